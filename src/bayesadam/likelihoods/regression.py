"""Regression: y = f + N(0, σ²), one noise variance per output, or y = m + N(0, exp g) with outputs m, then g."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.predictive import (
    NumericMixture,
    NumericPredictive,
    Predictive,
    level_quantile,
    like,
    nodes_like,
    normal_like,
    normal_mass,
    place_blocks,
    rows,
    summed,
)
from bayesadam.likelihoods.record import FEWEST_TO_JUDGE, CalibrationMethod, Likelihood

# Nodes to the unit of the quadrature over log-variances.
_NODES_PER_UNIT = 2
# By so many nats a target is likelier where the two halves of the outputs are taken for something else.
_CLEARLY = 0.2


@dataclass(frozen=True, eq=False)
class RegressionPredictive(NumericPredictive):
    """y = f + N(0, σ²), a Gaussian for every output.

    Where σ² is not known, whatever depends on it warns: `stddev`, `interval`, `log_prob`, `entropy` and `sample` are then of
    f alone.

    Attributes:
        noise_variance: σ² by output, or 0 where it is not known: see `calibrate`.
        noise_known: whether it is.
    """

    noise_variance: Tensor = field(default_factory=lambda: torch.zeros(()))
    noise_known: bool = True

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        return self.variance + self._noise

    @property
    def _noise(self) -> Tensor:
        """σ², with a warning where it is not known."""
        if not self.noise_known:
            warn(
                "the noise of the observations is not known and counts as 0, so this is the network's uncertainty alone: "
                "calibrate(posterior, held_out, likelihood='regression') estimates it, posterior.replace(noise_variance=...) "
                "gives it, and predictive.variance is that of the function without a warning"
            )
        return self.noise_variance

    def _epistemic(self) -> Tensor | None:
        """½ Σ Var[f]/σ² over outputs; None where σ² is not known."""
        if not bool((self.noise_variance > 0).all()):
            return None
        return rows(self.variance / self.noise_variance).sum(dim=1) / 2

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with probability `level`."""
        if not 0 < level < 1:
            raise SettingError(f"level must lie between 0 and 1, got {level!r}")
        reach = level_quantile(level) * self.stddev
        return self.mean - reach, self.mean + reach

    def entropy(self) -> Tensor:
        """The differential entropy of y in nats, one number per example; of the joint outputs where the covariance is known."""
        if self.covariance is not None:
            log_det: Tensor = torch.linalg.slogdet(self._total_covariance(self.covariance)).logabsdet
            return 0.5 * (log_det + self.covariance.shape[-1] * math.log(2 * math.pi * math.e))
        return (0.5 * (2 * math.pi * math.e * rows(self.total_variance)).log()).sum(dim=1)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...)."""
        noise = normal_like(self.mean, n, generator)
        return self._function_draws(n, generator) + noise * self._noise.sqrt()

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        if self.covariance is None:
            variance = self.total_variance

            def density(y: Tensor) -> Tensor:
                terms = (y - self.mean).square() / variance + (2 * math.pi * variance).log()
                return -0.5 * summed(terms, self.mean.dim())

            return density
        root: Tensor = torch.linalg.cholesky(self._total_covariance(self.covariance))
        constant = root.diagonal(dim1=1, dim2=2).log().sum(dim=1) + 0.5 * root.shape[-1] * math.log(2 * math.pi)

        def joint(y: Tensor) -> Tensor:
            residual = (y - self.mean).reshape(*y.shape[: y.dim() - self.mean.dim() + 1], -1, 1)
            white: Tensor = torch.linalg.solve_triangular(root, residual, upper=False).squeeze(-1)
            return -0.5 * white.square().sum(dim=-1) - constant

        return joint

    def _total_covariance(self, covariance: Tensor) -> Tensor:
        return covariance + torch.diag_embed(rows(self._noise.expand(self.mean.shape)))

    def _targets(self, y: Tensor) -> Tensor:
        return _regressed(y, self.mean)

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
    noise: bool = True
    calibration: CalibrationMethod = "evidence"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return (outputs - targets).square().mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """1/σ², σ² = 1 where it is not given."""
        ones = torch.ones_like(outputs)
        return ones if noise_variance is None else ones / noise_variance.to(outputs)

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the outputs' shape; the error knows networks of other likelihoods by theirs."""
        return _regressed(targets, outputs)

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Counts to which the exponentials of the outputs are nearer than the outputs: these are log-rates."""
        if targets is None:
            return None
        counts = bool(((targets >= 0) & (targets == targets.floor())).all()) and bool((targets > 1).any())
        if not counts:
            return None
        away, away_of_rates = ((targets - f).double().square().mean() for f in (outputs, outputs.exp()))
        if not bool(away_of_rates < away):
            return None
        return (
            f"the targets are counts, and exp(output) is nearer to them than the output is (root mean squared error "
            f"{float(away_of_rates.sqrt()):.3g} against {float(away.sqrt()):.3g}), as of a network that was trained for "
            "log-rates: use likelihood='poisson'"
        )


def _regressed(y: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the outputs' shape, one for each."""
    try:
        return like(y, outputs)
    except MatchError as error:
        if y.dim() == 0 or not len(y) == len(outputs) > 0:
            raise
        k = outputs[0].numel()
        if k == 2 * y[0].numel():
            hint = "means and log-variances are likelihood='heteroscedastic'"
        elif y[0].numel() == 1 and not y.is_floating_point() and k > 1:
            hint = "class indices are likelihood='classification'"
        else:
            raise
        raise MatchError(f"{error}. One output per target is likelihood='regression'; {hint}") from None


