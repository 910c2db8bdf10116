"""Pickles as data: what a file says is built, read without importing or calling anything it names.

A name that is not known here becomes a `Name`, and what the file would build by it a `StandIn`, which holds the name and
all that was given to it. The few known names, in the table that `load` is given, are functions of ours.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO

# A pickle of a model with a hundred thousand tensors has a few million.
_MOST_OPCODES = 20_000_000
_LONGEST_LINE = 1 << 20
# Larger ones could be made to have equal hashes.
_LARGEST_KEY = 1 << 60
# A tuple of tuples of one tuple has many in a few bytes, and its hash takes each.
_MOST_PARTS_OF_KEY = 32
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MAKES = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_NOTHING = ("PROTO", "FRAME", "READONLY_BUFFER")
# Calls by which a file acts on the machine that unpickles it; in data there is no use for them.
# In old protocols `subprocess` is called `commands`.
_ACTING_MODULES = frozenset(
    [
        "os",
        "posix",
        "nt",
        "subprocess",
        "commands",
        "shutil",
        "socket",
        "sys",
        "runpy",
        "pty",
        "ctypes",
        "importlib",
        "webbrowser",
    ]
)
_ACTING = frozenset(
    f"{module}.{name}"
    for module in ("builtins", "__builtin__", "io", "_io")
    for name in ("eval", "exec", "execfile", "compile", "open", "__import__", "input", "breakpoint", "print")
)


class BadPickle(ValueError):
    """What a pickle says makes no sense."""


class HostilePickle(BadPickle):
    """What a pickle says is to act on the machine."""


@dataclass(frozen=True)
class Name:
    """A name in a pickle, of a class or a function, that was not imported."""

    full: str

    def __repr__(self) -> str:
        return f"<{self.full}>"


@dataclass(eq=False)
class StandIn:
    """What would have been built: by which name, from which arguments, with which state, items and pairs."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = ()
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.name} object>"

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    def get(self, key: str) -> Any:
        """An entry of its state; None where there is none."""
        return self.state.get(key)


Builders = Mapping[str, Callable[..., Any]]


