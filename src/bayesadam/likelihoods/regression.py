"""Regression: y = f + N(0, σ²), one noise variance per output, or y = m + N(0, exp g) with outputs m, then g."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.likelihoods.component import Component
from bayesadam.likelihoods.numeric import GaussianLikelihood, nodes_like
from bayesadam.likelihoods.predictive import (
    FEWEST_TO_JUDGE,
    CalibrationMethod,
    function_draws,
    like,
    normal_like,
    position_blocks,
    rows,
)

# Nodes to the unit of the quadrature over log-variances.
_NODES_PER_UNIT = 2
# By so many nats targets must be likelier before another reading of the outputs is suggested.
_CLEARLY = 0.2


class Regression(GaussianLikelihood):
    """y = f + N(0, σ²), a Gaussian for every output, squared error in training.

    Validation cannot see what δ does outside the data, so evidence is the default of `calibrate`.
    """

    name = "regression"
    noise = True
    calibration: CalibrationMethod = "evidence"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return (outputs - targets).square().mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """1/σ², σ² = 1 where it is not given."""
        ones = torch.ones_like(outputs)
        return ones if noise_variance is None else ones / noise_variance.to(outputs)

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the outputs' shape; the error names the likelihood that outputs of another shape are of."""
        try:
            return like(targets, outputs)
        except MatchError as error:
            if targets.dim() == 0 or not len(targets) == len(outputs) > 0:
                raise
            outputs_of_one, targets_of_one = outputs[0].numel(), targets[0].numel()
            if outputs_of_one == 2 * targets_of_one:
                hint = "means and log-variances are likelihood='heteroscedastic'"
            elif targets_of_one == 1 and not targets.is_floating_point() and outputs_of_one > 1:
                hint = "class indices are likelihood='classification'"
            else:
                raise
            raise MatchError(f"{error}. One output per target is likelihood='regression'; {hint}") from None

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[f]."""
        return c.mean

    def _noise(self, c: Component) -> Tensor:
        """σ², with a warning where it is not known."""
        if c.noise_variance is None:
            warn(
                "the noise of the observations is not known and counts as 0, so this is the network's uncertainty "
                "alone: calibrate(posterior, held_out, likelihood='regression') estimates it, "
                "posterior.replace(noise_variance=...) gives it, and predictive.variance is that of the function "
                "without a warning"
            )
        return self.noise_variance(c)

    def total_variance(self, c: Component) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        return c.variance + self._noise(c)

    def _total_covariance(self, c: Component, covariance: Tensor) -> Tensor:
        return covariance + torch.diag_embed(rows(self._noise(c).expand(c.mean.shape)))

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """f + N(0, σ²)."""
        noise = normal_like(c.mean, n, generator)
        return function_draws(c, n, generator) + noise * self._noise(c).sqrt()

    def entropy(self, c: Component) -> Tensor:
        """½ log det(2πe Cov[y]); of independent outputs where the covariance is not known."""
        if c.covariance is None:
            return (0.5 * (2 * math.pi * math.e * rows(self.total_variance(c))).log()).sum(dim=1)
        log_det: Tensor = torch.linalg.slogdet(self._total_covariance(c, c.covariance)).logabsdet
        return 0.5 * (log_det + c.covariance.shape[-1] * math.log(2 * math.pi * math.e))

    def gaussians(self, c: Component) -> tuple[Tensor, Tensor, Tensor]:
        """One, N(E[f], Var[f] + σ²)."""
        return torch.ones_like(c.mean[None]), c.mean[None], self.total_variance(c).sqrt().expand(c.mean.shape)[None]

    def log_density(self, c: Component) -> Callable[[Tensor], Tensor]:
        """log N(y; E[f], Cov[f] + σ²)."""
        if c.covariance is None:
            return super().log_density(c)
        root: Tensor = torch.linalg.cholesky(self._total_covariance(c, c.covariance))
        log_det = root.diagonal(dim1=1, dim2=2).log().sum(dim=1) + 0.5 * root.shape[-1] * math.log(2 * math.pi)

        def joint(y: Tensor) -> Tensor:
            residual = (y - c.mean).reshape(*y.shape[: y.dim() - c.mean.dim() + 1], -1, 1)
            white: Tensor = torch.linalg.solve_triangular(root, residual, upper=False).squeeze(-1)
            return -0.5 * white.square().sum(dim=-1) - log_det

        return joint

    def distance(self, c: Component, y: Tensor) -> Tensor:
        """√(rᵀ (Cov[f] + σ²)⁻¹ r), r = y − E[f]: the studentised residual |r|/√(σ² + Var[f]) of a single output.

        For an example that the posterior has not seen this is, in a linear model, the textbook's |r|/(σ√(1 − h)), r and
        h those of a fit with it. One that was trained on has pulled f towards itself, which is not corrected for:
        Var[f] of a network is far too rough for that.
        """
        if c.covariance is None:
            return super().distance(c, y)
        residual = rows(y - c.mean)
        white = torch.linalg.solve(self._total_covariance(c, c.covariance), residual.unsqueeze(-1)).squeeze(-1)
        found: Tensor = (residual * white).sum(dim=-1).clamp(min=0).sqrt()
        return found

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Counts to which the exponentials of the outputs are nearer than the outputs: these are log-rates."""
        if targets is None:
            return None
        if not bool(((targets >= 0) & (targets == targets.floor())).all()) or not bool((targets > 1).any()):
            return None
        away, away_of_rates = ((targets - f).double().square().mean() for f in (outputs, outputs.exp()))
        if not bool(away_of_rates < away):
            return None
        return (
            "the targets are counts, and exp(output) is nearer to them than the output is (root mean squared error "
            f"{float(away_of_rates.sqrt()):.3g} against {float(away.sqrt()):.3g}), as of a network that was trained "
            "for log-rates: use likelihood='poisson'"
        )


