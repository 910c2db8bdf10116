"""Predictions from a Gaussian over weights: moments of the linearised network without a Jacobian, or draws."""

from bayesadam.predict.moments import Top

__all__ = ["Top"]
