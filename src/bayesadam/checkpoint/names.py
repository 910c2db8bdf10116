"""The parameter behind each key of an optimiser's state, where there is nothing but order and shapes.

An optimiser is given its parameters as a list, and saves their numbers. With one group, that list is a selection of the
model's parameters in the model's order: all of them, or those that were not frozen. The place of a key is then certain if
the first and the last selection whose shapes agree put it in the same place. Otherwise it is refused, never guessed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import own_part
from bayesadam.errors import MatchError

_BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")
_REMEDY = (
    "Pass param_names=[...], the parameter names in the order in which the optimiser was given them, or the model "
    "(Posterior.from_checkpoint)"
)


@dataclass(frozen=True)
class Slot:
    """One entry of the optimiser's list: its key, its group, the parameter's shape if known, whether it has a state."""

    key: Any
    group: int
    shape: torch.Size | None
    needed: bool


def parameter_names(weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """The names in a state dict that may be parameters, and those among them that repeat a tied tensor."""
    names: list[str] = []
    repeats: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in getattr(weights, "outline", weights).items():
        if name.rpartition(".")[2] in _BUFFER_SUFFIXES or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        names.append(name)
        memory = memory_of(tensor)
        if tensor.numel() and memory in seen:
            repeats.append(name)
        seen.add(memory)
    return names, repeats


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tied tensor have in common; views of one flat buffer differ."""
    if tensor.is_meta:
        # A tensor on the disk, by its outline: whether it is tied is not known.
        return (id(tensor),)
    held = own_part(tensor)
    return (held.untyped_storage().data_ptr(), held.storage_offset(), held.shape, held.stride())


def assign(slots: Sequence[Slot], names: Mapping[str, torch.Size], *, ordered: bool, in_order: bool) -> dict[Any, str]:
    """The name behind every key that can be identified; raises unless that is every key with a state.

    `names` has the shapes of what may be parameters, in the model's order or not (`ordered`); `in_order` says that each of
    several groups is in the model's order, too.
    """
    groups = [[slot for slot in slots if slot.group == number] for number in sorted({s.group for s in slots})]
    if len(slots) > len(names):
        raise MatchError(
            f"the optimiser's state holds {len(slots)} parameters, the weights {len(names)} tensors that may be "
            f"parameters: it is another model's state. {_REMEDY}"
        )
    # Without an order each key stands alone, and only a shape that occurs once decides.
    alone = [[slot] for slot in slots if slot.needed]
    runs = groups if ordered and (len(groups) == 1 or in_order) else alone
    listed, shapes = list(names), list(names.values())
    found: dict[Any, str] = {}
    for run in runs:
        wanted = [slot.shape for slot in run]
        first, last = _places(wanted, shapes), _places(wanted[::-1], shapes[::-1])
        if first is None or last is None:
            raise MatchError(_misfit(run, listed, shapes))
        for slot, low, high in zip(run, first, last[::-1], strict=True):
            high = len(shapes) - 1 - high
            if low == high:
                found[slot.key] = listed[low]
            elif slot.needed:
                raise MatchError(_ambiguity(slot, listed[low], listed[high], len(groups), ordered))
    doubled = [name for name, count in Counter(found.values()).items() if count > 1]
    if doubled:
        keys = [key for key, name in found.items() if name == doubled[0]]
        raise MatchError(
            f"by their shapes, the states under keys {keys[:4]} all belong to {doubled[0]!r}: it is another model's "
            f"state. {_REMEDY}"
        )
    return found


def _places(wanted: Sequence[torch.Size | None], shapes: Sequence[torch.Size]) -> list[int] | None:
    """The first selection of `shapes`, in order, that agrees with `wanted`; None agrees with any.

    >>> _places([torch.Size([2]), None], [torch.Size([3]), torch.Size([2]), torch.Size([4])])
    [1, 2]
    """
    places: list[int] = []
    place = 0
    for shape in wanted:
        while place < len(shapes) and shape is not None and shapes[place] != shape:
            place += 1
        if place == len(shapes):
            return None
        places.append(place)
        place += 1
    return places


def _misfit(run: Sequence[Slot], names: Sequence[str], shapes: Sequence[torch.Size]) -> str:
    available = Counter(shapes)
    missing = Counter(slot.shape for slot in run if slot.shape is not None) - available
    if missing:
        shape = next(iter(missing))
        key = next(slot.key for slot in run if slot.shape == shape)
        return (
            f"the state under key {key!r} has shape {tuple(shape)}, and of the weights {available[shape]} have that: it "
            f"is another model's state. {_REMEDY}"
        )
    place = next((i for i, slot in enumerate(run) if slot.shape not in (None, shapes[i])), 0)
    return (
        f"the optimiser's state is not in the order of the weights: key {run[place].key!r} has shape "
        f"{tuple(run[place].shape or ())} where {names[place]!r} has {tuple(shapes[place])}. {_REMEDY}"
    )


def _ambiguity(slot: Slot, first: str, last: str, groups: int, ordered: bool) -> str:
    described = "no shape" if slot.shape is None else f"shape {tuple(slot.shape)}"
    why = hint = ""
    if not ordered:
        why = " (the file keeps no order of its tensors, as safetensors files do not)"
    elif groups > 1:
        why = f" ({groups} groups without names have no known order)"
        hint = (
            ", or groups_in_order=True if each group was filled in the model's order, as by "
            "[p for name, p in model.named_parameters() if ...]"
        )
    return f"the state under key {slot.key!r}, of {described}, may belong to {first!r} or to {last!r}{why}. {_REMEDY}{hint}"
