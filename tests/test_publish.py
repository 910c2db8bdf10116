"""Posteriors published as small files: what is lost is bounded, what is read back is the same everywhere, the rest
refused.
"""

from __future__ import annotations

import dataclasses
import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam import _storage as storage
from bayesadam.cli import app
from bayesadam.errors import FileError, MatchError, SettingError, StateError
from bayesadam.readers import format_of, read_checkpoint, read_curvature
from bayesadam.readers.compression import decode, encode, outline, probe, widened
from bayesadam.readers.formats.lazy import Lazy
from cases import soap
from floats import approx, assert_close, close

COMPRESSIONS = (None, "bfloat16", "factored")


# --- the codes ------------------------------------------------------------------------------------------------------


def test_factored_is_the_product_of_the_margins():
    v = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(1)) ** 4
    v[2] = 0
    found = decode(encode(v, "factored"), "v")
    dense = v.double().reshape(5, 12)
    expected = torch.outer(dense.sum(1), dense.sum(0)) / dense.sum()
    assert_close(found.double().reshape(5, 12), expected, rtol=1e-6)
    rank_one = torch.outer(torch.rand(4) + 0.1, torch.rand(6) + 0.1)
    assert_close(decode(encode(rank_one, "factored"), "v"), rank_one, rtol=1e-6)
    assert not decode(encode(torch.zeros(4, 6), "factored"), "v").any()


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("shape", [(), (3,), (7, 300), (4, 5, 6)])
def test_the_outline_is_that_of_the_values(compress, shape):
    parts, like = encode(torch.rand(shape), compress), outline(torch.Size(shape), torch.float32, compress)
    assert {k: (p.shape, p.dtype) for k, p in parts.items()} == {k: (p.shape, p.dtype) for k, p in like.items()}


def test_what_is_no_second_moment_is_not_encoded():
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(StateError, match="negative, NaN or infinite"):
            encode(torch.tensor([1.0, bad]), "bfloat16")
    with pytest.raises(SettingError, match="'4bit'"):
        encode(torch.ones(2), "4bit")


def test_rounded_bases_become_orthonormal_again():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40)).Q
    rounded = basis.bfloat16().float()

    def distance(columns):
        return float((columns.double().T @ columns.double() - torch.eye(40)).abs().max())

    assert distance(rounded) > 5e-4
    assert distance(widened("left.w", basis.bfloat16())) < 2e-5
    assert torch.equal(widened("directions.w", basis.bfloat16()), rounded)


def export_checkpoint(path, out, n_data=None, *, compress=None, **options):
    ba.GaussianWeights.open(path, n_data, **options).export(out, compress=compress)


# --- files ----------------------------------------------------------------------------------------------------------


def build():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def train(model, optimizer, steps=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    x[:, :2] = 0
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, 2:5].argmax(dim=1)).backward()
        optimizer.step()


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint, and the network and the optimiser in it."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.97))
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 64}, tmp_path / "last.ckpt")
    return tmp_path, model, optimizer


def same_moments(found, expected, compress):
    assert list(found) == list(expected)
    for name, v in expected.items():
        if compress == "factored" and v.dim() > 1:
            assert_close(found[name].sum(dim=1), v.sum(dim=1), rtol=1e-4)
        else:
            assert_close(found[name], v, rtol=0.0 if compress is None else 0.05)


