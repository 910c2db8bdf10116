"""Which state belongs to which parameter: by identity for a live optimiser, by name or order for a saved one.

Without names, one group lists a selection of the model's parameters in the model's order. The name behind a key is
certain if the first and the last selection whose shapes agree give it the same name. How several groups were filled no
file says: trainers follow rules (`fillings`), and a name is certain if all rules that fit agree. All else is refused.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers, named_modules, unwrap
from bayesadam._checks import require_kind
from bayesadam._shards import check_placements, is_sharded, own_part, reshard
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.identify import has_tensors, identify_reader, parameter_shape, unknown_bases
from bayesadam.readers.registry import (
    ADVICE,
    TRACKED,
    Group,
    State,
    StateReader,
    as_number,
    reader_for,
    reader_named,
    reader_of,
)
from bayesadam.readers.tracking import is_tracked

# A mark of groups that together are one list in the model's order.
ONE_LIST = "bayesadam: one list"
NAMES = "Pass param_names=[...], the parameter names in the order in which the optimiser was given them"
REMEDY = f"{NAMES}, or the model (Posterior.from_checkpoint)"
_IN_ORDER = ", or groups_in_order=True if each group was filled in the model's order"
_BUFFER_SUFFIXES = ("running_mean", "running_var", "running_variance", "num_batches_tracked")
_FROZEN = "frozen (requires_grad is False)"
_UNTRAINED = "never received a gradient"

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Entry:
    """One parameter with its optimiser state."""

    name: str
    parameter: nn.Parameter
    state: State
    group: Group
    reader: StateReader

    @property
    def steps(self) -> float | None:
        """t, the gradients behind the statistic; None where they are not counted."""
        return self.reader.steps(self.state, self.group)

    @property
    def weight_decay(self) -> float:
        """λ of its group."""
        return float(self.group.get("weight_decay", 0.0) or 0.0)

    @property
    def weight(self) -> Tensor:
        """The weight that was trained, which is not always the one that is stored."""
        mean = None if self.reader.mean is None else self.reader.mean(self.state, self.group, self.parameter)
        return self.parameter.detach() if mean is None else mean


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
        moved = [entry for entry in self.entries if entry.weight.data_ptr() != entry.parameter.data_ptr()]
        for entry in moved:
            entry.parameter.copy_(entry.weight)
        if moved:
            warn(
                f"the file was saved while {' and '.join(self.optimizers)} was in train mode: the model got the "
                "average that it trains, computed from its state"
            )


class AmbiguousError(MatchError):
    """Nothing contradicts the match, but more than one answer is possible."""


@dataclass(frozen=True)
class Slot:
    """One entry of the optimiser's list; `needed` if it has a state, `decay` is its group's weight decay."""

    key: Any
    group: int
    shape: torch.Size | None
    needed: bool
    decay: float | None = None


@dataclass(frozen=True)
class Pairing:
    """The name behind every key that can be identified, and why."""

    names: Mapping[Any, str]
    why: str


# --- live optimisers and state dicts --------------------------------------------------------------------------------


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the user's own module by name; FSDP2's as the shards that an optimiser has seen."""
    require_kind(model, nn.Module, "model")
    reshard(model)
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in named_modules(unwrap(model)):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + key] = parameter
    return found


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
        record = reader_of(optimizer) if reader is None else reader_named(reader)
        if record is None and any(is_tracked(state) for state in optimizer.state.values()):
            record = TRACKED
        if record is None:
            name = f"{type(optimizer).__module__}.{title}"
            raise StateError(
                f"no reader is registered for {name}: describe it with readers.register(StateReader(...)) if it keeps "
                f"a second moment of the gradients, one number a weight; else {ADVICE}"
            )
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = [names[parameter] for parameter in trained if parameter in names]
        foreign += len(trained) - len(own)
        if twice := [name for name in own if name in taken]:
            raise MatchError(f"parameter {twice[0]!r} is trained by two of the optimisers given: pass one of them")
        found = _entries(parameters, optimizer.param_groups, optimizer.state, record, names, title)
        if record.statistic == "none" and not any(isinstance(entry, Entry) for entry in found.values()):
            refusals.append(f"{title} keeps no second moment per weight; {ADVICE}")
        taken |= found
    source = " and ".join(classes)
    if foreign and not taken:
        raise MatchError(
            f"none of the {foreign} parameters of {source} belongs to this {type(model).__name__}: pass the model that "
            "it trained (for a copy use Posterior.from_state_dict)"
        )
    if len(refusals) == len(listed):
        raise StateError(refusals[0])
    return _in_place(_finished(parameters, taken, source, classes))


