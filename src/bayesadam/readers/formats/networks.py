"""The networks and the optimisers' states in a saved dictionary, and which of them belong together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.fastai import torch_layout
from bayesadam.readers.match import (
    AmbiguousError,
    candidates,
    keeps_order,
    memory_of,
    names_in,
    pair_weights,
    slots_of,
)

_DEEPEST = 3
# In lower case. A key that is not among them is taken where it is the only one that fits.
_WEIGHTS_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights", "params")
_STEMS = ("optimizer", "optim")
_OPTIMIZER_KEYS = (*_STEMS, *(f"{s}_state_dict" for s in _STEMS), "optimizer_state", "optimizer_states", "opt")
# Words in the key of a copy of other weights.
_COPIES = {"target", "targ", "ema", "shadow", "average", "averaged", "avg", "polyak", "swa", "teacher", "best"}
# More networks are not tried together.
_MOST_TOGETHER = 6
_MOST_ROWS = 12

_FITS = "every shape fits"

Keys = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Network:
    """Weights under some keys of a file."""

    path: Keys
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Found:
    """The networks and the optimisers' states of a file, in its order."""

    networks: Sequence[Network] = ()
    optimizers: Mapping[Keys, Mapping[str, Any]] = field(default_factory=dict)


class Choice(NamedTuple):
    """The networks, in the optimiser's order, the keys of its state, and why they were taken."""

    networks: tuple[Network, ...]
    optimizer: Keys | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = f", optimizer_key={_dotted(self.optimizer)!r}" if self.optimizer else ""
        return f"weights_key={_dotted(*(network.path for network in self.networks))!r}{state}"


def find(tree: Mapping[Any, Any]) -> Found:
    """Every set of weights and every optimiser's state down to the third level."""
    held = list(branches(tree))
    networks = [Network(path, value) for path, value in held if not is_optimizer(value) and is_weights(value)]
    return Found(networks, {path: value for path, value in held if is_optimizer(value)})


