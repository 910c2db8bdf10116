"""Which state belongs to which parameter: by identity for a live optimiser; for a saved one by names, order or shapes.

Without names a group lists some of the model's parameters in the model's order. The name behind a key is certain where
the first and the last selection with these shapes give it the same name. How several groups were filled no file says:
a name is certain where all readings of them that fit (`_readings`) agree. All else is refused with the choices.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers, named_modules, unwrap
from bayesadam._checks import require_kind
from bayesadam._shards import check_placements, is_sharded, reshard
from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.readers.formats.lazy import clean_names, identities, outline_of
from bayesadam.readers.identify import has_tensors, identify_reader, parameter_shape, unknown_bases
from bayesadam.readers.registry import (
    ADVICE,
    TRACKED,
    Group,
    State,
    StateDict,
    StateReader,
    damage_told,
    reader_for,
    reader_named,
    reader_of,
)
from bayesadam.readers.tracking import is_tracked

NAMES = "Pass param_names=[...], the parameter names in the order in which the optimiser was given them"
IN_ORDER = ", or groups_in_order=True if each group was filled in the model's order"
_BUFFER_SUFFIXES = ("running_mean", "running_var", "running_variance", "num_batches_tracked")
_FROZEN = "frozen (requires_grad is False)"
_UNTRAINED = "never received a gradient"
_KEEPS_NONE = "which keeps no second moment per weight; ba.track(optimizer) keeps one"
# How states without names were matched, and that the user says so.
ONE_GROUP, IN_GROUPS, STATED = "one group in the model's order", "groups: ", ", as was stated"
_EACH_IN_ORDER = f"{IN_GROUPS}each in the model's order"
# By what trainers split parameters into groups: a function of a name and its dimensions.
_SPLITS: Mapping[str, Callable[[str, int], Hashable]] = {
    "matrices apart": lambda name, dims: dims > 1,
    "biases apart": lambda name, dims: name.endswith("bias"),
    "biases and other vectors apart": lambda name, dims: (name.endswith("bias"), dims > 1),
}
# A target network has the names of another, with `target` in them, and no optimiser trains it.
_TARGET = re.compile(r"_target(?=[._]|$)|(?<![a-z])target_")

Shapes = Mapping[str, torch.Size]
Runs = Sequence[tuple[Sequence["Slot"], Shapes]]
# An optimiser's name, its reader, its groups and the states by the keys in them.
Source = tuple[str, StateReader, Sequence[Group], Mapping[Any, State]]


@dataclass(frozen=True)
class Entry:
    """One parameter with its optimiser state."""

    name: str
    parameter: nn.Parameter
    state: State
    group: Group
    reader: StateReader

    @property
    @damage_told()
    def steps(self) -> float | None:
        """t, the gradients behind the statistic; None where they are not counted."""
        return self.reader.steps(self.state, self.group)

    @property
    @damage_told()
    def weight_decay(self) -> float:
        """λ of its group."""
        return float(self.group.get("weight_decay", 0.0) or 0.0)

    @property
    @damage_told()
    def average(self) -> Tensor | None:
        """The weight that was trained, where the one that is stored is another."""
        return None if self.reader.mean is None else self.reader.mean(self.state, self.group, self.parameter)

    @property
    def weight(self) -> Tensor:
        """The weight that was trained."""
        average = self.average
        return self.parameter.detach() if average is None else average


@dataclass(frozen=True)
class Match:
    """Parameters with their states, in the model's order, why the others are omitted, and how they were paired."""

    entries: tuple[Entry, ...]
    omitted: Mapping[str, str]
    optimizers: tuple[str, ...] = ()
    why: str = ""

    @torch.no_grad()
    def settle(self) -> None:
        """Give the model, which has the weights of a file, those that were trained."""
        averages = [(entry.parameter, average) for entry in self.entries if (average := entry.average) is not None]
        for parameter, average in averages:
            parameter.copy_(average)
        if averages:
            warn(
                f"the file was saved while {' and '.join(self.optimizers)} was in train mode: the model got the "
                "average that it trains, computed from its state"
            )


class AmbiguousError(MatchError):
    """Nothing contradicts the match, but more than one answer is possible."""


