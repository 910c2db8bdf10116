"""A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it."""

from bayesadam import bandits, checkpoint, curvature, methods, optim, scores
from bayesadam._version import __version__
from bayesadam.calibration import calibrate, log_marginal_likelihood
from bayesadam.curvature.recorder import Recorder
from bayesadam.diagnosis import Diagnosis, Finding, doctor
from bayesadam.errors import (
    BayesAdamError,
    BayesAdamWarning,
    CalibrationError,
    CollapsedPredictionWarning,
    DataError,
    DivergedError,
    FileError,
    ImproperError,
    MatchError,
    MemoryBudgetError,
    MissingExtraError,
    MissingFileError,
    NoPosteriorWarning,
    SettingError,
    StateError,
    StructureWarning,
    UnusedPosteriorWarning,
)
from bayesadam.inspect import inspect_checkpoint
from bayesadam.optim import Badam
from bayesadam.posterior import Mixture, Posterior
from bayesadam.predict import Predictive
from bayesadam.pruning import (
    PruningReport,
    from_torch_prune,
    keep_pruned,
    load_masks,
    neuron_masks,
    path_scores,
    prune,
    prune_checkpoint,
    pruning_masks,
    pruning_report,
    save_masks,
    shrink,
    to_torch_prune,
)
from bayesadam.sample import sample_checkpoint

__all__ = [
    "Badam",
    "BayesAdamError",
    "BayesAdamWarning",
    "CalibrationError",
    "CollapsedPredictionWarning",
    "DataError",
    "Diagnosis",
    "DivergedError",
    "FileError",
    "Finding",
    "ImproperError",
    "MatchError",
    "MemoryBudgetError",
    "MissingExtraError",
    "MissingFileError",
    "Mixture",
    "NoPosteriorWarning",
    "Posterior",
    "Predictive",
    "PruningReport",
    "Recorder",
    "SettingError",
    "StateError",
    "StructureWarning",
    "UnusedPosteriorWarning",
    "__version__",
    "bandits",
    "calibrate",
    "checkpoint",
    "curvature",
    "doctor",
    "from_torch_prune",
    "inspect_checkpoint",
    "keep_pruned",
    "load_masks",
    "log_marginal_likelihood",
    "methods",
    "neuron_masks",
    "optim",
    "path_scores",
    "prune",
    "prune_checkpoint",
    "pruning_masks",
    "pruning_report",
    "sample_checkpoint",
    "save_masks",
    "scores",
    "shrink",
    "to_torch_prune",
]
