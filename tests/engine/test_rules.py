"""Every rule of the engine against its equations, step by step, and the written-out gradient against autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bayesadam.engine.gradients import StackedGradient, loss_and_slope
from bayesadam.engine.network import ACTIVATIONS, Network, flatten, forward, initial, unflatten
from bayesadam.engine.rules import IVON, RULES, SWAG, Adam, BayesByBackprop, Dropout, Vadam, optimizer_state_dict
from bayesadam.engine.stack import Stack, constant, cosine, train
from bayesadam.engine.streams import Streams
from floats import assert_close

NETWORK = Network(2, (5, 4), 1, "tanh")
N, SIZE, STEPS, LR = 40, 8, 12, 0.01


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=source)
    return x, x.sum(dim=1, keepdim=True).sin()


def rows(seeds: int) -> Tensor:
    return torch.randint(N, (STEPS, seeds, SIZE), generator=torch.Generator().manual_seed(1))


def stack_of(rule, seeds=(0, 1), network: Network = NETWORK, **options) -> Stack:
    x, y = data()

    def batch(chosen: Tensor):
        targets = y[chosen]
        return x[chosen], lambda f: loss_and_slope(lambda g: (g - targets).square().mean(dim=(1, 2)), f)[1]

    stack = Stack(network, rule, seeds, batch, n_data=N, **options)
    train(stack, [rows(len(seeds))], constant(LR))
    return stack


def gradient_at(flat: Tensor, chosen: Tensor, network: Network = NETWORK, masks=None) -> Tensor:
    x, y = data()
    leaf = flat.detach().float().unsqueeze(0).requires_grad_()
    out = forward(network, unflatten(network, leaf), x[chosen], masks=masks)[0]
    (out - y[chosen]).square().mean().backward()
    return leaf.grad[0].double()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_autograds(activation):
    network = replace(NETWORK, activation=activation, n_outputs=3)
    flat, x = flatten(initial(network, [0, 1])), torch.randn(2, 7, 2)
    masks = [torch.rand(2, 7, width) for width in network.hidden]
    leaf = flat.clone().requires_grad_()
    loss = lambda f: f.square().mean(dim=(1, 2)) + f[..., 0].exp().sum(dim=1)  # noqa: E731
    loss(forward(network, unflatten(network, leaf), x, masks=masks)).sum().backward()
    gradient = StackedGradient(network, flat)
    found = gradient(x, lambda f: loss_and_slope(loss, f)[1], masks=masks)
    assert_close(found, leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_torchs_and_its_state_dict_loads_there(decoupled):
    rule = Adam(weight_decay=0.1, decoupled=decoupled)
    stack = stack_of(rule)
    params = {name: t[1].clone().requires_grad_() for name, t in initial(NETWORK, [0, 1]).items()}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(params.values(), lr=LR, weight_decay=0.1)
    x, y = data()
    for chosen in rows(2)[:, 1]:
        optimizer.zero_grad()
        out = forward(NETWORK, {n: p.unsqueeze(0) for n, p in params.items()}, x[chosen])[0]
        (out - y[chosen]).square().mean().backward()
        optimizer.step()
    for name, parameter in params.items():
        assert_close(stack.params[name][1], parameter.detach(), rtol=1e-4, atol=1e-6)
    found = optimizer_state_dict(NETWORK, stack.state, 1, rule)
    expected = optimizer.state_dict()
    optimizer.load_state_dict(found)
    for key, state in expected["state"].items():
        assert_close(found["state"][key]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-4, atol=1e-9)
        assert found["state"][key]["step"] == state["step"]


def perturbation(streams: Streams) -> Tensor:
    return streams.normal(flatten(initial(NETWORK, [0])).shape[1])[0].double()


def test_vadam_follows_its_equations():
    rule = Vadam(prior_precision=2.0, initial_std=0.1)
    stack = stack_of(rule, seeds=(3,))
    mu, streams = flatten(initial(NETWORK, [3]))[0].double(), Streams([3], "training")
    m, v = torch.zeros_like(mu), torch.full_like(mu, (100 - 2.0) / N)
    for t, chosen in enumerate(rows(1)[:, 0], start=1):
        g = gradient_at(mu + perturbation(streams) / (N * v + 2.0).sqrt(), chosen)
        m = 0.9 * m + 0.1 * (g + 2.0 / N * mu)
        v = 0.999 * v + 0.001 * g.square()
        mu = mu - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 2.0 / N)
    mean, variance = stack.gaussian()
    assert_close(mean[0].double(), mu, rtol=1e-4, atol=1e-6)
    assert_close(variance[0].double(), 1 / (N * v + 2.0), rtol=1e-4)


@pytest.mark.parametrize("rule", [IVON(weight_decay=0.05), IVON(prior_precision=2.0, initial_hessian=None)], ids=str)
def test_ivon_follows_its_equations(rule):
    stack = stack_of(rule, seeds=(3,))
    mu, streams = flatten(initial(NETWORK, [3]))[0].double(), Streams([3], "training")
    d = 0.05 if rule.prior_precision is None else 2.0 / N
    h0 = 1.0 if rule.initial_hessian is not None else 0.02**-2 / N - d
    (beta1, beta2), g, h = rule.betas, torch.zeros_like(mu), torch.full_like(mu, h0)
    for t, chosen in enumerate(rows(1)[:, 0], start=1):
        n = perturbation(streams) / (N * (h + d)).sqrt()
        gradient = gradient_at(mu + n, chosen)
        f = N * (h + d) * n * gradient
        g = beta1 * g + (1 - beta1) * gradient
        h = beta2 * h + (1 - beta2) * f + 0.5 * (1 - beta2) ** 2 * (h - f).square() / (h + d)
        mu = mu - LR * (h0 + d) * (g / (1 - beta1**t) + d * mu) / (h + d)
    mean, variance = stack.gaussian()
    assert_close(mean[0].double(), mu, rtol=1e-4, atol=1e-5)
    assert_close(variance[0].double(), 1 / (N * (h + d)), rtol=1e-4)


def test_bayes_by_backprop_is_adam_on_the_evidence_bound():
    """Against autograd on mean NLL + KL/N, with torch's own Adam and torch.distributions' divergence."""
    rule = BayesByBackprop(prior_precision=2.0, initial_std=0.1)
    stack = stack_of(rule, seeds=(3,))
    mu = flatten(initial(NETWORK, [3])).requires_grad_()
    rho = torch.full_like(mu, math.log(math.expm1(0.1))).detach().requires_grad_()
    adam, streams, (x, y) = torch.optim.Adam([mu, rho], lr=LR), Streams([3], "training"), data()
    for chosen in rows(1)[:, 0]:
        adam.zero_grad()
        std = torch.nn.functional.softplus(rho)
        theta = mu + std * streams.normal(mu.shape[1])
        fit = (forward(NETWORK, unflatten(NETWORK, theta), x[chosen])[0] - y[chosen]).square().mean()
        q, p = torch.distributions.Normal(mu, std), torch.distributions.Normal(0.0, 2.0**-0.5)
        (fit + torch.distributions.kl_divergence(q, p).sum() / N).backward()
        adam.step()
    mean, variance = stack.gaussian()
    assert_close(mean, mu.detach(), rtol=1e-4, atol=1e-5)
    assert_close(variance, torch.nn.functional.softplus(rho.detach()).square(), rtol=1e-3)


def test_dropout_trains_under_its_masks():
    network = replace(NETWORK, dropout=0.3, input_dropout=0.2)
    stack = stack_of(Dropout(), seeds=(3,), network=network)
    params = {name: t[0].clone().requires_grad_() for name, t in initial(NETWORK, [3]).items()}
    adam, streams, (x, y) = torch.optim.Adam(params.values(), lr=LR), Streams([3], "training"), data()
    for chosen in rows(1)[:, 0]:
        inputs, *masks = Dropout().masks(Dropout().noise(streams, network, SIZE), network)
        adam.zero_grad()
        out = forward(NETWORK, {n: p.unsqueeze(0) for n, p in params.items()}, x[chosen] * inputs, masks=masks)[0]
        (out - y[chosen]).square().mean().backward()
        adam.step()
    for name, parameter in params.items():
        assert_close(stack.params[name][0], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_laplace_prior_shrinks_in_adams_metric():
    plain, sparse = stack_of(Adam()), stack_of(Adam(sparsity=0.5))
    assert (sparse.weights == 0).any()
    assert sparse.weights.abs().sum() < plain.weights.abs().sum()
    # The second moment sees the loss alone: after the first step it is that of plain Adam.
    one, other = (Stack(NETWORK, rule, (0,), plain.batch, n_data=N) for rule in (Adam(), Adam(sparsity=0.5)))
    for stack in (one, other):
        stack.prepare(rows(1)[:1], constant(LR))
        stack.run(1)
    assert_close(one.state["exp_avg_sq"], other.state["exp_avg_sq"])
    root = one.state["exp_avg_sq"].div(0.001).sqrt() + 1e-8
    expected = one.weights.sign() * (one.weights.abs() - LR * 0.5 / root).clamp(min=0)
    assert_close(other.weights, expected)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_resumes_from_its_tensors_and_draws_functions(name):
    network = replace(NETWORK, dropout=0.2) if name == "mc-dropout" else NETWORK
    rule = RULES[name].with_settings(every=2, snapshots=6, rank=3)
    whole, half = stack_of(rule, network=network), stack_of(rule, network=network)
    resumed = Stack(network, rule, (0, 1), whole.batch, n_data=N)
    for key, tensor in resumed.tensors().items():
        tensor.copy_(half.tensors()[key])
    resumed.done = half.done
    resumed.streams.restore(half.streams.state())
    more = rows(2).flip(0)
    train(whole, [more], constant(LR))
    train(resumed, [more], constant(LR))
    for key, tensor in whole.tensors().items():
        assert_close(resumed.tensors()[key], tensor)
    params, masks = whole.functions(1, 6, Streams([1], "draws"))
    out = forward(network, params, data()[0], masks=masks)
    assert out.shape == (6, N, 1)
    assert torch.isfinite(out).all()
    if name == "adam":
        assert_close(out[0], forward(network, whole.params, data()[0])[1])
    else:
        assert out.std(dim=0).max() > 0


def test_swags_slots_hold_the_last_iterates():
    stack = stack_of(SWAG(every=2, rank=3), seeds=(0,))
    assert int(stack.state["count"]) == STEPS // 2
    assert stack.rule.deviations(stack.state).shape == (1, 3, stack.weights.shape[1])


def test_averages_clips_penalties_and_schedules():
    averaged = stack_of(Adam(), average=0.5)
    assert not torch.equal(averaged.mean, averaged.weights)
    clipped = stack_of(SWAG(), clip=1e-6)
    start = flatten(initial(NETWORK, (0, 1)))
    assert (clipped.weights - start).norm(dim=1).max() <= STEPS * LR * 1.1e-6
    rates = cosine(0.1, 10)(torch.tensor([0.0, 5.0, 10.0], dtype=torch.float64))
    assert_close(rates, torch.tensor([0.1, 0.05, 0.0], dtype=torch.float64))
