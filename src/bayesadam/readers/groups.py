"""How several groups of an optimiser were filled, which no file says: the rules that trainers follow.

A rule applies where it gives every group its size and every state its shape. A name is taken where all the rules that
apply agree on it; where two give different answers, it is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.readers.pairing import (
    IN_ORDER,
    REMEDY,
    AmbiguousError,
    Pairing,
    Shapes,
    Slot,
    assign,
    parameter_names,
    shapes_of,
    without_copies,
)

Groups = list[list[str]]
Test = Callable[[str, torch.Size], bool]


def pair(slots: Sequence[Slot], shapes: Shapes, *, ordered: bool, in_order: bool = False) -> Pairing:
    """The names behind the keys: by order and shapes alone where they suffice, else by the rule the groups follow.

    The arguments and the errors are those of `assign`.
    """
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
    candidates = parameter_names(weights)
    chosen = candidates.enough_for(len(slots))
    whole = [name for name in candidates.whole if name not in candidates.repeats]

    def by(names: Sequence[str]) -> Pairing:
        return pair(slots, shapes_of(weights, names), ordered=ordered, in_order=in_order)

    try:
        found = by(chosen)
    except AmbiguousError:
        # A target network is trained by no optimiser.
        trained = without_copies(weights, chosen)
        if len(trained) == len(chosen):
            raise
        found = by(trained)
    except MatchError as misfit:
        try:
            return by(whole)
        except MatchError as error:
            raise (error if isinstance(error, AmbiguousError) else misfit) from None
    if len(chosen) == len(slots) or all(slot.needed for slot in slots) or set(whole) <= set(chosen):
        return found
    try:
        other = by(whole).names
    except AmbiguousError:
        raise
    except MatchError:
        return found
    for slot in slots:
        if slot.needed and found.names[slot.key] != other[slot.key]:
            raise AmbiguousError(
                f"the state under key {slot.key!r} may belong to {found.names[slot.key]!r} or to {other[slot.key]!r}, "
                f"as tensors of integers are buffers or parameters. {REMEDY}"
            )
    return found


def _answers(slots: Sequence[Slot], shapes: Shapes) -> list[Pairing]:
    """The answers of the rules that agree with the sizes and with every shape; each once, by the first rule for it.

    Answers are the same where they agree on every key with a state.
    """
    if any(slot.needed and slot.shape is None for slot in slots):
        return []
    count = 1 + max(slot.group for slot in slots)
    sizes = [sum(slot.group == number for slot in slots) for number in range(count)]
    decays = [next((slot.decay for slot in slots if slot.group == number), None) for number in range(count)]
    # What has no state's shape is a buffer.
    wanted = {slot.shape for slot in slots}
    shapes = {name: shape for name, shape in shapes.items() if None in wanted or shape in wanted}
    found: dict[tuple[str, ...], Pairing] = {}
    for rule in (*RULES.get(count, ()), *RULES[0]):
        filled = rule.groups(shapes, sizes)
        names = tuple(itertools.chain.from_iterable(filled))
        if [len(group) for group in filled] != sizes or not rule.made_for(decays):
            continue
        if all(slot.shape in (None, shapes[name]) for slot, name in zip(slots, names, strict=True)):
            named = {slot.key: name for slot, name in zip(slots, names, strict=True)}
            read = tuple(named[slot.key] for slot in slots if slot.needed)
            found.setdefault(read, Pairing(named, f"groups: {rule.words}"))
    return list(found.values())


# --- rules ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A way to fill groups.

    Attributes:
        words: what it does, as "weights of ≥ 2 dimensions, then the rest".
        groups: (shapes by name in the model's order, the sizes of the groups) → names, group by group.
        decays: which of the groups decay more than the others, where that is what they were made for.
    """

    words: str
    groups: Callable[[Shapes, Sequence[int]], Groups]
    decays: tuple[bool, ...] = ()

    def made_for(self, decays: Sequence[float | None]) -> bool:
        """Whether the groups' weight decays are those that they are made for."""
        known = [decay for decay in decays if decay is not None]
        if not self.decays or len(known) < len(decays):
            return not self.decays
        more, less = ([d for d, one in zip(known, self.decays, strict=True) if one == kind] for kind in (True, False))
        return min(more) > max(less)


def _split(words: str, *tests: Test, decays: tuple[bool, ...] = ()) -> Rule:
    """Each name goes to the first group whose test it passes; names that pass none are in no group."""

    def groups(shapes: Shapes, _: Sequence[int]) -> Groups:
        filled: Groups = [[] for _ in tests]
        for name, shape in shapes.items():
            group = next((g for g, test in zip(filled, tests, strict=True) if test(name, shape or torch.Size())), None)
            if group is not None:
                group.append(name)
        return filled

    return Rule(words, groups, decays)


