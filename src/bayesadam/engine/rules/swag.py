"""SWAG (Maddox et al. 2019): the moments of SGD's iterates around an optimum."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules.rule import Functions, Gaussian, Number, Rule, State, Step
from bayesadam.engine.streams import Streams

_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True)
class SWAG(Rule):
    """θ ← θ − α (g + λθ); every few steps the iterate enters a running mean, variance and the last K deviations.

    Attributes:
        weight_decay: λ.
        snapshots: how many iterates count.
        every: steps between two of them.
        rank: K.
    """

    starts_trained = True
    lr = 1e-2
    betas = (0.0, 0.0)
    weight_decay: float = 0.0
    snapshots: int = 100
    every: int = 10
    rank: int = 20

    def steps(self, given: int) -> int:
        """As many as the iterates need."""
        return self.snapshots * self.every

    def start(self, weights: Tensor, n_data: Number) -> State:
        """Zero moments; the deviations have one slot more, into which iterates that do not count are written."""
        counts = {name: torch.zeros((), dtype=torch.int64, device=weights.device) for name in ("steps", "count")}
        moments = {name: torch.zeros_like(weights) for name in ("mean", "squares")}
        return {**moments, "deviations": weights.new_zeros(len(weights), self.rank + 1, weights.shape[1]), **counts}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """SGD, then Welford's sums: w² less w̄² would leave the difference of two large numbers."""
        weights.sub_(gradient.add_(weights, alpha=self.weight_decay).mul_(step.lr))
        state["steps"] += 1
        counts = (state["steps"] % self.every == 0).to(torch.int64)
        state["count"] += counts
        away = (weights - state["mean"]) * counts
        state["mean"] += away / state["count"].clamp(min=1)
        deviation = weights - state["mean"]
        state["squares"].addcmul_(away, deviation)
        slot = torch.where(counts > 0, (state["count"] - 1) % self.rank, self.rank)
        state["deviations"].index_copy_(1, slot.reshape(1), deviation.unsqueeze(1))

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """The mean and the variance of the iterates."""
        return Gaussian(state["mean"], (state["squares"] / state["count"]).clamp(min=_LEAST_VARIANCE))

    def deviations(self, state: State) -> Tensor:
        """D, the last deviations from the running mean, oldest first, (s, K, weights)."""
        count = int(state["count"])
        order = [number % self.rank for number in range(max(0, count - self.rank), count)]
        return state["deviations"][:, order]

    def sample(
        self, network: Network, weights: Tensor, state: State, n_data: Number, streams: Streams, n: int
    ) -> Functions:
        """θ = w̄ + 2^(-1/2) (√var z₁ + D z₂/√(K−1))."""
        mean, variance = self.gaussian(weights, state, n_data)
        columns = self.deviations(state)
        low_rank = torch.bmm(streams.normal(n, columns.shape[1]), columns) / math.sqrt(columns.shape[1] - 1)
        drawn = streams.normal(n, mean.shape[1]) * variance.sqrt().unsqueeze(1) + low_rank
        return Functions(unflatten(network, (mean.unsqueeze(1) + drawn / math.sqrt(2)).flatten(0, 1)))
