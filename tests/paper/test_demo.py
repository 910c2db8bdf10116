"""The demo, made small: its parts against independent computations, and the whole."""

import json
import math
from dataclasses import replace
from io import BytesIO

import matplotlib
import numpy as np
import pytest
import torch
from bayesadam.commands import demo as module
from bayesadam.commands import plots
from bayesadam.commands.demo import DemoSettings, compute, pruned_rmse, run_demo
from torch import nn

import bayesadam as ba
from bayesadam.data import ToyData
from floats import approx, assert_close

SMALL = DemoSettings(steps=300, draws=10, n_test=200)


@pytest.fixture(scope="module")
def small() -> module.Demo:
    return compute(SMALL, seed=0)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_pruning_removes_the_lowest_scores_and_no_more():
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 4.0]]))
        model.bias.fill_(8.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=10)
    # At x = (1, 1, 1) and y = 15 the error is the sum of the weights removed.
    data = ToyData(torch.ones(1, 3), torch.full((1, 1), 15.0))
    scores = {"weight": torch.tensor([[3.0, 1.0, 4.0]]), "bias": torch.tensor([2.0])}
    assert pruned_rmse(posterior, data, scores, (0.0, 0.25, 0.5, 0.75, 1.0)) == (0, 2, 10, 11, 15)
    # A quarter of four equal scores is one weight, not all four.
    equal = {name: torch.zeros_like(score) for name, score in scores.items()}
    assert pruned_rmse(posterior, data, equal, (0.25, 0.5)) == (1, 3)


def test_training_leaves_the_global_random_state_alone():
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    compute(replace(SMALL, steps=5), seed=0)
    assert torch.equal(state, torch.random.get_rng_state())


# --- the whole ------------------------------------------------------------------------------------------------------


def test_the_demo_learns(small):
    scores = small.results["in_range"]
    spread = float(small.train.y.std())
    assert scores["rmse"] < 0.7 * spread
    assert 0.85 < scores["coverage95"] <= 1
    # Better than the Gaussian that ignores x.
    assert scores["nll"] < 0.5 * math.log(2 * math.pi * math.e * spread**2) - 0.3


def test_summaries_are_the_posteriors(small):
    assert [row["name"] for row in small.results["parameters"]] == list(small.posterior.mean)
    for row in small.results["parameters"]:
        mean, variance = small.posterior.mean[row["name"]], small.posterior.variance[row["name"]]
        snr = (mean.double().abs() / variance.double().sqrt()).numpy().ravel()
        assert row["shape"] == tuple(mean.shape)
        assert row["weights"] == mean.numel()
        assert_close(row["snr"], np.quantile(snr, (0.05, 0.5, 0.95)), rtol=1e-4)
        assert row["share_v_zero"] == approx(
            (small.posterior.structure.second_moment[row["name"]] == 0).double().mean().item(), abs=1e-6
        )


def test_the_seed_decides_everything():
    settings = replace(SMALL, steps=40)
    first, again, other = (compute(settings, seed).results for seed in (3, 3, 4))
    assert first == again
    assert first["in_range"] != other["in_range"]


def test_files_hold_what_was_asked(tmp_path, capsys):
    settings = replace(SMALL, steps=20)
    paths = run_demo(seed=7, out=tmp_path / "new" / "folder", quiet=True, settings=settings)
    assert [path.name for path in paths] == ["demo.png", "metrics.json"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["demo.png", "metrics.json"]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    metrics = json.loads(paths[1].read_text())
    assert list(metrics) == ["command", "version", "seed", "device", "seconds", "settings", "results"]
    assert (metrics["command"], metrics["version"], metrics["seed"]) == ("demo", ba.__version__, 7)
    assert metrics["settings"]["steps"] == 20
    assert metrics["seconds"] > 0
    expected = compute(settings, 7).results
    assert metrics["results"]["in_range"] == expected["in_range"]
    assert metrics["results"]["pruning"]["rmse"]["snr"] == list(expected["pruning"]["rmse"]["snr"])


def test_the_table_has_a_row_for_every_parameter(small):
    from rich.console import Console

    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(module.table(small))
    text = captured.get()
    for row in small.results["parameters"]:
        line = next(line for line in text.splitlines() if row["name"] in line)
        assert f"{row['snr'][1]:.3g}" in line
        assert f"{row['share_v_zero']:.0%}" in line


@pytest.mark.slow
def test_the_picture_is_ours_whatever_the_users_style(small):
    def drawn() -> bytes:
        buffer = BytesIO()
        plots.png(module.picture(small))(buffer)
        return buffer.getvalue()

    plain = drawn()
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 20, "axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        styled = drawn()
        assert dict(matplotlib.rcParams) == before
    assert styled == plain


def test_nothing_in_the_picture_overlaps(small):
    figure = module.picture(small)
    with plots.house_style():
        figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    panels = figure.axes
    assert len(panels) == 4
    boxes = [axes.get_tightbbox(renderer) for axes in panels]
    for i, box in enumerate(boxes):
        assert figure.bbox.contains(box.x0, box.y0)
        assert figure.bbox.contains(box.x1, box.y1)
        assert not any(box.overlaps(other) for other in boxes[:i])
