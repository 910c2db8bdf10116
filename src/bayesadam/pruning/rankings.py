"""Scores to prune by, and the choice of the lowest: by count, in a fixed order, without a sort of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.settings import PrecisionRule
from bayesadam.gaussian.structure import outlined
from bayesadam.gaussian.weights import GaussianWeights

Ranking = str | Callable[[Tensor, Tensor], Tensor] | Mapping[str, Tensor]
# Weights processed together: bounds the extra memory whatever the size of a parameter.
CHUNK = 1 << 22
_DIGIT = 16
_BINS = 1 << _DIGIT


def snr(theta: Tensor, v: Tensor, rule: PrecisionRule) -> Tensor:
    """|θ| (w v̂ᵖ)^½, |μ|/σ with δ = 0: the paper's |θ| N^½ v̂^¼ at its p = ½.

    The prior is left out: with δ a dead weight, v̂ = 0, would score |θ| δ^½ and outlive weights in use.
    """
    return replace(rule, delta=0.0).precision(v).sqrt_().mul_(theta.abs())


def posterior_snr(theta: Tensor, v: Tensor, rule: PrecisionRule) -> Tensor:
    """|μ| (w v̂ᵖ + δ)^½, the posterior's own |μ|/σ, prior included."""
    return rule.precision(v).sqrt_().mul_(rule.mean(theta, v).abs())


def magnitude(theta: Tensor, v: Tensor, rule: PrecisionRule) -> Tensor:
    """|θ|."""
    return theta.abs()


def saliency(theta: Tensor, v: Tensor, rule: PrecisionRule) -> Tensor:
    """½ θ² v̂, optimal brain damage with the empirical Fisher as Hessian: the loss that removing a weight costs."""
    return theta.square().mul_(v).mul_(0.5)


RANKINGS: dict[str, Callable[[Tensor, Tensor, PrecisionRule], Tensor]] = {
    "snr": snr,
    "snr-posterior": posterior_snr,
    "magnitude": magnitude,
    "saliency": saliency,
}


@torch.no_grad()
def weight_scores(
    posterior: GaussianWeights, ranking: Ranking = "snr", names: Iterable[str] | None = None
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
                f"the scores given must be by parameter name: {unknown[:4]} are not in the posterior, {missing[:4]} "
                f"are missing (near the first: {near((unknown or missing)[0], posterior.mode if unknown else ranking)})"
            )
    elif not callable(ranking) and not (isinstance(ranking, str) and ranking in RANKINGS):
        raise SettingError(
            f"ranking must be one of {', '.join(map(repr, RANKINGS))}, a function of (theta, v), or scores by "
            f"parameter name; got {ranking!r}"
        )
    elif not posterior.structure.independent:
        raise SettingError(
            f"ranking {ranking!r} needs a second moment for each weight, which a {posterior.structure.kind!r} "
            "posterior has not: pass ready scores, such as ranking=posterior.snr()"
        )
    scores = {}
    for name in wanted:
        theta = posterior.mode[name]
        if isinstance(ranking, Mapping):
            score = ranking[name]
        else:
            v = posterior.structure.second_moment[name]
            rule = PrecisionRule.of(posterior.settings, posterior.prior_precision[name])
            score = ranking(theta, v) if callable(ranking) else RANKINGS[ranking](theta, v, rule)
        if not isinstance(score, Tensor) or score.shape != theta.shape or score.is_complex():
            found = f"shape {tuple(score.shape)}, {score.dtype}" if isinstance(score, Tensor) else type(score).__name__
            raise MatchError(f"the scores of {name!r} must be a real tensor of shape {tuple(theta.shape)}, got {found}")
        if bad := int(torch.isnan(score).sum()):
            raise MatchError(
                f"{bad} of the {score.numel()} scores of {name!r} are NaN, so its weights have no order: is the "
                "parameter finite? See bayesadam.doctor"
            )
        scores[name] = score.detach().to(theta.device, None if score.is_floating_point() else torch.float64)
    return scores


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
        sizes = _sizes(weight[equal])
        small = sizes < self.size
        first = (sizes == self.size).nonzero()[: self.ties, 0]
        small[first] = True
        chosen[equal] = small
        return chosen, replace(self, ties=self.ties - len(first))


@torch.no_grad()
def lowest(
    scores: Mapping[str, Tensor], weights: Mapping[str, Tensor], names: Sequence[str], count: int
) -> Callable[[str], Tensor]:
    """A function of a name: True at the weights taken, exactly `count` over all names, lowest score first.

    Equal scores are taken by |weight|, smallest first, then by position. No score may be NaN. Lazy tensors are read a
    few times, one by one; beside them the extra memory is that of one chunk. The time is linear.
    """
    kinds = {outlined(named)[name].dtype for named in (scores, weights) for name in names}
    kind = torch.float64 if torch.float64 in kinds else torch.float32

    def pieces(*wanted: str) -> Iterator[tuple[Tensor, Tensor]]:
        for name in wanted:
            flat = scores[name].reshape(-1).to(kind), weights[name].reshape(-1)
            yield from zip(*(torch.split(tensor, CHUNK) for tensor in flat), strict=True)

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
        removed = torch.zeros_like(weights[name], dtype=torch.bool)
        cut, start = cuts.get(name), 0
        for piece in pieces(name) if cut else ():
            taken, cut = cut.taken(*piece)  # type: ignore[union-attr]
            removed.view(-1)[start : start + len(taken)] = taken
            start += len(taken)
        return removed

    return chosen


def _sizes(weights: Tensor) -> Tensor:
    """|weight|; NaN counts as the largest: its score has said that it may stay."""
    return weights.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _kth(parts: Callable[[], Iterable[Tensor]], k: int, kind: torch.dtype) -> tuple[float, int]:
    """The k-th smallest number (from 1) and how many are below it.

    Digit by digit from the top of the numbers' bits, each a count of the numbers that share the digits before it:
    parts may lie on several devices and are never brought together.
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
