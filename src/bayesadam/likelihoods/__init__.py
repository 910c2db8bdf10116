"""Likelihoods: one record each, in one registry."""

from collections.abc import Mapping
from typing import Literal

from bayesadam.errors import SettingError
from bayesadam.likelihoods.classification import (
    Binary,
    BinaryMixture,
    BinaryPredictive,
    Classification,
    ClassificationMixture,
    ClassificationPredictive,
    SelectedClasses,
    SelectedMixture,
)
from bayesadam.likelihoods.poisson import Poisson, PoissonMixture, PoissonPredictive
from bayesadam.likelihoods.predictive import Link, LogitPredictive, NumericPredictive, Predictive, PredictiveMixture
from bayesadam.likelihoods.record import Likelihood
from bayesadam.likelihoods.regression import (
    Heteroscedastic,
    HeteroscedasticMixture,
    HeteroscedasticPredictive,
    Regression,
    RegressionMixture,
    RegressionPredictive,
)

LikelihoodName = Literal["regression", "classification", "binary", "heteroscedastic", "poisson"]
LIKELIHOODS: Mapping[str, Likelihood] = {
    record.name: record for record in (Regression(), Classification(), Binary(), Heteroscedastic(), Poisson())
}


def likelihood(name: str) -> Likelihood:
    """The likelihood of a name.

    >>> likelihood("poisson").noise
    False
    """
    if name not in LIKELIHOODS:
        raise SettingError(f"likelihood must be one of {tuple(LIKELIHOODS)}, got {name!r}")
    return LIKELIHOODS[name]


__all__ = [
    "LIKELIHOODS",
    "BinaryMixture",
    "BinaryPredictive",
    "ClassificationMixture",
    "ClassificationPredictive",
    "HeteroscedasticMixture",
    "HeteroscedasticPredictive",
    "Likelihood",
    "LikelihoodName",
    "Link",
    "LogitPredictive",
    "NumericPredictive",
    "PoissonMixture",
    "PoissonPredictive",
    "Predictive",
    "PredictiveMixture",
    "RegressionMixture",
    "RegressionPredictive",
    "SelectedClasses",
    "SelectedMixture",
    "likelihood",
]
