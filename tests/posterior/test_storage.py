"""Saving and loading: exact, named, atomic, and closed to damaged or foreign files."""

from __future__ import annotations

import copy
import json
import stat
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam import _storage as storage
from bayesadam.errors import FileError, MatchError, SettingError
from cases import mlp, trained
from floats import assert_close


def build(**settings: object) -> ba.Posterior:
    model, optimizer = trained(seed=1)
    return ba.Posterior.from_optimizer(model, optimizer, 321, **{"prior_precision": 1.5, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"form": "likelihood", "power": 0.7},
        {"power": 1.0, "batch_size": 16},
        {"prior_precision": {"0.weight": torch.rand(5, 3), "0.bias": 0.5, "2.weight": 3.0, "2.bias": torch.rand(2)}},
    ],
)
def test_a_round_trip_is_exact(tmp_path, settings):
    posterior = build(**settings).replace(scale=0.25)
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    loaded = ba.Posterior.load(path, mlp(3, 5, 2))
    for name in posterior.mean:
        assert torch.equal(loaded.mean[name], posterior.mean[name])
        assert torch.equal(loaded.variance[name], posterior.variance[name])
    assert loaded.settings.scale == 0.25
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    draws = posterior.sample(generator=seeds[0]), loaded.sample(generator=seeds[1])
    assert all(torch.equal(draws[0][n], draws[1][n]) for n in draws[0])


def test_loading_fills_the_model_with_the_mean_in_its_own_type(tmp_path):
    for form in ("map", "likelihood"):
        posterior = build(form=form)
        path = tmp_path / "p.safetensors"
        posterior.save(path)
        other = mlp(3, 5, 2).to(torch.bfloat16)
        loaded = ba.Posterior.load(path, other)
        assert loaded.mean["0.weight"].dtype == torch.float32
        assert loaded.sample()["0.weight"].dtype == torch.bfloat16
        for name, mu in posterior.mean.items():
            assert torch.equal(other.get_parameter(name), mu.bfloat16())
        model, x = mlp(3, 5, 2), torch.randn(4, 3)
        ba.Posterior.load(path, model)
        assert_close(model(x), torch.func.functional_call(model, posterior.mean, (x,)))


@pytest.mark.parametrize("likelihood", [None, "classification"])
def test_the_likelihood_is_kept(tmp_path, likelihood):
    posterior = build(likelihood=likelihood)
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    assert posterior.likelihood == ba.Posterior.load(path, mlp(3, 5, 2)).likelihood == likelihood
    assert posterior.replace(likelihood="poisson").likelihood == "poisson"
    assert posterior.replace(scale=2.0).likelihood == likelihood
    with pytest.raises(SettingError, match="likelihood must be one of"):
        posterior.replace(likelihood="luck")


def test_the_file_holds_named_tensors_and_a_json_header(tmp_path):
    path = tmp_path / "p.safetensors"
    build().save(path)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {
            f"{role}.{name}"
            for role in ("mode", "second_moment")
            for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        }
        header = json.loads(file.metadata()["bayesadam"])
    assert header["format"] == storage.FORMAT_VERSION
    assert header["structure"] == "diagonal"
    assert header["settings"]["n_data"] == 321


def test_a_truncated_file(tmp_path):
    path = tmp_path / "p.safetensors"
    build().save(path)
    whole = path.read_bytes()
    for keep in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(FileError, match="truncated or not a saved posterior"):
            ba.Posterior.load(path, mlp(3, 5, 2))


def rewrite(path, **changes: object) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["bayesadam"])
    save_file(tensors, path, metadata={"bayesadam": json.dumps({**header, **changes})})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 99}, "format 99.*upgrade"),
        ({"format": None}, "no 'bayesadam' header"),
        ({"structure": "banded"}, "holds a 'banded' posterior"),
        ({"parameters": ["0.weight", "missing"]}, "damaged.*missing"),
        ({"settings": {}}, "damaged"),
    ],
)
def test_headers_that_cannot_be_read(tmp_path, changes, match):
    path = tmp_path / "p.safetensors"
    build().save(path)
    rewrite(path, **changes)
    with pytest.raises(FileError, match=match):
        ba.Posterior.load(path, mlp(3, 5, 2))


def test_files_that_are_no_posteriors(tmp_path):
    with pytest.raises(FileError, match="no file at"):
        ba.Posterior.load(tmp_path / "absent", mlp(3, 5, 2))
    plain = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, plain)
    with pytest.raises(FileError, match="not a saved posterior"):
        ba.Posterior.load(plain, mlp(3, 5, 2))
    pickled = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, pickled)
    with pytest.raises(FileError, match="not a saved posterior"):
        ba.Posterior.load(pickled, mlp(3, 5, 2))


def test_another_models_posterior(tmp_path):
    path = tmp_path / "p.safetensors"
    build().save(path)
    with pytest.raises(MatchError, match=r"'0.weight' has shape \(5, 3\) in the file and \(6, 3\) in the model"):
        ba.Posterior.load(path, mlp(3, 6, 2))
    with pytest.raises(MatchError, match="has no parameters"):
        ba.Posterior.load(path, torch.nn.Linear(3, 5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_damaged_values(tmp_path, value):
    posterior = build()
    path = tmp_path / "p.safetensors"
    posterior.structure.second_moment["2.weight"][0, 0] = value
    posterior.save(path)
    with pytest.raises(FileError, match=r"'2\.weight'"):
        ba.Posterior.load(path, mlp(3, 5, 2))


def test_saving_replaces_a_file_only_when_complete(tmp_path, monkeypatch):
    posterior = build()
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    before = path.read_bytes()

    def half_written(file, *_):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(storage, "write_tensors", half_written)
    with pytest.raises(FileError, match="disk full"):
        posterior.replace(scale=2.0).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_keeps_the_usual_file_mode_and_refuses_bad_places(tmp_path):
    posterior = build()
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    with pytest.raises(FileError, match="does not exist"):
        posterior.save(tmp_path / "absent" / "p.safetensors")
    with pytest.raises(FileError, match="it is a folder"):
        posterior.save(tmp_path)


def test_a_model_with_other_running_statistics_is_warned_of(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    adam = torch.optim.Adam(model.parameters())
    for _ in range(5):
        adam.zero_grad()
        model(3 + torch.randn(16, 3)).square().mean().backward()
        adam.step()
    path = tmp_path / "posterior.safetensors"
    ba.Posterior.from_optimizer(model, adam, 100, prior_precision=1.0).save(path)
    fresh = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.Posterior.load(path, fresh)
    fresh[1].reset_running_stats()
    with pytest.warns(ba.errors.BayesAdamWarning, match="running statistics are not those"):
        ba.Posterior.load(path, fresh)
