"""Calibration: never worse than before, against dense evidence on problems where it is known, and careful with
failures.
"""

from __future__ import annotations

import math
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam import calibrate
from bayesadam.calibration import fits, held_out, log_marginal_likelihood
from bayesadam.errors import (
    BayesAdamError,
    CalibrationError,
    CollapsedPredictionWarning,
    MatchError,
    SettingError,
)
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.predict.prediction import Options
from cases import mlp
from floats import approx, assert_close, close
from predict.cases_networks import Lambda, Then, jacobian, posterior_over, predict


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Overlapping clouds in the plane, one a class."""
    generator = seeded(seed)
    y = torch.randint(classes, (count,), generator=generator)
    angle = 2 * math.pi * y / classes
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.7 * torch.randn(count, 2, generator=generator), y


def fitted(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor], y: Tensor) -> ba.Posterior:
    """Trained well past the point where it is over-confident."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(300):
        rows = torch.randint(len(x), (16,), generator=seeded(step))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, len(x), prior_precision=1.0)


@pytest.fixture(scope="module")
def classification() -> tuple[ba.Posterior, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = blobs(60, 3, seed=0)
    return fitted(mlp(2, 16, 3), x, F.cross_entropy, y), blobs(90, 3, seed=1)


@pytest.fixture(scope="module")
def binary() -> tuple[ba.Posterior, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = blobs(60, 2, seed=0)
    x_val, y_val = blobs(90, 2, seed=1)
    posterior = fitted(mlp(2, 16, 1), x, F.binary_cross_entropy_with_logits, y[:, None].float())
    return posterior, (x_val, y_val[:, None].float())


@pytest.fixture(scope="module")
def regression() -> tuple[ba.Posterior, tuple[Tensor, Tensor]]:
    """Two outputs, one ten times noisier than the other."""
    torch.manual_seed(0)

    def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        x = torch.rand(count, 1, generator=generator) * 4 - 2
        noise = torch.randn(count, 2, generator=generator) * torch.tensor([0.05, 0.5])
        return x, torch.cat([x.sin(), x.cos()], dim=1) + noise

    x, y = data(100, seed=0)
    return fitted(mlp(1, 16, 2), x, F.mse_loss, y), data(120, seed=1)


def problem(request: pytest.FixtureRequest, likelihood: str) -> tuple[ba.Posterior, tuple[Tensor, Tensor]]:
    return request.getfixturevalue(likelihood)


def log_likelihood(posterior: ba.Posterior, batch: tuple[Tensor, Tensor], **options: Any) -> float:
    """Under the variances of the posterior itself, which is what settings are fitted to."""
    x, y = batch
    return float(predict(posterior, x, shift=False, **options).log_prob(y).double().mean())


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings tried, for tests that do not ask for the best ones."""
    monkeypatch.setattr(fits, "_RATIOS", 5)
    monkeypatch.setattr(fits, "_NOISE_SHARES", (0.1, 0.5, 1.0))


every_likelihood = pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "loss"), [("classification", F.cross_entropy), ("binary", F.binary_cross_entropy_with_logits)]
)
@pytest.mark.parametrize("link", ["probit", "sampling"])
@pytest.mark.slow
def test_validation_is_no_worse_than_the_network_without_a_posterior(
    request, coarse, likelihood: str, loss: Any, link: str
):
    posterior, (x, y) = problem(request, likelihood)
    with torch.no_grad():
        without = -float(loss(posterior.model(x), y))
    found = calibrate(posterior, (x, y), likelihood=likelihood, method="validation", link=link)
    calibrated = log_likelihood(found, (x, y), likelihood=likelihood, link=link)
    # These networks are over-confident, so that it must even be better.
    assert calibrated > without + 0.01
    assert calibrated >= log_likelihood(posterior, (x, y), likelihood=likelihood, link=link)


def test_validation_does_not_spoil_a_network_that_needs_no_posterior():
    """Labels drawn from the network itself: any uncertainty about it only costs."""
    torch.manual_seed(0)
    model, x = mlp(2, 8, 3), torch.randn(1_000, 2)
    with torch.no_grad():
        model[2].weight *= 5
        logits = model(x)
    y = torch.multinomial(logits.softmax(dim=1), 1, generator=seeded()).squeeze(1)
    found = calibrate(posterior_over(model), (x, y), likelihood="classification", method="validation")
    assert log_likelihood(found, (x, y), likelihood="classification") >= -float(F.cross_entropy(logits, y)) - 1e-4


@every_likelihood
def test_no_other_scale_or_prior_is_better_on_the_same_data(request, likelihood: str):
    posterior, batch = problem(request, likelihood)
    found = calibrate(posterior, batch, likelihood=likelihood, method="validation")
    best = log_likelihood(found, batch, likelihood=likelihood)
    delta = {name: float(d) for name, d in found.prior_precision.items()}
    assert len(set(delta.values())) == 1
    for factor in (0.01, 0.1, 0.5, 0.9, 1.1, 2.0, 10.0, 100.0):
        together = found.replace(
            scale=found.settings.scale * factor, prior_precision={name: d * factor for name, d in delta.items()}
        )
        # The scale is refined within a grid, the ratio of prior and scale is on one.
        assert log_likelihood(together, batch, likelihood=likelihood) <= best + 1e-4
        alone = found.replace(prior_precision={name: d * factor for name, d in delta.items()})
        assert log_likelihood(alone, batch, likelihood=likelihood) <= best + 2e-3


def test_validation_of_a_regression_finds_the_noise_of_every_output(regression):
    posterior, (x, y) = regression
    found = calibrate(posterior, (x, y), likelihood="regression", method="validation")
    residual = (y - posterior.model(x).detach()).square().mean(dim=0)
    assert found.noise_variance.shape == (2,)
    assert (found.noise_variance <= residual * (1 + 1e-5)).all()
    total = predict(found, x, shift=False).total_variance.mean(dim=0)
    assert_close(total, residual, rtol=0.2)


@every_likelihood
def test_the_form_with_the_prior_applied_afterwards_is_calibrated_as_it_will_predict(request, coarse, likelihood: str):
    """There the mean moves with the prior, so that a prior chosen for another mean would shrink the network away."""
    posterior, batch = problem(request, likelihood)
    shrunk = posterior.replace(form="likelihood", prior_precision=1e-6)
    found = calibrate(shrunk, batch, likelihood=likelihood, method="validation")
    assert found.settings.form == "likelihood"
    assert log_likelihood(found, batch, likelihood=likelihood) >= log_likelihood(
        shrunk.replace(noise_variance=found.noise_variance), batch, likelihood=likelihood
    )
    plain = calibrate(posterior, batch, likelihood=likelihood, method="validation")
    assert (
        log_likelihood(found, batch, likelihood=likelihood) >= log_likelihood(plain, batch, likelihood=likelihood) - 0.1
    )


@every_likelihood
@pytest.mark.parametrize("method", ["validation", "evidence", None])
def test_the_given_posterior_and_its_model_are_left_alone(request, coarse, likelihood: str, method: str | None):
    posterior, batch = problem(request, likelihood)
    settings, noise = posterior.settings, posterior.noise_variance
    weights = {name: (p.data_ptr(), p.detach().clone()) for name, p in posterior.model.named_parameters()}
    posterior.model.train()
    state = torch.get_rng_state()
    found = calibrate(posterior, batch, likelihood=likelihood, method=method)
    assert found is not posterior
    assert posterior.settings is settings
    assert posterior.noise_variance is noise
    assert found.settings.n_data == settings.n_data
    assert posterior.model.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in posterior.model.named_parameters():
        assert parameter.data_ptr() == weights[name][0]
        assert torch.equal(parameter, weights[name][1])


@every_likelihood
def test_the_default_is_evidence_for_regression_and_temperature_for_classes(request, coarse, likelihood: str):
    posterior, batch = problem(request, likelihood)
    expected = "evidence" if likelihood == "regression" else "temperature"
    found = calibrate(posterior, batch, likelihood=likelihood)
    same = calibrate(posterior, batch, likelihood=likelihood, method=expected)
    assert found.settings.scale == same.settings.scale
    assert found.prior_precision == same.prior_precision
    assert found.temperature == same.temperature
    assert found.averaged == same.averaged == (likelihood == "regression")


@every_likelihood
@pytest.mark.parametrize("method", ["validation", "evidence"])
def test_the_starting_point_does_not_matter(request, coarse, likelihood: str, method: str):
    """A uniform rescaling of v, as loss scaling and gradient clipping cause, is absorbed."""
    posterior, batch = problem(request, likelihood)
    moments = {name: 1e6 * v for name, v in posterior.structure.second_moment.items()}
    other = replace(posterior, structure=Diagonal(moments)).replace(
        scale=7.0, prior_precision=123.0, n_data=posterior.n_data
    )
    first, second = (calibrate(p, batch, likelihood=likelihood, method=method) for p in (posterior, other))
    for name, variance in first.variance.items():
        assert_close(second.variance[name], variance, rtol=1e-2)


# --- evidence -------------------------------------------------------------------------------------------------------


def linear_problem(*, orthogonal: bool, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = seeded(3)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(x).Q * math.sqrt(80) * torch.tensor([0.05, 0.1, 0.3, 1.0, 2.0, 3.0])
    w = torch.randn(6, outputs, generator=generator, dtype=torch.float64)
    return x, x @ w + 0.5 * torch.randn(80, outputs, generator=generator, dtype=torch.float64)


def linear_posterior(x: Tensor, weight: Tensor) -> ba.Posterior:
    """Around given weights, with a second moment proportional to the diagonal of XᵀX: the true one, up to a scale."""
    model = nn.Linear(x.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model.weight.grad = (17.0 * x.square().mean(dim=0)).sqrt().expand_as(weight).clone()
    optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, len(x), power=1.0, batch_size=1)


def mackay(h: Tensor, weight: Tensor) -> float:
    """The root of δ|θ|² = Σ h/(h + δ), by bisection."""
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        if middle * float(weight.square().sum()) > float((h / (h + middle)).sum()):
            high = middle
        else:
            low = middle
    return middle


@pytest.mark.filterwarnings("ignore:these look like the training data")
@pytest.mark.parametrize("outputs", [1, 3])
def test_evidence_finds_mackays_fixed_point_with_the_true_diagonal_of_the_gauss_newton_matrix(outputs: int):
    x, y = linear_problem(orthogonal=False, outputs=outputs)
    weight = torch.linalg.lstsq(x, y).solution.T
    found = calibrate(linear_posterior(x, weight), (x, y), likelihood="regression")
    sigma2 = found.noise_variance
    # One trace for all outputs: the matrix has XᵀX/σ² for each of them, v knows of one scale.
    h = x.square().sum(dim=0).expand(outputs, -1) * float((1 / sigma2).mean())
    delta = found.prior_precision["weight"]
    assert delta == approx(mackay(h, weight), rel=1e-5)
    assert_close(1 / found.variance["weight"], h + delta, rtol=1e-8)


def test_evidence_is_stationary_where_it_is_known_exactly():
    """With orthogonal inputs the diagonal is the whole matrix; at the MAP of its own δ, so is d log p(y | δ)/dδ = 0."""
    x, y = linear_problem(orthogonal=True)
    delta, sigma2 = 1.0, 1.0
    for _ in range(60):
        weight = torch.linalg.solve(x.T @ x / sigma2 + delta * torch.eye(6), x.T @ y / sigma2).T
        found = calibrate(linear_posterior(x, weight), (x, y), likelihood="regression", method="evidence")
        delta, sigma2 = float(found.prior_precision["weight"]), float(found.noise_variance)

    def slope(delta: float) -> float:
        log_delta = torch.tensor(math.log(delta), dtype=torch.float64, requires_grad=True)
        covariance = sigma2 * torch.eye(80) + x @ x.T / log_delta.exp()
        exact = torch.distributions.MultivariateNormal(torch.zeros(80, dtype=torch.float64), covariance)
        return float(torch.autograd.grad(exact.log_prob(y.squeeze(1)), log_delta)[0])

    assert abs(slope(delta)) < 1e-4
    assert slope(delta / 2) > 0.1
    assert slope(delta * 2) < -0.1


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_the_total_curvature_is_that_of_the_gauss_newton_matrix(request, likelihood: str):
    posterior, (x, y) = problem(request, likelihood)
    found = calibrate(posterior, (x, y), likelihood=likelihood, method="evidence")
    model = posterior.model
    output = model(x)
    j = jacobian(model, list(posterior.mean), output)
    if likelihood == "classification":
        p = output.softmax(dim=1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    elif likelihood == "binary":
        p = output.sigmoid()
        hessian = torch.diag_embed(p * (1 - p))
    else:
        hessian = torch.diag_embed(1 / found.noise_variance).expand(len(x), 2, 2)
    trace = torch.einsum("bcp,bcd,bdp->", j, hessian, j) * posterior.n_data / len(x)
    delta = {name: float(d) for name, d in found.prior_precision.items()}
    total = sum((1 / v - delta[name]).sum() for name, v in found.variance.items())
    # The noise, and with it the trace, is settled to a percent.
    assert_close(total, trace.detach(), rtol=0.03 if likelihood == "regression" else 1e-4)


def test_noise_and_uncertainty_together_are_the_held_out_residuals(regression):
    posterior, (x, y) = regression
    found = calibrate(posterior, (x, y), likelihood="regression")
    residual = (y - posterior.model(x).detach()).square().mean(dim=0)
    assert found.noise_variance.shape == (2,)
    predicted = predict(found, x, shift=False).total_variance.mean(dim=0)
    assert_close(predicted, residual, rtol=0.03)
    # Each output has a noise of its own.
    assert found.noise_variance[1] > 10 * found.noise_variance[0]


def test_noise_and_uncertainty_fit_the_mean_that_the_prior_has_moved(regression):
    posterior, (x, y) = regression
    found = calibrate(posterior.replace(form="likelihood"), (x, y), likelihood="regression", method="evidence")
    predicted = predict(found, x, shift=False)
    assert not close(predicted.mean, posterior.model(x), rtol=1e-3)
    residual = (y - predicted.mean).square().mean(dim=0)
    assert_close(predicted.total_variance.mean(dim=0), residual, rtol=0.05)


@pytest.mark.parametrize("method", ["validation", "evidence"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_outputs_of_any_shape(coarse, method: str, shape: tuple[int, ...], likelihood: str):
    if likelihood == "classification" and shape != (2, 3):
        pytest.skip("no classes in the last dimension")
    torch.manual_seed(0)
    model = Then(mlp(3, 4, math.prod(shape)), lambda z: z.reshape(-1, *shape))
    x = torch.randn(40, 3)
    y = torch.randn(40, *shape)
    if likelihood == "binary":
        y = (y > 0).float()
    elif likelihood == "classification":
        y = y.argmax(dim=-1)
    found = calibrate(posterior_over(model), (x, y), likelihood=likelihood, method=method)
    assert math.isfinite(log_likelihood(found, (x, y), likelihood=likelihood))
    if likelihood == "regression":
        assert found.noise_variance.shape == shape


# --- log marginal likelihood ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["regression", "classification", "binary"])
def test_the_marginal_likelihood_is_laplaces(likelihood: str):
    torch.manual_seed(0)
    model, x = mlp(2, 4, 3).double(), torch.randn(30, 2, dtype=torch.float64)
    posterior = posterior_over(model, n_data=30, prior_precision=2.5)
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    with torch.no_grad():
        output = model(x)
    if likelihood == "regression":
        y = torch.randn(30, 3, dtype=torch.float64)
        fit = torch.distributions.Normal(output, noise.sqrt()).log_prob(y).sum()
    elif likelihood == "classification":
        y = torch.randint(3, (30,))
        fit = -F.cross_entropy(output, y, reduction="sum")
    else:
        y = torch.randint(2, (30, 3)).double()
        fit = -F.binary_cross_entropy_with_logits(output, y, reduction="sum")
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    precision = torch.diag(torch.cat([1 / v.flatten() for v in posterior.variance.values()]))
    prior = torch.distributions.MultivariateNormal(
        torch.zeros_like(theta), torch.eye(len(theta), dtype=torch.float64) / 2.5
    )
    # log p(D) ≈ log p(D, θ) + (P/2) log 2π − ½ log det(precision).
    expected = fit + prior.log_prob(theta) + len(theta) / 2 * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)
    posterior = posterior.replace(noise_variance=noise)
    found = log_marginal_likelihood(posterior, (x, y), likelihood=likelihood)
    assert_close(found, expected, rtol=1e-10)
    # Half of the data stands for all of it.
    halves = [(x[:15], y[:15]), (x[15:], y[15:])]
    assert_close(log_marginal_likelihood(posterior, halves, likelihood=likelihood), expected, rtol=1e-10)
    doubled = log_marginal_likelihood(posterior, halves * 2, likelihood=likelihood)
    assert_close(doubled, expected, rtol=1e-10)


@pytest.mark.parametrize("form", ["map", "likelihood"])
@pytest.mark.parametrize("delta", [0.1, 50.0])
def test_the_marginal_likelihood_of_a_linear_model_is_exact_in_both_forms(form: str, delta: float):
    """Orthogonal inputs, so that a diagonal is the whole posterior; y ~ N(0, σ² + X Xᵀ/δ)."""
    generator = torch.Generator().manual_seed(0)
    n, noise = 40, 0.25
    basis, _ = torch.linalg.qr(torch.randn(n, 3, generator=generator, dtype=torch.float64))
    x = basis * torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)
    y = x @ torch.ones(3, 1, dtype=torch.float64) + noise**0.5 * torch.randn(n, 1, generator=generator).double()
    curvature = (x.T @ x).diagonal() / noise
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_((x.T @ y).T / noise / (curvature + (delta if form == "map" else 0)))
    adam = torch.optim.Adam(model.parameters(), betas=(0.0, 0.0))
    moments = {"exp_avg": torch.zeros(1, 3).double(), "exp_avg_sq": curvature[None] / n}
    adam.state[model.weight] = {"step": torch.tensor(1.0), **moments}
    posterior = ba.Posterior.from_optimizer(
        model, adam, n, prior_precision=delta, form=form, power=1.0, batch_size=1
    ).replace(noise_variance=noise)
    prior = noise * torch.eye(n, dtype=torch.float64) + x @ x.T / delta
    expected = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=torch.float64), prior).log_prob(y[:, 0])
    assert_close(log_marginal_likelihood(posterior, (x, y), likelihood="regression"), expected, rtol=1e-9)


def test_the_marginal_likelihood_is_of_one_network():
    members = [posterior_over(mlp(2, 3, 1)).replace(noise_variance=1.0) for _ in range(2)]
    with pytest.raises(SettingError, match="a Mixture has 2"):
        log_marginal_likelihood(ba.Mixture(members), (torch.zeros(5, 2), torch.zeros(5, 1)), likelihood="regression")


def test_the_marginal_likelihood_needs_noise_a_prior_and_data():
    torch.manual_seed(0)
    posterior, x = posterior_over(mlp(2, 3, 1)), torch.randn(5, 2)
    with pytest.raises(SettingError, match="no noise_variance yet: calibrate"):
        log_marginal_likelihood(posterior, (x, x[:, :1]), likelihood="regression")
    with pytest.raises(SettingError, match=r"proper prior, but δ is 0 for '0\.weight'"):
        log_marginal_likelihood(
            posterior.replace(prior_precision=0.0, noise_variance=1.0), (x, x[:, :1]), likelihood="regression"
        )
    with pytest.raises(BayesAdamError, match="no held-out data"):
        log_marginal_likelihood(posterior.replace(noise_variance=1.0), iter(()), likelihood="regression")


# --- the predictive it will be used with ----------------------------------------------------------------------------


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ba.Posterior, dict[str, Any]]]:
    """Every candidate that calibration predicted with, and how."""
    seen: list[tuple[ba.Posterior, dict[str, Any]]] = []
    original = fits.component_of

    def recorded(posterior: ba.Posterior, inputs: Any, options: Options) -> Any:
        seen.append((posterior, {**vars(options), "seed": options.generator.initial_seed()}))
        return original(posterior, inputs, options)

    monkeypatch.setattr(fits, "component_of", recorded)
    return seen


@every_likelihood
@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
@pytest.mark.slow
def test_a_sampling_predictive_is_calibrated_with_its_own_draws(
    request, coarse, likelihood: str, predictive: str, predictions
):
    posterior, batch = problem(request, likelihood)
    options = {"likelihood": likelihood, "predictive": predictive, "n_samples": 6}
    found = calibrate(posterior, batch, generator=seeded(4), **options)
    assert predictions, "the predictive asked for was never used"
    (seed,) = {used["seed"] for _, used in predictions}
    assert {(used["predictive"], used["n_samples"], used["likelihood"]) for _, used in predictions} == {
        (predictive, 6, likelihood)
    }

    def scored(candidate: ba.Posterior) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CollapsedPredictionWarning)
            return log_likelihood(
                candidate, batch, likelihood=likelihood, predictive=predictive, n_samples=6, generator=seeded(seed)
            )

    method = "evidence" if likelihood == "regression" else "validation"
    start = calibrate(posterior, batch, likelihood=likelihood, method=method)
    assert scored(found) >= scored(start) - 1e-6
    again = calibrate(posterior, batch, generator=seeded(4), **options)
    assert all(torch.equal(again.variance[name], v) for name, v in found.variance.items())


def test_a_network_too_wide_to_be_sampled_is_mended_as_the_warning_advises():
    """What suits the linearised network may be far too wide for the real one."""
    torch.manual_seed(0)
    model, x = mlp(4, 32, 32, 1, activation=nn.ReLU), torch.randn(60, 4)
    with torch.no_grad():
        model[4].weight *= 20
        y = model(x) + 0.1 * torch.randn(60, 1)
    wide = posterior_over(model, n_data=1.0, prior_precision=1.0)
    with pytest.warns(CollapsedPredictionWarning, match="predictive='sampled'"):
        predict(wide, x, predictive="sampled", generator=seeded())
    mended = calibrate(wide, (x, y), likelihood="regression", predictive="sampled", generator=seeded(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(mended, x, predictive="sampled", generator=seeded())


@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
def test_sampling_does_not_spoil_a_network_that_needs_no_posterior(predictive: str):
    """Labels drawn from the network itself, so that any width and any temperature but 1 only cost."""
    torch.manual_seed(0)
    model, x = mlp(2, 8, 3), torch.randn(1_000, 2)
    with torch.no_grad():
        model[2].weight *= 5
        logits = model(x)
    y = torch.multinomial(logits.softmax(dim=1), 1, generator=seeded()).squeeze(1)
    options = {"likelihood": "classification", "predictive": predictive, "n_samples": 10}
    found = calibrate(posterior_over(model), (x, y), generator=seeded(1), **options)
    assert log_likelihood(found, (x, y), generator=seeded(2), **options) >= -float(F.cross_entropy(logits, y)) - 2e-3


def rows_run(posterior: ba.Posterior, batches: Any, **options: Any) -> int:
    """How many rows went through the model while it was calibrated."""
    rows: list[int] = []
    handle = posterior.model.register_forward_hook(lambda module, given, output: rows.append(len(output)))
    try:
        calibrate(posterior, batches, likelihood="classification", generator=seeded(), **options)
    finally:
        handle.remove()
    return sum(rows)


def test_a_classifier_is_calibrated_by_two_passes_of_the_mean_network(classification):
    posterior, (x, y) = classification
    for batches in ((x, y), [(x[:50], y[:50]), (x[50:], y[50:])]):
        assert rows_run(posterior, batches) == 2 * len(x)


@pytest.mark.slow
def test_what_a_sampling_calibration_costs(classification):
    posterior, draws = classification[0], 5
    cost = {
        n: rows_run(posterior, blobs(n, 3, seed=5), predictive="sampled", n_samples=draws) / draws
        for n in (3_000, 9_000)
    }
    # Thirteen widths on 2,000 examples, whatever the data, and each example once more to be scored, both with the mean
    # network beside the draws; for all examples its outputs, their moments, and its outputs once more.
    assert cost[9_000] < (1 + 1 / draws) * (13 * 2_000 + 9_000) + (3 / draws + 0.05) * 9_000
    # The search does not grow with the data.
    assert cost[9_000] - cost[3_000] < 1.5 * 6_000 + 3 * 2_000


def cost_of(temperature: float) -> float:
    """−log p(T), but for a constant."""
    log = math.log(temperature)
    return 2 * log**2 if log < 0 else log**2 / 2


def at_best_temperature(candidate: ba.Posterior, batch: tuple[Tensor, Tensor], **options: Any) -> float:
    """The greatest mean log-likelihood over temperatures, with log p(T), predicted anew, on a fine grid."""
    x, y = batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapsedPredictionWarning)
        p = predict(candidate, x, likelihood="classification", n_samples=6, generator=seeded(3), **options)
    values = [
        (p.draws.double() / t).softmax(dim=2).mean(dim=0).gather(1, y[:, None]).log().mean()
        - cost_of(float(t)) / len(y)
        for t in torch.logspace(math.log10(0.25), math.log10(5.6), 100, dtype=torch.float64)
    ]
    return float(torch.stack(values).max())


@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
def test_draws_choose_the_best_width_and_temperature_of_those_looked_at(classification, predictive: str, predictions):
    posterior, (x, y) = classification
    options = Options(likelihood="classification", predictive=predictive, n_samples=6)
    for batch in ((x, y), (x[::2], y[::2]), (x[:20], y[:20])):
        predictions.clear()
        own = fits.by_draws(posterior, held_out.HeldOut(posterior, [batch], options, seed=3))
        assert len(predictions) > 4
        values = {
            each.settings.scale: at_best_temperature(each, batch, predictive=predictive) for each, _ in predictions
        }
        found = values[own.settings.scale]
        # A parabola through temperatures of a ratio of √2 is not the peak itself.
        assert found >= max(values.values()) - 2e-3
        p = predict(own, batch[0], likelihood="classification", predictive=predictive, n_samples=6, generator=seeded(3))
        assert float(p.log_prob(batch[1]).double().mean()) - cost_of(own.temperature) / len(batch[1]) >= found - 2e-3


# --- failures -------------------------------------------------------------------------------------------------------


def test_settings_that_overflow_are_passed_over():
    """In float32 the smallest priors tried give infinite variances here."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3), 1e8 * torch.randn(50, 2)
    with torch.no_grad():
        model.weight *= 3e-8
    y = model(x).argmax(dim=1)
    moments = {"weight": torch.full((3, 2), 1e-38), "bias": torch.full((3,), 1e-38)}
    moments["weight"][0] = 0.0
    posterior = replace(posterior_over(model), structure=Diagonal(moments))
    smallest = posterior.replace(scale=1.0, n_data=1.0, prior_precision=1e-23)
    assert not torch.isfinite(predict(smallest, x, likelihood="classification").variance).all()
    found = calibrate(posterior, (x, y), likelihood="classification", method="validation")
    assert math.isfinite(log_likelihood(found, (x, y), likelihood="classification"))


@every_likelihood
@pytest.mark.parametrize("method", ["validation", "evidence"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_when_nothing_is_finite_calibration_fails_and_changes_nothing(
    request, coarse, likelihood: str, method: str, value: float
):
    posterior, (x, y) = problem(request, likelihood)
    before = {name: v.clone() for name, v in posterior.variance.items()}
    broken = x.clone()
    broken[7] = value
    with pytest.raises(CalibrationError, match="the posterior is unchanged"):
        calibrate(posterior, (broken, y), likelihood=likelihood, method=method)
    assert all(torch.equal(v, before[name]) for name, v in posterior.variance.items())
    assert posterior.noise_variance is None


def test_without_any_curvature_there_is_nothing_to_calibrate():
    torch.manual_seed(0)
    posterior = posterior_over(mlp(2, 3, 2))
    flat = replace(posterior, structure=Diagonal({n: torch.zeros_like(t) for n, t in posterior.mode.items()}))
    for method in ("validation", "evidence"):
        with pytest.raises(CalibrationError):
            calibrate(flat, blobs(20, 2, seed=0), likelihood="classification", method=method)


def test_weights_that_never_had_a_gradient_are_given_a_finite_variance(classification, coarse):
    posterior, batch = classification
    moments = {name: v.clone() for name, v in posterior.structure.second_moment.items()}
    moments["0.weight"][:8] = 0.0
    improper = replace(posterior, structure=Diagonal(moments)).replace(prior_precision=0.0)
    for method in ("validation", "evidence"):
        found = calibrate(improper, batch, likelihood="classification", method=method)
        assert torch.isfinite(found.variance["0.weight"]).all()
        found.sample()


# --- kinds of data --------------------------------------------------------------------------------------------------


class NamedLast(NamedTuple):
    x: Tensor
    y: Tensor


class NamedFirst(NamedTuple):
    label: Tensor
    x: Tensor


def loaders(x: Tensor, y: Tensor) -> Iterator[tuple[str, Any]]:
    parts = [(x[:50], y[:50]), (x[50:], y[50:])]
    yield "pair", (x, y)
    yield "pair-as-list", [x, y]
    yield "list", parts
    yield "tuple-of-tuples", tuple(parts)
    yield "generator", (part for part in parts)
    yield "loader", DataLoader(TensorDataset(x, y), batch_size=32)
    yield "one-input-in-a-tuple", [((a,), b) for a, b in parts]
    yield "one-mapping", {"input": x, "labels": y}
    yield "named-tuple", [NamedLast(a, b) for a, b in parts]
    yield "named-tuple-with-the-targets-first", [NamedFirst(b, a) for a, b in parts]
    for label in ("labels", "label", "label_ids", "targets", "target", "y"):
        yield label, [{"input": a, label: b} for a, b in parts]
    yield "mapping-that-is-no-dict", [UserDict(input=a, labels=b) for a, b in parts]
    yield "mapping-and-target", [({"input": a}, b) for a, b in parts]
    yield "mapping-that-is-no-dict-and-target", [(UserDict(input=a), b) for a, b in parts]


def test_held_out_data_of_every_kind(classification):
    posterior, (x, y) = classification
    expected = calibrate(posterior, (x, y), likelihood="classification", method="evidence")
    for name, batches in loaders(x, y):
        found = calibrate(posterior, batches, likelihood="classification", method="evidence")
        assert found.settings.scale == approx(expected.settings.scale, rel=1e-3), name
        assert found.prior_precision["0.weight"] == approx(expected.prior_precision["0.weight"], rel=1e-3), name


def test_several_inputs_and_a_forward_of_the_users_own(classification, coarse):
    posterior, (x, y) = classification
    expected = calibrate(posterior, (x, y), likelihood="classification", method="validation")
    found = calibrate(
        posterior,
        [(x[:, :1], x[:, 1:], y)],
        likelihood="classification",
        method="validation",
        forward=lambda model, batch: model(torch.cat(batch, dim=1)),
    )
    assert found.settings.scale == approx(expected.settings.scale, rel=1e-3)


def test_data_that_is_none_is_named(classification):
    posterior, (x, y) = classification
    used_up = iter([(x, y)])
    list(used_up)
    for batches in (used_up, [], DataLoader(TensorDataset(x[:0], y[:0]))):
        with pytest.raises(MatchError, match=r"no held-out data.*used up"):
            calibrate(posterior, batches, likelihood="classification")
    with pytest.raises(MatchError, match="batches must be a loader"):
        calibrate(posterior, 3, likelihood="classification")
    with pytest.raises(MatchError, match=r"a batch must be \(inputs, targets\).*got Tensor"):
        calibrate(posterior, [x], likelihood="classification")
    with pytest.raises(MatchError, match=r"a mapping with one of .*keys \['input'\]"):
        calibrate(posterior, [{"input": x}], likelihood="classification")
    for batch in ((x, y.tolist()), (x, {"labels": y})):
        with pytest.raises(MatchError, match=r"targets of a batch must be a tensor.*got (list|dict)"):
            calibrate(posterior, [batch], likelihood="classification")
    with pytest.raises(MatchError, match="empty"):
        calibrate(posterior, (x[:0], y[:0]), likelihood="classification")


def test_data_made_in_inference_mode(classification, coarse):
    posterior, (x, y) = classification
    expected = calibrate(posterior, (x, y), likelihood="classification", method="validation")
    with torch.inference_mode():
        batches = ((x.clone(), y), {"input": x.clone(), "labels": y})
    for batch in batches:
        found = calibrate(posterior, [batch], likelihood="classification", method="validation")
        assert found.settings.scale == approx(expected.settings.scale, rel=1e-6)


@pytest.mark.parametrize("method", ["validation", "evidence"])
@pytest.mark.parametrize("predictive", ["linearised", "linearised-sampled"])
def test_classes_of_minus_100_are_left_out(classification, coarse, method: str, predictive: str):
    posterior, (x, y) = classification
    options: dict[str, Any] = {"likelihood": "classification", "method": method, "predictive": predictive}
    options["n_samples"] = 5
    marked = y.clone()
    marked[::3] = -100
    kept = marked != -100
    found = calibrate(posterior, (x, marked), generator=seeded(), **options)
    expected = calibrate(posterior, (x[kept], y[kept]), generator=seeded(), **options)
    assert found.settings.scale == approx(expected.settings.scale, rel=1e-5)
    assert found.prior_precision["0.weight"] == approx(expected.prior_precision["0.weight"], rel=1e-5)
    with pytest.raises(MatchError, match="every class is -100"):
        calibrate(posterior, (x, torch.full_like(y, -100)), **options)


@pytest.mark.parametrize("method", ["validation", "evidence"])
@every_likelihood
def test_targets_of_another_shape_are_named(request, coarse, likelihood: str, method: str):
    posterior, (x, y) = problem(request, likelihood)
    if likelihood == "binary" and method == "evidence":
        pytest.skip("the curvature does not depend on the targets")
    with pytest.raises(MatchError, match="shape"):
        calibrate(posterior, (x, y[:-1]), likelihood=likelihood, method=method)
    with pytest.raises(MatchError, match="shape"):
        calibrate(posterior, (x, torch.zeros(len(x), 5)), likelihood=likelihood, method=method)


@pytest.mark.parametrize("method", ["validation", "evidence"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_single_logit_is_no_choice_of_classes(method: str, shape: tuple[int, ...]):
    model = Then(mlp(2, 3, 1), lambda z: z.reshape(-1, *shape))
    x, y = torch.randn(8, 2), torch.zeros(8, dtype=torch.long)
    with pytest.raises(MatchError, match="use likelihood='binary'"):
        calibrate(posterior_over(model), (x, y), likelihood="classification", method=method)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"likelihood": "counts"}, r"likelihood must be one of .*'counts'"),
        ({"method": "grid"}, r"method must be one of .*'grid'"),
        ({"predictive": "mcmc"}, r"predictive must be one of .*'mcmc'"),
        ({"link": "softmax"}, r"link must be one of .*'softmax'"),
        ({"n_samples": 1}, r"n_samples must be a whole number of at least 2 .draws., got 1"),
        ({"memory_budget": 0}, r"memory_budget must be a whole number of at least 1 .bytes., got 0"),
    ],
)
def test_bad_arguments_are_named(classification, options: dict[str, Any], match: str):
    posterior, batch = classification
    with pytest.raises(SettingError, match=match):
        calibrate(posterior, batch, **{"likelihood": "classification", **options})


def test_the_data_may_be_cut_to_fit_the_memory(classification, coarse):
    posterior, batch = classification
    expected = calibrate(posterior, batch, likelihood="classification", method="validation")
    rows: list[int] = []
    noted = Lambda(lambda self, x: rows.append(len(x)) or self.net(x), net=posterior.model)
    moved = replace(
        posterior,
        model=noted,
        mode={f"net.{name}": theta for name, theta in posterior.mode.items()},
        structure=Diagonal({f"net.{name}": v for name, v in posterior.structure.second_moment.items()}),
        settings=replace(posterior.settings, prior_precision={f"net.{name}": 1.0 for name in posterior.mode}),
    )
    found = calibrate(moved, batch, likelihood="classification", method="validation", memory_budget=20_000)
    # All but the two passes of the mean network.
    assert sorted(rows)[-3] < 60
    assert found.settings.scale == approx(expected.settings.scale, rel=1e-3)


def test_an_example_of_which_nothing_is_known_does_not_take_the_noise_away():
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    # The second input is 0 in all training: its weight has the prior alone.
    known = torch.tensor([1.0, 0.0]).double()
    for _ in range(400):
        x = torch.randn(32, 2).double() * known
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), 2 * x[:, :1] + 0.1 * torch.randn(32, 1).double()).backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 200, power=1, batch_size=32)
    x = torch.randn(200, 2).double() * known
    y = model(x).detach() + 0.1 * torch.randn(200, 1).double()
    calm = calibrate(posterior, (x, y), likelihood="regression").noise_variance
    # One input that does not vanish there, and whose variance is more than all residuals together.
    far = torch.cat([x, torch.tensor([[0.0, 3.0]]).double()])
    told = calibrate(posterior, (far, torch.cat([y, model(far[-1:]).detach()])), likelihood="regression")
    assert float(calm) == approx(0.01, rel=0.3)
    assert_close(told.noise_variance, calm, rtol=0.1)
