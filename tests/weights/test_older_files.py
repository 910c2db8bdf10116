"""Files of releases 0.2 and 0.3 are read as those read them: the folders have posteriors, and what was said of them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayesadam as ba
from bayesadam._storage import under
from bayesadam.errors import BayesAdamWarning, FileError, MatchError
from floats import assert_close
from formats.same import Evil

OLD, NEWER = Path(__file__).parent / "release_0_2", Path(__file__).parents[1] / "release_0_3"
EXPECTED, SAID = load_file(OLD / "expected.safetensors"), load_file(NEWER / "expected.safetensors")


def build(inputs: int = 3, width: int = 4, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def newer(outputs: int = 3) -> nn.Module:
    return build(4, 6, outputs)


def agrees(q: ba.GaussianWeights, kind: str, rtol: float = 1e-5) -> None:
    assert_close(q.mean, under(f"{kind}.mean.", EXPECTED), rtol=rtol)
    assert_close(q.variance, under(f"{kind}.variance.", EXPECTED), rtol=rtol)


def test_a_calibrated_diagonal_keeps_its_settings():
    path = OLD / "diagonal.safetensors"
    with pytest.warns(BayesAdamWarning, match="calibrate again") as said:
        q = ba.Posterior.load(path, build())
    assert len(said) == 1
    agrees(q, "diagonal")
    agrees(ba.GaussianWeights.open(path), "diagonal")
    # The likelihood is told by the calibration alone.
    assert (q.likelihood, q.temperature, q.n_data) == ("classification", pytest.approx(0.498222), 64)


def test_kronecker():
    q = ba.Posterior.load(OLD / "kronecker.safetensors", build())
    for each in (q, ba.GaussianWeights.open(OLD / "kronecker.safetensors")):
        agrees(each, "kronecker")
        assert (each.structure, each.n_data) == ("kronecker", 64)


def test_without_weights_and_in_eight_bits():
    model = build()
    agrees(ba.Posterior.load(OLD / "compressed.safetensors", model), "published", rtol=0.05)
    agrees(ba.Posterior.load(OLD / "published.safetensors", model), "published")
    for name, rtol in (("published", 1e-5), ("compressed", 0.05)):
        opened = ba.GaussianWeights.open(OLD / f"{name}.safetensors")
        assert opened.has_weights == (name == "compressed")
        assert_close(opened.variance, under("published.variance.", EXPECTED), rtol=rtol)


@pytest.mark.parametrize("kind", ["low-rank", "low-rank+diagonal"])
def test_of_low_rank_ones_the_diagonal_is_read(kind):
    path = OLD / f"{kind}.safetensors"
    with pytest.warns(BayesAdamWarning, match="reads the diagonal"):
        q = ba.Posterior.load(path, build())
    with pytest.warns(BayesAdamWarning):
        opened = ba.GaussianWeights.open(path)
    tensors = load_file(path)
    for name, v in q.curvature.second_moment.items():
        rows = tensors[f"directions.{name}"].double().square()
        exact = torch.tensordot(tensors["eigenvalues.directions"].double(), rows, dims=1)
        exact = exact + tensors[f"rest.{name}"].double() if kind != "low-rank" else exact
        assert_close(v.double(), exact, rtol=1e-5)
        assert torch.equal(opened.curvature.second_moment[name], v)


def test_mixtures():
    model = build()
    mixture = ba.Mixture.load(OLD / "mixture.safetensors", model)
    assert mixture.weights == (0.25, 0.75)
    for name, mean in under("mixture.mean.", EXPECTED).items():
        first, second = ((q.mean[name], q.variance[name]) for q in mixture)
        assert_close(0.25 * first[0] + 0.75 * second[0], mean, rtol=1e-5)
        within, between = 0.25 * first[1] + 0.75 * second[1], 0.1875 * (first[0] - second[0]).square()
        assert_close(within + between, under("mixture.variance.", EXPECTED)[name], rtol=1e-5)
    assert all(torch.equal(model.get_parameter(name), mu) for name, mu in mixture.members[0].mean.items())
    mixture = ba.Mixture.load(NEWER / "mixture.safetensors", newer())
    assert mixture.weights == (0.25, 0.75)
    assert_close(mixture.members[0].variance, under("variance.", SAID), rtol=1e-5)


def test_release_0_3():
    model = newer()
    model.load_state_dict(under("weights.", SAID))
    for name in ("diagonal", "published"):
        assert_close(ba.Posterior.load(NEWER / f"{name}.safetensors", model).variance, under("variance.", SAID))
    tracked = ba.Posterior.from_checkpoint(NEWER / "tracked.pt", newer(), n_data=200, batch_size=32)
    assert_close(tracked.variance, under("tracked.", SAID), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "outputs", "temperature", "noise"),
    [
        ("classification", 3, 0.7224562694093934, None),
        ("evidence", 1, 1.0, 0.014843054115772247),
        ("forward", 1, 1.0, 0.009565084241330624),
    ],
)
def test_of_a_calibrated_one_the_settings_are_kept(name, outputs, temperature, noise):
    with pytest.warns(BayesAdamWarning, match="calibrate again"):
        q = ba.Posterior.load(NEWER / f"{name}.safetensors", newer(outputs))
    assert q.likelihood == ("classification" if noise is None else "regression")
    assert q.temperature == temperature
    assert (q.noise_variance is None) if noise is None else (float(q.noise_variance) == pytest.approx(noise))


# --- folders, which sharded posteriors were saved to ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saved by two processes."""
    return Path(shutil.copytree(Path(__file__).parent / "release_0_3" / "sharded", tmp_path / "saved"))


def test_a_folder_is_read_by_one_process(folder, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    q, whole = ba.Posterior.load(folder, build(3, 5, 1)), torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, theta in q.mode.items():
        assert torch.equal(theta, whole[f"mode.{name}"])
        assert torch.equal(q.curvature.second_moment[name], whole[f"second_moment.{name}"])
    assert (q.n_data, q.scale, q.settings.form) == (321, 0.25, "likelihood")
    assert torch.equal(q.prior_precision["0.weight"], whole["prior_precision.0.weight"])
    assert q.noise_variance == pytest.approx(0.1)
    with pytest.raises(MatchError, match="another model"):
        ba.Posterior.load(folder, build(3, 4, 1))


@pytest.mark.parametrize("how", ["header", "json", "format", "contents", "shard", "truncated", "pickle"])
def test_damaged_folders_are_told_and_nothing_runs(folder, how):
    header, shard = folder / "bayesadam.json", folder / "__1_0.distcp"
    {
        "header": header.unlink,
        "json": lambda: header.write_text(header.read_text()[:20]),
        "format": lambda: header.write_text(json.dumps(json.loads(header.read_text()) | {"format": 99})),
        "contents": (folder / ".metadata").unlink,
        "shard": shard.unlink,
        "truncated": lambda: shard.write_bytes(b""),
        "pickle": lambda: (folder / ".metadata").write_bytes(pickle.dumps(Evil(folder / "ran"))),
    }[how]()
    with pytest.raises(FileError, match="mkdir" if how == "pickle" else None):
        ba.Posterior.load(folder, build(3, 5, 1))
    assert not (folder / "ran").exists()
