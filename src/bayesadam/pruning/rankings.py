"""Scores to prune by, and the choice of the lowest: by count, in a fixed order, without a sort of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.formulas import precision, shrunk_mean
from bayesadam.gaussian.settings import Precision, Settings
from bayesadam.posterior import Posterior

Ranking = str | Callable[[Tensor, Tensor], Tensor] | Mapping[str, Tensor]
# Weights processed together: bounds the extra memory whatever the size of a parameter.
CHUNK = 1 << 22
_DIGIT = 16
_BINS = 1 << _DIGIT


def snr(theta: Tensor, v: Tensor, settings: Settings, delta: Precision) -> Tensor:
    """|θ| (w v̂ᵖ)^½, |μ|/σ with δ = 0: the paper's |θ| N^½ v̂^¼ at its p = ½.

    The prior is left out: with δ a dead weight, v̂ = 0, would score |θ| δ^½ and outlive weights in use.
    """
    return precision(v, settings.weight, 0.0, settings.power).sqrt_().mul_(theta.abs())


def posterior_snr(theta: Tensor, v: Tensor, settings: Settings, delta: Precision) -> Tensor:
    """|μ| (w v̂ᵖ + δ)^½, the posterior's own |μ|/σ, prior included."""
    numbers = settings.weight, delta, settings.power
    mean = theta if settings.form == "map" else shrunk_mean(theta, v, *numbers)
    return precision(v, *numbers).sqrt_().mul_(mean.abs())


def magnitude(theta: Tensor, v: Tensor, settings: Settings, delta: Precision) -> Tensor:
    """|θ|."""
    return theta.abs()


def saliency(theta: Tensor, v: Tensor, settings: Settings, delta: Precision) -> Tensor:
    """½ θ² v̂, optimal brain damage with the empirical Fisher as Hessian: the loss that removing a weight costs."""
    return theta.square().mul_(v).mul_(0.5)


RANKINGS: dict[str, Callable[[Tensor, Tensor, Settings, Precision], Tensor]] = {
    "snr": snr,
    "snr-posterior": posterior_snr,
    "magnitude": magnitude,
    "saliency": saliency,
}


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
    wanted = list(posterior.mode if names is None else names)
    if isinstance(ranking, Mapping):
        unknown = [name for name in ranking if name not in posterior.mode]
        missing = [name for name in wanted if name not in ranking]
        if unknown or missing:
            raise MatchError(
                f"the scores given must be by parameter name: {unknown[:4]} are not in the posterior, {missing[:4]} are "
                f"missing (near the first: {near((unknown or missing)[0], posterior.mode if unknown else ranking)})"
            )
    elif not callable(ranking) and not (isinstance(ranking, str) and ranking in RANKINGS):
        raise SettingError(
            f"ranking must be one of {', '.join(map(repr, RANKINGS))}, a function of (theta, v), or scores by parameter "
            f"name; got {ranking!r}"
        )
    elif not posterior.structure.independent:
        raise SettingError(
            f"ranking {ranking!r} needs a second moment for each weight, which a {posterior.structure.kind!r} posterior "
            "has not: pass ready scores, such as ranking=posterior.snr()"
        )
    return {name: score_of(posterior, ranking, name) for name in wanted}


@torch.no_grad()
def score_of(posterior: Posterior, ranking: Ranking, name: str) -> Tensor:
    """The scores of one parameter."""
    theta, settings = posterior.mode[name], posterior.settings
    if isinstance(ranking, Mapping):
        score = ranking[name]
    elif callable(ranking):
        score = ranking(theta, posterior.structure.second_moment[name])
    else:
        v = posterior.structure.second_moment[name]
        score = RANKINGS[ranking](theta, v, settings, settings.prior_precision[name])
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


def near(word: str, names: Iterable[str]) -> str:
    """The names most like a word, for an error message."""
    every = list(names)
    return ", ".join(map(repr, get_close_matches(word, every, n=3, cutoff=0.4) or every[:3])) or "none at all"


@dataclass(frozen=True)
class Cut:
    """Where the lowest end: scores below `score`, at it those with |weight| below `size`, and then `ties` more."""

    score: float
    size: float
    ties: int

    def taken(self, score: Tensor, weight: Tensor) -> tuple[Tensor, Cut]:
        """True at the weights of one piece that are taken, and the cut for the next piece."""
        chosen, equal = score < self.score, score == self.score
        if not bool(equal.any()):
            return chosen, self
        sizes = _sizes(weight[equal])
        small, even = sizes < self.size, sizes == self.size
        first = even.nonzero()[: self.ties, 0]
        small[first] = True
        chosen[equal] = small
        return chosen, replace(self, ties=self.ties - len(first))


