"""What a page requests: points and sliders, checked once, at the door; and points to start from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bayesadam.data.toy import Interval, toy_points
from bayesadam.errors import BayesAdamError

X_INTERVAL = (-3.0, 3.0)
Y_INTERVAL = (-2.0, 2.0)
N_GRID = 201
MOST_POINTS = 200
MOST_BYTES = 32 * 1024
UNITS = ("tanh", "relu")
_PAGE = re.compile(r"[a-z0-9]{1,32}")
# The plane of the paper's toy problem, stretched onto the page's.
_CENTRE = (0.35, 0.4)
_STRETCH = (3.0 / 0.85, 1.5)


class RequestError(BayesAdamError):
    """A request that cannot be answered; the message says what would be accepted."""


@dataclass(frozen=True)
class Slider:
    """One slider: its key in a request, what the page calls it, its range, both ends included, and where it starts.

    Equal ways along a `logarithmic` one are equal factors; a `whole` one has only whole numbers. `about` is one line for
    the page: what it does, and to which methods.
    """

    name: str
    label: str
    low: float
    high: float
    default: float
    logarithmic: bool
    whole: bool
    about: str

    def check(self, value: object) -> float:
        """The value as a number, or an error that names the range."""
        number = _number(value, self.name)
        if not self.low <= number <= self.high or (self.whole and number != int(number)):
            kind = "a whole number" if self.whole else "a number"
            raise RequestError(f"{self.name} must be {kind} from {self.low:g} to {self.high:g}, got {value!r:.40}")
        return number


SLIDERS = (
    Slider("n_data", "N", 1, 10_000, 40, True, True, "data counted: Badam, Kronecker at once; BBB, Vadam retrain"),
    Slider(
        "prior_precision",
        "δ",
        0.01,
        1000,
        5,
        True,
        False,
        "prior precision: Badam, Kronecker at once; BBB, Vadam retrain",
    ),
    Slider("noise", "σ", 0.02, 0.5, 0.1, True, False, "noise of an observation, known to all methods"),
    Slider("dropout", "dropout", 0.01, 0.6, 0.1, False, False, "share of units switched off: MC dropout retrains"),
    Slider("width", "width", 5, 100, 50, False, True, "units in each of two layers: every network restarts"),
)
_KEYS = {"page", "points", "units", "restart", *(slider.name for slider in SLIDERS)}


@dataclass(frozen=True)
class Request:
    """One request of one page: the points, and the sliders' values.

    A newer request of the same `page` supersedes the older. N is the user's to say, as in the paper's pseudo-observations;
    `units` is the activation of the hidden layers; `restart` forgets what the page's networks learnt before.
    """

    page: str
    points: tuple[tuple[float, float], ...]
    n_data: float
    prior_precision: float
    noise: float
    dropout: float
    width: int
    units: str = UNITS[0]
    restart: bool = False


def parse(body: bytes) -> Request:
    """A request out of the bytes of a POST; sliders that are not named stand at their defaults.

    >>> parse(b'{"page": "a", "points": [[0, 1]], "width": 20}').width
    20
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise RequestError("the body must be JSON in UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply; send one flat object") from None
    except ValueError as error:
        raise RequestError(f"the body must be JSON: {error!s:.120}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body must be a JSON object, got {type(found).__name__}")
    unknown = sorted(found.keys() - _KEYS)
    if unknown:
        raise RequestError(f"unknown key {unknown[0]!r:.40}; known are {', '.join(sorted(_KEYS))}")
    return _request(found)


def describe() -> dict[str, Any]:
    """What a page must know to build itself: the plane, the sliders and their limits."""
    return {
        "x": X_INTERVAL,
        "y": Y_INTERVAL,
        "grid": N_GRID,
        "most_points": MOST_POINTS,
        "units": UNITS,
        "sliders": [asdict(slider) for slider in SLIDERS],
    }


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
    found = toy_points(40, generator=torch.Generator().manual_seed(0), intervals=intervals)
    return _pairs((found.x - _CENTRE[0]) * _STRETCH[0], (found.y - _CENTRE[1]) * _STRETCH[1])


def _pairs(x: torch.Tensor, y: torch.Tensor) -> list[tuple[float, float]]:
    across, up = x.flatten().clamp(*X_INTERVAL), y.flatten().clamp(*Y_INTERVAL)
    return [(round(a, 3), round(b, 3)) for a, b in zip(across.tolist(), up.tolist(), strict=True)]


def _request(found: Mapping[str, Any]) -> Request:
    page = found.get("page")
    if not isinstance(page, str) or not _PAGE.fullmatch(page):
        raise RequestError(f"page must be 1 to 32 small letters and digits, got {page!r:.40}")
    units = found.get("units", UNITS[0])
    if units not in UNITS:
        raise RequestError(f"units must be one of {', '.join(UNITS)}, got {units!r:.40}")
    restart = found.get("restart", False)
    if not isinstance(restart, bool):
        raise RequestError(f"restart must be true or false, got {restart!r:.40}")
    values = {slider.name: slider.check(found.get(slider.name, slider.default)) for slider in SLIDERS}
    width = int(values.pop("width"))
    return Request(page=page, points=_points(found.get("points")), width=width, units=units, restart=restart, **values)


def _points(found: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(found, list):
        raise RequestError(f"points must be a list of [x, y] pairs, got {type(found).__name__}")
    if len(found) > MOST_POINTS:
        raise RequestError(f"at most {MOST_POINTS} points, got {len(found)}: remove some, or clear the plane")
    points = []
    for place, pair in enumerate(found):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RequestError(f"points[{place}] must be an [x, y] pair, got {pair!r:.40}")
        x, y = (_number(value, f"points[{place}]") for value in pair)
        for value, axis, (low, high) in ((x, "x", X_INTERVAL), (y, "y", Y_INTERVAL)):
            if not low <= value <= high:
                raise RequestError(f"points[{place}]: {axis} must lie from {low:g} to {high:g}, got {value:g}")
        points.append((x, y))
    return tuple(points)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r:.40}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be finite, got {value!r:.40}")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