@dataclass(frozen=True, eq=False)
class HeteroscedasticPredictive(NumericPredictive):
    """p(y) = E_g[N(y; E[m | g], Var[m | g] + exp g)] for each target, (m, g) being Gaussian.

    The last dimension of the outputs holds k means m, then k log-variances g; so do `mean`, `variance`, `covariance` and
    `draws`. m is integrated in closed form, g by quadrature, or over its draws where the prediction sampled. m and g are
    independent unless the prediction was made with `covariance=True`; the k targets of an example always are, but for
    `sample`.
    """

    @property
    def predicted_mean(self) -> Tensor:
        """E[y] = E[m], (batch, ..., k)."""
        return self.mean.chunk(2, dim=-1)[0]

    @property
    def noise_variance(self) -> Tensor:
        """E[exp g], the expected observation noise; exp(E[g] + Var[g]/2) where g is Gaussian."""
        if self.draws is not None:
            return self.draws.chunk(2, dim=-1)[1].exp().mean(dim=0)
        return (self.mean + self.variance / 2).chunk(2, dim=-1)[1].exp()

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Var[m] + E[exp g]."""
        return self.variance.chunk(2, dim=-1)[0] + self.noise_variance

    def _epistemic(self) -> Tensor | None:
        """½ Σ (exp(−g) Var m + ½ Var g) over targets."""
        (_, log_variance), (of_mean, of_log) = (t.chunk(2, dim=-1) for t in (self.mean, self.variance))
        return rows((-log_variance).exp() * of_mean + of_log / 2).sum(dim=1) / 2

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ..., k)."""
        mean, log_variance = self._function_draws(n, generator).chunk(2, dim=-1)
        return mean + normal_like(self.predicted_mean, n, generator) * (log_variance / 2).exp()

    @cached_property
    def _components(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and standard deviations of the Gaussians that p(y) is a mixture of, (nodes, batch, ..., k)."""
        (mean, centre), (variance, width) = self.mean.chunk(2, dim=-1), self.variance.chunk(2, dim=-1)
        if self.draws is None:
            z, weights = nodes_like(_NODES_PER_UNIT, centre)
            away = z * width.sqrt()
        else:
            away = self.draws.chunk(2, dim=-1)[1] - centre
            weights = torch.full_like(away[:, :1], 1 / len(away))
        if self.covariance is not None:
            k = mean.shape[-1]
            cross = place_blocks(self.covariance, self.mean)[..., :k, k:].diagonal(dim1=-2, dim2=-1)
            slope = cross / width.clamp(min=torch.finfo(width.dtype).tiny)
            mean, variance = mean + slope * away, (variance - slope * cross).clamp(min=0)
        return weights, mean.expand_as(away), (variance + (centre + away).exp()).sqrt()

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        weights, means, stddevs = self._components
        constant = weights.log() - stddevs.log() - 0.5 * math.log(2 * math.pi)

        def density(y: Tensor) -> Tensor:
            white = (y.unsqueeze(-means.dim()) - means) / stddevs
            return summed(torch.logsumexp(constant - 0.5 * white.square(), -means.dim()), self.mean.dim())

        return density

    def _mass(self, upper: bool) -> Callable[[Tensor], Tensor]:
        weights, means, stddevs = (part.double() for part in self._components)
        return lambda y: (weights * normal_mass((y - means) / stddevs, upper)).sum(dim=0)

    def _bracket(self, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        _, means, stddevs = self._components
        ends = means + (1 if upper else -1) * level_quantile(1 - 2 * tail) * stddevs
        return ends.amin(dim=0), ends.amax(dim=0)


@dataclass(frozen=True, eq=False)
class HeteroscedasticMixture(NumericMixture, HeteroscedasticPredictive):
    """p(y) = Σ π_m p_m(y), each member a mixture of Gaussians itself."""

    @property
    def noise_variance(self) -> Tensor:
        """Σ π_m E_m[exp g]."""
        return self._averaged(lambda member: member.noise_variance)


@dataclass(frozen=True)
class Heteroscedastic(Likelihood):
    """Gaussian with a variance of its own for every input; 2 k outputs for k targets, means first.

    The Hessian in (m, g) is taken in expectation over y, diag(exp(−g), ½): at a single y it is not positive.
    """

    name: str = "heteroscedastic"
    kind: type[Predictive] = HeteroscedasticPredictive
    outputs_per_target: int = 2

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ ((y − m)² exp(−g) + g), the negative log-likelihood without its constant, a mean over targets too."""
        mean, log_variance = outputs.chunk(2, dim=-1)
        return 0.5 * ((targets - mean).square() * (-log_variance).exp() + log_variance).mean(dim=(1, 2))

    def n_outputs(self, targets: Tensor) -> int:
        """Two per target."""
        return 2 * super().n_outputs(targets)

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp(−g) for the means, ½ for the log-variances."""
        precision = (-outputs.chunk(2, dim=-1)[1]).exp()
        return torch.cat([precision, torch.full_like(precision, 0.5)], dim=-1)

    def locations(self, outputs: Tensor) -> Tensor:
        """The means."""
        if outputs.dim() < 2 or outputs.shape[-1] % 2:
            raise MatchError(
                f"heteroscedastic needs two outputs per target in the last dimension, means first, then log-variances, but "
                f"the outputs have shape {tuple(outputs.shape)}: for one output per target use likelihood='regression'"
            )
        return outputs.chunk(2, dim=-1)[0]

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Targets that are likelier by far, half of them and all together, where the outputs are taken for something else."""
        if targets is None or len(targets) < FEWEST_TO_JUDGE:
            return None
        f, y = outputs.double(), targets.double()
        mean, spread = f.chunk(2, dim=-1)
        k = mean.shape[-1]
        halves = "torch.cat([(f := model(x).chunk(2, -1))[0], {} * f[1].log()], -1)"
        others = {
            "log-variances first, then means": (spread, mean, f"model(x).roll({k}, -1)"),
            "means, then log standard deviations": (
                mean,
                2 * spread,
                f"model(x) * torch.tensor({[1.0] * k + [2.0] * k})",
            ),
        }
        if bool((spread > 0).all()):
            others["means, then variances"] = mean, spread.log(), halves.format(1)
            others["means, then standard deviations"] = mean, 2 * spread.log(), halves.format(2)
        if k > 1:
            one, two = f.reshape(*mean.shape, 2).unbind(dim=-1)
            words = "a mean and a log-variance for one target after the other"
            others[words] = one, two, "torch.cat([model(x)[..., ::2], model(x)[..., 1::2]], -1)"
        own = _surprise(y, mean, spread)
        gains = {words: own - _surprise(y, m, g) for words, (m, g, _) in others.items()}
        words, gain = max(gains.items(), key=lambda item: float(item[1].median()))
        if not bool(gain.median() > _CLEARLY) or not bool(gain.mean() > _CLEARLY):
            return None
        return (
            f"the held-out targets are likelier by {float(gain.median()):.2g} nats if the outputs are {words}, but "
            "likelihood='heteroscedastic' takes them for means, then log-variances: pass "
            f"forward=lambda model, x: {others[words][2]}, or train on if they are what it takes them for"
        )


def _surprise(y: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """−log N(y; m, exp g) without its constant."""
    return 0.5 * ((y - mean).square() * (-log_variance).exp() + log_variance)
