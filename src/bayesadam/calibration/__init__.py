"""Calibration: scale s, prior precision δ, temperature and observation noise from held-out data, and their worth."""

from bayesadam.calibration.calibrating import calibrate
from bayesadam.calibration.fits import log_marginal_likelihood

__all__ = ["calibrate", "log_marginal_likelihood"]
