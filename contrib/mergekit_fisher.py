"""Merging by published curvature, as methods of mergekit (0.1.5): `posterior.safetensors` lies beside each model.

    bayesadam_fisher             θ = (Σ αᵢ Fᵢ)⁻¹ Σ αᵢ Fᵢ θᵢ, F = v̂; the average by α where Σ F = 0
    bayesadam_gradient_matching  θ = θ₀ + (F₀ + Σ αᵢ Fᵢ)⁻¹ Σ (F₀ + αᵢ Fᵢ)(θᵢ − θ₀), F = N B v̂ + δ

α is `weight`, 1 where absent, θ₀ the base model, with F₀ = 0 where it has no curvature beside it, and δ is 0.3 times
the mean of αᵢ N B v̂. An N or B that is not known of every model counts for none. A parameter that only some of the
models trained is taken from those; one that none of them trained is averaged, and named in a warning. As a command it
is mergekit-yaml with these methods:

    python contrib/mergekit_fisher.py merge.yml merged

Needs curvature.py beside it, torch and mergekit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import (
    BasePolicy,
    InputContract,
    PerInput,
    PerNonBase,
    TensorEntry,
    TensorGroup,
    merge_method,
    register,
)
from torch import Tensor

from curvature import Curvature, Fault

FILE, SHARE = "posterior.safetensors", 0.3
LOG = logging.getLogger(__name__)


def fisher(thetas: Tensor, curvature: Tensor, alpha: Tensor) -> Tensor:
    """(Σ αᵢ Fᵢ)⁻¹ Σ αᵢ Fᵢ θᵢ over the first dimension, and Σ αᵢ θᵢ / Σ αᵢ where all F are 0."""
    shares = alpha.reshape(-1, *[1] * (thetas.dim() - 1)).to(thetas)
    largest = curvature.amax(dim=0)
    # By the largest first: the squares of small gradients are at the end of what float32 has.
    shares = shares * torch.where(largest > 0, curvature / largest, 1.0)
    merged = (shares / shares.sum(dim=0) * thetas).sum(dim=0)
    return torch.where((thetas == thetas[0]).all(dim=0), thetas[0], merged)


def matched(thetas: Tensor, curvature: Tensor, base: Tensor, known: Tensor, delta: float) -> Tensor:
    """θ₀ + (F₀ + Σ Fᵢ)⁻¹ Σ (F₀ + Fᵢ)(θᵢ − θ₀) with δ added to every F, and α in F."""
    own, every = known + delta, curvature + delta
    return base + ((own + every) * (thetas - base)).sum(dim=0) / (own + every.sum(dim=0))


@merge_method(
    name="bayesadam_fisher",
    pretty_name="Fisher by published curvature",
    reference_url="https://arxiv.org/abs/2111.09832",
    contract=InputContract(base=BasePolicy.FORBIDDEN, min_inputs=2),
)
def fisher_merge(group: TensorGroup, weight: PerInput[float] = 1.0) -> Tensor:
    """θ of one parameter."""
    thetas, alpha = _working(group.entries), _checked(weight.values_for(group.entries))
    curvature = _stacked(group, group.entries, [_required(entry) for entry in group.entries])
    return _averaged(group, thetas, alpha) if curvature is None else fisher(thetas, curvature, alpha)


@merge_method(
    name="bayesadam_gradient_matching",
    pretty_name="Gradient matching by published curvature",
    reference_url="https://arxiv.org/abs/2310.12808",
    contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=2),
)
def matching_merge(group: TensorGroup, weight: PerNonBase[float] = 1.0) -> Tensor:
    """θ of one parameter."""
    thetas, alpha = _working(group.non_base), _checked(weight.values_for(group.non_base))
    files, base = [_required(entry) for entry in group.non_base], _file(group.base)
    curvature = _stacked(group, group.non_base, files)
    if curvature is None:
        return _averaged(group, thetas, alpha)
    known = None if base is None else _stacked(group, [group.base], [base])
    *scales, of_base = _scales([*files, base])
    factors = alpha * torch.tensor(scales)
    # δ is the same for all parameters: a mean over the whole of every file.
    sizes = {name: math.prod(file.shape(name)) for file in files for name in file.names}
    total = sum(factor * _sum(file) for factor, file in zip(factors.tolist(), files, strict=True))
    delta = SHARE * total / len(files) / sum(sizes.values()) or 1.0
    curvature *= factors.reshape(-1, *[1] * (thetas.dim() - 1)).to(curvature)
    start = _working([group.base])[0]
    return matched(thetas, curvature, start, torch.zeros_like(start) if known is None else known[0] * of_base, delta)


for _method in (fisher_merge, matching_merge):
    register(_method)


def _file(entry: TensorEntry) -> Curvature | None:
    """What lies beside a model, on the disk or on the hub; None where nothing does."""
    if not isinstance(entry.id, ModelReference):
        raise TypeError("published curvature is found by the path of a model: merge with mergekit-yaml or run_merge")
    return _opened(entry.id)


@cache
def _opened(model: ModelReference) -> Curvature | None:
    path = Path(LoaderCache().get(model).index.base_path) / FILE
    return Curvature(path) if path.is_file() else None


def _required(entry: TensorEntry) -> Curvature:
    file = _file(entry)
    if file is None:
        raise Fault(str(entry.id), f"there is no {FILE} beside its weights", "write it with `bayesadam export`")
    return file


@cache
def _sum(file: Curvature) -> float:
    """Σ v̂ over all weights."""
    return math.fsum(float(file.moment(name).sum(dtype="float64")) for name in file.names)


def _averaged(group: TensorGroup, thetas: Tensor, alpha: Tensor) -> Tensor:
    LOG.warning("%s is averaged: no model has curvature of it", group.metadata.name)
    return fisher(thetas, torch.zeros_like(thetas), alpha)


def _scales(files: Sequence[Curvature | None]) -> list[float]:
    """N B of each, where known of all that have curvature; 1 for one that has none."""
    known = [file.header["settings"] for file in files if file is not None]
    keys = [key for key in ("n_data", "batch_size") if all(each.get(key) for each in known)]
    return [1.0 if f is None else math.prod(float(f.header["settings"][key]) for key in keys) for f in files]


def _checked(weights: Sequence[float]) -> Tensor:
    if not all(math.isfinite(each) and each > 0 for each in weights):
        raise ValueError(f"weight must be a positive number for each model, got {weights}")
    return torch.tensor(weights)


def _working(entries: Sequence[TensorEntry]) -> Tensor:
    """The weights of all models, in float32 or float64."""
    kind = torch.float64 if entries[0].tensor.dtype == torch.float64 else torch.float32
    return torch.stack([entry.tensor.to(kind) for entry in entries])


def _stacked(group: TensorGroup, entries: Sequence[TensorEntry], files: Sequence[Curvature]) -> Tensor | None:
    """v̂ of all models, 0 of those that did not train the parameter; None where none did."""
    name, like = str(group.metadata.name), _working(entries)
    found = torch.zeros_like(like)
    for number, (entry, file) in enumerate(zip(entries, files, strict=True)):
        if name in file.names:
            if file.shape(name) != tuple(entry.tensor.shape):
                what = f"{name!r} has shape {file.shape(name)}, and {tuple(entry.tensor.shape)} in the merge"
                raise Fault(file.path, what, "merge models of one shape, without a change of their vocabularies")
            # A layer of another place, as where layers are rearranged, is told by its weights.
            flat = entry.tensor.reshape(-1)
            probe = flat[:: max(len(flat) // 16, 1)][:16].double().cpu().numpy()
            file.check_weights({name: probe}, f"{name!r} of {entry.id}")
            found[number] = torch.from_numpy(file.moment(name)).to(found)
    return found if any(name in file.names for file in files) else None


if __name__ == "__main__":
    from mergekit.scripts.run_yaml import main

    main()
