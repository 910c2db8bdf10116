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
from bayesadam.calibration import calibrating
from sklearn.base import clone
from sklearn.datasets import load_iris, make_friedman1
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from bayesadam import BayesAdamError, Mixture, Posterior, calibrate
from bayesadam.engine.network import Network, initial
from bayesadam.engine.rules import Adam
from bayesadam.engine.streams import epochs
from bayesadam.errors import (
    BayesAdamWarning,
    CalibrationError,
    DivergedError,
    SettingError,
    StructureWarning,
)
from bayesadam.likelihoods import likelihood
from bayesadam.sklearn import BadamClassifier, BadamRegressor, estimators, log_likelihood
from bayesadam.sklearn.training import Part, fit_networks, split
from floats import approx, assert_close, close
from processes import run_python

# Enough to see what each test is about; how well the estimators do is a matter for benchmarks/tabular.py.
SMALL = {"hidden": (8,), "max_epochs": 20, "n_ensemble": 1, "random_state": 0}
HOMOSCEDASTIC = {**SMALL, "likelihood": "regression"}


def sine(n=120, seed=0, noise=0.1):
    random = np.random.RandomState(seed)
    X = random.uniform(-2, 2, (n, 2))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] + noise * random.randn(n)


def two_targets(n=120, seed=0):
    X, y = sine(n, seed)
    return X, np.stack([y, 100 + 50 * X[:, 0] ** 2], axis=1)


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


# --- what scikit-learn asks -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@parametrize_with_checks([BadamRegressor(n_ensemble=2, max_epochs=60), BadamClassifier(n_ensemble=2, max_epochs=60)])
def test_scikit_learn_accepts_them(estimator, check):
    with warnings.catch_warnings():
        # The checks feed bad data on purpose, and warn of that themselves.
        warnings.simplefilter("default")
        check(estimator)


def test_they_work_in_scikit_learns_tools():
    X, y = sine()
    pipeline = make_pipeline(PolynomialFeatures(), BadamRegressor(**SMALL))
    search = GridSearchCV(pipeline, {"badamregressor__hidden": [(4,), [8, 8]]}, cv=2).fit(X, y)
    mean, std = search.best_estimator_.predict(X[:5], return_std=True)
    assert mean.shape == std.shape == (5,)
    X, labels = blobs()
    for scoring in ("neg_log_loss", "accuracy", "roc_auc_ovr"):
        assert np.isfinite(cross_val_score(BadamClassifier(**SMALL), X, labels, cv=2, scoring=scoring)).all()


@pytest.mark.parametrize("estimator", [BadamRegressor, BadamClassifier])
def test_clones_and_pickles_predict_the_same(estimator):
    X, y = sine() if estimator is BadamRegressor else blobs()
    model = estimator(**{**SMALL, "n_ensemble": 2}).fit(X, y)
    predict = "predict" if estimator is BadamRegressor else "predict_proba"
    expected = getattr(model, predict)(X)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), clone(model).fit(X, y)):
        assert np.array_equal(getattr(other, predict)(X), expected)


def test_frames_in_arrays_out():
    pandas = pytest.importorskip("pandas")
    X, y = sine()
    frame = pandas.DataFrame(X, columns=["one", "two"])
    plain = BadamRegressor(**SMALL).fit(X, y)
    with sklearn.config_context(transform_output="pandas"):
        model = BadamRegressor(**SMALL).fit(frame, pandas.Series(y))
        found = model.predict(frame, return_std=True)
    assert list(model.feature_names_in_) == ["one", "two"]
    assert model.n_features_in_ == 2
    for mine, theirs in zip(found, plain.predict(X, return_std=True), strict=True):
        assert isinstance(mine, np.ndarray)
        assert_close(mine, theirs, rtol=1e-6)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"one": "three"}))


@pytest.mark.slow
def test_importing_bayesadam_leaves_scikit_learn_alone_and_its_absence_names_the_extra():
    code = (
        "import sys, bayesadam\nassert 'sklearn' not in sys.modules\nsys.modules['sklearn'] = None\n"
        "try:\n    from bayesadam.sklearn import BadamRegressor\n"
        "except bayesadam.BayesAdamError as error:\n    print(error)"
    )
    done = run_python(code)
    assert "pip install 'bayesadam[sklearn]'" in done.stdout, done.stderr


# --- training, against a plain loop ---------------------------------------------------------------------------------


NETWORK = Network(2, (5, 4), 2, "tanh")


