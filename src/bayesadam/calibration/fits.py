"""Scale, prior, temperature and noise fitted to held-out data: by validation, by evidence, and under draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bayesadam._progress import progress
from bayesadam.calibration.held_out import HeldOut, aligned, quietly
from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods import Component, agreed
from bayesadam.posterior import Posterior
from bayesadam.posterior.distribution import by_leverage
from bayesadam.posterior.mixture import require_one_network
from bayesadam.predict.call import Forward, examples
from bayesadam.predict.moments import VarianceOf
from bayesadam.predict.prediction import Options, component_of

# Bounds of the temperature, and standard deviations of log T before any example is seen, below T = 1 and above: more
# networks are too sure than too unsure.
_COLDEST, _HOTTEST = 0.1, 20.0
_COLD, _HOT = 0.5, 1.0
# Folds, and how often examples are dealt to them anew; temperatures that these choose from, over that of all examples.
_FOLDS, _REPEATS = 5, 4
# Of fewer examples folds say nothing, and log p(T) alone keeps T near 1.
_FEWEST_FOLDED = 100
_NEAR = tuple(math.exp(i / 20) for i in range(-10, 11))
# Ratios δ/w that one pass over the data tries; temperatures and shares of the residuals that are noise; rounds of scale
# and temperature in turn.
_RATIOS = 13
_TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 5.0)
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
_ROUNDS = 4
_NOISE_ROUNDS = 8
# Under draws: how many examples are looked at, more would hardly say more about two numbers, and the factors tried.
MOST_DRAWN = 2_000
_FACTORS = tuple(10.0 ** (i / 2) for i in range(-2, 11))
_DRAWN_TEMPERATURES = tuple(0.25 * 2 ** (i / 2) for i in range(13))


def log_prior(temperature: float) -> float:
    """log p(T) but for a constant, −½ (log T/τ)² with τ = ½ below T = 1 and 1 above.

    Without it a few examples that are all right would ask for the coldest temperature, and the next wrong one would
    cost dearly; hundreds of examples outvote it.
    """
    log = math.log(temperature)
    return -0.5 * (log / (_COLD if log < 0 else _HOT)) ** 2


def _scores(options: Options, mean: Tensor, variances: Tensor, y: Tensor, **of_outputs: Any) -> list[float]:
    """Mean log-likelihood and log p(T)/n under each of k sets of variances, (k, n, ...); −∞ where not finite."""
    k = len(variances)
    means, targets = mean.expand(k, *mean.shape).flatten(0, 1), y.expand(k, *y.shape).flatten(0, 1)
    found = options.record.predictive([Component(means, variances.flatten(0, 1), **of_outputs)], link=options.link)
    values = found.log_prob(targets).reshape(k, -1).mean(dim=1, dtype=torch.float64)
    values += log_prior(of_outputs.get("temperature", 1.0)) / max(len(y), 1)
    return [value if math.isfinite(value) else -math.inf for value in values.tolist()]


def _refined(
    score: Callable[[float], float], start: float, *, reach: float = 1.2, least: float = 0.0, most: float = math.inf
) -> tuple[float, float]:
    """The best of ever finer grids in the logarithm, the first up to `reach` to either side of `start`; its score."""
    rounds = math.ceil(math.log2(reach / 1e-4))

    @cache
    def at(step: int) -> tuple[float, float]:
        value = min(max(start * math.exp(reach * step / 2**rounds), least), most)
        return score(value), value

    best = 0
    for width in (2**i for i in range(rounds, -1, -1)):
        best = max((best, best - width, best - width // 2, best + width // 2, best + width), key=lambda i: at(i)[0])
    value, found = at(best)
    return found, value


def best_temperature(
    options: Options,
    mean: Tensor,
    y: Tensor,
    *,
    variance: Tensor | None = None,
    start: float = 1.0,
    reach: float = math.log(_HOTTEST),
) -> tuple[float, float]:
    """T of the greatest mean log-likelihood and prior, and that; without variances T of the mean network."""
    variances = torch.zeros_like(mean)[None] if variance is None else variance[None]

    def score(temperature: float) -> float:
        return _scores(options, mean, variances, y, temperature=temperature)[0]

    return _refined(score, start, reach=reach, least=_COLDEST)


def at_one(options: Options, mean: Tensor, y: Tensor) -> tuple[float, float]:
    """T = 1, and the mean log-likelihood there."""
    return 1.0, _scores(options, mean, torch.zeros_like(mean)[None], y, temperature=1.0)[0]


def out_of_fold(log_probs: Tensor, log_priors: Tensor, losses: Tensor) -> Tensor:
    """log p of every example at the temperature that the other folds choose, (n,), the mean over repetitions.

    Examples are dealt to folds in the order of their loss, so that every fold has its share of the costly ones.

    Args:
        log_probs: at each of k temperatures, (k, n).
        log_priors: of these, (k,).
        losses: of the network alone, (n,).
    """
    n, source, total = len(losses), torch.Generator().manual_seed(0), log_probs.sum(dim=1) + log_priors
    order, found, each = losses.argsort().cpu(), torch.zeros_like(log_probs[0]), torch.arange(n)
    for _ in range(_REPEATS):
        dealt = torch.rand(-(-n // _FOLDS), _FOLDS, generator=source).argsort(dim=1).flatten()[:n]
        folds = torch.empty_like(order).scatter_(0, order, dealt)
        in_fold = torch.nn.functional.one_hot(folds, _FOLDS).to(log_probs)
        best = (total[:, None] - log_probs @ in_fold).argmax(dim=0).cpu()
        found += log_probs[best[folds], each]
    return found / _REPEATS


def temperature_pays(options: Options, outputs: Tensor, tempered: Tensor, y: Tensor, owners: Tensor, at: float) -> bool:
    """Whether a fitted temperature of the `tempered` outputs is likelier than T = 1 of the outputs, out of fold.

    Folds choose among temperatures near `at`, the one fitted to all examples.
    """

    def by_example(mean: Tensor, temperature: float) -> Tensor:
        component = Component(mean, torch.zeros_like(mean), temperature=temperature)
        rows = options.record.predictive([component], link=options.link).log_prob(y)
        sums = torch.zeros(int(owners.max()) + 1, dtype=torch.float64)
        return sums.index_add_(0, owners.cpu(), rows.double().cpu().reshape(len(rows), -1).sum(dim=1))

    if int(owners.max()) + 1 < _FEWEST_FOLDED:
        return True
    temperatures = [max(_COLDEST, at * factor) for factor in _NEAR]
    log_probs = torch.stack([by_example(tempered, temperature) for temperature in temperatures])
    alone, log_priors = by_example(outputs, 1.0), torch.tensor([log_prior(t) for t in temperatures]).double()
    return bool(out_of_fold(log_probs, log_priors, -alone).sum() >= alone.sum())


# --- validation -----------------------------------------------------------------------------------------------------


def tables_of(data: HeldOut) -> tuple[list[float], Tensor, Tensor, Tensor]:
    """Ratios δ/w, of δ R/w under a prior of shape R; E[f] and w Var[f] at each, (k, n, ...); the targets.

    The scale then costs nothing, since it only divides. One pass over the data serves all ratios. In the likelihood
    form the mean, too, depends on the ratio: there it takes a pass for each.
    """
    posterior = data.posterior
    settings, structure = posterior.settings, posterior.structure
    curvatures, shape = structure.curvatures(settings.power), settings.prior_shape
    relative = curvatures if shape is None else structure.curvatures(settings.power, shape)
    positive = torch.cat([c.flatten()[c.flatten() > 0].double().cpu() for c in relative])
    if not len(positive):
        raise CalibrationError("every second moment is zero: there is no curvature to calibrate")
    low, high = math.log10(float(positive.median())) - 4, math.log10(float(positive.max())) + 2
    ratios = [10.0 ** (low + (high - low) * i / (_RATIOS - 1)) for i in range(_RATIOS)]
    if settings.form == "map":
        by_name = dict(zip(structure.second_moment, curvatures, strict=True))

        def variance_at(ratio: float) -> VarianceOf:
            return lambda name: 1 / (by_name[name] + ratio * (1.0 if shape is None else shape[name]))

        passes = [list(data.moments(posterior, [variance_at(r) for r in ratios]))]
        unit = 1.0
    else:
        passes, unit = [], settings.weight
        for r in ratios:
            at = posterior.replace(prior_precision=settings.prior_at(r * settings.weight), covariant=settings.covariant)
            passes.append(list(data.moments(at, [at.coordinate_variance.__getitem__])))
    means = torch.stack([torch.cat([part.mean for part in each]) for each in passes])
    variances = torch.cat([unit * torch.cat([part.variances for part in each], dim=1) for each in passes])
    return ratios, means.expand(_RATIOS, *means.shape[1:]), variances, torch.cat([part.y for part in passes[0]])


def by_validation(posterior: Posterior, data: HeldOut) -> Posterior:
    """The ratio, and temperature or share of noise, of the greatest likelihood, each with its own scale."""
    (ratios, means, tables, y), options = tables_of(data), data.options
    settings, record = posterior.settings, options.record
    best: tuple[float, float, int, dict[str, Any]] = (-math.inf, 1.0, 0, {})
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in posterior.structure.second_moment.values())
    # From drowning the outputs to vanishing; of classes to a hundredth of the outputs' own variance.
    steps = range(-6, 5 if record.tempered else 15)
    for number, (table, mean) in enumerate(zip(tables, means, strict=True)):
        middle = _middle(mean, table)
        if not middle:
            continue
        of_outputs: list[dict[str, Any]] = [{}]
        if record.noise:
            residual = (y - mean).square().mean(dim=0)
            of_outputs = [{"noise_variance": share * residual} for share in _NOISE_SHARES]
        elif record.tempered:
            of_outputs = [{"temperature": t} for t in _TEMPERATURES]
        weights = [w for x in steps if (w := middle * 10 ** (x / 2)) <= largest]
        for each in of_outputs if weights else []:
            scores = _scores(options, mean, torch.stack([table / w for w in weights]), y, **each)
            value, weight = max(zip(scores, weights, strict=True))
            if value > best[0]:
                best = value, weight, number, each
    value, weight, number, chosen = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood on the held-out data; the posterior is "
            "unchanged. Do the model's outputs contain NaN or infinities there?"
        )
    table, mean = tables[number], means[number]
    most = _middle(mean, table) * 10 ** (steps[-1] / 2) if record.tempered else math.inf
    for _ in range(_ROUNDS if record.tempered else 1):
        at = partial(_scores, options, mean, y=y, **chosen)
        weight, _ = _refined(lambda w, at=at: at((table / w)[None])[0], weight, most=most)  # type: ignore[misc]
        if record.tempered:
            near: Any = {"variance": table / weight, "start": chosen["temperature"], "reach": 1.2}
            chosen = {"temperature": best_temperature(options, mean, y, **near)[0]}
    unit = settings.weight / settings.scale
    outputs = {"noise_variance": record.ceiling(y)} | chosen
    prior = settings.prior_at(weight * ratios[number])
    return posterior.replace(scale=weight / unit, prior_precision=prior, covariant=settings.covariant, **outputs)


def _middle(mean: Tensor, table: Tensor) -> float:
    """The weight at which the variances of f, table/w, are on average the outputs' own; 0 if they vanish."""
    scale = float(mean.var()) if mean.numel() > 1 else 1.0
    found = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
    return found if math.isfinite(found) else 0.0