@dataclass(frozen=True)
class Slot:
    """One entry of the optimiser's list: its key, the number of its group, its shape; `needed` if it has a state."""

    key: Hashable
    group: int
    shape: torch.Size | None
    needed: bool


@dataclass(frozen=True)
class Pairing:
    """The name behind every key that can be identified, and why."""

    names: Mapping[Hashable, str]
    why: str


# --- live optimisers and state dicts --------------------------------------------------------------------------------


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the user's own module by name; FSDP2's as the shards that an optimiser has seen."""
    require_kind(model, nn.Module, "model")
    reshard(model)
    parameters: dict[nn.Parameter, str] = {}
    for prefix, module in named_modules(unwrap(model)):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                parameters.setdefault(parameter, prefix + key)
    return {name: parameter for parameter, name in parameters.items()}


def match_optimizers(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], reader: str | StateReader | None = None
) -> Match:
    """Match live optimisers to the model's parameters by identity; tied weights appear once, under their first name."""
    parameters = own_parameters(model)
    if not parameters:
        raise MatchError(f"{type(model).__name__} has no parameters")
    names: dict[Hashable, str] = {parameter: name for name, parameter in parameters.items()}
    sources: list[Source] = []
    for optimizer in listed_optimizers(optimizers):
        title, record = type(optimizer).__name__, reader_of(optimizer) if reader is None else reader_named(reader)
        if record is None and any(is_tracked(state) for state in optimizer.state.values()):
            record = TRACKED
        if record is None:
            raise MatchError(
                f"no reader is registered for {type(optimizer).__module__}.{title}: describe it with "
                "readers.register(StateReader(...)) if it keeps a second moment of the gradients, one number a weight; "
                f"else {ADVICE}"
            )
        sources.append((title, record, optimizer.param_groups, optimizer.state))
    whose = " and ".join(title for title, *_ in sources)
    if not any(key in names for *_, groups, _ in sources for group in groups for key in group["params"]):
        raise MatchError(
            f"no parameter of {whose} belongs to this {type(model).__name__}: pass the model that it trained (for a "
            "copy use Posterior.from_state_dict)"
        )
    return _in_place(_matched(parameters, sources, names, whose, "the identity of tensors"))


@damage_told()
def match_state_dict(
    model: nn.Module, state_dict: StateDict, reader: str | StateReader, param_names: Sequence[str] | None = None
) -> Match:
    """Match a saved optimiser state to the model's parameters: by names, else by the model's order and every shape."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise MatchError("not an optimiser's state dict: pass what it returned, for instance checkpoint['optimizer']")
    record, parameters = reader_named(reader), own_parameters(model)
    pairing = pair_by_names(state_dict, parameters, param_names)
    slots = slots_of(state_dict, record)
    # Here nobody can vouch for the groups.
    pairing = pairing or pair(slots, shapes_listed(parameters, len(slots)), ordered=True, remedy="")
    return _in_place(match_pairs(parameters, state_dict, record, pairing))


def match_pairs(
    parameters: Mapping[str, nn.Parameter], state_dict: StateDict, reader: StateReader, pairing: Pairing
) -> Match:
    """The match that a pairing of keys and names gives."""
    source = (reader.name, reader, state_dict["param_groups"], state_dict["state"])
    return _matched(parameters, [source], pairing.names, f"this {reader.name!r} state dict", pairing.why)


def _in_place(match: Match) -> Match:
    """The match, if the model's weights are those that were trained."""
    if any(entry.average is not None for entry in match.entries):
        raise MatchError(
            f"{' and '.join(match.optimizers)} is in train mode, in which the model has other weights than those "
            "that are trained: call optimizer.eval() before the posterior is read, or the state is saved"
        )
    return match


