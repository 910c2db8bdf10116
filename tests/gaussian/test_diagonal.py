"""The diagonal posterior against its equations, torch.distributions and sample moments."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

import bayesadam as ba
from bayesadam.errors import ImproperError, MatchError, SettingError
from cases import mlp, train, trained
from floats import approx, assert_close

N = 500


def v_hat(optimizer: torch.optim.Adam, parameter: torch.Tensor) -> torch.Tensor:
    """Adam's bias-corrected second moment, from its definition."""
    state = optimizer.state[parameter]
    return state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))


@pytest.mark.parametrize(
    ("power", "batch_size"), [(0.5, None), (0.5, 8), (1.0, 8), (0.25, None), (0.25, 8), (0.8, None), (0.8, 8)]
)
@pytest.mark.parametrize("form", ["map", "likelihood"])
def test_mean_and_variance_are_the_equations(power, batch_size, form):
    model, optimizer = trained()
    delta = 3.0
    posterior = ba.Posterior.from_optimizer(
        model, optimizer, N, prior_precision=delta, power=power, batch_size=batch_size, form=form
    )
    for name, parameter in model.named_parameters():
        data = N * float(batch_size or 1) ** (2 * power - 1) * v_hat(optimizer, parameter) ** power
        shrink = data / (data + delta) if form == "likelihood" else 1.0
        assert_close(posterior.variance[name].double(), 1 / (data + delta), rtol=1e-5)
        assert_close(posterior.mean[name].double(), shrink * parameter.detach().double(), rtol=1e-5, atol=1e-9)
        expected_snr = (shrink * parameter.detach().double()).abs() * (data + delta).sqrt()
        assert_close(posterior.snr()[name].double(), expected_snr, rtol=1e-5, atol=1e-9)


def test_the_papers_equation_to_the_letter_and_its_laplace_consistent_sibling():
    model, optimizer = trained()
    weight = model[0].weight
    paper = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=0.0, batch_size=64)
    assert_close(paper.variance["0.weight"].double(), 1 / (N * v_hat(optimizer, weight).sqrt()), rtol=1e-5)
    laplace = paper.replace(power=1.0)
    assert_close(laplace.variance["0.weight"].double(), 1 / (N * 64 * v_hat(optimizer, weight)), rtol=1e-5)


def test_prior_precision_defaults_to_n_times_the_weight_decay_of_each_group():
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
    train(model, optimizer)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    assert posterior.prior_precision == approx(
        {"0.weight": N * 0.1, "0.bias": N * 0.1, "2.weight": N * 0.02, "2.bias": N * 0.02}
    )


def test_prior_precision_by_name_and_by_weight():
    model, optimizer = trained()
    by_weight = torch.rand(5, 3) + 1
    prior = {"0.weight": by_weight, "0.bias": 1.0, "2.weight": torch.tensor(2.0), "2.bias": 0.0}
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=prior)
    flat = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=0.0)
    assert_close(1 / posterior.variance["0.weight"], 1 / flat.variance["0.weight"] + by_weight, rtol=1e-5)
    assert_close(1 / posterior.variance["2.weight"], 1 / flat.variance["2.weight"] + 2.0)
    assert posterior.sample()["0.weight"].shape == (5, 3)


@pytest.mark.parametrize("form", ["map", "likelihood"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_moments_of_ten_thousand_draws(form, power):
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(
        model, optimizer, N, prior_precision=2.0, form=form, power=power, batch_size=8
    )
    count = 10_000
    draws = posterior.sample(count, generator=torch.Generator().manual_seed(1))
    for name, values in draws.items():
        mean, variance = posterior.mean[name].double(), posterior.variance[name].double()
        standard = (values.double() - mean) / variance.sqrt()
        # Five standard errors: of the mean 1/√n, of the variance √(2/n).
        assert standard.mean(dim=0).abs().max() < 5 / math.sqrt(count)
        assert (standard.var(dim=0) - 1).abs().max() < 5 * math.sqrt(2 / count)


def test_draws_of_different_weights_are_uncorrelated_and_normal():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=2.0)
    count = 10_000
    draws = posterior.sample(count, generator=torch.Generator().manual_seed(2))
    standard = torch.cat(
        [((draws[n] - posterior.mean[n]) / posterior.stddev[n]).flatten(1) for n in draws], dim=1
    ).double()
    correlation = torch.corrcoef(standard.T) - torch.eye(standard.shape[1])
    assert correlation.abs().max() < 5.5 / math.sqrt(count)
    quantiles = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    expected = Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double()).icdf(quantiles)
    assert (standard.flatten()[:200_000].quantile(quantiles) - expected).abs().max() < 0.03


