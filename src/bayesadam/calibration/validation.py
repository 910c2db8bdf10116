"""Scale, prior and temperature (or noise) of the greatest held-out likelihood."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam.calibration.data import COLDEST, HeldOut
from bayesadam.errors import CalibrationError
from bayesadam.posterior import Posterior
from bayesadam.predict.moments import VarianceOf

# Ratios δ/w tried in one pass over the data.
_RATIOS = 13
# Temperatures tried; rounds of scale and temperature in turn.
_TEMPERATURES = (COLDEST, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 5.0)
_ROUNDS = 4
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class Tables:
    """The linearised network on held-out data, ratio δ/w by ratio; the scale then costs nothing, since it only divides.

    Attributes:
        ratios: δ/w, of δ R/w under a prior of shape R; they do not depend on the data.
        means: E[f], (k, n, ...), or (1, n, ...) where it is the same for all ratios.
        variances: w Var[f], (k, n, ...).
        targets: y, (n, ...).
        numbers: the example that each of the n belongs to.
    """

    ratios: Sequence[float]
    means: Tensor
    variances: Tensor
    targets: Tensor
    numbers: Tensor

    def of(self, chosen: Tensor) -> "Tables":
        """The rows of the examples that are chosen, booleans."""
        rows = chosen[self.numbers]
        if bool(rows.all()):
            return self
        here = rows.to(self.targets.device)
        of_rows = self.means[:, here], self.variances[:, here], self.targets[here], self.numbers[rows]
        return Tables(self.ratios, *of_rows)


def tables_of(posterior: Posterior, data: HeldOut, examples: Tensor) -> Tables:
    """One pass over the data, whose examples have these numbers, for all ratios.

    In the likelihood form the mean, too, depends on the ratio, and on it alone: there it takes a pass for each, as it does
    where directions over all weights change with it.
    """
    settings, structure = posterior.settings, posterior.structure
    curvatures, shape = structure.curvatures(settings.power), settings.prior_shape
    variances: list[VarianceOf]
    relative = curvatures if shape is None else structure.curvatures(settings.power, shape)
    positive = torch.cat([c.flatten()[c.flatten() > 0].double().cpu() for c in relative])
    if not len(positive):
        raise CalibrationError("every second moment is zero: there is no curvature to calibrate")
    low, high = math.log10(float(positive.median())) - 4, math.log10(float(positive.max())) + 2
    ratios = [10.0 ** (low + (high - low) * i / (_RATIOS - 1)) for i in range(_RATIOS)]
    if settings.form == "map" and not structure.has_directions:
        by_name = dict(zip(structure.second_moment, curvatures, strict=True))
        variances = [
            lambda name, r=r: 1 / (by_name[name] + (r if shape is None else r * shape[name]))  # type: ignore[misc]
            for r in ratios
        ]
        parts = list(data.moments(posterior, variances))
        means, tables = torch.cat([p[0] for p in parts])[None], torch.cat([p[1] for p in parts], dim=1)
    else:
        passes = []
        for r in ratios:
            at = posterior.replace(prior_precision=settings.prior_at(r * settings.weight), covariant=settings.covariant)
            variances = [at.coordinate_variance.__getitem__]
            passes.append(list(data.moments(at, variances, directions=[at.directions])))
        parts = passes[0]
        means = torch.stack([torch.cat([p[0] for p in each]) for each in passes])
        tables = settings.weight * torch.stack([torch.cat([p[1][0] for p in each]) for each in passes])
    owners = torch.cat([p[4] for p in parts])
    return Tables(ratios, means, tables, torch.cat([p[3] for p in parts]), examples[owners])


def by_validation(posterior: Posterior, data: HeldOut, found: Tables) -> Posterior:
    """The best of all ratios, and of temperatures or shares of noise, each with its own scale, on the rows of the tables."""
    settings, ratios, y = posterior.settings, found.ratios, found.targets
    means, tables = found.means.expand(len(ratios), *found.means.shape[1:]), found.variances
    record = data.options.record
    best: tuple[float, float, float, dict[str, Any]] = (-math.inf, 1.0, ratios[0], {})
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in posterior.structure.second_moment.values())
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
            top = max(zip(scores, weights, strict=True), default=best[:2])
            if top[0] > best[0]:
                best = (*top, ratio, each)
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
    prior = settings.prior_at(weight * ratio)
    return posterior.replace(scale=weight / unit, prior_precision=prior, covariant=settings.covariant, **outputs)


def _middle(mean: Tensor, table: Tensor) -> float:
    """The weight at which the variances of f, table/w, are on average as large as the outputs' own; 0 where they vanish."""
    scale = float(mean.var()) if mean.numel() > 1 else 1.0
    found = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
    return found if math.isfinite(found) else 0.0