# --- forward --------------------------------------------------------------------------------------------------------


def by_forward(posterior: Posterior, data: HeldOut) -> Posterior:
    """v of Var[f] = v r by the likelihood of the targets, and σ² of a regression with it.

    v = κ/E[H], H the Hessian of −log p(y | f): with κ = 1 the usual input's f is known as well as one observation tells
    it. κ has the prior −½ log² κ nats. Residuals of a regression are N(0, σ² (1 + κ r)), so that σ² is the mean of
    (y − f)²/(1 + κ r).
    """
    seen, record = data.observed, data.options.record
    r = seen.ratios.gentle[seen.owners].to(seen.outputs)

    def settings(scale: float) -> dict[str, Any]:
        noise = record.ceiling(seen.targets)
        if record.noise:
            square = (seen.targets - seen.outputs).square()
            noise = (square / (1 + scale * r).view(-1, *[1] * (square.dim() - 1))).mean(dim=0)
        h = record.locations(record.hessian_diagonal(seen.outputs, noise))
        return {"spread": scale / h.mean(dim=0), "noise_variance": noise}

    def score(scale: float) -> float:
        found = settings(scale)
        variance = by_leverage(record, seen.outputs, r, found.pop("spread"))
        value = _scores(data.options, seen.outputs, variance[None], seen.targets, **found)[0]
        return value - 0.5 * math.log(scale) ** 2 / len(r)

    scale, value = _refined(score, 1.0, reach=math.log(1000))
    if not math.isfinite(value):
        raise CalibrationError("no v gives a finite log-likelihood on the held-out data; the posterior is unchanged")
    return posterior.replace(**settings(scale))


