"""Where the Kronecker-factored Gaussian, a `Diagonal` in eigenbases, has its bases from: SOAP, gradients, a file."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam.errors import SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.structure import Named, Stored, StructureSpec, outlined
from bayesadam.readers import read_entry, read_rotated, working_dtype
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.match import Match
from bayesadam.readers.rotated import Rotation, eigenbasis, is_orthonormal

_MAX_SIDE = 10_000


def _of_state(match: Match) -> Diagonal:
    """The structure in the state of a SOAP; what it does not rotate is diagonal."""
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for entry in match.entries:
        if is_sharded(entry.parameter):
            raise SettingError(f"parameter {entry.name!r} is sharded, and a Kronecker-factored posterior is not")
        place = entry.parameter.device, working_dtype(entry.parameter.dtype)
        found = read_rotated(entry)
        if found is None:
            moments[entry.name] = read_entry(entry)[1].to(*place)
        else:
            moments[entry.name], bases[entry.name] = found[0].to(*place), found[1].to(*place)
    if not bases:
        raise SettingError(
            "structure='kronecker' needs eigenbases, which SOAP keeps: train with a SOAP, record gradients with "
            "bayesadam.Recorder, or use structure='diagonal'"
        )
    return Diagonal(moments, bases)


def _of_gradients(gradients: Named) -> Diagonal:
    """Of recorded gradients, (K, *shape) by parameter name: bases of Σ G Gᵀ and Σ Gᵀ G, v̂ the mean square in them.

    A vector gets the basis of Σ g gᵀ where there are as many gradients as it has entries; with fewer that matrix is
    flat in directions in which nothing was seen. Sides longer than 10,000 are left as they are.
    """
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for name, stack in gradients.items():
        found: list[Tensor | None] = [None, None]
        if stack.dim() > 2:
            matrices = stack.flatten(2)
            sides = (matrices.transpose(0, 1).flatten(1), matrices.flatten(0, 1).T)
            found = [eigenbasis(rows @ rows.T) if 1 < len(rows) <= _MAX_SIDE else None for rows in sides]
        elif stack.dim() == 2 and 1 < stack.shape[1] <= min(len(stack), _MAX_SIDE):
            found[1] = eigenbasis(stack.T @ stack)
        if any(basis is not None for basis in found):
            bases[name] = Rotation(*found)
            stack = torch.stack([bases[name].into(gradient, gradient.dim()) for gradient in stack])
        moments[name] = stack.square().mean(dim=0)
    if not bases:
        raise SettingError("no parameter has eigenbases to be found: use structure='diagonal' or 'low-rank'")
    return Diagonal(moments, bases)


def _load(stored: Stored) -> Diagonal:
    """The second moments and their bases, each basis of the side of its parameter and orthogonal."""
    moments = stored.weights("second_moment")
    like = outlined(moments)

    def read(name: str) -> Rotation:
        v = like[name]
        sides = [stored.tensors.get(f"{side}.{name}") for side in ("left", "right")]
        lengths = [v.shape[0], v.numel() // max(v.shape[0], 1)] if v.dim() > 1 else [0, v.numel()]
        for basis, length in zip(sides, lengths, strict=True):
            if basis is not None and not (basis.shape == (length, length) and is_orthonormal(basis)):
                raise stored.damaged(f"a basis of {name!r} is not orthogonal, or not of its shape")
        return Rotation(*sides).to(torch.device("cpu") if v.is_meta else v.device, v.dtype)

    names = [name for name in like if any(f"{side}.{name}" in stored.tensors for side in ("left", "right"))]
    if stored.parameters is None:
        return Diagonal(moments, Lazy({name: meta((), torch.float32) for name in names}, read))
    return Diagonal(moments, {name: read(name) for name in names})


KRONECKER = StructureSpec(
    "kronecker",
    build=lambda read: _of_state(read.match) if read.gradients is None else _of_gradients(read.gradients),
    load=_load,
)
