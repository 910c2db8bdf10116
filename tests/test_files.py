"""Files that are whole or absent: what a killed save leaves, and what it must not touch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayesadam import _storage
from bayesadam._files import replacing
from bayesadam.errors import BayesAdamError, SettingError
from processes import SOURCE

pytest.importorskip("fcntl")

KILLED = """
import os, signal, sys
from bayesadam._files import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SettingError("no convergence")])
def test_what_cannot_be_written_leaves_what_was_there(error: Exception, tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fill(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(BayesAdamError, match=str(error.args[-1])) as caught, replacing(target) as temporary:
        fill(temporary)
    assert (str(target) in str(caught.value)) == isinstance(error, OSError)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def writer(path: Path, what: str) -> subprocess.Popen[str]:
    command, env = [sys.executable, "-c", KILLED, str(path), what], {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "a[1].safetensors"
    assert writer(path, "dies").wait() == -9
    other = tmp_path / ".a[1].safetensors.old.aaaaaaaa.tmp"
    other.write_text("of another path")
    assert len(list(tmp_path.iterdir())) == 2
    _storage.write(path, {"x": torch.ones(2)}, {})
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_save_leaves_that_of_another_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    process = writer(path, "waits")
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    with replacing(path) as temporary:
        temporary.write_text("whole")
        with replacing(path) as second:
            second.write_text("in a thread")
        assert temporary.is_file()
    assert path.read_text() == "whole"
    process.communicate("")
    assert process.returncode == 0
    assert path.read_text() == "half"
    assert list(tmp_path.iterdir()) == [path]
