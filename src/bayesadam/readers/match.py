"""Which state belongs to which parameter: by identity for a live optimiser, by name or checked order for a saved one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import unwrap
from bayesadam._kinds import require_kind
from bayesadam._shards import check_placements, is_sharded, reshard
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.reader import Group, State, StateReader, has_tensors, outline, parameter_shape
from bayesadam.readers.registry import reader_named, reader_of, readers_with_key
from bayesadam.readers.rotated import unknown_bases

_WRAPPER_PREFIXES = ("_orig_mod", "module")
_FROZEN = "frozen (requires_grad is False)"
_UNTRAINED = "never received a gradient"


@dataclass(frozen=True)
class Entry:
    """One parameter with its optimiser state."""

    name: str
    parameter: nn.Parameter
    state: State
    group: Group
    reader: StateReader

    @property
    def weight_decay(self) -> float:
        """λ of its group."""
        return float(self.group.get("weight_decay", 0.0) or 0.0)


@dataclass(frozen=True)
class Match:
    """The parameters whose state is known, those omitted with the reason, and the number of another model's parameters."""

    entries: tuple[Entry, ...]
    omitted: Mapping[str, str]
    foreign: int = 0
    optimizers: tuple[str, ...] = ()


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the user's own module by name; FSDP2's as the shards that an optimiser has seen."""
    require_kind(model, nn.Module, "model")
    reshard(model)
    return dict(unwrap(model).named_parameters())


def match_optimizers(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], reader: str | StateReader | None = None
) -> Match:
    """Match live optimisers to the model's parameters by identity; tied weights appear once, under their first name."""
    names = {id(parameter): name for name, parameter in own_parameters(model).items()}
    if not names:
        raise MatchError(f"{type(model).__name__} has no parameters")
    optimizer_list = listed_optimizers(optimizers)
    classes = " and ".join(type(optimizer).__name__ for optimizer in optimizer_list)
    taken: dict[str, Entry | str] = {}
    refusals: list[str] = []
    owners: dict[str, int] = {}
    foreign = 0
    for index, optimizer in enumerate(optimizer_list):
        record = _resolve(optimizer, reader)
        refusal = refuse(record, type(optimizer).__name__) if record.statistic == "none" else None
        if refusal:
            refusals.append(refusal)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    foreign += 1
                elif owners.setdefault(name, index) != index:
                    raise MatchError(
                        f"parameter {name!r} is trained by two of the optimisers given; pass only the one whose second "
                        "moment is to be used"
                    )
                elif refusal:
                    taken[name] = f"trained by {type(optimizer).__name__}, which keeps no second moment per weight"
                else:
                    taken[name] = _entry_or_reason(name, parameter, optimizer.state.get(parameter, {}), group, record)
    if foreign and not taken:
        raise MatchError(
            f"none of the {foreign} parameters of {classes} belongs to this "
            f"{type(model).__name__}: pass the model that this optimiser trained (a copied or re-created model has "
            "new parameters; use Posterior.from_state_dict with optimizer.state_dict() for it)"
        )
    if len(refusals) == len(optimizer_list):
        raise StateError(refusals[0])
    return _finished(model, taken, tuple(type(o).__name__ for o in optimizer_list), classes, foreign)


def match_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], reader: str | StateReader, param_names: Sequence[str] | None = None
) -> Match:
    """Match a saved optimiser state to the model's parameters.

    Names are used where the state has them (keys that are names, or `param_names` in its groups) or the caller gives
    them, in the optimiser's order. A state of one group without names follows `model.parameters()`, frozen ones
    included or not, as its length says. Several groups without names have no known order and are refused unless the
    shapes leave one answer. Every shape is checked.
    """
    if not isinstance(state_dict, Mapping) or "state" not in state_dict or "param_groups" not in state_dict:
        found = sorted(map(str, state_dict))[:6] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise MatchError(
            f"not an optimiser's state dict: it needs 'state' and 'param_groups', found {found}. Pass what "
            "optimizer.state_dict() returned, for instance checkpoint['optimizer']"
        )
    record = reader_named(reader) if isinstance(reader, str) else reader
    if record.statistic == "none":
        raise StateError(refuse(record, record.name))
    parameters = own_parameters(model)
    states: Mapping[Any, State] = state_dict["state"]
    named = _names_of(state_dict["param_groups"], states, parameters, param_names)
    taken = {
        named[key]: _entry_or_reason(named[key], parameters[named[key]], states.get(key, {}), group, record)
        for group in state_dict["param_groups"]
        for key in group["params"]
    }
    return _finished(model, taken, (record.name,), f"this {record.name!r} state dict")


