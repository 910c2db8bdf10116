r"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbases of Shampoo, which gives a Kronecker-factored V."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam.errors import SettingError, StateError
from bayesadam.optim._checked import CheckedOptimizer, Group, loss_of, not_negative, two_betas
from bayesadam.optim._orthonormal import (
    HAS_HALF_KERNELS,
    add_gram,
    add_product,
    half_chain,
    half_product,
    halved,
    orthonormal_columns,
    split_product,
)
from bayesadam.readers import eigenbasis, reader_named, working_dtype
from bayesadam.readers.rotated import LEFT_KEY, PLAIN_KEY, RIGHT_KEY, ROTATED_KEY


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


_PLAIN_MOMENTUM = "exp_avg"
_ROTATED_MOMENTUM = "rotated_exp_avg"
# Where L and R are, and their bases.
_SIDES = (("left", LEFT_KEY), ("right", RIGHT_KEY))
# The most numbers in one stack of equal matrices: small ones are multiplied together, large ones are no faster for it.
_STACK, _HALF_STACK, _SPLIT_STACK = 2**20, 2**27, 2**24
# The most numbers in the bases that are refreshed side by side.
_LOT = 2**29
# With products of float16 the bases are those of L + δ I, δ this share of its largest eigenvalue. Directions below would be
# rounding errors, new ones at every refresh; so they stay.
_FLOOR = 1e-6
# No step is longer than this many learning rates with products of float16, which ends at 65,504.
_LONGEST = 1000.0

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Item:
    """A parameter with its gradient, of the state's type, and the count of this step."""

    parameter: Tensor
    gradient: Tensor
    state: State
    steps: int


@dataclass(frozen=True, eq=False)
class _Bases:
    """Q_L and Q_R of equal matrices, (b, m, m) and (b, n, n), in float16 for products of that; None is the identity."""

    left: Tensor | None
    right: Tensor | None
    half: bool

    def into(self, matrices: Tensor) -> Tensor:
        """Q_Lᵀ X Q_R."""
        if not self.half:
            return into_basis(matrices, self.left, self.right)
        rounded, scale = halved(matrices)
        left = None if self.left is None else self.left.mT
        return half_chain([factor for factor in (left, rounded, self.right) if factor is not None]).mul_(scale)

    def out_of(self, matrices: Tensor) -> Tensor:
        """Q_L X Q_Rᵀ."""
        if not self.half:
            return out_of_basis(matrices, self.left, self.right)
        rounded, scale = halved(matrices)
        return half_chain(self.way_out(rounded)).mul_(scale)

    def way_out(self, matrices: Tensor) -> list[Tensor]:
        """The factors of Q_L X Q_Rᵀ, two or three."""
        right = None if self.right is None else self.right.mT
        return [factor for factor in (self.left, matrices, right) if factor is not None]


@dataclass(frozen=True, eq=False)
class _Stack:
    """Items of equal matrices, to be multiplied together, and whether with factors of float16."""

    items: Sequence[_Item]
    half: bool

    @property
    def steps(self) -> int:
        return self.items[0].steps

    def matrices(self, key: str) -> list[Tensor]:
        """An entry of each state as a matrix."""
        return [item.state[key].flatten(1) for item in self.items]

    def bases(self) -> _Bases:
        """Those of this moment."""
        stacked = _half_stacked if self.half else _stacked
        left, right = (stacked(self.matrices(key)) if key in self.items[0].state else None for _, key in _SIDES)
        return _Bases(left, right, self.half)


