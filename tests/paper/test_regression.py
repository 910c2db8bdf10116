"""Figure 1, made small."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from bayesadam.paper import regression
from bayesadam.paper.methods import METHODS
from bayesadam.paper.regression import (
    METRICS,
    RegressionSettings,
    drawn,
    fit_methods,
    picture,
    run_regression,
)

SMALL = RegressionSettings(methods=("badam", "laplace-full", "mc-dropout"), n_seeds=2, epochs=5, n_test=30)


def test_the_command_writes_its_figure_and_metrics(tmp_path):
    paths = run_regression(seed=3, out=tmp_path, quiet=True, settings=SMALL)
    assert {path.name for path in paths} == {"figure1.png", "metrics.json"}
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics["results"]) == set(SMALL.methods)
    for scores in metrics["results"].values():
        assert set(scores) == set(METRICS)
        assert all(len(values) == 2 for values in scores.values())


def test_a_variant_alone_has_a_picture(tmp_path):
    settings = replace(SMALL, methods=(next(iter(regression.VARIANTS)),))
    paths = run_regression(seed=3, out=tmp_path, quiet=True, settings=settings)
    assert {path.name for path in paths} == {"figure1.png", "metrics.json"}


def results_of(folder):
    return json.loads((folder / "metrics.json").read_text())["results"]


def test_data_lie_where_they_should_and_the_gap_is_empty():
    train, held_out, inside, outside = drawn(0, SMALL)
    for part in (train, held_out, inside):
        assert part.x.min() >= 0
        assert part.x.max() <= 0.5
    assert not ((outside.x > 0) & (outside.x < 0.5)).any()
    gap, *_ = drawn(0, RegressionSettings(gap=True))
    assert not ((gap.x > 0.17) & (gap.x < 0.33)).any()


def test_an_initial_precision_is_that_of_the_first_step():
    """A step of Vadam moves θ by α m̂/(√v̂ + δ/N): the larger the first precision, the less it has moved."""
    names = [f"vadam-precision-{p:g}" for p in (10, 100, 1000)] + ["vadam"]
    settings = replace(SMALL, methods=tuple(names), epochs=1)
    rows = dict(fit_methods(settings.methods, seed=0, settings=settings))
    deviations = [rows[name]["scores"]["std_in"][0] for name in names]
    # The draws of the function are wider, the smaller the precision.
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[0] > 5 * deviations[-1]


def test_outside_is_near_or_far():
    scores = dict(fit_methods(("laplace-full",), seed=0, settings=SMALL))["laplace-full"]["scores"]
    for near, far, out in zip(scores["std_near"], scores["std_far"], scores["std_out"], strict=True):
        assert min(near, far) < out < max(near, far)


def test_panels_share_their_axes():
    rows = dict(fit_methods(SMALL.methods, seed=0, settings=SMALL))
    axes = [a for a in picture(rows | {"vadam-precision-10": {}}, 0, SMALL).axes if a.axison]
    assert len(axes) == len(SMALL.methods)
    assert len({(a.get_xlim(), a.get_ylim()) for a in axes}) == 1
    assert all(map(math.isfinite, rows[SMALL.methods[0]]["std"]))


# --- stopping and going on --------------------------------------------------------------------------------------------


def stopping_at(method, monkeypatch):
    """The methods called, in a list, and the clock at each call; the given one is stopped by Ctrl-C."""
    calls = []

    def noted(name):
        def fit(problem):
            calls.append((name, time.perf_counter()))
            if name == method:
                raise KeyboardInterrupt
            return METHODS[name](problem)

        return fit

    monkeypatch.setattr(regression, "METHODS", {name: noted(name) for name in METHODS})
    return calls


@pytest.mark.parametrize("method", ["laplace-full", pytest.param("mc-dropout", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_with_the_very_same_numbers(method, tmp_path, monkeypatch):
    given = {"seed": 3, "quiet": True, "settings": SMALL}
    run_regression(out=tmp_path / "whole", **given)
    cut = tmp_path / "cut"
    stopped = stopping_at(method, monkeypatch)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_regression(out=cut, **given)
    took = time.perf_counter() - began
    (ledger,) = cut.glob("unfinished-*.json")
    kept = json.loads(ledger.read_text())
    finished = [name for name, _ in stopped[:-1]]
    assert set(kept) == {*finished, "seconds"}
    assert 0 < kept["seconds"] <= took
    ledger.write_text(json.dumps({**kept, "seconds": 1000.0}))
    gone_on = stopping_at(None, monkeypatch)
    began = time.perf_counter()
    run_regression(out=cut, **given)
    took = time.perf_counter() - began
    assert not set(finished) & {name for name, _ in gone_on}
    assert (cut / "figure1.png").read_bytes() == (tmp_path / "whole" / "figure1.png").read_bytes()
    assert results_of(cut) == results_of(tmp_path / "whole")
    assert 1000 < json.loads((cut / "metrics.json").read_text())["seconds"] <= 1000 + took
    assert not list(cut.glob("unfinished*"))


@pytest.mark.slow
def test_other_settings_do_not_take_what_is_kept_and_other_methods_do(tmp_path, monkeypatch):
    stopping_at("mc-dropout", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run_regression(seed=0, out=tmp_path, quiet=True, settings=SMALL)
    (ledger,) = tmp_path.glob("unfinished-*.json")
    calls = stopping_at(None, monkeypatch)
    for seed, settings in ((1, SMALL), (0, replace(SMALL, epochs=6)), (0, replace(SMALL, gap=True))):
        calls.clear()
        run_regression(seed=seed, out=tmp_path, quiet=True, settings=settings)
        assert [name for name, _ in calls] == list(SMALL.methods)
        assert list(tmp_path.glob("unfinished-*.json")) == [ledger]
    calls.clear()
    settings = replace(SMALL, methods=("map", "badam"))
    run_regression(seed=0, out=tmp_path, quiet=True, settings=settings)
    assert [name for name, _ in calls] == ["map"]
    assert set(results_of(tmp_path)) == {"map", "badam"}
    assert not list(tmp_path.glob("unfinished*"))


def test_numbers_that_are_not_finite_are_kept(tmp_path, monkeypatch):
    def diverged(fitted, sets):
        found = scored(fitted, sets)
        return {**found, "scores": {**found["scores"], "nll_out": (math.inf, math.nan)}}

    scored = regression._scored
    settings = replace(SMALL, methods=("badam", "mc-dropout"))
    with monkeypatch.context() as patched:
        patched.setattr(regression, "_scored", diverged)
        stopping_at("mc-dropout", patched)
        with pytest.raises(KeyboardInterrupt):
            run_regression(seed=0, out=tmp_path, quiet=True, settings=settings)
    run_regression(seed=0, out=tmp_path, quiet=True, settings=settings)
    found = results_of(tmp_path)
    assert found["badam"]["nll_out"] == [None, None]
    assert None not in found["mc-dropout"]["nll_out"]
