"""Pruning a checkpoint without its model, against pruning the model itself."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.__main__ import main
from bayesadam.cli import app
from bayesadam.weights.gaussian import GaussianWeights

# Of the bias before the batch norm: see test_batch_norm.
pytestmark = pytest.mark.filterwarnings("ignore:left whole")


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
def test_the_file_holds_what_pruning_the_model_gives(saved, tmp_path, ranking, scope):
    model, adam, path = saved
    out = tmp_path / "pruned.pt"
    report = ba.pruning.prune_checkpoint(path, out, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",))
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
    assert report.total.weights - report.total.kept == removed


@pytest.mark.parametrize("ranking", ["snr", "saliency"])
def test_an_opened_file_has_the_masks_of_the_posterior(saved, ranking):
    model, adam, path = saved
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    opened = GaussianWeights.open(path, 1)
    for how in ({"fraction": 0.6}, {"pattern": "1:2"}):
        expected = ba.pruning_masks(posterior, ranking=ranking, exclude="biases", **how)
        found = ba.pruning_masks(opened, ranking=ranking, exclude="biases", **how)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], mask) for name, mask in expected.items())


def test_the_original_is_left_alone_and_bad_settings_write_nothing(saved, tmp_path):
    _, _, path = saved
    before = path.read_bytes()
    out = tmp_path / "pruned.pt"
    for change in ({"ranking": "luck"}, {"exclude": ("nothing*",)}, {"scope": "row"}, {"fraction": 1.5}):
        with pytest.raises(ba.BayesAdamError):
            ba.pruning.prune_checkpoint(path, out, **{"fraction": 0.5, **change})
    assert not out.exists()
    ba.pruning.prune_checkpoint(path, out, 0.5)
    assert path.read_bytes() == before


def test_the_command_prunes_reports_and_ends_with_its_paths(saved, tmp_path):
    _, _, path = saved
    out = tmp_path / "small" / "pruned.safetensors"
    given = ["prune", str(path), "--fraction", "0.75", "-o", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "0.weight" in result.output
    assert result.output.split()[-1] == str(out)
    # Buffers have no state and are not eligible.
    pruned = load_file(out)
    assert sum(int((tensor == 0).sum()) for tensor in pruned.values()) >= round(0.75 * (147 - 12))


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["prune", str(tmp_path / "no.pt"), "--fraction", "0.5", "-o", "x.pt"])
    assert isinstance(result.exception, ba.BayesAdamError)


def test_the_table_is_of_the_parameters_and_adds_up_to_the_fraction(saved, tmp_path):
    model, _, path = saved
    report = ba.pruning.prune_checkpoint(path, tmp_path / "pruned.pt", 0.5)
    assert [row.name for row in report.rows] == [name for name, _ in model.named_parameters()]
    assert report.total.weights == 147
    # The bias before the batch norm is left whole.
    assert report.total.weights - report.total.kept == round(0.5 * (147 - 12))
    found = torch.load(tmp_path / "pruned.pt", weights_only=True)["model"]
    zeros = sum(int((found[name] == 0).sum()) for name, _ in model.named_parameters())
    assert report.total.weights - report.total.kept == zeros


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5)
        self.attend = nn.MultiheadAttention(5, 1)
        self.biased = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.rnn(inputs)[0]
        return self.biased(self.attend(hidden, hidden, hidden)[0])


def test_biases_are_told_by_their_names_as_with_the_model(tmp_path):
    torch.manual_seed(0)
    model = Recurrent()
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2, 4)).square().mean().backward()
    adam.step()
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, path)
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    masks = ba.pruning_masks(posterior, 0.5, exclude="biases")
    assert "biased.weight" in masks
    for exclude in ("biases", ["biases"], ["biases", "*bias"]):
        report = ba.pruning.prune_checkpoint(path, tmp_path / "out.pt", 0.5, exclude=exclude)
        kept = {row.name: row.kept for row in report.rows}
        assert kept == {
            name: int(masks[name].sum()) if name in masks else p.numel() for name, p in model.named_parameters()
        }


@pytest.mark.parametrize("kind", ["norms", "embeddings"])
def test_kinds_that_need_the_model_are_refused(saved, tmp_path, capsys, kind):
    _, _, path = saved
    out = tmp_path / "pruned.pt"
    assert main(["prune", str(path), "--fraction", "0.5", "--exclude", kind, "-o", str(out)]) == 2
    told = capsys.readouterr().err
    assert f"--exclude '{kind}' matches no parameter" in told
    assert "1.weight" in told
    assert not out.exists()


def test_the_command_does_not_write_over_what_it_reads(saved, tmp_path, capsys):
    _, _, path = saved
    before = path.read_bytes()
    (tmp_path / "link.pt").symlink_to(path)
    for out in (path, tmp_path / "link.pt", tmp_path / "." / "last.pt"):
        assert main(["prune", str(path), "--fraction", "0.5", "-o", str(out)]) == 2
        assert "write to another file" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.pt", "link.pt"]


def test_a_folder_is_not_written_into_where_it_is_read(saved, tmp_path, capsys):
    model, adam, _ = saved
    folder = tmp_path / "state"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(adam.state_dict(), folder / "optimizer.bin")
    before = (folder / "pytorch_model.bin").read_bytes()
    given = ["prune", str(folder), "--fraction", "0.5", "-o"]
    assert main([*given, str(folder / "pytorch_model.bin")]) == 2
    assert "write to another file" in capsys.readouterr().err
    assert (folder / "pytorch_model.bin").read_bytes() == before
    assert CliRunner().invoke(app, [*given, str(tmp_path / "pruned.safetensors")]).exit_code == 0
