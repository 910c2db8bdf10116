"""Targets that are numbers: moments, densities, quantiles and intervals."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesadam.likelihoods.component import Component
from bayesadam.likelihoods.conformal import Guarantee, check_level, threshold
from bayesadam.likelihoods.predictive import Likelihood, Predictive, average, mixed, pooled, rows

_ENTROPY_DRAWS = 256
_HALVINGS = 64
# Quantiles are looked for up to here.
_FAR = 1e18


@dataclass(frozen=True, eq=False)
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
        each = [(self.likelihood.expected(c), self.likelihood.total_variance(c)) for c in self.components]
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

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number per example; outputs are taken as independent unless the covariance is known."""
        y = self.likelihood.matched(y, self.mean)
        return pooled(self.weights, [self.likelihood.log_density(c)(y) for c in self.components])

    def _sample(self, number: int, n: int, generator: torch.Generator | None) -> Tensor:
        return self.likelihood.sample(self.components[number], n, generator)

    def entropy(self) -> Tensor:
        """The entropy of y in nats, one number per example: Σ π_m H_m + I(y; m).

        I = Σ π_m E_m[log p_m(y)/p(y)] lies between 0 and −Σ π_m log π_m and has no closed form: it is the average over
        256 draws of each component, always the same ones, and is right to some hundredths.
        """
        known = average(self.weights, [self.likelihood.entropy(c) for c in self.components])
        if len(self.components) == 1:
            return known
        densities = [self.likelihood.log_density(c) for c in self.components]
        between = torch.zeros_like(known)
        for number, (component, weight) in enumerate(zip(self.components, self.weights, strict=True)):
            y = self.likelihood.fixed_draws(component, number)
            scores = [density(y) for density in densities]
            between += weight * (scores[number] - pooled(self.weights, scores)).mean(dim=0)
        return known + between.clamp(min=0).minimum(torch.special.entr(between.new_tensor(self.weights)).sum())

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each output: at most (1 − level)/2 of the probability lies on either side of it."""
        check_level(level)
        return self._quantile((1 - level) / 2, upper=False), self._quantile((1 - level) / 2, upper=True)

    def _quantile(self, tail: float, upper: bool) -> Tensor:
        ends = [self.likelihood.quantile(c, tail, upper) for c in self.components]
        if len(ends) == 1:
            return ends[0]
        # A quantile of the mixture lies between the least and the greatest of its components'.
        bounds, masses = torch.stack(ends), [self.likelihood.mass(c, upper) for c in self.components]
        bracket = bounds.amin(dim=0) - self.likelihood.resolution, bounds.amax(dim=0)
        return self.likelihood.halved(lambda y: average(self.weights, [m(y) for m in masses]), bracket, tail, upper)

    def prediction_set(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out.

        q is the conformal quantile of the held-out residuals in standard deviations, whatever the predictive's shape.
        """
        check_level(level)
        centre = self.predicted_mean
        reach = threshold(self._held_out("residuals"), level).to(centre) * rows(self.stddev)
        return centre - reach.view_as(centre), centre + reach.view_as(centre)

    def conformity(self, targets: Tensor, *, seed: int) -> Guarantee:
        """|y − E[y]| in standard deviations."""
        y = self.likelihood.matched(targets, self.mean)
        return Guarantee(residuals=rows((y - self.predicted_mean).abs() / self.stddev))


