"""What held-out data add to a network: calibrated answers in one forward pass."""

from bayesadam.calibrated.calibrating import calibrate
from bayesadam.calibrated.module import Answer, Calibrated, load

__all__ = ["Answer", "Calibrated", "calibrate", "load"]
