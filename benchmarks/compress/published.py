"""Pruning and rounding as others published them, written anew: SparseGPT, Wanda, magnitude, GPTQ, rounding.

All return a copy of the model. Inputs are a tensor or, by the names of the model's arguments, a dict of them. Layers go
in the order in which the model calls them, each on the inputs that the smaller layers before it produce; a layer's
weight is a matrix W, (outputs, inputs), and H = E[x xᵀ] over all examples and positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor]
Change = Callable[[Tensor, Tensor], Tensor]
BATCH = 100


# --- layers as matrices ---------------------------------------------------------------------------------------------


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights are pruned, by the weight's name: linear ones, convolutions; none tied to embeddings."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds = ("Linear", "Conv2d", "Conv1D")
    layers = {f"{name}.weight": module for name, module in model.named_modules() if type(module).__name__ in kinds}
    return {name: layer for name, layer in layers.items() if id(layer.weight) not in tied}


def matrix_of(layer: nn.Module) -> Tensor:
    """The weight as (outputs, inputs); the Conv1D of transformers holds it the other way round."""
    weight: Tensor = layer.weight.detach()
    return weight.mT if type(layer).__name__ == "Conv1D" else weight.flatten(1)


@torch.no_grad()
def write(layer: nn.Module, matrix: Tensor) -> None:
    """Put a matrix of `matrix_of`'s shape into the layer."""
    weight: Tensor = layer.weight
    weight.copy_((matrix.mT if type(layer).__name__ == "Conv1D" else matrix).reshape(weight.shape))


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs of a layer as rows, a convolution's as patches."""
    if isinstance(layer, nn.Conv2d):
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    return x.flatten(0, -2)


def batches(inputs: Inputs) -> Iterator[Callable[[nn.Module], object]]:
    """What runs a model on some of the inputs at a time."""
    if isinstance(inputs, Tensor):
        yield from (lambda model, x=x: model(x) for x in inputs.split(BATCH))
    else:
        parts = zip(*(x.split(BATCH) for x in inputs.values()), strict=True)
        yield from (lambda model, part=part: model(**dict(zip(inputs, part, strict=True))) for part in parts)


def _in_order(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Inputs) -> list[nn.Module]:
    """The layers as the model calls them first."""
    called: dict[nn.Module, None] = {}
    hooks = [layer.register_forward_hook(lambda module, *_: called.setdefault(module)) for layer in layers.values()]
    next(batches(inputs))(model)
    for hook in hooks:
        hook.remove()
    return list(called)


