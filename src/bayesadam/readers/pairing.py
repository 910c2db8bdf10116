"""The parameter behind each key of an optimiser's state, where there is nothing but order and shapes.

An optimiser is given its parameters as a list, and saves their numbers. With one group, that list is a selection of the
model's parameters in the model's order: all of them, or those that were not frozen. The name behind a key is certain if
the first and the last selection whose shapes agree give it the same name. Otherwise it is refused, never guessed.

How several groups were filled is for `bayesadam.readers.groups`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import own_part
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.identify import identify_reader
from bayesadam.readers.state import StateReader, as_number, has_tensors, parameter_shape

# A mark of groups that together are one list in the model's order.
ONE_LIST = "bayesadam: one list"
_BUFFER_SUFFIXES = ("running_mean", "running_var", "running_variance", "num_batches_tracked")
REMEDY = (
    "Pass param_names=[...], the parameter names in the order in which the optimiser was given them, or the model "
    "(Posterior.from_checkpoint)"
)
IN_ORDER = (
    ", or groups_in_order=True if each group was filled in the model's order, as by "
    "[p for name, p in model.named_parameters() if ...]"
)

Shapes = Mapping[str, torch.Size | None]


class AmbiguousError(MatchError):
    """Nothing contradicts the match, but more than one answer is possible."""


@dataclass(frozen=True)
class Slot:
    """One entry of the optimiser's list: its key, its group, the parameter's shape if known, whether it has a state.

    `decay` is the weight decay of its group, None where that has none.
    """

    key: Any
    group: int
    shape: torch.Size | None
    needed: bool
    decay: float | None = None


@dataclass(frozen=True)
class Pairing:
    """The name behind every key that can be identified, and why."""

    names: Mapping[Any, str]
    why: str


def slots_of(state_dict: Mapping[str, Any], reader: StateReader | None = None) -> list[Slot]:
    """The entries of an optimiser's list; None identifies the reader."""
    if reader is None:
        try:
            reader = identify_reader(state_dict)
        except StateError:
            reader = None
    always = reader is not None and reader.statistic == "identity"
    slots = []
    for number, group in enumerate(state_dict["param_groups"]):
        decay = group.get("weight_decay")
        decay = None if decay is None else as_number(decay, "weight_decay")
        for key in group["params"]:
            state = state_dict["state"].get(key, {})
            shape, needed = parameter_shape(state, reader), always or has_tensors(state)
            slots.append(Slot(key, 0 if group.get(ONE_LIST) else number, shape, needed, decay))
    return slots


