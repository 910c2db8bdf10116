"""The equations of a diagonal posterior, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.gaussian.settings import Precision, Settings


@dataclass(frozen=True, eq=False)
class PrecisionRule:
    """The numbers of  precision = w v̂ᵖ + δ  for one parameter; with `shrink` the mean is w c/(w c + δ) θ."""

    weight: float
    delta: Precision
    power: float
    shrink: bool

    @classmethod
    def of(cls, settings: Settings, delta: Precision) -> PrecisionRule:
        """That of a posterior's settings, with the parameter's own δ."""
        return cls(settings.weight, delta, settings.power, settings.form == "likelihood")

    def precision(self, second_moment: Tensor) -> Tensor:
        """w v̂ᵖ + δ."""
        return precision(second_moment, self.weight, self.delta, self.power)

    def mean(self, mode: Tensor, second_moment: Tensor) -> Tensor:
        """θ, or the shrunk mean."""
        return shrunk_mean(mode, second_moment, self.weight, self.delta, self.power) if self.shrink else mode


@dataclass(frozen=True)
class Part:
    """Which entries of a flat parameter are at hand: those from `first` on, of `total` in all."""

    first: int
    total: int


def curvature(second_moment: Tensor, power: float) -> Tensor:
    """c = v̂ᵖ, in new memory."""
    return second_moment.sqrt() if power == 0.5 else second_moment.pow(power)


def precision(second_moment: Tensor, weight: float, delta: Precision, power: float) -> Tensor:
    """w v̂ᵖ + δ.

    >>> precision(torch.tensor([4.0]), weight=10.0, delta=1.0, power=0.5)
    tensor([21.])
    """
    return curvature(second_moment, power).mul_(weight).add_(delta)


def shrunk_mean(mode: Tensor, second_moment: Tensor, weight: float, delta: Precision, power: float) -> Tensor:
    """w c/(w c + δ) θ, the mean of the likelihood form; 0 where there is neither curvature nor prior."""
    data = curvature(second_moment, power).mul_(weight)
    total = (data + delta).clamp_(min=torch.finfo(data.dtype).tiny)
    return data.div_(total).mul_(mode)
