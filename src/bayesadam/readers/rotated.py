r"""Second moments that are diagonal in a rotated space: of SOAP and of Kronecker-factored posteriors.

All SOAPs store V ← β₂ V + (1−β₂) G'², G' = G ×₁ Q₁ᵀ ×₂ Q₂ᵀ …, with one orthogonal Q a dimension. Entry (i, j, …) of V
belongs to column i of Q₁, column j of Q₂, and so on; the first gradient only finds the bases. The curvature of a weight
seen as the matrix (first dimension, all others) is

    V = (Q_R ⊗ Q_L) diag(v) (Q_R ⊗ Q_L)ᵀ,   Q_L = Q₁,   Q_R = Q₂ ⊗ Q₃ ⊗ …

Packages differ in where V, Q and the count of steps are: `two_sided` and `listed` give the stored V, in the bases'
coordinates, and one basis a dimension of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import MatchError

# Adam's name where nothing is rotated. Other names elsewhere, so that no reader of Adam mistakes them for its own.
PLAIN_KEY, ROTATED_KEY, LEFT_KEY, RIGHT_KEY = "exp_avg_sq", "rotated_exp_avg_sq", "left_basis", "right_basis"
# Those of a saved posterior: v̂ itself, free of bias.
MOMENT_KEY, BETA_KEY, SAVED_MARK = "second_moment", "beta2", "saved_posterior"
State = Mapping[str, Any]
Factors = tuple[Tensor, Sequence[Tensor | None]]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The coordinates X = Q_Lᵀ W Q_R of a weight W, seen as the matrix (first dimension, all others); None is I.

    Tensors are (..., *shape) of the weight; their coordinates have the same shape. Eigenvectors are columns.
    """

    left: Tensor | None
    right: Tensor | None

    def into(self, weights: Tensor, dims: int) -> Tensor:
        """Q_Lᵀ W Q_R of weights whose last `dims` dimensions are the parameter's."""
        matrix = weights.flatten(1 - dims) if dims > 2 else weights
        matrix = matrix if self.left is None else self.left.mT @ matrix
        return (matrix if self.right is None else matrix @ self.right).reshape(weights.shape)

    def out_of(self, coordinates: Tensor, dims: int) -> Tensor:
        """Q_L X Q_Rᵀ."""
        return self.each(lambda basis: basis.mT).into(coordinates, dims)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of (Q_R ⊗ Q_L) diag(values) (Q_R ⊗ Q_L)ᵀ: Q_L² values (Q_R²)ᵀ, squared entry by entry."""
        return self.each(torch.square).out_of(values, values.dim())

    def each(self, change: Callable[[Tensor], Tensor]) -> Rotation:
        """The same with its bases changed."""
        return Rotation(*(None if basis is None else change(basis) for basis in (self.left, self.right)))

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Rotation:
        """The same bases on another device or in another type."""
        return self.each(lambda basis: basis.to(device, dtype))


def is_orthonormal(columns: Tensor, tolerance: float = 1e-2) -> bool:
    """Whether the columns of a matrix are orthonormal, within rounding; NaN is within no tolerance."""
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return bool(((columns.mT @ columns - identity).abs() < tolerance).all())


def eigenbasis(matrix: Tensor) -> Tensor:
    """The eigenvectors of a symmetric matrix as columns, from the largest eigenvalue down.

    Double precision is used where single precision does not leave them orthonormal, as for matrices of low rank.
    """
    try:
        vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
        is_found = is_orthonormal(vectors)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        is_found = False
    if not is_found:
        vectors = torch.linalg.eigh(matrix.double()).eigenvectors.to(matrix.dtype)
    return vectors.flip(1).contiguous()


def rotation_of(bases: Sequence[Tensor | None], sides: Sequence[int]) -> Rotation | None:
    """Q_L = Q₁ and Q_R = Q₂ ⊗ Q₃ ⊗ … (Q₁ of a vector) for bases of these sides; None where all are the identity."""
    left, rest = (bases[0], bases[1:]) if len(bases) > 1 else (None, bases)
    kind = next((basis for basis in rest if basis is not None), None)
    if kind is None:
        return None if left is None else Rotation(left, None)
    whole = (
        torch.eye(side, dtype=kind.dtype, device=kind.device) if basis is None else basis
        for basis, side in zip(rest, sides[-len(rest) :], strict=True)
    )
    return Rotation(left, reduce(torch.kron, whole))


def weight_diagonal(stored: Tensor, bases: Sequence[Tensor | None]) -> Tensor:
    """The diagonal of V in the space of the weights, v ×₁ Q₁² ×₂ Q₂² …, squared entry by entry; not bias-corrected."""
    for basis in bases:
        # Each turn takes the first dimension and puts it last.
        stored = stored.movedim(0, -1)
        if basis is not None:
            stored = stored @ basis.to(stored.dtype).square().mT
    return stored


def two_sided(state: State, group: State, shape: torch.Size) -> Factors:
    """A left and a right basis of the matrix (first dimension, all others), as bayesadam itself stores them."""
    stored: Tensor = state[next((key for key in (MOMENT_KEY, ROTATED_KEY) if key in state), PLAIN_KEY)]
    if stored.shape != shape:
        raise MatchError(f"a statistic has shape {tuple(stored.shape)}: the state belongs to another model")
    if len(shape) < 2:
        return stored, [state.get(RIGHT_KEY)] * len(shape)
    return stored.flatten(1), [state.get(LEFT_KEY), state.get(RIGHT_KEY)]


def listed(state: State, group: State, shape: torch.Size) -> Factors:
    """`exp_avg_sq` of the parameter's shape, and `Q`, a list with a matrix or an empty list for each dimension."""
    # The authors' layout has both; other SOAPs with a Q count and correct otherwise.
    for entry in ("GG", "precondition_frequency"):
        if entry not in state:
            raise KeyError(entry)
    if group["merge_dims"] and len(shape) > 2:
        raise MatchError(f"dimensions of {tuple(shape)} may have been merged in two ways: train with merge_dims=False")
    moment: Tensor = state[PLAIN_KEY]
    if moment.shape != shape:
        raise MatchError(f"a statistic has shape {tuple(moment.shape)}: the state belongs to another model")
    # An empty list or None is the identity.
    bases = [_wide(basis) if isinstance(basis, Tensor) and basis.numel() else None for basis in state["Q"]]
    if all(basis is None for basis in bases):
        return _wide(moment), [None] * len(shape)
    sides = [None if basis is None else tuple(basis.shape) for basis in bases]
    fits = [have in (None, (side, side)) for have, side in zip(sides, shape, strict=False)]
    if len(sides) != len(shape) or not all(fits):
        raise MatchError(
            f"the bases of a parameter of shape {tuple(shape)} have shapes {sides}: the state is another model's, or "
            "its dimensions were merged; train with merge_dims=False"
        )
    # A bfloat16 basis is orthogonal to its own precision alone.
    precisions = [torch.finfo(basis.dtype).eps for basis in state["Q"] if isinstance(basis, Tensor)]
    tolerance = max(1e-2, 4 * max(precisions))
    if not all(basis is None or is_orthonormal(basis, tolerance) for basis in bases):
        raise MatchError(
            f"a basis of a parameter of shape {tuple(shape)} is not orthogonal: the file is damaged, or training met a "
            "non-finite gradient"
        )
    return _wide(moment), bases


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
