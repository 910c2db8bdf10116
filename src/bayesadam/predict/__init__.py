"""Predictions from a Gaussian over weights: moments of the linearised network without a Jacobian, or draws."""

from bayesadam.predict.draws import linearised_draws, sampled
from bayesadam.predict.moments import linearised, moments_under, white_rows
from bayesadam.predict.network import Forward
from bayesadam.predict.sides import input_sides

__all__ = ["Forward", "input_sides", "linearised", "linearised_draws", "moments_under", "sampled", "white_rows"]
