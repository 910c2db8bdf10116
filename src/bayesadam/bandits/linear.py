"""Bayesian linear regression per arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bayesadam.bandits.observations import Contexts, Floats, Indices, Rewards
from bayesadam.errors import MatchError

# a₀ of the prior.
SHAPE = 1.0
# More observations than the first number are added in blocks: long calls into BLAS leave the interpreter to other
# threads. The second is how many rows are worked on at once.
_FEW, _ROWS = 16, 256


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


class Head:
    """σ² ~ IG(a, b), β | σ² ~ N(μ, σ² C) for every arm: μ is (arms, features), C (arms, features, features).

    `joint` holds C with μ as its last row, (arms, features + 1, features), so that one product with x gives C x and
    μᵀ x of every arm; `shape` is a and `scale` b, (arms,) each. After each observation b and a − a₀ of every arm are
    multiplied by the `memory`.
    """

    def __init__(self, mean: Floats, covariance: Floats, shape: Floats, scale: Floats, memory: float) -> None:
        self.joint, self.shape, self.scale = np.concatenate([covariance, mean[:, None]], axis=1), shape, scale
        self.memory = memory

    @classmethod
    def prior(cls, arms: int, width: int, memory: float = 1.0) -> Head:
        """Around 0, with C = 1 and b = 0."""
        identity = np.tile(np.eye(width), (arms, 1, 1))
        return cls(np.zeros((arms, width)), identity, np.full(arms, SHAPE), np.zeros(arms), memory)

    @property
    def mean(self) -> Floats:
        """μ, in the same memory."""
        return self.joint[:, -1]

    @property
    def covariance(self) -> Floats:
        """C, in the same memory."""
        return self.joint[:, :-1]

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        """μᵀ x and xᵀ C x of every arm, (k, features) → (k, arms) each."""
        if len(x) > _ROWS:
            parts = [self.predict(x[first : first + _ROWS]) for first in range(0, len(x), _ROWS)]
            return np.concatenate([mean for mean, _ in parts]), np.concatenate([widths for _, widths in parts])
        reach = (x @ self.joint.reshape(-1, x.shape[1]).T).reshape(len(x), *self.joint.shape[:2])
        return reach[..., -1], np.maximum((reach[..., :-1] @ x[:, :, None])[..., 0], 0)

    def noises(self, own: float) -> list[float]:
        """σ_a² = (b + κσ²)/(a − a₀ + κ), κ = `own`: every arm's noise, shrunk toward that of all arms together."""
        halves, scales = [a - SHAPE for a in self.shape.tolist()], self.scale.tolist()
        shared = own * sum(scales) / (SHAPE + sum(halves))
        return [(scale + shared) / (half + own) for scale, half in zip(scales, halves, strict=True)]

    def update(self, arms: list[int], rewards: list[float], x: Floats) -> None:
        """Add observations of any arms, (k,), (k,), (k, features), as if one after the other.

        C ← C − g gᵀ/w, μ ← μ + e g/w, b ← b + ½ e²/w, a ← a + ½, with e = r − μᵀ x, g = C x and w = 1 + xᵀ g.
        """
        if len(arms) > _FEW:
            chosen, paid = np.array(arms), np.array(rewards)
            for rows in np.split(np.arange(len(x)), range(_ROWS, len(x), _ROWS)):
                self._add_block(chosen[rows], paid[rows], x[rows])
            return
        for arm, reward, row in zip(arms, rewards, x, strict=True):
            joint = self.joint[arm]
            reach = joint.dot(row)
            gain, error = reach[:-1], reward - float(reach[-1])
            whole = 1 + float(row.dot(gain))
            reach[-1] = -error
            joint -= (reach / whole)[:, None] * gain
            self.scale[arm] += 0.5 / whole * error * error
            self.shape[arm] += 0.5
            self._forget(1)

    def _add_block(self, arms: Indices, rewards: Floats, x: Floats) -> None:
        """The same at once for the rows X of an arm: with L Lᵀ = 1 + X C Xᵀ, H = L⁻¹ X C and z = L⁻¹ (r − X μ) it is
        C ← C − Hᵀ H, μ ← μ + Hᵀ z, and z² are the e²/w of one after the other.
        """
        fade = 0.5 * self.memory ** np.arange(len(arms), 0, -1)
        self._forget(len(arms))
        for arm in np.unique(arms):
            rows = arms == arm
            own = x[rows]
            reach = own @ self.joint[arm].T
            root = np.linalg.cholesky(reach[:, :-1] @ own.T + np.eye(len(own)))
            reach[:, -1] -= rewards[rows]
            solved = np.linalg.solve(root, reach)
            self.joint[arm] -= solved.T @ solved[:, :-1]
            self.scale[arm] += fade[rows] @ solved[:, -1] ** 2
            self.shape[arm] += fade[rows].sum()

    def _forget(self, count: int) -> None:
        """What so many observations leave of b and a − a₀."""
        if self.memory < 1:
            kept = self.memory**count
            self.scale *= kept
            self.shape += (1 - kept) * (SHAPE - self.shape)

    def left_out(self, arms: Indices, x: Floats, rewards: Floats) -> tuple[Floats, Floats]:
        """Errors of fitted observations as if each were left out, e/(1 − xᵀ C x), and 1 − xᵀ C x: (k,)."""
        errors, rest = np.empty(len(arms)), np.empty(len(arms))
        for arm in np.unique(arms):
            rows = arms == arm
            rest[rows] = np.maximum(1 - ((x[rows] @ self.covariance[arm]) * x[rows]).sum(axis=1), 1e-3)
            errors[rows] = (rewards[rows] - x[rows] @ self.mean[arm]) / rest[rows]
        return errors, rest
