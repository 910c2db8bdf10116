"""The scikit-learn estimators: scikit-learn's own checks, and each step against a plain reference."""

import copy
import itertools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sklearn
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bayesadam.engine.network import Network, initial
from bayesadam.engine.rules import Adam
from bayesadam.engine.streams import epochs
from bayesadam.errors import BayesAdamWarning, CalibrationError, SettingError
from bayesadam.likelihoods import likelihood
from bayesadam.sklearn import BadamClassifier, BadamRegressor, estimators, log_likelihood
from bayesadam.sklearn.training import Part, fit_networks, split
from bayesadam.weights.posterior import Posterior
from floats import approx, assert_close, close

# Enough to see what each test is about; how well the estimators do is a matter for benchmarks.
SMALL = {"hidden": (8,), "max_epochs": 20, "n_ensemble": 1, "random_state": 0}
HOMOSCEDASTIC = {**SMALL, "likelihood": "regression"}


def sine(n=120, seed=0, noise=0.1):
    random = np.random.RandomState(seed)
    X = random.uniform(-2, 2, (n, 2))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] + noise * random.randn(n)


def two_targets(n=120):
    X, y = sine(n)
    return X, np.stack([y, 100 + 50 * X[:, 0] ** 2], axis=1)


def changing_noise(n=400):
    random = np.random.RandomState(0)
    X = random.uniform(-1, 1, (n, 2))
    std = np.exp(1.5 * X[:, 0] - 1)
    return X, 20 + 5 * X[:, 1] + std * random.randn(n), std


def counts(n=400):
    random = np.random.RandomState(0)
    X = random.uniform(-1, 1, (n, 2))
    rate = np.exp(3 + X[:, 0] - 0.5 * X[:, 1])
    return X, random.poisson(rate), rate


def blobs(n=90, seed=0, labels=("a", "b", "c")):
    random = np.random.RandomState(seed)
    numbers = np.arange(n) % len(labels)
    return random.randn(n, 2) + 1.5 * numbers[:, None], np.array(labels)[numbers]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Torch's own, when it first loads its forward-mode derivatives.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=DeprecationWarning)
        yield


@pytest.mark.slow
@parametrize_with_checks([BadamRegressor(n_ensemble=2, max_epochs=60), BadamClassifier(n_ensemble=2, max_epochs=60)])
def test_scikit_learn_accepts_them(estimator, check):
    # The checks feed bad data on purpose, and warn of that themselves.
    warnings.simplefilter("default")
    check(estimator)


@pytest.mark.parametrize("estimator", [BadamRegressor, BadamClassifier])
def test_clones_pickles_and_searches_predict_the_same(estimator):
    X, y = sine() if estimator is BadamRegressor else blobs()
    settings = {**HOMOSCEDASTIC, "n_ensemble": 2} if estimator is BadamRegressor else SMALL
    model = estimator(**settings).fit(X, y)
    predict = "predict" if estimator is BadamRegressor else "predict_proba"
    search = GridSearchCV(make_pipeline(model), {f"{estimator.__name__.lower()}__hidden": [[8]]}, cv=2).fit(X, y)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), clone(model).fit(X, y), search):
        assert np.array_equal(getattr(other, predict)(X), getattr(model, predict)(X))


def test_frames_in_arrays_out():
    pandas = pytest.importorskip("pandas")
    X, y = sine()
    frame = pandas.DataFrame(X, columns=["one", "two"])
    with sklearn.config_context(transform_output="pandas"):
        model = BadamRegressor(**HOMOSCEDASTIC).fit(frame, pandas.Series(y))
        answers = model.predict(frame, return_std=True)
    assert all(isinstance(answer, np.ndarray) for answer in answers)
    assert_close(answers, BadamRegressor(**HOMOSCEDASTIC).fit(X, y).predict(X, return_std=True), rtol=1e-6)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"one": "three"}))


