"""The range of held-out inputs, and whether others lie in it: what was scaled, normalised or transposed otherwise.

Of every example i of a tensor of real numbers l_i is the least value and h_i the greatest. With l and h those of all
held-out examples and w = h − l, an example is in range where

    l − ¾ w ≤ l_i ≤ l⁺ + ¼ w   and   h⁻ − ¼ w ≤ h_i ≤ h + ¾ w   and   h_i − l_i ≥ ¼ w⁻,

l⁺ the largest of the held-out l_i, h⁻ the smallest of the h_i and w⁻ of the h_i − l_i, but for one in a hundred each.
The outer ends are wide enough for noise, the inner ones tell of values that were divided or not normalised. Of one or
two numbers an example, which are drawn on an axis beyond the data by intent, all margins are 3 w; of fewer than 32, as
of a table's row, the numbers may well be alike, and their width is not compared. A batch has left where more than half
of its examples have. Fewer than 20 held-out examples make no range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# The margins, in widths of the held-out range: outwards and inwards, those of few numbers, and an example's own width.
_MARGINS, _OF_FEW, _FEW, _WIDTH, _ROW = (0.75, 0.25), (3.0, 3.0), 2, 0.25, 32
# So many held-out examples make a range.
_FEWEST = 20
# The share of held-out examples that inner ends may leave out.
_RARE = 0.01
# Of texts: what it leaves out is no part of the leverage.
MASK = "attention_mask"
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

    @property
    def kind(self) -> str:
        """`"float"`, `"integer"` or `"bool"`."""
        return _kind(getattr(torch, self.dtype))

    @property
    def bounded(self) -> bool:
        """Whether values are compared: real numbers that were finite, and not all the same."""
        return self.kind == "float" and self.high > self.low

    @property
    def bounds(self) -> Tensor:
        """The least and the greatest that l_i, h_i and h_i − l_i may be, (2, 3, 1); the equation above."""
        width, sizes = self.high - self.low, self.shape
        numbers = _ROW if sizes is None else math.prod(n or _ROW for n in sizes)
        outwards, inwards = (margin * width for margin in (_OF_FEW if numbers <= _FEW else _MARGINS))
        least_width = 0.0 if numbers < _ROW else _WIDTH * self.least_width
        least = self.low - outwards, self.lowest_high - inwards, least_width
        return torch.tensor([least, (self.highest_low + inwards, self.high + outwards, math.inf)]).unsqueeze(2)

    def difference(self, leaf: Tensor) -> str | None:
        """How the examples of a batch differ from the held-out ones, in words with the remedy; None if they do not."""
        inputs = f"the inputs {self.name!r}" if self.name else "the inputs"
        if _kind(leaf.dtype) != self.kind:
            return f"{inputs} are {_name(leaf)}, the held-out ones {self.dtype}: convert and scale them as in training"
        if self._reordered(leaf):
            return (
                f"{inputs} have shape {tuple(leaf.shape[1:])}, the held-out ones {self.shape}: put their dimensions in "
                "the order of training (channels first or last)"
            )
        low, high = _ends(leaf)
        out = 0 if not self.bounded else len(low) - int(inside(self.bounds.to(low.device), low, high).sum())
        if 2 * out <= len(low):
            return None
        if lost := len(low) - int((low.isfinite() & high.isfinite()).sum()):
            return f"{inputs} hold NaN or infinities in {lost} of {len(low)} examples: replace them, or leave those out"
        least, greatest = float(low.min()), float(high.max())
        within = (
            f", most with values from below {self.highest_low:.3g} to above {self.lowest_high:.3g} in each example"
            if self.low <= least and greatest <= self.high
            else ""
        )
        return (
            f"{inputs} lie between {least:.3g} and {greatest:.3g}, the held-out ones between {self.low:.3g} and "
            f"{self.high:.3g}{within}: scale and normalise them as in training ({out} of {len(low)} examples have left "
            "the range)"
        )

    def _reordered(self, leaf: Tensor) -> bool:
        """Whether it has the same sizes in another order; those of 1 do not count, which move no number."""
        if self.shape is None or None in self.shape or leaf.shape[1:] == self.shape:
            return False
        sizes, known = ([n for n in shape if n is not None and n != 1] for shape in (leaf.shape[1:], self.shape))
        return sizes != known and sorted(sizes) == sorted(known)


def ranges_of(batches: Iterable[object]) -> tuple[InputRange, ...]:
    """The range of every tensor in the inputs of some batches."""
    seen: dict[str, list[Tensor]] = {}
    for inputs in batches:
        for name, leaf in _leaves(inputs):
            seen.setdefault(name, []).append(leaf)
    return tuple(_range_of(name, leaves) for name, leaves in seen.items())


def departure(ranges: Sequence[InputRange], inputs: object) -> str | None:
    """How a batch differs from the held-out inputs, in words with the remedy; None where it does not."""
    leaves = ranged(ranges, inputs).items()
    return next((words for n, leaf in leaves if (words := ranges[n].difference(leaf)) is not None), None)


def compared(
    ranges: Sequence[InputRange], leaves: Mapping[int, Tensor], bounds: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Whether each example is in range, and one that is NaN where it has NaN and no held-out one had, (batch,) each.

    In operations that can be traced; None where nothing is compared. `bounds` are those of the ranges.
    """
    holds, lost = [], []
    for number, leaf in leaves.items():
        one = ranges[number]
        other = _kind(leaf.dtype) != one.kind or one._reordered(leaf)
        if other:
            holds.append(torch.zeros(leaf.shape[0], dtype=torch.bool, device=leaf.device))
        if one.bounded and leaf.is_floating_point():
            low, high = _ends(leaf)
            # The minimum of onnxruntime skips NaN.
            if torch.compiler.is_compiling():
                low = low.masked_fill(_flat(leaf).isnan().any(dim=1), math.nan)
            lost.append(low)
            holds += [] if other else [inside(bounds[number], low, high)]
    return reduce(torch.logical_and, holds) if holds else None, reduce(torch.add, lost) if lost else None


