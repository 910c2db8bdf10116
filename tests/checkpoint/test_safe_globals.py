"""What trainers save with the tensors is read and passed on; nothing of it can run code, whatever the file says."""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import pathlib
import re
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.__main__ import main
from bayesadam.checkpoint import read_checkpoint, safe_globals
from bayesadam.errors import FileError
from cases import trained

UTC = datetime.timezone.utc
BESIDE = {
    "namespace": argparse.Namespace(lr=0.1, out=Path("runs/1"), layers=[3, 5], best=np.float64(0.5)),
    "simple": types.SimpleNamespace(lr=0.1),
    "float64": np.float64(0.25),
    "float32": np.float32(0.25),
    "int64": np.int64(-7),
    "bool": np.bool_(True),
    "str": np.str_("größer"),
    "empty str": np.str_(""),
    "array": np.arange(6.0).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "nothing": np.zeros((0, 3), np.float16),
    "words": np.array(["a", "bcd"]),
    "point": np.array(3 + 1j),
    "dtype": np.dtype("f4"),
    "random": np.random.RandomState(0).get_state(),
    "path": Path("runs") / "last",
    "other path": pathlib.PureWindowsPath("c:\\runs"),
    "defaultdict": collections.defaultdict(list, {"loss": [1.0, np.float32(2.0)]}),
    "empty defaultdict": collections.defaultdict(int),
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "when": datetime.datetime(2024, 2, 29, 12, tzinfo=UTC),
    "day": datetime.date(2024, 2, 29),
    "took": datetime.timedelta(hours=2),
    "nested": [{"deep": (np.float64(1.0), {"set"})}],
}


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    return trained(3, 5, 2, weight_decay=0.1)


def saved(path: Path, pair: tuple[nn.Module, torch.optim.Optimizer], /, **more: Any) -> Path:
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict(), **more}, path)
    return path


def edited(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """The file with its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return path


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("key", BESIDE)
def test_it_is_read_and_a_pruned_file_has_it_again(key: str, pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, extra=BESIDE[key])
    expected = ba.curvature.read_optimizer(*pair).second_moment
    found = ba.checkpoint.read_curvature(read_checkpoint(path)).second_moment
    assert all(torch.equal(found[name], v) for name, v in expected.items())
    ba.prune_checkpoint(path, tmp_path / "out.pt", 0.5)
    # Our own file of a moment ago: read as its author would.
    again = torch.load(tmp_path / "out.pt", weights_only=False)["extra"]
    assert type(again) is type(BESIDE[key])
    assert same(again, BESIDE[key])
    assert getattr(again, "default_factory", None) is getattr(BESIDE[key], "default_factory", None)


@pytest.mark.parametrize("core", ["_core", "core"])
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_the_names_of_every_numpy_and_python(core: str, module: str, pair: Any, tmp_path: Path) -> None:
    def change(content: bytes) -> bytes:
        content, count = re.subn(rb"numpy\._?core\.", f"numpy.{core}.".encode(), content)
        content, others = re.subn(rb"cpathlib(\._local)?\n", f"c{module}\n".encode(), content)
        assert count >= 2
        assert others == 1
        return content

    more = {"n_data": np.int64(60), "rng": BESIDE["random"], "path": Path("runs")}
    read = read_checkpoint(edited(saved(tmp_path / "c.pt", pair, **more), change))
    assert read.recorded.n_data == 60
    assert type(read.recorded.n_data) is int


def test_numbers_of_numpy_in_the_optimiser_are_numbers(pair: Any, tmp_path: Path) -> None:
    pair[1].param_groups[0]["weight_decay"] = np.float32(0.25)
    pair[1].param_groups[0]["lr"] = np.float64(0.1)
    path = saved(tmp_path / "c.pt", pair, n_data=np.int32(100))
    posterior = ba.Posterior.from_checkpoint(path, nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert set(posterior.prior_precision.values()) == {25.0}


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


def test_every_name_is_of_a_type_that_holds_data_or_of_a_stand_in_of_ours() -> None:
    # Each is made from its arguments alone: no file is opened, nothing is imported, nothing given is called.
    holds_data = {
        argparse.Namespace,
        types.SimpleNamespace,
        *(bool, int, float, str, list, tuple, dict),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath),
    }
    for name, made in {**safe_globals._PYTHON, **safe_globals._NUMPY}.items():
        assert made in holds_data or made.__module__ == safe_globals.__name__, name
    assert not any(made.__module__.startswith("numpy") for made in safe_globals._NUMPY.values())


@pytest.mark.parametrize(
    "function", [eval, getattr, open, print, os.mkdir, np.load, np.fromfile, np.memmap, pathlib.Path.write_text, type]
)
def test_nothing_else_is_called(function: Any, pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, args={"deep": [Call(function, str(tmp_path / "made"))]})
    with pytest.raises(FileError, match=r"needs .* to be unpickled, which could run any code"):
        read_checkpoint(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_built_calls_nothing_that_the_file_gives_it(pair: Any, tmp_path: Path) -> None:
    hooks = dict.fromkeys(
        ("__setstate__", "__reduce_ex__", "__reduce__", "__class__", "__len__"), Call(os.system, "no")
    )
    path = saved(tmp_path / "c.pt", pair, args=Built(argparse.Namespace, (), hooks))
    with pytest.raises(FileError, match="could run any code"):
        read_checkpoint(path)


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
    with pytest.raises(FileError):
        read_checkpoint(saved(tmp_path / "c.pt", pair, value=value))


def test_what_torch_allows_is_as_before_and_the_users_own_comes_first(pair: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", pair, value=np.arange(3.0), args=argparse.Namespace(a=1))
    before = set(torch.serialization.get_safe_globals())
    read_checkpoint(path)
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(FileError):
        read_checkpoint(saved(tmp_path / "bad.pt", pair, args=Call(eval, "1")))
    assert set(torch.serialization.get_safe_globals()) == before
    own = [RECONSTRUCT, np.ndarray, np.dtype, type(F8), argparse.Namespace]
    with torch.serialization.safe_globals(own):
        ba.prune_checkpoint(path, tmp_path / "out.pt", 0.5)
        assert {*before, *own} == set(torch.serialization.get_safe_globals())
    assert same(torch.load(tmp_path / "out.pt", weights_only=False)["value"], np.arange(3.0))


def test_several_threads_read_at_once(pair: Any, tmp_path: Path) -> None:
    path, failures = saved(tmp_path / "c.pt", pair, **BESIDE), []

    def read() -> None:
        try:
            for _ in range(10):
                read_checkpoint(path)
        except FileError as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Mine:
    """A class that nobody here knows."""


def test_an_unknown_class_is_named_and_the_command_says_what_can_be_done(
    pair: Any, tmp_path: Path, capsys: Any
) -> None:
    path = saved(tmp_path / "c.pt", pair, config=Mine())
    assert main(["prune", str(path), "--fraction", "0.5", "-o", str(tmp_path / "out.pt")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"needs the class {Mine.__module__}.Mine" in told
    assert "if you trust the file, do so in Python with what torch.load(path, weights_only=False) returns" in told
    assert not (tmp_path / "out.pt").exists()
