"""Figure 1, made small; stopping and resuming, for all experiments."""

import json
import math
from dataclasses import replace

import pytest

from experiments import figure1
from experiments.__main__ import main
from experiments.baselines import METHODS
from experiments.figure1 import METRICS, Settings, drawn, fit_methods, picture

SMALL = Settings(methods=("badam", "laplace-full", "mc-dropout"), n_seeds=2, epochs=5, n_test=30)


def results_of(folder):
    return json.loads((folder / "metrics.json").read_text())["results"]


def test_the_command_writes_its_figure_and_metrics(tmp_path, capsys):
    options = ["--methods", "map, vadam-precision-10", "--epochs", "2", "--seeds", "2", "--out", str(tmp_path)]
    assert main(["figure1", *options, "--quiet"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in ("figure1.png", "metrics.json")]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert list(metrics) == ["command", "version", "seed", "device", "seconds", "settings", "results"]
    assert metrics["command"] == "figure1"
    assert set(metrics["results"]) == {"map", "vadam-precision-10"}
    for scores in metrics["results"].values():
        assert set(scores) == set(METRICS)
        assert all(len(values) == 2 for values in scores.values())
    assert main(["figure1", "--methods", "luck", "--out", str(tmp_path)]) == 2
    assert "--methods must be some, separated by commas, of gp, badam" in capsys.readouterr().err


def test_data_lie_where_they_should():
    train, held_out, inside, outside = drawn(0, SMALL)
    for part in (train, held_out, inside):
        assert part.x.min() >= 0
        assert part.x.max() <= 0.5
    assert not ((outside.x > 0) & (outside.x < 0.5)).any()


def test_an_initial_precision_is_that_of_the_first_step():
    """A step of Vadam moves θ by α m̂/(√v̂ + δ/N): the larger the first precision, the less it has moved."""
    names = [f"vadam-precision-{p:g}" for p in (10, 100, 1000)] + ["vadam"]
    rows = dict(fit_methods(names, seed=0, settings=replace(SMALL, epochs=1)))
    deviations = [rows[name]["scores"]["std_in"][0] for name in names]
    # The draws of the function are wider, the smaller the precision.
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] > 5 * deviations[-1]


def test_panels_share_their_axes_and_outside_is_near_or_far():
    rows = dict(fit_methods(SMALL.methods, seed=0, settings=SMALL))
    axes = [a for a in picture(rows | {"vadam-precision-10": {}}, 0, SMALL).axes if a.axison]
    assert len(axes) == len(SMALL.methods)
    assert len({(a.get_xlim(), a.get_ylim()) for a in axes}) == 1
    assert all(map(math.isfinite, rows["badam"]["std"]))
    scores = rows["laplace-full"]["scores"]
    for near, far, out in zip(scores["std_near"], scores["std_far"], scores["std_out"], strict=True):
        assert min(near, far) < out < max(near, far)


def stopping_at(method, monkeypatch):
    """The methods called, in a list; the given one is stopped by Ctrl-C."""
    calls = []

    def noted(name):
        def fit(problem):
            calls.append(name)
            if name == method:
                raise KeyboardInterrupt
            return METHODS[name](problem)

        return fit

    monkeypatch.setattr(figure1, "METHODS", {name: noted(name) for name in METHODS})
    return calls


def test_a_stopped_run_resumes_with_the_very_same_numbers(tmp_path, monkeypatch):
    common = {"seed": 3, "quiet": True, "settings": SMALL}
    figure1.run(out=tmp_path / "whole", **common)
    cut = tmp_path / "cut"
    stopping_at("mc-dropout", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        figure1.run(out=cut, **common)
    (ledger,) = cut.glob("unfinished-*.json")
    kept = json.loads(ledger.read_text())
    assert set(kept) == {"badam", "laplace-full", "seconds"}
    assert kept["seconds"] > 0
    ledger.write_text(json.dumps({**kept, "seconds": 1000.0}))
    calls = stopping_at(None, monkeypatch)
    figure1.run(out=cut, **common)
    assert calls == ["mc-dropout"]
    assert (cut / "figure1.png").read_bytes() == (tmp_path / "whole" / "figure1.png").read_bytes()
    assert results_of(cut) == results_of(tmp_path / "whole")
    assert json.loads((cut / "metrics.json").read_text())["seconds"] > 1000
    assert not list(cut.glob("unfinished*"))


def test_other_settings_do_not_take_what_is_kept_and_other_methods_do(tmp_path, monkeypatch):
    stopping_at("laplace-full", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        figure1.run(seed=0, out=tmp_path, quiet=True, settings=SMALL)
    (ledger,) = tmp_path.glob("unfinished-*.json")
    calls = stopping_at(None, monkeypatch)
    one = replace(SMALL, methods=("badam",))
    for seed, settings in ((1, one), (0, replace(one, epochs=6))):
        figure1.run(seed=seed, out=tmp_path, quiet=True, settings=settings)
        assert list(tmp_path.glob("unfinished-*.json")) == [ledger]
    assert calls == 2 * ["badam"]
    calls.clear()
    figure1.run(seed=0, out=tmp_path, quiet=True, settings=replace(SMALL, methods=("map", "badam")))
    assert calls == ["map"]
    assert set(results_of(tmp_path)) == {"map", "badam"}
