"""The methods of `apart` on a network small enough to know the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import bayesadam as ba
from benchmarks.compress import apart, smaller
from benchmarks.compress.trained import NETS, Data, dropped


@pytest.fixture
def small() -> tuple[object, Data, smaller.Case]:
    """A network, its data, and a case whose v̂ is 1 everywhere."""
    torch.manual_seed(0)
    net = replace(NETS["lenet300"], build=partial(dropped, (6, 5, 3)), batch=16)
    x, model = torch.randn(1600, 6), net.build().eval()
    data = Data((x, torch.randint(3, (1600,))), (x, torch.randint(3, (1600,))))
    moments = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    posterior = ba.Posterior.from_moments(model, dict(model.named_parameters()), moments, 1600, "classification")
    return net, data, smaller.Case(posterior, x[:64])


def test_fitting_is_gradient_descent_at_falling_rates(small):
    """Two steps of all data on a linear layer, as numpy would take them: the rates are 1 and ½ of the first."""
    _, data, _ = small
    model = nn.Linear(6, 3)
    x, y = data.train[0].double().numpy(), torch.eye(3)[data.train[1]].double().numpy()
    w, b = (p.detach().double().numpy().copy() for p in (model.weight, model.bias))
    for rate in (0.3, 0.15):
        p = torch.tensor(x @ w.T + b).softmax(1).numpy() - y
        w, b = w - rate * p.T @ x / 1600, b - rate * p.mean(axis=0)
    apart.fit(model, [torch.optim.SGD(model.parameters(), 0.3)], data, 1600, 2)
    torch.testing.assert_close(model.weight.detach().double(), torch.tensor(w), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.bias.detach().double(), torch.tensor(b), rtol=1e-4, atol=1e-6)


def test_the_recorded_factors_are_the_moments_of_the_gradients(small):
    _, data, case = small
    posterior = apart.recorded(data, 16, case.model)
    total = torch.zeros(6, 6)
    for x, y in zip(*(part.split(16) for part in data.train), strict=True):
        gradient = torch.autograd.grad(nn.functional.cross_entropy(case.model(x), y), case.model[1].weight)[0]
        total += gradient.mT @ gradient
    basis = posterior.curvature.bases["1.weight"].right
    turned = basis.mT @ total @ basis
    torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=1e-3, atol=1e-3 * float(turned.trace()))


def test_a_network_that_is_tuned_keeps_its_zeros_and_moves(small):
    net, data, case = small
    before = smaller.magnitude(case, 0.5, None)
    after = apart.tuned(net, data, 0, smaller.magnitude)(case, 0.5, None)
    for name in case.eligible:
        assert torch.equal(before.get_parameter(name) == 0, after.get_parameter(name) == 0)
        assert not torch.equal(before.get_parameter(name), after.get_parameter(name))


def test_own_inputs_are_ours_and_every_method_prunes_its_share(small):
    _, data, case = small
    found = apart.on(lambda x: x)(case, 0.5, None)
    for name, parameter in smaller.ours(case, 0.5, None).named_parameters():
        assert torch.equal(parameter, found.get_parameter(name))
    for method in (apart.on(torch.rand_like), *(apart.by_factors(data, 16, adam=adam) for adam in (False, True))):
        model = method(case, 0.5, None)
        assert sum(int((model.get_parameter(name) == 0).sum()) for name in case.eligible) == round(0.5 * 45)


@pytest.mark.parametrize("rule", apart.RULES)
def test_other_rules_leave_a_second_moment_of_every_matrix(small, rule, monkeypatch):
    monkeypatch.setattr(apart, "EPOCHS", 1)
    net, data, case = small
    posterior = apart.ruled(rule, net, data, 0)
    assert all(bool((posterior.curvature.second_moment[name] > 0).any()) for name in case.eligible)
    pruned = apart.of(lambda: posterior, "magnitude")(case, 0.5, None)
    assert sum(int((pruned.get_parameter(name) == 0).sum()) for name in case.eligible) == round(0.5 * 45)
