"""Pickles as data: Python's own unpickler, closed, so that nothing a file names is imported or called.

A class or function becomes a `Name`, what the file would build with it a `StandIn`; the few names that build tensors,
numbers and containers call functions of this module. `torch.load(pickle_module=...)` is not enough: it runs
TorchScript, allocates what a file declares, does not report where a storage lies, and crashes on deep keys.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LONGEST_LINE = 1 << 20
# Larger keys could be made to have equal hashes.
_LARGEST_KEY = 1 << 60
# A tuple of tuples of one tuple has many parts in a few bytes, and its hash visits each.
_MOST_PARTS_OF_KEY = 32
# An expanded tensor has more entries than its storage; none that anybody saves has more than this.
_MOST_EXPANDED = 1 << 24
# What acts on the machine that unpickles; data has no use for it. Python 2 calls `subprocess` `commands`.
_MODULES = "os|posix|nt|subprocess|commands|shutil|socket|sys|runpy|pty|ctypes|importlib|webbrowser"
_FUNCTIONS = "eval|exec|execfile|compile|open|__import__|input|breakpoint|print"
_ACTING = re.compile(rf"({_MODULES})\..*|(builtins|__builtin__|io|_io)\.({_FUNCTIONS})", re.DOTALL)
_SAME_NAME = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
_STORAGES: dict[str, torch.dtype] = {name: getattr(torch, name.lower()) for name in _SAME_NAME}
_STORAGES |= {"Char": torch.int8, "Byte": torch.uint8, "Untyped": torch.uint8}
_STORAGES |= {"ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, ValueError),
    *(struct.error, OverflowError, MemoryError),
)
_NEW = ("copyreg.__newobj__", "copy_reg.__newobj__", "copyreg._reconstructor", "copy_reg._reconstructor")


class BadPickle(ValueError):
    """The pickle makes no sense."""


class HostilePickle(BadPickle):
    """The pickle would act on the machine."""


@dataclass(frozen=True)
class Name:
    """A class or function named in a pickle; it was not imported."""

    full: str


@dataclass(eq=False)
class StandIn:
    """An object that was not built: its class or function, arguments and state; items and pairs of it are dropped."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = ()

    def __repr__(self) -> str:
        return f"<{self.name} object>"


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory of tensors, and the type of its entries."""

    memory: torch.UntypedStorage
    dtype: torch.dtype

    def part(self, offset: int, count: int) -> Storage:
        """Some of the entries."""
        width = self.dtype.itemsize
        return Storage(self.memory[offset * width : (offset + count) * width], self.dtype)


Builders = Mapping[str, Callable[..., Any]]


class Window:
    """Bytes and a position in them: reading beyond the end, or a line that is absurdly long, is an error."""

    def __init__(self, view: memoryview, position: int = 0) -> None:
        self.view, self.position = view, position

    def part(self, count: int) -> memoryview:
        """The next bytes, exactly so many."""
        begin = self.position
        if not 0 <= begin <= begin + count <= len(self.view):
            raise BadPickle("it ends too early")
        self.position += count
        return self.view[begin : self.position]

    def read(self, count: int) -> bytes:
        """A copy of them."""
        return bytes(self.part(count))

    def readline(self) -> bytes:
        """Up to the end of a line."""
        for length in (128, _LONGEST_LINE):
            line = bytes(self.view[self.position : self.position + length])
            if b"\n" in line:
                break
        return self.read(line.find(b"\n") + 1 or len(line))


def unpickle(window: Window, builders: Builders, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The content of the pickle at the window's position.

    `builders` are functions by full name; where one fails, a stand-in is left. `persistent` resolves ids.
    """
    try:
        return _Unpickler(window, builders, persistent).load()
    except BadPickle:
        raise
    except _DAMAGE as error:
        raise BadPickle(f"{type(error).__name__}: {error}") from None


# Extensions are a registry of the process, not of the file; buffers lie outside of it.
_REFUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)


