"""One template over all likelihoods: losses, Hessians, targets, predictions, mixtures, calibration and evidence."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibration import fits
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from bayesadam.likelihoods import LIKELIHOODS, Component, Likelihood, NumericPredictive, agreed, likelihood
from cases import mlp
from floats import approx, assert_close

TARGETS = 2
PREDICTIVES = ["linearised", "sampled", "linearised-sampled"]
every_likelihood = pytest.mark.parametrize("record", LIKELIHOODS.values(), ids=LIKELIHOODS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _halves(f: Tensor) -> torch.distributions.Distribution:
    mean, log_variance = f.chunk(2, dim=-1)
    return torch.distributions.Normal(mean, (log_variance / 2).exp())


# p(y | f) by torch.distributions, observation noise of variance 1/2 where there is one; outputs for two targets.
EXAMPLES = {
    "regression": (lambda f: torch.distributions.Normal(f, 0.5**0.5), TARGETS),
    "classification": (lambda f: torch.distributions.Categorical(logits=f), 3),
    "binary": (lambda f: torch.distributions.Bernoulli(logits=f), TARGETS),
    "heteroscedastic": (_halves, 2 * TARGETS),
    "poisson": (lambda f: torch.distributions.Poisson(f.exp()), TARGETS),
}


def draw(name: str, outputs: Tensor, seed: int = 0) -> Tensor:
    """Targets that a network with these outputs would have made."""
    torch.manual_seed(seed)
    return EXAMPLES[name][0](outputs).sample()


def width(record: Likelihood) -> int:
    return EXAMPLES[record.name][1]


def log_density(name: str, outputs: Tensor, y: Tensor) -> Tensor:
    """log p(y | f) of one example."""
    return EXAMPLES[name][0](outputs).log_prob(y).sum()


def expected_hessian(name: str, f: Tensor) -> Tensor:
    """−E[∂² log p(y | f)] by autograd: at y = m ± σ the average of anything quadratic in y is its expectation.

    For a likelihood that is not a Gaussian of y, give here another rule unless its Hessian does not depend on y.
    """
    distribution = EXAMPLES[name][0](f)
    targets = [draw(name, f)]
    if isinstance(distribution, torch.distributions.Normal):
        targets = [distribution.mean + sign * distribution.stddev for sign in (-1, 1)]
    hessians = [torch.autograd.functional.hessian(lambda g, t=t: -log_density(name, g, t), f) for t in targets]
    return torch.stack(hessians).mean(dim=0)


def predictive(record: Likelihood, mean: Tensor, variance: Tensor, **options: Tensor) -> ba.Predictive:
    return record.predictive(
        [Component(mean, variance, noise_variance=torch.tensor(0.5) if record.noise else None, **options)]
    )


# --- the records ----------------------------------------------------------------------------------------------------


def test_names_are_the_registrys():
    assert all(likelihood(name).name == name for name in LIKELIHOODS)
    assert set(EXAMPLES) == set(LIKELIHOODS)
    with pytest.raises(SettingError, match=r"likelihood must be one of \('regression', .*got 'gamma'"):
        likelihood("gamma")


def test_a_call_and_the_posterior_agree_on_a_likelihood():
    assert agreed("binary", None) == agreed(None, "binary") == agreed("binary", "binary") == "binary"
    with pytest.raises(SettingError, match="no likelihood yet: pass likelihood='classification'"):
        agreed(None, None)
    with pytest.raises(SettingError, match=r"is for likelihood='binary', and likelihood='poisson' was given.*replace"):
        agreed("poisson", "binary")


@every_likelihood
def test_without_uncertainty_the_predictive_is_the_likelihood(record):
    mean = random(6, width(record))
    y = draw(record.name, mean)
    found = predictive(record, mean, torch.zeros_like(mean)).log_prob(y)
    expected = torch.stack([log_density(record.name, f, t) for f, t in zip(mean, y, strict=True)])
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


@every_likelihood
def test_the_loss_has_the_gradient_of_the_negative_log_likelihood(record):
    outputs = random(3, 6, width(record)).requires_grad_()
    y = torch.stack([draw(record.name, f.detach(), seed) for seed, f in enumerate(outputs)])
    loss = record.loss(outputs, y)
    assert loss.shape == (3,)
    (found,) = torch.autograd.grad(loss.sum(), outputs)
    total = torch.stack(
        [log_density(record.name, f, t) for f, t in zip(outputs.flatten(0, 1), y.flatten(0, 1), strict=True)]
    )
    (expected,) = torch.autograd.grad(-total.sum(), outputs)
    terms = 6 if record.name == "classification" else 6 * TARGETS
    assert_close(found, expected / terms, rtol=1e-9, atol=1e-12)


@every_likelihood
def test_the_hessian_is_autograds_averaged_over_targets(record):
    for f in random(4, width(record), seed=1):
        expected = expected_hessian(record.name, f)
        root = record.hessian_root(f, torch.tensor(0.5))
        assert_close(root @ root.mT, expected, rtol=1e-8, atol=1e-12)
        assert_close(record.hessian_diagonal(f, torch.tensor(0.5)), expected.diagonal(), rtol=1e-8, atol=1e-12)
        assert record.coupled == bool((expected - expected.diagonal().diag()).abs().max() > 1e-12)


@every_likelihood
def test_targets_of_a_data_set_take_the_shape_of_the_loss(record):
    like = torch.zeros((), dtype=torch.float32)
    y = draw(record.name, random(7, width(record)))
    assert record.n_outputs(y) == (int(y.max()) + 1 if record.name == "classification" else width(record))
    shaped = record.shaped(y, like)
    assert shaped.shape == y.shape
    assert shaped.dtype == (torch.int64 if record.name == "classification" else torch.float32)
    if record.name != "classification":
        assert record.shaped(y[:, 0], like).shape == (7, 1)
        assert record.n_outputs(y[:, 0]) == width(record) // TARGETS
    assert bool(record.loss(random(1, 7, width(record)).float(), shaped[None]).isfinite().all())


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("poisson", 1.5, r"counts, .* one is 1\.5: round them"),
        ("poisson", -1.0, "one is -1"),
        ("poisson", math.nan, "one is nan"),
        ("poisson", math.inf, "one is inf"),
        ("binary", 2.0, "must be 0 or 1, got 0 to 2"),
        ("classification", 1.5, "class indices"),
        ("classification", -1.0, "whole numbers of at least 0"),
    ],
)
def test_targets_that_are_none_are_named(name, value, match):
    y = torch.tensor([0.0, value])
    with pytest.raises(MatchError, match=match):
        likelihood(name).shaped(y, torch.zeros(()))
    if name != "classification":
        f = torch.zeros(2, likelihood(name).outputs_per_target)
        with pytest.raises(MatchError, match=match):
            likelihood(name).predictive([Component(f, torch.ones_like(f))]).log_prob(y)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("heteroscedastic", (5, 3)), ("heteroscedastic", (5,)), ("classification", (5, 1))],
)
def test_outputs_that_are_none_of_the_likelihoods_are_named(name, shape):
    with pytest.raises(MatchError, match=r"outputs have shape .*use likelihood='"):
        likelihood(name).predictive([Component(torch.zeros(shape), torch.ones(shape))])


# --- mixtures -------------------------------------------------------------------------------------------------------


@every_likelihood
@pytest.mark.parametrize("drawn", [False, True], ids=["moments", "draws"])
def test_a_mixture_is_the_sum_of_its_members(record, drawn):
    weights = (0.6, 0.1, 0.3)
    members = []
    for seed in range(3):
        mean, variance = random(5, width(record), seed=seed), random(5, width(record), seed=9 + seed).square()
        draws = mean + variance.sqrt() * random(20, *mean.shape, seed=20 + seed) if drawn else None
        members.append(predictive(record, mean, variance, draws=draws))
    found = record.predictive([member.components[0] for member in members], weights)
    y = draw(record.name, members[0].mean)
    scores = torch.stack([m.log_prob(y) for m in members])
    expected = torch.logsumexp(scores + torch.tensor(weights, dtype=torch.float64).log()[:, None], dim=0)
    assert_close(found.log_prob(y), expected, rtol=1e-10, atol=1e-12)
    # Heavy tails make some of these moments wide: a log-normal rate most of all.
    n = 20_000
    draws = found.sample(n, generator=torch.Generator().manual_seed(0)).double()
    assert draws.shape[1:] == y.shape
    if not isinstance(found, NumericPredictive):
        return
    sigmas = (draws.mean(dim=0) - found.predicted_mean) / found.total_variance.sqrt() * math.sqrt(n)
    assert drawn or float(sigmas.abs().max()) < 5
    for level in (0.5, 0.9):
        low, high = found.interval(level)
        inside = [(draws < low).double(), (draws > high).double()]
        if not drawn:
            assert all(float((part.mean(dim=0) - (1 - level) / 2).max()) < 0.02 for part in inside)


# --- through the library --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=LIKELIHOODS)
def fitted(request) -> tuple[str, ba.Posterior, Tensor, Tensor]:
    """A small network trained by Adam on data of its likelihood, with held-out data."""
    record = likelihood(request.param)
    x = torch.linspace(-2, 2, 240, dtype=torch.float64)[:, None]
    columns = [x.sin(), x.cos(), x / 2 - 0.5, x.square() / 4 - 1]
    y = draw(record.name, torch.cat(columns[: width(record)], dim=1))
    torch.manual_seed(0)
    model = mlp(1, 16, width(record)).double()
    optimizer = ba.Badam(model.parameters(), lr=1e-2)
    train, rest = torch.randperm(240)[:160], torch.randperm(240)[160:]
    for _ in range(400):
        optimizer.zero_grad()
        record.loss(model(x[train])[None], record.shaped(y[train], x)[None]).sum().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 160, prior_precision=1.0)
    return record.name, posterior.replace(noise_variance=0.5 if record.noise else None), x[rest], y[rest]


@pytest.mark.parametrize("kind", PREDICTIVES)
def test_predict_gives_the_likelihoods_predictive(fitted, kind):
    name, posterior, x, y = fitted
    x, y = x[::3], y[::3]
    options = {"likelihood": name, "predictive": kind, "n_samples": 50, "covariance": True}
    # Narrow enough for the linearised and the real network to agree.
    posterior = posterior.replace(scale=1000.0, prior_precision=1000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BayesAdamWarning)
        found = posterior.predict(x, generator=torch.Generator().manual_seed(0), **options)
    exact = posterior.predict(x, likelihood=name)
    assert type(found) is type(exact)
    assert found.log_prob(y).shape == (len(x),)
    assert len(found.entropy()) == len(x)
    assert found.sample(3).shape == (3, *y.shape)
    assert abs(ba.scores.nll(found, y) - ba.scores.nll(exact, y)) < 0.1
    mixture = ba.Mixture([posterior, posterior.replace(scale=10.0)]).predict(x, likelihood=name, predictive=kind)
    assert isinstance(mixture, type(exact))
    assert bool(mixture.log_prob(y).isfinite().all())
    if isinstance(found, NumericPredictive):
        assert ba.scores.coverage(found, y, level=0.9) > 0.7
        assert ba.scores.rmse(found.predicted_mean, y) < 2


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings tried: the best ones are not asked for."""
    monkeypatch.setattr(fits, "_RATIOS", 3)
    monkeypatch.setattr(fits, "_NOISE_SHARES", (0.1, 0.5, 1.0))


