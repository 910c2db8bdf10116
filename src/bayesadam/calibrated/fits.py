"""What is fitted to held-out data: the temperature of classes, the spread and the noise of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bayesadam.calibrated.leverage import Ratios
from bayesadam.calibrated.module import by_leverage
from bayesadam.errors import CalibrationError
from bayesadam.likelihoods import Component, Likelihood, Moments
from bayesadam.likelihoods.classes import of_examples

# Bounds of the temperature, and standard deviations of log T before any example is seen, below T = 1 and above: more
# networks are too sure than too unsure.
_COLDEST, _HOTTEST = 0.1, 20.0
_COLD, _HOT = 0.5, 1.0
# Temperatures grow with leverage by the first exponent at which held-out data lose at most 0.5 % of their likelihood.
_EXPONENTS, _DEAREST = (0.5, 0.375, 0.25, 0.125, 0.0), 1.005


def log_prior(temperature: float) -> float:
    """log p(T) but for a constant, −½ (log T/τ)² with τ = ½ below T = 1 and 1 above.

    Without it a few examples that are all right would ask for the coldest temperature, and the next wrong one would
    cost dearly; hundreds of examples outvote it.
    """
    log = math.log(temperature)
    return -0.5 * (log / (_COLD if log < 0 else _HOT)) ** 2


def mean_log_prob(kind: Likelihood, component: Component, y: Tensor) -> float:
    """The mean log-likelihood; −∞ where it is not finite."""
    value = float(kind.log_prob([component], y).mean(dtype=torch.float64))
    return value if math.isfinite(value) else -math.inf


def refined(
    score: Callable[[float], float], start: float, *, reach: float = 1.2, least: float = 0.0, most: float = math.inf
) -> tuple[float, float]:
    """The best of ever finer grids in the logarithm, the first up to `reach` to either side of `start`; its score."""
    rounds = math.ceil(math.log2(reach / 1e-4))

    @cache
    def at(step: int) -> tuple[float, float]:
        value = min(max(start * math.exp(reach * step / 2**rounds), least), most)
        return score(value), value

    best = 0
    for width in (2**i for i in range(rounds, -1, -1)):
        best = max((best, best - width, best - width // 2, best + width // 2, best + width), key=lambda i: at(i)[0])
    value, found = at(best)
    return found, value


def best_temperature(
    kind: Likelihood,
    outputs: Tensor,
    y: Tensor,
    *,
    variance: Tensor | None = None,
    start: float = 1.0,
    reach: float = math.log(_HOTTEST),
) -> tuple[float, float]:
    """T of the greatest mean log-likelihood and prior, and that; without a variance T of the mean network."""

    def score(temperature: float) -> float:
        value = mean_log_prob(kind, Component(Moments(outputs, variance), temperature=temperature), y)
        return value + log_prior(temperature) / max(len(y), 1)

    return refined(score, start, reach=reach, least=_COLDEST)


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