def published(folder, model, compress=None, **options):
    """`model.safetensors` with `posterior.safetensors` beside it."""
    save_file(model.state_dict(), folder / "model.safetensors")
    export_checkpoint(folder / "last.ckpt", folder / "posterior.safetensors", compress=compress, **options)
    return folder / "posterior.safetensors"


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_an_export_is_read_back_by_everything(saved, compress):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model, optimizer, n_data=64)
    out = published(folder, model, compress, batch_size=16)
    loaded = ba.Posterior.load(out, model)
    same_moments(loaded.structure.second_moment, live.structure.second_moment, compress)
    assert loaded.prior_precision == approx(live.prior_precision)
    assert (loaded.settings.n_data, loaded.settings.batch_size, loaded.settings.power) == (64, 16, 0.5)
    assert all(torch.equal(loaded.mode[name], theta) for name, theta in live.mode.items())
    # As the optimiser's state of weights in another file, of the weights beside it, of a folder.
    torch.save(model.state_dict(), folder / "elsewhere.pt")
    fresh = build()
    for path, second in ((folder / "elsewhere.pt", out), (folder / "model.safetensors", None)):
        found = ba.Posterior.from_checkpoint(path, fresh, optimizer_path=second)
        assert all(torch.equal(found.structure.second_moment[n], v) for n, v in loaded.structure.second_moment.items())
        assert found.prior_precision == approx(live.prior_precision)
        assert found.n_data == 64
    inspected, direct = (ba.inspect(folder / name) for name in ("model.safetensors", "last.ckpt"))
    assert (inspected.optimizer, inspected.n_data) == ("published", 64)
    # Inputs that are always 0 fill columns, which even factors keep.
    assert inspected.dead == direct.dead == 64
    ba.pruning.prune_checkpoint(folder / "model.safetensors", folder / "pruned.safetensors", 0.5)
    assert sum(int((t == 0).sum()) for t in load_file(folder / "pruned.safetensors").values()) >= 771 // 2
    ba.GaussianWeights.open(folder / "model.safetensors").write_sample(folder / "draw.safetensors", seed=3)
    drawn = loaded.sample(generator=torch.Generator().manual_seed(3))
    written = load_file(folder / "draw.safetensors")
    assert all(close(written[name], value, rtol=1e-5, atol=1e-7) for name, value in drawn.items())


def test_the_optimisers_own_state_comes_first(saved):
    folder, model, optimizer = saved
    published(folder, model)
    torch.save(optimizer.state_dict(), folder / "optimizer.safetensors")
    assert read_checkpoint(folder / "model.safetensors").optimizer_path == folder / "optimizer.safetensors"
    (folder / "optimizer.safetensors").unlink()
    (folder / "last.ckpt").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert read_checkpoint(folder / "pytorch_model.bin").optimizer_path == folder / "posterior.safetensors"
    (folder / "pytorch_model.bin").unlink()
    assert read_curvature(read_checkpoint(folder)).second_moment.keys() == dict(model.named_parameters()).keys()
    save_file(model.state_dict(), folder / "other.model.2.safetensors")
    with pytest.raises(FileError, match="no optimiser state"):
        read_checkpoint(folder / "other.model.2.safetensors")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_save_and_load_with_every_option(saved, weights, compress):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model, optimizer, n_data=64, prior_precision=2.0).replace(temperature=1.5)
    path = folder / "saved.safetensors"
    live.save(path, weights=weights, compress=compress)
    found = ba.Posterior.load(path, model)
    same_moments(found.structure.second_moment, live.structure.second_moment, compress)
    assert (found.temperature, found.prior_precision) == (1.5, live.prior_precision)
    assert all(torch.equal(found.mode[name], theta) for name, theta in live.mode.items())
    header = storage.read(path)[1]
    assert header["format"] == (1 if weights and compress is None else 2)
    assert any(key.startswith("mode.") for key in load_file(path)) == weights


def test_a_whole_posterior_is_a_checkpoint_by_itself(saved):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model, optimizer, n_data=64)
    live.save(folder / "whole.safetensors", compress="bfloat16")
    assert format_of(folder / "whole.safetensors").name == "posterior"
    inspection = ba.inspect(folder / "whole.safetensors")
    assert (inspection.format, inspection.n_data, inspection.weights) == ("posterior", 64, live.n_weights)
    assert "kept as bfloat16" in " ".join(inspection.why)
    report = ba.pruning.prune_checkpoint(folder / "whole.safetensors", folder / "pruned.safetensors", 0.75)
    assert report.to_dict()
    assert set(load_file(folder / "pruned.safetensors")) == set(model.state_dict())
    found = ba.Posterior.from_checkpoint(folder / "whole.safetensors", build())
    same_moments(found.structure.second_moment, live.structure.second_moment, "bfloat16")