def test_large_tensors_are_drawn_in_blocks_with_the_right_moments():
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 400, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=3)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    draw = posterior.sample(generator=torch.Generator().manual_seed(0))["weight"]
    standard = ((draw - posterior.mean["weight"]) / posterior.stddev["weight"]).double()
    assert abs(standard.mean()) < 5 / math.sqrt(standard.numel())
    assert abs(standard.var() - 1) < 5 * math.sqrt(2 / standard.numel())
    blocks = standard.flatten()[: 6 * 65_536].view(6, 65_536)
    assert (torch.corrcoef(blocks) - torch.eye(6)).abs().max() < 5.5 / math.sqrt(65_536)


def test_log_prob_and_entropy_equal_torch_distributions():
    model, optimizer = trained(dtype=torch.float64)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=2.0, form="likelihood")
    draws = posterior.sample(7)
    expected = sum(
        Normal(posterior.mean[n], posterior.stddev[n]).log_prob(draws[n]).flatten(1).sum(dim=1) for n in draws
    )
    assert_close(posterior.log_prob(draws), expected, rtol=1e-12)
    one = {name: values[3] for name, values in draws.items()}
    assert_close(posterior.log_prob(one), expected[3], rtol=1e-12)
    entropy = sum(Normal(posterior.mean[n], posterior.stddev[n]).entropy().sum() for n in draws)
    assert_close(posterior.entropy(), entropy, rtol=1e-12)


def test_log_prob_sums_many_float32_terms_without_losing_digits():
    torch.manual_seed(0)
    model = torch.nn.Linear(2000, 500, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=2)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    draw = posterior.sample()
    exact = Normal(posterior.mean["weight"].double(), posterior.stddev["weight"].double()).log_prob(
        draw["weight"].double()
    )
    assert_close(posterior.log_prob(draw), exact.sum(), rtol=1e-6)


def test_draws_are_reproducible_and_independent_of_order_and_company():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)

    def draw(p: ba.Posterior, n: int | None = None) -> dict[str, torch.Tensor]:
        return p.sample(n, generator=torch.Generator().manual_seed(5))

    first, again = draw(posterior, 4), draw(posterior, 4)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(
        first["0.weight"], posterior.sample(4, generator=torch.Generator().manual_seed(6))["0.weight"]
    )

    model[0].bias.requires_grad_(False)
    fewer = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    assert "0.bias" not in fewer.mean
    assert torch.equal(draw(fewer)["2.weight"], draw(posterior)["2.weight"])

    reordered = torch.nn.Sequential()
    for key in ("2", "1", "0"):
        reordered.add_module(key, model.get_submodule(key))
    backwards = ba.Posterior.from_optimizer(reordered, optimizer, N, prior_precision=1.0)
    assert list(backwards.mean) != list(fewer.mean)
    assert all(torch.equal(draw(backwards)[n], draw(fewer)[n]) for n in fewer.mean)


