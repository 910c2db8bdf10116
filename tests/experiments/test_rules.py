"""Every rule that the paper compares with, against its equations, step by step."""

import math

import pytest
import torch
from torch import Tensor

from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.stack import constant
from bayesadam.engine.streams import Streams
from engine.stacks import LR, NETWORK, N, batch, data, gradient_at, rows
from experiments.rules import IVON, RULES, BayesByBackprop, Vadam
from experiments.stacks import Stack
from floats import assert_close


def stack_of(rule, seeds=(0, 1), network: Network = NETWORK, **options) -> Stack:
    stack = Stack(network, rule, seeds, batch, n_data=N, **options)
    stack.train(rows(len(seeds)), constant(LR))
    return stack


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


def test_ivon_follows_its_equations():
    rule = IVON(weight_decay=0.05)
    stack = stack_of(rule, seeds=(3,))
    mu, streams = flatten(initial(NETWORK, [3]))[0].double(), Streams([3], "training")
    d, h0 = 0.05, 1.0
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


@pytest.mark.parametrize("name", RULES)
def test_every_rule_draws_functions(name):
    network = Network(2, (5, 4), 1, "tanh", dropout=0.2) if name == "mc-dropout" else NETWORK
    stack = stack_of(RULES[name](), network=network)
    params, masks = stack.functions(1, 6, Streams([1], "draws"))
    out = forward(network, params, data()[0], masks=masks)
    assert out.shape == (6, N, 1)
    assert torch.isfinite(out).all()
    if name == "adam":
        assert_close(out[0], forward(network, stack.params, data()[0])[1])
    else:
        assert out.std(dim=0).max() > 0
