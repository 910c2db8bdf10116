"""What trainers save with the tensors is passed over and passed on; nothing of it can run code, whatever the file
says.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import os
import pathlib
import pickle
import shutil
import subprocess
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.readers import read_checkpoint
from bayesadam.readers.formats import pickles
from bayesadam.readers.formats.pickles import BUILDERS, Storage, tensor
from formats.fuzz import audited
from formats.same import same_moments


class Mine:
    """A class that nobody here knows."""

    def __init__(self) -> None:
        self.lr, self.other = 0.1, [self]


class Words(dict[str, int]):
    """A dictionary of one's own."""


class Colour(enum.Enum):
    RED = 1


BESIDE = {
    "namespace": argparse.Namespace(lr=0.1, out=Path("runs/1"), layers=[3, 5], best=np.float64(0.5)),
    "numbers": [np.float64(0.25), np.int64(-7), np.bool_(True), np.str_("größer")],
    "arrays": [np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 3), np.float16), np.array(["a", "bcd"])],
    "random": np.random.RandomState(0).get_state(),
    "path": pathlib.PureWindowsPath("c:\\runs"),
    "defaultdict": collections.defaultdict(list, {"loss": [1.0, np.float32(2.0)]}),
    "counter": collections.Counter("aab"),
    "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
    "nested": [{"deep": (np.float64(1.0), {"set"})}],
    "object": Mine(),
    "function": Mine.__init__,
    "dictionary": Words(a=1),
    "partial": functools.partial(Mine),
    "enum": Colour.RED,
    "several": [Mine(), Words(), torch.optim.Adam, torch.device("cpu"), torch.float16, ValueError("no")],
    "module": nn.Linear(2, 2),
    "loader": torch.utils.data.TensorDataset(torch.zeros(3)),
}


class Counted:
    """Counts how often it is made."""

    made = 0

    def __init__(self, *_: Any) -> None:
        type(self).made += 1


def saved(path: Path, pair: tuple[nn.Module, torch.optim.Optimizer], /, **more: Any) -> Path:
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict(), **more}, path)
    return path


@pytest.mark.parametrize("key", BESIDE)
def test_it_is_read_and_a_pruned_file_has_it_again(key: str, pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, extra=BESIDE[key])
    same_moments(path, pair)
    ba.compress.prune_checkpoint(path, tmp_path / "out.pt", 0.5)
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(tmp_path / "out.pt") as other:
        name = next(name for name in one.namelist() if name.endswith("data.pkl"))
        assert one.read(name) == other.read(name)
    # Our own file of a moment ago: read as its author would.
    again = torch.load(tmp_path / "out.pt", weights_only=False)
    assert type(again["extra"]) is type(BESIDE[key])
    weights = torch.cat([w.flatten() for w in again["model"].values() if w.dim() > 1])
    assert 0.3 < (weights == 0).double().mean() < 0.7


# --- nothing runs ---------------------------------------------------------------------------------------------------


class Call:
    """Pickled as a call, as a hostile file would be."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


class Built(Call):
    """The same with a state for what was made."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any) -> None:
        super().__init__(function, *arguments)
        self.state = state

    def __reduce__(self) -> Any:
        return self.function, self.arguments, self.state


@pytest.mark.parametrize("function", [eval, exec, open, print, os.mkdir, os.system, subprocess.run, shutil.rmtree])
def test_a_file_that_is_made_to_run_code_is_refused(function: Any, pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, args={"deep": [Call(function, str(tmp_path / "made"))]})
    with (
        audited() as events,
        pytest.raises(FileError, match=r"would call \S+ if it were unpickled.*[Nn]othing was run"),
    ):
        read_checkpoint(path)
    assert list(tmp_path.iterdir()) == [path]
    assert not events


@pytest.mark.parametrize("function", [getattr, np.load, np.fromfile, np.memmap, pathlib.Path.write_text, type, Counted])
def test_nothing_else_is_called_either(function: Any, pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, args={"deep": [Call(function, str(tmp_path / "made"))]})
    Counted.made = 0
    with audited() as events:
        same_moments(path, pair)
    assert list(tmp_path.iterdir()) == [path]
    assert not events
    assert Counted.made == 0


HUGE = (2**61, 8)
F8 = np.dtype("f8")
# A field of objects that its flags deny: numpy's own reader would take the bytes for addresses.
LYING = Built(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))
RECONSTRUCT = np.zeros(1).__reduce__()[0]


