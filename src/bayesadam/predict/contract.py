"""Σ_w J_bcw J_bdw S_w over the weights of one parameter, from the factors of its gradients, in bounded memory."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from bayesadam.predict.layers import (
    EmbeddingUse,
    Layout,
    MatrixUse,
    ProductUse,
    SumUse,
    Use,
    Windows,
    batch_first,
    gathered,
)

# Gradients of one parameter are formed in pieces of this many entries and dropped: on a CPU they fit a cache, on another
# device they fill it with work.
_PIECE = 1 << 21
_DEVICE_PIECE = 1 << 27
_LONG_ROW = 4096
Layouts = Sequence[Layout]


def variances(
    uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, variance: Sequence[Tensor]
) -> Tensor:
    """Σ_w J²_bcw S_w for each S of `variance`: (k, b, c).

    `uses` are every use of one parameter, or of the same rows of it, and `ds` is D at each, (c, ...).
    """
    first = uses[0]
    variance = [first.of(s) for s in variance]
    if isinstance(first, ProductUse) and all(type(use) is type(first) for use in uses):
        arranged = [first.arranged(s) for s in variance]
        if len(uses) == 1 and _can_fuse(ds[0], variance):
            x, windows = first.views(ds[0], layout[0], size)
            if x.shape[3] > 1:
                return _fused_variances(x, windows, arranged)
        x, y = _joined_factors(uses, ds, layout, size, variance[0].dtype)
        return _product_variances(x, y, arranged)
    rows = _looked_up(uses, ds, layout, size, variance[0].dtype)
    if rows is not None:
        own, ids, factors = rows
        squares, total = own.square(), variance[0].new_zeros(len(variance), size, len(own))
        if factors is not None:
            x, y = factors
            total = _product_variances(x, y, [s.unsqueeze(0) for s in variance])
            squares = squares + 2 * own * _rows_of_product(x, y, ids)
        return total + torch.stack([torch.einsum("cbte,bte->bc", squares, s[ids]) for s in variance])
    step = max(1, _piece_size(variance[0]) // (size * variance[0].numel()))
    parts = []
    for c0 in range(0, len(ds[0]), step):
        squares = _dense(uses, [d[c0 : c0 + step] for d in ds], layout, size, variance[0]).flatten(2).square_()
        parts.append(torch.stack([squares @ s.flatten() for s in variance]).transpose(1, 2))
    return torch.cat(parts, dim=2)


def covariances(
    uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, variance: Sequence[Tensor]
) -> Tensor:
    """Σ_w J_bcw J_bdw S_w for each S of `variance`: (k, b, c, d)."""
    first = uses[0]
    variance = [first.of(s) for s in variance]
    if isinstance(first, ProductUse) and all(type(use) is type(first) for use in uses):
        x, y = _joined_factors(uses, ds, layout, size, variance[0].dtype)
        return _product_covariances(x, y, [first.arranged(s) for s in variance])
    rows = _looked_up(uses, ds, layout, size, variance[0].dtype)
    if rows is not None:
        own, ids, factors = rows
        roots = [s[ids].sqrt() for s in variance]
        lefts = [(own * root).flatten(2).transpose(0, 1) for root in roots]
        total = torch.stack([gram(left) for left in lefts])
        if factors is None:
            return total
        product = _rows_of_product(*factors, ids)
        rights = [(product * root).flatten(2).transpose(0, 1) for root in roots]
        cross = torch.stack([left @ right.mT for left, right in zip(lefts, rights, strict=True)])
        return total + _product_covariances(*factors, [s.unsqueeze(0) for s in variance]) + cross + cross.mT
    grads = _dense(uses, ds, layout, size, variance[0])
    return torch.stack([gram((grads * s.sqrt()).flatten(2).transpose(0, 1)) for s in variance])


def one_position(use: Use, layout: Layout, size: int) -> bool:
    """Whether a weight matrix is used at one place per example, so that its bias can be contracted along with it."""
    shape = use.output.shape
    return isinstance(use, MatrixUse) and layout is batch_first and len(shape) == 2 and shape[0] == size


def total_gradient(
    uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, weights: Tensor, like: Tensor
) -> Tensor:
    """Σ_b weights_b ∂f_b/∂(the rows in use), for one direction of outputs: what autograd must agree with."""
    total = torch.zeros_like(uses[0].of(like))
    for use, d, lay in zip(uses, ds, layout, strict=True):
        if isinstance(use, ProductUse):
            x, y = use.factors(d.to(like.dtype), lay, size)
            part = torch.einsum("bgpx,bgpy,b->gxy", x[0], y.to(like.dtype), weights)
            total += use.restored(part, total.shape)
        elif isinstance(use, EmbeddingUse):
            grads, ids = use.looked_up(d.to(like.dtype), lay, size)
            total.index_add_(0, ids.flatten(), (grads[0] * weights[:, None, None]).flatten(0, 1))
        elif isinstance(use, SumUse):
            grads = use.gradients(d.to(like.dtype), lay, size, total.shape)[0]
            total += torch.tensordot(weights, grads, dims=1)
    return total


def _joined_factors(
    uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Several uses of one weight are more positions of it."""
    each = zip(uses, ds, layout, strict=True)
    pairs = [use.factors(d.to(dtype), lay, size) for use, d, lay in each if isinstance(use, ProductUse)]
    if len(pairs) == 1:
        return pairs[0][0], pairs[0][1].to(dtype)
    return torch.cat([x for x, _ in pairs], dim=3), torch.cat([y.to(dtype) for _, y in pairs], dim=2)


