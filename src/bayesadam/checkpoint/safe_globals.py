"""What trainers save with the tensors: settings, paths, dates, numpy's numbers, read without running any code.

torch's reader of plain data calls what the file names, so far as the name is allowed. Behind every name allowed here is a
type that holds data and does nothing else when it is built, or a stand-in. numpy's own builders are never called: they take
a file's word for what memory holds.
"""

import argparse
import datetime
import math
import os
import pickle
import re
import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

# Truth values, numbers and texts; what holds objects or has fields is left to the user.
_CODES = re.compile(r"[biufcSU]\d+")
_lock = threading.RLock()


class StandIn:
    """Stands in for a class of the writer's: holds what was pickled, does nothing."""

    state: Any = ()

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    def get(self, key: str) -> Any:
        """An entry of what was pickled; None where there is none."""
        return self.state.get(key)


class Dtype:
    """Stands in for `numpy.dtype`; saved again, it is one."""

    def __init__(self, code: str, *_: object) -> None:
        if not _CODES.fullmatch(code):
            raise pickle.UnpicklingError(f"GLOBAL numpy.dtype({code!r})")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *fields = state[:5]
        if any(field is not None for field in fields):
            raise pickle.UnpicklingError("GLOBAL numpy.dtype(fields)")
        self.dtype = self.dtype.newbyteorder(order)

    def __reduce__(self) -> Any:
        return self.dtype.__reduce__()


class Array:
    """Stands in for `numpy.ndarray`; saved again, it is one."""

    values: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        self.values = _values(kind, shape, raw, fortran)

    def __reduce__(self) -> Any:
        return self.values.__reduce__()


def _values(kind: Dtype, shape: tuple[int, ...], raw: bytes, fortran: bool = False) -> np.ndarray[Any, Any]:
    if len(raw) != math.prod(shape) * kind.dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for an array of shape {shape} and type {kind.dtype}")
    return np.ndarray(shape, kind.dtype, raw, order="F" if fortran else "C")


def _array(*_: object) -> Array:
    return Array()


def _scalar(kind: Dtype, raw: bytes) -> Any:
    return _values(kind, (), raw)[()]


def _defaultdict(factory: Any = None) -> OrderedDict[Any, Any]:
    """torch fills a dict or an OrderedDict and no other mapping; saved again, it is a defaultdict."""
    held: OrderedDict[Any, Any] = OrderedDict()
    held.__dict__["__reduce_ex__"] = lambda _: defaultdict(factory, held).__reduce__()
    return held


def _no_bytes() -> bytes:
    """An empty text of bytes has a name in a file where others have their letters."""
    return b""


def _posix_path(*parts: str) -> PurePath:
    return Path(*parts) if os.name == "posix" else PurePosixPath(*parts)


def _windows_path(*parts: str) -> PurePath:
    return Path(*parts) if os.name == "nt" else PureWindowsPath(*parts)


_NUMPY: dict[str, Callable[..., Any]] = {
    "numpy.dtype": Dtype,
    "numpy.ndarray": Array,
    # The module's names in numpy 2 and before.
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("_core", "core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("_core", "core")},
}
_PYTHON: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "collections.defaultdict": _defaultdict,
    "builtins.bytes": _no_bytes,
    # What a defaultdict makes of a key that it lacks.
    **{f"builtins.{kind.__name__}": kind for kind in (bool, int, float, str, list, tuple, dict)},
    **{
        f"datetime.{kind.__name__}": kind
        for kind in (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
    },
    # The module's names in Python 3.13 and in all others.
    **{f"{module}.PosixPath": _posix_path for module in ("pathlib", "pathlib._local")},
    **{f"{module}.WindowsPath": _windows_path for module in ("pathlib", "pathlib._local")},
    **{f"{module}.PurePosixPath": PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{f"{module}.PureWindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


@contextmanager
def plain_data_allowed() -> Iterator[None]:
    """Within it, `torch.load(weights_only=True)` reads the names above; what the user has allowed comes first."""
    with _lock:
        given = torch.serialization.get_safe_globals()
        own = {entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}" for entry in given}
        # The parts of numpy go together: its own and stand-ins do not know each other.
        numpy = {} if any(name.startswith("numpy.") for name in own) else _NUMPY
        allowed: list[Any] = [(made, name) for name, made in {**_PYTHON, **numpy}.items() if name not in own]
        with torch.serialization.safe_globals(allowed):
            yield