def moment_of(model: nn.Module, layer: nn.Module, inputs: Inputs) -> Tensor:
    """H of a layer, in float64."""
    width, count = matrix_of(layer).shape[1], 0
    total = torch.zeros(width, width, dtype=torch.float64, device=layer.weight.device)

    def add(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal count
        x = _rows(module, arguments[0])
        count += len(x)
        total.add_(x.mT @ x)

    hook = layer.register_forward_pre_hook(add)
    for run in batches(inputs):
        run(model)
    hook.remove()
    return total / count


@torch.no_grad()
def _layer_by_layer(model: nn.Module, inputs: Inputs, eligible: Sequence[str] | None, change: Change) -> nn.Module:
    small = copy.deepcopy(model).eval()
    layers = {name: layer for name, layer in matrices(small).items() if eligible is None or name in eligible}
    for layer in _in_order(small, layers, inputs):
        write(layer, change(matrix_of(layer).double(), moment_of(small, layer, inputs)))
    return small


# --- pruning --------------------------------------------------------------------------------------------------------


def lowest(scores: Tensor, fraction: float) -> Tensor:
    """True at the lowest share of each row."""
    order = scores.argsort(dim=1, stable=True)[:, : round(fraction * scores.shape[1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def _lost(scores: Tensor, fraction: float | None, pattern: str | None) -> Tensor:
    """True at what is removed of each row, or of each M consecutive inputs all but N."""
    if pattern is None:
        assert fraction is not None
        return lowest(scores, fraction)
    keep, size = map(int, pattern.split(":"))
    return lowest(scores.reshape(-1, size), 1 - keep / size).view_as(scores)


def magnitude(
    model: nn.Module, fraction: float, *, uniform: bool = False, eligible: Sequence[str] | None = None
) -> nn.Module:
    """Without the smallest |w|: of each layer, or of all."""
    small = copy.deepcopy(model).eval()
    found = [layer for name, layer in matrices(small).items() if eligible is None or name in eligible]
    for group in [[layer] for layer in found] if uniform else [found]:
        weights = [matrix_of(layer) for layer in group]
        gone = lowest(torch.cat([w.abs().flatten() for w in weights])[None], fraction)[0]
        for layer, w, part in zip(group, weights, gone.split([w.numel() for w in weights]), strict=True):
            write(layer, w.masked_fill(part.view(w.shape), 0))
    return small


def wanda(
    model: nn.Module,
    inputs: Inputs,
    fraction: float | None = None,
    *,
    pattern: str | None = None,
    eligible: Sequence[str] | None = None,
) -> nn.Module:
    """Without the smallest |w_ij| ‖x_j‖ of each row; nothing else moves (Sun et al., 2023)."""

    def change(w: Tensor, h: Tensor) -> Tensor:
        return w.masked_fill(_lost(w.abs() * h.diagonal().sqrt(), fraction, pattern), 0)

    return _layer_by_layer(model, inputs, eligible, change)


def sparsegpt(
    model: nn.Module,
    inputs: Inputs,
    fraction: float | None = None,
    *,
    pattern: str | None = None,
    bits: int | None = None,
    block: int = 128,
    damp: float = 0.01,
    eligible: Sequence[str] | None = None,
) -> nn.Module:
    """Without the smallest (w_j / U_jj)² of each 128 columns, the later columns moved (Frantar and Alistarh, 2023).

    With `bits` what stays is rounded in the same sweep, as in their joint form.
    """
    every = block if pattern is None else int(pattern.split(":")[1])

    def change(w: Tensor, h: Tensor) -> Tensor:
        onto = None if bits is None else grid_of(w, bits)

        def choose(part: Tensor, diagonal: Tensor) -> Settle:
            scores = (part / diagonal).square()
            gone = _lost(scores.reshape(1, -1) if pattern is None else scores, fraction, pattern).view_as(part)
            return lambda column, k: (onto(column) if onto else column).masked_fill(gone[:, k : k + 1], 0)

        return sweep(w, h, choose, every, block, damp)

    return _layer_by_layer(model, inputs, eligible, change)


# --- rounding -------------------------------------------------------------------------------------------------------


def grid_of(w: Tensor, bits: int, *, symmetric: bool = True, search: bool = False) -> Callable[[Tensor], Tensor]:
    """Rounds to a grid a row, from its smallest to its largest weight; what GPTQ's authors use.

    With `search` the grid is the one of 80 narrower ones that has the least Σ |q − w|^2.4.
    """
    top, low, high = 2**bits - 1, w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = torch.where(high > low, (high - low) / top, 2 / top)
    zero = torch.full_like(scale, (top + 1) / 2) if symmetric else (-low / scale).round()

    def onto(x: Tensor, scale: Tensor) -> Tensor:
        return ((x / scale).round() + zero).clamp(0, top).sub(zero).mul(scale)

    if search:
        scales = [scale * (1 - k / 100) for k in range(80)]
        errors = torch.stack([(onto(w, each) - w).abs().pow(2.4).sum(1, keepdim=True) for each in scales])
        scale = torch.stack(scales).gather(0, errors.argmin(0, keepdim=True))[0]
    return partial(onto, scale=scale)


def rtn(
    model: nn.Module,
    bits: int,
    *,
    group: int | None = None,
    symmetric: bool = True,
    search: bool = False,
    eligible: Sequence[str] | None = None,
) -> nn.Module:
    """Every weight rounded to the nearest of its grid."""
    small = copy.deepcopy(model).eval()
    for name, layer in matrices(small).items():
        if eligible is None or name in eligible:
            parts = matrix_of(layer).split(group or matrix_of(layer).shape[1], dim=1)
            write(layer, torch.cat([grid_of(w, bits, symmetric=symmetric, search=search)(w) for w in parts], dim=1))
    return small


def gptq(
    model: nn.Module,
    inputs: Inputs,
    bits: int,
    *,
    group: int | None = None,
    symmetric: bool = True,
    search: bool = False,
    reorder: bool = True,
    block: int = 128,
    damp: float = 0.01,
    eligible: Sequence[str] | None = None,
) -> nn.Module:
    """Columns rounded one by one, those of the largest H_jj first, the later ones moved (Frantar et al., 2022).

    Without `reorder` they are in their own order; a `group` of columns has a grid of its own, from the moved weights.
    """

    def choose(part: Tensor, diagonal: Tensor) -> Settle:
        onto = grid_of(part, bits, symmetric=symmetric, search=search)
        return lambda column, k: onto(column)

    def change(w: Tensor, h: Tensor) -> Tensor:
        order = h.diagonal().argsort(descending=True) if reorder else torch.arange(len(h), device=h.device)
        moved = sweep(w[:, order], h[order][:, order], choose, group or len(h), block, damp)
        return moved[:, order.argsort()]

    return _layer_by_layer(model, inputs, eligible, change)


# --- what SparseGPT and GPTQ share ----------------------------------------------------------------------------------

# What a column, (outputs, 1), becomes, the k-th of those chosen together.
Settle = Callable[[Tensor, int], Tensor]


def sweep(
    w: Tensor, h: Tensor, choose: Callable[[Tensor, Tensor], Settle], every: int, block: int, damp: float
) -> Tensor:
    """q_j = settle(w_j), then w_later −= (w_j − q_j)/U_jj · U_j,later, column after column.

    U is the upper Cholesky factor of (H + λ)⁻¹, λ = damp × mean H_jj. Each `every` columns `choose` is given them and
    their U_jj; an input that is always 0 loses its weights.
    """
    w, h, dead = w.clone(), h.clone(), h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(damp * h.diagonal().mean())
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for first in range(0, w.shape[1], block):
        last, errors = min(first + block, w.shape[1]), []
        for j in range(first, last):
            if j % every == 0:
                settle = choose(w[:, j : j + every], u.diagonal()[j : j + every])
            q = settle(w[:, j : j + 1], j % every)
            errors.append((w[:, j : j + 1] - q) / u[j, j])
            w[:, j:last] -= errors[-1] * u[j, j:last]
            w[:, j : j + 1] = q
        w[:, last:] -= torch.cat(errors, dim=1) @ u[first:last, last:]
    return w


# --- batch norms ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def renormed(model: nn.Module, inputs: Inputs) -> nn.Module:
    """A copy whose batch norms have the statistics of these inputs, the mean over their batches."""
    again = copy.deepcopy(model).eval()
    norms = [module for module in again.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for run in batches(inputs) if norms else ():
        run(again)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return again.eval()
