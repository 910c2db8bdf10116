"""With which probability an arm is chosen: closed forms, quadrature, and how often it is chosen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bayesadam.bandits import PAPER_AGENTS, Agent, agent_settings, make_agent
from bayesadam.engine.network import forward
from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError, SettingError
from floats import approx, assert_close

SMALL = {"hidden": (8,), "batch_size": 16, "train_every": 5, "train_steps": 4}
HERE = np.array([0.5, -0.3, 0.2])


def trained(name: str, n_arms: int = 3, rounds: int = 30, **changes: object) -> Agent:
    known = agent_settings(name).names()
    own = {key: value for key, value in SMALL.items() if key in known} | changes
    agent = Agent(name, agent_settings(name, **{"initial_pulls": 0, **own}), 3, n_arms, 4)
    rows = np.random.default_rng(2).normal(size=(rounds, 3))
    agent.update(rows, np.arange(rounds) % n_arms, rows[np.arange(rounds), np.arange(rounds) % 3])
    return agent


def state_of(agent: Agent) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in agent._actor.state().items()}


# --- against closed forms -------------------------------------------------------------------------------------------


def test_linear_against_quadrature_over_the_students():
    agent = trained("linear")
    posterior = agent._actor.linear_posterior()
    x = np.append(HERE.astype(np.float32).astype(np.float64), 1.0)
    scores = []
    for arm in range(3):
        a, b = float(posterior.shape[0, arm]), float(posterior.scale[0, arm])
        scale = math.sqrt(b / a * x @ posterior.covariance[0, arm].numpy() @ x)
        scores.append(stats.t(2 * a, float(x @ posterior.mean[0, arm, 0].numpy()), scale))
    n = 40_000
    found = agent.probabilities([HERE], draws=n)[0]
    grid = np.linspace(-8, 8, 4001)
    for arm, own in enumerate(scores):
        others = [score.cdf(grid) for number, score in enumerate(scores) if number != arm]
        expected = integrate.simpson(own.pdf(grid) * np.prod(others, axis=0), x=grid)
        assert 0.01 < expected < 0.99
        assert found[arm] == approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))


@pytest.mark.parametrize("name", ["badam", "badam-map", "vadam", "bbb", "ivon"])
def test_gaussian_weights_of_a_linear_network_against_the_normal_distribution(name):
    agent = trained(name, n_arms=2, hidden=(), **({"dropout": 0.0} if name.startswith("badam") else {}))
    mean, variance = agent._actor.gaussian()
    # f = W x + b, with the weights of one arm after those of the other, then the biases.
    x = torch.tensor(HERE, dtype=torch.float32).double()
    (m, v) = ((part[0, :6].double().view(2, 3), part[0, 6:].double()) for part in (mean, variance))
    gap = (m[0][0] - m[0][1]) @ x + m[1][0] - m[1][1]
    width = (v[0].sum(dim=0) @ x.square() + v[1].sum()).sqrt()
    expected = float(stats.norm.cdf(float(gap / width)))
    n = 40_000
    found = agent.probabilities([HERE], draws=n)[0, 0]
    assert found == approx(expected, abs=4 * math.sqrt(max(expected * (1 - expected), 1e-6) / n))


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_agents_with_finitely_many_scores_are_exact(epsilon):
    rows = np.random.default_rng(0).normal(size=(20, 3))
    x = torch.from_numpy(rows.astype(np.float32)).unsqueeze(0)
    for name, members in (("greedy", 1), ("bootstrap", 4)):
        agent = trained(name, epsilon=epsilon, **({"members": members} if members > 1 else {}))
        learner = agent._actor
        found = agent.probabilities(rows, draws=1)
        every = forward(learner.network, learner.params, x.repeat(members, 1, 1))
        expected = np.full((20, 3), epsilon / 3)
        for member in every.argmax(dim=2).numpy():
            expected[np.arange(20), member] += (1 - epsilon) / members
        assert_close(found, expected, atol=1e-12)
    assert_close(trained("uniform", epsilon=epsilon).probabilities(rows), 1 / 3, atol=1e-12)


# --- against choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "epsilon"), [*((name, 0.0) for name in PAPER_AGENTS), ("linear", 0.4), ("bootstrap", 0.4)]
)
def test_arms_are_chosen_as_often_as_their_probabilities_say(name, epsilon):
    agent = trained(name, n_arms=4, epsilon=epsilon)
    n = 3000
    for arms in (None, (0, 2, 3)):
        chosen = agent.act(np.tile(HERE, (n, 1)), arms=arms)
        allowed = None if arms is None else np.isin(np.arange(4), arms)[None]
        found = agent.probabilities([HERE], allowed=allowed, draws=n)[0]
        shares = np.bincount(chosen, minlength=4) / n
        assert found.sum() == approx(1)
        error = np.sqrt(2 * found * (1 - found) / n) + 1e-9
        assert (np.abs(shares - found) < 5 * error + 3 / n).all()
        if arms is not None:
            assert found[1] == 0
        elif epsilon:
            assert (found >= epsilon / 4).all()


def decided(agent: Agent, draws: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Arms and probabilities of so many decisions, all at once."""
    x, learner = torch.tensor(HERE, dtype=torch.float32).expand(1, n, 3), agent._actor
    drawn = learner.drawn(x)
    arms = learner.explored(drawn).argmax(dim=2)
    allowed, streams = torch.ones(agent.n_arms, dtype=torch.bool), Streams([8], "p")
    found = learner.choice_probabilities(x, allowed, draws=draws, streams=streams, drawn=drawn)
    return arms[0].numpy(), found.gather(2, arms.unsqueeze(2))[0, :, 0].numpy()


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_inverse_probabilities_of_decisions_miss_by_what_the_formula_says(epsilon):
    # P E[1/share | chosen] = 1 − (1 − P)^(M+1), with few draws so that it shows; exploration keeps every arm possible.
    agent = trained("linear", epsilon=epsilon)
    exact = agent.probabilities([HERE], draws=200_000)[0]
    draws, n = 3, 20_000
    arms, probabilities = decided(agent, draws, n)
    for arm in range(3):
        terms = np.where(arms == arm, 1 / probabilities, 0.0)
        expected = 1.0 if epsilon else 1 - (1 - exact[arm]) ** (draws + 1)
        assert terms.mean() == approx(expected, abs=4 * terms.std() / math.sqrt(n))
    if not epsilon:
        assert 1 - (1 - exact.min()) ** (draws + 1) < 0.8
        assert set(probabilities) == {0.25, 0.5, 0.75, 1.0}


