"""`sampled()` leaves no trace, whatever happens inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.weights.networks import copy_into
from cases import state_of, train, trained


class Odd(nn.Module):
    """Tied weights, a batch norm, and buffers that are expanded, sparse or absent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        base = torch.arange(1.0, 4.0)
        self.register_buffer("expanded", base[:1].expand(4))
        self.register_buffer("rows", base[:, None].expand(3, 4))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("nothing", None)
        self.register_buffer("number", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.expanded


@pytest.fixture
def posterior() -> ba.Posterior:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    return ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=1.0)


def test_inside_the_model_has_the_draw_and_outside_its_own_weights_and_buffers(posterior):
    model, before = posterior.model, state_of(posterior.model)
    running = model.norm.running_mean.clone()
    expected = posterior.sample(generator=torch.Generator().manual_seed(4))
    assert "second.weight" not in expected
    with posterior.sampled(generator=torch.Generator().manual_seed(4)) as inside:
        assert inside is model
        assert model.first.weight is model.second.weight
        assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
        model(torch.randn(8, 4))
        model.number.add_(1)
        model.expanded[0] = 7.0
        model.rows = torch.zeros(3, 4)
        assert not torch.equal(model.norm.running_mean, running)
    assert state_of(model) == before
    assert model.expanded.stride() == (0,)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_weights_come_back_after_any_exception(posterior, error):
    before = state_of(posterior.model)
    with pytest.raises(error), posterior.sampled():
        raise error
    assert state_of(posterior.model) == before


def test_weights_come_back_when_putting_the_draw_in_fails_half_way(posterior, monkeypatch):
    before = state_of(posterior.model)
    broken = {**posterior.sample(), "second.bias": None}
    monkeypatch.setattr(type(posterior), "sample", lambda self, **_: broken)
    with pytest.raises(AttributeError), posterior.sampled():
        pytest.fail("a draw without values must not get in")
    assert state_of(posterior.model) == before


def test_nested_draws(posterior):
    before = state_of(posterior.model)
    with posterior.sampled():
        outer = state_of(posterior.model)
        with posterior.sampled():
            assert state_of(posterior.model)["values"] != outer["values"]
        assert state_of(posterior.model) == outer
    assert state_of(posterior.model) == before


def test_the_models_type_and_its_mean_for_good():
    model, optimizer = trained(dtype=torch.bfloat16)
    q = ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=5.0).replace(form="likelihood")
    with q.sampled():
        assert model(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    copy_into(q.model, q.mean)
    assert all(torch.equal(p, q.mean[n].bfloat16()) for n, p in model.named_parameters())
    q.model[0] = nn.Linear(3, 6)
    with pytest.raises(ba.BayesAdamError, match=r"no longer has a parameter '0.weight' of shape \(5, 3\)"):
        q.sample()
