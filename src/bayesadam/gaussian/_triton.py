"""The draw as one CUDA kernel: θ and v̂ are read once, the draw is written once, random numbers never touch memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bayesadam.gaussian.settings import PrecisionRule

# One Philox call gives four normals; a program makes this many calls. Part of what a seed means.
_CALLS = 1024
_POWERS = {0.5: 0, 1.0: 1}


@triton.jit
def _normal_pair(a, b):  # type: ignore[no-untyped-def]
    """Box and Muller: two independent normals from two 32-bit integers."""
    radius = tl.sqrt(-2.0 * libdevice.fast_logf(tl.maximum(1.0e-7, tl.uint_to_uniform_float(a))))
    angle = 6.283185307179586 * (tl.uint_to_uniform_float(b) - 0.5)
    return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    out, theta, v, deltas, noise, column, size, weight, delta, power,
    KIND: tl.constexpr, SHRINK: tl.constexpr, TENSOR_DELTA: tl.constexpr,
):  # fmt: skip
    inside = column < size
    moment = tl.load(v + column, mask=inside, other=1.0)
    mean = tl.load(theta + column, mask=inside, other=0.0)
    if KIND == 0:
        data = weight * tl.sqrt(moment)
    elif KIND == 1:
        data = weight * moment
    else:
        data = weight * tl.exp2(power * tl.log2(moment))
    if TENSOR_DELTA:
        delta = tl.load(deltas + column, mask=inside, other=0.0)
    precision = data + delta
    if SHRINK:
        mean = mean * (data / precision)
    tl.store(out + column, (mean + noise * tl.rsqrt(precision)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "blocks"])
def _kernel(  # type: ignore[no-untyped-def]
    out, theta, v, deltas, size, blocks, weight, delta, power, seed,
    KIND: tl.constexpr, SHRINK: tl.constexpr, TENSOR_DELTA: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
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
    _write(out, theta, v, deltas, first, column, size, weight, delta, power, KIND, SHRINK, TENSOR_DELTA)
    column += CALLS
    _write(out, theta, v, deltas, second, column, size, weight, delta, power, KIND, SHRINK, TENSOR_DELTA)
    column += CALLS
    _write(out, theta, v, deltas, third, column, size, weight, delta, power, KIND, SHRINK, TENSOR_DELTA)
    column += CALLS
    _write(out, theta, v, deltas, fourth, column, size, weight, delta, power, KIND, SHRINK, TENSOR_DELTA)


def fill(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int) -> None:
    """Fill `rows`, (draws, weights) in any floating type, from float32 θ and v̂ on the same CUDA device."""
    draws, size = rows.shape
    delta, tensor = rule.delta, isinstance(rule.delta, Tensor)
    blocks = triton.cdiv(size, 4 * _CALLS)
    with torch.cuda.device(theta.device):
        _kernel[(blocks * draws,)](
            rows, theta, v, delta if tensor else theta, size, blocks,
            rule.weight, 0.0 if tensor else delta, rule.power, seed,
            KIND=_POWERS.get(rule.power, 2), SHRINK=rule.shrink, TENSOR_DELTA=tensor, CALLS=_CALLS, num_warps=8,
        )  # fmt: skip
