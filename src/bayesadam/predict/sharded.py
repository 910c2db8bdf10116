"""Predictions of a model that FSDP2 has sharded: it is gathered whole on every process for the call."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from bayesadam._shards import fsdp_modules, is_sharded, whole
from bayesadam.errors import BayesAdamError, MemoryBudgetError, SettingError
from bayesadam.readers.match import own_parameters

# θ, v̂, σ², μ in the parameters' type, and a draw.
_COPIES = 5


@contextmanager
def gathered(gaussian: Any, budget: int) -> Iterator[Any]:
    """The posterior and its model in whole tensors on every process; the model's shards are back when it ends.

    FSDP2's hooks gather weights into memory of their own, past anything that is put in their place. So they are set
    aside for the call. A posterior that does not fit the budget, in bytes, is refused.
    """
    needed = _COPIES * sum(theta.numel() * theta.element_size() for theta in gaussian.mode.values())
    if needed > budget:
        raise MemoryBudgetError(
            f"a prediction gathers a sharded posterior on every process, about {needed:,} bytes, and the memory budget "
            f"is {budget:,}: raise memory_budget, or run the model yourself inside posterior.sampled()"
        )
    from torch.distributed.fsdp import FSDPModule

    # First, since it reshards what FSDP2 has left gathered.
    parameters, modules = own_parameters(gaussian.model), fsdp_modules(gaussian.model)
    ours = {id(p) for module in modules for p in module.parameters()}
    for name, p in parameters.items():
        if is_sharded(p) and (id(p) not in ours or sum(place.is_shard() for place in p.placements) > 1):
            raise SettingError(
                f"parameter {name!r} is placed as {p.placements} by something other than FSDP2: to predict, use "
                "posterior.gathered(model) with a plain model of the same architecture, or run the model yourself "
                "inside posterior.sampled()"
            )
    plain = {}
    for name, p in gaussian.model.named_parameters():
        if is_sharded(p):
            # A weight of the posterior is replaced at every call: it needs a shape, a type and a device, no values.
            empty = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
            plain[id(p)] = empty if name in gaussian.mode else whole(p.detach())
    hooks = [(m, type(m), m._forward_pre_hooks, m._forward_hooks) for m in modules]
    shards = [(m, key, p) for m in gaussian.model.modules() for key, p in m._parameters.items() if id(p) in plain]
    try:
        for module, kind, before, after in hooks:
            module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
            module._forward_pre_hooks, module._forward_hooks = _foreign(before), _foreign(after)
        for module, key, p in shards:
            module._parameters[key] = plain[id(p)]
        yield gaussian.gathered(gaussian.model)
    finally:
        for module, key, p in shards:
            module._parameters[key] = p
        for module, kind, before, after in hooks:
            module.__class__, module._forward_pre_hooks, module._forward_hooks = kind, before, after


def _foreign(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """The hooks that are not FSDP2's, of which there must be one: left in place, it would undo every draw."""
    owners = {key: str(getattr(hook, "__module__", "")) for key, hook in hooks.items()}
    foreign = OrderedDict((k, hook) for k, hook in hooks.items() if not owners[k].startswith("torch.distributed.fsdp."))
    if len(foreign) == len(hooks):
        raise BayesAdamError(
            f"FSDP2's hooks were not found where torch {torch.__version__} should have them: to predict, use "
            "posterior.gathered(model) with a plain model of the same architecture"
        )
    return foreign
