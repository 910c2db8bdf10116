"""The second moments of other packages' SOAPs, Adam's in the eigenbases of every dimension of a weight, and of Shampoo.

All SOAPs store V with V ← β₂ V + (1−β₂) G'², G' = G ×₁ Q₁ᵀ ×₂ Q₂ᵀ …, one orthogonal Q a dimension, eigenvectors as columns, and
let V's entries go with the columns of Q when a basis is refreshed. Entry (i, j, …) of V thus belongs to column i of Q₁, column j
of Q₂, and so on, and the curvature of a weight seen as the matrix (first dimension, all others) is

    V = (Q_R ⊗ Q_L) diag(v) (Q_R ⊗ Q_L)ᵀ,   Q_L = Q₁,   Q_R = Q₂ ⊗ Q₃ ⊗ …

The first gradient only finds the bases. What differs is where V, Q and the count of steps are.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import StateError
from bayesadam.readers.reader import Group, State, StateReader
from bayesadam.readers.rotated import Factors, RotatedReader, is_orthonormal, require_shape

_MOMENT, _BASES, _STATISTICS = "exp_avg_sq", "Q", "GG"
# heavyball names an entry after the function that keeps it and its place in the chain.
_HEAVYBALL_MOMENT, _HEAVYBALL_BASES = "scale_by_soap_exp_avg_sq_", "scale_by_soap_Q_"
_MOST_DIMENSIONS = 8
# Sums of the same squares, added up in another order.
_TRACE_TOLERANCE = 1e-3


def checked_bases(found: Sequence[Any], shape: Sequence[int]) -> list[Tensor | None]:
    """One basis a dimension, each orthogonal and of that side; an empty list or None is the identity.

    Raises:
        StateError: there are more or fewer, or one is not a basis of its side.
    """
    bases = [basis if isinstance(basis, Tensor) and basis.numel() else None for basis in found]
    if all(basis is None for basis in bases):
        return [None] * len(shape)
    sides = [None if basis is None else tuple(basis.shape) for basis in bases]
    fits = [basis is None or basis.shape == (side, side) for basis, side in zip(bases, shape, strict=False)]
    if len(bases) != len(shape) or not all(fits):
        raise StateError(
            f"the bases of a parameter whose second moment is {tuple(shape)} have shapes {sides}, one a dimension was "
            "expected: the state belongs to another model, or its dimensions were merged; train with merge_dims=False"
        )
    for basis in bases:
        if basis is not None and not is_orthonormal(_wide(basis), max(1e-2, 4 * torch.finfo(basis.dtype).eps)):
            raise StateError(
                f"a basis of shape {tuple(basis.shape)}, of a parameter whose second moment is {tuple(shape)}, is not "
                "orthogonal: the file is damaged, or training met a non-finite gradient; use a checkpoint before that"
            )
    # Copies: heavyball writes to its bases.
    return [None if basis is None else _wide(basis, copy=True) for basis in bases]


def _listed(state: State, group: Group, shape: torch.Size) -> Factors:
    """`exp_avg_sq` of the parameter's shape, and `Q`, a list with a matrix or an empty list for each dimension."""
    # The authors' layout has both; other SOAPs with a Q count and correct otherwise.
    for entry in (_STATISTICS, "precondition_frequency"):
        if entry not in state:
            raise KeyError(entry)
    if group["merge_dims"] and len(shape) > 2:
        raise StateError(
            f"SOAP was trained with merge_dims=True, and a parameter of shape {tuple(shape)} may have been merged in two "
            "ways (data_format is not in the state): train with merge_dims=False"
        )
    moment: Tensor = state[_MOMENT]
    require_shape(moment, moment.shape == shape, shape)
    return _wide(moment), checked_bases(state[_BASES], shape)


def _bucketed(state: State, group: Group, shape: torch.Size) -> Factors:
    """One view of the parameter, its dimensions after the first merged; a leading 1 before the second moment and the bases."""
    views = [view for view in state.values() if isinstance(view, Mapping)]
    if len(views) != 1 or group["split"] or group["ecc"] or group["param_ecc"]:
        raise StateError(
            f"heavyball's SOAP keeps a parameter of shape {tuple(shape)} in {len(views)} parts, or compressed: train with "
            "split=False, ecc=None and param_ecc=None"
        )
    moment, bases = (_only(views[0], stem) for stem in (_HEAVYBALL_MOMENT, _HEAVYBALL_BASES))
    fits = moment.shape[:2] == (1, *shape[:1]) and moment.numel() == shape.numel()
    require_shape(moment, fits, shape)
    inner = [None if basis is None else basis.squeeze(0) for basis in bases]
    return _wide(moment.squeeze(0)), checked_bases(inner, moment.shape[1:])


def _only(view: State, stem: str) -> Any:
    found = [key for key in view if str(key).startswith(stem) and str(key)[len(stem) :].isdigit()]
    if len(found) != 1:
        raise StateError(
            f"heavyball's state has {sorted(map(str, view))}, and {len(found)} of them are called {stem}0, {stem}1 …: it is "
            "read of its SOAP alone, not of its relatives (KLSOAP, SOLP, …) or of chains of your own"
        )
    return view[found[0]]


def _wide(tensor: Tensor, *, copy: bool = False) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=copy)


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
        wide = _wide(stored, copy=True)
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


def _listed_reader(name: str, source: str, mark: str, **fields: Any) -> RotatedReader:
    """An optimiser with the layout of the authors' soap.py."""
    layout: dict[str, Any] = {"key": _MOMENT, "factors": _listed, "bases": (_BASES, _STATISTICS), "mark": mark}
    return RotatedReader(name, (source,), decay=("betas", 1), bias_correction=True, **layout, **fields)


_TRAIN_WITH = "train with a SOAP, which keeps a second moment in the same bases, or with Adam"

PACKAGE_READERS = (
    _listed_reader(
        "soap-reference",
        "soap.SOAP",
        "max_precond_dim",
        note="The soap.py of SOAP's authors, and copies of it. Its count leaves out the first gradient, as V does.",
    ),
    _listed_reader(
        "soap-pytorch-optimizer",
        "pytorch_optimizer.optimizer.soap.SOAP",
        "max_precondition_dim",
        step="group",
        idle_steps=1,
        note="One count for all parameters of a group: v of one that missed steps is taken for smaller than it is.",
    ),
    RotatedReader(
        "soap-heavyball",
        ("heavyball.SOAP",),
        key=_HEAVYBALL_MOMENT,
        step="group",
        factors=_bucketed,
        idle_steps=1,
        counter="step_count",
        note="Its average is free of bias: β₂ grows with the steps. SOAP itself alone, not its relatives (KLSOAP, SOLP, …).",
    ),
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
