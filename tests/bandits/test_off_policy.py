"""Off-policy estimates: exact expectations over every possible log, coverage, and what is not to be trusted."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

import bayesadam as ba
from bayesadam.bandits import Agent, Estimate, Log, evaluate, make_agent, read_log, replay
from bayesadam.bandits.off_policy import mean, predicted_before, self_normalised
from bayesadam.errors import MatchError, OverlapWarning
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


def outcomes(logging: np.ndarray):
    """Every (context, arm, reward) and its probability."""
    for x, arm, reward in itertools.product(range(2), range(3), range(2)):
        paid = P_REWARD[x, arm] if reward else 1 - P_REWARD[x, arm]
        yield (x, arm, reward), P_CONTEXT[x] * logging[x, arm] * paid


def quietly(log: Log, of, **options: object):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverlapWarning)
        return evaluate(log, of, **options)


# --- expectations ---------------------------------------------------------------------------------------------------


def test_ips_and_doubly_robust_are_unbiased_over_every_log_of_an_agent_that_learns():
    # What the second decision is drawn from depends on the first one's arm and reward, and so does the model that it is
    # predicted by.
    total, found = 0.0, np.zeros(2)
    for first, one in outcomes(LOGGING):
        after = LOGGING[::-1] if first[2] else np.roll(LOGGING, first[1], axis=1)
        for second, other in outcomes(after):
            rows = [first, second]
            log = Log.of(
                contexts=[X[x] for x, _, _ in rows],
                arms=[arm for _, arm, _ in rows],
                probabilities=[LOGGING[first[0], first[1]], after[second[0], second[1]]],
                rewards=[float(reward) for _, _, reward in rows],
                n_arms=3,
            )
            estimates = quietly(log, policy)
            found += one * other * np.array([estimates.ips.value, estimates.doubly_robust.value])
            total += one * other
    assert total == approx(1)
    assert_close(found, TRUTH, atol=1e-12)


def drawn(n: int, seed: int, logging: np.ndarray = LOGGING) -> Log:
    rng = np.random.default_rng(seed)
    x = rng.choice(2, size=n, p=P_CONTEXT)
    arms = (rng.random(n)[:, None] > logging[x].cumsum(axis=1)).sum(axis=1)
    rewards = (rng.random(n) < P_REWARD[x, arms]).astype(float)
    return Log.of(contexts=X[x], arms=arms, probabilities=logging[x, arms], rewards=rewards, n_arms=3)


@pytest.mark.slow
def test_standard_errors_are_the_deviation_over_many_logs():
    every = [quietly(drawn(150, seed), policy) for seed in range(150)]
    for name in ("ips", "snips", "doubly_robust"):
        found = [getattr(one, name) for one in every]
        values, errors = np.array([(one.value, one.error) for one in found]).T
        assert errors.mean() == approx(values.std(), rel=0.2), name
        assert values.mean() == approx(TRUTH, abs=4 * values.std() / np.sqrt(150) + 0.003), name
        inside = [low <= TRUTH <= high for low, high in (one.interval(0.9) for one in found)]
        assert 0.82 < np.mean(inside) < 0.97, name


def test_intervals_and_errors_by_hand():
    rewards, weights = np.array([1.0, 0.0, 2.0]), np.array([0.5, 2.0, 1.0])
    ips = mean(weights * rewards)
    assert ips.value == approx(2.5 / 3)
    assert ips.error == approx(np.std([0.5, 0.0, 2.0], ddof=1) / np.sqrt(3))
    snips = self_normalised(rewards, weights)
    v = 2.5 / 3.5
    assert snips.value == approx(v)
    assert snips.error == approx(np.sqrt(0.25 * (1 - v) ** 2 + 4 * v**2 + (2 - v) ** 2) / 3.5)
    assert self_normalised(rewards + 5, weights).value == approx(v + 5)
    assert np.isnan(self_normalised(rewards, np.zeros(3)).value)
    assert np.isnan(mean(rewards[:1]).error)
    low, high = Estimate(1.0, 2.0).interval(0.95)
    assert (low, high) == approx((1 - 2 * 1.959964, 1 + 2 * 1.959964), rel=1e-6)


# --- the model ------------------------------------------------------------------------------------------------------


def test_a_decision_is_predicted_by_earlier_ones_alone():
    log = drawn(60, 1)
    before = predicted_before(log)
    assert (before[0] == 0).all()
    for row in range(1, 60):
        # By ridge regression of the rows of an arm so far, around the mean of all; refitted at every tenth more.
        fits = [end for end in range(1, row + 1) if close(before[row], _ridge(log, end, row), atol=1e-8)]
        assert fits
        assert max(fits) >= row / 1.12 - 1
    other = Log.of(
        contexts=log.contexts,
        arms=log.arms,
        probabilities=log.probabilities,
        rewards=np.where(np.arange(60) < 30, log.rewards, 99.0),
        n_arms=3,
    )
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


def test_rows_that_are_not_judged_serve_the_model():
    log = drawn(40, 3)
    told = np.where(np.arange(40) < 20, np.nan, log.probabilities)
    half = Log(**{**vars(log), "probabilities": told})
    found = quietly(half, policy)
    assert (found.decisions, found.left_out["without a probability"]) == (20, 20)
    np.testing.assert_array_equal(predicted_before(half), predicted_before(log))


# --- agents that learn ----------------------------------------------------------------------------------------------


def learning_log(seed: int, n: int = 300, step: int = 50) -> tuple[Log, np.ndarray]:
    """Of an agent whose probabilities choose, learnt from batch by batch; and what every arm pays in every context."""
    rng = np.random.default_rng(seed)
    contexts = rng.normal(size=(n, 2)).astype(np.float32)
    expected = 1 / (1 + np.exp(-contexts @ np.array([[1.0, -1.0, 0.2], [0.5, 0.5, -1.0]])))
    agent = make_agent("linear", 2, 3, seed=seed, epsilon=0.25)
    arms, shares, rewards = np.zeros(n, int), np.zeros(n), np.zeros(n)
    for first in range(0, n, step):
        part = slice(first, first + step)
        every = agent.probabilities(contexts[part], draws=50)
        arms[part] = (rng.random(step)[:, None] > every.cumsum(axis=1)).sum(axis=1).clip(max=2)
        shares[part] = every[np.arange(step), arms[part]]
        rewards[part] = rng.random(step) < expected[np.arange(first, first + step), arms[part]]
        agent.update(contexts[part], arms[part], rewards[part])
    return Log.of(contexts=contexts, arms=arms, probabilities=shares, rewards=rewards), expected


def contrary(contexts: np.ndarray) -> np.ndarray:
    scores = contexts @ np.array([[-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]])
    shares = np.exp(scores)
    return shares / shares.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_coverage_over_sixty_logs_of_an_agent_that_learns():
    rng = np.random.default_rng(99)
    many = rng.normal(size=(200_000, 2))
    expected = 1 / (1 + np.exp(-many @ np.array([[1.0, -1.0, 0.2], [0.5, 0.5, -1.0]])))
    truth = float((contrary(many) * expected).sum(axis=1).mean())
    found = [evaluate(learning_log(seed)[0], contrary) for seed in range(60)]
    for name in ("ips", "snips", "doubly_robust"):
        own = [getattr(one, name) for one in found]
        errors = np.array([one.value - truth for one in own])
        assert abs(errors.mean()) < 3.5 * errors.std() / np.sqrt(60), name
        inside = [low <= truth <= high for low, high in (one.interval(0.95) for one in own)]
        assert 0.85 <= np.mean(inside) <= 1.0, name
    spread = {name: np.std([getattr(one, name).value for one in found]) for name in ("ips", "doubly_robust")}
    assert spread["doubly_robust"] < spread["ips"]


def test_from_decide_to_evaluate(tmp_path):
    path, rng = tmp_path / "log.jsonl", np.random.default_rng(0)
    agent = make_agent("linear", 2, 3, epsilon=0.2)
    agent.log(path)
    for number, row in enumerate(rng.normal(size=(250, 2))):
        decision = agent.decide(row, draws=50)
        if number % 10:
            agent.reward(decision.id, float(row[0] > 0) if decision.arm == 0 else 0.5)
    agent.update([0.0, 0.0], 1, 0.5)
    found = evaluate(path, lambda contexts: np.where(contexts[:, 0] > 0, 0, 1))
    # Arm 0 where it pays 1, otherwise arm 1 for ½.
    low, high = found.doubly_robust.interval(0.999)
    assert low <= 0.75 <= high
    assert found.doubly_robust.error < 0.1
    assert found.decisions == 250 - 25 - 8
    assert found.left_out == {"without a reward": 25, "tried in turn": 8, "without a probability": 1}
    assert found.logged.value == approx(_judged(path).mean())
    text = str(found)
    for part in ("value", "95% interval", "as logged", "self-normalised IPS", "doubly robust"):
        assert part in text
    assert "217 decisions; left out: {'without a reward': 25, 'tried in turn': 8, 'without a probability': 1}" in text
    assert "not to be trusted" not in text


def _judged(path) -> np.ndarray:
    log = read_log(path)
    return log.rewards[np.isfinite(log.rewards) & np.isfinite(log.probabilities) & ~log.tried]


# --- policies -------------------------------------------------------------------------------------------------------


def test_an_agent_is_evaluated_as_it_is_and_learns_nothing():
    log, _ = learning_log(0)
    agent = make_agent("linear", 2, 3, seed=4, epsilon=0.3)
    agent.update(log.contexts[:50], log.arms[:50], log.rewards[:50])
    before = {name: tensor.clone() for name, tensor in agent._actor.state().items()}
    found = evaluate(log, agent)
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent._actor.state().items())
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
    # A function that does not know of it puts probability where there was no choice.
    with pytest.warns(
        OverlapWarning, match=r"16\.7% of the policy's probability is on arms that the log could not choose"
    ):
        blind = evaluate(log, lambda contexts: np.full((len(contexts), 3), 1 / 3))
    assert blind.impossible == approx(1 / 6)
    more, fewer, less = (make_agent("linear", 2, n, epsilon=1.0) for n in (5, 2, 3))
    assert_close(evaluate(log, more).ips.value, found.ips.value)
    less.remove_arm(2)
    for one in (fewer, less):
        assert (
            evaluate(log, one).ips == evaluate(log, lambda contexts: np.tile([0.5, 0.5, 0.0], (len(contexts), 1))).ips
        )


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


# --- doubts ---------------------------------------------------------------------------------------------------------


def uniform_log(n: int, seed: int = 0, **changes: object) -> Log:
    rng = np.random.default_rng(seed)
    arms = rng.integers(3, size=n)
    given = {
        "contexts": rng.normal(size=(n, 1)),
        "arms": arms,
        "probabilities": np.full(n, 1 / 3),
        "rewards": arms + 0.0,
    }
    return Log.of(**{**given, "n_arms": 3, **changes})


def first(contexts: np.ndarray) -> np.ndarray:
    return np.zeros(len(contexts), int)


def doubts(log: Log, of=first) -> str:
    with pytest.warns(OverlapWarning, match="off-policy estimates cannot be trusted") as caught:
        found = evaluate(log, of)
    assert caught[0].filename == __file__
    assert found.doubts
    assert all(f"not to be trusted: {doubt}" in str(found) for doubt in found.doubts)
    return "; ".join(found.doubts)


def test_a_log_with_overlap_raises_no_doubt():
    assert evaluate(uniform_log(300), first).doubts == ()


def test_a_small_effective_sample_size_is_doubtful():
    assert "the effective sample size is" in doubts(uniform_log(60))


def test_one_decision_with_most_of_the_weight_is_doubtful():
    probabilities = np.full(300, 1 / 3)
    log = uniform_log(300)
    probabilities[np.flatnonzero(log.arms == 0)[0]] = 0.01
    assert "one decision has 27% of all the weight" in doubts(uniform_log(300, probabilities=probabilities))


def test_arms_that_were_never_chosen_are_doubtful():
    log = Log.of(
        **{name: getattr(uniform_log(300), name) for name in ("contexts", "arms", "probabilities", "rewards")}, n_arms=4
    )
    found = doubts(log, lambda contexts: np.tile([0.5, 0.2, 0.2, 0.1], (len(contexts), 1)))
    assert "10.0% of the policy's probability is on arms that the log never chose" in found


def test_a_log_of_certain_choices_tells_of_no_other(tmp_path):
    agent = make_agent("greedy", 1, 2, hidden=(4,), initial_pulls=0)
    agent.log(tmp_path / "log.jsonl")
    for row in np.random.default_rng(0).normal(size=(40, 1)):
        agent.reward(agent.decide(row).id, 1.0)
    chosen = set(read_log(tmp_path / "log.jsonl").arms.tolist())
    with pytest.warns(OverlapWarning, match="of the policy's probability is on arms that the log could not choose"):
        found = evaluate(tmp_path / "log.jsonl", lambda contexts: np.full((len(contexts), 2), 0.5))
    assert chosen <= {0, 1}
    assert found.impossible == approx(0.5)


def test_wrong_probabilities_are_found_out():
    assert "the mean weight is 0.5" in doubts(uniform_log(900, probabilities=np.full(900, 0.6)))


def test_an_agent_that_learnt_from_the_log_is_doubtful(tmp_path):
    path, agent = tmp_path / "log.jsonl", make_agent("linear", 1, 2, epsilon=0.5)
    agent.log(path)
    for row in np.random.default_rng(0).normal(size=(80, 1)):
        agent.reward(agent.decide(row, draws=5).id, float(row[0]))
    other = make_agent("linear", 1, 2, epsilon=0.5)
    assert not evaluate(path, other).doubts
    agent.save(tmp_path / "agent")
    for one in (agent, replay(path), Agent.load(tmp_path / "agent")):
        with pytest.warns(ba.errors.OverlapWarning, match="learnt from this very log, which favours it"):
            evaluate(path, one)
