"""`sampled()` leaves no trace, whatever happens inside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayesadam as ba
from cases import trained


@pytest.fixture
def posterior() -> ba.Posterior:
    model, optimizer = trained()
    return ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=1.0)


def snapshot(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    for name, parameter in model.named_parameters():
        pointer, values = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter.detach(), values)


def test_inside_the_model_has_the_draw_and_outside_its_own_weights(posterior):
    before = snapshot(posterior.model)
    expected = posterior.sample(generator=torch.Generator().manual_seed(4))
    with posterior.sampled(generator=torch.Generator().manual_seed(4)) as model:
        assert model is posterior.model
        assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    assert_untouched(posterior.model, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_weights_come_back_after_any_exception(posterior, error):
    before = snapshot(posterior.model)
    with pytest.raises(error), posterior.sampled():
        raise error
    assert_untouched(posterior.model, before)


def test_weights_come_back_when_putting_the_draw_in_fails_half_way(posterior, monkeypatch):
    before = snapshot(posterior.model)
    broken = {**posterior.sample(), "2.weight": None}
    monkeypatch.setattr(type(posterior), "sample", lambda self, **_: broken)
    with pytest.raises(AttributeError), posterior.sampled():
        pytest.fail("a draw without values must not get in")
    assert_untouched(posterior.model, before)


def test_nested_draws(posterior):
    before = snapshot(posterior.model)
    with posterior.sampled():
        outer = snapshot(posterior.model)
        with posterior.sampled():
            assert not torch.equal(posterior.model[0].weight, outer["0.weight"][1])
        assert_untouched(posterior.model, outer)
    assert_untouched(posterior.model, before)


def test_training_goes_on_afterwards():
    model, optimizer = trained()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    posterior = ba.Posterior.from_optimizer(model, optimizer, 100)
    x = torch.randn(4, 3)
    for network, opt in ((model, optimizer), (twin, twin_optimizer)):
        if network is model:
            with posterior.sampled():
                network(x)
        opt.zero_grad()
        network(x).square().mean().backward()
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_buffers_come_back_and_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=1.0)
    assert "second.weight" not in posterior.mean
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    with posterior.sampled():
        assert model.first.weight is model.second.weight
        model(torch.randn(8, 4))
        assert not torch.equal(model.norm.running_mean, buffers["norm.running_mean"][1])
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])


def test_buffers_that_are_expanded_or_sparse_come_back_and_those_after_them_too():
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            base = torch.arange(3.0)
            self.register_buffer("expanded", base[:1].expand(4))
            self.register_buffer("rows", base[:, None].expand(3, 4))
            self.register_buffer("sparse", torch.eye(4).to_sparse())
            self.register_buffer("nothing", None)
            self.register_buffer("number", torch.tensor(2.0))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)) * self.expanded

    torch.manual_seed(0)
    model = Buffers()
    moments = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    posterior = ba.Posterior.from_moments(model, dict(model.named_parameters()), moments, 10)
    before = {name: (b, b.to_dense().clone()) for name, b in model.named_buffers()}
    with posterior.sampled():
        model(torch.randn(8, 4))
        model.number.add_(1)
        model.expanded[0] = 7.0
        model.rows = torch.zeros(3, 4)
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer.to_dense(), before[name][1])
    assert model.expanded.stride() == (0,)


def test_bf16_models_run_with_a_draw():
    model, optimizer = trained(dtype=torch.bfloat16)
    posterior = ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=1.0)
    with posterior.sampled():
        assert model(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_copy_mean_to_model_writes_the_mean():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=5.0).replace(form="likelihood")
    posterior.copy_mean_to_model()
    assert all(torch.equal(p, posterior.mean[n]) for n, p in model.named_parameters())


def test_a_changed_model_is_noticed(posterior):
    posterior.model[0] = nn.Linear(3, 6)
    with pytest.raises(ba.BayesAdamError, match=r"no longer has a parameter '0.weight' of shape \(5, 3\)"):
        posterior.sample()
