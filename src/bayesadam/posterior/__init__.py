"""Gaussians over named parameters, and mixtures of them."""

from bayesadam.posterior.mixture import Mixture
from bayesadam.posterior.posterior import Posterior
from bayesadam.structures.settings import Settings
from bayesadam.structures.structure import Structure

__all__ = ["Mixture", "Posterior", "Settings", "Structure"]
