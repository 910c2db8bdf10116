"""Every peer can be imported, and every benchmark runs at its smallest size: `make peers-test`, in the peers'
environment.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# `house.py` measures the source, not the software.
SCRIPTS = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if "\ndef main()" in path.read_text(encoding="utf-8") and path.stem != "house"
)
# Those that do something else altogether by an option, which is then in the name of their results.
RUNS = [*((script,) for script in SCRIPTS), ("tabular", "--made-up-gaps"), ("lora", "--text")]
PEERS = {
    ("doubt",): "laplace",
    ("predict",): "laplace",
    ("step",): "ivon",
    ("structures",): "laplace",
    ("tabular", "--made-up-gaps"): "laplace",
}
LIMIT = 1800


def run(script: str, *options: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own, after the statement `before`."""
    path = HERE / f"{script}.py"
    code = (
        f"import runpy, sys\nsys.path.insert(0, {str(HERE)!r})\n{before}\nrunpy.run_path({str(path)!r}, "
        "run_name='__main__')"
    )
    command = [sys.executable, *(["-c", code] if before else [path]), "--quick", *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "ivon",
        "vowpalwabbit",
        "mabwiser.mab",
        "calvera.bandits",
        "laplace",
        "laplace.curvature",
        "asdl",
        "backpack",
        "curvlinops",
        "torchmetrics",
        "ngboost",
        "river.drift",
    ],
)
def test_peers_can_be_imported(module):
    importlib.import_module(module)


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_benchmarks_run_and_end_with_a_number(command, tmp_path):
    done = run(*command, "--out", tmp_path)
    if done.returncode and ("no source delivered it" in done.stderr or "NoData: " in done.stderr):
        pytest.skip(f"{done.stderr.splitlines()[-1]}; set BAYESADAM_DATA")
    assert done.returncode == 0, done.stderr[-4000:]
    name = "".join(command).replace("--", "-")
    assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert re.search(r"\d", done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", PEERS, ids=" ".join)
def test_a_comparison_without_its_peer_fails(command, tmp_path):
    done = run(*command, "--out", tmp_path, before=f"sys.modules[{PEERS[command]!r}] = None")
    assert done.returncode == 1
    assert "nothing to compare with" in done.stderr
    assert not list(tmp_path.iterdir())


def test_bandits_go_on_without_a_rival(tmp_path):
    done = run(
        "bandits",
        "--rivals",
        "Vowpal Wabbit",
        "mabwiser LinUCB",
        "--out",
        tmp_path,
        before="sys.modules['vowpalwabbit'] = None",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Vowpal Wabbit is left out: vowpalwabbit cannot be imported" in done.stdout
    assert "| mabwiser LinUCB, best |" in (tmp_path / "bandits.md").read_text(encoding="utf-8")


def test_bandits_alone_resume(tmp_path):
    told = [run("bandits", "--alone", "--agents", "linear", "--out", tmp_path).stdout for _ in range(2)]
    assert "wine, linear: " in told[0]
    assert "wine, linear: " not in told[1]
    assert "| linear | " in told[1]


@pytest.mark.parametrize("data", ["mnist", "text"])
def test_doubt_resumes_and_reports(data, tmp_path):
    command = ("doubt", "--alone", "--data", data, "--out", tmp_path)
    assert "no cell is finished" in run(*command, "--report").stderr
    first, second = run(*command, "--seeds", 0), run(*command, "--seeds", 0, 1)
    assert first.returncode == 0, first.stderr[-4000:]
    assert second.returncode == 0, second.stderr[-4000:]
    assert first.stdout.count(" trained or loaded in ") == 1
    assert second.stdout.count(" trained or loaded in ") == 2
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((tmp_path / "doubt").glob("*.json"))]
    assert [cell["seed"] for cell in cells] == [0, 1, "all"]
    (rows,) = json.loads((tmp_path / "doubt.json").read_text(encoding="utf-8"))["results"].values()
    assert rows["ours, held-out inputs"]["networks"] == 2
    shifted = cells[0]["rows"]["ours, held-out inputs"]["shifted"]
    assert [len(strengths) for strengths in shifted.values()] == [4] * 6
    assert "cost" not in cells[1]["rows"]["network alone"]
    timed = run(*command, "--seeds", 0, 1, "--costs")
    assert timed.returncode == 0, timed.stderr[-4000:]
    last = run(*command, "--report").stdout
    assert "4 cells" in last
    assert "| ensemble | " in (tmp_path / "doubt.md").read_text(encoding="utf-8")


def test_a_stopped_search_resumes_and_all_of_a_kind_draw_the_same_settings(tmp_path):
    out = ("--out", tmp_path)
    assert "no search is finished" in run("tune_bandits", *out, "--report").stderr
    first = run("tune_bandits", *out, "--agents", "vadam", "bbb")
    assert first.returncode == 0, first.stderr[-4000:]
    results = tmp_path / "tune_bandits.json"
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found["agents"]["vadam"]["space"] == found["agents"]["bbb"]["space"]
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "tune_bandits").rglob("*.json")}
    lost = tmp_path / "tune_bandits" / "bbb" / "tuned-wheel-0.5-1.json"
    lost.unlink()
    assert "1 of 2 searches" in run("tune_bandits", *out, "--agents", "vadam", "bbb", "--report").stdout
    run("tune_bandits", *out, "--agents", "vadam", "bbb")
    assert {path for path, before in cells.items() if path.stat().st_mtime_ns != before} == {lost}
    assert json.loads(results.read_text(encoding="utf-8")) == found
