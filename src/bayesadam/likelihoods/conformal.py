"""Split conformal prediction: sets, intervals and p-values that hold their level on data like the held-out.

Of n held-out scores and one more, exchangeable with them, every rank is equally likely: the new score is at most the
⌈(n + 1) level⌉-th smallest of the n with a probability between level and level + 1/(n + 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesadam.errors import SettingError


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
    """(1 + the number of reference scores at least as large)/(n + 1), (batch,), in operations that ONNX has."""
    larger = (reference.to(scores) >= scores[:, None]).sum(dim=1)
    return (1 + larger).to(scores.dtype) / (len(reference) + 1)


def check_level(level: float) -> None:
    """Refuse what is no probability between 0 and 1."""
    if not 0 < level < 1:
        raise SettingError(f"level must lie between 0 and 1, such as 0.9 for 90 %, got {level!r}")