def _matched(
    parameters: Mapping[str, nn.Parameter],
    sources: Sequence[Source],
    names: Mapping[Hashable, str],
    whose: str,
    why: str,
) -> Match:
    """Parameters with their states, or why they are omitted, by the name behind each key; a live tensor is a key."""
    matched: dict[str, Entry | str] = {}
    keyed = ((*source, group, key) for source in sources for group in source[2] for key in group["params"])
    for title, usual, _, states, group, key in keyed:
        if key not in names:
            continue
        name, state = names[key], states.get(key, {})
        if name in matched:
            raise MatchError(f"parameter {name!r} is trained by two of the optimisers given: pass one of them")
        parameter, reader = parameters[name], reader_for(state, group, usual)
        # Some optimisers fill in counters, or sums at step 0, before the first gradient. A counter above 0 with nothing
        # beside it is no such state: the reader says what is missing.
        is_untrained = reader.steps(state, group) == 0 or not (has_tensors(state) or "step" in state)
        if not parameter.requires_grad:
            matched[name] = _FROZEN
        elif reader.statistic == "none":
            matched[name] = f"trained by {title if reader is usual else reader.name}, {_KEEPS_NONE}"
        elif is_untrained and reader.statistic != "identity":
            matched[name] = _UNTRAINED
        else:
            check_parameter(name, parameter)
            if unknown := unknown_bases(reader, state, parameter.shape):
                raise MatchError(
                    f"the state of parameter {name!r} keeps bases ({', '.join(unknown)}), and reader {reader.name!r} "
                    f"would take {reader.key!r}, which is in rotated coordinates, for the weights' own: name its "
                    "optimiser"
                )
            matched[name] = Entry(name, parameter, state, group, reader)
    every = {n: matched.get(n, "not in the optimiser" if p.requires_grad else _FROZEN) for n, p in parameters.items()}
    entries = tuple(entry for entry in every.values() if isinstance(entry, Entry))
    omitted = {name: reason for name, reason in every.items() if isinstance(reason, str)}
    if not entries and _UNTRAINED in omitted.values():
        raise MatchError(f"{whose} has not taken a step yet: train first, then read the posterior")
    if not entries and any(reason.endswith(_KEEPS_NONE) for reason in omitted.values()):
        raise MatchError(f"{whose} keeps no second moment per weight; {ADVICE}")
    if not entries:
        described = "; ".join(f"{count} {reason}" for reason, count in Counter(omitted.values()).items())
        raise MatchError(f"{whose} leaves no parameter to read: {described}")
    return Match(entries, omitted, tuple(title for title, *_ in sources), why)


def check_parameter(name: str, parameter: Tensor) -> None:
    """Refuse parameters that no real Gaussian can be put on."""
    if parameter.is_meta:
        raise MatchError(f"parameter {name!r} is on the meta device and has no values: materialise the model first")
    if parameter.is_quantized or not parameter.is_floating_point() or parameter.element_size() == 1:
        raise MatchError(
            f"parameter {name!r} is complex, quantised or not floating point ({parameter.dtype}): freeze it with "
            "requires_grad_(False), and it is left out"
        )
    if is_sharded(parameter):
        check_placements(name, parameter)


# --- names ----------------------------------------------------------------------------------------------------------


def names_in(state_dict: StateDict) -> tuple[str, ...] | None:
    """The parameters' names in the optimiser's order, where its state has them."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if keys and all(isinstance(key, str) for key in keys):
        return tuple(keys)
    if groups and all("param_names" in group for group in groups):
        return tuple(name for group in groups for name in group["param_names"])
    return None


def pair_by_names(
    state_dict: StateDict, tensors: Mapping[str, Tensor], param_names: Sequence[str] | None
) -> Pairing | None:
    """The names that are given in the optimiser's order, or those in its state; None where there are neither."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    counts = Counter(keys)
    odd = [key for key in counts if counts[key] > 1] + [key for key in state_dict["state"] if key not in counts]
    if odd:
        raise MatchError(f"the state dict is inconsistent: keys {odd[:4]} are repeated or in no group")
    source = "the names in the state" if param_names is None else "param_names"
    param_names = names_in(state_dict) if param_names is None else param_names
    if param_names is None:
        return None
    names = list(param_names) if all(name in tensors for name in param_names) else list(clean_names(param_names))
    if len(names) != len(keys):
        raise MatchError(f"{source} gives {len(names)} names for the {len(keys)} parameters of the state dict")
    odd = [name for name, count in Counter(names).items() if name not in tensors or count > 1]
    if odd:
        raise MatchError(f"by {source}, {odd[:4]} are not among the weights, or twice: is it another model's state?")
    return Pairing(dict(zip(keys, names, strict=True)), source)


# --- order and shapes -----------------------------------------------------------------------------------------------


