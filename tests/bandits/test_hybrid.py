"""The hybrid agent: exact heads against closed forms, its units, and what it does where others fail."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bayesadam.bandits import (
    AgentSettings,
    agent_settings,
    classification_problem,
    make_agent,
    reward_problem,
    simulate,
)
from bayesadam.bandits.hybrid import Hybrid
from bayesadam.bandits.learner import Buffer
from bayesadam.bandits.linear import LinearPosterior, Statistics
from bayesadam.bandits.simulation import Playing
from bayesadam.weights.draws import stream_seed
from floats import approx, assert_close

CPU = torch.device("cpu")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- the heads ------------------------------------------------------------------------------------------------------

RUNS, ARMS, WIDTH, COUNT = 2, 3, 4, 30


def observations(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = rng(seed)
    x = random.normal(size=(RUNS, COUNT, WIDTH))
    x[..., -1] = 1
    arms, rewards = random.integers(ARMS, size=(RUNS, COUNT)), random.normal(size=(RUNS, COUNT))
    return torch.from_numpy(arms), torch.from_numpy(x), torch.from_numpy(rewards)


def reference(arms: np.ndarray, x: np.ndarray, rewards: np.ndarray, arm: int, prior: np.ndarray, precision: float):
    """μ, C and ½(Σ r² + λ|μ₀|² − μᵀ C⁻¹ μ) of one run's arm, from the normal equations."""
    own = arms == arm
    inverse = precision * np.eye(WIDTH) + x[own].T @ x[own]
    mean = np.linalg.solve(inverse, precision * prior + x[own].T @ rewards[own])
    squares = (rewards[own] ** 2).sum() + precision * prior @ prior
    return mean, np.linalg.inv(inverse), 0.5 * (squares - mean @ inverse @ mean)


def statistics(arms: torch.Tensor, x: torch.Tensor, rewards: torch.Tensor) -> Statistics:
    found = Statistics.zeros(RUNS, ARMS, WIDTH, CPU)
    found.add(arms, x, rewards, torch.ones(COUNT, dtype=torch.float64))
    return found


@pytest.mark.parametrize("size", [1, 7, COUNT])
def test_updates_in_blocks_are_the_normal_equations(size):
    arms, x, rewards = observations()
    head = LinearPosterior.prior(RUNS, ARMS, WIDTH, 1.0, CPU)
    for first in range(0, COUNT, size):
        part = slice(first, first + size)
        head.update(arms[:, part], x[:, part], rewards[:, part])
    for run in range(RUNS):
        for arm in range(ARMS):
            own = (arms[run].numpy(), x[run].numpy(), rewards[run].numpy())
            mean, covariance, residual = reference(*own, arm, np.zeros(WIDTH), 1.0)
            assert_close(head.mean[run, arm, 0], mean, atol=1e-10)
            assert_close(head.covariance[run, arm], covariance, atol=1e-10)
            assert_close(head.scale[run, arm, 0], residual, atol=1e-10)
            assert head.shape[run, arm] == 1 + 0.5 * (own[0] == arm).sum()


def test_a_fit_is_the_normal_equations_around_prior_means():
    arms, x, rewards = observations()
    prior = torch.from_numpy(rng(1).normal(size=(RUNS, ARMS, 3, WIDTH)))
    head, precision = LinearPosterior.prior(RUNS, ARMS, WIDTH, 1.0, CPU), torch.tensor([0.3, 2.0], dtype=torch.float64)
    head = replace(head, mean=head.mean.repeat(1, 1, 3, 1), scale=head.scale.repeat(1, 1, 3))
    identity = torch.eye(WIDTH, dtype=torch.float64)
    residual = head.fit(statistics(arms, x, rewards), prior, precision[:, None, None, None] * identity)
    for run, arm, component in itertools.product(range(RUNS), range(ARMS), range(3)):
        own = (arms[run].numpy(), x[run].numpy(), rewards[run].numpy())
        found = reference(*own, arm, prior[run, arm, component].numpy(), float(precision[run]))
        place = run, arm, component
        for mine, theirs in zip((head.mean[place], head.covariance[place[:2]], residual[place]), found, strict=True):
            assert_close(mine, theirs, atol=1e-10)


def test_errors_of_what_is_left_out_are_those_of_fits_without_it():
    arms, x, rewards = observations()
    head, zero = LinearPosterior.prior(RUNS, ARMS, WIDTH, 1.0, CPU), np.zeros(WIDTH)
    head.fit(statistics(arms, x, rewards), torch.zeros_like(head.mean), 0.5 * torch.eye(WIDTH, dtype=torch.float64))
    errors, rest = head.left_out(head.mean.squeeze(2), arms, x, rewards)
    assert ((rest > 0) & (rest < 1)).all()
    for place in range(COUNT):
        kept = np.arange(COUNT) != place
        arm = int(arms[1, place])
        mean, _, _ = reference(
            arms[1, kept].numpy(), x[1, kept].numpy(), rewards[1, kept].numpy(), arm, zero, precision=0.5
        )
        assert float(errors[1, place]) == approx(float(rewards[1, place]) - float(x[1, place].numpy() @ mean))


def deviations(learner: Hybrid, contexts: torch.Tensor) -> torch.Tensor:
    """Of f, for every arm."""
    first = torch.zeros(*contexts.shape[:2], 1, learner.n_arms, dtype=torch.int64)
    return learner._predictive(contexts, first)[1]


