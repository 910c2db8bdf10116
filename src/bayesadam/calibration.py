"""Calibration: the scale s, the prior precision δ and the observation noise, from held-out data."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam.errors import BayesAdamWarning, CalibrationError, SettingError
from bayesadam.held_out import aligned
from bayesadam.likelihoods import Likelihood, LikelihoodName, Link, Predictive
from bayesadam.likelihoods.predictive import place_blocks
from bayesadam.likelihoods.record import CalibrationMethod
from bayesadam.posterior import Mixture, Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.predict.call import Call, Forward, evaluating, to_device
from bayesadam.predict.gaussian import parameters_at_mean
from bayesadam.predict.generic import VarianceOf
from bayesadam.predict.linearised import DEFAULT_BUDGET, moments
from bayesadam.predict.options import Options, PredictiveKind
from bayesadam.predict.prediction import predictive_of
from bayesadam.structures.noise import fresh_seed
from bayesadam.structures.structure import Directions

AnyPosterior = TypeVar("AnyPosterior", Posterior, Mixture)
# Ratios δ/w tried in one pass over the data, and decades of scale around the best.
_RATIOS = 25
_MOST_STEPS = 8
_NOISE_ROUNDS = 8
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


def calibrate(
    posterior: AnyPosterior,
    batches: Any,
    *,
    likelihood: LikelihoodName,
    method: CalibrationMethod | None = None,
    predictive: PredictiveKind = "linearised",
    n_samples: int = 30,
    link: Link = "probit",
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = DEFAULT_BUDGET,
) -> AnyPosterior:
    """A posterior whose numbers can be trusted, from held-out data; the one given is not changed.

    `"validation"` chooses s and δ (and σ² of a regression) by the predictive log-likelihood of the held-out data, under
    the very predictive that will be used. `"evidence"` takes σ² of greatest likelihood from the held-out residuals
    r ~ N(0, σ² + Var[f]), s so that the total curvature Σ w c equals that of the generalised Gauss-Newton matrix,
    N E[Σ J² Λ], and δ by MacKay's fixed point δ = γ/|θ|², γ = Σ w c/(w c + δ). Validation inside the data cannot see
    what δ does outside it and shrinks the uncertainty there to nothing, so regression defaults to evidence; for
    classification evidence fails where validation works, so that is the default there, as for every likelihood without a
    noise of its own to estimate. Either way δ comes out as one number for all parameters, whatever it was before.

    Args:
        posterior: the posterior to calibrate; the members of a mixture are calibrated one by one.
        batches: held-out data: a loader of (inputs, targets), of mappings with their labels, or one such pair. Targets
            belong to the outputs at their places; labels inside a mapping are taken as the model's own loss takes them,
            which for a causal language model is one place further on. Classes of −100 are left out.
        method: `"validation"` or `"evidence"`; None takes the default above.
        predictive: what `predict` will be called with; so are the rest.

    Raises:
        CalibrationError: nothing tried gave a finite score.
        MatchError: it is not clear which output a label belongs to: pass `forward`, and targets to match its outputs.
    """
    if method is not None and method not in get_args(CalibrationMethod):
        raise SettingError(f"method must be one of {get_args(CalibrationMethod)}, got {method!r}")
    options = Options(
        likelihood=likelihood,
        predictive=predictive,
        n_samples=n_samples,
        link=link,
        forward=forward,
        generator=generator,
        memory_budget=memory_budget,
    )
    members = posterior.members if isinstance(posterior, Mixture) else (posterior,)
    held_out = list(aligned(members[0], batches, likelihood=likelihood, forward=forward))
    found = [_calibrated(_Data(member, held_out, options), method) for member in members]
    return Mixture(found, posterior.weights) if isinstance(posterior, Mixture) else found[0]


def log_marginal_likelihood(
    posterior: Posterior, batches: Any, *, likelihood: LikelihoodName, forward: Forward | None = None
) -> Tensor:
    """Laplace's estimate of log p(D) at the posterior's mean μ: log p(D | μ) − ½ δ|μ|² − ½ log det((w c + δ)/δ).

    The likelihood term is that of the batches, taken as N examples: pass training data, or a fair part of it. Where every
    place of a sequence has a class, N counts places.
    """
    require_one_network(posterior, "a marginal likelihood")
    data = list(aligned(posterior, batches, likelihood=likelihood, forward=forward))
    options = Options(likelihood=likelihood, forward=forward)
    if options.record.noise and posterior.noise_variance is None:
        raise SettingError("the posterior has no noise_variance yet: calibrate it, or replace(noise_variance=...)")
    call, params = Call(posterior.model, forward), parameters_at_mean(posterior)
    device = next(iter(params.values())).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(posterior.model), torch.no_grad():
        for inputs, y in data:
            mean = call(params, to_device(inputs, device))
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
            found = _predictive(options, posterior, mean, torch.zeros_like(mean))
            scores = options.record.log_probs(found, y.to(device))
            total += scores.sum(dtype=torch.float64).cpu()
            count += len(scores)
    fit = posterior.n_data / count * total
    penalty = torch.zeros((), dtype=torch.float64)
    for name, mu in posterior.mean.items():
        delta = torch.as_tensor(posterior.prior_precision[name], dtype=mu.dtype, device=mu.device)
        if not bool((delta > 0).all()):
            raise SettingError(f"the marginal likelihood needs a proper prior, but δ is 0 for {name!r}")
        penalty += (delta * mu.square() - delta.log().expand_as(mu)).sum(dtype=torch.float64).cpu()
    # log det Λ = P log 2πe − 2 H[q].
    log_det = posterior.n_weights * math.log(2 * math.pi * math.e) - 2 * posterior.entropy().cpu()
    return fit - 0.5 * (penalty + log_det)


@dataclass(frozen=True, eq=False)
class _Data:
    """Held-out data and how the model is called on it."""

    posterior: Posterior
    batches: Sequence[tuple[Any, Tensor]]
    options: Options

    def moments(
        self,
        posterior: Posterior,
        variances: Sequence[VarianceOf],
        *,
        covariance: bool = False,
        directions: Sequence[Directions | None] = (),
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Mean, variances (k, ...), covariance and targets, batch by batch, at a posterior's mean.

        Of classes these have a row for every place that counts, (n, c), (k, n, c), (n, c, c) and (n,).
        """
        record, budget, bases = self.options.record, self.options.memory_budget, posterior.structure.bases
        call = Call(self.posterior.model, self.options.forward)
        params = parameters_at_mean(posterior)
        device = next(iter(params.values())).device
        with evaluating(self.posterior.model):
            for inputs, y in self.batches:
                found = moments(
                    call, params, variances, to_device(inputs, device), covariance, budget, bases, directions
                )
                y = record.matched(y.to(device), found.mean)
                keep = record.counted(found.mean, y)
                block = None if found.covariance is None else place_blocks(found.covariance[0], found.mean)[keep]
                yield found.mean[keep], found.variance[:, keep], block, y[keep]

    def score(self, posterior: Posterior, mean: Tensor, variance: Tensor, y: Tensor) -> float:
        """Mean log-likelihood of the targets, −∞ where it is not finite."""
        found = _predictive(self.options, posterior, mean, variance).log_prob(y)
        value = float(found.mean(dtype=torch.float64))
        return value if math.isfinite(value) else -math.inf


