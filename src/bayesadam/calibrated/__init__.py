"""What held-out data add to a network: calibrated answers in one forward pass."""

from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.calibrating import calibrate
from bayesadam.calibrated.module import Calibrated, Program, load

__all__ = ["Answer", "Calibrated", "Program", "calibrate", "load"]
