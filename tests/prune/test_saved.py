"""Pruning a checkpoint without its model, against pruning the model itself."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.cli import app


def trained() -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        adam.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        adam.step()
    return model, adam


@pytest.fixture
def saved(tmp_path):
    model, adam = trained()
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}, path)
    return model, adam, path


@pytest.mark.parametrize("ranking", ["snr", "magnitude", "saliency"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("piece", [3, 1000])
def test_the_file_holds_what_pruning_the_model_gives(saved, tmp_path, monkeypatch, ranking, scope, piece):
    monkeypatch.setattr(sys.modules["bayesadam.prune.saved"], "_PIECE", piece)
    model, adam, path = saved
    out = tmp_path / "pruned.pt"
    report = ba.prune_checkpoint(path, out, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",))
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    masks = ba.pruning_masks(posterior, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",))
    expected = ba.prune(model, masks, inplace=False).state_dict()
    found = torch.load(out, weights_only=True)
    assert found["epoch"] == 3
    for name, tensor in expected.items():
        assert torch.equal(found["model"][name], tensor), name
    for key, state in adam.state_dict()["state"].items():
        assert torch.equal(found["optimizer"]["state"][key]["exp_avg_sq"], state["exp_avg_sq"])
    removed = sum(int((~mask).sum()) for mask in masks.values())
    assert report.weights - report.kept == removed


def test_the_original_is_left_alone_and_bad_settings_write_nothing(saved, tmp_path):
    _, _, path = saved
    before = path.read_bytes()
    out = tmp_path / "pruned.pt"
    for change in ({"ranking": "luck"}, {"exclude": ("nothing*",)}, {"scope": "row"}, {"fraction": 1.5}):
        with pytest.raises(ba.BayesAdamError):
            ba.prune_checkpoint(path, out, **{"fraction": 0.5, **change})
    assert not out.exists()
    ba.prune_checkpoint(path, out, 0.5)
    assert path.read_bytes() == before


def test_the_command_prunes_reports_and_ends_with_its_paths(saved, tmp_path):
    _, _, path = saved
    out = tmp_path / "small" / "pruned.safetensors"
    given = ["prune", str(path), "--fraction", "0.75", "-o", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "0.weight" in result.output
    assert result.output.split()[-2:] == [str(out), str(out.parent / "pruned.metrics.json")]
    record = json.loads((out.parent / "pruned.metrics.json").read_text())
    assert record["command"] == "prune"
    # Buffers have no state and are not eligible.
    assert record["results"]["weights"] - record["results"]["kept"] == round(0.75 * 147)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["prune", str(tmp_path / "no.pt"), "--fraction", "0.5", "-o", "x.pt"])
    assert isinstance(result.exception, ba.BayesAdamError)
