"""The public names, each from the module that has it; `bayesadam` imports this one with the first of them."""

from bayesadam import bandits, compress, errors, likelihoods, merging, optim, readers, scores, sklearn, trainers
from bayesadam._version import __version__
from bayesadam.acquiring import acquire
from bayesadam.anchoring import anchor
from bayesadam.auditing import audit
from bayesadam.calibrated import Answer, Calibrated, calibrate, load
from bayesadam.compress import prune, quantise
from bayesadam.diagnosis import doctor
from bayesadam.errors import BayesAdamError
from bayesadam.inspecting import inspect
from bayesadam.lora import LoraPrior
from bayesadam.merging import merge
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
    "acquire",
    "anchor",
    "audit",
    "bandits",
    "calibrate",
    "compress",
    "doctor",
    "errors",
    "inspect",
    "likelihoods",
    "load",
    "merge",
    "merging",
    "optim",
    "prune",
    "quantise",
    "readers",
    "scores",
    "sklearn",
    "track",
    "trainers",
]