def inside(bounds: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether examples with these least and greatest values, (batch,), are within the bounds of a range."""
    ends = torch.stack([low, high, high - low])
    return (ends.clamp(*bounds.unbind()) == ends).all(dim=0)


def example_of(ranges: Sequence[InputRange], dtype: torch.dtype, device: torch.device) -> Any:
    """Two examples, of real numbers across the range, of others the largest; None where a shape is not known."""
    made: dict[str, Tensor] = {}
    for one in ranges:
        sizes = [n for n in one.shape or () if n is not None]
        if one.shape is None or len(sizes) < len(one.shape) or "." in one.name:
            return None
        shape, across = (2, *sizes), torch.linspace(one.low, one.high, 2 * math.prod(sizes), dtype=torch.float64)
        if one.kind == "float":
            made[one.name] = across.reshape(shape).to(device, dtype)
        else:
            made[one.name] = torch.full(shape, one.high, dtype=getattr(torch, one.dtype), device=device)
    if all(name.isdecimal() for name in made):
        return tuple(made.values()) or None
    return made.get("", made)


def _leaves(inputs: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their names, those that have a row for each example and something in it."""
    if isinstance(inputs, Tensor):
        if inputs.dim() and inputs.layout == torch.strided and math.prod(inputs.shape[1:]):
            yield name, inputs
    elif isinstance(inputs, Mapping | tuple | list):
        alone = not isinstance(inputs, Mapping) and len(inputs) == 1
        for key, value in inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs):
            yield from _leaves(value, name if alone else f"{name}.{key}".lstrip("."))


def ranged(ranges: Sequence[InputRange], inputs: object) -> dict[int, Tensor]:
    """The tensors of a batch that have a range, by its number."""
    leaves = dict(_leaves(inputs))
    return {number: leaves[one.name] for number, one in enumerate(ranges) if one.name in leaves}


def _flat(leaf: Tensor) -> Tensor:
    return leaf.detach().flatten(1) if leaf.dim() > 1 else leaf.detach()[:, None]


def _ends(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each example, (batch,), in float32; NaN where there is one."""
    flat = _flat(leaf)
    # Together, `aminmax` takes four times as long on a CPU.
    return flat.amin(dim=1).float(), flat.amax(dim=1).float()


def _range_of(name: str, leaves: Sequence[Tensor]) -> InputRange:
    shapes = [leaf.shape[1:] for leaf in leaves]
    alike = len({len(shape) for shape in shapes}) == 1
    shape = tuple(n[0] if len(set(n)) == 1 else None for n in zip(*shapes, strict=True)) if alike else None
    dtype = _name(leaves[0])
    if sum(map(len, leaves)) < _FEWEST:
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
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "integer"


def _name(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")
