"""The report: what it takes, what it runs, what it claims, and a page that needs nothing else."""

from __future__ import annotations

import json
import math
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bayesadam.errors import FileError
from experiments import cost, figure1, figure2, report, table1
from experiments.claims import CLAIMS, EXPERIMENTS, Finished, Verdict, above, judged
from experiments.figure1 import METRICS
from experiments.figure2 import FRACTIONS, VARIANTS
from experiments.report import read
from experiments.running import Sample
from experiments.table1 import OWN_AGENTS, PAPER

NASTY = "</script><script>alert(\"1\")</script><img src=x onerror='y'>&amp;"
METHODS = ("gp", "badam", "mc-dropout", "bbb", "vadam", "laplace-diagonal", "laplace-full")


# --- runs with known numbers ------------------------------------------------------------------------------------------


def regression_run(std: dict[str, tuple[float, float]] | None = None, seeds: int = 3, **settings) -> dict:
    """Every score is its own number; `std` gives (in range, outside) by method."""
    std = {m: (0.03 + 0.01 * k, 0.3 + 0.1 * k) for k, m in enumerate(METHODS)} | (std or {})
    results = {}
    for number, (method, (near, far)) in enumerate(std.items()):
        scores = {name: [number + 0.1 * k + 0.001 * s for s in range(seeds)] for k, name in enumerate(METRICS)}
        scores["std_in"] = [near + 1e-4 * s for s in range(seeds)]
        scores["std_out"] = [far + 1e-3 * s for s in range(seeds)]
        scores["std_near"] = [(near + far) / 2 + 1e-4 * s for s in range(seeds)]
        scores["std_far"] = [2 * far - (near + far) / 2 + 1e-3 * s for s in range(seeds)]
        results[method] = scores
    asked = {"methods": list(std), "n_seeds": seeds, "epochs": 20_000} | settings
    return metrics("figure1", asked, results)


def pruning_run(levels: dict[tuple[str, str], dict[float, float]], seeds: int = 3, **settings) -> dict:
    """Accuracy .98 at every fraction but those given."""
    results: dict = {}
    for (method, ranking), given in levels.items():
        rows = [[given.get(f, 0.98) - 1e-4 * s for f in FRACTIONS] for s in range(seeds)]
        results.setdefault(method, {})[ranking] = {"fractions": list(FRACTIONS), "accuracy": rows}
    asked = {"data": "mnist", "methods": list(results), "n_seeds": seeds, "epochs": 100, "hidden": [400, 400]}
    return metrics("figure2", asked | settings, results)


PRUNED = {
    ("badam", "snr"): {0.75: 0.97, 0.9: 0.95, 0.95: 0.8},
    ("badam", "magnitude"): {0.75: 0.9, 0.9: 0.3, 0.95: 0.1},
    ("mc-dropout", "magnitude"): {0.75: 0.9, 0.9: 0.3, 0.95: 0.1},
    ("bbb", "snr"): {0.75: 0.979, 0.9: 0.978, 0.95: 0.977},
    ("vadam", "snr"): {0.75: 0.5, 0.9: 0.4, 0.95: 0.3},
}


def bandits_run(rewards: dict[str, dict[str, float]], runs: int = 4, **settings) -> dict:
    results = {
        problem: {
            agent: {
                "reward_ratio": [value + 0.001 * r for r in range(runs)],
                "regret_ratio": [1 - value + 0.001 * r for r in range(runs)],
                "rounds": 200,
                "seconds": 1.0,
                "points": list(range(1, 201)),
                "regret_mean": [(1 - value) * t for t in range(1, 201)],
                "regret_sd": [0.1 * t for t in range(1, 201)],
            }
            for agent, value in agents.items()
        }
        for problem, agents in rewards.items()
    }
    asked = {"problems": list(rewards), "agents": list(next(iter(rewards.values()))), "runs": runs, "rounds": None}
    return metrics("table1", asked | {"settings": "paper"} | settings, results)


