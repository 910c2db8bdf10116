"""Which examples each step sees: rows for many steps at a time, every seed with its own choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayesadam.engine.streams import Streams
from bayesadam.structures.noise import stream_seed

# Rows are drawn for this many steps at a time where an epoch has fewer steps than the second number.
_BLOCK = 256
_LONG_EPOCH = 20


def epochs(n: int, size: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Shuffled passes over n examples without end, (steps, s, size) each; n mod size examples are left out."""
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
    steps = n // size
    while True:
        orders = torch.stack([torch.randperm(n, generator=source) for source in sources])
        yield orders[:, : steps * size].view(len(seeds), steps, size).transpose(0, 1)


def blocks(n: int, size: int, seeds: Sequence[int], steps: int) -> Iterator[Tensor]:
    """The rows of so many steps in blocks, (k, s, size): epochs, or with replacement where an epoch is very short."""
    streams = Streams(seeds, "batches")
    drawn = (streams.rows(n, _BLOCK, size).transpose(0, 1) for _ in iter(int, 1))
    for rows in epochs(n, size, seeds) if n // size >= _LONG_EPOCH else drawn:
        yield rows[:steps]
        steps -= len(rows)
        if steps <= 0:
            return
