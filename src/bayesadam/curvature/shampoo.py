"""Shampoo's statistics as a Kronecker-factored second moment."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from bayesadam.curvature.reader import Group, State, StateReader
from bayesadam.curvature.rotated import Factors, RotatedReader
from bayesadam.errors import StateError

_MOST_DIMENSIONS = 8
# Sums of the same squares, added up in another order.
_TRACE_TOLERANCE = 1e-3


def kronecker_factors(state: State, group: Group, shape: torch.Size) -> list[Tensor]:
    r"""The factors of V, one a dimension, V = M_1 ⊗ M_2 ⊗ … for weights in row-major order.

    Shampoo keeps :math:`S_k = \epsilon I + \sum_t G_t^{(k)} G_t^{(k)\top}`, with :math:`G^{(k)}` the gradient unfolded along
    dimension k; for a matrix L and R. All of them have the same trace, :math:`\tau = \sum_t \lVert G_t \rVert^2`. Where the
    gradient's covariance is a Kronecker product, it is

    .. math::
        V = \frac{(S_1 - \epsilon I) \otimes (S_2 - \epsilon I) \otimes \cdots}{t\, \tau^{d - 1}}

    in expectation, so for a matrix :math:`v_{ij} = \lambda_i \mu_j / (t\, \tau)` with the eigenvalues of L and of R; for a
    vector it is :math:`\frac 1 t \sum_t g_t g_t^\top`, as it is. The trace of V is the mean of ‖G‖² always.

    Raises:
        StateError: the statistics are of something else than the gradients, or of another parameter.
    """
    if not 1 <= len(shape) <= _MOST_DIMENSIONS:
        raise StateError(f"Shampoo keeps no statistic for a parameter of shape {tuple(shape)}: use Adam for it")
    if float(group["momentum"]) != 0.0:
        raise StateError(
            f"with momentum={group['momentum']} Shampoo mixes its last steps into the gradients before it sums their squares: "
            "train with momentum=0"
        )
    start, steps = float(group["matrix_eps"]), float(group["step"])
    factors = []
    for dim, side in enumerate(shape):
        stored: Tensor = state[f"pre_cond_{dim}"]
        if stored.shape != (side, side):
            raise StateError(
                f"dimension {dim} of a parameter of shape {tuple(shape)} has a statistic of shape {tuple(stored.shape)}: the "
                "state belongs to another model"
            )
        wide = stored.detach().to(torch.promote_types(stored.dtype, torch.float32), copy=True)
        wide.diagonal().sub_(start).clamp_(min=0.0)
        factors.append(wide)
    traces = torch.stack([factor.trace() for factor in factors])
    total = float(traces[0])
    if not float((traces - total).abs().max()) <= _TRACE_TOLERANCE * total:
        raise StateError(
            f"Shampoo's statistics of a parameter of shape {tuple(shape)} have traces {traces.tolist()}, which are equal "
            "where all are of the gradients themselves: before version 4.1 pytorch_optimizer took those after the first of "
            "gradients that it had preconditioned already, which are no second moments; upgrade it and train again, or train "
            "with SOAP"
        )
    if total > 0:
        factors[0] /= steps
        for factor in factors[1:]:
            factor /= total
    return factors


def _diagonal(state: State, group: Group, shape: torch.Size) -> Tensor:
    return _product([factor.diagonal() for factor in kronecker_factors(state, group, shape)])


def _factors(state: State, group: Group, shape: torch.Size) -> Factors:
    found = [torch.linalg.eigh(factor) for factor in kronecker_factors(state, group, shape)]
    # Rounding can leave an eigenvalue slightly below zero.
    values = _product([pair.eigenvalues.flip(0).clamp(min=0.0) for pair in found])
    return values, [pair.eigenvectors.flip(1).contiguous() for pair in found]


def _product(vectors: list[Tensor]) -> Tensor:
    """x₁ ⊗ x₂ ⊗ …, with a dimension for each."""
    return reduce(lambda product, vector: product.unsqueeze(-1) * vector, vectors)


_TRAIN_WITH = "train with a SOAP, which keeps a second moment in the same bases, or with Adam"

SHAMPOO_READERS = (
    RotatedReader(
        "shampoo",
        ("pytorch_optimizer.optimizer.shampoo.Shampoo",),
        key="pre_cond_0",
        step="group",
        coupled_decay=True,
        decoupled_flag="weight_decouple",
        mark="matrix_eps",
        read=_diagonal,
        factors=_factors,
        bases=tuple(f"{stem}_{dim}" for stem in ("pre_cond", "inv_pre_cond") for dim in range(_MOST_DIMENSIONS)),
        note="A mean over all steps, as Adagrad's. The Kronecker product that L and R give, not a moment of its own.",
    ),
    StateReader(
        "scalable-shampoo",
        ("pytorch_optimizer.optimizer.shampoo.ScalableShampoo",),
        statistic="none",
        advice=f"its statistics are of blocks, inside objects that no state dict should hold; {_TRAIN_WITH}",
    ),
    StateReader(
        "torch-optimizer-shampoo",
        ("torch_optimizer.shampoo.Shampoo",),
        statistic="none",
        advice="its statistics, after that of the first dimension, are of gradients that it has preconditioned already; "
        f"{_TRAIN_WITH}",
    ),
)
