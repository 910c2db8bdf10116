"""Where in a saved dictionary the weights and the optimiser's state are, and what else the trainer wrote down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from bayesadam.errors import FileError

# In lower case. A key that is not among them is taken where it is the only one that fits.
_WEIGHTS_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights", "params")
_STEMS = ("optimizer", "optim")
_OPTIMIZER_KEYS = (*_STEMS, *(f"{s}_state_dict" for s in _STEMS), "optimizer_state", "optimizer_states", "opt")
_STEP_KEYS = ("global_step", "step", "iteration", "iter", "iter_num", "iterations")
_EPOCH_KEYS = ("epoch", "current_epoch", "epochs")
_N_DATA_KEYS = ("n_data", "num_train_examples", "n_train")
_CLASS_KEYS = ("optimizer_class", "optimizer_name", "optimizer_type")

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """What else the trainer wrote: steps taken, epochs, N, the optimiser's class; None where it wrote nothing."""

    step: int | None = None
    epoch: int | None = None
    n_data: int | None = None
    optimizer: str | None = None

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
        weights: tensors by the names in the file, or None.
        optimizer: an optimiser's state in torch's layout, or None.
        summary: what the file holds, in words.
        weights_at: the keys that lead to the weights.
        ordered: whether `weights` are in the order in which the model registered them.
        recorded: what else the trainer wrote.
        rules: what it did without writing it down.
    """

    weights: Mapping[str, Tensor] | None
    optimizer: Mapping[str, Any] | None
    summary: str
    weights_at: Keys = ()
    ordered: bool = False
    recorded: Recorded = field(default_factory=Recorded)
    rules: Rules = field(default_factory=Rules)


def contents_of(
    tree: Any, source: object, *, weights_key: str | None = None, optimizer_key: str | None = None
) -> Contents:
    """The weights and the optimiser's state in a dictionary, at the top, under a key, or one level further down.

    `source` is the file's path, for messages; the keys choose where there are several.
    """
    if not isinstance(tree, Mapping):
        raise FileError(
            f"{source} holds a {type(tree).__name__}, not a dictionary: save "
            "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
        )
    found = list(_branches(tree))
    held = {path: value for path, value in found if _is_weights(value)}
    several = f"{source} holds several sets of weights"
    weights = _choose(held, _WEIGHTS_KEYS, weights_key, several, "weights_key")
    held = {path: value for path, value in found if _is_optimizer(value)}
    several = f"{source} holds the state of several optimisers"
    optimizer = _choose(held, _OPTIMIZER_KEYS, optimizer_key, several, "optimizer_key")
    path, named = weights or ((), None)
    return Contents(
        weights=None if named is None else {key: tensor for key, tensor in named.items() if isinstance(tensor, Tensor)},
        optimizer=None if optimizer is None else optimizer[1],
        summary=describe(tree),
        weights_at=path,
        ordered=named is not None and keeps_order(named),
        recorded=_recorded([v for path, v in found if len(path) < 2 and not _is_weights(v) and not _is_optimizer(v)]),
    )


def describe(tree: Mapping[Any, Any]) -> str:
    """A dictionary's first keys and what is under them.

    >>> describe({"epoch": 3, "model": {"w": 1}})
    "'epoch' (int), 'model' (dict of 1)"
    """
    described = [f"{key!r} ({_kind(value)})" for key, value in itertools.islice(tree.items(), 8)]
    return ", ".join(described) + (f" and {len(tree) - 8} more" if len(tree) > 8 else "") if tree else "nothing"


def keeps_order(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict is still in the order of the model's modules.

    torch notes the modules, in order, with a state dict. Without the note, names in alphabetical order are taken to
    have been sorted by someone.
    """
    names = list(weights)
    noted = getattr(weights, "_metadata", None)
    if isinstance(noted, Mapping):
        place = {module: number for number, module in enumerate(noted)}
        places = [place[module] for name in names if (module := name.rpartition(".")[0]) in place]
        if places:
            return places == sorted(places)
    return len(names) < 2 or names != sorted(names)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"{'dict' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    return type(value).__name__


def _branches(tree: Mapping[Any, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value down to the second level, lists opened; what is weights or an optimiser's state is not looked into."""
    yield path, tree
    if len(path) == 2 or _is_weights(tree) or _is_optimizer(tree):
        return
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _branches(value, (*path, str(key)))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if _is_optimizer(item):
                    yield (*path, str(key), str(index)), item


def _is_weights(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    others = [key for key, item in value.items() if not isinstance(item, Tensor) and not key.endswith("_extra_state")]
    # A dictionary of losses holds single numbers, one of random states holds bytes.
    return not others and any(tensor.is_floating_point() and tensor.dim() > 0 for tensor in tensors)


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list | tuple)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def _choose(
    candidates: Mapping[Keys, Any], known: Sequence[str], wanted: str | None, several: str, option: str
) -> tuple[Keys, Any] | None:
    """The one meant: the one asked for, else the shallowest under a usual key, else the only one."""
    paths = list(candidates)
    if wanted is not None:
        paths = [path for path in paths if ".".join(path) == wanted]
        if not paths:
            there = ", ".join(repr(".".join(path)) for path in candidates) or "none"
            raise FileError(f"there is nothing of the kind under {option}={wanted!r}; there is {there}")
    usual = [path for path in paths if any(part.lower() in known for part in path[-2:])]
    if usual:
        paths = [path for path in usual if len(path) == min(map(len, usual))]
    if len(paths) > 1:
        there = " and ".join(repr(".".join(path)) for path in paths[:6])
        raise FileError(f"{several}, {there}: say which with {option}={'.'.join(paths[0])!r}")
    return (paths[0], candidates[paths[0]]) if paths else None


def _recorded(levels: Sequence[Mapping[Any, Any]]) -> Recorded:
    def number(keys: Sequence[str]) -> int | None:
        for key, level in itertools.product(keys, levels):
            value = level.get(key)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            # numpy's whole numbers, too.
            if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
                return int(value)
        return None

    classes = [level[key] for key in _CLASS_KEYS for level in levels if isinstance(level.get(key), str)]
    return Recorded(number(_STEP_KEYS), number(_EPOCH_KEYS), number(_N_DATA_KEYS) or None, next(iter(classes), None))
