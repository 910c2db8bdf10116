"""Likelihoods: one object each, in one registry. A likelihood and weighted components make a predictive."""

from collections.abc import Mapping
from typing import Any

from bayesadam.errors import SettingError
from bayesadam.likelihoods.classification import Binary, Classification, LogitPredictive
from bayesadam.likelihoods.component import Component
from bayesadam.likelihoods.counts import Poisson
from bayesadam.likelihoods.predictive import Likelihood, Link, Predictive
from bayesadam.likelihoods.regression import Heteroscedastic, NumericPredictive, Regression

# A new likelihood is added here, and nowhere else.
_ALL = (Regression(), Classification(), Binary(), Heteroscedastic(), Poisson())
LIKELIHOODS: Mapping[str, Likelihood[Any]] = {each.name: each for each in _ALL}
# One of the registry's names, which are checked where they are used.
LikelihoodName = str


def likelihood(name: str) -> Likelihood[Any]:
    """The likelihood of a name.

    >>> likelihood("poisson").noise
    False
    """
    if name not in LIKELIHOODS:
        raise SettingError(f"likelihood must be one of {tuple(LIKELIHOODS)}, got {name!r}")
    return LIKELIHOODS[name]


def agreed(given: str | None, own: str | None) -> str:
    """The name that a call gives, or the posterior's own; a contradiction is an error, and so is none at all."""
    name = own if given is None else given
    if name is None:
        raise SettingError(
            "the posterior has no likelihood yet: pass likelihood='classification', or another of "
            f"{tuple(LIKELIHOODS)}, here or to Posterior.from_optimizer"
        )
    if own not in (None, likelihood(name).name):
        raise SettingError(
            f"the posterior is for likelihood={own!r}, and likelihood={name!r} was given: leave it out, or use "
            f"posterior.replace(likelihood={name!r}) if the network has such outputs"
        )
    return name


__all__ = [
    "LIKELIHOODS",
    "Component",
    "Likelihood",
    "LikelihoodName",
    "Link",
    "LogitPredictive",
    "NumericPredictive",
    "Predictive",
    "agreed",
    "likelihood",
]
