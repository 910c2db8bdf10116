"""The whole `bandits` command, killed again and again: it ends with the numbers of one that was left alone."""

from __future__ import annotations

import json
import os

import pytest

from processes import run_python

KILLS = int(os.environ.get("BAYESADAM_TEST_KILLS", "20"))

# Imports once, then forks a process for each attempt; no thread has run by then. The kernel ends an attempt after a random
# share of the time that the command needs on a core: however busy the machine is, 20 of them leave some of the work to the
# last one.
KILLED = """
import contextlib, json, os, random, resource, signal, sys
from pathlib import Path

import bayesadam.cli, bayesadam.experiments.bandits
import torch._dynamo  # what torch.optim brings in with its first optimiser, otherwise in every attempt anew
from bayesadam.__main__ import main
from bayesadam.bandits.simulation import Playing

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
# The three seconds that users have are longer than an attempt lasts here.
Playing.__init__.__defaults__ = (*Playing.__init__.__defaults__[:-1], 0.0)


def attempt(name, seconds=0.0):
    # In a process of its own, which has so many seconds on a core until SIGPROF ends it; how it ended.
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        code = 1
        try:
            code = main(
                ["bandits", "--problems", "wheel:0.5", "--agents", "badam,linear,greedy", "--runs", "2", "--rounds", "400",
                 "--seed", "3", "--device", "cpu", "--out", str(folder / name), "--quiet"]
            )
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code or 0)
    return os.waitpid(child, 0)[1]


def finished():
    with contextlib.suppress(StopIteration):
        return sorted(json.loads(next((folder / "killed").glob("unfinished-*.json")).read_text()))
    return []


assert attempt("whole") == 0
used = resource.getrusage(resource.RUSAGE_CHILDREN)
whole = used.ru_utime + used.ru_stime

choose = random.Random(5)
struck = []
for _ in range(kills):
    status = attempt("killed", (0.2 + choose.random()) * whole / kills)
    assert status in (0, signal.SIGPROF), status
    if not status:
        break
    done = finished()
    states = {path.stem for path in (folder / "killed").glob("unfinished/*.safetensors")}
    half = states - {name.replace("/", "-").replace(":", "-") for name in done}
    struck.append({"finished": done, "half": sorted(half)})
if not struck or status:
    assert attempt("killed") == 0
print(json.dumps(struck), file=sys.stderr)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_command_ends_with_the_same_numbers(tmp_path):
    done = run_python(KILLED, tmp_path, KILLS)
    assert done.returncode == 0, done.stderr
    struck = json.loads(done.stderr.splitlines()[-1])
    # A core may have become faster since the undisturbed run, and the last kills have come too late.
    assert len(struck) >= KILLS / 2
    # Finished cells stay finished, and kills met cells half played.
    counts = [len(one["finished"]) for one in struck]
    assert counts == sorted(counts)
    assert sum(bool(one["half"]) for one in struck) >= KILLS / 4
    first, second = (
        json.loads((tmp_path / name / "metrics.json").read_text())["results"] for name in ("whole", "killed")
    )
    for cells in (first, second):
        for cell in cells["wheel:0.5"].values():
            cell.pop("seconds")
    assert set(first["wheel:0.5"]) == {"greedy", "linear", "badam"}
    assert second == first
    assert not list((tmp_path / "killed").glob("unfinished*"))
