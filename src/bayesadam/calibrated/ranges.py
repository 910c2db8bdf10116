"""The range of held-out inputs, and whether others lie in it: what was scaled, normalised or transposed otherwise.

Of every example i of a tensor of real numbers l_i is the least value and h_i the greatest. With l and h those of all
held-out examples and w = h − l, an example is in range where

    l − ¾ w ≤ l_i ≤ l⁺ + ¼ w   and   h⁻ − ¼ w ≤ h_i ≤ h + ¾ w   and   h_i − l_i ≥ ¼ w⁻,

l⁺ the largest of the held-out l_i, h⁻ the smallest of the h_i and w⁻ of the h_i − l_i, but for one in a hundred each.
The outer ends are wide enough for noise, the inner ones tell of values that were divided or not normalised. Of one or
two numbers an example, which are drawn on an axis beyond the data by intent, all margins are 3 w. A batch has left
where more than half of its examples have. Fewer than 20 held-out examples make no range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

# Tensors, or arrays of numpy.
Values = TypeVar("Values", Tensor, Any)
# The margins, in widths of the held-out range: outwards and inwards, those of few numbers, and an example's own width.
_MARGINS, _OF_FEW, _FEW, _WIDTH = (0.75, 0.25), (3.0, 3.0), 2, 0.25
# So many held-out examples make a range.
_FEWEST = 20
# The share of held-out examples that inner ends may leave out.
_RARE = 0.01
# Of texts: what it leaves out is no part of the leverage.
MASK = "attention_mask"
# So many real numbers tell one example from another.
_TELLING = 8
# Real numbers that are whole and so close together are masks, counts or classes: any of them may be missing.
_CLOSE = 16


@dataclass(frozen=True)
class InputRange:
    """What the held-out examples of one tensor of the inputs were.

    Attributes:
        name: its key in a mapping, its number in a tuple, with dots where they are nested; empty for a tensor alone.
        dtype: its type, such as `"float32"`.
        shape: of one example, None for sizes that varied; None where the number of dimensions did.
        low, high: the least and the greatest value; 0 where there were NaN or infinities, or too few examples.
        highest_low, lowest_high, least_width: l⁺, h⁻ and w⁻ above.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    low: float = 0.0
    high: float = 0.0
    highest_low: float = 0.0
    lowest_high: float = 0.0
    least_width: float = 0.0

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> InputRange:
        """From its plain data."""
        shape = header["shape"]
        return cls(**{**header, "shape": None if shape is None else tuple(shape)})

    @property
    def kind(self) -> str:
        """`"float"`, `"integer"`, `"bool"` or `"complex"`."""
        return _kind(getattr(torch, self.dtype))

    @property
    def bounded(self) -> bool:
        """Whether values are compared: real numbers that were finite, and not all the same."""
        return self.kind == "float" and self.high > self.low

    def holds(self, low: Values, high: Values) -> Values:
        """Whether examples with these least and greatest values, (batch,), are in range; the equation above."""
        width, sizes = self.high - self.low, self.shape
        # Lists, not generators, which the compiler of torch does not take.
        few = sizes is not None and math.prod([n or _FEW + 1 for n in sizes]) <= _FEW
        outwards, inwards = [margin * width for margin in (_OF_FEW if few else _MARGINS)]
        outer = (low >= self.low - outwards) & (high <= self.high + outwards)
        inner = (low <= self.highest_low + inwards) & (high >= self.lowest_high - inwards)
        return outer & inner & (high - low >= _WIDTH * self.least_width)


def has_mask(ranges: Sequence[InputRange]) -> bool:
    """Whether the held-out inputs had a mask of their padding."""
    return any(each.name == MASK for each in ranges)


def ranges_of(batches: Iterable[Any]) -> tuple[InputRange, ...]:
    """The range of every tensor in the inputs of some batches."""
    seen: dict[str, list[Tensor]] = {}
    for inputs in batches:
        for name, leaf in _leaves(inputs):
            seen.setdefault(name, []).append(leaf)
    return tuple(_range_of(name, leaves) for name, leaves in seen.items())


def departure(ranges: Sequence[InputRange], inputs: Any) -> str | None:
    """How a batch differs from the held-out inputs, in words with the remedy; None where it does not."""
    for known, leaf in _pairs(ranges, inputs):
        if (words := _of_another_kind(known, leaf)) is not None:
            return words
        if known.bounded:
            # As an array, whose small operations are the quicker ones.
            low, high = torch.stack(_ends(leaf)).float().cpu().numpy()
            out = len(low) - int(known.holds(low, high).sum())
            if 2 * out > len(low):
                return _of_other_values(known, float(low.min()), float(high.max()), f"{out} of {len(low)}")
    return None


def inside(ranges: Sequence[InputRange], inputs: Any) -> Tensor | None:
    """Whether each example is in range, (batch,), in operations that can be traced; None where nothing is compared."""
    found: Tensor | None = None
    for known, leaf in _pairs(ranges, inputs):
        if _of_another_kind(known, leaf) is not None:
            each = torch.zeros(leaf.shape[0], dtype=torch.bool, device=leaf.device)
        elif known.bounded:
            each = known.holds(*_ends(leaf.float()))
        else:
            continue
        found = each if found is None else found & each
    return found


