"""Which of a file's networks, and which of its optimisers' states: by the usual keys, else by every shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayesadam.errors import FileError, MatchError, StateError
from bayesadam.readers.formats.identify import identify_reader
from bayesadam.readers.formats.names import AmbiguousError, Slot, keeps_order, memory_of, parameter_names, shapes_of
from bayesadam.readers.formats.networks import (
    Found,
    Keys,
    Network,
    dotted,
    joined,
    match_weights,
    named,
    names_in,
    slots_of,
    tensors_of,
)

# In lower case. A key that is not among them is taken where it is the only one that fits.
_WEIGHTS_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights", "params")
_STEMS = ("optimizer", "optim")
_OPTIMIZER_KEYS = (*_STEMS, *(f"{s}_state_dict" for s in _STEMS), "optimizer_state", "optimizer_states", "opt")
# Words in the key of a copy of other weights.
_COPIES = {"target", "targ", "ema", "shadow", "average", "averaged", "avg", "polyak", "swa", "teacher", "best"}
# Of more networks, only those are tried together that fill the optimiser's list without a gap.
_MOST_TOGETHER = 6
_MOST_ROWS = 12

Shape = torch.Size | None


@dataclass(frozen=True, eq=False)
class Choice:
    """The networks, in the optimiser's order, the keys of its state, and in words why they were taken."""

    networks: tuple[Network, ...]
    optimizer: Keys | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Pair:
    """Networks that an optimiser may have trained, and how sure that is."""

    networks: tuple[Network, ...]
    optimizer: Keys
    verdict: str

    @property
    def options(self) -> str:
        """The options that ask for it."""
        state = f", optimizer_key={dotted(self.optimizer)!r}" if self.optimizer else ""
        return f"weights_key={joined(self.networks)!r}{state}"

    @property
    def related(self) -> int:
        """How many words their keys share."""
        return len(_words(self.optimizer) & set().union(*(_words(network.path) for network in self.networks)))


def choose(found: Found, source: object, weights_key: str | None, optimizer_key: str | None) -> Choice:
    """The networks and the optimiser that are meant: those asked for, else the usual, else the one pair that fits.

    Usual keys are taken as long as no shape contradicts them. A file without an optimiser gives no networks where it has
    several: they are chosen by the state that comes from elsewhere.
    """
    asked = _asked_networks(found.networks, weights_key)
    states = _asked(found.optimizers, optimizer_key, "optimizer_key")
    copies = {} if asked else _copies(found.networks)
    sets = [network for network in found.networks if network not in copies]
    notes = tuple(f"{dotted(copy.path)!r} was left out, a copy of {dotted(of.path)!r}" for copy, of in copies.items())
    usual = asked or tuple(_usual({n.path: n for n in sets if not n.alone}, _WEIGHTS_KEYS).values())
    usual_states = list(_usual(states, _OPTIMIZER_KEYS))
    if not states:
        if len(usual) > 1 and not asked and any(t.is_meta for n in usual for t in tensors_of([n]).values()):
            several = f"{source} holds several sets of weights, {_listed([n.path for n in usual])}"
            raise FileError(f"{several}: say which with weights_key={dotted(usual[0].path)!r}")
        return Choice(usual if asked or len(usual) == 1 else (), None, notes)
    if not found.networks:
        if len(usual_states) > 1:
            several = f"{source} holds the state of several optimisers, {_listed(usual_states)}"
            raise FileError(f"{several}: say which with optimizer_key={dotted(usual_states[0])!r}")
        return Choice((), usual_states[0], notes)
    clear = (asked or len(usual) == 1) and len(usual_states) == 1
    told = asked is not None and len(asked) == 1 and optimizer_key is not None
    if clear and (told or _verdict(usual, states[usual_states[0]])):
        return Choice(usual, usual_states[0], (*notes, *_reasons(found, usual, usual_states[0], asked, optimizer_key)))
    first = usual_states if len(usual_states) == 1 else list(states)
    pairs = _pairs(sets, asked, {path: states[path] for path in first})
    if not pairs and len(first) < len(states):
        pairs = _pairs(sets, asked, states)
    if len(pairs) == 1 and pairs[0].networks == (asked or tuple(n for n in sets if n in pairs[0].networks)):
        only = pairs[0]
        why = (
            f"weights {joined(only.networks)!r} and optimiser {dotted(only.optimizer)!r}: the only pair, and the only "
            "order, that no shape contradicts"
        )
        return Choice(only.networks, only.optimizer, (*notes, why))
    if not pairs and clear:
        # What does not fit is said where the states are matched.
        return Choice(usual, usual_states[0], notes)
    _require_second_moments(list(states.values()))
    raise FileError(_table(source, sets, list(states), pairs))


