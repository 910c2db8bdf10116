"""Which weights and which optimiser's state in a saved dictionary belong together, and what else the trainer wrote."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

import bayesadam.readers.match as matching
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.pickles import StandIn, said

# Under which keys trainers write what `Recorded` has.
_STEP_KEYS = ("global_step", "step", "iteration", "iter", "iter_num", "iterations")
_EPOCH_KEYS = ("epoch", "current_epoch", "epochs")
_N_DATA_KEYS = ("n_data", "num_train_examples", "n_train")
_CLASS_KEYS = ("optimizer_class", "optimizer_name", "optimizer_type")
# Levels of dictionaries that are searched.
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
# What fastai calls the entries of a state.
_NAMES = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq", "step": "step"}

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


@dataclass(frozen=True)
class Recorded:
    """What else the trainer wrote: steps taken, epochs, N, the optimiser's class, B; None where it wrote nothing."""

    step: int | None = None
    epoch: int | None = None
    n_data: int | None = None
    optimizer: str | None = None
    batch_size: int | None = None

    def completed(self, other: Recorded) -> Recorded:
        """What this lacks, from `other`."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return Recorded(**{**asdict(other), **known})


@dataclass(frozen=True)
class Rules:
    """What a trainer does without writing it down; each rule needs the model.

    Attributes:
        model: builds the model, without values, from what is saved with the weights; None where that does not say.
        names: (model) → the model's name for each name in the file, where they differ.
        orders: (model) → the parameter names in the order of the trainer's optimiser, group by group; several answers
            where versions of the trainer differ.
        partial: whether the file holds a part of the model's weights by intent, as an adapter's does.
    """

    model: Callable[[], nn.Module] | None = None
    names: Callable[[nn.Module], Mapping[str, str]] | None = None
    orders: Callable[[nn.Module], Sequence[Sequence[Sequence[str]]]] | None = None
    partial: bool = False


@dataclass(frozen=True, eq=False)
class Contents:
    """What one file or folder holds; a checkpoint may be two of them.

    Attributes:
        weights: tensors by the names in the file.
        optimizer: an optimiser's state in torch's layout.
        weights_at: the keys that lead to the weights, where all of them are in one dictionary.
        places: the keys that lead to each of the weights, where they are not.
        ordered: whether `weights` are in the order in which the model registered them.
        found: all the networks and states that the file holds.
        notes: which of them were taken and why, in words.
    """

    weights: Mapping[str, Tensor] | None
    optimizer: Mapping[str, Any] | None
    summary: str
    weights_at: Keys = ()
    places: Mapping[str, Keys] = field(default_factory=dict)
    ordered: bool = False
    recorded: Recorded = field(default_factory=Recorded)
    rules: Rules = field(default_factory=Rules)
    found: Found = field(default_factory=Found)
    notes: tuple[str, ...] = ()


def contents_of(
    tree: Any, source: object, *, weights_key: str | None = None, optimizer_key: str | None = None
) -> Contents:
    """The weights and the optimiser's state in a dictionary, at the top or down to the third level; see `choose`."""
    if not isinstance(tree, Mapping):
        raise FileError(
            f"{source} holds a {_kind(tree)}, not a dictionary: save "
            "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
        )
    held = list(branches(tree))
    states = {path: value for path, value in held if is_optimizer(value)}
    rest = [(path, value) for path, value in held if not is_optimizer(value)]
    found = Found([Network(path, value) for path, value in rest if is_weights(value)], states)
    choice = choose(found, source, weights_key, optimizer_key)
    contents = Contents(
        weights=None,
        optimizer=None if choice.optimizer is None else states[choice.optimizer],
        summary=describe(tree),
        recorded=recorded_in(value for path, value in rest if len(path) < 2 and not is_weights(value)),
        found=found,
    )
    return with_choice(contents, choice)


def with_choice(contents: Contents, choice: Choice) -> Contents:
    """The contents with the weights of the networks that were chosen, under their keys where there are several."""
    networks = choice.networks
    if not networks:
        return replace(contents, notes=choice.notes)
    one = len(networks) == 1
    return replace(
        contents,
        weights=tensors_of(networks),
        weights_at=networks[0].path if one else (),
        places={} if one else {name: (*network.path, own) for name, (network, own) in named(networks).items()},
        ordered=all(matching.keeps_order(network.tensors) for network in networks),
        notes=choice.notes,
    )