NETWORK = Network(2, (5, 4), 2, "tanh")


def toy_parts(seeds=(3, 4)):
    X, y = two_targets(60)
    x, y = torch.from_numpy(X).float(), torch.from_numpy((y - y.mean(axis=0)) / y.std(axis=0)).float()
    parts = split(np.zeros(60), 0.2, len(seeds), np.random.RandomState(0))
    return x, y, [Part(part.rows, part.held_out, seed) for part, seed in zip(parts, seeds, strict=True)]


def five_epochs(average, new, done):
    """A moving average over 5 x 3 steps, of all weights so far while these are fewer."""
    return average + (new - average) * max(1 / 15, 1 / (1 + float(done)))


def fit_toy(x, y, parts, *, lr=1e-2, max_epochs=6, patience=None):
    rule = Adam(decoupled=True, weight_decay=0.1)
    settings = {"lr": lr, "batch_size": 16, "max_epochs": max_epochs, "patience": patience, "device": "cpu"}
    return fit_networks(NETWORK, rule, likelihood("regression"), (x, y), parts, **settings)


def test_networks_trained_together_are_those_of_a_plain_loop():
    x, y, parts = toy_parts()
    for part, fit in zip(parts, fit_toy(x, y, parts), strict=True):
        network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        with torch.no_grad():
            for parameter, values in zip(network.parameters(), initial(NETWORK, [part.seed]).values(), strict=True):
                parameter.copy_(values[0])
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        losses, states, average = [], [], AveragedModel(network, avg_fn=five_epochs)
        for order in itertools.islice(epochs(48, 16, [part.seed]), 6):
            for (chosen,) in order:
                batch = part.rows[chosen]
                optimizer.zero_grad()
                nn.functional.mse_loss(network(x[batch]), y[batch]).backward()
                optimizer.step()
                average.update_parameters(network)
            scheduler.step()
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(average(x[part.held_out]), y[part.held_out])))
            states.append(copy.deepcopy((list(average.parameters()), optimizer.state_dict()["state"])))
        weights, state = states[fit.best_epoch - 1]
        assert fit.best_epoch == int(np.argmin(losses)) + 1
        assert_close([*fit.params.values()], [w.detach() for w in weights], rtol=1e-4, atol=1e-6)
        corrected = [entry["exp_avg_sq"] / (1 - 0.999 ** float(entry["step"])) for entry in state.values()]
        assert_close([*fit.second_moment.values()], corrected, rtol=1e-4, atol=1e-9)


def test_a_network_stops_after_so_many_epochs_without_a_lower_loss_and_does_not_wait_for_the_others():
    x, y, parts = toy_parts((3, 4, 5))
    settings = {"max_epochs": 60, "patience": 3, "lr": 0.05}
    together = fit_toy(x, y, parts, **settings)
    assert len({fit.epochs for fit in together}) > 1
    for part, fit in zip(parts, together, strict=True):
        (alone,) = fit_toy(x, y, [part], **settings)
        assert (alone.best_epoch, alone.epochs) == (fit.best_epoch, fit.epochs)
        assert fit.epochs in (60, fit.best_epoch + 3)
        assert_close(fit.params, alone.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("n", "n_parts"), [(10, 5), (57, 3), (200, 1)])
def test_each_row_is_held_out_at_most_once_and_each_stratum_gives_its_share(n, n_parts):
    strata = np.random.RandomState(n).choice([0, 1, 1, 1, 2, 2], size=n)
    parts = split(strata, 0.2, n_parts, np.random.RandomState(0))
    for part in parts:
        assert sorted([*part.rows.tolist(), *part.held_out.tolist()]) == list(range(n))
        assert len(part.held_out) == max(2, round(0.2 * n))
        assert set(strata[part.rows]) == set(strata)
        share = np.bincount(strata[part.held_out], minlength=3) - 0.2 * np.bincount(strata, minlength=3)
        assert np.abs(share).max() < 2
    held_out = np.concatenate([part.held_out for part in parts])
    assert len(held_out) - len(np.unique(held_out)) <= max(0, len(held_out) - (n - 3))
    again = split(strata, 0.2, 1, np.random.RandomState(0))[0]
    assert torch.equal(again.held_out, parts[0].held_out)
    assert again.seed == parts[0].seed


