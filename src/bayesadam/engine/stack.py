"""A stack of small networks that learn by Adam, under dropout where the network has it."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bayesadam.engine.gradients import Slope, StackedGradient
from bayesadam.engine.network import Network, flatten, initial, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.streams import Streams

Batches = Callable[[Tensor], Iterable[tuple[Tensor, Slope]]]
Schedule = Callable[[Tensor], Tensor]
# Batches are made, and units drawn that are dropped, for so many steps at once.
_BLOCK = 40


class Stack:
    """Networks of one shape, one per seed.

    Args:
        seeds: one per network; a seed's numbers do not depend on the other seeds.
        batches: from the rows of some steps (k, s, b) to each one's inputs (s, b, inputs) and the function that gives
            ∂loss/∂f.
        weights: flat weights to start from, (s, weights); None draws them from the seeds.
        average: β of a moving average of the weights, `mean`, which is the weights themselves for 0.
        clip: the norm at which each network's gradient is clipped.

    Attributes:
        penalty: λ of a penalty (λ/2)|θ|².
        done: the number of steps so far.
    """

    def __init__(
        self,
        network: Network,
        rule: Adam,
        seeds: Sequence[int],
        batches: Batches,
        *,
        weights: Tensor | None = None,
        device: str | torch.device = "cpu",
        average: float = 0.0,
        clip: float = math.inf,
    ) -> None:
        self.network, self.rule, self.batches, self.average, self.clip = network, rule, batches, average, clip
        self.weights = flatten(initial(network, seeds, device=device)) if weights is None else weights
        self.mean = self.weights.clone() if average else self.weights
        self.state = rule.start(self.weights)
        self.penalty, self.done = 0.0, 0
        self.streams = Streams(seeds, "training", device)
        self._gradient = StackedGradient(network, self.weights)

    @torch.no_grad()
    def train(self, rows: Tensor, schedule: Schedule) -> None:
        """A step for each of the rows, (k, s, b); the schedule maps steps done before, float64 (k,), to rates."""
        rates = schedule(torch.arange(self.done, self.done + len(rows), dtype=torch.float64)).tolist()
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK].to(self.weights.device)
            masks = self._masks(len(block), block.shape[2])
            for lr, (x, slope), mask in zip(rates[first : first + _BLOCK], self.batches(block), masks, strict=True):
                self._step(self._gradient(x, slope, masks=mask), lr)

    def _step(self, gradient: Tensor, lr: float) -> None:
        if self.clip < math.inf:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            if norm.max().item() > self.clip:
                gradient.mul_((self.clip / norm).clamp_(max=1))
        if self.penalty:
            gradient.add_(self.weights, alpha=self.penalty)
        self.rule.update(self.weights, gradient, self.state, lr)
        if self.average:
            self.mean.lerp_(self.weights, 1 - min(self.average, self.done / (self.done + 1)))
        self.done += 1

    def _masks(self, steps: int, b: int) -> Sequence[Sequence[Tensor] | None]:
        """The factors of every hidden layer's units, (s, b, units) each, for every step; None without dropout."""
        if not self.network.dropout:
            return [None] * steps
        sizes = [b * width for width in self.network.hidden]
        parts = torch.split(self.streams.kept(self.network.dropout, steps, sum(sizes)), sizes, dim=2)
        return list(zip(*(part.view(len(part), steps, b, -1).unbind(1) for part in parts), strict=True))

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights, or their moving average, (s, *shape) by name."""
        return unflatten(self.network, self.mean)

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up the state, by name."""
        averaged = {"mean": self.mean} if self.average else {}
        return {"weights": self.weights, **averaged, **self.state}


def constant(lr: float) -> Schedule:
    """α at every step."""
    return lambda done: torch.full_like(done, lr)


def cosine(lr: float, steps: int) -> Schedule:
    """α ½(1 + cos πt/T), from α down to nothing."""
    return lambda done: 0.5 * lr * (1 + torch.cos(math.pi * done / steps))