def toy_parts(seeds=(3, 4)):
    X, y = two_targets(60)
    x, y = torch.from_numpy(X).float(), torch.from_numpy((y - y.mean(axis=0)) / y.std(axis=0)).float()
    parts = split(np.zeros(60), 0.2, len(seeds), np.random.RandomState(0))
    return x, y, [Part(part.rows, part.held_out, seed) for part, seed in zip(parts, seeds, strict=True)]


def fit_toy(x, y, parts, **changes):
    rule = Adam(decoupled=True, weight_decay=0.1)
    settings = {
        "lr": 1e-2,
        "batch_size": 16,
        "max_epochs": 6,
        "patience": None,
        "device": "cpu",
    }
    return fit_networks(NETWORK, rule, likelihood("regression"), (x, y), parts, **{**settings, **changes})


def test_networks_trained_together_are_those_of_a_plain_loop():
    x, y, parts = toy_parts()
    together = fit_toy(x, y, parts)
    for part, found in zip(parts, together, strict=True):
        network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        with torch.no_grad():
            for parameter, values in zip(network.parameters(), initial(NETWORK, [part.seed]).values(), strict=True):
                parameter.copy_(values[0])
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        losses, states = [], []
        for order in itertools.islice(epochs(48, 16, [part.seed]), 6):
            for (chosen,) in order:
                batch = part.rows[chosen]
                optimizer.zero_grad()
                nn.functional.mse_loss(network(x[batch]), y[batch]).backward()
                optimizer.step()
            scheduler.step()
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(network(x[part.held_out]), y[part.held_out])))
            states.append(copy.deepcopy((list(network.parameters()), optimizer.state_dict()["state"])))
        best = int(np.argmin(losses))
        assert found.best_epoch == best + 1
        weights, state = states[best]
        for mine, theirs in zip(found.params.values(), weights, strict=True):
            assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-6)
        for index, entry in state.items():
            mine = found.state["state"][index]
            for name in ("exp_avg", "exp_avg_sq"):
                assert_close(mine[name], entry[name], rtol=1e-4, atol=1e-6)
            assert float(mine["step"]) == float(entry["step"])


def test_training_stops_after_so_many_epochs_without_a_lower_loss():
    X, y = sine(60, noise=1.0)
    settings = {**HOMOSCEDASTIC, "hidden": (20,), "calibration": None, "lr": 0.05}
    stopped = BadamRegressor(**{**settings, "max_epochs": 400, "patience": 5}).fit(X, y)
    (best,) = stopped.best_epochs_
    assert stopped.n_iter_ == best + 5 < 400


def test_a_network_that_stops_early_does_not_wait_for_the_others():
    x, y, parts = toy_parts((3, 4, 5))
    settings = {"max_epochs": 60, "patience": 3, "lr": 0.05}
    together = fit_toy(x, y, parts, **settings)
    assert len({found.epochs for found in together}) > 1
    for part, found in zip(parts, together, strict=True):
        (alone,) = fit_toy(x, y, [part], **settings)
        assert (alone.best_epoch, alone.epochs) == (found.best_epoch, found.epochs)
        for name, theirs in alone.params.items():
            assert_close(found.params[name], theirs, rtol=1e-3, atol=1e-5)


def test_training_that_diverges_says_so():
    X, y = sine(40)
    with pytest.raises(DivergedError, match="lower lr=1e\\+30"):
        BadamRegressor(**{**SMALL, "lr": 1e30}).fit(X, y)


# --- what is held out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parts", [1, 3, 5])
@pytest.mark.parametrize("n", [10, 57, 200])
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


@pytest.mark.parametrize(
    ("strata", "fraction", "expected"),
    [
        ([0, 0], 0.2, (1, 1)),
        ([0, 0, 0], 0.2, (2, 1)),
        ([0, 0, 0, 0], 0.2, (2, 2)),
        ([0, 0, 0, 0], 0.99, (1, 3)),
        ([0, 1], 0.2, (2, 2)),
        ([0, 1, 1], 0.2, (2, 1)),
        ([0, 0, 0, 0], 0.0, (4, 4)),
    ],
)
def test_few_rows_are_shared_as_well_as_can_be(strata, fraction, expected):
    (part,) = split(np.array(strata), fraction, 1, np.random.RandomState(0))
    assert (len(part.rows), len(part.held_out)) == expected


