"""Figure 2's command in small: the curves against masks applied one by one, stopping and going on, the files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.cli import app
from bayesadam.commands import plots
from bayesadam.commands.running import Run
from bayesadam.data import Images
from bayesadam.engine.network import member
from bayesadam.paper import pruning
from bayesadam.paper.methods import Network, Training, diagonal_ggn
from bayesadam.paper.pruning import FRACTIONS, PruningSettings, curves_of, problem_of
from floats import approx, assert_close

QUICK = Training(epochs=2, batch_size=16, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.99999))


@pytest.fixture
def images() -> Images:
    source = torch.Generator().manual_seed(0)
    x = torch.rand(200, 6, generator=source)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()
    return Images("squares", x[:150], y[:150], x[150:], y[150:])


def problem(images: Images, seeds=(1, 2)):
    return problem_of(images, Network(6, (8, 7), 3, dropout=0.2), QUICK, seeds, "cpu")


def test_the_curve_is_that_of_masks_applied_one_by_one(images):
    given = problem(images)
    found = curves_of("badam", given)
    assert set(found) == {"snr", "magnitude"}
    for index in range(2):
        model = given.network.build(member(given.optimum.params, index)).eval()
        posterior = ba.Posterior.from_state_dict(model, given.optimum.state_dict(index), 150, prior_precision=0.0)
        for ranking in ("snr", "magnitude"):
            for place in (0, 3, 7, 9):
                small = ba.prune(posterior, FRACTIONS[place], ranking=ranking).model
                right = small(images.test_x).argmax(dim=1) == images.test_y
                assert found[ranking]["accuracy"][index][place] == approx(float(right.double().mean()))


@pytest.mark.parametrize("method", plots.METHOD_TITLES)
def test_every_method_has_its_curves_and_a_seed_its_own(images, method):
    together = curves_of(method, problem(images, (1, 2)))
    alone = curves_of(method, problem(images, (2,)))
    for ranking, found in together.items():
        one, other = found["accuracy"], alone[ranking]["accuracy"]
        assert len(one) == 2
        assert all(0 <= a <= 1 for row in one for a in row)
        differing = sum(abs(a - b) > 0.021 for a, b in zip(one[1], other[0], strict=True))
        # Rounding may reorder near-equal scores, and move one of fifty images.
        assert differing <= 2


def test_a_variant_is_badam_with_its_own_setting(images, monkeypatch):
    monkeypatch.setattr(pruning, "load_images", lambda *_: images)
    settings = PruningSettings(epochs=2, hidden=(8, 7), batch_size=16, lr=1e-2, n_seeds=2)
    found = dict(pruning.fit_part([*pruning.VARIANTS], seed=0, settings=settings, device="cpu"))
    assert set(found) == set(pruning.VARIANTS)
    for name, changes in (("badam-l2-0.0001", {"weight_decay": 1e-4}), ("badam-beta2-0.99", {"betas": (0.9, 0.99)})):
        given = replace(problem(images, (0, 1)), training=replace(QUICK, **changes))
        assert found[name] == {"snr": curves_of("badam", given)["snr"]}


def test_the_diagonal_ggn_is_the_sum_of_squared_jacobians(images):
    network = Network(6, (5, 4), 3, "tanh")
    given = problem_of(images, network, QUICK, (3, 4), "cpu")
    x = images.train_x[:40].double()
    params = {name: t.double() for name, t in given.optimum.params.items()}
    found = diagonal_ggn(network, params, x, at_once=16)
    for index in range(2):
        model = network.build(member(given.optimum.params, index)).double()
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for row in x:
            outputs = model(row.unsqueeze(0))[0]
            p = outputs.detach().softmax(dim=0)
            curvature = torch.diag(p) - torch.outer(p, p)
            grads = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs]
            for place, name in enumerate(total):
                j = torch.stack([row_of[place] for row_of in grads])
                total[name] += torch.einsum("c...,cd,d...->...", j, curvature, j)
        for name, expected in total.items():
            assert_close(found[name][index], expected, rtol=1e-5, atol=1e-12)


def test_a_stopped_run_goes_on_where_it_was(images, tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "load_images", lambda *_, **__: images)
    settings = PruningSettings(methods=("badam", "mc-dropout"), n_seeds=1, epochs=1, hidden=(8, 7), batch_size=16)
    given = {"seed": 0, "quiet": True, "settings": settings, "device": "cpu"}
    whole = pruning.run_pruning(out=tmp_path / "whole", **given)
    real, calls = pruning.curves_of, []

    def dies_at_the_second(name, problem):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(name, problem)

    monkeypatch.setattr(pruning, "curves_of", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        pruning.run_pruning(out=tmp_path / "cut", **given)
    (ledger,) = (tmp_path / "cut").glob("unfinished-*.json")
    kept = json.loads(ledger.read_text())
    assert kept["seconds"] > 0
    ledger.write_text(json.dumps({**kept, "seconds": 1000.0}))
    resumed = pruning.run_pruning(out=tmp_path / "cut", **given)
    assert calls == ["badam", "mc-dropout", "mc-dropout"]
    assert not list((tmp_path / "cut").glob("unfinished-*.json"))
    first, second = (json.loads(paths[-1].read_text()) for paths in (whole, resumed))
    assert first["results"] == second["results"]
    # Both sessions' together.
    assert second["seconds"] > 1000 > first["seconds"]


def test_what_is_kept_outlives_a_failure_to_write_the_results(images, tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "load_images", lambda *_, **__: images)
    settings = PruningSettings(methods=("mc-dropout",), n_seeds=1, epochs=1, hidden=(8, 7), batch_size=16)
    given = {"seed": 0, "quiet": True, "settings": settings, "device": "cpu", "out": tmp_path}
    (tmp_path / "figure2.png").mkdir()
    with pytest.raises(ba.BayesAdamError, match="it is a folder"):
        pruning.run_pruning(**given)
    (tmp_path / "figure2.png").rmdir()
    monkeypatch.setattr(pruning, "curves_of", None)
    pruning.run_pruning(**given)
    assert not list(tmp_path.glob("unfinished*"))


def test_another_setting_has_another_ledger(tmp_path):
    one, other = (Run("pruning", 0, tmp_path, {"epochs": epochs}) for epochs in (5, 6))
    assert one.ledger != other.ledger


def test_the_commands_write_their_picture_and_metrics(images, tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "load_images", lambda *_, **__: images)
    monkeypatch.setattr(
        pruning, "RECIPES", tuple(replace(recipe, hidden=(8, 8), longer=1) for recipe in pruning.RECIPES[:2])
    )
    base = ["pruning", "--epochs", "1", "--seeds", "1", "--device", "cpu", "--out"]
    for extra, picture in (
        (["--methods", "badam"], "figure2.png"),
        (["--sparse"], "figure2-sparse.png"),
    ):
        out = tmp_path / picture
        result = CliRunner().invoke(app, [*base, str(out), *extra])
        assert result.exit_code == 0, result.output
        assert (out / picture).read_bytes()[:4] == b"\x89PNG"
        record = json.loads((out / "metrics.json").read_text())
        assert record["command"] == "pruning"
        for found in record["results"].values():
            assert set(found) == {"snr", "magnitude"}
            assert found["snr"]["fractions"] == list(FRACTIONS)
            assert len(found["snr"]["accuracy"]) == 1


@pytest.mark.parametrize(
    "bad", [["--methods", "luck"], ["--device", "tpu"], ["--activation", "step"], ["--data", "letters"]], ids=str
)
def test_bad_options_are_named(bad):
    result = CliRunner().invoke(app, ["pruning", "--epochs", "1", *bad])
    assert result.exit_code != 0
    assert isinstance(result.exception, ba.BayesAdamError)
