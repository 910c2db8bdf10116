"""Posteriors over sharded parameters: each process draws and holds its own part of what one process would."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._shards import agreed, box, is_sharded, own_part, placed_like, recover, reshard, wrapped
from bayesadam.gaussian import noise
from bayesadam.gaussian.formulas import Part, PrecisionRule
from bayesadam.gaussian.settings import Precision


def common_seed(generator: torch.Generator | None, named: Mapping[str, Tensor]) -> int:
    """A fresh seed; where parameters are sharded, that of the first process, so that the parts belong to one draw."""
    seed = noise.fresh_seed(generator)
    shard = next((tensor for tensor in named.values() if is_sharded(tensor)), None)
    return seed if shard is None else agreed(seed, shard)


def prior_like(prior: Mapping[str, Precision], named: Mapping[str, Tensor]) -> dict[str, Precision]:
    """Prior precisions that are tensors, sharded as the parameters are."""
    return {
        name: placed_like(delta, named[name]) if isinstance(delta, Tensor) and is_sharded(named[name]) else delta
        for name, delta in prior.items()
    }


def draw(mode: Tensor, second_moment: Tensor, rule: PrecisionRule, **options: Any) -> Tensor:
    """`noise.draw`, of this process's part where the parameter is sharded."""
    if not is_sharded(mode):
        return noise.draw(mode, second_moment, rule, **options)
    theta, v = own_part(mode), own_part(second_moment)
    delta = own_part(rule.delta) if isinstance(rule.delta, Tensor) else rule.delta
    offset, shape = box(mode)
    if 0 in shape or is_run(shape, mode.shape):
        first = reduce(lambda number, at: number * at[1] + at[0], zip(offset, mode.shape, strict=True), 0)
        part = Part(first, mode.numel())
        drawn = noise.draw(theta, v, replace(rule, delta=delta), part=part, **options)
    else:
        # Not a run of the flat parameter (split by columns, say): draw in full, keep the box.
        here = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        lead = (slice(None),) if options["n"] is not None else ()
        v, theta = _filled(v, mode.shape, here), _filled(theta, mode.shape, here)
        delta = _filled(delta, mode.shape, here) if isinstance(delta, Tensor) else delta
        drawn = noise.draw(theta, v, replace(rule, delta=delta), **options)[lead + here].clone()
    return wrapped(drawn, mode)


def is_run(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a box of a tensor is one run of its flat entries: the dimensions after the first long one are whole.

    >>> is_run((2, 3), (5, 3)), is_run((5, 2), (5, 3)), is_run((1, 2), (5, 3))
    (True, False, True)
    """
    long = next((i for i, size in enumerate(shape) if size > 1), len(shape))
    return tuple(shape[long + 1 :]) == tuple(whole[long + 1 :])


def _filled(part: Tensor, shape: Sequence[int], here: tuple[slice, ...]) -> Tensor:
    full = part.new_ones(tuple(shape))
    full[here] = part
    return full


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values in its sharded parameters; on leaving, by whatever way, the very same bits as before.

    They are written into the shards' own memory: FSDP2 gathers from there, whatever the parameter's `.data` may be.
    """
    reshard(model)
    shards = {name: own_part(parameter) for name, parameter in model.named_parameters() if name in values}
    before = {name: shard.clone() for name, shard in shards.items()}
    try:
        _write(shards, values)
        yield
    finally:
        _write(shards, before)
        reshard(model)
        if not all(is_sharded(parameter) for name, parameter in model.named_parameters() if name in before):
            recover(model)


def _write(shards: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, shard in shards.items():
            shard.copy_(own_part(values[name]))
