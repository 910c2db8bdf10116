"""Bayesian linear regression, where the posterior is known: what v says of it, at p = 1 and at the paper's p = 1/2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayesadam as ba
from floats import assert_close

N, BATCH, NOISE, PRIOR = 2_000, 32, 0.3, 4.0


@pytest.fixture(scope="module")
def problem() -> dict[str, object]:
    """y = w·x + N(0, σ²) with independent inputs of different scales, trained at the exact likelihood."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64) * scales
    truth = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    y = x @ truth + NOISE * torch.randn(N, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        # Many standard deviations away, and near enough for v to forget the way.
        model.weight.copy_(truth.T + 0.1)
    optimizer = ba.Badam(model.parameters(), lr=1e-2, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    for _ in range(4_000):
        rows = torch.randint(N, (BATCH,), generator=generator)
        loss = (model(x[rows]) - y[rows]).square().mean() / (2 * NOISE**2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    precision = x.T @ x / NOISE**2 + PRIOR * torch.eye(5, dtype=torch.float64)
    exact_mean = torch.linalg.solve(precision, x.T @ y / NOISE**2).T
    return {"model": model, "optimizer": optimizer, "precision": precision, "mean": exact_mean, "scales": scales}


def test_the_mean_is_the_exact_posteriors_within_a_fraction_of_its_spread(problem):
    posterior = ba.Posterior.from_optimizer(problem["model"], problem["optimizer"], N, prior_precision=PRIOR)
    spread = problem["precision"].diagonal().rsqrt()
    assert ((posterior.mean["weight"] - problem["mean"]).abs() / spread).max() < 0.5


def test_power_one_gives_the_exact_marginal_precision(problem):
    """E[g²] at the optimum is diag(XᵀX)/(N B σ²), so N B v + δ is the diagonal of the exact precision."""
    posterior = ba.Posterior.from_optimizer(
        problem["model"], problem["optimizer"], N, prior_precision=PRIOR, power=1.0, batch_size=BATCH
    )
    ratio = 1 / posterior.variance["weight"][0] / problem["precision"].diagonal()
    print("precision over exact, N B v + δ:", [f"{r:.3f}" for r in ratio.tolist()])
    assert (ratio - 1).abs().max() < 0.15


def test_the_papers_square_root_is_off_by_the_predicted_factor(problem):
    """N√v = N (E[x²]/(B σ²))^(1/2), so over the exact N E[x²]/σ² it is σ/(√B E[x²]^(1/2)): wider for strong inputs."""
    posterior = ba.Posterior.from_optimizer(problem["model"], problem["optimizer"], N, prior_precision=0.0)
    exact = problem["precision"].diagonal() - PRIOR
    ratio = 1 / posterior.variance["weight"][0] / exact
    predicted = NOISE / (math.sqrt(BATCH) * (exact * NOISE**2 / N).sqrt())
    print("precision over exact, N √v:", [f"{r:.4f}" for r in ratio.tolist()])
    print("              predicted   :", [f"{r:.4f}" for r in predicted.tolist()])
    assert_close(ratio, predicted, rtol=0.1)
    assert ratio.max() < 1
