"""The networks and the optimisers' states in a saved dictionary, and which of them belong together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from bayesadam.errors import FileError, MatchError, StateError
from bayesadam.readers.match import (
    ONE_LIST,
    AmbiguousError,
    candidates,
    keeps_order,
    memory_of,
    names_in,
    pair_weights,
    slots_of,
)
from bayesadam.readers.registry import identify_reader

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

_FASTAI = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq", "step": "step"}

Keys = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Network:
    """Weights under some keys of a file; `alone` is one tensor that no dictionary holds."""

    path: Keys
    tensors: Mapping[str, Tensor]
    alone: bool = False


@dataclass(frozen=True, eq=False)
class Found:
    """The networks and the optimisers' states of a file, in its order."""

    networks: Sequence[Network] = ()
    optimizers: Mapping[Keys, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Choice:
    """The networks, in the optimiser's order, the keys of its state, and why they were taken."""

    networks: tuple[Network, ...]
    optimizer: Keys | None
    notes: tuple[str, ...] = ()


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
    """Dictionaries and numbers down to the third level, lists of states opened, states in torch's layout."""
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


def torch_layout(value: Any) -> Any:
    """A state that fastai's Adam wrote, in torch's layout; all else as it is.

    fastai saves `{"state": [one dictionary a parameter], "hypers": [one dictionary a group]}`: all its groups in one
    list, and not where one ends. `sqr_mom` is β₂; `do_wd` says of a parameter that it does not decay.
    """
    if not isinstance(value, Mapping) or value.keys() != {"state", "hypers"}:
        return value
    lists = []
    for held in (value["state"], value["hypers"]):
        # A list, or fastcore's `L`.
        inside = getattr(held, "state", None)
        items = inside.get("items") if isinstance(inside, Mapping) else held
        lists.append(items if isinstance(items, list | tuple) else ())
    states, hypers = lists
    if not states or not hypers or not all(isinstance(entry, Mapping) for entry in (*states, *hypers)):
        return value
    trained = [state for state in states if any(isinstance(held, Tensor) for held in state.values())]
    # No file says which parameter is in which group, so the groups must agree.
    shared = [[group.get(key) for key in ("mom", "sqr_mom", "eps", "wd")] for group in hypers]
    momentum, beta, eps, decay = shared[0]
    if not all(_FASTAI.keys() <= state.keys() for state in trained) or any(group != shared[0] for group in shared):
        return value
    if momentum is None or beta is None:
        return value
    groups = [
        {
            "betas": (momentum, beta),
            "eps": eps,
            "weight_decay": float(decay or 0.0) if decays else 0.0,
            "params": [number for number, _ in members],
            ONE_LIST: True,
        }
        for decays, members in itertools.groupby(enumerate(states), lambda item: bool(item[1].get("do_wd", True)))
    ]
    renamed = [{_FASTAI[key]: held for key, held in state.items() if key in _FASTAI} for state in states]
    return {"state": {n: state for n, state in enumerate(renamed) if state}, "param_groups": groups}


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
    prefixes = ["" if len(networks) == 1 or n.alone else f"{_dotted(n.path)}." for n in networks]
    return {
        prefix + name: (network, name)
        for prefix, network in zip(prefixes, networks, strict=True)
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
    given = None if weights_key is None else tuple(_given(by_path, weights_key, "weights_key").values())
    states = found.optimizers if optimizer_key is None else _given(found.optimizers, optimizer_key, "optimizer_key")
    copies = {} if given else _copies(found.networks)
    notes = tuple(f"{_dotted(copy.path)!r} was left out, a copy of {_dotted(of.path)!r}" for copy, of in copies.items())
    sets = [network for network in found.networks if network not in copies]
    usual = given or tuple(_usual({n.path: n for n in sets if not n.alone}, _WEIGHTS_KEYS).values())
    usual_states = list(_usual(states, _OPTIMIZER_KEYS))
    several = [n.path for n in usual] if not states and not given else usual_states if not found.networks else []
    on_disk = any(tensor.is_meta for network in usual for tensor in tensors_of([network]).values())
    if len(several) > 1 and (states or on_disk):
        option, what = ("optimizer_key", "states") if states else ("weights_key", "sets of weights")
        example = f"{option}={_dotted(several[0])!r}"
        raise FileError(f"{source} holds several {what}, {_listed(several)}: say which with {example}")
    if not states or not found.networks:
        return Choice(usual if len(several) < 2 else (), next(iter(usual_states), None), notes)
    clear = (given or len(usual) == 1) and len(usual_states) == 1
    both_given = given is not None and len(given) == 1 and optimizer_key is not None
    if clear and (both_given or _verdict(usual, states[usual_states[0]])):

        def why(key: str | None, count: int) -> str:
            return "as given" if key is not None else "the only one" if count == 1 else "the usual key"

        taken = f"weights {_dotted(*(n.path for n in usual))!r}: {why(weights_key, len(found.networks))}"
        by = f"optimiser {_dotted(usual_states[0])!r}: {why(optimizer_key, len(found.optimizers))}"
        return Choice(usual, usual_states[0], (*notes, taken, by))
    first = usual_states if len(usual_states) == 1 else list(states)
    pairs = _pairs(sets, given, {path: states[path] for path in first})
    if not pairs and len(first) < len(states):
        pairs = _pairs(sets, given, states)
    if len(pairs) == 1 and pairs[0].networks == (given or tuple(n for n in sets if n in pairs[0].networks)):
        reason = f"{pairs[0]}: the only pair, and the only order, that no shape contradicts"
        return Choice(pairs[0].networks, pairs[0].optimizer, (*notes, reason))
    if not pairs and clear:
        # The error comes where the states are matched.
        return Choice(usual, usual_states[0], notes)
    refusals = []
    for state in states.values():
        try:
            identify_reader(state)
        except StateError as error:
            refusals.append(error)
    if len(refusals) == len(states):
        raise refusals[0]
    shown = pairs or [_Pair((network,), path, "its shapes do not fit") for network in sets for path in states]
    rows = "".join(f"\n  {pair} ({pair.verdict})" for pair in shown[:_MOST_ROWS])
    more = f"\n  and {len(shown) - _MOST_ROWS} more" if len(shown) > _MOST_ROWS else ""
    raise FileError(
        f"{source} holds weights under {_listed([network.path for network in sets])} and states under "
        f"{_listed(list(states))}"
        f"{'' if pairs else ', and no shapes fit'}. Say which, several networks in their order, with{rows}{more}"
    )


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


class _Pair(NamedTuple):
    """Networks that an optimiser may have trained, and how certain that is."""

    networks: tuple[Network, ...]
    optimizer: Keys
    verdict: str

    def __str__(self) -> str:
        state = f", optimizer_key={_dotted(self.optimizer)!r}" if self.optimizer else ""
        return f"weights_key={_dotted(*(network.path for network in self.networks))!r}{state}"


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
    return f"every shape fits{gaps}" + ("" if numbers == sorted(numbers) else ", group by group")


def _pairs(
    sets: Sequence[Network], given: tuple[Network, ...] | None, states: Mapping[Keys, Mapping[str, Any]]
) -> list[_Pair]:
    """Every pair that nothing contradicts: those given in an order, or one network, or the fewest in an order."""
    pairs: list[_Pair] = []
    for path, state in states.items():
        if given and (verdict := _verdict(given, state)):
            pairs.append(_Pair(given, path, verdict))
            continue
        slots = slots_of(state)
        together = given or tuple(network for network in sets if not network.alone)
        checked = names_in(state) is None and any(slot.shape is not None for slot in slots)
        most = len(together) if len(together) <= _MOST_TOGETHER and (given or checked) else 1
        for count in range(len(given) if given else 1, most + 1):
            among = sets if not given and count == len(slots) == 1 else together
            orders = itertools.permutations(among, count)
            fitting = [_Pair(order, path, verdict) for order in orders if (verdict := _verdict(order, state))]
            # Buffers and frozen parts leave gaps in the list.
            exact = [pair for pair in fitting if not given and count > 1 and pair.verdict == "every shape fits"]
            pairs += exact or fitting
            if fitting:
                break
    return pairs
