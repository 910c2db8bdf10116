"""Linear heads and observations against closed forms: normal equations, weights 2^(−age/h)."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import block_diag

from bayesadam.bandits.linear import Head, Statistics, normal_equations, shared_precision
from bayesadam.bandits.observations import Observations
from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError
from floats import approx, assert_close

ARMS, WIDTH, COUNT, H = 3, 4, 40, 9.0


def observations(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arms, features with the constant 1 last, rewards."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(COUNT, WIDTH))
    x[:, -1] = 1
    return rng.integers(ARMS, size=COUNT), x, 3 + 2 * rng.normal(size=COUNT)


def reference(
    x: np.ndarray, rewards: np.ndarray, prior: np.ndarray, precision: np.ndarray, w: np.ndarray | None = None
):
    """μ, C and ½(Σ r² + μ₀ᵀ Λ₀ μ₀ − μᵀ C⁻¹ μ) of one arm's rows."""
    w = np.ones(len(x)) if w is None else w
    inverse = np.diag(precision) + x.T @ (w[:, None] * x)
    mean = np.linalg.solve(inverse, precision * prior + x.T @ (w * rewards))
    return mean, np.linalg.inv(inverse), 0.5 * (w @ rewards**2 + precision @ prior**2 - mean @ inverse @ mean)


def statistics(arms: np.ndarray, x: np.ndarray, rewards: np.ndarray) -> Statistics:
    data = Statistics.zeros(len(np.unique(arms)), x.shape[1])
    data.add(arms, x, rewards, np.ones(len(arms)))
    return data


def test_updates_one_by_one_are_the_normal_equations():
    arms, x, rewards = observations()
    head = Head.prior(ARMS, WIDTH)
    for arm, row, reward in zip(arms.tolist(), x, rewards.tolist(), strict=True):
        head.update([arm], [reward], row[None])
    for arm in range(ARMS):
        own = arms == arm
        mean, covariance, residual = reference(x[own], rewards[own], np.zeros(WIDTH), np.ones(WIDTH))
        assert_close(head.mean[arm], mean, rtol=1e-9)
        assert_close(head.covariance[arm], covariance, rtol=1e-9)
        assert head.scale[arm] == approx(residual, rel=1e-9)
        assert head.shape[arm] == 1 + own.sum() / 2
    means, widths = head.predict(x)
    assert_close(means, x @ head.mean.T, rtol=1e-9)
    assert_close(widths, np.einsum("ki,aij,kj->ka", x, head.covariance, x), rtol=1e-9)


def test_many_observations_at_once_are_as_one_after_the_other_and_errors_are_forgotten():
    arms, x, rewards = observations()
    plain, single, block = (Head.prior(ARMS, WIDTH, memory) for memory in (1.0, 0.97, 0.97))
    shape, scale = np.zeros((2, ARMS))
    for at, arm in enumerate(arms.tolist()):
        one, before = ([arm], [float(rewards[at])], x[at : at + 1]), plain.scale.copy()
        plain.update(*one)
        single.update(*one)
        shape, scale = 0.97 * (shape + 0.5 * (np.arange(ARMS) == arm)), 0.97 * (scale + plain.scale - before)
    block.update(arms.tolist(), rewards.tolist(), x)
    for head in (single, block):
        assert_close(head.joint, plain.joint, rtol=1e-9)
        assert_close(head.shape, 1 + shape, rtol=1e-9)
        assert_close(head.scale, scale, rtol=1e-9)


def test_a_fit_is_the_normal_equations_around_prior_means():
    arms, x, rewards = observations()
    prior, precision = np.random.default_rng(1).normal(size=(ARMS, WIDTH)), np.array([0.3, 2.0, 1.0, 0.1])
    covariance, mean, residual = normal_equations(statistics(arms, x, rewards), prior, precision)
    for arm in range(ARMS):
        own = arms == arm
        expected = reference(x[own], rewards[own], prior[arm], precision)
        for found, wanted in zip((mean[arm], covariance[arm], residual[arm]), expected, strict=True):
            assert_close(found, wanted, rtol=1e-9)


def test_errors_of_what_is_left_out_are_those_of_fits_without_it():
    arms, x, rewards = observations()
    ridge = np.full(WIDTH, 0.5)
    covariance, mean, _ = normal_equations(statistics(arms, x, rewards), np.zeros((ARMS, WIDTH)), ridge)
    errors, rest = Head(mean, covariance, np.ones(ARMS), np.ones(ARMS), 1.0).left_out(arms, x, rewards)
    assert ((rest > 0) & (rest < 1)).all()
    for place in range(COUNT):
        kept = (arms == arms[place]) & (np.arange(COUNT) != place)
        without, _, _ = reference(x[kept], rewards[kept], np.zeros(WIDTH), ridge)
        assert errors[place] == approx(rewards[place] - x[place] @ without, rel=1e-8)


