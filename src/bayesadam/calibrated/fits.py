"""What is fitted to held-out data: the temperature of classes, the spread and the noise of numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesadam.calibrated.answer import by_leverage
from bayesadam.errors import CalibrationError
from bayesadam.likelihoods import Component, Likelihood, Moments
from bayesadam.likelihoods.classes import of_examples
from bayesadam.likelihoods.fitting import best_temperature, mean_log_prob, refined
from bayesadam.predict.leverage import Ratios

# Temperatures grow with leverage by the first exponent at which held-out data lose at most 0.5 % of their likelihood.
_EXPONENTS, _DEAREST = (0.5, 0.375, 0.25, 0.125, 0.0), 1.005


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
        moments = Moments(outputs, by_leverage(kind, outputs, r, spread))
        return mean_log_prob(kind, Component(moments, noise), y) - 0.5 * math.log(scale) ** 2 / len(r)

    scale, value = refined(score, 1.0, reach=math.log(1000))
    if not math.isfinite(value):
        raise CalibrationError("no v gives a finite log-likelihood on the held-out data: are there NaN or infinities?")
    return at(scale)
