"""The public names, each from the module that has it; `bayesadam` imports this one with the first of them."""

from bayesadam import bandits, errors, likelihoods, optim, readers, scores, sklearn
from bayesadam._version import __version__
from bayesadam.calibrated import Answer, Calibrated, calibrate, load
from bayesadam.errors import BayesAdamError
from bayesadam.lora import LoraPrior
from bayesadam.monitoring import Monitor
from bayesadam.optim import Badam
from bayesadam.readers import Recorder, track
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

__all__ = [
    "Answer",
    "Badam",
    "BayesAdamError",
    "Calibrated",
    "GaussianWeights",
    "LoraPrior",
    "Mixture",
    "Monitor",
    "Posterior",
    "Recorder",
    "__version__",
    "bandits",
    "calibrate",
    "errors",
    "likelihoods",
    "load",
    "optim",
    "readers",
    "scores",
    "sklearn",
    "track",
]