def _in_place(match: Match) -> Match:
    """The match, if the model's weights are those that were trained."""
    for entry in match.entries:
        if entry.reader.mean is not None and entry.reader.mean(entry.state, entry.group, entry.parameter) is not None:
            raise StateError(
                f"{' and '.join(match.optimizers)} is in train mode, in which the model has other weights than those "
                "that are trained: call optimizer.eval() before the posterior is read, or the state is saved"
            )
    return match


def match_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], reader: str | StateReader, param_names: Sequence[str] | None = None
) -> Match:
    """Match a saved optimiser state to the model's parameters: by names, else by the model's order and every shape."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise MatchError("not an optimiser's state dict: pass what it returned, for instance checkpoint['optimizer']")
    record = usable_reader(reader, state_dict)
    parameters = own_parameters(model)
    pairing = pair_by_names(state_dict, parameters, param_names)
    if pairing is None:
        slots = slots_of(state_dict, record)
        pairing = pair(slots, shapes_listed(parameters, len(slots)), ordered=True)
    return _in_place(match_pairs(parameters, state_dict, record, pairing))


def usable_reader(reader: str | StateReader, state_dict: Mapping[str, Any]) -> StateReader:
    """The reader, by name or as it is, where it finds a second moment, or one was tracked."""
    record = reader_named(reader)
    if record.statistic == "none" and not any(is_tracked(state) for state in state_dict["state"].values()):
        raise StateError(f"{record.name} keeps no second moment per weight; {ADVICE}")
    return record


def match_pairs(
    parameters: Mapping[str, nn.Parameter], state_dict: Mapping[str, Any], reader: StateReader, pairing: Pairing
) -> Match:
    """The match that a pairing of keys and names gives."""
    taken = _entries(parameters, state_dict["param_groups"], state_dict["state"], reader, pairing.names)
    return _finished(parameters, taken, f"this {reader.name!r} state dict", (reader.name,), why=pairing.why)


def _entries(
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Group],
    states: Mapping[Any, State],
    usual: StateReader,
    names: Mapping[Any, str],
    title: str | None = None,
) -> dict[str, Entry | str]:
    """Parameters with their states, or why they are omitted, by the name behind each key; a live tensor is a key."""
    found: dict[str, Entry | str] = {}
    for group, key in ((each, key) for each in groups for key in each["params"] if key in names):
        name, state = names[key], states.get(key, {})
        parameter, reader = parameters[name], reader_for(state, group, usual)
        # Some optimisers fill in counters, or sums at step 0, before the first gradient. A counter above 0 with nothing
        # beside it is no such state: the reader says what is missing.
        untrained = reader.steps(state, group) == 0 or not (has_tensors(state) or "step" in state)
        if not parameter.requires_grad:
            found[name] = _FROZEN
        elif reader.statistic == "none":
            whose = reader.name if reader is not usual else title or reader.name
            found[name] = f"trained by {whose}, which keeps no second moment per weight; ba.track(optimizer) keeps one"
        elif untrained and reader.statistic != "identity":
            found[name] = _UNTRAINED
        else:
            check_parameter(name, parameter)
            if unknown := unknown_bases(reader, state, parameter.shape):
                raise StateError(
                    f"the state of parameter {name!r} keeps bases ({', '.join(unknown)}), and reader {reader.name!r} "
                    f"would take {reader.key!r}, which is in rotated coordinates, for the weights' own: name its "
                    "optimiser"
                )
            found[name] = Entry(name, parameter, state, group, reader)
    return found


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


def _finished(
    parameters: Mapping[str, nn.Parameter],
    taken: Mapping[str, Entry | str],
    source: str,
    optimizers: tuple[str, ...],
    why: str = "the identity of tensors",
) -> Match:
    found = {n: taken.get(n, "not in the optimiser" if p.requires_grad else _FROZEN) for n, p in parameters.items()}
    entries = tuple(entry for entry in found.values() if isinstance(entry, Entry))
    omitted = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if not entries:
        if _UNTRAINED in omitted.values():
            raise StateError(f"{source} has not taken a step yet: train first, then read the posterior")
        described = "; ".join(f"{count} {reason}" for reason, count in Counter(omitted.values()).items())
        raise StateError(f"{source} leaves no parameter to read: {described}")
    return Match(entries, omitted, optimizers, why)


# --- names ----------------------------------------------------------------------------------------------------------


def names_in(state_dict: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The parameters' names in the optimiser's order, where its state has them."""
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if keys and all(isinstance(key, str) for key in keys):
        return tuple(keys)
    if groups and all("param_names" in group for group in groups):
        return tuple(name for group in groups for name in group["param_names"])
    return None


