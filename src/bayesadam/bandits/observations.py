"""What an agent has observed: contexts, chosen arms and rewards, and how much each weighs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam.engine.streams import Streams

Contexts = npt.NDArray[np.float32]
Rewards = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Observations that there is room for at first and at most.
FIRST_ROOM, MOST_ROOM = 1024, 1 << 16


class Observations:
    """Contexts (room, features), chosen arms and rewards (room,), of which the first `count` rows are seen.

    They are the newest of `total` observations. With a half-life h, an observation that i others have followed weighs
    w = 2^(−i/h), whatever their arms; otherwise 1. `sums` are Σ w r and Σ w r² of all.
    """

    def __init__(self, n_features: int, half_life: float | None = None) -> None:
        self.half_life = math.inf if half_life is None else half_life
        self.contexts = np.zeros((FIRST_ROOM, n_features), np.float32)
        self.arms, self.rewards = np.zeros(FIRST_ROOM, np.int64), np.zeros(FIRST_ROOM, np.float32)
        self.sums, self.count, self.total = (0.0, 0.0), 0, 0
        # What a weight is multiplied by when one more observation comes.
        self.fade = 2 ** (-1 / self.half_life)

    def add(self, contexts: npt.ArrayLike, arms: npt.ArrayLike, rewards: npt.ArrayLike) -> slice:
        """The next observations, (k, features), (k,), (k,); returns their rows."""
        paid = np.asarray(rewards, np.float32)
        rows = slice(self.count, self.count + len(paid))
        if rows.stop > len(self.arms):
            more = max(len(self.arms), rows.stop - len(self.arms))
            self.contexts = np.pad(self.contexts, ((0, more), (0, 0)))
            self.arms, self.rewards = np.pad(self.arms, (0, more)), np.pad(self.rewards, (0, more))
        self.contexts[rows], self.arms[rows], self.rewards[rows] = contexts, arms, paid
        self.count, self.total = rows.stop, self.total + len(paid)
        first, second = self.sums
        for reward in paid.tolist():
            first, second = first * self.fade + reward, second * self.fade + reward * reward
        self.sums = first, second
        return rows

    def weights(self, rows: slice | Indices) -> Floats:
        """2^(−age/h) of observations, with the newest one's age 0."""
        places = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return np.exp2((places - (self.count - 1)) / self.half_life)

    @property
    def effective_count(self) -> float:
        """The sum of all weights, Σ_{i<n} 2^(−i/h) = (1 − 2^(−n/h))/(1 − 2^(−1/h))."""
        if math.isinf(self.half_life):
            return self.total
        return math.expm1(-math.log(2) * self.total / self.half_life) / math.expm1(-math.log(2) / self.half_life)

    def moments(self) -> tuple[float, float]:
        """Weighted mean and standard deviation of the rewards; the latter 1 where all are equal."""
        mean, square = (part / max(self.effective_count, 1) for part in self.sums)
        variance = square - mean**2
        return mean, math.sqrt(variance) if variance > 1e-12 * max(square, 1e-12) else 1.0

    def drawn(self, streams: Streams, *shape: int) -> Indices:
        """Rows for mini-batches, with replacement and with probabilities ∝ 2^(−age/h).

        The age is drawn by inverting its distribution function P(age < i) = (1 − 2^(−i/h))/(1 − 2^(−n/h)).
        """
        if math.isinf(self.half_life):
            rows: Indices = streams.rows(self.count, *shape).numpy()[0]
            return rows
        rate, uniform = math.log(2) / self.half_life, streams.uniform(*shape).numpy()[0].astype(np.float64)
        ages = (np.log1p(uniform * math.expm1(-rate * self.count)) / -rate).astype(np.int64)
        newest: Indices = self.count - 1 - np.minimum(ages, self.count - 1)
        return newest

    def thin(self) -> None:
        """Hold the newest half of `MOST_ROOM` only."""
        kept = slice(max(0, self.count - MOST_ROOM // 2), self.count)
        self.count = kept.stop - kept.start
        for array in (self.contexts, self.arms, self.rewards):
            array[: self.count] = array[kept].copy()

    def snapshot(self) -> Observations:
        """The same as they are now, in the same memory; what is added later does not change it."""
        return copy.copy(self)

    def state(self) -> dict[str, Tensor]:
        """As tensors, by name."""
        arrays: dict[str, Contexts | Indices] = {"contexts": self.contexts, "arms": self.arms, "rewards": self.rewards}
        tensors = {name: torch.tensor(array[: self.count]) for name, array in arrays.items()}
        return {**tensors, "sums": torch.tensor(self.sums, dtype=torch.float64), "thinned": torch.tensor([self.total])}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken; releases up to 0.3 have one more dimension, and may hold a sample."""
        contexts, arms, rewards = (state[name].numpy() for name in ("contexts", "arms", "rewards"))
        self.add(contexts.reshape(-1, self.contexts.shape[1]), arms.ravel(), rewards.ravel())
        first, second = state["sums"].flatten().tolist()
        self.sums = first, second
        self.total = int(state["thinned"][0]) if "thinned" in state else self.count
