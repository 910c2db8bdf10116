r"""Second moments that are diagonal in a rotated space: of SOAP, Shampoo and Kronecker-factored posteriors.

All SOAPs store V ← β₂ V + (1−β₂) G'², G' = G ×₁ Q₁ᵀ ×₂ Q₂ᵀ …, with one orthogonal Q a dimension. Entry (i, j, …) of V
belongs to column i of Q₁, column j of Q₂, and so on; the first gradient only finds the bases. The curvature of a weight
seen as the matrix (first dimension, all others) is

    V = (Q_R ⊗ Q_L) diag(v) (Q_R ⊗ Q_L)ᵀ,   Q_L = Q₁,   Q_R = Q₂ ⊗ Q₃ ⊗ …

Packages differ in where V, Q and the count of steps are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import StateError
from bayesadam.readers.state import Group, State, StateReader, outline, second_moment, working_dtype

# Adam's name where nothing is rotated. Other names elsewhere, so that no reader of Adam mistakes them for its own.
PLAIN_KEY, ROTATED_KEY, LEFT_KEY, RIGHT_KEY = "exp_avg_sq", "rotated_exp_avg_sq", "left_basis", "right_basis"
# Those of a saved posterior: v̂ itself, free of bias.
MOMENT_KEY, ROTATED_MOMENT_KEY, BETA_KEY = "second_moment", "rotated_second_moment", "beta2"
PLAIN_MARK, ROTATED_MARK = "saved_posterior", "saved_rotated_posterior"
# The names of bases in optimisers' states, and of the statistics that these are the eigenvectors of.
_BASIS_NAMES = re.compile(
    r"((q|gg|l|r)(_?[lr])?|.*(basis|bases|eigen|ortho|proj|precond_|pre_cond_).*)([._]?\d+)?", re.I
)
# heavyball names an entry after the function that keeps it and its index in the chain.
_HEAVYBALL_MOMENT, _HEAVYBALL_BASES = "scale_by_soap_exp_avg_sq_", "scale_by_soap_Q_"
_MOST_DIMENSIONS = 8

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
        matrix = coordinates.flatten(1 - dims) if dims > 2 else coordinates
        matrix = matrix if self.left is None else self.left @ matrix
        return (matrix if self.right is None else matrix @ self.right.mT).reshape(coordinates.shape)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of (Q_R ⊗ Q_L) diag(values) (Q_R ⊗ Q_L)ᵀ: Q_L² values (Q_R²)ᵀ, squared entry by entry."""
        squared = (None if basis is None else basis.square() for basis in (self.left, self.right))
        return Rotation(*squared).out_of(values, values.dim())

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Rotation:
        """The same bases on another device or in another type."""
        return Rotation(*(basis if basis is None else basis.to(device, dtype) for basis in (self.left, self.right)))


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


@dataclass(frozen=True, eq=False)
class Rotated:
    r"""v̂ of one parameter in the space of its eigenbases.

    With vec stacking the columns of the m×n matrix W, the covariance that goes with it is

    .. math::
        \operatorname{Cov} \operatorname{vec}(W)
            = (Q_R \otimes Q_L) \operatorname{diag} \frac{1}{w\, \hat v^p + \delta}\, (Q_R \otimes Q_L)^\top

    which is never formed. Entry (i, j) of `second_moment`, of the parameter's shape, belongs to left eigenvector i and
    right eigenvector j.
    """

    rotation: Rotation
    second_moment: Tensor


