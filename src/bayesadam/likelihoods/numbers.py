"""Numbers: y = f + N(0, σ²); y = m + N(0, exp g), outputs m, then g; and counts, y ~ Poisson(λ), λ = exp f.

Each is a mixture over a few values of f, its draws or the nodes of a quadrature, of a distribution of torch's.

A variance v of a logarithm is that of what the logarithm is of, relative to its mean: λ is log-normal with E[λ] = exp f
and Var[λ] = v E[λ]², not E[λ] = exp(f + v/2), which far from the data is any number at all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    MixtureSameFamily,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
)

from bayesadam.errors import CalibrationError, MatchError
from bayesadam.likelihoods.base import FEWEST_TO_JUDGE, Component, Likelihood
from bayesadam.likelihoods.moments import Moments, rows

# Nodes to the unit of standard deviation: of log-variances, and of log-rates.
_NODES, _COUNT_NODES = 2, 1
# The share of a log-rate's variance that is the Gamma's at each node: nodes are then 1.7 of its widths apart.
_BETWEEN = 0.25
# Logarithms are cut off here: an output so far off says nothing, but its rate and its square must stay numbers.
_LARGEST = 30.0
# What rounding may have taken from the end of an interval of counts, relative to it.
_ROUNDED = 1e-5
# From this r on log Γ(r + y) − log Γ(r) is Stirling's series, to 1e-8.
_SERIES = 64.0
# Counts whose variance about their rates is this many times a Poisson variable's are overdispersed.
_DISPERSED = 2.0


class NumericLikelihood(Likelihood):
    """p(y | f) of numbers."""

    @abstractmethod
    def expected(self, c: Component) -> Tensor:
        """E[y]."""

    @abstractmethod
    def variance(self, c: Component) -> Tensor:
        """Var[y], observation noise included."""

    @abstractmethod
    def parts(self, c: Component) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Weights, (n,) and then ones, and the parameters of y's distribution at n values of f, (n, batch, ..., k)."""

    def family(self, *parameters: Tensor) -> Distribution:
        """y's distribution at given parameters; N(loc, scale²) unless told otherwise."""
        loc, scale = parameters
        return Normal(loc, scale, validate_args=False)

    def ends(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of an interval, of numbers that y can be."""
        return low, high

    def distribution(self, components: Sequence[Component]) -> Distribution:
        """y's, target by target: the mixture of all components' parts."""
        weights, parameters = zip(*(self.parts(c) for c in components), strict=True)
        shape = parameters[0][0].shape[1:]
        shares = torch.cat([c.weight * w.expand(len(w), *shape) for c, w in zip(components, weights, strict=True)])
        stacked = [torch.cat(parts) for parts in zip(*parameters, strict=True)]
        if len(shares) == 1:
            return self.family(*(parameter[0] for parameter in stacked))
        mixed = self.family(*(parameter.movedim(0, -1) for parameter in stacked))
        return MixtureSameFamily(
            Categorical(probs=shares.movedim(0, -1), validate_args=False), mixed, validate_args=False
        )

    def log_prob(self, components: Sequence[Component], y: Tensor) -> Tensor:
        """log p(y), summed over the targets of an example, which are independent but for a common network."""
        y = self.matched(y, components[0].f.mean)
        networks = [self.distribution([replace(c, weight=1.0)]) for c in components]
        scores = torch.stack([rows(network.log_prob(y)).sum(dim=1) for network in networks])
        shares = torch.tensor([c.weight for c in components], dtype=scores.dtype, device=scores.device)
        return (scores + shares.log()[:, None]).logsumexp(dim=0)

    def novelty(self, f: Tensor, r: Tensor) -> Tensor:
        """r itself."""
        return r


class Regression(NumericLikelihood):
    """y = f + N(0, σ²). Validation cannot see what δ does outside the data, so `tune` takes evidence."""

    name = "regression"
    noise = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return (outputs - targets).square().mean(dim=(1, 2))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """1/σ², σ² = 1 where it is not given."""
        ones = torch.ones_like(outputs)
        return ones if noise_variance is None else ones / noise_variance.to(outputs)

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[f]."""
        return c.f.mean

    def variance(self, c: Component) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        if c.noise_variance is None:
            raise CalibrationError(
                "σ² of the observations is not known: posterior.tune(held_out) estimates it and "
                "posterior.replace(noise_variance=...) gives it; .f_mean and .f_variance need none"
            )
        noise, shape = c.noise_variance, c.f.mean.shape[1:]
        if noise.dim() and shape and shape[-noise.dim() :] != noise.shape:
            raise MatchError(
                f"σ² is of {tuple(noise.shape)} outputs, and these are {tuple(shape)}: pass the forward= that "
                "posterior.tune had, or tune a posterior for these outputs"
            )
        return _variance_of(c.f) + noise.to(c.f.mean)

    def parts(self, c: Component) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One, N(E[f], Var[f] + σ²)."""
        stddev = self.variance(c).sqrt().expand(c.f.mean.shape)
        return _weights(1, c.f.mean), (c.f.mean[None], stddev[None])

    def log_prob(self, components: Sequence[Component], y: Tensor) -> Tensor:
        """log N(y; E[f], Cov[f] + σ²) of one network whose covariance is known; else as of all numbers."""
        (c, *others) = components
        if others or c.f.covariance is None:
            return super().log_prob(components, y)
        y, noise = self.matched(y, c.f.mean), self.variance(c) - _variance_of(c.f)
        joint = c.f.covariance + torch.diag_embed(rows(noise))
        gaussian: Distribution = MultivariateNormal(rows(c.f.mean), joint, validate_args=False)
        scores: Tensor = gaussian.log_prob(rows(y))
        return scores


class Heteroscedastic(NumericLikelihood):
    """y = m + N(0, exp g), a variance of its own for every input: 2 k outputs for k targets, means first.

    p(y) = E_g[N(y; E[m], Var[m] + exp g)] for each target, m and g being independent: m is Gaussian and integrated in
    closed form, exp g log-normal and integrated by quadrature, or over draws of g.

    Where `noise_variance` is known it is the most that exp g counts for: far from the data g may be anything.

    The Hessian in (m, g) is taken in expectation over y, diag(exp(−g), ½): at a single y it is not positive.
    """

    name = "heteroscedastic"
    outputs_per_target = 2

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

    def locations(self, outputs: Tensor) -> Tensor:
        """The means."""
        if outputs.dim() < 2 or outputs.shape[-1] % 2:
            raise MatchError(
                "heteroscedastic needs two outputs per target in the last dimension, means first, then log-variances, "
                f"but the outputs have shape {tuple(outputs.shape)}: for one output per target use "
                "likelihood='regression'"
            )
        return outputs.chunk(2, dim=-1)[0]

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp(−g) for the means, ½ for the log-variances."""
        precision = _exp(-outputs.chunk(2, dim=-1)[1])
        return torch.cat([precision, torch.full_like(precision, 0.5)], dim=-1)

    def ceiling(self, targets: Tensor) -> Tensor:
        """The largest (y − ȳ)² of each target."""
        return (targets - targets.mean(dim=0)).square().amax(dim=0)

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[m], (batch, ..., k)."""
        return self.locations(c.f.mean)

    def variance(self, c: Component) -> Tensor:
        """Var[y] = Var[m] + E[exp g]."""
        weights, g = self._log_variances(c)
        return _variance_of(c.f).chunk(2, dim=-1)[0] + (weights * self._noise(c, g)).sum(dim=0)

    def parts(self, c: Component) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One for each node, or draw, of g."""
        (weights, g), mean = self._log_variances(c), self.expected(c)
        stddev = (_variance_of(c.f).chunk(2, dim=-1)[0] + self._noise(c, g)).sqrt()
        return weights, (mean.expand(g.shape), stddev)

    def _log_variances(self, c: Component) -> tuple[Tensor, Tensor]:
        """Weights and values of g."""
        mean, variance, draws = (
            None if part is None else part.chunk(2, dim=-1)[1] for part in (c.f.mean, c.f.variance, c.f.draws)
        )
        assert mean is not None
        if draws is not None or variance is None:
            return nodes(Moments(mean, draws=draws), _NODES)
        return nodes(_log_normal(mean, variance.log1p()), _NODES)

    def _noise(self, c: Component, g: Tensor) -> Tensor:
        """exp g, at most the ceiling."""
        noise = _exp(g)
        return noise if c.noise_variance is None else noise.minimum(c.noise_variance.to(noise))


class Counts(NumericLikelihood):
    """y ~ Poisson(λ), λ log-normal for each target, or exp f of draws; the Hessian exp f does not depend on y.

    Its quadrature has one node to a standard deviation. Instead of a Poisson each has a negative binomial, which makes
    up for a quarter of the variance of log λ: of large counts Poissons would leave gaps between nodes, however many.
    """

    name = "poisson"
    standardised = False

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """exp f − y f, the negative log-likelihood without its constant, a mean over targets too."""
        return (outputs.exp() - targets * outputs).mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Counts, (n, k)."""
        return _counts(super().shaped(targets, like))

    def start(self, targets: Tensor) -> Tensor | None:
        """The logarithm of the mean count."""
        return targets.mean(dim=0).clamp(min=0.5 / len(targets)).log()

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Counts in the shape of the outputs."""
        return _counts(super().matched(targets, outputs))

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Overdispersion, Σ (y − exp f)²/Σ exp f, far above 1."""
        if targets is None or len(targets) < FEWEST_TO_JUDGE:
            return None
        rates = _exp(outputs.double())
        dispersion = float((targets - rates).square().sum() / rates.sum())
        if not dispersion > _DISPERSED:
            return None
        return (
            f"the held-out counts vary {dispersion:.2g} times as much about the network's rates as Poisson counts "
            "would: p.mean stays the network's rate, and what is said of its uncertainty is widened to make up for "
            "that. Outputs are the logarithms of rates: of rates pass forward=lambda model, x: model(x).log()"
        )

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp f."""
        return _exp(outputs)

    def expected(self, c: Component) -> Tensor:
        """E[y] = exp E[f], or the mean of exp f over draws."""
        return _exp(c.f.mean) if c.f.draws is None else _exp(c.f.draws).mean(dim=0)

    def variance(self, c: Component) -> Tensor:
        """Var[y] = E[y] + v E[y]², v = Var[f], or the relative variance of exp f over draws."""
        mean = self.expected(c)
        if c.f.draws is not None:
            return mean + (_exp(c.f.draws) - mean).square().mean(dim=0)
        return mean + _variance_of(c.f) * mean.square()

    def parts(self, c: Component) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The rate at each draw of f; or at each node of ¾ of its variance, with that of a Gamma for the rest."""
        if c.f.draws is not None or c.f.variance is None:
            weights, f = nodes(c.f, _COUNT_NODES)
            return weights, (_exp(f),)
        weights, f = nodes(_log_normal(c.f.mean, (1 - _BETWEEN) * c.f.variance.log1p()), _COUNT_NODES)
        return weights, (_exp(f), (_BETWEEN * c.f.variance.log1p()).expm1().expand(f.shape))

    def family(self, *parameters: Tensor) -> Distribution:
        """Poisson; or negative binomial, that of a Poisson whose rate is a Gamma's, given its relative variance."""
        rate, *relative = parameters
        if not relative:
            return Poisson(rate, validate_args=False)
        r = 1 / relative[0].clamp(min=1e-12)
        logits = rate.clamp(min=torch.finfo(rate.dtype).tiny).log() - r.log()
        return _NegativeBinomial(r, logits=logits, validate_args=False)

    def ends(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Whole numbers of at least 0; one at the least, and what rounding took from an end is put back."""
        low = (low - _ROUNDED * (1 + low.abs())).clamp(min=0).ceil()
        return low, (high + _ROUNDED * (1 + high.abs())).floor().maximum(low)


class _NegativeBinomial(NegativeBinomial):
    """The same where r is so large that differences of log Γ have no digits left: y ~ Poisson(λ) for r → ∞."""

    def log_prob(self, value: Tensor) -> Tensor:
        """log of Γ(r + y)/(Γ(r) y!) pʸ (1 − p)ʳ."""
        r, y, logits = self.total_count, value, self.logits
        large = r.clamp(min=_SERIES)
        series = (large + y - 0.5) * (y / large).log1p() - y + (1 / (large + y) - 1 / large) / 12
        exact = torch.lgamma(r + y) - torch.lgamma(r) - y * r.log()
        rising = torch.where(r < _SERIES, exact, series)
        scores: Tensor = rising + y * (r.log() + logits) - (r + y) * F.softplus(logits) - torch.lgamma(y + 1)
        return scores


def _variance_of(f: Moments) -> Tensor:
    """Var[f], zeros of the mean network alone."""
    return torch.zeros_like(f.mean) if f.variance is None else f.variance


def _exp(log: Tensor) -> Tensor:
    """exp, of numbers up to 30."""
    return log.clamp(max=_LARGEST).exp()


def _log_normal(log_mean: Tensor, variance: Tensor) -> Moments:
    """log λ of a log-normal λ with this mean and, of its logarithm, this variance."""
    return Moments(log_mean.clamp(max=_LARGEST) - variance / 2, variance)


def _weights(n: int, like: Tensor) -> Tensor:
    """n equal ones, that broadcast against (n, *like.shape)."""
    return torch.full((n, *[1] * like.dim()), 1 / n, dtype=like.dtype, device=like.device)


def nodes(f: Moments, per_unit: int) -> tuple[Tensor, Tensor]:
    """Weights and values, (n, batch, ...), with Σ w h(value) ≈ E[h(f)]: draws, or a quadrature over a Gaussian.

    That is the trapezoidal rule on ±8 standard deviations, with so many nodes to each: for integrands that are smooth
    on the scale of a step its error falls faster than any power of that step.
    """
    if f.draws is not None:
        return _weights(len(f.draws), f.mean), f.draws
    if f.variance is None:
        return _weights(1, f.mean), f.mean[None]
    z = torch.arange(-8 * per_unit, 8 * per_unit + 1, dtype=torch.float64, device=f.mean.device) / per_unit
    z = z.to(f.mean.dtype).view(-1, *[1] * f.mean.dim())
    return (-0.5 * z.square()).softmax(dim=0), f.mean + z * f.variance.sqrt()


def _counts(y: Tensor) -> Tensor:
    """The targets, if all are counts."""
    wrong = y[~(torch.isfinite(y) & (y >= 0) & (y == y.floor()))]
    if wrong.numel():
        raise MatchError(
            f"the targets of likelihood='poisson' are counts, 0, 1, 2, …, but one is {float(wrong[0]):g}: round them, "
            "or use likelihood='regression' for real numbers"
        )
    return y
