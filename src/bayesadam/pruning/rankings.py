"""Scores to prune by, lowest first: pure functions of one parameter's weights and their curvature."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.settings import Precision, precision, shrunk_mean
from bayesadam.posterior import Posterior
from bayesadam.pruning.names import near


@dataclass(frozen=True, eq=False)
class Weights:
    """What a ranking sees of one parameter: θ, v̂, and the numbers of  precision = w v̂ᵖ + δ."""

    theta: Tensor
    v: Tensor
    weight: float
    power: float
    delta: Precision
    form: str


Rule = Callable[[Tensor, Tensor], Tensor]
Ranking = str | Rule | Mapping[str, Tensor]


def snr(w: Weights) -> Tensor:
    """|θ| (w v̂ᵖ)^½, |μ|/σ with δ = 0: the paper's |θ| N^½ v̂^¼ at its p = ½.

    The prior has no part in it: with δ a dead weight, v̂ = 0, would score |θ| δ^½ and outlive weights in use.
    """
    return precision(w.v, w.weight, 0.0, w.power).sqrt_().mul_(w.theta.abs())


def posterior_snr(w: Weights) -> Tensor:
    """|μ| (w v̂ᵖ + δ)^½, the posterior's own |μ|/σ, prior included."""
    mean = w.theta if w.form == "map" else shrunk_mean(w.theta, w.v, w.weight, w.delta, w.power)
    return precision(w.v, w.weight, w.delta, w.power).sqrt_().mul_(mean.abs())


def magnitude(w: Weights) -> Tensor:
    """|θ|."""
    return w.theta.abs()


def saliency(w: Weights) -> Tensor:
    """½ θ² v̂, optimal brain damage with the empirical Fisher for the Hessian: the loss that a weight's removal costs."""
    return w.theta.square().mul_(w.v).mul_(0.5)


RANKINGS: dict[str, Callable[[Weights], Tensor]] = {
    "snr": snr,
    "snr-posterior": posterior_snr,
    "magnitude": magnitude,
    "saliency": saliency,
}


def powered(q: float) -> Rule:
    """The ranking |θ| v̂^(q/2): magnitude at q = 0, the paper's order at ½, the order of `"saliency"` at 1.

    >>> powered(1.0)(torch.tensor([-3.0]), torch.tensor([4.0]))
    tensor([6.])
    """
    return lambda theta, v: v.pow(q / 2).mul_(theta.abs())


def weight_scores(
    posterior: Posterior, ranking: Ranking = "snr", names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The score of every weight, by parameter name; none is NaN.

    Args:
        posterior: over the weights.
        ranking: a name from `RANKINGS`, a function `ranking(theta, v) -> scores` of tensors, or ready scores by name.
        names: the parameters wanted; None for all of the posterior's.
    """
    posterior.require_whole("ranking weights")
    names = list(posterior.mode if names is None else names)
    if isinstance(ranking, Mapping):
        unknown = [name for name in ranking if name not in posterior.mode]
        missing = [name for name in names if name not in ranking]
        if unknown or missing:
            raise MatchError(
                f"the scores given must be by parameter name: {unknown[:4]} are not in the posterior, {missing[:4]} are "
                f"missing (near the first: {near((unknown or missing)[0], posterior.mode if unknown else ranking)})"
            )
    with torch.no_grad():
        return {name: _checked(name, _score(posterior, ranking, name), posterior.mode[name]) for name in names}


def _score(posterior: Posterior, ranking: Ranking, name: str) -> object:
    if isinstance(ranking, Mapping):
        return ranking[name]
    if not callable(ranking) and not (isinstance(ranking, str) and ranking in RANKINGS):
        raise SettingError(
            f"ranking must be one of {', '.join(map(repr, RANKINGS))}, a function of (theta, v), or scores by parameter "
            f"name; got {ranking!r}"
        )
    if not posterior.structure.independent:
        raise SettingError(
            f"ranking {ranking!r} needs a second moment for each weight, which a {posterior.structure.kind!r} posterior "
            "has not: pass ready scores, such as ranking=posterior.snr()"
        )
    theta, v, settings = posterior.mode[name], posterior.structure.second_moment[name], posterior.settings
    if callable(ranking):
        return ranking(theta, v)
    weights = Weights(theta, v, settings.weight, settings.power, settings.prior_precision[name], settings.form)
    return RANKINGS[ranking](weights)


def _checked(name: str, score: object, theta: Tensor) -> Tensor:
    if not isinstance(score, Tensor) or score.shape != theta.shape or score.is_complex():
        described = f"shape {tuple(score.shape)}, {score.dtype}" if isinstance(score, Tensor) else type(score).__name__
        raise MatchError(f"the scores of {name!r} must be a real tensor of shape {tuple(theta.shape)}, got {described}")
    if not score.is_floating_point():
        return score.to(theta.device, torch.float64)
    bad = int(torch.isnan(score).sum())
    if bad:
        raise MatchError(
            f"{bad} of the {score.numel()} scores of {name!r} are NaN, so its weights have no order: is the parameter "
            "finite? See bayesadam.doctor"
        )
    return score.detach().to(theta.device)
