"""Every peer can be imported, and every benchmark runs at its smallest size: `make peers-test`, in the peers'
environment.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = sorted(
    ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
    for path in HERE.glob("*/*.py")
    # `make science-test` runs those of models from the package index, `make wild` those of other libraries.
    if "\ndef main()" in path.read_text(encoding="utf-8") and path.parent.name not in ("science", "checkpoints")
)
PEERS = {"benchmarks.doubt.run": "laplace", "benchmarks.speed.training": "ivon", "benchmarks.tables.run": "ngboost"}
MODULES = ("ivon", "vowpalwabbit", "mabwiser.mab", "calvera.bandits", "laplace", "laplace.curvature", "asdl")
MODULES += ("backpack", "curvlinops", "torchmetrics", "ngboost", "catboost")


def run(module: str, *options: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own, after the statement `before`."""
    code = f"import runpy, sys\n{before}\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    command = [sys.executable, *(["-c", code] if before else ["-m", module]), "--quick", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=HERE.parent)


@pytest.mark.parametrize("module", MODULES)
def test_peers_can_be_imported(module):
    importlib.import_module(module)


@pytest.mark.parametrize("module", SCRIPTS)
def test_benchmarks_run_write_a_file_and_end_with_a_number(module, tmp_path):
    done = run(module, "--out", tmp_path)
    if done.returncode and "no source delivered it" in done.stderr:
        pytest.skip(f"{done.stderr.splitlines()[-1]}; set BAYESADAM_DATA")
    assert done.returncode == 0, done.stderr[-4000:]
    assert any(path.stat().st_size for path in tmp_path.glob("*.*"))
    assert re.search(r"\d|png", done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", PEERS)
def test_a_comparison_without_its_peer_fails(module, tmp_path):
    done = run(module, "--out", tmp_path, before=f"sys.modules[{PEERS[module]!r}] = None")
    assert done.returncode == 1
    assert "nothing to compare with" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_scoreboard_of_doubt_resumes(tmp_path):
    command = ("benchmarks.doubt.run", "--alone", "--data", "mnist", "--out", tmp_path)
    assert "no cell is finished" in run(*command, "--report").stderr
    first, second = run(*command, "--seeds", 0), run(*command, "--seeds", 0, 1)
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr + second.stderr)[-4000:]
    assert "mnist-lenet-0, seed 0" in first.stdout
    assert "mnist-lenet-0, seed 0" not in second.stdout
    assert "3 cells" in run(*command, "--report").stdout
    assert "| ensemble | " in (tmp_path / "doubt.md").read_text(encoding="utf-8")