def _either_first(first: str, test: Test, second: str, *decays: bool) -> Iterator[Rule]:
    def rest(name: str, shape: torch.Size) -> bool:
        return not test(name, shape)

    yield _split(f"{first}, then {second}", test, rest, decays=decays)
    yield _split(f"{second}, then {first}", rest, test, decays=decays[::-1])


_HEADS = ("head", "heads", "classifier", "fc", "linear", "output", "out")
# Of which timm's models say that they should not decay.
_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token", "absolute_pos_embed", "relative_position_bias_table")
_NORMS = re.compile(r"layer_?norm|rms_?norm|(^|[._])norm\d*([._]|$)|(^|\.)ln_?(\d+|f)?\.", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|emb|embed|embeds|embedding|embeddings)([._]|$)", re.IGNORECASE)


def _is_small(name: str, shape: torch.Size) -> bool:
    return len(shape) <= 1 or name.endswith(".bias")


def _is_norm_or_bias(name: str, _: torch.Size) -> bool:
    return "bias" in name or _NORMS.search(name) is not None


def _consecutive(shapes: Shapes, sizes: Sequence[int]) -> Groups:
    """The model's order, cut.

    >>> _consecutive(dict.fromkeys("abcd"), [1, 3])
    [['a'], ['b', 'c', 'd']]
    """
    names = iter(shapes)
    groups = [list(itertools.islice(names, size)) for size in sizes]
    return groups if next(names, None) is None else []


def _as_mingpt(shapes: Shapes, _: Sequence[int]) -> Groups:
    """Weights that decay, then biases, norms and embeddings, each sorted by name."""
    small = {name for name, shape in shapes.items() if len(shape or ()) < 2}
    fixed = small | {n for n in shapes if _is_norm_or_bias(n, torch.Size()) or _EMBEDDINGS.search(n)}
    return [sorted(shapes.keys() - fixed), sorted(fixed)]


def _two_a_part(shapes: Shapes, sizes: Sequence[int]) -> Groups:
    """The model's order, cut into parts of two groups each: weights of ≥ 2 dimensions, then the rest."""
    if len(sizes) % 2 or len(sizes) == 2:
        return []
    parts = _consecutive(shapes, [sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)])
    return [[n for n in part if (len(shapes[n] or ()) > 1) == large] for part in parts for large in (True, False)]


_YOLO: dict[str, Test] = {
    "biases": lambda name, _: name.endswith("bias"),
    "norms' weights": lambda name, shape: name.endswith("weight") and len(shape) == 1,
    "the other weights": lambda name, shape: (
        not name.endswith("bias") and not (name.endswith("weight") and len(shape) == 1)
    ),
}

# By the number of groups; 0 for any number. The booleans say which group decays.
RULES: Mapping[int, Sequence[Rule]] = {
    2: (
        # nanoGPT, llama2.c.
        *_either_first("weights of ≥ 2 dimensions", lambda _, shape: len(shape) > 1, "the rest", True, False),
        # timm.
        *_either_first("biases and what has ≤ 1 dimension", _is_small, "the rest", False, True),
        *_either_first(
            "biases, what has ≤ 1 dimension, tokens and positions",
            lambda name, shape: _is_small(name, shape) or name.rpartition(".")[2] in _TOKENS,
            "the rest",
            *(False, True),
        ),
        *_either_first("biases", lambda name, _: name.endswith("bias"), "the rest", False, True),
        # The scripts of Hugging Face, then its Trainer.
        *_either_first(
            "all but biases and LayerNorm weights",
            lambda name, _: "bias" not in name and "LayerNorm.weight" not in name,
            "those",
            *(True, False),
        ),
        *_either_first("all but biases and norms", lambda *named: not _is_norm_or_bias(*named), "those", True, False),
        Rule("all but biases, norms and embeddings, then those; each sorted by name", _as_mingpt, (True, False)),
        *_either_first("the backbone", lambda name, _: "backbone" in name, "the rest"),
        # DETR trains no norm of its backbone, and not the first layers.
        _split(
            "all but the backbone, then the convolutions of its layers 2 to 4",
            lambda name, _: "backbone" not in name,
            lambda name, shape: len(shape) > 1 and re.search(r"layer[234]", name) is not None,
        ),
        *_either_first("the head", lambda name, _: name.partition(".")[0] in _HEADS, "the rest"),
    ),
    # YOLO: biases, other weights, norms' weights in recent versions; in the older norms', other weights, biases.
    3: tuple(
        _split(
            ", then ".join(order),
            *(_YOLO[part] for part in order),
            decays=tuple(part == "the other weights" for part in order),
        )
        for order in itertools.permutations(_YOLO)
    ),
    0: (
        Rule("consecutive parts of the model, in its order", _consecutive),
        Rule(
            "consecutive parts of the model, the last first",
            lambda shapes, sizes: _consecutive(shapes, sizes[::-1])[::-1],
        ),
        # fastai.
        Rule("two for each part of the model, weights of ≥ 2 dimensions, then the rest", _two_a_part),
    ),
}