def _require_second_moments(states: Sequence[Mapping[str, Any]]) -> None:
    """States that nothing can be read from are told as such before there is anything to choose."""
    refusals = []
    for state in states:
        try:
            identify_reader(state)
        except StateError as error:
            refusals.append(error)
    if len(refusals) == len(states):
        raise refusals[0]


def _asked_networks(networks: Sequence[Network], wanted: str | None) -> tuple[Network, ...] | None:
    """Those named, in that order; a comma separates several."""
    if wanted is None:
        return None
    by_path = {network.path: network for network in networks}
    whole = any(dotted(path) == wanted for path in by_path)
    keys = [wanted] if whole or "," not in wanted else [key.strip() for key in wanted.split(",")]
    if len(set(keys)) < len(keys):
        raise FileError(f"weights_key={wanted!r} names a network twice")
    return tuple(next(iter(_asked(by_path, key, "weights_key").values())) for key in keys)


def _asked(candidates: Mapping[Keys, Any], wanted: str | None, option: str) -> dict[Keys, Any]:
    if wanted is None:
        return dict(candidates)
    chosen = {path: value for path, value in candidates.items() if dotted(path) == wanted}
    if len(chosen) == 1:
        return chosen
    there = ", ".join(repr(dotted(path)) for path in candidates) or "none"
    what = "there is nothing of the kind" if not chosen else "there are several of the kind"
    raise FileError(f"{what} under {option}={wanted!r}; there is {there}")


def _usual(candidates: Mapping[Keys, Any], known: Sequence[str]) -> dict[Keys, Any]:
    """The shallowest under a usual key, else all."""
    usual = [path for path in candidates if any(part.lower() in known for part in path[-2:])]
    depth = min(map(len, usual), default=0)
    return {path: value for path, value in candidates.items() if not usual or (path in usual and len(path) == depth)}


def _reasons(
    found: Found, networks: Sequence[Network], optimizer: Keys, asked: object, optimizer_key: str | None
) -> Iterator[str]:
    def why(was_asked: bool, count: int) -> str:
        return "asked for" if was_asked else "the only one" if count == 1 else "the usual key"

    yield f"weights {joined(networks)!r}: {why(asked is not None, len(found.networks))}"
    yield f"optimiser {dotted(optimizer)!r}: {why(optimizer_key is not None, len(found.optimizers))}"


def _words(path: Keys) -> set[str]:
    """The words of a key.

    >>> sorted(_words(("criticTarget", "state_dict")))
    ['critic', 'dict', 'state', 'target']
    """
    return {word.lower() for part in path for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}


def _copies(networks: Sequence[Network]) -> dict[Network, Network]:
    """Targets, averages and the like, and what is there twice, with the network that each is a copy of."""
    shapes = {n: {_plain(key): t.shape for key, t in tensors_of([n]).items() if t.dim()} for n in networks}
    found: dict[Network, Network] = {}
    for place, network in enumerate(networks):
        alike = [n for n in networks if n is not network and n not in found and shapes[n] == shapes[network]]
        originals = [n for n in alike if not _words(n.path) & _COPIES]
        same = [n for n in alike if n in networks[:place] and _memory(n) == _memory(network)]
        if same or (originals and _words(network.path) & _COPIES):
            found[network] = (same or originals)[0]
    return found


def _plain(name: str) -> str:
    """A name without the prefixes of torch.compile, data parallelism and averages."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _memory(network: Network) -> list[tuple[Any, ...]]:
    return [memory_of(tensor) for tensor in tensors_of([network]).values()]


def _verdict(networks: Sequence[Network], state: Mapping[str, Any]) -> str:
    """How an optimiser's state fits networks in this order; empty where something contradicts that."""
    names = names_in(state)
    tensors = tensors_of(networks)
    if names is not None:
        known = {_plain(name) for name in tensors}
        return "every name is there" if all(_plain(name) in known for name in names) else ""
    slots = slots_of(state)
    if all(slot.shape is None for slot in slots):
        return "nothing in its state to check" if len(slots) <= len(parameter_names(tensors).whole) else ""
    try:
        found = match_weights(slots, tensors, ordered=all(keeps_order(n.tensors) for n in networks))
    except AmbiguousError:
        return "no shape contradicts it"
    except MatchError:
        return ""
    behind = named(networks)
    if len({behind[name][0] for name in found.names.values()}) < len(networks):
        return ""
    count = len(parameter_names(tensors).single)
    return "every shape fits" + (f", of {len(slots)} in {count} parameters" if len(slots) < count else "")


