"""The whole `bandits` command, killed again and again: it ends with the numbers of one that was left alone."""

from __future__ import annotations

import json
import os

import pytest

from processes import run_python

KILLS = int(os.environ.get("BAYESADAM_TEST_KILLS", "6"))

# Imports once, then forks a process for each attempt; no thread has run by then. SIGPROF ends an attempt a random time
# after a random number of trainings: how busy the machine is does not matter.
KILLED = """
import contextlib, json, os, random, signal, sys
from pathlib import Path

import bayesadam.cli, bayesadam.paper.bandits
import torch._dynamo  # what torch.optim brings in with its first optimiser, otherwise in every attempt anew
from bayesadam.__main__ import main
from bayesadam.bandits.simulation import Playing

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
advance, trainings = Playing.advance, folder / "trainings"


def attempt(name, trainings_left=10**6, seconds=0.0):
    # In a process of its own; after so many trainings it has so many seconds on a core. How it ended.
    def counted(self):
        nonlocal trainings_left
        trainings_left -= 1
        if not trainings_left:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        advance(self)

    child = os.fork()
    if not child:
        Playing.advance = counted
        code = 1
        try:
            code = main(
                ["bandits", "--problems", "wheel:0.5", "--agents", "badam,linear,greedy", "--runs", "2",
                 "--rounds", "400", "--seed", "3", "--device", "cpu", "--out", str(folder / name), "--quiet"]
            )
        except SystemExit as end:
            code = end.code
        finally:
            trainings.write_text(str(10**6 - trainings_left))
            os._exit(code or 0)
    return os.waitpid(child, 0)[1]


def finished():
    with contextlib.suppress(StopIteration):
        return sorted(json.loads(next((folder / "killed").glob("unfinished-*.json")).read_text()))
    return []


assert attempt("whole") == 0
whole = int(trainings.read_text())

choose = random.Random(5)
struck = []
for _ in range(kills):
    status = attempt("killed", 1 + int(choose.random() * 2 * whole / kills), 0.001 + 0.05 * choose.random())
    assert status in (0, signal.SIGPROF), status
    if not status:
        break
    struck.append(finished())
if not struck or status:
    assert attempt("killed") == 0
print(json.dumps(struck), file=sys.stderr)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_a_killed_command_ends_with_the_same_numbers(tmp_path):
    done = run_python(KILLED, tmp_path, KILLS)
    assert done.returncode == 0, done.stderr
    struck = json.loads(done.stderr.splitlines()[-1])
    # Cells that a kill left unfinished are played again; the last kills may come too late all the same.
    assert len(struck) >= KILLS / 2
    # Finished cells stay finished.
    counts = list(map(len, struck))
    assert counts == sorted(counts)
    first, second = (
        json.loads((tmp_path / name / "metrics.json").read_text())["results"] for name in ("whole", "killed")
    )
    for cells in (first, second):
        for cell in cells["wheel:0.5"].values():
            cell.pop("seconds")
    assert set(first["wheel:0.5"]) == {"greedy", "linear", "badam"}
    assert second == first
    assert not list((tmp_path / "killed").glob("unfinished*"))