def test_a_step_towards_the_shared_precision_makes_rewards_likelier():
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(6, 9, 2)), np.ones((6, 9, 1))], axis=2)
    rewards = (x @ (0.3 * rng.normal(size=(6, 3, 1)))).squeeze(2) + 0.5 * rng.normal(size=(6, 9))
    data = statistics(np.arange(6).repeat(9), x.reshape(-1, 3), rewards.ravel())
    first, zero, variance, evidence = np.full(3, 0.01), np.zeros((6, 3)), 0.25, []
    precision = first
    for _ in range(6):
        marginals = block_diag(*(np.eye(9) + own @ np.diag(1 / precision) @ own.T for own in x))
        evidence.append(stats.multivariate_normal.logpdf(rewards.ravel(), cov=variance * marginals))
        covariance, mean, _ = normal_equations(data, zero, precision)
        precision = shared_precision(mean, covariance, variance, first, first_arms=0.0)
    assert all(np.diff(evidence) > 0)
    # Arms that nothing is known of, so many that the others do not count, leave the first precision.
    assert_close(shared_precision(mean, covariance, variance, first, first_arms=1e12), first, rtol=1e-6)


def test_features_that_no_fit_can_take_are_named():
    data = Statistics.zeros(1, 2)
    with np.errstate(over="ignore"):
        data.add(np.zeros(2, int), np.array([[1e160, 1.0], [1.0, 1.0]]), np.ones(2), np.ones(2))
    with pytest.raises(MatchError, match="standardise the contexts"):
        normal_equations(data, np.zeros((1, 2)), np.full(2, 1e-8))


def fed(step: int, half_life: float | None) -> Observations:
    """Observations that came a few at a time."""
    arms, x, rewards = observations()
    seen = Observations(WIDTH - 1, half_life)
    for first in range(0, COUNT, step):
        part = slice(first, first + step)
        seen.add(x[part, :-1], arms[part], rewards[part])
    return seen


@pytest.mark.parametrize("half_life", [0.5, 9.0, 1e6, None])
def test_moments_and_count_are_weighted(half_life):
    seen = fed(7, half_life)
    weights = 2.0 ** (-(COUNT - 1 - np.arange(COUNT)) / (half_life or math.inf))
    rewards = seen.rewards[:COUNT].astype(float)
    mean = weights @ rewards / weights.sum()
    std = math.sqrt(weights @ (rewards - mean) ** 2 / weights.sum())
    assert seen.effective_count == approx(weights.sum(), rel=1e-9)
    assert seen.moments() == approx((mean, std), rel=1e-7)
    assert_close(seen.weights(slice(0, COUNT)), weights)


def test_rewards_that_are_all_equal_have_the_unit_1():
    seen = Observations(1)
    seen.add(np.zeros((3, 1)), [0, 0, 0], [0.1, 0.1, 0.1])
    assert seen.moments()[1] == 1


@pytest.mark.parametrize("half_life", [2.0, 9.0, 1e9])
def test_mini_batches_are_drawn_by_weight(half_life):
    seen = fed(COUNT, half_life)
    n = 60_000
    weights = 2.0 ** (-(COUNT - 1 - np.arange(COUNT)) / half_life)
    expected = weights / weights.sum()
    shares = np.bincount(seen.drawn(Streams([1], "rows"), n), minlength=COUNT) / n
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected / n) + 1e-9).all()


def test_the_newest_are_kept(monkeypatch):
    monkeypatch.setattr("bayesadam.bandits.observations.MOST_ROOM", 512)
    seen = Observations(1, 50.0)
    for first in range(0, 2000, 100):
        if seen.count + 100 > 512:
            seen.thin()
        numbers = np.arange(first, first + 100)
        seen.add(numbers[:, None], np.zeros(100, int), numbers)
    seen.thin()
    assert (seen.total, seen.count, len(seen.arms)) == (2000, 256, 1024)
    np.testing.assert_array_equal(seen.rewards[:256], np.arange(1744, 2000))
    np.testing.assert_array_equal(seen.contexts[:256, 0], np.arange(1744, 2000))
    assert seen.weights(slice(255, 256)) == 1
    assert seen.moments()[0] == approx(np.average(np.arange(2000), weights=2.0 ** (np.arange(2000) / 50)), rel=1e-6)
