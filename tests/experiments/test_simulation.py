"""Simulations: bookkeeping by hand, independence of what is stacked."""

import numpy as np
import pytest
import torch

from experiments import classification_problem, reward_problem, simulate
from experiments.agents import AGENTS, agent_settings
from floats import approx, assert_close

SMALL = {"hidden": (16, 16), "batch_size": 64, "train_steps": 5}


def blobs(n: int = 400, features: int = 5, arms: int = 3):
    random_ = np.random.default_rng(0)
    labels = random_.integers(arms, size=n)
    centres = 2 * random_.normal(size=(arms, features))
    return classification_problem(centres[labels] + random_.normal(size=(n, features)), labels, name="blobs")


def small(agent: str, settings: str = "tuned", **changes: object):
    """With as much of `SMALL` as the agent has."""
    known = agent_settings(agent).names()
    return agent_settings(agent, settings, **{k: v for k, v in (SMALL | changes).items() if k in known})


def test_totals_by_hand():
    # Arm 1 pays 2 and arm 0 pays 1 whatever the context; the forced pulls are all there is.
    chosen = reward_problem(np.arange(4.0)[:, None], np.tile([1.0, 2.0], (4, 1)))
    found = simulate(chosen, "greedy", runs=2, settings=small("greedy", initial_pulls=2))
    np.testing.assert_array_equal(found.arms, [[0, 1, 0, 1]] * 2)
    assert_close(found.reward, 1 + 2 + 1 + 2)
    assert_close(found.reward_ratio, (1 + 2 + 1 + 2) / 8)
    assert_close(found.regret_ratio, 2 / (8 - 6))
    assert found.rounds == 4


def test_a_run_is_lost_where_the_best_single_arm_would_have_earned_as_much():
    rounds = blobs().make(0, 400)
    largest = max(rounds.rewards.sum(axis=0))
    assert rounds.single.sum() == largest
    for agent, lost in (("linear", False), ("uniform", True)):
        found = simulate(blobs(), agent, runs=2)
        np.testing.assert_array_equal(found.lost, [lost, lost])
        np.testing.assert_array_equal(found.reward <= largest, found.lost)


def test_uniform_is_near_its_expectation():
    found = simulate("wheel:0.5", "uniform", runs=10, rounds=3000)
    assert found.regret_ratio.mean() == approx(1, abs=4 * found.regret_ratio.std() / np.sqrt(10))
    assert simulate(blobs(), "uniform").reward_ratio.mean() == approx(1 / 3, abs=0.03)


# With the tuned settings every agent plays below.
@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_plays_with_the_papers_settings(agent):
    found = simulate(blobs(), agent, runs=2, rounds=120, settings=small(agent, "paper"))
    assert np.isfinite([found.reward_ratio, found.regret_ratio]).all()


@pytest.mark.parametrize("agent", ["hybrid", "linear", "badam", "mc-dropout", "vadam"])
def test_a_run_does_not_depend_on_what_is_stacked_with_it(agent):
    many, one = (simulate(blobs(), agent, runs=runs, rounds=80, settings=small(agent)).arms for runs in (3, 1))
    # Rounding differs between batch shapes, and may change a choice late in a run.
    np.testing.assert_array_equal(many[0, :40], one[0, :40])


def test_runs_differ_and_repeat_and_the_global_random_state_and_threads_are_left_alone():
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    np.random.seed(3)
    first, again, other = (
        simulate(blobs(), "badam", runs=3, rounds=120, settings=small("badam"), seed=s).arms for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
