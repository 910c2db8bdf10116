"""Merging fine-tuned networks by their curvature."""

from bayesadam.merging.merged import METHODS, Merged, merge, merge_checkpoints
from bayesadam.merging.methods import MergeReport

__all__ = ["METHODS", "MergeReport", "Merged", "merge", "merge_checkpoints"]
