"""Merging fine-tuned networks by their curvature, and how alike their tasks are."""

from bayesadam.merging.merged import Merged, merge, merge_checkpoints
from bayesadam.merging.overlap import similarity
from bayesadam.merging.plan import Method
from bayesadam.merging.report import MergedParameter, MergeReport

__all__ = ["MergeReport", "Merged", "MergedParameter", "Method", "merge", "merge_checkpoints", "similarity"]
