"""What a regression says before its noise is known, and of networks that were trained for another likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, MatchError
from cases import mlp
from floats import assert_close


def posterior(outputs: int = 1, seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(2, 4, outputs)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return ba.Posterior.from_moments(model, mean, {name: torch.full_like(p, 0.1) for name, p in mean.items()}, 10)


X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
NEEDS_NOISE: dict[str, Callable[[Any], Any]] = {
    "stddev": lambda p: p.stddev,
    "total_variance": lambda p: p.total_variance,
    "interval": lambda p: p.interval(0.9),
    "log_prob": lambda p: p.log_prob(torch.zeros(6, 1)),
    "entropy": lambda p: p.entropy(),
    "sample": lambda p: p.sample(3),
}


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", NEEDS_NOISE)
def test_what_needs_the_noise_says_that_it_is_not_known(name, mixed, covariance):
    q: Any = ba.Mixture([posterior(), posterior(seed=1)]) if mixed else posterior()
    found = q.predict(X, likelihood="regression", covariance=covariance)
    with pytest.warns(
        BayesAdamWarning, match=r"noise of the observations is not known .*replace\(noise_variance="
    ) as seen:
        NEEDS_NOISE[name](found)
    assert {warning.filename for warning in seen} == {__file__}
    known = q.replace(noise_variance=0.5).predict(X, likelihood="regression", covariance=covariance)
    NEEDS_NOISE[name](known)


def test_what_does_not_need_it_is_silent():
    found = posterior().predict(X, likelihood="regression")
    assert (found.variance > 0).all()
    assert not found.noise_known
    assert float(found.noise_variance) == 0
    assert found.novelty.shape == (6,)
    # A noise of 0 that was given is a noise that is known.
    exact = posterior().replace(noise_variance=0.0).predict(X, likelihood="regression")
    assert_close(exact.stddev, exact.variance.sqrt())
    # A margin of two classes is a number without a noise.
    torch.manual_seed(0)
    margin = posterior(2).predict(X, likelihood="classification", outputs=torch.tensor([[1.0, -1.0]]))
    assert_close(margin.stddev, margin.variance.sqrt())


def test_with_a_noise_numbers_are_those_of_a_normal_distribution():
    found = posterior().replace(noise_variance=0.3).predict(X, likelihood="regression")
    reference = Normal(found.mean.double(), (found.variance.double() + 0.3).sqrt())
    low, high = found.interval(0.9)
    for end, tail in ((low, 0.05), (high, 0.95)):
        assert_close(reference.cdf(end.double()), torch.full_like(reference.mean, tail), atol=1e-5)
    y = torch.randn(6, 1)
    assert_close(found.log_prob(y).double(), reference.log_prob(y.double()).sum(dim=1), atol=1e-5, rtol=1e-5)


# --- networks of other likelihoods ----------------------------------------------------------------------------------


def trained(outputs: int, loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, x: Tensor) -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp(1, 16, outputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, n_data=len(x))


def curve() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 120)[:, None]
    return x, torch.poisson((1.2 * torch.sin(2 * x) + 0.7).exp(), generator=generator)


def test_a_regression_of_counts_and_of_real_numbers_is_not_doubted():
    x, counts = curve()
    squared = torch.nn.functional.mse_loss
    with warnings.catch_warnings():
        warnings.simplefilter("error", BayesAdamWarning)
        warnings.filterwarnings("ignore", "these look like the training data")
        for y in (counts, counts + 0.25, torch.sin(x)):
            ba.calibrate(trained(1, squared, y, x), (x, y), likelihood="regression")


def test_targets_of_another_shape_are_refused():
    with pytest.raises(MatchError, match=r"the targets have shape \(6, 2\), the outputs \(6, 3\)$"):
        ba.calibrate(posterior(3), (X, torch.zeros(6, 2)), likelihood="regression")
