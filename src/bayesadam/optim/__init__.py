"""Badam, the optimiser of the paper."""

from bayesadam.optim.badam import Badam

__all__ = ["Badam"]