@torch.no_grad()
def lowest(
    scores: Mapping[str, Tensor], weights: Mapping[str, Tensor], names: Sequence[str], count: int
) -> Callable[[str], Tensor]:
    """A function of a name: True at the weights taken, exactly `count` over all names, lowest score first.

    Equal scores are taken by |weight|, smallest first, then by position. No score may be NaN. The tensors may be lazy, on
    several devices: they are read a few times, one by one, and the extra memory is that of one chunk; the time is linear.
    """
    outlines = [getattr(named, "outline", named) for named in (scores, weights)]
    wide = any(outline[name].dtype == torch.float64 for outline in outlines for name in names)
    kind = torch.float64 if wide else torch.float32

    def pieces(*wanted: str) -> Iterator[tuple[Tensor, Tensor]]:
        for name in wanted:
            flat = scores[name].reshape(-1), weights[name].reshape(-1)
            for score, weight in zip(*(torch.split(tensor, CHUNK) for tensor in flat), strict=True):
                yield score.to(kind), weight

    cuts: dict[str, Cut] = {}
    if count:
        score, below = _kth(lambda: (score for score, _ in pieces(*names)), count, kind)
        tied = lambda: (_sizes(weight[s == score]).to(kind) for s, weight in pieces(*names))  # noqa: E731
        size, fewer = _kth(tied, count - below, kind)
        cut = Cut(score, size, count - below - fewer)
        for name in names:
            cuts[name] = cut
            for piece in pieces(name) if cut.ties else ():
                _, cut = cut.taken(*piece)

    def chosen(name: str) -> Tensor:
        parts = []
        cut = cuts.get(name)
        for piece in pieces(name) if cut else ():
            taken, cut = cut.taken(*piece)  # type: ignore[union-attr]
            parts.append(taken)
        theta = weights[name]
        return torch.cat(parts).view(theta.shape) if parts else torch.zeros_like(theta, dtype=torch.bool)

    return chosen


def best_of_groups(scores: Tensor, weights: Tensor, keep: int) -> Tensor:
    """True at the `keep` highest of each row of scores; equal ones by |weight|, then the later position remains."""
    masks = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    rows = max(1, CHUNK // scores.shape[1])
    for score, weight, mask in zip(*(torch.split(tensor, rows) for tensor in (scores, weights, masks)), strict=True):
        by_size = weight.abs().argsort(dim=1, stable=True)
        order = by_size.gather(1, score.gather(1, by_size).argsort(dim=1, stable=True))
        mask.scatter_(1, order[:, : scores.shape[1] - keep], False)
    return masks


def _sizes(weights: Tensor) -> Tensor:
    """|weight|; NaN counts as the largest: its score has said that it may stay."""
    return weights.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _kth(parts: Callable[[], Iterable[Tensor]], k: int, kind: torch.dtype) -> tuple[float, int]:
    """The k-th smallest number (from 1) and how many are below it.

    Digit by digit from the top of the numbers' bits, each a count of the numbers that share the digits before it: parts
    may lie on several devices and are never brought together.
    """
    integer, bits = (torch.int64, 64) if kind == torch.float64 else (torch.int32, 32)
    prefix = below = 0
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        top = shift == bits - _DIGIT
        # The top digit has the sign in it.
        start = -_BINS // 2 if top else prefix * _BINS
        counts = torch.zeros(_BINS, dtype=torch.int64)
        for part in parts():
            # Adding 0 makes −0 into 0.
            key = _ordered((part + 0.0).view(integer))
            if not top:
                key = key[(key >> (shift + _DIGIT)) == prefix]
            counts += torch.bincount((key >> shift) - start, minlength=_BINS).cpu()
        upto = counts.cumsum(0)
        digit = int(torch.searchsorted(upto, k - below))
        below += int(upto[digit] - counts[digit])
        prefix = start + digit
    return float(_ordered(torch.tensor(prefix, dtype=integer)).view(kind)), below


def _ordered(bits: Tensor) -> Tensor:
    """The bits of floating-point numbers as integers of the numbers' order; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
