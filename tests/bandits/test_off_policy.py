"""Off-policy estimates: exact expectations over every possible log, coverage, and what is not to be trusted."""

import itertools
import warnings

import numpy as np
import pytest

import bayesadam as ba
from bayesadam.bandits import Agent, Estimate, Log, compare, evaluate, make_agent, read_log, replay
from bayesadam.bandits.off_policy import (
    bound_at_end,
    doubly_robust_terms,
    lower_bounds,
    mean,
    predicted_before,
    sequence_terms,
)
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from floats import approx, assert_close, close

# Two contexts, three arms, rewards of 0 and 1: everything can be enumerated.
X = np.array([[0.5], [-1.0]])
P_CONTEXT = np.array([0.3, 0.7])
P_REWARD = np.array([[0.2, 0.9, 0.5], [0.6, 0.1, 0.3]])
LOGGING = np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]])
POLICY = np.array([[0.1, 0.8, 0.1], [0.7, 0.0, 0.3]])
TRUTH = float(P_CONTEXT @ (POLICY * P_REWARD).sum(axis=1))


def policy(contexts: np.ndarray) -> np.ndarray:
    return POLICY[(contexts[:, 0] < 0).astype(int)]


def thirds(contexts: np.ndarray) -> np.ndarray:
    return np.full((len(contexts), 3), 1 / 3)


def every_log(full: bool = False):
    """Every log of two decisions and its probability; with the probabilities of all arms, or of the chosen ones.

    What the second decision is drawn from depends on the first one's arm and reward, and so does the model that it is
    predicted by.
    """

    def outcomes(logging: np.ndarray):
        for x, arm, reward in itertools.product(range(2), range(3), range(2)):
            paid = P_REWARD[x, arm] if reward else 1 - P_REWARD[x, arm]
            yield (x, arm, float(reward)), P_CONTEXT[x] * logging[x, arm] * paid

    for first, one in outcomes(LOGGING):
        after = LOGGING[::-1] if first[2] else np.roll(LOGGING, first[1], axis=1)
        for second, other in outcomes(after):
            x, arms, rewards = map(list, zip(first, second, strict=True))
            shares = np.stack([LOGGING[x[0]], after[x[1]]])
            shares = shares if full else shares[[0, 1], arms]
            yield Log.of(contexts=X[x], arms=arms, probabilities=shares, rewards=rewards, n_arms=3), one * other


def quietly(log: Log, of, **options: object):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        return evaluate(log, of, **options)


def test_ips_and_doubly_robust_are_unbiased_over_every_log_of_an_agent_that_learns():
    total, found = 0.0, np.zeros(2)
    for log, chance in every_log():
        estimates = quietly(log, policy)
        found += chance * np.array([estimates.ips.value, estimates.doubly_robust.value])
        total += chance
    assert total == approx(1)
    assert_close(found, TRUTH, atol=1e-12)


@pytest.mark.parametrize("against", [0.0, 1 / 3], ids=["one", "two"])
@pytest.mark.parametrize("full", [True, False], ids=["all arms", "chosen arm"])
@pytest.mark.parametrize("depth", [0.5, 4.0])
@pytest.mark.slow
def test_terms_of_a_sequence_have_the_value_as_their_mean_over_every_log(depth, full, against):
    # With a small depth many predictions are cut off.
    found, least = np.zeros((2, 2)), np.inf
    for log, chance in every_log(full):
        one = quietly(log, policy)
        pair = one.shares, np.full((2, 3), against)
        terms = np.array([sequence_terms(log, one.predicted, *both, (0, 1), depth) for both in (pair, pair[::-1])])
        found, least = found + chance * terms, min(least, terms.min())
    rival = against * float(P_CONTEXT @ P_REWARD.sum(axis=1))
    means = np.array([TRUTH - rival + 3 * against, rival - TRUTH + 1])
    assert_close(found, np.stack([means, means], axis=1), atol=1e-12)
    assert least >= -depth * full - 1e-12


def test_one_reward_has_no_error_and_no_interval():
    assert np.isnan(mean(np.ones(1)).error)
    assert np.isnan(Estimate(1.0, 2.0).interval(0.95)).all()


