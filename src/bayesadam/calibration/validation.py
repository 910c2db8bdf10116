"""Scale, prior and temperature (or noise) of the greatest held-out likelihood."""

import math
from typing import Any

import torch
from torch import Tensor

from bayesadam.calibration.data import COLDEST, HeldOut
from bayesadam.errors import CalibrationError
from bayesadam.posterior import Posterior
from bayesadam.predict.generic import VarianceOf

# Ratios δ/w tried in one pass over the data.
_RATIOS = 13
# Steps along scale and prior under a sampling predictive, at most.
_MOST_STEPS = 8
# Temperatures tried; rounds of scale and temperature in turn.
_TEMPERATURES = (COLDEST, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 5.0)
_ROUNDS = 4
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


def by_validation(posterior: Posterior, data: HeldOut) -> Posterior:
    """One pass over the data for every ratio δ/w; the scale then costs nothing, since it only divides the variances.

    In the likelihood form the mean, too, depends on the ratio, and on it alone: there it takes a pass for each, as it does
    where directions over all weights change with it.
    """
    settings, structure = posterior.settings, posterior.structure
    curvatures = structure.curvatures(settings.power)
    variances: list[VarianceOf]
    positive = torch.cat([c.flatten()[c.flatten() > 0].double().cpu() for c in curvatures])
    if not len(positive):
        raise CalibrationError("every second moment is zero: there is no curvature to calibrate")
    low, high = math.log10(float(positive.median())) - 4, math.log10(float(positive.max())) + 2
    ratios = [10.0 ** (low + (high - low) * i / (_RATIOS - 1)) for i in range(_RATIOS)]
    if settings.form == "map" and not structure.has_directions:
        by_name = dict(zip(structure.second_moment, curvatures, strict=True))
        variances = [lambda name, r=r: 1 / (by_name[name] + r) for r in ratios]  # type: ignore[misc]
        parts = list(data.moments(posterior, variances))
        mean, tables = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1)
        means = mean.expand(len(ratios), *mean.shape)
    else:
        passes = []
        for r in ratios:
            at = posterior.replace(prior_precision=r * settings.weight)
            variances = [at.coordinate_variance.__getitem__]
            passes.append(list(data.moments(at, variances, directions=[at.directions])))
        parts = passes[0]
        means = torch.stack([torch.cat([p[0] for p in each]) for each in passes])
        tables = settings.weight * torch.stack([torch.cat([p[1][0] for p in each]) for each in passes])
    y = torch.cat([p[3] for p in parts])
    record = data.options.record
    best: tuple[float, float, float, dict[str, Any]] = (-math.inf, 1.0, ratios[0], {})
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in curvatures)
    steps = range(-6, 5 if record.tempered else 15)
    for table, ratio, mean in zip(tables, ratios, means, strict=True):
        of_outputs: list[dict[str, Any]] = [{}]
        if record.noise:
            residual = (y - mean).square().mean(dim=0)
            of_outputs = [{"noise_variance": share * residual} for share in _NOISE_SHARES]
        elif record.tempered:
            of_outputs = [{"temperature": t} for t in _TEMPERATURES]
        # From swamping the outputs to vanishing; of classes to a hundredth of the outputs' own variance.
        middle = _middle(mean, table)
        if not middle:
            continue
        for each in of_outputs:
            weights = [w for x in steps if (w := middle * 10 ** (x / 2)) <= largest]
            scores = data.scores(mean, torch.stack([table / w for w in weights]), y, **each) if weights else []
            found = max(zip(scores, weights, strict=True), default=best[:2])
            if found[0] > best[0]:
                best = (*found, ratio, each)
    value, weight, ratio, chosen = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood on the held-out data; the posterior is unchanged. "
            "Do the model's outputs contain NaN or infinities there?"
        )
    where = ratios.index(ratio)
    table, mean = tables[where], means[where]

    most = math.log(_middle(mean, table)) + math.log(10) * steps[-1] / 2 if record.tempered else math.inf
    for _ in range(_ROUNDS if "temperature" in chosen else 1):
        weight = data.best_weight(mean, table, y, start=weight, most=most, **chosen)
        if "temperature" in chosen:
            scaled = table / weight
            chosen = {"temperature": data.best_temperature(mean, scaled, y, start=chosen["temperature"], reach=1.2)}
    unit = posterior.settings.weight / posterior.settings.scale
    outputs = {"noise_variance": None} | chosen
    return posterior.replace(scale=weight / unit, prior_precision=weight * ratio, **outputs)


def _middle(mean: Tensor, table: Tensor) -> float:
    """The weight at which the variances of f, table/w, are on average as large as the outputs' own; 0 where they vanish."""
    scale = float(mean.var()) if mean.numel() > 1 else 1.0
    found = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
    return found if math.isfinite(found) else 0.0


def by_repeated_prediction(posterior: Posterior, data: HeldOut) -> Posterior:
    """Start from what suits the linearised network, then search along the scale and the prior under the real predictive."""

    def score(candidate: Posterior) -> float:
        value = -data.nll(candidate, data.batches)
        return value if math.isfinite(value) else -math.inf

    best, value = posterior, score(posterior)
    # Uphill in ever smaller steps: first along scale and prior together, which is one temperature, then along the prior.
    for both in (True, False):
        for factor in (10.0, 10.0**0.5, 10.0**0.25):
            for step in (factor, 1 / factor):
                for _ in range(_MOST_STEPS):
                    prior = {name: step * delta for name, delta in best.prior_precision.items()}
                    scale = best.settings.scale * (step if both else 1.0)
                    candidate = best.replace(scale=scale, prior_precision=prior)
                    found = score(candidate)
                    # A rise this small is the flat end, where the posterior no longer matters.
                    if not found > value + 1e-6:
                        break
                    best, value = candidate, found
    if not math.isfinite(value):
        raise CalibrationError(
            f"no scale or prior precision gives a finite log-likelihood under predictive={data.options.predictive!r}; the posterior is "
            "unchanged. Use predictive='linearised'"
        )
    return best
