r"""A second moment that is diagonal in a rotated space: what SOAP keeps, and what a Kronecker-factored posterior needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam.curvature.reader import Group, State, StateReader, outline, second_moment

# Adam's names where nothing is rotated. Names of their own elsewhere, so that no reader of Adam takes them for weights'.
PLAIN_KEY = "exp_avg_sq"
ROTATED_KEY = "rotated_exp_avg_sq"
LEFT_KEY = "left_basis"
RIGHT_KEY = "right_basis"
# What optimisers call their bases, and the statistics that these are the eigenvectors of.
_BASIS_NAMES = re.compile(
    r"((q|gg|l|r)(_?[lr])?|.*(basis|bases|eigen|ortho|proj|precond_|pre_cond_).*)([._]?\d+)?", re.I
)


def into_basis(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Q_Lᵀ X Q_R; None is the identity."""
    if left is not None:
        matrix = left.mT @ matrix
    return matrix if right is None else matrix @ right


def out_of_basis(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Q_L X Q_Rᵀ; None is the identity."""
    if left is not None:
        matrix = left @ matrix
    return matrix if right is None else matrix @ right.mT


@dataclass(frozen=True, eq=False)
class Rotation:
    """The coordinates X = Q_Lᵀ W Q_R of a weight W, seen as the matrix (first dimension, all others).

    Tensors are (..., *shape) of the weight; their coordinates have the same shape.

    Attributes:
        left: Q_L, eigenvectors as columns; None is the identity.
        right: Q_R; None is the identity.
    """

    left: Tensor | None
    right: Tensor | None

    def into(self, weights: Tensor, dims: int) -> Tensor:
        """Q_Lᵀ W Q_R of weights with so many dimensions, after any leading ones."""
        return into_basis(_matrix(weights, dims), self.left, self.right).reshape(weights.shape)

    def out_of(self, coordinates: Tensor, dims: int) -> Tensor:
        """Q_L X Q_Rᵀ."""
        return out_of_basis(_matrix(coordinates, dims), self.left, self.right).reshape(coordinates.shape)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of (Q_R ⊗ Q_L) diag(values) (Q_R ⊗ Q_L)ᵀ: Q_L² values (Q_R²)ᵀ, squared entry by entry."""
        squared = (None if basis is None else basis.square() for basis in (self.left, self.right))
        return out_of_basis(_matrix(values, values.dim()), *squared).reshape(values.shape)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Rotation:
        """The same bases elsewhere."""
        return Rotation(
            *(None if basis is None else basis.to(device=device, dtype=dtype) for basis in (self.left, self.right))
        )


def _matrix(tensor: Tensor, dims: int) -> Tensor:
    return tensor.flatten(1 - dims) if dims > 2 else tensor


def rotation_of(bases: Sequence[Tensor | None], shape: Sequence[int]) -> Rotation:
    """One basis a dimension as two: Q_L = Q₁ and Q_R = Q₂ ⊗ Q₃ ⊗ …; that of a vector is Q_R. None is the identity."""
    left, rest = (bases[0], bases[1:]) if len(bases) > 1 else (None, bases)
    if all(basis is None for basis in rest):
        return Rotation(left, None)
    kind = next(basis for basis in rest if basis is not None)
    whole = (
        torch.eye(side, dtype=kind.dtype, device=kind.device) if basis is None else basis
        for basis, side in zip(rest, shape[-len(rest) :], strict=True)
    )
    return Rotation(left, reduce(torch.kron, whole))


@dataclass(frozen=True, eq=False)
class Rotated:
    r"""v̂ of one parameter in the space of its eigenbases.

    With vec stacking the columns of the m×n matrix W, the covariance that goes with it is

    .. math::
        \operatorname{Cov} \operatorname{vec}(W)
            = (Q_R \otimes Q_L) \operatorname{diag} \frac{1}{w\, \hat v^p + \delta}\, (Q_R \otimes Q_L)^\top

    which is never formed: `rotation.out_of` of ε (w v̂ᵖ + δ)^(−1/2) is a draw from it, and `rotation.diagonal` of
    1/(w v̂ᵖ + δ) has its diagonal.

    The tensors are the optimiser's as they were when this was read: it replaces its bases, it does not write to them.

    Attributes:
        rotation: Q_L and Q_R; a vector has Q_R alone, or neither.
        second_moment: v̂, bias-corrected, of the parameter's shape: entry (i, j) of the matrix belongs to left eigenvector
            i and right eigenvector j.
    """

    rotation: Rotation
    second_moment: Tensor


@dataclass(frozen=True)
class RotatedReader(StateReader):
    """A reader of a second moment that is kept in the eigenbases of each weight.

    `read` gives its diagonal in the space of the weights, and `kept` all of it.

    Attributes:
        kept: a function (state, group, parameter shape) → (bases, s in their coordinates), s as the optimiser keeps it; or
            None for a parameter that is not rotated.
        bases: the entries of the state that are bases, or what they are found from.
        idle_steps: the steps that are counted but leave no gradient in s.
        counter: the entry that counts, where it is not `step`.
    """

    kept: Callable[[State, Group, torch.Size], tuple[Rotation, Tensor] | None] | None = None
    bases: tuple[str, ...] = ()
    idle_steps: int = 0
    counter: str = "step"

    def steps(self, state: State, group: Group) -> float | None:
        """t, the number of gradients behind s."""
        counted = (group if self.step == "group" else state).get(self.counter)
        return None if counted is None else max(float(counted) - self.idle_steps, 0.0)

    def rotated(self, state: State, group: Group, shape: torch.Size) -> Rotated | None:
        """v̂ in its bases; None for a parameter that is not rotated.

        Raises:
            KeyError: the state lacks an entry.
        """
        found = None if self.kept is None else self.kept(state, group, shape)
        if found is None:
            return None
        rotation, stored = found
        return Rotated(rotation, second_moment(stored.detach().clone(), self, state, group))


def unknown_bases(reader: StateReader, state: State, shape: torch.Size) -> list[str]:
    """The entries of a state that look like bases and that its reader knows nothing of.

    A second moment kept beside bases is in their coordinates. Taken for the weights' own it has the right name and the right
    shape, and every number in it is wrong. Lists of tensors, square matrices that are not of the parameter's shape, and
    matrices with a name that bases have, are such entries. A `read` function of the user's own is trusted.
    """
    known = reader.bases if isinstance(reader, RotatedReader) else ()
    if reader.statistic in ("identity", "none") or (reader.read is not None and not isinstance(reader, RotatedReader)):
        return []
    return [
        str(key) for key, value in outline(state).items() if key not in known and _like_bases(str(key), value, shape)
    ]


def _like_bases(name: str, value: Any, shape: torch.Size) -> bool:
    named = _BASIS_NAMES.fullmatch(name) is not None
    if isinstance(value, Mapping):
        return named
    if isinstance(value, list | tuple):
        return named or any(isinstance(inner, Tensor) and inner.dim() > 1 for inner in value)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] != value.shape[1]:
        return False
    return named or (len(value) > 1 and value.shape != shape)


def _stored(state: State) -> Tensor:
    stored: Tensor = state[ROTATED_KEY if ROTATED_KEY in state else PLAIN_KEY]
    return stored


def _unrotated(state: State, group: Group, shape: torch.Size) -> Tensor:
    """The diagonal of V in the space of the weights, not bias-corrected: what a diagonal posterior can take from SOAP."""
    return _rotation(state).diagonal(_stored(state))


def _rotation(state: State) -> Rotation:
    return Rotation(state.get(LEFT_KEY), state.get(RIGHT_KEY))


def _kept(state: State, group: Group, shape: torch.Size) -> tuple[Rotation, Tensor] | None:
    return (_rotation(state), state[ROTATED_KEY]) if ROTATED_KEY in state else None


SOAP_READER = RotatedReader(
    "soap",
    ("bayesadam.optim.soap.SOAP",),
    key=f"{PLAIN_KEY} or {ROTATED_KEY}",
    decay=("betas", 1),
    bias_correction=True,
    mark="precondition_every",
    read=_unrotated,
    kept=_kept,
    bases=("left", "right", LEFT_KEY, RIGHT_KEY),
    note="The diagonal of a matrix that is diagonal in rotated coordinates; a Kronecker-factored posterior keeps all of it.",
)
