r"""A second moment that is diagonal in a rotated space: what SOAP stores, and what a Kronecker-factored posterior needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import StateError
from bayesadam.readers.reader import Group, State, StateReader, outline, second_moment

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
        return Rotation(*(basis if basis is None else basis.to(device, dtype) for basis in (self.left, self.right)))


def is_orthonormal(columns: Tensor, tolerance: float = 1e-2) -> bool:
    """Whether the columns of a matrix are, within rounding; NaN is within no tolerance."""
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return bool(((columns.mT @ columns - identity).abs() < tolerance).all())


def eigenbasis(matrix: Tensor) -> Tensor:
    """The eigenvectors of a symmetric matrix as columns, from the largest eigenvalue down.

    Where single precision does not find them, or does not leave them orthonormal, as happens to matrices of low rank, they are
    found in double.

    >>> eigenbasis(torch.diag(torch.tensor([1.0, 3.0]))).abs()
    tensor([[0., 1.],
            [1., 0.]])
    """
    try:
        vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
        is_found = is_orthonormal(vectors)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        is_found = False
    if not is_found:
        vectors = torch.linalg.eigh(matrix.double()).eigenvectors.to(matrix.dtype)
    return vectors.flip(1).contiguous()


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

    Attributes:
        rotation: Q_L and Q_R; a vector has Q_R alone, or neither.
        second_moment: v̂, bias-corrected, of the parameter's shape: entry (i, j) of the matrix belongs to left eigenvector
            i and right eigenvector j.
    """

    rotation: Rotation
    second_moment: Tensor


Factors = tuple[Tensor, Sequence[Tensor | None]]


@dataclass(frozen=True)
class RotatedReader(StateReader):
    """A reader of a second moment that is stored in the eigenbases of each weight.

    Without a `read` of its own, the diagonal in the space of the weights comes from `factors`.

    Attributes:
        factors: a function (state, group, parameter shape) → (s, one basis a dimension of s), s as the optimiser stores it,
            in the bases' coordinates; None is the identity.
        bases: the entries of the state that are bases, or what they are found from.
        idle_steps: the steps that are counted but leave no gradient in s.
        counter: the entry that counts, where it is not `step`.
    """

    factors: Callable[[State, Group, torch.Size], Factors] | None = None
    bases: tuple[str, ...] = ()
    idle_steps: int = 0
    counter: str = "step"

    def __post_init__(self) -> None:
        if self.read is None and self.factors is not None:
            object.__setattr__(self, "read", partial(_weight_diagonal, self.factors))

    def steps(self, state: State, group: Group) -> float | None:
        """t, the number of gradients behind s."""
        counted = (group if self.step == "group" else state).get(self.counter)
        return None if counted is None else max(float(counted) - self.idle_steps, 0.0)

    def rotated(self, state: State, group: Group, shape: torch.Size) -> Rotated | None:
        """v̂ in its bases; None for a parameter that is not rotated.

        Raises:
            KeyError: the state lacks an entry.
        """
        stored, bases = (None, ()) if self.factors is None else self.factors(state, group, shape)
        if stored is None or all(basis is None for basis in bases):
            return None
        moment = second_moment(stored.detach().clone().reshape(shape), self, state, group)
        return Rotated(rotation_of(bases, stored.shape), moment)


def _weight_diagonal(factors: Callable[..., Factors], state: State, group: Group, shape: torch.Size) -> Tensor:
    """The diagonal of V in the space of the weights, v ×₁ Q₁² ×₂ Q₂² …, squared entry by entry; not bias-corrected."""
    moment, bases = factors(state, group, shape)
    for basis in bases:
        # Each turn takes the first dimension and puts it last.
        moment = moment.movedim(0, -1)
        if basis is not None:
            moment = moment @ basis.to(moment.dtype).square().mT
    return moment.reshape(shape)


def require_shape(moment: Tensor, fits: bool, shape: Sequence[int]) -> None:
    """Refuse the second moment of another parameter."""
    if not fits:
        raise StateError(
            f"the second moment of a parameter of shape {tuple(shape)} has shape {tuple(moment.shape)}: the state belongs to "
            "another model"
        )


def unknown_bases(reader: StateReader, state: State, shape: torch.Size) -> list[str]:
    """The entries of a state that look like bases and that its reader knows nothing of.

    A second moment stored with bases is in their coordinates. Taken for the weights' own it has the right name and the right
    shape, and every number in it is wrong. Lists of tensors, square matrices that are not of the parameter's shape, and
    matrices with a name that bases have, are such entries. A `read` function of the user's own is trusted.
    """
    known = reader.bases if isinstance(reader, RotatedReader) else ()
    if reader.statistic in ("identity", "none") or (reader.read is not None and not isinstance(reader, RotatedReader)):
        return []
    held = {key: value for key, value in outline(state).items() if isinstance(key, str) and key not in known}
    return [name for name, value in held.items() if _like_bases(name, value, shape)]


def _like_bases(name: str, value: Any, shape: torch.Size) -> bool:
    named = _BASIS_NAMES.fullmatch(name) is not None
    if isinstance(value, Mapping):
        return named
    if isinstance(value, list | tuple):
        return named or any(isinstance(inner, Tensor) and inner.dim() > 1 for inner in value)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] != value.shape[1]:
        return False
    return named or (len(value) > 1 and value.shape != shape)


def _soap_factors(state: State, group: Group, shape: torch.Size) -> Factors:
    """`SOAP`'s: it replaces its bases and never writes to them, so they need no copy."""
    stored: Tensor = state[ROTATED_KEY if ROTATED_KEY in state else PLAIN_KEY]
    require_shape(stored, stored.shape == shape, shape)
    if len(shape) < 2:
        return stored, [state.get(RIGHT_KEY)] * len(shape)
    return stored.flatten(1), [state.get(LEFT_KEY), state.get(RIGHT_KEY)]


SOAP_READER = RotatedReader(
    "soap",
    ("bayesadam.optim.soap.SOAP",),
    key=f"{PLAIN_KEY} or {ROTATED_KEY}",
    decay=("betas", 1),
    bias_correction=True,
    mark="precondition_every",
    factors=_soap_factors,
    bases=("left", "right", LEFT_KEY, RIGHT_KEY),
    note="The diagonal of a matrix that is diagonal in rotated coordinates; a Kronecker-factored posterior has all of it.",
)
