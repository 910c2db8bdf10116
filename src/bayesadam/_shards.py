"""Tensors of which every process holds a part: torch's DTensor, as FSDP2 makes them.

torch.distributed.tensor takes a second to import and is missing from some builds, so it is imported only for a DTensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bayesadam.errors import MatchError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is sharded over processes; while nothing has imported DTensor there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_placements(name: str, parameter: DTensor) -> None:
    """Refuse what is neither split nor copied: a part must be a box of the whole tensor."""
    from torch.distributed.tensor import Replicate, Shard

    odd = [placement for placement in parameter.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise MatchError(f"parameter {name!r} is placed as {odd[0]}: only Shard and Replicate work")


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; all of it where it is not sharded."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every process, all of which must call it; a partial sum is added up here."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def box(like: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this process's part lies in the whole tensor, and its shape; a process without any has a length of 0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(offset), tuple(shape)


def wrapped(part: Tensor, like: DTensor) -> Tensor:
    """Parts as one tensor placed as `like`; leading dimensions that `like` lacks are whole on every process."""
    from torch.distributed.tensor import DTensor, Shard

    extra = part.dim() - like.dim()
    placements = [Shard(p.dim + extra) if isinstance(p, Shard) else p for p in like.placements]
    shape = torch.Size((*part.shape[:extra], *like.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, on the device of `like` and sharded as it is; leading dimensions may come before.

    A tensor that every process holds whole is cut without communication.
    """
    if not is_sharded(like):
        return whole(tensor).to(like.device)
    if is_sharded(tensor) and tensor.dim() == like.dim():
        return tensor.redistribute(like.device_mesh, like.placements)
    offset, shape = box(like)
    here: tuple[Any, ...] = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    part = whole(tensor)[(..., *here)]
    return wrapped(part.to(like.device, copy=True).contiguous(), like)


def extremes(tensor: Tensor) -> Tensor:
    """(smallest, largest) entry as one tensor, (−∞, ∞) or NaN where an entry is not a number."""
    if not is_sharded(tensor):
        return torch.stack(torch.aminmax(tensor))
    from torch.distributed.tensor import DTensor, Partial

    part = own_part(tensor)
    pair = part.new_full((2,), -math.inf)
    if part.numel():
        low, high = torch.aminmax(part)
        # The maximum over processes may drop a NaN.
        pair = torch.stack((-low, high)).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    partial = [Partial("max")] * tensor.device_mesh.ndim
    low, high = whole(DTensor.from_local(pair, tensor.device_mesh, partial, run_check=False))
    return torch.stack((-low, high))


def agreed(number: int, like: DTensor) -> int:
    """The number of the first process of the mesh, on every one of them."""
    mesh = like.device_mesh
    value = torch.tensor(number, dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
    return int(value)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules to which `fully_shard` was applied, outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Reshard every FSDP2 module: a forward without a backward leaves the root's parameters gathered."""
    for module in fsdp_modules(model):
        module.reshard()


def is_first_rank() -> bool:
    """Whether this process is the one that logs and writes."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def on_first_rank(work: Callable[[], Any]) -> None:
    """`work` done by the first rank alone, its failure raised on all."""
    failure: list[Exception | None] = [None]
    if is_first_rank():
        try:
            work()
        except Exception as error:
            # Raised below on every rank: the others would wait for ever.
            failure = [error]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values in its sharded parameters; on leaving, by whatever way, the very same bits as before.

    They are written into the shards' own memory: FSDP2 gathers from there, whatever the parameter's `.data` may be.
    """
    reshard(model)
    shards = {name: own_part(parameter) for name, parameter in model.named_parameters() if name in values}
    before = {name: shard.clone() for name, shard in shards.items()}

    @torch.no_grad()
    def write(named: Mapping[str, Tensor]) -> None:
        for name, shard in shards.items():
            shard.copy_(own_part(named[name]))

    try:
        write(values)
        yield
    finally:
        write(before)
        reshard(model)
        if not all(is_sharded(parameter) for name, parameter in model.named_parameters() if name in before):
            # A forward that raised half-way: the next one would use weights that are still gathered.
            inner: set[nn.Module] = set()
            for module in fsdp_modules(model):
                # Older releases have no reset.
                if module not in inner and hasattr(module, "reset_iter_state"):
                    module.reset_iter_state()
                inner.update(module.modules())
