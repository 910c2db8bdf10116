"""Which parameters are meant: by name, by pattern, by kind, with tied ones known under each of their names."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesadam._kinds import require_kind
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.posterior.running import biases_before_norms


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


def near(word: str, names: Iterable[str]) -> str:
    """The names most like a word, for an error message."""
    every = list(names)
    return ", ".join(map(repr, get_close_matches(word, every, n=3, cutoff=0.4) or every[:3])) or "none at all"


def matching(model: nn.Module, patterns: str | Sequence[str]) -> set[str]:
    """The first names of the parameters that any pattern or kind (`"norms"`, `"biases"`, `"embeddings"`) means.

    A kind that the model has none of is passed over; a pattern that matches nothing is an error.
    """
    held = owners(model)
    kinds = {kind: {name for name, ways in held.items() if any(map(fits, ways))} for kind, fits in _KINDS.items()}
    return _matching(patterns, {name: [owner.name for owner in ways] for name, ways in held.items()}, kinds)


def matching_names(names: Collection[str], patterns: str | Sequence[str]) -> set[str]:
    """As `matching`, where the names are all there is: they identify biases, but not the class of a module."""
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if pattern in _KINDS and pattern != "biases":
            raise SettingError(
                f"exclude={pattern!r} goes by the classes of the model's modules, which a file does not have: write "
                "patterns of names instead, such as '*.norm*.weight'. Its parameters are "
                + ", ".join(sorted(names)[:8])
                + (", …" if len(names) > 8 else "")
            )
    biases = {name for name in names if _bias_key(name.rpartition(".")[2])}
    return _matching(patterns, {name: [name] for name in names}, {"biases": biases})


def _matching(
    patterns: str | Sequence[str], aliases: Mapping[str, Sequence[str]], kinds: Mapping[str, set[str]]
) -> set[str]:
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        chosen = {name for name, ways in aliases.items() if any(fnmatchcase(way, pattern) for way in ways)}
        if not chosen and pattern not in kinds:
            raise MatchError(
                f"exclude={pattern!r} matches no parameter; near it: {near(pattern.strip('*'), aliases)}. The kinds are "
                + ", ".join(map(repr, kinds))
            )
        found |= kinds.get(pattern, chosen)
    return found


def checked_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks by the first names of their parameters, each boolean and of its parameter's shape; all, or an error."""
    require_kind(model, nn.Module, "model")
    require_kind(masks, Mapping, "masks")
    parameters = dict(model.named_parameters())
    known = {owner.name: name for name, held in owners(model).items() for owner in held}
    found: dict[str, Tensor] = {}
    for given, mask in masks.items():
        name = known.get(given)
        if name is None:
            kind = type(model).__name__
            raise MatchError(f"mask {given!r} is of no parameter of {kind}; near it: {near(given, parameters)}")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            described = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise MatchError(f"mask {given!r} must be a boolean tensor, True where a weight is kept, not {described}")
        if mask.shape != parameters[name].shape:
            shape = tuple(parameters[name].shape)
            raise MatchError(f"mask {given!r} has shape {tuple(mask.shape)}, the parameter {shape}")
        if name in found and not bool((found[name].to(mask.device) == mask).all()):
            raise MatchError(f"{given!r} and {name!r} are one tied parameter, and their masks differ: give one of them")
        found[name] = mask
    return found


def held_by_statistics(names: Collection[str], moment: Callable[[str], Tensor], widths: Collection[int]) -> set[str]:
    """The biases that a batch norm follows, see `biases_before_norms`; a warning names them."""
    found = biases_before_norms(names, moment, widths)
    if found:
        warn(
            f"left whole: {', '.join(found[:4])}{', …' if len(found) > 4 else ''}. A batch norm follows, so that the "
            "loss did not feel them, but its running mean has them in it, and without them the network would be another one"
        )
    return set(found)


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