class Heteroscedastic(GaussianLikelihood):
    """y = m + N(0, exp g), a variance of its own for every input: 2 k outputs for k targets, means first.

    p(y) = E_g[N(y; E[m | g], Var[m | g] + exp g)] for each target, (m, g) being Gaussian: m is integrated in closed
    form, g by quadrature, or over its draws where the prediction sampled. m and g are independent unless the prediction
    was made with `covariance=True`; the k targets of an example always are, but for `sample`.

    The Hessian in (m, g) is taken in expectation over y, diag(exp(−g), ½): at a single y it is not positive.
    """

    name = "heteroscedastic"
    outputs_per_target = 2
    weight_decay = 0.1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ ((y − m)² exp(−g) + g), the negative log-likelihood without its constant, a mean over targets too."""
        return _nll(targets, *outputs.chunk(2, dim=-1)).mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp(−g) for the means, ½ for the log-variances."""
        precision = (-outputs.chunk(2, dim=-1)[1]).exp()
        return torch.cat([precision, torch.full_like(precision, 0.5)], dim=-1)

    def locations(self, outputs: Tensor) -> Tensor:
        """The means."""
        if outputs.dim() < 2 or outputs.shape[-1] % 2:
            raise MatchError(
                "heteroscedastic needs two outputs per target in the last dimension, means first, then log-variances, "
                f"but the outputs have shape {tuple(outputs.shape)}: for one output per target use "
                "likelihood='regression'"
            )
        return outputs.chunk(2, dim=-1)[0]

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[m], (batch, ..., k)."""
        return c.mean.chunk(2, dim=-1)[0]

    def total_variance(self, c: Component) -> Tensor:
        """Var[y] = Var[m] + E[exp g]."""
        return c.variance.chunk(2, dim=-1)[0] + self.noise_variance(c)

    def noise_variance(self, c: Component) -> Tensor:
        """E[exp g], exp(E[g] + Var[g]/2) where g is Gaussian."""
        if c.draws is not None:
            return c.draws.chunk(2, dim=-1)[1].exp().mean(dim=0)
        return (c.mean + c.variance / 2).chunk(2, dim=-1)[1].exp()

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """m + N(0, exp g) at draws of (m, g)."""
        mean, log_variance = function_draws(c, n, generator).chunk(2, dim=-1)
        return mean + normal_like(self.expected(c), n, generator) * (log_variance / 2).exp()

    def gaussians(self, c: Component) -> tuple[Tensor, Tensor, Tensor]:
        """One for each node, or draw, of g."""
        (mean, centre), (variance, width) = c.mean.chunk(2, dim=-1), c.variance.chunk(2, dim=-1)
        if c.draws is None:
            z, weights = nodes_like(_NODES_PER_UNIT, centre)
            away = z * width.sqrt()
        else:
            away = c.draws.chunk(2, dim=-1)[1] - centre
            weights = torch.full_like(away[:, :1], 1 / len(away))
        if c.covariance is not None:
            k = mean.shape[-1]
            cross = position_blocks(c.covariance, c.mean)[..., :k, k:].diagonal(dim1=-2, dim2=-1)
            slope = cross / width.clamp(min=torch.finfo(width.dtype).tiny)
            mean, variance = mean + slope * away, (variance - slope * cross).clamp(min=0)
        return weights, mean.expand_as(away), (variance + (centre + away).exp()).sqrt()

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Targets that are likelier by far, half of them and all together, under another reading of the outputs."""
        if targets is None or len(targets) < FEWEST_TO_JUDGE:
            return None
        f, y = outputs.double(), targets.double()
        mean, spread = f.chunk(2, dim=-1)
        k = mean.shape[-1]
        halves = "torch.cat([(f := model(x).chunk(2, -1))[0], {} * f[1].log()], -1)"
        doubled = f"model(x) * torch.tensor({[1.0] * k + [2.0] * k})"
        readings = {
            "log-variances first, then means": (spread, mean, f"model(x).roll({k}, -1)"),
            "means, then log standard deviations": (mean, 2 * spread, doubled),
        }
        if bool((spread > 0).all()):
            readings["means, then variances"] = mean, spread.log(), halves.format(1)
            readings["means, then standard deviations"] = mean, 2 * spread.log(), halves.format(2)
        if k > 1:
            one, two = f.reshape(*mean.shape, 2).unbind(dim=-1)
            code = "torch.cat([model(x)[..., ::2], model(x)[..., 1::2]], -1)"
            readings["a mean and a log-variance for one target after the other"] = one, two, code
        own = _nll(y, mean, spread)
        gains = {words: own - _nll(y, m, g) for words, (m, g, _) in readings.items()}
        words, gain = max(gains.items(), key=lambda item: float(item[1].median()))
        if not bool(gain.median() > _CLEARLY) or not bool(gain.mean() > _CLEARLY):
            return None
        return (
            f"the held-out targets are likelier by {float(gain.median()):.2g} nats if the outputs are {words}, but "
            "likelihood='heteroscedastic' takes them for means, then log-variances: pass "
            f"forward=lambda model, x: {readings[words][2]}, or train on if they are means and log-variances"
        )


def _nll(y: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """−log N(y; m, exp g) without its constant."""
    return 0.5 * ((y - mean).square() * (-log_variance).exp() + log_variance)
