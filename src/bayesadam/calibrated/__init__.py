"""What held-out data add to a network: calibrated answers in one forward pass."""

from bayesadam.calibrated.calibrate import calibrate
from bayesadam.calibrated.module import Answer, Calibrated, load

__all__ = ["Answer", "Calibrated", "calibrate", "load"]
