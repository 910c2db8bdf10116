"""The engine's gradient against autograd, and its Adam against torch's."""

import math
from dataclasses import replace

import pytest
import torch

from bayesadam.engine.gradients import StackedGradient, loss_and_slope
from bayesadam.engine.network import ACTIVATIONS, flatten, forward, initial, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, constant, cosine
from bayesadam.engine.streams import Streams
from engine.stacks import LR, NETWORK, SIZE, batches, data, rows, stack_of
from floats import assert_close


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


@pytest.mark.parametrize(("decoupled", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.3)])
def test_adam_is_torchs_under_the_masks(decoupled, dropout):
    network = replace(NETWORK, dropout=dropout)
    stack = stack_of(Adam(weight_decay=0.1, decoupled=decoupled), network=network)
    params = {name: t[1].clone().requires_grad_() for name, t in initial(NETWORK, [0, 1]).items()}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(params.values(), lr=LR, weight_decay=0.1)
    streams, (x, y), masks = Streams([0, 1], "training"), data(), None
    for chosen in rows(2)[:, 1]:
        if dropout:
            uniform = streams.uniform(SIZE * sum(network.hidden))[1:].split([SIZE * n for n in network.hidden], dim=1)
            masks = [(part.view(1, SIZE, -1) >= dropout) / (1 - dropout) for part in uniform]
        optimizer.zero_grad()
        out = forward(NETWORK, {n: p.unsqueeze(0) for n, p in params.items()}, x[chosen], masks=masks)[0]
        (out - y[chosen]).square().mean().backward()
        optimizer.step()
    for name, parameter in params.items():
        assert_close(stack.params[name][1], parameter.detach(), rtol=1e-4, atol=1e-6)
    for key, moment in unflatten(NETWORK, stack.state["exp_avg_sq"]).items():
        assert_close(moment[1], optimizer.state[params[key]]["exp_avg_sq"], rtol=1e-4, atol=1e-9)
    assert stack.state["step"].tolist() == [len(rows(2))]


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_units_are_kept_where_uniform_numbers_say_so(rate):
    kept, uniform = Streams([3, 4], "x").kept(rate, 5, 8), Streams([3, 4], "x").uniform(5, 8)
    assert_close(kept, (uniform >= rate).float() / (1 - rate))


def test_a_stack_resumes_from_its_tensors():
    network = replace(NETWORK, dropout=0.2)
    whole, half = (stack_of(Adam(), network=network, average=0.9) for _ in range(2))
    resumed = Stack(network, Adam(), (0, 1), whole.batches, average=0.9)
    for key, tensor in resumed.tensors().items():
        tensor.copy_(half.tensors()[key])
    resumed.done = half.done
    resumed.streams.restore(half.streams.state())
    for stack in (whole, resumed):
        stack.train(rows(2).flip(0), constant(LR))
    for key, tensor in whole.tensors().items():
        assert_close(resumed.tensors()[key], tensor)


def test_averages_clips_penalties_and_schedules():
    averaged = stack_of(Adam(), average=0.5)
    assert not torch.equal(averaged.mean, averaged.weights)
    decayed, pulled = stack_of(Adam(weight_decay=0.1)), Stack(NETWORK, Adam(), (0, 1), batches)
    pulled.penalty = 0.1
    pulled.train(rows(2), constant(LR))
    assert_close(pulled.weights, decayed.weights, rtol=1e-5, atol=1e-7)
    tiny, plain = (stack_of(Adam(betas=(0.0, 0.9)), clip=clip) for clip in (1e-6, math.inf))
    assert tiny.state["exp_avg"].norm(dim=1).max() <= 1.001e-6 < plain.state["exp_avg"].norm(dim=1).min()
    rates = cosine(0.1, 10)(torch.tensor([0.0, 5.0, 10.0], dtype=torch.float64))
    assert_close(rates, torch.tensor([0.1, 0.05, 0.0], dtype=torch.float64))
