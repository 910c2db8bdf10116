"""Bayesian linear regression per arm, on the contexts or on a network's last hidden layer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.learners import Greedy, Learner
from bayesadam.bandits.settings import AgentSettings, LinearSettings, NeuralLinearSettings
from bayesadam.engine.network import forward
from bayesadam.engine.streams import Streams

# Examples of one arm that are multiplied at once.
_PIECE = 64


@dataclass(frozen=True, eq=False)
class Statistics:
    """All that linear regression needs of the data, float64; the last feature is a constant 1.

    Attributes:
        gram: Σ x xᵀ, (runs, arms, features, features).
        cross: Σ x r, (runs, arms, features).
        squares: Σ r², (runs, arms).
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor

    @classmethod
    def zeros(cls, runs: int, arms: int, width: int, device: torch.device) -> Statistics:
        """Of no data."""
        shapes = ((width, width), (width,), ())
        return cls(*(torch.zeros(runs, arms, *shape, dtype=torch.float64, device=device) for shape in shapes))

    def fade(self, factor: float) -> None:
        """Let all data so far weigh less by a factor."""
        for tensor in vars(self).values():
            tensor.mul_(factor)

    def add(self, arms: Tensor, x: Tensor, rewards: Tensor, weights: Tensor) -> None:
        """Take in examples of any arms, with arms and rewards (runs, k) and weights (k,) or (runs, k).

        Each arm's examples are laid out in pieces of one size, the last filled up with zeros, so that all products Σ z zᵀ of
        z = √w (x, r) are one batch, whatever the arms.
        """
        (runs, k), n_arms, width = arms.shape, self.squares.shape[1], x.shape[2]
        size = min(_PIECE, -(-k // n_arms))
        counts = F.one_hot(arms, n_arms).cumsum(dim=1)
        pieces = -(-counts[:, -1] // size)
        ends = pieces.cumsum(dim=1)
        place = (ends - pieces).gather(1, arms) * size + counts.gather(2, arms.unsqueeze(2)).squeeze(2) - 1
        examples = torch.cat([x, rewards.unsqueeze(2)], dim=2) * weights.sqrt().unsqueeze(-1)
        laid_out = examples.new_zeros(runs, (k // size + n_arms) * size, width + 1)
        laid_out.scatter_(1, place.unsqueeze(2).expand_as(examples), examples)
        laid_out = laid_out.view(runs, -1, size, width + 1)
        numbers = torch.arange(laid_out.shape[1], device=x.device).repeat(runs, 1)
        owners = F.one_hot(torch.searchsorted(ends, numbers, right=True), n_arms + 1)[..., :-1].to(x)
        sums = (owners.mT @ (laid_out.mT @ laid_out).flatten(2)).view(runs, n_arms, width + 1, width + 1)
        self.gram.add_(sums[..., :-1, :-1])
        self.cross.add_(sums[..., :-1, -1])
        self.squares.add_(sums[..., -1, -1])

    def standardised(self, shift: Tensor, scale: Tensor) -> Statistics:
        """The same for rewards (r − shift)/scale, with shift and scale (runs, 1)."""
        sums, count = self.cross[..., -1], self.gram[..., -1, -1]
        cross = (self.cross - shift.unsqueeze(2) * self.gram[..., -1]) / scale.unsqueeze(2)
        return Statistics(self.gram, cross, (self.squares - 2 * shift * sums + shift.square() * count) / scale.square())


def normal_equations(data: Statistics, prior: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L of Λ = Λ₀ + Σ x xᵀ = L Lᵀ, μ = Λ⁻¹ (Λ₀ μ₀ + Σ x r), and ½(Σ r² + μ₀ᵀ Λ₀ μ₀ − μᵀ Λ μ), with which b grows.

    Args:
        data: of every run and arm.
        prior: μ₀, several of them, (runs, arms, components, features); so are μ, and, without the features, the third.
        precision: Λ₀, what broadcasts to (runs, arms, features, features).
    """
    pull = prior @ precision
    factor = torch.linalg.cholesky(data.gram + precision)
    cross = data.cross.unsqueeze(2) + pull
    mean = torch.cholesky_solve(cross.mT, factor).mT
    squares = data.squares.unsqueeze(2) + (pull * prior).sum(dim=3)
    return factor, mean, 0.5 * (squares - (cross * mean).sum(dim=3)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class LinearPosterior:
    """Normal–inverse-gamma: σ² ~ IG(a, b), β | σ² ~ N(μ, σ² Λ⁻¹), for every run and arm.

    Attributes:
        mean: μ, (runs, arms, features).
        factor: L of Λ = L Lᵀ, (runs, arms, features, features).
        shape: a, (runs, arms).
        scale: b, (runs, arms).
    """

    mean: Tensor
    factor: Tensor
    shape: Tensor
    scale: Tensor

    @classmethod
    def of(cls, data: Statistics, *, precision: float, shape: float, scale: float) -> LinearPosterior:
        """Λ = λ1 + Σ x xᵀ, μ = Λ⁻¹ Σ x r, a = a₀ + n/2, b = b₀ + ½(Σ r² − μᵀ Λ μ)."""
        identity = torch.eye(data.cross.shape[2]).to(data.cross)
        around = torch.zeros_like(data.cross).unsqueeze(2)
        factor, mean, residual = normal_equations(data, around, precision * identity)
        return cls(mean.squeeze(2), factor, shape + 0.5 * data.gram[..., -1, -1], scale + residual.squeeze(2))

    def draws(self, x: Tensor, streams: Streams, each: int = 1) -> Tensor:
        """β·x of every arm, `each` draws of (σ², β) for every row of x (runs, k, features): (runs, k·each, arms).

        One row sees its β through β·x alone, which given σ² is N(μ·x, σ² xᵀ Λ⁻¹ x).
        """
        runs, arms, _ = self.mean.shape
        columns = x.mT.unsqueeze(1).expand(-1, arms, -1, -1)
        width = torch.linalg.solve_triangular(self.factor, columns, upper=False).square().sum(dim=2).mT
        width, x = (of.repeat_interleave(each, dim=1) for of in (width, x))
        k = x.shape[1]
        noise = self.scale.unsqueeze(1) / streams.gamma(self.shape.unsqueeze(1).expand(runs, k, arms))
        normal = streams.normal(k, arms).double()
        return torch.baddbmm((noise * width).sqrt() * normal, x, self.mean.mT)


def with_constant(x: Tensor) -> Tensor:
    """A feature of 1 behind the others, float64."""
    return F.pad(x.double(), (0, 1), value=1.0)


class _OnStatistics(Learner):
    """Scores from a normal–inverse-gamma posterior of statistics."""

    learns_at_once = True
    settings: LinearSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        width = self._features(buffer.contexts[:, :0]).shape[2]
        self.statistics = Statistics.zeros(buffer.runs, n_arms, width, self.device)
        self._memory |= vars(self.statistics)
        self._linear: LinearPosterior | None = None
        self._choice = self._stream("linear", seeds)

    @abstractmethod
    def _features(self, contexts: Tensor) -> Tensor:
        """Of contexts (runs, k, ...), the constant among them, float64."""

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        return self._many_scores(contexts, 1, streams).squeeze(2)

    def _many_scores(self, contexts: Tensor, draws: int, streams: Streams) -> Tensor:
        found = self.linear_posterior().draws(self._features(contexts), streams, draws)
        return found.float().view(*contexts.shape[:2], draws, self.n_arms)

    def _outcomes(self, contexts: Tensor) -> None:
        return None

    def observe(self, places: slice) -> None:
        """Add the new observations to the statistics, which fade towards the prior by 2^(−k/h)."""
        super().observe(places)
        contexts, arms, rewards = self.buffer.seen(places)
        self.statistics.fade(self.buffer.faded(places.stop - places.start))
        self.statistics.add(arms, self._features(contexts), rewards.double(), self.buffer.weights(places))
        self._linear = None

    def linear_posterior(self) -> LinearPosterior:
        """The posterior of what was learnt so far, in units of the standardised rewards where these are."""
        if self._linear is None:
            s = self.settings
            data = self.statistics.standardised(*self.buffer.moments()) if s.standardise else self.statistics
            self._linear = LinearPosterior.of(data, precision=s.precision, shape=s.shape, scale=s.scale)
        return self._linear

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The posterior follows from the statistics."""
        super().load(tensors)
        self._linear = None


class Linear(_OnStatistics):
    """Linear Thompson sampling with a full posterior per arm; statistics grow by what is observed, and fade where it forgets."""

    def _features(self, contexts: Tensor) -> Tensor:
        return with_constant(contexts)


class NeuralLinear(_OnStatistics, Greedy):
    """Linear Thompson sampling on the last hidden layer of a network that is trained as the greedy agent's.

    Training changes the features of all that was seen, so the statistics are computed again after each: from the newest
    `window` observations of every arm, which bounds the cost, and weighted so that they count as all of its observations.
    With a half-life h an observation weighs 2^(−age/h), and all of an arm's as much as these weights together.
    """

    settings: NeuralLinearSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self._newest = torch.zeros(buffer.runs, n_arms, self.settings.window, dtype=torch.int64, device=self.device)
        self._pulls = torch.zeros(buffer.runs, n_arms, dtype=torch.int64, device=self.device)
        self._memory |= {"newest": self._newest, "pulls": self._pulls}

    def _features(self, contexts: Tensor) -> Tensor:
        return with_constant(forward(self.network, self.params, contexts, n_layers=len(self.network.hidden)))

    def observe(self, places: slice) -> None:
        """Put the new observations in their arms' windows, over the oldest."""
        super().observe(places)
        window = self.settings.window
        arms = self.buffer.arms[:, places]
        chosen = F.one_hot(arms, self.n_arms)
        before = (self._pulls.unsqueeze(1) + chosen.cumsum(dim=1) - chosen).gather(2, arms.unsqueeze(2)).squeeze(2)
        numbers = torch.arange(places.start, places.stop, device=self.device).expand_as(arms)
        self._newest.view(self.buffer.runs, -1).scatter_(1, arms * window + before % window, numbers)
        self._pulls += chosen.sum(dim=1)

    def train(self) -> None:
        """Train the network, then compute the statistics again."""
        super().train()
        self.refresh()

    def refresh(self) -> None:
        """The statistics at the network's features as they are now."""
        # The last feature is the constant: its square sums the weights of all that was observed.
        forgets = math.isfinite(self.buffer.half_life)
        counts = self.statistics.gram[..., -1, -1].clone() if forgets else self._pulls.double()
        for tensor in vars(self.statistics).values():
            tensor.zero_()
        size = min(self.settings.window, self.buffer.count)
        there = torch.arange(size, device=self.device)
        for arm in range(self.n_arms):
            newest = self._newest[:, arm, :size]
            contexts, _, rewards = self.buffer.at(newest)
            weights = torch.where(there < self._pulls[:, arm : arm + 1], self.buffer.weights(newest), 0.0)
            weights *= counts[:, arm : arm + 1] / weights.sum(dim=1, keepdim=True).clamp(
                min=torch.finfo(torch.float64).tiny
            )
            self.statistics.add(torch.full_like(newest, arm), self._features(contexts), rewards.double(), weights)
        self._linear = None
