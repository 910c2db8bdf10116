"""Random draws μ + ε (w v̂ᵖ + δ)^(-1/2) in one pass over μ and v̂.

A parameter's stream of random numbers is seeded from the draw's seed and the parameter's *name*, so it does not depend
on which other parameters there are, on their order, or on how the work is split. Streams differ between kinds of device,
as torch's own do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from bayesadam.posterior.formulas import precision, shrunk_mean
from bayesadam.posterior.settings import Precision

# A block fits a CPU core's cache, and torch runs operations of at most this size on one thread, which leaves the
# parallelism to us. Part of what a seed means: changing it changes every draw.
_CPU_BLOCK = 32_768
_DEVICE_BLOCK = 1 << 24
_THREADED_FROM = 8 * _CPU_BLOCK


def fresh_seed(generator: torch.Generator | None) -> int:
    """One 63-bit seed from the user's generator, or from torch's default one."""
    device = generator.device if generator is not None else torch.device("cpu")
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def stream_seed(seed: int, name: str, *indices: int) -> int:
    """A 63-bit seed for one parameter's stream, or for a block of it.

    >>> stream_seed(0, "weight") != stream_seed(0, "bias")
    True
    """
    text = "\0".join([str(seed), name, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw(
    mode: Tensor,
    second_moment: Tensor,
    *,
    weight: float,
    delta: Precision,
    power: float,
    shrink: bool,
    seed: int,
    n: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """μ + ε (w v̂ᵖ + δ)^(-1/2), shape (n, *shape) or the parameter's own; μ is θ, or w c/(w c + δ) θ with `shrink`.

    Beside the result at most a few blocks of memory are used, and on CUDA with Triton none.
    """
    out = torch.empty((n or 1, *mode.shape), dtype=dtype, device=mode.device)
    if out.numel():
        rows = out.view(out.shape[0], -1)
        theta, v = mode.reshape(-1), second_moment.reshape(-1)
        deltas = delta.to(theta).reshape(-1) if isinstance(delta, Tensor) else delta
        fill = _triton_fill() if mode.device.type == "cuda" and theta.dtype == torch.float32 else None
        if fill is not None:
            fill(rows, theta, v, weight=weight, delta=deltas, power=power, shrink=shrink, seed=seed)
        else:
            _fill_in_blocks(rows, theta, v, weight=weight, delta=deltas, power=power, shrink=shrink, seed=seed)
    return out if n is not None else out[0]


@cache
def _triton_fill() -> Callable[..., None] | None:
    if torch.version.hip is not None:
        return None
    try:
        from bayesadam.posterior._triton import fill
    except ImportError:
        return None
    return fill


def _fill_in_blocks(
    rows: Tensor, theta: Tensor, v: Tensor, *, weight: float, delta: Precision, power: float, shrink: bool, seed: int
) -> None:
    on_cpu = theta.device.type == "cpu"
    block = _CPU_BLOCK if on_cpu else _DEVICE_BLOCK
    width = min(block, theta.numel())
    blocks = [
        (start, first) for start in range(0, theta.numel(), width) for first in range(0, rows.shape[0], block // width)
    ]

    def work(mine: list[tuple[int, int]]) -> None:
        generator = torch.Generator(device=theta.device)
        known = -1
        for start, first in mine:
            here = slice(start, start + width)
            if start != known:
                known = start
                deltas = delta[here] if isinstance(delta, Tensor) else delta
                mean = shrunk_mean(theta[here], v[here], weight, deltas, power) if shrink else theta[here]
                std = precision(v[here], weight, deltas, power).rsqrt_()
            part = rows[first : first + block // width, here]
            in_place = part.dtype == theta.dtype and part.is_contiguous()
            noise = part if in_place else torch.empty_like(part, dtype=theta.dtype)
            noise.normal_(generator=generator.manual_seed(stream_seed(seed, "block", start, first)))
            noise.mul_(std).add_(mean)
            if not in_place:
                part.copy_(noise)

    threads = torch.get_num_threads() if on_cpu and rows.numel() >= _THREADED_FROM else 1
    if threads == 1:
        work(blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, [blocks[k::threads] for k in range(threads)]):
            pass
