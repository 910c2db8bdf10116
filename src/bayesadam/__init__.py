"""A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it."""

from bayesadam import curvature, optim
from bayesadam._version import __version__
from bayesadam.doctor import Diagnosis, Finding, doctor
from bayesadam.errors import BayesAdamError, BayesAdamWarning
from bayesadam.optim import Badam
from bayesadam.posterior import Posterior

__all__ = [
    "Badam",
    "BayesAdamError",
    "BayesAdamWarning",
    "Diagnosis",
    "Finding",
    "Posterior",
    "__version__",
    "curvature",
    "doctor",
    "optim",
]