@pytest.mark.parametrize(
    ("n", "calibration"), [(2, "auto"), (2, None), (3, "auto"), (4, "validation"), (5, "evidence")]
)
def test_tiny_data(n, calibration):
    X, y = sine(n)
    settings = {**SMALL, "calibration": calibration}
    mean, std = BadamRegressor(**{**settings, "n_ensemble": 2}).fit(X, y).predict(X, return_std=True)
    assert (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all()
    probs = BadamClassifier(**settings).fit(X, np.arange(n) % 2).predict_proba(X)
    assert_close(probs.sum(axis=1), 1)


def test_constant_inputs_and_targets():
    X, y = sine(40)
    X[:, 1] = 3.0
    for targets in (y, np.full(40, 7.0)):
        mean, std = BadamRegressor(**SMALL).fit(X, targets).predict(X, return_std=True)
        assert (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all()
    assert np.abs(mean - 7).max() < 0.5


# --- regression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ensemble", [1, 3])
@pytest.mark.parametrize("data", [sine, two_targets])
def test_mean_and_std_are_those_of_the_linearised_mixture(data, n_ensemble):
    X, y = data()
    model = BadamRegressor(**{**HOMOSCEDASTIC, "n_ensemble": n_ensemble}).fit(X, y)
    mean, std = model.predict(X[:6], return_std=True)
    assert mean.shape == std.shape == y[:6].shape
    assert mean.dtype == std.dtype == np.float64
    assert_close(model.predict(X[:6]), mean, rtol=1e-12)

    shift, scale = y.reshape(len(y), -1).mean(axis=0), y.reshape(len(y), -1).std(axis=0)
    x = torch.from_numpy((X[:6] - X.mean(axis=0)) / X.std(axis=0))
    means, variances = [], []
    for posterior, network in zip(model.posteriors_, model.networks_, strict=True):
        assert isinstance(posterior, Posterior)
        names = list(posterior.mean)

        def outputs(*weights, network=network, names=names):
            return torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x,))

        weights = tuple(posterior.mean[name] for name in names)
        jacobians = torch.autograd.functional.jacobian(outputs, weights)
        function_variance = sum(
            (j.square() * posterior.variance[name]).flatten(2).sum(dim=2)
            for name, j in zip(names, jacobians, strict=True)
        )
        means.append(outputs(*weights).detach().numpy())
        # The function's deviation grows with leverage.
        growth = posterior.predict(x).components[0].growth[:, None]
        variances.append((function_variance * growth**2 + posterior.noise_variance).numpy())
    assert isinstance(model.posterior_, Mixture)
    assert list(model.posterior_) == model.posteriors_
    expected = np.mean(means, axis=0)
    variance = np.mean(variances, axis=0) + np.mean(np.square(means), axis=0) - expected**2
    assert_close(mean.reshape(6, -1), expected * scale + shift, rtol=1e-9)
    assert_close(std.reshape(6, -1), np.sqrt(variance) * scale, rtol=1e-6)


def test_a_linear_problem_is_solved_with_its_noise():
    random = np.random.RandomState(0)
    X = random.randn(500, 3)
    y = X @ [1.0, -2.0, 0.5] + 3 + 2 * random.randn(500)
    model = BadamRegressor(hidden=(), likelihood="regression", random_state=0).fit(X[:400], y[:400])
    exact = LinearRegression().fit(X[:400], y[:400])
    mean, std = model.predict(X[400:], return_std=True)
    assert np.abs(mean - exact.predict(X[400:])).max() < 0.3
    assert model.noise_variance_ == approx(4, rel=0.25)
    assert (np.abs(y[400:] - mean) < 1.96 * std).mean() == approx(0.95, abs=0.05)


@pytest.mark.parametrize("calibration", ["evidence", "validation"])
def test_the_band_holds_what_it_should(calibration):
    X, y = make_friedman1(600, noise=1.0, random_state=0)
    model = BadamRegressor(calibration=calibration, max_epochs=60, n_ensemble=1, random_state=0).fit(X[:300], y[:300])
    mean, std = model.predict(X[300:], return_std=True)
    assert 0.88 < (np.abs(y[300:] - mean) < 1.96 * std).mean() < 0.995
    assert model.score(X[300:], y[300:]) > 0.75


