"""What the library raises: every message names the thing, its value, and the remedy.

Each error is also the built-in one that a Python user would catch: a bad value is a `ValueError`, a bad file an
`OSError`.
"""


class BayesAdamError(Exception):
    """Base of every error raised on bad input."""


class SettingError(BayesAdamError, ValueError):
    """A setting lies outside what the method allows, such as N ≤ 0."""


class MatchError(BayesAdamError, ValueError):
    """Parameters, optimiser state, data or file do not belong together, or give no posterior."""


class ImproperError(BayesAdamError, ValueError):
    """Some weights have neither curvature nor prior, so their variance is infinite."""


class CalibrationError(BayesAdamError, ValueError):
    """No setting tried on the held-out data gave a finite score."""


class FileError(BayesAdamError, OSError):
    """A file cannot be read (truncated, of a newer format, not one of ours) or written."""


class MissingFileError(FileError, FileNotFoundError):
    """There is no file or folder at a path."""


class MissingExtraError(BayesAdamError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class BayesAdamWarning(UserWarning):
    """What a user should know before trusting a result; the message says what to do."""
