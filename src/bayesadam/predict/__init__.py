"""Predictive distributions from a Gaussian over weights: linearised without a Jacobian, or sampled."""

from bayesadam.errors import CollapsedPredictionWarning, MemoryBudgetError
from bayesadam.likelihoods import (
    BinaryMixture,
    BinaryPredictive,
    ClassificationMixture,
    ClassificationPredictive,
    HeteroscedasticMixture,
    HeteroscedasticPredictive,
    PoissonMixture,
    PoissonPredictive,
    Predictive,
    RegressionMixture,
    RegressionPredictive,
    SelectedClasses,
    SelectedMixture,
)
from bayesadam.predict.asked import Top
from bayesadam.predict.gaussian import Gaussian
from bayesadam.predict.prediction import predict

__all__ = [
    "BinaryMixture",
    "BinaryPredictive",
    "ClassificationMixture",
    "ClassificationPredictive",
    "CollapsedPredictionWarning",
    "Gaussian",
    "HeteroscedasticMixture",
    "HeteroscedasticPredictive",
    "MemoryBudgetError",
    "PoissonMixture",
    "PoissonPredictive",
    "Predictive",
    "RegressionMixture",
    "RegressionPredictive",
    "SelectedClasses",
    "SelectedMixture",
    "Top",
    "predict",
]
