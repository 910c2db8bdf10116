"""Rows of embeddings that stand for padding: torch gives them no gradient, so they are not learned nor drawn."""

import torch
from torch import Tensor, nn

from bayesadam._shards import box, is_sharded, own_part


def padding_rows(model: nn.Module) -> dict[str, int]:
    """Their numbers by parameter name; a table that another layer uses too, such as a tied head, has none.

    >>> padding_rows(nn.Sequential(nn.Embedding(5, 2, padding_idx=-1), nn.Embedding(5, 2)))
    {'0.weight': 4}
    """
    rows: dict[int, set[int | None]] = {}
    for module in model.modules():
        row = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        for parameter in module._parameters.values():
            rows.setdefault(id(parameter), set()).add(row)
    only = {name: rows[id(parameter)] for name, parameter in model.named_parameters()}
    return {name: row for name, found in only.items() if len(found) == 1 and (row := next(iter(found))) is not None}


def keep_row(values: Tensor, theta: Tensor, row: int) -> None:
    """Write a row of θ, (rows, ...), into values, (..., rows, ...); of shards, what this process has of it."""
    own, source = own_part(values), own_part(theta)
    at = row - (box(theta)[0][0] if is_sharded(theta) else 0)
    if 0 <= at < len(source):
        with torch.no_grad():
            own.select(own.dim() - source.dim(), at).copy_(source[at])
