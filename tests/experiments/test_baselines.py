"""Stacked training and the baselines, each against a case with a known answer."""

import pytest
import torch

from bayesadam.engine.network import Network, member
from experiments import baselines
from experiments.baselines import METHODS, Data, Problem, Training, gaussians, noise_variance
from experiments.figure1 import coverage, nll
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