class SOAP(CheckedOptimizer):
    r"""Adam, for matrices in the eigenbases of the gradient's two covariances.

    .. math::
        &\textbf{input}: W_1 \in \mathbb R^{m \times n}, \eta\ (\text{lr}), \beta_1, \beta_2,
            \beta_s\ (\text{shampoo\_beta}), \epsilon, \lambda\ (\text{weight decay}),
            k\ (\text{precondition\_every}), s\ (\text{statistics\_every}) \\
        &L = (1 - \beta_s)\, G_0 G_0^\top, \quad R = (1 - \beta_s)\, G_0^\top G_0, \quad
            L = Q_L \Lambda_L Q_L^\top, \quad R = Q_R \Lambda_R Q_R^\top, \quad M_0 = V_0 = 0 \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad G_t = \nabla f_t(W_t), \qquad G'_t = Q_L^\top G_t\, Q_R \\
        &\quad M_t = \beta_1 M_{t-1} + (1 - \beta_1)\, G_t, \qquad M'_t = Q_L^\top M_t\, Q_R \\
        &\quad V_t = \beta_2 V_{t-1} + (1 - \beta_2)\, G'_t \odot G'_t \\
        &\quad U = \frac{M'_t / (1 - \beta_1^t)}{\sqrt{V_t / (1 - \beta_2^t)} + \epsilon}, \qquad
            W_{t+1} = (1 - \eta \lambda)\, W_t - \eta\, Q_L U Q_R^\top \\
        &\quad \textbf{if}\ s \mid t: \quad L \leftarrow \beta_s L + (1 - \beta_s)\, G_t G_t^\top, \qquad
            R \leftarrow \beta_s R + (1 - \beta_s)\, G_t^\top G_t \\
        &\quad \textbf{if}\ k \mid t: \quad \text{sort the columns of}\ Q_L\ \text{by}\ \operatorname{diag} Q_L^\top L\, Q_L,
            \text{falling, and the rows of}\ V_t\ \text{with them}; \quad Q_L \leftarrow \operatorname{qr}(L\, Q_L).Q; \\
        &\quad \phantom{\textbf{if}\ k \mid t:} \quad \text{the same for}\ Q_R, R\ \text{and the columns of}\ V_t

    The first gradient of a parameter, :math:`G_0`, only initialises its bases, as in the authors' code: there is no update
    and no weight decay, and t counts from the next. In the bases of its own singular vectors :math:`G_0` is diagonal, and
    Adam would divide the rounding errors off the diagonal by themselves. For the same reason L, R and the bases are
    updated after the step, so a gradient is never rotated by bases that were computed from it.

    M is the average of the gradients in the space of the weights, but is stored as M': between two refreshes the bases are
    constant and averaging commutes with rotating, and a refresh rotates M' with them. That is the paper's M up to
    rounding, with three rotations instead of four.

    A tensor of more than two dimensions, a convolution's weight, is the matrix (first dimension, all others). Parameters
    of one dimension or none are updated by Adam, from their first gradient. The basis of a side longer than `max_side` is
    the identity, and a matrix with two such sides is updated by Adam; with max_side=0 this is `torch.optim.AdamW`.

    V in its bases is a Kronecker-factored posterior: `Posterior.from_optimizer(..., structure="kronecker")` reads it.

    A step multiplies matrices: about 6 (m²n + mn²) operations more than Adam's, whatever the batch. It pays where batches
    are large compared with m and n, or where fewer steps are worth it. `statistics_every` above 1 saves up to a third of
    that. Matrices of equal shapes are multiplied together, and no step waits for a device but the first and those that refresh.

    With `half_products`, the default on CUDA, the factors of products are rounded to 16 bits, and sums are float32, as the
    state is: float16 for rotations, scaled by the gradient's largest entry; bfloat16 for L and R; and for a refresh pairs of
    float16 numbers, which have nearly all digits of float32, with L + δ I for L, δ = 1e-6 of L's largest eigenvalue, since
    directions below that are rounding errors. A basis that is not orthonormal then is taken from a QR decomposition in
    float32. The way of 40 steps is 0.1 to 0.5 % from that in float64 where gradients have full rank (5e-6 without). Where
    they have not, as those of a small language model, float32 has no bases of its own either: the diagonal of V was 2 %
    from float64's, in the median, with half_products and without, and held-out losses agreed in three digits. Parameters of
    float64 are multiplied in float64 whatever is asked for.

    The state of 16-bit parameters is float32, but updates below their precision are lost, as with any optimiser.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = SOAP(model.parameters(), lr=1e-2)
    >>> for x in torch.ones(3, 1, 2):
    ...     optimizer.zero_grad()
    ...     model(x).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.state[model.weight]["right_basis"].shape
    torch.Size([2, 2])

    Args:
        params: parameters or groups of them; a group may have settings of its own.
        lr: η.
        betas: (β₁, β₂).
        shampoo_beta: β_s; None takes β₂.
        eps: ε.
        weight_decay: λ, decoupled as in AdamW.
        precondition_every: k, the steps between two refreshes of the bases.
        statistics_every: s, the steps between two updates of L and R, which average over s/(1 − β_s) steps.
        max_side: the longest side that gets a basis, which takes 2 side² numbers of memory.
        maximize: maximise instead.
        half_products: whether factors are rounded to 16 bits, as above; None, where that is faster: on CUDA, from torch
            2.10. Elsewhere True gives the same roundings at no gain.
    """

    reader = reader_named("soap")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_every: int = 10,
        statistics_every: int = 1,
        max_side: int = 10_000,
        maximize: bool = False,
        half_products: bool | None = None,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        every = {"precondition_every": precondition_every, "statistics_every": statistics_every}
        more = {"shampoo_beta": shampoo_beta, "max_side": max_side, "half_products": half_products}
        super().__init__(params, {**adam, **every, **more})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients, and returns the loss; optional.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                plain, rotated = self._due(group)
                for items in _alike(plain):
                    _plain_step(items, group)
                stacks = list(_stacks(rotated, group))
                for stack in stacks:
                    _rotated_step(stack, group)
                _refresh([stack for stack in stacks if stack.steps % group["precondition_every"] == 0])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict()` was taken."""
        # States that were saved before there was a choice lack it.
        groups = [{"half_products": None, **group} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _check(self, settings: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            not_negative(name, settings[name])
        two_betas(settings["betas"])
        beta = settings["shampoo_beta"]
        if beta is not None and not 0.0 <= beta < 1.0:
            raise SettingError(f"shampoo_beta must be at least 0 and below 1, or None for betas[1], got {beta!r}")
        for name, least in (("precondition_every", 1), ("statistics_every", 1), ("max_side", 0)):
            value = settings[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not isinstance(settings["maximize"], bool):
            raise SettingError(f"maximize must be True or False, got {settings['maximize']!r}")
        if not (settings["half_products"] is None or isinstance(settings["half_products"], bool)):
            raise SettingError(f"half_products must be True, False or None, got {settings['half_products']!r}")

    def _due(self, group: Group) -> tuple[list[_Item], list[_Item]]:
        """The parameters to be updated by Adam and those to be rotated, counted; new ones are initialised."""
        plain: list[_Item] = []
        rotated: list[_Item] = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            _require_usable(parameter, parameter.grad)
            gradient = parameter.grad.to(working_dtype(parameter.dtype))
            gradient = gradient.neg() if group["maximize"] else gradient
            state: dict[str, Tensor] = self.state[parameter]
            is_new = not state
            if is_new:
                _start(state, parameter, gradient, group)
            is_rotated = ROTATED_KEY in state
            if is_new and is_rotated:
                continue
            state["step"] += 1
            (rotated if is_rotated else plain).append(_Item(parameter, gradient, state, int(state["step"])))
        return plain, rotated


def _start(state: dict[str, Tensor], parameter: Tensor, gradient: Tensor, group: Group) -> None:
    """The state before the first step, with the bases that the first gradient gives."""
    # The count stays on the host, as Adam's, so that 1 − βᵗ never waits for a device.
    state["step"] = torch.zeros(())
    moment = torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device)
    if parameter.dim() < 2 or not any(1 < side <= group["max_side"] for side in gradient.flatten(1).shape):
        state[_PLAIN_MOMENTUM], state[PLAIN_KEY] = moment, moment.clone()
        return
    state[_ROTATED_MOMENTUM], state[ROTATED_KEY] = moment, moment.clone()
    matrix = gradient.flatten(1)
    for (side, basis), rows in zip(_SIDES, (matrix, matrix.mT), strict=True):
        # The basis of a side of length 1 is 1.
        if 1 < len(rows) <= group["max_side"]:
            statistic = (rows @ rows.mT).mul_(1 - _shampoo_beta(group))
            try:
                # From the largest eigenvalue down, the order that a refresh keeps.
                vectors = eigenbasis(statistic)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                state.clear()
                raise StateError(
                    f"the first gradient of a parameter of shape {tuple(parameter.shape)} has no eigenbasis: is it "
                    f"finite? ({error})"
                ) from None
            state[side], state[basis] = statistic, vectors


def _alike(items: Iterable[_Item]) -> Iterable[list[_Item]]:
    """The items by step, type and device, and rotated ones by shape and bases."""
    kinds: dict[Hashable, list[_Item]] = defaultdict(list)
    for item in items:
        shape = item.gradient.flatten(1).shape if ROTATED_KEY in item.state else ()
        has_bases = tuple(key in item.state for _, key in _SIDES)
        kinds[item.steps, item.gradient.dtype, item.gradient.device, shape, has_bases].append(item)
    return kinds.values()


def _stacks(items: Iterable[_Item], group: Group) -> Iterator[_Stack]:
    """Rotated items in stacks of equal matrices, as many at a time as are fast and fit into memory."""
    for alike in _alike(items):
        first = alike[0]
        half = _is_half(first.gradient, group)
        largest = max(first.state[key].numel() for key in (ROTATED_KEY, LEFT_KEY, RIGHT_KEY) if key in first.state)
        most = max((_HALF_STACK if half else _STACK) // largest, 1)
        for start in range(0, len(alike), most):
            yield _Stack(alike[start : start + most], half)


def _is_half(gradient: Tensor, group: Group) -> bool:
    if gradient.dtype == torch.float64:
        return False
    asked: bool | None = group["half_products"]
    if asked and gradient.is_cuda and not HAS_HALF_KERNELS:
        raise SettingError(
            f"half_products=True needs CUDA kernels of torch 2.10 or later, this is {torch.__version__}: pass None or False"
        )
    return gradient.is_cuda and HAS_HALF_KERNELS if asked is None else asked


def _plain_step(items: Sequence[_Item], group: Group) -> None:
    """AdamW's step."""
    gradients = [item.gradient.contiguous() for item in items]
    weights = [item.parameter.to(item.gradient.dtype).contiguous() for item in items]
    momenta, squares = ([item.state[key] for item in items] for key in (_PLAIN_MOMENTUM, PLAIN_KEY))
    _adam(weights, gradients, momenta, squares, items[0].steps, group, lr=group["lr"], decay=group["weight_decay"])
    _write(items, weights)


def _rotated_step(stack: _Stack, group: Group) -> None:
    """Adam's step in the eigenbases, then the statistics."""
    gradients = _stacked([item.gradient.flatten(1) for item in stack.items])
    bases = stack.bases()
    turned = bases.into(gradients).unbind()
    direction = torch.zeros_like(gradients, memory_format=torch.contiguous_format)
    moments = stack.matrices(_ROTATED_MOMENTUM), stack.matrices(ROTATED_KEY)
    # From zero and with a rate of 1, what Adam arrives at is −U.
    _adam(direction.unbind(), turned, *moments, stack.steps, group, lr=1.0, decay=0.0)
    weights = [item.parameter.to(item.gradient.dtype).flatten(1) for item in stack.items]
    _add_out_of(bases, direction, weights, keep=1 - group["lr"] * group["weight_decay"], size=group["lr"])
    _write(stack.items, weights)
    if stack.steps % group["statistics_every"] == 0:
        _add_statistics(stack, gradients, _shampoo_beta(group))


def _adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: int,
    group: Group,
    *,
    lr: float,
    decay: float,
) -> None:
    """AdamW's step of contiguous tensors, one kernel for all."""
    beta1, beta2 = group["betas"]
    # Filled there, so that no device is waited for.
    count = torch.full((), steps, dtype=torch.float32, device=gradients[0].device)
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(momenta),
        list(squares),
        [],
        [count] * len(weights),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _add_out_of(bases: _Bases, direction: Tensor, weights: Sequence[Tensor], *, keep: float, size: float) -> None:
    """W ← keep W + size Q_L X Q_Rᵀ; the last product is added into the weights as it is formed."""
    if bases.half:
        direction = direction.half().clamp_(-_LONGEST, _LONGEST)
    *first, last = bases.way_out(direction)
    most = reduce(partial(half_product, out=torch.float16), first) if bases.half else reduce(torch.matmul, first)
    for weight, a, b in zip(weights, most, last, strict=True):
        add_product(weight, a, b, beta=keep, alpha=size)


def _add_statistics(stack: _Stack, gradients: Tensor, beta: float) -> None:
    """L ← β L + (1 − β) G Gᵀ, and R with Gᵀ."""
    rows = gradients.bfloat16() if stack.half else gradients
    for item, matrix in zip(stack.items, rows, strict=True):
        for (side, _), factor in zip(_SIDES, (matrix, matrix.mT), strict=True):
            if side in item.state:
                add_gram(item.state[side], factor, beta=beta, alpha=1 - beta)


def _write(items: Sequence[_Item], weights: Sequence[Tensor]) -> None:
    """Copy weights that are not the parameters' own memory."""
    for item, weight in zip(items, weights, strict=True):
        if weight.data_ptr() != item.parameter.data_ptr():
            item.parameter.copy_(weight.view(item.parameter.shape))


def _refresh(stacks: Sequence[_Stack]) -> None:
    """One power iteration and a QR for each basis; V is permuted with its columns, M' is rotated."""
    momenta = [stack.bases().out_of(_stacked(stack.matrices(_ROTATED_MOMENTUM))) for stack in stacks]
    places: dict[tuple[bool, torch.device], list[tuple[State, int]]] = defaultdict(list)
    for stack in stacks:
        for item in stack.items:
            sides = [(item.state, dim) for dim, (side, _) in enumerate(_SIDES) if side in item.state]
            places[stack.half, item.gradient.device] += sides
    for (half, _), sides in places.items():
        refreshed = _half_refreshed if half else _refreshed
        for (state, dim), (basis, order) in zip(sides, refreshed([_pair(*side) for side in sides]), strict=True):
            square = state[ROTATED_KEY]
            state[ROTATED_KEY] = square.flatten(1).index_select(dim, order).view(square.shape)
            state[_SIDES[dim][1]] = basis
    for stack, momentum in zip(stacks, momenta, strict=True):
        for stored, matrix in zip(stack.matrices(_ROTATED_MOMENTUM), stack.bases().into(momentum), strict=True):
            stored.copy_(matrix)


def _pair(state: State, dim: int) -> tuple[Tensor, Tensor]:
    side, basis = _SIDES[dim]
    return state[side], state[basis]


def _refreshed(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """qr(L Q).Q of each (L, Q), with the columns of Q in falling order of qᵀ L q, and that order."""
    for statistic, basis in pairs:
        product = statistic @ basis
        order = (basis * product).sum(dim=0).argsort(descending=True, stable=True)
        yield torch.linalg.qr(product.index_select(1, order)).Q.contiguous(), order


def _half_refreshed(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same of L + δ I with factors of float16, by size side by side.

    It reads from the device once, whether all are orthonormal; those that are not come from a QR decomposition in float32.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for lot in _lots([len(statistic) for statistic, _ in pairs]):
        shifted = [_shifted([pairs[i] for i in indices]) for indices in lot]
        results = orthonormal_columns([products for products, _ in shifted])
        is_orthonormal = torch.cat([fine for _, fine in results]).tolist()
        for indices, (products, orders), (bases, _) in zip(lot, shifted, results, strict=True):
            for i, product, order, basis in zip(indices, products, orders, bases, strict=True):
                fine = is_orthonormal.pop(0)
                found[i] = (basis.clone() if fine else torch.linalg.qr(product).Q.contiguous()), order
    return [found[i] for i in range(len(pairs))]


def _lots(sizes: Sequence[int]) -> Iterator[list[list[int]]]:
    """The indices of matrices of equal sizes, in lots that fit into memory, from the largest down."""
    lot: dict[int, list[int]] = {}
    filled = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if lot and filled + sizes[i] ** 2 > _LOT:
            yield list(lot.values())
            lot, filled = {}, 0
        lot.setdefault(sizes[i], []).append(i)
        filled += sizes[i] ** 2
    if lot:
        yield list(lot.values())


def _shifted(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(L + δ I) Q of equal sizes with its columns in falling order of qᵀ L q, and that order."""
    bases = _stacked([basis for _, basis in pairs])
    # A product of split factors takes several times their memory.
    most = max(_SPLIT_STACK // bases[0].numel(), 1)
    parts = [slice(start, start + most) for start in range(0, len(pairs), most)]
    products = torch.cat(
        [split_product(_stacked([statistic for statistic, _ in pairs[part]]), bases[part]) for part in parts]
    )
    values = (bases * products).sum(dim=1)
    floor = values.amax(dim=1).mul_(_FLOOR).clamp_min_(torch.finfo(values.dtype).tiny)
    orders = values.argsort(dim=1, descending=True, stable=True)
    products.addcmul_(bases, floor[:, None, None])
    return products.gather(2, orders[:, None, :].expand_as(products)), orders


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))


def _half_stacked(matrices: Sequence[Tensor]) -> Tensor:
    stacked = torch.empty((len(matrices), *matrices[0].shape), dtype=torch.float16, device=matrices[0].device)
    torch._foreach_copy_(list(stacked.unbind()), list(matrices))
    return stacked


def _shampoo_beta(group: Group) -> float:
    beta = group["shampoo_beta"]
    return float(group["betas"][1] if beta is None else beta)


def _require_usable(parameter: Tensor, gradient: Tensor) -> None:
    what = f"a parameter of shape {tuple(parameter.shape)}"
    if gradient.layout != torch.strided:
        raise SettingError(
            f"{what} has a sparse gradient ({gradient.layout}): gradients are rotated, so they must be dense; build "
            "nn.Embedding with sparse=False"
        )
    if parameter.is_complex():
        raise SettingError(f"{what} is complex ({parameter.dtype}): freeze it, or store it as two real tensors")
    if is_sharded(parameter):
        raise SettingError(
            f"{what} is sharded over processes, and its bases need the whole matrix: train with replicas, or with AdamW"
        )
