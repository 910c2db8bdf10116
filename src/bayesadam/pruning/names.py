"""Which parameters are meant: by name, by pattern, by kind, with tied ones known under each of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesadam.errors import MatchError, SettingError


class Owner(NamedTuple):
    """A module that holds a parameter, the parameter's key in it, and its name by that way."""

    name: str
    module: nn.Module
    key: str


def owners(model: nn.Module) -> dict[str, tuple[Owner, ...]]:
    """The modules that hold each parameter, by its first name; tied parameters have several."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Owner, ...]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owner = Owner(f"{prefix}.{key}" if prefix else key, module, key)
                name = first.setdefault(id(parameter), owner.name)
                found[name] = (*found.get(name, ()), owner)
    return found


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter by any of its names."""
    return {owner.name: name for name, held in owners(model).items() for owner in held}


def near(word: str, names: Iterable[str]) -> str:
    """The names most like a word, for an error message."""
    every = list(names)
    return ", ".join(map(repr, get_close_matches(word, every, n=3, cutoff=0.4) or every[:3])) or "none at all"


def matching(model: nn.Module, patterns: str | Sequence[str]) -> set[str]:
    """The first names of the parameters that any pattern or kind (`"norms"`, `"biases"`, `"embeddings"`) means.

    A kind that the model has none of is passed over; a pattern that matches nothing is an error.
    """
    held = owners(model)
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        kind = _KINDS.get(pattern)
        chosen = {
            name
            for name, ways in held.items()
            if any(kind(owner) if kind else fnmatchcase(owner.name, pattern) for owner in ways)
        }
        if not chosen and kind is None:
            raise MatchError(
                f"exclude pattern {pattern!r} matches no parameter of {type(model).__name__}; near it: "
                f"{near(pattern.strip('*'), held)}. The kinds are {', '.join(map(repr, _KINDS))}"
            )
        found |= chosen
    return found


def matching_names(names: Collection[str], patterns: str | Sequence[str]) -> set[str]:
    """As `matching`, where the names are all there is: they identify biases, but not the class of a module."""
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if pattern in _KINDS and pattern != "biases":
            raise SettingError(
                f"exclude={pattern!r} goes by the classes of the model's modules, which a file does not have: write "
                "patterns of names instead, such as '*.norm*.weight'. Its parameters are "
                + ", ".join(sorted(names)[:8])
                + (", …" if len(names) > 8 else "")
            )
        chosen = {name for name in names if pattern == "biases" and _bias_key(name.rpartition(".")[2])}
        chosen |= {name for name in names if fnmatchcase(name, pattern)}
        if not chosen and pattern != "biases":
            raise MatchError(
                f"exclude={pattern!r} matches no parameter; near it: {near(pattern.strip('*'), names)}. Of the kinds, "
                "'biases' can be identified"
            )
        found |= chosen
    return found


def checked_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks by the first names of their parameters, each boolean and of its parameter's shape; all, or an error."""
    parameters, known = dict(model.named_parameters()), first_names(model)
    found: dict[str, Tensor] = {}
    for given, mask in masks.items():
        name = known.get(given)
        if name is None:
            raise MatchError(
                f"mask {given!r} is of no parameter of {type(model).__name__}; near it: {near(given, parameters)}"
            )
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            described = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise MatchError(f"mask {given!r} must be a boolean tensor, True where a weight is kept, not {described}")
        if mask.shape != parameters[name].shape:
            raise MatchError(
                f"mask {given!r} has shape {tuple(mask.shape)}, the parameter {tuple(parameters[name].shape)}"
            )
        if name in found and not bool((found[name].to(mask.device) == mask).all()):
            raise MatchError(f"{given!r} and {name!r} are one tied parameter, and their masks differ: give one of them")
        found[name] = mask
    return found


def _is_of(pattern: str, owner: Owner) -> bool:
    return any(re.search(pattern, kind.__name__) for kind in type(owner.module).__mro__)


def _bias_key(key: str) -> bool:
    """Whether a module's parameter is a bias, by its key: `bias`, `in_proj_bias`, `bias_hh_l0`."""
    return "bias" in key.split("_")


_KINDS: dict[str, Callable[[Owner], bool]] = {
    "norms": partial(_is_of, r"Norm(\d*d)?$"),
    "biases": lambda owner: _bias_key(owner.key),
    "embeddings": partial(_is_of, r"Embedding(s|Bag)?$"),
}