def branches(tree: Mapping[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Dictionaries down to the third level, lists of states opened, states in torch's layout."""
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


def named(networks: Sequence[Network]) -> dict[str, tuple[Network, str]]:
    """The network and the name in it behind every name: of one network its own, of several with its keys before it."""
    return {
        name if len(networks) == 1 else f"{_dotted(network.path)}.{name}": (network, name)
        for network in networks
        for name, tensor in network.tensors.items()
        if isinstance(tensor, Tensor)
    }


def tensors_of(networks: Sequence[Network]) -> dict[str, Tensor]:
    """The tensors of all of them by name."""
    return {name: network.tensors[own] for name, (network, own) in named(networks).items()}


def _dotted(*paths: Keys) -> str:
    """Keys as `weights_key` and `optimizer_key` have them."""
    return ",".join(".".join(path) for path in paths)


def choose(found: Found, source: object, weights_key: str | None, optimizer_key: str | None) -> Choice:
    """The networks and the optimiser that are named by the keys, else the usual, else the one pair that fits.

    A file without an optimiser gives no networks where it has several: the state from elsewhere chooses.
    """
    by_path = {network.path: network for network in found.networks}
    given = () if weights_key is None else tuple(_given(by_path, weights_key, "weights_key").values())
    states = found.optimizers if optimizer_key is None else _given(found.optimizers, optimizer_key, "optimizer_key")
    copies = {} if given else _copies(found.networks)
    notes = tuple(f"{_dotted(copy.path)!r} was left out, a copy of {_dotted(of.path)!r}" for copy, of in copies.items())
    sets = [network for network in found.networks if network not in copies]
    usual = given or tuple(_usual({network.path: network for network in sets}, _WEIGHTS_KEYS).values())
    usual_states = list(_usual(states, _OPTIMIZER_KEYS))
    if not found.networks and len(usual_states) > 1:
        raise _several(source, "states", usual_states, "optimizer_key")
    if not states and not given and len(usual) > 1:
        if any(tensor.is_meta for network in usual for tensor in tensors_of([network]).values()):
            raise _several(source, "sets of weights", [network.path for network in usual], "weights_key")
        usual = ()
    if not states or not found.networks:
        return Choice(usual, next(iter(usual_states), None), notes)
    first = {path: states[path] for path in usual_states if len(usual_states) == 1} or states
    clear = len(first) == 1 and (given or len(usual) == 1)
    if clear and ((len(given) == 1 and optimizer_key is not None) or _verdict(usual, states[usual_states[0]])):
        return Choice(usual, usual_states[0], notes)
    pairs = _pairs(sets, given, first) or _pairs(sets, given, states)
    if len(pairs) == 1 and pairs[0].networks == (given or tuple(n for n in sets if n in pairs[0].networks)):
        reason = f"{pairs[0]}: the only pair, and the only order, that no shape contradicts"
        return pairs[0]._replace(notes=(*notes, reason))
    if not pairs and clear:
        # The error comes where the states are matched.
        return Choice(usual, usual_states[0], notes)
    rows = "".join(f"\n  {pair} ({pair.notes[0]})" for pair in pairs[:_MOST_ROWS])
    raise FileError(
        f"{source} holds weights under {_listed([network.path for network in sets])} and states under "
        f"{_listed(list(states))}{'' if pairs else ', and no shapes fit'}. Say which, several networks in their order, "
        f"with {rows or 'weights_key= and optimizer_key='}"
    )


def _several(source: object, what: str, paths: Sequence[Keys], option: str) -> FileError:
    return FileError(f"{source} holds several {what}, {_listed(paths)}: say which with {option}={_dotted(paths[0])!r}")


def _listed(paths: Sequence[Keys]) -> str:
    return " and ".join(repr(_dotted(path)) for path in paths[:6])


def _given(candidates: Mapping[Keys, T], wanted: str, option: str) -> dict[Keys, T]:
    """Those under the keys that an option names, in that order; a comma separates several."""
    by_name = {_dotted(path): path for path in candidates}
    names = [wanted] if wanted in by_name else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in by_name:
            there = ", ".join(map(repr, by_name)) or "none"
            raise FileError(f"there is nothing of the kind under {option}={name!r}; there is {there}")
    if len(set(names)) < len(names):
        raise FileError(f"{option}={wanted!r} names a network twice")
    return {by_name[name]: candidates[by_name[name]] for name in names}


def _usual(candidates: Mapping[Keys, T], known: Sequence[str]) -> dict[Keys, T]:
    """The shallowest under a usual key, else all."""
    usual = [path for path in candidates if any(part.lower() in known for part in path[-2:])]
    depth = min(map(len, usual), default=0)
    return {path: value for path, value in candidates.items() if not usual or (path in usual and len(path) == depth)}


def _copies(networks: Sequence[Network]) -> dict[Network, Network]:
    """Targets, averages and repeated weights, with the network that each is a copy of."""
    tensors = {network: tensors_of([network]) for network in networks}
    shapes = {n: {_plain(key): t.shape for key, t in held.items() if t.dim()} for n, held in tensors.items()}
    memory = {n: [memory_of(tensor) for tensor in held.values()] for n, held in tensors.items()}
    # The words of their keys: `criticTarget` is two.
    words = {n: set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", _dotted(n.path)).lower())) for n in networks}
    found: dict[Network, Network] = {}
    for number, network in enumerate(networks):
        alike = [n for n in networks if n is not network and n not in found and shapes[n] == shapes[network]]
        originals = [n for n in alike if not words[n] & _COPIES]
        same = [n for n in alike if n in networks[:number] and memory[n] == memory[network]]
        if same or (originals and words[network] & _COPIES):
            found[network] = (same or originals)[0]
    return found


def _plain(name: str) -> str:
    """A name without the prefixes of torch.compile, data parallelism and averages."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _verdict(networks: Sequence[Network], state: Mapping[str, Any]) -> str:
    """How an optimiser's state fits networks in this order; empty where something contradicts that."""
    names = names_in(state)
    tensors = tensors_of(networks)
    if names is not None:
        known = {_plain(name) for name in tensors}
        return "every name is there" if all(_plain(name) in known for name in names) else ""
    slots = slots_of(state)
    if all(slot.shape is None for slot in slots):
        return "nothing in its state to check" if len(slots) <= len(candidates(tensors, len(slots))) else ""
    try:
        found = pair_weights(slots, tensors, ordered=all(keeps_order(n.tensors) for n in networks))
    except AmbiguousError:
        return "no shape contradicts it"
    except MatchError:
        return ""
    behind = named(networks)
    numbers = [networks.index(behind[found.names[slot.key]][0]) for slot in slots if slot.key in found.names]
    if len(set(numbers)) < len(networks):
        return ""
    count = len(candidates(tensors))
    gaps = f", of {len(slots)} in {count} parameters" if len(slots) < count else ""
    return f"{_FITS}{gaps}" + ("" if numbers == sorted(numbers) else ", group by group")


def _pairs(
    sets: Sequence[Network], given: tuple[Network, ...], states: Mapping[Keys, Mapping[str, Any]]
) -> list[Choice]:
    """Every pair that nothing contradicts: those given in an order, or one network, or the fewest in an order."""
    pairs: list[Choice] = []
    for path, state in states.items():
        if given and (verdict := _verdict(given, state)):
            pairs.append(Choice(given, path, (verdict,)))
            continue
        together = given or sets
        checked = names_in(state) is None and any(slot.shape is not None for slot in slots_of(state))
        most = len(together) if len(together) <= _MOST_TOGETHER and (given or checked) else 1
        for count in range(len(given) or 1, most + 1):
            orders = itertools.permutations(together, count)
            fitting = [Choice(order, path, (verdict,)) for order in orders if (verdict := _verdict(order, state))]
            # Buffers and frozen parts leave gaps in the list.
            exact = [pair for pair in fitting if not given and count > 1 and pair.notes == (_FITS,)]
            pairs += exact or fitting
            if fitting:
                break
    return pairs
