"""A command in a process of its own that is killed resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bayesadam.paper.regression import RegressionSettings, run_regression
from processes import PATIENCE, SOURCE, eventually

# The first method is real, the second never ends: the kill cannot come too late.
STALLED = """
import sys
import time
from bayesadam.__main__ import main
from bayesadam.paper import regression
regression.METHODS = {**regression.METHODS, "bbb": lambda problem: time.sleep(10**6)}
sys.exit(main(sys.argv[1:]))
"""


def ledger_in(folder: Path) -> dict[str, object]:
    for path in folder.glob("unfinished-*.json"):
        return json.loads(path.read_text())
    return {}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_killed_run_ends_with_the_numbers_of_one_left_alone(tmp_path):
    settings = RegressionSettings(methods=("badam", "bbb"), n_seeds=2, epochs=200)
    options = ["--methods", "badam,bbb", "--seeds", "2", "--epochs", "200", "--quiet"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, "regression", *options, "--out", str(cut)],
        env={**os.environ, "PYTHONPATH": SOURCE},
    ) as process:
        try:
            eventually(lambda: process.poll() is not None or "badam" in ledger_in(cut), "a finished method")
        finally:
            process.kill()
        assert process.wait(timeout=PATIENCE) == -signal.SIGKILL
    kept = ledger_in(cut)
    assert set(kept) == {"badam", "seconds"}
    for out in (cut, whole):
        run_regression(seed=0, out=out, quiet=True, settings=settings)
    first, second = (json.loads((out / "metrics.json").read_text()) for out in (whole, cut))
    assert second["results"] == first["results"]
    assert second["results"]["badam"] == kept["badam"]["scores"]
    assert second["seconds"] > kept["seconds"]
