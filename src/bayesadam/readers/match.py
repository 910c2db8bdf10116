"""Which state belongs to which parameter: by identity for a live optimiser, by name or order for a saved one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import unwrap
from bayesadam._checks import require_kind
from bayesadam._shards import check_placements, is_sharded, reshard
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.pairing import Pairing, names_in, pair, slots_of
from bayesadam.readers.registry import reader_named, reader_of, readers_with_key
from bayesadam.readers.rotated import unknown_bases
from bayesadam.readers.state import Group, State, StateReader, has_tensors, outline

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
    """Parameters with their states.

    Attributes:
        entries: the parameters whose state is known, in the model's order.
        omitted: the others, with the reason.
        foreign: how many parameters of a live optimiser are another model's.
        optimizers: the optimisers' names.
        why: how states and parameters were paired, in words.
    """

    entries: tuple[Entry, ...]
    omitted: Mapping[str, str]
    foreign: int = 0
    optimizers: tuple[str, ...] = ()
    why: str = ""


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the user's own module by name; FSDP2's as the shards that an optimiser has seen."""
    require_kind(model, nn.Module, "model")
    reshard(model)
    return dict(unwrap(model).named_parameters())


def match_optimizers(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], reader: str | StateReader | None = None
) -> Match:
    """Match live optimisers to the model's parameters by identity; tied weights appear once, under their first name."""
    parameters = own_parameters(model)
    if not parameters:
        raise MatchError(f"{type(model).__name__} has no parameters")
    names = {parameter: name for name, parameter in parameters.items()}
    listed = listed_optimizers(optimizers)
    classes = tuple(type(optimizer).__name__ for optimizer in listed)
    taken: dict[str, Entry | str] = {}
    refusals: list[str] = []
    foreign = 0
    for optimizer, title in zip(listed, classes, strict=True):
        record = reader_named(reader) if isinstance(reader, str) else reader or reader_of(optimizer)
        if record is None:
            keys = sorted({str(key) for state in optimizer.state.values() for key in state})
            similar = readers_with_key(keys)
            hint = (
                ""
                if not similar
                else f"; its keys {keys} look like {similar}: pass reader={similar[0]!r} if that is right"
            )
            raise StateError(
                f"no reader is registered for {type(optimizer).__module__}.{title}{hint}. Describe it with "
                "bayesadam.readers.register(StateReader(...))"
            )
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = [names[parameter] for parameter in trained if parameter in names]
        foreign += len(trained) - len(own)
        if twice := [name for name in own if name in taken]:
            raise MatchError(
                f"parameter {twice[0]!r} is trained by two of the optimisers given; pass only the one whose second "
                "moment is to be used"
            )
        if record.statistic == "none":
            refusals.append(f"{title} keeps no second moment per weight; {record.advice}")
            taken |= dict.fromkeys(own, f"trained by {title}, which keeps no second moment per weight")
        else:
            taken |= _entries(parameters, optimizer.param_groups, optimizer.state, record, names)
    source = " and ".join(classes)
    if foreign and not taken:
        raise MatchError(
            f"none of the {foreign} parameters of {source} belongs to this {type(model).__name__}: pass the model that "
            "this optimiser trained (a copied or re-created model has new parameters; use Posterior.from_state_dict "
            "with optimizer.state_dict() for it)"
        )
    if len(refusals) == len(listed):
        raise StateError(refusals[0])
    return _finished(parameters, taken, source, classes, foreign)


def match_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], reader: str | StateReader, param_names: Sequence[str] | None = None
) -> Match:
    """Match a saved optimiser state to the model's parameters.

    Names count where the state has them or the caller gives them, in the optimiser's order. Without names, the model's
    order and every shape decide, several groups by the rules that trainers follow; several answers are an error.
    """
    if not isinstance(state_dict, Mapping) or "state" not in state_dict or "param_groups" not in state_dict:
        found = sorted(map(str, state_dict))[:6] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise MatchError(
            f"not an optimiser's state dict: it needs 'state' and 'param_groups', found {found}. Pass what "
            "optimizer.state_dict() returned, for instance checkpoint['optimizer']"
        )
    record = usable_reader(reader)
    parameters = own_parameters(model)
    pairing = pair_by_names(state_dict, parameters, param_names)
    if pairing is None:
        slots = slots_of(state_dict, record)
        pairing = pair(slots, shapes_listed(parameters, len(slots)), ordered=True)
    return match_pairs(parameters, state_dict, record, pairing)


def usable_reader(reader: str | StateReader) -> StateReader:
    """The reader, by name or as it is, where it finds a second moment."""
    record = reader_named(reader) if isinstance(reader, str) else reader
    if record.statistic == "none":
        raise StateError(f"{record.name} keeps no second moment per weight; {record.advice}")
    return record


