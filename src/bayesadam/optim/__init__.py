"""Optimisers."""

from bayesadam.optim.badam import Badam

__all__ = ["Badam"]
