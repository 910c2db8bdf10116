"""Random numbers and mini-batches for a stack: each seed has its own source per purpose, whose state can be saved."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam.gaussian.noise import stream_seed

_RESOLUTION = 1 << 16
# Rows are drawn for this many steps at a time where an epoch has fewer steps than the second number.
_BLOCK = 256
_LONG_EPOCH = 20


class Streams:
    """One source per seed, for one purpose, so that no seed's numbers depend on the other seeds.

    On a CPU numpy draws: it is several times faster than torch there. Streams differ between kinds of device.
    """

    def __init__(self, seeds: Sequence[int], purpose: str, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        own = [stream_seed(seed, purpose) for seed in seeds]
        on_cpu = self.device.type == "cpu"
        self._numpy = [np.random.Generator(np.random.SFC64(seed)) for seed in own] if on_cpu else []
        self._torch = [] if self._numpy else [torch.Generator(device).manual_seed(seed) for seed in own]

    def __len__(self) -> int:
        return len(self._numpy or self._torch)

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """torch's, which a captured CUDA graph must register; none on a CPU."""
        return self._torch

    def normal(self, *shape: int) -> Tensor:
        """(seeds, *shape) standard normals."""
        return self._drawn(torch.randn, "standard_normal", shape)

    def uniform(self, *shape: int) -> Tensor:
        """(seeds, *shape) uniform numbers in [0, 1)."""
        return self._drawn(torch.rand, "random", shape)

    def _drawn(self, on_device: Callable[..., Tensor], on_cpu: str, shape: tuple[int, ...]) -> Tensor:
        if self._torch:
            return torch.stack([on_device(shape, generator=g, device=self.device) for g in self._torch])
        out = np.empty((len(self), *shape), np.float32)
        for source, part in zip(self._numpy, out, strict=True):
            getattr(source, on_cpu)(out=part, dtype=np.float32)
        return torch.from_numpy(out)

    def rows(self, n: int, *shape: int) -> Tensor:
        """(seeds, *shape) whole numbers below n."""
        if self._torch:
            return torch.stack([torch.randint(n, shape, generator=g, device=self.device) for g in self._torch])
        return torch.from_numpy(np.stack([source.integers(n, size=shape) for source in self._numpy]))

    def masks(self, rate: float, *shape: int) -> Tensor:
        """(seeds, *shape) zeros with probability `rate`, to within 2⁻¹⁷, otherwise 1/(1 − rate)."""
        if self._torch:
            return (self.uniform(*shape) >= rate).float().div_(1 - rate)
        size = int(np.prod(shape))
        out = np.empty((len(self), size), np.float32)
        scale = np.float32(1 / (1 - rate))
        for source, part in zip(self._numpy, out, strict=True):
            # Raw bits, four units to a word: the masks are most of the random numbers there are.
            bits = source.bit_generator.random_raw(-(-size // 4)).view(np.uint16)[:size]
            np.multiply(bits >= round(rate * _RESOLUTION), scale, out=part)
        return torch.from_numpy(out).view(len(self), *shape)

    def gamma(self, shape: Tensor) -> Tensor:
        """Draws of Gamma(shape, 1), (seeds, ...), float64; one per entry."""
        if self._torch:
            pairs = zip(shape.double(), self._torch, strict=True)
            return torch.stack([torch._standard_gamma(part, generator=g) for part, g in pairs])
        pairs_ = zip(shape.double().numpy(), self._numpy, strict=True)
        return torch.from_numpy(np.stack([source.standard_gamma(part) for part, source in pairs_]))

    def state(self) -> Tensor:
        """Where every source stands, one row per seed, on the CPU."""
        if self._torch:
            return torch.stack([source.get_state() for source in self._torch])
        return torch.from_numpy(np.stack([_words(source.bit_generator) for source in self._numpy]))

    def restore(self, state: Tensor) -> None:
        """Resume where `state` was taken."""
        if self._torch:
            for source, row in zip(self._torch, state, strict=True):
                source.set_state(row.clone())
            return
        for own, words in zip(self._numpy, state.numpy(), strict=True):
            own.bit_generator.state = {
                "bit_generator": "SFC64",
                "state": {"state": words[:4].view(np.uint64)},
                "has_uint32": int(words[4]),
                "uinteger": int(words[5]),
            }


def _words(source: np.random.BitGenerator) -> npt.NDArray[np.int64]:
    state = source.state
    words = np.asarray(state["state"]["state"], np.uint64).view(np.int64)
    return np.concatenate([words, np.array([state["has_uint32"], state["uinteger"]], np.int64)])


def epochs(n: int, size: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Shuffled passes over n examples without end, (steps, s, size) each; n mod size examples are left out."""
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
    steps = n // size
    while True:
        orders = torch.stack([torch.randperm(n, generator=source) for source in sources])
        yield orders[:, : steps * size].view(len(seeds), steps, size).transpose(0, 1)


@dataclass(frozen=True)
class Blocks:
    """The rows of so many steps in blocks, (k, s, size): epochs, or with replacement where an epoch is very short."""

    n: int
    size: int
    seeds: Sequence[int]
    steps: int

    @property
    def _are_epochs(self) -> bool:
        return self.n // self.size >= _LONG_EPOCH

    def __len__(self) -> int:
        return -(-self.steps // (self.n // self.size if self._are_epochs else _BLOCK))

    def __iter__(self) -> Iterator[Tensor]:
        streams, left = Streams(self.seeds, "batches"), self.steps
        drawn = (streams.rows(self.n, _BLOCK, self.size).transpose(0, 1) for _ in iter(int, 1))
        for rows in epochs(self.n, self.size, self.seeds) if self._are_epochs else drawn:
            yield rows[:left]
            left -= len(rows)
            if left <= 0:
                return
