"""What torch and numpy write into pickles, by name: tensors, storages, numbers, arrays."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam.readers.formats.pickles import BadPickle, Builders, Name, said

# The types of storages by the names of their classes.
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Untyped": torch.uint8,
}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# An expanded tensor has more entries than its storage; none that anybody saves has more than this.
_MOST_EXPANDED = 1 << 24
# Truth values, numbers and texts.
_CODES = re.compile(r"[<>=|]?[biufcSU]\d+")


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory of tensors, and the type of its entries."""

    memory: torch.UntypedStorage
    dtype: torch.dtype


def storage_type(named: Any) -> torch.dtype:
    """The type behind `torch.FloatStorage`.

    >>> storage_type(Name("torch.FloatStorage")), storage_type(Name("torch.storage.UntypedStorage"))
    (torch.float32, torch.uint8)
    """
    full = named.full if isinstance(named, Name) else ""
    kind = re.fullmatch(r"torch\.(?:cuda\.|storage\.)?_?(\w+)Storage", full)
    if kind is None or kind[1] not in _STORAGES:
        raise BadPickle(f"a storage of type {said(named)}")
    return _STORAGES[kind[1]]


def tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """A view of a storage, if it lies inside."""
    dtype = next((one for one in rest if isinstance(one, torch.dtype)), None)
    if isinstance(storage, Tensor):
        raise BadPickle("a tensor of a tensor")
    if not isinstance(storage, Storage):
        raise ImpossibleTensorError(f"a tensor of {type(storage).__name__}")
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if len(shape) != len(steps) or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers) or len(shape) > 64:
        raise ImpossibleTensorError("a tensor of an impossible size or stride")
    kind = dtype or storage.dtype
    held = storage.memory.nbytes() // kind.itemsize
    entries = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1 if entries else offset
    if last > held or entries > max(held, _MOST_EXPANDED):
        raise ImpossibleTensorError(f"a tensor of size {shape!r} that needs {last} entries of a storage of {held}")
    return torch.empty(0, dtype=kind).set_(storage.memory, offset, shape, steps)


class ImpossibleTensorError(ValueError):
    """A tensor that cannot be: the file is damaged."""


def _parameter(data: Any = None, *_: Any) -> Any:
    if not isinstance(data, Tensor):
        raise BadPickle("a parameter of no tensor")
    return data


def _of_type(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """A subclass of Tensor is read as the tensor that it is."""
    builder = TENSORS.get(function.full) if isinstance(function, Name) else None
    if builder is None or not isinstance(arguments, tuple):
        raise BadPickle("a tensor of a type that is not known")
    return builder(*arguments)


def _mapping(*_: Any) -> OrderedDict[Any, Any]:
    return OrderedDict()


def _ordered(pairs: Sequence[Any] = (), *_: Any) -> OrderedDict[Any, Any]:
    try:
        return OrderedDict(pairs)
    except (TypeError, ValueError) as error:
        raise BadPickle(str(error)) from None


def _size(entries: Any = ()) -> torch.Size:
    if not isinstance(entries, tuple | list) or not all(isinstance(n, int) and abs(n) < 1 << 62 for n in entries):
        raise BadPickle("a size of no numbers")
    return torch.Size(entries)


def _encoded(text: Any = "", coding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or coding not in ("latin1", "latin-1"):
        raise BadPickle("bytes in another coding")
    return text.encode("latin1")


def _no_bytes(*arguments: Any) -> bytes:
    """An empty text of bytes has a name in a file where others have their letters."""
    if arguments:
        raise BadPickle("bytes of something")
    return b""


class Dtype:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _CODES.fullmatch(code) or len(code) > 8:
            raise BadPickle(f"an array of {said(code)}")
        try:
            self.dtype: np.dtype[Any] | None = np.dtype(code)
        except TypeError as error:
            raise BadPickle(str(error)) from None

    def built(self, state: Any) -> None:
        """Its byte order; with fields it is not a type of numbers."""
        plain = isinstance(state, tuple) and len(state) >= 5 and all(part is None for part in state[2:5])
        if not plain or state[1] not in tuple("<>=|") or self.dtype is None:
            self.dtype = None
        else:
            self.dtype = self.dtype.newbyteorder(state[1])


class Array:
    """Stands in for `numpy.ndarray`; `values` is None where they cannot be read."""

    values: np.ndarray[Any, Any] | None = None

    def built(self, state: Any) -> None:
        """Its shape, type and bytes."""
        try:
            _, shape, kind, fortran, raw = state
            self.values = _values(kind, shape, raw, bool(fortran))
        except (BadPickle, TypeError, ValueError):
            self.values = None


def _values(kind: Any, shape: Any, raw: Any, fortran: bool = False) -> np.ndarray[Any, Any]:
    if not isinstance(kind, Dtype) or kind.dtype is None or not isinstance(raw, bytes):
        raise BadPickle("an array of something else than numbers")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape) or len(shape) > 64:
        raise BadPickle("an array of an impossible shape")
    if len(raw) != math.prod(shape) * kind.dtype.itemsize:
        raise BadPickle(f"{len(raw)} bytes for an array of shape {shape} and type {kind.dtype}")
    return np.ndarray(shape, kind.dtype, raw, order="F" if fortran else "C")


def _array(*_: Any) -> Array:
    return Array()


def _scalar(kind: Any = None, raw: Any = b"") -> Any:
    """A number of numpy's, as Python's."""
    return _values(kind, (), raw)[()].item()


TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": tensor,
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor,
}
BUILDERS: Builders = {
    **TENSORS,
    **{f"torch._utils._rebuild_{kind}": _parameter for kind in ("parameter", "parameter_with_state")},
    **{f"torch.{name}": _parameter for name in ("nn.parameter.Parameter", "autograd.variable.Variable")},
    "torch.nn.parameter.Buffer": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._tensor._rebuild_from_type": _of_type,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _mapping,
    "_codecs.encode": _encoded,
    "builtins.bytes": _no_bytes,
    "__builtin__.bytes": _no_bytes,
    "numpy.dtype": Dtype,
    # The module's names in numpy 2 and before.
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("_core", "core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("_core", "core")},
}
CONSTANTS = _DTYPES
