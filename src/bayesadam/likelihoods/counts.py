"""Counts: y ~ Poisson(exp f), one log-rate per target; or spread more than that, y ~ NB, outputs m, then g."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayesadam.errors import MatchError
from bayesadam.likelihoods.component import Component, cross, function_draws
from bayesadam.likelihoods.predictive import FEWEST_TO_JUDGE
from bayesadam.likelihoods.regression import NumericLikelihood, first_half, given_second, nodes, nodes_like, summed

# Nodes to the unit of log p; of the cumulative distribution of Poisson counts, which has steep steps, and of others.
_NODES_PER_UNIT, _STEEP_NODES_PER_UNIT, _FEW_NODES_PER_UNIT = 2, 16, 1
# Log-rates and log-means are cut off above this: a posterior so wide says nothing, but its interval must stay a number.
_LARGEST = 40.0
# Log-dispersions are cut off beyond ± this: counts are Poisson's before that.
_MOST_DISPERSED = 15.0
# Counts whose variance about their rates is this many times a Poisson variable's are overdispersed.
_DISPERSED = 2.0


class CountLikelihood(NumericLikelihood):
    """p(y | f) of counts, 0, 1, 2, …."""

    resolution = 0.25
    standardised = False

    def _counts(self, y: Tensor) -> Tensor:
        """The targets, if all are counts."""
        wrong = y[~(torch.isfinite(y) & (y >= 0) & (y == y.floor()))]
        if wrong.numel():
            raise MatchError(
                f"the targets of likelihood={self.name!r} are counts, 0, 1, 2, …, but one is {float(wrong[0]):g}: "
                "round them, or use likelihood='regression' for real numbers"
            )
        return y

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Counts, (n, k)."""
        return self._counts(super().shaped(targets, like))

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Counts in the shape of the outputs that locate them."""
        return self._counts(super().matched(targets, outputs))


class Poisson(CountLikelihood):
    """y ~ Poisson(exp f), f Gaussian for each target or drawn; the Hessian exp f does not depend on y."""

    name = "poisson"

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
            "on data like the held-out; or train with likelihood='negative-binomial', two outputs a target. Outputs "
            "are the logarithms of rates: of rates pass forward=lambda model, x: model(x).log()"
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


class NegativeBinomial(CountLikelihood):
    """y ~ NB, E[y | f] = μ = exp m, Var[y | f] = μ + exp(g) μ²: 2 k outputs for k targets, log-means first.

    With r = exp(−g), p(y | f) = Γ(y + r)/(Γ(r) y!) σ(m + g)ʸ σ(−m − g)ʳ. In m and g the Hessian, taken in expectation
    over y, is diagonal. p(y) = E_g E_m[p(y | m, g)] for each target, both by quadrature, (m, g) being Gaussian, or over
    their draws where the prediction sampled; m and g are independent unless the prediction was made with
    `covariance=True`.
    """

    name = "negative-binomial"
    outputs_per_target = 2
    weight_decay = 0.1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−log p(y | f) without log y!, a mean over targets too; in float64, since Γ(y + r)/Γ(r) cancels."""
        m, g = _halves(outputs.double())
        return -_log_likelihood(m, g, targets.double()).mean(dim=(1, 2)).to(outputs)

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """μ r/(μ + r) for m; r² E[ψ'(r) − ψ'(r + y)] − μ r/(μ + r) for g, ψ' the trigamma function."""
        m, g = _halves(outputs.double())
        of_mean = (m + logsigmoid(-m - g)).exp()
        of_dispersion = (_expected_trigamma(m, g) - of_mean).clamp(min=0)
        return torch.cat([of_mean, of_dispersion], dim=-1).to(outputs)

    def locations(self, outputs: Tensor) -> Tensor:
        """The log-means."""
        return first_half(outputs, self.name, "log-means first, then log-dispersions", instead="poisson")

    def start(self, targets: Tensor) -> Tensor | None:
        """The logarithms of the mean count and of the dispersion (Var[y] − E[y])/E[y]² of the counts."""
        mean = targets.mean(dim=0).clamp(min=0.5 / len(targets))
        dispersion = (targets.var(dim=0, unbiased=False) - mean) / mean.square()
        return torch.cat([mean.log(), dispersion.clamp(min=0.01).log()])

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[exp m], exp(E[m] + Var[m]/2) where m is Gaussian."""
        if c.draws is not None:
            return _halves(c.draws)[0].exp().mean(dim=0)
        return (c.mean + c.variance / 2).chunk(2, dim=-1)[0].exp()

    def noise_variance(self, c: Component) -> Tensor:
        """E[Var[y | f]] = E[exp m] + E[exp(2m + g)]."""
        if c.draws is not None:
            m, g = _halves(c.draws)
            return (m.exp() + (2 * m + g).exp()).mean(dim=0)
        (m, g), (of_m, of_g) = c.mean.chunk(2, dim=-1), c.variance.chunk(2, dim=-1)
        return self.expected(c) + (2 * m + g + 2 * of_m + of_g / 2 + 2 * cross(c)).exp()

    def total_variance(self, c: Component) -> Tensor:
        """Var[y] = E[Var[y | f]] + Var[exp m]."""
        if c.draws is not None:
            return self.noise_variance(c) + _halves(c.draws)[0].exp().var(dim=0)
        return self.noise_variance(c) + self.expected(c).square() * c.variance.chunk(2, dim=-1)[0].expm1()

    def sample(self, c: Component, n: int, generator: torch.Generator | None) -> Tensor:
        """Poisson counts at rates exp(m) G, G ~ Gamma(r, r), at draws of (m, g)."""
        m, g = _halves(function_draws(c, n, generator).double())
        r = (-g).exp()
        rates = m.exp() * torch._standard_gamma(r, generator=generator) / r
        return torch.poisson(rates.clamp(max=math.exp(_LARGEST)), generator=generator).to(c.mean)

    def log_density(self, c: Component, y: Tensor) -> Tensor:
        """log E[p(y | m, g)], summed over targets."""
        weights, m, variance, g = _given_dispersion(c, _NODES_PER_UNIT)
        dims = m.dim() - 1
        y = y.double().unsqueeze(-m.dim())
        found = _log_mean_over_m(m, variance, g, y) if c.draws is None else _log_likelihood(m, g, y)
        scores = (found + weights.log()).logsumexp(dim=-m.dim()) - torch.lgamma(y + 1).squeeze(-m.dim())
        return summed(scores, dims).to(c.mean)

    def mass(self, c: Component, y: Tensor, upper: bool) -> Tensor:
        """P(Y > k | f) = P(T < m + g), T the logit of a Beta(k + 1, r) variable, by quadrature; right to 2e-3."""
        weights, m, variance, g = _given_dispersion(c, _FEW_NODES_PER_UNIT)
        a, r = y.floor().clamp(min=0) + 1, (-g).exp()
        z, step = _stretched(8.0, 8, m.dim() + 1, m)
        width = (1 / a + 1 / r).sqrt()
        away = width * z.sinh()
        t = a.log() + g + away
        density = (a * logsigmoid(t) + r * logsigmoid(-t) + z.cosh().log()).softmax(dim=0)
        # As wide as the nodes are apart at the least: a step of Φ between two nodes would be missed.
        spread = (variance + (step * width * z.cosh()).square() / 4).sqrt()
        white = (m - a.log() - away) / (spread * math.sqrt(2))
        found = (weights * (density * torch.erfc(-white if upper else white) / 2).sum(dim=0)).sum(dim=0)
        return torch.where(y < 0, float(upper), found)


def _halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """m and g, cut off."""
    m, g = outputs.chunk(2, dim=-1)
    return m.clamp(max=_LARGEST), g.clamp(min=-_MOST_DISPERSED, max=_MOST_DISPERSED)


def _log_likelihood(m: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log p(y | m, g) + log y!."""
    r = (-g).exp()
    return torch.lgamma(y + r) - torch.lgamma(r) + y * (m + g) + (y + r) * logsigmoid(-m - g)