def cost_run(**changes: float) -> dict:
    """Costs under which both claims hold; a change names problem, method and measure with underscores."""
    methods = {"adam": (1.0, None, 1.0), "badam": (1.2, 0.001, 40.0), "mc-dropout": (1.2, None, 100.0)}
    methods |= {"bbb": (3.0, None, 150.0), "vadam": (2.0, None, 150.0), "laplace-diagonal": (None, 0.1, None)}
    results: dict = {}
    for problem in ("regression", "pruning"):
        for method, values in methods.items():
            pairs = zip(("step", "posterior", "prediction"), values, strict=True)
            given = {what: changes.get(f"{problem}_{method}_{what}", value) for what, value in pairs if value}
            results.setdefault(problem, {})[method] = {what: [value, value] for what, value in given.items()}
    return metrics("cost", {"data": "mnist", "rounds": 2}, results)


AS_IN_THE_PAPER = {
    p: {a: PAPER[a][p][0] for a in PAPER} for p in ("mushroom", "financial", "jester", "statlog", "adult")
}


def metrics(name: str, settings: dict, results: dict) -> dict:
    about = {"command": name, "version": "9.9", "seed": 0, "device": "cpu", "seconds": 61.0}
    return {**about, "settings": settings, "results": results}


def put(root: Path, name: str, content: dict) -> Path:
    path = root / name / "metrics.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def put_picture(root: Path, name: str) -> None:
    Figure(figsize=(1, 1)).savefig(root / name / "picture.png")


@pytest.fixture
def whole(tmp_path):
    put(tmp_path, "figure1", regression_run())
    put(tmp_path, "figure2", pruning_run(PRUNED))
    put(tmp_path, "table1", bandits_run(AS_IN_THE_PAPER, runs=3))
    put(tmp_path, "cost", cost_run())
    for name in EXPERIMENTS:
        put_picture(tmp_path, name)
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


def finished(content: dict) -> Finished:
    return Finished(content["command"], content["command"], content)


def verdicts(*contents: dict) -> dict[str, Verdict]:
    runs = {content["command"]: finished(content) for content in contents}
    return {claim.key: judged(claim, runs.get(claim.experiment)).verdict for claim in CLAIMS}


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


# --- finished runs are taken as they are ------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_runs")
def test_finished_runs_are_taken_as_they_are(whole, capsys):
    before = {path: path.read_bytes() for path in whole.rglob("metrics.json")}
    text, found = reported(whole)
    assert capsys.readouterr().out.split() == [str(whole / "report.html"), str(whole / "report.json")]
    assert {path: path.read_bytes() for path in before} == before
    assert found["command"] == "report"
    assert found["results"]["missing"] == {}
    assert ".741" in text
    assert (
        "<code>python -m experiments table1 --seed 0 --problems mushroom,financial,jester,statlog,adult --runs 3"
        in text
    )
    assert "--settings paper --device cpu</code>" in text
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


# --- what is missing is run -------------------------------------------------------------------------------------------


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
    stub("figure2", lambda s: pruning_run(PRUNED, seeds=s.n_seeds, epochs=s.epochs, data=s.data))
    stub(
        "table1",
        lambda s: bandits_run(
            {p: dict.fromkeys(s.agents, 0.5) for p in s.problems}, runs=s.runs, rounds=s.rounds, settings=s.settings
        ),
    )
    stub("cost", lambda s: cost_run())
    monkeypatch.setattr(report, "locate", lambda name, **_: {})
    monkeypatch.setattr(report, "find", lambda name: {})
    return asked


def test_what_is_missing_is_run_in_full(tmp_path, stubs):
    reported(tmp_path)
    assert [(name, given["out"]) for name, given in stubs] == [(name, tmp_path / name) for name in EXPERIMENTS]
    regression, pruning, bandits, costs = (given["settings"] for _, given in stubs)
    assert regression == figure1.Settings()
    assert costs == cost.Settings()
    assert pruning == figure2.Settings()
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
    for words in ("This is the quick version.", "500 epochs instead of 20,000", "on digits, not on MNIST", "2 runs"):
        assert words in text
    assert "Not played: mushroom." in text
    reported(tmp_path)
    assert [given["out"] for _, given in stubs[4:]] == [tmp_path / name for name in EXPERIMENTS]
    text, _ = reported(tmp_path, quick=True)
    assert len(stubs) == 8
    assert "on digits" not in text


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
    text, found = reported(tmp_path / "none")
    assert [given["out"].name for _, given in stubs] == ["figure1", "figure2", "cost"]
    assert "Could not be run: Not played: mushroom. mushroom is" in text
    assert all(c["verdict"] == "not measured" for c in found["results"]["claims"] if c["claim"].startswith("table1"))


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
    assert len(Outline(text).all("img")) == 3


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_runs")
def test_the_page_needs_nothing_else(whole):
    text, _ = reported(whole)
    outline = Outline(text)
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
    for words in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert words in text
    assert {"lang": "en-GB"} in outline.all("html")
    pictures = outline.all("img")
    assert len(pictures) == len(EXPERIMENTS)
    assert all(picture["alt"] for picture in pictures)