@dataclass(frozen=True)
class RotatedReader(StateReader):
    """A reader of a second moment that is stored in the eigenbases of each weight.

    Without a `read` of its own, the diagonal in the space of the weights comes from `factors`.

    Attributes:
        factors: a function (state, group, parameter shape) → (s, one basis a dimension of s), s as the optimiser
            stores it, in the bases' coordinates; None is the identity.
        idle_steps: the steps that are counted but leave no gradient in s.
        counter: the entry that counts, where it is not `step`.
    """

    factors: Callable[[State, Group, torch.Size], Factors] | None = None
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
        """v̂ in its bases, Q_L = Q₁ and Q_R = Q₂ ⊗ Q₃ ⊗ … (Q₁ of a vector); None for a parameter that is not rotated."""
        stored, bases = (None, ()) if self.factors is None else self.factors(state, group, shape)
        if stored is None or all(basis is None for basis in bases):
            return None
        moment = second_moment(stored.detach().clone().reshape(shape), self, state, group)
        left, rest = (bases[0], bases[1:]) if len(bases) > 1 else (None, bases)
        kind = next((basis for basis in rest if basis is not None), None)
        if kind is None:
            return Rotated(Rotation(left, None), moment)
        whole = (
            torch.eye(side, dtype=kind.dtype, device=kind.device) if basis is None else basis
            for basis, side in zip(rest, stored.shape[-len(rest) :], strict=True)
        )
        return Rotated(Rotation(left, reduce(torch.kron, whole)), moment)


def _weight_diagonal(factors: Callable[..., Factors], state: State, group: Group, shape: torch.Size) -> Tensor:
    """The diagonal of V in the space of the weights, v ×₁ Q₁² ×₂ Q₂² …, squared entry by entry; not bias-corrected."""
    moment, bases = factors(state, group, shape)
    for basis in bases:
        # Each turn takes the first dimension and puts it last.
        moment = moment.movedim(0, -1)
        if basis is not None:
            moment = moment @ basis.to(moment.dtype).square().mT
    return moment.reshape(shape)


def unknown_bases(reader: StateReader, state: State, shape: torch.Size) -> list[str]:
    """The entries of a state that look like bases and that its reader knows nothing of.

    A second moment stored with bases is in their coordinates: read as the weights' own, every number in it is wrong.
    A `read` function of the user's own is trusted.
    """
    if reader.statistic in ("identity", "none") or (reader.read is not None and not isinstance(reader, RotatedReader)):
        return []
    held = {key: value for key, value in outline(state).items() if isinstance(key, str) and key not in reader.bases}
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


def _require_shape(moment: Tensor, fits: bool, shape: Sequence[int]) -> None:
    if not fits:
        raise StateError(
            f"the statistic of a parameter of shape {tuple(shape)} has shape {tuple(moment.shape)}: the state belongs "
            "to another model"
        )


def _two_sided(plain: str, rotated: str, state: State, group: Group, shape: torch.Size) -> Factors:
    """A left and a right basis of the matrix (first dimension, all others), as bayesadam itself stores them."""
    stored: Tensor = state[rotated if rotated in state else plain]
    _require_shape(stored, stored.shape == shape, shape)
    if len(shape) < 2:
        return stored, [state.get(RIGHT_KEY)] * len(shape)
    return stored.flatten(1), [state.get(LEFT_KEY), state.get(RIGHT_KEY)]


def _listed(state: State, group: Group, shape: torch.Size) -> Factors:
    """`exp_avg_sq` of the parameter's shape, and `Q`, a list with a matrix or an empty list for each dimension."""
    # The authors' layout has both; other SOAPs with a Q count and correct otherwise.
    for entry in ("GG", "precondition_frequency"):
        if entry not in state:
            raise KeyError(entry)
    if group["merge_dims"] and len(shape) > 2:
        raise StateError(
            f"SOAP was trained with merge_dims=True, and a parameter of shape {tuple(shape)} may have been merged in "
            "two ways (data_format is not in the state): train with merge_dims=False"
        )
    moment: Tensor = state[PLAIN_KEY]
    _require_shape(moment, moment.shape == shape, shape)
    return _wide(moment), _checked_bases(state["Q"], shape)


