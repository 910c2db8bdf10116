"""The public names, each from the module that has it. `bayesadam` imports this one when the first of them is asked for."""

from bayesadam import bandits, optim, readers, scores
from bayesadam._version import __version__
from bayesadam.anchoring import Anchor, anchor
from bayesadam.auditing import Audit, Suspect, audit
from bayesadam.calibration import calibrate, log_marginal_likelihood
from bayesadam.diagnosis import Diagnosis, Finding, doctor
from bayesadam.errors import (
    BayesAdamError,
    BayesAdamWarning,
    CalibrationError,
    CollapsedPredictionWarning,
    DataError,
    DivergedError,
    FileError,
    HeldOutWarning,
    ImproperError,
    MatchError,
    MemoryBudgetError,
    MissingExtraError,
    MissingFileError,
    NoPosteriorWarning,
    OverlapWarning,
    SettingError,
    StateError,
    StructureWarning,
    UnusedPosteriorWarning,
)
from bayesadam.inspect import inspect_checkpoint
from bayesadam.likelihoods import Predictive
from bayesadam.likelihoods.predictive import Predictive
from bayesadam.lora import LoraPrior
from bayesadam.merging import MergeReport, merge, merge_checkpoints, similarity
from bayesadam.optim import Badam
from bayesadam.posterior import GaussianWeights, Mixture, Posterior
from bayesadam.predict import Top
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
    tune_only,
    tuning_masks,
)
from bayesadam.readers.recorder import Recorder

__all__ = [
    "Anchor",
    "Audit",
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
    "GaussianWeights",
    "HeldOutWarning",
    "ImproperError",
    "LoraPrior",
    "MatchError",
    "MemoryBudgetError",
    "MergeReport",
    "MissingExtraError",
    "MissingFileError",
    "Mixture",
    "NoPosteriorWarning",
    "OverlapWarning",
    "Posterior",
    "Predictive",
    "PruningReport",
    "Recorder",
    "SettingError",
    "StateError",
    "StructureWarning",
    "Suspect",
    "Top",
    "UnusedPosteriorWarning",
    "__version__",
    "anchor",
    "audit",
    "bandits",
    "calibrate",
    "doctor",
    "from_torch_prune",
    "inspect_checkpoint",
    "keep_pruned",
    "load_masks",
    "log_marginal_likelihood",
    "merge",
    "merge_checkpoints",
    "neuron_masks",
    "optim",
    "path_scores",
    "prune",
    "prune_checkpoint",
    "pruning_masks",
    "pruning_report",
    "readers",
    "save_masks",
    "scores",
    "shrink",
    "similarity",
    "to_torch_prune",
    "tune_only",
    "tuning_masks",
]