@pytest.mark.usefixtures("nothing_runs")
def test_what_a_file_holds_cannot_break_the_page(tmp_path):
    agents = {"badam": 0.5, NASTY: 0.6}
    nasty = bandits_run({"mushroom": agents, NASTY: agents}, settings=NASTY)
    nasty |= {"device": NASTY, "version": NASTY, "seed": NASTY}
    put(tmp_path, "table1", nasty)
    put(tmp_path, "figure1", regression_run({NASTY: (0.1, 0.2)}))
    put(tmp_path, "figure2", pruning_run({**PRUNED, (NASTY, NASTY): {}}, data=NASTY))
    put(tmp_path, "cost", metrics("cost", {"data": NASTY, "rounds": 1}, {NASTY: {NASTY: {"step": [1.0]}}}))
    outline = Outline(reported(tmp_path)[0])
    assert not outline.all("img")
    assert not [attributes for _, attributes in outline.elements if {"onerror", "onload"} & set(attributes)]
    assert not outline.all("script")
    assert any(NASTY in text for text in outline.texts)


@pytest.mark.usefixtures("nothing_runs")
def test_numbers_that_are_not_finite_are_dashes(whole):
    broken = regression_run()
    for scores in broken["results"].values():
        scores["nll_out"] = [None] * 3
    broken["results"]["vadam"]["std_in"] = [0.0] * 3
    put(whole, "figure1", broken)
    cells = bandits_run({"mushroom": {"badam": 0.5, "greedy": 0.4}})
    cells["results"]["mushroom"]["greedy"] |= {"reward_ratio": [None] * 4, "regret_mean": [None] * 200}
    put(whole, "table1", cells)
    text, _ = reported(whole)
    Outline(text)
    assert "nan" not in re.sub(r"[a-z-]*nan[a-z]+|financial", "", text.lower())
    assert "<td>–</td>" in text


# --- claims -----------------------------------------------------------------------------------------------------------


def test_above_is_two_standard_errors_of_the_difference():
    pairs = [((1.0, 1.2, 1.4), (0.9, 1.0, 1.1)), ((1.0, 1.2, 1.4), (0.7, 0.8, 0.9)), ((0.1, 0.2), (0.5, 0.9, 0.7))]
    for first, second in pairs:
        error = math.sqrt(sum(statistics.variance(s) / len(s) for s in (first, second)))
        z = (statistics.fmean(first) - statistics.fmean(second)) / error
        expected = None if abs(z) <= 2 else z > 0
        assert above(Sample(first), Sample(second)) is expected
        assert above(Sample(second), Sample(first)) is (None if expected is None else not expected)
    assert above(Sample((1.0,)), Sample((0.0,))) is None
    assert above(Sample(()), Sample((0.0, 1.0))) is None


def test_the_papers_own_table_gives_the_papers_own_claims():
    found = verdicts(bandits_run(AS_IN_THE_PAPER))
    assert found["table1-reaches"] is Verdict.HELD
    assert found["table1-bbb"] is Verdict.HELD
    assert found["table1-mc-dropout"] is Verdict.HELD
    assert found["table1-greedy"] is Verdict.HELD
    # Vadam leads on mushroom, statlog and adult, Greedy on the other two.
    assert found["table1-vadam"] is Verdict.HELD


def test_claims_about_rewards_turn_with_the_numbers():
    turned = {p: {**agents, "badam": agents["bbb"] - 0.2, "vadam": -1.0} for p, agents in AS_IN_THE_PAPER.items()}
    found = verdicts(bandits_run(turned))
    for key in ("table1-reaches", "table1-bbb", "table1-mc-dropout", "table1-greedy", "table1-vadam"):
        assert found[key] is Verdict.FAILED
    mixed = AS_IN_THE_PAPER | {"mushroom": {**AS_IN_THE_PAPER["mushroom"], "badam": 0.1}}
    assert verdicts(bandits_run(mixed))["table1-bbb"] is Verdict.PARTLY
    one = verdicts(bandits_run(AS_IN_THE_PAPER, runs=1))
    assert one["table1-bbb"] is Verdict.OPEN
    # The Showdown's agents are the paper's.
    agents = {"badam": 0.5, "bbb": 0.9, "bbb-showdown": 0.1, "greedy": 0.9, "greedy-showdown": 0.1}
    found = verdicts(bandits_run({"mushroom": agents}))
    assert (found["table1-bbb"], found["table1-greedy"]) == (Verdict.HELD, Verdict.HELD)