class _Unpickler(pickle._Unpickler):
    """Replaces every opcode that calls something, changes an object, or takes a hash."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, window: Window, builders: Builders, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(window, encoding="latin1")
        self._builders, self._persistent = builders, persistent
        self.dispatch = self.opcodes  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return _DTYPES.get(full, Name(full))

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise BadPickle("it refers to something outside of itself")
        return self._persistent(pid)

    def _made(self, what: Any, arguments: Any) -> Any:
        """What a call gives: the result of a builder, or a stand-in."""
        if not isinstance(arguments, tuple):
            raise BadPickle(f"arguments that are no tuple but {type(arguments).__name__}")
        if isinstance(what, StandIn):
            return StandIn(f"what {what.name} returns", (what, *arguments))
        if not isinstance(what, Name):
            raise BadPickle(f"a call of {type(what).__name__}")
        if _ACTING.fullmatch(what.full):
            raise HostilePickle(what.full)
        if what.full in _NEW:
            return self._made(arguments[0], arguments[1:] if "newobj" in what.full else ())
        try:
            return self._builders[what.full](*arguments)
        except BadPickle:
            raise
        except (LookupError, TypeError, AttributeError, ValueError):
            return StandIn(what.full, arguments)

    def _call(self, *keywords: Any) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.append(self._made(what, (*arguments, *keywords) if keywords else arguments))

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self._made(klass, tuple(args)))

    def _bytearray(self) -> None:
        # Python's own allocates before it reads.
        (count,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(count)))

    def _build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, StandIn):
            built.state = state
        elif isinstance(built, OrderedDict) and isinstance(state, dict) and "_metadata" in state:
            # torch notes the modules' names with a state dict.
            built._metadata = state["_metadata"]  # type: ignore[attr-defined]

    def _dict(self) -> None:
        # `pop_mark` replaces the stack.
        pairs = self.pop_mark()
        self.append({})
        self._set(pairs)

    def _frozenset(self) -> None:
        self.append(frozenset(map(_key, self.pop_mark())))

    def _set(self, items: list[Any]) -> None:
        built = self.stack[-1]
        if isinstance(built, StandIn):
            return
        if not isinstance(built, dict) or len(items) % 2:
            raise BadPickle(f"pairs for {type(built).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            built[_key(key)] = value

    def _extend(self, items: list[Any]) -> None:
        built = self.stack[-1]
        if isinstance(built, set):
            built.update(map(_key, items))
        elif isinstance(built, list):
            built.extend(items)
        elif not isinstance(built, StandIn):
            raise BadPickle(f"items for {type(built).__name__}")

    opcodes = {key: step for key, step in pickle._Unpickler.dispatch.items() if bytes([key]) not in _REFUSED} | {
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: lambda self: self._call(self.stack.pop()),
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.BUILD[0]: _build,
        pickle.DICT[0]: _dict,
        pickle.FROZENSET[0]: _frozenset,
        pickle.SETITEM[0]: lambda self: self._set([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._extend(self.pop_mark()),
    }


def _key(value: Any) -> Any:
    """A value whose hash is cheap: a plain one, an object by its identity, or a small tuple of these."""
    parts = [value]
    for part in parts:
        if isinstance(part, int) and abs(part) >= _LARGEST_KEY:
            raise BadPickle("a key that is too large")
        if isinstance(part, list | dict | set | bytearray):
            raise BadPickle(f"a key of type {type(part).__name__}")
        if isinstance(part, tuple | frozenset):
            if len(parts) + len(part) > _MOST_PARTS_OF_KEY:
                raise BadPickle("a key of too many parts")
            parts.extend(part)
    return value


def described(reference: Any) -> tuple[torch.dtype, str]:
    """The type, named as `torch.FloatStorage`, and the key by which a file refers to a storage."""
    if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] not in ("storage", b"storage"):
        raise BadPickle("a reference to something else than a storage")
    _, named, key = reference[:3]
    if not isinstance(key, str | int):
        raise BadPickle("a storage without a key")
    full = named.full if isinstance(named, Name) else ""
    kind = re.fullmatch(r"torch\.(?:cuda\.|storage\.)?_?(\w+)Storage", full)
    if kind is None or kind[1] not in _STORAGES:
        raise BadPickle(f"a storage of type {said(named)}")
    return _STORAGES[kind[1]], str(key)


def tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """A view of a storage, if it lies inside; torch itself would enlarge the storage."""
    if isinstance(storage, Tensor):
        raise TypeError("a tensor of a tensor")
    if not isinstance(storage, Storage):
        raise BadPickle(f"a tensor of {type(storage).__name__}")
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if len(shape) != len(steps) or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers) or len(shape) > 64:
        raise BadPickle("a tensor of an impossible size or stride")
    kind = next((one for one in rest if isinstance(one, torch.dtype)), storage.dtype)
    capacity = storage.memory.nbytes() // kind.itemsize
    entries = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1 if entries else offset
    if last > capacity or entries > max(capacity, _MOST_EXPANDED):
        raise BadPickle(f"a tensor of size {shape!r} that needs {last} entries of a storage of {capacity}")
    return torch.empty(0, dtype=kind).set_(storage.memory, offset, shape, steps)


def _of_type(function: Name, kind: Any, arguments: tuple[Any, ...], *state: Any) -> Tensor:
    """A subclass of Tensor is read as the tensor that it is."""
    if function.full == "torch._utils._rebuild_wrapper_subclass" and kind.full.startswith("torchao.optim.subclass_"):
        return _of_blocks(**state[0])
    return _TENSORS[function.full](*arguments)


def _of_blocks(
    codes: Tensor, scale: Tensor, qmap: Tensor | None = None, signed: bool = False, _shape: Any = None, **_: Any
) -> Tensor:
    """torchao's optimiser states: entries of a table, or float8, times the scale of their block; of 4 bits in pairs."""
    # Averages of gradients, which have a sign, are of no use; of 4 bits two codes are in one.
    is_block = not signed and scale.dim() == 1 and len(scale) and codes.numel() % len(scale) == 0
    is_coded = qmap is None or (codes.dtype == torch.uint8 and qmap.dim() == 1 and len(qmap))
    if not (is_block and is_coded) or (_shape is not None and math.prod(_shape) != 2 * codes.numel()):
        raise TypeError("blocks that are not read")
    shape = codes.shape
    if _shape is not None:
        codes, shape = torch.stack([codes >> 4, codes & 15], dim=-1), torch.Size(_shape)
    values = codes.float() if qmap is None else qmap[codes.long().clamp_(max=len(qmap) - 1)]
    return (values.reshape(len(scale), -1) * scale[:, None]).reshape(shape)


