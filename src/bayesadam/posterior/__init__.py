"""Gaussians over named parameters, and mixtures of them."""

from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import Structure
from bayesadam.posterior.mixture import Mixture
from bayesadam.posterior.posterior import Posterior

__all__ = ["Mixture", "Posterior", "Settings", "Structure"]