def refuse(reader: StateReader, class_name: str) -> str:
    """Why an optimiser without a second moment gives no posterior, and what would."""
    return f"{class_name} keeps no second moment per weight; {reader.advice}"


def listed_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimiser or several as a list, each without a trainer's wrapper."""
    listed = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in listed:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise MatchError(
                f"expected a torch optimiser or a list of them, got {type(optimizer).__name__}; for a saved state use "
                "Posterior.from_state_dict"
            )
    if not listed:
        raise MatchError("no optimiser was given: the list is empty")
    return [_inner(optimizer) for optimizer in listed]  # type: ignore[arg-type]


def _inner(optimizer: Optimizer) -> Optimizer:
    """The torch optimiser inside a trainer's wrapper (Accelerate and Lightning keep it in `.optimizer`)."""
    inner = getattr(optimizer, "optimizer", None)
    return _inner(inner) if isinstance(inner, Optimizer) else optimizer


def _resolve(optimizer: Optimizer, reader: str | StateReader | None) -> StateReader:
    if isinstance(reader, StateReader):
        return reader
    if reader is not None:
        return reader_named(reader)
    found = reader_of(optimizer)
    if found is None:
        keys = sorted({str(key) for state in optimizer.state.values() for key in state})
        similar = readers_with_key(keys)
        hint = f"; its keys {keys} look like {similar}: pass reader={similar[0]!r} if that is right" if similar else ""
        raise StateError(
            f"no reader is registered for {type(optimizer).__module__}.{type(optimizer).__qualname__}{hint}. "
            "Describe it with bayesadam.readers.register(StateReader(...))"
        )
    return found


def _entry_or_reason(
    name: str, parameter: nn.Parameter, state: State, group: Group, reader: StateReader
) -> Entry | str:
    """The parameter with its state, or why it is omitted."""
    # Some optimisers fill in counters, or sums at step 0, before the first gradient. A counter above 0 with nothing beside
    # it is no such state: the reader says what is missing.
    untrained = reader.steps(state, group) == 0 or not (has_tensors(state) or "step" in state)
    if not parameter.requires_grad:
        return _FROZEN
    if untrained and reader.statistic != "identity":
        return _UNTRAINED
    check_parameter(name, parameter)
    if unknown := unknown_bases(reader, state, parameter.shape):
        similar = [other for other in readers_with_key(map(str, outline(state))) if other != reader.name]
        raise StateError(
            f"the state of parameter {name!r} keeps bases ({', '.join(unknown)}), so its second moment is in rotated "
            f"coordinates, and reader {reader.name!r} would take {reader.key!r} for the weights' own. Name the optimiser that wrote it"
            + (f", perhaps {' or '.join(map(repr, similar))}" if similar else "")
            + "; or describe it with bayesadam.readers.register(StateReader(...)) and a `read` function"
        )
    return Entry(name, parameter, state, group, reader)


def check_parameter(name: str, parameter: Tensor) -> None:
    """Refuse parameters that no real Gaussian can be put on."""
    if parameter.is_meta:
        raise MatchError(f"parameter {name!r} is on the meta device and has no values: materialise the model first")
    if parameter.is_complex():
        raise MatchError(
            f"parameter {name!r} is complex ({parameter.dtype}): freeze it, or store it as two real tensors"
        )
    if parameter.is_quantized or not parameter.is_floating_point() or parameter.element_size() == 1:
        raise MatchError(
            f"parameter {name!r} is quantised or not floating point ({parameter.dtype}): freeze it with "
            "requires_grad_(False), and it is left out"
        )
    if is_sharded(parameter):
        check_placements(name, parameter)


