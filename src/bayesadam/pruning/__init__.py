"""Pruning: which weights or units to remove, removing them, and keeping them removed."""

from bayesadam.pruning.apply import PruningReport, keep_pruned, prune, pruning_report, tune_only
from bayesadam.pruning.masks import (
    RANKINGS,
    Ranking,
    load_masks,
    prune_checkpoint,
    pruning_masks,
    save_masks,
    tuning_masks,
    weight_scores,
)
from bayesadam.pruning.units import neuron_masks, path_scores, shrink

__all__ = [
    "RANKINGS",
    "PruningReport",
    "Ranking",
    "keep_pruned",
    "load_masks",
    "neuron_masks",
    "path_scores",
    "prune",
    "prune_checkpoint",
    "pruning_masks",
    "pruning_report",
    "save_masks",
    "shrink",
    "tune_only",
    "tuning_masks",
    "weight_scores",
]