def _ordered(pairs: Any = (), *_: Any) -> OrderedDict[Any, Any]:
    return OrderedDict((_key(key), value) for key, value in pairs)


def _encoded(text: str, coding: str = "latin1") -> bytes:
    """Bytes, which old protocols write as text."""
    if coding not in ("latin1", "latin-1"):
        raise TypeError("bytes in another coding")
    return text.encode("latin1")


def _scalar(kind: StandIn, raw: bytes) -> Any:
    """A number or text of numpy's, as Python's."""
    code, order = kind.arguments[0], kind.state[1]
    if kind.name != "numpy.dtype" or order not in tuple("<>=|") or not re.fullmatch(r"[biufcSU]\d{1,4}", code):
        raise TypeError(f"a number of {said(code)}")
    return np.ndarray((), np.dtype(code).newbyteorder(order), raw)[()].item()


_TENSORS: dict[str, Callable[..., Tensor]] = {
    f"torch._utils._rebuild_tensor{version}": tensor for version in ("", "_v2", "_v3")
}
BUILDERS: Builders = {
    **_TENSORS,
    **{f"torch._utils._rebuild_parameter{end}": lambda data, *_: data for end in ("", "_with_state")},
    **{f"torch.nn.parameter.{kind}": lambda data, *_: data for kind in ("Parameter", "Buffer")},
    "torch.autograd.variable.Variable": lambda data, *_: data,
    **{f"torch._tensor._rebuild_from_type{version}": _of_type for version in ("", "_v2")},
    "torch.Size": torch.Size,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: OrderedDict(),
    "_codecs.encode": _encoded,
    # Empty bytes of old protocols.
    **{f"{module}.bytes": lambda: b"" for module in ("builtins", "__builtin__")},
    # The names of numpy's module in its version 2 and before.
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("_core", "core")},
}


def said(value: Any) -> str:
    """A value of a pickle for a message: itself where it is plain and short, else its type."""
    plain = value is None or isinstance(value, str | int | float | Name | StandIn)
    shown = f"{value!r}" if plain and not (isinstance(value, int) and abs(value) >= _LARGEST_KEY) else ""
    return shown if 0 < len(shown) <= 200 else f"a {type(value).__name__}"
