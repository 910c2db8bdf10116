"""A half-life: every learner against the same data with weights 2^(−age/h), and against a world that changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesadam.bandits import Agent, agent_settings, make_agent
from bayesadam.bandits.agents import entry
from bayesadam.bandits.learner import Buffer, with_constant
from bayesadam.bandits.linear import NeuralLinear
from bayesadam.bandits.networks import Greedy
from bayesadam.engine.network import member
from bayesadam.engine.streams import Streams
from floats import approx, assert_close

H = 9.0
SLOW = pytest.mark.slow
SMALL = {"hidden": (6, 5), "batch_size": 16, "train_steps": 4}


def fed(name: str, n: int = 40, step: int = 7, half_life: float | None = H, **changes: object):
    """A learner that has seen 40 observations of two runs and four arms, a few at a time."""
    source = torch.Generator().manual_seed(1)
    buffer = Buffer(torch.randn(2, 60, 3, generator=source), half_life)
    arms, rewards = torch.randint(4, (2, n), generator=source), 3 + 2 * torch.randn(2, n, generator=source)
    known = agent_settings(name).names()
    own = {key: value for key, value in {**SMALL, **changes}.items() if key in known}
    learner = entry(name).learner(agent_settings(name, forget=half_life, **own), buffer, 4, [3, 4])
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        learner.observe(buffer.add(arms[:, part], rewards[:, part]))
    return learner, buffer


def weights(n: int = 40, half_life: float = H) -> np.ndarray:
    return 2.0 ** (-(n - 1 - np.arange(n)) / half_life)


# --- what was seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_life", [0.5, 9.0, 1e6, None])
def test_the_buffer_s_moments_and_count_are_weighted(half_life):
    _, buffer = fed("uniform", half_life=half_life)
    own = np.ones(40) if half_life is None else weights(half_life=half_life)
    assert buffer.effective_count == approx(own.sum(), rel=1e-9)
    rewards = buffer.rewards[:, :40].double().numpy()
    mean = (own * rewards).sum(axis=1) / own.sum()
    std = np.sqrt((own * (rewards - mean[:, None]) ** 2).sum(axis=1) / own.sum())
    found = buffer.moments()
    assert_close(found[0][:, 0], mean, rtol=1e-9)
    assert_close(found[1][:, 0], std, rtol=1e-7)
    assert_close(buffer.weights(slice(0, 40)), own)
    assert_close(buffer.widened(100).moments()[0][:, 0], mean, rtol=1e-9)


@pytest.mark.parametrize("half_life", [2.0, 9.0, 1e9])
def test_mini_batches_are_drawn_by_weight(half_life):
    _, buffer = fed("uniform", half_life=half_life)
    n = 60_000
    rows = buffer.drawn(Streams([1, 2], "rows"), n)
    assert rows.shape == (2, n)
    assert rows.dtype == torch.int64
    expected = weights(half_life=half_life) / weights(half_life=half_life).sum()
    for run in range(2):
        shares = np.bincount(rows[run].numpy(), minlength=40) / n
        assert (np.abs(shares - expected) < 5 * np.sqrt(expected / n) + 1e-9).all()


def test_a_training_draws_its_mini_batches_so():
    learner, buffer = fed("greedy")
    twin, _ = fed("greedy")
    own = learner.settings
    rows = buffer.drawn(Streams(learner.owners, "batches"), own.train_steps, own.batch_size)
    assert (rows.double().mean() > 28).item()
    learner.train()
    twin._prepare()
    twin.stack.prepare(rows.transpose(0, 1), lambda done: own.lr / (1 + own.lr_decay * done))
    twin.stack.run(own.train_steps)
    assert_close(learner.stack.weights, twin.stack.weights)


# --- posteriors -----------------------------------------------------------------------------------------------------


def conjugate(x: np.ndarray, y: np.ndarray, w: np.ndarray, precision: float, a0: float, b0: float):
    """Normal–inverse-gamma of weighted examples."""
    lam = precision * np.eye(x.shape[1]) + x.T @ (w[:, None] * x)
    mu = np.linalg.solve(lam, x.T @ (w * y))
    return mu, lam, a0 + w.sum() / 2, b0 + 0.5 * (w @ y**2 - mu @ lam @ mu)


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("step", [1, 7, 40])
def test_linear_is_the_posterior_of_weighted_data_however_it_was_fed(standardise, step):
    learner, buffer = fed("linear", step=step, standardise=standardise)
    found, own = learner.linear_posterior(), weights()
    for run in range(2):
        rewards = buffer.rewards[run, :40].double().numpy()
        if standardise:
            mean = own @ rewards / own.sum()
            rewards = (rewards - mean) / np.sqrt(own @ (rewards - mean) ** 2 / own.sum())
        for arm in range(4):
            mine = (buffer.arms[run, :40] == arm).numpy()
            x = np.column_stack([buffer.contexts[run, :40].double().numpy()[mine], np.ones(mine.sum())])
            mu, lam, a, b = conjugate(x, rewards[mine], own[mine], 0.25, 6, 6)
            assert_close(found.mean[run, arm, 0], mu, rtol=1e-6, atol=1e-8)
            assert_close(found.covariance[run, arm], np.linalg.inv(lam), rtol=1e-8)
            assert float(found.shape[run, arm]) == approx(a, rel=1e-9)
            assert float(found.scale[run, arm]) == approx(b, rel=1e-6)


def test_linear_ends_with_the_prior_of_an_arm_that_is_never_seen_again():
    agent = make_agent("linear", 3, 2, forget=1.0)
    rows = np.random.default_rng(0).normal(size=(70, 3))
    agent.update(rows[:10], np.zeros(10, int), np.ones(10))
    agent.update(rows[10:], np.ones(60, int), np.ones(60))
    found = agent._actor.linear_posterior()
    assert_close(found.mean[0, 0, 0], np.zeros(4), atol=1e-12)
    assert_close(found.covariance[0, 0], 4 * np.eye(4))
    assert float(found.shape[0, 0]) == approx(6)


@pytest.mark.parametrize("window", [1000, 4])
def test_neural_linear_weighs_its_window(window):
    learner, buffer = fed("neural-linear", standardise=False, window=window)
    assert isinstance(learner, NeuralLinear)
    learner.train()
    found, own = learner.linear_posterior(), weights()
    for run in range(2):
        module = learner.network.build(member(learner.params, run)).eval()
        with torch.no_grad():
            features = with_constant(module[:-1](buffer.contexts[run, :40])).numpy()
        for arm in range(4):
            mine = np.flatnonzero(buffer.arms[run, :40] == arm)
            kept = mine[-window:]
            # The newest stand for all of the arm's.
            w = own[kept] * own[mine].sum() / own[kept].sum()
            rewards = buffer.rewards[run, :40].double().numpy()
            mu, _, a, b = conjugate(features[kept], rewards[kept], w, 0.25, 6, 6)
            assert_close(found.mean[run, arm, 0], mu, rtol=1e-4, atol=1e-5)
            assert float(found.shape[run, arm]) == approx(a, rel=1e-9)
            assert float(found.scale[run, arm]) == approx(b, rel=1e-4)


@pytest.mark.parametrize("name", ["badam", "badam-map", "vadam", "ivon", "bbb"])
def test_n_is_the_effective_count(name):
    learner, _ = fed(name)
    learner.train()
    expected = weights().sum() * (learner.settings.n_per_round or 16)
    assert float(learner.stack.n_data) == approx(expected, rel=1e-5)
    if name == "badam-map":
        moment = learner.stack.state["exp_avg_sq"].double() / (1 - learner.settings.betas[1] ** 4)
        precision = expected * moment.sqrt() + 1 / learner.settings.prior_variance
        assert_close(learner.gaussian().variance.double(), 1 / precision, rtol=1e-4)


def test_the_noise_is_forgotten_too():
    learner, buffer = fed("greedy")
    assert isinstance(learner, Greedy)
    learner.train()
    before = learner._errors.clone()
    learner.observe(buffer.add(torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), 3.0)))
    assert_close(learner._errors[:, 1], before[:, 1] * 2 ** (-3 / H) + 3)


# --- in a world that changes ----------------------------------------------------------------------------------------


def late_reward(name: str, forget: float | None) -> float:
    """Of the last hundred rounds; half-way arm 0 and arm 1 change places."""
    own = {} if name == "linear" else {"hidden": (16,), "batch_size": 64, "train_steps": 20, "lr": 0.01}
    agent = make_agent(name, 2, 2, seed=3, forget=forget, epsilon=0.1, **own)
    rows = np.random.default_rng(4).normal(size=(40, 20, 2))
    rewards = []
    for number, part in enumerate(rows):
        arms = agent.act(part)
        better = (part[:, 0] > 0) if number < 20 else (part[:, 0] <= 0)
        rewards.append((arms == better).astype(float))
        agent.update(part, arms, rewards[-1])
    return float(np.mean(rewards[-5:]))


@pytest.mark.parametrize("name", ["linear", *(pytest.param(name, marks=SLOW) for name in ("greedy", "neural-linear"))])
def test_an_agent_that_forgets_follows_a_change(name):
    assert late_reward(name, 60.0) > max(0.8, late_reward(name, None) + 0.05)


# --- everywhere, and nowhere else -----------------------------------------------------------------------------------


def test_a_saved_agent_forgets_as_before(tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 3))
    agent = make_agent("linear", 3, 2, forget=11.0)
    agent.update(rows[:25], np.arange(25) % 2, rows[:25, 0])
    agent.save(tmp_path / "agent")
    again = Agent.load(tmp_path / "agent")
    for one in (agent, again):
        one.update(rows[25:], np.arange(15) % 2, rows[25:, 0])
    assert again.settings.forget == 11.0
    for name, tensor in agent._trainer.state().items():
        assert torch.equal(tensor, again._trainer.state()[name]), name
