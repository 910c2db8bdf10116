"""How several groups of an optimiser were filled, which no file says: the rules that trainers follow.

A rule applies where it gives every group its size and every state its shape. What is read is what all the rules that apply
agree on; where two give different answers, it is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayesadam.readers.formats.names import REMEDY, AmbiguousError, Slot, assign

Shapes = Mapping[str, torch.Size | None]
Groups = list[list[str]]

_MORE_FIRST, _LESS_FIRST = (True, False), (False, True)
_HEADS = ("head", "heads", "classifier", "fc", "linear", "output", "out")
# Of which timm's models say that they should not decay.
_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token", "absolute_pos_embed", "relative_position_bias_table")
_NORMS = re.compile(r"layer_?norm|rms_?norm|(^|[._])norm\d*([._]|$)|(^|\.)ln_?(\d+|f)?\.", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|emb|embed|embeds|embedding|embeddings)([._]|$)", re.IGNORECASE)


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


@dataclass(frozen=True)
class Matched:
    """The name behind every key that can be identified, and in words what that rests on."""

    names: Mapping[Any, str]
    words: str


def matched(slots: Sequence[Slot], shapes: Shapes, *, ordered: bool, in_order: bool) -> Matched:
    """The names behind the keys: by order and shapes alone where they do, else by the rule that the groups follow.

    The arguments are those of `assign`, and so is what is raised.
    """
    groups = 1 + max((slot.group for slot in slots), default=0)
    if not ordered:
        return Matched(assign(slots, shapes, ordered=False, in_order=in_order), "shapes that occur once")
    if groups == 1 or in_order:
        words = "one group in the model's order" if groups == 1 else "groups: each in the model's order, as asked"
        return Matched(assign(slots, shapes, ordered=True, in_order=in_order), words)
    answers = _answers(slots, shapes)
    try:
        found = assign(slots, shapes, ordered=True, in_order=False)
    except AmbiguousError as refusal:
        if not answers:
            raise
        if len(answers) > 1:
            raise AmbiguousError(_disagreement(slots, answers, groups)) from refusal
        return answers[0]
    agreeing = [answer for answer in answers if all(answer.names[key] == name for key, name in found.items())]
    return agreeing[0] if len(agreeing) == 1 else Matched(found, "shapes that occur once")


def _answers(slots: Sequence[Slot], shapes: Shapes) -> list[Matched]:
    """What the rules give that agree with the sizes and with every shape; each answer once, by the first rule for it.

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
    found: dict[tuple[str, ...], Matched] = {}
    for rule in (*RULES.get(count, ()), *RULES[0]):
        filled = rule.groups(shapes, sizes)
        names = tuple(itertools.chain.from_iterable(filled))
        if [len(group) for group in filled] != sizes or not rule.made_for(decays):
            continue
        if all(slot.shape in (None, shapes[name]) for slot, name in zip(slots, names, strict=True)):
            named = {slot.key: name for slot, name in zip(slots, names, strict=True)}
            read = tuple(named[slot.key] for slot in slots if slot.needed)
            found.setdefault(read, Matched(named, f"groups: {rule.words}"))
    return list(found.values())


def _disagreement(slots: Sequence[Slot], answers: Sequence[Matched], groups: int) -> str:
    one, two = answers[:2]
    key = next(slot.key for slot in slots if slot.needed and one.names[slot.key] != two.names[slot.key])
    return (
        f"the state under key {key!r} may belong to {one.names[key]!r} ({one.words}) or to {two.names[key]!r} ({two.words}): "
        f"{groups} groups without names, and every shape agrees with both. {REMEDY}, or groups_in_order=True if each group "
        "was filled in the model's order, as by [p for name, p in model.named_parameters() if ...]"
    )


def _split(words: str, *belongs: Callable[[str, torch.Size], bool], decays: tuple[bool, ...] = ()) -> Rule:
    """Names to the first group whose condition they meet; what meets none is in the last, unless that has one, too."""

    def groups(shapes: Shapes, _: Sequence[int]) -> Groups:
        filled: Groups = [[] for _ in belongs]
        for name, shape in shapes.items():
            place = next((i for i, test in enumerate(belongs) if test(name, torch.Size(shape or ()))), None)
            if place is not None:
                filled[place].append(name)
        return filled

    return Rule(words, groups, decays)


def _both_ways(
    first: str, test: Callable[[str, torch.Size], bool], second: str, decays: tuple[bool, ...] = ()
) -> list[Rule]:
    def rest(name: str, shape: torch.Size) -> bool:
        return not test(name, shape)

    return [
        _split(f"{first}, then {second}", test, rest, decays=decays),
        _split(f"{second}, then {first}", rest, test, decays=decays[::-1]),
    ]


