"""Table 1's command in small: its files, its numbers against `simulate`, stopping and resuming."""

import json
from dataclasses import asdict

import pytest

from experiments import simulate, table1
from experiments.__main__ import main
from experiments.table1 import Settings, run
from floats import approx

SMALL = Settings(problems=("wheel:0.5", "wheel:0.9"), agents=("linear", "uniform"), runs=2, rounds=60)


def given(out, **changes):
    return {"seed": 4, "out": out, "quiet": True, "settings": SMALL, "device": "cpu", **changes}


def test_the_cells_are_those_of_simulate(tmp_path):
    paths = run(**given(tmp_path))
    assert {path.name for path in paths} == {"table1.md", "metrics.json"}
    results = json.loads((tmp_path / "metrics.json").read_text())["results"]
    for problem in SMALL.problems:
        for agent in SMALL.agents:
            expected = simulate(problem, agent, runs=2, rounds=60, seed=4, device="cpu")
            assert results[problem][agent]["reward_ratio"] == approx(expected.reward_ratio.tolist())
            assert results[problem][agent]["regret_ratio"] == approx(expected.regret_ratio.tolist())
            assert results[problem][agent]["lost"] == expected.lost.tolist()
    assert not list(tmp_path.glob("unfinished*"))


def test_the_best_of_each_column_is_bold_and_the_papers_numbers_stand_next_to_them(tmp_path):
    cells = {
        f"{problem}/{agent}": {
            "reward_ratio": [value, value - 0.2],
            "regret_ratio": [0.25, 0.35],
            "lost": [False, lost],
        }
        for problem, agent, value, lost in (("mushroom", "badam", 0.9, False), ("mushroom", "greedy", 0.2, True))
    }
    settings = asdict(Settings(problems=("mushroom",), agents=("badam", "greedy"), runs=2))
    text = table1.table(table1.by_problem(cells), settings).markdown()
    assert "| Badam | **.800** ± .141 (.100; .700) |" in text
    assert "| Greedy | .100 ± .141 (.100; .000, 1 lost) |" in text
    assert "| *in the paper* | .74 ± .09 |" in text


@pytest.mark.parametrize(
    "bad", [["--problems", "luck"], ["--agents", "luck"], ["--settings", "mine"], ["--device", "tpu"]], ids=str
)
def test_bad_options_are_named(bad, tmp_path, capsys):
    base = ["table1", "--problems", "wheel", "--agents", "uniform", "--rounds", "20", "--out", str(tmp_path)]
    assert main([*base, *bad]) == 2
    assert capsys.readouterr().err.startswith("experiments: ")


def test_the_papers_numbers_stand_below_the_showdowns_agents():
    cells = {f"census:1000/{agent}": {"reward_ratio": [0.3, 0.4]} for agent in ("bbb-showdown", "bbb")}
    asked = Settings(problems=("census:1000",), agents=("bbb-showdown", "bbb"), runs=2, settings="paper")
    rows = table1.table(table1.by_problem(cells), asdict(asked)).rows
    assert [row[0] for row in rows] == ["Bayes by Backprop, as the Showdown", "*in the paper*", "Bayes by Backprop"]
    assert rows[1][1] == ".38 ± .02"