def test_predictions_are_in_the_units_of_the_data():
    X, y = sine()
    model = BadamRegressor(**HOMOSCEDASTIC).fit(X, y)
    other = BadamRegressor(**HOMOSCEDASTIC).fit(1e6 * X + 5e6, 1e-5 * y - 3)
    for mine, theirs, shift in zip(
        model.predict(X, return_std=True), other.predict(1e6 * X + 5e6, return_std=True), (-3, 0), strict=True
    ):
        assert_close(1e-5 * mine + shift, theirs, rtol=1e-3, atol=1e-7)
    assert other.noise_variance_ == approx(1e-10 * model.noise_variance_, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("n", [6, 120])
def test_every_structure_fits_predicts_clones(structure, n):
    # A hundred gradients are too few for low rank by its own warning.
    warnings.simplefilter("ignore", StructureWarning)
    x, y = sine(n)
    options = {"structure": structure, "n_ensemble": 2, "random_state": 0}
    found = BadamRegressor(**options).fit(x, y)
    mean, std = found.predict(x, return_std=True)
    again = clone(found)
    assert again.get_params()["structure"] == structure
    for one, other in zip((mean, std), again.fit(x, y).predict(x, return_std=True), strict=True):
        assert_close(one, other, rtol=1e-6)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def test_kronecker_factors_widen_at_least_as_much_outside_the_data():
    x, y = sine()
    far = x[:20] * 10
    stds = {}
    for structure in ("diagonal", "kronecker"):
        found = BadamRegressor(structure=structure, likelihood="regression", n_ensemble=1, random_state=0).fit(x, y)
        (member,) = found.posteriors_
        inputs = torch.from_numpy(found.input_scaler_.transform(far))
        stds[structure] = member.predict(inputs).variance.mean()
    assert stds["kronecker"] >= stds["diagonal"]


def test_one_column_stays_a_column():
    X, y = sine()
    flat, column = BadamRegressor(**HOMOSCEDASTIC).fit(X, y), BadamRegressor(**HOMOSCEDASTIC).fit(X, y[:, None])
    assert np.array_equal(flat.predict(X)[:, None], column.predict(X))
    assert isinstance(flat.noise_variance_, float)
    assert column.noise_variance_.shape == (1,)


# --- other likelihoods ----------------------------------------------------------------------------------------------


def changing_noise(n=400, seed=0):
    random = np.random.RandomState(seed)
    X = random.uniform(-1, 1, (n, 2))
    std = np.exp(1.5 * X[:, 0] - 1)
    return X, 20 + 5 * X[:, 1] + std * random.randn(n), std


def counts(n=400, seed=0):
    random = np.random.RandomState(seed)
    X = random.uniform(-1, 1, (n, 2))
    rate = np.exp(3 + X[:, 0] - 0.5 * X[:, 1])
    return X, random.poisson(rate), rate


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regression", "heteroscedastic", "poisson"])
def test_the_predictive_is_the_mixtures_in_the_units_of_y(name):
    X, y, _ = counts(120) if name == "poisson" else changing_noise(120)
    model = BadamRegressor(likelihood=name, **{**SMALL, "n_ensemble": 3, "max_epochs": 40}).fit(X, y)
    x = torch.from_numpy((X[:6] - X.mean(axis=0)) / X.std(axis=0))
    found = model.posterior_.predict(x, likelihood=name)
    shift, scale = (0.0, 1.0) if name == "poisson" else (y.mean(), y.std())
    mean, std = model.predict(X[:6], return_std=True)
    assert mean.shape == std.shape == (6,)
    assert_close(model.predict(X[:6]), mean, rtol=1e-12)
    rates = torch.stack([network(x).detach().exp() for network in model.networks_]).mean(dim=0)
    expected = rates if name == "poisson" else found.predicted_mean
    assert_close(mean, expected.numpy()[:, 0] * scale + shift, rtol=1e-12)
    assert_close(std, found.stddev.numpy()[:, 0] * scale, rtol=1e-12)
    scaled = torch.from_numpy((y[:6, None] - shift) / scale)
    assert_close(model.log_likelihood(X[:6], y[:6]), found.log_prob(scaled).numpy() - np.log(scale), rtol=1e-9)
    assert hasattr(model, "noise_variance_") == (name == "regression")


@pytest.mark.parametrize("name", ["regression", "heteroscedastic"])
def test_densities_integrate_to_one(name):
    X, y, _ = changing_noise(120)
    model = BadamRegressor(likelihood=name, **SMALL).fit(X, y)
    grid = np.linspace(y.min() - 30, y.max() + 30, 8001)
    density = np.exp(model.log_likelihood(np.repeat(X[:1], len(grid), axis=0), grid))
    assert np.trapezoid(density, grid) == approx(1, abs=1e-3)


def test_counts_have_probabilities_of_sum_one():
    X, y, _ = counts(120)
    model = BadamRegressor(likelihood="poisson", **SMALL).fit(X, y)
    values = np.arange(400)
    assert np.exp(model.log_likelihood(np.repeat(X[:1], 400, axis=0), values)).sum() == approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_changing_noise_is_found():
    X, y, std = changing_noise(1200)
    model = BadamRegressor(likelihood="heteroscedastic", random_state=0).fit(X[:800], y[:800])
    mean, found = model.predict(X[800:], return_std=True)
    assert np.corrcoef(np.log(found), np.log(std[800:]))[0, 1] > 0.9
    assert (np.abs(y[800:] - mean) < 1.96 * found).mean() == approx(0.95, abs=0.03)
    plain = BadamRegressor(likelihood="regression", random_state=0).fit(X[:800], y[:800])
    gain = model.log_likelihood(X[800:], y[800:]) - plain.log_likelihood(X[800:], y[800:])
    assert gain.mean() > 0.15


@pytest.mark.slow
def test_rates_are_found_whatever_their_size():
    X, _, rate = counts(1200)
    for factor in (1, 50):
        many = np.random.RandomState(1).poisson(factor * rate)
        model = BadamRegressor(likelihood="poisson", random_state=0).fit(X[:800], many[:800])
        mean, std = model.predict(X[800:], return_std=True)
        assert np.median(np.abs(mean / (factor * rate[800:]) - 1)) < 0.1
        assert (np.abs(many[800:] - mean) < 1.96 * std).mean() == approx(0.95, abs=0.04)


def test_several_targets_each_have_a_noise_or_a_rate():
    X, y, _ = changing_noise(120)
    y = np.stack([y, -100 * y], axis=1)
    model = BadamRegressor(likelihood="heteroscedastic", **SMALL).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == y.shape
    assert model.log_likelihood(X, y).shape == (120,)
    X, y, _ = counts(120)
    model = BadamRegressor(likelihood="poisson", **SMALL).fit(X, np.stack([y, 0 * y], axis=1))
    assert (model.predict(X)[:, 1] < 0.5).all()


def test_counts_that_vary_far_more_than_poissons_have_sane_means_and_are_told():
    random = np.random.RandomState(0)
    X = random.randn(500, 3)
    rate = np.exp(1 + 0.7 * X[:, 0])
    y = random.negative_binomial(1, 1 / (1 + rate))
    with pytest.warns(BayesAdamWarning, match="^trust the means and the intervals, not .* Poisson counts would$"):
        model = BadamRegressor(**{**SMALL, "n_ensemble": 5, "likelihood": "poisson"}).fit(X, y)
    assert model.predict(X).max() < 20 * y.max()


def test_what_is_no_count_or_no_likelihood_is_refused():
    X, y, _ = changing_noise(40)
    with pytest.raises(ValueError, match="counts, 0, 1, 2"):
        BadamRegressor(likelihood="poisson", **SMALL).fit(X, y)
    with pytest.raises(SettingError, match=r"likelihood must be one of .*'poisson'.*, got 'gamma'"):
        BadamRegressor(likelihood="gamma", **SMALL).fit(X, y)


# --- the likelihood that is picked, and what held-out rows say ------------------------------------------------------


def residuals_by_hand(model, X, y, name):
    """|y − E[y]| in standard deviations of each row under the first network that held it out."""
    x = torch.from_numpy((X - X.mean(axis=0)) / X.std(axis=0))
    scaled = torch.from_numpy((y - y.mean()) / y.std())[:, None]
    parts = split(np.zeros(len(y)), 0.2, len(model.posteriors_), np.random.RandomState(model.random_state))
    residuals, seen = [], []
    for posterior, part in zip(model.posteriors_, parts, strict=True):
        new = [row for row in part.held_out.tolist() if row not in seen]
        found = posterior.predict(x[new], likelihood=name)
        residuals.append((scaled[new] - found.predicted_mean).abs() / found.stddev)
        seen += new
    return torch.cat(residuals).numpy()


def test_the_default_noise_depends_on_the_input_where_enough_rows_are_held_out():
    X, y, _ = changing_noise(100)
    settings = {**SMALL, "n_ensemble": 5}
    model = BadamRegressor(**settings).fit(X, y)
    told = BadamRegressor(**settings, likelihood="heteroscedastic").fit(X, y)
    assert model.likelihood_ == told.likelihood_ == "heteroscedastic"
    assert np.array_equal(model.predict(X), told.predict(X))
    assert BadamRegressor(**SMALL).fit(X[:40], y[:40]).likelihood_ == "regression"


def test_a_heteroscedastic_gradient_is_weighted_by_the_standard_deviation():
    outputs = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.randn(2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(likelihood("heteroscedastic").training_loss(outputs, targets).sum(), outputs)
    mean, log_variance = outputs.chunk(2, dim=-1)
    plain = nn.functional.gaussian_nll_loss(mean, targets, log_variance.exp(), reduction="sum", eps=0) / 10
    (expected,) = torch.autograd.grad(plain, outputs)
    assert_close(found, expected * (log_variance / 2).exp().detach().repeat(1, 1, 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["regression", "heteroscedastic"])
def test_intervals_reach_as_far_as_the_rank_of_held_out_residuals(name):
    X, y, _ = changing_noise(100)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 5}, likelihood=name).fit(X, y)
    residuals = residuals_by_hand(model, X, y, name)
    assert_close(model.residuals_, residuals, rtol=1e-9, atol=1e-9)
    mean, std, low, high = model.predict(X[:7], return_std=True, return_interval=0.8)
    assert len(residuals) == 99  # one row is always trained on
    q = np.sort(residuals[:, 0])[80 - 1]  # ⌈100 × 0.8⌉ = 80
    assert_close(low, mean - q * std, rtol=1e-9, atol=1e-9)
    assert_close(high, mean + q * std, rtol=1e-9, atol=1e-9)
    assert np.isinf(model.predict(X[:7], return_interval=0.995)[1]).all()
    with pytest.raises(SettingError, match=r"level must lie between 0 and 1.* got 90"):
        model.predict(X[:7], return_interval=90)


@pytest.mark.slow
def test_intervals_hold_new_rows_inside_a_pipeline():
    held = []
    settings = {**HOMOSCEDASTIC, "hidden": (), "n_ensemble": 5}
    for seed in range(12):
        X, y = sine(1080, seed, noise=0.5)
        pipeline = make_pipeline(PolynomialFeatures(3), BadamRegressor(**settings))
        _, low, high = pipeline.fit(X[:80], 1e3 * y[:80]).predict(X[80:], return_interval=0.8)
        held.append(((low <= 1e3 * y[80:]) & (1e3 * y[80:] <= high)).mean())
    # Residuals are of networks that saw fewer rows, which makes intervals a little wide.
    assert 0.78 < np.mean(held) < 0.88


def test_scoring_by_the_log_likelihood():
    X, y = sine(90)
    model = make_pipeline(PolynomialFeatures(), BadamRegressor(**SMALL))
    expected = []
    for rows, test in KFold(3).split(X):
        wide = PolynomialFeatures().fit(X[rows])
        alone = BadamRegressor(**SMALL).fit(wide.transform(X[rows]), y[rows])
        expected.append(alone.log_likelihood(wide.transform(X[test]), y[test]).mean())
    assert_close(cross_val_score(model, X, y, cv=3, scoring=log_likelihood), expected, rtol=1e-9, atol=1e-9)
    grid = {"badamregressor__max_epochs": [1, 20]}
    search = GridSearchCV(model, grid, cv=2, scoring=log_likelihood).fit(X, y)
    assert search.best_params_ == {"badamregressor__max_epochs": 20}
    assert log_likelihood(search, X, y) == approx(log_likelihood(search.best_estimator_, X, y))


def test_scoring_of_another_regressor_is_of_a_gaussian():
    X, y = sine(40)
    process = GaussianProcessRegressor(alpha=0.1).fit(X, y)
    mean, std = process.predict(X, return_std=True)
    expected = -0.5 * (((y - mean) / std) ** 2 + np.log(2 * np.pi * std**2))
    assert log_likelihood(process, X, y) == approx(expected.mean())


def test_a_row_that_several_networks_hold_out_has_one_residual():
    X, y = sine(8)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 5}).fit(X, y)
    assert len(model.residuals_) <= 8
    _, low, high = model.predict(X, return_interval=0.9)
    assert np.isinf(low).all()
    assert np.isinf(high).all()


