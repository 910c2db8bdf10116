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
from bayesadam.errors import BayesAdamWarning
from bayesadam.weights.gaussian import GaussianWeights
from cases import train
from compress.cases_compress import normalised, removed
from predict.cases_networks import Lambda

# Of the bias before the batch norm, which the last test is about.
pytestmark = pytest.mark.filterwarnings("ignore:left whole")


@pytest.fixture
def saved(tmp_path):
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, adam, steps=10)
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}, path)
    return model, adam, path


@pytest.mark.parametrize(("ranking", "scope"), [("snr", "global"), ("magnitude", "layer"), ("saliency", "global")])
def test_the_file_holds_what_pruning_the_model_gives(saved, tmp_path, ranking, scope):
    model, adam, path = saved
    out = tmp_path / "pruned.pt"
    report = ba.compress.prune_checkpoint(path, out, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",))
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    masks = ba.compress.masks(posterior, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",))
    expected = ba.prune(posterior, 0.6, ranking=ranking, scope=scope, exclude=("*.bias",)).model.state_dict()
    found = torch.load(out, weights_only=True)
    assert found["epoch"] == 3
    for name, tensor in expected.items():
        assert torch.equal(found["model"][name], tensor), name
    for key, state in adam.state_dict()["state"].items():
        assert torch.equal(found["optimizer"]["state"][key]["exp_avg_sq"], state["exp_avg_sq"])
    assert (list(report.parameters), report.weights) == ([name for name, _ in model.named_parameters()], 147)
    assert report.weights - report.kept == removed(masks)


@pytest.mark.parametrize("ranking", ["snr", "saliency"])
def test_an_opened_file_has_the_masks_of_the_posterior(saved, ranking):
    model, adam, path = saved
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    opened = GaussianWeights.open(path, 1)
    for how in ({"fraction": 0.6}, {"pattern": "1:2"}):
        expected = ba.compress.masks(posterior, ranking=ranking, exclude="biases", **how)
        found = ba.compress.masks(opened, ranking=ranking, exclude="biases", **how)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], mask) for name, mask in expected.items())


def test_the_command_prunes_reports_and_ends_with_its_path(saved, tmp_path):
    _, _, path = saved
    out = tmp_path / "small" / "pruned.safetensors"
    given = ["prune", str(path), "--fraction", "0.75", "-o", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "0.weight" in result.output
    assert "The weights alone are written: a path that ends in .pt keeps the optimiser's state." in result.output
    assert result.output.split()[-1] == str(out)
    assert list(out.parent.iterdir()) == [out]
    # Buffers have no state and are not eligible, nor is the bias before the batch norm.
    assert sum(int((tensor == 0).sum()) for tensor in load_file(out).values()) >= round(0.75 * (147 - 12))


def test_a_matrix_without_weights_is_named(saved, tmp_path):
    path, out, how = saved[2], tmp_path / "pruned.pt", {"fraction": 0.5, "ranking": "magnitude"}
    tree = torch.load(path)
    tree["model"]["3.weight"] *= 1e-6
    torch.save(tree, path)
    with pytest.warns(BayesAdamWarning, match=r"no weight is left of 3\.weight: scope='bounded'"):
        ba.compress.prune_checkpoint(path, out, **how)
    assert 0 < ba.compress.prune_checkpoint(path, out, scope="bounded", **how).parameters["3.weight"][1] < 36


def test_biases_are_told_by_their_names_as_with_the_model(tmp_path):
    model = Lambda(
        lambda self, x: self.biased(self.attend(*[self.rnn(x)[0]] * 3)[0]),
        rnn=nn.GRU(4, 5),
        attend=nn.MultiheadAttention(5, 1),
        biased=nn.Linear(5, 2),
    )
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2, 4)).square().mean().backward()
    adam.step()
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, path)
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=1, prior_precision=0.0)
    masks = ba.compress.masks(posterior, 0.5, exclude="biases")
    assert "biased.weight" in masks
    for exclude in ("biases", ["biases"], ["biases", "*bias"]):
        report = ba.compress.prune_checkpoint(path, tmp_path / "out.pt", 0.5, exclude=exclude)
        kept = {name: left for name, (_, left) in report.parameters.items()}
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
    model, adam, path = saved
    (tmp_path / "link.pt").symlink_to(path)
    folder = tmp_path / "state"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(adam.state_dict(), folder / "optimizer.bin")
    for source, out in ((path, tmp_path / "link.pt"), (folder, folder / "pytorch_model.bin")):
        before = out.read_bytes()
        assert main(["prune", str(source), "--fraction", "0.5", "-o", str(out)]) == 2
        assert "write to another file" in capsys.readouterr().err
        assert out.read_bytes() == before
    out = tmp_path / "pruned.safetensors"
    assert CliRunner().invoke(app, ["prune", str(folder), "--fraction", "0.5", "-o", str(out)]).exit_code == 0


