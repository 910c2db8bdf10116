"""What held-out data add to a network: calibrated answers in one forward pass."""

from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.calibrating import calibrate
from bayesadam.calibrated.loading import load
from bayesadam.calibrated.module import Calibrated
from bayesadam.calibrated.programs import Program

__all__ = ["Answer", "Calibrated", "Program", "calibrate", "load"]