def _predictive(options: Options, posterior: Posterior, mean: Tensor, variance: Tensor) -> Predictive:
    noise = posterior.noise_variance
    return options.record.predictive(mean, variance, link=options.link, noise_variance=noise)


def _calibrated(data: _Data, method: CalibrationMethod | None) -> Posterior:
    by_evidence = (method or data.options.record.calibration) == "evidence"
    best = (_by_evidence if by_evidence else _by_validation)(data.posterior, data)
    if data.options.predictive != "linearised":
        best = _by_repeated_prediction(best, data)
    best.warn_of_limits()
    return best


def _by_validation(posterior: Posterior, data: _Data) -> Posterior:
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
    best: tuple[float, float, float, Tensor | None] = (-math.inf, 1.0, ratios[0], None)
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in curvatures)
    for table, ratio, mean in zip(tables, ratios, means, strict=True):
        residual = (y - mean).square().mean(dim=0) if data.options.record.noise else None
        noises = [None] if residual is None else [share * residual for share in _NOISE_SHARES]
        # At weight w the variances are table/w: from swamping the outputs to vanishing.
        scale = float(mean.var()) if mean.numel() > 1 else 1.0
        middle = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
        if not (math.isfinite(middle) and middle > 0):
            continue
        for noise in noises:
            candidate = posterior.replace(noise_variance=noise)
            weights = [w for x in range(-6, 15) if (w := middle * 10 ** (x / 2)) <= largest]
            value, weight = max(((data.score(candidate, mean, table / w, y), w) for w in weights), default=best[:2])
            if value > best[0]:
                best = (value, weight, ratio, noise)
    value, weight, ratio, noise = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood on the held-out data; the posterior is unchanged. "
            "Do the model's outputs contain NaN or infinities there?"
        )
    where = ratios.index(ratio)
    table, mean, candidate = tables[where], means[where], posterior.replace(noise_variance=noise)
    weight = _refined(lambda w: data.score(candidate, mean, table / w, y), weight)
    unit = posterior.settings.weight / posterior.settings.scale
    return posterior.replace(scale=weight / unit, prior_precision=weight * ratio, noise_variance=noise)


