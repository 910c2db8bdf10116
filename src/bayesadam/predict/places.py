"""One place of each example alone, such as the last token: where the model allows, its last layer is run there and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam.errors import MatchError, SettingError
from bayesadam.predict.call import Call, batch_size, examples, output_tensor
from bayesadam.predict.plan import agree, weakly

Positions = Literal["all", "last"] | Tensor


@dataclass(frozen=True)
class AfterModel:
    """The outputs of one place out of those of all."""

    def output(self, call: Call, inputs: Any, place: Tensor) -> Tensor:
        """(batch, outputs)."""
        return at_places(output_tensor(call.run(inputs)), place)


@dataclass(frozen=True)
class AtHead:
    """The last layer's inputs cut to one place, so that it gives (batch, outputs).

    Attributes:
        name: the layer's, a linear one whose output is the model's.
    """

    name: str

    def output(self, call: Call, inputs: Any, place: Tensor) -> Tensor:
        """(batch, outputs)."""

        def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (at_places(given[0], place), *given[1:])

        handle = call.model.get_submodule(self.name).register_forward_pre_hook(cut)
        try:
            return output_tensor(call.run(inputs))
        finally:
            handle.remove()


def at_places(outputs: Tensor, place: Tensor) -> Tensor:
    """(batch, places…, outputs) at one place each, (batch,), counted over all dimensions of places."""
    flat = outputs.flatten(1, -2)
    return flat[torch.arange(len(flat), device=flat.device), place.to(flat.device)]


_ways: WeakKeyDictionary[nn.Module, dict[Any, tuple[AtHead | AfterModel, torch.Size]]] = WeakKeyDictionary()


def placed(call: Call, params: Mapping[str, Tensor], inputs: Any) -> tuple[Call, torch.Size]:
    """The call that takes (inputs, place), and the shape of an example's outputs at all places.

    Which way is tried on one example, and remembered for the model and the kind of its inputs.
    """
    known = _ways.setdefault(call.model, {})
    leaves, spec = pytree.tree_flatten(inputs)
    kinds = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    key = weakly(call.forward), str(spec), kinds
    if key not in known:
        known[key] = _tried(call, params, examples(inputs, 0, 1))
    way, shape = known[key]
    return replace(call, at=way), shape


def at_one_place(
    call: Call, params: Mapping[str, Tensor], inputs: Any, positions: Positions | None
) -> tuple[Call, tuple[Any, Tensor]] | None:
    """The call and the inputs that give the outputs of one place of each example; None where more are asked for, or all."""
    several = isinstance(positions, Tensor) and positions.dtype == torch.bool
    if positions is None or several or (isinstance(positions, str) and positions == "all"):
        return None
    cut, shape = placed(call, params, inputs)
    return cut, (inputs, chosen_places(positions, inputs, shape).to(next(iter(params.values())).device))


def _tried(call: Call, params: Mapping[str, Tensor], one: Any) -> tuple[AtHead | AfterModel, torch.Size]:
    """The last layer, if cutting its inputs gives what cutting the outputs does; and the shape of the outputs."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            seen[name] = output

        return hook

    layers = [(name, m) for name, m in call.model.named_modules() if type(m) is nn.Linear]
    handles = [layer.register_forward_hook(note(name)) for name, layer in layers]
    try:
        with torch.no_grad():
            whole = call(params, one)
    finally:
        for handle in handles:
            handle.remove()
    shape = whole.shape[1:]
    found = [name for name, output in seen.items() if _same_memory(output, whole)] if len(shape) > 1 else []
    place = torch.full((1,), shape[:-1].numel() // 2, device=whole.device)
    for name in found:
        way = AtHead(name)
        try:
            with torch.no_grad():
                cut = replace(call, at=way)(params, (one, place))
        except (RuntimeError, IndexError, ValueError, MatchError):
            continue
        if cut.shape == (1, whole.shape[-1]) and agree(cut, at_places(whole, place)):
            return way, shape
    return AfterModel(), shape


def _same_memory(output: Any, whole: Tensor) -> bool:
    return isinstance(output, Tensor) and output.data_ptr() == whole.data_ptr() and output.shape == whole.shape


def chosen_places(positions: Positions, inputs: Any, shape: torch.Size) -> Tensor:
    """Places by number, (batch,), or a mask of them, (batch, places), of outputs of that shape, places first.

    The last one is that of the inputs' `attention_mask`, where there is one.
    """
    size, count = batch_size(inputs), shape[:-1].numel()
    if len(shape) < 2:
        raise MatchError(
            f"positions are of outputs (batch, places, outputs), but an example's have shape {tuple(shape)}"
        )
    if isinstance(positions, str):
        if positions == "all":
            return torch.ones(size, count, dtype=torch.bool)
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if mask is None or mask.shape != (size, count):
            return torch.full((size,), count - 1)
        last: Tensor = (mask.bool() * torch.arange(count, device=mask.device)).amax(dim=1)
        return last
    if positions.dtype == torch.bool:
        if positions.reshape(len(positions), -1).shape != (size, count):
            raise MatchError(f"a mask of positions has shape {(size, *shape[:-1])}, got {tuple(positions.shape)}")
        return positions.reshape(size, -1)
    if positions.shape != (size,) or positions.is_floating_point():
        raise MatchError(
            f"positions by number have shape ({size},), one for each example, got {tuple(positions.shape)}"
        )
    if not bool(((positions >= -count) & (positions < count)).all()):
        raise MatchError(f"positions are from 0 to {count - 1}, got {int(positions.min())} to {int(positions.max())}")
    return positions % count


def check_positions(positions: Positions | None) -> None:
    """Refuse what cannot be places."""
    if positions is not None and not isinstance(positions, Tensor) and positions not in ("all", "last"):
        raise SettingError(
            f"positions must be 'all', 'last', a place for each example, or a boolean mask, got {positions!r}"
        )
