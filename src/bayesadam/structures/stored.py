"""Structures out of the tensors of a file, each checked: what is damaged or another model's is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._shards import placed_like
from bayesadam.curvature.read import working_dtype
from bayesadam.curvature.rotated import Rotation
from bayesadam.errors import FileError
from bayesadam.structures.diagonal import Diagonal
from bayesadam.structures.kronecker import Kronecker
from bayesadam.structures.low_rank import LowRank, no_rest
from bayesadam.structures.structure import Structure

Path = str | os.PathLike[str]
Tensors = Mapping[str, Tensor]
Parameters = Mapping[str, nn.Parameter]


def stored_structure(
    path: Path, kind: str, tensors: Tensors, names: Sequence[str], parameters: Parameters
) -> Structure:
    """The structure of that kind; a KeyError is a tensor that is missing."""
    if kind == "diagonal":
        return Diagonal(_moments(path, "second_moment", tensors, names, parameters))
    if kind == "kronecker":
        moments = _moments(path, "second_moment", tensors, names, parameters)
        found = _bases(path, tensors, moments)
        return Kronecker(moments, {name: b.to(moments[name].device, moments[name].dtype) for name, b in found.items()})
    if kind not in ("low-rank", "low-rank+diagonal"):
        raise FileError(f"{path} holds a {kind!r} posterior, which this version does not know: upgrade bayesadam")
    return _low_rank(path, kind, tensors, names, parameters)


def stored_weights(
    path: Path, role: str, tensors: Tensors, names: Sequence[str], parameters: Parameters
) -> dict[str, Tensor]:
    """Finite tensors of the parameters' shapes, where and how the parameters are."""
    named = {name: tensors[f"{role}.{name}"] for name in names}
    storage.check_owner(path, {name: tensor.shape for name, tensor in named.items()}, parameters)
    for name, tensor in named.items():
        _require_finite(path, name, tensor)
    return {n: placed_like(t, parameters[n]).to(working_dtype(t.dtype)) for n, t in named.items()}


def _moments(
    path: Path, role: str, tensors: Tensors, names: Sequence[str], parameters: Parameters
) -> dict[str, Tensor]:
    found = stored_weights(path, role, tensors, names, parameters)
    for name, v in found.items():
        if bool((v < 0).any()):
            raise FileError(f"{path} is damaged: the second moment of {name!r} has negative entries")
    return found


def _bases(path: Path, tensors: Tensors, moments: Tensors) -> dict[str, Rotation]:
    """The eigenbases in a file, each of the side of its parameter and orthogonal."""
    found: dict[str, Rotation] = {}
    for name, v in moments.items():
        sides = [tensors.get(f"{side}.{name}") for side in ("left", "right")]
        lengths = [v.shape[0], v.numel() // max(v.shape[0], 1)] if v.dim() > 1 else [0, v.numel()]
        for basis, length in zip(sides, lengths, strict=True):
            if basis is not None and not (basis.shape == (length, length) and _is_orthonormal(basis)):
                raise FileError(f"{path} is damaged: a basis of {name!r} is not orthogonal, or not of its shape")
        if any(side is not None for side in sides):
            found[name] = Rotation(*sides)
    return found


def _low_rank(path: Path, kind: str, tensors: Tensors, names: Sequence[str], parameters: Parameters) -> LowRank:
    stored = {name: tensors[f"directions.{name}"] for name in names}
    storage.check_owner(path, {name: rows.shape[1:] for name, rows in stored.items()}, parameters)
    values = tensors["eigenvalues.directions"]
    flat = [rows.unsqueeze(-1).flatten(1) for rows in stored.values() if len(rows) == len(values)]
    whole = len(flat) == len(stored) and _is_orthonormal(torch.cat(flat, dim=1).T)
    if not whole or values.dim() != 1 or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise FileError(f"{path} is damaged: its directions are not orthonormal, or not as many as its eigenvalues")
    rows = {name: r.to(parameters[name].device, working_dtype(r.dtype)) for name, r in stored.items()}
    first = next(iter(rows.values()))
    rest = no_rest(rows) if kind == "low-rank" else _moments(path, "rest", tensors, names, parameters)
    return LowRank(rows, values.to(first), rest, kind)


def _is_orthonormal(columns: Tensor) -> bool:
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return bool(((columns.mT @ columns - identity).abs() < 1e-2).all())


def _require_finite(path: Path, name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise FileError(f"{path} is damaged: {name!r} has entries that are not finite")