def _bucketed(state: State, group: Group, shape: torch.Size) -> Factors:
    """heavyball's: dimensions after the first are merged; the second moment and the bases have a leading 1."""
    views = [view for view in state.values() if isinstance(view, Mapping)]
    if len(views) != 1 or group["split"] or group["ecc"] or group["param_ecc"]:
        raise StateError(
            f"heavyball's SOAP keeps a parameter of shape {tuple(shape)} in {len(views)} parts, or compressed: train "
            "with split=False, ecc=None and param_ecc=None"
        )
    found: list[Any] = []
    for stem in (_HEAVYBALL_MOMENT, _HEAVYBALL_BASES):
        keys = [key for key in map(str, views[0]) if key.startswith(stem) and key[len(stem) :].isdigit()]
        if len(keys) != 1:
            raise StateError(
                f"heavyball's state has {sorted(map(str, views[0]))}, and {len(keys)} of them are called {stem}0, "
                f"{stem}1 …: only its SOAP is read, not its relatives (KLSOAP, SOLP, …) or chains of your own"
            )
        found.append(views[0][keys[0]])
    moment, bases = found
    _require_shape(moment, moment.shape[:2] == (1, *shape[:1]) and moment.numel() == shape.numel(), shape)
    inner = [None if basis is None else basis.squeeze(0) for basis in bases]
    return _wide(moment.squeeze(0)), _checked_bases(inner, moment.shape[1:])


def _checked_bases(found: Sequence[Any], shape: Sequence[int]) -> list[Tensor | None]:
    """One basis a dimension, each orthogonal and of that side; an empty list or None is the identity."""
    bases = [basis if isinstance(basis, Tensor) and basis.numel() else None for basis in found]
    if all(basis is None for basis in bases):
        return [None] * len(shape)
    fits = [basis is None or basis.shape == (side, side) for basis, side in zip(bases, shape, strict=False)]
    if len(bases) != len(shape) or not all(fits):
        sides = [None if basis is None else tuple(basis.shape) for basis in bases]
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


def _wide(tensor: Tensor, *, copy: bool = False) -> Tensor:
    return tensor.detach().to(working_dtype(tensor.dtype), copy=copy)


def _shampoo_factors(state: State, group: Group, shape: torch.Size) -> Factors:
    r"""The eigenvalues and eigenvectors of V = M_1 ⊗ M_2 ⊗ …, one factor a dimension, weights in row-major order.

    Shampoo keeps :math:`S_k = \epsilon I + \sum_t G_t^{(k)} G_t^{(k)\top}`, with :math:`G^{(k)}` the gradient unfolded
    along dimension k; for a matrix L and R. All have the same trace, :math:`\tau = \sum_t \lVert G_t \rVert^2`. Where
    the gradient's covariance is a Kronecker product, it is

    .. math::
        V = \frac{(S_1 - \epsilon I) \otimes (S_2 - \epsilon I) \otimes \cdots}{t\, \tau^{d - 1}}

    in expectation, so for a matrix :math:`v_{ij} = \lambda_i \mu_j / (t\, \tau)` with the eigenvalues of L and of R;
    for a vector it is :math:`\frac 1 t \sum_t g_t g_t^\top`. The trace of V is always the mean of ‖G‖².
    """
    if not 1 <= len(shape) <= _MOST_DIMENSIONS:
        raise StateError(f"Shampoo keeps no statistic for a parameter of shape {tuple(shape)}: use Adam for it")
    if float(group["momentum"]) != 0.0:
        mixed = f"with momentum={group['momentum']} Shampoo's statistics are of mixed gradients"
        raise StateError(f"{mixed}: train with momentum=0")
    start, steps = float(group["matrix_eps"]), float(group["step"])
    factors = []
    for dim, side in enumerate(shape):
        stored: Tensor = state[f"pre_cond_{dim}"]
        _require_shape(stored, stored.shape == (side, side), shape)
        wide = _wide(stored, copy=True)
        wide.diagonal().sub_(start).clamp_(min=0.0)
        factors.append(wide)
    traces = torch.stack([factor.trace() for factor in factors])
    total = float(traces[0])
    # Sums of the same squares, added up in another order; NaN is not within any tolerance.
    if not float((traces - total).abs().max()) <= 1e-3 * total:
        raise StateError(
            f"Shampoo's statistics of a parameter of shape {tuple(shape)} have traces {traces.tolist()}, which differ: "
            "pytorch_optimizer before 4.1 summed preconditioned gradients; upgrade it and train again, or use SOAP"
        )
    if total > 0:
        factors[0] /= steps
        for factor in factors[1:]:
            factor /= total
    found = [torch.linalg.eigh(factor) for factor in factors]
    # Rounding can leave an eigenvalue slightly below zero.
    values = [pair.eigenvalues.flip(0).clamp(min=0.0) for pair in found]
    product = reduce(lambda product, vector: product.unsqueeze(-1) * vector, values)
    return product, [pair.eigenvectors.flip(1).contiguous() for pair in found]


