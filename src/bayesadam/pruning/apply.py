"""Masks applied: weights set to 0, and held there while training continues."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bayesadam._alone import unwrap
from bayesadam.errors import SettingError
from bayesadam.pruning.names import checked_masks, owners

Model = TypeVar("Model", bound=nn.Module)
# First moments: what would carry a weight away from 0 once the masks are lifted.
_MOMENTUM_KEYS = ("exp_avg", "momentum_buffer")


def prune(model: Model, masks: Mapping[str, Tensor], *, inplace: bool = True) -> Model:
    """θ ← θ where the mask is True, 0 elsewhere.

    Every name and shape is checked before a weight is written. Parameters without a mask are left alone; the model may
    be wrapped for data parallelism or compiled. `inplace=False` prunes and returns a deep copy.
    """
    checked_masks(unwrap(model), masks)
    if not inplace:
        model = copied(model)
    for parameter, removed in _removals(model, masks):
        _clear(parameter, removed)
    return model


def copied(model: Model) -> Model:
    """A deep copy, tied parameters still tied."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise SettingError(
            f"{type(model).__name__} cannot be copied ({error}). Where torch.nn.utils.prune holds some of its weights, make "
            "that permanent first with its remove(module, name)"
        ) from error


class PrunedHandle:
    """Holds the masks over a model until `remove` or the end of the `with` block."""

    def __init__(self, removals: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._removals = removals
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(_gradient_hook(removed))  # type: ignore[no-untyped-call]
            for parameter, removed in removals
            if parameter.requires_grad
        ]

    def apply(self, *_: Any) -> None:
        """Set the pruned weights to 0 once more."""
        for parameter, removed in self._removals:
            _clear(parameter, removed)

    def watch(self, optimizer: Optimizer) -> None:
        """Clear the pruned weights' momentum, and apply the masks after each of the optimiser's steps."""
        for parameter, removed in self._removals:
            state = optimizer.state.get(parameter, {})
            for key in _MOMENTUM_KEYS:
                moment = state.get(key)
                if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                    _clear(moment, removed)
        self._hooks.append(optimizer.register_step_post_hook(self.apply))

    def remove(self) -> None:
        """Let the weights go; they are 0 until training moves them."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> PrunedHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def keep_pruned(
    model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> PrunedHandle:
    """Prune the model, and keep it pruned through fine-tuning.

    Gradients of pruned weights are set to 0 before they reach the norm of a clipping or the optimiser, and the masks are
    applied after every step. Use it in a `with` block, or call `remove` at the end. Second moments are left alone. Without
    the optimiser that trains the model, or several, call `apply` after each step.
    """
    prune(model, masks)
    handle = PrunedHandle(_removals(model, masks))
    for one in (optimizer,) if isinstance(optimizer, Optimizer) else optimizer or ():
        handle.watch(one)
    return handle


def to_torch_prune(model: Model, masks: Mapping[str, Tensor]) -> Model:
    """Register the masks with `torch.nn.utils.prune`, on every module that holds the parameter.

    Its `is_pruned`, `remove` and the rest then work: `weight` becomes `weight_orig` × `weight_mask`.
    """
    inner = unwrap(model)
    held = owners(inner)
    for name, mask in checked_masks(inner, masks).items():
        for module, key in {(owner.module, owner.key): None for owner in held[name]}:
            torch_prune.custom_from_mask(module, key, mask.to(getattr(module, key)))  # type: ignore[no-untyped-call]
    return model


def from_torch_prune(model: nn.Module) -> dict[str, Tensor]:
    """The masks that `torch.nn.utils.prune` has put on a model, by the names the parameters had before."""
    masks: dict[str, Tensor] = {}
    for ways in owners(unwrap(model)).values():
        name, module, key = ways[0]
        mask = module._buffers.get(f"{key.removesuffix('_orig')}_mask") if key.endswith("_orig") else None
        if mask is not None:
            masks[name.removesuffix("_orig")] = mask != 0
    return masks


def _removals(model: nn.Module, masks: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that lose weights, with True at these."""
    inner = unwrap(model)
    parameters = dict(inner.named_parameters())
    found = ((parameters[name], ~mask) for name, mask in checked_masks(inner, masks).items())
    return [(parameter, removed.to(parameter.device)) for parameter, removed in found if bool(removed.any())]


@torch.no_grad()
def _clear(tensor: Tensor, removed: Tensor) -> None:
    # Not a product: it would keep NaN, and make −0.
    tensor.masked_fill_(removed, 0)


def _gradient_hook(removed: Tensor) -> Any:
    return lambda gradient: gradient if gradient.is_sparse else gradient.masked_fill(removed, 0)
