"""Gaussians over a model's weights, and mixtures of them."""

from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.posterior.mixture import Mixture
from bayesadam.posterior.posterior import Posterior

__all__ = ["GaussianWeights", "Mixture", "Posterior", "Settings"]