def names_in(state_dict: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The parameters' names in the optimiser's order, where its state has them."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if keys and all(isinstance(key, str) for key in keys):
        return tuple(keys)
    if groups and all("param_names" in group for group in groups):
        return tuple(name for group in groups for name in group["param_names"])
    return None


def clean_names(keys: Iterable[str]) -> dict[str, str]:
    """Names without the prefixes of torch.compile and data parallelism, and the key behind each.

    >>> clean_names(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])
    {'0.weight': 'module._orig_mod.0.weight', '0.bias': 'module._orig_mod.0.bias'}
    """
    keys = list(keys)
    names = [".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names if len(set(names)) == len(keys) else keys, keys, strict=True))


# --- tensors by name that may be parameters ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The names in a state dict that may be parameters, in its order.

    Attributes:
        names: those of real or complex numbers that are no known buffers.
        repeats: those among them that repeat a tied tensor.
        whole: with those of integers and truth values, which an optimiser may list and keeps no state for.
    """

    names: tuple[str, ...]
    repeats: frozenset[str]
    whole: tuple[str, ...]

    @property
    def single(self) -> list[str]:
        """A tied tensor under its first name alone."""
        return [name for name in self.names if name not in self.repeats]

    def enough_for(self, count: int) -> list[str]:
        """The fewest that could be a list of so many: memory is also shared by parameters that were never tied."""
        if count <= len(self.single):
            return self.single
        if count <= len(self.names):
            return list(self.names)
        return [name for name in self.whole if name not in self.repeats or count > len(self.whole) - len(self.repeats)]


def parameter_names(weights: Mapping[str, Tensor]) -> Candidates:
    """What in a state dict may be parameters."""
    whole, names, repeats = [], [], []
    seen: set[tuple[Any, ...]] = set()
    identity = identities(weights)
    for name, tensor in getattr(weights, "outline", weights).items():
        if name.rpartition(".")[2] in _BUFFER_SUFFIXES:
            continue
        whole.append(name)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        names.append(name)
        if tensor.numel() and identity[name] in seen:
            repeats.append(name)
        seen.add(identity[name])
    return Candidates(tuple(names), frozenset(repeats), tuple(whole))


def shapes_of(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, torch.Size | None]:
    """Shapes by name; None for integers and truth values, which no state can belong to."""
    held = getattr(weights, "outline", weights)
    return {n: held[n].shape if held[n].is_floating_point() or held[n].is_complex() else None for n in names}


def keeps_order(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict is still in the order of the model's modules.

    torch notes the modules, in order, with a state dict. Without the note, names in alphabetical order are taken to
    have been sorted by someone.
    """
    names = list(weights)
    noted = getattr(weights, "_metadata", None)
    if isinstance(noted, Mapping):
        number = {module: number for number, module in enumerate(noted)}
        numbers = [number[module] for name in names if (module := name.rpartition(".")[0]) in number]
        if numbers:
            return numbers == sorted(numbers)
    return len(names) < 2 or names != sorted(names)


def without_copies(weights: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """The names that are no target's: those without the same name, `target` left out, beside them.

    >>> held = dict.fromkeys(["q_net.0.weight", "q_net_target.0.weight", "target.weight"], torch.zeros(2))
    >>> without_copies(held, list(held))
    ['q_net.0.weight', 'target.weight']
    """
    shapes = shapes_of(weights, names)
    original = {name: re.sub(r"_target(?=[._]|$)|(?<![a-z])target_", "", name) for name in names}
    return [name for name in names if original[name] == name or shapes.get(original[name]) != shapes[name]]


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tied tensor have in common; views of one flat buffer differ."""
    if tensor.is_meta:
        # A tensor on the disk, by its outline: whether it is tied is not known.
        return (id(tensor),)
    held = own_part(tensor)
    return (held.untyped_storage().data_ptr(), held.storage_offset(), held.shape, held.stride())


def identities(weights: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """`memory_of` by name: names of one tied tensor have the same.

    Lazy tensors lie at addresses that are used again, so they are identified by their outline.
    """
    return {name: memory_of(tensor) for name, tensor in getattr(weights, "outline", weights).items()}


# --- by order and shape --------------------------------------------------------------------------------------------------


def assign(slots: Sequence[Slot], names: Shapes, *, ordered: bool, in_order: bool) -> dict[Any, str]:
    """The name behind every key that can be identified; raises unless that is every key with a state.

    Args:
        slots: the optimiser's list.
        names: the shapes of what may be parameters.
        ordered: whether `names` are in the model's order.
        in_order: whether each of several groups is in the model's order, too.
    """
    groups = [[slot for slot in slots if slot.group == number] for number in sorted({s.group for s in slots})]
    if len(slots) > len(names):
        raise MatchError(
            f"the optimiser's state holds {len(slots)} parameters, the weights {len(names)} tensors that may be "
            f"parameters: it is another model's state. {REMEDY}"
        )
    listed, shapes = list(names), list(names.values())
    _require_shapes(slots, shapes)
    # Without an order each key stands alone, and only a shape that occurs once decides.
    alone = [[slot] for slot in slots if slot.needed]
    found: dict[Any, str] = {}
    for run in groups if ordered and (len(groups) == 1 or in_order) else alone:
        wanted = [slot.shape for slot in run]
        first, last = _positions(wanted, shapes), _positions(wanted[::-1], shapes[::-1])
        if first is None or last is None:
            _require_shapes(run, shapes)
            at = next((i for i, slot in enumerate(run) if slot.shape not in (None, shapes[i])), 0)
            raise MatchError(
                f"the optimiser's state is not in the order of the weights: key {run[at].key!r} has shape "
                f"{tuple(run[at].shape or ())} where {listed[at]!r} has {tuple(shapes[at] or ())}. {REMEDY}"
            )
        for slot, low, high in zip(run, first, last[::-1], strict=True):
            high = len(shapes) - 1 - high
            if low == high:
                found[slot.key] = listed[low]
            elif slot.needed:
                raise AmbiguousError(_ambiguity(slot, listed[low], listed[high], len(groups), ordered))
    doubled = [name for name, count in Counter(found.values()).items() if count > 1]
    if doubled:
        keys = [key for key, name in found.items() if name == doubled[0]]
        raise MatchError(
            f"by their shapes, the states under keys {keys[:4]} all belong to {doubled[0]!r}: it is another model's "
            f"state. {REMEDY}"
        )
    return found


def _positions(wanted: Sequence[torch.Size | None], shapes: Sequence[torch.Size | None]) -> list[int] | None:
    """The first selection of `shapes`, in order, that agrees with `wanted`, where None agrees with any.

    >>> _positions([torch.Size([2]), None], [torch.Size([3]), torch.Size([2]), torch.Size([4])])
    [1, 2]
    """
    positions: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(shapes) and shape is not None and shapes[at] != shape:
            at += 1
        if at == len(shapes):
            return None
        positions.append(at)
        at += 1
    return positions


def _require_shapes(slots: Sequence[Slot], shapes: Sequence[torch.Size | None]) -> None:
    """Refuse states of a shape that fewer weights have."""
    missing = Counter(s.shape for s in slots if s.shape is not None) - Counter(s for s in shapes if s is not None)
    for shape in missing:
        key = next(slot.key for slot in slots if slot.shape == shape)
        raise MatchError(
            f"the state under key {key!r} has shape {tuple(shape)}, and of the weights {shapes.count(shape)} have "
            f"that: it is another model's state. {REMEDY}"
        )


def _ambiguity(slot: Slot, first: str, last: str, groups: int, ordered: bool) -> str:
    described = "no shape" if slot.shape is None else f"shape {tuple(slot.shape)}"
    why = hint = ""
    if not ordered:
        why = " (the file keeps no order of its tensors, as safetensors files do not)"
    elif groups > 1:
        why, hint = f" ({groups} groups without names have no known order)", IN_ORDER
    return (
        f"the state under key {slot.key!r}, of {described}, may belong to {first!r} or to {last!r}{why}. {REMEDY}{hint}"
    )
