"""What is left of a smaller network, as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bayesadam._tables import aligned
from bayesadam._warnings import warn
from bayesadam.readers import Checkpoint
from bayesadam.weights.named import AnyPath, Named


@dataclass(frozen=True)
class PruningReport:
    """What is left of a network: the weights and those kept of each parameter, and of all; prints as a table.

    Of a file, `notes` say which of its weights were read, and what else was pruned, stays as it was or is left out. Of
    a quantised network `bytes` are those of each tensor in its file, also of buffers, which are no weights, and of the
    header, and `moved` says how far a layer's outputs moved.
    """

    parameters: Mapping[str, tuple[int, int]]
    weights: int
    kept: int
    notes: tuple[str, ...] = ()
    bytes: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Named, kept: Named, notes: tuple[str, ...] = ()) -> PruningReport:
        """The report of masks, by the names of the parameters; one without a mask stays whole."""
        counts = {name: int(torch.count_nonzero(mask)) for name, mask in kept.items()}
        rows = {name: (p.numel(), counts.get(name, p.numel())) for name, p in parameters.items()}
        return cls(rows, sum(weights for weights, _ in rows.values()), sum(left for _, left in rows.values()), notes)

    @classmethod
    def of_file(cls, checkpoint: Checkpoint, parameters: Named, kept: Named, out: AnyPath) -> PruningReport:
        """The report of what was written to a file, with what became of all that the checkpoint holds."""
        is_whole = Path(out).suffix != ".safetensors" or checkpoint.format == "safetensors"
        return cls.of(parameters, kept, _notes(checkpoint, len(parameters), is_whole))

    def __str__(self) -> str:
        more = [head for head, column in (("bytes", self.bytes), ("outputs moved", self.moved)) if column]
        lines = [["parameter", "weights", "kept", "removed", *more]]
        sizes = {**self.bytes, "total": sum(self.bytes.values())}
        others: dict[str, tuple[int, ...]] = dict.fromkeys(self.bytes, ())
        for name, counts in {**others, **self.parameters, "total": (self.weights, self.kept)}.items():
            cells = [*(f"{n:,}" for n in counts), f"{1 - counts[1] / max(counts[0], 1):.1%}"] if counts else [""] * 3
            line = [name, *cells]
            moved = f"{self.moved[name]:.2%}" if name in self.moved else ""
            lines.append([*line, *([f"{sizes[name]:,}"] if self.bytes else []), *([moved] if self.moved else [])])
        return "\n".join([*(f"{note[0].upper()}{note[1:]}." for note in self.notes), *aligned(lines)])


def _notes(checkpoint: Checkpoint, states: int, is_whole: bool) -> tuple[str, ...]:
    """Which weights of a file were read, and what became of the others."""

    def listed(paths: Iterable[tuple[str, ...]]) -> str:
        return ", ".join(repr(".".join(path)) if path else "the weights" for path in dict.fromkeys(paths))

    read = f"read {listed(checkpoint.networks)}: {states} of {len(checkpoint.weights)} tensors have a state"
    if not is_whole:
        return (read, "the weights alone are written: a path that ends in .pt keeps the optimiser's state")
    copies = listed(network.path for network, _ in checkpoint.copies.values())
    dense = [f"{listed(checkpoint.left)} left as it was"] if checkpoint.left else []
    return (read, *([f"pruned by the same masks: {copies}"] if copies else []), *dense, *checkpoint.notes)


def warn_of_whole(may: Mapping[str, int], done: Collection[str], what: str) -> None:
    """Warn where less than half of the weights that may change are of the matrices that can: sizes by name."""
    total, some = sum(may.values()), sum(size for name, size in may.items() if name in done)
    if 2 * some < total:
        left = sorted((name for name in may if name not in done), key=lambda name: -may[name])
        warn(
            f"{some:,} of {total:,} weights are {what}, those of linear layers, convolutions and attention; of "
            f"{', '.join(left[:4])} none is"
        )
