"""What `posterior.predict` returns: f of one network, or of a mixture of them, and y under its likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayesadam.errors import SettingError
from bayesadam.likelihoods.base import Component, Likelihood
from bayesadam.likelihoods.classes import ClassLikelihood
from bayesadam.likelihoods.numbers import NumericLikelihood


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """p(y) = Σ π E[p(y | f)] for every example of a batch.

    `f_mean`, `f_variance` and `covariance` are of the function f, without observation noise; `mean`, `variance` and
    `stddev` of y.

    Attributes:
        likelihood: p(y | f).
        components: f of each network; a `Posterior`'s prediction has one.
    """

    likelihood: Likelihood
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        self.likelihood.locations(self.components[0].f.mean)

    def __repr__(self) -> str:
        networks = f", {len(self.components)} networks" if len(self.components) > 1 else ""
        return f"Prediction({self.likelihood.name}, outputs {tuple(self.components[0].f.mean.shape)}{networks})"

    def _mixed(self, mean: Callable[[Component], Tensor], variance: Callable[[Component], Tensor]) -> Tensor:
        """Σ π (Var + (E − Ē)²)."""
        if len(self.components) == 1:
            return variance(self.components[0])
        centre = self._averaged(mean)
        return self._averaged(lambda c: variance(c) + (mean(c) - centre).square())

    def _averaged(self, value: Callable[[Component], Tensor]) -> Tensor:
        """Σ π x."""
        if len(self.components) == 1:
            return value(self.components[0])
        return torch.stack([c.weight * value(c) for c in self.components]).sum(dim=0)

    @property
    def f_mean(self) -> Tensor:
        """E[f], (batch, ...)."""
        return self._averaged(lambda c: c.f.mean)

    @property
    def f_variance(self) -> Tensor:
        """Var[f], of the same shape."""
        return self._mixed(lambda c: c.f.mean, _known_variance)

    @property
    def covariance(self) -> Tensor:
        """Cov[f] of the outputs of each example, (batch, outputs, outputs), or of all of them together for "joint"."""
        f, *others = (c.f for c in self.components)
        found = f.covariance if f.joint is None else f.joint
        if others or found is None:
            raise SettingError("predict(x, covariance=True), or covariance='joint', of one posterior has covariances")
        return found

    @property
    def draws(self) -> Tensor:
        """Draws of f, (n, batch, ...), of all networks one after the other."""
        drawn = [c.f.draws for c in self.components if c.f.draws is not None]
        if not drawn:
            raise SettingError("predict(x, draws=32) has draws")
        return torch.cat(drawn)

    @cached_property
    def distribution(self) -> Distribution:
        """p(y), a distribution of torch's: `.sample()`, `.log_prob(y)`, `.cdf(y)`, `.entropy()` where it has them."""
        return self.likelihood.distribution(self.components)

    @property
    def probs(self) -> Tensor:
        """The probabilities: of every class, in the last dimension, or of y = 1 for each binary output."""
        if not isinstance(self.likelihood, ClassLikelihood):
            raise SettingError(f"probabilities are of classes, and the likelihood is {self.likelihood.name!r}")
        return self.likelihood.probs(self.components)

    @property
    def mean(self) -> Tensor:
        """E[y]."""
        return self._averaged(self._numbers.expected)

    @property
    def variance(self) -> Tensor:
        """Var[y], observation noise included."""
        kind = self._numbers
        return self._mixed(kind.expected, kind.variance)

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of y, observation noise included."""
        return self.variance.sqrt()

    @property
    def _numbers(self) -> NumericLikelihood:
        if not isinstance(self.likelihood, NumericLikelihood):
            raise SettingError("classes have .probs, and f .f_mean and .f_variance; .mean and .stddev are of numbers")
        return self.likelihood

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y): one number for each example, or for each class index where an example has many."""
        return self.likelihood.log_prob(self.components, y)


def _known_variance(c: Component) -> Tensor:
    if c.f.variance is None:
        raise SettingError("this prediction is of the mean network alone: its variance is not known")
    return c.f.variance
