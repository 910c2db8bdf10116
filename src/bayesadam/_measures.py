"""What scores and their pictures both compute, of plain tensors."""

import torch
from torch import Tensor


def chance_above(inside: Tensor, outside: Tensor) -> float:
    """The chance that a number of the second kind is above one of the first, ties counting half, by the sum of their ranks."""
    scores = torch.cat([inside.flatten(), outside.flatten()]).double()
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[place]
    n_in, n_out = inside.numel(), outside.numel()
    return float((ranks[n_in:].sum() - n_out * (n_out + 1) / 2) / (n_in * n_out))


def in_bins(confidence: Tensor, right: Tensor, bins: int) -> Tensor:
    """How many answers there are in each of equal bins of confidence, the sum of their confidence, and how many are right: (3, bins).

    >>> in_bins(torch.tensor([0.4, 0.9, 1.0]), torch.tensor([False, True, True]), 2)
    tensor([[1.0000, 2.0000],
            [0.4000, 1.9000],
            [0.0000, 2.0000]], dtype=torch.float64)
    """
    confidence = confidence.double()
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, right.double()])
    return values.new_zeros(3, bins).index_add_(1, index, values)
