"""IVON against its equations and a known posterior; what it shares with Vadam is tested there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import SettingError
from bayesadam.optim import IVON
from floats import assert_close
from optim.test_vadam import (
    DEVICES,
    IVON_,
    InjectedNoise,
    Regression,
    Weights,
    assert_follows,
    batches,
    build,
    gradients_at,
    injected,  # noqa: F401
    network,
    report,
    train,
)


def ivon_reference(
    model: nn.Module, m: Weights, data: list[Tensor], noise: Iterator[Tensor], samples: int, settings: dict[str, Any]
) -> dict[str, Weights]:
    """The equations of the docstring of `IVON`, line by line, in float64, with ĝ and f averaged over the samples."""
    kappa, d, h0, b1, b2 = settings["n_data"], settings["weight_decay"], settings["initial_hessian"], *settings["betas"]
    g = {k: torch.zeros_like(w) for k, w in m.items()}
    h = {k: torch.full_like(w, h0(k)) for k, w in m.items()}
    for t, x in enumerate(data, start=1):
        g_hat = {k: torch.zeros_like(w) for k, w in m.items()}
        f = {k: torch.zeros_like(w) for k, w in m.items()}
        for _ in range(samples):
            n = {k: next(noise) / (kappa * (h[k] + d(k))).sqrt() for k in m}
            at_sample = gradients_at(model, {k: m[k] + n[k] for k in m}, x)
            for k in m:
                g_hat[k] += at_sample[k] / samples
                f[k] += kappa * (h[k] + d(k)) * n[k] * at_sample[k] / samples
        for k in m:
            g[k] = b1 * g[k] + (1 - b1) * g_hat[k]
            correction = 0.5 * (1 - b2) ** 2 * (h[k] - f[k]) ** 2 / (h[k] + d(k))
            h[k] = b2 * h[k] + (1 - b2) * f[k] + correction
            m[k] = m[k] - settings["lr"](k) * (h0(k) + d(k)) * (g[k] / (1 - b1**t) + d(k) * m[k]) / (h[k] + d(k))
    return {"mean": m, "momentum": g, "hessian": h, "precision": {k: kappa * (h[k] + d(k)) for k in m}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("samples", [1, 3])
def test_ivon_follows_its_equations(injected: InjectedNoise, samples, device):  # noqa: F811
    """Two groups with different d, h₀ and α, ten steps, in float64."""
    model = network(torch.float64, device)
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.05, "initial_hessian": 0.7},
        {"params": model[2].parameters(), "lr": 0.2},
    ]
    optimizer = IVON(groups, **{**IVON_, "betas": (0.8, 0.95)})
    data = list(batches(10, torch.empty((), dtype=torch.float64, device=device)))
    train(model, optimizer, data, samples)
    settings = {
        "n_data": 200,
        "betas": (0.8, 0.95),
        "lr": lambda name: 0.1 if name.startswith("0.") else 0.2,
        "weight_decay": lambda name: 0.05 if name.startswith("0.") else 1e-4,
        "initial_hessian": lambda name: 0.7 if name.startswith("0.") else 1.0,
    }
    twin = network(torch.float64)
    expected = ivon_reference(twin, start, [x.cpu() for x in data], iter(injected.drawn), samples, settings)
    assert_follows(model, optimizer, expected, "hessian")


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "runs"), [(200, 24), (20, 96)])
def test_ivon_finds_the_exact_posterior_of_a_linear_regression(batch, runs):
    """E[f] is the diagonal of the Hessian, XᵀX/(N σ²), whatever the batch size, so κ (h + d) is exact."""
    problem = Regression(200)
    posterior = problem.run(
        lambda model: IVON(
            model.parameters(),
            lr=0.1,
            n_data=200,
            initial_hessian=6.0,
            weight_decay=problem.prior / 200,
            betas=(0.9, 0.998),
            generator=1,
        ),
        batch=batch,
        steps=1_800,
        decay=1e-3,
        runs=runs,
    )
    error, ratio = problem.compare(posterior)
    report(f"IVON, batches of {batch}", error, ratio)
    assert error.abs().max() < 0.25
    assert error.mean(dim=0).abs().max() < 0.05
    # The mean of the runs shows that the estimate is unbiased. A single run has the noise of its mini-batches in f,
    # which a memory of 500 steps does not average away: with them 15 % holds for the typical run, without for every
    # one.
    assert (ratio.mean(dim=0) - 1).abs().max() < 0.05
    assert (ratio - 1).square().mean().sqrt() < 0.15
    if batch == problem.n_data:
        assert (ratio - 1).abs().max() < 0.15


def curve_downwards(steps: int = 60) -> tuple[nn.Module, IVON]:
    """A loss of −½ c w² in some weights and +½ c w² in others."""
    model = nn.Linear(40, 1, bias=False)
    optimizer = IVON(model.parameters(), lr=0.0, n_data=100, initial_hessian=0.1, weight_decay=0.5, betas=(0.9, 0.9))
    signs = torch.linspace(-0.3, 0.3, 40)
    for _ in range(steps):
        with optimizer.sampled_parameters():
            (0.5 * signs * model.weight.square()).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_negative_hessian_leaves_the_precision_positive_and_the_posterior_exact(tmp_path):
    torch.manual_seed(0)
    model, optimizer = curve_downwards()
    h = optimizer.state[model.weight]["hessian"]
    assert bool((h < 0).any())
    assert bool((h > 0).any())
    assert bool((h + 0.5 > 0).all())
    posterior = optimizer.posterior(model)
    assert_close(1 / posterior.variance["weight"], 100 * (h + 0.5))
    prior = posterior.prior_precision["weight"]
    assert_close(prior[h > 0], torch.full_like(prior[h > 0], 50.0))
    assert bool((prior[h < 0] < 50).all())
    assert bool((prior > 0).all())
    posterior.save(tmp_path / "q.safetensors")
    loaded = ba.Posterior.load(tmp_path / "q.safetensors", model)
    assert torch.equal(loaded.variance["weight"], posterior.variance["weight"])


def test_the_prior_is_one_number_where_no_hessian_is_negative():
    model = network()
    optimizer = build((IVON, IVON_), model, weight_decay=0.01)
    train(model, optimizer, batches(2, model[0].weight))
    assert all(bool((state["hessian"] >= 0).all()) for state in optimizer.state.values())
    assert optimizer.posterior(model).prior_precision == {name: 2.0 for name, _ in model.named_parameters()}


def test_the_hessian_is_unbiased_at_the_default_beta2_in_float32():
    """With β₂ = 0.99999 a step changes h by a hundred-thousandth: rounding must not eat it, nor shift where it
    settles.
    """
    model = nn.Linear(20_000, 1, bias=False)
    optimizer = IVON(model.parameters(), lr=0.0, n_data=100, initial_hessian=2.0, weight_decay=1e-4, generator=0)
    for _ in range(1_000):
        with optimizer.sampled_parameters():
            (0.5 * model.weight.square()).sum().backward()
        optimizer.step()
    h = optimizer.state[model.weight]["hessian"].double()
    expected = 1 + 0.99999**1_000
    assert abs(float(h.mean()) - expected) < 5 * float(h.std()) / 20_000**0.5 + 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial_hessian": 0.0}, r"initial_hessian must be a positive finite number .* got 0.0"),
        ({"weight_decay": -1e-4}, "weight_decay must be finite and at least 0, got -0.0001"),
    ],
)
def test_ivons_own_bad_settings_are_named(changes, message):
    with pytest.raises(SettingError, match=message):
        build((IVON, IVON_), network(), **changes)


def test_without_weight_decay_there_is_no_prior():
    model = network()
    optimizer = build((IVON, IVON_), model, weight_decay=0)
    train(model, optimizer, batches(3, model[0].weight))
    posterior = optimizer.posterior(model)
    h = optimizer.state[model[0].weight]["hessian"]
    assert_close(posterior.variance["0.weight"], 1 / (200 * h))