def test_noise_far_from_the_data_is_at_most_what_targets_varied_by():
    X, y, _ = changing_noise(100)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 2}).fit(X, y)
    _, std = model.predict(1e3 * X, return_std=True)
    assert np.isfinite(std).all()
    noise = np.sqrt([float(posterior.noise_variance) for posterior in model.posteriors_]) * y.std()
    assert (noise <= np.abs(y - y.mean()).max() * 1.5).all()
    found = model.posterior_.predict(model._inputs(1e3 * X), likelihood="heteroscedastic")
    assert float(found.noise_variance.sqrt().max()) * y.std() <= noise.max() * (1 + 1e-9)


def test_a_posterior_that_widens_far_has_one_noise_variance():
    X, y, _ = changing_noise(100)
    fitted = BadamRegressor(**{**SMALL, "n_ensemble": 2, "structure": "kronecker"}).fit(X, y)
    assert fitted.likelihood_ == "regression"


def test_intervals_of_counts_are_whole_numbers():
    X, y, _ = counts(100)
    model = BadamRegressor(**{**SMALL, "n_ensemble": 5, "likelihood": "poisson"}).fit(X, y)
    _, low, high = model.predict(X, return_interval=0.8)
    assert (low >= 0).all()
    assert np.array_equal(low, low.round())
    assert np.array_equal(high, high.round())
    assert ((low <= y) & (y <= high)).mean() > 0.7


