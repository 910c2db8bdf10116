"""Choosing the lowest of many scores: by count, in a fixed order, without a sort of them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Weights looked at together: bounds the extra memory whatever the size of a parameter.
_CHUNK = 1 << 22
_DIGIT = 16
_BINS = 1 << _DIGIT


@torch.no_grad()
def lowest(scores: Sequence[Tensor], weights: Sequence[Tensor], count: int) -> list[Tensor]:
    """True at exactly `count` weights, those of the lowest scores over all tensors taken together.

    Equal scores are taken by |weight|, smallest first, then by position, first tensor first. Beside the masks the extra
    memory is that of the tied weights' magnitudes and one chunk; the time is linear. No score may be NaN.
    """
    chosen = [torch.zeros(score.shape, dtype=torch.bool, device=score.device) for score in scores]
    if count == 0:
        return chosen
    kind, size_kind = _common_type(scores), _common_type(weights)
    flat = [
        (s.reshape(-1).to(kind), w.reshape(-1), c.view(-1)) for s, w, c in zip(scores, weights, chosen, strict=True)
    ]
    pieces = [piece for row in flat for piece in zip(*(torch.split(tensor, _CHUNK) for tensor in row), strict=True)]
    cut, below = _kth([score for score, _, _ in pieces], count)
    open_count = count - below
    tied: list[tuple[Tensor, Tensor, Tensor]] = []
    for score, weight, taken in pieces:
        torch.lt(score, cut, out=taken)
        equal = score == cut
        if bool(equal.any()):
            # A weight that is NaN counts as the largest; its score has said that it may stay.
            sizes = weight[equal].abs().nan_to_num_(nan=torch.inf, posinf=torch.inf).to(size_kind)
            tied.append((equal, sizes, taken))
    cut, below = _kth([sizes for _, sizes, _ in tied], open_count)
    open_count -= below
    for equal, sizes, taken in tied:
        small, even = sizes < cut, sizes == cut
        if open_count:
            first = even.nonzero()[:open_count, 0]
            small[first] = True
            open_count -= len(first)
        taken[equal] = small
    return chosen


def best_of_groups(scores: Tensor, weights: Tensor, keep: int) -> Tensor:
    """True at the `keep` highest of each row of scores; equal ones by |weight|, then the later position is kept."""
    masks = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    rows = max(1, _CHUNK // scores.shape[1])
    for score, weight, mask in zip(*(torch.split(tensor, rows) for tensor in (scores, weights, masks)), strict=True):
        by_size = weight.abs().argsort(dim=1, stable=True)
        order = by_size.gather(1, score.gather(1, by_size).argsort(dim=1, stable=True))
        mask.scatter_(1, order[:, : scores.shape[1] - keep], False)
    return masks


def _common_type(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _kth(parts: Sequence[Tensor], k: int) -> tuple[float, int]:
    """The k-th smallest number (from 1) and how many are below it.

    Digit by digit from the top of the numbers' bits, each a count of the numbers that share the digits before it: parts
    may lie on several devices and are never brought together.
    """
    kind = parts[0].dtype
    bits = 64 if kind == torch.float64 else 32
    prefix = below = 0
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        top = shift == bits - _DIGIT
        # The top digit has the sign in it.
        start = -_BINS // 2 if top else prefix * _BINS
        counts = torch.zeros(_BINS, dtype=torch.int64)
        for part in parts:
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
