"""Bayesian linear regression per arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bayesadam.bandits.observations import Contexts, Floats, Indices, Rewards
from bayesadam.errors import MatchError

# Rows whose products with all covariances are in memory at once.
_ROWS = 256


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
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(data.gram + np.diag(precision)))
    if failed.any() or not factor.isfinite().all():
        raise MatchError("the features are too large, or of too different sizes, for a fit: standardise the contexts")
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
        covariance, mean = self.covariance[arm], self.mean[arm]
        reach = covariance @ x
        whole, error = 1 + float(x @ reach), reward - float(mean @ x)
        covariance -= (reach / whole)[:, None] * reach
        mean += error / whole * reach
        self.scale[arm] += 0.5 / whole * error * error
        self.shape[arm] += 0.5

    def widths(self, x: Floats) -> Floats:
        """xᵀ C x of every arm, (k, features) → (k, arms)."""
        (k, width), arms = x.shape, len(self.mean)
        widths, flat = np.empty((k, arms)), self.covariance.reshape(-1, width).T
        for first in range(0, k, _ROWS):
            rows = x[first : first + _ROWS]
            widths[first : first + _ROWS] = np.matmul((rows @ flat).reshape(-1, arms, width), rows[:, :, None])[..., 0]
        return np.maximum(widths, 0, out=widths)

    def left_out(self, arms: Indices, x: Floats, rewards: Floats) -> tuple[Floats, Floats]:
        """Errors of fitted observations as if each were left out, e/(1 − xᵀ C x), and 1 − xᵀ C x: (k,)."""
        errors, rest = np.empty(len(arms)), np.empty(len(arms))
        for arm in np.unique(arms):
            rows = arms == arm
            rest[rows] = np.maximum(1 - ((x[rows] @ self.covariance[arm]) * x[rows]).sum(axis=1), 1e-3)
            errors[rows] = (rewards[rows] - x[rows] @ self.mean[arm]) / rest[rows]
        return errors, rest