def test_double_precision_stays(tmp_path):
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 20, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    live = ba.Posterior.from_optimizer(model, optimizer, n_data=64)
    live.save(tmp_path / "p.safetensors", weights=False, compress="factored")
    found = ba.Posterior.load(tmp_path / "p.safetensors", model)
    assert {v.dtype for v in (*found.structure.second_moment.values(), *found.mode.values())} == {torch.float64}


# --- rotated ones ---------------------------------------------------------------------------------------------------


@pytest.fixture
def soap_saved(tmp_path):
    torch.manual_seed(0)
    model = build()
    optimizer = soap(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.95, 0.97))
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 64}, tmp_path / "last.ckpt")
    return tmp_path, model, optimizer


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_kronecker_is_published_with_its_bases(soap_saved, compress):
    folder, model, optimizer = soap_saved
    live = ba.Posterior.from_optimizer(model, optimizer, n_data=64, structure="kronecker")
    out = published(folder, model, compress, structure="kronecker")
    loaded = ba.Posterior.load(out, model)
    assert loaded.structure.kind == "kronecker"
    again = ba.Posterior.from_checkpoint(folder / "model.safetensors", build(), structure="kronecker")
    diagonal = ba.Posterior.from_checkpoint(folder / "model.safetensors", build())
    expected = ba.Posterior.from_optimizer(model, optimizer, n_data=64)
    for name, v in live.structure.second_moment.items():
        assert torch.equal(again.structure.second_moment[name], loaded.structure.second_moment[name])
        assert (name in live.structure.bases) == (name in loaded.structure.bases) == (name in again.structure.bases)
        if compress == "factored":
            continue
        # Rounding leaves numbers in a block that are twenty decades below the others.
        tolerance = 1e-5 if compress is None else 0.12
        assert_close(loaded.structure.second_moment[name], v, rtol=tolerance)
        assert_close(loaded.variance[name], live.variance[name], rtol=tolerance)
        # The diagonal of the weights' own coordinates, never the rotated numbers.
        weights = expected.structure.second_moment[name]
        assert_close(diagonal.structure.second_moment[name], weights, rtol=tolerance, atol=1e-3 * weights.max())


def test_rotated_moments_are_never_read_as_the_weights_own(soap_saved):
    folder, model, _ = soap_saved
    published(folder, model, structure="kronecker")
    for name in ("adam", "adamw", "rmsprop", "adagrad"):
        with pytest.raises((StateError, MatchError)):
            ba.Posterior.from_checkpoint(folder / "model.safetensors", build(), optimizer=name)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_weights_of_another_training_are_refused(saved):
    folder, model, _ = saved
    out = published(folder, model)
    torch.manual_seed(7)
    with pytest.raises(MatchError, match="load the weights that were published"):
        ba.Posterior.load(out, build())
    half = build()
    half.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    assert ba.Posterior.load(out, half).n_weights == 771
    with pytest.raises(MatchError, match="another model's posterior"):
        ba.Posterior.load(out, nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3)))
    with pytest.raises(MatchError, match="no parameters"):
        ba.Posterior.load(out, nn.Linear(20, 32))


