"""The diagonal posterior against its equations, torch.distributions and sample moments."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.distributions import Normal

import bayesadam as ba
from bayesadam.errors import ImproperError, MatchError, SettingError
from cases import mlp, seeded, train, trained
from floats import approx, assert_close

N = 500


def build(**settings: object) -> ba.Posterior:
    model, optimizer = trained()
    return ba.Posterior.from_optimizer(model, optimizer, N, **{"prior_precision": 2.0, **settings})


@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.1, 0.02), (0.1, 0.0)])
def test_the_prior_precision_is_n_times_the_weight_decay_or_1(decays):
    model = mlp(3, 5, 2)
    groups = [
        {"params": model[at].parameters(), "weight_decay": decay} for at, decay in zip((0, 2), decays, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer)
    q = ba.Posterior.from_optimizer(model, optimizer, N)
    first, second = (N * decay or 1.0 for decay in decays)
    assert q.prior_precision == approx({"0.weight": first, "0.bias": first, "2.weight": second, "2.bias": second})
    assert q.settings.default_prior == (0.0 in decays)
    assert not q.replace(prior_precision=1.0).settings.default_prior


def large(*sizes: int) -> ba.Posterior:
    torch.manual_seed(0)
    model = torch.nn.Linear(*sizes, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=3)
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)


def test_large_tensors_are_drawn_in_blocks_whatever_the_number_of_threads():
    q, threads = large(1000, 600), torch.get_num_threads()
    drawn = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            drawn.append(q.sample(generator=seeded())["weight"])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    standard = ((drawn[0] - q.mean["weight"]) / q.stddev["weight"]).double()
    assert abs(standard.mean()) < 5 / math.sqrt(standard.numel())
    assert abs(standard.var() - 1) < 5 * math.sqrt(2 / standard.numel())
    quantiles = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    assert_close(standard.flatten().quantile(quantiles), Normal(0.0, 1.0).icdf(quantiles), atol=0.03)
    blocks = standard.flatten()[: 6 * 65_536].view(6, 65_536)
    assert (torch.corrcoef(blocks) - torch.eye(6)).abs().max() < 5.5 / math.sqrt(65_536)


def test_log_prob_sums_many_float32_terms_without_losing_digits():
    q = large(2000, 500)
    draw = q.sample()
    exact = Normal(q.mean["weight"].double(), q.stddev["weight"].double()).log_prob(draw["weight"].double())
    assert q.log_prob(draw).dtype == torch.float64
    assert_close(q.log_prob(draw), exact.sum(), rtol=1e-6)


def test_draws_are_reproducible_and_independent_of_order_and_company():
    model, optimizer = trained()
    q = ba.Posterior.from_optimizer(model, optimizer, N)
    first, again, other = (q.sample(4, generator=seeded(seed)) for seed in (5, 5, 6))
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in first)
    model[0].bias.requires_grad_(False)
    reordered = torch.nn.Sequential()
    for key in ("2", "1", "0"):
        reordered.add_module(key, model.get_submodule(key))
    backwards = ba.Posterior.from_optimizer(reordered, optimizer, N)
    assert list(backwards.mean) == ["2.weight", "2.bias", "0.weight"]
    assert "0.bias" in backwards.omitted
    assert all(torch.equal(draw, first[n]) for n, draw in backwards.sample(4, generator=seeded(5)).items())
    torch.manual_seed(3)
    without, second = q.sample(), q.sample()
    torch.manual_seed(3)
    assert torch.equal(q.sample()["0.weight"], without["0.weight"])
    assert not torch.equal(without["0.weight"], second["0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draws_have_the_parameters_type_and_the_posterior_its_own(dtype):
    model, optimizer = trained(dtype=dtype, eps=1e-4)
    q = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    kept = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for t in (*q.mean.values(), *q.variance.values())} == {kept}
    draws = q.sample(2000, generator=seeded())
    assert {t.dtype for t in draws.values()} == {dtype}
    standard = (draws["0.weight"].to(kept) - q.mean["0.weight"]) / q.stddev["0.weight"]
    assert (standard.var(dim=0) - 1).abs().max() < 6 * math.sqrt(2 / 2000)


def test_weights_without_curvature_or_prior_have_infinite_variance_and_refuse_to_be_drawn():
    q = build(prior_precision=0.0)
    q.curvature.second_moment["0.weight"][:, 1] = 0.0
    assert torch.isinf(q.variance["0.weight"][:, 1]).all()
    assert (q.snr()["0.weight"][:, 1] == 0).all()
    for call in (q.sample, lambda: q.log_prob(q.mean)):
        with pytest.raises(ImproperError, match=r"'0.weight': 5 of 15.*prior_precision"):
            call()
    with pytest.raises(ImproperError):
        q.replace(prior_precision={name: torch.zeros_like(theta) for name, theta in q.mean.items()}).sample()
    mended = q.replace(prior_precision=10.0)
    assert torch.isfinite(mended.sample()["0.weight"]).all()
    assert_close(mended.variance["0.weight"][:, 1], torch.full((5,), 0.1))


def test_the_posterior_does_not_follow_later_training():
    model, optimizer = trained()
    q = ba.Posterior.from_optimizer(model, optimizer, N)
    before = copy.deepcopy((q.mean, q.variance))
    train(model, optimizer, seed=9)
    assert_close(q.mean, before[0], rtol=1e-300)
    assert_close(q.variance, before[1], rtol=1e-300)


def test_to_and_replace_return_new_ones_and_leave_the_model_alone():
    q = build()
    scaled = q.replace(prior_precision=0.0, scale=4.0, n_data=2 * N)
    assert_close(scaled.variance["2.bias"] * 8, q.replace(prior_precision=0.0).variance["2.bias"])
    assert (q.scale, q.n_data) == (1.0, N)
    double = q.replace(noise_variance=0.5).to(dtype=torch.float64)
    assert (double.mean["0.weight"].dtype, double.noise_variance.dtype) == (torch.float64, torch.float64)
    assert q.mean["0.weight"].dtype == q.model[0].weight.dtype == torch.float32
    assert_close(double.variance["0.bias"].float(), q.variance["0.bias"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(({"n_data": n}, "n_data must be a positive finite number") for n in (0, float("nan"), "many", True)),
        ({"prior_precision": -1.0}, "at least 0, got -1.0"),
        ({"prior_precision": float("nan")}, "finite"),
        ({"prior_precision": None}, "at least 0, got None"),
        ({"prior_precision": {"0.weight": 1.0}}, "missing"),
        ({"prior_precision": {"0.weight": torch.ones(2), "0.bias": 1, "2.weight": 1, "2.bias": 1}}, "has shape"),
        ({"power": 0.0}, "power must be"),
        ({"power": 1.0}, "power=1 needs batch_size"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"form": "laplace"}, "form must be one of"),
        ({"scale": -1.0}, "scale must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"noise_variance": -1.0}, "noise_variance must be"),
        ({"likelihood": "luck"}, "likelihood must be one of"),
        ({"tempering": 1.0}, "cannot replace"),
    ],
    ids=str,
)
def test_bad_settings_name_the_value(changes, match):
    with pytest.raises(SettingError, match=match):
        build().replace(**changes)


def test_bad_requests():
    q = build()
    for n in (0, -1, 1.5, True):
        with pytest.raises(SettingError, match="n must be a whole number of at least 1"):
            q.sample(n)
    for values, match in (
        ({"0.weight": torch.zeros(5, 3)}, "missing"),
        ({**q.mean, "0.weight": torch.zeros(3, 5)}, "expected"),
        ({**q.mean, "0.weight": torch.zeros(2, 5, 3)}, "leading dimensions"),
    ):
        with pytest.raises(MatchError, match=match):
            q.log_prob(values)
    with pytest.raises(SettingError, match="float32 or float64"):
        q.to(dtype=torch.float16)


def test_settings_are_printed_in_a_table():
    q = build(batch_size=8, likelihood="regression").replace(noise_variance=[0.5, 2.0], temperature=2.0)
    title, *lines = str(q).splitlines()
    assert title == "Posterior over Sequential"
    assert [line.split(maxsplit=1)[0] for line in lines].count("scale") == 1
    shown = {line[2:18].strip(): line[19:] for line in lines}
    assert shown["structure"] == "diagonal, 32 weights in 4 parameters"
    assert (shown["data"], shown["curvature"]) == ("N = 500, B = 8", "v̂^0.5, map form")
    assert (shown["scale"], shown["prior precision"], shown["noise variance"]) == ("s = 1", "δ = 2", "σ² = 0.5 to 2")
    assert "no weight decay" in str(build(prior_precision=None))
    assert "\n" not in repr(q)


def test_of_a_linear_regression_the_posterior_is_known():
    """Of y = w·x + N(0, σ²), inputs independent and of several scales, trained at the exact likelihood.

    E[g²] at the optimum is diag(XᵀX)/(N B σ²): N B v + δ is the diagonal of the exact precision, and the paper's N √v
    is off by σ/(√B E[x²]^½), wider for strong inputs.
    """
    n, batch, noise, prior = 2_000, 32, 0.3, 4.0
    scales = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    x = torch.randn(n, 5, dtype=torch.float64) * scales
    truth = torch.randn(5, 1, dtype=torch.float64)
    y = x @ truth + noise * torch.randn(n, 1, dtype=torch.float64)
    model = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        # Many standard deviations away, and near enough for v to forget the way.
        model.weight.copy_(truth.T + 0.1)
    optimizer = ba.Badam(model.parameters(), lr=1e-2, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    for _ in range(4_000):
        rows = torch.randint(n, (batch,))
        optimizer.zero_grad()
        ((model(x[rows]) - y[rows]).square().mean() / (2 * noise**2)).backward()
        optimizer.step()
        schedule.step()
    data = x.T @ x / noise**2
    precision = data + prior * torch.eye(5, dtype=torch.float64)
    how = {"prior_precision": prior, "power": 1.0, "batch_size": batch}
    q = ba.Posterior.from_optimizer(model, optimizer, n, **how)
    exact = torch.linalg.solve(precision, x.T @ y / noise**2).T
    assert ((q.mean["weight"] - exact).abs() * precision.diagonal().sqrt()).max() < 0.5
    assert_close(1 / q.variance["weight"][0], precision.diagonal(), rtol=0.15, size=0.0)
    paper = ba.Posterior.from_optimizer(model, optimizer, n, prior_precision=0.0)
    ratio, predicted = 1 / paper.variance["weight"][0] / data.diagonal(), (n / data.diagonal() / batch).sqrt()
    assert_close(ratio, predicted, rtol=0.1, size=0.0)
    assert ratio.max() < 1
