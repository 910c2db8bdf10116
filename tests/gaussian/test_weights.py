"""A Gaussian without a model: what a file says is what the live posterior says, one parameter in memory at a time."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError, ImproperError, SettingError, StateError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.settings import Settings
from cases import mlp, train
from floats import assert_close

N = 200


def recorded(structure: str) -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    recorder = ba.Recorder(optimizer, keep=8)
    train(model, optimizer, steps=12)
    given: Any = {"structure": structure, "recorder": None if structure == "diagonal" else recorder}
    return ba.Posterior.from_optimizer(model, optimizer, N, **given)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    train(model, optimizer, steps=12)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": N}
    torch.save(tree, tmp_path / "c.pt")
    return tmp_path / "c.pt", model, optimizer


def same(found: ba.GaussianWeights, expected: ba.GaussianWeights) -> None:
    assert list(found.mode) == list(expected.mode)
    assert found.prior_precision == expected.prior_precision
    for name, theta in expected.mean.items():
        assert_close(found.mean[name], theta)
        assert_close(found.variance[name], expected.variance[name])
    draws = [each.sample(2, generator=torch.Generator().manual_seed(1)) for each in (found, expected)]
    assert all(torch.equal(draws[0][name], value) for name, value in draws[1].items())
    assert_close(found.log_prob(draws[0]), expected.log_prob(draws[0]))
    assert_close(found.entropy(), expected.entropy())


@pytest.mark.parametrize("changes", [{}, {"form": "likelihood"}, {"power": 1.0, "batch_size": 8}])
def test_a_checkpoint_opens_as_the_live_posterior(checkpoint: Any, changes: Any) -> None:
    path, model, optimizer = checkpoint
    found = ba.GaussianWeights.open(path, **changes)
    same(found, ba.Posterior.from_optimizer(model, optimizer, N, **changes))
    assert found.source is not None
    assert (found.has_weights, found.n_data, found.origin.steps) == (True, N, (12, 12))
    assert ba.GaussianWeights.open(path, 7, prior_precision=2.0).replace(n_data=N).prior_precision["0.bias"] == 2.0


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("compress", [None, "8bit"])
def test_a_saved_posterior_opens_without_its_model(structure: str, compress: str | None, tmp_path: Path) -> None:
    posterior = recorded(structure)
    posterior.save(tmp_path / "p.safetensors", compress=compress)
    found = ba.GaussianWeights.open(tmp_path / "p.safetensors")
    same(found, ba.Posterior.load(tmp_path / "p.safetensors", mlp(3, 5, 2)))
    # Again from disk.
    found.save(tmp_path / "again.safetensors")
    same(ba.GaussianWeights.open(tmp_path / "again.safetensors"), found)
    assert ba.GaussianWeights.open(tmp_path / "p.safetensors", 9).n_data == 9
    with pytest.raises(SettingError, match="of its own"):
        ba.GaussianWeights.open(tmp_path / "p.safetensors", power=0.7)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_parts_are_the_whole_parameter_by_parameter(structure: str) -> None:
    posterior = recorded(structure)
    parts = [posterior.part(name) for name in posterior.mode]
    assert [name for part in parts for name in part.mode] == list(posterior.mode)
    for part in parts:
        draw = part.sample(generator=torch.Generator().manual_seed(3))
        whole = posterior.sample(generator=torch.Generator().manual_seed(3))
        for name in part.mode:
            assert_close(part.variance[name], posterior.variance[name])
            assert_close(part.snr()[name], posterior.snr()[name])
            assert torch.equal(draw[name], whole[name])
    assert_close(sum(part.entropy() for part in parts), posterior.entropy())


def test_a_part_of_a_file_is_dropped_before_the_next_is_read(checkpoint: Any) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    opened = ba.GaussianWeights.open(checkpoint[0])
    for name in opened.mode:
        part = opened.part(name)
        gc.collect()
        assert all(each() is None for each in seen)
        (v,) = part.structure.second_moment.values()
        seen.append(weakref.ref(v))
        del v, part
    assert len(seen) == 4


def test_values_that_cannot_be_are_refused_when_they_are_read(checkpoint: Any) -> None:
    path, model, optimizer = checkpoint
    optimizer.state[model[2].weight]["exp_avg_sq"][0, 0] = -1.0
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = ba.GaussianWeights.open(path, N)
    assert found.part("0.weight").variance["0.weight"].shape == (5, 3)
    with pytest.raises(StateError, match=r"'2\.weight'"):
        found.variance  # noqa: B018


def test_without_weights_there_are_variances_alone(checkpoint: Any, tmp_path: Path) -> None:
    path, model, optimizer = checkpoint
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    posterior.save(tmp_path / "p.safetensors", weights=False)
    found = ba.GaussianWeights.open(tmp_path / "p.safetensors")
    assert not found.has_weights
    assert found.shapes == posterior.shapes
    for name, variance in posterior.variance.items():
        assert_close(found.variance[name], variance)
    for refused in (found.snr, found.sample, lambda: found.save(tmp_path / "q.safetensors")):
        with pytest.raises(FileError, match="has no weights"):
            refused()
    torch.save(model.state_dict(), path)
    same(ba.GaussianWeights.open(path, optimizer_path=tmp_path / "p.safetensors"), posterior)


def test_a_posterior_writes_a_draw_with_its_buffers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=3)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    posterior.write_sample(tmp_path / "draw.safetensors", seed=4)
    found, drawn = (
        load_file(tmp_path / "draw.safetensors"),
        posterior.sample(generator=torch.Generator().manual_seed(4)),
    )
    assert set(found) == set(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in drawn.items())
    assert torch.equal(found["1.running_mean"], model[1].running_mean)


def test_sums_need_no_model(checkpoint: Any) -> None:
    path, model, optimizer = checkpoint
    live, opened = ba.Posterior.from_optimizer(model, optimizer, N), ba.GaussianWeights.open(path)
    total, expected = opened + opened.replace(n_data=50), live + live.replace(n_data=50)
    assert type(total) is ba.GaussianWeights
    assert type(expected) is ba.Posterior
    same(total, expected)


@pytest.mark.parametrize("decays", [(0.0,), (0.1, 0.0)])
def test_without_weight_decay_the_prior_precision_is_1(decays: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    groups = [{"params": list(model.parameters())[k :: len(decays)], "weight_decay": d} for k, d in enumerate(decays)]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, steps=3)
    found = ba.Posterior.from_optimizer(model, optimizer, N)
    assert set(found.prior_precision.values()) == {N * decay or 1.0 for decay in decays}
    said = next(line for line in str(found).splitlines() if "prior precision" in line)
    assert said.endswith("δ = 1 (no weight decay)" if len(decays) == 1 else "(1 where there is no weight decay)")
    assert "weight decay" not in str(found.replace(prior_precision=1.0))
    found.sample()
    letter = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=0.0)
    assert set(letter.prior_precision.values()) == {0.0}


def test_no_prior_and_no_curvature_is_improper() -> None:
    q = ba.GaussianWeights({"w": torch.ones(2)}, Diagonal({"w": torch.tensor([0.0, 1.0])}), Settings(1.0, {"w": 0.0}))
    with pytest.raises(ImproperError, match="'w': 1 of 2"):
        q.sample()
    assert "GaussianWeights(diagonal, 2 weights in 1 parameters" in repr(q)
