"""Several networks side by side: their tensors brought together piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from bayesadam.errors import MatchError, StateError
from bayesadam.lora import Pair
from bayesadam.merging.experts import Expert
from bayesadam.merging.lora import Adapter
from bayesadam.readers import working_dtype
from bayesadam.readers.curvature import PIECE


def tied_names(experts: Sequence[Expert]) -> dict[str, str]:
    """The first name of every tensor that all the networks have tied, by its other names."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name in experts[0].outline:
        key = tuple(expert.identity[name] for expert in experts)
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def stacked(experts: Sequence[Expert], name: str, scales: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """θ and F = scale × v̂ of a parameter in pieces of the flat tensor, (models, n) each; 0 where a model has no state."""
    flat = [expert.weights[name].detach().reshape(-1) for expert in experts]
    moments = [expert.moments[name].read() if name in expert.moments else repeat(None) for expert in experts]
    kind, device = working_dtype(flat[0].dtype), flat[0].device
    for start in range(0, len(flat[0]), PIECE):
        theta = torch.stack([each[start : start + PIECE].to(device, kind) for each in flat])
        curvature = torch.zeros_like(theta)
        for row, moment, scale, expert in zip(curvature, moments, scales, experts, strict=True):
            v = next(moment)
            if v is not None:
                row.copy_(checked(v, name, expert)).mul_(scale)
        yield theta, curvature


def averaged(experts: Sequence[Expert], name: str, counts: Tensor) -> Iterator[Tensor]:
    """Σ αᵢ θᵢ / Σ αᵢ in pieces of the flat tensor; to the bit the same where all are the same."""
    flat = [expert.weights[name].detach().reshape(-1) for expert in experts]
    kind, device = working_dtype(flat[0].dtype), flat[0].device
    alpha = (counts / counts.sum()).to(device)[:, None]
    for start in range(0, len(flat[0]), PIECE):
        theta = torch.stack([each[start : start + PIECE].to(device, kind) for each in flat])
        same = (theta == theta[0]).all(dim=0)
        yield torch.where(same, theta[0], (alpha.to(kind) * theta).sum(dim=0))


def checked(moment: Tensor, name: str, expert: Expert) -> Tensor:
    """Second moments that are finite and not negative."""
    if not bool((torch.isfinite(moment) & (moment >= 0)).all()):
        raise StateError(
            f"the second moment of {name!r} in {expert.label} has entries that are negative or not finite: training met a "
            "non-finite gradient, or the file is damaged; take a checkpoint before that"
        )
    return moment


def adapters_of(experts: Sequence[Expert], pair: Pair) -> list[Adapter]:
    """Both factors of an adapter as matrices, in each of the networks."""
    scales = [expert.scaling(pair.prefix, pair.adapter, expert.outline[pair.down].shape[0]) for expert in experts]
    known = [scale for scale in scales if scale is not None]
    if known and len(known) < len(scales):
        unknown = experts[scales.index(None)].label
        raise MatchError(
            f"by what the adapter of {pair.prefix!r} is multiplied is not known of {unknown}: put its adapter_config.json "
            "beside its weights, or merge posteriors of the live models"
        )
    found = []
    for expert, scale in zip(experts, scales, strict=True):
        parts = []
        for name in (pair.up, pair.down):
            tensor = expert.weights[name].detach()
            tensor = tensor.to(experts[0].weights[name].device, working_dtype(tensor.dtype))
            v = torch.zeros_like(tensor)
            if name in expert.moments:
                v = checked(expert.moments[name].whole(tensor.shape), name, expert).to(tensor)
            parts.append((tensor.flatten(1), v.flatten(1)))
        (up, up_moment), (down, down_moment) = parts
        found.append(Adapter(up, down, up_moment, down_moment, 1.0 if scale is None else scale))
    return found