def test_given_the_choice_the_share_is_as_large_as_the_formula_says():
    agent = trained("linear")
    exact = agent.probabilities([HERE], draws=200_000)[0]
    draws = 9
    arms, probabilities = decided(agent, draws, 20_000)
    for arm in range(3):
        shares = probabilities[arms == arm]
        expected = exact[arm] + (1 - exact[arm]) / (draws + 1)
        error = math.sqrt(draws * exact[arm] * (1 - exact[arm])) / (draws + 1)
        assert shares.mean() == approx(expected, abs=4 * error / math.sqrt(len(shares)))
        assert shares.std() == approx(error, rel=0.1)


def test_a_decision_has_the_share_of_its_arm_with_the_draw_that_chose_it():
    agent, twin = trained("linear"), trained("linear")
    for number in range(30):
        decision = agent.decide(HERE, draws=4)
        count = decision.probability * 5
        assert count == approx(round(count))
        assert count >= 1
        assert decision.arm == twin.act(HERE), number


@pytest.mark.parametrize("name", PAPER_AGENTS)
def test_probabilities_change_no_choice(name):
    plain, asked = trained(name, epsilon=0.1), trained(name, epsilon=0.1)
    rows = np.random.default_rng(5).normal(size=(8, 3))
    expected = [plain.act(row) for row in rows]
    found = []
    for number, row in enumerate(rows):
        before = state_of(asked)
        asked.probabilities(rows, draws=3)
        assert all(torch.equal(tensor, before[key]) for key, tensor in state_of(asked).items())
        found.append(asked.decide(row, draws=1 + number).arm)
    assert found == expected


# --- in turn, arms, bad input ---------------------------------------------------------------------------------------


def test_an_arm_that_is_tried_in_turn_is_certain():
    agent = make_agent("linear", 3, 3, initial_pulls=2)
    first = [agent.decide(HERE) for _ in range(6)]
    assert [(decision.arm, decision.probability) for decision in first] == [(arm, 1.0) for arm in (0, 1, 2, 0, 1, 2)]
    assert 0 < agent.decide(HERE).probability < 1
    # Asked for, they are what follows.
    assert (make_agent("linear", 3, 3, initial_pulls=2).probabilities([HERE]) > 0).all()


def test_the_only_arm_on_offer_is_certain():
    agent = trained("badam")
    assert agent.decide(HERE, arms=[1]).probability == 1.0
    agent.remove_arm(0)
    assert agent.decide(HERE, arms=[2]).probability == 1.0
    assert agent.probabilities([HERE])[0, 0] == 0


def test_every_context_may_have_arms_of_its_own():
    agent = trained("linear", n_arms=4)
    rows = np.random.default_rng(0).normal(size=(3, 3))
    mask = np.array([[True, True, False, False], [False, False, True, False], [True, True, True, True]])
    found = agent.probabilities(rows, allowed=mask, draws=50)
    assert_close(found.sum(axis=1), 1)
    assert (found[~mask] == 0).all()
    np.testing.assert_array_equal(found[1], [0, 0, 1, 0])


def test_many_contexts_are_as_one_by_one_up_to_their_draws():
    agent = trained("badam", n_per_round=1.0)
    rows = np.tile(HERE, (300, 1))
    found = agent.probabilities(rows, draws=200)
    assert_close(found.mean(axis=0), agent.probabilities([HERE], draws=50_000)[0], atol=0.015)
    assert not (found[0] == found[1]).all()
    np.testing.assert_array_equal(found, agent.probabilities(rows, draws=200))


@pytest.mark.parametrize("draws", [0, -1, 1.5, True])
def test_draws_must_be_a_positive_number(draws):
    agent = trained("linear")
    for ask in (lambda: agent.decide(HERE, draws=draws), lambda: agent.probabilities([HERE], draws=draws)):
        with pytest.raises(SettingError, match="draws must be a whole number"):
            ask()
    assert agent.pending == ()


def test_masks_are_checked():
    agent = trained("linear")
    agent.remove_arm(2)
    with pytest.raises(MatchError, match="no allowed arm that is not removed"):
        agent.probabilities([HERE, HERE], allowed=np.array([[True, True, True], [False, False, True]]))
