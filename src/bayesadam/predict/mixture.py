"""Mixtures of predictive distributions: what several networks with a posterior each say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from bayesadam.predict.predict import predict
from bayesadam.predict.predictive import (
    BinaryPredictive,
    ClassificationPredictive,
    RegressionPredictive,
)
from bayesadam.structures.noise import fresh_seed, stream_seed

if TYPE_CHECKING:
    from bayesadam.posterior.mixture import Mixture

_ENTROPY_DRAWS = 256
_HALVINGS = 60


def predict_mixture(
    mixture: Mixture, inputs: Any, *, generator: torch.Generator | None = None, **options: Any
) -> RegressionMixture | ClassificationMixture | BinaryMixture:
    """p(y) = Σ π_m p_m(y), the members' predictives of one batch mixed.

    Args:
        mixture: of posteriors.
        inputs: as in `predict`.
        generator: makes the draws reproducible; each member has a stream of its own.
        options: those of `predict`, the same for every member; `n_samples` are drawn from each.
    """
    mixture.require_proper()
    seed = fresh_seed(generator)
    found = [
        predict(member, inputs, generator=torch.Generator().manual_seed(stream_seed(seed, "member", number)), **options)
        for number, member in enumerate(mixture.members)
    ]
    return mixed(found, mixture.weights)


def mixed(
    members: Sequence[RegressionPredictive | ClassificationPredictive | BinaryPredictive], weights: Sequence[float]
) -> RegressionMixture | ClassificationMixture | BinaryMixture:
    """Predictives of one kind, of the same batch, as one distribution.

    E[f] = Σ π_m E_m[f] and Var[f] = Σ π_m (Var_m[f] + (E_m[f] − E[f])²), the covariance alike where every member has one.
    Draws are the members', in turn and in proportion to π.
    """
    mean = _average(weights, [member.mean for member in members])
    away = [member.mean - mean for member in members]
    spreads = [member.variance + d.square() for member, d in zip(members, away, strict=True)]
    blocks = [
        member.covariance + d.reshape(len(d), -1, 1) * d.reshape(len(d), 1, -1)
        for member, d in zip(members, away, strict=True)
        if member.covariance is not None
    ]
    drawn = [member.draws for member in members if member.draws is not None]
    fields: dict[str, Any] = {
        "mean": mean,
        "variance": _average(weights, spreads),
        "covariance": _average(weights, blocks) if len(blocks) == len(members) else None,
        "draws": _interleaved(weights, drawn) if len(drawn) == len(members) else None,
        "members": tuple(members),
        "weights": tuple(weights),
    }
    first = members[0]
    if isinstance(first, RegressionPredictive):
        noises = [member.noise_variance for member in members if isinstance(member, RegressionPredictive)]
        return RegressionMixture(**fields, noise_variance=_average(weights, noises))
    kind = ClassificationMixture if isinstance(first, ClassificationPredictive) else BinaryMixture
    return kind(**fields, link=first.link, seed=first.seed)


@dataclass(frozen=True, eq=False)
class RegressionMixture(RegressionPredictive):
    """p(y) = Σ π_m N(y; f_m, Var_m[f] + σ_m²); one network speaks for all outputs of an example.

    `mean`, `variance` and `noise_variance` = Σ π_m σ_m² are its moments; densities, intervals and draws are the mixture's
    own and not those of the Gaussian with these moments.

    Attributes:
        members: the predictives.
        weights: π.
    """

    members: tuple[RegressionPredictive, ...] = ()
    weights: tuple[float, ...] = ()

    def log_prob(self, y: Tensor) -> Tensor:
        """log Σ π_m p_m(y), one number an example; within a member outputs are independent unless covariances are known."""
        scores = torch.stack([member.log_prob(y) for member in self.members])
        return _pooled(self.weights, scores)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each output: F(low) = 1 − F(high) = (1 − level)/2, F(y) = Σ π_m Φ((y − f_m)/σ_m).

        A quantile of the mixture lies between the least and the greatest of the members': from there by halving.
        """
        means, stddevs = (torch.stack([getattr(m, key) for m in self.members]).double() for key in ("mean", "stddev"))
        lows, highs = zip(*(member.interval(level) for member in self.members), strict=True)
        tail = (1 - level) / 2
        low = _quantile(self.weights, means, stddevs, torch.stack(lows).double(), tail)
        # From above the same, mirrored: the small number is the one that keeps its digits.
        high = -_quantile(self.weights, -means, stddevs, -torch.stack(highs).double(), tail)
        return low.to(self.mean), high.to(self.mean)

    def entropy(self) -> Tensor:
        """The differential entropy of y in nats, one number an example: Σ π_m H_m + I(y; m).

        The first term is exact. What y tells about the member, I = Σ π_m E_m[log p_m(y)/p(y)], lies between 0 and
        −Σ π_m log π_m and has no closed form: it is the average over 256 draws of each member, always the same ones, and is
        right to some hundredths.
        """
        weights = self.mean.new_tensor(self.weights)
        known = _average(self.weights, [member.entropy() for member in self.members])
        densities = [_density(member) for member in self.members]
        generator = torch.Generator(device=self.mean.device).manual_seed(0)
        told = torch.zeros_like(known)
        for number, (member, weight) in enumerate(zip(self.members, self.weights, strict=True)):
            y = replace(member, draws=None).sample(_ENTROPY_DRAWS, generator=generator)
            scores = torch.stack([density.log_prob(y.reshape(*y.shape[:2], -1)) for density in densities])
            told += weight * (scores[number] - _pooled(self.weights, scores)).mean(dim=0)
        return known + told.clamp(min=0).minimum(torch.special.entr(weights).sum())

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...), each from one member for the whole batch."""
        return _sampled(self.members, self.weights, n, generator)


@dataclass(frozen=True, eq=False)
class ClassificationMixture(ClassificationPredictive):
    """p(class) = Σ π_m p_m(class), each member's by its own link or draws.

    Attributes:
        members: the predictives.
        weights: π.
    """

    members: tuple[ClassificationPredictive, ...] = ()
    weights: tuple[float, ...] = ()

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities of the classes."""
        return _average(self.weights, [member.probs for member in self.members])

    def mutual_information(self) -> Tensor:
        """I(y; m, θ) = I(y; m) + Σ π_m I_m(y; θ): what members disagree on, and what each does not know of its weights."""
        return _information(self, self.members, self.weights)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of the class, (n, batch), each from one member for the whole batch."""
        return _sampled(self.members, self.weights, n, generator)


@dataclass(frozen=True, eq=False)
class BinaryMixture(BinaryPredictive):
    """p(y = 1) = Σ π_m p_m(y = 1), output by output.

    Attributes:
        members: the predictives.
        weights: π.
    """

    members: tuple[BinaryPredictive, ...] = ()
    weights: tuple[float, ...] = ()

    @cached_property
    def probs(self) -> Tensor:
        """p(y = 1)."""
        return _average(self.weights, [member.probs for member in self.members])

    def log_prob(self, y: Tensor) -> Tensor:
        """log Σ π_m p_m(y) of zeros and ones; within a member the outputs of an example are independent."""
        return _pooled(self.weights, torch.stack([member.log_prob(y) for member in self.members]))

    def mutual_information(self) -> Tensor:
        """I(y; m, θ) = I(y; m) + Σ π_m I_m(y; θ), output by output."""
        return _information(self, self.members, self.weights)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, zeros and ones, each from one member for the whole batch."""
        return _sampled(self.members, self.weights, n, generator)


