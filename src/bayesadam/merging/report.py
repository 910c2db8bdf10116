"""What a merge did: how much each model counted, and how far their curvatures lie on the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import combinations
from typing import Any

from torch import Tensor

from bayesadam._tables import aligned
from bayesadam.merging.methods import counted_shares


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over weights, in float64: Σ √(Fᵢ Fⱼ), whose diagonal is Σ Fᵢ, and Σ αᵢ Fᵢ / Σ αⱼ Fⱼ."""

    weights: int
    products: Tensor
    shares: Tensor

    @classmethod
    def of(cls, curvature: Tensor, counts: Tensor) -> Sums:
        """Those of F, (models, n), and α."""
        roots = curvature.sqrt().cpu().double()
        return cls(curvature.shape[1], roots @ roots.T, counted_shares(curvature, counts).cpu().double().sum(dim=1))

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Over all parts, of which there is one at least."""
        # One by one: a list of small tensors between large ones would keep the memory of these from being freed.
        return reduce(lambda a, b: cls(a.weights + b.weights, a.products + b.products, a.shares + b.shares), parts)

    @property
    def curvature(self) -> Tensor:
        """Σ Fᵢ, (models,)."""
        return self.products.diagonal()

    def overlap(self, first: int, second: int) -> float:
        """Σ√(F_a F_b) / √(Σ F_a Σ F_b), 1 − the squared Hellinger distance of F/ΣF; 0 where either is 0 throughout."""
        size = math.sqrt(float(self.curvature[first] * self.curvature[second]))
        return min(float(self.products[first, second]) / size, 1.0) if size else 0.0

    def least_overlap(self) -> float:
        """The least of two models."""
        return min(self.overlap(i, j) for i, j in combinations(range(len(self.shares)), 2))


@dataclass(frozen=True)
class MergedLayer:
    """One module: the mean share with which each model counted, and the least overlap of two."""

    name: str
    weights: int
    shares: tuple[float, ...]
    overlap: float


@dataclass(frozen=True)
class MergeReport:
    """What a merge did; prints as a table of layers.

    Attributes:
        labels: the models', in the order of the shares.
        layers: every module of which one of them has curvature.
        overlap: the least of two models over all weights, as by `similarity`.
        notes: what was merged in another way, and what was not known, in words.
    """

    method: str
    labels: tuple[str, ...]
    layers: tuple[MergedLayer, ...]
    overlap: float
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, method: str, labels: Sequence[str], sums: Mapping[str, Sums], notes: Iterable[str]) -> MergeReport:
        """The report of sums by parameter name."""
        parts: dict[str, list[Sums]] = {}
        for name, found in sums.items():
            parts.setdefault(name.rpartition(".")[0] or name, []).append(found)
        totals = {name: Sums.total(found) for name, found in parts.items()}
        layers = [
            MergedLayer(name, each.weights, tuple((each.shares / each.weights).tolist()), each.least_overlap())
            for name, each in totals.items()
        ]
        overlap = Sums.total(totals.values()).least_overlap()
        return cls(method, tuple(labels), tuple(layers), overlap, tuple(notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        numbers = [f"model {number}" for number in range(1, len(self.labels) + 1)]
        legend = [f"{number} is {label}" for number, label in zip(numbers, self.labels, strict=True) if number != label]
        lines = [["layer", "weights", *numbers, "overlap"]]
        for row in self.layers:
            lines.append([row.name, f"{row.weights:,}", *(f"{s:.1%}" for s in row.shares), f"{row.overlap:.2f}"])
        last = f"merged by {self.method}; overlap of the curvatures {self.overlap:.2f}"
        return "\n".join([*aligned(lines), *legend, last, *self.notes])
