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
class Rotated:
    r"""v̂ of one parameter in the space of its eigenbases.

    With vec stacking the columns of the m×n matrix W, the covariance that goes with it is

    .. math::
        \operatorname{Cov} \operatorname{vec}(W)
            = (Q_R \otimes Q_L) \operatorname{diag} \frac{1}{w\, \hat v^p + \delta}\, (Q_R \otimes Q_L)^\top

    which is never formed: `out_of` of ε (w v̂ᵖ + δ)^(−1/2) is a draw from it, and `diagonal` of 1/(w v̂ᵖ + δ) has its
    diagonal.

    The tensors are the optimiser's as they were when this was read: it replaces its bases, it does not write to them.

    Attributes:
        left: Q_L, m×m with the eigenvectors as columns; None is the identity.
        right: Q_R, n×n; None is the identity.
        second_moment: v̂, bias-corrected: m×n, entry (i, j) of left eigenvector i and right eigenvector j. A parameter of
            less than two dimensions has no bases, and v̂ has its shape.
        shape: the parameter's own: (m, …), where all dimensions but the first make up n.
    """

    left: Tensor | None
    right: Tensor | None
    second_moment: Tensor
    shape: torch.Size

    def into(self, weights: Tensor) -> Tensor:
        """Q_Lᵀ W Q_R of something in the parameter's shape, as a matrix like `second_moment`."""
        return into_basis(weights.reshape(self.second_moment.shape), self.left, self.right)

    def out_of(self, coordinates: Tensor) -> Tensor:
        """Q_L X Q_Rᵀ, in the parameter's shape."""
        return out_of_basis(coordinates, self.left, self.right).reshape(self.shape)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of (Q_R ⊗ Q_L) diag(values) (Q_R ⊗ Q_L)ᵀ, one number a weight: Q_L² values (Q_R²)ᵀ, by entries."""
        left, right = (None if basis is None else basis.square() for basis in (self.left, self.right))
        return out_of_basis(values, left, right).reshape(self.shape)


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
    matrix = estimate if estimate.dim() < 2 else estimate.flatten(1)
    return Rotated(state.get(LEFT_KEY), state.get(RIGHT_KEY), matrix, stored.shape)


def _stored(state: State) -> Tensor:
    stored: Tensor = state[ROTATED_KEY if ROTATED_KEY in state else PLAIN_KEY]
    return stored


def _unrotated(state: State, group: Group, shape: torch.Size) -> Tensor:
    """The diagonal of V in the space of the weights, not bias-corrected: what a diagonal posterior can take from SOAP."""
    stored = _stored(state)
    matrix = stored if stored.dim() < 2 else stored.flatten(1)
    return Rotated(state.get(LEFT_KEY), state.get(RIGHT_KEY), matrix, stored.shape).diagonal(matrix)


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
