"""Whole modules and optimisers that were pickled: what their state dicts have."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from bayesadam.readers.formats.names import memory_of
from bayesadam.readers.formats.pickles import BadPickle, StandIn

Memory = tuple[Any, ...]

# As deep as anything is looked for in a file.
_LEVELS = 3
_DEEPEST = 200
# Modules may be shared, and a hostile file can share them so often that no walk ends.
_MOST_MODULES = 1_000_000


def as_weights(tree: Any) -> Any:
    """The tree with every module and optimiser in its upper levels exchanged for its state dict."""
    names: dict[Memory, str] = {}
    return _with_optimizers(_with_modules(tree, names, 0), names, 0)


def _with_modules(tree: Any, names: dict[Memory, str], level: int) -> Any:
    if isinstance(tree, StandIn):
        found = OrderedDict(_tensors(tree, "", frozenset(), itertools.count()))
        for name, tensor in found.items():
            names.setdefault(_memory(tensor), name)
        return found or tree
    return _each(tree, level, lambda value: _with_modules(value, names, level + 1))


def _with_optimizers(tree: Any, names: Mapping[Memory, str], level: int) -> Any:
    if isinstance(tree, StandIn):
        return _state_dict(tree, names)
    return _each(tree, level, lambda value: _with_optimizers(value, names, level + 1))


def _each(tree: Any, level: int, made: Callable[[Any], Any]) -> Any:
    if level == _LEVELS or not isinstance(tree, dict) or not any(isinstance(v, StandIn | dict) for v in tree.values()):
        return tree
    return _like(tree, {key: made(value) for key, value in tree.items()})


def _like(tree: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """The values, with what torch notes at a state dict."""
    if all(values[key] is tree[key] for key in tree):
        return tree
    made = OrderedDict(values)
    if hasattr(tree, "_metadata"):
        made._metadata = tree._metadata  # type: ignore[attr-defined]
    return made


def is_module(held: StandIn) -> bool:
    """Whether it was a torch module, or one of TorchScript's."""
    state = held.state
    return isinstance(state, Mapping) and ("_modules" in state or held.name.startswith("__torch__."))


def _tensors(held: StandIn, prefix: str, above: frozenset[int], visits: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, then children, in the order of `state_dict`; of TorchScript, attributes in the file's order."""
    if not is_module(held) or id(held) in above or len(above) == _DEEPEST:
        return
    if next(visits) == _MOST_MODULES:
        raise BadPickle(f"more than {_MOST_MODULES:,} modules in one")
    above |= {id(held)}
    state = held.state
    if "_modules" not in state:
        children = {key: value for key, value in state.items() if isinstance(value, StandIn)}
        own = state
    else:
        transient = state.get("_non_persistent_buffers_set")
        skipped = transient if isinstance(transient, set | frozenset) else _members(transient)
        buffers = {key: value for key, value in _pairs(state.get("_buffers")) if key not in skipped}
        own = {**dict(_pairs(state.get("_parameters"))), **buffers}
        children = {key: value for key, value in _pairs(state["_modules"]) if isinstance(value, StandIn)}
    for key, value in own.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
    for key, value in children.items():
        yield from _tensors(value, f"{prefix}{key}.", above, visits)


def _pairs(held: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in held.items() if isinstance(key, str)] if isinstance(held, Mapping) else []


def _members(held: Any) -> set[Any]:
    """Of a set, which old protocols make from a list."""
    listed = held.arguments[0] if isinstance(held, StandIn) and held.arguments else ()
    return {item for item in listed if isinstance(item, str)} if isinstance(listed, list | tuple) else set()


def _state_dict(held: StandIn, names: Mapping[Memory, str]) -> Any:
    """An optimiser's state dict; anything else as it is. Its parameters are tensors, known by their memory."""
    state = held.state
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return held
    groups, states = state["param_groups"], state["state"]
    try:
        listed = [_memory(parameter) for group in groups for parameter in group["params"]]
        known = all(place in names for place in listed)
        keys = {place: names[place] if known else number for number, place in enumerate(listed)}
        numbered = {keys[_memory(parameter)]: value for parameter, value in states.items()}
        made = [{**group, "params": [keys[_memory(p)] for p in group["params"]]} for group in groups]
    except (TypeError, KeyError, AttributeError):
        return held
    return {"state": numbered, "param_groups": made} if len(keys) == len(listed) else held


def _memory(parameter: Any) -> Memory:
    if not isinstance(parameter, Tensor):
        raise TypeError("a parameter is a tensor")
    return memory_of(parameter)
