"""The paper's experiments, run again: Figure 1 (regression), Figure 2 (pruning), Table 1 (bandits), and the report.

Here is what they share: the same number from several seeds or runs, and how numbers are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

MISSING = "–"


@dataclass(frozen=True)
class Sample:
    """The same number from several seeds or runs, without those that are not finite."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Sample:
        """From what `metrics.json` holds, where null stands for what is not finite."""
        return cls(tuple(float(value) for value in values if value is not None and math.isfinite(value)))

    @property
    def mean(self) -> float:
        """Over the values; NaN where there is none."""
        return fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation; NaN where there are not two values."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean: sd/√n."""
        return self.deviation / math.sqrt(max(len(self.values), 1))


def above(first: Sample, second: Sample) -> bool | None:
    """Whether the first mean lies above the second by more than 2 √(s₁²/n₁ + s₂²/n₂); None where they are too close.

    >>> above(Sample((3.0, 3.1)), Sample((1.0, 1.1))), above(Sample((3.0, 1.0)), Sample((2.0, 2.1)))
    (True, None)
    """
    difference = first.mean - second.mean
    error = math.hypot(first.standard_error, second.standard_error)
    if not math.isfinite(difference) or not math.isfinite(error) or abs(difference) <= 2 * error:
        return None
    return difference > 0


def fixed(value: float | None, digits: int = 3) -> str:
    """Decimals without the leading zero, as the paper has them, and a true minus sign.

    >>> fixed(0.7649), fixed(-0.909), fixed(-1.3, 2), fixed(None), fixed(-0.0001)
    ('.765', '−.909', '−1.30', '–', '.000')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    shown = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(shown) else ""
    return sign + (shown[1:] if shown.startswith("0.") else shown)


def digits(value: float) -> str:
    """Three digits that count, and a true minus sign.

    >>> digits(0.0317), digits(-1.304)
    ('0.0317', '−1.3')
    """
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else MISSING


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, without the sign.

    >>> percent(0.9843), percent(-0.0042)
    ('98.43', '−0.42')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}".replace("-", "−")
