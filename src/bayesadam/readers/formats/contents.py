"""What a file or folder holds: networks, optimisers' states, and what else the trainer wrote."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayesadam._checks import is_number
from bayesadam.errors import FileError
from bayesadam.readers.formats.pickles import StandIn, said

# Under which keys trainers write what `Recorded` has.
_NUMBERS = {
    "step": ("global_step", "step", "iteration", "iter", "iter_num", "iterations"),
    "epoch": ("epoch", "current_epoch", "epochs"),
    "n_data": ("n_data", "num_train_examples", "n_train"),
}
# Levels of dictionaries that are searched.
_DEEPEST = 3

Keys = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """Weights by name, the keys that lead to them, and whether they are in the order in which the model has them."""

    path: Keys
    tensors: Mapping[str, Tensor]
    ordered: bool = True


@dataclass(frozen=True)
class Recorded:
    """What else the trainer wrote: steps taken, epochs, N, B; None where it wrote nothing."""

    step: int | None = None
    epoch: int | None = None
    n_data: int | None = None
    batch_size: int | None = None

    def completed(self, other: Recorded) -> Recorded:
        """What this lacks, from `other`."""
        return replace(other, **{key: value for key, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class Rules:
    """What a trainer does without writing it down; each rule needs the model.

    Attributes:
        names: (model) → the model's name for each name in the file, where they differ.
        orders: (model) → the parameter names in the order of the trainer's optimiser, group by group; several answers
            where versions of the trainer differ.
        partial: whether the file holds a part of the model's weights by intent, as an adapter's does.
    """

    names: Callable[[nn.Module], Mapping[str, str]] | None = None
    orders: Callable[[nn.Module], Sequence[Sequence[Sequence[str]]]] | None = None
    partial: bool = False


@dataclass(frozen=True, eq=False)
class Contents:
    """What one file or folder holds; a checkpoint may be two of them.

    Attributes:
        networks: all the weights.
        states: all the optimisers' states, in torch's layout, by the keys that lead to them.
        summary: what is in it, for messages.
        beside: files that may have the state where there is none.
        notes: what is to be said of how it was read.
    """

    networks: Sequence[Network]
    states: Mapping[Keys, Mapping[str, Any]]
    summary: str
    recorded: Recorded = field(default_factory=Recorded)
    rules: Rules = field(default_factory=Rules)
    beside: Sequence[Path] = ()
    notes: tuple[str, ...] = ()


def contents_of(tree: Any, source: object) -> Contents:
    """The weights and the optimisers' states in a dictionary, at the top or down to the third level."""
    if not isinstance(tree, Mapping):
        raise FileError(
            f"{source} holds a {_kind(tree)}, not a dictionary: save "
            "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
        )
    inside = list(branches(tree))
    rest = [(path, value) for path, value in inside if not is_optimizer(value)]
    return Contents(
        networks=[Network(path, value, keeps_order(value)) for path, value in rest if is_weights(value)],
        states={path: value for path, value in inside if is_optimizer(value)},
        summary=describe(tree),
        recorded=recorded_in(value for path, value in rest if len(path) < 2 and not is_weights(value)),
        notes=tuple(
            f"{'.'.join((*path, str(key)))!r} is a list of {len(listed)} tensors without names, which is not read"
            for path, value in rest
            if isinstance(value, Mapping)
            for key, listed in value.items()
            if isinstance(listed, list)
            and listed
            and all(isinstance(t, Tensor) and t.is_floating_point() for t in listed)
        ),
    )


def describe(tree: Mapping[Any, Any]) -> str:
    """A dictionary's first keys and what is under them."""
    return ", ".join(f"{said(key)} ({_kind(value)})" for key, value in itertools.islice(tree.items(), 8)) or "nothing"


def _kind(value: Any) -> str:
    name = value.name if isinstance(value, StandIn) else type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, Mapping | list) else name


def recorded_in(levels: Iterable[Mapping[Any, Any]]) -> Recorded:
    """What a trainer wrote into dictionaries, under the usual keys, the first of which counts."""
    levels = list(levels)
    recorded: dict[str, Any] = {}
    for name, keys in _NUMBERS.items():
        for key, level in itertools.product(keys, levels):
            value = level.get(key)
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if is_number(value) and value >= 0:
                recorded.setdefault(name, int(value))
    return Recorded(**{**recorded, "n_data": recorded.get("n_data") or None})


def branches(tree: Mapping[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Dictionaries down to the third level, lists of states opened."""
    yield path, tree
    if is_weights(tree) or is_optimizer(tree):
        return
    for key, value in tree.items():
        if not isinstance(key, str | int):
            continue
        here = (*path, str(key))
        if isinstance(value, Mapping) and len(here) <= _DEEPEST:
            yield from branches(value, here)
        elif isinstance(value, list | tuple):
            yield from (((*here, str(number)), item) for number, item in enumerate(value) if is_optimizer(item))


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


def keeps_order(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict is in the order of the modules that torch noted with it; without the note, not sorted."""
    names = list(weights)
    noted = getattr(weights, "_metadata", None)
    number = {module: number for number, module in enumerate(noted if isinstance(noted, Mapping) else ())}
    numbers = [number[module] for name in names if (module := name.rpartition(".")[0]) in number]
    return numbers == sorted(numbers) if numbers else len(names) < 2 or names != sorted(names)
