"""Σ_xy (Σ_p X_px Y_py)² S_xy in one kernel: the gradients of single examples live in registers and are never written.

Imported only where triton is installed and the tensors are on CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayesadam.predict.layers import Windows

_PLACES, _FEATURES = 3, 4


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    x, y, s, parts, c_count, b_count, g_count, p_count, width, depth,
    x_c, x_b, x_g, x_p, x_x, y_b, y_g, p1, p2, p_s0, p_s1, p_s2, f1, f2, f3, f_s0, f_s1, f_s2, f_s3, s_g, s_x, s_y,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_P: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One tile of (x, y) of one example and group: Σ over the tile for every c."""
    across = tl.cdiv(depth, BLOCK_Y)
    tiles = tl.cdiv(width, BLOCK_X) * across
    tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, g = pair // g_count, pair % g_count
    rows = (tile // across) * BLOCK_X + tl.arange(0, BLOCK_X)
    columns = (tile % across) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    inside = (rows < width)[:, None] & (columns < depth)[None, :]
    weights = tl.load(s + g * s_g + rows[:, None] * s_x + columns[None, :] * s_y, mask=inside, other=0.0)
    feature = (
        (columns // (f1 * f2 * f3)) * f_s0
        + (columns // (f2 * f3) % f1) * f_s1
        + (columns // f3 % f2) * f_s2
        + (columns % f3) * f_s3
    )
    x_start = x + b.to(tl.int64) * x_b + g * x_g
    y_start = y + b.to(tl.int64) * y_b + g * y_g
    for c in range(c_count):
        total = tl.zeros((BLOCK_X, BLOCK_Y), dtype=tl.float32)
        for first in range(0, p_count, BLOCK_P):
            p = first + tl.arange(0, BLOCK_P)
            left = tl.load(
                x_start + rows[:, None].to(tl.int64) * x_x + p[None, :] * x_p,
                mask=(rows < width)[:, None] & (p < p_count)[None, :],
                other=0.0,
            )
            place = (p // (p1 * p2)) * p_s0 + (p // p2 % p1) * p_s1 + (p % p2) * p_s2
            right = tl.load(
                y_start + place[:, None] + feature[None, :],
                mask=(p < p_count)[:, None] & (columns < depth)[None, :],
                other=0.0,
            )
            if HALF:
                total = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), total)
            else:
                total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="tf32")
        x_start += x_c
        tl.store(parts + ((tile * g_count + g) * c_count + c) * b_count + b, tl.sum(total * total * weights))


def product_variance(x: Tensor, y: Windows, s: Tensor) -> Tensor:
    """X (c, b, g, p, x), Y (b, g, p, y), S (g, x, y) → (b, c); sums are in float32.

    Of features that lie side by side, those of a matrix, factors are rounded to bfloat16, of images to TF32: what is faster.
    """
    c, b, g, p, width = x.shape
    places, features = _padded(y, 2, y.places, _PLACES), _padded(y, 2 + y.places, None, _FEATURES)
    depth = y.view.shape[2 + y.places :].numel()
    block_x, block_y = (min(128, max(16, triton.next_power_of_2(n))) for n in (width, depth))
    tiles = triton.cdiv(width, block_x), triton.cdiv(depth, block_y)
    parts = x.new_empty(tiles[0] * tiles[1], g, c, b, dtype=torch.float32)
    _squares[(tiles[0] * tiles[1] * b * g,)](
        x,
        y.view,
        s,
        parts,
        c,
        b,
        g,
        p,
        width,
        depth,
        *x.stride(),
        *y.view.stride()[:2],
        *places,
        *features,
        *s.stride(),
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        BLOCK_P=32 if p > 16 else 16,
        HALF=y.places == 1,
        num_warps=8 if block_x * block_y > 4096 else 4,
    )
    return parts.sum(dim=(0, 1)).T


def _padded(y: Windows, start: int, count: int | None, to: int) -> list[int]:
    """Sizes but the first, then strides, of some dimensions, with dimensions of one entry before them."""
    stop = None if count is None else start + count
    sizes, strides = list(y.view.shape[start:stop]), list(y.view.stride()[start:stop])
    missing = to - len(sizes)
    return [*([1] * missing + sizes)[1:], *([0] * missing + strides)]
