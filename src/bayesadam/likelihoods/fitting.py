"""The search for a temperature, or for any one number, by held-out likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bayesadam.likelihoods.base import Component, Likelihood
from bayesadam.likelihoods.moments import Moments

# Bounds of the temperature, and standard deviations of log T before any example is seen, below T = 1 and above: more
# networks are too sure than too unsure.
_COLDEST, _HOTTEST = 0.1, 20.0
_COLD, _HOT = 0.5, 1.0
# Where a search leaves grids for parabolas.
_STEP = 0.1


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
    """The best value in the logarithm, looked for up to `reach` to either side of `start`, and its score.

    Ever finer grids lead to one step of at most a tenth, and parabolas through the best and its neighbours to 1e-4.
    """

    @cache
    def at(log: float) -> float:
        return score(min(max(start * math.exp(log), least), most))

    best, width = 0.0, reach
    while width > _STEP:
        best = max((best, best - width, best - width / 2, best + width / 2, best + width), key=at)
        width /= 2
    for step in (width, width / 20):
        low, high = at(best - step) - at(best), at(best + step) - at(best)
        bend = -(low + high)
        # Of a plateau, or of a slope, the best point stands.
        top = best + step / 2 * (high - low) / bend if 0 < bend < math.inf else best
        best = max((best, best - step, best + step, top), key=at)
    return min(max(start * math.exp(best), least), most), at(best)


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
