"""What the headers of our files hold, each kind's as a type that its values are compared with where they are read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from bayesadam._checks import is_count, is_number


class Check(NamedTuple):
    """A condition on the values of a type, in its annotation."""

    holds: Callable[[Any], bool]
    meaning: str


Count = Annotated[int, Check(is_count, "at least 1")]
CountOrZero = Annotated[int, Check(lambda n: is_count(n, 0), "at least 0")]
Positive = Annotated[float, Check(lambda x: x > 0, "positive")]
NotNegative = Annotated[float, Check(lambda x: x >= 0, "at least 0")]
Share = Annotated[float, Check(lambda x: 0 < x < 1, "between 0 and 1")]
Decay = Annotated[float, Check(lambda x: 0 <= x <= 1, "between 0 and 1")]
Steps = Annotated[list[NotNegative], Check(bool, "of one number at least")]


# Up to release 0.3 headers lack some of these.
class SettingsHeader(TypedDict, total=False):
    """`weights.Settings`."""

    n_data: Positive
    prior_precision: dict[str, NotNegative]
    power: Annotated[Positive, Check(lambda p: p <= 10, "at most 10")]
    batch_size: Positive | None
    form: Literal["map", "likelihood"]
    scale: Positive
    covariant: bool
    default_prior: bool


class PosteriorHeader(TypedDict, total=False):
    """A posterior, or a mixture with its members; what earlier releases wrote besides is let be."""

    version: str
    structure: str
    parameters: list[str]
    settings: SettingsHeader
    inputs: dict[str, tuple[str | None, bool]] | None
    omitted: dict[str, str]
    has_weights: bool
    compress: str | None
    optimizer: list[str] | None
    steps: Steps | None
    beta2: Decay | None
    recorded: bool | None
    tracked: object
    likelihood: str | None
    noise_variance: NotNegative | list[NotNegative] | list[list[NotNegative]] | None
    temperature: Positive
    running_statistics: dict[str, tuple[float, float]] | None
    calibration: dict[str, object] | None
    weights: list[Positive]
    members: Annotated[list[PosteriorHeader], Check(bool, "of one member at least")]


class AgentHeader(TypedDict, total=False):
    """An agent of `bandits`."""

    agent: str
    settings: dict[str, object]
    n_features: Count
    n_arms: Count
    seed: int
    training: Literal["now", "background"]
    gone: list[CountOrZero]
    pulls: list[CountOrZero]
    next_id: CountOrZero
    since_training: CountOrZero
    log: tuple[str, CountOrZero] | None


class MonitorHeader(TypedDict, total=False):
    """A `Monitor`; of release 0.3 it may have slices."""

    n: CountOrZero
    log_martingale: float
    alarm: Share
    alarmed_at: Count | None
    stride: Count
    draw: dict[str, object]


class GridHeader(TypedDict):
    """A `Grid`, and how a weight is its matrix."""

    bits: Annotated[int, Check(lambda bits: bits in (2, 3, 4, 8), "2, 3, 4 or 8")]
    group: Count
    groups: Count
    inputs_first: bool


class PackedHeader(TypedDict, total=False):
    """A packed network: shapes, grids, the first names of what is tied, and buffers."""

    shapes: dict[str, list[CountOrZero]]
    grids: dict[str, GridHeader]
    same: dict[str, str]
    buffers: list[str]


def typed(value: object, kind: Any, name: str = "the header") -> Any:
    """A value of JSON, with tuples and dataclasses where the type has them; a ValueError names what is of another type.

    >>> typed([1, 0.5], tuple[int, Share])
    (1, 0.5)
    >>> typed({"n_data": "many"}, SettingsHeader)
    Traceback (most recent call last):
    ValueError: 'n_data' of the header must be float, got 'many'
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = typed(value, args[0], name)
        for check in args[1:]:
            if not check.holds(value):
                raise ValueError(f"{name} must be {check.meaning}, got {reprlib.repr(value)}")
        return value
    if origin in (Union, UnionType):
        # An error of the last: the one that is not None.
        for one in args[:-1] if args[-1] is not NoneType else (NoneType, *args[:-2]):
            with suppress(ValueError):
                return typed(value, one, name)
        return typed(value, args[-1] if args[-1] is not NoneType else args[-2], name)
    if isinstance(value, dict):
        if is_dataclass(kind) or is_typeddict(kind):
            hints = _hints(kind)
            there = {key: typed(value[key], hint, f"{key!r} of {name}") for key, hint in hints.items() if key in value}
            return value | there if is_typeddict(kind) else kind(**value | there)
        if origin in (dict, Mapping):
            return {key: typed(inner, args[1], f"{key!r} of {name}") for key, inner in value.items()}
    if isinstance(value, list):
        if origin is list:
            return [typed(inner, args[0], name) for inner in value]
        if origin is tuple and (args[-1] is ... or len(args) == len(value)):
            kinds = [args[0]] * len(value) if args[-1] is ... else args
            return tuple(typed(inner, each, name) for inner, each in zip(value, kinds, strict=True))
    if origin is Literal and value in args and isinstance(value, str):
        return value
    if kind in _HOLDS and _HOLDS[kind](value):
        return value
    words = getattr(kind, "__name__", "") if origin is None else str(kind).replace("typing.", "")
    raise ValueError(f"{name} must be {words}, got {reprlib.repr(value)}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


_HOLDS: Mapping[Any, Callable[[object], bool]] = {
    object: lambda value: True,
    NoneType: lambda value: value is None,
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: is_number,
}