def _by_evidence(posterior: Posterior, data: _Data) -> Posterior:
    ones: VarianceOf = lambda name: torch.ones_like(posterior.mode[name])  # noqa: E731
    record = data.options.record
    if not record.noise:
        parts = list(data.moments(posterior, [ones], covariance=record.coupled))
        curvature = torch.cat([_output_curvature(record, mean, variance, block) for mean, variance, block, _ in parts])
        return _at_evidence(posterior, float(curvature.mean(dtype=torch.float64)))

    def residuals(
        at: Posterior, variances: Sequence[VarianceOf], directions: Sequence[Directions | None] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = list(data.moments(at, variances, directions=directions))
        mean, square = (torch.cat(part) for part in zip(*((m, (y - m).square()) for m, _, _, y in parts), strict=True))
        variance = torch.cat([v for _, v, _, _ in parts], dim=1)
        return mean, square.clamp(min=torch.finfo(square.dtype).tiny), variance

    mean, square, (reach,) = residuals(posterior, [ones])
    noise = square.mean(dim=0)
    for _ in range(_NOISE_ROUNDS):
        curvature = (reach * record.hessian_diagonal(mean, noise)).mean(dim=0).sum()
        found = _at_evidence(posterior, float(curvature)).replace(noise_variance=noise)
        # In the likelihood form the mean has moved, and the residuals with it.
        variances = [ones, found.coordinate_variance.__getitem__]
        mean, square, (reach, uncertain) = residuals(found, variances, [None, found.directions])
        # A held-out residual is noise and error of f, and Var[f] goes with σ²: r² ~ σ² (1 + u), u = Var[f]/σ². Of greatest
        # likelihood is the mean of r²/(1 + u): an example of which the network knows little says little about the noise.
        fresh = (square / (1 + uncertain / noise)).mean(dim=0)
        if bool(((fresh - noise).abs() <= 0.01 * noise).all()):
            break
        noise = fresh
    return found


def _output_curvature(record: Likelihood, mean: Tensor, variance: Tensor, covariance: Tensor | None) -> Tensor:
    """tr(J Jᵀ Λ) per example, Λ = A Aᵀ the Hessian of the negative log-likelihood in the outputs."""
    if covariance is None:
        return (variance[0] * record.hessian_diagonal(mean)).reshape(len(mean), -1).sum(dim=1)
    root = record.hessian_root(mean)
    return ((covariance @ root) * root).flatten(1).sum(dim=1)


def _at_evidence(posterior: Posterior, curvature: float) -> Posterior:
    """s from the trace of the Gauss-Newton matrix, N × `curvature`, and δ from MacKay's fixed point δ = γ/|θ|²."""
    total = sum(float(c.sum(dtype=torch.float64)) for c in posterior.structure.curvatures(posterior.settings.power))
    weight = posterior.n_data * curvature / total if total else math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(
            f"the curvature on the held-out data gives a weight of {weight!r}; the posterior is unchanged. Do the model's "
            "outputs contain NaN, or do they not depend on the weights?"
        )
    unit = posterior.settings.weight / posterior.settings.scale
    posterior = posterior.replace(scale=weight / unit, prior_precision=1.0)
    square = max(sum(float(theta.square().sum(dtype=torch.float64)) for theta in posterior.mode.values()), 1e-30)
    delta = 1.0
    for _ in range(200):
        fresh = max(posterior.effective_dimension / square, 1e-12)
        posterior = posterior.replace(prior_precision=fresh)
        if abs(fresh - delta) <= 1e-6 * delta:
            break
        delta = fresh
    return posterior


def _by_repeated_prediction(posterior: Posterior, data: _Data) -> Posterior:
    """Start from what suits the linearised network, then search along the scale and the prior under the real predictive.

    Every candidate sees the same random numbers, so that they differ by their settings alone.
    """
    options = data.options
    seed = fresh_seed(options.generator)

    def score(candidate: Posterior) -> float:
        total, count = 0.0, 0
        for inputs, y in data.batches:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BayesAdamWarning)
                same = replace(options, generator=torch.Generator().manual_seed(seed))
                found = predictive_of(candidate, inputs, same)
            scores = options.record.log_probs(found, y.to(found.mean.device))
            total += float(scores.sum(dtype=torch.float64))
            count += len(scores)
        return total / count if math.isfinite(total) else -math.inf

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
            f"no scale or prior precision gives a finite log-likelihood under predictive={options.predictive!r}; the posterior is "
            "unchanged. Use predictive='linearised'"
        )
    return best


def _refined(score: Callable[[float], float], weight: float) -> float:
    """Golden-section search over half a decade to either side, in the logarithm."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(weight) - 1.2, math.log(weight) + 1.2
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = score(math.exp(a)), score(math.exp(b))
    for _ in range(20):
        if fa >= fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = score(math.exp(a))
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = score(math.exp(b))
    refined = math.exp((low + high) / 2)
    return refined if score(refined) >= score(weight) else weight