def test_few_rows_are_shared_as_well_as_can_be():
    cases = {(0, 0): (1, 1), (0, 0, 0): (2, 1), (0, 1): (2, 2)}
    for strata, sizes in cases.items():
        (part,) = split(np.array(strata), 0.2, 1, np.random.RandomState(0))
        assert (len(part.rows), len(part.held_out)) == sizes


@pytest.mark.parametrize("n", [2, 4, 5])
def test_tiny_and_constant_data(n):
    X, y = sine(n)
    X[:, 1] = 3.0
    for targets in (y, np.full(n, 7.0)):
        with pytest.warns(BayesAdamWarning, match=f"{n} rows are too few"):
            model = BadamRegressor(**{**SMALL, "n_ensemble": 2}).fit(X, targets)
        mean, std = model.predict(X, return_std=True)
        assert (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all()
    probs = BadamClassifier(**SMALL).fit(X, np.arange(n) % 2).predict_proba(X)
    assert_close(probs.sum(axis=1), np.ones(n))


@pytest.mark.parametrize(("data", "n_ensemble"), [(sine, 1), (two_targets, 3)])
def test_mean_and_std_are_those_of_the_linearised_mixture(data, n_ensemble):
    X, y = data()
    model = BadamRegressor(**{**HOMOSCEDASTIC, "n_ensemble": n_ensemble}).fit(X, y)
    mean, std = model.predict(X[:6], return_std=True)
    assert mean.shape == std.shape == y[:6].shape
    assert mean.dtype == std.dtype == np.float64
    shift, scale = y.reshape(len(y), -1).mean(axis=0), y.reshape(len(y), -1).std(axis=0)
    x = torch.from_numpy((X[:6] - X.mean(axis=0)) / X.std(axis=0))
    means, variances = [], []
    for posterior, network in zip(model.posteriors_, model.networks_, strict=True):
        jacobians = torch.func.jacrev(lambda p, net=network: torch.func.functional_call(net, p, (x,)))(posterior.mean)
        f_variance = sum((j.square() * posterior.variance[name]).flatten(2).sum(dim=2) for name, j in jacobians.items())
        means.append(torch.func.functional_call(network, posterior.mean, (x,)).detach().numpy())
        variances.append((f_variance + posterior.noise_variance).detach().numpy())
    assert list(model.posterior_) == model.posteriors_
    variance = np.mean(variances, axis=0) + np.var(means, axis=0)
    assert_close(mean.reshape(6, -1), np.mean(means, axis=0) * scale + shift, rtol=1e-9)
    assert_close(std.reshape(6, -1), np.sqrt(variance) * scale, rtol=1e-6)


def test_a_linear_problem_is_solved_with_its_noise():
    random = np.random.RandomState(0)
    X = random.randn(500, 3)
    y = X @ [1.0, -2.0, 0.5] + 3 + 2 * random.randn(500)
    model = BadamRegressor(hidden=(), likelihood="regression", random_state=0).fit(X[:400], y[:400])
    mean, std = model.predict(X[400:], return_std=True)
    assert np.abs(mean - LinearRegression().fit(X[:400], y[:400]).predict(X[400:])).max() < 0.3
    assert model.noise_variance_ == approx(4, rel=0.25)
    assert (np.abs(y[400:] - mean) < 1.96 * std).mean() == approx(0.95, abs=0.05)


def test_predictions_are_in_the_units_and_the_shape_of_the_data():
    X, y = sine()
    model = BadamRegressor(**HOMOSCEDASTIC).fit(X, y)
    other = BadamRegressor(**HOMOSCEDASTIC).fit(1e6 * X + 5e6, 1e-5 * y[:, None] - 3)
    mean, std = other.predict(1e6 * X + 5e6, return_std=True)
    expected_mean, expected_std = model.predict(X, return_std=True)
    assert_close(mean[:, 0], 1e-5 * expected_mean - 3, rtol=1e-3, atol=1e-7)
    assert_close(std[:, 0], 1e-5 * expected_std, rtol=1e-3)
    assert isinstance(model.noise_variance_, float)
    assert other.noise_variance_ == approx([1e-10 * model.noise_variance_], rel=1e-3)


def test_the_input_side_widens_outside_the_data():
    X, y = sine()
    fits = [BadamRegressor(**HOMOSCEDASTIC, structure=s).fit(X, y) for s in ("diagonal", "inputs")]
    near, far = ([fit.predict(k * X, return_std=True)[1].mean() for fit in fits] for k in (1, 10))
    assert far[1] / near[1] > 1.2 * far[0] / near[0]
    assert BadamRegressor(**{**SMALL, "n_ensemble": 2}, structure="inputs").fit(X, y).likelihood_ == "regression"


@pytest.mark.parametrize("name", ["regression", "heteroscedastic", "poisson"])
def test_the_predictive_is_the_mixtures_in_the_units_of_y(name):
    X, y, _ = counts(120) if name == "poisson" else changing_noise(120)
    model = BadamRegressor(likelihood=name, **{**SMALL, "n_ensemble": 2}).fit(X, y)
    x = torch.from_numpy((X[:6] - X.mean(axis=0)) / X.std(axis=0))
    p = model.posterior_.predict(x)
    shift, scale = (0.0, 1.0) if name == "poisson" else (y.mean(), y.std())
    mean, std = model.predict(X[:6], return_std=True)
    rates = torch.stack([network(x).detach().exp() for network in model.networks_]).mean(dim=0)
    assert_close(mean, (rates if name == "poisson" else p.mean).numpy()[:, 0] * scale + shift, rtol=1e-12)
    assert_close(std, p.stddev.numpy()[:, 0] * scale, rtol=1e-12)
    scores = model.log_likelihood(X[:6], y[:6])
    assert_close(model.distribution(X[:6]).log_prob(torch.from_numpy(y[:6, None]))[:, 0].numpy(), scores, rtol=1e-9)
    assert hasattr(model, "noise_variance_") == (name == "regression")
    grid = np.arange(400) if name == "poisson" else np.linspace(y.min() - 30, y.max() + 30, 8001)
    density = np.exp(model.log_likelihood(np.repeat(X[:1], len(grid), axis=0), grid))
    assert np.trapezoid(density, grid) == approx(1, abs=1e-3)
    assert np.trapezoid(density * (grid - mean[0]) ** 2, grid) == approx(std[0] ** 2, rel=0.01)
    if name == "poisson":
        assert_close(p.log_prob(torch.from_numpy(y[:6, None])).numpy(), scores, rtol=1e-9)


def test_one_row_in_a_hundred_may_be_four_times_as_far_off():
    X, y = sine(60)
    model = BadamRegressor(**{**HOMOSCEDASTIC, "n_ensemble": 2}).fit(X, y)
    expected = np.zeros((8, 60))
    for posterior in model.posteriors_:
        p, noise = (
            posterior.predict(torch.from_numpy(model.input_scaler_.transform(X))),
            float(posterior.noise_variance),
        )
        for share, factor in ((0.99, 1.0), (0.01, 16.0)):
            std = y.std() * np.sqrt(p.f_variance.numpy()[:, 0] + noise * factor / (0.99 + 0.01 * 16))
            expected += (
                share / 2 * norm.pdf(y + np.arange(8)[:, None], y.mean() + y.std() * p.f_mean.numpy()[:, 0], std)
            )
    found = [model.log_likelihood(X, y + shift) for shift in range(8)]
    assert_close(np.stack(found), np.log(expected), rtol=1e-6)


def test_counts_that_vary_far_more_than_poissons_have_sane_means_and_are_told():
    random = np.random.RandomState(0)
    X = random.randn(500, 3)
    y = random.negative_binomial(1, 1 / (2 + np.expm1(1 + 0.7 * X[:, 0])))
    with pytest.warns(BayesAdamWarning, match="^trust the means and the intervals more .* Poisson counts would"):
        model = BadamRegressor(**{**SMALL, "n_ensemble": 2, "likelihood": "poisson"}).fit(X, y)
    assert model.predict(X).max() < 20 * y.max()


@pytest.mark.parametrize(
    ("rows", "make", "name"),
    [
        (100, lambda X, y: y, "heteroscedastic"),
        (40, lambda X, y: y, "regression"),
        (150, lambda X, y: np.random.poisson(np.exp(X[:, 0])), "poisson"),
        (150, lambda X, y: np.round(50 + 5 * X[:, 0] + 2 * np.random.randn(150)), "heteroscedastic"),
    ],
    ids=["noise that changes", "few rows are held out", "counts", "ages"],
)
def test_the_default_likelihood_is_what_held_out_rows_ask_for(rows, make, name):
    X, y, _ = changing_noise(rows)
    y = make(X, y)
    model, told = (BadamRegressor(**SMALL, **given).fit(X, y) for given in ({}, {"likelihood": name}))
    assert model.likelihood_ == name
    answers = ([*each.predict(X[:9], return_std=True, return_interval=0.8)] for each in (model, told))
    assert np.array_equal(*answers)


@pytest.mark.parametrize("name", ["regression", "heteroscedastic"])
def test_intervals_reach_as_far_as_the_rank_of_held_out_residuals(name):
    X, y, _ = changing_noise(100)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 5}, likelihood=name).fit(X, y)
    x = torch.from_numpy((X - X.mean(axis=0)) / X.std(axis=0))
    scaled = torch.from_numpy((y - y.mean()) / y.std())[:, None]
    residuals = {}
    for posterior, part in zip(model.posteriors_, split(np.zeros(100), 0.2, 5, np.random.RandomState(0)), strict=True):
        p = posterior.predict(x[part.held_out])
        errors = ((scaled[part.held_out] - p.mean).abs() / p.stddev)[:, 0].tolist()
        residuals = dict(zip(part.held_out.tolist(), errors, strict=True)) | residuals
    assert len(residuals) == 99  # one row is always trained on
    assert_close(np.sort(model.residuals_[:, 0]), np.sort([*residuals.values()]), rtol=1e-9)
    mean, std, low, high = model.predict(X[:7], return_std=True, return_interval=0.8)
    q = sorted(residuals.values())[80 - 1]  # ⌈100 × 0.8⌉ = 80
    assert_close(np.stack([low, high]), np.stack([mean - q * std, mean + q * std]), rtol=1e-9, atol=1e-9)
    assert np.isinf(model.predict(X[:7], return_interval=0.995)[1]).all()
    with pytest.raises(SettingError, match=r"level must lie between 0 and 1.* got 90"):
        model.predict(X[:7], return_interval=90)