def drawn(n: int, seed: int, logging: np.ndarray = LOGGING) -> Log:
    rng = np.random.default_rng(seed)
    x = rng.choice(2, size=n, p=P_CONTEXT)
    arms = (rng.random(n)[:, None] > logging[x].cumsum(axis=1)).sum(axis=1)
    rewards = (rng.random(n) < P_REWARD[x, arms]).astype(float)
    return Log.of(contexts=X[x], arms=arms, probabilities=logging[x, arms], rewards=rewards, n_arms=3)


@pytest.mark.parametrize("p", [0.03, 0.2, 0.6])
def test_the_bound_at_the_end_holds_over_every_path(p):
    # Two rows with the mean 10 p: the second has a control variate, of depth 3.
    risk, missed, total = 0.1, 0.0, 0.0
    for path in itertools.product((0, 1), repeat=9):
        won = np.array(path, float)
        chance = np.prod(np.where(won > 0, p, 1 - p))
        terms = np.stack([10 * won, 10 * won - 3 * (won - p) / (1 - p)])
        missed += chance * (bound_at_end(terms, np.array([0.0, 3.0]), risk) > 10 * p)
        total += chance
    assert total == approx(1)
    assert missed <= risk


def test_the_bound_at_the_end_is_sharp():
    terms = np.random.default_rng(0).integers(2, size=(1, 2000)).astype(float)
    bound = bound_at_end(terms, np.zeros(1), 0.025)
    reach = 1.96 * terms.std() / np.sqrt(2000)
    assert 0.9 * reach < terms.mean() - bound < 1.5 * reach
    assert bound > lower_bounds(terms[0], 0.025)[-1]


def rare_log(seed: int, n: int, rate: float, *, draws: int = 0) -> Log:
    """Of clicks; with draws, of a learner whose probabilities are counted from so few that most arms have none."""
    rng = np.random.default_rng(seed)
    chances = np.tile([0.7, 0.2, 0.06, 0.04], (n, 1))
    if draws:
        chances = rng.multinomial(draws, chances[0], size=n) / draws
    arms = (rng.random(n)[:, None] > chances.cumsum(axis=1)).sum(axis=1).clip(max=3)
    return Log.of(contexts=rng.normal(size=(n, 1)), arms=arms, probabilities=chances, rewards=rng.random(n) < rate)


@pytest.mark.parametrize("draws", [0, 10])
@pytest.mark.parametrize(("n", "rate"), [(50, 0.07), (300, 0.01), (300, 0.07)])
def test_intervals_of_rare_rewards_hold(n, rate, draws):

    def rare(contexts: np.ndarray) -> np.ndarray:
        return np.tile([0.0, 0.1, 0.4, 0.5], (len(contexts), 1))

    missed = none = normal = 0
    for seed in range(40):
        found = quietly(rare_log(seed, n, rate, draws=draws), rare)
        low, high = found.doubly_robust.interval(0.95)
        assert found.ips.interval(0.95) == (low, high) or np.isnan(low)
        none += np.isnan(low)
        missed += rate < low or rate > high
        normal += abs(found.doubly_robust.value - rate) > 1.96 * found.doubly_robust.error
        assert np.isnan(low) == (found.reward_range is None)
        assert found.reward_range or found.doubts
    assert missed <= 5
    assert normal >= 6
    assert none < 20


def test_few_rewards_that_differ_are_doubted():
    found = quietly(rare_log(0, 3000, 0.07), lambda contexts: np.full(len(contexts), 3))
    assert found.effective_size > 30
    assert not any("differ from the usual ones" in doubt for doubt in found.doubts)
    few = quietly(rare_log(0, 1000, 0.07), lambda contexts: np.full(len(contexts), 3))
    assert few.effective_size > 30
    assert any("effective rewards differ from the usual ones, below 4" in doubt for doubt in few.doubts)
    # None of the policy's own, where they are rare in the log.
    none = Log.of(contexts=np.zeros((400, 1)), arms=[0, 1] * 200, probabilities=[0.5] * 400, rewards=[0] * 399 + [1])
    assert "only about 0.5 effective rewards differ" in doubts(none)
    # A few large ones.
    rng = np.random.default_rng(0)
    large = uniform_log(600, rewards=rng.normal(size=600) + 1000 * (np.arange(600) % 300 == 0), n_arms=3)
    assert "effective rewards differ" in doubts(large, thirds)


