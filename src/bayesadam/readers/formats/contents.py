"""Where in a saved dictionary the weights and the optimiser's state are, and what else the trainer wrote down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from bayesadam.errors import FileError
from bayesadam.readers.formats.networks import (
    Choice,
    Found,
    Keys,
    branches,
    choose,
    find,
    is_optimizer,
    is_weights,
    named,
    tensors_of,
)
from bayesadam.readers.formats.pickles import StandIn, said
from bayesadam.readers.match import keeps_order

_STEP_KEYS = ("global_step", "step", "iteration", "iter", "iter_num", "iterations")
_EPOCH_KEYS = ("epoch", "current_epoch", "epochs")
_N_DATA_KEYS = ("n_data", "num_train_examples", "n_train")
_CLASS_KEYS = ("optimizer_class", "optimizer_name", "optimizer_type")


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
        orders: (model) → the parameter names in the order in which the trainer gives them to its optimiser, group by
            group; several answers where versions of the trainer differ.
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
    found = find(tree)
    choice = choose(found, source, weights_key, optimizer_key)
    levels = [v for path, v in branches(tree) if len(path) < 2 and isinstance(v, Mapping)]
    contents = Contents(
        weights=None,
        optimizer=None if choice.optimizer is None else found.optimizers[choice.optimizer],
        summary=describe(tree),
        recorded=recorded_in(level for level in levels if not is_weights(level) and not is_optimizer(level)),
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
        ordered=all(keeps_order(network.tensors) for network in networks),
        notes=choice.notes,
    )


def describe(tree: Mapping[Any, Any]) -> str:
    """A dictionary's first keys and what is under them."""
    described = [f"{said(key)} ({_kind(value)})" for key, value in itertools.islice(tree.items(), 8)]
    return ", ".join(described) + (f" and {len(tree) - 8} more" if len(tree) > 8 else "") if tree else "nothing"


def _kind(value: Any) -> str:
    if isinstance(value, StandIn):
        return value.name
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"{'dict' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    return type(value).__name__


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
