"""Bayesian linear regression per arm, and the agent that uses it on the contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bayesadam.bandits.observations import Contexts, Floats, Indices, Observations, Rewards
from bayesadam.bandits.settings import AgentSettings, LinearSettings
from bayesadam.engine.streams import Streams

Scores = npt.NDArray[np.float32]
Sampler = Callable[[int, Streams], Scores]
Arrays = dict[str, npt.NDArray[Any]]
Rows = TypeVar("Rows", Contexts, Floats, npt.NDArray[np.bool_])
# Scores that are in memory at once when probabilities are counted.
_ROWS_AT_ONCE = 1 << 14


def with_constant(x: Contexts | Floats) -> Floats:
    """The features with a constant 1 appended, float64."""
    features = np.ones((len(x), x.shape[1] + 1))
    features[:, :-1] = x
    return features


@dataclass(frozen=True, eq=False)
class Statistics:
    """Σ w x xᵀ, Σ w x r and Σ w r² of every arm, (arms, ...); the last feature is a constant 1."""

    gram: Floats
    cross: Floats
    squares: Floats

    @classmethod
    def zeros(cls, arms: int, width: int) -> Statistics:
        """Of no data."""
        return cls(np.zeros((arms, width, width)), np.zeros((arms, width)), np.zeros(arms))

    @property
    def counts(self) -> Floats:
        """Σ w of every arm, (arms,)."""
        return self.gram[:, -1, -1]

    def fade(self, factor: float) -> None:
        """Multiply the weight of all data so far by a factor."""
        for array in vars(self).values():
            array *= factor

    def add(self, arms: Indices, x: Floats, rewards: Rewards | Floats, weights: Floats) -> None:
        """Add examples of any arms, with arms, rewards and weights (k,)."""
        targets = rewards.astype(np.float64)
        for arm in np.unique(arms):
            rows = arms == arm
            weighed = weights[rows, None] * x[rows]
            self.gram[arm] += weighed.T @ x[rows]
            self.cross[arm] += targets[rows] @ weighed
            self.squares[arm] += weights[rows] @ targets[rows] ** 2

    def standardised(self, shift: float, scale: float) -> Statistics:
        """The same for rewards (r − shift)/scale."""
        squares = self.squares - 2 * shift * self.cross[:, -1] + shift**2 * self.counts
        return Statistics(self.gram, (self.cross - shift * self.gram[..., -1]) / scale, squares / scale**2)


def normal_equations(data: Statistics, prior: Floats, precision: Floats) -> tuple[Floats, Floats, Floats]:
    """C = (Λ₀ + Σ x xᵀ)⁻¹, μ = C (Λ₀ μ₀ + Σ x r), and ½(Σ r² + μ₀ᵀ Λ₀ μ₀ − μᵀ C⁻¹ μ), by which b grows.

    The `prior` μ₀, and so μ, is (arms, features), the third (arms,); the `precision` Λ₀ is diagonal, (features,).
    torch's Cholesky factors take half the time of numpy's.
    """
    cross = data.cross + precision * prior
    factor = torch.linalg.cholesky(torch.from_numpy(data.gram + np.diag(precision)))
    mean = torch.cholesky_solve(torch.from_numpy(cross).unsqueeze(2), factor).squeeze(2).numpy()
    squares = data.squares + (precision * prior**2).sum(axis=1) - (cross * mean).sum(axis=1)
    # C is symmetric; the rows of its transpose are the contiguous ones.
    return torch.cholesky_inverse(factor).mT.contiguous().numpy(), mean, 0.5 * squares.clip(min=0)


def shared_precision(gaps: Floats, covariance: Floats, variance: float, first: Floats, *, first_arms: float) -> Floats:
    """Λ₀ of all arms after a step of expectation maximisation: feature j's is (A + A₀)/(Σ_a s_aj + A₀/λ_j).

    s_a = (μ_a − μ₀)²/σ² + diag C_a is the second moment of an arm's weights about their prior mean, given its rewards:
    `gaps` are μ_a − μ₀, (arms, features), the `variance` σ². Beside the A arms, A₀ (`first_arms`) that nothing is known
    of have the `first` precision λ, (features,).
    """
    moments = gaps**2 / variance + np.diagonal(covariance, axis1=1, axis2=2)
    shared: Floats = (len(gaps) + first_arms) / (moments.sum(axis=0) + first_arms / first)
    return shared


@dataclass(eq=False)
class Head:
    """σ² ~ IG(a, b), β | σ² ~ N(μ, σ² C) for every arm."""

    mean: Floats  # μ, (arms, features)
    covariance: Floats  # C, (arms, features, features)
    shape: Floats  # a, (arms,)
    scale: Floats  # b, (arms,)

    @classmethod
    def prior(cls, arms: int, width: int, shape: float) -> Head:
        """Around 0, with C = 1 and b = 0."""
        identity = np.tile(np.eye(width), (arms, 1, 1))
        return cls(np.zeros((arms, width)), identity, np.full(arms, shape), np.zeros(arms))

    def update(self, arm: int, x: Floats, reward: float) -> None:
        """Add an observation: C ← C − g gᵀ/w, μ ← μ + e g/w, b ← b + ½ e²/w, a ← a + ½.

        Here e = r − μᵀ x, g = C x and w = 1 + xᵀ g.
        """
        reach = self.covariance[arm] @ x
        whole, error = 1 + float(x @ reach), float(reward - self.mean[arm] @ x)
        self.covariance[arm] -= np.multiply.outer(reach / whole, reach)
        self.mean[arm] += error / whole * reach
        self.scale[arm] += 0.5 / whole * error * error
        self.shape[arm] += 0.5

    def widths(self, x: Floats) -> Floats:
        """xᵀ C x of every arm, (k, features) → (k, arms)."""
        k, width = x.shape
        reach = (x @ self.covariance.reshape(-1, width).T).reshape(k, -1, width)
        widths: Floats = np.maximum(np.matmul(reach, x[:, :, None])[:, :, 0], 0)
        return widths

    def left_out(self, arms: Indices, x: Floats, rewards: Floats) -> tuple[Floats, Floats]:
        """Errors of fitted observations as if each were left out, e/(1 − xᵀ C x), and 1 − xᵀ C x: (k,)."""
        errors, rest = np.empty(len(arms)), np.empty(len(arms))
        for arm in np.unique(arms):
            rows = arms == arm
            rest[rows] = np.maximum(1 - ((x[rows] @ self.covariance[arm]) * x[rows]).sum(axis=1), 1e-3)
            errors[rows] = (rewards[rows] - x[rows] @ self.mean[arm]) / rest[rows]
        return errors, rest


class Learner(ABC):
    """Scores the arms of contexts, with an independent draw for each, and takes note of observations.

    `choice` is the stream of the draws by which it chooses.
    """

    settings: AgentSettings
    choice: str

    def __init__(self, settings: AgentSettings, n_features: int, n_arms: int, seed: int) -> None:
        self.settings, self.n_features, self.n_arms, self.seed = settings, n_features, n_arms, seed
        self.streams = {purpose: Streams([seed], purpose) for purpose in ("explore", self.choice)}

    @abstractmethod
    def sampler(self, contexts: Contexts) -> Sampler:
        """n ↦ n independent draws of the scores for every row, (k, n, arms), from given streams."""

    @abstractmethod
    def observe(self, seen: Observations, rows: slice) -> None:
        """Take note of new rows."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """What was learnt, by name, in the learner's own memory."""

    @abstractmethod
    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what was learnt by a learner with the same settings; releases up to 0.3 have more dimensions."""

    def parts(self, array: npt.NDArray[Any]) -> Sequence[npt.NDArray[Any]]:
        """Views of an array, of each of which the leading part stays when an arm is added."""
        return (array,)

    def due(self, seen: Observations) -> bool:
        """Whether there is something to train."""
        return False

    def widened(self) -> Learner:
        """The same for one more arm, which is as in a new learner."""
        wide = type(self)(self.settings, self.n_features, self.n_arms + 1, self.seed)
        state = wide.state()
        for name, array in self.state().items():
            for part, whole in zip(self.parts(array), wide.parts(state[name]), strict=True):
                whole[tuple(slice(0, length) for length in part.shape)] = part
        wide.restore(state)
        return wide

    def chosen(
        self, contexts: Contexts, allowed: Sequence[int], *, draws: int = 0, further: Streams | None = None
    ) -> tuple[list[int], Floats]:
        """The arms chosen for k contexts, and the probabilities of those allowed, (k, allowed).

        π(a | x) = ε/|A| + (1 − ε) P(a). P is the share of M + 1 draws that prefer the arm: the one that chooses, and
        M = `draws` more from the streams `further`. All are exchangeable, so given all of them the share of the chosen
        arm is the probability of the choice. As an estimate of P given the choice, it is too large by (1 − P)/(M + 1)
        with a standard error of √(M P(1 − P))/(M + 1), and P E[1/share | chosen] = 1 − (1 − P)^(M+1): inverse shares
        are unbiased but for arms with P of the order 1/M.
        """
        many, epsilon, arms, shares = len(allowed), self.settings.epsilon, list[int](), list[Floats]()
        mask = slice(None) if many == self.n_arms else list(allowed)
        for x in _parts(contexts, draws):
            sample = self.sampler(x)
            best = sample(1, self.streams[self.choice])[..., mask].argmax(axis=2)
            choice = best[:, 0]
            if epsilon:
                uniform = self.streams["explore"].uniform(len(x), 1 + self.n_arms).numpy()[0]
                choice = np.where(uniform[:, 0] < epsilon, uniform[:, 1:][:, mask].argmax(axis=1), choice)
            arms += [allowed[at] for at in choice.tolist()]
            if further is not None:
                best = np.concatenate([best, sample(draws, further)[..., mask].argmax(axis=2)], axis=1)
            shares.append(_shares(best, many))
        return arms, epsilon / many + (1 - epsilon) * np.concatenate(shares)

    def probabilities(self, contexts: Contexts, allowed: npt.NDArray[np.bool_], draws: int, streams: Streams) -> Floats:
        """As `chosen` for a mask (k, arms) of the arms allowed, without a choice.

        The share of M draws is unbiased, with a standard error of √(P(1 − P)/M).
        """
        shares: Floats = allowed / allowed.sum(axis=1, keepdims=True) * self.settings.epsilon
        for x, mask, share in zip(_parts(contexts, draws), _parts(allowed, draws), _parts(shares, draws), strict=True):
            best = np.where(mask[:, None], self.sampler(x)(draws, streams), -np.inf).argmax(axis=2)
            share += (1 - self.settings.epsilon) * _shares(best, self.n_arms)
        return shares

    def state(self) -> Arrays:
        """What was learnt, and where the random numbers are."""
        return self.arrays() | {f"stream.{name}": stream.state().numpy() for name, stream in self.streams.items()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Resume where `state` was taken, with the same settings and seed."""
        self.load(state)
        for name, stream in self.streams.items():
            stream.restore(torch.from_numpy(state[f"stream.{name}"].copy()))


