"""Optimisers that end with a Gaussian over the weights."""

from bayesadam.optim.badam import Badam
from bayesadam.optim.ivon import IVON
from bayesadam.optim.vadam import Vadam

__all__ = ["IVON", "Badam", "Vadam"]