def slots_of(state_dict: StateDict, reader: StateReader | None = None) -> list[Slot]:
    """The entries of an optimiser's list; None identifies the reader."""
    if reader is None:
        with suppress(MatchError):
            reader = identify_reader(state_dict)
    slots = []
    for number, group in enumerate(state_dict["param_groups"]):
        for key in group["params"]:
            state = state_dict["state"].get(key, {})
            record = None if reader is None else reader_for(state, group, reader)
            needed = has_tensors(state)
            if reader is not None and record is not None:
                # What is not read need not be identified.
                is_refused = record is not reader and record.statistic == "none"
                needed = (needed or reader.statistic == "identity") and not is_refused
            slots.append(Slot(key, number, parameter_shape(state, record), needed))
    return slots


def shapes_listed(parameters: Mapping[str, nn.Parameter], count: int) -> dict[str, torch.Size]:
    """The shapes of the parameters in a list of this length: the trainable ones where they are as many, else all."""
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    return {name: parameters[name].shape for name in (trainable if count == len(trainable) else parameters)}


def candidates(weights: Mapping[str, Tensor], count: int = 0) -> dict[str, torch.Size]:
    """The shapes of the tensors that may be parameters: no buffers; if `count` are left, tied ones once, no targets."""
    outline, identity = outline_of(weights), identities(weights)
    names = [
        name
        for name, tensor in outline.items()
        if (tensor.is_floating_point() or tensor.is_complex())
        and name.rpartition(".")[2] not in _BUFFER_SUFFIXES
        and not (name.endswith("mask") and _is_mask(weights[name]))
    ]
    first = {identity[name]: name for name in reversed(names) if outline[name].numel()}
    distinct = [name for name in names if first.get(identity[name], name) == name]
    names = distinct if len(distinct) >= count else names
    trained = [name for name in names if (original := _TARGET.sub("", name)) == name or original not in outline]
    return {name: outline[name].shape for name in (trained if len(trained) >= count else names)}


def _is_mask(tensor: Tensor) -> bool:
    """Whether it is of zeros and ones alone, as no trained weight is: a mask of e3nn, or of torch's pruning."""
    return not tensor.is_meta and bool(((tensor == 0) | (tensor == 1)).all())


def pair(
    slots: Sequence[Slot],
    shapes: Shapes,
    *,
    ordered: bool,
    in_order: bool = False,
    remedy: str = IN_ORDER,
    rules: Sequence[Sequence[Sequence[str]]] = (),
) -> Pairing:
    """The names behind the keys: by the trainer's rules, else the order of the parameters, else shapes that occur once.

    `ordered` says that `shapes` are in the model's order, `in_order` that each of several groups is, too; `remedy` is
    told where that would help. A rule has the names group by group.
    """
    missing = Counter(slot.shape for slot in slots if slot.shape is not None) - Counter(shapes.values())
    if len(slots) > len(shapes) or missing:
        lost = [f", too few of shape {tuple(shape)}" for shape in missing][:1]
        raise MatchError(
            f"the optimiser's state holds {len(slots)} parameters, the weights {len(shapes)} tensors that may be "
            f"parameters{''.join(lost)}: it is another model's state, or that of several networks. {NAMES}"
        )
    answers: dict[tuple[str, ...], Pairing] = {}
    refusals: list[MatchError] = []
    groups = [list(group) for _, group in itertools.groupby(slots, key=lambda slot: slot.group)]
    ruled = (("the trainer's rule", runs) for order in rules for runs in _filled(groups, filter(None, order), shapes))
    for readings in (ruled, _readings(groups, shapes, ordered, in_order)):
        for why, runs in readings if not answers else ():
            try:
                names = _selected(runs)
                answers.setdefault(tuple(names[slot.key] for slot in slots if slot.needed), Pairing(names, why))
            except MatchError as refusal:
                refusals.append(refusal)
    if not answers:
        raise next((refusal for refusal in refusals if isinstance(refusal, AmbiguousError)), refusals[0])
    one, *others = answers.values()
    if not others:
        return one
    key = next(slot.key for slot in slots if slot.needed and one.names[slot.key] != others[0].names[slot.key])
    choices = " or to ".join(f"{answer.names[key]!r} ({answer.why})" for answer in (one, *others))
    remedy = remedy if _EACH_IN_ORDER in (answer.why for answer in answers.values()) else ""
    raise AmbiguousError(
        f"the state under key {key!r} may belong to {choices}: {slots[-1].group + 1} groups without names, and every "
        f"shape agrees with each. {NAMES}{remedy}"
    )


