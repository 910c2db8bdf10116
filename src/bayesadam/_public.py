"""The public names, each from the module that has it; `bayesadam` imports this one with the first of them."""

from bayesadam import (
    anchoring,
    auditing,
    bandits,
    errors,
    likelihoods,
    merging,
    optim,
    pruning,
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
from bayesadam.deploying import deploy
from bayesadam.diagnosis import doctor
from bayesadam.errors import BayesAdamError
from bayesadam.inspecting import inspect
from bayesadam.likelihoods import Predictive
from bayesadam.lora import LoraPrior
from bayesadam.merging import merge
from bayesadam.monitoring import Monitor
from bayesadam.optim import Badam
from bayesadam.posterior import GaussianWeights, Mixture, Posterior
from bayesadam.predict import Top
from bayesadam.pruning import prune, pruning_masks
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
    "deploy",
    "doctor",
    "errors",
    "inspect",
    "likelihoods",
    "log_marginal_likelihood",
    "merge",
    "merging",
    "optim",
    "prune",
    "pruning",
    "pruning_masks",
    "readers",
    "scores",
    "sklearn",
    "track",
    "trainers",
]
