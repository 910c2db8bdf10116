"""Figure 1, made small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bayesadam.errors import BayesAdamError, SettingError
from bayesadam.experiments import regression
from bayesadam.experiments.regression import (
    METRICS,
    RegressionSettings,
    drawn,
    fit_all,
    groups,
    picture,
    run_regression,
)

SMALL = RegressionSettings(methods=("badam", "laplace-full", "mc-dropout"), n_seeds=2, epochs=5, n_test=30)


def test_the_command_writes_its_figure_and_metrics(tmp_path):
    paths = run_regression(seed=3, out=tmp_path, quiet=True, settings=SMALL, jobs=1)
    assert {path.name for path in paths} == {"figure1.png", "curves.json", "metrics.json"}
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics["results"]) == set(SMALL.methods)
    for scores in metrics["results"].values():
        assert set(scores) == set(METRICS)
        assert all(len(values) == 2 for values in scores.values())


def test_the_same_seed_gives_the_same_numbers_in_one_process_or_two():
    def found(jobs: int) -> dict[str, object]:
        return {c.method: dict(c.scores) for group in fit_all(0, SMALL, jobs=jobs) for c in group}

    alone, together = found(1), found(2)
    for method, scores in alone.items():
        for name, values in scores.items():
            assert together[method][name] == pytest.approx(values, rel=1e-4)


def test_data_lie_where_they_should_and_the_gap_is_empty():
    train, held_out, inside, outside = drawn(0, SMALL)
    for part in (train, held_out, inside):
        assert part.x.min() >= 0
        assert part.x.max() <= 0.5
    assert not ((outside.x > 0) & (outside.x < 0.5)).any()
    gap, *_ = drawn(0, RegressionSettings(gap=True))
    assert not ((gap.x > 0.17) & (gap.x < 0.33)).any()


def test_every_method_is_in_one_group():
    settings = RegressionSettings()
    jobs = groups(settings.methods)
    assert sorted(name for job in jobs for name in job) == sorted(settings.methods)


def test_panels_share_their_axes():
    curves = [c for group in fit_all(0, SMALL, jobs=1) for c in group]
    axes = [a for a in picture(curves, 0, SMALL).axes if a.axison]
    assert len({(a.get_xlim(), a.get_ylim()) for a in axes}) == 1
    assert torch.isfinite(curves[0].total_std).all()


def test_unknown_methods_are_named():
    with pytest.raises(SettingError, match="magic"):
        RegressionSettings(methods=("magic",))


def test_a_method_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch):
    def diverges(problem):
        raise BayesAdamError("the variance must be finite")

    monkeypatch.setattr(regression, "METHODS", {**regression.METHODS, "map": diverges})
    settings = replace(SMALL, methods=("badam", "map"))
    paths = run_regression(seed=0, out=tmp_path, quiet=True, settings=settings, jobs=1)
    assert set(json.loads(paths[-1].read_text())["results"]) == {"badam"}
    with pytest.raises(BayesAdamError, match="map: the variance"):
        run_regression(seed=0, out=tmp_path, quiet=True, settings=replace(settings, methods=("map",)), jobs=1)
