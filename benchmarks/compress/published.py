"""Pruning and rounding as others published them, written anew: SparseGPT, Wanda, magnitude, GPTQ, rounding.

All return a copy of the model. Layers go in the order in which the model calls them, each on the inputs that smaller
layers before it produce; a layer's weight is a matrix W, (outputs, inputs), and H = E[x xᵀ], over positions too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What a column, (outputs, 1), becomes, the k-th of those chosen together.
Settle = Callable[[Tensor, int], Tensor]
BATCH, BLOCK, DAMP = 100, 128, 0.01


def matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers and convolutions without groups, by the weight's name; none tied to embeddings."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds = ("Linear", "Conv2d", "Conv1D")
    layers = {f"{name}.weight": module for name, module in model.named_modules() if type(module).__name__ in kinds}
    return {n: m for n, m in layers.items() if id(m.weight) not in tied and getattr(m, "groups", 1) == 1}


def matrix_of(layer: nn.Module) -> Tensor:
    """The weight as (outputs, inputs); the Conv1D of transformers holds it the other way round."""
    weight: Tensor = layer.weight.detach()
    return weight.mT if type(layer).__name__ == "Conv1D" else weight.flatten(1)


@torch.no_grad()
def write(layer: nn.Module, matrix: Tensor) -> None:
    """Put a matrix of `matrix_of`'s shape into the layer."""
    weight: Tensor = layer.weight
    weight.copy_((matrix.mT if type(layer).__name__ == "Conv1D" else matrix).reshape(weight.shape))


