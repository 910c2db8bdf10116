"""Pruning: which weights or units to remove, removing them, and keeping them removed."""

from bayesadam.pruning.apply import PrunedHandle, from_torch_prune, keep_pruned, prune, to_torch_prune
from bayesadam.pruning.masks import load_masks, pruning_masks, save_masks
from bayesadam.pruning.neurons import neuron_masks, path_scores, rank_neurons
from bayesadam.pruning.rankings import RANKINGS, Ranking, Weights, powered, weight_scores
from bayesadam.pruning.report import PrunedParameter, PruningReport, pruning_report
from bayesadam.pruning.saved import prune_checkpoint
from bayesadam.pruning.shrinking import shrink

__all__ = [
    "RANKINGS",
    "PrunedHandle",
    "PrunedParameter",
    "PruningReport",
    "Ranking",
    "Weights",
    "from_torch_prune",
    "keep_pruned",
    "load_masks",
    "neuron_masks",
    "path_scores",
    "powered",
    "prune",
    "prune_checkpoint",
    "pruning_masks",
    "pruning_report",
    "rank_neurons",
    "save_masks",
    "shrink",
    "to_torch_prune",
    "weight_scores",
]