# --- evidence -------------------------------------------------------------------------------------------------------


def by_evidence(posterior: Posterior, data: HeldOut) -> Posterior:
    """s and δ from the curvature of the outputs; where there is a σ², all three in turn."""
    record, shape = data.options.record, posterior.settings.prior_shape

    def unit(name: str) -> Tensor:
        return torch.ones_like(posterior.structure.second_moment[name]) / (1.0 if shape is None else shape[name])

    if not record.noise:
        # ½ tr(H Cov f) at Cov θ = 1 is half the trace of the Gauss-Newton matrix.
        parts = data.moments(posterior, [unit], covariance=record.coupled)
        halves: list[Any] = [record.epistemic(Component(p.mean, p.variances[0], p.covariance)) for p in parts]
        return _at_evidence(posterior, 2 * float(torch.cat(halves).mean(dtype=torch.float64)))
    found, noise = posterior, None
    variances: list[VarianceOf] = [unit]
    for _ in range(_NOISE_ROUNDS + 1):
        # In the likelihood form the mean moves with δ, and the residuals with it.
        rows = list(data.moments(found, variances))
        mean, y = torch.cat([p.mean for p in rows]), torch.cat([p.y for p in rows])
        square = (y - mean).square()
        square = square.clamp(min=torch.finfo(square.dtype).tiny)
        reach, *uncertain = torch.cat([p.variances for p in rows], dim=1)
        if noise is None:
            noise = square.mean(dim=0)
        else:
            # A held-out residual is noise and error of f, and Var[f] goes with σ²: r² ~ σ² (1 + u), u = Var[f]/σ². The
            # mean of r²/(1 + u) has the greatest likelihood: where the network knows little, r says little about σ².
            before, noise = noise, (square / (1 + uncertain[0] / noise)).mean(dim=0)
            if bool(((noise - before).abs() <= 0.01 * before).all()):
                return found
        curvature = (reach * record.hessian_diagonal(mean, noise)).mean(dim=0).sum()
        found = _at_evidence(posterior, float(curvature)).replace(noise_variance=noise)
        variances = [unit, found.coordinate_variance.__getitem__]
    return found


