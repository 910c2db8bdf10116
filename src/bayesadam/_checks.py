"""Checks of arguments, each with the message that names the argument, its value and what is wanted."""

import reprlib
import sys
from typing import TypeGuard

from bayesadam.errors import MatchError, SettingError


def require_kind(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise unless the argument is an instance of `kind`.

    >>> require_kind("a.pt", (dict, list), "masks")
    Traceback (most recent call last):
    bayesadam.errors.MatchError: masks must be a dict or list, got str: are the arguments in their order?
    """
    if not isinstance(value, kind):
        kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise MatchError(f"{name} must be a {kinds}, got {type(value).__name__}: are the arguments in their order?")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number that a float can hold; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is a whole number of at least `least`; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positive(name: str, value: object, meaning: str) -> None:
    """Raise unless it is a positive finite number."""
    if not is_number(value) or value <= 0:
        raise SettingError(f"{name} must be a positive finite number ({meaning}), got {reprlib.repr(value)}")


def not_negative(name: str, value: object) -> None:
    """Raise unless it is a finite number of at least 0."""
    if not is_number(value) or value < 0:
        raise SettingError(f"{name} must be finite and at least 0, got {reprlib.repr(value)}")


def count(name: str, value: object, meaning: str, *, least: int = 1) -> None:
    """Raise unless it is a whole number of at least `least`.

    >>> count("keep", 2.5, "gradients")
    Traceback (most recent call last):
    bayesadam.errors.SettingError: keep must be a whole number of at least 1 (gradients), got 2.5
    """
    if not is_count(value, least):
        raise SettingError(f"{name} must be a whole number of at least {least} ({meaning}), got {reprlib.repr(value)}")
