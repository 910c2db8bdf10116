"""Stacked training and the baselines, each against a case with a known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bayesadam.engine.network import flatten, member
from experiments import baselines
from experiments.baselines import METHODS, Data, Network, Problem, Training, gaussians, noise_variance, trained
from experiments.figure1 import coverage, nll
from experiments.rules import SWAG, gaussian
from experiments.running import generator
from floats import approx, assert_close

NETWORK = Network(2, (6, 5), 1, "tanh")
QUICK = Training(epochs=6, batch_size=8, lr=1e-2)


def problem(seeds: tuple[int, ...], training: Training = QUICK, n: int = 24) -> Problem:
    """A seed's data depend on the seed alone."""
    sets = []
    for seed in seeds:
        source = torch.Generator().manual_seed(seed)
        x = torch.randn(n + 20, 2, generator=source)
        y = x.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(n + 20, 1, generator=source)
        sets.append((x[:n], y[:n], x[n:], y[n:]))
    parts = [torch.stack(column) for column in zip(*sets, strict=True)]
    return Problem(Data(*parts, "regression"), NETWORK, training, seeds, draws=7)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_and_a_seeds_result_does_not_depend_on_its_neighbours(name):
    x = torch.linspace(-2, 2, 10).reshape(5, 2)
    together = [predict(x) for predict in METHODS[name](problem((11, 12, 13)))]
    assert all(torch.isfinite(p.f_mean).all() and (p.stddev > 0).all() for p in together)
    (alone,) = (predict(x) for predict in METHODS[name](problem((12,))))
    assert_close(together[1].f_mean, alone.f_mean, rtol=1e-4, atol=1e-5)
    assert_close(together[1].stddev, alone.stddev, rtol=1e-3, atol=1e-5)


def test_a_prediction_is_the_mixture_of_its_gaussians():
    means, variances = torch.randn(3, 200, 1), torch.rand(3, 200, 1)
    p, y = gaussians(means, variances, torch.tensor([0.1])), torch.randn(200, 1)
    parts = torch.distributions.Normal(means.squeeze(2).T, (variances.squeeze(2).T + 0.1).sqrt())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(200, 3)), parts)
    assert nll(p.distribution, y) == approx(-float(mixture.log_prob(y.squeeze(1)).mean()), rel=1e-5)
    assert_close(p.f_mean.squeeze(1), mixture.mean)
    assert_close(p.stddev.squeeze(1), mixture.stddev)
    below = mixture.cdf(y.squeeze(1))
    expected = float(((below >= 0.1) & (below <= 0.9)).double().mean())
    assert coverage(p.distribution, y, 0.8) == approx(expected, abs=0.006)


def linear_problem(training: Training) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """One linear layer with known noise: the exact posterior's mean and covariance beside it."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=source) * torch.tensor([0.5, 1.0, 2.0])
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.2 + 0.3 * torch.randn(400, 1, generator=source)
    data = Data(x[None, :300], y[None, :300], x[None, 300:], y[None, 300:], "regression")
    return Problem(data, Network(3, (), 1), training, (0,), draws=200), x[:300], y[:300]


def test_the_full_laplace_of_a_linear_model_is_its_exact_posterior():
    given, x, _ = linear_problem(Training(epochs=300, batch_size=300, lr=2e-2, weight_decay=0.0))
    (predict,) = METHODS["laplace-full"](given)
    network = given.network.build(member(given.optimum.params, 0))
    held_out = network(given.data.x_held_out[0]).detach()
    noise = noise_variance(held_out[None], given.data.y_held_out[0]).double()
    design = torch.cat([x, torch.ones(300, 1)], dim=1).double()
    delta = baselines._evidence(torch.linalg.eigvalsh(design.T @ design / noise), dict(network.named_parameters()))
    covariance = torch.linalg.inv(design.T @ design / noise + delta * torch.eye(4, dtype=torch.float64))
    test = torch.randn(5, 3)
    rows = torch.cat([test, torch.ones(5, 1)], dim=1).double()
    expected = torch.einsum("bi,ij,bj->b", rows, covariance, rows)
    assert_close(predict(test).f_variance.squeeze(1).double(), expected, rtol=1e-3)


def test_the_diagonal_laplace_of_a_linear_model_is_its_exact_marginal_precision():
    given, x, _ = linear_problem(Training(epochs=300, batch_size=300, lr=2e-2, weight_decay=0.0))
    (predict,) = METHODS["laplace-diagonal"](given)
    # At the unit vectors f is a weight plus the bias, whose variance is that at 0.
    at = torch.cat([torch.zeros(1, 3), torch.eye(3)])
    bias, *weights = predict(at).f_variance.squeeze(1)
    noise = float(predict(at).components[0].noise_variance)
    precision = 1 / (torch.stack(weights) - bias)
    exact = x.square().sum(dim=0) / noise
    assert (precision - exact).std() < 0.01 * precision.mean()
    assert ((precision - exact) > 0).all()


def test_swags_moments_are_those_of_the_iterates():
    """A plain SGD on the same batches: the mean, the variance, and the last deviations from the running mean."""
    given, _, _ = linear_problem(Training(epochs=30, batch_size=10, lr=2e-2, weight_decay=0.0))
    stack = trained(given, SWAG, rank=4, snapshots=20, every=5, lr=1e-2)
    mean, variance = gaussian(stack)
    theta = flatten(given.optimum.params)[0].clone().requires_grad_()
    sgd = torch.optim.SGD([theta], lr=1e-2)
    order = generator(0, "batches")
    rows = torch.cat([torch.randperm(300, generator=order).view(30, 10) for _ in range(4)])[:100]
    seen, deviations = [], []
    for number, chosen in enumerate(rows, start=1):
        sgd.zero_grad()
        x, y = given.data.x[0][chosen], given.data.y[0][chosen]
        (x @ theta[:3, None] + theta[3] - y).square().mean().backward()
        sgd.step()
        if number % 5 == 0:
            seen.append(theta.detach().clone())
            deviations.append(seen[-1] - torch.stack(seen).mean(dim=0))
    iterates = torch.stack(seen)
    assert_close(mean[0], iterates.mean(dim=0), rtol=1e-4, atol=1e-5)
    assert_close(variance[0], iterates.var(dim=0, correction=0), rtol=1e-2, atol=1e-7)
    found = stack.rule.deviations(stack.state)[0]
    assert_close(found, torch.stack(deviations[-4:]), rtol=1e-3, atol=1e-5)


def test_swags_draws_have_half_of_both_variances():
    """Of f = w·x + b: ½ (Σ var x² + |Dᵀx|²/(K − 1))."""
    given, _, _ = linear_problem(Training(epochs=30, batch_size=10, lr=2e-2, weight_decay=0.0))
    given = replace(given, draws=10_000)
    stack = trained(given, SWAG)
    columns = stack.rule.deviations(stack.state)[0]
    x = torch.tensor([[1.0, -0.5, 2.0]])
    row = torch.tensor([1.0, -0.5, 2.0, 1.0])
    low_rank = (columns @ row).square().sum() / (len(columns) - 1)
    expected = 0.5 * (gaussian(stack).variance[0] @ row.square() + low_rank)
    assert_close(METHODS["swag"](given)[0](x).f_variance.squeeze(), expected, rtol=0.05)