def test_intervals_of_counts_are_whole_numbers_and_reach_new_rows():
    X, y, _ = counts(300)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 2, "likelihood": "poisson"}).fit(X[:100], y[:100])
    _, low, high = model.predict(X[100:], return_interval=0.8)
    assert np.array_equal([low, high], np.round([low, high]))
    assert ((low <= y[100:]) & (y[100:] <= high)).mean() == approx(0.85, abs=0.12)
    with pytest.warns(BayesAdamWarning, match="8 rows are too few for intervals"):
        assert len(BadamRegressor(**{**SMALL, "n_ensemble": 5}).fit(*sine(8)).residuals_) <= 8


def test_scoring_by_the_log_likelihood():
    X, y = sine(90)
    model = make_pipeline(PolynomialFeatures(), BadamRegressor(**HOMOSCEDASTIC))
    expected = []
    for rows, test in KFold(3).split(X):
        wide = PolynomialFeatures().fit(X[rows])
        alone = BadamRegressor(**HOMOSCEDASTIC).fit(wide.transform(X[rows]), y[rows])
        expected.append(alone.log_likelihood(wide.transform(X[test]), y[test]).mean())
    assert_close(cross_val_score(model, X, y, cv=3, scoring=log_likelihood), expected, rtol=1e-9, atol=1e-9)
    search = GridSearchCV(model, {"badamregressor__max_epochs": [1, 20]}, cv=2, scoring=log_likelihood).fit(X, y)
    assert search.best_params_ == {"badamregressor__max_epochs": 20}
    assert log_likelihood(search, X, y) == approx(log_likelihood(search.best_estimator_, X, y))
    process = GaussianProcessRegressor(alpha=0.1).fit(X[:40], y[:40])
    mean, std = process.predict(X, return_std=True)
    gaussian = -0.5 * (((y - mean) / std) ** 2 + np.log(2 * np.pi * std**2))
    assert log_likelihood(process, X, y) == approx(gaussian.mean())


