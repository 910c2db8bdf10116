"""What a stack of runs has seen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Buffer:
    """Contexts, chosen arms and rewards of a stack of runs, in memory that is taken once.

    The contexts are the caller's own (runs, room, features): observation i is row i, so nothing is copied. Only the first
    `count` rows have been seen.

    Attributes:
        contexts: (runs, room, features), float32.
        arms: (runs, room), int64.
        rewards: (runs, room), float32.
        sums: Σ r and Σ r² of every run, (runs, 2), float64.
        count: how many observations every run has.
    """

    def __init__(self, contexts: Tensor) -> None:
        runs, room, _ = contexts.shape
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
        wide = rewards.double()
        self.sums += torch.stack([wide.sum(dim=1), wide.square().sum(dim=1)], dim=1)
        self.count = places.stop
        return places

    def at(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of contexts (n, b, features), arms (n, b) and rewards (n, b) at places (n, b), n a multiple of the runs."""
        n, b = places.shape
        first = self._first_row.repeat_interleave(n // self.runs, dim=0) if n > self.runs else self._first_row
        index = (places + first).flatten()
        contexts = self.contexts.view(-1, self.contexts.shape[2]).index_select(0, index)
        arms, rewards = (of.view(-1).index_select(0, index).view(n, b) for of in (self.arms, self.rewards))
        return contexts.view(n, b, -1), arms, rewards

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the rewards so far, (runs, 1), float64; the latter 1 where all are alike."""
        mean, square = (self.sums / max(self.count, 1)).unbind(dim=1)
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
        wide = Buffer(contexts)
        wide.restore(self.state())
        return wide
