"""Points to start from."""

from __future__ import annotations

import torch

from bayesadam.data.toy import Interval, ToyData, toy_points
from bayesadam.play.request import X_INTERVAL, Y_INTERVAL

# The paper's plane, stretched onto the page's.
_CENTRE = (0.35, 0.4)
_STRETCH = (3.0 / 0.85, 1.5)


def examples() -> dict[str, list[tuple[float, float]]]:
    """Named sets of points: the paper's toy problem, the same with a hole, a cubic, and a handful.

    >>> {name: len(points) for name, points in examples().items()}
    {'paper': 40, 'gap': 40, 'cubic': 20, 'few': 5}
    """
    x = torch.linspace(-2, 2, 20)
    cubic = 0.2 * x**3 + 0.1 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    return {
        "paper": _toy(((0.0, 0.5),)),
        "gap": _toy(((-0.3, 0.1), (0.6, 1.0))),
        "cubic": _pairs(x, cubic),
        "few": [(-1.5, -0.6), (-0.7, 0.5), (0.1, 0.2), (0.8, -0.5), (1.6, 0.8)],
    }


def _toy(intervals: tuple[Interval, ...]) -> list[tuple[float, float]]:
    found: ToyData = toy_points(40, generator=torch.Generator().manual_seed(0), intervals=intervals)
    return _pairs((found.x - _CENTRE[0]) * _STRETCH[0], (found.y - _CENTRE[1]) * _STRETCH[1])


def _pairs(x: torch.Tensor, y: torch.Tensor) -> list[tuple[float, float]]:
    across, up = x.flatten().clamp(*X_INTERVAL), y.flatten().clamp(*Y_INTERVAL)
    return [(round(a, 3), round(b, 3)) for a, b in zip(across.tolist(), up.tolist(), strict=True)]
