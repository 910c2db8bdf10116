"""Numbers: their predictive and `NumericLikelihood`; y = f + N(0, σ²), or y = m + N(0, exp g), outputs m, then g."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.abstention import doubt_of_numbers
from bayesadam.likelihoods.component import Component, function_draws, normal_like, position_blocks, rows
from bayesadam.likelihoods.conformal import Guarantee, check_level, threshold
from bayesadam.likelihoods.predictive import CalibrationMethod, Likelihood, Predictive, average, mixed, pooled

_ENTROPY_DRAWS = 256
_HALVINGS = 64
# Quantiles are looked for up to here.
_FAR = 1e18
# Nodes to the unit of the quadrature over log-variances.
_NODES_PER_UNIT = 2


@dataclass(frozen=True, eq=False, repr=False)
class NumericPredictive(Predictive):
    """p(y) of targets that are numbers, (batch, ..., k).

    Where a regression's σ² is not known, it counts as 0 and what depends on it warns: `stddev`, `interval`, `log_prob`,
    `entropy` and `sample` are then those of f alone.
    """

    likelihood: NumericLikelihood

    @property
    def predicted_mean(self) -> Tensor:
        """E[y] = Σ π_m E_m[y]."""
        return average(self.weights, [self.likelihood.expected(c) for c in self.components])

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Σ π_m (Var_m[y] + (E_m[y] − E[y])²), observation noise included."""
        each = [(self.likelihood.expected(c), self.likelihood.total_variance(c)) for c in self._noisy]
        return mixed(self.weights, each)[1]

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of y, observation noise included."""
        return self.total_variance.sqrt()

    @property
    def noise_variance(self) -> Tensor:
        """E[Var[y | f]], the expected observation noise: σ² of a regression, 0 where it is not known."""
        return average(self.weights, [self.likelihood.noise_variance(c) for c in self.components])

    @property
    def noise_known(self) -> bool:
        """Whether a regression's σ² was calibrated or given."""
        return not self.likelihood.noise or all(c.noise_variance is not None for c in self.components)

    @property
    def _noisy(self) -> tuple[Component, ...]:
        """The components, with a warning where their noise is not known."""
        if not self.noise_known:
            warn(
                "the noise of the observations is not known and counts as 0, so this is the network's uncertainty "
                "alone: calibrate(posterior, held_out, likelihood='regression') estimates it, "
                "posterior.replace(noise_variance=...) gives it, and predictive.variance is that of the function "
                "without a warning"
            )
        return self.components

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number per example; outputs are taken as independent unless the covariance is known."""
        y = self.likelihood.matched(y, self.mean)
        return pooled(self.weights, [self.likelihood.log_density(c, y) for c in self._noisy])

    def _sample(self, number: int, n: int, generator: torch.Generator | None) -> Tensor:
        return self.likelihood.sample(self._noisy[number], n, generator)

    def entropy(self) -> Tensor:
        """The entropy of y in nats, one number per example: Σ π_m H_m + I(y; m).

        I = Σ π_m E_m[log p_m(y)/p(y)] has no closed form: it is the average over 256 draws of each component, always
        the same ones, and is right to some hundredths.
        """
        known = average(self.weights, [self.likelihood.entropy(c) for c in self._noisy])
        if len(self.components) == 1:
            return known
        between = torch.zeros_like(known)
        for number, weight in enumerate(self.weights):
            y = self.likelihood.fixed_draws(self.components[number], number)
            scores = [self.likelihood.log_density(c, y) for c in self.components]
            between += weight * (scores[number] - pooled(self.weights, scores)).mean(dim=0)
        return known + between.clamp(min=0).minimum(torch.special.entr(between.new_tensor(self.weights)).sum())

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each output: at most (1 − level)/2 of the probability lies on either side of it."""
        check_level(level)
        tail = (1 - level) / 2
        # Cantelli's inequality: no quantile is farther from the mean.
        centre, reach = self.predicted_mean.double(), self.stddev.double() * math.sqrt(1 / tail - 1)
        low, high = (centre - reach).nan_to_num(-_FAR), (centre + reach).nan_to_num(_FAR)
        bounds = low.clamp(min=-_FAR), high.clamp(max=_FAR)
        return self._quantile(tail, bounds, upper=False), self._quantile(tail, bounds, upper=True)

    def _quantile(self, tail: float, bounds: tuple[Tensor, Tensor], upper: bool) -> Tensor:
        """The least y with P(Y ≤ y) ≥ `tail`, or with P(Y > y) ≤ `tail`, by halving."""
        low, high = bounds
        for _ in range(_HALVINGS):
            if bool((high - low <= self.likelihood.resolution).all()):
                break
            middle = (low + high) / 2
            mass = average(self.weights, [self.likelihood.mass(c, middle, upper) for c in self.components])
            below = mass > tail if upper else mass < tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (high.round() if self.likelihood.resolution else (low + high) / 2).to(self.mean)

    def prediction_set(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out.

        q is the conformal quantile of the held-out residuals in standard deviations, whatever the predictive's shape.
        """
        check_level(level)
        centre = self.predicted_mean
        reach = threshold(self._held_out("residuals"), level).to(centre) * rows(self.stddev)
        return centre - reach.view_as(centre), centre + reach.view_as(centre)

    @property
    def doubt(self) -> Tensor:
        """The standard deviation of y, (batch,), the largest of several targets."""
        return doubt_of_numbers(self.stddev)

    def wrong(self, targets: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether |y − E[y]| > tolerance, (batch,); of several targets, whether of any."""
        if tolerance is None and self.abstention is not None:
            tolerance = self.abstention.tolerance
        if tolerance is None:
            raise SettingError("a number is wrong where it is farther from y than a tolerance: pass tolerance=")
        y = self.likelihood.matched(targets, self.mean)
        return rows((y - self.predicted_mean).abs() > tolerance).any(dim=1)

    def conformity(self, targets: Tensor, *, seed: int) -> Guarantee:
        """|y − E[y]| in standard deviations."""
        y = self.likelihood.matched(targets, self.mean)
        return {"residuals": rows((y - self.predicted_mean).abs() / self.stddev)}


class NumericLikelihood(Likelihood[NumericPredictive]):
    """p(y | f) of numbers. Its methods are of one component c.

    Intervals of a new one are right to some hundredths of the probability; `mass` makes them exact.

    Attributes:
        resolution: half the distance of neighbouring targets or less; 0 where targets are real.
    """

    kind = NumericPredictive
    resolution: float = 0.0

    @abstractmethod
    def expected(self, c: Component) -> Tensor:
        """E[y]."""

    @abstractmethod
    def total_variance(self, c: Component) -> Tensor:
        """Var[y], observation noise included."""

    @abstractmethod
    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of y."""

    @abstractmethod
    def log_density(self, c: Component, y: Tensor) -> Tensor:
        """log p(y), (..., batch), of y, (..., batch, ...)."""

    def noise_variance(self, c: Component) -> Tensor:
        """σ² of the observations, 0 where there is none."""
        return c.mean.new_zeros(()) if c.noise_variance is None else c.noise_variance.to(c.mean)

    def mass(self, c: Component, y: Tensor, upper: bool) -> Tensor:
        """P(Y > y) if `upper`, else P(Y ≤ y), for each output, in float64; by draws."""
        draws = self.fixed_draws(c, 0)
        return (draws > y if upper else draws <= y).double().mean(dim=0)

    def entropy(self, c: Component) -> Tensor:
        """The entropy of y, one number per example: the mean of −log p over 256 draws, always the same ones."""
        return -self.log_density(c, self.fixed_draws(c, 0)).mean(dim=0)

    def fixed_draws(self, c: Component, seed: int) -> Tensor:
        """256 draws of y, the same at every call."""
        generator = torch.Generator(device=c.mean.device).manual_seed(seed)
        return self.sample(replace(c, draws=None), _ENTROPY_DRAWS, generator)

    def distance(self, c: Component, y: Tensor) -> Tensor:
        """√Σ (y − E[y])²/Var[y] over targets, (batch,): how many standard deviations y is from E[y]."""
        return rows((y - self.expected(c)).square() / self.total_variance(c)).sum(dim=1).sqrt()


class GaussianLikelihood(NumericLikelihood):
    """p(y) = Σ w N(y; mean, stddev²), a finite mixture of Gaussians for each target."""

    @abstractmethod
    def gaussians(self, c: Component) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and standard deviations, (n, batch, ..., k)."""

    def log_density(self, c: Component, y: Tensor) -> Tensor:
        """log Σ w N(y; mean, stddev²), summed over targets."""
        weights, means, stddevs = self.gaussians(c)
        first = -means.dim()
        white = (y.unsqueeze(first) - means) / stddevs
        scores = weights.log() - stddevs.log() - 0.5 * math.log(2 * math.pi) - 0.5 * white.square()
        return summed(scores.logsumexp(first), means.dim() - 1)

    def mass(self, c: Component, y: Tensor, upper: bool) -> Tensor:
        """Σ w P(N(mean, stddev²) ≤ y), or > y; `torch.special.ndtr` loses the digits of small ones."""
        weights, means, stddevs = (part.double() for part in self.gaussians(c))
        scale = stddevs.clamp(min=torch.finfo(torch.float64).tiny) * (math.sqrt(2) if upper else -math.sqrt(2))
        return (weights * torch.erfc((y - means) / scale)).sum(dim=0) / 2


class Regression(GaussianLikelihood):
    """y = f + N(0, σ²). Validation cannot see what δ does outside the data, so `calibrate` takes evidence."""

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

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[f]."""
        return c.mean

    def total_variance(self, c: Component) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        return c.variance + self.noise_variance(c)

    def _joint(self, c: Component) -> Any:
        """N(E[f], Cov[f] + σ²) over the outputs of an example, where the covariance is known."""
        if c.covariance is None:
            return None
        noise = torch.diag_embed(rows(self.noise_variance(c).expand(c.mean.shape)))
        return MultivariateNormal(rows(c.mean), c.covariance + noise, validate_args=False)

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """f + N(0, σ²)."""
        noise = normal_like(c.mean, n, generator)
        return function_draws(c, n, generator) + noise * self.noise_variance(c).sqrt()

    def entropy(self, c: Component) -> Tensor:
        """½ log det(2πe Cov[y]); of independent outputs where the covariance is not known."""
        if (joint := self._joint(c)) is not None:
            found: Tensor = joint.entropy()
            return found
        return (0.5 * (2 * math.pi * math.e * rows(self.total_variance(c))).log()).sum(dim=1)

    def gaussians(self, c: Component) -> tuple[Tensor, Tensor, Tensor]:
        """One, N(E[f], Var[f] + σ²)."""
        return torch.ones_like(c.mean[None]), c.mean[None], self.total_variance(c).sqrt().expand(c.mean.shape)[None]

    def log_density(self, c: Component, y: Tensor) -> Tensor:
        """log N(y; E[f], Cov[f] + σ²)."""
        if (joint := self._joint(c)) is None:
            return super().log_density(c, y)
        found: Tensor = joint.log_prob(y.reshape(*y.shape[: y.dim() - c.mean.dim()], *joint.loc.shape))
        return found

    def distance(self, c: Component, y: Tensor) -> Tensor:
        """√(rᵀ (Cov[f] + σ²)⁻¹ r), r = y − E[f]: the studentised residual |r|/√(σ² + Var[f]) of a single output.

        An example that was trained on has pulled f towards itself, which is not corrected for: Var[f] of a network is
        far too rough for that.
        """
        if (joint := self._joint(c)) is None:
            return super().distance(c, y)
        residual = rows(y - c.mean).unsqueeze(-1)
        white: Tensor = torch.linalg.solve_triangular(joint.scale_tril, residual, upper=False).squeeze(-1)
        return white.square().sum(dim=-1).sqrt()


class Heteroscedastic(GaussianLikelihood):
    """y = m + N(0, exp g), a variance of its own for every input: 2 k outputs for k targets, means first.

    p(y) = E_g[N(y; E[m | g], Var[m | g] + exp g)] for each target, (m, g) being Gaussian: m is integrated in closed
    form, g by quadrature, or over its draws where the prediction sampled. m and g are independent unless the prediction
    was made with `covariance=True`; the k targets of an example always are, but for `sample`.

    Where `noise_variance` is known, as after `calibrate`, it is the most that exp g counts for: far from the data g may
    be anything.

    The Hessian in (m, g) is taken in expectation over y, diag(exp(−g), ½): at a single y it is not positive.
    """

    name = "heteroscedastic"
    outputs_per_target = 2
    weight_decay = 0.1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ ((y − m)² exp(−g) + g), the negative log-likelihood without its constant, a mean over targets too."""
        return self._nll(outputs, targets).mean(dim=(1, 2))

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Each target's loss times exp(g/2), a constant to the gradient, so that noisy inputs' means are learnt too.

        It is β-NLL with β = ½ (Seitzer et al. 2022).
        """
        weight = (outputs.detach().chunk(2, dim=-1)[1] / 2).exp()
        return (weight * self._nll(outputs, targets)).mean(dim=(1, 2))

    def _nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=-1)
        return 0.5 * ((targets - mean).square() * (-log_variance).exp() + log_variance)

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

    def ceiling(self, targets: Tensor) -> Tensor:
        """The largest (y − ȳ)² of each target."""
        return (targets - targets.mean(dim=0)).square().amax(dim=0)

    def noise_variance(self, c: Component) -> Tensor:
        """E[exp g], exp(E[g] + Var[g]/2) where g is Gaussian and nothing bounds it."""
        if c.draws is not None:
            return self._noise(c, c.draws.chunk(2, dim=-1)[1]).mean(dim=0)
        if c.noise_variance is None:
            return (c.mean + c.variance / 2).chunk(2, dim=-1)[1].exp()
        centre, spread = (part.chunk(2, dim=-1)[1] for part in (c.mean, c.variance))
        weights, g = nodes(_NODES_PER_UNIT, centre, spread, None)
        return (weights * self._noise(c, g)).sum(dim=0)

    def _noise(self, c: Component, g: Tensor) -> Tensor:
        """exp g, at most the ceiling."""
        found = g.exp()
        return found if c.noise_variance is None else found.minimum(c.noise_variance.to(found))

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """m + N(0, exp g) at draws of (m, g)."""
        mean, log_variance = function_draws(c, n, generator).chunk(2, dim=-1)
        return mean + normal_like(self.expected(c), n, generator) * self._noise(c, log_variance).sqrt()

    def gaussians(self, c: Component) -> tuple[Tensor, Tensor, Tensor]:
        """One for each node, or draw, of g: E[m | g] and Var[m | g] + exp g."""
        (m, centre), (of_m, of_g) = c.mean.chunk(2, dim=-1), c.variance.chunk(2, dim=-1)
        weights, g = nodes(_NODES_PER_UNIT, centre, of_g, None if c.draws is None else c.draws.chunk(2, dim=-1)[1])
        shared = torch.zeros_like(centre)
        if c.covariance is not None:
            k = centre.shape[-1]
            shared = position_blocks(c.covariance, c.mean)[..., :k, k:].diagonal(dim1=-2, dim2=-1)
        slope = shared / of_g.clamp(min=torch.finfo(g.dtype).tiny)
        return weights, m + slope * (g - centre), ((of_m - slope * shared).clamp(min=0) + self._noise(c, g)).sqrt()


def nodes_like(per_unit: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """z and w with Σ w h(z) ≈ E[h(z)], z ~ N(0, 1), that broadcast against `mean` with a leading dimension.

    The trapezoidal rule on [−8, 8], `per_unit` nodes to the unit: for integrands that are smooth on the scale of a step
    its error falls faster than any power of that step.
    """
    z = torch.arange(-8 * per_unit, 8 * per_unit + 1, dtype=torch.float64).div(per_unit).view(-1, *[1] * mean.dim())
    return z.to(mean), (-0.5 * z.square()).softmax(dim=0).to(mean)


def nodes(per_unit: int, mean: Tensor, variance: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and values, (n, batch, ...), that stand for f: quadrature over a Gaussian, or its draws."""
    if draws is not None:
        return torch.full_like(draws[:, :1], 1 / len(draws)), draws
    z, weights = nodes_like(per_unit, mean)
    return weights, mean + z * variance.sqrt()


def summed(terms: Tensor, dims: int) -> Tensor:
    """(..., batch, ...) of which the last `dims` are the batch and an example's, summed over outputs: (..., batch)."""
    return terms.unsqueeze(-1).flatten(terms.dim() - dims + 1).sum(dim=-1)