def _stretched(reach: float, per_unit: int, dims: int, like: Tensor) -> tuple[Tensor, float]:
    """Nodes z of the trapezoidal rule on [−reach, reach] in a leading dimension of `dims`, and their distance."""
    n = round(reach * per_unit)
    z = torch.arange(-n, n + 1, dtype=like.dtype, device=like.device).div(per_unit)
    return z.view(-1, *[1] * (dims - 1)), 1 / per_unit


def _expected_trigamma(m: Tensor, g: Tensor) -> Tensor:
    """r² E[ψ'(r) − ψ'(r + y)].

    With ψ'(x) = ∫ w exp(−x w)/(1 − exp(−w)) dw over w > 0 and E[exp(−w y)] = (1 + (1 − exp(−w)) μ/r)⁻ʳ it is
    ∫ v exp(−v)/(1 − exp(−v/r)) (1 − E[exp(−y v/r)]) dv, by the trapezoidal rule over log v.
    """
    r = (-g).exp()
    log_v = torch.arange(-30.0, 4.25, 0.25, dtype=m.dtype, device=m.device).view(-1, *[1] * m.dim())
    v = log_v.exp()
    falls = -torch.expm1(-v / r)
    reached = -torch.expm1(-r * torch.log1p(falls * (m + g).exp()))
    return 0.25 * (v.square() * (-v).exp() / falls * reached).sum(dim=0)