def test_weights_of_another_training_are_refused_in_a_checkpoint_too(saved, tmp_path_factory):
    folder, model, optimizer = saved
    out = published(folder, model, "bfloat16")
    other = build()
    torch.save(other.state_dict(), folder / "elsewhere.pt")
    # With its own weights in it, too.
    ba.Posterior.from_optimizer(model, optimizer, 64).save(folder / "whole.safetensors")
    for state in (out, folder / "whole.safetensors"):
        pair = (folder / "elsewhere.pt", state)
        for read in (
            lambda pair=pair: ba.pruning.prune_checkpoint(
                pair[0], folder / "p.safetensors", 0.5, optimizer_path=pair[1]
            ),
            lambda pair=pair: ba.Posterior.from_checkpoint(pair[0], build(), optimizer_path=pair[1]),
            lambda pair=pair: ba.merge([folder / "last.ckpt", pair]),
        ):
            with pytest.raises(MatchError, match=r"weights in .*elsewhere.pt are not those"):
                read()
    # Beside the weights, and in a folder of both.
    save_file(other.state_dict(), folder / "model.safetensors")
    alone = tmp_path_factory.mktemp("folder")
    for name in ("model.safetensors", "posterior.safetensors"):
        (alone / name).write_bytes((folder / name).read_bytes())
    for path in (folder / "model.safetensors", alone):
        with pytest.raises(MatchError, match="not those that the saved posterior belongs to"):
            read_checkpoint(path)
    save_file({n: t.bfloat16() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    assert read_checkpoint(folder / "model.safetensors").format == "safetensors"


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_the_file_says_how_many_gradients_and_examples_are_behind_it(saved, compress):
    folder, model, optimizer = saved
    out = published(folder, model, compress, batch_size=16)
    live = ba.Posterior.from_optimizer(model, optimizer, 64, batch_size=16)
    live.save(folder / "live.safetensors", weights=False, compress=compress)
    again = ba.Posterior.from_checkpoint(folder / "model.safetensors", build(), power=1.0)
    found = [ba.Posterior.load(path, model) for path in (out, folder / "live.safetensors")]
    for each in (live, again, *found):
        assert (each.origin.steps, each.origin.beta, each.origin.recorded) == ((40, 40), 0.97, False)
        assert each.settings.batch_size == 16


def test_short_trainings_are_warned_of_when_exported_and_when_merged(saved):
    folder, model, _ = saved
    sources = [folder / "last.ckpt"]
    short = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    train(model, short, steps=5)
    torch.save({"model": model.state_dict(), "optimizer": short.state_dict()}, folder / "few.pt")
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"few\.pt was trained for 5 steps"):
        export_checkpoint(folder / "few.pt", folder / "few.safetensors", 64)
    torch.save(model.state_dict(), folder / "weights.pt")
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"weights\.pt was trained for 5 steps"):
        ba.merge([*sources, (folder / "weights.pt", folder / "few.safetensors")])


def test_the_batch_size_of_a_published_file_counts_in_a_merge(saved):
    folder, model, optimizer = saved
    out = published(folder, model, batch_size=4)
    other = build()
    other.load_state_dict(model.state_dict())
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, betas=(0.9, 0.97))
    train(other, adam, steps=50)
    live = [
        ba.Posterior.from_optimizer(m, o, 64, batch_size=b) for m, o, b in ((model, optimizer, 4), (other, adam, 32))
    ]
    live[1].save(folder / "other.safetensors")
    base = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    expected = ba.merge(live, base=base)
    found = ba.merge([(folder / "model.safetensors", out), folder / "other.safetensors"], base=base)
    assert found.report.notes == ()
    assert all(close(found[name], expected[name], atol=1e-6) for name in expected)
    shares = [{row.name: row.shares for row in each.report.layers} for each in (found, expected)]
    assert all(shares[0][name] == approx(own, abs=1e-5) for name, own in shares[1].items())


def test_the_probe_is_a_copy_of_a_few_weights():
    theta = torch.arange(1000.0)
    assert len(probe(theta)) == 16
    theta.zero_()
    assert probe(torch.zeros(())).shape == (1,)
    assert probe(torch.zeros(0)).shape == (0,)


