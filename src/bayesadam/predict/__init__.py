"""Predictions from a Gaussian over weights: moments of the linearised network without a Jacobian, or draws."""

from bayesadam.predict.options import Options, Top
from bayesadam.predict.prediction import component_of

__all__ = ["Options", "Top", "component_of"]
