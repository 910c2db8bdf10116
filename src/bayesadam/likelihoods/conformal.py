"""Split conformal prediction: sets, intervals and p-values that hold their level on data like the held-out.

Of n held-out scores and one more, exchangeable with them, every rank is equally likely: the new score is at most the
⌈(n + 1) level⌉-th smallest of the n with a probability between level and level + 1/(n + 1).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from bayesadam.errors import SettingError

SetMethod = Literal["lac", "aps", "raps"]
# Held-out scores that nothing was fitted to, (n, ...) by name: `classes.METHOD` of the true classes; `labels`, those
# classes; `residuals`, |y − E[y]| over the standard deviation of the predictive; `novelty`.
Guarantee = Mapping[str, Tensor]
# RAPS: from which rank on a class costs more, and how much.
_FREE_RANKS = 2
_PENALTY = 0.05


def threshold(scores: Tensor, level: float) -> Tensor:
    """The ⌈(n + 1) level⌉-th smallest of n scores along the first dimension; ∞ where there are too few.

    >>> threshold(torch.arange(1.0, 20), 0.95)
    tensor(19.)
    """
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return torch.full_like(scores[:1].sum(dim=0), math.inf)
    return scores.sort(dim=0).values[rank - 1]


def p_values(reference: Tensor, scores: Tensor) -> Tensor:
    """(1 + the number of reference scores, in ascending order, at least as large)/(n + 1)."""
    ordered = reference.to(scores)
    larger = len(ordered) - torch.searchsorted(ordered, scores.contiguous(), right=False)
    return (1 + larger).to(torch.float64) / (len(ordered) + 1)


def class_scores(probs: Tensor, method: SetMethod, uniform: Tensor) -> Tensor:
    """How badly each class conforms, (..., classes), of its probabilities and a uniform number per example, (...).

    LAC: 1 − p_k (Sadinle, Lei and Wasserman 2019). APS: the probability of all likelier classes and a random share of
    p_k (Romano, Sesia and Candès 2020). RAPS: the same and a penalty on ranks beyond the second (Angelopoulos et al.
    2021).
    """
    if method not in get_args(SetMethod):
        raise SettingError(f"method must be one of {get_args(SetMethod)}, got {method!r}")
    if method == "lac":
        return 1 - probs
    ordered, order = probs.sort(dim=-1, descending=True)
    scores = ordered.cumsum(dim=-1) - (1 - uniform).unsqueeze(-1).to(probs) * ordered
    if method == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
        scores = scores + _PENALTY * (ranks - _FREE_RANKS).clamp(min=0).to(scores)
    return torch.empty_like(scores).scatter_(-1, order, scores)


def uniform_like(probs: Tensor, seed: int) -> Tensor:
    """A number in (0, 1) for each row: the same for the same batch only, or its own bias would be in every coverage."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(probs.detach().cpu().contiguous().numpy().tobytes()))
    return torch.rand(probs.shape[:-1], generator=generator, dtype=torch.float64).to(probs.device)


def joined(parts: Sequence[Guarantee], novelty: Sequence[Tensor]) -> dict[str, Tensor]:
    """The scores of several batches, on the CPU; of those that not every batch has, none."""
    names = set.intersection(*map(set, parts)) if parts else set()
    found = {name: torch.cat([part[name] for part in parts]).cpu() for name in names}
    return found | ({"novelty": torch.cat(list(novelty)).cpu().sort().values} if novelty else {})


def check_level(level: float) -> None:
    """Refuse what is no probability between 0 and 1."""
    if not 0 < level < 1:
        raise SettingError(f"level must lie between 0 and 1, such as 0.9 for 90 %, got {level!r}")
