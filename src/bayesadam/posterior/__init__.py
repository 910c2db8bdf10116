"""Gaussians over named parameters."""

from bayesadam.posterior.posterior import Posterior
from bayesadam.posterior.settings import Settings
from bayesadam.posterior.structure import Structure

__all__ = ["Posterior", "Settings", "Structure"]