# --- the agent ------------------------------------------------------------------------------------------------------


def linear_problem(scale: float = 1.0, shift: float = 0.0):
    contexts = rng(2).normal(size=(600, 4)).astype(np.float32)
    rewards = contexts @ rng(3).normal(size=(4, 3))
    return reward_problem(contexts, scale * rewards + shift, name="linear", standardise=False)


def rings():
    """The arm is the ring that a point lies in: no linear function of the coordinates tells."""
    points = rng(4).uniform(-1, 1, size=(2000, 2))
    return classification_problem(points, np.digitize(np.hypot(*points.T), [0.5, 0.8]), name="rings")


def small(**changes: object) -> AgentSettings:
    """Settings of an agent that trains little."""
    return agent_settings("hybrid", **{"hidden": (30, 30), "dropout": 0.0, "train_steps": 100, **changes})


def played(problem, rounds: int, **changes: object) -> Hybrid:
    """The learner after so many rounds of one run."""
    playing = Playing(problem, "hybrid", runs=1, rounds=rounds, device="cpu", settings=small(**changes))
    for _ in playing.turns:
        playing.advance()
    return playing.learner


@pytest.mark.slow
def test_linear_rewards_are_left_to_the_linear_head():
    learner = played(linear_problem(), 300)
    assert float(learner._share) < 0.3
    best = linear_problem().run(stream_seed(0, "run", 0), 300).optimum.sum()
    assert learner.buffer.rewards.sum() > 0.85 * best


@pytest.mark.slow
def test_others_are_left_to_the_network():
    learner = played(rings(), 1000)
    assert float(learner._share) > 0.7
    late = learner.buffer.rewards[:, -300:].mean()
    linear = simulate(rings(), "linear", runs=1, rounds=1000)
    assert late > 0.8 > float(linear.reward_ratio.mean())


@pytest.mark.parametrize(("scale", "shift"), [(8.0, 0.0), pytest.param(1.0, 16.0, marks=pytest.mark.slow)])
def test_units_of_the_rewards_do_not_matter(scale, shift):
    ours = played(linear_problem(), 200, train_steps=20).buffer.arms
    theirs = played(linear_problem(scale, shift), 200, train_steps=20).buffer.arms
    assert (ours == theirs).double().mean() > 0.9


@pytest.mark.slow
def test_a_prize_that_was_not_seen_is_possible_where_the_range_says_so():
    wide, narrow = (played(rings(), 200, reward_range=given) for given in ((0.0, 50.0), (0.0, 1.0)))
    x = torch.zeros(1, 1, 2)
    assert (deviations(wide, x) > 3 * deviations(narrow, x)).all()


def test_rewards_of_nothing_but_zeros_do_not_end_exploration():
    agent = make_agent("hybrid", n_features=2, n_arms=4, settings=small(), seed=1)
    arms = []
    for context in rng(5).normal(size=(100, 2)):
        arms.append(agent.act(context))
        agent.update(context, arms[-1], 0.0)
    assert min(np.bincount(arms[50:], minlength=4)) > 2


def test_what_is_held_out_is_not_trained_on():
    learner = played(rings(), 200, hold_out=5)
    rows = learner._rows()
    assert rows.min() >= 0
    assert rows.max() < 200
    assert (rows % 5 != 0).all()


def test_trainings_grow_rarer():
    learner = played(rings(), 700, train_steps=2, growth=1.15)
    assert learner.stack.done == 2 * len(due(700))
    assert played(rings(), 400, train_steps=2, growth=1.15, forget=50.0).stack.done > 2 * len(due(400))


def due(rounds: int) -> list[int]:
    """At which counts the agent trains: after the first pulls, then 5 and 15 % more observations at least."""
    found, count, following = [], 3, 0
    while count < rounds:
        if count >= following:
            found.append(count)
            following = count + int(max(5, 0.15 * count))
        count += 5
    return found


@pytest.mark.slow
def test_the_penalty_falls_with_the_data_and_with_the_noise():
    learner = played(rings(), 800)
    noisy = reward_problem(rings().run(0).contexts, rng(6).normal(size=(2000, 3)), name="noise", standardise=False)
    other = played(noisy, 800)
    for one in (learner, other):
        one._prepare()
        fades = 500 / (500 + one.buffer.count)
        assert float(one._l2) == approx(one.settings.l2 * fades * float(one.noise_variance()), rel=1e-5)
    # In units of the rewards seen, which vary little where the best arms are chosen.
    assert float(learner.noise_variance()) < 0.9 * float(other.noise_variance())
    assert float(other.noise_variance()) == approx(1, abs=0.15)


def test_the_default_agent_is_hybrid():
    assert make_agent(n_features=2, n_arms=2).name == "hybrid"


def test_exploration_settles():
    bold, settled = (played(rings(), 200, exploration=share, settling=1.0, train_steps=30) for share in (1.0, 0.1))
    ratio = deviations(settled, torch.zeros(1, 1, 2)) / deviations(bold, torch.zeros(1, 1, 2))
    assert math.isfinite(float(ratio.max()))
    assert float(ratio.max()) < 0.9


def test_room_is_made_for_more():
    learner = played(rings(), 100)
    wide = Hybrid(learner.settings, Buffer(torch.zeros(1, 500, 2)), 3, [0])
    wide.load(learner.tensors())
    assert torch.equal(wide._linear.mean, learner._linear.mean)
    assert int(wide._due[0]) == int(learner._due[0])
