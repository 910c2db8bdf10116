"""J Σ Jᵀ where Σ is narrower along a few directions over all weights together: rows of J, projected and dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import MemoryBudgetError
from bayesadam.predict.call import Call, batch_size, examples
from bayesadam.predict.contract import gram
from bayesadam.predict.generic import VarianceOf, jacobians
from bayesadam.structures.structure import Directions


def projected_moments(
    call: Call,
    params: Mapping[str, Tensor],
    variances: Sequence[VarianceOf],
    directions: Sequence[Directions | None],
    inputs: Any,
    *,
    outputs: int,
    covariance: bool,
    budget: int,
) -> tuple[Tensor, Tensor | None]:
    """Variances (k, b, c) for each Σ = S^½ (I − Q diag(1 − κ) Qᵀ) S^½, and for a single one the blocks (b, c, c).

    With H = J S^½ and A = H Q it is  (H − A Qᵀ)(H − A Qᵀ)ᵀ + A diag(κ) Aᵀ,  two squares: where the data have determined
    nearly all of H the difference of H Hᵀ and A Aᵀ would be lost in rounding.
    """
    size = batch_size(inputs)
    needed = outputs * sum(tensor.numel() * tensor.element_size() for tensor in params.values())
    if needed > budget:
        raise MemoryBudgetError(
            f"a low-rank posterior needs the gradients of every output, {needed:,} bytes per example, and the memory budget is "
            f"{budget:,}: raise memory_budget, or use predictive='linearised-sampled', which needs less"
        )
    found_variances, blocks = [], []
    chunk = max(1, budget // (4 * needed))
    for start in range(0, size, chunk):
        found = jacobians(call, dict(params), {}, examples(inputs, start, start + chunk))
        wide = {name: j.to(torch.promote_types(j.dtype, torch.float32)) for name, j in found.items()}
        parts = [_parts(wide, variance, each) for variance, each in zip(variances, directions, strict=True)]
        found_variances.append(torch.stack([_sum_of_squares(part) for part in parts]))
        if covariance:
            blocks.append(torch.stack([gram(rows) for rows in parts[0]]).sum(dim=0))
    return torch.cat(found_variances, dim=1), torch.cat(blocks) if covariance else None


def _parts(rows: Mapping[str, Tensor], variance: VarianceOf, directions: Directions | None) -> list[Tensor]:
    """(b, c, ·) whose squares add up to the variances: H − A Qᵀ parameter by parameter, and A κ^½."""
    white = {name: row * variance(name).sqrt().to(row) for name, row in rows.items()}
    if directions is None:
        return [row.unsqueeze(-1).flatten(2) for row in white.values()]
    inside = directions.coordinates(white)
    outside = directions.scaled(white, torch.zeros_like(directions.variance))
    return [*(row.unsqueeze(-1).flatten(2) for row in outside.values()), inside * directions.variance.sqrt().to(inside)]


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Σ over the last dimension of each and over all."""
    return torch.stack([part.square().sum(dim=-1) for part in parts]).sum(dim=0)
