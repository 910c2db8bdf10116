"""What a stack of runs has seen."""

from __future__ import annotations

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

    def rows(self, places: Tensor) -> Tensor:
        """The contexts (networks, b, features) at places (networks, b), where every run has the same number of networks."""
        networks, b = places.shape
        members = networks // self.runs
        first = self._first_row.repeat_interleave(members, dim=0) if members > 1 else self._first_row
        flat = self.contexts.view(-1, self.contexts.shape[2])
        return flat.index_select(0, (places + first).view(-1)).view(networks, b, -1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the rewards so far, (runs, 1), float64; the latter 1 where all are alike."""
        mean, square = (self.sums / max(self.count, 1)).unbind(dim=1)
        variance = square - mean.square()
        std = torch.where(variance > 1e-12 * square.clamp(min=1e-12), variance.clamp(min=0).sqrt(), 1.0)
        return mean.unsqueeze(1), std.unsqueeze(1)
