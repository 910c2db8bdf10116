"""The public names, each from the module that has it; `bayesadam` imports this one with the first of them."""

from bayesadam import (
    anchoring,
    auditing,
    bandits,
    compress,
    errors,
    likelihoods,
    merging,
    optim,
    readers,
    scores,
    sklearn,
    trainers,
)
from bayesadam._version import __version__
from bayesadam.acquiring import acquire
from bayesadam.anchoring import anchor
from bayesadam.auditing import audit
from bayesadam.calibration import calibrate, log_marginal_likelihood
from bayesadam.compress import prune
from bayesadam.deploying import deploy
from bayesadam.diagnosis import doctor
from bayesadam.errors import BayesAdamError
from bayesadam.inspect import inspect_checkpoint
from bayesadam.likelihoods import Predictive
from bayesadam.lora import LoraPrior
from bayesadam.merging import merge
from bayesadam.monitoring import Monitor
from bayesadam.optim import Badam
from bayesadam.posterior import GaussianWeights, Mixture, Posterior
from bayesadam.predict import Top
from bayesadam.readers import Recorder, track

__all__ = [
    "Badam",
    "BayesAdamError",
    "GaussianWeights",
    "LoraPrior",
    "Mixture",
    "Monitor",
    "Posterior",
    "Predictive",
    "Recorder",
    "Top",
    "__version__",
    "acquire",
    "anchor",
    "anchoring",
    "audit",
    "auditing",
    "bandits",
    "calibrate",
    "compress",
    "deploy",
    "doctor",
    "errors",
    "inspect_checkpoint",
    "likelihoods",
    "log_marginal_likelihood",
    "merge",
    "merging",
    "optim",
    "prune",
    "readers",
    "scores",
    "sklearn",
    "track",
    "trainers",
]
