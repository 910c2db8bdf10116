"""The problems are made by their seeds alone, rivals learn, and the tables are those of the documentation."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bandits import speed
from benchmarks.bandits.problems import stranger
from benchmarks.bandits.rivals import RIVALS, play
from benchmarks.bandits.strangers import REPORTED, ranks, report, scores, shares
from experiments import classification_problem
from experiments.problems import Rounds

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["iris", "linear-26", "sales", "heavy-tailed"])
def test_a_shorter_run_is_the_beginning_of_a_longer_one(name):
    short, long = (stranger(name).run(3, rounds) for rounds in (40, 400))
    for part in ("contexts", "rewards", "expected"):
        np.testing.assert_allclose(getattr(short, part), getattr(long, part)[:40], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_learn(name):
    pytest.importorskip(RIVALS[name].module)
    random = np.random.default_rng(0)
    labels = random.integers(3, size=300)
    clusters = classification_problem(np.eye(3)[labels] * 4 + 0.3 * random.standard_normal((300, 3)), labels)
    rounds, makes = clusters.run(0), list(RIVALS[name].settings.values())[:4]
    paid = [rounds.rewards[np.arange(300), play(clusters, rounds, make, 1)] for make in makes]
    assert any(one.mean() > 0.75 and one[-100:].mean() > 0.9 for one in paid)


def test_the_loops_of_the_speed_benchmark_run(tmp_path):
    rounds = speed.linear(30)
    agent, row = speed.ours(rounds, tmp_path, train_steps=2)
    assert (agent.pending, row["p99_ms"] >= row["median_ms"]) == ((), True)
    assert speed.memory(1000, tmp_path, train_steps=2)["mib"] > 0


def test_scores_do_not_change_with_the_unit_of_rewards():
    expected = np.array([[0.0, 1.0], [3.0, 2.0]])
    arms = np.array([1, 1])
    for pays in (expected, 1000 * expected - 7):
        assert scores(Rounds(pays, pays, pays), arms, 2) == pytest.approx(0.5)


def test_equal_scores_share_a_rank():
    assert ranks({"a": 0.5, "b": 0.7, "c": 0.5}) == {"a": 2.5, "b": 1.0, "c": 2.5}


def test_slow_rivals_play_less():
    horizons = [500, 2000, 20_000]
    assert shares("default", horizons, 20) == {(500, 2000, 20_000): 20}
    assert shares("mabwiser LinUCB: alpha 0.1, l2_lambda 1", horizons, 20) == {(500, 2000): 10, (20_000,): 1}
    assert shares("mabwiser LinUCB: alpha 1, l2_lambda 1", horizons, 20) == {(500, 2000): 10}
    assert shares("calvera NeuralTS: defaults", horizons, 20) == {(500,): 2}
    assert shares("calvera NeuralTS: defaults", [2000], 20) == {}
    assert shares("mabwiser LinTS: alpha 1, l2_lambda 1", [500], 3) == {(500,): 3}


def test_the_table_of_the_documentation_is_of_the_results():
    results = json.loads((DOCS / "results" / "strangers.json").read_text(encoding="utf-8"))
    told, summary = report(results["scores"], list(REPORTED))
    # The file is release 0.3's. The page has some of its rows, beside one of today's agent: ours and the best rivals.
    page = (DOCS / "bandits.md").read_text(encoding="utf-8").replace("`hybrid` of release 0.3", "`hybrid`")
    assert sum(row in told.replace("**", "").splitlines() for row in page.replace("**", "").splitlines()) == 8
    for horizon, found in results["figures"].items():
        assert summary[horizon].keys() == found.keys()
        for agent, row in found.items():
            ours = summary[horizon][agent]
            assert {key: ours[key] for key in ("problems", "worst_on")} == {k: row[k] for k in ("problems", "worst_on")}
            for key in ("rank", "near", "of_best", "worst_over_linear"):
                assert ours[key] == pytest.approx(row[key], rel=1e-3, abs=5.01e-3), (horizon, agent, key)
