"""The public names, each from the module that has it; `bayesadam` imports this one with the first of them."""

from bayesadam import errors, optim, readers
from bayesadam._version import __version__
from bayesadam.errors import BayesAdamError
from bayesadam.lora import LoraPrior
from bayesadam.optim import Badam
from bayesadam.posterior import GaussianWeights, Mixture, Posterior
from bayesadam.readers import Recorder, track

__all__ = [
    "Badam",
    "BayesAdamError",
    "GaussianWeights",
    "LoraPrior",
    "Mixture",
    "Posterior",
    "Recorder",
    "__version__",
    "errors",
    "optim",
    "readers",
    "track",
]
