"""Smaller networks: which weights to remove, a posterior without them, and keeping them removed."""

from bayesadam.compress.conditioning import condition
from bayesadam.compress.masking import apply_masks, keep_pruned
from bayesadam.compress.pruning import prune, prune_checkpoint
from bayesadam.compress.quantising import Quantised, quantise
from bayesadam.compress.ranking import RANKINGS, masks, weight_scores
from bayesadam.compress.report import PruningReport
from bayesadam.compress.units import importance, remove_units

__all__ = [
    "RANKINGS",
    "PruningReport",
    "Quantised",
    "apply_masks",
    "condition",
    "importance",
    "keep_pruned",
    "masks",
    "prune",
    "prune_checkpoint",
    "quantise",
    "remove_units",
    "weight_scores",
]
