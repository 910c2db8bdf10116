"""The report: what it takes, what it runs, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
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
AS_IN_THE_PAPER = {p: {a: PAPER[a][p][0] for a in PAPER} for p in ("mushroom", "jester")}


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
        curves = {"points": [1, 2], "regret_mean": [0.5, 1.0], "regret_sd": [0.1, 0.2], "rounds": 200, "seconds": 1.0}
        return {"reward_ratio": [value + 0.001 * r for r in range(runs)], "regret_ratio": [0.5] * runs, **curves}

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
    runs = regression_run(), pruning_run("badam"), bandits_run(AS_IN_THE_PAPER), cost_run()
    for content in runs:
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


class Outline(HTMLParser):
    """Elements and text, and a complaint where an end tag is missing or wrong."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.mark.usefixtures("nothing_runs")
def test_finished_runs_are_taken_as_they_are(whole, capsys):
    put(whole, "table1-more", bandits_run({"mushroom": {"badam": 0.123}}))
    before = {path: path.read_bytes() for path in whole.rglob("metrics.json")}
    text, found = reported(whole)
    assert capsys.readouterr().out.split() == [str(whole / "report.html"), str(whole / "report.json")]
    assert {path: path.read_bytes() for path in before} == before
    assert (found["command"], found["results"]["missing"]) == ("report", {})
    command = "python -m experiments table1 --seed 0 --problems mushroom,jester --runs 3 --settings paper --device cpu"
    assert f"<code>{command}</code>" in text
    assert {"file": "table1/metrics.json", "command": command} in found["results"]["runs"]
    assert ".741" in text
    assert "Also run: table1-more" in text
    assert not list(whole.glob(".report*"))


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


def test_what_is_missing_is_run_in_full(tmp_path, stubs):
    reported(tmp_path)
    assert [(name, given["out"]) for name, given in stubs] == [(name, tmp_path / name) for name in EXPERIMENTS]
    regression, pruning, bandits, costs = (given["settings"] for _, given in stubs)
    assert (regression, pruning, costs) == (figure1.Settings(), figure2.Settings(), cost.Settings())
    assert bandits == table1.Settings(agents=OWN_AGENTS, settings="paper")
    # The whole census is large, and fetched by name alone.
    assert "census" not in bandits.problems
    reported(tmp_path)
    assert len(stubs) == len(EXPERIMENTS)


def test_the_quick_version_stands_apart_and_says_so(tmp_path, stubs):
    text, _ = reported(tmp_path, quick=True)
    assert [given["out"] for _, given in stubs] == [tmp_path / "quick" / name for name in EXPERIMENTS]
    regression, pruning, bandits, costs = (given["settings"] for _, given in stubs)
    assert regression.epochs == 500
    assert pruning.data == costs.data == "digits"
    # Nothing is fetched: the problem whose files are absent is not played, the embedded one is.
    assert bandits.problems == ("wheel",)
    for words in ("This is the quick version:", "--epochs 500", "--data digits", "Not played: mushroom."):
        assert words in text
    reported(tmp_path)
    assert [given["out"] for _, given in stubs[4:]] == [tmp_path / name for name in EXPERIMENTS]
    text, _ = reported(tmp_path, quick=True)
    assert len(stubs) == 8
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
    assert len(Outline(text).all("img")) == 2


@pytest.mark.usefixtures("nothing_runs")
def test_the_page_needs_nothing_else(whole):
    outline = Outline(text := reported(whole)[0])
    links = [value for _, attributes in outline.elements for key, value in attributes.items() if key in ("src", "href")]
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert len(set(ids)) == len(ids)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {name for name, _ in outline.elements}
    assert not re.search(r"@import|url\((?!#)|https?:", text)
    policy = next(m["content"] for m in outline.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert {"lang": "en-GB"} in outline.all("html")
    pictures = outline.all("img")
    assert len(pictures) == len(EXPERIMENTS)
    assert all(picture["alt"] for picture in pictures)


@pytest.mark.usefixtures("nothing_runs")
def test_what_a_file_holds_cannot_break_the_page(tmp_path):
    agents = {"badam": 0.5, NASTY: 0.6}
    nasty = bandits_run({"mushroom": agents, NASTY: agents}, settings=NASTY)
    put(tmp_path, "table1", nasty | {"device": NASTY, "version": NASTY, "seed": NASTY})
    put(tmp_path, "figure1", regression_run(NASTY))
    put(tmp_path, "figure2", pruning_run("badam", NASTY, data=NASTY))
    put(tmp_path, "cost", cost_run(NASTY, data=NASTY))
    outline = Outline(reported(tmp_path)[0])
    assert not outline.all("img")
    assert not [attributes for _, attributes in outline.elements if {"onerror", "onload"} & set(attributes)]
    assert not outline.all("script")
    assert any(NASTY in text for text in outline.texts)


@pytest.mark.usefixtures("nothing_runs")
def test_numbers_that_are_not_finite_are_dashes(whole):
    broken = regression_run()
    broken["results"]["badam"] |= {"nll_out": [None] * 3, "std_in": [0.0] * 3}
    put(whole, "figure1", broken)
    cells = bandits_run({"mushroom": {"badam": 0.5, "greedy": 0.4}})
    cells["results"]["mushroom"]["greedy"] |= {"reward_ratio": [None] * 3, "regret_mean": [None] * 2}
    put(whole, "table1", cells)
    text, _ = reported(whole)
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z]+|financial", "", text.lower())
    assert "<td>–</td>" in text
