"""The parameter behind each key of an optimiser's state, where there is nothing but order and shapes.

One group lists a selection of the model's parameters in the model's order. The name behind a key is certain if the
first and the last selection whose shapes agree give it the same name. How several groups were filled no file says:
trainers follow rules, and a name is certain if all rules that fit sizes and shapes agree. All else is refused.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import own_part
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.registry import identify_reader
from bayesadam.readers.state import StateReader, as_number, has_tensors, parameter_shape

# A mark of groups that together are one list in the model's order.
ONE_LIST = "bayesadam: one list"
_BUFFER_SUFFIXES = ("running_mean", "running_var", "running_variance", "num_batches_tracked")
NAMES = "Pass param_names=[...], the parameter names in the order in which the optimiser was given them"
REMEDY = f"{NAMES}, or the model (Posterior.from_checkpoint)"
IN_ORDER = (
    ", or groups_in_order=True if each group was filled in the model's order, as by "
    "[p for name, p in model.named_parameters() if ...]"
)

Shapes = Mapping[str, torch.Size | None]


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
            shape, needed = parameter_shape(state, reader), always or has_tensors(state)
            slots.append(Slot(key, 0 if group.get(ONE_LIST) else number, shape, needed, decay))
    return slots


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


def candidates(weights: Mapping[str, Tensor], count: int = 0, *, integers: bool = False) -> list[str]:
    """The names in a state dict that may be a list of at least `count` parameters, the fewest, in its order.

    A tied tensor counts under its first name alone where that is enough. Integers, which an optimiser may list and
    keeps no state for, count last, or always with `integers`.
    """
    held = getattr(weights, "outline", weights)
    listed = [name for name in held if name.rpartition(".")[2] not in _BUFFER_SUFFIXES]
    real = [name for name in listed if held[name].is_floating_point() or held[name].is_complex()]
    identity = identities(weights)
    first = {identity[name]: name for name in reversed(real) if held[name].numel()}
    repeats = {name for name in real if first.get(identity[name], name) != name}
    lists = [[name for name in names if name not in repeats] for names in (real, listed)]
    options = [lists[1], listed] if integers else [lists[0], real, lists[1], listed]
    return next((names for names in options if len(names) >= count), listed)


def shapes_of(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, torch.Size | None]:
    """Shapes by name; None for integers and truth values, which no state can belong to."""
    held = getattr(weights, "outline", weights)
    return {n: held[n].shape if held[n].is_floating_point() or held[n].is_complex() else None for n in names}


def keeps_order(weights: Mapping[str, Any]) -> bool:
    """Whether a state dict is in the order of the modules that torch noted with it; without the note, not sorted."""
    names = list(weights)
    noted = getattr(weights, "_metadata", None)
    number = {module: number for number, module in enumerate(noted if isinstance(noted, Mapping) else ())}
    numbers = [number[module] for name in names if (module := name.rpartition(".")[0]) in number]
    return numbers == sorted(numbers) if numbers else len(names) < 2 or names != sorted(names)


def without_copies(weights: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """The names that are no target's: those without the same name, `target` left out, beside them."""
    shapes = shapes_of(weights, names)
    original = {name: re.sub(r"_target(?=[._]|$)|(?<![a-z])target_", "", name) for name in names}
    return [name for name in names if original[name] == name or shapes.get(original[name]) != shapes[name]]


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


def assign(slots: Sequence[Slot], names: Shapes, *, ordered: bool, in_order: bool) -> dict[Any, str]:
    """The name behind every key that can be identified; raises unless that is every key with a state.

    `ordered` says that `names` are in the model's order, `in_order` that each of several groups is, too.
    """
    groups = [[slot for slot in slots if slot.group == number] for number in sorted({s.group for s in slots})]
    if len(slots) > len(names):
        counts = f"{len(slots)} parameters, the weights {len(names)} tensors that may be parameters"
        raise MatchError(f"the optimiser's state holds {counts}: it is another model's state. {REMEDY}")
    listed, shapes = list(names), list(names.values())
    _require_shapes(slots, shapes)
    # Without an order each key stands alone, and only a shape that occurs once decides.
    alone = [[slot] for slot in slots if slot.needed]
    found: dict[Any, str] = {}
    for run in groups if ordered and (len(groups) == 1 or in_order) else alone:
        wanted = [slot.shape for slot in run]
        first, last = _positions(wanted, shapes), _positions(wanted[::-1], shapes[::-1])
        if first is None or last is None:
            _require_shapes(run, shapes)
            at = next((i for i, slot in enumerate(run) if slot.shape not in (None, shapes[i])), 0)
            raise MatchError(
                f"the optimiser's state is not in the order of the weights: key {run[at].key!r} has shape "
                f"{tuple(run[at].shape or ())} where {listed[at]!r} has {tuple(shapes[at] or ())}. {REMEDY}"
            )
        for slot, low, high in zip(run, first, last[::-1], strict=True):
            high = len(shapes) - 1 - high
            if low == high:
                found[slot.key] = listed[low]
            elif slot.needed:
                why = hint = ""
                shape = "no shape" if slot.shape is None else f"shape {tuple(slot.shape)}"
                if not ordered:
                    why = " (the file keeps no order of its tensors, as safetensors files do not)"
                elif len(groups) > 1:
                    why, hint = f" ({len(groups)} groups without names have no known order)", IN_ORDER
                raise AmbiguousError(
                    f"the state under key {slot.key!r}, of {shape}, may belong to {listed[low]!r} or to "
                    f"{listed[high]!r}{why}. {REMEDY}{hint}"
                )
    doubled = [name for name, count in Counter(found.values()).items() if count > 1]
    if doubled:
        keys = [key for key, name in found.items() if name == doubled[0]]
        raise MatchError(
            f"by their shapes, the states under keys {keys[:4]} all belong to {doubled[0]!r}: it is another model's "
            f"state. {REMEDY}"
        )
    return found


