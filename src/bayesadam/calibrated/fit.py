"""What held-out data add to a network, and how it is fitted: a temperature of classes, spread and noise of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.ranges import InputRange
from bayesadam.errors import CalibrationError
from bayesadam.likelihoods import ClassLikelihood, Component, Likelihood, Moments, NumericLikelihood
from bayesadam.likelihoods.abstention import Abstention
from bayesadam.likelihoods.classes import of_examples
from bayesadam.likelihoods.fitting import best_temperature, mean_log_prob, refined
from bayesadam.predict.leverage import Leverage, Ratios

# Temperatures grow with leverage by the first exponent at which held-out data lose at most 0.5 % of their likelihood.
_EXPONENTS, _DEAREST = (0.5, 0.375, 0.25, 0.125, 0.0), 1.005


@dataclass(frozen=True)
class Report:
    """What `calibrate` did, on how much, and what came of it.

    Attributes:
        n: held-out examples.
        nll: mean negative log-likelihood of the held-out examples as they are now predicted and, of classes, of the
            network at the best temperature and at 1; with their standard errors.
        outcome: what is predicted, in words.
        abstention: which inputs are answered; None where `risk` was not given.
    """

    likelihood: str
    n: int
    nll: Mapping[str, tuple[float, float]]
    outcome: str
    abstention: Abstention | None = None

    def __str__(self) -> str:
        lines = [f"{self.likelihood}: calibrated on {self.n} held-out examples"]
        lines += [f"  negative log-likelihood, {name}: {v:.4f} ± {error:.4f}" for name, (v, error) in self.nll.items()]
        lines.append(f"  {self.outcome}")
        return "\n".join(lines if self.abstention is None else [*lines, f"  answers {self.abstention}"])


@dataclass(frozen=True, eq=False)
class Fit:
    """All that held-out data add to a network."""

    likelihood: Likelihood
    # None where no layer is known.
    leverage: Leverage | None
    # Of ((1 + r)/2), by which temperatures grow; and T₀ of classes.
    exponent: float = 0.5
    temperature: float = 1.0
    # v of Var[f] = v r of numbers, by target; and σ², or the most that noise can be.
    spread: Tensor | None = None
    noise_variance: Tensor | None = None
    # Of the held-out inputs, ascending; and of their targets, 1 − p of classes, |y − E[y]|/sd of numbers.
    novelties: Tensor | None = None
    # r of the same inputs, ascending, where p-values ask it too.
    leverages: Tensor | None = None
    scores: Tensor | None = None
    # Of the outputs, see `dims_of`, and where the network has the classes of several positions; and of the inputs.
    dims: tuple[int, int] = (0, 0)
    class_dim: int = -1
    ranges: tuple[InputRange, ...] = ()
    report: Report = field(default_factory=lambda: Report("", 0, {}, ""))

    def answer(self, f: Tensor, ratios: Ratios, spread: Tensor | None, noise: Tensor | None) -> Answer:
        """Novelty and y, given the network's outputs and relative leverages; v and σ² are on the outputs' device."""
        kind = self.likelihood
        novelty = kind.novelty(f, ratios.near)
        novelty, leverage = few_digits(torch.stack([novelty, ratios.steep.to(novelty)]))
        answer = Answer(novelty, f_mean=f, leverage=leverage, likelihood=kind.name)
        if isinstance(kind, ClassLikelihood):
            temperature = self.temperature * of_examples(ratios.growth(self.exponent), f)
            return answer._replace(probs=kind.link(f / temperature))
        assert isinstance(kind, NumericLikelihood)
        assert spread is not None
        variance = _by_leverage(kind, f, ratios.gentle, spread)
        c = Component(Moments(f, variance), noise)
        answer = answer._replace(mean=kind.expected(c), stddev=kind.variance(c).sqrt())
        return answer._replace(f_variance=variance, noise_variance=noise)


def few_digits(x: Tensor) -> Tensor:
    """Numbers rounded to 16 bits, so that equal inputs tie whatever the batch that they came in."""
    factor = 2 ** (8 if x.dtype == torch.float32 else 37) + 1
    x = x.clamp(max=torch.finfo(x.dtype).max / factor / 2)
    more = x * factor
    return more - (more - x)


def dims_of(f: Tensor) -> tuple[int, int]:
    """How many dimensions outputs have, and the last of them; 1 of one number an example, (batch,)."""
    return f.dim(), f.shape[-1] if f.dim() > 1 else 1


def grown_temperature(
    kind: Likelihood, outputs: Tensor, y: Tensor, ratios: Ratios, score: float
) -> tuple[float, float]:
    """The largest exponent of growth that costs held-out data little beside `score`, and T₀ there."""
    exponent, temperature = 0.0, 1.0
    for exponent in _EXPONENTS:
        grown = outputs / of_examples(ratios.growth(exponent), outputs)
        temperature, reached = best_temperature(kind, grown, y)
        if reached >= _DEAREST * score:
            break
    return exponent, temperature


def spread_and_noise(kind: Likelihood, outputs: Tensor, y: Tensor, r: Tensor) -> tuple[Tensor, Tensor | None]:
    """v of Var[f] = v r by the likelihood of the targets, and σ² of a regression with it.

    v = κ/E[H], H the Hessian of −log p(y | f): with κ = 1 the usual input's f is known as well as one observation tells
    it. κ has the prior −½ log² κ nats. Residuals of a regression are N(0, σ² (1 + κ r)), so that σ² is the mean of
    (y − f)²/(1 + κ r).
    """
    r = r.to(outputs)

    def at(scale: float) -> tuple[Tensor, Tensor | None]:
        noise = kind.ceiling(y)
        if kind.noise:
            square = (y - outputs).square()
            noise = (square / (1 + of_examples(scale * r, square))).mean(dim=0)
            noise = noise.clamp(min=torch.finfo(noise.dtype).tiny)
        hessian = kind.locations(kind.hessian_diagonal(outputs, noise))
        return scale / hessian.mean(dim=0), noise

    def score(scale: float) -> float:
        spread, noise = at(scale)
        moments = Moments(outputs, _by_leverage(kind, outputs, r, spread))
        return mean_log_prob(kind, Component(moments, noise), y) - 0.5 * math.log(scale) ** 2 / len(r)

    scale, value = refined(score, 1.0, reach=math.log(1000))
    if not math.isfinite(value):
        raise CalibrationError("no v gives a finite log-likelihood on the held-out data: are there NaN or infinities?")
    return at(scale)


def _by_leverage(kind: Likelihood, f: Tensor, r: Tensor, spread: Tensor) -> Tensor:
    """Var[f] = v r of the outputs that locate targets, 0 of others."""
    located = spread.to(f) * of_examples(r, f).expand(kind.locations(f).shape)
    rest = f.shape[-1] - located.shape[-1] if f.dim() > 1 else 0
    return located if not rest else torch.nn.functional.pad(located, (0, rest))
