r"""A second moment that is diagonal in a rotated space: what SOAP keeps, and what a Kronecker-factored posterior needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.curvature.reader import Group, State, StateReader, second_moment
from bayesadam.errors import StateError

# Adam's names where nothing is rotated. Names of their own elsewhere, so that no reader of Adam takes them for weights'.
PLAIN_KEY = "exp_avg_sq"
ROTATED_KEY = "rotated_exp_avg_sq"
LEFT_KEY = "left_basis"
RIGHT_KEY = "right_basis"


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
        rotation: Q_L and Q_R; a parameter of less than two dimensions has neither.
        second_moment: v̂, bias-corrected, of the parameter's shape: entry (i, j) of the matrix belongs to left eigenvector
            i and right eigenvector j.
    """

    rotation: Rotation
    second_moment: Tensor


def soap_statistics(state: State, group: Group) -> Rotated:
    """What `SOAP` knows of one parameter; `state` and `group` of a live optimiser or out of its state dict.

    >>> from bayesadam.optim.soap import SOAP
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = SOAP(model.parameters())
    >>> for _ in range(2):
    ...     model(torch.randn(8, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> soap_statistics(optimizer.state[model.weight], optimizer.param_groups[0]).second_moment.shape
    torch.Size([2, 3])

    Raises:
        StateError: the state is not SOAP's, or has no gradient in it yet.
    """
    try:
        steps, stored = float(state["step"]), _stored(state)
        if steps < 1:
            raise StateError(
                f"SOAP has taken {steps:g} steps for a parameter of shape {tuple(stored.shape)}, whose first gradient only "
                "finds the bases: train it for at least one step more"
            )
        estimate = second_moment(stored.detach().clone(), SOAP_READER, state, group)
    except KeyError as missing:
        raise StateError(
            f"not the state of SOAP: there is no {missing}; the state has {sorted(map(str, state))}, its group "
            f"{sorted(map(str, group))}"
        ) from None
    return Rotated(_rotation(state), estimate)


def _stored(state: State) -> Tensor:
    stored: Tensor = state[ROTATED_KEY if ROTATED_KEY in state else PLAIN_KEY]
    return stored


def _unrotated(state: State, group: Group, shape: torch.Size) -> Tensor:
    """The diagonal of V in the space of the weights, not bias-corrected: what a diagonal posterior can take from SOAP."""
    return _rotation(state).diagonal(_stored(state))


def _rotation(state: State) -> Rotation:
    return Rotation(state.get(LEFT_KEY), state.get(RIGHT_KEY))


SOAP_READER = StateReader(
    "soap",
    ("bayesadam.optim.soap.SOAP",),
    key=f"{PLAIN_KEY} or {ROTATED_KEY}",
    decay=("betas", 1),
    bias_correction=True,
    mark="precondition_every",
    read=_unrotated,
    note="The diagonal of a matrix that is diagonal in rotated coordinates; a Kronecker-factored posterior keeps all of it.",
)
