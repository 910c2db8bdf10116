"""Packages that take seconds to import: a process that runs none of their tests does not wait for them."""

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """A package that is imported when its first attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def lazy(name: str) -> Any:
    """`pytest.importorskip(name)` without the import; all tests with such packages run in one process."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return Lazy(name)