# --- classification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels", [("no", "yes"), (False, True), (-1, 1), ("b", "a", "c"), (10.0, 3.0, 7.0), (0, 1, 2, 3)]
)
def test_labels_of_any_kind(labels):
    X, y = blobs(40 * len(labels), labels=labels)
    model = BadamClassifier(random_state=0, max_epochs=60, n_ensemble=1).fit(X, y)
    assert list(model.classes_) == sorted(labels)
    probs = model.predict_proba(X)
    assert probs.shape == (len(X), len(labels))
    assert_close(probs.sum(axis=1), 1)
    assert np.array_equal(model.predict(X), model.classes_[probs.argmax(axis=1)])
    assert model.score(X, y) > 0.75


def test_probabilities_are_averaged_over_the_networks():
    X, y = load_iris(return_X_y=True)
    model = BadamClassifier(**{**SMALL, "n_ensemble": 3}).fit(X, y)
    x = torch.from_numpy((X - X.mean(axis=0)) / X.std(axis=0))
    each = [posterior.predict(x, likelihood="classification").probs.numpy() for posterior in model.posteriors_]
    assert not close(each[0], each[1], atol=1e-3)
    assert_close(model.predict_proba(X), np.mean(each, axis=0), rtol=1e-9)


def test_far_from_the_data_the_classifier_is_less_sure_than_its_network():
    X, y = blobs(150, seed=1, labels=(0, 1))
    model = BadamClassifier(random_state=0, max_epochs=60, n_ensemble=1).fit(X, y)
    far = np.array([[-40.0, 40.0], [60.0, -50.0]])
    with torch.no_grad():
        plain = model.networks_[0](torch.from_numpy(model.input_scaler_.transform(far))).softmax(dim=-1)
    assert (model.predict_proba(far).max(axis=1) <= plain.numpy().max(axis=1)).all()


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="two classes or more; y holds 1 class, \\['x'\\]"):
        BadamClassifier().fit(np.random.RandomState(0).randn(10, 2), ["x"] * 10)