def moment_of(model: nn.Module, layer: nn.Module, inputs: Tensor) -> Tensor:
    """H of a layer, in float64, a convolution's of patches."""
    width, count = matrix_of(layer).shape[1], 0
    total = torch.zeros(width, width, dtype=torch.float64, device=layer.weight.device)

    def add(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal count
        x = arguments[0]
        if isinstance(module, nn.Conv2d):
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
        x = x.flatten(0, -2)
        count += len(x)
        total.add_(x.mT @ x)

    hook = layer.register_forward_pre_hook(add)
    for some in inputs.split(BATCH):
        model(some)
    hook.remove()
    return total / count


@torch.no_grad()
def _layer_by_layer(model: nn.Module, inputs: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A copy with the matrix that `change` makes of W and H, in the order of the layers' first calls."""
    small, called = copy.deepcopy(model).eval(), dict[nn.Module, None]()
    layers = matrices(small).values()
    hooks = [layer.register_forward_hook(lambda module, *_: called.setdefault(module)) for layer in layers]
    small(inputs[:BATCH])
    for hook in hooks:
        hook.remove()
    for layer in called:
        write(layer, change(matrix_of(layer).double(), moment_of(small, layer, inputs)))
    return small


def lowest(scores: Tensor, fraction: float) -> Tensor:
    """True at the lowest share of each row."""
    order = scores.argsort(dim=1, stable=True)[:, : round(fraction * scores.shape[1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def magnitude(model: nn.Module, fraction: float, *, uniform: bool = False) -> nn.Module:
    """Without the smallest |w|: of each layer, or of all."""
    small = copy.deepcopy(model).eval()
    layers = list(matrices(small).values())
    for group in [[layer] for layer in layers] if uniform else [layers]:
        weights = [matrix_of(layer) for layer in group]
        gone = lowest(torch.cat([w.abs().flatten() for w in weights])[None], fraction)[0]
        for layer, w, part in zip(group, weights, gone.split([w.numel() for w in weights]), strict=True):
            write(layer, w.masked_fill(part.view(w.shape), 0))
    return small


def wanda(model: nn.Module, inputs: Tensor, fraction: float) -> nn.Module:
    """Without the smallest |w_ij| ‖x_j‖ of each row; nothing else moves (Sun et al., 2023)."""
    return _layer_by_layer(
        model, inputs, lambda w, h: w.masked_fill(lowest(w.abs() * h.diagonal().sqrt(), fraction), 0)
    )


def sparsegpt(
    model: nn.Module, inputs: Tensor, fraction: float, *, bits: int | None = None, block: int = BLOCK
) -> nn.Module:
    """Without the smallest (w_j / U_jj)² of each 128 columns, the later columns moved (Frantar and Alistarh, 2023).

    With `bits` what stays is rounded in the same sweep, as in their joint form.
    """

    def change(w: Tensor, h: Tensor) -> Tensor:
        onto = (lambda x: x) if bits is None else grid_of(w, bits)

        def choose(part: Tensor, diagonal: Tensor) -> Settle:
            gone = lowest((part / diagonal).square().reshape(1, -1), fraction).view_as(part)
            return lambda column, k: onto(column).masked_fill(gone[:, k : k + 1], 0)

        return sweep(w, h, choose, block)

    return _layer_by_layer(model, inputs, change)


def grid_of(w: Tensor, bits: int, *, search: bool = False) -> Callable[[Tensor], Tensor]:
    """Rounds to a symmetric grid a row, up to its largest |w|; what GPTQ's authors use.

    With `search` the grid is the one of 80 narrower ones that has the least Σ |q − w|^2.4.
    """
    top, high = 2**bits - 1, w.abs().amax(1, keepdim=True)
    scale, zero = torch.where(high > 0, 2 * high / top, 2 / top), (top + 1) / 2

    def onto(x: Tensor, scale: Tensor) -> Tensor:
        return ((x / scale).round() + zero).clamp(0, top).sub(zero).mul(scale)

    if search:
        scales = [scale * (1 - k / 100) for k in range(80)]
        errors = torch.stack([(onto(w, one) - w).abs().pow(2.4).sum(1, keepdim=True) for one in scales])
        scale = torch.stack(scales).gather(0, errors.argmin(0, keepdim=True))[0]
    return partial(onto, scale=scale)


def rtn(model: nn.Module, bits: int, *, search: bool = False) -> nn.Module:
    """Every weight rounded to the nearest of its grid."""
    small = copy.deepcopy(model).eval()
    for layer in matrices(small).values():
        write(layer, grid_of(matrix_of(layer), bits, search=search)(matrix_of(layer)))
    return small


def gptq(model: nn.Module, inputs: Tensor, bits: int, *, search: bool = False) -> nn.Module:
    """Columns rounded one by one, those of the largest H_jj first, the later ones moved (Frantar et al., 2022)."""

    def change(w: Tensor, h: Tensor) -> Tensor:
        order = h.diagonal().argsort(descending=True)
        onto = grid_of(w * (h.diagonal() > 0), bits, search=search)
        moved = sweep(w[:, order], h[order][:, order], lambda *_: lambda column, k: onto(column))
        return moved[:, order.argsort()]

    return _layer_by_layer(model, inputs, change)


def sweep(w: Tensor, h: Tensor, choose: Callable[[Tensor, Tensor], Settle], block: int = BLOCK) -> Tensor:
    """q_j = settle(w_j), then w_later −= (w_j − q_j)/U_jj · U_j,later, column after column.

    U is the upper Cholesky factor of (H + λ)⁻¹, λ = .01 × mean H_jj. `choose` is given each block of columns and their
    U_jj; an input that is always 0 loses its weights.
    """
    w, h, dead = w.clone(), h.clone(), h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(DAMP * h.diagonal().mean())
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for first in range(0, w.shape[1], block):
        last, errors = min(first + block, w.shape[1]), []
        settle = choose(w[:, first:last], u.diagonal()[first:last])
        for j in range(first, last):
            q = settle(w[:, j : j + 1], j - first)
            errors.append((w[:, j : j + 1] - q) / u[j, j])
            w[:, j:last] -= errors[-1] * u[j, j:last]
            w[:, j : j + 1] = q
        w[:, last:] -= torch.cat(errors, dim=1) @ u[first:last, last:]
    return w


@torch.no_grad()
def renormed(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A copy whose batch norms have the statistics of these inputs, the mean over their batches."""
    again = copy.deepcopy(model).eval()
    norms = [module for module in again.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for some in inputs.split(BATCH) if norms else ():
        again(some)
    return again.eval()
