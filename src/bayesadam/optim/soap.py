r"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbases of Shampoo, which gives a Kronecker-factored V."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam.curvature.read import working_dtype
from bayesadam.curvature.rotated import (
    LEFT_KEY,
    PLAIN_KEY,
    RIGHT_KEY,
    ROTATED_KEY,
    SOAP_READER,
    into_basis,
    out_of_basis,
)
from bayesadam.errors import SettingError, StateError
from bayesadam.optim._checked import CheckedOptimizer, Group, loss_of, not_negative, two_betas

_PLAIN_MOMENTUM = "exp_avg"
_ROTATED_MOMENTUM = "rotated_exp_avg"
# Where L and R are, and their bases.
_SIDES = (("left", LEFT_KEY), ("right", RIGHT_KEY))


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
    are large compared with m and n, or where fewer steps are worth it. `statistics_every` above 1 saves a third of that.

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
    """

    reader = SOAP_READER

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
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        every = {"precondition_every": precondition_every, "statistics_every": statistics_every}
        super().__init__(params, {**adam, "shampoo_beta": shampoo_beta, **every, "max_side": max_side})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients, and returns the loss; optional.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, parameter.grad, group)
        return loss

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

    def _step(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        _require_usable(parameter, gradient)
        gradient = gradient.to(working_dtype(parameter.dtype))
        if group["maximize"]:
            gradient = gradient.neg()
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            _start(state, parameter, gradient, group)
            if ROTATED_KEY in state:
                return
        state["step"] += 1
        weights = parameter.to(gradient.dtype)
        if ROTATED_KEY in state:
            weights = weights.flatten(1)
            _rotated_step(weights, gradient.flatten(1), state, group)
        else:
            _plain_step(weights, gradient, state, group)
        if weights.data_ptr() != parameter.data_ptr():
            parameter.copy_(weights.view(parameter.shape))


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
                vectors = torch.linalg.eigh(statistic).eigenvectors.flip(1).contiguous()
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                state.clear()
                raise StateError(
                    f"the first gradient of a parameter of shape {tuple(parameter.shape)} has no eigenbasis: is it "
                    f"finite? ({error})"
                ) from None
            state[side], state[basis] = statistic, vectors


def _plain_step(weights: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Group) -> None:
    """AdamW's step, in its order of operations."""
    weights.mul_(1 - group["lr"] * group["weight_decay"])
    momentum, denominator, size = _adam(gradient, state[_PLAIN_MOMENTUM], state[PLAIN_KEY], state, group)
    weights.addcdiv_(momentum, denominator, value=-size)


def _rotated_step(weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group) -> None:
    """Adam's step in the eigenbases, then the statistics and, when due, the bases."""
    left, right = state.get(LEFT_KEY), state.get(RIGHT_KEY)
    stored, square = state[_ROTATED_MOMENTUM].flatten(1), state[ROTATED_KEY].flatten(1)
    momentum, denominator, size = _adam(into_basis(gradient, left, right), stored, square, state, group)
    direction = momentum.div(denominator)
    keep = 1 - group["lr"] * group["weight_decay"]
    # The last product is added into the weights as it is formed, and the decay with it.
    *first, last = (f for f in (left, direction, None if right is None else right.mT) if f is not None)
    weights.addmm_(reduce(torch.matmul, first), last, beta=keep, alpha=-size)
    steps = int(state["step"])
    if steps % group["statistics_every"] == 0:
        beta = _shampoo_beta(group)
        for (side, _), rows in zip(_SIDES, (gradient, gradient.mT), strict=True):
            if side in state:
                state[side].addmm_(rows, rows.mT, beta=beta, alpha=1 - beta)
    if steps % group["precondition_every"] == 0:
        _refresh(state)


def _adam(
    gradient: Tensor, momentum: Tensor, square: Tensor, state: Mapping[str, Tensor], group: Group
) -> tuple[Tensor, Tensor, float]:
    """Both moments in place; M, √V̂ + ε, and η over M's correction."""
    (beta1, beta2), steps = group["betas"], float(state["step"])
    momentum.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
    return momentum, denominator, group["lr"] / (1 - beta1**steps)


def _refresh(state: dict[str, Tensor]) -> None:
    """One power iteration and a QR for each basis; V is permuted with its columns, M' is rotated."""
    shape = state[ROTATED_KEY].shape
    square = state[ROTATED_KEY].flatten(1)
    momentum = state[_ROTATED_MOMENTUM].flatten(1)
    momentum = out_of_basis(momentum, state.get(LEFT_KEY), state.get(RIGHT_KEY))
    for dim, (side, basis) in enumerate(_SIDES):
        if side in state:
            state[basis], order = _refreshed(state[side], state[basis])
            square = square.index_select(dim, order)
    momentum = into_basis(momentum, state.get(LEFT_KEY), state.get(RIGHT_KEY))
    state[ROTATED_KEY], state[_ROTATED_MOMENTUM] = square.view(shape), momentum.reshape(shape)


def _refreshed(statistic: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """qr(L Q).Q, with the columns of Q in falling order of qᵀ L q, and that order."""
    product = statistic @ basis
    order = (basis * product).sum(dim=0).argsort(descending=True, stable=True)
    return torch.linalg.qr(product.index_select(1, order)).Q.contiguous(), order


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
