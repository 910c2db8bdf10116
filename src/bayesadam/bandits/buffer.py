"""What a stack of runs has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bayesadam.engine.streams import Streams


class Buffer:
    """Contexts, chosen arms and rewards of a stack of runs, in memory that is taken once.

    The contexts are the caller's own (runs, room, features): observation i is row i, so nothing is copied. Only the first
    `count` rows have been seen.

    With a half-life h, what has been followed by i other observations weighs 2^(−i/h), whichever their arms: rewards may
    drift. Without one everything weighs 1.

    Attributes:
        contexts: (runs, room, features), float32.
        arms: (runs, room), int64.
        rewards: (runs, room), float32.
        sums: Σ w r and Σ w r² of every run, (runs, 2), float64.
        count: how many observations every run has.
        half_life: h, infinite where nothing is forgotten.
    """

    def __init__(self, contexts: Tensor, half_life: float | None = None) -> None:
        runs, room, _ = contexts.shape
        self.half_life = math.inf if half_life is None else half_life
        self.contexts = contexts
        self.arms = torch.zeros(runs, room, dtype=torch.int64, device=contexts.device)
        self.rewards = torch.zeros(runs, room, device=contexts.device)
        self.sums = torch.zeros(runs, 2, dtype=torch.float64, device=contexts.device)
        self.count = 0
        self._first_row = torch.arange(runs, device=contexts.device)[:, None] * room

    @property
    def runs(self) -> int:
        """How many runs are stacked."""
        return self.contexts.shape[0]

    def add(self, arms: Tensor, rewards: Tensor) -> slice:
        """The next observations of every run, (runs, k) each; returns their places."""
        places = slice(self.count, self.count + arms.shape[1])
        self.arms[:, places] = arms
        self.rewards[:, places] = rewards
        self.count = places.stop
        wide, weights = rewards.double(), self.weights(places)
        self.sums *= self.faded(arms.shape[1])
        self.sums += torch.stack([(weights * wide).sum(dim=1), (weights * wide.square()).sum(dim=1)], dim=1)
        return places

    def faded(self, count: int) -> float:
        """2^(−k/h), what a weight is multiplied by when k more observations come."""
        return float(2 ** (-count / self.half_life))

    def weights(self, places: slice | Tensor) -> Tensor:
        """2^(−age/h) of observations, with the newest one's age 0, float64."""
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop, device=self.contexts.device)
        return torch.exp2((places - (self.count - 1)).double() / self.half_life)

    @property
    def effective_count(self) -> float:
        """Σ_{i<n} 2^(−i/h) = (1 − 2^(−n/h))/(1 − 2^(−1/h)), as many observations as all weights together make."""
        if math.isinf(self.half_life):
            return self.count
        return math.expm1(-math.log(2) * self.count / self.half_life) / math.expm1(-math.log(2) / self.half_life)

    def drawn(self, streams: Streams, *shape: int) -> Tensor:
        """Places of examples for mini-batches, (seeds, *shape), with replacement and with probabilities ∝ 2^(−age/h).

        The age is drawn by inverting its distribution function P(age < i) = (1 − 2^(−i/h))/(1 − 2^(−n/h)).
        """
        if math.isinf(self.half_life):
            return streams.rows(self.count, *shape)
        rate = math.log(2) / self.half_life
        ages = torch.log1p(streams.uniform(*shape).double() * math.expm1(-rate * self.count)) / -rate
        return self.count - 1 - ages.long().clamp_(max=self.count - 1)

    def seen(self, places: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts (runs, k, features), arms and rewards (runs, k) at the same places of every run."""
        return self.contexts[:, places], self.arms[:, places], self.rewards[:, places]

    def at(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of contexts (n, b, features), arms (n, b) and rewards (n, b) at places (n, b), n a multiple of the runs."""
        n, b = places.shape
        first = self._first_row.repeat_interleave(n // self.runs, dim=0) if n > self.runs else self._first_row
        index = (places + first).flatten()
        contexts = self.contexts.view(-1, self.contexts.shape[2]).index_select(0, index)
        arms, rewards = (of.view(-1).index_select(0, index).view(n, b) for of in (self.arms, self.rewards))
        return contexts.view(n, b, -1), arms, rewards

    def moments(self) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the rewards, (runs, 1), float64; the latter 1 where all are alike."""
        mean, square = (self.sums / max(self.effective_count, 1)).unbind(dim=1)
        variance = square - mean.square()
        std = torch.where(variance > 1e-12 * square.clamp(min=1e-12), variance.clamp(min=0).sqrt(), 1.0)
        return mean.unsqueeze(1), std.unsqueeze(1)

    def state(self) -> dict[str, Tensor]:
        """A copy of all but the contexts, on the CPU."""
        seen = {"arms": self.arms[:, : self.count], "rewards": self.rewards[:, : self.count], "sums": self.sums}
        return {name: tensor.cpu().clone() for name, tensor in seen.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken, with the same contexts."""
        self.count = state["arms"].shape[1]
        self.arms[:, : self.count].copy_(state["arms"])
        self.rewards[:, : self.count].copy_(state["rewards"])
        self.sums.copy_(state["sums"])

    def widened(self, room: int) -> Buffer:
        """The same observations in a buffer with more room."""
        contexts = self.contexts.new_zeros(self.runs, room, self.contexts.shape[2])
        contexts[:, : self.count] = self.contexts[:, : self.count]
        wide = Buffer(contexts, self.half_life)
        wide.restore(self.state())
        return wide