def _given_dispersion(c: Component, per_unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, E[m | g], Var[m | g] and g, (n, batch, ..., k), at nodes of g, float64; at draws of (m, g) Var = 0."""
    if c.draws is not None:
        m, g = _halves(c.draws.double())
        return torch.full_like(m, 1 / len(m)), m, torch.zeros_like(m), g
    centre, width = (part.double().chunk(2, dim=-1)[1] for part in (c.mean, c.variance))
    weights, g = nodes(per_unit, centre, width, None)
    m, left = given_second(c, g)
    m, g = _halves(torch.cat([m, g], dim=-1))
    return weights, m, left.expand_as(m), g


def _log_mean_over_m(mean: Tensor, variance: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log E[p(y | m, g)] + log y!, m = E[m] + √Var[m] u, with nodes about the mode of the integrand and at its scale.

    The mode is a root of √v (y − (y + r) σ(m + g)) − u, which falls: Newton's steps, halved where they leave the
    interval between 0 and the value at u = 0, which holds the root.
    """
    root, r = variance.sqrt(), (-g).exp()
    total = y + r
    end = root * (y - total * torch.sigmoid(mean + g))
    low, high, u = end.clamp(max=0), end.clamp(min=0), torch.zeros_like(end)
    for _ in range(30):
        share = torch.sigmoid(mean + root * u + g)
        slope = root * (y - total * share) - u
        low, high = torch.where(slope > 0, u, low), torch.where(slope > 0, high, u)
        curvature = 1 + variance * total * share * (1 - share)
        before, u = u, u + slope / curvature
        u = torch.where((u < low) | (u > high), (low + high) / 2, u)
        # The nodes need not be exactly about the mode: to within a hundredth of the integrand's scale.
        if bool(((u - before).square() * curvature < 1e-4).all()):
            break
    share = torch.sigmoid(mean + root * u + g)
    scale = (1 + variance * total * share * (1 - share)).rsqrt()
    here = mean + root * u + g
    rest = y * here + total * logsigmoid(-here) - 0.5 * u.square()
    top = torch.lgamma(total) - torch.lgamma(r) + rest
    z, _ = _stretched(4.0, 5, 1, mean)
    away = z.sinh()
    weights = (z.cosh().log() - 0.5 * away.square()).softmax(dim=0)
    found = torch.zeros_like(top)
    # One node at a time: 41 of m for each of 33 of g are too many to keep for the draws of an entropy.
    for weight, x in zip(weights, away, strict=True):
        at = u + scale * x
        logit = mean + root * at + g
        shift = y * logit + total * logsigmoid(-logit) - 0.5 * at.square()
        found += weight * (shift - rest + 0.5 * x.square()).exp()
    return top + found.log() + scale.log()
