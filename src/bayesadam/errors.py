"""What the library raises: every message names the thing, its value, and the remedy.

Each error is also the built-in one that a Python user would catch: a bad value is a `ValueError`, a bad file an
`OSError`.
"""


class BayesAdamError(Exception):
    """Base of every error raised on bad input."""


class SettingError(BayesAdamError, ValueError):
    """A setting lies outside what the method allows, such as N ≤ 0."""


class MatchError(BayesAdamError, ValueError):
    """Parameters, optimiser state or file do not belong together."""


class StateError(BayesAdamError, ValueError):
    """The optimiser's state cannot give a posterior: never stepped, not finite, no second moment."""


class ImproperError(BayesAdamError, ValueError):
    """Some weights have neither curvature nor prior, so their variance is infinite."""


class CalibrationError(BayesAdamError, ValueError):
    """No setting tried on the held-out data gave a finite score."""


class DivergedError(BayesAdamError, ArithmeticError):
    """Training gave no finite loss."""


class TrainingError(BayesAdamError, RuntimeError):
    """A training in the background failed; the agent goes on with what it had learnt before."""


class FileError(BayesAdamError, OSError):
    """A file cannot be read (truncated, of a newer format, not one of ours) or written."""


class MissingFileError(FileError, FileNotFoundError):
    """There is no file or folder at a path."""


class MissingExtraError(BayesAdamError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class MemoryBudgetError(BayesAdamError, MemoryError):
    """One example does not fit the memory budget."""


class BayesAdamWarning(UserWarning):
    """Base of the library's warnings."""


class StructureWarning(BayesAdamWarning):
    """The posterior's structure cannot hold what its settings ask of it."""


class HeldOutWarning(BayesAdamWarning):
    """Held-out data are too few, or look like those of another likelihood."""


class InputRangeWarning(BayesAdamWarning):
    """Inputs have left the range of the held-out ones: they are scaled, normalised or laid out otherwise."""


class CollapsedPredictionWarning(BayesAdamWarning):
    """Averaging over weight draws gives another answer than the mean network: the posterior is too wide to sample."""


class NoPosteriorWarning(BayesAdamWarning):
    """Training succeeded, but no posterior could be read; `callback.posterior` raises the reason."""


class OverlapWarning(BayesAdamWarning):
    """A log tells too little of a policy: off-policy estimates of what it would have earned cannot be trusted."""
