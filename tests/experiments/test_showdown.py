"""The Showdown's agents against their equations in float64, and against autograd."""

import math

import torch
from torch import Tensor

from bayesadam.engine.network import Network, initial
from bayesadam.engine.stack import constant
from bayesadam.engine.streams import Streams
from experiments.rules import Step
from experiments.showdown import LocalBayesByBackprop, RMSprop
from experiments.stacks import Stack
from floats import assert_close

NETWORK, SIZE, STEPS, N = Network(3, (5, 4), 2), 7, 12, 40
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, N)[:, None]
ROWS = torch.randint(N, (STEPS, 1, SIZE), generator=torch.Generator().manual_seed(1))


def batch(rows: Tensor):
    return X[rows], lambda f: 2 * (f - Y[rows]) / SIZE


def drawn_outputs(params: dict[str, Tensor], variances: dict[str, Tensor], x: Tensor, noise: list[Tensor]) -> Tensor:
    """A draw of every unit for each example, by the definition."""
    h = x
    for number, eps in enumerate(noise):
        mean = h @ params[f"layer{number}.weight"].mT + params[f"layer{number}.bias"].unsqueeze(1)
        z = mean + (h.square() @ variances[f"layer{number}.weight"].mT + 1e-6).sqrt() * eps
        h = z.relu() if number < len(noise) - 1 else z
    return h


def test_rmsprop_is_tensorflows():
    rule = RMSprop()
    theta, state = torch.tensor([[1.0, -2.0]]), rule.start(torch.zeros(1, 2), 1.0)
    exact, v = theta[0].double(), torch.ones(2, dtype=torch.float64)
    for t in range(1, 6):
        g = torch.tensor([0.5 * t, -3.0])
        rule.update(theta, g[None].clone(), state, torch.empty(0), Step(0.1 / t, 1.0, 1.0, 1.0))
        v = 0.9 * v + 0.1 * g.double().square()
        exact = exact - 0.1 / t * g.double() / (v + 1e-10).sqrt()
    assert_close(theta[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_the_showdowns_bayes_by_backprop_is_adam_on_its_bound():
    """Against autograd on mean NLL + KL(weights)/N with torch's Adam; the biases are points."""
    names, shapes = list(NETWORK.shapes()), NETWORK.shapes()
    precision = {n: torch.full(s, s[1] / 2 if len(s) == 2 else 0.0) for n, s in shapes.items()}
    rule = LocalBayesByBackprop(torch.cat([p.flatten() for p in precision.values()]))
    stack = Stack(NETWORK, rule, (3,), batch, n_data=N)
    stack.train(ROWS, constant(0.01))
    means = {n: t.clone().requires_grad_() for n, t in initial(NETWORK, [3]).items()}
    rhos = {n: torch.full_like(means[n], -5.0).requires_grad_() for n in names if "weight" in n}
    adam, streams = torch.optim.Adam([*means.values(), *rhos.values()], lr=0.01), Streams([3], "training")
    for rows in ROWS:
        adam.zero_grad()
        noise = rule.masks(rule.noise(streams, NETWORK, SIZE), NETWORK)
        out = drawn_outputs(means, {n: (2 * r).exp() for n, r in rhos.items()}, X[rows], noise)
        kl = 0.0
        for n, r in rhos.items():
            prior = torch.distributions.Normal(0.0, math.sqrt(2 / shapes[n][1]))
            kl = kl + torch.distributions.kl_divergence(torch.distributions.Normal(means[n], r.exp()), prior).sum()
        ((out - Y[rows]).square().sum() / SIZE + kl / N).backward()
        adam.step()
    found = stack.gaussian()
    expected = torch.cat([means[n].detach().flatten() for n in names])
    assert_close(found.mean[0], expected, rtol=1e-3, atol=1e-5)
    variances = torch.cat(
        [(2 * rhos[n]).exp().detach().flatten() if n in rhos else torch.zeros(shapes[n]) for n in names]
    )
    assert_close(found.variance[0], variances, rtol=1e-3, atol=1e-8)
