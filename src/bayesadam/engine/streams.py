"""Random numbers and mini-batches for a stack: each seed has its own source per purpose, whose state can be saved."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam.weights.draws import stream_seed


class Streams:
    """One source per seed, for one purpose, so that no seed's numbers depend on the other seeds.

    On a CPU numpy draws: it is several times faster than torch there. Streams differ between kinds of device.
    """

    def __init__(self, seeds: Sequence[int], purpose: str, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        own = [stream_seed(seed, purpose) for seed in seeds]
        on_cpu = self.device.type == "cpu"
        self._numpy = [np.random.Generator(np.random.SFC64(seed)) for seed in own] if on_cpu else []
        # A captured CUDA graph must register these.
        self.generators = [] if on_cpu else [torch.Generator(device).manual_seed(seed) for seed in own]

    def __len__(self) -> int:
        return len(self._numpy or self.generators)

    def normal(self, *shape: int) -> Tensor:
        """(seeds, *shape) standard normals."""
        return self._drawn(torch.randn, "standard_normal", shape)

    def uniform(self, *shape: int) -> Tensor:
        """(seeds, *shape) uniform numbers in [0, 1)."""
        return self._drawn(torch.rand, "random", shape)

    def _drawn(self, on_device: Callable[..., Tensor], on_cpu: str, shape: tuple[int, ...]) -> Tensor:
        if self.generators:
            return torch.stack([on_device(shape, generator=g, device=self.device) for g in self.generators])
        out = np.empty((len(self), *shape), np.float32)
        for source, part in zip(self._numpy, out, strict=True):
            getattr(source, on_cpu)(out=part, dtype=np.float32)
        return torch.from_numpy(out)

    def rows(self, n: int, *shape: int) -> Tensor:
        """(seeds, *shape) whole numbers below n."""
        if self.generators:
            return torch.stack([torch.randint(n, shape, generator=g, device=self.device) for g in self.generators])
        return torch.from_numpy(np.stack([source.integers(n, size=shape) for source in self._numpy]))

    def gamma(self, shape: Tensor) -> Tensor:
        """Draws of Gamma(shape, 1), (seeds, ...), float64; one per entry."""
        if self.generators:
            pairs = zip(shape.double(), self.generators, strict=True)
            return torch.stack([torch._standard_gamma(part, generator=g) for part, g in pairs])
        pairs_ = zip(shape.double().numpy(), self._numpy, strict=True)
        return torch.from_numpy(np.stack([source.standard_gamma(part) for part, source in pairs_]))

    def begin(self, *names: str | int) -> None:
        """Begin the stream of these names, of the only source, a CPU's: at once, where a new source takes longer."""
        digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=24).digest()
        words = {"state": np.append(np.frombuffer(digest, np.uint64), np.uint64(1))}
        own = {"bit_generator": "SFC64", "state": words, "has_uint32": 0, "uinteger": 0}
        self._numpy[0].bit_generator.state = own

    def state(self) -> Tensor:
        """The state of every source, one row per seed, on the CPU."""
        if self.generators:
            return torch.stack([source.get_state() for source in self.generators])
        rows = []
        for source in self._numpy:
            state = source.bit_generator.state
            words = np.asarray(state["state"]["state"], np.uint64).view(np.int64)
            rows.append(np.append(words, [state["has_uint32"], state["uinteger"]]))
        return torch.from_numpy(np.stack(rows))

    def restore(self, state: Tensor) -> None:
        """Resume where `state` was taken."""
        if self.generators:
            for generator, row in zip(self.generators, state, strict=True):
                generator.set_state(row.clone())
            return
        for source, words in zip(self._numpy, state.numpy(), strict=True):
            own: dict[str, Any] = {"state": {"state": words[:4].view(np.uint64)}}
            own |= {"has_uint32": int(words[4]), "uinteger": int(words[5])}
            source.bit_generator.state = {"bit_generator": "SFC64", **own}


def epochs(n: int, size: int, seeds: Sequence[int]) -> Iterator[Tensor]:
    """Shuffled passes over n examples without end, (steps, s, size) each; n mod size examples are left out."""
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
    while True:
        orders = torch.stack([torch.randperm(n, generator=source) for source in sources])
        yield orders[:, : n - n % size].view(len(seeds), -1, size).transpose(0, 1)