def test_claims_about_pruning():
    found = verdicts(pruning_run(PRUNED))
    assert found["figure2-beats-magnitude"] is Verdict.HELD
    # Bayes by Backprop loses less, the two others more: Badam does not lose least.
    assert found["figure2-most-robust"] is Verdict.FAILED
    assert found["figure2-accurate"] is Verdict.HELD
    best = {**PRUNED, ("bbb", "snr"): PRUNED["vadam", "snr"]}
    assert verdicts(pruning_run(best))["figure2-most-robust"] is Verdict.HELD
    poor = {**PRUNED, ("badam", "snr"): {**PRUNED["badam", "magnitude"], 0.0: 0.97}, ("badam", "magnitude"): {}}
    found = verdicts(pruning_run(poor))
    assert found["figure2-beats-magnitude"] is Verdict.FAILED
    assert found["figure2-accurate"] is Verdict.FAILED
    just = {**PRUNED, ("badam", "snr"): {**PRUNED["badam", "snr"], 0.0: 0.979}}
    assert verdicts(pruning_run(just))["figure2-accurate"] is Verdict.HELD
    just["badam", "snr"][0.0] = 0.977
    assert verdicts(pruning_run(just))["figure2-accurate"] is Verdict.FAILED
    assert verdicts(pruning_run(PRUNED, data="digits"))["figure2-accurate"] is Verdict.UNMEASURED
    assert verdicts(pruning_run({("badam", "snr"): {}}))["figure2-accurate"] is Verdict.UNMEASURED


def test_claims_about_the_toy_regression():
    std = {
        "gp": (0.01, 0.1),
        "badam": (0.02, 0.12),
        "mc-dropout": (0.03, 0.1),
        "bbb": (0.04, 0.04),
        "vadam": (0.05, 0.04),
        "laplace-diagonal": (0.03, 0.2),
        "laplace-full": (0.015, 0.09),
    }
    keys = ("figure1-widens", "figure1-mass-near-data", "figure1-like-laplace", "figure1-variational-narrow")
    found = verdicts(regression_run(std))
    assert {found[key] for key in keys} == {Verdict.HELD}
    turned = {"badam": (0.1, 0.05), "bbb": (0.04, 0.5), "vadam": (0.05, 0.3), "laplace-diagonal": (0.1, 0.2)}
    found = verdicts(regression_run(std | turned))
    assert {found[key] for key in keys} == {Verdict.FAILED}
    # One method that is clearly tighter refutes the claim to be the tightest.
    tighter = verdicts(regression_run(std | {"bbb": (0.01, 0.04)}))
    assert tighter["figure1-mass-near-data"] is Verdict.FAILED
    # Like the diagonal Laplace's, unlike the full one's.
    assert verdicts(regression_run(std | {"laplace-full": (0.01, 0.3)}))["figure1-like-laplace"] is Verdict.PARTLY


@pytest.mark.parametrize(("worst", "verdict"), [(-0.5, Verdict.HELD), (-1.05, Verdict.FAILED), (-1.2, Verdict.FAILED)])
def test_vadam_is_sensitive_where_its_worst_precision_is_clearly_worse(worst, verdict):
    content = regression_run()
    assert verdicts(content)["figure1-vadam-sensitive"] is Verdict.UNMEASURED
    for name, nll in (("vadam", -1.1), ("vadam-precision-10", worst), ("vadam-precision-100", -1.1)):
        content["results"][name] = content["results"]["vadam"] | {"nll_in": [nll, nll + 0.01, nll - 0.01]}
    assert verdicts(content)["figure1-vadam-sensitive"] is verdict


