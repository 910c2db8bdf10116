"""Saved posteriors: exact, named, atomic, small where that is asked for, and closed to damaged or foreign files."""

from __future__ import annotations

import copy
import dataclasses
import json
import stat
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam import _storage as storage
from bayesadam.errors import BayesAdamWarning, FileError, MatchError, SettingError
from bayesadam.readers import format_of, read_checkpoint, read_curvature
from bayesadam.readers.compression import decode, encode, outline, probe, widened
from bayesadam.readers.formats.lazy import Lazy
from cases import mlp, rewrite, seeded, soap, train, trained
from floats import approx, assert_close

COMPRESSIONS = (None, "factored")
N = 64


def build(**settings: object) -> ba.Posterior:
    model, optimizer = trained(seed=1)
    return ba.Posterior.from_optimizer(model, optimizer, 321, **{"prior_precision": 1.5, **settings})


# --- one file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "likelihood", "power": 0.7, "likelihood": "classification", "temperature": 1.5},
        {"power": 1.0, "batch_size": 16, "noise_variance": [0.25, 4.0]},
        {"prior_precision": {"0.weight": torch.rand(5, 3), "0.bias": 0.5, "2.weight": 3.0, "2.bias": torch.rand(2)}},
    ],
)
def test_a_round_trip_is_exact(tmp_path, settings):
    q, path = build().replace(scale=0.25, **settings), tmp_path / "q.safetensors"
    q.save(path)
    loaded = ba.Posterior.load(path, mlp(3, 5, 2))
    assert_close(loaded.mean, q.mean, rtol=1e-300)
    assert_close(loaded.variance, q.variance, rtol=1e-300)
    assert (loaded.scale, loaded.likelihood, loaded.temperature) == (0.25, q.likelihood, q.temperature)
    assert str(loaded.noise_variance) == str(q.noise_variance)
    assert_close(loaded.sample(generator=seeded()), q.sample(generator=seeded()), rtol=1e-300)


def test_loading_fills_the_model_with_the_mean_in_its_own_type(tmp_path):
    q, path, other = build().replace(form="likelihood"), tmp_path / "p.safetensors", mlp(3, 5, 2).to(torch.bfloat16)
    q.save(path)
    loaded = ba.Posterior.load(path, other)
    assert loaded.mean["0.weight"].dtype == torch.float32
    assert loaded.sample()["0.weight"].dtype == torch.bfloat16
    assert all(torch.equal(other.get_parameter(name), mu.bfloat16()) for name, mu in q.mean.items())


def test_the_file_holds_named_tensors_and_a_json_header(tmp_path):
    path = tmp_path / "p.safetensors"
    build().save(path)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {f"{role}.{name}" for role in ("mode", "second_moment") for name in names}
        header = json.loads(file.metadata()["bayesadam"])
    assert (header["format"], header["structure"], header["settings"]["n_data"]) == (1, "diagonal", 321)
    opened = ba.GaussianWeights.open(path, 9, prior_precision=2.0)
    assert (opened.n_data, opened.prior_precision["0.bias"]) == (9, 2.0)
    with pytest.raises(SettingError, match="of its own"):
        ba.GaussianWeights.open(path, power=0.7)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h, t: h.update(format=99), "format 99.*upgrade"),
        (lambda h, t: h.update(format=None), "no 'bayesadam' header"),
        (lambda h, t: h.update(structure="banded"), "holds a 'banded' posterior"),
        (lambda h, t: h.update(parameters=["0.weight", "missing"]), "damaged.*missing"),
        (lambda h, t: h.update(settings={}), "damaged"),
        (lambda h, t: h.update(noise_variance=[]), "damaged"),
        (lambda h, t: h.update(temperature=[1.0]), "damaged"),
        (lambda h, t: h.update(parameters=5), "damaged"),
    ],
)
def test_headers_that_cannot_be_read(tmp_path, change, match):
    path = tmp_path / "p.safetensors"
    build().save(path)
    rewrite(path, change)
    with pytest.raises(FileError, match=match):
        ba.Posterior.load(path, mlp(3, 5, 2))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("mode.0.weight", torch.ones(5, 3).int()),
        ("second_moment.0.weight", torch.ones(15)),
        ("second_moment.0.bias", torch.ones(5).to(torch.complex64)),
        ("second_moment.2.bias", torch.ones(1)),
    ],
)
def test_tensors_that_do_not_fit_together(tmp_path, key, tensor):
    path = tmp_path / "p.safetensors"
    build().save(path)
    rewrite(path, lambda _, tensors: tensors.update({key: tensor}))
    with pytest.raises(FileError, match="damaged"):
        ba.GaussianWeights.open(path)


