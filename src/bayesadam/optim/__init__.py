"""Optimisers that end with a Gaussian over the weights."""

from bayesadam.optim.badam import Badam
from bayesadam.optim.variational import IVON, Vadam

__all__ = ["IVON", "Badam", "Vadam"]