class Window:
    """A part of a file for `load`: reads no further than its end, and no line that is absurdly long."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end = file, end

    def tell(self) -> int:
        """Where it is, in the file."""
        return self._file.tell()

    def read(self, count: int) -> bytes:
        """So many bytes; none where there are fewer."""
        return self._file.read(count) if 0 <= count <= self._end - self._file.tell() else b""

    def readline(self) -> bytes:
        """Up to the end of a line."""
        return self._file.readline(min(_LONGEST_LINE, max(0, self._end - self._file.tell())))


def load(
    window: Window,
    builders: Builders,
    persistent: Callable[[Any], Any] | None = None,
    constants: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """What a pickle holds.

    Args:
        window: where it begins.
        builders: full name → what is made of the arguments, by a function of ours; one that raises `BadPickle` says that
            it cannot be, and leaves a stand-in.
        persistent: (id) → what the pickle refers to outside of itself.
        constants: full name → the value that it stands for.
    """
    return _Machine(builders, persistent, constants).run(window)


def _opcodes(window: Window) -> Iterator[tuple[str, Any]]:
    try:
        for number, (code, argument, _) in enumerate(pickletools.genops(window)):  # type: ignore[arg-type]
            if number == _MOST_OPCODES:
                raise BadPickle(f"a pickle of more than {_MOST_OPCODES:,} steps")
            yield code.name, argument
    except (ValueError, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise BadPickle(str(error)) from None


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(
        self, builders: Builders, persistent: Callable[[Any], Any] | None, constants: Mapping[str, Any]
    ) -> None:
        self._builders, self._persistent, self._constants = builders, persistent, constants
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, window: Window) -> Any:
        try:
            for name, argument in _opcodes(window):
                if name == "STOP":
                    return self._stack.pop()
                self._step(name, argument)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise BadPickle(f"{type(error).__name__}: {error}") from None
        raise BadPickle("it has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if argument is not None and name not in _NAMED_STEPS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _MAKES:
            stack.append(_MAKES[name]())
        elif name in _PUTS:
            self._memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name in _TUPLES:
            count = _TUPLES[name]
            made = tuple(stack[-count:])
            if len(made) < count:
                raise BadPickle("a tuple of more than there is")
            stack[-count:] = [made]
        elif name not in _NOTHING:
            step = _STEPS.get(name)
            if step is None:
                raise BadPickle(f"opcode {name}, which no file of torch has")
            step(self, argument)

    def _marked(self) -> list[Any]:
        """What lies above the last mark, off the stack."""
        place = self._marks.pop()
        found = self._stack[place:]
        del self._stack[place:]
        return found

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._marked()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _list(self, _: Any) -> None:
        self._stack.append(self._marked())

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    def _frozenset(self, _: Any) -> None:
        self._stack.append(frozenset(_key(item) for item in self._marked()))

    def _dict(self, _: Any) -> None:
        made: dict[Any, Any] = {}
        _set(made, self._marked())
        self._stack.append(made)

    def _append(self, _: Any) -> None:
        _extend(self._stack[-2], [self._stack.pop()])

    def _appends(self, _: Any) -> None:
        found = self._marked()
        _extend(self._stack[-1], found)

    def _additems(self, _: Any) -> None:
        found = self._marked()
        held = self._stack[-1]
        if isinstance(held, set):
            held.update(_key(item) for item in found)
        else:
            _extend(held, found)

    def _setitem(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _set(self._stack[-1], [key, value])

    def _setitems(self, _: Any) -> None:
        found = self._marked()
        _set(self._stack[-1], found)

    def _global(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._named(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(self._named(module, name))

    def _named(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("a name that is no text")
        full = f"{module}.{name}"
        return self._constants.get(full, Name(full))

    def _reduce(self, _: Any) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        self._stack.append(self._made(made, arguments))

    def _newobj_ex(self, _: Any) -> None:
        keywords, arguments, made = self._stack.pop(), self._stack.pop(), self._stack.pop()
        found = self._made(made, arguments)
        if isinstance(found, StandIn) and isinstance(keywords, dict):
            found.state = keywords
        self._stack.append(found)

    def _obj(self, _: Any) -> None:
        made, *arguments = self._marked()
        self._stack.append(self._made(made, tuple(arguments)))

    def _inst(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._made(self._named(module, name), tuple(self._marked())))

    def _made(self, what: Any, arguments: Any) -> Any:
        """What a name makes of arguments: by one of ours, or a stand-in."""
        if not isinstance(arguments, tuple):
            raise BadPickle(f"arguments that are no tuple but {type(arguments).__name__}")
        if isinstance(what, StandIn):
            return StandIn(f"what {what.name} returns", (what, *arguments))
        if not isinstance(what, Name):
            raise BadPickle(f"a call of {type(what).__name__}")
        if what.full in _ACTING or what.full.partition(".")[0] in _ACTING_MODULES:
            raise HostilePickle(what.full)
        if what.full in (
            "copyreg.__newobj__",
            "copy_reg.__newobj__",
            "copyreg._reconstructor",
            "copy_reg._reconstructor",
        ):
            # How an object of a class begins in old protocols.
            made, *rest = arguments
            return self._made(made, tuple(rest) if "newobj" in what.full else ())
        builder = self._builders.get(what.full)
        if builder is not None:
            try:
                return builder(*arguments)
            except BadPickle:
                pass
        return StandIn(what.full, arguments)

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        held = self._stack[-1]
        if isinstance(held, StandIn):
            held.state = state
        elif isinstance(held, OrderedDict) and isinstance(state, dict) and "_metadata" in state:
            # torch notes the modules' names with a state dict.
            held._metadata = state["_metadata"]  # type: ignore[attr-defined]
        elif hasattr(held, "built"):
            held.built(state)

    def _persid(self, argument: Any) -> None:
        self._refer(argument)

    def _binpersid(self, _: Any) -> None:
        self._refer(self._stack.pop())

    def _refer(self, found: Any) -> None:
        if self._persistent is None:
            raise BadPickle("it refers to something outside of itself")
        self._stack.append(self._persistent(found))


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MEMOIZE": _Machine._memoize,
    "MARK": _Machine._mark,
    "POP": _Machine._pop,
    "POP_MARK": _Machine._pop_mark,
    "DUP": _Machine._dup,
    "LIST": _Machine._list,
    "TUPLE": _Machine._tuple,
    "FROZENSET": _Machine._frozenset,
    "DICT": _Machine._dict,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._additems,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._reduce,
    "NEWOBJ_EX": _Machine._newobj_ex,
    "OBJ": _Machine._obj,
    "INST": _Machine._inst,
    "BUILD": _Machine._build,
    "PERSID": _Machine._persid,
    "BINPERSID": _Machine._binpersid,
}
# What has an argument that is not the value itself.
_NAMED_STEPS = frozenset((*_STEPS, *_PUTS, *_GETS, *_NOTHING, "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"))


def _extend(held: Any, found: list[Any]) -> None:
    if isinstance(held, StandIn):
        held.items.extend(found)
    elif isinstance(held, list):
        held.extend(found)
    else:
        raise BadPickle(f"items for {type(held).__name__}")


def _set(held: Any, found: list[Any]) -> None:
    pairs = held.pairs if isinstance(held, StandIn) else held
    if not isinstance(pairs, dict) or len(found) % 2:
        raise BadPickle(f"pairs for {type(held).__name__}")
    for key, value in zip(found[::2], found[1::2], strict=True):
        pairs[_key(key)] = value


def _key(value: Any) -> Any:
    """A value that may be a key: a plain one, an object by its identity, or a small tuple of these."""
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


def classes_in(tree: Any) -> tuple[str, ...]:
    """The names of all stand-ins in what was read, in alphabetical order.

    >>> classes_in({"args": StandIn("argparse.Namespace", state={"lr": StandIn("omegaconf.FloatNode")}), "epoch": 3})
    ('argparse.Namespace', 'omegaconf.FloatNode')
    """
    # Held so that no other object takes an address that was seen.
    seen: dict[int, Any] = {}
    left, found = [tree], set()
    while left:
        value = left.pop()
        if id(value) in seen or not isinstance(value, StandIn | Mapping | list | tuple | set | frozenset):
            continue
        seen[id(value)] = value
        if isinstance(value, StandIn):
            found.add(value.name)
            left += [value.arguments, value.state, value.items, value.pairs]
        elif isinstance(value, Mapping):
            left += value.values()
        else:
            left += value
    return tuple(sorted(found))


def said(value: Any) -> str:
    """A value of a pickle for a message: itself where it is plain and short, else its type.

    >>> said(3), said(Name("torch.FloatStorage")), said([[1], [2]])
    ('3', '<torch.FloatStorage>', 'a list')
    """
    plain = value is None or isinstance(value, str | int | float | Name | StandIn)
    shown = f"{value!r}" if plain and not (isinstance(value, int) and abs(value) >= _LARGEST_KEY) else ""
    return shown if 0 < len(shown) <= 200 else f"a {type(value).__name__}"
