"""Warnings that point at the user's line."""

import os
import sys
import warnings

from bayesadam.errors import BayesAdamWarning

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(message: str, category: type[Warning] = BayesAdamWarning) -> None:
    """Warn at the line from which the library was called.

    That is the frame outside the outermost one of this package: torch's decorators and generated methods may lie
    between.
    """
    # As `warnings.warn` counts: 1 is this function, 2 its caller.
    level = here = 2
    frame = sys._getframe(1)
    while frame.f_back is not None:
        here += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = here
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
