"""Random numbers and mini-batches for a stack: each seed has its own source per purpose, whose state can be saved."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from bayesadam.weights.draws import stream_seed


class Streams:
    """One source per seed, for one purpose, so that no seed's numbers depend on the other seeds.

    numpy draws them, the same for every device: it is several times faster than torch on a CPU.
    """

    def __init__(self, seeds: Sequence[int], purpose: str, device: str | torch.device = "cpu") -> None:
        self.device = device
        self.sources = [np.random.Generator(np.random.SFC64(stream_seed(seed, purpose))) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        """(seeds, *shape) standard normals."""
        out = np.empty((len(self.sources), *shape), np.float32)
        for source, part in zip(self.sources, out, strict=True):
            source.standard_normal(out=part, dtype=np.float32)
        return torch.from_numpy(out).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """(seeds, *shape) uniform numbers in [0, 1)."""
        out = np.empty((len(self.sources), *shape), np.float32)
        for source, part in zip(self.sources, out, strict=True):
            source.random(out=part, dtype=np.float32)
        return torch.from_numpy(out).to(self.device)

    def kept(self, rate: float, *shape: int) -> Tensor:
        """(seeds, *shape) factors: 0 with the probability r, otherwise 1/(1 − r), as `uniform` numbers below r say."""
        out, count = np.empty((len(self.sources), *shape), np.float32), math.prod(shape)
        low, factor = math.ceil(float(np.float32(rate)) * 2**24) << 8, np.float32(1) / np.float32(1 - rate)
        for source, part in zip(self.sources, out, strict=True):
            words = source.integers(2**64 - 1, size=-(-count // 2), dtype=np.uint64, endpoint=True).view(np.uint32)
            np.multiply(words[:count] >= low, factor, out=part.reshape(-1))
        return torch.from_numpy(out).to(self.device)

    def rows(self, n: int, *shape: int) -> Tensor:
        """(seeds, *shape) whole numbers below n."""
        return torch.from_numpy(np.stack([source.integers(n, size=shape) for source in self.sources])).to(self.device)

    def state(self) -> Tensor:
        """The state of every source, one row per seed."""
        states = [source.bit_generator.state for source in self.sources]
        words = [np.asarray(state["state"]["state"], np.uint64).view(np.int64) for state in states]
        halves = [[state["has_uint32"], state["uinteger"]] for state in states]
        return torch.from_numpy(np.concatenate([np.stack(words), halves], axis=1))

    def restore(self, state: Tensor) -> None:
        """Resume where `state` was taken."""
        for source, row in zip(self.sources, state.numpy(), strict=True):
            words = row[:4].copy().view(np.uint64)
            source.bit_generator.state = {
                "bit_generator": "SFC64",
                "state": {"state": words},
                "has_uint32": int(row[4]),
                "uinteger": int(row[5]),
            }


def epochs(n: int, size: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Shuffled passes over n examples without end, (steps, s, size) each; n mod size examples are left out."""
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
    while True:
        orders = torch.stack([torch.randperm(n, generator=source) for source in sources])
        yield orders[:, : n - n % size].view(len(seeds), -1, size).transpose(0, 1)