def _at_evidence(posterior: Posterior, curvature: float) -> Posterior:
    """s from the trace of the Gauss-Newton matrix, N × `curvature`, and δ from MacKay's fixed point δ = γ/|θ|².

    Under a prior of shape R all of it is in the coordinates R^½ θ, in which that prior is δ.
    """
    settings, shape = posterior.settings, posterior.settings.prior_shape
    total = sum(float(c.sum(dtype=torch.float64)) for c in posterior.structure.curvatures(settings.power, shape))
    weight = posterior.n_data * curvature / total if total else math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(
            f"the curvature on the held-out data gives a weight of {weight!r}; the posterior is unchanged. Do the "
            "model's outputs contain NaN, or do they not depend on the weights?"
        )
    scale = weight * settings.scale / settings.weight

    def at(delta: float) -> Posterior:
        prior = settings.prior_at(delta)
        return posterior.replace(scale=scale, prior_precision=prior, covariant=settings.covariant)

    squares = [(1.0 if shape is None else shape[name]) * theta.square() for name, theta in posterior.mode.items()]
    square = max(sum(float(each.sum(dtype=torch.float64)) for each in squares), 1e-30)
    delta, found = 1.0, at(1.0)
    for _ in range(200):
        fresh = max(found.effective_dimension / square, 1e-12)
        found = at(fresh)
        if abs(fresh - delta) <= 1e-6 * delta:
            break
        delta = fresh
    return found


