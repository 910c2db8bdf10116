"""Bayesian linear regression per arm, and the agents that use it on contexts or on a network's last hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.bandits.learner import AgentSettings, Buffer, Count, Entry, Flag, Learner, Positive, with_constant
from bayesadam.bandits.networks import AdamLearner, GreedySettings, SomeWidths
from bayesadam.engine.streams import Streams

# Examples of one arm that are multiplied at once.
_PIECE = 64
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Σ x xᵀ, Σ x r and Σ r² of every run and arm, (runs, arms, ...), float64; the last feature is a constant 1."""

    gram: Tensor
    cross: Tensor
    squares: Tensor

    @classmethod
    def zeros(cls, runs: int, arms: int, width: int, device: torch.device) -> Statistics:
        """Of no data."""
        shapes = ((width, width), (width,), ())
        return cls(*(torch.zeros(runs, arms, *shape, dtype=torch.float64, device=device) for shape in shapes))

    def fade(self, factor: float) -> None:
        """Multiply the weight of all data so far by a factor."""
        for tensor in vars(self).values():
            tensor.mul_(factor)

    def add(self, arms: Tensor, x: Tensor, rewards: Tensor, weights: Tensor) -> None:
        """Add examples of any arms, with arms and rewards (runs, k) and weights (k,) or (runs, k).

        Each arm's examples are laid out in pieces of one size, the last padded with zeros, so that all products Σ z zᵀ
        of z = √w (x, r) are one batch, whatever the arms.
        """
        (runs, k), n_arms, width = arms.shape, self.squares.shape[1], x.shape[2]
        size = min(_PIECE, -(-k // n_arms))
        counts = F.one_hot(arms, n_arms).cumsum(dim=1)
        pieces = -(-counts[:, -1] // size)
        ends = pieces.cumsum(dim=1)
        slot = (ends - pieces).gather(1, arms) * size + counts.gather(2, arms.unsqueeze(2)).squeeze(2) - 1
        examples = torch.cat([x, rewards.unsqueeze(2)], dim=2) * weights.sqrt().unsqueeze(-1)
        laid_out = examples.new_zeros(runs, (k // size + n_arms) * size, width + 1)
        laid_out.scatter_(1, slot.unsqueeze(2).expand_as(examples), examples)
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
    """C = (Λ₀ + Σ x xᵀ)⁻¹, μ = C (Λ₀ μ₀ + Σ x r), and ½(Σ r² + μ₀ᵀ Λ₀ μ₀ − μᵀ C⁻¹ μ), by which b grows.

    The `prior` μ₀, and so μ, is (runs, arms, components, features), the third without features; the `precision` Λ₀
    broadcasts to (runs, arms, features, features).
    """
    pull = prior @ precision
    factor = torch.linalg.cholesky(data.gram + precision)
    cross = data.cross.unsqueeze(2) + pull
    mean = torch.cholesky_solve(cross.mT, factor).mT
    squares = data.squares.unsqueeze(2) + (pull * prior).sum(dim=3)
    return torch.cholesky_inverse(factor), mean, 0.5 * (squares - (cross * mean).sum(dim=3)).clamp(min=0)


def shared_precision(gaps: Tensor, covariance: Tensor, variance: Tensor, first: Tensor, *, first_arms: float) -> Tensor:
    """Λ₀ of all arms, diagonal, after a step of expectation maximisation: feature j's is (A + A₀)/(Σ_a s_aj + A₀/λ_j).

    s_a = (μ_a − μ₀)²/σ² + diag C_a is the second moment of an arm's weights about their prior mean, given its rewards.
    Beside the A arms, A₀ that nothing is known of have the first precision λ.

    Args:
        gaps: μ_a − μ₀, (runs, arms, features).
        covariance: C_a, (runs, arms, features, features).
        variance: σ², (runs, 1).
        first: λ, (runs, 1, features, features), diagonal.
        first_arms: A₀.
    """
    moments = gaps.square() / variance.unsqueeze(2) + covariance.diagonal(dim1=2, dim2=3)
    known = first.diagonal(dim1=2, dim2=3).reciprocal()
    return torch.diag_embed((moments.shape[1] + first_arms) / (moments.sum(dim=1, keepdim=True) + first_arms * known))


@dataclass(frozen=True, eq=False)
class LinearPosterior:
    """σ² ~ IG(a, b_k), β | σ² ~ N(μ_k, σ² C) for every run, arm and component k of its prior, float64.

    Components differ in their means only, so they share one covariance; the data make component k likely as b_k^−a.
    """

    mean: Tensor  # μ, (runs, arms, components, features)
    covariance: Tensor  # C, (runs, arms, features, features)
    shape: Tensor  # a, (runs, arms)
    scale: Tensor  # b, (runs, arms, components)

    @classmethod
    def prior(cls, runs: int, arms: int, width: int, shape: float, device: torch.device) -> LinearPosterior:
        """One component around 0, with C = 1 and b = 0."""
        mean = torch.zeros(runs, arms, 1, width, dtype=torch.float64, device=device)
        identity = torch.eye(width).to(mean).repeat(runs, arms, 1, 1)
        return cls(mean, identity, torch.full_like(mean[..., 0, 0], shape), torch.zeros_like(mean[..., 0]))

    @classmethod
    def of(cls, data: Statistics, *, precision: float, shape: float, scale: float) -> LinearPosterior:
        """C⁻¹ = λ1 + Σ x xᵀ, μ = C Σ x r, a = a₀ + n/2, b = b₀ + ½(Σ r² − μᵀ C⁻¹ μ)."""
        around, ridge = (
            torch.zeros_like(data.cross).unsqueeze(2),
            precision * torch.eye(data.cross.shape[2]).to(data.cross),
        )
        covariance, mean, residual = normal_equations(data, around, ridge)
        return cls(mean, covariance, shape + 0.5 * data.gram[..., -1, -1], scale + residual)

    def fit(self, data: Statistics, prior: Tensor, precision: Tensor) -> Tensor:
        """Refit μ and C around μ₀ with Λ₀, in place; returns the third of `normal_equations`."""
        covariance, mean, residual = normal_equations(data, prior, precision)
        self.covariance.copy_(covariance)
        self.mean.copy_(mean)
        return residual

    def update(self, arms: Tensor, x: Tensor, rewards: Tensor) -> None:
        """Add k observations in place, with arms and rewards (runs, k) and features (runs, k, features).

        With X the rows of an arm, e = r − Xμ and 1 + X C Xᵀ = L Lᵀ: C ← C − GᵀG, μ ← μ + Gᵀz and b ← b + ½ |z|², where
        G = L⁻¹ X C and z = L⁻¹ e. One observation of one run is of rank one, and mostly numpy's: its calls cost less.
        """
        if arms.numel() == 1 and x.device.type == "cpu":
            self._update_one(int(arms), x.numpy()[0, 0], float(rewards))
            return
        chosen = F.one_hot(arms, self.mean.shape[1]).mT.to(x)
        own = x.unsqueeze(1) * chosen.unsqueeze(3)
        errors = (rewards[:, None, :, None] - x.unsqueeze(1) @ self.mean.mT) * chosen.unsqueeze(3)
        reach = own @ self.covariance
        factor = reach @ own.mT
        factor.diagonal(dim1=2, dim2=3).add_(1)
        factor = torch.linalg.cholesky(factor)
        gain = torch.linalg.solve_triangular(factor, reach, upper=False)
        z = torch.linalg.solve_triangular(factor, errors, upper=False)
        self.covariance.sub_(gain.mT @ gain)
        self.mean.add_(z.mT @ gain)
        self.shape.add_(0.5 * chosen.sum(dim=2))
        self.scale.add_(0.5 * z.square().sum(dim=2))

    def _update_one(self, arm: int, x: Floats, reward: float) -> None:
        """C ← C − g gᵀ/w, μ ← μ + e g/w, b ← b + ½ e²/w with g = C x and w = 1 + xᵀ g."""
        means, covariances, shapes, scales = self.first
        mean = means[arm]
        reach = covariances[arm] @ x
        whole = 1 + float(x @ reach)
        errors = reward - mean @ x
        other = torch.from_numpy(reach)
        self._first_covariances[arm].addr_(other, other, alpha=-1 / whole)
        mean += np.multiply.outer(errors / whole, reach)
        scales[arm] += 0.5 / whole * errors * errors
        shapes[arm] += 0.5

    def widths(self, x: Tensor) -> Tensor:
        """xᵀ C x of every arm, (runs, k, arms)."""
        runs, k, width = x.shape
        reach = (x @ self.covariance.reshape(runs, -1, width).mT).view(runs, k, -1, width)
        return (reach @ x.unsqueeze(3)).squeeze(3).clamp_(min=0)

    @cached_property
    def first(self) -> tuple[Floats, Floats, Floats, Floats]:
        """μ, C, a and b of the first run as arrays of numpy in the same memory."""
        return self.mean.numpy()[0], self.covariance.numpy()[0], self.shape.numpy()[0], self.scale.numpy()[0]

    @cached_property
    def _first_covariances(self) -> tuple[Tensor, ...]:
        """C of the first run's arms."""
        return self.covariance[0].unbind()

    def widths_of_one(self, x: Floats) -> Floats:
        """`widths` of one run, (k, features) → (k, arms)."""
        covariance, (k, width) = self.first[1], x.shape
        reach = (x @ covariance.reshape(-1, width).T).reshape(k, -1, width)
        found: Floats = np.maximum(np.matmul(reach, x[:, :, None])[:, :, 0], 0)
        return found

    def draws(self, x: Tensor, n: int, streams: Streams) -> Tensor:
        """β·x of every arm by the first component, n draws of (σ², β) for every row of x: (runs, k, n, arms).

        One row depends on β only through β·x, which given σ² is N(μ·x, σ² xᵀ C x).
        """
        means, widths = (x @ self.mean[:, :, 0].mT).unsqueeze(2), self.widths(x).unsqueeze(2)
        shape, scale = (of[:, None, None].expand(-1, x.shape[1], n, -1) for of in (self.shape, self.scale[..., 0]))
        std = (scale / streams.gamma(shape) * widths).sqrt()
        return torch.addcmul(means, std, streams.normal(*std.shape[1:]).double())

    def left_out(self, mean: Tensor, arms: Tensor, x: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of fitted observations as if each were left out, e/(1 − xᵀ C x), and 1 − xᵀ C x: (runs, k).

        The mean of every arm is (runs, arms, features); arms and rewards of the observations are (runs, k).
        """
        own = arms.unsqueeze(2)
        rest = (1 - self.widths(x).gather(2, own).squeeze(2)).clamp_(min=1e-3)
        return (rewards - (x @ mean.mT).gather(2, own).squeeze(2)) / rest, rest


@dataclass(frozen=True)
class LinearSettings(AgentSettings):
    """Bayesian linear regression per arm.

    Attributes:
        standardise: whether rewards are learnt in units of their mean and standard deviation so far.
        shape, scale: a₀ and b₀ of the inverse gamma prior of the noise.
        precision: λ of the weights' prior precision, in units of the noise.
    """

    standardise: Flag = False
    shape: Positive = 6.0
    scale: Positive = 6.0
    precision: Positive = 0.25


class Linear(Learner):
    """Linear Thompson sampling with a full posterior per arm; its statistics fade where the agent forgets."""

    learns_at_once = True
    settings: LinearSettings

    def __init__(self, settings: LinearSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        width = self._features(buffer.contexts[:, :0]).shape[2]
        self.statistics = Statistics.zeros(buffer.runs, n_arms, width, self.device)
        self._memory |= vars(self.statistics)
        self._linear: LinearPosterior | None = None
        self._choice = self._stream("linear", seeds)

    def _features(self, contexts: Tensor) -> Tensor:
        """Of contexts (runs, k, ...), including the constant, float64."""
        return with_constant(contexts)

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        return self.linear_posterior().draws(self._features(contexts), n, streams).float()

    def observe(self, rows: slice) -> None:
        """Add the new observations to the statistics, which fade towards the prior by 2^(−k/h)."""
        super().observe(rows)
        contexts, arms, rewards = self.buffer.seen(rows)
        self.statistics.fade(self.buffer.faded(rows.stop - rows.start))
        self.statistics.add(arms, self._features(contexts), rewards.double(), self.buffer.weights(rows))
        self._linear = None

    def linear_posterior(self) -> LinearPosterior:
        """The current posterior, in units of the standardised rewards where these are."""
        if self._linear is None:
            s = self.settings
            data = self.statistics.standardised(*self.buffer.moments()) if s.standardise else self.statistics
            self._linear = LinearPosterior.of(data, precision=s.precision, shape=s.shape, scale=s.scale)
        return self._linear

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the statistics, from which the posterior follows."""
        super().load(tensors)
        self._linear = None


LINEAR = Entry(Linear, LinearSettings)


@dataclass(frozen=True)
class NeuralLinearSettings(LinearSettings, GreedySettings):
    """Linear regression on the last hidden layer; `window` observations per arm are refitted after every training."""

    window: Count = 1000
    hidden: SomeWidths = (100, 100)


class NeuralLinear(Linear, AdamLearner):
    """Linear Thompson sampling on the last hidden layer of a network that is trained as the greedy agent's.

    Training changes the features of all observations, so the statistics are recomputed after each: from the newest
    `window` observations of every arm, which bounds the cost, and weighted so that they count as all of its
    observations. With a half-life h an observation weighs 2^(−age/h), and all of an arm's the sum of these weights.
    """

    settings: NeuralLinearSettings

    def _features(self, contexts: Tensor) -> Tensor:
        return self._last_hidden(contexts)

    def train(self) -> None:
        """Train the network, then recompute the statistics at its new features."""
        super().train()
        # The last feature is the constant: its square sums the weights of all observations.
        counts, n = self.statistics.gram[..., -1, -1].clone(), self.buffer.count
        self.statistics.fade(0.0)
        numbers, tiny = torch.arange(n, device=self.device), torch.finfo(torch.float64).tiny
        for arm in range(self.n_arms):
            own = torch.where(self.buffer.arms[:, :n] == arm, numbers, -1)
            newest = own.topk(min(self.settings.window, n), dim=1).values
            contexts, _, rewards = self.buffer.at(newest.clamp(min=0))
            weights = torch.where(newest < 0, 0.0, self.buffer.weights(newest))
            weights *= counts[:, arm : arm + 1] / weights.sum(dim=1, keepdim=True).clamp(min=tiny)
            self.statistics.add(torch.full_like(newest, arm), self._features(contexts), rewards.double(), weights)
        self._linear = None


NEURAL_LINEAR = Entry(NeuralLinear, NeuralLinearSettings)
