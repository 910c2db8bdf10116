"""Which networks and which state of a file belong together: those named, the usual, or the one choice that fits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Keys, Network
from bayesadam.readers.formats.lazy import clean_names, memory_of, outline_of
from bayesadam.readers.match import AmbiguousError, candidates, names_in, pair, slots_of
from bayesadam.readers.registry import StateDict, damage_told

# In lower case. A key that is not among them is taken where it is the only one that fits.
_WEIGHTS_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights", "params")
_STEMS = ("optimizer", "optim")
_OPTIMIZER_KEYS = (*_STEMS, *(f"{s}_state_dict" for s in _STEMS), "optimizer_state", "optimizer_states", "opt")
# Words in the key of a copy of other weights.
_COPIES = {"target", "targ", "ema", "shadow", "average", "averaged", "avg", "polyak", "swa", "teacher", "best"}
# More networks than so many are not tried together; more rows are not shown.
_MOST_TOGETHER, _MOST_ROWS = 3, 12

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """The networks, in the optimiser's order, the keys of its state, and why they were taken."""

    networks: tuple[Network, ...]
    state: Keys
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = f", optimizer_key={dotted(self.state)!r}" if self.state else ""
        return f"weights_key={dotted(*(network.path for network in self.networks))!r}{state}"

    def places(self) -> dict[str, tuple[Network, str]]:
        """The network and the key in it behind every name: of several networks with their keys before it."""
        stored = {
            key if len(self.networks) == 1 else f"{dotted(network.path)}.{key}": (network, key)
            for network in self.networks
            for key, tensor in outline_of(network.tensors).items()
            if isinstance(tensor, Tensor)
        }
        return {name: stored[key] for name, key in clean_names(stored).items()}


def dotted(*paths: Keys) -> str:
    """Keys as `weights_key` and `optimizer_key` have them."""
    return ",".join(".".join(path) for path in paths)


@damage_told()
def choose(
    networks: Sequence[Network],
    states: Mapping[Keys, StateDict],
    source: object,
    weights_key: str | None,
    optimizer_key: str | None,
) -> Choice:
    """The networks and the state under the keys that are given, else the usual keys, else the one pair that fits."""
    by_path = {network.path: network for network in networks}
    asked = () if weights_key is None else tuple(_under(by_path, weights_key, "weights_key").values())
    states = states if optimizer_key is None else _under(states, optimizer_key, "optimizer_key")
    copies = {} if asked else _copies(networks)
    notes = tuple(f"{dotted(copy.path)!r} was not read, a copy of {dotted(of.path)!r}" for copy, of in copies.items())
    originals = {path: network for path, network in by_path.items() if network not in copies}
    usual = asked or tuple((_usual(originals, _WEIGHTS_KEYS) or originals).values())
    # Without a usual key a state may be that of any network: `opt_disc` is not that of `model`.
    usual_states = _usual(states, _OPTIMIZER_KEYS) or ({} if len(originals) > 1 and not asked else states)
    is_clear = len(usual_states) == 1 and (bool(asked) or len(usual) == 1)
    clear = Choice(usual, next(iter(usual_states), ()), notes)
    is_named = len(asked) == 1 and optimizer_key is not None
    if is_clear and (is_named or fit(clear, states[clear.state])):
        return clear
    # Every choice that nothing contradicts: the networks asked for, else one, else the fewest in some order.
    pairs: list[Choice] = []
    for path, state in (usual_states if len(usual_states) == 1 else states).items():
        for size in range(1, min(len(originals), _MOST_TOGETHER) + 1):
            orders = [asked] if asked else itertools.permutations(originals.values(), size)
            choices = [Choice(order, path, (why,)) for order in orders if (why := fit(Choice(order, path), state))]
            pairs += choices
            if choices or asked:
                break
    if len(pairs) == 1:
        return Choice(pairs[0].networks, pairs[0].state, (*notes, f"{pairs[0]}: the only choice that fits"))
    if not pairs and is_clear:
        # The error comes where the states are matched.
        return clear
    rows = "".join(f"\n  {row} ({row.notes[0]})" for row in pairs[:_MOST_ROWS])
    weights, kept = (" and ".join(repr(dotted(path)) for path in list(paths)[:6]) for paths in (originals, states))
    raise FileError(
        f"{source} holds weights under {weights} and states under {kept}"
        f"{'' if pairs else ', and no shapes fit'}. Say which, several networks in their order, with "
        f"{rows or 'weights_key= and optimizer_key='}"
    )


