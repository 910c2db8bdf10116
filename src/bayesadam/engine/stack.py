"""A stack of small networks that learn by Adam, under dropout where the network has it."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bayesadam.engine.gradients import Slope, StackedGradient
from bayesadam.engine.network import Network, dropout_mask, flatten, initial, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.streams import Streams

Batch = Callable[[Tensor], tuple[Tensor, Slope]]
Schedule = Callable[[Tensor], Tensor]


class Stack:
    """Networks of one shape, one per seed.

    Args:
        seeds: one per network; a seed's numbers do not depend on the other seeds.
        batch: from rows (s, b) to inputs (s, b, inputs) and the function that gives ∂loss/∂f.
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
        batch: Batch,
        *,
        weights: Tensor | None = None,
        device: str | torch.device = "cpu",
        average: float = 0.0,
        clip: float = math.inf,
    ) -> None:
        self.network, self.rule, self.batch, self.average, self.clip = network, rule, batch, average, clip
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
        for lr, chosen in zip(rates, rows.to(self.weights.device), strict=True):
            x, slope = self.batch(chosen)
            gradient = self._gradient(x, slope, masks=self._masks(rows.shape[2]))
            if self.clip < math.inf:
                norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
                gradient.mul_((self.clip / norm.clamp_(min=1e-12)).clamp_(max=1))
            if self.penalty:
                gradient.add_(self.weights, alpha=self.penalty)
            self.rule.update(self.weights, gradient, self.state, lr)
            if self.average:
                self.mean.lerp_(self.weights, 1 - min(self.average, self.done / (self.done + 1)))
            self.done += 1

    def _masks(self, b: int) -> list[Tensor] | None:
        """The factors of every hidden layer's units, (s, b, units) each; None without dropout."""
        if not self.network.dropout:
            return None
        sizes = [b * width for width in self.network.hidden]
        parts = torch.split(self.streams.uniform(sum(sizes)), sizes, dim=1)
        return [dropout_mask(part.view(len(part), b, -1), self.network.dropout) for part in parts]

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights, or their moving average, (s, *shape) by name."""
        return unflatten(self.network, self.mean)

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up the state, by name."""
        averaged = {"mean": self.mean} if self.average else {}
        return {"weights": self.weights, **averaged, **self.state}


def train(stack: Stack, blocks: Iterable[Tensor], schedule: Schedule) -> None:
    """Train block after block."""
    for rows in blocks:
        stack.train(rows, schedule)


def constant(lr: float) -> Schedule:
    """α at every step."""
    return lambda done: torch.full_like(done, lr)


def cosine(lr: float, steps: int) -> Schedule:
    """α ½(1 + cos πt/T), from α down to nothing."""
    return lambda done: 0.5 * lr * (1 + torch.cos(math.pi * done / steps))
