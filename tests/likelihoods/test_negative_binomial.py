"""The negative-binomial predictive against sums over a fine grid of (m, g) and over all counts, in float64."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from bayesadam.likelihoods import Component, likelihood
from floats import approx, assert_close

RECORD = likelihood("negative-binomial")
COUNTS = torch.arange(3000, dtype=torch.float64)
# E[m], E[g], Var[m], Var[g], Cov[m, g].
CASES = {
    "certain": (1.0, -0.5, 0.0, 0.0, 0.0),
    "narrow": (2.0, -1.0, 0.01, 0.04, 0.0),
    "wide": (0.5, 0.3, 0.8, 0.5, 0.0),
    "correlated": (1.0, -1.0, 0.5, 0.5, -0.4),
    "nearly-poisson": (1.5, -12.0, 0.3, 0.1, 0.0),
    "dispersed": (0.0, 2.5, 0.2, 0.2, 0.0),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def component(m: float, g: float, of_m: float, of_g: float, cross: float, dtype=torch.float64) -> Component:
    covariance = torch.tensor([[[of_m, cross], [cross, of_g]]], dtype=dtype)
    mean = torch.tensor([[m, g]], dtype=dtype)
    return Component(mean, covariance.diagonal(dim1=1, dim2=2), covariance=covariance if cross else None)


@lru_cache
def probabilities(m: float, g: float, of_m: float, of_g: float, cross: float) -> Tensor:
    """p(y) of every count: the sum over a grid of 41 x 41 values of (m, g) of torch's negative binomial."""
    z = torch.linspace(-8, 8, 41, dtype=torch.float64)
    w = (-0.5 * z.square()).softmax(dim=0)
    root = math.sqrt(of_m)
    slope = cross / root if root else 0.0
    total = torch.zeros_like(COUNTS)
    for weight, a in zip(w, z, strict=True):
        at = (g + slope * a + math.sqrt(of_g - slope**2) * z)[:, None]
        p = torch.distributions.NegativeBinomial((-at).exp(), logits=m + root * a + at)
        total += weight * (w[:, None] * p.log_prob(COUNTS).exp()).sum(dim=0)
    return total


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def known(request) -> tuple[Component, Tensor]:
    return component(*CASES[request.param]), probabilities(*CASES[request.param])


def test_probabilities_are_those_of_a_fine_grid(known):
    c, p = known
    few = COUNTS[:60, None, None]
    assert_close(RECORD.log_density(c, few)[:, 0].exp(), p[:60], rtol=1e-5, atol=1e-9)


def test_the_cumulative_distribution_is_their_sum(known):
    c, p = known
    for k in (-1.0, 0.0, 1.0, 4.0, 20.0, 100.0):
        below = float(p[: int(k) + 1].sum())
        y = torch.tensor([[k]], dtype=torch.float64)
        assert float(RECORD.mass(c, y, upper=False)) == approx(below, abs=2e-3)
        assert float(RECORD.mass(c, y, upper=True)) == approx(1 - below, abs=2e-3)


def test_intervals_are_quantiles(known):
    c, p = known
    low, high = RECORD.predictive([c]).interval(0.9)
    below = p.cumsum(dim=0)
    assert float(below[int(low)]) > 0.05 - 2e-3
    assert low == 0 or float(below[int(low) - 1]) < 0.05 + 2e-3
    assert float(below[int(high)]) > 0.95 - 2e-3
    assert float(below[int(high) - 1]) < 0.95 + 2e-3


@pytest.mark.parametrize("name", ["certain", "narrow", "correlated", "nearly-poisson"])
def test_moments_and_entropy_are_sums(name):
    c, p = component(*CASES[name]), probabilities(*CASES[name])
    found = RECORD.predictive([c])
    mean = (p * COUNTS).sum()
    assert_close(found.predicted_mean[0, 0], mean, rtol=1e-6, atol=0)
    assert_close(found.total_variance[0, 0], (p * (COUNTS - mean).square()).sum(), rtol=1e-3, atol=0)
    # 256 draws.
    assert float(found.entropy()) == approx(float(torch.special.entr(p).sum()), abs=0.2)


@pytest.mark.parametrize("y", [0.0, 3.0, 400.0, 50_000.0])
def test_the_mode_is_found_where_the_posterior_is_far_wider_than_the_likelihood(y):
    c = component(6.0, -6.0, 9.0, 0.0, 0.0)
    m = torch.linspace(-24, 30, 200_001, dtype=torch.float64)
    p = torch.distributions.NegativeBinomial(torch.tensor(6.0).double().exp(), logits=m - 6)
    prior = torch.distributions.Normal(6.0, 3.0).log_prob(m)
    expected = (p.log_prob(torch.tensor(y).double()) + prior).logsumexp(dim=0) + (m[1] - m[0]).log()
    assert_close(RECORD.log_density(c, torch.tensor([[y]]).double())[0], expected, rtol=1e-6, atol=0)


@every_case
def test_draws_have_these_frequencies(case):
    y = RECORD.sample(component(*case), 40_000, torch.Generator().manual_seed(0)).flatten()
    p = probabilities(*case)
    for k in range(6):
        share = float((y == k).double().mean())
        assert abs(share - float(p[k])) < 5 * math.sqrt(float(p[k]) / 40_000) + 1e-4


def test_draws_of_the_outputs_are_averaged_over():
    draws = torch.randn(7, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    c = Component(draws.mean(dim=0), draws.var(dim=0), draws=draws)
    m, g = draws[:, 0, 0, None], draws[:, 0, 1, None]
    p = torch.distributions.NegativeBinomial((-g).exp(), logits=m + g).log_prob(COUNTS).exp().mean(dim=0)
    assert_close(RECORD.log_density(c, COUNTS[:9, None, None])[:, 0].exp(), p[:9], rtol=1e-9, atol=0)
    assert float(RECORD.mass(c, torch.tensor([[2.0]]).double(), upper=False)) == approx(float(p[:3].sum()), abs=2e-3)
    assert_close(RECORD.expected(c)[0, 0], (p * COUNTS).sum(), rtol=1e-9, atol=0)


def test_float32_keeps_its_digits_where_counts_are_nearly_poissons():
    outputs = torch.tensor([[[1.0, -12.0]]], requires_grad=True)
    (found,) = torch.autograd.grad(RECORD.loss(outputs, torch.tensor([[[4.0]]])).sum(), outputs)
    # ∂/∂m of −log p is (μ − y)/(1 + μ/r); ∂/∂g is of order 1/r.
    assert float(found[0, 0, 0]) == approx(math.e - 4, rel=1e-4)
    assert abs(float(found[0, 0, 1])) < 1e-4


def test_training_starts_at_the_moments_of_the_counts():
    y = torch.tensor([[0.0], [0.0], [4.0], [8.0]])
    # Mean 3, variance 11.
    assert_close(RECORD.start(y), torch.tensor([math.log(3), math.log(8 / 9)]), rtol=1e-6, atol=0)