def test_without_a_generator_draws_follow_torchs_own_seed():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    torch.manual_seed(3)
    first, second = posterior.sample(), posterior.sample()
    torch.manual_seed(3)
    assert torch.equal(posterior.sample()["0.weight"], first["0.weight"])
    assert not torch.equal(first["0.weight"], second["0.weight"])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_draws_do_not_depend_on_the_number_of_threads(threads):
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 600)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = posterior.sample(2, generator=torch.Generator().manual_seed(0))
        torch.set_num_threads(threads)
        got = posterior.sample(2, generator=torch.Generator().manual_seed(0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(got[n], expected[n]) for n in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draws_have_the_parameters_type_and_the_posterior_its_own(dtype):
    model, optimizer = trained(dtype=dtype, eps=1e-4)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    kept = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for t in (*posterior.mean.values(), *posterior.variance.values())} == {kept}
    draws = posterior.sample(2000, generator=torch.Generator().manual_seed(0))
    assert {t.dtype for t in draws.values()} == {dtype}
    standard = (draws["0.weight"].to(kept) - posterior.mean["0.weight"]) / posterior.stddev["0.weight"]
    assert (standard.var(dim=0) - 1).abs().max() < 6 * math.sqrt(2 / 2000)


def test_weights_without_curvature_or_prior_have_infinite_variance_and_refuse_to_be_drawn():
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 3)
        x[:, 1] = 0.0
        model(x).square().mean().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=0.0)
    assert torch.isinf(posterior.variance["0.weight"][:, 1]).all()
    assert (posterior.snr()["0.weight"][:, 1] == 0).all()
    for call in (posterior.sample, posterior.entropy, lambda: posterior.log_prob(posterior.mean)):
        with pytest.raises(ImproperError, match=r"'0.weight': 4 of 12.*prior_precision"):
            call()
    mended = posterior.replace(prior_precision=10.0)
    assert torch.isfinite(mended.sample()["0.weight"]).all()
    assert_close(mended.variance["0.weight"][:, 1], torch.full((4,), 0.1))
    by_weight = {name: torch.zeros_like(theta) for name, theta in posterior.mean.items()}
    with pytest.raises(ImproperError):
        posterior.replace(prior_precision=by_weight).sample()


def test_replace_returns_a_new_posterior():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=0.0)
    scaled = posterior.replace(scale=4.0)
    assert posterior.settings.scale == 1.0
    assert_close(scaled.variance["2.bias"] * 4, posterior.variance["2.bias"])
    assert_close(posterior.replace(n_data=4 * N).variance["2.bias"], scaled.variance["2.bias"])


def test_the_posterior_does_not_follow_later_training():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    before = {**posterior.mean}, posterior.variance
    copies = [{n: t.clone() for n, t in part.items()} for part in before]
    train(model, optimizer, seed=9)
    assert all(torch.equal(posterior.mean[n], copies[0][n]) for n in copies[0])
    assert all(torch.equal(posterior.variance[n], copies[1][n]) for n in copies[1])


@pytest.mark.parametrize("n_data", [0, -5, float("nan"), float("inf"), "many", None, True])
def test_n_must_be_positive(n_data):
    model, optimizer = trained()
    with pytest.raises(SettingError, match=r"n_data must be a positive finite number"):
        ba.Posterior.from_optimizer(model, optimizer, n_data)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prior_precision": -1.0}, "at least 0, got -1.0"),
        ({"prior_precision": float("nan")}, "finite"),
        ({"prior_precision": {"0.weight": 1.0}}, "missing"),
        (
            {"prior_precision": {"0.weight": torch.ones(2), "0.bias": 1, "2.weight": 1, "2.bias": 1}},
            r"'0.weight' has shape",
        ),
        ({"power": 0.0}, "power must be"),
        ({"power": 1.0}, "power=1 needs batch_size"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"form": "laplace"}, "form must be one of"),
        ({"scale": -1.0}, "scale must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"tempering": 1.0}, "cannot replace"),
    ],
)
def test_bad_settings_name_the_value(changes, match):
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    with pytest.raises(SettingError, match=match):
        posterior.replace(**changes)


def test_bad_requests():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N)
    with pytest.raises(SettingError, match="structure must be one of"):
        ba.Posterior.from_optimizer(model, optimizer, N, structure="full")
    for n in (0, -1, 1.5, True):
        with pytest.raises(SettingError, match="n must be a whole number of at least 1"):
            posterior.sample(n)
    with pytest.raises(MatchError, match="missing"):
        posterior.log_prob({"0.weight": torch.zeros(5, 3)})
    with pytest.raises(MatchError, match="expected"):
        posterior.log_prob({**posterior.mean, "0.weight": torch.zeros(3, 5)})
    with pytest.raises(MatchError, match="leading dimensions"):
        posterior.log_prob({**posterior.mean, "0.weight": torch.zeros(2, 5, 3)})
    with pytest.raises(SettingError, match="float32 or float64"):
        posterior.to(dtype=torch.float16)


def test_to_changes_type_and_leaves_the_model_alone():
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=1.0)
    double = posterior.to(dtype=torch.float64)
    assert double.mean["0.weight"].dtype == torch.float64
    assert posterior.mean["0.weight"].dtype == model[0].weight.dtype == torch.float32
    assert_close(double.variance["0.bias"].float(), posterior.variance["0.bias"])