def test_a_log_of_clicks_alone_has_no_interval():
    log = uniform_log(800)
    clicked = np.random.default_rng(1).random(800) < 0.05
    alone = Log(**{**vars(log), "rewards": np.where(clicked, 1.0, np.nan)})
    told = doubts(alone)
    missing = int((~clicked).sum())
    assert f"{missing} of 800 decisions have no reward, so that there is no interval: log 0 for what paid" in told
    assert "all rewards are 1: there is no interval without reward_range=(low, high)" in told
    for options in ({}, {"reward_range": (0, 1)}):
        found = quietly(alone, first, **options)
        assert np.isnan(found.doubly_robust.interval(0.95)).all()
        assert np.isnan(found.logged.interval(0.95)).all()
        assert np.isnan(found.sequence(0.95, reward_range=(0, 1)).lower).all()
        assert "none" in str(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        both = compare(alone, first, lambda contexts: np.ones(len(contexts), int), reward_range=(0, 1))
    assert np.isnan(both.difference.interval(0.95)).all()
    assert not (both.sequence(0.95, reward_range=(0, 1)).lower > 0).any()
    # Also where most are clicks.
    most = Log(**{**vars(log), "rewards": np.where(clicked, np.nan, 1.0)})
    assert quietly(most, first, reward_range=(0, 1)).reward_range is None
    # A tenth of the rewards that waits does not matter.
    assert quietly(Log(**{**vars(log), "rewards": np.where(clicked, np.nan, log.rewards)}), first).reward_range


def test_constant_rewards_have_an_interval_within_their_range_alone():
    log = uniform_log(600, rewards=np.ones(600))
    assert "all rewards are 1" in doubts(log)
    assert np.isnan(quietly(log, first).doubly_robust.interval(0.95)).all()
    low, high = evaluate(log, first, reward_range=(0, 1)).doubly_robust.interval(0.95)
    assert 0.9 < low < 1 == high
    low, high = evaluate(log, first, reward_range=(0, 4)).doubly_robust.interval(0.95)
    assert low < 1 < high < 2
    with pytest.raises(MatchError, match=r"reward_range must be \(low, high\) around all rewards, here 1 to 1"):
        evaluate(log, first, reward_range=(2, 3))


def test_a_decision_is_predicted_by_earlier_ones_alone():
    log = drawn(60, 1)
    before = predicted_before(log)
    assert (before[0] == 0).all()
    for row in range(1, 60):
        # By ridge regression of the rows of an arm so far, around the mean of all; refitted at every tenth more.
        ends = range(max(1, int(np.ceil(row / 1.12 - 1))), row + 1)
        assert any(close(before[row], _ridge(log, end, row), atol=1e-8) for end in ends)
    other = Log(**{**vars(log), "rewards": np.where(np.arange(60) < 30, log.rewards, 99.0)})
    np.testing.assert_array_equal(predicted_before(other)[:31], before[:31])
    assert not close(predicted_before(other)[40:], before[40:])


def _ridge(log: Log, end: int, row: int) -> np.ndarray:
    shift = log.rewards[:end].mean()
    x = np.column_stack([log.contexts.astype(float), np.ones(len(log))])
    found = []
    for arm in range(3):
        mine = np.flatnonzero(log.arms[:end] == arm)
        gram = x[mine].T @ x[mine] + 0.25 * np.eye(2)
        found.append(x[row] @ np.linalg.solve(gram, x[mine].T @ (log.rewards[mine] - shift)) + shift)
    return np.array(found)


def test_a_window_judges_its_decisions_by_a_model_of_all_before_them():
    log = drawn(90, 5)
    whole, found = quietly(log, policy), quietly(log, policy, since=30, until=70)
    assert (found.decisions, found.left_out["without a reward"]) == (40, 0)
    np.testing.assert_array_equal(found.log.ids, np.arange(30, 70))
    np.testing.assert_array_equal(found.predicted, predicted_before(log)[30:70])
    weighted = whole.shares[range(90), log.arms] / log.probabilities * log.rewards
    robust = doubly_robust_terms(whole.log, whole.predicted, whole.shares)
    for one, terms in ((found.ips, weighted), (found.doubly_robust, robust)):
        assert one.value == approx(terms[30:70].mean())
        assert one.error == approx(terms[30:70].std(ddof=1) / np.sqrt(40))
    parts = [quietly(log, policy, until=30), quietly(log, policy, since=30)]
    assert [one.decisions for one in parts] == [30, 60]
    assert whole.ips.value == approx((30 * parts[0].ips.value + 60 * parts[1].ips.value) / 90)


def test_windows_of_an_agents_log_are_by_decision(tmp_path):
    agent, rng = make_agent("linear", 1, 2, epsilon=0.5, initial_pulls=1), np.random.default_rng(0)
    agent.log(tmp_path / "log.jsonl")
    agent.update([0.0], 0, 0.0)
    for row in rng.normal(size=(20, 1)):
        agent.reward(agent.decide(row).id, 1.0)
        agent.update(row, 0, 0.0)

    def window(**options: int) -> tuple[int, int, int]:
        found = quietly(tmp_path / "log.jsonl", lambda contexts: np.full((len(contexts), 2), 0.5), **options)
        return found.decisions, found.left_out["tried in turn"], found.left_out["without a probability"]

    # Two decisions tried in turn; an update before all, and one after each.
    assert window() == (18, 2, 21)
    assert window(since=0) == (18, 2, 20)
    assert window(since=5) == (15, 0, 15)
    assert window(since=5, until=9) == (4, 0, 4)
    assert window(until=9) == (7, 2, 10)


@pytest.mark.parametrize("given", [-1, 2.0, "2026-01-01"])
def test_windows_are_whole_numbers(given):
    for name in ("since", "until"):
        with pytest.raises(SettingError, match=f"{name} must be a whole number .* logs have no times"):
            evaluate(drawn(50, 0), policy, **{name: given})


def test_bounds_are_where_the_bets_have_won_enough():
    terms, risk, bets = np.random.default_rng(0).exponential(size=40), 0.05, 4.0 ** np.arange(-7, 2)
    found = lower_bounds(terms, risk)

    def wealth(n: int, value: float) -> float:
        return float(np.mean([np.prod([(1 + bet * term) / (1 + bet * value) for term in terms[:n]]) for bet in bets]))

    for n in range(1, 41):
        if found[n - 1] == 0:
            assert wealth(n, 0.0) < 1 / risk
        else:
            assert wealth(n, found[n - 1]) == approx(1 / risk, rel=1e-5)
    assert 0 < found[-1] < terms.mean()
    assert found[0] == 0


@pytest.mark.parametrize("risk", [0.1, 0.3])
def test_bounds_hold_over_every_path_of_terms_whose_means_change(risk):
    # A term is 0 or large; how probable and how large depends on the one before.
    missed = total = 0.0
    for path in itertools.product((0, 1), repeat=9):
        chance, terms, means, before = 1.0, [], [], 0
        for won in path:
            p, size = (0.3, 4.0) if before else (0.05, 40.0)
            chance *= p if won else 1 - p
            terms.append(size * won)
            means.append(p * size)
            before = won
        average = np.cumsum(means) / np.arange(1, 10)
        missed += chance * bool((lower_bounds(np.array(terms), risk) > average).any())
        total += chance
    assert total == approx(1)
    assert 0 < missed <= risk


def test_a_later_look_extends_an_earlier_one():
    log, _ = learning_log(3)
    whole, early = (evaluate(log, contrary, until=until) for until in (None, 150))
    found, before = (one.sequence(0.9, reward_range=(0, 1)) for one in (whole, early))
    np.testing.assert_array_equal(found.decisions, log.ids)
    assert_close(found.lower[:150], before.lower)
    assert_close(found.upper[:150], before.upper)
    assert ((found.lower >= 0) & (found.lower <= found.upper) & (found.upper <= 1)).all()
    low, high = whole.doubly_robust.interval(0.9)
    assert found.lower[-1] < low < high < found.upper[-1]


def test_sequences_scale_with_the_rewards_and_their_range():
    log = drawn(80, 2)
    large = Log(**{**vars(log), "rewards": 10 * log.rewards})
    one, ten = (quietly(each, policy).sequence(0.9, reward_range=(0, top)) for each, top in ((log, 1), (large, 10)))
    assert_close(ten.lower, 10 * one.lower)
    assert_close(ten.upper, 10 * one.upper)
    lost = Log(**{**vars(log), "rewards": log.rewards - 5})
    assert_close(quietly(lost, policy).sequence(0.9, reward_range=(-5, -4)).lower, one.lower - 5, atol=0.1)


def test_sequences_of_rewards_outside_their_range_are_refused():
    found = quietly(drawn(80, 2), policy)
    for given in ((0, 0.5), (0.5, 1), (1, 0), (0, np.nan), (-np.inf, 1)):
        with pytest.raises(MatchError, match=r"must be \(low, high\) around all rewards, here 0 to 1; got"):
            found.sequence(0.95, reward_range=given)
    with pytest.raises(SettingError, match="level must lie between 0 and 1"):
        found.sequence(95, reward_range=(0, 1))


def test_two_policies_are_compared_decision_by_decision():
    log, _ = learning_log(1)
    found = compare(log, contrary, thirds, since=20)
    one, other = (doubly_robust_terms(each.log, each.predicted, each.shares) for each in (found.first, found.second))
    assert found.difference.value == approx(found.first.doubly_robust.value - found.second.doubly_robust.value)
    assert found.difference.error == approx(np.std(one - other, ddof=1) / np.sqrt(280))
    assert found.first.doubly_robust == evaluate(log, contrary, since=20).doubly_robust
    text = str(found)
    for part in ("first", "second", "difference", "95% interval"):
        assert part in text
    assert "not to be trusted" not in text
    low, high = found.difference.interval(0.9)
    assert low < found.difference.value < high
    least, most = found.first.logged.interval(0.9)
    assert least < log.rewards[20:].mean() < most
    swapped = compare(log, thirds, contrary, since=20)
    assert swapped.difference.interval(0.9) == approx((-high, -low))
    back, there = (each.sequence(0.9, reward_range=(0, 1)) for each in (swapped, found))
    assert_close(back.lower, -there.upper)
    assert_close(back.upper, -there.lower)


def test_a_policy_differs_from_itself_by_nothing():
    rewards = np.random.default_rng(1).integers(2, size=2000).astype(float)
    found = compare(uniform_log(2000, probabilities=np.full((2000, 3), 1 / 3), rewards=rewards), first, first)
    assert (found.difference.value, found.difference.error) == (0, 0)
    low, high = found.difference.interval(0.9)
    assert low < 0 < high
    of_both, of_one = (one.sequence(0.95, reward_range=(0, 1)) for one in (found, found.first))
    assert (of_both.lower < 0).all()
    assert (of_both.upper > 0).all()
    assert of_both.upper[-1] - of_both.lower[-1] < (of_one.upper[-1] - of_one.lower[-1]) / 2


def learning_log(seed: int, n: int = 300, step: int = 50) -> tuple[Log, np.ndarray]:
    """Of an agent whose probabilities choose, learnt from batch by batch; and what every arm pays in every context."""
    rng = np.random.default_rng(seed)
    contexts = rng.normal(size=(n, 2)).astype(np.float32)
    expected = 1 / (1 + np.exp(-contexts @ np.array([[1.0, -1.0, 0.2], [0.5, 0.5, -1.0]])))
    agent = make_agent("linear", 2, 3, seed=seed, epsilon=0.5)
    arms, shares, rewards = np.zeros(n, int), np.zeros(n), np.zeros(n)
    for first in range(0, n, step):
        part = slice(first, first + step)
        every = agent.probabilities(contexts[part])
        arms[part] = (rng.random(step)[:, None] > every.cumsum(axis=1)).sum(axis=1).clip(max=2)
        shares[part] = every[np.arange(step), arms[part]]
        rewards[part] = rng.random(step) < expected[np.arange(first, first + step), arms[part]]
        agent.update(contexts[part], arms[part], rewards[part])
    return Log.of(contexts=contexts, arms=arms, probabilities=shares, rewards=rewards), expected


def contrary(contexts: np.ndarray) -> np.ndarray:
    scores = contexts @ np.array([[-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]])
    shares = np.exp(scores)
    return shares / shares.sum(axis=1, keepdims=True)


def test_from_decide_to_evaluate(tmp_path):
    path, rng = tmp_path / "log.jsonl", np.random.default_rng(0)
    agent = make_agent("linear", 2, 3, epsilon=0.2)
    agent.log(path)
    for number, row in enumerate(rng.normal(size=(250, 2))):
        decision = agent.decide(row)
        if number % 10:
            agent.reward(decision.id, float(row[0] > 0) if decision.arm == 0 else 0.5)
    agent.update([0.0, 0.0], 1, 0.5)
    found, log = evaluate(path, lambda contexts: np.where(contexts[:, 0] > 0, 0, 1)), read_log(path)
    judged = log.rewards[np.isfinite(log.rewards) & np.isfinite(log.probabilities) & ~log.tried]
    # Arm 0 where it pays 1, otherwise arm 1 for ½.
    low, high = found.doubly_robust.interval(0.999)
    assert low <= 0.75 <= high
    assert found.doubly_robust.error < 0.1
    assert found.decisions == 250 - 25 - 2
    assert found.left_out == {"without a reward": 25, "tried in turn": 2, "without a probability": 1}
    assert found.logged.value == approx(judged.mean())
    text = str(found)
    for part in ("value", "95% interval", "as logged", "doubly robust"):
        assert part in text
    assert "223 decisions; left out: {'without a reward': 25, 'tried in turn': 2, 'without a probability': 1}" in text
    assert "not to be trusted" not in text


def test_an_agent_is_evaluated_as_it_is_and_learns_nothing():
    log, _ = learning_log(0)
    agent = make_agent("linear", 2, 3, seed=4, epsilon=0.3)
    agent.update(log.contexts[:50], log.arms[:50], log.rewards[:50])
    before = {name: array.copy() for name, array in agent._learner.state().items()}
    found = evaluate(log, agent)
    assert all(np.array_equal(array, before[name]) for name, array in agent._learner.state().items())
    expected = evaluate(log, lambda contexts: agent.probabilities(contexts))
    assert found.ips == expected.ips
    assert found.doubly_robust == expected.doubly_robust
    assert agent.pending == ()


def test_an_agent_chooses_among_the_arms_that_were_on_offer():
    rng = np.random.default_rng(0)
    allowed = np.ones((200, 3), bool)
    allowed[::2, 2] = False
    arms = np.where(allowed[:, 2], rng.integers(3, size=200), rng.integers(2, size=200))
    log = Log.of(
        contexts=rng.normal(size=(200, 2)),
        arms=arms,
        probabilities=1 / allowed.sum(axis=1),
        rewards=arms.astype(float),
        allowed=allowed,
    )
    found = evaluate(log, make_agent("linear", 2, 3, initial_pulls=0, epsilon=1.0))
    assert found.impossible == 0
    assert_close(found.ips.value, found.logged.value)
    assert found.effective_size == approx(200)
    renormalised = evaluate(log, thirds)
    assert (renormalised.impossible, renormalised.doubts) == (0, ())
    assert_close(renormalised.shares, allowed / allowed.sum(axis=1, keepdims=True))
    assert_close(renormalised.ips.value, found.ips.value)
    more, fewer, less = (make_agent("linear", 2, n, epsilon=1.0) for n in (5, 2, 3))
    assert_close(evaluate(log, more).ips.value, found.ips.value)
    less.remove_arm(2)
    for one in (fewer, less):
        halves = evaluate(log, lambda contexts: np.tile([0.5, 0.5, 0.0], (len(contexts), 1)))
        assert evaluate(log, one).ips == halves.ips
    with pytest.warns(BayesAdamWarning, match="in 100 decisions the policy chooses none of the arms that were on"):
        stuck = evaluate(log, lambda contexts: np.full(len(contexts), 2))
    assert stuck.impossible == approx(0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda n: np.full(n, 3), "over the arms that the log has"),
        (lambda n: np.full(n, -1), "over the arms that the log has"),
        (lambda n: np.full(n, 0.5), r"gives probabilities of shape \(50, 3\), or 50 arms; got \(50,\)"),
        (lambda n: np.zeros((n, 2)), r"got \(50, 2\)"),
        (lambda n: np.full((n, 3), 0.4), "at least 0 and sum to 1"),
        (lambda n: np.tile([1.5, -0.5, 0.0], (n, 1)), "at least 0"),
        (lambda n: np.full((n, 3), np.nan), "at least 0"),
    ],
)
def test_bad_policies_are_named(given, message):
    with pytest.raises(MatchError, match=message):
        evaluate(drawn(50, 0), lambda contexts: given(len(contexts)))


