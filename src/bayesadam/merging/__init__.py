"""Merging fine-tuned networks by their curvature, and how alike their tasks are."""

from bayesadam.merging.merged import Merged, Method, merge, merge_checkpoints, similarity
from bayesadam.merging.report import MergeReport

__all__ = ["MergeReport", "Merged", "Method", "merge", "merge_checkpoints", "similarity"]
