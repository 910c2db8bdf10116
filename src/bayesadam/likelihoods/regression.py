"""Regression: y = f + N(0, σ²), one noise variance per output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesadam.errors import SettingError
from bayesadam.likelihoods.predictive import (
    NumericMixture,
    NumericPredictive,
    Predictive,
    PredictiveMixture,
    level_quantile,
    normal_like,
    normal_mass,
    rows,
    summed,
)
from bayesadam.likelihoods.record import CalibrationMethod, Likelihood


@dataclass(frozen=True, eq=False)
class RegressionPredictive(NumericPredictive):
    """y = f + N(0, σ²), a Gaussian for every output.

    Attributes:
        noise_variance: σ² by output, or 0 where it is not known: see `calibrate`.
    """

    noise_variance: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        return self.variance + self.noise_variance

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with probability `level`."""
        if not 0 < level < 1:
            raise SettingError(f"level must lie between 0 and 1, got {level!r}")
        z = level_quantile(level)
        return self.mean - z * self.stddev, self.mean + z * self.stddev

    def entropy(self) -> Tensor:
        """The differential entropy of y in nats, one number per example; of the joint outputs where the covariance is known."""
        if self.covariance is not None:
            log_det = torch.linalg.slogdet(self._total_covariance(self.covariance)).logabsdet
            joint: Tensor = 0.5 * (log_det + self.covariance.shape[-1] * math.log(2 * math.pi * math.e))
            return joint
        return (0.5 * (2 * math.pi * math.e * rows(self.total_variance)).log()).sum(dim=1)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...)."""
        noise = normal_like(self.mean, n, generator)
        return self._function_draws(n, generator) + noise * self.noise_variance.sqrt()

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        if self.covariance is None:
            variance = self.total_variance

            def density(y: Tensor) -> Tensor:
                terms = (y - self.mean).square() / variance + (2 * math.pi * variance).log()
                return -0.5 * summed(terms, self.mean.dim())

            return density
        root = torch.linalg.cholesky(self._total_covariance(self.covariance))
        constant = root.diagonal(dim1=1, dim2=2).log().sum(dim=1) + 0.5 * root.shape[-1] * math.log(2 * math.pi)

        def joint(y: Tensor) -> Tensor:
            residual = (y - self.mean).reshape(*y.shape[: y.dim() - self.mean.dim() + 1], -1, 1)
            white = torch.linalg.solve_triangular(root, residual, upper=False).squeeze(-1)
            density: Tensor = -0.5 * white.square().sum(dim=-1) - constant
            return density

        return joint

    def _total_covariance(self, covariance: Tensor) -> Tensor:
        return covariance + torch.diag_embed(rows(self.noise_variance.expand(self.mean.shape)))

    def _mass(self, upper: bool) -> Callable[[Tensor], Tensor]:
        mean, stddev = self.mean.double(), self.stddev.double()
        stddev = stddev.clamp(min=torch.finfo(stddev.dtype).tiny)
        return lambda y: normal_mass((y - mean) / stddev, upper)

    def _quantile(self, tail: float, upper: bool) -> Tensor:
        return self.interval(1 - 2 * tail)[upper]


@dataclass(frozen=True, eq=False)
class RegressionMixture(NumericMixture, RegressionPredictive):
    """p(y) = Σ π_m N(y; f_m, Var_m[f] + σ_m²); `noise_variance` = Σ π_m σ_m²."""

    interval = NumericPredictive.interval
    _quantile = NumericPredictive._quantile


@dataclass(frozen=True)
class Regression(Likelihood):
    """Squared error in training. Validation cannot see what δ does outside the data, so evidence is the default."""

    name: str = "regression"
    kind: type[Predictive] = RegressionPredictive
    mixture_kind: type[PredictiveMixture] = RegressionMixture
    noise: bool = True
    calibration: CalibrationMethod = "evidence"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return (outputs - targets).square().mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """1/σ², σ² = 1 where it is not given."""
        ones = torch.ones_like(outputs)
        return ones if noise_variance is None else ones / noise_variance.to(outputs)