def test_a_log_without_rewards_says_so(tmp_path):
    agent = make_agent("linear", 1, 2, initial_pulls=1)
    agent.log(tmp_path / "log.jsonl")
    for number in range(5):
        agent.decide([float(number)])
    agent.reward(0, 1.0)
    with pytest.raises(MatchError, match=r"has 0 decisions .* left out: .*'without a reward': 4"):
        evaluate(tmp_path / "log.jsonl", policy)


def uniform_log(n: int, seed: int = 0, **changes: object) -> Log:
    rng = np.random.default_rng(seed)
    arms = rng.integers(3, size=n)
    plain = {"contexts": rng.normal(size=(n, 1)), "arms": arms, "probabilities": np.full(n, 1 / 3), "n_arms": 3}
    return Log.of(**{**plain, "rewards": arms + 0.0, **changes})


def first(contexts: np.ndarray) -> np.ndarray:
    return np.zeros(len(contexts), int)


def doubts(log: Log, of=first) -> str:
    with pytest.warns(BayesAdamWarning, match="off-policy estimates cannot be trusted") as caught:
        found = evaluate(log, of)
    assert caught[0].filename == __file__
    assert found.doubts
    assert all(f"not to be trusted: {doubt}" in str(found) for doubt in found.doubts)
    return "; ".join(found.doubts)


