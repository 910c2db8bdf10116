"""Counts: y ~ Poisson(exp f), one log-rate per target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods.predictive import (
    NumericMixture,
    NumericPredictive,
    Predictive,
    like,
    nodes_like,
    rows,
    summed,
)
from bayesadam.likelihoods.record import FEWEST_TO_JUDGE, Likelihood

# Nodes to the unit: of log p, centred on each target, and of the cumulative distribution, which has steep steps.
_NODES_PER_UNIT = 2
_STEEP_NODES_PER_UNIT = 16
_NEWTON_STEPS = 20
# Rates are cut off at exp of this: a posterior so wide says nothing, but its interval must stay a number.
_LARGEST = 40.0
# Counts that vary so many times as much about their rates as Poisson counts do are no Poisson counts.
_DISPERSED = 2.0


@dataclass(frozen=True, eq=False)
class PoissonPredictive(NumericPredictive):
    """p(y) = E_f[Poisson(y; exp f)], f Gaussian for each target, or over the draws of f where the prediction sampled."""

    _resolution: ClassVar[float] = 0.25

    @property
    def predicted_mean(self) -> Tensor:
        """E[y] = E[exp f], exp(E[f] + Var[f]/2) where f is Gaussian."""
        return (self.mean + self.variance / 2).exp() if self.draws is None else self.draws.exp().mean(dim=0)

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = E[exp f] + Var[exp f]."""
        rate = self.predicted_mean
        if self.draws is None:
            return rate + rate.square() * self.variance.expm1()
        return rate + self.draws.exp().var(dim=0)

    def _epistemic(self) -> Tensor | None:
        """½ Σ exp(E[f]) Var[f] over outputs."""
        return rows(self.mean.exp() * self.variance).sum(dim=1) / 2

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...)."""
        return torch.poisson(self._function_draws(n, generator).clamp(max=_LARGEST).exp(), generator=generator)

    def _targets(self, y: Tensor) -> Tensor:
        y = like(y, self.mean)
        _check(y)
        return y

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        def density(y: Tensor) -> Tensor:
            scores = self._drawn(y, self.draws) if self.draws is not None else self._integrated(y)
            return summed(scores - torch.lgamma(y + 1), self.mean.dim())

        return density

    def _drawn(self, y: Tensor, draws: Tensor) -> Tensor:
        """log E[exp(y f − exp f)] over the draws."""
        rates = y.unsqueeze(-draws.dim()) * draws - draws.exp()
        return rates.logsumexp(dim=-draws.dim()) - torch.log(rates.new_tensor(len(draws)))

    def _integrated(self, y: Tensor) -> Tensor:
        """log E[exp(y f − exp f)], f = E[f] + √Var[f] u, with the nodes about the mode of the integrand and at its scale.

        The mode is a root of √v (y − exp f) − u, a concave function that falls: from where it is negative, as it is at
        f = max(E[f], log y), Newton's steps approach it from one side.
        """
        mean, root = self.mean, self.variance.sqrt()
        start = torch.maximum(mean, y.clamp(min=torch.finfo(y.dtype).tiny).log())
        u = torch.where(root > 0, (start - mean) / root.clamp(min=torch.finfo(root.dtype).tiny), 0.0)
        for _ in range(_NEWTON_STEPS):
            rate = (mean + root * u).exp()
            step = (root * (y - rate) - u) / (1 + self.variance * rate)
            u = u + step
            # The nodes need not be centred to the last digit.
            if bool((step.abs() < 1e-3).all()):
                break
        scale = (1 + self.variance * (mean + root * u).exp()).rsqrt()
        z, weights = nodes_like(_NODES_PER_UNIT, u)
        at = u + scale * z
        f = mean + root * at
        # E[h(u)] = ∫ h φ(u) du = scale ∫ h(u) φ(u)/φ(z) φ(z) dz.
        scores = y * f - f.exp() - 0.5 * at.square() + 0.5 * z.square()
        return (scores + weights.log()).logsumexp(dim=0) + scale.log()

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Weights and rates, (nodes, batch, ...), in float64."""
        if self.draws is None:
            mean = self.mean.double()
            z, weights = nodes_like(_STEEP_NODES_PER_UNIT, mean)
            f = mean + z * self.variance.double().sqrt()
        else:
            f = self.draws.double()
            weights = torch.full_like(f[:, :1], 1 / len(f))
        return weights, f.clamp(max=_LARGEST).exp()

    def _mass(self, upper: bool) -> Callable[[Tensor], Tensor]:
        weights, rates = self._rates()
        # P(Y ≤ k) is the upper incomplete gamma function at k + 1, and 0 below 0.
        of = torch.special.gammainc if upper else torch.special.gammaincc

        def mass(y: Tensor) -> Tensor:
            found = (weights * of((y.floor() + 1).clamp(min=1), rates)).sum(dim=0)
            return torch.where(y < 0, float(upper), found)

        return mass

    def _bracket(self, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        # Beyond this a Poisson variable of the greatest rate lies with a probability below `tail`, by Chernoff's bound.
        most = self._rates()[1].amax(dim=0)
        slack = -2 * torch.log(most.new_tensor(tail))
        return torch.full_like(most, -1.0), most + (most * slack).sqrt() + slack


@dataclass(frozen=True, eq=False)
class PoissonMixture(NumericMixture, PoissonPredictive):
    """p(y) = Σ π_m p_m(y)."""


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts with a log link, whose Hessian exp f does not depend on y. Validation is the default, as for classes."""

    name: str = "poisson"
    kind: type[Predictive] = PoissonPredictive

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """exp f − y f, the negative log-likelihood without its constant, a mean over targets too."""
        return (outputs.exp() - targets * outputs).mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Counts, (n, k)."""
        found = super().shaped(targets, like)
        _check(found)
        return found

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp f."""
        return outputs.exp()

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Overdispersion, Σ (y − exp f)²/Σ exp f, far above 1."""
        if targets is None or len(targets) < FEWEST_TO_JUDGE:
            return None
        logs = outputs.double().clamp(max=_LARGEST)
        rates = logs.exp()
        dispersion = float((targets - rates).square().sum() / rates.sum())
        if not dispersion > _DISPERSED:
            return None
        if bool((outputs > 0).all()) and float((rates - targets * logs - outputs + targets * outputs.log()).mean()) > 0:
            return (
                "the held-out counts are likelier if the outputs are rates, but likelihood='poisson' takes them for the "
                "logarithms of rates: pass forward=lambda model, x: model(x).log(), or train on if logarithms is what they are"
            )
        return (
            f"the held-out counts vary {dispersion:.2g} times as much about the network's rates as Poisson counts would. "
            "Calibration makes up for that by widening the posterior: p.predicted_mean is then too high, and p.interval too wide. "
            "Take p.mean.exp() for the rate, and p.prediction_set(level), which holds its level on data like the held-out"
        )


def _check(y: Tensor) -> None:
    wrong = y[~(torch.isfinite(y) & (y >= 0) & (y == y.floor()))]
    if wrong.numel():
        raise MatchError(
            f"the targets of a Poisson likelihood are counts, 0, 1, 2, …, but one is {float(wrong[0]):g}: round them, or "
            "use likelihood='regression' for real numbers"
        )