@pytest.mark.parametrize(
    "value",
    [
        Built(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), LYING, False, b"\x41" * 8)),
        Built(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (4,), F8, False, b"\x41" * 8)),
        Built(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, HUGE, F8, False, b"")),
        Built(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (-1,), F8, False, b"")),
        Built(RECONSTRUCT, (np.ndarray, (0,), b"b"), "not a state"),
        Call(np.ndarray, HUGE),
        Call(np.float64(0).__reduce__()[0], F8, b"\x41" * 7),
        Call(np.float64(0).__reduce__()[0], np.dtype("O"), b"\x41" * 8),
        np.array([1, None], dtype=object),
        np.zeros(2, dtype=[("a", "f4")]),
    ],
    ids=range(10),
)
def test_bytes_are_never_taken_for_more_than_numbers(value: Any, pair: Any, tmp_path: Path) -> None:
    same_moments(saved(tmp_path / "c.pt", pair, value=value), pair)


# --- the machine ----------------------------------------------------------------------------------------------------


def loaded(content: bytes) -> Any:
    return pickles.unpickle(pickles.Window(memoryview(content)), BUILDERS)


PLAIN = [
    None, True, False, 0, -1, 255, 70000, -(2**40), 2**200, 1.5, float("inf"), "", "größer", "x" * 300, b"", b"ab", (), (1,),
    (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1, [2, [3]]], {}, {"a": {"b": 1}, 3: (4, 5)}, OrderedDict(b=1, a=2),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_what_pickle_makes_of_it(protocol: int) -> None:
    for value in [*PLAIN, PLAIN]:
        found = loaded(pickle.dumps(value, protocol))
        assert found == value
        assert type(found) is type(value)


BAD = {
    "nothing": b"",
    "no end": b"\x80\x02]",
    "an empty stack": b".",
    "no mark": b"\x80\x02t.",
    "an unknown opcode": b"\x80\x02\xff.",
    "a length beyond the end": b"\x80\x04\x8e" + b"\xff" * 8 + b"ab.",
    "a text beyond the end": b"\x80\x02X\xff\xff\xff\x7fab.",
    "a call without arguments": b"\x80\x02cos\nsystem\nR.",
    "arguments that are no tuple": b"\x80\x02ccollections\nOrderedDict\n]R.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "items of a number": b"\x80\x02K\x01K\x02a.",
    "an extension": b"\x80\x02\x82\x01.",
    "a reference outside": b"\x80\x02K\x01Q.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "a key that is nested deeply": b"\x80\x02}" + b"K\x01" + b"\x85" * 100_000 + b"K\x02s.",
    "a key of one tuple a billion times": b"\x80\x02}(K\x01K\x01t"
    + b"".join(b"q\x00h\x00h\x00h\x00\x87" for _ in range(40))
    + b"K\x02s.",
    "a bytearray beyond the end": b"\x80\x05\x96" + b"\0\0\0\0\2\0\0\0" + b"ab.",
    "a frame beyond the end": b"\x80\x04\x95" + b"\0\0\0\0\2\0\0\0" + b"N.",
    "keys of one hash": b"\x80\x02}\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"K\x01s.",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "bytes out of band": b"\x80\x05\x97.",
    "pairs without a partner": b"\x80\x02}(K\x01u.",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_pickle_that_makes_no_sense_ends_in_an_error_and_takes_no_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(pickles.BadPickle):
            loaded(content)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_billion_laughs_take_neither_time_nor_memory(pair: Any, tmp_path: Path) -> None:
    laughs: Any = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    deep: Any = ()
    for _ in range(400):
        deep = (deep,)
    same_moments(saved(tmp_path / "c.pt", pair, laughs=laughs, deep=deep), pair)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((5,), (1,), 0), ((2,), (4,), 0), ((1,), (1,), 4), ((-1,), (1,), 0), ((2**40,), (0,), 0), ((2, 2), (1,), 0)],
)
def test_a_tensor_that_lies_outside_of_its_storage_is_damage(size: Any, stride: Any, offset: int) -> None:
    storage = Storage(torch.zeros(4).untyped_storage(), torch.float32)
    with pytest.raises(ValueError, match="a tensor of"):
        tensor(storage, offset, size, stride)
