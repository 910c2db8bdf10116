"""Stacked training and the baselines, each against a case with a known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bayesadam.engine.network import flatten, forward, initial, member
from bayesadam.engine.streams import Streams
from experiments import baselines
from experiments.baselines import (
    METHODS,
    Data,
    Network,
    Prediction,
    Problem,
    Training,
    blocks,
    noise_variance,
    trained,
)
from experiments.rules import RULES, SWAG, Dropout, gaussian
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


def test_a_predictions_scores_are_those_of_its_mixture():
    means, variances = torch.randn(3, 200, 1), torch.rand(3, 200, 1)
    p, y = Prediction(means, variances, 0.1), torch.randn(200, 1)
    parts = torch.distributions.Normal(means.squeeze(2).T, (variances.squeeze(2).T + 0.1).sqrt())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(200, 3)), parts)
    assert p.nll(y) == approx(-float(mixture.log_prob(y.squeeze(1)).mean()), rel=1e-5)
    assert_close(p.f_mean.squeeze(1), mixture.mean)
    assert_close(p.stddev.squeeze(1), mixture.stddev)
    below = mixture.cdf(y.squeeze(1))
    assert p.coverage(y, 0.8) == approx(float(((below >= 0.1) & (below <= 0.9)).double().mean()), abs=0.006)


def test_badams_posterior_is_the_one_read_off_a_plain_adam():
    stack = problem((5, 6))
    params = {name: t[1].clone().requires_grad_() for name, t in initial(NETWORK, (5, 6)).items()}
    adam = torch.optim.Adam(params.values(), lr=QUICK.lr, betas=QUICK.betas, weight_decay=QUICK.weight_decay)
    rows = Streams([6], "batches").rows(24, QUICK.steps(24), 8)[0]
    for chosen in rows:
        adam.zero_grad()
        out = forward(NETWORK, {n: p.unsqueeze(0) for n, p in params.items()}, stack.data.x[1][chosen])[0]
        (out - stack.data.y[1][chosen]).square().mean().backward()
        adam.step()
    state = baselines.adam_state_dict(stack.optimum, 1)
    for key, parameter in enumerate(params.values()):
        assert_close(state["state"][key]["exp_avg_sq"], adam.state[parameter]["exp_avg_sq"], rtol=1e-4, atol=1e-9)
        assert_close(stack.optimum.params[list(params)[key]][1], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_dropouts_variance_on_one_linear_layer():
    """f = Σ w_i h_i m_i with m ∈ {0, 1/(1−p)}: Var f = p/(1−p) Σ (w_i h_i)²."""
    rate, width = 0.3, 6
    network = Network(1, (width,), 1, "relu")
    flat = flatten(initial(network, [0]))
    params, masks = Dropout().sample(replace(network, dropout=rate), flat, {}, 1.0, Streams([1], "masks"), 40_000)
    draws = forward(network, params, torch.tensor([[0.7]]), masks=masks).squeeze()
    hidden = torch.relu(params["layer0.weight"][0, :, 0] * 0.7 + params["layer0.bias"][0])
    expected = rate / (1 - rate) * (params["layer1.weight"][0, 0] * hidden).square().sum()
    assert_close(draws.var(), expected, rtol=0.05)


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
    noise = float(predict(at).noise)
    precision = 1 / (torch.stack(weights) - bias)
    exact = x.square().sum(dim=0) / noise
    assert (precision - exact).std() < 0.01 * precision.mean()
    assert ((precision - exact) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lr", "tolerance"),
    [
        ("bbb", 5e-3, 0.35),
        ("vadam", 5e-3, None),
        ("ivon", 5e-3, None),
    ],
)
def test_variational_posteriors_of_a_linear_model_are_the_exact_mean_field_ones(name, lr, tolerance):
    """q's best mean is the exact one, its best precisions are the diagonal of the exact precision.

    Vadam's precision is that of squared mini-batch gradients, B times too small beside the exact one and known to be;
    IVON's moves by a hundred-thousandth a step, and is checked where it is let run, in `tests/optim`.
    """
    given, x, y = linear_problem(Training(epochs=600, batch_size=50, lr=lr, weight_decay=1 / 300))
    # The last iterate of one seed is noisy: the mean over eight is not.
    parts = {name: getattr(given.data, name).repeat(8, 1, 1) for name in ("x", "y", "x_held_out", "y_held_out")}
    given = replace(given, data=replace(given.data, **parts), seeds=tuple(range(8)))
    stack = trained(given, RULES[name])
    mean, variance = gaussian(stack)
    design = torch.cat([x, torch.ones(300, 1)], dim=1)
    precision = design.T @ design / 0.09 + torch.eye(4)
    exact = torch.linalg.solve(precision, design.T @ y / 0.09).squeeze()
    assert ((mean.mean(dim=0) - exact).abs() * precision.diagonal().sqrt()).max() < 2
    if tolerance is not None:
        assert_close(1 / variance[0], precision.diagonal(), rtol=tolerance)


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


@pytest.mark.parametrize(("n", "size", "steps"), [(100, 10, 1000), (100, 10, 256), (1000, 10, 250), (1000, 10, 300)])
def test_blocks_hold_so_many_steps_and_are_the_same_again(n, size, steps):
    found, again = (list(blocks(n, size, (1, 2), steps)) for _ in range(2))
    assert sum(map(len, found)) == steps
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