# --- randomness, threads, arguments ---------------------------------------------------------------------------------


def test_the_random_state_determines_everything_and_no_global_one_is_touched():
    X, y = sine()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    model = BadamRegressor(**{**SMALL, "n_ensemble": 2}).fit(X, y)
    expected = model.predict(X, return_std=True)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(1234)
    for state in (0, np.random.RandomState(0)):
        again = BadamRegressor(**{**SMALL, "random_state": state, "n_ensemble": 2}).fit(X, y)
        assert all(np.array_equal(a, b) for a, b in zip(again.predict(X, return_std=True), expected, strict=True))
    other = BadamRegressor(**{**SMALL, "random_state": 1, "n_ensemble": 2}).fit(X, y)
    assert not close(other.predict(X), expected[0])


@pytest.mark.slow
def test_draws_of_y_have_the_predictive_moments():
    X, y = sine(60)
    model = BadamRegressor(**SMALL).fit(X, y)
    mean, std = model.predict(X[:4], return_std=True)
    draws = model.sample_y(X[:4], 1000, random_state=1)
    assert draws.shape == (4, 1000)
    assert bool((np.abs(draws.mean(axis=1) - mean) < 5 * std / np.sqrt(1000)).all())
    assert_close(draws.std(axis=1), std, rtol=0.1)
    assert np.array_equal(draws, model.sample_y(X[:4], 1000, random_state=1))


