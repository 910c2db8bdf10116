"""`bayesadam merge`."""

from __future__ import annotations

import sys
import warnings

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
    assert result.output.split()[-1] == str(out)
    expected = merge(paths, weights=[1, 3])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(out).items())


def test_the_command_trims(paths, tmp_path):
    out, base = tmp_path / "merged.safetensors", str(tmp_path / "base.pt")
    result = CliRunner().invoke(app, ["merge", *paths, "-o", str(out), "--base", base, "--trim", "0.5"])
    assert result.exit_code == 0, result.output
    expected = merge(paths, base=base, trim=0.5)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(out).items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "m.safetensors", "--trim", "0.5"], "trim must be a share, 0 to 1, with a base"),
        (["-o", "merged.pt"], "end the path in .safetensors"),
        (["-o", "m.safetensors", "--method", "mean"], "method must be one of"),
        (["-o", "m.safetensors", "--method", "gradient-matching"], "--method 'gradient-matching' needs --base,"),
        (["-o", "m.safetensors", "--weight", "2", "0.pt"], "one number for each of the 3 models"),
        (["base.pt", "-o", "m.safetensors"], "the network before fine-tuning as --base"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(paths, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["merge", *paths, *options]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_warnings_have_no_line_of_python(paths, tmp_path, capsys, monkeypatch):
    shorter = torch.load(paths[1], weights_only=True)
    shorter["optimizer"]["param_groups"][0]["betas"] = (0.9, 0.99)
    torch.save(shorter, paths[1])
    # As Python shows them where nobody listens.
    monkeypatch.setattr(warnings, "showwarning", lambda *a: sys.stderr.write(warnings.formatwarning(*a[:4])))
    with pytest.raises(SystemExit, match="0"):
        main(["merge", *paths, "-q", "-o", str(tmp_path / "m.safetensors")])
    assert "bayesadam: warning: 1.pt was trained for 40 steps" in capsys.readouterr().err


def test_a_state_of_its_own_may_lie_beside_the_weights(paths, tmp_path):
    apart = []
    for number, path in enumerate(paths):
        tree = torch.load(path, weights_only=True)
        apart.append(str(tmp_path / f"{number}_model.pt"))
        torch.save(tree["model"], apart[-1])
        torch.save(tree["optimizer"], tmp_path / f"{number}_optimizer.pt")
    done = CliRunner().invoke(app, ["merge", *apart, "-o", str(tmp_path / "new" / "m.safetensors")])
    assert done.exit_code == 0, done.output
    expected = merge(paths)
    assert all(torch.equal(t, expected[name]) for name, t in load_file(tmp_path / "new" / "m.safetensors").items())