def describe(tree: Mapping[Any, Any]) -> str:
    """A dictionary's first keys and what is under them."""
    return ", ".join(f"{said(key)} ({_kind(value)})" for key, value in itertools.islice(tree.items(), 8)) or "nothing"


def _kind(value: Any) -> str:
    name = value.name if isinstance(value, StandIn) else type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, Mapping | list) else name


def recorded_in(levels: Iterable[Mapping[Any, Any]]) -> Recorded:
    """What a trainer wrote into dictionaries, under the usual keys; the first dictionary that has one counts."""
    levels = list(levels)

    def number(keys: Sequence[str]) -> int | None:
        for key, level in itertools.product(keys, levels):
            value = level.get(key)
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
                return int(value)
        return None

    classes = [level[key] for key in _CLASS_KEYS for level in levels if isinstance(level.get(key), str)]
    return Recorded(number(_STEP_KEYS), number(_EPOCH_KEYS), number(_N_DATA_KEYS) or None, next(iter(classes), None))


# --- networks and optimisers' states ---------------------------------------------------------------------------------


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
    memory = {n: [matching.memory_of(tensor) for tensor in held.values()] for n, held in tensors.items()}
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
    names = matching.names_in(state)
    tensors = tensors_of(networks)
    if names is not None:
        known = {_plain(name) for name in tensors}
        return "every name is there" if all(_plain(name) in known for name in names) else ""
    slots = matching.slots_of(state)
    if all(slot.shape is None for slot in slots):
        return "nothing in its state to check" if len(slots) <= len(matching.candidates(tensors, len(slots))) else ""
    try:
        found = matching.pair_weights(slots, tensors, ordered=all(matching.keeps_order(n.tensors) for n in networks))
    except matching.AmbiguousError:
        return "no shape contradicts it"
    except MatchError:
        return ""
    behind = named(networks)
    numbers = [networks.index(behind[found.names[slot.key]][0]) for slot in slots if slot.key in found.names]
    if len(set(numbers)) < len(networks):
        return ""
    count = len(matching.candidates(tensors))
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
        checked = matching.names_in(state) is None and any(slot.shape is not None for slot in matching.slots_of(state))
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


def torch_layout(value: Any) -> Any:
    """A state that fastai's own Adam wrote, in torch's layout; all else as it is.

    It has one dictionary a parameter, `state`, and one a group, `hypers`; nothing says where a group ends. `sqr_mom` is
    β₂; `do_wd` says of a parameter that it does not decay.
    """
    if not isinstance(value, Mapping) or value.keys() != {"state", "hypers"}:
        return value
    states, hypers = map(_items, (value["state"], value["hypers"]))
    # No file says which parameter is in which group, so the groups must agree.
    shared = [[group.get(key) for key in ("mom", "sqr_mom", "eps", "wd")] for group in hypers]
    trained = [state for state in states if any(isinstance(held, Tensor) for held in state.values())]
    if not states or not shared or any(group != shared[0] for group in shared) or None in shared[0][:2]:
        return value
    if not all(_NAMES.keys() <= state.keys() for state in trained):
        return value
    momentum, beta, eps, decay = shared[0]
    groups = [
        {
            "betas": (momentum, beta),
            "eps": eps,
            "weight_decay": float(decay or 0.0) if decays else 0.0,
            "params": [number for number, _ in members],
            matching.ONE_LIST: True,
        }
        for decays, members in itertools.groupby(enumerate(states), lambda item: bool(item[1].get("do_wd", True)))
    ]
    renamed = [{_NAMES[key]: held for key, held in state.items() if key in _NAMES} for state in states]
    return {"state": {n: state for n, state in enumerate(renamed) if state}, "param_groups": groups}


def _items(held: Any) -> list[Mapping[str, Any]]:
    """The dictionaries of a list, or of fastcore's `L`; none where something else is among them."""
    inside = getattr(held, "state", None)
    items = inside.get("items") if isinstance(inside, Mapping) else held
    listed = list(items) if isinstance(items, list | tuple) else []
    return listed if all(isinstance(item, Mapping) for item in listed) else []
