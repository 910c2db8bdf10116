"""Scale, prior and noise by the evidence, and the evidence itself."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam._progress import progress
from bayesadam.calibration.data import HeldOut
from bayesadam.errors import CalibrationError, SettingError
from bayesadam.gaussian.structure import Directions
from bayesadam.held_out import aligned
from bayesadam.likelihoods import Likelihood, LikelihoodName
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.predict.call import Call, Forward, evaluating, to_device
from bayesadam.predict.moments import VarianceOf, parameters_at_mean
from bayesadam.predict.options import Options

_NOISE_ROUNDS = 8


def by_evidence(posterior: Posterior, data: HeldOut) -> Posterior:
    """s, δ and σ², in turn where there is a σ²: s and δ depend on it, and it on what of a residual is not Var[f]."""
    shape = posterior.settings.prior_shape
    unit: VarianceOf = lambda name: torch.ones_like(posterior.mode[name]) / (1.0 if shape is None else shape[name])  # noqa: E731
    record = data.options.record
    if not record.noise:
        parts = list(data.moments(posterior, [unit], covariance=record.coupled))
        curvature = torch.cat([_output_curvature(record, mean, variance, block) for mean, variance, block, *_ in parts])
        return _at_evidence(posterior, float(curvature.mean(dtype=torch.float64)))

    def residuals(
        at: Posterior, variances: Sequence[VarianceOf], directions: Sequence[Directions | None] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = list(data.moments(at, variances, directions=directions))
        mean, square = (
            torch.cat(part) for part in zip(*((m, (y - m).square()) for m, _, _, y, _ in parts), strict=True)
        )
        variance = torch.cat([v for _, v, *_ in parts], dim=1)
        return mean, square.clamp(min=torch.finfo(square.dtype).tiny), variance

    mean, square, (reach,) = residuals(posterior, [unit])
    noise = square.mean(dim=0)
    for _ in range(_NOISE_ROUNDS):
        curvature = (reach * record.hessian_diagonal(mean, noise)).mean(dim=0).sum()
        found = _at_evidence(posterior, float(curvature)).replace(noise_variance=noise)
        # In the likelihood form the mean has moved, and the residuals with it.
        variances = [unit, found.coordinate_variance.__getitem__]
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
    """s from the trace of the Gauss-Newton matrix, N × `curvature`, and δ from MacKay's fixed point δ = γ/|θ|².

    Under a prior of shape R all of it is in the coordinates R^½ θ, in which that prior is δ.
    """
    settings, shape = posterior.settings, posterior.settings.prior_shape
    total = sum(float(c.sum(dtype=torch.float64)) for c in posterior.structure.curvatures(settings.power, shape))
    weight = posterior.n_data * curvature / total if total else math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(
            f"the curvature on the held-out data gives a weight of {weight!r}; the posterior is unchanged. Do the model's "
            "outputs contain NaN, or do they not depend on the weights?"
        )
    unit = settings.weight / settings.scale

    def at(delta: float) -> Posterior:
        prior = settings.prior_at(delta)
        return posterior.replace(scale=weight / unit, prior_precision=prior, covariant=settings.covariant)

    squares = {name: theta.square() for name, theta in posterior.mode.items()}
    if shape is not None:
        squares = {name: shape[name] * square for name, square in squares.items()}
    square = max(sum(float(each.sum(dtype=torch.float64)) for each in squares.values()), 1e-30)
    delta, found = 1.0, at(1.0)
    for _ in range(200):
        fresh = max(found.effective_dimension / square, 1e-12)
        found = at(fresh)
        if abs(fresh - delta) <= 1e-6 * delta:
            break
        delta = fresh
    return found


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
        for inputs, y in progress(data, "log_marginal_likelihood"):
            mean = call(params, to_device(inputs, device))
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
            found = options.record.predictive(
                mean, torch.zeros_like(mean), link=options.link, noise_variance=posterior.noise_variance
            )
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