@pytest.mark.parametrize("labels", [("no", "yes"), (False, True), (10.0, 3.0, 7.0)])
def test_probabilities_are_averaged_over_the_networks_whatever_the_labels(labels):
    X, y = blobs(40 * len(labels), labels=labels)
    model = BadamClassifier(random_state=0, max_epochs=60, n_ensemble=2).fit(X, y)
    assert list(model.classes_) == sorted(labels)
    x = torch.from_numpy((X - X.mean(axis=0)) / X.std(axis=0))
    probs = [posterior.predict(x).probs.numpy() for posterior in model.posteriors_]
    assert_close(model.predict_proba(X), np.mean(probs, axis=0), rtol=1e-9)
    assert np.array_equal(model.predict(X), model.classes_[np.mean(probs, axis=0).argmax(axis=1)])
    assert model.score(X, y) > 0.75
    far = torch.tensor([[-40.0, 40.0], [60.0, -50.0]], dtype=torch.float64)
    with torch.no_grad():
        for posterior in model.posteriors_:
            assert (posterior.predict(far).probs.amax(dim=1) <= posterior.model(far).softmax(dim=1).amax(dim=1)).all()


def test_the_random_state_determines_everything_and_no_global_one_is_touched():
    X, y = sine()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    model = BadamRegressor(**{**HOMOSCEDASTIC, "n_ensemble": 2}).fit(X, y)
    expected, draws = model.predict(X, return_std=True), model.sample_y(X, 3)
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(told, expected) for told in pool.map(lambda _: model.predict(X, True), range(8)))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(1234)
    for state in (0, np.random.RandomState(0)):
        again = BadamRegressor(**{**HOMOSCEDASTIC, "random_state": state, "n_ensemble": 2}).fit(X, y)
        assert all(np.array_equal(a, b) for a, b in zip(again.predict(X, return_std=True), expected, strict=True))
        assert np.array_equal(again.sample_y(X, 3), draws)
    other = BadamRegressor(**{**HOMOSCEDASTIC, "random_state": 1, "n_ensemble": 2}).fit(X, y)
    assert not close(other.predict(X), expected[0])