@pytest.mark.filterwarnings("default:left whole")
def test_a_bias_before_a_batch_norm_stays_in_the_file(tmp_path):
    model, optimizer, _ = normalised()
    path, out = tmp_path / "last.pt", tmp_path / "pruned.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"left whole: 0\.bias"):
        report = ba.compress.prune_checkpoint(path, out, 0.3)
    assert report.weights - report.kept == round(0.3 * (report.weights - 8))
    pruned = torch.load(out, weights_only=True)["model"]
    assert torch.equal(pruned["0.bias"], model.state_dict()["0.bias"])
    assert (pruned["0.weight"] == 0).any()


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("key", [None, "model", "ema"])
def test_averages_are_pruned_by_the_same_masks(saved, tmp_path, prefix, key):
    model, adam, path = saved
    averages = {f"{prefix}{name}": tensor * 0.5 for name, tensor in model.state_dict().items()}
    averages |= {"n_averaged": torch.tensor(3)} if prefix else {}
    lists = {"shadow_params": [parameter.detach() * 0.1 for parameter in model.parameters()]}
    tree = {"model": model.state_dict(), "ema": averages, "optimizer": adam.state_dict(), "lists": lists}
    torch.save({**tree, "other": {"x": torch.ones(3, 2)}}, path)
    out = tmp_path / "pruned.pt"
    report = ba.compress.prune_checkpoint(path, out, 0.6, weights_key=key)
    found = torch.load(out, weights_only=True)
    for name, tensor in model.state_dict().items():
        pruned = found["model"][name] == 0
        assert torch.equal(found["ema"][f"{prefix}{name}"] == 0, pruned | (tensor == 0))
    assert report.weights - report.kept == sum(int((found["model"][n] == 0).sum()) for n, _ in model.named_parameters())
    assert torch.equal(found["other"]["x"], torch.ones(3, 2))
    read, copy = (key or "model"), "model" if key == "ema" else "ema"
    lines = str(report).splitlines()
    assert lines[0] == f"Read {read!r}: 6 of {9 + bool(prefix) * (key == 'ema')} tensors have a state."
    assert lines[1:3] == [f"Pruned by the same masks: {copy!r}.", "'other' left as it was."]
    # Without names it stays as it is.
    assert torch.equal(found["lists"]["shadow_params"][0], lists["shadow_params"][0])
    assert "'lists.shadow_params' is a list of 6 tensors without names, which is not read." in lines


def test_a_calibrated_network_is_not_pruned_under_its_calibration(saved, tmp_path):
    model, adam, _ = saved
    x = torch.randn(60, 6)
    net = ba.calibrate(model.eval(), (x, torch.randint(3, (60,))), likelihood="classification")
    net.save(tmp_path / "net.safetensors")
    torch.save(adam.state_dict(), tmp_path / "o.pt")
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    options = {"optimizer_path": tmp_path / "o.pt", "param_names": names}
    with pytest.raises(ba.BayesAdamError, match=r"has what bayesadam\.calibrated found of its weights as they are"):
        ba.compress.prune_checkpoint(tmp_path / "net.safetensors", tmp_path / "out.safetensors", 0.5, **options)