@pytest.mark.parametrize("method", ["validation", "evidence", None])
def test_calibrate_improves_a_posterior_that_is_far_too_wide(fitted, coarse, method):
    name, posterior, x, y = fitted
    x, y = x[::2], y[::2]
    wide = posterior.replace(scale=1e-4, prior_precision=1e-3)
    tuned = ba.calibrate(wide, (x, y), likelihood=name, method=method)
    before, after = (ba.scores.nll(p.predict(x, likelihood=name), y) for p in (wide, tuned))
    assert math.isfinite(after)
    assert after < before
    if method is None:
        default = ba.calibrate(wide, (x, y), likelihood=name, method=likelihood(name).calibration)
        assert (tuned.settings.scale, tuned.temperature) == (default.settings.scale, default.temperature)
    both = ba.calibrate(ba.Mixture([wide, wide]), (x, y), likelihood=name, method=method)
    assert all(member.settings.scale == tuned.settings.scale for member in both)
    assert all(member.temperature == tuned.temperature for member in both)


def test_calibrate_for_draws(fitted, coarse):
    name, posterior, x, y = fitted
    wide = posterior.replace(scale=1e-2, prior_precision=1e-2)
    options = {"likelihood": name, "predictive": "sampled", "n_samples": 10}

    def nll(p: ba.Posterior) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BayesAdamWarning)
            return ba.scores.nll(p.predict(x, generator=torch.Generator().manual_seed(0), **options), y)

    tuned = ba.calibrate(wide, (x, y), generator=torch.Generator().manual_seed(0), **options)
    assert nll(tuned) < nll(wide)


