"""Likelihoods: one object each, in one registry."""

from collections.abc import Mapping

from bayesadam.errors import SettingError
from bayesadam.likelihoods.base import Component, Likelihood
from bayesadam.likelihoods.classes import Binary, Classification, ClassLikelihood
from bayesadam.likelihoods.moments import Moments
from bayesadam.likelihoods.numbers import Counts, Heteroscedastic, NumericLikelihood, Regression
from bayesadam.likelihoods.prediction import Prediction

# A new likelihood is added here, and nowhere else.
_ALL = (Regression(), Classification(), Binary(), Heteroscedastic(), Counts())
LIKELIHOODS: Mapping[str, Likelihood] = {each.name: each for each in _ALL}


def likelihood(name: str) -> Likelihood:
    """The likelihood of a name.

    >>> likelihood("poisson").noise
    False
    """
    if name not in LIKELIHOODS:
        raise SettingError(f"likelihood must be one of {tuple(LIKELIHOODS)}, got {name!r}")
    return LIKELIHOODS[name]


def agreed(given: str | None, kept: str | None) -> Likelihood:
    """The likelihood that a call gives, or the posterior's own; a contradiction is an error, and so is none at all."""
    name = kept if given is None else given
    if name is None:
        raise SettingError(
            "there is no likelihood yet: pass likelihood='classification', or another of "
            f"{tuple(LIKELIHOODS)}, here or to Posterior.from_optimizer"
        )
    if kept not in (None, likelihood(name).name):
        raise SettingError(
            f"the posterior is for likelihood={kept!r}, and likelihood={name!r} was given: leave it out, or use "
            f"posterior.replace(likelihood={name!r}) if the network has such outputs"
        )
    return likelihood(name)


__all__ = [
    "LIKELIHOODS",
    "ClassLikelihood",
    "Component",
    "Likelihood",
    "Moments",
    "NumericLikelihood",
    "Prediction",
    "agreed",
    "likelihood",
]
