"""Numbers: y = f + N(0, σ²); y = m + N(0, exp g), outputs m, then g; and counts, y ~ Poisson(exp f).

Each is a mixture over a few values of f, its draws or the nodes of a quadrature, of a distribution of torch's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily, MultivariateNormal, Normal, Poisson

from bayesadam.errors import CalibrationError, MatchError
from bayesadam.likelihoods.base import FEWEST_TO_JUDGE, Component, Likelihood
from bayesadam.likelihoods.moments import Moments, rows

# Nodes to the unit of standard deviation: of log-variances, and of log-rates, whose Poisson is narrow.
_NODES, _COUNT_NODES = 2, 16
# Log-rates are cut off above this: a posterior so wide says nothing, but its rate must stay a number.
_LARGEST = 40.0
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

    p(y) = E_g[N(y; E[m], Var[m] + exp g)] for each target, (m, g) being Gaussian and independent: m is integrated in
    closed form, g by quadrature, or over its draws.

    Where `noise_variance` is known it is the most that exp g counts for: far from the data g may be anything.

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
        precision = (-outputs.chunk(2, dim=-1)[1]).exp()
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
        return nodes(Moments(mean, variance, draws=draws), _NODES)

    def _noise(self, c: Component, g: Tensor) -> Tensor:
        """exp g, at most the ceiling."""
        noise = g.exp()
        return noise if c.noise_variance is None else noise.minimum(c.noise_variance.to(noise))


class Counts(NumericLikelihood):
    """y ~ Poisson(exp f), f Gaussian for each target or drawn; the Hessian exp f does not depend on y."""

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
        rates = outputs.double().clamp(max=_LARGEST).exp()
        dispersion = float((targets - rates).square().sum() / rates.sum())
        if not dispersion > _DISPERSED:
            return None
        return (
            f"the held-out counts vary {dispersion:.2g} times as much about the network's rates as Poisson counts "
            "would, and the posterior is widened to make up for that: means and standard deviations are then too "
            "large. Take p.f_mean.exp() for the rate, and net(x).interval(level) of a calibrated network, which holds "
            "its level. Outputs are the logarithms of rates: of rates pass forward=lambda model, x: model(x).log()"
        )

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """exp f."""
        return outputs.exp()

    def expected(self, c: Component) -> Tensor:
        """E[y] = E[exp f]."""
        weights, (rates,) = self.parts(c)
        return (weights * rates).sum(dim=0)

    def variance(self, c: Component) -> Tensor:
        """Var[y] = E[exp f] + Var[exp f]."""
        weights, (rates,) = self.parts(c)
        mean = (weights * rates).sum(dim=0)
        return mean + (weights * (rates - mean).square()).sum(dim=0)

    def parts(self, c: Component) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The rate at each node, or draw, of f."""
        weights, f = nodes(c.f, _COUNT_NODES)
        return weights, (f.clamp(max=_LARGEST).exp(),)

    def family(self, *parameters: Tensor) -> Distribution:
        """Poisson."""
        (rate,) = parameters
        return Poisson(rate, validate_args=False)


def _variance_of(f: Moments) -> Tensor:
    """Var[f], zeros of the mean network alone."""
    return torch.zeros_like(f.mean) if f.variance is None else f.variance


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
