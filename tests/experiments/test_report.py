"""The report: what it takes, what it runs, and a page that needs nothing else."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bayesadam.errors import FileError
from experiments import cost, figure1, figure2, report, table1
from experiments.figure1 import METRICS
from experiments.figure2 import FRACTIONS
from experiments.report import EXPERIMENTS, read
from experiments.table1 import OWN_AGENTS, PAPER

NASTY = "</script><script>alert(\"1\")</script><img src=x onerror='y'>&amp;"


def metrics(name: str, settings: dict, results: dict) -> dict:
    about = {"command": name, "version": "9.9", "seed": 0, "device": "cpu", "seconds": 61.0}
    return {**about, "settings": settings, "results": results}


def regression_run(*methods: str, seeds: int = 3, **settings) -> dict:
    results = {m: {name: [0.1 * s for s in range(seeds)] for name in METRICS} for m in ("gp", "badam", *methods)}
    return metrics("figure1", {"methods": list(results), "n_seeds": seeds, "epochs": 20_000} | settings, results)


def pruning_run(*methods: str, seeds: int = 3, **settings) -> dict:
    curve = {"fractions": list(FRACTIONS), "accuracy": seeds * [[0.98] * len(FRACTIONS)]}
    asked = {"data": "mnist", "methods": list(methods), "n_seeds": seeds, "epochs": 100, "hidden": [400, 400]}
    return metrics("figure2", asked | settings, {m: dict.fromkeys(("snr", m), curve) for m in methods})


def bandits_run(rewards: dict[str, dict[str, float]], runs: int = 3, **settings) -> dict:
    def cell(value: float) -> dict:
        return {"reward_ratio": [value + 0.001 * r for r in range(runs)], "regret_ratio": [0.5] * runs, "rounds": 200}

    results = {problem: {agent: cell(value) for agent, value in of.items()} for problem, of in rewards.items()}
    asked = {"problems": list(rewards), "agents": list(next(iter(rewards.values()))), "runs": runs, "rounds": None}
    return metrics("table1", asked | {"settings": "paper"} | settings, results)


def cost_run(name: str = "badam", **settings) -> dict:
    return metrics("cost", {"data": "mnist", "rounds": 2} | settings, {"regression": {name: {"step": [1.0, 1.1]}}})


def put(root: Path, name: str, content: dict) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "metrics.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def whole(tmp_path):
    as_in_the_paper = {p: {a: PAPER[a][p][0] for a in PAPER} for p in ("mushroom", "jester")}
    for content in (regression_run(), pruning_run("badam"), bandits_run(as_in_the_paper), cost_run()):
        put(tmp_path, content["command"], content)
        Figure(figsize=(1, 1)).savefig(tmp_path / content["command"] / "picture.png")
    return tmp_path


@pytest.fixture
def nothing_runs(monkeypatch):
    def refuse(**asked):
        raise AssertionError(f"was run: {asked}")

    for name in EXPERIMENTS:
        monkeypatch.setattr(f"experiments.{name}.run", refuse)


def reported(root: Path, *, quick: bool = False) -> tuple[str, dict]:
    report.run(seed=0, out=root, quiet=True, quick=quick, device="cpu")
    return (root / "report.html").read_text(encoding="utf-8"), json.loads((root / "report.json").read_text())


@pytest.mark.usefixtures("nothing_runs")
def test_finished_runs_are_taken_as_they_are_and_the_page_needs_nothing_else(whole, capsys):
    put(whole, "table1-more", bandits_run({"mushroom": {"badam": 0.123}}))
    before = {path: path.read_bytes() for path in whole.rglob("metrics.json")}
    text, found = reported(whole)
    assert capsys.readouterr().out.split() == [str(whole / "report.html"), str(whole / "report.json")]
    assert {path: path.read_bytes() for path in before} == before
    assert (found["command"], found["results"]["missing"]) == ("report", {})
    command = "python -m experiments table1 --seed 0 --problems mushroom,jester --runs 3 --settings paper --device cpu"
    assert {"file": "table1/metrics.json", "command": command} in found["results"]["runs"]
    assert all(words in text for words in (f"<code>{command}</code>", ".741", "Also run: table1-more"))
    links, ids = re.findall(r'(?:src|href)="([^"]*)"', text), re.findall(r'\bid="([^"]*)"', text)
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert len(set(ids)) == len(ids)
    assert not re.search(r"@import|url\((?!#)|https?:|<(link|iframe|object|embed|base|form|script)\b", text)
    assert "content=\"default-src 'none';" in text
    assert text.count("<img ") == text.count(' alt="') == len(EXPERIMENTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a run's metrics"),
        ("[]", "not a run's metrics"),
        (json.dumps({"command": "demo"}), "`demo`, not table1"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path, content, message):
    (tmp_path / "table1").mkdir()
    (tmp_path / "table1" / "metrics.json").write_text(content)
    with pytest.raises(FileError, match=re.escape(message)) as caught:
        read(tmp_path, "table1", "table1")
    assert str(tmp_path / "table1" / "metrics.json") in str(caught.value)


@pytest.fixture
def stubs(monkeypatch):
    """Runs that note what they were asked and write a finished run; all data are there."""
    asked: list[tuple[str, dict]] = []

    def stub(name, make):
        def run(**given):
            asked.append((name, given))
            put(given["out"].parent, given["out"].name, make(given["settings"]))

        monkeypatch.setattr(f"experiments.{name}.run", run)

    stub("figure1", lambda s: regression_run(seeds=s.n_seeds, epochs=s.epochs))
    stub("figure2", lambda s: pruning_run("badam", seeds=s.n_seeds, epochs=s.epochs, data=s.data))
    stub("table1", lambda s: bandits_run({p: dict.fromkeys(s.agents, 0.5) for p in s.problems}, runs=s.runs))
    stub("cost", lambda s: cost_run())
    monkeypatch.setattr(report, "locate", lambda name, **_: {})
    monkeypatch.setattr(report, "find", lambda name: {})
    return asked


def test_what_is_missing_is_run_in_full_and_the_quick_version_stands_apart(tmp_path, stubs):
    text, _ = reported(tmp_path, quick=True)
    assert [(name, given["out"]) for name, given in stubs] == [(n, tmp_path / "quick" / n) for n in EXPERIMENTS]
    regression, pruning, bandits, costs = (given["settings"] for _, given in stubs)
    assert (regression.epochs, pruning.data, costs.data) == (500, "digits", "digits")
    # Nothing is fetched: the problem whose files are absent is not played, the embedded one is.
    assert bandits.problems == ("wheel",)
    for words in ("This is the quick version:", "--epochs 500", "--data digits", "Not played: mushroom."):
        assert words in text
    stubs.clear()
    reported(tmp_path)
    assert [given["out"] for _, given in stubs] == [tmp_path / name for name in EXPERIMENTS]
    regression, pruning, bandits, costs = (given["settings"] for _, given in stubs)
    assert (regression, pruning, costs) == (figure1.Settings(), figure2.Settings(), cost.Settings())
    assert bandits == table1.Settings(agents=OWN_AGENTS, settings="paper")
    # The whole census is large, and fetched by name alone.
    assert "census" not in bandits.problems
    text, _ = reported(tmp_path, quick=True)
    assert len(stubs) == len(EXPERIMENTS)
    assert "--data digits" not in text


def test_absent_data_are_named_and_never_swapped(tmp_path, stubs, monkeypatch):
    absent = {"jester"}

    def locate(name, **_):
        if name in absent:
            raise FileError(f"{name} is <nowhere>")
        return {}

    monkeypatch.setattr(report, "locate", locate)
    text, _ = reported(tmp_path / "some")
    assert stubs[2][1]["settings"].problems == ("mushroom", "financial", "statlog", "adult", "covertype", "census:1000")
    assert "Not played: jester. jester is &lt;nowhere&gt;" in text
    absent |= {"mushroom", "financial", "statlog", "adult", "covertype", "census-1000"}
    stubs.clear()
    text, _ = reported(tmp_path / "none")
    assert [given["out"].name for _, given in stubs] == ["figure1", "figure2", "cost"]
    assert "Could not be run: Not played: mushroom. mushroom is" in text


@pytest.mark.slow
def test_a_real_run_from_nothing_to_the_page(tmp_path, monkeypatch):
    small = {
        "figure1": figure1.Settings(methods=("map",), n_seeds=2, epochs=2, n_test=20),
        "figure2": figure2.Settings(data="digits", methods=("badam",), n_seeds=2, epochs=1, hidden=(8,)),
        "table1": table1.Settings(("wheel",), ("badam", "uniform"), runs=2, rounds=40),
        "cost": cost.Settings("digits", rounds=1),
    }
    monkeypatch.setattr(report, "QUICK_SETTINGS", small)
    text, found = reported(tmp_path, quick=True)
    assert [run["file"] for run in found["results"]["runs"]] == [f"quick/{name}/metrics.json" for name in EXPERIMENTS]
    assert "wheel" in text
    assert text.count("<img ") == 2


@pytest.mark.usefixtures("nothing_runs")
def test_what_a_file_holds_cannot_break_the_page_and_what_is_not_finite_is_a_dash(tmp_path):
    agents = {"badam": 0.5, NASTY: 0.6, "greedy": 0.4}
    nasty = bandits_run({"mushroom": agents, NASTY: agents}, settings=NASTY)
    nasty["results"]["mushroom"]["greedy"]["reward_ratio"] = [None] * 3
    put(tmp_path, "table1", nasty | {"device": NASTY, "version": NASTY, "seed": NASTY})
    regression = regression_run(NASTY)
    regression["results"]["badam"] |= {"nll_out": [None] * 3, "std_in": [0.0] * 3}
    put(tmp_path, "figure1", regression)
    put(tmp_path, "figure2", pruning_run("badam", NASTY, data=NASTY))
    put(tmp_path, "cost", cost_run(NASTY, data=NASTY))
    text, _ = reported(tmp_path)
    assert not re.search(r"<(img|script)\b", text)
    assert "&lt;script&gt;alert(" in text
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z]+|financial", "", text.lower())
    assert "<td>–</td>" in text
