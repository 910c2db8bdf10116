"""Real processes: a command that is ended takes its workers with it, whatever it was ended by, and then resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from bayesadam.commands.running import Run, run_parts
from bayesadam.errors import BayesAdamError
from bayesadam.paper.regression import RegressionSettings, run_regression
from processes import PATIENCE, SOURCE, eventually

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# Years of work: what ends, was ended.
COMMANDS = {
    "regression": ["--methods", "badam,gp", "--seeds", "1", "--epochs", "1000000000"],
    "pruning": ["--data", "digits", "--methods", "badam,vadam", "--epochs", "1000000000", "--device", "cpu"],
}


def stat(pid: int) -> tuple[str, int] | None:
    """A process's state and parent; None when it is gone, waited for or not."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else (state, int(parent))


def workers_of(pid: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        child = stat(int(folder.name))
        if child is not None and child[1] == pid:
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"multiprocessing.spawn" in command:
                found.add(int(folder.name))
    return found


def ledger_in(folder: Path) -> dict[str, object]:
    for path in folder.glob("unfinished-*.json"):
        return json.loads(path.read_text())
    return {}


class Command:
    """A `bayesadam` command in a process of its own; leaving it ends what is left.

    Args:
        arguments: the command and its options.
        before: Python that runs first.
    """

    def __init__(self, *arguments: str, before: str = "") -> None:
        code = f"import sys\nfrom bayesadam.__main__ import main\n{before}\nsys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, "--quiet"],
            env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers: set[int] = set()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pid in self.workers:
            if stat(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def at_work(self, count: int) -> bool:
        assert self.process.poll() is None, self.process.stderr.read()
        self.workers = workers_of(self.process.pid)
        return len(self.workers) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ended_by"),
    [
        ("regression", signal.SIGTERM),
        ("pruning", signal.SIGKILL),
        pytest.param("regression", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("pruning", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_workers_end_with_their_command(name, ended_by, tmp_path):
    if name == "pruning":
        pytest.importorskip("sklearn")
    with Command(name, *COMMANDS[name], "--jobs", "2", "--out", str(tmp_path)) as command:
        eventually(lambda: command.at_work(2), "two workers")
        if name == "regression":
            # One worker is done with its method then; those of `pruning` are struck while they are starting.
            eventually(lambda: "gp" in ledger_in(tmp_path), "a finished method")
        command.process.send_signal(ended_by)
        code = command.process.wait(timeout=PATIENCE)
        eventually(lambda: not any(map(stat, command.workers)), "the end of the workers")
        assert code == -ended_by


# The first method is real, the second never ends: the kill cannot come too late.
STALLED = """
import time
from bayesadam.paper import regression
regression.METHODS = {**regression.METHODS, "bbb": lambda problem: time.sleep(10**6)}
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_numbers_of_one_left_alone(tmp_path):
    settings = RegressionSettings(methods=("badam", "bbb"), n_seeds=2, epochs=200)
    options = ["--methods", "badam,bbb", "--seeds", "2", "--epochs", "200", "--jobs", "1"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with Command("regression", *options, "--out", str(cut), before=STALLED) as command:
        eventually(lambda: "badam" in ledger_in(cut), "a finished method")
        command.process.kill()
        assert command.process.wait(timeout=PATIENCE) == -signal.SIGKILL
    kept = ledger_in(cut)
    assert set(kept) == {"badam", "seconds"}
    for out in (cut, whole):
        run_regression(seed=0, out=out, quiet=True, settings=settings, jobs=1)
    first, second = (json.loads((out / "metrics.json").read_text()) for out in (whole, cut))
    assert second["results"] == first["results"]
    assert second["results"]["badam"] == kept["badam"]["scores"]
    assert second["seconds"] > kept["seconds"]


# --- what goes wrong in a worker --------------------------------------------------------------------------------------


def work(names):
    for name in names:
        if name == "error":
            raise BayesAdamError("no such data")
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, {"name": name, "in": os.getpid()}


def work_or_wait(names):
    if names == ("busy",):
        time.sleep(PATIENCE)
    # Later than the first part has come back.
    time.sleep(1 if names != ("a",) else 0)
    yield from work(names)


@pytest.mark.slow
def test_results_come_from_processes_that_end_when_all_is_done(tmp_path):
    run = Run("parts", 0, tmp_path, {}, quiet=True)
    found = run_parts(run, list("abcd"), work, jobs=2)
    assert list(found) == list("abcd")
    pids = {found[name]["in"] for name in "abcd"}
    assert len(pids) <= 2
    assert os.getpid() not in pids
    assert not any(map(stat, pids))
    assert set(ledger_in(tmp_path)) == {"a", "b", "c", "d", "seconds"}


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "message"), [("error", "no such data"), ("killed", "terminated abruptly")])
def test_a_worker_that_fails_ends_the_others_and_what_is_finished_stays(bad, message, tmp_path):
    run = Run("parts", 0, tmp_path, {}, quiet=True)
    names = ["a", "busy", bad]
    began = time.monotonic()
    # The worker of the second part would be at work until the deadline.
    with pytest.raises((BayesAdamError, BrokenProcessPool), match=message):
        run_parts(run, names, work_or_wait, jobs=2)
    assert time.monotonic() - began < PATIENCE
    assert not workers_of(os.getpid())
    assert set(ledger_in(tmp_path)) == {"a", "seconds"}