def fingerprints(inputs: Any) -> Tensor:
    """A number for each example, (batch,), int64: the same for the same bits and, but by chance, for no others.

    Of the first tensor of real numbers, eight or more an example, which do not agree by chance; else of none.
    """
    for _, leaf in _leaves(inputs):
        if leaf.is_floating_point() and leaf[0].numel() >= _TELLING:
            whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.element_size()]
            bits = leaf.detach().reshape(len(leaf), -1).cpu().contiguous().view(whole).long()
            # An odd multiplier of each place; sums of whole numbers that overflow do not depend on their order.
            places = torch.arange(bits.shape[1]).mul(0x9E3779B97F4A7C15 - 2**64).bitwise_or(1)
            return ((bits + 1) * places).sum(dim=1)
    return torch.zeros(0, dtype=torch.int64)


def example_of(ranges: Sequence[InputRange], dtype: torch.dtype, device: torch.device) -> Any:
    """Two examples to trace with, real numbers 0, others the largest seen; None where a shape is not known."""
    made: dict[str, Tensor] = {}
    for known in ranges:
        if known.shape is None or None in known.shape or "." in known.name:
            return None
        own = dtype if known.kind == "float" else getattr(torch, known.dtype)
        value = 0 if known.kind == "float" else known.high
        made[known.name] = torch.full((2, *known.shape), value, dtype=own, device=device)  # type: ignore[arg-type]
    if all(name.isdecimal() for name in made):
        return tuple(made.values()) or None
    return made.get("", made)


def _leaves(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their names, those that have a row for each example and something in it."""
    if isinstance(inputs, Tensor):
        if inputs.dim() and inputs.layout == torch.strided and math.prod(inputs.shape[1:]):
            yield name, inputs
    elif isinstance(inputs, Mapping | tuple | list):
        alone = not isinstance(inputs, Mapping) and len(inputs) == 1
        for key, value in inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs):
            yield from _leaves(value, name if alone else f"{name}.{key}".lstrip("."))


def _pairs(ranges: Sequence[InputRange], inputs: Any) -> Iterator[tuple[InputRange, Tensor]]:
    known = {each.name: each for each in ranges}
    return ((known[name], leaf) for name, leaf in _leaves(inputs) if name in known)


def _ends(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each example, (batch,); NaN where there is one."""
    flat = leaf.detach().flatten(1) if leaf.dim() > 1 else leaf.detach()[:, None]
    # Together, `aminmax` takes four times as long on a CPU.
    return flat.amin(dim=1), flat.amax(dim=1)


def _range_of(name: str, leaves: Sequence[Tensor]) -> InputRange:
    shapes = [leaf.shape[1:] for leaf in leaves]
    alike = len({len(shape) for shape in shapes}) == 1
    shape = tuple(n[0] if len(set(n)) == 1 else None for n in zip(*shapes, strict=True)) if alike else None
    dtype = str(leaves[0].dtype).removeprefix("torch.")
    if leaves[0].is_complex() or sum(map(len, leaves)) < _FEWEST:
        return InputRange(name, dtype, shape)
    low, high = (torch.cat(ends).double().cpu() for ends in zip(*map(_ends, leaves), strict=True))
    if not bool((low.isfinite() & high.isfinite()).all()):
        return InputRange(name, dtype, shape)
    least, greatest = float(low.min()), float(high.max())
    whole = not leaves[0].is_floating_point() or all(bool((leaf == leaf.round()).all()) for leaf in leaves)
    if whole and greatest - least <= _CLOSE:
        return InputRange(name, dtype, shape, least, greatest, greatest, least, 0.0)
    rare = int(_RARE * len(low))
    highest_low, lowest_high = low.sort().values[-1 - rare], high.sort().values[rare]
    inner = map(float, (highest_low, lowest_high, (high - low).sort().values[rare]))
    return InputRange(name, dtype, shape, least, greatest, *inner)


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _of_another_kind(known: InputRange, leaf: Tensor) -> str | None:
    """Of other numbers, or with the same sizes in another order, in words."""
    if _kind(leaf.dtype) != known.kind:
        own = str(leaf.dtype).removeprefix("torch.")
        return f"{_named(known)} are {own}, the held-out ones {known.dtype}: convert and scale them as in training"
    if known.shape is None or None in known.shape:
        return None
    # Sizes of 1 do not count: where a model takes them, the numbers are in the same order.
    given, before = ([n for n in shape if n != 1] for shape in (leaf.shape[1:], known.shape))
    if given != before and sorted(given) == sorted(before):  # type: ignore[type-var]
        return (
            f"{_named(known)} have shape {tuple(leaf.shape[1:])}, the held-out ones {known.shape}: put their "
            "dimensions in the order of training (channels first or last)"
        )
    return None


def _of_other_values(known: InputRange, low: float, high: float, how_many: str) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{_named(known)} hold NaN or infinities in {how_many} examples: replace them, or leave those out"
    inside = ", but otherwise within an example" if known.low <= low and high <= known.high else ""
    return (
        f"{_named(known)} lie between {low:.3g} and {high:.3g}, the held-out ones between {known.low:.3g} and "
        f"{known.high:.3g}{inside}: scale and normalise them as in training ({how_many} examples have left the range)"
    )


def _named(known: InputRange) -> str:
    return f"the inputs {known.name!r}" if known.name else "the inputs"