def _positions(wanted: Sequence[torch.Size | None], shapes: Sequence[torch.Size | None]) -> list[int] | None:
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


def _require_shapes(slots: Sequence[Slot], shapes: Sequence[torch.Size | None]) -> None:
    """Refuse states of a shape that fewer weights have."""
    missing = Counter(s.shape for s in slots if s.shape is not None) - Counter(s for s in shapes if s is not None)
    for shape in missing:
        key = next(slot.key for slot in slots if slot.shape == shape)
        raise MatchError(
            f"the state under key {key!r} has shape {tuple(shape)}, and of the weights {shapes.count(shape)} have "
            f"that: it is another model's state. {REMEDY}"
        )


def pair(slots: Sequence[Slot], shapes: Shapes, *, ordered: bool, in_order: bool = False) -> Pairing:
    """The names behind the keys: by order and shapes alone where they suffice, else by the rule the groups follow."""
    groups = 1 + max((slot.group for slot in slots), default=0)
    if not ordered or groups == 1 or in_order:
        found = assign(slots, shapes, ordered=ordered, in_order=in_order)
        kept = "one group in the model's order" if groups == 1 else "groups: each in the model's order, as given"
        return Pairing(found, kept if ordered else "shapes that occur once")
    answers = _answers(slots, shapes)
    try:
        found = assign(slots, shapes, ordered=True, in_order=False)
    except AmbiguousError as refusal:
        if len(answers) == 1:
            return answers[0]
        if not answers:
            raise
        one, two = answers[:2]
        key = next(slot.key for slot in slots if slot.needed and one.names[slot.key] != two.names[slot.key])
        raise AmbiguousError(
            f"the state under key {key!r} may belong to {one.names[key]!r} ({one.why}) or to {two.names[key]!r} "
            f"({two.why}): {groups} groups without names, and every shape agrees with both. {REMEDY}{IN_ORDER}"
        ) from refusal
    agreeing = [answer for answer in answers if all(answer.names[key] == name for key, name in found.items())]
    return agreeing[0] if len(agreeing) == 1 else Pairing(found, "shapes that occur once")


def pair_weights(
    slots: Sequence[Slot], weights: Mapping[str, Tensor], *, ordered: bool, in_order: bool = False
) -> Pairing:
    """`pair` with the candidates for parameters among a file's weights; integers count where the rest is undecided."""
    chosen, whole = candidates(weights, len(slots)), candidates(weights, integers=True)
    found: list[Pairing] = []
    misfit: MatchError | None = None
    for names in (chosen, whole):
        # A target network is trained by no optimiser.
        trained = without_copies(weights, names)
        for listed in (names, trained):
            try:
                found.append(pair(slots, shapes_of(weights, listed), ordered=ordered, in_order=in_order))
                break
            except AmbiguousError:
                if len(listed) == len(trained):
                    raise
            except MatchError as error:
                misfit = misfit or error
                break
        if found and (len(chosen) == len(slots) or set(whole) <= set(chosen)):
            return found[0]
    if not found:
        raise misfit or MatchError(REMEDY)
    for slot in slots:
        answers = sorted({pairing.names[slot.key] for pairing in found}) if slot.needed else []
        if len(answers) > 1:
            raise AmbiguousError(
                f"the state under key {slot.key!r} may belong to {' or to '.join(map(repr, answers))}, as tensors of "
                f"integers are buffers or parameters. {REMEDY}"
            )
    return found[0]


