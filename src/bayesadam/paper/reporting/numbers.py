"""Samples of a few runs: their moments, how two differ, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

# A difference counts where it exceeds this many of its standard errors.
STANDARD_ERRORS = 2.0
MISSING = "–"


@dataclass(frozen=True)
class Sample:
    """The same number from several seeds or runs, without those that are not finite, and where it was read."""

    values: tuple[float, ...]
    source: str = ""

    @classmethod
    def of(cls, values: Iterable[float | None], source: str = "") -> Sample:
        """From what `metrics.json` holds, where null stands for what is not finite."""
        return cls(tuple(float(value) for value in values if value is not None and math.isfinite(value)), source)

    @property
    def mean(self) -> float:
        """Over the values; NaN where there is none."""
        return fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float:
        """The standard deviation, with n − 1; NaN where there are not two values."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean: sd/√n."""
        return self.sd / math.sqrt(len(self.values)) if self.values else math.nan


def above(first: Sample, second: Sample) -> bool | None:
    """Whether the first mean lies above the second by more than `STANDARD_ERRORS`; None where they are too close to tell.

    The standard error of the difference is √(s₁²/n₁ + s₂²/n₂); one value alone tells nothing.

    >>> above(Sample((3.0, 3.1)), Sample((1.0, 1.1))), above(Sample((3.0, 1.0)), Sample((2.0, 2.1)))
    (True, None)
    """
    difference = first.mean - second.mean
    error = math.hypot(first.standard_error, second.standard_error)
    if not math.isfinite(difference) or not math.isfinite(error) or abs(difference) <= STANDARD_ERRORS * error:
        return None
    return difference > 0


def fixed(value: float | None, digits: int = 3) -> str:
    """Decimals without the leading zero, as the paper has them, and a true minus sign.

    >>> fixed(0.7649), fixed(-0.909), fixed(-1.3, 2), fixed(None), fixed(-0.0001)
    ('.765', '−.909', '−1.30', '–', '.000')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text[1:] if text.startswith("0.") else text)


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, without the sign.

    >>> percent(0.9843), percent(-0.0042)
    ('98.43', '−0.42')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}".replace("-", "−")


def mean_sd(sample: Sample, digits: int = 3) -> str:
    """Mean ± standard deviation.

    >>> mean_sd(Sample((0.5, 0.7)))
    '.600 ± .141'
    """
    return _around(sample, sample.sd, digits)


def mean_error(sample: Sample, digits: int = 3) -> str:
    """Mean ± standard error.

    >>> mean_error(Sample((0.5, 0.7)))
    '.600 ± .100'
    """
    return _around(sample, sample.standard_error, digits)


def _around(sample: Sample, spread: float, digits: int) -> str:
    if not sample.values:
        return MISSING
    return fixed(sample.mean, digits) + (f" ± {fixed(spread, digits)}" if len(sample.values) > 1 else "")


def significant(value: float | None, digits: int = 3) -> str:
    """So many digits that count, never in powers of ten below a million.

    >>> significant(0.0317), significant(40.27), significant(1234567.0), significant(-1.304), significant(20000.0)
    ('0.0317', '40.3', '1.23e+06', '−1.30', '20000')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    sign = "−" if value < 0 else ""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{sign}{abs(value):.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{sign}{abs(value):.{places}f}"


def duration(seconds: float | None) -> str:
    """For people.

    >>> duration(71.0), duration(595.9), duration(8000.0), duration(9.4)
    ('1 min 11 s', '9 min 56 s', '2 h 13 min', '9 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
