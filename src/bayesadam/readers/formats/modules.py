"""Whole modules and optimisers that were pickled: their state dicts."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from bayesadam.readers.formats.pickles import BadPickle, StandIn
from bayesadam.readers.pairing import memory_of

# As deep as anything is looked for in a file.
_LEVELS = 3
_DEEPEST = 200
# Modules may be shared, and a hostile file can share them so often that no walk ends.
_MOST_MODULES = 1_000_000


def as_weights(tree: Any) -> Any:
    """The tree with every module and optimiser in its upper levels exchanged for its state dict."""
    names: dict[tuple[Any, ...], str] = {}

    def weights(held: StandIn) -> Any:
        found = OrderedDict(_tensors(held, "", frozenset(), itertools.count()))
        for name, tensor in found.items():
            names.setdefault(memory_of(tensor), name)
        return found or held

    return _exchanged(_exchanged(tree, weights), lambda held: _state_dict(held, names))


def _exchanged(tree: Any, made: Callable[[StandIn], Any], level: int = 0) -> Any:
    if isinstance(tree, StandIn):
        return made(tree)
    if level == _LEVELS or not isinstance(tree, dict):
        return tree
    values = OrderedDict((key, _exchanged(value, made, level + 1)) for key, value in tree.items())
    if all(values[key] is tree[key] for key in tree):
        return tree
    # torch notes the order of the modules at a state dict.
    if hasattr(tree, "_metadata"):
        values._metadata = tree._metadata  # type: ignore[attr-defined]
    return values


def is_module(held: StandIn) -> bool:
    """Whether it was a torch module, or one of TorchScript's."""
    state = held.state
    return isinstance(state, Mapping) and ("_modules" in state or held.name.startswith("__torch__."))


def _tensors(held: StandIn, prefix: str, above: frozenset[int], visits: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, then children, in the order of `state_dict`; of TorchScript, attributes in file order."""
    if not is_module(held) or id(held) in above or len(above) == _DEEPEST:
        return
    if next(visits) == _MOST_MODULES:
        raise BadPickle(f"more than {_MOST_MODULES:,} modules in one")
    state = own = children = held.state
    if "_modules" in state:
        skipped = state.get("_non_persistent_buffers_set")
        if isinstance(skipped, StandIn):
            # A set, which old protocols make from a list.
            skipped = skipped.arguments[0] if skipped.arguments else ()
        transient = set(map(str, skipped)) if isinstance(skipped, list | tuple | set | frozenset) else set()
        buffers = {key: value for key, value in _named(state.get("_buffers")).items() if key not in transient}
        own, children = {**_named(state.get("_parameters")), **buffers}, _named(state["_modules"])
    for key, value in own.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
    for key, value in children.items():
        if isinstance(value, StandIn):
            yield from _tensors(value, f"{prefix}{key}.", above | {id(held)}, visits)


def _named(held: Any) -> dict[str, Any]:
    return {key: value for key, value in held.items() if isinstance(key, str)} if isinstance(held, Mapping) else {}


def _state_dict(held: StandIn, names: Mapping[tuple[Any, ...], str]) -> Any:
    """An optimiser's state dict; anything else as it is. Its parameters are tensors, known by their memory."""
    state = held.state
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return held
    groups, states = state["param_groups"], state["state"]
    try:
        listed = [memory_of(parameter) for group in groups for parameter in group["params"]]
        known = all(memory in names for memory in listed)
        keys = {memory: names[memory] if known else number for number, memory in enumerate(listed)}
        numbered = {keys[memory_of(parameter)]: value for parameter, value in states.items()}
        made = [{**group, "params": [keys[memory_of(p)] for p in group["params"]]} for group in groups]
    except (TypeError, KeyError, AttributeError):
        return held
    return {"state": numbered, "param_groups": made} if len(keys) == len(listed) else held