def _is_matrix(_: str, shape: torch.Size) -> bool:
    return len(shape) > 1


def _is_bias(name: str, _: torch.Size) -> bool:
    return name.endswith("bias")


def _is_small(name: str, shape: torch.Size) -> bool:
    return len(shape) <= 1 or name.endswith(".bias")


def _is_norm_or_bias(name: str, _: torch.Size) -> bool:
    return "bias" in name or _NORMS.search(name) is not None


def _is_norm_weight(name: str, shape: torch.Size) -> bool:
    return name.endswith("weight") and len(shape) == 1


def _in_backbone(name: str, _: torch.Size) -> bool:
    return "backbone" in name


def _in_head(name: str, _: torch.Size) -> bool:
    return name.partition(".")[0] in _HEADS


def _consecutive(shapes: Shapes, sizes: Sequence[int]) -> Groups:
    """The model's order, cut.

    >>> _consecutive(dict.fromkeys("abcd"), [1, 3])
    [['a'], ['b', 'c', 'd']]
    """
    names = iter(shapes)
    groups = [list(itertools.islice(names, size)) for size in sizes]
    return groups if next(names, None) is None else []


def _as_mingpt(shapes: Shapes, _: Sequence[int]) -> Groups:
    """What decays, then biases, norms and embeddings, each sorted by name."""
    fixed = {
        name
        for name, shape in shapes.items()
        if len(shape or ()) < 2 or _is_norm_or_bias(name, torch.Size(shape or ())) or _EMBEDDINGS.search(name)
    }
    return [sorted(shapes.keys() - fixed), sorted(fixed)]


def _last_first(shapes: Shapes, sizes: Sequence[int]) -> Groups:
    """The same with the head's group before the body's."""
    return _consecutive(shapes, sizes[::-1])[::-1]


def _two_a_part(shapes: Shapes, sizes: Sequence[int]) -> Groups:
    """The model's order, cut into parts of two groups each: weights of ≥ 2 dimensions, then the rest."""
    if len(sizes) % 2 or len(sizes) == 2:
        return []
    parts = _consecutive(shapes, [sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)])
    by_size = [[[n for n in part if (len(shapes[n] or ()) > 1) == large] for large in (True, False)] for part in parts]
    return list(itertools.chain.from_iterable(by_size))


_YOLO = {
    "biases": _is_bias,
    "norms' weights": _is_norm_weight,
    "the other weights": lambda name, shape: not _is_bias(name, shape) and not _is_norm_weight(name, shape),
}

# By the number of groups; 0 for any number.
RULES: Mapping[int, Sequence[Rule]] = {
    2: (
        # nanoGPT, llama2.c.
        *_both_ways("weights of ≥ 2 dimensions", _is_matrix, "the rest", _MORE_FIRST),
        # timm.
        *_both_ways("biases and what has ≤ 1 dimension", _is_small, "the rest", _LESS_FIRST),
        *_both_ways(
            "biases, what has ≤ 1 dimension, tokens and positions",
            lambda name, shape: _is_small(name, shape) or name.rpartition(".")[2] in _TOKENS,
            "the rest",
            _LESS_FIRST,
        ),
        *_both_ways("biases", _is_bias, "the rest", _LESS_FIRST),
        # The scripts of Hugging Face, then its Trainer.
        *_both_ways(
            "all but biases and LayerNorm weights",
            lambda name, _: "bias" not in name and "LayerNorm.weight" not in name,
            "those",
            _MORE_FIRST,
        ),
        *_both_ways(
            "all but biases and norms", lambda name, shape: not _is_norm_or_bias(name, shape), "those", _MORE_FIRST
        ),
        Rule("all but biases, norms and embeddings, then those; each sorted by name", _as_mingpt, _MORE_FIRST),
        *_both_ways("the backbone", _in_backbone, "the rest"),
        # DETR trains no norm of its backbone, and not the first layers.
        _split(
            "all but the backbone, then the convolutions of its layers 2 to 4",
            lambda name, shape: not _in_backbone(name, shape),
            lambda name, shape: len(shape) > 1 and re.search(r"layer[234]", name) is not None,
        ),
        *_both_ways("the head", _in_head, "the rest"),
    ),
    # YOLO: biases, other weights, norms' weights in recent versions; in the older norms', other weights, biases.
    3: tuple(
        _split(
            f"{', then '.join(order)}",
            *(_YOLO[part] for part in order),
            decays=tuple(part == "the other weights" for part in order),
        )
        for order in itertools.permutations(_YOLO)
    ),
    0: (
        Rule("consecutive parts of the model, in its order", _consecutive),
        Rule("consecutive parts of the model, the last first", _last_first),
        # fastai.
        Rule("two for each part of the model, weights of ≥ 2 dimensions, then the rest", _two_a_part),
    ),
}