def _answers(slots: Sequence[Slot], shapes: Shapes) -> list[Pairing]:
    """The answers of the rules that agree with sizes, shapes and decays; each once, by the first rule for it."""
    if any(slot.needed and slot.shape is None for slot in slots):
        return []
    count = 1 + max(slot.group for slot in slots)
    sizes = [sum(slot.group == number for slot in slots) for number in range(count)]
    decays = [next((slot.decay for slot in slots if slot.group == number), None) for number in range(count)]
    # What has no state's shape is a buffer.
    wanted = {slot.shape for slot in slots}
    shapes = {name: shape for name, shape in shapes.items() if None in wanted or shape in wanted}
    found: dict[tuple[str, ...], Pairing] = {}
    for words, filled, decaying in fillings(shapes, sizes):
        names = list(itertools.chain.from_iterable(filled))
        if [len(group) for group in filled] != sizes:
            continue
        if decaying:
            # The groups that a rule makes for weight decay decay more than the others.
            more, less = ([d for d, one in zip(decays, decaying, strict=True) if one == kind] for kind in (True, False))
            if None in decays or not min(more) > max(less):  # type: ignore[type-var, operator]
                continue
        if all(slot.shape in (None, shapes[name]) for slot, name in zip(slots, names, strict=True)):
            named = {slot.key: name for slot, name in zip(slots, names, strict=True)}
            read = tuple(named[slot.key] for slot in slots if slot.needed)
            found.setdefault(read, Pairing(named, f"groups: {words}"))
    return list(found.values())


_HEADS = ("head", "heads", "classifier", "fc", "linear", "output", "out")
# Of which timm's models say that they should not decay.
_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token", "absolute_pos_embed", "relative_position_bias_table")
_NORMS = re.compile(r"bias|layer_?norm|rms_?norm|(^|[._])norm\d*([._]|$)|(^|\.)ln_?(\d+|f)?\.", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|emb|embed|embeds|embedding|embeddings)([._]|$)", re.IGNORECASE)

# Two groups: the one whose names and dimensions pass the test, the other, which of them decays. Either may be first.
_TWO: tuple[tuple[str, str, Callable[[str, int], bool], tuple[bool, ...]], ...] = (
    # nanoGPT, llama2.c.
    ("weights of ≥ 2 dimensions", "the rest", lambda _, dims: dims > 1, (True, False)),
    # timm.
    (
        *("biases and what has ≤ 1 dimension", "the rest"),
        lambda name, dims: dims <= 1 or name.endswith(".bias"),
        (False, True),
    ),
    (
        *("biases, what has ≤ 1 dimension, tokens and positions", "the rest"),
        lambda name, dims: dims <= 1 or name.endswith(".bias") or name.rpartition(".")[2] in _TOKENS,
        (False, True),
    ),
    ("biases", "the rest", lambda name, _: name.endswith("bias"), (False, True)),
    # The scripts of Hugging Face, then its Trainer.
    (
        *("all but biases and LayerNorm weights", "those"),
        lambda name, _: "bias" not in name and "LayerNorm.weight" not in name,
        (True, False),
    ),
    ("all but biases and norms", "those", lambda name, _: _NORMS.search(name) is None, (True, False)),
    ("the backbone", "the rest", lambda name, _: "backbone" in name, ()),
    ("the head", "the rest", lambda name, _: name.partition(".")[0] in _HEADS, ()),
)


def fillings(shapes: Shapes, sizes: Sequence[int]) -> Iterator[tuple[str, Sequence[list[str]], tuple[bool, ...]]]:
    """By every rule: what it does, the names group by group, and which groups decay where that is their purpose."""
    dims = {name: len(shape or ()) for name, shape in shapes.items()}
    if len(sizes) == 2:
        for one, other, test, decaying in _TWO:
            groups = [[name for name in dims if test(name, dims[name]) == passed] for passed in (True, False)]
            yield f"{one}, then {other}", groups, decaying
            yield f"{other}, then {one}", groups[::-1], decaying[::-1]
        fixed = {name for name in dims if dims[name] < 2 or _NORMS.search(name) or _EMBEDDINGS.search(name)}
        words = "all but biases, norms and embeddings, then those; each sorted by name"
        # minGPT.
        yield words, [sorted(dims.keys() - fixed), sorted(fixed)], (True, False)
        # DETR trains no norm of its backbone, and not the first layers.
        rest = [name for name in dims if "backbone" not in name]
        trained = [name for name in dims if "backbone" in name and dims[name] > 1 and re.search(r"layer[234]", name)]
        yield "all but the backbone, then the convolutions of its layers 2 to 4", [rest, trained], ()
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
    if len(sizes) > 2 and len(sizes) % 2 == 0:
        # fastai.
        halves = _cut(shapes, [sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)])
        groups = [[name for name in part if (dims[name] > 1) == large] for part in halves for large in (True, False)]
        yield "two for each part of the model, weights of ≥ 2 dimensions, then the rest", groups, ()


def _cut(names: Iterable[str], sizes: Sequence[int]) -> list[list[str]]:
    """The names in consecutive parts of these sizes; none where they are not as many."""
    rest = iter(names)
    parts = [list(itertools.islice(rest, size)) for size in sizes]
    return parts if next(rest, None) is None else []
