"""A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it."""

from bayesadam import curvature, methods, optim, scores
from bayesadam._version import __version__
from bayesadam.calibrate import calibrate, log_marginal_likelihood
from bayesadam.doctor import Diagnosis, Finding, doctor
from bayesadam.errors import BayesAdamError, BayesAdamWarning
from bayesadam.optim import Badam
from bayesadam.posterior import Posterior
from bayesadam.predict import Predictive

__all__ = [
    "Badam",
    "BayesAdamError",
    "BayesAdamWarning",
    "Diagnosis",
    "Finding",
    "Posterior",
    "Predictive",
    "__version__",
    "calibrate",
    "curvature",
    "doctor",
    "log_marginal_likelihood",
    "methods",
    "optim",
    "scores",
]