_SOAP: dict[str, Any] = {"decay": ("betas", 1), "bias_correction": True}
_REFERENCE: dict[str, Any] = {**_SOAP, "key": PLAIN_KEY, "factors": _listed, "bases": ("Q", "GG")}
_TRAIN_WITH = "train with a SOAP, which keeps a second moment in the same bases, or with Adam"

ROTATED_READERS = (
    RotatedReader(
        "soap",
        ("bayesadam.optim.soap.SOAP",),
        key=f"{PLAIN_KEY} or {ROTATED_KEY}",
        **_SOAP,
        mark="precondition_every",
        factors=partial(_two_sided, PLAIN_KEY, ROTATED_KEY),
        bases=("left", "right", LEFT_KEY, RIGHT_KEY),
        note="The SOAP of bayesadam 0.2: saved states are read, the optimiser itself is gone.",
    ),
    RotatedReader(
        "soap-reference",
        ("soap.SOAP",),
        **_REFERENCE,
        mark="max_precond_dim",
        note="The soap.py of SOAP's authors, and copies of it. Its count leaves out the first gradient, as V does.",
    ),
    RotatedReader(
        "soap-pytorch-optimizer",
        ("pytorch_optimizer.optimizer.soap.SOAP",),
        **_REFERENCE,
        mark="max_precondition_dim",
        step="group",
        idle_steps=1,
        note="One count for all parameters of a group: v of one that missed steps is underestimated.",
    ),
    RotatedReader(
        "soap-heavyball",
        ("heavyball.SOAP",),
        key=_HEAVYBALL_MOMENT,
        step="group",
        factors=_bucketed,
        idle_steps=1,
        counter="step_count",
        note="Its average is free of bias: β₂ grows with the steps. Only SOAP, not its relatives (KLSOAP, SOLP, …).",
    ),
    RotatedReader(
        "shampoo",
        ("pytorch_optimizer.optimizer.shampoo.Shampoo",),
        key="pre_cond_0",
        step="group",
        coupled_decay=True,
        decoupled_flag="weight_decouple",
        mark="matrix_eps",
        factors=_shampoo_factors,
        bases=tuple(f"{stem}_{dim}" for stem in ("pre_cond", "inv_pre_cond") for dim in range(_MOST_DIMENSIONS)),
        note="A mean over all steps, as Adagrad's. The Kronecker product of L and R, not a moment of its own.",
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
        advice="its statistics, after that of the first dimension, are of gradients that it has preconditioned "
        f"already; {_TRAIN_WITH}",
    ),
    StateReader(
        "published",
        (),
        key=MOMENT_KEY,
        decay=(BETA_KEY, None),
        mark=PLAIN_MARK,
        note="The second moments of a saved posterior.",
    ),
    RotatedReader(
        "published-kronecker",
        (),
        key=f"{MOMENT_KEY} or {ROTATED_MOMENT_KEY}",
        decay=(BETA_KEY, None),
        mark=ROTATED_MARK,
        factors=partial(_two_sided, MOMENT_KEY, ROTATED_MOMENT_KEY),
        bases=(LEFT_KEY, RIGHT_KEY),
        note="The second moments of a saved Kronecker-factored posterior; structure='diagonal' has their diagonal.",
    ),
)