# --- the maths ------------------------------------------------------------------------------------------------------


def _average(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Σ π_m x_m."""
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight * value
    return total


def _pooled(weights: Sequence[float], scores: Tensor) -> Tensor:
    """log Σ π_m exp(scores_m), members first."""
    logs = scores.new_tensor(weights).log().view(-1, *[1] * (scores.dim() - 1))
    return torch.logsumexp(scores + logs, dim=0)


def _interleaved(weights: Sequence[float], drawn: Sequence[Tensor]) -> Tensor:
    """As many draws of each member as its weight allows, all of the heaviest's, so mixed that any run of them is fair."""
    kept = [draws[: round(len(draws) * weight / max(weights))] for weight, draws in zip(weights, drawn, strict=True)]
    places = torch.cat([(torch.arange(len(draws)) + 0.5) / len(draws) for draws in kept])
    return torch.cat(kept)[places.argsort(stable=True).to(kept[0].device)]


def _quantile(weights: Sequence[float], means: Tensor, stddevs: Tensor, quantiles: Tensor, tail: float) -> Tensor:
    """The y with Σ π_m Φ((y − μ_m)/σ_m) = `tail`, by halving between the members' own quantiles; members first."""
    shares = means.new_tensor(weights).view(-1, *[1] * (means.dim() - 1))
    stddevs = stddevs.clamp(min=torch.finfo(stddevs.dtype).tiny)
    low, high = quantiles.amin(dim=0), quantiles.amax(dim=0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = (shares * torch.special.ndtr((middle - means) / stddevs)).sum(dim=0) < tail
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _density(member: RegressionPredictive) -> Distribution:
    """p_m(y) over the outputs of an example, with what need be factorised factorised once."""
    mean, size = member.mean, len(member.mean)
    if member.covariance is None:
        return Independent(Normal(mean.reshape(size, -1), member.stddev.reshape(size, -1), validate_args=False), 1)
    return MultivariateNormal(mean.reshape(size, -1), member._total_covariance(member.covariance), validate_args=False)


def _information(
    whole: ClassificationPredictive | BinaryPredictive,
    members: Sequence[ClassificationPredictive | BinaryPredictive],
    weights: Sequence[float],
) -> Tensor:
    """H[p] − Σ π_m H[p_m] + Σ π_m I_m."""
    between = whole.entropy() - _average(weights, [member.entropy() for member in members])
    return between.clamp(min=0) + _average(weights, [member.mutual_information() for member in members])


def _sampled(
    members: Sequence[RegressionPredictive | ClassificationPredictive | BinaryPredictive],
    weights: Sequence[float],
    n: int,
    generator: torch.Generator | None,
) -> Tensor:
    """n draws, a member picked for each."""
    shares = torch.tensor(weights, dtype=torch.float64, device=members[0].mean.device)
    picks = torch.multinomial(shares, n, replacement=True, generator=generator)
    places = [(picks == number).nonzero().flatten() for number in range(len(members))]
    drawn = [
        member.sample(len(where), generator=generator)
        for member, where in zip(members, places, strict=True)
        if len(where)
    ]
    return torch.cat(drawn)[torch.cat(places).argsort()]