def log_marginal_likelihood(
    posterior: Posterior, batches: Any, *, likelihood: str | None = None, forward: Forward | None = None
) -> Tensor:
    """Laplace's estimate of log p(D) at the posterior's mean μ: log p(D | μ) − ½ δ|μ|² − ½ log det((w c + δ)/δ).

    The likelihood term is that of the batches, taken as N examples: pass training data, or a fair part of it. Where
    every position of a sequence has a class, N counts positions. `likelihood=None` is the posterior's own.
    """
    require_one_network(posterior, "a marginal likelihood")
    options = Options(likelihood=agreed(likelihood, posterior.likelihood), forward=forward)
    if options.record.noise and posterior.noise_variance is None:
        raise SettingError("the posterior has no noise_variance yet: calibrate it, or replace(noise_variance=...)")
    data = list(aligned(posterior, batches, likelihood=options.likelihood, forward=forward))
    total, count = 0.0, 0
    for batch in progress(data, "log_marginal_likelihood"):
        seen = HeldOut(posterior, [batch], options, 0).observed
        mean, y = seen.outputs, seen.targets
        component = Component(mean, torch.zeros_like(mean), noise_variance=posterior.noise_variance)
        scores = options.record.predictive([component]).log_prob(y)
        total, count = total + float(scores.sum(dtype=torch.float64)), count + len(scores)
    penalty = torch.zeros((), dtype=torch.float64)
    for name, mu in posterior.mean.items():
        delta = torch.as_tensor(posterior.prior_precision[name], dtype=mu.dtype, device=mu.device)
        if not bool((delta > 0).all()):
            raise SettingError(f"the marginal likelihood needs a proper prior, but δ is 0 for {name!r}")
        penalty += (delta * mu.square() - delta.log().expand_as(mu)).sum(dtype=torch.float64).cpu()
    # log det Λ = P log 2πe − 2 H[q].
    log_det = posterior.n_weights * math.log(2 * math.pi * math.e) - 2 * posterior.entropy().cpu()
    return posterior.n_data / count * total - 0.5 * (penalty + log_det)


# --- draws ----------------------------------------------------------------------------------------------------------


def by_draws(start: Posterior, data: HeldOut) -> Posterior:
    """The best width under a predictive that samples, on at most 2,000 examples; for classes with a temperature.

    Scale and prior are multiplied together, which divides all variances: what suits the linearised network may be far
    too wide for the real one.
    """
    record, settings, best = data.options.record, start.settings, (-math.inf, 1.0, start)
    options = replace(data.options, generator=torch.Generator().manual_seed(data.seed))
    for factor in _FACTORS:
        prior = {name: factor * delta for name, delta in settings.prior_precision.items()}
        at = start.replace(scale=factor * settings.scale, prior_precision=prior, covariant=settings.covariant)
        log_probs, n = [], 0
        for inputs, y in data.batches:
            if n >= MOST_DRAWN:
                break
            inputs, y = examples(inputs, 0, MOST_DRAWN - n), y[: MOST_DRAWN - n]
            with quietly():
                c, _ = component_of(at, inputs, replace(options, generator=torch.Generator().manual_seed(data.seed)))
            tempered = [replace(c, temperature=t) for t in _DRAWN_TEMPERATURES] if record.tempered else [c]
            each = [record.predictive([one], link=options.link) for one in tempered]
            log_probs.append(torch.stack([record.log_probs(p, y.to(c.mean.device)) for p in each]).cpu())
            n += len(y)
            data.step()
        value, temperature = _at_best(torch.cat(log_probs, dim=1))
        best = max(best, (value, temperature, at), key=lambda found: found[0])
    value, temperature, found = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale gives a finite log-likelihood under draws; the posterior is unchanged. Use "
            "predictive='linearised'"
        )
    return found.replace(temperature=temperature)


def _at_best(log_probs: Tensor) -> tuple[float, float]:
    """The mean log-likelihood and the temperature, by a parabola in log T through the best and its neighbours."""
    means = log_probs.mean(dim=1, dtype=torch.float64)
    means = torch.where(means.isfinite(), means, -math.inf)
    if len(means) == 1:
        return float(means), 1.0
    prior = means.new_tensor([log_prior(t) for t in _DRAWN_TEMPERATURES])
    values = (means + prior / log_probs.shape[1]).tolist()
    top = max(range(len(values)), key=values.__getitem__)
    if not 0 < top < len(values) - 1 or not all(map(math.isfinite, values[top - 1 : top + 2])):
        return values[top], _DRAWN_TEMPERATURES[top]
    before, at, after = values[top - 1 : top + 2]
    bend = before - 2 * at + after
    shift = 0.5 * (before - after) / bend if bend < 0 else 0.0
    return at - 0.25 * (before - after) * shift, _DRAWN_TEMPERATURES[top] * 2 ** (shift / 2)