class NumericLikelihood(Likelihood[NumericPredictive]):
    """p(y | f) of numbers. Its methods are of one component c.

    A new one defines `expected`, `total_variance`, `sample` and `log_density`, besides what every likelihood defines.
    Its intervals are then right to some hundredths of the probability; `mass` makes them exact.

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
    def log_density(self, c: Component) -> Callable[[Tensor], Tensor]:
        """y, (..., batch, ...) → log p(y), (..., batch); factorises once."""

    def noise_variance(self, c: Component) -> Tensor:
        """σ² of the observations, 0 where there is none."""
        return c.mean.new_zeros(()) if c.noise_variance is None else c.noise_variance.to(c.mean)

    def mass(self, c: Component, upper: bool) -> Callable[[Tensor], Tensor]:
        """y → P(Y > y) if `upper`, else P(Y ≤ y), for each output, in float64; by draws."""
        draws = self.fixed_draws(c, 0)
        return lambda y: (draws > y if upper else draws <= y).double().mean(dim=0)

    def bracket(self, c: Component, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        """Two bounds between which the quantile lies, E[y] ± sd[y] √(1/tail − 1), by Cantelli's inequality."""
        centre, stddev = self.expected(c).double(), self.total_variance(c).double().sqrt()
        reach = stddev * math.sqrt(1 / tail - 1)
        return (centre - reach).nan_to_num(-_FAR).clamp(min=-_FAR), (centre + reach).nan_to_num(_FAR).clamp(max=_FAR)

    def quantile(self, c: Component, tail: float, upper: bool) -> Tensor:
        """The least y with P(Y ≤ y) ≥ `tail`, or with P(Y > y) ≤ `tail`."""
        return self.halved(self.mass(c, upper), self.bracket(c, tail, upper), tail, upper).to(c.mean)

    def halved(
        self, mass: Callable[[Tensor], Tensor], bracket: tuple[Tensor, Tensor], tail: float, upper: bool
    ) -> Tensor:
        """The quantile of a mass by halving its bracket."""
        low, high = bracket[0].double(), bracket[1].double()
        for _ in range(_HALVINGS):
            if bool((high - low <= self.resolution).all()):
                break
            middle = (low + high) / 2
            below = mass(middle) > tail if upper else mass(middle) < tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (high.round() if self.resolution else (low + high) / 2).to(bracket[0])

    def entropy(self, c: Component) -> Tensor:
        """The entropy of y, one number per example: the mean of −log p over 256 draws, always the same ones."""
        return -self.log_density(c)(self.fixed_draws(c, 0)).mean(dim=0)

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

    def log_density(self, c: Component) -> Callable[[Tensor], Tensor]:
        """log Σ w N(y; mean, stddev²), summed over targets."""
        weights, means, stddevs = self.gaussians(c)
        constant, first = weights.log() - stddevs.log() - 0.5 * math.log(2 * math.pi), -means.dim()

        def density(y: Tensor) -> Tensor:
            white = (y.unsqueeze(first) - means) / stddevs
            return summed(torch.logsumexp(constant - 0.5 * white.square(), first), means.dim() - 1)

        return density

    def mass(self, c: Component, upper: bool) -> Callable[[Tensor], Tensor]:
        """Σ w P(N(mean, stddev²) ≤ y), or > y; `torch.special.ndtr` loses the digits of small ones."""
        weights, means, stddevs = (part.double() for part in self.gaussians(c))
        scale = stddevs.clamp(min=torch.finfo(torch.float64).tiny) * (math.sqrt(2) if upper else -math.sqrt(2))
        return lambda y: (weights * torch.erfc((y - means) / scale)).sum(dim=0) / 2

    def bracket(self, c: Component, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        """The least and the greatest of the Gaussians' quantiles."""
        _, means, stddevs = self.gaussians(c)
        ends = means + (1 if upper else -1) * level_quantile(1 - 2 * tail) * stddevs
        return ends.amin(dim=0), ends.amax(dim=0)


def nodes_like(per_unit: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """z and w with Σ w h(z) ≈ E[h(z)], z ~ N(0, 1), that broadcast against `mean` with a leading dimension.

    The trapezoidal rule on [−8, 8], `per_unit` nodes to the unit: for integrands that are smooth on the scale of a step
    its error falls faster than any power of that step.
    """
    z = torch.arange(-8 * per_unit, 8 * per_unit + 1, dtype=torch.float64).div(per_unit).view(-1, *[1] * mean.dim())
    return z.to(mean), (-0.5 * z.square()).softmax(dim=0).to(mean)


def summed(terms: Tensor, dims: int) -> Tensor:
    """(..., batch, ...) of which the last `dims` are the batch and an example's, summed over outputs: (..., batch)."""
    return terms.unsqueeze(-1).flatten(terms.dim() - dims + 1).sum(dim=-1)


def level_quantile(level: float) -> float:
    """z with P(|N(0, 1)| ≤ z) = level."""
    return math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
