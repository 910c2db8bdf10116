"""What the library raises: every message names the thing, its value, and the way out."""

from __future__ import annotations


class BayesAdamError(Exception):
    """Base of every error raised on bad input."""


class SettingError(BayesAdamError):
    """A setting lies outside what the method allows, such as N ≤ 0."""


class MatchError(BayesAdamError):
    """Parameters, optimiser state or file do not belong together."""


class StateError(BayesAdamError):
    """The optimiser's state cannot give a posterior: never stepped, not finite, no second moment."""


class ImproperError(BayesAdamError):
    """Some weights have neither curvature nor prior, so their variance is infinite."""


class FileError(BayesAdamError):
    """A file cannot be read (truncated, of a newer format, not one of ours) or written."""


class DataError(FileError):
    """A data set cannot be had, or one of its files does not hold what it should."""


class MissingExtraError(BayesAdamError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class BayesAdamWarning(UserWarning):
    """Base of the library's warnings."""


class MemoryBudgetError(BayesAdamError):
    """One example does not fit the memory budget."""
