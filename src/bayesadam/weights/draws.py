"""Random draws μ + ε (w v̂ᵖ + δ)^(-1/2) in one pass over μ and v̂.

A parameter's stream is seeded from the draw's seed and the parameter's name, whatever other parameters there are and
however the work is split. Streams differ between kinds of device, as torch's own do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from bayesadam._shards import agreed, is_sharded, placed_like, whole
from bayesadam.weights.settings import PrecisionRule

# A block fits a CPU core's cache. Part of what a seed means: changing it changes every draw.
_BLOCK = 65_536
_THREADED_FROM = 4 * _BLOCK


def fresh_seed(generator: torch.Generator | None, named: Mapping[str, Tensor] | None = None) -> int:
    """One 63-bit seed from the user's generator or torch's own; of sharded parameters the first process's."""
    device = generator.device if generator is not None else torch.device("cpu")
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    shard = next((tensor for tensor in (named or {}).values() if is_sharded(tensor)), None)
    return seed if shard is None else agreed(seed, shard)


def stream_seed(seed: int, name: str, *indices: int) -> int:
    """A 63-bit seed for one parameter's stream, or for a block of it."""
    text = "\0".join([str(seed), name, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def standard_normal(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """ε ~ N(0, 1) in the type and place of `like`; on a CPU by numpy, several times faster than torch there."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        random = np.random.Generator(np.random.SFC64(seed))
        kind = np.float32 if like.dtype == torch.float32 else np.float64
        return torch.from_numpy(random.standard_normal(tuple(shape), kind))
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device).normal_(generator=generator)


def draw(
    mode: Tensor, second_moment: Tensor, rule: PrecisionRule, *, seed: int, n: int | None, dtype: torch.dtype
) -> Tensor:
    """μ + ε (w v̂ᵖ + δ)^(-1/2), (n, *shape) or the parameter's own; of a sharded one each process keeps its part."""
    if is_sharded(mode):
        rule = replace(rule, delta=whole(rule.delta)) if isinstance(rule.delta, Tensor) else rule
        return placed_like(draw(whole(mode), whole(second_moment), rule, seed=seed, n=n, dtype=dtype), mode)
    out = torch.empty((n or 1, *mode.shape), dtype=dtype, device=mode.device)
    if out.numel():
        if isinstance(rule.delta, Tensor):
            rule = replace(rule, delta=rule.delta.to(mode).reshape(-1))
        fill = _filler(mode, rule)
        fill(out.view(len(out), -1), mode.reshape(-1), second_moment.reshape(-1), rule, seed)
    return out if n is not None else out[0]


def _filler(theta: Tensor, rule: PrecisionRule) -> Callable[..., None]:
    if theta.device.type == "cpu":
        return _fill_on_cpu
    usual = rule.power == 0.5 and not rule.shrink and not isinstance(rule.delta, Tensor)
    if usual and theta.device.type == "cuda" and theta.dtype == torch.float32 and torch.version.hip is None:
        with suppress(ImportError):
            from bayesadam.weights._triton import fill

            return fill
    return _fill_row_by_row


def _fill_row_by_row(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int) -> None:
    """On any device, with torch's own generator."""
    mean, std = rule.mean(theta, v), rule.precision(v).rsqrt_()
    for number, row in enumerate(rows):
        row.copy_(standard_normal(theta.shape, theta, stream_seed(seed, "row", number)).mul_(std).add_(mean))


def _fill_on_cpu(rows: Tensor, theta: Tensor, v: Tensor, rule: PrecisionRule, seed: int) -> None:
    """Block by block in cache, by threads: numpy's normals are faster than torch's, and drawn outside the lock."""
    width = min(_BLOCK, theta.numel())
    height = _BLOCK // width
    means, moments = theta.numpy(), v.numpy()
    deltas = rule.delta.numpy() if isinstance(rule.delta, Tensor) else None

    def fill(start: int, first: int) -> None:
        here = slice(start, start + width)
        some = rows[first : first + height, here]
        data = np.sqrt(moments[here]) if rule.power == 0.5 else np.power(moments[here], rule.power)
        data *= rule.weight
        precision = data + (rule.delta if deltas is None else deltas[here])
        random = np.random.Generator(np.random.SFC64(stream_seed(seed, "block", start, first)))
        noise = random.standard_normal(tuple(some.shape), means.dtype.type)
        noise /= np.sqrt(precision)
        noise += means[here] * (data / precision) if rule.shrink else means[here]
        some.copy_(torch.from_numpy(noise))

    blocks = list(product(range(0, theta.numel(), width), range(0, len(rows), height)))
    if rows.numel() < _THREADED_FROM:
        for block in blocks:
            fill(*block)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, *zip(*blocks, strict=True)))
