"""Split conformal prediction: sets, intervals and p-values that hold their level on data like the held-out.

Of n held-out scores and one more, exchangeable with them, every rank is equally likely: the new score is at most the
⌈(n + 1) level⌉-th smallest of the n with a probability between level and level + 1/(n + 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesadam.errors import SettingError

# Before torch 2.7 it could not be told from compiling.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
# w, the share of alarms that is left to the second of two p-values.
SECOND = 0.2


def threshold(scores: Tensor, level: float) -> Tensor:
    """The ⌈(n + 1) level⌉-th smallest of n scores along the first dimension; ∞ where there are too few.

    >>> threshold(torch.arange(1.0, 20), 0.95)
    tensor(19.)
    """
    check_level(level)
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return torch.full_like(scores[:1].sum(dim=0), math.inf)
    return scores.sort(dim=0).values[rank - 1]


def p_values(reference: Tensor, scores: Tensor) -> Tensor:
    """(1 + the number of reference scores at least as large)/(n + 1), (batch,); the reference ascends."""
    n, reference = len(reference), reference.to(scores)
    if _exporting():
        # ONNX does not search, and onnxruntime adds up whole numbers slowly.
        larger = (reference >= scores[:, None]).to(scores.dtype).sum(dim=1)
    else:
        larger = n - torch.searchsorted(reference, scores.contiguous())
    return (1 + larger).to(scores.dtype) / (n + 1)


def either(first: Tensor, second: Tensor) -> Tensor:
    """min(p₁/(1 − w), p₂/w, 1): of inputs for which both hold at most α have p ≤ α, whatever ties the two."""
    return torch.minimum(first / (1 - SECOND), second / SECOND).clamp(max=1)


def chance_of_novel(count: int, of: int, rank: int, n: int) -> float:
    """P(K ≥ count), K how many `of` new scores are above the `rank`-th largest of n others, all exchangeable.

    K has the beta-binomial distribution, C(m, k) B(k + rank, m − k + n + 1 − rank)/B(rank, n + 1 − rank), m = `of`.

    >>> round(chance_of_novel(1, 1, 1, 99), 6)
    0.01
    """

    def log_factorial(number: Tensor | int) -> Tensor:
        return torch.lgamma(torch.as_tensor(number, dtype=torch.float64) + 1)

    k = torch.arange(count, of + 1, dtype=torch.float64)
    places = log_factorial(of) - log_factorial(k) - log_factorial(of - k)
    ranks = log_factorial(k + rank - 1) + log_factorial(of - k + n - rank) - log_factorial(of + n)
    whole = log_factorial(rank - 1) + log_factorial(n - rank) - log_factorial(n)
    return float((places + ranks - whole).logsumexp(dim=0).exp())


def check_level(level: float) -> None:
    """Refuse what is no probability between 0 and 1."""
    if not 0 < level < 1:
        raise SettingError(f"level must lie between 0 and 1, such as 0.9 for 90 %, got {level!r}")
