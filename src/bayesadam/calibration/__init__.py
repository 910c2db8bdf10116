"""Calibration: scale s, prior precision δ, temperature and observation noise from held-out data, and what they are worth."""

from bayesadam.calibration.choice import calibrate
from bayesadam.calibration.evidence import log_marginal_likelihood

__all__ = ["calibrate", "log_marginal_likelihood"]