def test_doubts_say_why():
    assert evaluate(uniform_log(300), first).doubts == ()
    assert "the effective sample size is" in doubts(uniform_log(60))
    assert "the mean weight is 0.5" in doubts(uniform_log(900, probabilities=np.full(900, 0.6)))
    rare = np.full(300, 1 / 3)
    rare[np.flatnonzero(uniform_log(300).arms == 0)[0]] = 0.01
    assert "one decision has 27% of all the weight" in doubts(uniform_log(300, probabilities=rare))
    never = doubts(uniform_log(300, n_arms=4), lambda contexts: np.tile([0.5, 0.2, 0.2, 0.1], (len(contexts), 1)))
    assert "10.0% of the policy's probability is on arms that the log never chose" in never
    with pytest.warns(BayesAdamWarning):
        both = compare(uniform_log(60), first, thirds)
    assert "not to be trusted: first: the effective sample size is" in str(both)
    assert "second: " not in str(both)


def test_an_agent_that_learnt_from_the_log_is_doubtful(tmp_path):
    path, agent = tmp_path / "log.jsonl", make_agent("linear", 1, 2, epsilon=0.5)
    agent.log(path)
    for row in np.random.default_rng(0).normal(size=(80, 1)):
        agent.reward(agent.decide(row).id, float(row[0]))
    other = make_agent("linear", 1, 2, epsilon=0.5)
    assert not evaluate(path, other).doubts
    agent.save(tmp_path / "agent")
    for one in (agent, replay(path), Agent.load(tmp_path / "agent")):
        with pytest.warns(ba.errors.BayesAdamWarning, match="learnt from this very log, which favours it"):
            evaluate(path, one)
