"""Abstention: the exact bounds and the family of tests; conformal thresholds and p-values."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from bayesadam.errors import SettingError
from bayesadam.likelihoods.abstention import binomial_cdf, certified, needed, remedy, starts
from bayesadam.likelihoods.conformal import p_values, threshold
from floats import approx, assert_close


@pytest.mark.parametrize("trials", [1, 7, 300, 20_000])
@pytest.mark.parametrize("p", [1e-4, 0.02, 0.5, 0.97])
def test_the_binomial_distribution(trials, p):
    for successes in sorted({0, 1, trials // 50, trials // 2, trials - 1, trials}):
        assert binomial_cdf(successes, trials, p) == approx(binom.cdf(successes, trials, p), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("risk", [0.01, 0.02, 0.3])
def test_the_fewest_examples(risk):
    n = needed(risk, 0.05)
    assert (1 - risk) ** (n - 1) <= 0.05 < (1 - risk) ** (n - 2)
    sure = torch.arange(float(n)), torch.zeros(n, dtype=torch.bool)
    assert certified(*sure, risk=risk, confidence=0.95) == (n - 1.0, n, 0)
    assert certified(*(part[1:] for part in sure), risk=risk, confidence=0.95) is None


def by_hand(doubt: np.ndarray, wrong: np.ndarray, risk: float, confidence: float) -> float | None:
    """The fallback procedure, hypothesis by hypothesis."""
    n, found, level = len(doubt), None, 0.0
    shares = starts(n, risk, 1 - confidence)
    if not shares:
        return None
    numbers, k = set(shares) | {n}, float(shares[0])
    while round(k) <= n:
        numbers.add(round(k))
        k *= 1.03
    for number in sorted(numbers):
        level += (1 - confidence) / len(shares) * (number in shares)
        t = np.sort(doubt)[number - 1]
        within = doubt <= t
        if level > 0 and binom.cdf(wrong[within].sum(), within.sum() - 1, risk) <= level * (1 + 1e-12):
            found = t
        else:
            level = 0.0
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("n", "risk", "ties"), [(400, 0.05, False), (1000, 0.05, True), (3000, 0.02, False)])
def test_the_threshold_is_that_of_the_fallback_procedure(seed, n, risk, ties):
    generator = np.random.default_rng(seed)
    doubt = generator.random(n)
    wrong = generator.random(n) < 0.3 * doubt**3
    doubt = np.ceil(30 * doubt) / 30 if ties else doubt
    found = certified(torch.tensor(doubt), torch.tensor(wrong), risk=risk, confidence=0.9)
    expected = by_hand(doubt, wrong, risk, 0.9)
    assert (found is None) == (expected is None)
    if found is not None:
        within = doubt <= expected
        assert found[:3] == (expected, within.sum(), wrong[within].sum())


WORLDS = {
    "growing": lambda u: 0.4 * u**3,
    "at the risk itself": lambda u: 0 * u + 0.0501,
    "a step": lambda u: np.where(u < 0.4, 0.05, 0.3),
    "rising and falling": lambda u: np.where((10 * u).astype(int) % 2 == 0, 0.0, 0.105),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.slow
def test_the_risk_is_exceeded_no_more_often_than_was_allowed(world):
    rate, generator, runs, n, risk = WORLDS[world], np.random.default_rng(0), 300, 400, 0.05
    grid = (np.arange(20_000) + 0.5) / 20_000
    true_risk = np.cumsum(rate(grid)) / np.arange(1, 20_001)
    exceeded = answered = 0
    for _ in range(runs):
        u = generator.random(n)
        wrong = generator.random(n) < rate(u)
        found = certified(torch.tensor(u), torch.tensor(wrong), risk=risk, confidence=0.9)
        if found is not None:
            exceeded += true_risk[int(found[0] * 20_000)] > risk
            answered += 1
    # One world in a thousand would be beyond it by chance if the level were met exactly.
    assert exceeded <= binom.ppf(0.999, runs, 0.1)
    if world == "growing":
        assert answered > 0.9 * runs


def test_nothing_helps_where_the_surest_are_wrong():
    every = torch.arange(600.0), torch.ones(600, dtype=torch.bool)
    assert "too many of the surest" in remedy(*every, risk=0.05, confidence=0.95)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("n", [5, 19, 100])
def test_the_threshold_covers_a_new_score(n, level):
    """Among n + 1 scores each is as likely to be the new one: the share within is exact."""
    scores = torch.randn(n + 1, dtype=torch.float64)
    within = [bool(scores[i] <= threshold(torch.cat([scores[:i], scores[i + 1 :]]), level)) for i in range(n + 1)]
    share = sum(within) / (n + 1)
    assert share == 1.0 or level - 1e-9 <= share <= level + 1 / (n + 1) + 1e-9


def test_p_values_are_ranks():
    reference, scores = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 2.0, 3.0, 9.0])
    assert_close(p_values(reference, scores), torch.tensor([1.0, 0.8, 0.4, 0.2]))


def test_levels_are_probabilities():
    with pytest.raises(SettingError, match="level must lie"):
        threshold(torch.ones(3), 95)
