"""Random numbers and mini-batches for a stack: each seed has its own source per purpose, whose state can be saved."""

import hashlib
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
        self._sources = [np.random.Generator(np.random.SFC64(stream_seed(seed, purpose))) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        """(seeds, *shape) standard normals."""
        out = np.empty((len(self._sources), *shape), np.float32)
        for source, part in zip(self._sources, out, strict=True):
            source.standard_normal(out=part, dtype=np.float32)
        return torch.from_numpy(out).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """(seeds, *shape) uniform numbers in [0, 1)."""
        out = np.empty((len(self._sources), *shape), np.float32)
        for source, part in zip(self._sources, out, strict=True):
            source.random(out=part, dtype=np.float32)
        return torch.from_numpy(out).to(self.device)

    def rows(self, n: int, *shape: int) -> Tensor:
        """(seeds, *shape) whole numbers below n."""
        return torch.from_numpy(np.stack([source.integers(n, size=shape) for source in self._sources])).to(self.device)

    def gamma(self, shape: Tensor) -> Tensor:
        """Draws of Gamma(shape, 1), (seeds, ...), float64; one per entry."""
        pairs = zip(self._sources, shape.double().numpy(), strict=True)
        return torch.from_numpy(np.stack([source.standard_gamma(part) for source, part in pairs]))

    def begin(self, *names: str | int) -> None:
        """Begin the stream of these names, of the only source: at once, where a new source takes longer."""
        digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=24).digest()
        self._set(0, np.append(np.frombuffer(digest, np.uint64), np.uint64(1)), 0, 0)

    def _set(self, index: int, words: np.ndarray[tuple[int], np.dtype[np.uint64]], half: int, spare: int) -> None:
        state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": half, "uinteger": spare}
        self._sources[index].bit_generator.state = state

    def state(self) -> Tensor:
        """The state of every source, one row per seed."""
        states = [source.bit_generator.state for source in self._sources]
        words = [np.asarray(state["state"]["state"], np.uint64).view(np.int64) for state in states]
        halves = [[state["has_uint32"], state["uinteger"]] for state in states]
        return torch.from_numpy(np.concatenate([np.stack(words), halves], axis=1))

    def restore(self, state: Tensor) -> None:
        """Resume where `state` was taken."""
        for index, row in enumerate(state.numpy()):
            self._set(index, row[:4].copy().view(np.uint64), int(row[4]), int(row[5]))


def epochs(n: int, size: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Shuffled passes over n examples without end, (steps, s, size) each; n mod size examples are left out."""
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
    while True:
        orders = torch.stack([torch.randperm(n, generator=source) for source in sources])
        yield orders[:, : n - n % size].view(len(seeds), -1, size).transpose(0, 1)
