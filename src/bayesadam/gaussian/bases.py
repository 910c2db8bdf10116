"""Where a `Diagonal` has its bases from: the state of a SOAP, recorded gradients, a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import is_sharded, placed_like
from bayesadam._warnings import warn
from bayesadam.errors import SettingError, StructureWarning
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.inputs import InputSide
from bayesadam.gaussian.structure import Named, Stored, outlined
from bayesadam.readers import read_entry, read_rotated, working_dtype
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.match import Match
from bayesadam.readers.rotated import Rotation, eigenbasis, is_orthonormal

# What can be read off an optimiser.
STRUCTURES = ("diagonal", "kronecker")
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
        raise SettingError("no parameter has eigenbases to be found: use structure='diagonal'")
    return Diagonal(moments, bases)


def built(name: str, match: Match, second_moment: Named, gradients: Named | None = None) -> Diagonal:
    """The structure of that name out of an optimiser's state, or of recorded gradients, (K, *shape) by name."""
    if name == "diagonal":
        return Diagonal(second_moment)
    return _of_state(match) if gradients is None else _of_gradients(gradients)


def check_structure(name: str) -> None:
    """Refuse the name of a structure that cannot be read off an optimiser."""
    if name not in STRUCTURES:
        instead = "; the input side of the layers is posterior.with_inputs(inputs)" if name == "inputs" else ""
        gone = "; 'kronecker' takes recorded gradients too" if name.startswith("low-rank") else ""
        raise SettingError(f"structure must be one of {STRUCTURES}, got {name!r}{instead}{gone}")


def loaded(kind: str, stored: Stored, header: Mapping[str, Any]) -> Diagonal:
    """The structure of a file; a KeyError is a tensor that the file lacks.

    Of low-rank ones, which releases before 0.4 wrote, the diagonal is read.
    """
    if kind.startswith("low-rank"):
        warn(f"{stored.path} holds a low-rank posterior, of which this release reads the diagonal", StructureWarning)
        return Diagonal({name: _low_rank_diagonal(stored, name, kind) for name in stored.names})
    if kind == "inputs":
        sides = {name: _loaded_side(stored, name, *own) for name, own in header["inputs"].items()}
        joined = {side.bias for side in sides.values()}
        plain = replace(stored, names=[name for name in stored.names if name not in sides and name not in joined])
        rows = {name: stored.tensors[f"rows.{name}"].to(side.spectrum) for name, side in sides.items()}
        products = {name: torch.outer(g, sides[name].spectrum) for name, g in rows.items()}
        return Diagonal({**plain.weights("second_moment"), **products}, {}, sides)
    moments = stored.weights("second_moment")
    if kind == "diagonal":
        return Diagonal(moments)
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


def _loaded_side(stored: Stored, name: str, bias: str | None, inputs_first: bool) -> InputSide:
    """The input side of one layer."""
    like = outlined(stored.tensors)[f"mode.{name}"] if stored.parameters is None else stored.parameters[name]
    basis, spectrum = (stored.tensors[f"{role}.{name}"] for role in ("right", "spectrum"))
    outputs, inputs = (like.shape[1], like.shape[0]) if inputs_first else (like.shape[0], like[0].numel())
    size, rows = inputs + (bias is not None), stored.tensors[f"rows.{name}"]
    if basis.shape != (size, size) or spectrum.shape != (size,) or not is_orthonormal(basis):
        raise stored.damaged(f"the inputs of {name!r} have a basis that is not orthogonal, or not of their number")
    if rows.shape != (outputs,) or not bool((torch.isfinite(rows) & (rows >= 0)).all() & (spectrum >= 0).all()):
        raise stored.damaged(f"{name!r} has curvature that is negative or not finite, or not one for each output")
    place = torch.device("cpu") if stored.parameters is None else like.device
    return InputSide(basis, spectrum, torch.Size(like.shape), bias, inputs_first).each(lambda t: t.to(place))


def _low_rank_diagonal(stored: Stored, name: str, kind: str) -> Tensor:
    """diag V = Σ_k s_k U_k² and, of `"low-rank+diagonal"`, the rest."""
    values, rows = stored.tensors["eigenvalues.directions"], stored.tensors[f"directions.{name}"]
    if values.dim() != 1 or len(rows) != len(values) or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise stored.damaged("its directions are not as many as its eigenvalues")
    found = torch.tensordot(values.to(rows), rows.square(), dims=1)
    if kind != "low-rank":
        found = found + stored.tensors[f"rest.{name}"].to(found)
    return found if stored.parameters is None else placed_like(found, stored.parameters[name])
