"""What a calibrated network says of a batch, and what held-out data add to a network so that it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayesadam.calibrated.ranges import InputRange
from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods import ClassLikelihood, Component, Likelihood, Moments, NumericLikelihood
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import Abstention, doubt_of_classes, doubt_of_numbers
from bayesadam.likelihoods.classes import of_examples
from bayesadam.likelihoods.conformal import threshold
from bayesadam.predict.leverage import Leverage, Ratios


class Answer(NamedTuple):
    """What a calibrated network says of a batch; None where it does not apply.

    Attributes:
        novelty: how unlike the held-out inputs each example is, (batch,).
        p_value: the share of held-out examples at least as novel, (batch,): of examples like them at most α have p ≤ α.
        probs: of the classes, or of y = 1 for each binary output.
        mean: E[y] of numbers.
        stddev: of y, observation noise included.
        f_mean: f, (batch, ...).
        f_variance: Var[f] of numbers.
        leverage: r of each example, its leverage over that of familiar inputs, (batch,).
        layers: log h of each layer less the median of held-out inputs, (batch, layers), by the names in `net.layers`.
        answered: whether to answer it, where `calibrate` was given a `risk`; the others, and what is not in range, are
            for a person.
        in_range: whether its inputs are in the range of the held-out ones.
        noise_variance, scores: σ², and the held-out scores behind `set` and `interval`.
        likelihood: p(y | f), by name.
    """

    novelty: Tensor
    p_value: Tensor | None = None
    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    f_mean: Tensor | None = None
    f_variance: Tensor | None = None
    leverage: Tensor | None = None
    layers: Tensor | None = None
    answered: Tensor | None = None
    in_range: Tensor | None = None
    noise_variance: Tensor | None = None
    scores: Tensor | None = None
    likelihood: str = ""

    def set(self, level: float = 0.95) -> Tensor:
        """Which classes the set holds, booleans: the true one with probability `level` on data like the held-out."""
        return self.set_within(threshold(self._scores, level))

    def set_within(self, reach: Tensor) -> Tensor:
        """The classes whose 1 − p is at most `reach`."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.probs is None:
            raise SettingError("a set is of classes; of numbers see interval(level)")
        return 1 - kind.of_classes(self.probs) <= reach.to(self.probs).unsqueeze(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out."""
        return self.interval_within(threshold(self._scores, level))

    def interval_within(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        """E[y] ± `reach` sd[y]."""
        if self.mean is None or self.stddev is None:
            raise SettingError("an interval is of numbers; of classes see set(level)")
        half = reach.to(self.mean).view(self.mean.shape[1:]) * self.stddev
        return self.mean - half, self.mean + half

    @property
    def _scores(self) -> Tensor:
        if self.scores is None:
            raise CalibrationError(
                "this needs held-out scores: calibrate on at least 20 examples, of classes with one class for each"
            )
        return self.scores

    @property
    def distribution(self) -> Distribution:
        """p(y), a distribution of torch's."""
        kind = likelihood_of(self.likelihood)
        assert self.f_mean is not None
        if isinstance(kind, ClassLikelihood):
            # Those probabilities are of logits at the example's own temperature.
            assert self.probs is not None
            logits = self.probs.log() if kind.coupled else self.probs.logit()
            return kind.distribution([Component(Moments(logits))])
        return kind.distribution([Component(Moments(self.f_mean, self.f_variance), self.noise_variance)])

    @property
    def doubt(self) -> Tensor:
        """By which inputs are answered, (batch,): the probability that an answer is wrong, or the largest stddev."""
        return _doubt(likelihood_of(self.likelihood), self.probs, self.stddev)

    @property
    def token_novelty(self) -> Tensor:
        """How unlike the held-out inputs each position is, (batch, positions); `novelty` is an example's mean."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.f_mean is None or self.f_mean.dim() < 3 or not kind.coupled:
            raise SettingError("token_novelty is of outputs (batch, positions, classes); see novelty")
        assert self.leverage is not None
        return kind.token_novelty(self.f_mean, self.leverage)


@dataclass(frozen=True)
class Report:
    """What `calibrate` did, on how much, and what came of it.

    Attributes:
        n: held-out examples.
        nll: mean negative log-likelihood of the held-out examples as they are now predicted and, of classes, of the
            network at the best temperature and at 1; with their standard errors.
        outcome: what is predicted, in words.
        missing: what a posterior would have added; empty where there was one.
        abstention: which inputs are answered; None where `risk` was not given.
    """

    likelihood: str
    n: int
    nll: Mapping[str, tuple[float, float]]
    outcome: str
    missing: str = ""
    abstention: Abstention | None = None

    def __str__(self) -> str:
        lines = [f"{self.likelihood}: calibrated on {self.n} held-out examples, each left out of its own leverage"]
        lines += [f"  negative log-likelihood, {name}: {v:.4f} ± {error:.4f}" for name, (v, error) in self.nll.items()]
        lines.append(f"  {self.outcome}")
        lines += [] if self.abstention is None else [f"  answers {self.abstention}"]
        return "\n".join([*lines, f"  {self.missing}"] if self.missing else lines)


@dataclass(frozen=True, eq=False)
class Fit:
    """All that held-out data add to a network.

    Attributes:
        likelihood: p(y | f).
        leverage: how far layers extrapolate; None where no layer is known.
        exponent: of ((1 + r)/2), by which temperatures, or standard deviations, grow.
        temperature: T₀ of classes.
        spread: v of Var[f] = v r of numbers, by target.
        noise_variance: σ², or the most that noise can be.
        novelties: of the held-out inputs, ascending.
        scores: of the held-out targets, 1 − p of classes, |y − E[y]|/sd of numbers.
        dims: how many dimensions the outputs have, and the last of them; see `dims_of`.
        report: what `calibrate` did.
        ranges: of the held-out inputs.
    """

    likelihood: Likelihood
    leverage: Leverage | None
    exponent: float = 0.5
    temperature: float = 1.0
    spread: Tensor | None = None
    noise_variance: Tensor | None = None
    novelties: Tensor | None = None
    scores: Tensor | None = None
    dims: tuple[int, int] = (0, 0)
    ranges: tuple[InputRange, ...] = ()
    report: Report = field(default_factory=lambda: Report("", 0, {}, ""))


def dims_of(f: Tensor) -> tuple[int, int]:
    """How many dimensions outputs have, and the last of them; 1 of one number an example, (batch,)."""
    return f.dim(), f.shape[-1] if f.dim() > 1 else 1


class Predicted(NamedTuple):
    """y of a batch: probabilities, or mean, standard deviation and the variance of f."""

    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    f_variance: Tensor | None = None


def predicted(
    fit: Fit, f: Tensor, ratios: Ratios, moved: tuple[Tensor | None, Tensor | None] | None = None
) -> Predicted:
    """y given the network's outputs and relative leverages; `moved` are the fit's v and σ² on another device."""
    kind = fit.likelihood
    spread, noise = (fit.spread, fit.noise_variance) if moved is None else moved
    if isinstance(kind, ClassLikelihood):
        return Predicted(kind.link(f / (fit.temperature * of_examples(ratios.growth(fit.exponent), f))))
    assert isinstance(kind, NumericLikelihood)
    assert spread is not None
    variance = by_leverage(kind, f, ratios.gentle, spread)
    c = Component(Moments(f, variance), noise)
    return Predicted(None, kind.expected(c), kind.variance(c).sqrt(), variance)


def by_leverage(kind: Likelihood, f: Tensor, r: Tensor, spread: Tensor) -> Tensor:
    """Var[f] = v r of the outputs that locate targets, 0 of others."""
    located = spread.to(f) * of_examples(r, f).expand(kind.locations(f).shape)
    rest = f.shape[-1] - located.shape[-1] if f.dim() > 1 else 0
    return located if not rest else torch.nn.functional.pad(located, (0, rest))


def _doubt(kind: Likelihood, probs: Tensor | None, stddev: Tensor | None) -> Tensor:
    if isinstance(kind, ClassLikelihood):
        assert probs is not None
        return doubt_of_classes(kind.of_classes(probs))
    assert stddev is not None
    return doubt_of_numbers(stddev)


def doubt(fit: Fit, y: Predicted) -> Tensor:
    """By which inputs are answered, (batch,)."""
    return _doubt(fit.likelihood, y.probs, y.stddev)
