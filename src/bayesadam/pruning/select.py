"""Choosing the lowest of many scores: by count, in a fixed order, without a sort of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Weights processed together: bounds the extra memory whatever the size of a parameter.
CHUNK = 1 << 22
_DIGIT = 16
_BINS = 1 << _DIGIT
# Scores and weights, piece by piece, as often as they are asked for.
Pieces = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Cut:
    """Where the lowest scores end: all below `score`, of those equal to it all with |weight| below `size`, and `ties` more."""

    score: float
    size: float
    ties: int

    def taken(self, score: Tensor, weight: Tensor) -> tuple[Tensor, Cut]:
        """True at what is taken of one piece, and the cut for the next."""
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
def cut_after(pieces: Pieces, count: int, *, wide: bool = False) -> Cut:
    """The cut with exactly `count` weights below it, of the lowest scores over all pieces taken together.

    Equal scores are taken by |weight|, smallest first, then by position. No score may be NaN, and `count` is at least 1. The
    pieces, float32 or with `wide` float64, are iterated over a few times and never brought together.
    """
    kind = torch.float64 if wide else torch.float32
    score, below = _kth(lambda: (score.to(kind) for score, _ in pieces()), count, kind)
    tied = lambda: (_sizes(weight[s.to(kind) == score]).to(kind) for s, weight in pieces())  # noqa: E731
    size, fewer = _kth(tied, count - below, kind)
    return Cut(score, size, count - below - fewer)


@torch.no_grad()
def lowest(scores: Sequence[Tensor], weights: Sequence[Tensor], count: int) -> list[Tensor]:
    """True at exactly `count` weights, those of the lowest scores over all tensors taken together: see `cut_after`.

    Beside the masks the extra memory is that of one chunk; the time is linear.
    """
    chosen = [torch.zeros(score.shape, dtype=torch.bool, device=score.device) for score in scores]
    if count == 0:
        return chosen
    wide = any(tensor.dtype == torch.float64 for tensor in (*scores, *weights))
    kind = torch.float64 if wide else torch.float32
    rows = zip(scores, weights, chosen, strict=True)
    flat = [(score.reshape(-1).to(kind), weight.reshape(-1), mask.view(-1)) for score, weight, mask in rows]
    pieces = [piece for row in flat for piece in zip(*(torch.split(tensor, CHUNK) for tensor in row), strict=True)]
    cut = cut_after(lambda: ((score, weight) for score, weight, _ in pieces), count, wide=wide)
    for score, weight, into in pieces:
        taken, cut = cut.taken(score, weight)
        into.copy_(taken)
    return chosen


def _sizes(weights: Tensor) -> Tensor:
    """|weight|; one that is NaN counts as the largest: its score has said that it may stay."""
    return weights.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def best_of_groups(scores: Tensor, weights: Tensor, keep: int) -> Tensor:
    """True at the `keep` highest of each row of scores; equal ones by |weight|, then the later position remains."""
    masks = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    rows = max(1, CHUNK // scores.shape[1])
    for score, weight, mask in zip(*(torch.split(tensor, rows) for tensor in (scores, weights, masks)), strict=True):
        by_size = weight.abs().argsort(dim=1, stable=True)
        order = by_size.gather(1, score.gather(1, by_size).argsort(dim=1, stable=True))
        mask.scatter_(1, order[:, : scores.shape[1] - keep], False)
    return masks


def _kth(parts: Callable[[], Iterable[Tensor]], k: int, kind: torch.dtype) -> tuple[float, int]:
    """The k-th smallest number (from 1) and how many are below it.

    Digit by digit from the top of the numbers' bits, each a count of the numbers that share the digits before it: parts
    may lie on several devices and are never brought together.
    """
    bits = 64 if kind == torch.float64 else 32
    prefix = below = 0
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        top = shift == bits - _DIGIT
        # The top digit has the sign in it.
        start = -_BINS // 2 if top else prefix * _BINS
        counts = torch.zeros(_BINS, dtype=torch.int64)
        for part in parts():
            # Adding 0 makes −0 into 0.
            key = _ordered((part + 0.0).view(_integer(kind)))
            if not top:
                key = key[(key >> (shift + _DIGIT)) == prefix]
            counts += torch.bincount((key >> shift) - start, minlength=_BINS).cpu()
        upto = counts.cumsum(0)
        digit = int(torch.searchsorted(upto, k - below))
        below += int(upto[digit] - counts[digit])
        prefix = start + digit
    return float(_ordered(torch.tensor(prefix, dtype=_integer(kind))).view(kind)), below


def _ordered(bits: Tensor) -> Tensor:
    """The bits of floating numbers as integers of the numbers' order; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def _integer(kind: torch.dtype) -> torch.dtype:
    return torch.int64 if kind == torch.float64 else torch.int32
