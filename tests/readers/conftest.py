"""Optimiser classes by qualified name, from whichever packages are installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def _timm_without_its_models() -> Iterator[None]:
    """Stand-ins for timm's packages: the real ones import the models, and those torchvision."""
    places = list(importlib.util.find_spec("timm").submodule_search_locations)
    stubs = []
    for name, paths in (("timm", places), ("timm.optim", [f"{place}/optim" for place in places])):
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = paths
            stubs.append(name)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def _load(path: str) -> type:
    module, _, name = path.rpartition(".")
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        if package == "timm":
            with _timm_without_its_models():
                return getattr(importlib.import_module(module), name)
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        pytest.skip(f"the installed {package} has no {path}: {error}")


@pytest.fixture(scope="session")
def optimizer_class() -> Callable[[str], type]:
    """The class named `"package.module.Class"`; the test is skipped where it is not installed."""
    return _load
