"""Heteroscedastic and Poisson predictives against brute force in float64: dense quadrature over the outputs, sums
over counts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, Poisson

from bayesadam.likelihoods import Component, likelihood
from bayesadam.likelihoods.component import function_draws
from floats import approx, assert_close

Z = torch.linspace(-9, 9, 721, dtype=torch.float64)
W = (-0.5 * Z.square()).softmax(dim=0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(outputs: int, *, batch: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    root = random(batch, outputs, outputs, seed=1)
    covariance = root @ root.mT / outputs + 0.05 * torch.eye(outputs).double()
    return random(batch, outputs), covariance.diagonal(dim1=1, dim2=2).clone(), covariance


# --- heteroscedastic ------------------------------------------------------------------------------------------------


def gaussians(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of y given nodes of (f, g), (721, 721) each, for one target."""
    root = torch.linalg.cholesky(covariance)
    f = mean[0] + root[0, 0] * Z[:, None]
    g = mean[1] + root[1, 0] * Z[:, None] + root[1, 1] * Z[None, :]
    return f, (g / 2).exp()


def one_target(place: int, example: int, whole: bool) -> tuple[Tensor, Tensor]:
    mean, variance, covariance = moments(4)
    pair = [place, 2 + place]
    block = covariance[example][pair][:, pair] if whole else variance[example][pair].diag()
    return gaussians(mean[example][pair], block)


@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
def test_a_heteroscedastic_predictive_is_the_integral(whole):
    mean, variance, covariance = moments(4)
    found = likelihood("heteroscedastic").predictive([Component(mean, variance, covariance if whole else None)])
    y = random(6, 2, seed=5)
    low, high = found.interval(0.9)
    log_probs = torch.zeros(6, 2).double()
    for example in range(3):
        for place in range(2):
            f, s = one_target(place, example, whole)

            def integral(values: Tensor) -> Tensor:
                return W @ values @ W

            expected = integral(f.expand_as(s))
            total = integral(f.square() + s.square()) - expected.square()
            assert_close(found.predicted_mean[example, place], expected, rtol=1e-9, atol=1e-12)
            assert_close(found.total_variance[example, place], total, rtol=1e-8)
            log_probs[example, place] = integral(Normal(f, s).log_prob(y[example, place]).exp()).log()
            for end, below in ((low, 0.05), (high, 0.95)):
                mass = integral(Normal(f, s).cdf(end[example, place]))
                assert float(mass) == approx(below, abs=1e-6)
    assert_close(found.log_prob(y)[:3], log_probs.sum(dim=1)[:3], rtol=1e-6, atol=1e-6)


def test_heteroscedastic_draws_are_the_nodes_of_the_log_variance():
    mean, variance, covariance = moments(2)
    draws = function_draws(Component(mean, variance, covariance), 50_000, None)
    by_draws = likelihood("heteroscedastic").predictive([Component(mean, variance, covariance, draws)])
    exact = likelihood("heteroscedastic").predictive([Component(mean, variance, covariance)])
    y = random(6, seed=5)
    assert_close(by_draws.log_prob(y), exact.log_prob(y), atol=0.05)
    assert_close(by_draws.interval(0.9)[1], exact.interval(0.9)[1], rtol=0.05, atol=0.05)
    assert_close(by_draws.total_variance, exact.total_variance, rtol=0.2)


def test_heteroscedastic_outputs_may_have_places():
    """(batch, places, 2 k): each place is as if it were alone."""
    mean, variance, _ = moments(4)
    found = likelihood("heteroscedastic").predictive([Component(mean.view(3, 2, 4), variance.view(3, 2, 4))])
    flat = likelihood("heteroscedastic").predictive([Component(mean, variance)])
    y = random(6, 2, seed=5)
    assert_close(found.log_prob(y.view(3, 2, 2)), flat.log_prob(y).view(3, 2).sum(dim=1))
    covariance = torch.zeros(3, 8, 8).double()
    covariance.diagonal(dim1=1, dim2=2).copy_(variance.view(3, 8))
    whole = likelihood("heteroscedastic").predictive(
        [Component(mean.view(3, 2, 4), variance.view(3, 2, 4), covariance)]
    )
    assert_close(whole.log_prob(y.view(3, 2, 2)), found.log_prob(y.view(3, 2, 2)))