def test_the_settings_are_best_where_no_other_keeps_more():
    worse = {(name, "snr"): {0.75: 0.9, 0.9: 0.9, 0.95: 0.7} for name in VARIANTS}
    assert verdicts(pruning_run(PRUNED))["figure2-settings"] is Verdict.UNMEASURED
    assert verdicts(pruning_run(PRUNED | worse))["figure2-settings"] is Verdict.HELD
    claim = next(claim for claim in CLAIMS if claim.key == "figure2-settings")
    assert {check[2].partition("/")[0] for check in claim.checks} == set(VARIANTS)
    better = worse | {("badam-l2-1e-05", "snr"): {0.75: 0.9, 0.9: 0.96, 0.95: 0.7}}
    assert verdicts(pruning_run(PRUNED | better))["figure2-settings"] is Verdict.PARTLY
    every = {(name, "snr"): {0.75: 0.975, 0.9: 0.96, 0.95: 0.9} for name in VARIANTS}
    assert verdicts(pruning_run(PRUNED | every))["figure2-settings"] is Verdict.FAILED
    # Badam with other settings is not another method.
    found = verdicts(pruning_run(PRUNED | {("badam-l2-1e-05", "snr"): {0.0: 0.999}}))
    assert found["figure2-accurate"] is Verdict.HELD


def test_claims_about_costs():
    def found(**changes: float) -> tuple[Verdict, Verdict]:
        every = verdicts(cost_run(**changes))
        return every["cost-variational"], every["cost-badam"]

    assert found() == (Verdict.HELD, Verdict.HELD)
    assert found(regression_bbb_step=1.7) == (Verdict.PARTLY, Verdict.HELD)
    assert found(pruning_badam_prediction=111.0) == (Verdict.HELD, Verdict.PARTLY)
    assert found(pruning_badam_posterior=0.011) == (Verdict.HELD, Verdict.PARTLY)
    rules = {f"{p}_{m}_step": 1.1 for p in ("regression", "pruning") for m in ("bbb", "vadam")}
    assert found(**rules) == (Verdict.FAILED, Verdict.HELD)


def test_a_verdict_says_what_decides_it():
    claim = next(claim for claim in CLAIMS if claim.key == "table1-bbb")
    mixed = {p: dict(agents) for p, agents in AS_IN_THE_PAPER.items()} | {"census:1000": {"badam": 0.1, "bbb": 0.9}}
    mixed["mushroom"]["badam"] = 0.1
    found = judged(claim, finished(bandits_run(mixed)))
    assert found.verdict is Verdict.PARTLY
    assert found.decided_by == "4 of 5 came out as claimed; against it mushroom: .102 against .601."
    # A part of a table is shown alone.
    assert [check.counts for check in found.checks] == [True] * 5 + [False] + [False] * 6
    assert judged(claim, finished(bandits_run(AS_IN_THE_PAPER, runs=1))).decided_by.endswith(
        "within two standard errors."
    )
    assert judged(claim, None).decided_by == ""


def test_a_claim_about_the_table_holds_only_with_the_papers_own_settings():
    reaches = next(claim for claim in CLAIMS if claim.key == "table1-reaches")
    tuned, paper = (finished(bandits_run(AS_IN_THE_PAPER, settings=settings)) for settings in ("tuned", "paper"))
    assert judged(reaches, tuned).verdict is Verdict.PARTLY
    assert judged(reaches, paper).verdict is Verdict.HELD
    assert len(judged(reaches, paper).checks) == len(AS_IN_THE_PAPER)


def test_a_shorter_run_shows_its_checks_and_judges_nothing():
    claim = next(claim for claim in CLAIMS if claim.key == "figure1-widens")
    assert judged(claim, finished(regression_run(seeds=5))).reservation == ""
    fewer = judged(claim, finished(regression_run(seeds=2)))
    assert (fewer.verdict, fewer.reservation) == (Verdict.HELD, "2 seeds instead of 5")
    short = judged(claim, finished(regression_run(epochs=500, seeds=2)))
    assert short.reservation == "500 epochs instead of 20,000, 2 seeds instead of 5"
    assert (short.verdict, [check.passed for check in short.checks][:2]) == (Verdict.SHORT, [True, True])
    claim = next(claim for claim in CLAIMS if claim.key == "table1-greedy")
    short = judged(claim, finished(bandits_run(AS_IN_THE_PAPER, rounds=400, settings="tuned")))
    assert short.reservation == "with our own settings, tuned, 400 rounds, 4 runs instead of 10"
    assert short.verdict is Verdict.SHORT