def _pairs(
    sets: Sequence[Network], asked: tuple[Network, ...] | None, states: Mapping[Keys, Mapping[str, Any]]
) -> list[_Pair]:
    """Every pair that nothing contradicts, those first whose keys share words."""
    pairs = [
        pair
        for path, state in states.items()
        for pair in (_candidates(sets, path, state) if asked is None else _orders_of(asked, path, state))
    ]
    return sorted(pairs, key=lambda pair: -pair.related)


def _orders_of(asked: tuple[Network, ...], path: Keys, state: Mapping[str, Any]) -> list[_Pair]:
    """The networks as they were asked for, else in the orders that fit."""
    if verdict := _verdict(asked, state):
        return [_Pair(asked, path, verdict)]
    orders = itertools.permutations(asked) if len(asked) <= _MOST_TOGETHER else ()
    return [_Pair(order, path, verdict) for order in orders if (verdict := _verdict(order, state))]


def _candidates(sets: Sequence[Network], path: Keys, state: Mapping[str, Any]) -> list[_Pair]:
    """One network, or several, that an optimiser may have trained."""
    slots = slots_of(state)
    alone = [(network,) for network in sets if not network.alone or len(slots) == 1]
    pairs = [_Pair(networks, path, verdict) for networks in alone if (verdict := _verdict(networks, state))]
    if names_in(state) is not None or all(slot.shape is None for slot in slots):
        return pairs
    together = [network for network in sets if not network.alone]
    pairs += [_Pair(order, path, "every shape fits") for order in _sequences(slots, together) if len(order) > 1]
    if pairs or len(together) > _MOST_TOGETHER:
        return pairs
    return list(_with_gaps(together, path, state))


def _sequences(slots: Sequence[Slot], sets: Sequence[Network]) -> list[tuple[Network, ...]]:
    """Networks in an order in which their parameters, all of them, have just the shapes of the list."""
    for whole in (False, True):
        shapes = {network: _shapes(network, whole) for network in sets}
        found = list(itertools.islice(_orders(slots, shapes, 0), _MOST_ROWS + 1))
        if found:
            return found
    return []


def _shapes(network: Network, whole: bool) -> list[Shape]:
    """The shapes of its parameters, those of integers among them or not."""
    tensors = tensors_of([network])
    candidates = parameter_names(tensors)
    listed = [name for name in candidates.whole if name not in candidates.repeats] if whole else candidates.single
    return list(shapes_of(tensors, listed).values())


def _orders(
    slots: Sequence[Slot], shapes: Mapping[Network, Sequence[Shape]], start: int
) -> Iterator[tuple[Network, ...]]:
    """The same from some place on; a group that ends inside a network is no such order."""
    if start == len(slots):
        yield ()
        return
    for network, own in shapes.items():
        here = slots[start : start + len(own)]
        fits = len(here) == len(own) and all(slot.shape in (None, shape) for slot, shape in zip(here, own, strict=True))
        if own and fits and here[0].group == here[-1].group:
            others = {other: shape for other, shape in shapes.items() if other is not network}
            yield from ((network, *rest) for rest in _orders(slots, others, start + len(own)))


def _with_gaps(sets: Sequence[Network], path: Keys, state: Mapping[str, Any]) -> Iterator[_Pair]:
    """Several networks with buffers, or frozen parts, that the optimiser has no states of; no more of them than needed."""
    enough: list[set[Network]] = []
    for count in range(2, len(sets) + 1):
        for chosen in itertools.combinations(sets, count):
            if any(fewer <= set(chosen) for fewer in enough):
                continue
            for order in itertools.permutations(chosen):
                if verdict := _verdict(order, state):
                    enough.append(set(chosen))
                    yield _Pair(order, path, verdict)


def _listed(paths: Sequence[Keys]) -> str:
    return " and ".join(repr(dotted(path)) for path in paths[:6])


def _table(source: object, sets: Sequence[Network], states: Sequence[Keys], pairs: Sequence[_Pair]) -> str:
    networks = [network.path for network in sets if not network.alone]
    several = [
        f"several sets of weights, {_listed(networks)}" if len(networks) > 1 else "",
        f"the state of several optimisers, {_listed(states)}" if len(states) > 1 else "",
    ]
    held = f"{source} holds {', and '.join(part for part in several if part) or 'weights and a state'}"
    if not pairs:
        example = f"weights_key={dotted(networks[0])!r}" + (
            f", optimizer_key={dotted(states[0])!r}" if states[0] else ""
        )
        return f"{held}, and no shapes fit. Say which with {example}; several networks in their order with weights_key='a,b'"
    rows = [f"\n  {pair.options} ({pair.verdict})" for pair in pairs[:_MOST_ROWS]]
    more = f"\n  and {len(pairs) - _MOST_ROWS} more" if len(pairs) > _MOST_ROWS else ""
    return f"{held}. Say which with{''.join(rows)}{more}"