def test_files_that_are_damaged_or_no_posteriors(tmp_path):
    path, plain, pickled = tmp_path / "p.safetensors", tmp_path / "w.safetensors", tmp_path / "w.pt"
    build().save(path)
    whole = path.read_bytes()
    for keep in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(FileError, match="truncated or not a saved posterior"):
            ba.Posterior.load(path, mlp(3, 5, 2))
    with pytest.raises(FileError, match="no file at"):
        ba.Posterior.load(tmp_path / "absent", mlp(3, 5, 2))
    save_file({"weight": torch.zeros(2)}, plain)
    torch.save({"weight": torch.zeros(2)}, pickled)
    for foreign in (plain, pickled):
        with pytest.raises(FileError, match="not a saved posterior"):
            ba.Posterior.load(foreign, mlp(3, 5, 2))


def test_another_models_posterior(tmp_path):
    build().save(tmp_path / "p.safetensors")
    with pytest.raises(MatchError, match=r"'0.weight' has shape \(5, 3\) in the file and \(6, 3\) in the model"):
        ba.Posterior.load(tmp_path / "p.safetensors", mlp(3, 6, 2))
    with pytest.raises(MatchError, match="has no parameters"):
        ba.Posterior.load(tmp_path / "p.safetensors", nn.Linear(3, 5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_values_that_cannot_be(tmp_path, value):
    q, path = build(), tmp_path / "p.safetensors"
    q.curvature.second_moment["2.weight"][0, 0] = value
    q.save(path)
    with pytest.raises(FileError, match=r"'2\.weight'"):
        ba.Posterior.load(path, mlp(3, 5, 2))
    opened = ba.GaussianWeights.open(path)
    # One parameter is read at a time: the others are there.
    assert opened.part("0.weight").variance["0.weight"].shape == (5, 3)
    with pytest.raises(FileError, match=r"'2\.weight'"):
        opened.variance  # noqa: B018


def test_saving_replaces_a_file_only_when_complete(tmp_path, monkeypatch):
    q, path, plain = build(), tmp_path / "p.safetensors", tmp_path / "plain"
    q.save(path)
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    before = path.read_bytes()

    def half_written(file, *_):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(storage, "write_tensors", half_written)
    with pytest.raises(FileError, match="disk full"):
        q.replace(scale=2.0).save(path)
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == {path, plain}
    for place, match in ((tmp_path / "absent" / "p.safetensors", "does not exist"), (tmp_path, "it is a folder")):
        with pytest.raises(FileError, match=match):
            q.save(place)


def test_a_model_with_other_tensors_than_those_of_the_posterior_is_warned_of(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, steps=5)
    q, path = ba.Posterior.from_optimizer(model, adam, 100), tmp_path / "posterior.safetensors"
    q.save(path)
    fresh = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.Posterior.load(path, fresh)
    fresh[1].reset_running_stats()
    with pytest.warns(BayesAdamWarning, match="running statistics or frozen weights are not those"):
        ba.Posterior.load(path, fresh)
    fresh, path = copy.deepcopy(model), tmp_path / "of the head.safetensors"
    fresh[0].requires_grad_(False)
    head = torch.optim.Adam(fresh[3].parameters())
    train(fresh, head, steps=5)
    ba.Posterior.from_optimizer(fresh, head, 100).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.Posterior.load(path, copy.deepcopy(fresh))
        ba.Posterior.load(path, copy.deepcopy(fresh).bfloat16())
    fresh[0].weight.data.neg_()
    with pytest.warns(BayesAdamWarning, match=r"frozen weights are not those that .* \(first '0.weight', 1 in all\)"):
        ba.Posterior.load(path, fresh)
    assert not q.moved_statistics
    model(torch.randn(8, 3))
    assert q.moved_statistics == ["1.running_mean", "1.running_var"]


# --- one tensor at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A folder with a checkpoint, and the network and the optimiser in it."""
    torch.manual_seed(0)
    model = mlp(20, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.97))
    train(model, optimizer, steps=40)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": N}, tmp_path / "last.ckpt")
    return tmp_path, model, optimizer


def test_files_are_read_and_written_tensor_by_tensor(saved):
    folder, _, _ = saved
    opened, seen = ba.GaussianWeights.open(folder / "last.ckpt"), []
    moments = opened.curvature.second_moment

    def watched(name: str) -> torch.Tensor:
        assert all(each() is None for each in seen)
        v = moments[name]
        seen.append(weakref.ref(v))
        return v

    structure = dataclasses.replace(opened.curvature, second_moment=Lazy(moments.outline, watched))
    opened = dataclasses.replace(opened, curvature=structure)
    for name in opened.mode:
        opened.part(name).snr()
    opened.export(folder / "posterior.safetensors", compress="factored")
    # The rows and the columns of a matrix are two tensors.
    assert len(seen) == 4 + 6


# --- without weights, and in fewer bytes ----------------------------------------------------------------------------


def product(v: torch.Tensor) -> torch.Tensor:
    """Of the margins of a matrix, over their sum."""
    rows = v.double().flatten(1)
    return (torch.outer(rows.sum(1), rows.sum(0)) / rows.sum()).view(v.shape)


def test_factored_is_the_product_of_the_margins():
    v = torch.rand(5, 3, 4) ** 4
    v[2] = 0
    assert_close(decode(encode(v, "factored"), "v").double(), product(v), rtol=1e-6)
    assert not decode(encode(torch.zeros(4, 6), "factored"), "v").any()
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(MatchError, match="negative, NaN or infinite"):
            encode(torch.tensor([[1.0, bad]]), "factored")


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("shape", [(), (3,), (7, 300), (4, 5, 6)])
def test_the_outline_is_that_of_the_values(compress, shape):
    parts, like = encode(torch.rand(shape), compress), outline(torch.Size(shape), torch.float32, compress)
    assert {k: (p.shape, p.dtype) for k, p in parts.items()} == {k: (p.shape, p.dtype) for k, p in like.items()}


def test_rounded_bases_become_orthonormal_again():
    basis = torch.linalg.qr(torch.randn(40, 40, generator=seeded())).Q

    def distance(columns: torch.Tensor) -> float:
        return float((columns.double().T @ columns.double() - torch.eye(40)).abs().max())

    assert distance(basis.bfloat16().float()) > 5e-4
    assert distance(widened("left.w", basis.bfloat16())) < 2e-5
    assert torch.equal(widened("directions.w", basis.bfloat16()), basis.bfloat16().float())


def same_moments(found: Any, expected: Any, compress: str | None) -> None:
    assert list(found) == list(expected)
    for name, v in expected.items():
        if compress == "factored" and v.dim() > 1:
            assert_close(found[name].double(), product(v), rtol=1e-6)
        else:
            assert torch.equal(found[name], v)


def published(folder: Path, model: nn.Module, compress: str | None = None, **how: Any) -> Path:
    """`model.safetensors` with `posterior.safetensors` beside it."""
    save_file(model.state_dict(), folder / "model.safetensors")
    out = folder / "posterior.safetensors"
    ba.GaussianWeights.open(folder / "last.ckpt", **how).export(out, compress=compress)
    return out


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_an_export_is_read_back_by_everything(saved, compress):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model, optimizer, N)
    out = published(folder, model, compress, batch_size=16)
    loaded, opened = ba.Posterior.load(out, model), ba.GaussianWeights.open(out)
    same_moments(loaded.curvature.second_moment, live.curvature.second_moment, compress)
    assert (loaded.n_data, loaded.settings.batch_size, loaded.settings.power) == (N, 16, 0.5)
    assert (loaded.origin.steps, loaded.origin.beta, loaded.origin.recorded) == ((40, 40), 0.97, False)
    assert all(torch.equal(loaded.mode[name], theta) for name, theta in live.mode.items())
    assert (opened.has_weights, opened.shapes) == (False, live.shapes)
    assert_close(opened.variance, loaded.variance)
    for refused in (opened.snr, opened.sample, lambda: opened.save(folder / "q.safetensors")):
        with pytest.raises(FileError, match="has no weights"):
            refused()
    # As the optimiser's state of weights in another file, and of the weights beside it.
    torch.save(model.state_dict(), folder / "elsewhere.pt")
    for path, second in ((folder / "elsewhere.pt", out), (folder / "model.safetensors", None)):
        q = ba.Posterior.from_checkpoint(path, mlp(20, 32, 3), optimizer_path=second)
        assert all(torch.equal(q.curvature.second_moment[n], v) for n, v in loaded.curvature.second_moment.items())
        assert (q.n_data, q.prior_precision) == (N, approx(live.prior_precision))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_save_and_load_with_every_option(saved, weights, compress):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model.double(), optimizer, N, prior_precision=2.0)
    path = folder / "saved.safetensors"
    live.save(path, weights=weights, compress=compress)
    q = ba.Posterior.load(path, model)
    same_moments(q.curvature.second_moment, live.curvature.second_moment, compress)
    assert {v.dtype for v in (*q.curvature.second_moment.values(), *q.mode.values())} == {torch.float64}
    assert q.prior_precision == live.prior_precision
    assert all(torch.equal(q.mode[name], theta) for name, theta in live.mode.items())
    assert storage.read(path)[1]["format"] == (1 if weights and compress is None else 2)
    assert any(key.startswith("mode.") for key in load_file(path)) == weights
    if weights:
        assert format_of(path).name == "posterior"
        assert_close(ba.Posterior.from_checkpoint(path, mlp(20, 32, 3).double()).variance, q.variance)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_kronecker_is_published_with_its_bases(tmp_path, compress):
    model = mlp(20, 32, 3)
    optimizer = soap(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.95, 0.97))
    train(model, optimizer, steps=40)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": N}, tmp_path / "last.ckpt")
    live = ba.Posterior.from_optimizer(model, optimizer, N, structure="kronecker")
    loaded = ba.Posterior.load(published(tmp_path, model, compress, structure="kronecker"), model)
    again = ba.Posterior.from_checkpoint(tmp_path / "model.safetensors", mlp(20, 32, 3), structure="kronecker")
    same_moments(loaded.curvature.second_moment, live.curvature.second_moment, compress)
    assert set(live.curvature.bases) == set(loaded.curvature.bases) == set(again.curvature.bases)
    assert_close(again.variance, loaded.variance)
    for name in ("adam", "adagrad"):
        with pytest.raises(MatchError):
            ba.Posterior.from_checkpoint(tmp_path / "model.safetensors", mlp(20, 32, 3), optimizer=name)


