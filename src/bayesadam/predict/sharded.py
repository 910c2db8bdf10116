"""Predictions of a model that FSDP2 has sharded: gathered whole where that fits, module by module where it does not.

FSDP2's hooks gather weights into memory of its own, past anything that is put in their place and past autograd's
forward mode. So they are set aside for the call, and what they do is done here, with weights of our choosing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from bayesadam._shards import fsdp_modules, is_sharded, whole
from bayesadam.errors import BayesAdamError, MemoryBudgetError, SettingError
from bayesadam.predict.call import Call
from bayesadam.readers.match import own_parameters

# θ, v̂, σ², μ in the parameters' type, and a draw.
_COPIES = 5
Gather = Callable[[str], Tensor]


def fits(gaussian: Any, predictive: str, budget: int) -> bool:
    """Whether the whole posterior may be gathered on every process; the exact method cannot do without.

    Raises:
        MemoryBudgetError: it may not, and must.
    """
    needed: int = _COPIES * sum(theta.numel() * theta.element_size() for theta in gaussian.mode.values())
    if needed > budget and predictive == "linearised":
        raise MemoryBudgetError(
            f"predictive='linearised' gathers a sharded posterior on every process, about {needed:,} bytes, and the "
            f"memory budget is {budget:,}: raise memory_budget, or use predictive='linearised-sampled', which gathers "
            "one FSDP module at a time"
        )
    return needed <= budget


@contextmanager
def gathered(gaussian: Any) -> Iterator[Any]:
    """The posterior and its model in whole tensors on every process; the model's shards are back when it ends."""
    model = gaussian.model
    _check_fsdp(model)
    with _without_fsdp(model):
        named = {name: p for name, p in model.named_parameters() if is_sharded(p)}

        def gather(name: str) -> Tensor:
            if name not in gaussian.mode:
                return whole(named[name].detach())
            # Replaced at every call: it needs a shape, a type and a device, no values.
            return torch.zeros((), dtype=named[name].dtype, device=named[name].device).expand(named[name].shape)

        with _holding(model, named, gather):
            yield gaussian.gathered(model)


def draws_by_module(
    gaussian: Any, call: Call, inputs: Any, predictive: str, generator: torch.Generator | None, n: int
) -> tuple[Tensor, Tensor]:
    """Draws of f, (n, batch, ...), and f(x; μ); one FSDP module's weights are whole at a time, as in training.

    Every process runs 1 + n forwards, each on all of its own batch. The linearised network's draws are
    f(x; μ) + J (θ − μ), weights being dual numbers.
    """
    model, mean = gaussian.model, gaussian.mean
    _check_fsdp(model)
    modules = fsdp_modules(model)
    owner = {id(parameter): module for module in modules for parameter in module.parameters()}
    named = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    groups = [(module, {name: p for name, p in named.items() if owner[id(p)] is module}) for module in modules]

    def at_mean(name: str) -> Tensor:
        return whole(mean.get(name, named[name]).detach().to(named[name].dtype))

    def at(theta: Mapping[str, Tensor], name: str) -> Tensor:
        return whole(theta[name]) if name in theta else at_mean(name)

    def along(theta: Mapping[str, Tensor], name: str) -> Tensor:
        centre = at_mean(name)
        dual: Tensor = forward_ad.make_dual(centre, at(theta, name) - centre)  # type: ignore[no-untyped-call]
        return dual

    def forward(gather: Gather) -> Tensor:
        """Each FSDP module's own weights are gathered as it starts and let go as it ends."""
        with ExitStack() as handles:
            for module, own in groups:
                weights = ExitStack()
                handles.enter_context(weights)

                def enter(module: nn.Module, _: Any, weights: ExitStack = weights, own: Any = own) -> None:
                    weights.enter_context(_holding(module, own, gather))

                handles.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                leave = module.register_forward_hook(lambda *_, own=weights: own.close(), always_call=True)
                handles.callback(leave.remove)
            return call({}, inputs)

    def forward_mode(theta: Mapping[str, Tensor]) -> Tensor:
        with forward_ad.dual_level():
            try:
                value, tangent = forward_ad.unpack_dual(forward(partial(along, theta)))  # type: ignore[no-untyped-call]
            except NotImplementedError as error:
                raise BayesAdamError(
                    f"an operation of the model has no forward-mode derivative ({error}): raise memory_budget, so that "
                    "the whole posterior is gathered and other ways can be taken, or use predictive='sampled'"
                ) from error
            total: Tensor = value if tangent is None else value + tangent
            return total

    outputs = []
    with _without_fsdp(model), torch.no_grad():
        for _ in range(n):
            theta = gaussian.sample(generator=generator)
            outputs.append(forward(partial(at, theta)) if predictive == "sampled" else forward_mode(theta))
        found = torch.stack(outputs)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        return found, forward(at_mean).to(found.dtype)


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """The model's FSDP2 modules as the plain ones they were, without hooks; their parameters stay shards."""
    from torch.distributed.fsdp import FSDPModule

    before = [(m, type(m), m._forward_pre_hooks, m._forward_hooks) for m in fsdp_modules(model)]
    try:
        for module, kind, pre_hooks, hooks in before:
            module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
            module._forward_pre_hooks, module._forward_hooks = _foreign(pre_hooks), _foreign(hooks)
        yield
    finally:
        for module, kind, pre_hooks, hooks in before:
            module.__class__ = kind
            module._forward_pre_hooks, module._forward_hooks = pre_hooks, hooks


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


def _check_fsdp(model: nn.Module) -> None:
    """Refuse tensors sharded by anything else: what their layers' hooks do is not known here."""
    # First, since it reshards what FSDP2 has left gathered.
    parameters = own_parameters(model)
    ours = {id(p) for module in fsdp_modules(model) for p in module.parameters()}
    for name, parameter in parameters.items():
        if is_sharded(parameter) and (id(parameter) not in ours or sum(p.is_shard() for p in parameter.placements) > 1):
            raise SettingError(
                f"parameter {name!r} is placed as {parameter.placements} by something other than FSDP2: to predict, "
                "use posterior.gathered(model) with a plain model of the same architecture, or run the model yourself "
                "inside posterior.sampled()"
            )


@contextmanager
def _holding(module: nn.Module, named: Mapping[str, Tensor], gather: Gather) -> Iterator[None]:
    """The module with gathered tensors for its sharded parameters, those in `named`, by the names there."""
    names = {id(parameter): name for name, parameter in named.items()}
    held = [
        (owner, key, parameter)
        for owner in module.modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and id(parameter) in names
    ]
    tensors = {name: gather(name) for name in dict.fromkeys(names[id(parameter)] for _, _, parameter in held)}
    try:
        for owner, key, parameter in held:
            # As torch.func.functional_call does: a tensor, which may carry a tangent, in a parameter's place.
            owner._parameters[key] = tensors[names[id(parameter)]]  # type: ignore[assignment]
        yield
    finally:
        for owner, key, parameter in held:
            owner._parameters[key] = parameter
