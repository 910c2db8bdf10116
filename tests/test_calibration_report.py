"""What calibration reports, computed a second time; guarantees that come with it; temperature scaling as the floor."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibration.fits import out_of_fold
from bayesadam.calibration.held_out import HeldOut
from bayesadam.errors import CalibrationError, HeldOutWarning, MatchError, SettingError
from bayesadam.leverage import Ratios
from bayesadam.likelihoods.conformal import uniform_like
from bayesadam.predict.prediction import Options
from cases import mlp
from floats import approx, assert_close, close

Batch = tuple[Tensor, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int, seed: int, *, classes: int = 3, spread: float = 0.7) -> Batch:
    """Overlapping clouds in the plane, one a class."""
    generator = seeded(seed)
    y = torch.randint(classes, (count,), generator=generator)
    angle = 2 * math.pi * y / classes
    return torch.stack([angle.cos(), angle.sin()], dim=1) + spread * torch.randn(count, 2, generator=generator), y


@cache
def network(seed: int = 0, steps: int = 300, lr: float = 2e-2, classes: int = 3) -> ba.Posterior:
    """Over-trained by default; with few steps, or small ones, under-trained."""
    torch.manual_seed(seed)
    model = mlp(2, 16, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x, y = blobs(60, seed, classes=classes)
    for step in range(steps):
        rows = torch.randint(len(x), (16,), generator=seeded(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, len(x), prior_precision=1.0)


@cache
def curve(seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(1, 12, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    x, y = waves(80, seed)
    for step in range(150):
        rows = torch.randint(len(x), (16,), generator=seeded(step))
        optimizer.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, len(x), prior_precision=1.0)


def waves(count: int, seed: int) -> Batch:
    generator = seeded(seed)
    x = 4 * torch.rand(count, 1, generator=generator) - 2
    return x, torch.cat([x.sin(), x.cos()], dim=1) + 0.2 * torch.randn(count, 2, generator=generator)


def calibrated(posterior: Any, batch: Any, likelihood: str = "classification", **options: Any) -> Any:
    return ba.calibrate(posterior, batch, likelihood=likelihood, **options)


def logits(model: nn.Module, x: Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(x).double().numpy()


def nll_at(temperature: float, f: np.ndarray, y: Tensor) -> float:
    """Of softmax(f/T), in numpy."""
    z = f / temperature
    z = z - z.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y.numpy()]))


def best_temperature(f: np.ndarray, y: Tensor) -> float:
    """Of the greatest likelihood and prior, in which log T is half as wide below 0 as above."""

    def cost(log_t: float) -> float:
        return nll_at(math.exp(log_t), f, y) + (log_t**2 / 2 if log_t > 0 else 2 * log_t**2) / len(y)

    found = minimize_scalar(cost, bounds=(math.log(0.1), 3), method="bounded", options={"xatol": 1e-7})
    return math.exp(found.x)


def ratios(posterior: ba.Posterior, batch: Batch, likelihood: str = "classification") -> Ratios:
    """Of held-out examples, each left out of its own leverage."""
    return HeldOut(posterior, [batch], Options(likelihood=likelihood), 0).observed.ratios


def steepness(own: Ratios) -> Tensor:
    """By which novelty divides logits."""
    return (1 + 10 * math.pi / 4 * own.steep**1.5).sqrt()


def shifted(posterior: ba.Posterior, batch: Batch) -> np.ndarray:
    """The logits, over what leverage multiplies temperatures by, at the largest exponent that costs at most 0.5 %."""
    f, own = logits(posterior.model, batch[0]), ratios(posterior, batch)
    for exponent in (0.5, 0.375, 0.25, 0.125, 0.0):
        found = f / replace(own, exponent=exponent).growth.double().numpy()[:, None]
        if nll_at(best_temperature(found, batch[1]), found, batch[1]) <= 1.005 * nll_at(
            best_temperature(f, batch[1]), f, batch[1]
        ):
            break
    return found


def log_probs(fit: Any, x: Tensor, y: Tensor) -> Tensor:
    return fit.predict(x, likelihood="classification").log_prob(y).double()


# --- the data ---------------------------------------------------------------------------------------------------------


def test_random_numbers_of_the_user_s_are_left_alone():
    posterior = network()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    calibrated(posterior, blobs(24, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_one_example_serve():
    x, y = blobs(24, 1)
    one_by_one = calibrated(network(), [(x[i : i + 1], y[i : i + 1]) for i in range(24)])
    report = one_by_one.calibration
    assert (report.n_fitted, report.n_scored) == (24, 24)
    assert report.guarantee["novelty"].shape == (24,)
    assert report.guarantee["classes.aps"].shape == (24,)
    # Each batch has random numbers of its own.
    probs = one_by_one.predict(x, likelihood="classification").probs
    assert len(report.guarantee["classes.aps"].unique()) == 24
    assert bool(torch.isfinite(probs).all())


def test_the_same_data_give_the_same():
    first, second = (calibrated(network(), blobs(80, 1)) for _ in range(2))
    assert first.settings.scale == second.settings.scale
    assert first.temperature == second.temperature
    same_report(first.calibration, second.calibration)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [300, 10])
def test_the_report_s_numbers(steps):
    batch, posterior = blobs(120, 1), network(steps=steps)
    found = calibrated(posterior, batch)
    report, y = found.calibration, batch[1]
    assert (report.likelihood, report.method) == ("classification", "temperature")
    assert (report.n_fitted, report.n_scored) == (120, 120)
    f, own = logits(posterior.model, batch[0]), shifted(posterior, batch)
    assert report.nll == {
        "calibrated": approx(nll_at(best_temperature(own, y), own, y), rel=1e-4),
        "best temperature alone": approx(nll_at(best_temperature(f, y), f, y), rel=1e-4),
        "network alone": approx(nll_at(1.0, f, y), rel=1e-5),
    }
    assert found.temperature == approx(best_temperature(own, y), rel=1e-2)
    assert (report.temperatures, report.averaged) == ((found.temperature,), found.averaged)
    assert not report.averaged
    # s and δ are as they were.
    assert found.settings.scale == posterior.settings.scale
    assert {n: float(d) for n, d in found.prior_precision.items()} == dict.fromkeys(posterior.mode, 1.0)


def test_the_report_s_numbers_of_an_average_over_the_posterior():
    batch, posterior = blobs(120, 1), network()
    found = calibrated(posterior, batch, method="validation")
    report, f = found.calibration, logits(posterior.model, batch[0])
    assert report.nll == {
        "calibrated": approx(-float(log_probs(found, *batch).mean()), rel=1e-5),
        "best temperature alone": approx(nll_at(best_temperature(f, batch[1]), f, batch[1]), rel=1e-4),
        "network alone": approx(nll_at(1.0, f, batch[1]), rel=1e-5),
    }
    assert (report.method, report.averaged, found.averaged) == ("validation", True, True)


@pytest.mark.parametrize("method", ["evidence", "validation"])
def test_the_report_s_numbers_of_a_regression(method):
    (x, y), posterior = waves(100, 1), curve()
    found = calibrated(posterior, (x, y), "regression", method=method)
    report, own = found.calibration, ratios(posterior, (x, y), "regression")
    assert (report.n_fitted, report.n_scored, report.method) == (100, 100, method)
    p = found.predict(x, likelihood="regression", shift=False)
    variance = p.variance * own.growth.square()[:, None] + found.noise_variance
    by_hand = torch.distributions.Normal(p.mean, variance.sqrt())
    assert report.nll == {"calibrated": approx(-float(by_hand.log_prob(y).sum(dim=1).mean()), abs=1e-5)}
    assert_close(report.guarantee["residuals"], ((y - by_hand.mean) / by_hand.stddev).abs())
    assert "classes.lac" not in report.guarantee
    assert_close(report.guarantee["novelty"], own.steep.sort().values)


@pytest.mark.parametrize(("seed", "steps"), [(5, 300), (0, 10)])
def test_the_guarantee_s_scores(seed, steps):
    batch, posterior = blobs(200, 35), network(seed, steps)
    found = calibrated(posterior, batch)
    guarantee, own = found.calibration.guarantee, ratios(posterior, batch)
    assert torch.equal(guarantee["labels"], batch[1])
    probs = torch.from_numpy(shifted(posterior, batch) / found.temperature).softmax(dim=1)
    assert_close(guarantee["classes.lac"].double(), 1 - probs.gather(1, batch[1][:, None])[:, 0], rtol=1e-3, atol=1e-4)
    p = (torch.from_numpy(logits(posterior.model, batch[0])) / steepness(own)[:, None]).softmax(dim=1)
    novelty = torch.special.entr(p).sum(dim=1)
    assert_close(guarantee["novelty"], novelty.sort().values, rtol=1e-5)
    fresh = blobs(30, 2)[0]
    scores = found.novelty(fresh)
    by_hand = (1 + (guarantee["novelty"][None] >= scores[:, None]).sum(dim=1)) / 201
    assert_close(found.predict(fresh).novelty_pvalue, by_hand.double(), rtol=1e-6, atol=1e-9)


def test_randomised_sets_have_random_numbers_of_their_own():
    """Those of a prediction must be independent of those behind the held-out scores."""
    batch = blobs(80, 1)
    found = calibrated(network(), batch)
    p = torch.from_numpy(shifted(network(), batch) / found.temperature).softmax(dim=1)
    own = p.gather(1, found.calibration.guarantee["labels"][:, None]).squeeze(1)
    likelier = torch.where(p > own[:, None], p, 0).sum(dim=1)
    held_out = (found.calibration.guarantee["classes.aps"].double() - likelier) / own
    # What prediction_set() takes by default.
    default = uniform_like(found.predict(batch[0]).probs, 1)
    assert float((held_out - default).abs()[own > 0.05].mean()) > 0.1
    assert bool(((held_out > -0.02) & (held_out < 1.02))[own > 0.05].all())


@pytest.mark.parametrize("seed", range(1))
def test_false_alarms_and_coverage_are_about_nominal(seed):
    found = calibrated(network(), blobs(400, 10 + seed))
    x, y = blobs(2000, 20 + seed)
    p = found.predict(x, likelihood="classification")
    # The spread of a threshold from n held-out examples, besides the binomial of the fresh ones.
    for alpha in (0.05, 0.2):
        spread = math.sqrt(alpha * (1 - alpha) * (1 / 400 + 1 / 2000))
        assert abs(float((p.novelty_pvalue <= alpha).double().mean()) - alpha) < 4 * spread
    for method in ("lac", "aps", "raps"):
        covered = p.prediction_set(0.8, method=method).gather(1, y[:, None]).double().mean()
        assert abs(float(covered) - 0.8) < 4 * math.sqrt(0.16 * (1 / 400 + 1 / 2000))


def test_the_report_in_words():
    text = str(calibrated(network(), blobs(90, 1)).calibration)
    for told in (
        "classification",
        "fitted by temperature",
        "90 held-out",
        "without its own leverage",
        "network alone",
        "best temperature alone",
    ):
        assert told in text
    text = str(calibrated(network(), blobs(90, 1), method="validation").calibration)
    assert "fitted by validation" in text
    assert "average over the posterior" in text
    assert "regression: fitted by evidence" in str(calibrated(curve(), waves(60, 1), "regression").calibration)
    assert network().calibration is None


# --- no guarantees ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::bayesadam.errors.HeldOutWarning")
def test_of_few_examples_there_are_no_guarantees():
    count, batch, said = 19, blobs(19, 1), "at least 20 examples"
    found = calibrated(network(), batch)
    assert (found.calibration.n_fitted, found.calibration.n_scored) == (count, 0)
    assert found.calibration.guarantee == {}
    assert "the same" in str(found.calibration)
    f, nll = logits(found.model, batch[0]), found.calibration.nll
    assert nll["network alone"] == approx(nll_at(1.0, f, batch[1]), rel=1e-5)
    t = best_temperature(f, batch[1])
    assert nll["best temperature alone"] == approx(nll_at(t, f, batch[1]), rel=1e-4)
    p = found.predict(batch[0], likelihood="classification")
    with pytest.raises(CalibrationError, match=said):
        _ = p.novelty_pvalue
    with pytest.raises(CalibrationError, match=said):
        p.prediction_set()
    assert p.novelty.shape == batch[1].shape
    found = calibrated(curve(), waves(count, 1), "regression")
    with pytest.raises(CalibrationError, match=said):
        found.predict(waves(5, 2)[0], likelihood="regression").prediction_set()


# --- never below temperature scaling ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::bayesadam.errors.CollapsedPredictionWarning")
def test_probabilities_are_the_mean_network_s_at_temperatures_that_grow_with_leverage():
    batch, posterior = blobs(200, 1), network(steps=10, lr=1e-3)
    found = calibrated(posterior, batch)
    report = found.calibration
    assert not report.averaged
    assert "T(x)" in report.preferred
    assert report.preferred in str(report)
    x = blobs(30, 3)[0]
    p = found.predict(x, likelihood="classification")
    growth = p.components[0].growth
    with torch.no_grad():
        assert_close(p.probs, (posterior.model(x) / (found.temperature * growth[:, None])).softmax(dim=1))
        plain = found.predict(x, shift=False).probs
        assert torch.equal(plain, (posterior.model(x) / found.temperature).softmax(dim=1))
    assert torch.equal(p.novelty, found.novelty(x, likelihood="classification"))
    with pytest.raises(SettingError, match="covariance=True"):
        _ = p.variance
    # Variances, draws and what samples are the posterior's all the same.
    assert bool((found.predict(x, covariance=True).variance > 0).all())
    sampled = found.predict(x, likelihood="classification", predictive="sampled", generator=seeded())
    assert not close(sampled.probs, p.probs, rtol=1e-3)
    used = found.replace(averaged=True).predict(x, likelihood="classification")
    assert not close(used.probs, p.probs, rtol=1e-4)


def test_calibration_keeps_the_likelihood():
    batch = blobs(40, 1)
    found = calibrated(network(), batch)
    assert found.likelihood == "classification"
    assert calibrated(found, batch, likelihood=None).likelihood == "classification"
    assert calibrated(ba.Mixture([network()]), batch).likelihood == "classification"
    with pytest.raises(SettingError, match="is for likelihood='classification', and likelihood='binary' was given"):
        calibrated(found, batch, likelihood="binary")
    with pytest.raises(SettingError, match="no likelihood yet: pass likelihood='classification'"):
        ba.calibrate(network(), batch)
    with pytest.raises(SettingError, match="no likelihood yet"):
        ba.log_marginal_likelihood(network(), batch)
    own = ba.log_marginal_likelihood(found, batch)
    assert_close(own, ba.log_marginal_likelihood(found, batch, likelihood="classification"))


def test_a_few_examples_that_are_all_right_do_not_make_it_certain():
    posterior = network(steps=60)
    x, _ = blobs(30, 5)
    y = torch.from_numpy(logits(posterior.model, x).argmax(axis=1))
    found = calibrated(posterior, (x, y))
    # Without a prior the best temperature is the coldest there may be, where the next wrong guess costs most.
    assert nll_at(0.25, logits(posterior.model, x), y) < nll_at(0.5, logits(posterior.model, x), y)
    assert 0.35 < found.temperature <= 1
    assert found.temperature == approx(best_temperature(shifted(posterior, (x, y)), y), rel=1e-3)
    fresh, labels = blobs(2000, 6)
    alone = nll_at(1.0, logits(posterior.model, fresh), labels)
    coldest = nll_at(0.25, logits(posterior.model, fresh), labels)
    assert -float(log_probs(found, fresh, labels).mean()) - alone < 0.25 * (coldest - alone)


@pytest.mark.slow
@pytest.mark.parametrize("count", [25, 60])
def test_few_held_out_examples_do_no_harm_on_real_data(count):
    x, y = (torch.as_tensor(each) for each in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(dim=0)) / x.std(dim=0)).float()
    alone, mine = [], []
    for seed in range(1000, 1004):
        train, held_out, test = torch.randperm(len(y), generator=seeded(seed)).split([227, count, 342 - count])
        torch.manual_seed(seed)
        model = mlp(30, 64, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(60):
            for rows in train[torch.randperm(len(train))].split(50):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        found = ba.Posterior.from_optimizer(model, optimizer, len(train), prior_precision=1.0)
        found = ba.calibrate(found, (x[held_out], y[held_out]), likelihood="classification")
        alone.append(nll_at(1.0, logits(model, x[test]), y[test]))
        mine.append(-float(log_probs(found, x[test], y[test]).mean()))
    assert np.mean(mine) < 1.1 * np.mean(alone)


def test_labels_of_other_inputs_are_warned_of():
    x, y = blobs(200, 5)
    with pytest.warns(HeldOutWarning, match="worse on the held-out data than a guess .* scaled as in training"):
        calibrated(network(), (x, y[torch.randperm(len(y), generator=seeded())]))


@pytest.mark.parametrize("method", ["evidence", "validation"])
def test_targets_of_another_scale_are_told(method):
    x, y = waves(100, 1)
    with pytest.warns(HeldOutWarning, match="^scale the targets as in training: .*mean squared error"):
        calibrated(curve(), (x, 50 + 20 * y), "regression", method=method)


def test_held_out_examples_that_are_there_twice_are_told():
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(60, 8)
    y = x[:, :3].argmax(dim=1)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 60, likelihood="classification")
    with pytest.warns(HeldOutWarning, match="^give every held-out example once: 30 of 60 are there before"):
        ba.calibrate(posterior, [(x[:30], y[:30]), (x[:30], y[:30])])


def test_inputs_that_make_the_network_absurdly_sure_are_told():
    x, y = blobs(200, 1)
    with pytest.warns(HeldOutWarning, match="worse on the held-out data than a guess .* scaled as in training"):
        calibrated(network(), (1000 * x.roll(1, dims=1), y))


def test_inputs_that_are_not_scaled_are_warned_of():
    x, y = blobs(200, 5)
    with pytest.warns(HeldOutWarning, match="scaled as in training"):
        # As a network of ReLUs has them.
        calibrated(network(), (x, y), forward=lambda model, x: 12 * model(x))


@pytest.mark.parametrize(("steps", "lr"), [(300, 2e-2), (10, 1e-3)])
def test_held_out_data_of_the_same_kind_are_not(steps, lr):
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeldOutWarning)
        calibrated(network(steps=steps, lr=lr), blobs(200, 5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y + 1, "must be 0 to 2, got 1 to 3"),
        (lambda y: y - 1, "must be 0 to 2, got -1 to 1"),
        (lambda y: F.one_hot(y, 3), r"shape \(30,\), got \(30, 3\)"),
        (lambda y: y[:, None], r"shape \(30,\), got \(30, 1\)"),
    ],
)
def test_labels_in_another_form_are_refused(change, said):
    x, y = blobs(30, 5)
    with pytest.raises(MatchError, match=said):
        calibrated(network(), (x, change(y)))


def problem(seed: int, count: int) -> tuple[ba.Posterior, Batch, Batch]:
    """Over- and under-trained, few and many classes."""
    classes = 2 + seed % 4
    steps, lr = [(300, 2e-2), (600, 5e-2), (10, 1e-3), (30, 5e-3)][seed // 5]
    fresh = blobs(2000, 300 + seed, classes=classes)
    return network(seed, steps, lr, classes), blobs(count, 100 + seed, classes=classes), fresh


def test_out_of_fold_with_one_example_a_fold_is_leaving_each_out():
    source = seeded(3)
    scores, priors = torch.randn(7, 5, generator=source).double(), torch.randn(7, generator=source).double()
    found = out_of_fold(scores, priors, torch.rand(5, generator=source))
    for example in range(5):
        others = [float(priors[t] + scores[t].sum() - scores[t, example]) for t in range(7)]
        assert float(found[example]) == approx(float(scores[int(np.argmax(others)), example]))


def test_every_fold_has_its_share_of_the_costly_examples():
    # Ten of fifty are right at a high temperature only: a fold without them would choose the lower one for them.
    costly = torch.arange(50) % 5 == 0
    scores = torch.stack([torch.where(costly, -3.0, -0.1), torch.where(costly, -1.0, -0.5)]).double()
    found = out_of_fold(scores, torch.zeros(2).double(), costly.double())
    assert torch.equal(found, scores[int(scores.sum(dim=1).argmax())])


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, True), (2.5, False)])
def test_the_network_alone_is_used_where_it_predicts_best(temperature, kept):
    """Classes drawn from softmax(f/T): 13 errors in 800 or so; whatever the order of the examples, one outcome."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3))
    with torch.no_grad():
        model[0].weight.copy_(6 * torch.tensor([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]]))
        model[0].bias.zero_()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = blobs(60, 5, spread=0.3)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    posterior, (x, _) = (
        ba.Posterior.from_optimizer(model, optimizer, 60, prior_precision=1.0),
        blobs(800, 6, spread=0.3),
    )
    probs = torch.from_numpy(logits(model, x) / temperature).softmax(dim=1)
    y = torch.multinomial(probs, 1, generator=seeded(8)).squeeze(1)
    outcomes = set()
    for seed in range(10):
        order = torch.randperm(800, generator=seeded(seed))
        found = calibrated(posterior, (x[order], y[order]))
        outcomes.add(found.temperature == 1)
        assert ("T₀ stays 1" in found.calibration.preferred) == kept
        assert found.calibration.errors["network alone"] > 0
    assert outcomes == {kept}


