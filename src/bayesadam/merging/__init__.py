"""Merging fine-tuned networks by their curvature, and how alike their tasks are."""

from bayesadam.merging.merged import METHODS, Merged, merge, merge_checkpoints, similarity
from bayesadam.merging.methods import MergeReport

__all__ = ["METHODS", "MergeReport", "Merged", "merge", "merge_checkpoints", "similarity"]
