"""Where a `Diagonal` has its bases from: the state of a SOAP, or recorded gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam.errors import SettingError
from bayesadam.readers import read_entry, read_rotated, working_dtype
from bayesadam.readers.match import Match
from bayesadam.readers.rotated import Rotation, eigenbasis
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.named import Named

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
        rotated = read_rotated(entry)
        if rotated is None:
            moments[entry.name] = read_entry(entry)[1].to(*place)
        else:
            moments[entry.name], bases[entry.name] = rotated[0].to(*place), rotated[1].to(*place)
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
        sides: list[Tensor | None] = [None, None]
        if stack.dim() > 2:
            matrices = stack.flatten(2)
            both = (matrices.transpose(0, 1).flatten(1), matrices.flatten(0, 1).T)
            sides = [eigenbasis(rows @ rows.T) if 1 < len(rows) <= _MAX_SIDE else None for rows in both]
        elif stack.dim() == 2 and 1 < stack.shape[1] <= min(len(stack), _MAX_SIDE):
            sides[1] = eigenbasis(stack.T @ stack)
        if any(basis is not None for basis in sides):
            bases[name] = Rotation(*sides)
            stack = torch.stack([bases[name].into(gradient, gradient.dim()) for gradient in stack])
        moments[name] = stack.square().mean(dim=0)
    if not bases:
        raise SettingError("no parameter has eigenbases to be found: use structure='diagonal'")
    return Diagonal(moments, bases)


def built(name: str, match: Match, second_moment: Named, gradients: Named | None = None) -> Diagonal:
    """The structure of that name out of an optimiser's state, or of recorded gradients, (K, *shape) by name."""
    if name not in STRUCTURES:
        instead = "; the input side of the layers is posterior.with_inputs(inputs)" if name == "inputs" else ""
        gone = "; 'kronecker' takes recorded gradients too" if name.startswith("low-rank") else ""
        raise SettingError(f"structure must be one of {STRUCTURES}, got {name!r}{instead}{gone}")
    if name == "diagonal":
        return Diagonal(second_moment)
    return _of_state(match) if gradients is None else _of_gradients(gradients)
