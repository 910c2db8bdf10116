"""A stack of two small networks after a few steps, and the gradient of one of them by autograd."""

from functools import partial

import torch
from torch import Tensor

from bayesadam.engine.gradients import loss_and_slope
from bayesadam.engine.network import Network, forward, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, constant

NETWORK = Network(2, (5, 4), 1, "tanh")
N, SIZE, STEPS, LR = 40, 8, 12, 0.01


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=source)
    return x, x.sum(dim=1, keepdim=True).sin()


def rows(seeds: int) -> Tensor:
    return torch.randint(N, (STEPS, seeds, SIZE), generator=torch.Generator().manual_seed(1))


def batch(chosen: Tensor):
    x, y = data()
    return x[chosen], lambda f: loss_and_slope(lambda g: (g - y[chosen]).square().mean(dim=(1, 2)), f)[1]


batches = partial(map, batch)


def stack_of(rule: Adam, seeds=(0, 1), network: Network = NETWORK, **options) -> Stack:
    stack = Stack(network, rule, seeds, batches, **options)
    stack.train(rows(len(seeds)), constant(LR))
    return stack


def gradient_at(flat: Tensor, chosen: Tensor, network: Network = NETWORK, masks=None) -> Tensor:
    x, y = data()
    leaf = flat.detach().float().unsqueeze(0).requires_grad_()
    out = forward(network, unflatten(network, leaf), x[chosen], masks=masks)[0]
    (out - y[chosen]).square().mean().backward()
    return leaf.grad[0].double()