def _under(choices: Mapping[Keys, T], wanted: str, option: str) -> dict[Keys, T]:
    """Those under the keys that an option names, in that order; a comma separates several."""
    by_name = {dotted(path): path for path in choices}
    names = [wanted] if wanted in by_name else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in by_name:
            there = ", ".join(map(repr, by_name)) or "none"
            raise FileError(f"there is nothing of the kind under {option}={name!r}; there is {there}")
    if len(set(names)) < len(names):
        raise FileError(f"{option}={wanted!r} names a network twice")
    return {by_name[name]: choices[by_name[name]] for name in names}


def _usual(choices: Mapping[Keys, T], keys: Sequence[str]) -> dict[Keys, T]:
    """The shallowest under a usual key."""
    usual = [path for path in choices if any(part.lower() in keys for part in path[-2:])]
    depth = min(map(len, usual), default=0)
    return {path: choices[path] for path in usual if len(path) == depth}


def copies_of(chosen: Sequence[Network], networks: Sequence[Network]) -> dict[Network, Network]:
    """Of the others those that are copies of a chosen one, or that a chosen one is a copy of, with that."""
    copies = _copies(networks)
    first = {copies.get(network, network): network for network in chosen}
    return {n: first[of] for n in networks if n not in chosen and (of := copies.get(n, n)) in first}


def matching(copy: Network, original: Network) -> dict[str, str]:
    """The key in a network behind every key in a copy of it, whose names and shapes are the same."""
    keys = _sized(original)
    return {key: keys[name][0] for name, (key, _) in _sized(copy).items()}


def _sized(network: Network) -> dict[str, tuple[str, torch.Size]]:
    """The key and the shape behind the name of every tensor that is no counter."""
    outline = outline_of(network.tensors)
    names = clean_names(key for key, tensor in outline.items() if isinstance(tensor, Tensor) and tensor.dim())
    return {name: (key, outline[key].shape) for name, key in names.items()}


def _copies(networks: Sequence[Network]) -> dict[Network, Network]:
    """Targets, averages and repeated weights, with the network that each is a copy of."""
    shapes, memory, words = {}, {}, {}
    for network in networks:
        shapes[network] = {name: shape for name, (_, shape) in _sized(network).items()}
        memory[network] = [memory_of(t) for t in outline_of(network.tensors).values() if isinstance(t, Tensor)]
        # `criticTarget` is two words.
        words[network] = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", dotted(network.path)).lower()))
    copies: dict[Network, Network] = {}
    for number, network in enumerate(networks):
        alike = [n for n in networks if n is not network and n not in copies and shapes[n] == shapes[network]]
        originals = [n for n in alike if not words[n] & _COPIES]
        same = [n for n in alike if n in networks[:number] and memory[n] == memory[network]]
        if same or (originals and words[network] & _COPIES):
            copies[network] = (same or originals)[0]
    return copies


def fit(choice: Choice, state: StateDict) -> str:
    """How an optimiser's state fits networks in this order; empty where something contradicts that."""
    places, names = choice.places(), names_in(state)
    if names is not None:
        return "every name is there" if all(name in places for name in clean_names(names)) else ""
    slots = slots_of(state)
    tensors = {name: outline_of(network.tensors)[key] for name, (network, key) in places.items()}
    shapes = candidates(tensors, len(slots))
    if all(slot.shape is None for slot in slots):
        return "nothing in its state to check" if len(choice.networks) == 1 and len(slots) <= len(shapes) else ""
    try:
        pairing = pair(slots, shapes, ordered=all(network.ordered for network in choice.networks))
    except AmbiguousError:
        return "no shape contradicts it"
    except MatchError:
        return ""
    used = {places[pairing.names[slot.key]][0] for slot in slots if slot.key in pairing.names}
    gaps = f", of {len(slots)} in {len(shapes)} parameters" if len(slots) < len(shapes) else ""
    return f"every shape fits{gaps}" if len(used) == len(choice.networks) else ""
