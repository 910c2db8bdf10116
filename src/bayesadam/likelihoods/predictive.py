"""What all predictive distributions share: moments of the outputs, quantiles of numbers, probabilities of classes, mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam._warnings import warn
from bayesadam.errors import CalibrationError, MatchError, SettingError
from bayesadam.likelihoods.component import Novel as Novel
from bayesadam.likelihoods.component import Score as Score
from bayesadam.likelihoods.conformal import (
    Guarantee,
    SetMethod,
    check_level,
    class_scores,
    p_values,
    threshold,
    uniform_like,
)

Link = Literal["probit", "sampling"]
_LOGIT_DRAWS = 200
_ENTROPY_DRAWS = 256
_HALVINGS = 60
# Below that many held-out examples all of them are fitted.
FEWEST_SCORED = 20
# Novelty costs a covariance of all outputs with each other; up to here that is a small part of a prediction.
FEW_OUTPUTS = 20
_COMMON = ("mean", "variance", "covariance", "draws", "novel", "guarantee", "score", "plan")


@dataclass(frozen=True, eq=False)
class Predictive:
    """The outputs of a network under a weight posterior.

    Attributes:
        mean: E[f], of the network's output shape, (batch, ...).
        variance: Var[f], without observation noise, of the same shape.
        covariance: (batch, outputs, outputs), where it was asked for.
        draws: (n, batch, ...), draws of f where the method sampled. Those of `"linearised-sampled"` are functions: one draw
            of the weights for the whole batch. Those of `"sampled"` have the right distribution example by example and
            need not be: where every weight sits in a linear layer, activations are drawn instead of weights, independently
            from example to example. For functions at drawn weights use `sampled()`.
        novel: what `novelty` is computed from.
        guarantee: held-out scores, where the posterior was calibrated on data that it was not fitted to.
        score: the estimate behind `epistemic`, where outputs are too many for an exact one.
        plan: how the moments were found, in words.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    draws: Tensor | None = None
    novel: Novel | None = None
    guarantee: Guarantee | None = None
    score: Score | None = None
    plan: str = ""

    @property
    def epistemic(self) -> Tensor:
        """½ tr(H Cov[f]), H the Hessian of −log p(y | f): to first order what y would teach about the weights, in nats.

        One number for each example, or for each place of classes. Exact where the covariance is known, or where the
        likelihood does not couple outputs; else an unbiased estimate, `score` has its standard error.
        """
        if self.score is not None:
            return self.score.value
        found = self._epistemic()
        if found is None:
            raise SettingError(
                "this prediction cannot tell ½ tr(H Cov[f]): predict with covariance=True, or with probes=2 for an estimate"
            )
        return found

    def _epistemic(self) -> Tensor | None:
        """The same out of the moments; None where they do not tell."""
        return None

    @cached_property
    def novelty(self) -> Tensor:
        """How unlike the training data each example is, (batch,): larger is less familiar. Calibration does not touch it.

        Of classes the entropy, in nats, of the probabilities under the settings of novelty. Of numbers what y would teach
        about f, ½ Σ log(1 + Var[f]/σ²) over outputs, σ² the noise, or 1/(−∂² log p) where the likelihood has none.
        """
        members = (
            [(1.0, self)] if not isinstance(self, PredictiveMixture) else zip(self.weights, self.members, strict=True)
        )
        found = [(weight, member.novel) for weight, member in members]
        if any(novel is None for _, novel in found):
            raise SettingError(
                "this prediction has no novelty: it needs predictive='linearised', and novelty=True where outputs are many"
            )
        weights, novels = zip(*found, strict=True)
        return self._novelty_of(novels, weights)

    @property
    def novelty_limit(self) -> float:
        """The largest novelty there can be: none of numbers."""
        return math.inf

    @property
    def novelty_pvalue(self) -> Tensor:
        """The share of held-out examples at least as novel, in float64: of those like them at most α have p ≤ α."""
        return p_values(self._held_out("novelty"), self.novelty)

    def _held_out(self, name: str) -> Any:
        found = getattr(self.guarantee, name, None)
        if found is not None and (len(found) or not isinstance(found, Mapping)):
            return found
        if self.guarantee is None or not self.guarantee.tensors():
            remedy = f"calibrate the posterior with at least {FEWEST_SCORED} examples and two folds"
        elif name == "novelty":
            remedy = (
                f"calibration keeps it of at most {FEW_OUTPUTS} outputs. Of more, with h = posterior.novelty(held_out): "
                "(1 + (h >= p.novelty[:, None]).sum(1)) / (1 + len(h))"
            )
        else:
            remedy = "calibration keeps them where each example has one class, and none is left out"
        raise CalibrationError(f"no {name} of held-out data: {remedy}")

    @classmethod
    def _novelty_of(cls, members: Sequence[Novel], weights: Sequence[float]) -> Tensor:
        """Of the mixture of these."""
        mean = average(weights, [member.mean for member in members])
        variance = average(weights, [member.variance + (member.mean - mean).square() for member in members])
        precision = average(weights, [member.precision for member in members])
        return 0.5 * rows(torch.log1p(variance * precision)).sum(dim=1)

    def plot(
        self,
        x: Any = None,
        *,
        targets: Any = None,
        other: Predictive | None = None,
        kind: Literal["bands", "probabilities", "reliability", "novelty"] | None = None,
        level: float = 0.95,
        ax: Any = None,
    ) -> Any:
        """A picture of the prediction, with matplotlib; returns its axes.

        | kind              | shows                                                                   | the default             |
        |-------------------|-------------------------------------------------------------------------|-------------------------|
        | `"bands"`         | mean and intervals of numbers over x, or example by example             | of numbers              |
        | `"probabilities"` | of classes over x, or their means                                       | of classes              |
        | `"reliability"`   | accuracy against confidence, and the expected calibration error         | of classes with targets |
        | `"novelty"`       | a histogram of `novelty`; of `other` too, with the AUROC between the two | with `other`            |

        Where the noise of a regression is not known, its bands are of the function alone.

        Args:
            x: one number for each example, such as a column of the inputs.
            targets: what was observed.
            other: a predictive of other inputs, such as out-of-distribution ones.
            kind: see the table; None takes the default.
            level: of the intervals.
            ax: axes to draw on; None for those of a new figure.
        """
        require("matplotlib")
        from bayesadam.likelihoods.pictures import draw

        return draw(self, x, targets, other, kind, level, ax)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number per example."""
        raise NotImplementedError

    def entropy(self) -> Tensor:
        """The entropy of y in nats."""
        raise NotImplementedError

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, a leading dimension."""
        raise NotImplementedError

    def _function_draws(self, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of f: those at hand, or Gaussian ones."""
        if self.draws is not None and len(self.draws) >= n:
            return self.draws[:n]
        noise = normal_like(self.mean, n, generator)
        if self.covariance is None:
            return self.mean + noise * self.variance.sqrt()
        # Positive semi-definite: a jitter of rounding size makes it factorise.
        scale = self.covariance.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        eye = torch.eye(self.covariance.shape[-1], dtype=scale.dtype, device=scale.device)
        root = torch.linalg.cholesky(self.covariance + 10 * torch.finfo(scale.dtype).eps * scale.clamp(min=1e-30) * eye)
        flat = torch.einsum("bcd,nbd->nbc", root, noise.reshape(n, len(self.mean), -1))
        return self.mean + flat.view_as(noise)


@dataclass(frozen=True, eq=False)
class NumericPredictive(Predictive):
    """Targets that are numbers: they have moments and quantiles."""

    # Quantiles are found to this precision; 0 is as near as halving gets.
    _resolution: ClassVar[float] = 0.0

    @property
    def predicted_mean(self) -> Tensor:
        """E[y]."""
        return self.mean

    @property
    def total_variance(self) -> Tensor:
        """Var[y], observation noise included."""
        raise NotImplementedError

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of y, observation noise included."""
        return self.total_variance.sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number per example; outputs are taken as independent unless the covariance is known."""
        y = self._targets(y)
        return self._log_density()(y)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each output: at most (1 − level)/2 of the probability lies on either side of it."""
        if not 0 < level < 1:
            raise SettingError(f"level must lie between 0 and 1, got {level!r}")
        return self._quantile((1 - level) / 2, upper=False), self._quantile((1 - level) / 2, upper=True)

    def prediction_set(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out.

        q is the conformal quantile of the held-out residuals in standard deviations, whatever the predictive's shape.
        """
        check_level(level)
        reach = threshold(self._held_out("residuals"), level).to(self.mean) * rows(self.stddev)
        centre = rows(self.predicted_mean)
        return (centre - reach).view_as(self.predicted_mean), (centre + reach).view_as(self.predicted_mean)

    def entropy(self) -> Tensor:
        """The entropy of y in nats, one number per example: the mean of −log p over 256 draws, always the same ones."""
        return -self._log_density()(_fixed_draws(self, 0)).mean(dim=0)

    def _targets(self, y: Tensor) -> Tensor:
        """Targets in the shape of the predicted mean, checked."""
        return like(y, self.predicted_mean)

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        """y, (..., batch, ...) → log p(y), (..., batch); what need be factorised is factorised once."""
        raise NotImplementedError

    def _quantile(self, tail: float, upper: bool) -> Tensor:
        """The least y with P(Y ≤ y) ≥ `tail`, or with P(Y > y) ≤ `tail`, by halving."""
        mass = self._mass(upper)
        low, high = (end.double() for end in self._bracket(tail, upper))
        for _ in range(_HALVINGS):
            if self._resolution and bool((high - low <= self._resolution).all()):
                break
            middle = (low + high) / 2
            below = mass(middle) > tail if upper else mass(middle) < tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (high.round() if self._resolution else (low + high) / 2).to(self.mean)

    def _mass(self, upper: bool) -> Callable[[Tensor], Tensor]:
        """y → P(Y > y) if `upper`, else P(Y ≤ y), for each output, in float64."""
        raise NotImplementedError

    def _bracket(self, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        """Two bounds between which the quantile lies."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LogitPredictive(Predictive):
    """Targets that are classes: they have probabilities.

    Attributes:
        link: how logits become probabilities where f is Gaussian.
        seed: of the draws of `link="sampling"`.
        temperature: T, by which logits are divided before they become probabilities.
        averaged: whether probabilities are averages over the posterior; else they are those of the mean network, which
            held-out data then preferred.
    """

    link: Link = "probit"
    seed: int = 0
    temperature: float = 1.0
    averaged: bool = True

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities."""
        if self.draws is None and not self.averaged:
            return self._probs_at(self.mean / self.temperature)
        if self.draws is not None or self.link == "sampling":
            return self._draw_probs().mean(dim=0)
        return self._probit_probs(self.mean / self.temperature, self.variance / self.temperature**2)

    @property
    def class_probs(self) -> Tensor:
        """The probability of every class, in the last dimension."""
        return self._of_classes(self.probs)

    def entropy(self) -> Tensor:
        """The entropy of y in nats: all uncertainty."""
        return _entropy(self.class_probs)

    def mutual_information(self) -> Tensor:
        """H[E p] − E[H p], what more data could still teach: uncertainty of the weights alone.

        It is the posterior's also where `probs` are the mean network's (`averaged` is False), and may then exceed their
        `entropy()`. By draws, which know the correlations between logits only where the prediction was made with `covariance=True`.
        """
        probs = self._of_classes(self._draw_probs())
        return (_entropy(probs.mean(dim=0)) - _entropy(probs).mean(dim=0)).clamp(min=0)

    def _draw_probs(self) -> Tensor:
        draws = self.draws
        if draws is None:
            generator = torch.Generator(device=self.mean.device).manual_seed(self.seed)
            draws = self._function_draws(_LOGIT_DRAWS, generator)
        return self._probs_at(draws / self.temperature)

    def prediction_set(
        self, level: float = 0.95, *, method: SetMethod = "lac", by_class: bool = False, seed: int = 1
    ) -> Tensor:
        """Which classes the set holds, booleans of the shape of `class_probs`.

        It contains the true class with probability `level` on data like the held-out.

        Args:
            method: `"lac"` for the smallest sets; `"aps"` for sets that grow with the difficulty of the example; `"raps"`
                for the same without a long tail of unlikely classes. The last two are randomised.
            by_class: the guarantee for each class by itself, which needs 1/(1 − level) held-out examples of it; a class
                with fewer is in every set.
            seed: of the random numbers.
        """
        check_level(level)
        probs = self.class_probs
        scores = class_scores(probs, method, uniform_like(probs, seed))
        held_out = self._held_out("classes")[method].to(scores)
        if not by_class:
            return scores <= threshold(held_out, level).unsqueeze(-1)
        labels = self._held_out("labels").to(scores.device)
        if labels[0].numel() != 1:
            raise SettingError("by_class=True is for one label per example")
        limits = torch.stack([threshold(held_out[labels == k], level) for k in range(probs.shape[-1])])
        if bool(limits.isinf().any()):
            few = int(limits.isinf().nonzero()[0])
            warn(
                f"{int(limits.isinf().sum())} of {len(limits)} classes are in every set: class {few} has "
                f"{int((labels == few).sum())} held-out examples, and a level of {level:g} for each class needs "
                f"{math.ceil(level / (1 - level) - 1e-9)}"
            )
        return scores <= limits

    @classmethod
    def _novelty_of(cls, members: Sequence[Novel], weights: Sequence[float]) -> Tensor:
        probs = cls._of_classes(average(weights, [cls._novel_probs(member) for member in members]))
        return rows(_entropy(probs)).mean(dim=1)

    @property
    def novelty_limit(self) -> float:
        """ln K of K classes, the largest novelty there can be."""
        return math.log(self.class_probs.shape[-1])

    @classmethod
    def _novel_probs(cls, novel: Novel) -> Tensor:
        """The probabilities under the settings of novelty."""
        raise NotImplementedError

    @staticmethod
    def _of_classes(probs: Tensor) -> Tensor:
        return probs

    def _probs_at(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def _probit_probs(self, mean: Tensor, variance: Tensor) -> Tensor:
        raise NotImplementedError


def _entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs).sum(dim=-1)
    return entropy


_MIXTURES: dict[type, type] = {}


@dataclass(frozen=True, eq=False)
class PredictiveMixture(Predictive):
    """p(y) = Σ π_m p_m(y), the predictives of several networks; one network speaks for all outputs of an example.

    `mean` and `variance` are its moments; probabilities, densities, intervals and draws are the mixture's own.

    Attributes:
        members: the predictives.
        weights: π.
    """

    members: tuple[Any, ...] = ()
    weights: tuple[float, ...] = ()

    def __init_subclass__(cls) -> None:
        """A mixture is also of the kind of its members, the one base that is no mixture."""
        super().__init_subclass__()
        _MIXTURES.update({base: cls for base in cls.__bases__ if not issubclass(base, PredictiveMixture)})

    def log_prob(self, y: Tensor) -> Tensor:
        """log Σ π_m p_m(y), one number per example; within a member as its own `log_prob`."""
        return pooled(self.weights, torch.stack([member.log_prob(y) for member in self.members]))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, each from one member for the whole batch."""
        shares = torch.tensor(self.weights, dtype=torch.float64, device=self.mean.device)
        picks = torch.multinomial(shares, n, replacement=True, generator=generator)
        places = [(picks == number).nonzero().flatten() for number in range(len(self.members))]
        counts = zip(self.members, map(len, places), strict=True)
        drawn = [member.sample(count, generator=generator) for member, count in counts if count]
        return torch.cat(drawn)[torch.cat(places).argsort()]

    def _epistemic(self) -> Tensor | None:
        """Σ π_m of the members', each round its own mean."""
        return self._averaged(lambda member: member.epistemic)

    def _averaged(self, of: Callable[[Any], Tensor]) -> Tensor:
        """Σ π_m x_m."""
        return average(self.weights, [of(member) for member in self.members])


@dataclass(frozen=True, eq=False)
class NumericMixture(PredictiveMixture, NumericPredictive):
    """A mixture whose targets are numbers."""

    @property
    def predicted_mean(self) -> Tensor:
        """E[y] = Σ π_m E_m[y]."""
        return self._averaged(lambda member: member.predicted_mean)

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Σ π_m (Var_m[y] + (E_m[y] − E[y])²), observation noise included."""
        centre = self.predicted_mean
        return self._averaged(lambda m: m.total_variance + (m.predicted_mean - centre).square())

    def entropy(self) -> Tensor:
        """The entropy of y in nats, one number per example: Σ π_m H_m + I(y; m).

        What y tells about the member, I = Σ π_m E_m[log p_m(y)/p(y)], lies between 0 and −Σ π_m log π_m and has no closed
        form: it is the average over 256 draws of each member, always the same ones, and is right to some hundredths.
        """
        known = self._averaged(lambda member: member.entropy())
        densities = [member._log_density() for member in self.members]
        told = torch.zeros_like(known)
        for number, (member, weight) in enumerate(zip(self.members, self.weights, strict=True)):
            y = _fixed_draws(member, number)
            scores = torch.stack([density(y) for density in densities])
            told += weight * (scores[number] - pooled(self.weights, scores)).mean(dim=0)
        return known + told.clamp(min=0).minimum(torch.special.entr(told.new_tensor(self.weights)).sum())

    def _log_density(self) -> Callable[[Tensor], Tensor]:
        densities = [member._log_density() for member in self.members]
        return lambda y: pooled(self.weights, torch.stack([density(y) for density in densities]))

    def _mass(self, upper: bool) -> Callable[[Tensor], Tensor]:
        masses = [member._mass(upper) for member in self.members]
        return lambda y: average(self.weights, [mass(y) for mass in masses])

    def _bracket(self, tail: float, upper: bool) -> tuple[Tensor, Tensor]:
        # A quantile of the mixture lies between the least and the greatest of the members'.
        ends = torch.stack([member._quantile(tail, upper) for member in self.members]).double()
        return ends.amin(dim=0) - self._resolution, ends.amax(dim=0)


@dataclass(frozen=True, eq=False)
class LogitMixture(PredictiveMixture, LogitPredictive):
    """A mixture whose targets are classes, each member's probabilities by its own link or draws."""

    @cached_property
    def probs(self) -> Tensor:
        """Σ π_m p_m."""
        return self._averaged(lambda member: member.probs)

    def mutual_information(self) -> Tensor:
        """I(y; m, θ) = I(y; m) + Σ π_m I_m(y; θ): what members disagree on, and what each does not know of its weights."""
        return self.disagreement() + self._averaged(lambda member: member.mutual_information())

    def _epistemic(self) -> Tensor | None:
        """I(y; m) of the mean networks + Σ π_m of the members'."""
        means = mixture_of([replace(m, averaged=False, draws=None) for m in self.members], self.weights)
        assert isinstance(means, LogitMixture)
        return means.disagreement() + self._averaged(lambda member: member.epistemic)

    def disagreement(self) -> Tensor:
        """I(y; m) = H[Σ π_m p_m] − Σ π_m H[p_m] in nats: what members disagree on."""
        return (self.entropy() - self._averaged(lambda member: member.entropy())).clamp(min=0)


def mixture_of(members: Sequence[Predictive], weights: Sequence[float]) -> PredictiveMixture:
    """Predictives of one kind, of the same batch, as one distribution."""
    found: PredictiveMixture = _MIXTURES[type(members[0])](**mixed_fields(members, weights))
    return found


def has_novelty(predictive: Predictive) -> bool:
    """Whether a prediction was made with `novelty`."""
    if isinstance(predictive, PredictiveMixture):
        return all(member.novel is not None for member in predictive.members)
    return predictive.novel is not None


def mixed_fields(members: Sequence[Predictive], weights: Sequence[float]) -> dict[str, Any]:
    """E[f] = Σ π_m E_m[f] and Var[f] = Σ π_m (Var_m[f] + (E_m[f] − E[f])²), the fields of a mixture.

    The covariance alike, where every member has one. Draws are the members', in turn and in proportion to π. Tensors that
    a kind has besides, such as a noise, are averaged, other fields the first member's.
    """
    mean = average(weights, [member.mean for member in members])
    away = [member.mean - mean for member in members]
    blocks = [
        member.covariance + d.reshape(len(d), -1, 1) * d.reshape(len(d), 1, -1)
        for member, d in zip(members, away, strict=True)
        if member.covariance is not None
    ]
    drawn = [member.draws for member in members if member.draws is not None]
    held = {field.name: [getattr(member, field.name) for member in members] for field in fields(members[0])}
    own = {key: v for key, v in held.items() if key not in _COMMON}
    return {key: average(weights, v) if _is_real(v[0]) else v[0] for key, v in own.items()} | {
        "mean": mean,
        "variance": average(weights, [m.variance + d.square() for m, d in zip(members, away, strict=True)]),
        "covariance": average(weights, blocks) if len(blocks) == len(members) else None,
        "draws": _interleaved(weights, drawn) if len(drawn) == len(members) else None,
        "members": tuple(members),
        "weights": tuple(weights),
    }


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def average(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Σ π_m x_m."""
    return reduce(torch.add, [weight * value for weight, value in zip(weights, values, strict=True)])


def pooled(weights: Sequence[float], scores: Tensor) -> Tensor:
    """log Σ π_m exp(scores_m), members first."""
    logs = scores.new_tensor(weights).log().view(-1, *[1] * (scores.dim() - 1))
    return torch.logsumexp(scores + logs, dim=0)


def _interleaved(weights: Sequence[float], drawn: Sequence[Tensor]) -> Tensor:
    """As many draws of each member as its weight allows, all of the heaviest's, so mixed that any run of them is fair."""
    parts = [draws[: round(len(draws) * weight / max(weights))] for weight, draws in zip(weights, drawn, strict=True)]
    places = torch.cat([(torch.arange(len(draws)) + 0.5) / len(draws) for draws in parts])
    return torch.cat(parts)[places.argsort(stable=True).to(parts[0].device)]


def normal_like(mean: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, (n, *mean.shape)."""
    return torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _fixed_draws(predictive: Predictive, seed: int) -> Tensor:
    generator = torch.Generator(device=predictive.mean.device).manual_seed(seed)
    return replace(predictive, draws=None).sample(_ENTROPY_DRAWS, generator=generator)


def nodes_like(per_unit: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """z and w with Σ w h(z) ≈ E[h(z)], z ~ N(0, 1), that broadcast against `mean` with a leading dimension.

    The trapezoidal rule on [−8, 8], `per_unit` nodes to the unit: for integrands that are smooth on the scale of a step
    its error falls faster than any power of that step.
    """
    z = torch.arange(-8 * per_unit, 8 * per_unit + 1, dtype=torch.float64).div(per_unit).view(-1, *[1] * mean.dim())
    return z.to(mean), (-0.5 * z.square()).softmax(dim=0).to(mean)


def summed(terms: Tensor, dims: int) -> Tensor:
    """(..., batch, ...) of which the last `dims` are an example's and the batch, summed over outputs: (..., batch)."""
    return terms.unsqueeze(-1).flatten(terms.dim() - dims + 1).sum(dim=-1)


def rows(tensor: Tensor) -> Tensor:
    """(batch, ...) as (batch, outputs), also where an output is a single number, (batch,)."""
    return tensor.reshape(len(tensor), -1)


def place_blocks(covariance: Tensor, mean: Tensor) -> Tensor:
    """The covariance within the last dimension at each place, (batch, ..., o, o), out of that of all outputs of an example."""
    size = mean.shape[-1]
    places = mean[0].numel() // size
    blocks = covariance.view(-1, places, size, places, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return blocks.reshape(*mean.shape, size)


def like(y: Tensor, mean: Tensor) -> Tensor:
    """Targets in the outputs' shape: (batch,) serves (batch, 1), and the other way round."""
    if y.dim() > 0 and len(y) == len(mean) and y[0].squeeze().shape == mean[0].squeeze().shape:
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        several = y.dim() == 1 and len(y) == len(mean) and mean.dim() == 2
        remedy = (
            ": there is to be a target for each output, or likelihood='classification' for classes" if several else ""
        )
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the outputs {tuple(mean.shape)}{remedy}")
    return y.to(mean)


def normal_mass(z: Tensor, upper: bool) -> Tensor:
    """P(N(0, 1) > z) if `upper`, else P(N(0, 1) ≤ z); `torch.special.ndtr` loses the digits of small ones."""
    return torch.erfc((z if upper else -z) / math.sqrt(2)) / 2


def level_quantile(level: float) -> float:
    """z with P(|N(0, 1)| ≤ z) = level."""
    return math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