def clean_names(keys: Iterable[str]) -> dict[str, str]:
    """Names without the prefixes of torch.compile and data parallelism, and the key behind each."""
    keys = list(keys)
    names = [".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names if len(set(names)) == len(keys) else keys, keys, strict=True))


def pair_by_names(
    state_dict: Mapping[str, Any], known: Mapping[str, Tensor], given: Sequence[str] | None, source: str = "param_names"
) -> Pairing | None:
    """The names that are given in the optimiser's order, or those in its state; None where there are neither."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    counts = Counter(keys)
    odd = [key for key in counts if counts[key] > 1] + [key for key in state_dict["state"] if key not in counts]
    if odd:
        raise MatchError(f"the state dict is inconsistent: keys {odd[:4]} are repeated or in no group")
    if given is None:
        given, source = names_in(state_dict), "the names in the state"
    if given is None:
        return None
    names = list(given) if all(name in known for name in given) else list(clean_names(given))
    if len(names) != len(keys):
        raise MatchError(f"{source} gives {len(names)} names for the {len(keys)} parameters of the state dict")
    odd = [name for name, count in Counter(names).items() if name not in known or count > 1]
    if odd:
        raise MatchError(f"by {source}, {odd[:4]} are not among the weights, or twice: is it another model's state?")
    return Pairing(dict(zip(keys, names, strict=True)), source)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tied tensor have in common; views of one flat buffer differ."""
    if tensor.is_meta:
        # A tensor on the disk, by its outline: whether it is tied is not known.
        return (id(tensor),)
    held = own_part(tensor)
    return (held.untyped_storage().data_ptr(), held.storage_offset(), held.shape, held.stride())


def identities(weights: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """`memory_of` by name; lazy tensors, whose addresses are used again, are identified by their outline."""
    return {name: memory_of(tensor) for name, tensor in getattr(weights, "outline", weights).items()}


# --- order and shapes -----------------------------------------------------------------------------------------------


def slots_of(state_dict: Mapping[str, Any], reader: StateReader | None = None) -> list[Slot]:
    """The entries of an optimiser's list; None identifies the reader."""
    if reader is None:
        with suppress(StateError):
            reader = identify_reader(state_dict)
    always = reader is not None and reader.statistic == "identity"
    slots = []
    for number, group in enumerate(state_dict["param_groups"]):
        decay = group.get("weight_decay")
        decay = None if decay is None else as_number(decay, "weight_decay")
        for key in group["params"]:
            state = state_dict["state"].get(key, {})
            own = None if reader is None else reader_for(state, group, reader)
            shape, needed = parameter_shape(state, own), always or has_tensors(state)
            # What is not read need not be identified.
            needed = needed and not (own is not reader and own is not None and own.statistic == "none")
            slots.append(Slot(key, 0 if group.get(ONE_LIST) else number, shape, needed, decay))
    return slots


def shapes_listed(parameters: Mapping[str, nn.Parameter], count: int) -> dict[str, torch.Size]:
    """The shapes of the parameters in a list of this length: the trainable ones where they are as many, else all."""
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    return {name: parameters[name].shape for name in (trainable if count == len(trainable) else parameters)}


def candidates(weights: Mapping[str, Tensor], count: int = 0) -> list[str]:
    """The names in a state dict that may be parameters; of tied ones the first, where that leaves `count` or more."""
    held = getattr(weights, "outline", weights)
    names = [name for name in held if held[name].is_floating_point() or held[name].is_complex()]
    names = [name for name in names if name.rpartition(".")[2] not in _BUFFER_SUFFIXES]
    identity = identities(weights)
    first = {identity[name]: name for name in reversed(names) if held[name].numel()}
    distinct = [name for name in names if first.get(identity[name], name) == name]
    return distinct if len(distinct) >= count else names


def keeps_order(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict is in the order of the modules that torch noted with it; without the note, not sorted."""
    names = list(weights)
    noted = getattr(weights, "_metadata", None)
    number = {module: number for number, module in enumerate(noted if isinstance(noted, Mapping) else ())}
    numbers = [number[module] for name in names if (module := name.rpartition(".")[0]) in number]
    return numbers == sorted(numbers) if numbers else len(names) < 2 or names != sorted(names)


def pair_weights(
    slots: Sequence[Slot], weights: Mapping[str, Tensor], *, ordered: bool, in_order: bool = False
) -> Pairing:
    """`pair` with the candidates for parameters among a file's weights."""
    held = getattr(weights, "outline", weights)
    shapes = {name: held[name].shape for name in candidates(weights, len(slots))}
    try:
        return pair(slots, shapes, ordered=ordered, in_order=in_order)
    except AmbiguousError:
        # A target network, which has the names of another with `target` in them, is trained by no optimiser.
        original = {name: re.sub(r"_target(?=[._]|$)|(?<![a-z])target_", "", name) for name in shapes}
        trained = {n: shape for n, shape in shapes.items() if original[n] == n or shapes.get(original[n]) != shape}
        if len(trained) == len(shapes):
            raise
        return pair(slots, trained, ordered=ordered, in_order=in_order)


def pair(slots: Sequence[Slot], shapes: Shapes, *, ordered: bool, in_order: bool = False) -> Pairing:
    """The names behind the keys: by order and shapes alone where they suffice, else by the rule the groups follow."""
    count = 1 + max((slot.group for slot in slots), default=0)
    unordered = not ordered or (count > 1 and not in_order)
    try:
        found = assign(slots, shapes, ordered=ordered, in_order=in_order)
    except AmbiguousError as refusal:
        answers = _answers(slots, shapes, count) if ordered and unordered else []
        if len(answers) == 1:
            return answers[0]
        if not answers:
            raise
        one, two = answers[:2]
        key = next(slot.key for slot in slots if slot.needed and one.names[slot.key] != two.names[slot.key])
        raise AmbiguousError(
            f"the state under key {key!r} may belong to {one.names[key]!r} ({one.why}) or to {two.names[key]!r} "
            f"({two.why}): {count} groups without names, and every shape agrees with both. {REMEDY}{_IN_ORDER}"
        ) from refusal
    kept = "one group in the model's order" if count == 1 else "groups: each in the model's order, as given"
    return Pairing(found, "shapes that occur once" if unordered else kept)


def assign(slots: Sequence[Slot], names: Shapes, *, ordered: bool, in_order: bool) -> dict[Any, str]:
    """The name behind every key that can be identified; raises unless that is every key with a state.

    `ordered` says that `names` are in the model's order, `in_order` that each of several groups is, too.
    """
    groups = [[slot for slot in slots if slot.group == number] for number in sorted({s.group for s in slots})]
    listed, shapes = list(names), list(names.values())
    missing = Counter(slot.shape for slot in slots if slot.shape is not None) - Counter(shapes)
    if len(slots) > len(names) or missing:
        lost = [f", too few of shape {tuple(shape)}" for shape in missing][:1]
        raise MatchError(
            f"the optimiser's state holds {len(slots)} parameters, the weights {len(names)} tensors that may be "
            f"parameters{''.join(lost)}: it is another model's state. {REMEDY}"
        )
    # Without an order each key stands alone, and only a shape that occurs once decides.
    alone = [[slot] for slot in slots if slot.needed]
    found: dict[Any, str] = {}
    for run in groups if ordered and (len(groups) == 1 or in_order) else alone:
        wanted = [slot.shape for slot in run]
        first, last = _positions(wanted, shapes), _positions(wanted[::-1], shapes[::-1])
        if first is None or last is None:
            at = next((i for i, slot in enumerate(run) if slot.shape not in (None, shapes[i])), 0)
            raise MatchError(
                f"the optimiser's state is not in the order of the weights: key {run[at].key!r} has shape "
                f"{tuple(run[at].shape or ())} where {listed[at]!r} has {tuple(shapes[at])}. {REMEDY}"
            )
        for slot, low, high in zip(run, first, last[::-1], strict=True):
            high = len(shapes) - 1 - high
            if low == high:
                found[slot.key] = listed[low]
            elif slot.needed:
                why = f" ({len(groups)} groups without names have no known order)" if len(groups) > 1 else ""
                why = why if ordered else " (the file keeps no order of its tensors, as safetensors files do not)"
                raise AmbiguousError(
                    f"the state under key {slot.key!r}, of shape {slot.shape and tuple(slot.shape)}, may belong to "
                    f"{listed[low]!r} or to {listed[high]!r}{why}. {REMEDY}{_IN_ORDER if len(groups) > 1 else ''}"
                )
    doubled = [name for name, count in Counter(found.values()).items() if count > 1]
    if doubled:
        raise MatchError(f"by their shapes, several states belong to {doubled[0]!r}. {REMEDY}")
    return found


def _positions(wanted: Sequence[torch.Size | None], shapes: Sequence[torch.Size]) -> list[int] | None:
    """The first selection of `shapes`, in order, that agrees with `wanted`, where None agrees with any."""
    positions: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(shapes) and shape is not None and shapes[at] != shape:
            at += 1
        if at == len(shapes):
            return None
        positions.append(at)
        at += 1
    return positions


def _answers(slots: Sequence[Slot], shapes: Shapes, count: int) -> list[Pairing]:
    """The answers of the rules that agree with sizes, shapes and decays; each once, by the first rule for it."""
    if any(slot.needed and slot.shape is None for slot in slots):
        return []
    sizes = [sum(slot.group == number for slot in slots) for number in range(count)]
    decays = [next((slot.decay for slot in slots if slot.group == number), None) for number in range(count)]
    # What has no state's shape is a buffer.
    wanted = {slot.shape for slot in slots}
    shapes = {name: shape for name, shape in shapes.items() if None in wanted or shape in wanted}
    found: dict[tuple[str, ...], Pairing] = {}
    for words, filled, decaying in fillings(shapes, sizes):
        if [len(group) for group in filled] != sizes:
            continue
        if decaying:
            # The groups that a rule makes for weight decay decay more than the others.
            more, less = ([d for d, one in zip(decays, decaying, strict=True) if one == kind] for kind in (True, False))
            if None in decays or not min(more) > max(less):  # type: ignore[type-var, operator]
                continue
        named = list(zip(slots, itertools.chain.from_iterable(filled), strict=True))
        if all(slot.shape in (None, shapes[name]) for slot, name in named):
            read = tuple(name for slot, name in named if slot.needed)
            found.setdefault(read, Pairing({slot.key: name for slot, name in named}, f"groups: {words}"))
    return list(found.values())


# --- how trainers fill several groups, one rule each ----------------------------------------------------------------

_HEADS = ("head", "heads", "classifier", "fc", "linear", "output", "out")
# Of which timm's models say that they should not decay.
_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token", "absolute_pos_embed", "relative_position_bias_table")
_NORMS = re.compile(r"bias|layer_?norm|rms_?norm|(^|[._])norm\d*([._]|$)|(^|\.)ln_?(\d+|f)?\.", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|emb|embed|embeds|embedding|embeddings)([._]|$)", re.IGNORECASE)


def _fixed_by_timm(name: str, dims: int) -> bool:
    return dims <= 1 or name.endswith(".bias")


# Two groups: the names and dimensions that pass the test, and the rest. Whether the first decays more than the rest, or
# less; None where decay is not the purpose. Either may come first.
_TWO: tuple[tuple[str, Callable[[str, int], bool], bool | None], ...] = (
    # nanoGPT, llama2.c.
    ("weights of ≥ 2 dimensions", lambda _, dims: dims > 1, True),
    # timm.
    ("biases and what has ≤ 1 dimension", _fixed_by_timm, False),
    (
        "biases, what has ≤ 1 dimension, tokens and positions",
        lambda name, dims: _fixed_by_timm(name, dims) or name.rpartition(".")[2] in _TOKENS,
        False,
    ),
    ("biases", lambda name, _: name.endswith("bias"), False),
    # Hugging Face's Trainer.
    ("all but biases and norms", lambda name, _: _NORMS.search(name) is None, True),
    ("the backbone", lambda name, _: "backbone" in name, None),
    ("the head", lambda name, _: name.partition(".")[0] in _HEADS, None),
)


def fillings(shapes: Shapes, sizes: Sequence[int]) -> Iterator[tuple[str, Sequence[list[str]], tuple[bool, ...]]]:
    """By every rule: what it does, the names group by group, and which groups decay where that is their purpose."""
    dims = {name: len(shape) for name, shape in shapes.items()}
    if len(sizes) == 2:
        for words, test, more in _TWO:
            groups = [[name for name in dims if test(name, dims[name]) == passed] for passed in (True, False)]
            decaying: tuple[bool, ...] = () if more is None else (more, not more)
            yield f"{words}, then the rest", groups, decaying
            yield f"the rest, then {words}", groups[::-1], decaying[::-1]
        # minGPT.
        fixed = {name for name in dims if dims[name] < 2 or _NORMS.search(name) or _EMBEDDINGS.search(name)}
        words = "all but biases, norms and embeddings, then those; each sorted by name"
        yield words, [sorted(dims.keys() - fixed), sorted(fixed)], (True, False)
    if len(sizes) == 3:
        # YOLO: biases, other weights, norms' weights in recent versions; in the older norms', other weights, biases.
        parts: dict[str, list[str]] = {"biases": [], "norms' weights": [], "the other weights": []}
        for name in dims:
            norm = "norms' weights" if name.endswith("weight") and dims[name] == 1 else "the other weights"
            parts["biases" if name.endswith("bias") else norm].append(name)
        for order in itertools.permutations(parts):
            decaying = tuple(part == "the other weights" for part in order)
            yield ", then ".join(order), [parts[part] for part in order], decaying
    yield "consecutive parts of the model, in its order", _cut(shapes, sizes), ()
    yield "consecutive parts of the model, the last first", _cut(shapes, sizes[::-1])[::-1], ()


def _cut(names: Iterable[str], sizes: Sequence[int]) -> list[list[str]]:
    """The names in consecutive parts of these sizes; none where they are not as many."""
    rest = iter(names)
    parts = [list(itertools.islice(rest, size)) for size in sizes]
    return parts if next(rest, None) is None else []
