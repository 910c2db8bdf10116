"""`bayesadam merge`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bayesadam.__main__ import main
from bayesadam.cli import app
from bayesadam.merging import merge
from cases import mlp, train


@pytest.fixture
def paths(tmp_path):
    torch.manual_seed(0)
    base = mlp(3, 4, 1)
    torch.save(base.state_dict(), tmp_path / "base.pt")
    found = []
    for seed in range(2):
        model = mlp(3, 4, 1)
        model.load_state_dict(base.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.97))
        train(model, optimizer, steps=40, seed=seed)
        found.append(tmp_path / f"{seed}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, found[-1])
    return list(map(str, found))


def test_the_command_merges_and_shows_the_shares(paths, tmp_path):
    out = tmp_path / "merged.safetensors"
    result = CliRunner().invoke(app, ["merge", *paths, "-o", str(out), "--weight", "1", "--weight", "3"])
    assert result.exit_code == 0, result.output
    assert "0.pt" in result.output
    assert "%" in result.output
    assert result.output.split()[-2:] == [str(out), str(tmp_path / "merged.metrics.json")]
    expected = merge(paths, weights=[1, 3])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(out).items())
    record = json.loads((tmp_path / "merged.metrics.json").read_text())
    assert record["results"]["labels"] == ["0.pt", "1.pt"]
    assert record["results"]["layers"][0]["name"] == "0"


def test_with_a_base_it_is_gradient_matching(paths, tmp_path):
    out = tmp_path / "merged.safetensors"
    result = CliRunner().invoke(app, ["merge", *paths, "--base", str(tmp_path / "base.pt"), "-o", str(out), "-q"])
    assert result.exit_code == 0, result.output
    expected = merge(paths, base=tmp_path / "base.pt")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(out).items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "merged.pt"], "give the path that ending"),
        (["-o", "m.safetensors", "--method", "mean"], "method must be one of"),
        (["-o", "m.safetensors", "--optimizer-file", "x.pt"], "is of one checkpoint"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(paths, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["merge", *paths, *options]) != 0
    assert said in capsys.readouterr().err.replace("--method", "method")
