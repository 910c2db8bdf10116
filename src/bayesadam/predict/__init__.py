"""Predictions from a Gaussian over weights: moments of the linearised network without a Jacobian, or draws."""

from bayesadam.predict.draws import linearised_draws, sampled
from bayesadam.predict.moments import DEFAULT_BUDGET, linearised, mean_outputs, moments_under, white_rows
from bayesadam.predict.network import Forward, Gaussian
from bayesadam.predict.sides import input_sides

__all__ = [
    "DEFAULT_BUDGET",
    "Forward",
    "Gaussian",
    "input_sides",
    "linearised",
    "linearised_draws",
    "mean_outputs",
    "moments_under",
    "sampled",
    "white_rows",
]