def _filled(groups: Sequence[Sequence[Slot]], parts: Iterable[Sequence[str]], shapes: Shapes) -> Iterator[Runs]:
    """The groups with the names that fill them exactly, if these do."""
    parts = list(parts)
    filling = [{name: shapes[name] for name in part if name in shapes} for part in parts]
    if [len(part) for part in filling] == [len(part) for part in parts] == [len(group) for group in groups]:
        yield list(zip(groups, filling, strict=True))


def _readings(
    groups: Sequence[Sequence[Slot]], shapes: Shapes, ordered: bool, in_order: bool
) -> Iterator[tuple[str, Runs]]:
    """How the groups may have been filled, in words: lists of keys, and the names that each selects from."""
    slots = [slot for group in groups for slot in group]
    if not ordered or (len(groups) > 1 and not in_order):
        yield "shapes that occur once", [([slot], shapes) for slot in slots if slot.needed]
    if not ordered:
        return
    if len(groups) < 2:
        yield ONE_GROUP, [(slots, shapes)]
        return
    yield _EACH_IN_ORDER + STATED * in_order, [(group, shapes) for group in groups]
    if in_order:
        return
    yield "groups: consecutive parts of the model", [(slots, shapes)]
    backwards = [slot for group in reversed(groups) for slot in group]
    yield "groups: consecutive parts of the model, the last first", [(backwards, shapes)]
    if len(groups[0][0].shape or ()) > 1:
        # minGPT, its many copies among them, sorts the names and lists matrices first.
        yield "groups: each sorted by name", [(group, dict(sorted(shapes.items()))) for group in groups]
    wanted = {slot.shape for slot in slots}
    for words, kind in _SPLITS.items():
        parts: dict[Hashable, list[str]] = {}
        # What has no state's shape is a buffer.
        for name, shape in shapes.items():
            if shape in wanted or None in wanted:
                parts.setdefault(kind(name, len(shape)), []).append(name)
        for order in itertools.permutations(parts.values()) if len(parts) <= 3 else ():
            for runs in _filled(groups, order, shapes):
                yield f"groups: {words}, each in the model's order", runs


def _selected(runs: Runs) -> dict[Hashable, str]:
    """The name behind every key that can be identified, where each run selects from its names in their order; raises
    unless that is every key with a state.
    """
    chosen: dict[Hashable, str] = {}
    for slots, shapes_by_name in runs:
        names, shapes = list(shapes_by_name), list(shapes_by_name.values())
        wanted = [slot.shape for slot in slots]
        first, last = _positions(wanted, shapes), _positions(wanted[::-1], shapes[::-1])
        if first is None or last is None:
            at = next((i for i, slot in enumerate(slots) if slot.shape not in (None, shapes[i])), 0)
            raise MatchError(
                f"the optimiser's state is not in the order of the weights: key {slots[at].key!r} has shape "
                f"{tuple(slots[at].shape or ())} where {names[at]!r} has {tuple(shapes[at])}. {NAMES}"
            )
        for slot, low, from_end in zip(slots, first, last[::-1], strict=True):
            high = len(shapes) - 1 - from_end
            if low == high:
                chosen[slot.key] = names[low]
            elif slot.needed:
                raise AmbiguousError(
                    f"the state under key {slot.key!r}, of shape {slot.shape and tuple(slot.shape)}, may belong to "
                    f"{names[low]!r} or to {names[high]!r}, by their order and shapes. {NAMES}"
                )
    doubled = [name for name, count in Counter(chosen.values()).items() if count > 1]
    if doubled:
        raise MatchError(f"by their shapes, several states belong to {doubled[0]!r}. {NAMES}")
    return chosen


def _positions(wanted: Sequence[torch.Size | None], shapes: Sequence[torch.Size]) -> list[int] | None:
    """The first selection of `shapes`, in order, that agrees with `wanted`, where None agrees with any."""
    positions: list[int] = []
    for shape in wanted:
        start = positions[-1] + 1 if positions else 0
        at = next((i for i in range(start, len(shapes)) if shape in (None, shapes[i])), None)
        if at is None:
            return None
        positions.append(at)
    return positions
