"""`bayesadam merge`."""

import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from bayesadam.__main__ import main
from bayesadam.merging import merge
from cases import mlp, train


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = mlp(3, 4, 1)
    torch.save(base.state_dict(), "base.pt")
    found = []
    for seed in range(2):
        model = mlp(3, 4, 1)
        model.load_state_dict(base.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.97))
        train(model, optimizer, steps=40, seed=seed)
        found.append(f"{seed}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, found[-1])
    return found


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (["--weight", "1", "--weight", "3"], {"weights": [1, 3]}),
        (["--base", "base.pt", "--trim", "0.5"], {"base": "base.pt", "trim": 0.5}),
    ],
)
@pytest.mark.parametrize("apart", [False, True], ids=["in one file", "a state of its own beside the weights"])
def test_the_command_merges_and_shows_the_shares(paths, capsys, options, same, apart):
    expected = merge(paths, **same)
    for number, path in enumerate(paths if apart else ()):
        tree = torch.load(path, weights_only=True)
        paths[number] = f"{number}_model.pt"
        torch.save(tree["model"], paths[number])
        torch.save(tree["optimizer"], f"{number}_optimizer.pt")
    with pytest.raises(SystemExit, match="0"):
        main(["merge", *paths, "-o", "new/m.safetensors", *options])
    told = capsys.readouterr().out
    assert paths[0] in told
    assert "%" in told
    assert told.split()[-1] == "new/m.safetensors"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file("new/m.safetensors").items())


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
def test_what_is_wrong_is_said_in_one_line(paths, capsys, options, said):
    assert main(["merge", *paths, *options]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_warnings_have_no_line_of_python(paths, capsys, monkeypatch):
    shorter = torch.load(paths[1], weights_only=True)
    shorter["optimizer"]["param_groups"][0]["betas"] = (0.9, 0.99)
    torch.save(shorter, paths[1])
    # As Python shows them where nobody listens.
    monkeypatch.setattr(warnings, "showwarning", lambda *a: sys.stderr.write(warnings.formatwarning(*a[:4])))
    with pytest.raises(SystemExit, match="0"):
        main(["merge", *paths, "-q", "-o", "m.safetensors"])
    assert "bayesadam: warning: 1.pt was trained for 40 steps" in capsys.readouterr().err
