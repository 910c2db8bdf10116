"""The paper's toy regression (its appendix on toy regression), as pure functions of a generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam._checks import count, not_negative
from bayesadam.errors import SettingError

Interval = tuple[float, float]

N_TRAIN = 200
TRAIN_INTERVAL: Interval = (0.0, 0.5)
TEST_INTERVAL: Interval = (-0.5, 1.2)
# The paper writes ε ~ N(0, 0.02), and we read a standard deviation. dy/dε reaches 1 + 1.8 π ≈ 6.7, so y varies by up
# to 0.13, as in the paper's picture; were 0.02 a variance, by up to 0.94, and the curve, of height 1, would be buried.
NOISE_STD = 0.02


@dataclass(frozen=True, eq=False)
class ToyData:
    """Inputs x and targets y, both float32 of shape (n, 1)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def split(self, n: int) -> tuple[ToyData, ToyData]:
        """The first n points and the rest; points are drawn independently, so no shuffling is needed."""
        if not 0 < n < len(self):
            raise SettingError(f"cannot split {len(self)} points after the first {n}: both parts need a point")
        return ToyData(self.x[:n], self.y[:n]), ToyData(self.x[n:], self.y[n:])


def toy_function(x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """y = x + 0.3 sin(2π(x + ε)) + 0.3 sin(4π(x + ε)) + ε, with ε the `noise`.

    ε enters the sines too, so the standard deviation of y depends on x.

    >>> toy_function(torch.tensor([0.0, 0.25])).tolist()
    [0.0, 0.550000011920929]
    """
    angle = 2 * math.pi * (x + noise)
    return x + 0.3 * torch.sin(angle) + 0.3 * torch.sin(2 * angle) + noise


def toy_points(
    n: int = N_TRAIN,
    *,
    generator: torch.Generator,
    intervals: Sequence[Interval] = (TRAIN_INTERVAL,),
    noise_std: float = NOISE_STD,
) -> ToyData:
    """Noisy points with x uniform over a union of disjoint intervals (low, high) and ε ~ N(0, noise_std²)."""
    count("n", n, "points")
    not_negative("noise_std", noise_std)
    if not intervals or any(not low < high for low, high in intervals):
        raise SettingError(f"intervals must be (low, high) pairs with low < high, got {list(intervals)}")
    lows, highs = torch.tensor(intervals, dtype=torch.float32).unbind(dim=1)
    ends = (highs - lows).cumsum(dim=0)
    # Positions along the intervals laid end to end, then moved back to where their interval lies.
    position = torch.rand(n, generator=generator) * ends[-1]
    which = torch.searchsorted(ends, position, right=True).clamp_(max=len(lows) - 1)
    x = highs[which] - (ends[which] - position)
    noise = noise_std * torch.randn(n, generator=generator)
    return ToyData(x.unsqueeze(1), toy_function(x, noise).unsqueeze(1))


def toy_grid(n: int = 341, interval: Interval = TEST_INTERVAL) -> ToyData:
    """Evenly spaced points with y the function without noise."""
    x = torch.linspace(*interval, n).unsqueeze(1)
    return ToyData(x, toy_function(x))
