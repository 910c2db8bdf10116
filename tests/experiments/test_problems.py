"""Problems against rewards worked out by hand, and what is refused."""

import numpy as np
import pytest

from bayesadam.errors import MatchError, SettingError
from experiments import problems
from experiments.data import FileError, Table, data_set, find
from experiments.problems import PROBLEMS, classification_problem, problem, reward_problem, wheel
from floats import approx, assert_close

X = np.array([[1.0, 5.0, 0.0], [3.0, 5.0, 1.0], [5.0, 5.0, 0.5], [7.0, 5.0, 9.0]])


@pytest.fixture
def tables(monkeypatch):
    """Small tables in the place of the benchmark's files."""
    random = np.random.default_rng(5)
    labels = random.integers(7, size=400)
    made = {
        "mushroom": Table(np.eye(40, dtype=np.uint8), np.arange(40) % 2, 2),
        "financial": Table(random.normal(size=(900, 21))),
        "jester": Table(random.uniform(-10, 10, size=(400, 40)).astype(np.float32)),
        "statlog": Table(random.normal(3, 7, size=(400, 9)).astype(np.float32), labels, 7),
        "adult": Table(random.normal(size=(400, 6)), labels, 14),
        "covertype": Table(random.normal(size=(10_500, 6)), np.arange(10_500) % 7, 7),
        "census": Table(random.integers(2, size=(400, 30), dtype=np.uint8), labels, 9),
    }
    made["census-1000"] = made["census"]
    monkeypatch.setattr(problems, "load_table", made.__getitem__)
    return made


def own():
    return classification_problem(np.random.default_rng(0).normal(size=(300, 4)), np.arange(300) % 3)


@pytest.mark.parametrize("name", ["own", *PROBLEMS])
@pytest.mark.usefixtures("tables")
def test_rows_depend_on_the_seed_alone_and_short_runs_begin_long_ones(name):
    chosen = own() if name == "own" else problem(name)
    long, short, other = chosen.run(7, 150), chosen.run(7, 90), chosen.run(8, 150)
    assert long.contexts.shape == (150, chosen.n_features)
    assert long.rewards.shape == long.expected.shape == (150, chosen.n_arms)
    assert long.contexts.dtype == long.rewards.dtype == np.float32
    for part in ("contexts", "rewards", "expected"):
        np.testing.assert_array_equal(getattr(long, part)[:90], getattr(short, part))
    assert not np.array_equal(long.contexts, other.contexts)
    np.testing.assert_array_equal(long.optimum, long.expected.max(axis=1))


def test_no_more_rounds_than_rows():
    with pytest.raises(SettingError, match="offers 300 rounds"):
        own().run(0, 301)
    assert len(wheel().run(0, 100_000).contexts) == 100_000


def test_the_wheel_pays_by_quadrant_beyond_its_radius():
    rounds = wheel(0.6).run(3, 40_000)
    x, y = rounds.contexts.T.astype(np.float64)
    norm = np.hypot(x, y)
    assert norm.max() <= 1 + 1e-6
    # Uniform in the disc: the share beyond δ is 1 − δ².
    assert (norm >= 0.6).mean() == approx(0.64, abs=0.01)
    for arm, here in enumerate([(x > 0) & (y > 0), (x > 0) & (y < 0), (x < 0) & (y > 0), (x < 0) & (y < 0)]):
        far = here & (norm > 0.6 + 1e-6)
        np.testing.assert_array_equal(rounds.expected[far, arm], np.float32(50))
        assert rounds.rewards[far, arm].mean() == approx(50, abs=0.001)
        assert rounds.rewards[far, arm].std() == approx(0.01, rel=0.1)
        near = ~here | (norm < 0.6 - 1e-6)
        np.testing.assert_array_equal(rounds.expected[near, arm], np.float32(1))
        assert rounds.rewards[near, arm].std() == approx(0.05, rel=0.05)
    assert rounds.rewards[:, 4].mean() == approx(1.2, abs=0.002)
    assert np.unique(rounds.optimum).tolist() == approx([1.2, 50])


def test_mushroom_has_the_expected_optimum(tables):
    chosen = problem("mushroom")
    assert (chosen.n_features, chosen.n_arms, chosen.rounds, chosen.most_rounds) == (40, 2, 40, None)
    rounds = chosen.run(0, 20_000)
    is_edible = tables["mushroom"].labels[rounds.contexts.argmax(axis=1)] == 1
    np.testing.assert_array_equal(rounds.optimum, np.where(is_edible, 5.0, 0.0))
    np.testing.assert_array_equal(rounds.uniform, np.where(is_edible, 2.5, -7.5))
    np.testing.assert_array_equal(rounds.rewards[:, 0], 0)
    np.testing.assert_array_equal(rounds.rewards[is_edible, 1], 5)
    assert set(rounds.rewards[~is_edible, 1]) == {5.0, -35.0}
    assert rounds.rewards[~is_edible, 1].mean() == approx(-15, abs=1)
    # With replacement, and not scaled.
    assert is_edible.mean() == approx(0.5, abs=0.02)
    assert set(np.unique(rounds.contexts)) == {0, 1}