@pytest.mark.slow
@pytest.mark.parametrize("count", [50, 150])
@pytest.mark.parametrize("method", ["temperature", "validation"])
def test_it_is_never_worse_than_the_best_temperature(count, method):
    mine, floor = [], []
    for seed in range(0, 20, 2):
        posterior, batch, (x, y) = problem(seed, count)
        found = calibrated(posterior, batch, method=method)
        report = found.calibration
        assert report.averaged == found.averaged
        assert report.averaged == (method == "validation")
        assert all(math.isfinite(value) and value > 0 for value in report.nll.values())
        scores = log_probs(found, x, y)
        assert bool(torch.isfinite(scores).all())
        t = best_temperature(logits(posterior.model, batch[0]), batch[1])
        mine.append(-float(scores.mean()))
        floor.append(nll_at(t, logits(posterior.model, x), y))
    # On fresh data, against temperature scaling fitted to all that is held out.
    assert np.mean(mine) <= 1.01 * np.mean(floor)


@pytest.mark.parametrize("seed", range(2))
def test_fifty_examples_are_enough_for_a_regression(seed):
    found = calibrated(curve(), waves(50, 50 + seed), "regression")
    x, y = waves(400, 7)
    p = found.predict(x, likelihood="regression")
    assert bool(torch.isfinite(p.log_prob(y)).all())
    low, high = p.prediction_set(0.8)
    covered = ((low <= y) & (y <= high)).double().mean(dim=0)
    # 50 scores: a beta variable about .8 with a standard deviation of .06.
    assert bool(((covered > 0.56) & (covered <= 1)).all())


