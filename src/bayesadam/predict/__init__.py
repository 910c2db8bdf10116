"""Predictive distributions from a weight posterior: linearised without a Jacobian, or sampled."""

from bayesadam.errors import CollapsedPredictionWarning, MemoryBudgetError
from bayesadam.predict.mixture import BinaryMixture, ClassificationMixture, RegressionMixture
from bayesadam.predict.predict import predict
from bayesadam.predict.predictive import (
    BinaryPredictive,
    ClassificationPredictive,
    Predictive,
    RegressionPredictive,
)

__all__ = [
    "BinaryMixture",
    "BinaryPredictive",
    "ClassificationMixture",
    "ClassificationPredictive",
    "CollapsedPredictionWarning",
    "MemoryBudgetError",
    "Predictive",
    "RegressionMixture",
    "RegressionPredictive",
    "predict",
]
