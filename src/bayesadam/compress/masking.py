"""Masks by parameter name, True where a weight stays: on a model, and through further training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers, unwrap
from bayesadam.errors import MatchError
from bayesadam.weights.named import Named


class Owner(NamedTuple):
    """A module that holds a parameter, the parameter's key in it, and its name by that path."""

    name: str
    module: nn.Module | None
    key: str


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """The modules that hold each parameter, by its first name; tied parameters have several."""
    first: dict[int, str] = {}
    by_name: dict[str, list[Owner]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owner = Owner(f"{prefix}.{key}" if prefix else key, module, key)
                by_name.setdefault(first.setdefault(id(parameter), owner.name), []).append(owner)
    return by_name


def checked(model: nn.Module, masks: Named) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that lose weights, with True at these; every name, type and shape is checked."""
    parameters = dict(model.named_parameters())
    first_names = {owner.name: name for name, ways in owners(model).items() for owner in ways}
    removals: dict[str, Tensor] = {}
    for path, mask in masks.items():
        name = first_names.get(path)
        if name is None:
            raise MatchError(f"mask {path!r} is of no parameter of {type(model).__name__}")
        parameter = parameters[name]
        if getattr(mask, "dtype", None) != torch.bool or mask.shape != parameter.shape:
            kind = f"{type(mask).__name__} of {getattr(mask, 'dtype', 'no type')}"
            described = f"{kind} and of shape {tuple(getattr(mask, 'shape', ()))}"
            raise MatchError(
                f"mask {path!r} must be a boolean tensor of shape {tuple(parameter.shape)}, not a {described}"
            )
        removed = ~mask.to(parameter.device)
        if name in removals and not torch.equal(removals[name], removed):
            raise MatchError(f"{path!r} and {name!r} are one tied parameter, and their masks differ: give one")
        removals[name] = removed
    return [(parameters[name], removed) for name, removed in removals.items() if bool(removed.any())]


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Named) -> None:
    """θ ← θ where the mask is True, 0 elsewhere, in place; parameters without a mask are left alone.

    Every name and shape is checked before a weight is written. The model may be wrapped for data parallelism or
    compiled.
    """
    for parameter, removed in checked(unwrap(model), masks):
        # Not a product: it would keep NaN, and make −0.
        parameter.masked_fill_(removed, 0)


@contextmanager
def keep_pruned(model: nn.Module, masks: Named, optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[nn.Module]:
    """The model pruned by the masks, and kept so through fine-tuning in the `with` block.

    Gradients of pruned weights are 0 before they reach clipping or the optimiser; masks are applied after every step,
    whatever weight decay and momentum did.
    """
    optimizers, removals = listed_optimizers(optimizer), checked(unwrap(model), masks)

    @torch.no_grad()
    def to_zero(*_: object) -> None:
        for parameter, removed in removals:
            parameter.masked_fill_(removed, 0)

    to_zero()
    hooks = [each.register_step_post_hook(to_zero) for each in optimizers]
    for parameter, removed in removals:
        if parameter.requires_grad:
            hook = lambda gradient, removed=removed: gradient.masked_fill(removed, 0)  # noqa: E731
            hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield model
    finally:
        for handle in hooks:
            handle.remove()
