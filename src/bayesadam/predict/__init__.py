"""Predictive distributions from a Gaussian over weights: linearised without a Jacobian, or sampled."""

from bayesadam.errors import CollapsedPredictionWarning, MemoryBudgetError
from bayesadam.likelihoods import Predictive
from bayesadam.predict.asked import Top
from bayesadam.predict.gaussian import Gaussian
from bayesadam.predict.prediction import predict

__all__ = [
    "CollapsedPredictionWarning",
    "Gaussian",
    "MemoryBudgetError",
    "Predictive",
    "Top",
    "predict",
]
