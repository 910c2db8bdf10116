"""What a merge did: how much each model counted, and how far their curvatures lie on the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam.merging.methods import counted_shares


@dataclass(frozen=True, eq=False)
class Sums:
    """What is added up over weights, piece by piece; sums in float64.

    Attributes:
        weights: how many.
        curvature: Σ Fᵢ, (models,).
        products: Σ √(Fᵢ Fⱼ), (models, models).
        shares: Σ αᵢ Fᵢ / Σ αⱼ Fⱼ, (models,).
    """

    weights: int
    curvature: Tensor
    products: Tensor
    shares: Tensor

    @classmethod
    def none(cls, models: int) -> Sums:
        """Those of no weights."""
        zeros = torch.zeros(models, dtype=torch.float64)
        return cls(0, zeros, torch.zeros(models, models, dtype=torch.float64), zeros)

    @classmethod
    def of(cls, curvature: Tensor, counts: Tensor) -> Sums:
        """Those of one piece: F, (models, n), and α."""
        roots = curvature.sqrt().cpu().double()
        shares = counted_shares(curvature, counts).cpu().double().sum(dim=1)
        return cls(curvature.shape[1], roots.square().sum(dim=1), roots @ roots.T, shares)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.weights + other.weights,
            self.curvature + other.curvature,
            self.products + other.products,
            self.shares + other.shares,
        )

    def overlap(self, first: int, second: int) -> float:
        """Σ√(F_a F_b) / √(Σ F_a Σ F_b), 1 − the squared Hellinger distance of F/ΣF; 0 where either is 0 throughout."""
        size = math.sqrt(float(self.curvature[first] * self.curvature[second]))
        return min(float(self.products[first, second]) / size, 1.0) if size else 0.0

    def overlaps(self) -> list[float]:
        """Of every pair of models."""
        count = len(self.curvature)
        return [self.overlap(i, j) for i in range(count) for j in range(i)]


@dataclass(frozen=True)
class MergedParameter:
    """One parameter, or one layer: the mean share with which each model counted, and the least overlap of two."""

    name: str
    weights: int
    shares: tuple[float, ...]
    overlap: float

    @classmethod
    def of(cls, name: str, sums: Sums) -> MergedParameter:
        """The row of the sums over its weights."""
        shares = (sums.shares / max(sums.weights, 1)).tolist()
        return cls(name, sums.weights, tuple(shares), min(sums.overlaps(), default=1.0))


@dataclass(frozen=True)
class MergeReport:
    """What a merge did; prints as a table of layers.

    Attributes:
        method: by which the models were merged.
        labels: the models', in the order of the shares.
        parameters: every parameter that one of them has curvature of.
        layers: the same by module.
        overlap: the least of two models over all weights, as by `similarity`; of Kronecker factors that of the diagonals.
        notes: what was merged in another way, and what was not known, in words.
    """

    method: str
    labels: tuple[str, ...]
    parameters: tuple[MergedParameter, ...]
    layers: tuple[MergedParameter, ...]
    overlap: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        short, legend = _short(self.labels)
        heading = ["layer", "weights", *short, "overlap"]
        lines = [heading, *(_cells(row) for row in self.layers)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
        table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join(
            [*table, *legend, f"merged by {self.method}; overlap of the curvatures {self.overlap:.2f}", *self.notes]
        )


def report_of(
    method: str, labels: Sequence[str], sums: Iterable[tuple[str, Sums]], notes: Iterable[str]
) -> MergeReport:
    """The report of sums by parameter name."""
    layers: dict[str, Sums] = {}
    rows = []
    total = Sums.none(len(labels))
    for name, found in sums:
        rows.append(MergedParameter.of(name, found))
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers[layer] + found if layer in layers else found
        total = total + found
    by_layer = tuple(MergedParameter.of(name, found) for name, found in layers.items())
    least = min(total.overlaps(), default=1.0)
    return MergeReport(method, tuple(labels), tuple(rows), by_layer, least, tuple(notes))


def _short(labels: Sequence[str], limit: int = 16) -> tuple[Sequence[str], list[str]]:
    """Headings of columns, and the lines that explain them: numbers in place of labels that are too long."""
    if all(len(label) <= limit for label in labels):
        return labels, []
    numbers = [f"model {number}" for number in range(1, len(labels) + 1)]
    return numbers, [f"{number} is {label}" for number, label in zip(numbers, labels, strict=True)]


def _cells(row: MergedParameter) -> list[str]:
    return [row.name, f"{row.weights:,}", *(f"{share:.1%}" for share in row.shares), f"{row.overlap:.2f}"]
