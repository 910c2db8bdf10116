"""What an agent has observed: contexts, chosen arms and rewards, all of them or a sample, and how much each weighs."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam.engine.streams import Streams

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Observations that there is room for at first and at most; of more, a sample is kept.
FIRST_ROOM, MOST_ROOM = 1024, 1 << 16
# Odd numbers that mix the bits of an observation's number.
_HASH = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Observations:
    """Contexts (room, features), chosen arms and rewards (room,), of which the first `count` rows are seen.

    With a half-life h, an observation that i others have followed weighs w = 2^(−i/h), whatever their arms; otherwise
    1. `sums` are Σ w r and Σ w r², float64. Once thinned, these are some of `total` observations, in their order, and
    `numbers`, (room,), says which.
    """

    def __init__(self, n_features: int, half_life: float | None = None) -> None:
        self.half_life = math.inf if half_life is None else half_life
        self.contexts = np.zeros((FIRST_ROOM, n_features), np.float32)
        self.arms, self.rewards = np.zeros(FIRST_ROOM, np.int64), np.zeros(FIRST_ROOM, np.float32)
        self.numbers, self.sums = np.arange(FIRST_ROOM), np.zeros(2)
        self.count = self.total = 0
        # One of 2^level observations is kept when it is thinned; the last time so many rows were.
        self.level = self.settled = 0

    def add(self, contexts: npt.ArrayLike, arms: npt.ArrayLike, rewards: npt.ArrayLike) -> slice:
        """The next observations, (k, features), (k,), (k,); returns their rows."""
        paid = np.asarray(rewards, np.float32)
        k = len(paid)
        rows = slice(self.count, self.count + k)
        if rows.stop > len(self.arms):
            self._widen(max(2 * len(self.arms), rows.stop))
        self.contexts[rows], self.arms[rows], self.rewards[rows] = contexts, arms, paid
        self.count, self.total = rows.stop, self.total + k
        weighed = paid.astype(np.float64) * self.weights(rows)
        self.sums *= self.faded(k)
        self.sums += weighed.sum(), weighed @ paid
        return rows

    def _widen(self, room: int) -> None:
        more = room - len(self.arms)
        self.contexts = np.pad(self.contexts, ((0, more), (0, 0)))
        self.arms, self.rewards = np.pad(self.arms, (0, more)), np.pad(self.rewards, (0, more))
        self._number(self.numbers[: self.count])

    def _number(self, numbers: Indices) -> None:
        """The numbers of the rows seen, and of those to come."""
        self.numbers = np.append(numbers, np.arange(self.total, self.total + len(self.arms) - len(numbers)))

    def faded(self, count: int) -> float:
        """2^(−k/h), by which a weight is multiplied when k more observations come."""
        return float(2 ** (-count / self.half_life))

    def weights(self, rows: slice | Indices) -> Floats:
        """2^(−age/h) of observations, with the newest one's age 0."""
        return np.exp2((self.numbers[rows] - (self.total - 1)) / self.half_life)

    @property
    def effective_count(self) -> float:
        """The sum of all weights, Σ_{i<n} 2^(−i/h) = (1 − 2^(−n/h))/(1 − 2^(−1/h))."""
        if math.isinf(self.half_life):
            return self.total
        return math.expm1(-math.log(2) * self.total / self.half_life) / math.expm1(-math.log(2) / self.half_life)

    def moments(self) -> tuple[float, float]:
        """Weighted mean and standard deviation of the rewards; the latter 1 where all are equal."""
        mean, square = (self.sums / max(self.effective_count, 1)).tolist()
        variance = square - mean**2
        return mean, math.sqrt(variance) if variance > 1e-12 * max(square, 1e-12) else 1.0

    def drawn(self, streams: Streams, *shape: int) -> Indices:
        """Rows for mini-batches, with replacement and with probabilities ∝ 2^(−age/h).

        The age is drawn by inverting its distribution function P(age < i) = (1 − 2^(−i/h))/(1 − 2^(−n/h)).
        """
        if math.isinf(self.half_life):
            return streams.rows(self.count, *shape).numpy()[0]
        rate, uniform = math.log(2) / self.half_life, streams.uniform(*shape).numpy()[0].astype(np.float64)
        ages = (np.log1p(uniform * math.expm1(-rate * self.count)) / -rate).astype(np.int64)
        return self.count - 1 - np.minimum(ages, self.count - 1)

    def kept(self) -> Indices:
        """The rows, half of `MOST_ROOM` at most, that `thin` keeps: with a half-life the newest, otherwise a sample.

        An observation is in it if a hash of its number, uniform in [0, 1), is below 2^−level, whatever comes later.
        """
        most = MOST_ROOM // 2
        if not math.isinf(self.half_life):
            return np.arange(max(0, self.count - most), self.count)
        mixed = self.numbers[: self.count].astype(np.uint64)
        for factor in _HASH:
            mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
        uniform = (mixed >> np.uint64(11)) * 2.0**-53
        while (rows := np.flatnonzero(uniform < 2.0**-self.level)).size > most:
            self.level += 1
        return rows

    def thin(self, rows: Indices) -> None:
        """Hold these rows only."""
        k = self.count = self.settled = len(rows)
        self.contexts[:k], self.arms[:k], self.rewards[:k] = self.contexts[rows], self.arms[rows], self.rewards[rows]
        self._number(self.numbers[rows])

    def until(self, count: int) -> Observations:
        """The first rows, in the same memory; what is added to this one later does not change it."""
        first = copy.copy(self)
        first.count, first.total, first.sums = count, self.total - (self.count - count), self.sums.copy()
        return first

    def state(self) -> dict[str, Tensor]:
        """As tensors, by name."""
        seen = slice(self.count)
        arrays = {"contexts": self.contexts[seen], "arms": self.arms[seen], "rewards": self.rewards[seen]}
        if self.total > self.count:
            arrays |= {"numbers": self.numbers[seen], "thinned": np.array([self.total, self.level, self.settled])}
        return {name: torch.tensor(array) for name, array in (arrays | {"sums": self.sums}).items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken; releases up to 0.3 have one more dimension."""
        n_features = self.contexts.shape[1]
        rewards = state["rewards"].flatten().numpy()
        self.add(state["contexts"].reshape(-1, n_features).numpy(), state["arms"].flatten().numpy(), rewards)
        self.sums[:] = state["sums"].flatten().numpy()
        if "thinned" in state:
            self.total, self.level, self.settled = state["thinned"].tolist()
            self._number(state["numbers"].numpy())