def test_threads_may_fit_and_predict_at_once(monkeypatch):
    # `warnings.catch_warnings`, by which the warning of few held-out rows is left out, is of the whole process.
    monkeypatch.setattr(calibrating, "warn", lambda *_: None)
    X, y = sine(60)
    models = [BadamRegressor(**{**HOMOSCEDASTIC, "random_state": seed}) for seed in range(4)]
    expected = [clone(model).fit(X, y).predict(X, return_std=True)[1] for model in models]
    with ThreadPoolExecutor(4) as pool:
        fitted = list(pool.map(lambda model: model.fit(X, y), models))
        shared = list(pool.map(lambda _: fitted[0].predict(X, return_std=True)[1], range(16)))
        means = list(pool.map(lambda number: fitted[0].predict(X, return_std=number % 2 == 1), range(16)))
    for model, std in zip(fitted, expected, strict=True):
        assert np.array_equal(model.predict(X, return_std=True)[1], std)
    assert all(np.array_equal(std, expected[0]) for std in shared)
    assert all(close(found[0] if number % 2 else found, means[0]) for number, found in enumerate(means))


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
        ("n_ensemble", 0, "n_ensemble must be a whole number of at least 1"),
        ("hidden", (50, 0), "every width must be a whole number"),
        ("hidden", (2.5,), "whole number"),
        ("activation", "swish", "activation must be one of"),
        ("calibration", "best", "calibration must be one of .* got 'best'"),
        ("structure", "full", "structure must be one of .* got 'full'"),
        ("device", "nowhere", "device='nowhere' cannot be used"),
        ("lr", 0.0, "lr must be a positive finite number .* got 0.0"),
        ("lr", float("nan"), "got nan"),
        ("lr", float("inf"), "got inf"),
        ("weight_decay", -1, "weight_decay must be finite and at least 0, got -1"),
        ("validation_fraction", 1.0, "validation_fraction must be from 0 and below 1, got 1.0"),
        ("batch_size", 0, "batch_size must be a whole number of at least 1 .* got 0"),
        ("batch_size", "all", "got 'all'"),
        ("max_epochs", 1.5, "max_epochs must be a whole number .* got 1.5"),
        ("patience", 0, "patience must be a whole number .* got 0"),
        ("n_ensemble", True, "n_ensemble must be a whole number .* got True"),
    ],
)
def test_bad_arguments_are_refused_by_name_before_training(name, value, message, monkeypatch):
    monkeypatch.setattr(estimators, "fit_networks", lambda *_, **__: pytest.fail("trained"))
    X, y = sine(20)
    with pytest.raises(SettingError, match=message) as caught:
        BadamRegressor(**{"max_epochs": 2, name: value}).fit(X, y)
    assert isinstance(caught.value, BayesAdamError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "settings",
    [{"activation": activation} for activation in ("relu", "tanh", "gelu", "silu", "elu", "sigmoid")]
    + [
        {"weight_decay": 0.0, "calibration": None},
        {"validation_fraction": 0.0, "batch_size": 7},
        {"hidden": np.array([4, 4]), "n_ensemble": np.int64(2), "patience": np.int64(3), "lr": np.float32(0.01)},
        {"device": torch.device("cpu")},
    ],
)
def test_good_arguments_are_heeded(settings):
    X, y = sine(60)
    model = BadamRegressor(**{**SMALL, **settings}).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all()
    assert len(model.posteriors_) == settings.get("n_ensemble", 1)
    if "batch_size" in settings:
        assert model.posteriors_[0].settings.batch_size == 6
        assert model.posteriors_[0].n_data == 60


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_more_held_out_rows_give_sets_and_p_values(likelihood):
    """As the page has it."""
    if likelihood == "classification":
        X, y = blobs(1200)
        model = BadamClassifier(**SMALL).fit(X[:200], y[:200])
        targets = np.searchsorted(model.classes_, y)
    else:
        X, y = sine(1200)
        model = BadamRegressor(**HOMOSCEDASTIC).fit(X[:200], y[:200])
        targets = model.target_scaler_.transform(y[:, None])
    x = model.input_scaler_.transform(X)
    with warnings.catch_warnings():
        posterior = calibrate(model.posterior_, (x[200:700], targets[200:700]), likelihood=likelihood)
    found = posterior.predict(x[700:], likelihood=likelihood)
    if likelihood == "classification":
        held = found.prediction_set(0.9).numpy()[np.arange(500), targets[700:]]
    else:
        low, high = (model.target_scaler_.inverse_transform(end)[:, 0] for end in found.prediction_set(0.9))
        held = (low <= y[700:]) & (y[700:] <= high)
    # Two binomial deviations of the test rows and of the held-out ones each.
    assert abs(held.mean() - 0.9) < 4 * np.sqrt(0.09 / 500)
    assert abs((found.novelty_pvalue <= 0.1).double().mean() - 0.1) < 4 * np.sqrt(0.09 / 500)


def test_a_posterior_that_cannot_be_calibrated_is_kept_as_it_was_read(monkeypatch):
    def fail(*args, **kwargs):
        raise CalibrationError("no luck")

    monkeypatch.setattr(estimators, "calibrate", fail)
    X, y = sine(60)
    with pytest.warns(BayesAdamWarning, match="not calibrated: no luck") as caught:
        model = BadamRegressor(**HOMOSCEDASTIC).fit(X, y)
    assert caught[0].filename == __file__
    plain = BadamRegressor(**HOMOSCEDASTIC, calibration=None).fit(X, y)
    for mine, theirs in zip(model.predict(X, return_std=True), plain.predict(X, return_std=True), strict=True):
        assert np.array_equal(mine, theirs)