def test_a_file_without_weights_says_what_to_give(saved):
    folder, model, _ = saved
    out = published(folder, model)
    with pytest.raises(FileError, match=r"4 parameters without weights.*optimizer_path="):
        read_checkpoint(out)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compress": "zip"}, SettingError, "bfloat16"),
        ({"structure": "low-rank"}, SettingError, "structure must be one of"),
        ({"structure": "kronecker"}, SettingError, "needs eigenbases"),
        ({"n_data": -1}, SettingError, "n_data"),
        ({"batch_size": 0}, SettingError, "batch_size"),
        ({"out": "posterior.pt"}, FileError, "safetensors"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused_and_nothing_written(saved, options, error, message):
    folder, _, _ = saved
    out = folder / options.pop("out", "posterior.safetensors")
    with pytest.raises(error, match=message):
        export_checkpoint(folder / "last.ckpt", out, **options)
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def test_a_later_format_and_damaged_files_are_refused(saved):
    folder, model, optimizer = saved
    out = published(folder, model, "factored")
    tensors, header = storage.read(out)
    storage.write(out, tensors, {**header, "format": 3})
    with pytest.raises(FileError, match="reads up to 2"):
        ba.Posterior.load(out, model)
    # A release that knows the first format alone.
    with pytest.raises(FileError, match="has format 2, this version of bayesadam reads up to 1"):
        storage.check_version(out, 2, storage.Kind("bayesadam", "a saved posterior"))
    for missing in ("second_moment_rows.0.weight", "second_moment_columns.0.weight", "probe.0.weight"):
        storage.write(out, {key: t for key, t in tensors.items() if key != missing}, header)
        with pytest.raises(FileError, match="damaged"):
            ba.Posterior.load(out, model)
    rows = torch.full_like(tensors["second_moment_rows.0.weight"], float("nan"))
    storage.write(out, {**tensors, "second_moment_rows.0.weight": rows}, header)
    with pytest.raises(StateError, match="must be finite"):
        read_curvature(read_checkpoint(folder / "model.safetensors"))
    live = ba.Posterior.from_optimizer(model, optimizer, 64)
    live.replace(prior_precision={n: torch.ones_like(t) for n, t in live.mode.items()}).save(out)
    with pytest.raises(FileError, match="prior precision for each weight"):
        read_checkpoint(out)


def test_other_files_are_not_taken_for_posteriors(saved):
    folder, model, optimizer = saved
    live = ba.Posterior.from_optimizer(model, optimizer, 64)
    ba.pruning.save_masks(folder / "masks.safetensors", ba.pruning_masks(live, 0.5))
    save_file({"bayesadam": torch.ones(2)}, folder / "named.safetensors")
    for name in ("masks", "named"):
        assert format_of(folder / f"{name}.safetensors").name == "safetensors"


# --- the command, and memory ----------------------------------------------------------------------------------------


def test_the_command(saved):
    folder, model, _ = saved
    out = folder / "posterior.safetensors"
    arguments = ["export", str(folder / "last.ckpt"), "-o", str(out), "--compress", "bfloat16", "--batch-size", "16"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert str(out) in done.output.replace("\n", "")
    with safe_open(out, framework="pt") as file:
        header = json.loads(file.metadata()["bayesadam"])
    assert (header["optimizer"], header["steps"], header["compress"]) == (["adamw"], [40, 40], "bfloat16")
    assert header["settings"]["batch_size"] == 16
    assert ba.Posterior.load(out, model).n_weights == 771


def test_files_are_written_tensor_by_tensor(tmp_path):
    """Each second moment is dropped before the next is read."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.ckpt")
    opened = ba.GaussianWeights.open(tmp_path / "last.ckpt", 10)
    moments, seen = opened.structure.second_moment, []

    def watched(name):
        assert all(each() is None for each in seen)
        v = moments[name]
        seen.append(weakref.ref(v))
        return v

    structure = dataclasses.replace(opened.structure, second_moment=Lazy(moments.outline, watched))
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"last\.ckpt was trained for 1 steps"):
        dataclasses.replace(opened, structure=structure).export(tmp_path / "posterior.safetensors", compress="bfloat16")
    assert len(seen) == 12
