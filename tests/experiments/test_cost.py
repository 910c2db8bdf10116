"""Costs: the ratios by a clock of its own, and what is compared, without a look at the times."""

import json
from dataclasses import replace

import torch

from bayesadam.engine.network import Network
from experiments import cost
from experiments.__main__ import main
from experiments.cost import costs, problem_named, ratios, table
from experiments.data import Images
from floats import approx


def test_ratios_are_of_medians_over_turns_taken_in_order():
    now, order = [0.0], []
    # The second round's machine is ten times slower, and one turn of the first is far slower still.
    taken = {"first": iter([2.0, 2.0, 90.0, 20.0, 20.0, 20.0]), "second": iter([3.0, 3.0, 3.0, 30.0, 30.0, 31.0])}

    def call(name: str) -> None:
        order.append(name)
        now[0] += next(taken[name])

    calls = {name: lambda name=name: call(name) for name in taken}
    assert ratios(calls, 2, clock=lambda: now[0]) == {"first": [1.0, 1.0], "second": [1.5, 1.5]}
    assert order == 6 * ["first", "second"]


def images(*_: object) -> Images:
    source = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 6, generator=source), torch.randint(3, (40,), generator=source)
    return Images(x[:30], y[:30], x[30:], y[30:])


def tripled(calls, rounds):
    """Every call is made once, and said to take three times as long as the first."""
    for call in calls.values():
        call()
    return {name: rounds * [3.0 if place else 1.0] for place, name in enumerate(calls)}


def test_a_posterior_is_a_share_of_the_papers_training(monkeypatch):
    monkeypatch.setattr(cost, "load_images", images)
    monkeypatch.setattr(cost, "ratios", tripled)
    monkeypatch.setattr(cost, "_IMAGES", 10)
    problem = problem_named("pruning", 0, "mnist")
    assert (problem.network.hidden, problem.network.dropout, problem.training.epochs) == ((400, 400), 0.2, 100)
    measured = costs(replace(problem, network=Network(6, (5, 4), 3, dropout=0.2), draws=3), 2)
    # 30 images are one batch: 100 epochs are 100 steps, a call is 20 of them, and 10 images are a third of all.
    assert measured["badam"] == {"step": [3.0, 3.0], "posterior": approx([0.6, 0.6]), "prediction": [3.0, 3.0]}
    assert measured["laplace-diagonal"] == {"posterior": approx([1.8, 1.8])}
    for method in ("mc-dropout", "bbb", "vadam"):
        assert measured[method] == {"step": [3.0, 3.0], "prediction": [3.0, 3.0]}
    assert measured["adam"] == {"step": [1.0, 1.0], "prediction": [1.0, 1.0]}


def test_the_command_writes_a_table_of_both_networks(monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "load_images", images)
    monkeypatch.setattr(cost, "ratios", tripled)
    assert main(["cost", "--rounds", "2", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["command"], metrics["settings"]) == ("cost", {"data": "mnist", "rounds": 2})
    rows = {row[0]: row[1:] for row in table(metrics["results"], metrics["settings"]).rows}
    # 20 of 40,000 steps, three times.
    assert rows["the toy regression, Badam"] == ("3", "0.0015", "3")
    assert rows["the image network, MC dropout"] == ("3", "–", "3")
    assert len(rows) == 12
