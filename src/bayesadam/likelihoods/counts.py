"""Counts: y ~ Poisson(exp f), one log-rate per target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods.component import Component, function_draws
from bayesadam.likelihoods.predictive import FEWEST_TO_JUDGE
from bayesadam.likelihoods.regression import NumericLikelihood, nodes, nodes_like, summed

# Nodes to the unit of log p, and of the cumulative distribution, which has steep steps.
_NODES_PER_UNIT, _STEEP_NODES_PER_UNIT = 2, 16
# Log-rates are cut off above this: a posterior so wide says nothing, but its interval must stay a number.
_LARGEST = 40.0
# Counts whose variance about their rates is this many times a Poisson variable's are overdispersed.
_DISPERSED = 2.0


class Poisson(NumericLikelihood):
    """y ~ Poisson(exp f), f Gaussian for each target or drawn; the Hessian exp f does not depend on y."""

    name = "poisson"
    resolution = 0.25
    standardised = False

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Counts, (n, k)."""
        return _counts(super().shaped(targets, like))

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Counts in the shape of the outputs."""
        return _counts(super().matched(targets, outputs))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """exp f − y f, the negative log-likelihood without its constant, a mean over targets too."""
        return (outputs.exp() - targets * outputs).mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp f."""
        return outputs.exp()

    def start(self, targets: Tensor) -> Tensor | None:
        """The logarithm of the mean count."""
        return targets.mean(dim=0).clamp(min=0.5 / len(targets)).log()

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[exp f], exp(E[f] + Var[f]/2) where f is Gaussian."""
        return (c.mean + c.variance / 2).exp() if c.draws is None else c.draws.exp().mean(dim=0)

    def total_variance(self, c: Component) -> Tensor:
        """Var[y] = E[exp f] + Var[exp f]."""
        rate = self.expected(c)
        return rate + (rate.square() * c.variance.expm1() if c.draws is None else c.draws.exp().var(dim=0))

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """Counts at draws of f."""
        return torch.poisson(function_draws(c, n, generator).clamp(max=_LARGEST).exp(), generator=generator)

    def log_density(self, c: Component, y: Tensor) -> Tensor:
        """log E[exp(y f − exp f)] − log y!."""
        if c.draws is None:
            found = _log_mean_by_quadrature(c, y)
        else:
            first = -c.draws.dim()
            found = (y.unsqueeze(first) * c.draws - c.draws.exp()).logsumexp(dim=first) - math.log(len(c.draws))
        return summed(found - torch.lgamma(y + 1), c.mean.dim())

    def mass(self, c: Component, y: Tensor, upper: bool) -> Tensor:
        """P(Y ≤ k) is the upper incomplete gamma function at k + 1, and 0 below 0."""
        draws = None if c.draws is None else c.draws.double()
        weights, f = nodes(_STEEP_NODES_PER_UNIT, c.mean.double(), c.variance.double(), draws)
        gamma = torch.special.gammainc if upper else torch.special.gammaincc
        found = (weights * gamma((y.floor() + 1).clamp(min=1), f.clamp(max=_LARGEST).exp())).sum(dim=0)
        return torch.where(y < 0, float(upper), found)

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Overdispersion, Σ (y − exp f)²/Σ exp f, far above 1."""
        if targets is None or len(targets) < FEWEST_TO_JUDGE:
            return None
        rates = outputs.double().clamp(max=_LARGEST).exp()
        dispersion = float((targets - rates).square().sum() / rates.sum())
        if not dispersion > _DISPERSED:
            return None
        return (
            f"the held-out counts vary {dispersion:.2g} times as much about the network's rates as Poisson counts "
            "would. Calibration makes up for that by widening the posterior: p.predicted_mean is then too high, and "
            "p.interval too wide. Take p.mean.exp() for the rate, and p.prediction_set(level), which holds its level "
            "on data like the held-out. Outputs are the logarithms of rates: of rates pass "
            "forward=lambda model, x: model(x).log()"
        )


def _log_mean_by_quadrature(c: Component, y: Tensor) -> Tensor:
    """log E[exp(y f − exp f)], f = E[f] + √Var[f] u, with the nodes about the mode of the integrand and at its scale.

    The mode is a root of √v (y − exp f) − u, a concave function that falls: from where it is negative, as it is at
    f = max(E[f], log y), Newton's steps approach it from one side.
    """
    mean, root = c.mean, c.variance.sqrt()
    start = torch.maximum(mean, y.clamp(min=torch.finfo(y.dtype).tiny).log())
    u = torch.where(root > 0, (start - mean) / root.clamp(min=torch.finfo(root.dtype).tiny), 0.0)
    for _ in range(20):
        rate = (mean + root * u).exp()
        u = u + (root * (y - rate) - u) / (1 + c.variance * rate)
    scale = (1 + c.variance * (mean + root * u).exp()).rsqrt()
    z, weights = nodes_like(_NODES_PER_UNIT, u)
    at = u + scale * z
    f = mean + root * at
    # E[h(u)] = ∫ h φ(u) du = scale ∫ h(u) φ(u)/φ(z) φ(z) dz.
    scores = y * f - f.exp() - 0.5 * at.square() + 0.5 * z.square()
    return (scores + weights.log()).logsumexp(dim=0) + scale.log()


def _counts(y: Tensor) -> Tensor:
    """The targets, if all are counts."""
    wrong = y[~(torch.isfinite(y) & (y >= 0) & (y == y.floor()))]
    if wrong.numel():
        raise MatchError(
            f"the targets of likelihood='poisson' are counts, 0, 1, 2, …, but one is {float(wrong[0]):g}: round them, "
            "or use likelihood='regression' for real numbers"
        )
    return y
