"""Random draws μ + ε (w v̂ᵖ + δ)^(-1/2) in one pass over μ and v̂.

A parameter's stream of random numbers is seeded from the draw's seed and the parameter's *name*, so it does not depend
on which other parameters there are, on their order, or on how the work is split: a process with a part of a parameter
draws that part of the whole parameter's draw. Streams differ between kinds of device, as torch's own do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayesadam._shards import agreed, box, is_sharded, own_part, wrapped
from bayesadam.gaussian.settings import Part, PrecisionRule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# A block fits a CPU core's cache. Part of what a seed means: changing it changes every draw.
_BLOCK = 65_536
_THREADED_FROM = 4 * _BLOCK


def fresh_seed(generator: torch.Generator | None) -> int:
    """One 63-bit seed from the user's generator, or from torch's default one."""
    device = generator.device if generator is not None else torch.device("cpu")
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


def common_seed(generator: torch.Generator | None, named: Mapping[str, Tensor]) -> int:
    """A fresh seed; where parameters are sharded, the first process's, so that the parts belong to one draw."""
    seed = fresh_seed(generator)
    shard = next((tensor for tensor in named.values() if is_sharded(tensor)), None)
    return seed if shard is None else agreed(seed, shard)


def stream_seed(seed: int, name: str, *indices: int) -> int:
    """A 63-bit seed for one parameter's stream, or for a block of it.

    >>> stream_seed(0, "weight") != stream_seed(0, "bias")
    True
    """
    text = "\0".join([str(seed), name, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def standard_normal(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """ε ~ N(0, 1) of a shape, in the type and place of `like`, from a stream of its own.

    On a CPU numpy draws: it is several times faster than torch there.
    """
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        random = np.random.Generator(np.random.SFC64(seed))
        kind = np.float32 if like.dtype == torch.float32 else np.float64
        return torch.from_numpy(random.standard_normal(tuple(shape), kind))
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device).normal_(generator=generator)


def draw(
    mode: Tensor,
    second_moment: Tensor,
    rule: PrecisionRule,
    *,
    seed: int,
    n: int | None,
    dtype: torch.dtype,
    part: Part | None = None,
) -> Tensor:
    """μ + ε (w v̂ᵖ + δ)^(-1/2), shape (n, *shape) or the parameter's own; of a sharded parameter this process's part.

    Besides the result at most a few blocks of memory are used, and on CUDA with Triton none. With `part` the tensors
    are a part of a parameter, and the draw is that part of the whole parameter's.
    """
    if is_sharded(mode):
        return _draw_shard(mode, second_moment, rule, seed=seed, n=n, dtype=dtype)
    out = torch.empty((n or 1, *mode.shape), dtype=dtype, device=mode.device)
    if out.numel():
        theta, v = mode.reshape(-1), second_moment.reshape(-1)
        if isinstance(rule.delta, Tensor):
            rule = replace(rule, delta=rule.delta.to(theta).reshape(-1))
        fill = _filler(theta.device.type, theta.dtype)
        fill(out.view(out.shape[0], -1), theta, v, rule, seed, part or Part(0, theta.numel()))
    return out if n is not None else out[0]


def _draw_shard(mode: DTensor, second_moment: Tensor, rule: PrecisionRule, *, n: int | None, **options: Any) -> Tensor:
    theta, v = own_part(mode), own_part(second_moment)
    delta = own_part(rule.delta) if isinstance(rule.delta, Tensor) else rule.delta
    offset, shape = box(mode)
    if 0 in shape or is_run(shape, mode.shape):
        first = reduce(lambda number, at: number * at[1] + at[0], zip(offset, mode.shape, strict=True), 0)
        part = Part(first, mode.numel())
        return wrapped(draw(theta, v, replace(rule, delta=delta), n=n, part=part, **options), mode)
    # Not a run of the flat parameter (split by columns, say): draw in full, keep the box.
    here = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))

    def filled(part: Tensor) -> Tensor:
        full = part.new_ones(tuple(mode.shape))
        full[here] = part
        return full

    delta = filled(delta) if isinstance(delta, Tensor) else delta
    drawn = draw(filled(theta), filled(v), replace(rule, delta=delta), n=n, **options)
    return wrapped(drawn[((slice(None),) if n is not None else ()) + here].clone(), mode)


def is_run(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a box of a tensor is one run of its flat entries: the dimensions after the first long one are whole.

    >>> is_run((2, 3), (5, 3)), is_run((5, 2), (5, 3)), is_run((1, 2), (5, 3))
    (True, False, True)
    """
    long = next((i for i, size in enumerate(shape) if size > 1), len(shape))
    return tuple(shape[long + 1 :]) == tuple(whole[long + 1 :])


def _filler(device: str, dtype: torch.dtype) -> Callable[..., None]:
    if device == "cpu":
        return _fill_on_cpu
    return (_triton_fill() if device == "cuda" and dtype == torch.float32 else None) or _fill_row_by_row


@cache
def _triton_fill() -> Callable[..., None] | None:
    if torch.version.hip is not None:
        return None
    try:
        from bayesadam.gaussian._triton import fill
    except ImportError:
        return None
    return fill


def _fill_row_by_row(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int, part: Part) -> None:
    """On any device, with torch's own generator."""
    mean, std = rule.mean(theta, v), rule.precision(v).rsqrt_()
    generator = torch.Generator(device=theta.device)
    here = slice(part.first, part.first + theta.numel())
    for number, row in enumerate(rows):
        whole = row if row.dtype == theta.dtype and part.total == len(row) else theta.new_empty(part.total)
        noise = whole.normal_(generator=generator.manual_seed(stream_seed(seed, "row", number)))[here]
        noise.mul_(std).add_(mean)
        if whole is not row:
            row.copy_(noise)


def _fill_on_cpu(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int, part: Part) -> None:
    """Block by block in cache, blocks shared among threads.

    numpy does the arithmetic: its normals are drawn several times faster than torch's, outside the interpreter lock,
    and its ufuncs stay on the calling thread. A block that a part cuts is drawn whole.
    """
    width = min(_BLOCK, part.total)
    height = _BLOCK // width
    end = part.first + theta.numel()
    starts = range(part.first // width * width, end, width)
    blocks = [(start, first) for start in starts for first in range(0, rows.shape[0], height)]
    means, moments = theta.numpy(), v.numpy()
    deltas = rule.delta.numpy() if isinstance(rule.delta, Tensor) else rule.delta

    def work(mine: list[tuple[int, int]]) -> None:
        buffer = np.empty((height, width), means.dtype)
        known = -1
        for start, first in mine:
            inside = slice(max(part.first - start, 0), min(width, end - start))
            here = slice(start + inside.start - part.first, start + inside.stop - part.first)
            if start != known:
                known = start
                data = np.sqrt(moments[here]) if rule.power == 0.5 else np.power(moments[here], rule.power)
                data *= rule.weight
                total = data + (deltas[here] if isinstance(deltas, np.ndarray) else deltas)
                mean = means[here] * (data / total) if rule.shrink else means[here]
                root = np.sqrt(total, out=total)
            some = rows[first : first + height, here]
            block = buffer[: some.shape[0], : min(width, part.total - start)]
            random = np.random.Generator(np.random.SFC64(stream_seed(seed, "block", start, first)))
            random.standard_normal(out=block, dtype=block.dtype)
            noise = block[:, inside]
            noise /= root
            noise += mean
            some.copy_(torch.from_numpy(noise))

    threads = torch.get_num_threads() if rows.numel() >= _THREADED_FROM else 1
    if threads == 1:
        work(blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, [blocks[k::threads] for k in range(threads)]):
            pass