@pytest.mark.usefixtures("tables")
def test_financial_arms_are_portfolios_of_unit_norm():
    rounds = problem("financial").run(5)
    portfolios, residual, *_ = np.linalg.lstsq(rounds.contexts.astype(np.float64), rounds.expected, rcond=None)
    assert_close(np.linalg.norm(portfolios, axis=0), 1, atol=1e-5)
    assert residual.max() < 1e-4
    spread = (rounds.rewards - rounds.expected).std(axis=0)
    assert_close(spread, 0.01 * np.arange(1, 9), rtol=0.12)


def test_jester_splits_a_users_ratings(tables):
    chosen = problem("jester")
    assert (chosen.n_features, chosen.n_arms, chosen.rounds) == (32, 8, 400)
    ratings, arms, run = tables["jester"].contexts, range(17, 25), chosen.run(1)
    rows = {tuple(row[arms]): np.delete(row, arms) for row in ratings}
    for context, rewards in zip(run.contexts, run.rewards, strict=True):
        np.testing.assert_array_equal(context, rows[tuple(rewards)])


@pytest.mark.usefixtures("tables")
def test_labelled_tables_are_scaled_column_by_column():
    rounds = problem("statlog").run(0)
    assert_close(rounds.contexts.astype(np.float64).mean(axis=0), 0, atol=1e-5)
    assert_close(rounds.contexts.astype(np.float64).std(axis=0), 1, atol=1e-5)
    np.testing.assert_array_equal(rounds.rewards.sum(axis=1), 1)
    np.testing.assert_array_equal(rounds.optimum, 1)
    large = problem("covertype")
    assert (large.rounds, large.most_rounds, problem("adult").n_arms) == (10_000, 10_500, 14)


def test_labels_become_arms_in_order_and_constant_columns_stay_finite():
    chosen = classification_problem(X, ["b", "a", "b", "c"], name="mine")
    assert (chosen.name, chosen.n_arms, chosen.rounds) == ("mine", 3, 4)
    rounds = chosen.run(0)
    scaled = (X - X.mean(axis=0)) / np.where(X.std(axis=0) == 0, 1, X.std(axis=0))
    order = [int(np.argmin(np.abs(scaled[:, 0] - c))) for c in rounds.contexts[:, 0]]
    assert_close(rounds.contexts, scaled[order], atol=1e-6)
    np.testing.assert_array_equal(rounds.rewards, np.eye(3)[[1, 0, 1, 2]][order])
    plain = classification_problem(X, [1, 0, 1, 0], standardise=False).run(0)
    assert sorted(plain.contexts[:, 0]) == [1, 3, 5, 7]
    # A large offset does not drown a column, and .1 is constant.
    far = classification_problem((1e9 + np.arange(50.0))[:, None], np.arange(50) % 2).run(0)
    assert far.contexts.std() == approx(1, abs=1e-6)
    constant = classification_problem(np.full((50, 1), 0.1), np.arange(50) % 2).run(0)
    np.testing.assert_array_equal(constant.contexts, 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: classification_problem(X, [0, 1, 0]), MatchError, "4 rows of X"),
        (lambda: classification_problem(X, [[0, 1], [1, 0]]), MatchError, r"shape \(2, 2\)"),
        (lambda: classification_problem(X, [1, 1, 1, 1]), FileError, "two arms"),
        (lambda: classification_problem(X, [0, 1, np.nan, 1]), FileError, "label of row 2"),
        (lambda: classification_problem(X, ["a", None, "b", "a"]), FileError, "label of row 1"),
        (lambda: classification_problem(X * np.nan, [0, 1, 0, 1]), FileError, "not finite in float32"),
        (lambda: classification_problem([["x"], ["y"]], [0, 1]), FileError, "table of numbers"),
        (lambda: classification_problem(X[0], [0, 1, 2]), FileError, r"shape \(3,\)"),
        (lambda: classification_problem(X[:0], []), FileError, "not empty"),
        (lambda: reward_problem(X, X[:3]), MatchError, "4 contexts"),
        (lambda: reward_problem(X, X[:, :1]), FileError, "two arms"),
        (lambda: reward_problem(X, X / 0.0), FileError, "rewards have numbers that are not finite"),
        (lambda: reward_problem(X * 1e300, X), FileError, "not finite in float32"),
        (lambda: problem("mushrooms"), SettingError, "must be one of"),
        (lambda: problem("wheel:x"), SettingError, "must be a number"),
        (lambda: problem("wheel:2"), SettingError, "between 0 and 1, got 'wheel:2'"),
        (lambda: wheel(1.0), SettingError, "between 0 and 1"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_tables_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_jesters_uniform_is_the_papers():
    if len(find("jester")) < len(data_set("jester")):
        pytest.skip("the files of jester are not here")
    rounds = problem("jester").run(0)
    assert rounds.uniform.sum() / rounds.optimum.sum() == approx(0.34, abs=0.01)
