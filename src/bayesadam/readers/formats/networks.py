"""The networks and the optimisers' states in a saved dictionary, and whether the one may have been trained by the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bayesadam.errors import MatchError, StateError
from bayesadam.readers.formats.fastai import ONE_LIST, torch_layout
from bayesadam.readers.formats.groups import Matched, matched
from bayesadam.readers.formats.identify import identify_reader, shape_behind
from bayesadam.readers.formats.names import REMEDY, AmbiguousError, Slot, parameter_names, shapes_of, without_copies
from bayesadam.readers.reader import StateReader, as_number, has_tensors, parameter_shape

_DEEPEST = 3

Keys = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """Weights under some keys of a file; `alone` is one tensor that no dictionary holds."""

    path: Keys
    tensors: Mapping[str, Tensor]
    alone: bool = False

    def place(self, name: str) -> Keys:
        """The keys that lead to a tensor."""
        return self.path if self.alone else (*self.path, name)


@dataclass(frozen=True, eq=False)
class Found:
    """The networks and the optimisers' states of a file, in its order."""

    networks: Sequence[Network] = ()
    optimizers: Mapping[Keys, Mapping[str, Any]] = field(default_factory=dict)


def dotted(path: Keys) -> str:
    """Keys as `weights_key` and `optimizer_key` have them."""
    return ".".join(path)


def joined(networks: Iterable[Network]) -> str:
    """Several networks as `weights_key` has them."""
    return ",".join(dotted(network.path) for network in networks)


def find(tree: Mapping[Any, Any]) -> Found:
    """Every set of weights and every optimiser's state down to the third level."""
    networks: list[Network] = []
    optimizers: dict[Keys, Mapping[str, Any]] = {}
    for path, value in branches(tree):
        if is_optimizer(value):
            optimizers[path] = value
        elif is_weights(value):
            networks.append(Network(path, value))
        elif isinstance(value, Tensor):
            networks.append(Network(path, {path[-1]: value}, alone=True))
    lists = [slots_of(state) for state in optimizers.values()]
    # A loss is a tensor, too: what stands alone counts only where an optimiser has one parameter, of its shape.
    single = {slots[0].shape for slots in lists if len(slots) == 1}
    return Found([n for n in networks if not n.alone or n.tensors[n.path[-1]].shape in single], optimizers)


def branches(tree: Mapping[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Dictionaries and numbers down to the third level, lists of states opened, states in torch's layout.

    What is weights or an optimiser's state is not looked into.
    """
    state = torch_layout(tree)
    yield path, state
    if is_weights(tree) or is_optimizer(state):
        return
    for key, value in tree.items():
        if not isinstance(key, str | int):
            continue
        here = (*path, str(key))
        if isinstance(value, Mapping) and len(here) <= _DEEPEST:
            yield from branches(value, here)
        elif isinstance(value, Tensor) and value.is_floating_point() and len(here) < _DEEPEST:
            yield here, value
        elif isinstance(value, list | tuple):
            items = [((*here, str(number)), torch_layout(item)) for number, item in enumerate(value)]
            yield from (item for item in items if is_optimizer(item[1]))


def is_weights(value: Any) -> bool:
    """Whether it is a dictionary of tensors by name."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    others = [key for key, item in value.items() if not isinstance(item, Tensor) and not key.endswith("_extra_state")]
    # A dictionary of losses holds single numbers, one of random states holds bytes.
    return not others and any(tensor.is_floating_point() and tensor.dim() > 0 for tensor in tensors)


def is_optimizer(value: Any) -> bool:
    """Whether it is an optimiser's state in torch's layout."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list | tuple)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def slots_of(state_dict: Mapping[str, Any], reader: StateReader | None = None) -> list[Slot]:
    """The entries of an optimiser's list; shapes are those that its reader finds, None identifies that."""
    groups = list(enumerate(state_dict["param_groups"]))
    keys = [(key, 0 if group.get(ONE_LIST) else number) for number, group in groups for key in group["params"]]
    decays = [_decay(group) for _, group in groups for _ in group["params"]]
    held = [(key, number, state_dict["state"].get(key, {})) for key, number in keys]
    if reader is None:
        try:
            reader = identify_reader(state_dict)
        except StateError:
            return [
                Slot(key, number, parameter_shape(s) or parameter_shape(s, ["momentum_buffer"]), has_tensors(s), decay)
                for (key, number, s), decay in zip(held, decays, strict=True)
            ]
    always = reader.statistic == "identity"
    return [
        Slot(key, number, shape_behind(reader, s), always or has_tensors(s), decay)
        for (key, number, s), decay in zip(held, decays, strict=True)
    ]


def _decay(group: Mapping[str, Any]) -> float | None:
    found = group.get("weight_decay")
    return None if found is None else as_number(found, "weight_decay")


def names_in(state_dict: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The parameters' names in the optimiser's order, where its state has them."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if keys and all(isinstance(key, str) for key in keys):
        return tuple(keys)
    if groups and all("param_names" in group for group in groups):
        return tuple(name for group in groups for name in group["param_names"])
    return None


def match_weights(
    slots: Sequence[Slot], weights: Mapping[str, Tensor], *, ordered: bool, in_order: bool = False
) -> Matched:
    """`matched` with what may be parameters among the weights; integers count where the rest does not settle it."""
    candidates = parameter_names(weights)
    chosen = candidates.enough_for(len(slots))
    whole = [name for name in candidates.whole if name not in candidates.repeats]
    settled = len(chosen) == len(slots) or all(slot.needed for slot in slots) or set(whole) <= set(chosen)

    def by(names: Sequence[str]) -> Matched:
        return matched(slots, shapes_of(weights, names), ordered=ordered, in_order=in_order)

    try:
        found = by(chosen)
    except AmbiguousError:
        # A target network is trained by no optimiser.
        trained = without_copies(weights, chosen)
        if len(trained) == len(chosen):
            raise
        found = by(trained)
    except MatchError as misfit:
        try:
            return by(whole)
        except MatchError as error:
            raise (error if isinstance(error, AmbiguousError) else misfit) from None
    if settled:
        return found
    try:
        other = by(whole)
    except AmbiguousError:
        raise
    except MatchError:
        return found
    for slot in slots:
        if slot.needed and found.names[slot.key] != other.names[slot.key]:
            raise AmbiguousError(
                f"the state under key {slot.key!r} may belong to {found.names[slot.key]!r} or to "
                f"{other.names[slot.key]!r}, as tensors of integers are buffers or parameters. {REMEDY}"
            )
    return found


def named(networks: Sequence[Network]) -> dict[str, tuple[Network, str]]:
    """The network and the name in it behind every name: of one network its own, of several with its keys before it."""
    prefixes = ["" if len(networks) == 1 or n.alone else f"{dotted(n.path)}." for n in networks]
    return {
        prefix + name: (network, name)
        for prefix, network in zip(prefixes, networks, strict=True)
        for name, tensor in network.tensors.items()
        if isinstance(tensor, Tensor)
    }


def tensors_of(networks: Sequence[Network]) -> dict[str, Tensor]:
    """The tensors of all of them by name."""
    return {name: network.tensors[own] for name, (network, own) in named(networks).items()}
