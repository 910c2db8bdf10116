"""Optimisers."""

from bayesadam.optim.badam import Badam
from bayesadam.optim.ivon import IVON
from bayesadam.optim.soap import SOAP
from bayesadam.optim.vadam import Vadam

__all__ = ["IVON", "SOAP", "Badam", "Vadam"]