@pytest.mark.slow
def test_draws_of_y_have_the_predictive_moments():
    X, y = sine(60)
    model = BadamRegressor(**SMALL).fit(X, y)
    mean, std = model.predict(X[:4], return_std=True)
    draws = model.sample_y(X[:4], 1000, random_state=1)
    assert draws.shape == (4, 1000)
    assert (np.abs(draws.mean(axis=1) - mean) < 5 * std / np.sqrt(1000)).all()
    assert_close(draws.std(axis=1), std, rtol=0.1)


@pytest.mark.cuda
@pytest.mark.parametrize("estimator", [BadamRegressor, BadamClassifier])
def test_what_a_gpu_trained_predicts_on_the_cpu_as_if_trained_there(estimator):
    X, y = sine() if estimator is BadamRegressor else blobs()
    here, there = (estimator(**{**SMALL, "n_ensemble": 2}, device=device).fit(X, y) for device in ("cpu", "cuda"))
    assert {p.device.type for network in there.networks_ for p in network.parameters()} == {"cpu"}
    predict = "predict" if estimator is BadamRegressor else "predict_proba"
    assert_close(getattr(here, predict)(X), getattr(there, predict)(X), atol=0.02)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden", (50, 0), "every width must be a whole number"),
        ("activation", "swish", "activation must be one of"),
        ("structure", "full", "structure must be one of .* got 'full'"),
        ("likelihood", "gamma", r"likelihood must be one of .*'poisson'.*, got 'gamma'"),
        ("lr", float("nan"), "lr must be a positive finite number .* got nan"),
        ("weight_decay", -1, "weight_decay must be finite and at least 0, got -1"),
        ("validation_fraction", 1.0, "validation_fraction must be from 0 and below 1, got 1.0"),
        ("batch_size", "all", "batch_size must be a whole number of at least 1 .* got 'all'"),
        ("max_epochs", 1.5, "max_epochs must be a whole number .* got 1.5"),
        ("patience", 0, "patience must be a whole number .* got 0"),
        ("n_ensemble", True, "n_ensemble must be a whole number .* got True"),
    ],
)
def test_bad_arguments_are_refused_by_name_before_training(name, value, message, monkeypatch):
    monkeypatch.setattr(estimators, "fit_networks", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SettingError, match=message):
        BadamRegressor(**{"max_epochs": 2, name: value}).fit(*sine(20))


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "gelu"},
        {"weight_decay": 0.0},
        {"validation_fraction": 0.0, "batch_size": 7},
        {"hidden": np.array([4, 4]), "n_ensemble": np.int64(2), "patience": np.int64(3), "lr": np.float32(0.01)},
    ],
)
def test_good_arguments_are_heeded(settings):
    X, y = sine(60)
    model = BadamRegressor(**{**HOMOSCEDASTIC, **settings}).fit(X, y)
    assert (model.predict(X, return_std=True)[1] > 0).all()
    assert len(model.posteriors_) == settings.get("n_ensemble", 1)
    if "batch_size" in settings:
        assert (model.posteriors_[0].settings.batch_size, model.posteriors_[0].n_data) == (6, 60)


def test_what_cannot_be_fitted_is_refused():
    X, y, _ = changing_noise(40)
    with pytest.raises(ValueError, match="counts, 0, 1, 2"):
        BadamRegressor(likelihood="poisson", **SMALL).fit(X, y)
    with pytest.raises(ValueError, match="two classes or more; y holds 1 class, \\['x'\\]"):
        BadamClassifier().fit(X, ["x"] * 40)
    with pytest.raises(SettingError, match="lower lr=1e\\+30"):
        BadamRegressor(**{**SMALL, "lr": 1e30}).fit(X, y)


def test_a_posterior_that_cannot_be_tuned_is_kept_as_it_was_read(monkeypatch):
    def fail(*args, **kwargs):
        raise CalibrationError("no luck")

    X, y = sine(60)
    monkeypatch.setattr(Posterior, "tune", fail)
    with pytest.warns(BayesAdamWarning, match="not tuned: no luck") as caught:
        model = BadamRegressor(**HOMOSCEDASTIC).fit(X, y)
    assert caught[0].filename == __file__
    assert (model.predict(X, return_std=True)[1] > 0).all()
    # N × weight decay.
    assert [*model.posteriors_[0].prior_precision.values()] == approx([48 * 0.01] * 4)