def test_weights_of_another_training_are_refused(saved):
    folder, model, optimizer = saved
    out, whole = published(folder, model), folder / "whole.safetensors"
    torch.manual_seed(7)
    other = mlp(20, 32, 3)
    with pytest.raises(MatchError, match="load the weights that were published"):
        ba.Posterior.load(out, other)
    half = mlp(20, 32, 3)
    half.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    assert ba.Posterior.load(out, half).n_weights == 771
    # As a state beside weights, too, and with its own weights in it.
    torch.save(other.state_dict(), folder / "elsewhere.pt")
    ba.Posterior.from_optimizer(model, optimizer, N).save(whole)
    for state in (out, whole):
        with pytest.raises(MatchError, match=r"weights in .*elsewhere.pt are not those"):
            ba.Posterior.from_checkpoint(folder / "elsewhere.pt", mlp(20, 32, 3), optimizer_path=state)
    assert len(probe(torch.arange(1000.0))) == 16
    assert [probe(torch.zeros(shape)).shape for shape in ((), (0,))] == [(1,), (0,)]


def test_a_short_training_is_warned_of(saved):
    folder, model, _ = saved
    short = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    train(model, short, steps=5)
    torch.save({"model": model.state_dict(), "optimizer": short.state_dict()}, folder / "few.pt")
    with pytest.warns(BayesAdamWarning, match=r"few\.pt was trained for 5 steps"):
        ba.GaussianWeights.open(folder / "few.pt", N).export(folder / "few.safetensors")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"compress": "8bit"}, SettingError, "compress must be one of.*factored"),
        ({"structure": "low-rank"}, SettingError, "structure must be one of"),
        ({"structure": "kronecker"}, SettingError, "needs eigenbases"),
        ({"n_data": -1}, SettingError, "n_data"),
        ({"out": "posterior.pt"}, FileError, "safetensors"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused_and_nothing_written(saved, how, error, message):
    folder, _, _ = saved
    out, compress = folder / how.pop("out", "posterior.safetensors"), how.pop("compress", None)
    with pytest.raises(error, match=message):
        ba.GaussianWeights.open(folder / "last.ckpt", **how).export(out, compress=compress)
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def test_a_later_format_and_parts_that_are_missing_are_refused(saved):
    folder, model, optimizer = saved
    out = published(folder, model, "factored")
    tensors, header = storage.read(out)
    storage.write(out, tensors, {**header, "format": 3})
    with pytest.raises(FileError, match="reads up to 2"):
        ba.Posterior.load(out, model)
    # A release that knows the first format alone.
    with pytest.raises(FileError, match="has format 2, this version of bayesadam reads up to 1"):
        storage.check_version(out, 2, storage.Kind("bayesadam", "a saved posterior"))
    for missing in ("second_moment_rows.0.weight", "second_moment.0.bias", "probe.0.weight"):
        storage.write(out, {key: t for key, t in tensors.items() if key != missing}, header)
        with pytest.raises(FileError, match="damaged"):
            ba.Posterior.load(out, model)
    storage.write(out, {**tensors, "second_moment_columns.0.weight": torch.zeros(())}, header)
    with pytest.raises(FileError, match="damaged"):
        read_curvature(read_checkpoint(folder / "model.safetensors"))
    live = ba.Posterior.from_optimizer(model, optimizer, N)
    live.replace(prior_precision={n: torch.ones_like(t) for n, t in live.mode.items()}).save(out)
    with pytest.raises(FileError, match="prior precision for each weight"):
        read_checkpoint(out)
