"""The paper's draw, θ + ε (w v̂^½ + δ)^(-1/2), as one CUDA kernel: random numbers never touch memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bayesadam.weights.settings import PrecisionRule

# One Philox call gives four normals; a program makes this many calls. Part of what a seed means.
_CALLS = 1024


@triton.jit
def _normal_pair(a, b):  # type: ignore[no-untyped-def]
    """Box and Muller: two independent normals from two 32-bit integers."""
    radius = tl.sqrt(-2.0 * libdevice.fast_logf(tl.maximum(1.0e-7, tl.uint_to_uniform_float(a))))
    angle = 6.283185307179586 * (tl.uint_to_uniform_float(b) - 0.5)
    return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)


@triton.jit
def _write(out, theta, v, noise, column, size, weight, delta):  # type: ignore[no-untyped-def]
    inside = column < size
    moment = tl.load(v + column, mask=inside, other=1.0)
    mean = tl.load(theta + column, mask=inside, other=0.0)
    drawn = mean + noise * tl.rsqrt(weight * tl.sqrt(moment) + delta)
    tl.store(out + column, drawn.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "blocks"])
def _kernel(out, theta, v, size, blocks, weight, delta, seed, CALLS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    row = program // blocks
    block = (program % blocks).to(tl.int64)
    lane = tl.arange(0, CALLS)
    counter = block * CALLS + lane
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, high, zero + row.to(tl.uint32), zero)
    first, second = _normal_pair(a, b)
    third, fourth = _normal_pair(c, d)
    out += row.to(tl.int64) * size
    column = block * (4 * CALLS) + lane
    _write(out, theta, v, first, column, size, weight, delta)
    _write(out, theta, v, second, column + CALLS, size, weight, delta)
    _write(out, theta, v, third, column + 2 * CALLS, size, weight, delta)
    _write(out, theta, v, fourth, column + 3 * CALLS, size, weight, delta)


def fill(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int) -> None:
    """Fill `rows`, (draws, weights) in any floating type, from float32 θ and v̂ on the same CUDA device."""
    draws, size = rows.shape
    blocks = triton.cdiv(size, 4 * _CALLS)
    with torch.cuda.device(theta.device):
        _kernel[(blocks * draws,)](
            rows, theta, v, size, blocks, rule.weight, rule.delta, seed, CALLS=_CALLS, num_warps=8
        )