def pair_by_names(
    state_dict: Mapping[str, Any], known: Mapping[str, Tensor], given: Sequence[str] | None, source: str = "param_names"
) -> Pairing | None:
    """The names that are given in the optimiser's order, or those in its state; None where there are neither."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    counts = Counter(keys)
    repeated = [key for key, count in counts.items() if count > 1]
    unlisted = [key for key in state_dict["state"] if key not in counts]
    if repeated or unlisted:
        raise MatchError(
            f"the state dict is inconsistent: keys {(repeated or unlisted)[:4]} are repeated or in no group"
        )
    if given is None:
        given, source = names_in(state_dict), "the names in the state"
    if given is None:
        return None
    names = [_unwrapped(name, known) for name in given]
    if len(names) != len(keys):
        raise MatchError(f"{source} gives {len(names)} names for the {len(keys)} parameters of the state dict")
    doubled = [name for name, count in Counter(names).items() if count > 1]
    unknown = [name for name in names if name not in known]
    if doubled or unknown:
        raise MatchError(
            f"by {source}, {(unknown or doubled)[:4]} "
            f"{'are not among the weights' if unknown else 'are named twice'}: is it another model's state?"
        )
    return Pairing(dict(zip(keys, names, strict=True)), source)


def shapes_listed(parameters: Mapping[str, nn.Parameter], count: int) -> dict[str, torch.Size]:
    """The shapes of the parameters in a list of this length: the trainable ones where they are as many, else all."""
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    return {name: parameters[name].shape for name in (trainable if count == len(trainable) else parameters)}


def match_pairs(
    parameters: Mapping[str, nn.Parameter],
    state_dict: Mapping[str, Any],
    reader: StateReader,
    pairing: Pairing,
    omitted: Mapping[str, str] | None = None,
) -> Match:
    """The match that a pairing of keys and names gives. `omitted` have a reason already."""
    taken: dict[str, Entry | str] = {**(omitted or {})}
    names = {key: name for key, name in pairing.names.items() if name not in taken}
    taken |= _entries(parameters, state_dict["param_groups"], state_dict["state"], reader, names)
    return _finished(parameters, taken, f"this {reader.name!r} state dict", (reader.name,), why=pairing.why)


def _entries(
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Group],
    states: Mapping[Any, State],
    reader: StateReader,
    names: Mapping[Any, str],
) -> dict[str, Entry | str]:
    """Parameters with their states, or why they are omitted, by the name behind each key; a live tensor is a key."""
    found: dict[str, Entry | str] = {}
    for group, key in ((each, key) for each in groups for key in each["params"] if key in names):
        name, state = names[key], states.get(key, {})
        parameter = parameters[name]
        # Some optimisers fill in counters, or sums at step 0, before the first gradient. A counter above 0 with nothing
        # beside it is no such state: the reader says what is missing.
        untrained = reader.steps(state, group) == 0 or not (has_tensors(state) or "step" in state)
        if not parameter.requires_grad or (untrained and reader.statistic != "identity"):
            found[name] = _UNTRAINED if parameter.requires_grad else _FROZEN
            continue
        check_parameter(name, parameter)
        if unknown := unknown_bases(reader, state, parameter.shape):
            similar = [other for other in readers_with_key(map(str, outline(state))) if other != reader.name]
            perhaps = f", perhaps {' or '.join(map(repr, similar))}" if similar else ""
            raise StateError(
                f"the state of parameter {name!r} keeps bases ({', '.join(unknown)}), and reader {reader.name!r} would "
                f"take {reader.key!r}, which is in rotated coordinates, for the weights' own. Name the optimiser that "
                f"wrote it{perhaps}; or describe it with bayesadam.readers.register(StateReader(...)) and `read`"
            )
        found[name] = Entry(name, parameter, state, group, reader)
    return found


def listed_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimiser or several as a list, each without a trainer's wrapper."""
    listed: list[Any] = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not listed:
        raise MatchError("no optimiser was given: the list is empty")
    for index, optimizer in enumerate(listed):
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise MatchError(
                f"expected a torch optimiser or a list of them, got {type(optimizer).__name__}; for a saved state use "
                "Posterior.from_state_dict"
            )
        # Accelerate and Lightning keep it in `.optimizer`.
        while isinstance(inner := getattr(listed[index], "optimizer", None), Optimizer):
            listed[index] = inner
    return listed


def check_parameter(name: str, parameter: Tensor) -> None:
    """Refuse parameters that no real Gaussian can be put on."""
    if parameter.is_meta:
        raise MatchError(f"parameter {name!r} is on the meta device and has no values: materialise the model first")
    if parameter.is_quantized or not parameter.is_floating_point() or parameter.element_size() == 1:
        raise MatchError(
            f"parameter {name!r} is complex, quantised or not floating point ({parameter.dtype}): freeze it with "
            "requires_grad_(False), and it is left out; or store a complex one as two real tensors"
        )
    if is_sharded(parameter):
        check_placements(name, parameter)


def _finished(
    parameters: Mapping[str, nn.Parameter],
    taken: Mapping[str, Entry | str],
    source: str,
    optimizers: tuple[str, ...],
    foreign: int = 0,
    why: str = "the identity of tensors",
) -> Match:
    entries, omitted = [], {}
    for name, parameter in parameters.items():
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
    return Match(tuple(entries), omitted, foreign, optimizers, why)


def _unwrapped(name: str, known: Mapping[str, Any]) -> str:
    """`name` without the prefixes that torch.compile and data parallelism put before it."""
    parts = name.split(".")
    while ".".join(parts) not in known:
        prefix = next((p for p in _WRAPPER_PREFIXES if p in parts[:-1]), None)
        if prefix is None:
            return name
        parts.remove(prefix)
    return ".".join(parts)