def _looked_up(
    uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None] | None:
    """Gradients (c, b, t, e) of the rows ids (b, t) that embeddings look up, and the factors of the same table as a matrix.

    None where the parameter has other uses, or no such ones. A head tied to its embedding has both.
    """
    found, products = [], []
    for index, use in enumerate(uses):
        if isinstance(use, EmbeddingUse):
            found.append(use.looked_up(ds[index].to(dtype), layout[index], size))
        elif isinstance(use, MatrixUse):
            products.append(index)
        else:
            return None
    if not found:
        return None
    ids = torch.cat([i for _, i in found], dim=1)
    own = gathered(torch.cat([grads for grads, _ in found], dim=2), ids)
    if not products:
        return own, ids, None
    factors = _joined_factors(
        [uses[i] for i in products], [ds[i] for i in products], [layout[i] for i in products], size, dtype
    )
    return own, ids, factors


def _rows_of_product(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """The rows ids (b, t) of the gradients Σ_p X Y: (c, b, t, e)."""
    x, y = x.squeeze(2), y.squeeze(1)
    index = ids[None, :, None, :].expand(x.shape[0], -1, x.shape[2], -1)
    return torch.einsum("cbpt,bpe->cbte", x.gather(3, index), y)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _can_fuse(x: Tensor, variance: Sequence[Tensor]) -> bool:
    """Whether one kernel does it: on CUDA, of float32 variances, where triton is installed."""
    return x.is_cuda and all(s.dtype == torch.float32 for s in variance) and _has_triton()


def _fused_variances(x: Tensor, y: Windows, variance: Sequence[Tensor]) -> Tensor:
    from bayesadam.predict._triton import product_variance

    return torch.stack([product_variance(x, y, s) for s in variance])


def _product_variances(x: Tensor, y: Tensor, variance: Sequence[Tensor]) -> Tensor:
    c, b, g, p, width = x.shape
    if p > 1 and _can_fuse(x, variance):
        return _fused_variances(x, Windows(y, 1), variance)
    if p == 1:
        # One position: (x y)² factorises, and Σ S y² comes first.
        squares, inputs = x.squeeze(3).square(), y.squeeze(2).square()
        inner = [torch.einsum("bgy,gxy->bgx", inputs, s) for s in variance]
        return torch.stack([torch.einsum("cbgx,bgx->bc", squares, t) for t in inner])
    out = x.new_zeros(len(variance), b, c)
    flat = torch.stack([s.reshape(g, -1) for s in variance], dim=-1)
    per_pair, piece_size = g * width * y.shape[-1], _piece_size(x)
    step_c = max(1, min(c, piece_size // per_pair))
    step_b = max(1, min(b, piece_size // (per_pair * step_c)))
    step_x = max(1, min(width, piece_size // (g * y.shape[-1])))
    for b0 in range(0, b, step_b):
        for c0 in range(0, c, step_c):
            for x0 in range(0, width, step_x):
                piece = _gradients(x[c0 : c0 + step_c, b0 : b0 + step_b, ..., x0 : x0 + step_x], y[b0 : b0 + step_b])
                rows = flat.view(g, width, y.shape[-1], -1)[:, x0 : x0 + step_x].flatten(1, 2)
                part = torch.einsum("bgcn,gnk->kbc", piece.square_().flatten(3), rows)
                out[:, b0 : b0 + step_b, c0 : c0 + step_c] += part
    return out


def _product_covariances(x: Tensor, y: Tensor, variance: Sequence[Tensor]) -> Tensor:
    c, b, g, p, width = x.shape
    if p == 1:
        inputs, outputs = y.squeeze(2).square(), x.squeeze(3)
        inner = [torch.einsum("bgy,gxy->bgx", inputs, s) for s in variance]
        return torch.stack([gram((outputs * t.sqrt()).flatten(2).transpose(0, 1)) for t in inner])
    out = x.new_zeros(len(variance), b, c, c)
    roots = [s.sqrt() for s in variance]
    piece_size = _piece_size(x)
    step_x = max(1, min(width, piece_size // (c * g * y.shape[-1])))
    step_b = max(1, min(b, piece_size // (c * g * step_x * y.shape[-1])))
    for b0 in range(0, b, step_b):
        for x0 in range(0, width, step_x):
            piece = _gradients(x[:, b0 : b0 + step_b, ..., x0 : x0 + step_x], y[b0 : b0 + step_b])
            for total, root in zip(out, roots, strict=True):
                scaled = (piece * root[:, None, x0 : x0 + step_x]).transpose(1, 2).flatten(2)
                total[b0 : b0 + step_b] += gram(scaled)
    return out


def _piece_size(like: Tensor) -> int:
    return _PIECE if like.device.type == "cpu" else _DEVICE_PIECE


def _gradients(x: Tensor, y: Tensor) -> Tensor:
    """Σ_p X Y as (b, g, c, x, y)."""
    c, b, g, _, width = x.shape
    left = x.permute(1, 2, 0, 4, 3).reshape(b, g, c * width, -1)
    return (left @ y).view(b, g, c, width, -1)


def _dense(uses: Sequence[Use], ds: Sequence[Tensor], layout: Layouts, size: int, variance: Tensor) -> Tensor:
    """The gradients (c, b, *shape) themselves: for small parameters, and for those used in unlike ways."""
    total = variance.new_zeros(len(ds[0]), size, *variance.shape)
    for use, d, lay in zip(uses, ds, layout, strict=True):
        if isinstance(use, SumUse):
            total += use.gradients(d.to(variance.dtype), lay, size, variance.shape)
        elif isinstance(use, EmbeddingUse):
            grads, ids = use.looked_up(d.to(variance.dtype), lay, size)
            index = ids[None, :, :, None].expand_as(grads)
            total.scatter_add_(2, index, grads)
        elif isinstance(use, ProductUse):
            x, y = use.factors(d.to(variance.dtype), lay, size)
            total += use.restored(_gradients(x, y.to(variance.dtype)).permute(2, 0, 1, 3, 4), variance.shape)
    return total


def gram(rows: Tensor) -> Tensor:
    """Σ_n rows rowsᵀ, (b, c, n) → (b, c, c).

    On a CPU numpy does it, which knows the product to be symmetric. Elsewhere long rows are cut and their parts summed: few
    numbers out of many are slow work for a matrix product.
    """
    if rows.device.type == "cpu":
        array = rows.numpy()
        return torch.from_numpy(np.matmul(array, array.swapaxes(1, 2)))
    b, c, n = rows.shape
    parts = n // _LONG_ROW
    if parts < 2:
        return torch.bmm(rows, rows.mT)
    even = rows[:, :, : parts * _LONG_ROW].reshape(b, c, parts, _LONG_ROW).transpose(1, 2).flatten(0, 1)
    total = torch.bmm(even, even.mT).view(b, parts, c, c).sum(dim=1)
    return total + gram(rows[:, :, parts * _LONG_ROW :]) if n % _LONG_ROW else total
