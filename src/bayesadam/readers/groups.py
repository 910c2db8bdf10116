"""How trainers fill the several groups of an optimiser, which no file says: one rule each."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

Shapes = Mapping[str, torch.Size]
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