def _finished(
    model: nn.Module, taken: Mapping[str, Entry | str], optimizers: tuple[str, ...], source: str, foreign: int = 0
) -> Match:
    entries, omitted = [], {}
    for name, parameter in unwrap(model).named_parameters():
        found = taken.get(name, "not in the optimiser" if parameter.requires_grad else _FROZEN)
        if isinstance(found, Entry):
            entries.append(found)
        else:
            omitted[name] = found
    if not entries:
        reasons = Counter(omitted.values())
        if _UNTRAINED in reasons:
            raise StateError(f"{source} has not taken a step yet: train first, then read the posterior")
        described = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise StateError(f"{source} leaves no parameter to read: {described}")
    return Match(tuple(entries), omitted, foreign, optimizers)


def _names_of(
    groups: Sequence[Group],
    states: Mapping[Any, State],
    parameters: Mapping[str, nn.Parameter],
    param_names: Sequence[str] | None,
) -> dict[Any, str]:
    """The parameter name behind each key of a state dict."""
    keys = [key for group in groups for key in group["params"]]
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    unlisted = [key for key in states if key not in set(keys)]
    if repeated or unlisted:
        raise MatchError(
            f"the state dict is inconsistent: keys {(repeated or unlisted)[:4]} are repeated or in no group"
        )
    given, source = param_names, "the names in the state dict" if param_names is None else "param_names"
    if given is None and all(isinstance(key, str) for key in keys):
        given = keys
    elif given is None and all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
    if given is None:
        names, source = _names_by_order(groups, states, keys, parameters), "the order of model.parameters()"
    else:
        names = [_strip(name, parameters) for name in given]
    if len(names) != len(keys):
        raise MatchError(f"{source} gives {len(names)} names for the {len(keys)} parameters of the state dict")
    doubled = [name for name, count in Counter(names).items() if count > 1]
    unknown = [name for name in names if name not in parameters]
    if doubled or unknown:
        raise MatchError(
            f"by {source}, {(unknown or doubled)[:4]} "
            f"{'are no parameters of this model' if unknown else 'are named twice'}: is it another model's state?"
        )
    for key, name in zip(keys, names, strict=True):
        shape = parameter_shape(states.get(key, {}))
        if shape is not None and shape != parameters[name].shape:
            raise MatchError(
                f"by {source}, the state under key {key!r} has shape {tuple(shape)} but parameter {name!r} has "
                f"{tuple(parameters[name].shape)}: it is another model's state, or in another order. Pass "
                "param_names=[...], the parameter names in the order in which the optimiser was given them"
            )
    return dict(zip(keys, names, strict=True))


def _strip(name: str, parameters: Mapping[str, nn.Parameter]) -> str:
    """`name` without the prefixes that torch.compile and data parallelism put before it."""
    parts = name.split(".")
    while ".".join(parts) not in parameters:
        prefix = next((p for p in _WRAPPER_PREFIXES if p in parts[:-1]), None)
        if prefix is None:
            return name
        parts.remove(prefix)
    return ".".join(parts)


def _names_by_order(
    groups: Sequence[Group], states: Mapping[Any, State], keys: list[Any], parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    every = list(parameters)
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    names = next((names for names in (every, trainable) if len(names) == len(keys)), None)
    if names is None:
        raise MatchError(
            f"the state dict holds {len(keys)} parameters, the model {len(every)} ({len(trainable)} of them trainable): "
            "it is another model's state, or was built over a part of this one. Pass param_names=[...], the parameter "
            "names in the order in which the optimiser was given them"
        )
    if len(groups) == 1:
        return names
    # Groups may hold the parameters in any order: only shapes that occur once can tell which is which.
    by_shape: dict[torch.Size, str] = {parameters[name].shape: name for name in names}
    shapes = [parameter_shape(states.get(key, {})) for key in keys]
    if len(by_shape) == len(names) and all(shape in by_shape for shape in shapes):
        return [by_shape[shape] for shape in shapes if shape is not None]
    raise MatchError(
        f"the state dict has {len(groups)} parameter groups and no names, so its order is not known and equal shapes "
        "could be confused. Pass param_names=[...], the parameter names in the order in which the optimiser was given "
        "them, or load it into an optimiser built as in training and use Posterior.from_optimizer"
    )