def test_the_entropy_of_y_is_right_to_some_hundredths():
    mean, variance, _ = moments(2)
    found = likelihood("heteroscedastic").predictive([Component(mean, variance)])
    grid = torch.linspace(-200, 200, 40_001, dtype=torch.float64)
    log_p = found.likelihood.log_density(found.components[0], grid[:, None, None].expand(-1, 6, 1))
    expected = -(log_p.exp() * log_p).sum(dim=0) * (grid[1] - grid[0])
    assert_close(found.entropy(), expected, atol=0.2)
    assert float((found.entropy() - expected).mean().abs()) < 0.1


# --- counts ---------------------------------------------------------------------------------------------------------

MEAN = torch.tensor([-2.0, 0.0, 2.0, 4.0, 6.0, 1.0], dtype=torch.float64)
VARIANCE = torch.tensor([1.0, 0.0, 0.5, 0.3, 0.01, 2.0], dtype=torch.float64)


def log_probabilities(counts: Tensor, reach: float, nodes: int) -> Tensor:
    """log p(y) of every count for every example, (counts, 6), by a quadrature over ±`reach` standard deviations."""
    z = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    f = MEAN + z[:, None] * VARIANCE.sqrt()
    scores = counts[:, None, None] * f - f.exp() - torch.lgamma(counts + 1)[:, None, None]
    return (scores + (-0.5 * z.square()).log_softmax(dim=0)[:, None]).logsumexp(dim=1)


@pytest.mark.parametrize("shape", [(6,), (6, 1)], ids=str)
@pytest.mark.slow
def test_a_poisson_predictive_is_the_integral(shape):
    found = likelihood("poisson").predictive([Component(MEAN.view(shape), VARIANCE.view(shape))])
    counts = torch.tensor([0.0, 1.0, 5.0, 40.0, 300.0, 1000.0], dtype=torch.float64)
    expected = log_probabilities(counts, 40, 40_001)
    for count, row in zip(counts, expected, strict=True):
        assert_close(found.log_prob(count.expand(shape)), row, rtol=1e-6, atol=1e-6)
    each = torch.arange(3000, dtype=torch.float64)
    p = log_probabilities(each, 10, 1001).exp()[:, :5]
    mean = each @ p
    assert_close(found.predicted_mean.flatten()[:5], mean, rtol=1e-6)
    assert_close(found.total_variance.flatten()[:5], each.square() @ p - mean.square(), rtol=1e-5)
    cumulated = p.cumsum(dim=0)
    for level in (0.5, 0.95):
        low, high = found.interval(level)
        for end, mass in ((low, (1 - level) / 2), (high, (1 + level) / 2)):
            assert end.flatten()[:5].tolist() == (cumulated < mass).sum(dim=0).double().tolist()


def test_poisson_draws_are_averaged_over():
    draws = MEAN + VARIANCE.sqrt() * random(7, 6)
    found = likelihood("poisson").predictive([Component(draws.mean(dim=0), draws.var(dim=0), None, draws)])
    y = torch.tensor([0.0, 2.0, 3.0, 50.0, 400.0, 1.0], dtype=torch.float64)
    expected = Poisson(draws.exp()).log_prob(y).exp().mean(dim=0).log()
    assert_close(found.log_prob(y), expected, rtol=1e-10, atol=1e-12)
    assert_close(found.predicted_mean, draws.exp().mean(dim=0))
    samples = found.sample(7)
    assert bool((samples == samples.floor()).all())


def test_a_posterior_without_bounds_still_has_an_interval():
    found = likelihood("poisson").predictive([Component(torch.zeros(2), torch.tensor([1e6, 0.0]))])
    low, high = found.interval(0.95)
    assert bool((low >= 0).all())
    assert bool(high.isfinite().all())
    assert bool(found.sample(5).isfinite().all())