def _parts(rows: Rows, draws: int) -> list[Rows]:
    """Views of rows whose draws are in memory at once."""
    size = max(1, _ROWS_AT_ONCE // (draws + 1))
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _shares(best: Indices, arms: int) -> Floats:
    """How often each arm is among the draws (k, n), as a share, (k, arms)."""
    k, n = best.shape
    counts = np.bincount((best + arms * np.arange(k)[:, None]).ravel(), minlength=arms * k)
    shares: Floats = counts.reshape(k, arms) / n
    return shares


class Linear(Learner):
    """Linear Thompson sampling with a full posterior per arm; its statistics fade where the agent forgets.

    C⁻¹ = λ1 + Σ x xᵀ, μ = C Σ x r, a = a₀ + n/2, b = b₀ + ½(Σ r² − μᵀ C⁻¹ μ).
    """

    settings: LinearSettings
    choice = "linear"

    def __init__(self, settings: LinearSettings, n_features: int, n_arms: int, seed: int) -> None:
        super().__init__(settings, n_features, n_arms, seed)
        self.statistics = Statistics.zeros(n_arms, n_features + 1)
        # Mean and standard deviation of the rewards.
        self.moments = np.array([0.0, 1.0])
        self._head: Head | None = None

    @property
    def head(self) -> Head:
        """The current posterior, in units of the standardised rewards where these are."""
        if self._head is None:
            settings, data = self.settings, self.statistics
            if settings.standardise:
                data = data.standardised(*self.moments.tolist())
            precision = np.full(self.n_features + 1, settings.precision)
            covariance, mean, residual = normal_equations(data, np.zeros_like(data.cross), precision)
            self._head = Head(mean, covariance, settings.shape + 0.5 * data.counts, settings.scale + residual)
        return self._head

    def sampler(self, contexts: Contexts) -> Sampler:
        """β·x depends on β only through N(μ·x, σ² xᵀ C x) given σ², of which each draw has its own."""
        x, head = with_constant(contexts), self.head
        means, widths = (x @ head.mean.T)[:, None], head.widths(x)[:, None]

        def draw(n: int, streams: Streams) -> Scores:
            shape = torch.from_numpy(np.broadcast_to(head.shape, (1, len(x), n, self.n_arms)).copy())
            scores: Floats = np.sqrt(head.scale * widths / streams.gamma(shape).numpy()[0])
            scores *= streams.normal(len(x), n, self.n_arms).numpy()[0]
            scores += means
            return scores.astype(np.float32)

        return draw

    def observe(self, seen: Observations, rows: slice) -> None:
        """Add the new observations to the statistics, which fade towards the prior by 2^(−k/h)."""
        self.statistics.fade(seen.faded(rows.stop - rows.start))
        self.statistics.add(seen.arms[rows], with_constant(seen.contexts[rows]), seen.rewards[rows], seen.weights(rows))
        self.moments[:], self._head = seen.moments(), None

    def arrays(self) -> Arrays:
        """The statistics, from which the posterior follows."""
        return {**vars(self.statistics), "moments": self.moments}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over the statistics."""
        for name, array in self.arrays().items():
            array[...] = arrays[name].reshape(array.shape)
        self._head = None