# --- changes and files ------------------------------------------------------------------------------------------------


def test_a_changed_posterior_has_no_report():
    found = calibrated(network(), blobs(60, 1))
    for change in ({"scale": 2.0}, {"prior_precision": 3.0}, {"temperature": 1.5}, {"averaged": True}, {}):
        assert found.replace(**change).calibration is None
        p = found.replace(**change).predict(blobs(5, 2)[0], likelihood="classification")
        with pytest.raises(CalibrationError, match="calibrate"):
            p.prediction_set()
        with pytest.raises(CalibrationError, match="calibrate"):
            _ = p.novelty_pvalue
    assert found.calibration is not None
    moved = found.to(dtype=torch.float64)
    assert moved.calibration is found.calibration


def same_report(found: Any, expected: Any) -> None:
    assert str(found) == str(expected)
    assert found.header() == expected.header()
    tensors = expected.guarantee
    assert found.guarantee.keys() == tensors.keys()
    assert tensors
    assert_close(found.guarantee, tensors)


@pytest.mark.parametrize("steps", [300, 10])
def test_a_saved_posterior_keeps_its_report(tmp_path, steps):
    posterior = calibrated(network(steps=steps), blobs(120, 1))
    posterior.save(tmp_path / "posterior")
    found = ba.Posterior.load(tmp_path / "posterior", mlp(2, 16, 3))
    same_report(found.calibration, posterior.calibration)
    assert (found.temperature, found.averaged) == (posterior.temperature, posterior.averaged)
    x = blobs(40, 2)[0]
    mine, theirs = (each.predict(x, likelihood="classification") for each in (found, posterior))
    assert torch.equal(mine.probs, theirs.probs)
    assert torch.equal(mine.novelty_pvalue, theirs.novelty_pvalue)
    for method in ("lac", "aps", "raps"):
        assert torch.equal(mine.prediction_set(0.9, method=method), theirs.prediction_set(0.9, method=method))
    network().save(tmp_path / "raw")
    assert ba.Posterior.load(tmp_path / "raw", mlp(2, 16, 3)).calibration is None
    assert torch.equal(mine.prediction_set(0.7, by_class=True), theirs.prediction_set(0.7, by_class=True))


