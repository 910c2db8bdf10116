"""However it was read, the same state gives the same posterior."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from cases import mlp, soap, train
from floats import assert_close

N = 200


def same(found: ba.GaussianWeights, expected: ba.GaussianWeights) -> None:
    assert list(found.mode) == list(expected.mode)
    assert vars(found.settings) == vars(expected.settings)
    for name, theta in expected.mean.items():
        assert torch.equal(found.mean[name], theta)
        assert torch.equal(found.variance[name], expected.variance[name])
    draws = [q.sample(2, generator=torch.Generator().manual_seed(1)) for q in (found, expected)]
    assert all(torch.equal(draws[0][name], value) for name, value in draws[1].items())


def trained(make: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    optimizer = make(model.parameters(), **{"weight_decay": 0.1, **options})
    train(model, optimizer, steps=12)
    return model, optimizer


@pytest.mark.parametrize("how", [{}, {"prior_precision": 0.7}, {"power": 1.0, "batch_size": 8}], ids=str)
def test_live_saved_and_opened_are_the_same(how, tmp_path):
    model, optimizer = trained()
    live = ba.Posterior.from_optimizer(model, optimizer, N, "regression", **how)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": N}, tmp_path / "c.pt")
    fresh = mlp(3, 5, 2)
    read = ba.Posterior.from_checkpoint(tmp_path / "c.pt", fresh, None, "regression", **how)
    assert torch.equal(fresh[0].weight, model[0].weight)
    same(read, live)
    same(ba.Posterior.from_state_dict(model, optimizer.state_dict(), N, optimizer="adamw", **how), live)
    opened = ba.GaussianWeights.open(tmp_path / "c.pt", **how)
    same(opened, live)
    assert (live.likelihood, read.likelihood) == ("regression", "regression")
    assert opened.source is not None
    for q in (live, read, opened):
        assert (q.has_weights, q.n_data, q.origin.steps, q.origin.optimizers[0].lower()) == (True, N, (12, 12), "adamw")


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_soap_is_read_alike_from_everywhere(structure, tmp_path):
    model, optimizer = trained(soap)
    live = ba.Posterior.from_optimizer(model, optimizer, N, structure=structure)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    state = optimizer.state_dict()
    named: Any = {"structure": structure, "optimizer": "soap-pytorch-optimizer"}
    same(ba.Posterior.from_state_dict(model, state, N, **named), live)
    same(ba.Posterior.from_checkpoint(tmp_path / "c.pt", mlp(3, 5, 2), N, **named), live)
    same(ba.GaussianWeights.open(tmp_path / "c.pt", N, structure=structure), live)
    rotated = ba.Posterior.from_optimizer(model, optimizer, N, structure="kronecker")
    for name, v in ba.Posterior.from_optimizer(model, optimizer, N).curvature.second_moment.items():
        # The diagonal of the weights' own coordinates, never the rotated numbers.
        assert_close(rotated.curvature.diagonal(name), v, rtol=1e-4)


def test_a_second_moment_makes_a_posterior_as_its_optimiser_does():
    model, optimizer = trained()
    live = ba.Posterior.from_optimizer(model, optimizer, N, "regression", prior_precision=2.0, batch_size=8)
    v = live.curvature.second_moment
    how = {"prior_precision": 2.0, "batch_size": 8}
    same(ba.Posterior.from_second_moment(model, v, N, "regression", **how), live)
    double = ba.Posterior.from_second_moment(
        model, v, N, mean={name: theta.double() + 1 for name, theta in live.mode.items()}, **how
    )
    assert double.mode["0.weight"].dtype == double.curvature.second_moment["0.weight"].dtype == torch.float64
    assert_close(double.mean["0.bias"], live.mean["0.bias"].double() + 1)
    v["0.weight"].mul_(0.0)
    assert bool(double.curvature.second_moment["0.weight"].any())
    part = ba.Posterior.from_second_moment(model, {"0.bias": v["0.bias"]}, N)
    assert dict(part.omitted) == dict.fromkeys(("0.weight", "2.weight", "2.bias"), "not given")


def test_known_means_and_variances_are_kept():
    model = mlp(3, 5, 2)
    mean = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    variance = {name: torch.rand_like(p) + 0.1 for name, p in model.named_parameters()}
    q = ba.Posterior.from_moments(model, mean, variance, N, "regression")
    assert_close(q.mean, mean)
    assert_close(q.variance, variance)
    assert (q.settings.power, q.likelihood, q.replace(scale=2.0).effective_dimension) == (1.0, "regression", 32.0)
    wrong: list[tuple[Any, Any]] = [
        (MatchError, lambda: ba.Posterior.from_moments(model, mean, {"1.weight": torch.ones(2)}, N)),
        (MatchError, lambda: ba.Posterior.from_moments(model, {}, variance, N)),
        (MatchError, lambda: ba.Posterior.from_second_moment(model, {"0.bias": torch.ones(2)}, N)),
        (SettingError, lambda: ba.Posterior.from_moments(model, mean, {"0.bias": torch.zeros(5)}, N)),
        (SettingError, lambda: ba.Posterior.from_second_moment(model, {"0.bias": torch.full((5,), -1.0)}, N)),
    ]
    for error, work in wrong:
        with pytest.raises(error, match=r"'[01]\.(bias|weight)'"):
            work()


def test_recorded_gradients_stand_for_the_state():
    model, _ = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.3)
    recorder = ba.Recorder(optimizer, keep=30, every=1)
    train(model, optimizer, steps=30)
    q = ba.Posterior.from_recorder(model, recorder, N, prior_precision=None, structure="diagonal", batch_size=8)
    for name, gradients in recorder.gradients(model).items():
        assert_close(1 / q.variance[name], N * 8 * gradients.square().mean(dim=0) + N * 0.3, rtol=1e-5)
    assert (q.origin.recorded, q.settings.power) == (True, 1.0)
    with pytest.raises(MatchError, match="recorder must be a Recorder"):
        ba.Posterior.from_recorder(model, optimizer, N)


def test_a_prior_that_follows_the_weights_is_read_at_the_weights_of_the_file(tmp_path):
    """`LoraPrior` at θ of the file, not at those that the model had; at another power nothing is loaded."""

    def adapted() -> nn.Module:
        layers = OrderedDict(lora_A=nn.Linear(3, 2, bias=False), lora_B=nn.Linear(2, 3, bias=False))
        return nn.Sequential(OrderedDict(inner=nn.Sequential(layers)))

    model, fresh = adapted(), adapted()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    how: Any = {"prior_precision": ba.LoraPrior(2.0, scaling=1.0), "batch_size": 8}
    before = fresh.inner.lora_A.weight.clone()
    with pytest.raises(SettingError, match="needs power=1"):
        ba.Posterior.from_checkpoint(tmp_path / "c.pt", fresh, N, **how)
    assert torch.equal(fresh.inner.lora_A.weight, before)
    q = ba.Posterior.from_checkpoint(tmp_path / "c.pt", fresh, N, power=1.0, **how)
    rows = model.inner.lora_B.weight.detach().square().sum(dim=0)
    assert_close(q.prior_precision["inner.lora_A.weight"], 2.0 * rows[:, None].expand(2, 3), rtol=1e-5)
    assert q.settings.covariant
    assert not q.replace(prior_precision=1.0).settings.covariant
    with pytest.raises(SettingError, match="needs a model"):
        ba.GaussianWeights.open(tmp_path / "c.pt", N).replace(prior_precision=ba.LoraPrior())