@every_likelihood
def test_the_evidence_of_a_linear_network_is_laplaces(record):
    """Inputs that are one-hot give a diagonal GGN, so the diagonal posterior holds all of it."""
    groups, n, delta = 4, 40, 0.7
    x = nn.functional.one_hot(torch.arange(n) % groups, groups).double()
    model = nn.Linear(groups, width(record), bias=False).double()
    with torch.no_grad():
        model.weight.copy_(0.5 * random(width(record), groups, seed=3))
    y = draw(record.name, model(x).detach())
    theta = model.weight.detach()

    def ggn(example: Tensor) -> Tensor:
        jacobian = torch.autograd.functional.jacobian(lambda w: w @ example, theta).flatten(1)
        return jacobian.T @ expected_hessian(record.name, theta @ example) @ jacobian

    dense = sum(ggn(example) for example in x)
    if record.coupled:
        # Softmax couples the classes: only the trace is compared, below.
        dense = dense.diagonal().diag()
    posterior = ba.Posterior.from_moments(
        model, {"weight": theta}, {"weight": 1 / dense.diagonal().view_as(theta)}, n
    ).replace(prior_precision=delta, noise_variance=0.5 if record.noise else None)
    fit = sum(log_density(record.name, f, t) for f, t in zip(model(x).detach(), y, strict=True))
    precision = dense + delta * torch.eye(len(dense)).double()
    expected = fit - 0.5 * delta * theta.square().sum()
    expected = expected + 0.5 * len(dense) * math.log(delta) - 0.5 * torch.linalg.slogdet(precision).logabsdet
    found = ba.log_marginal_likelihood(posterior, (x, y), likelihood=record.name)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if record.noise:
        return
    # Evidence puts the total curvature where the GGN's is, whatever it was before.
    tuned = ba.calibrate(posterior.replace(scale=7.0), (x, y), likelihood=record.name, method="evidence")
    total = sum(float((1 / v - tuned.prior_precision[k]).sum()) for k, v in tuned.variance.items())
    assert total == approx(float(dense.trace()), rel=1e-5)


def test_the_old_name_of_predictive_works_and_points_at_the_users_line(fitted):
    name, posterior, x, _ = fitted
    options = {"likelihood": name, "n_samples": 3}
    for asked in (posterior, ba.Mixture([posterior])):
        with pytest.warns(DeprecationWarning, match="predictive='linearised-sampled'") as caught:
            old = asked.predict(x, method="linearised-sampled", generator=torch.Generator().manual_seed(0), **options)
        assert [w.filename for w in caught if "predictive" in str(w.message)] == [__file__]
        new = asked.predict(x, predictive="linearised-sampled", generator=torch.Generator().manual_seed(0), **options)
        assert torch.equal(old.draws, new.draws)