def test_a_saved_regression_keeps_its_report(tmp_path):
    posterior = calibrated(curve(), waves(60, 1), "regression")
    posterior.save(tmp_path / "posterior")
    found = ba.Posterior.load(tmp_path / "posterior", mlp(1, 12, 2))
    same_report(found.calibration, posterior.calibration)
    x = waves(20, 2)[0]
    for mine, theirs in zip(
        found.predict(x, likelihood="regression").prediction_set(),
        posterior.predict(x, likelihood="regression").prediction_set(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_a_saved_mixture_keeps_its_report(tmp_path):
    mixture = calibrated(ba.Mixture([network(0), network(1)], [0.7, 0.3]), blobs(80, 1))
    mixture.save(tmp_path / "mixture")
    found = ba.Mixture.load(tmp_path / "mixture", mlp(2, 16, 3))
    same_report(found.calibration, mixture.calibration)
    assert [m.temperature for m in found] == [m.temperature for m in mixture]
    x = blobs(40, 2)[0]
    mine, theirs = (each.predict(x, likelihood="classification") for each in (found, mixture))
    assert_close(mine.novelty_pvalue, theirs.novelty_pvalue)
    assert torch.equal(mine.prediction_set(0.9), theirs.prediction_set(0.9))
    assert mixture.replace(scale=2.0).calibration is None
    assert mixture.to(dtype=torch.float64).calibration is mixture.calibration


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.95, 0.05]])
def test_a_mixture_s_numbers_are_of_the_whole(weights):
    batch = blobs(80, 1)
    mixture = ba.Mixture([network(0), network(1, 10)], weights)
    found = calibrated(mixture, batch)
    report = found.calibration
    assert report.n_fitted == report.n_scored == 80
    assert len({member.averaged for member in found}) == 1
    assert report.temperatures == tuple(member.temperature for member in found)
    assert report.averaged == found.members[0].averaged

    def nll(each: list[np.ndarray]) -> float:
        pooled = sum(w * torch.from_numpy(f).softmax(dim=1) for w, f in zip(weights, each, strict=True))
        return -float(pooled.gather(1, batch[1][:, None]).log().mean())

    f = [logits(member.model, batch[0]) for member in mixture]
    own = [shifted(member, batch) / t for member, t in zip(mixture, report.temperatures, strict=True)]
    plain = [each / best_temperature(each, batch[1]) for each in f]
    assert report.nll == {
        "calibrated": approx(nll(own), rel=1e-4),
        "best temperature alone": approx(nll(plain), rel=1e-4),
        "network alone": approx(nll(f), rel=1e-5),
    }
    steep = [steepness(ratios(member, batch)).double().numpy()[:, None] for member in mixture]
    probs = [torch.from_numpy(each / u).softmax(dim=1) for each, u in zip(f, steep, strict=True)]
    novelty = sum(w * torch.special.entr(p).sum(dim=1) for w, p in zip(weights, probs, strict=True))
    assert_close(report.guarantee["novelty"], novelty.sort().values, rtol=1e-5)
    pooled = sum(w * torch.from_numpy(each).softmax(dim=1) for w, each in zip(weights, own, strict=True))
    lac = 1 - pooled.gather(1, batch[1][:, None])[:, 0]
    assert_close(report.guarantee["classes.lac"].double(), lac, rtol=1e-3, atol=1e-4)


# --- once more --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["temperature", "validation", "evidence"])
def test_calibrating_again_starts_anew(method):
    batch = blobs(100, 1)
    once = calibrated(network(), batch, method=method)
    again = calibrated(network().replace(temperature=5.0, averaged=False), batch, method=method)
    assert again.averaged == once.averaged
    assert again.calibration.nll == approx(once.calibration.nll, rel=1e-4)


def test_averaging_over_the_posterior_may_beat_the_best_temperature():
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = mlp(64, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        rows = torch.randint(50, (16,), generator=seeded(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 50, batch_size=16, prior_precision=1.0)
    found = calibrated(posterior, (x[200:1200], y[200:1200]), method="validation")
    assert found.calibration.averaged
    assert found.calibration.nll["calibrated"] < found.calibration.nll["best temperature alone"]
    assert "average over the posterior" in found.calibration.preferred
