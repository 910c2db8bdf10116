"""Learnt priors: empirical Bayes against a known family, the agent that starts from one, and its files."""

import math

import numpy as np
import pytest
import torch

import bayesadam as ba
from bayesadam.bandits import Log, Prior, agent_settings, fit_prior, make_agent, replay, reward_problem, simulate, wheel
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.empirical_bayes import _moments
from bayesadam.bandits.hybrid import Hybrid
from bayesadam.bandits.linear import Statistics

WIDTH, ARMS, PROBLEMS, ROWS = 3, 2, 400, 40
MEAN = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
SPREAD = torch.tensor([[[1.0, 0.6, 0.0], [0.6, 0.8, 0.1], [0.0, 0.1, 0.3]]], dtype=torch.float64).repeat(ARMS, 1, 1)
NOISE = torch.tensor([0.25, 0.04], dtype=torch.float64)


def family(seed: int = 0) -> Statistics:
    """Problems whose weights are N(MEAN, SPREAD), with rewards of variance NOISE."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=source)

    x = normal(PROBLEMS, ARMS * ROWS, WIDTH)
    x[..., -1] = 1
    arms = torch.arange(ARMS * ROWS).remainder(ARMS).expand(PROBLEMS, -1)
    factor = torch.linalg.cholesky(SPREAD)
    weights = MEAN + (factor @ normal(PROBLEMS, ARMS, WIDTH, 1)).squeeze(3)
    own = weights.gather(1, arms.unsqueeze(2).expand(-1, -1, WIDTH))
    rewards = (own * x).sum(dim=2) + NOISE[arms].sqrt() * normal(PROBLEMS, ARMS * ROWS)
    data = Statistics.zeros(PROBLEMS, ARMS, WIDTH, torch.device("cpu"))
    data.add(arms, x, rewards, torch.ones(ARMS * ROWS, dtype=torch.float64))
    return data


def test_empirical_bayes_finds_the_family():
    (mean, covariance, shape, scale), _ = _moments(
        family(), torch.full((PROBLEMS, ARMS), float(ROWS), dtype=torch.float64)
    )
    noise = scale / shape
    error = math.sqrt(1 / PROBLEMS)
    assert torch.allclose(mean, MEAN, atol=4 * error)
    assert torch.allclose(covariance * noise[:, None, None], SPREAD, atol=6 * error)
    assert torch.allclose(noise, NOISE, rtol=0.05)


def test_an_arm_that_no_problem_saw_twice_has_no_prior():
    logs = [
        Log.of(contexts=np.ones((4, 1)), arms=arms, probabilities=np.full(4, 0.5), rewards=np.ones(4), n_arms=2)
        for arms in ([0, 0, 0, 0], [0, 0, 1, 1])
    ]
    with pytest.raises(ba.MatchError, match="arms='exchangeable'"):
        fit_prior(logs, hidden=(3,), steps=5)
    assert fit_prior(logs, arms="exchangeable", hidden=(3,), steps=5).exchangeable


# --- the agent ------------------------------------------------------------------------------------------------------


def slopes(number: int, arms: int = 3):
    """Rewards that are linear in one hidden direction of the contexts, with another slope in every problem."""
    random = np.random.default_rng(number)
    contexts = random.normal(size=(400, 4))
    hidden = np.sin(2 * contexts[:, :1])
    return reward_problem(contexts, hidden * random.normal(size=arms), name=f"slopes {number}", standardise=False)


@pytest.fixture(scope="module")
def prior() -> Prior:
    return fit_prior([slopes(number) for number in range(12)], hidden=(30,), rounds=300, steps=600)


def test_an_agent_that_starts_from_a_prior_needs_less(prior):
    small = agent_settings("hybrid", hidden=(20,), train_steps=20)
    alone = simulate(slopes(99), "hybrid", runs=4, rounds=150, seed=3, settings=small)
    with_prior = simulate(slopes(99), "hybrid", runs=4, rounds=150, seed=3, settings=small, prior=prior)
    assert with_prior.regret_ratio.mean() < 0.7 * alone.regret_ratio.mean()


def test_its_head_is_the_normal_equations_with_the_learnt_precision(prior):
    random = np.random.default_rng(0)
    contexts = torch.from_numpy(random.normal(size=(1, 60, 4))).float()
    learner = Hybrid(agent_settings("hybrid", hidden=(20,), train_steps=20), Buffer(contexts), 3, [0])
    learner.start_from(prior)
    arms, rewards = torch.arange(60).remainder(3)[None], torch.from_numpy(random.normal(size=(1, 60))).float()
    learner.observe(learner.buffer.add(arms, rewards))
    before = learner._linear.mean.clone(), learner._linear.covariance.clone()
    x = prior.features(contexts)[0].numpy()
    for arm in range(3):
        own = arms[0].numpy() == arm
        noise = np.exp((x[own] @ prior.log_noise[arm].numpy()).clip(-math.log(1e4), math.log(1e4)))
        inverse, weighted = np.linalg.inv(prior.covariance[arm].numpy()), x[own] / noise[:, None]
        precision = inverse + weighted.T @ x[own]
        mean = np.linalg.solve(precision, inverse @ prior.mean[arm].numpy() + weighted.T @ rewards[0].numpy()[own])
        np.testing.assert_allclose(before[0][0, arm], mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(before[1][0, arm], np.linalg.inv(precision), rtol=1e-5, atol=1e-7)
    # A training writes it in units of the rewards seen.
    learner.train()
    shift, scale = learner._units()
    back = learner._linear.mean * scale.unsqueeze(2)
    back[..., -1] += shift
    np.testing.assert_allclose(x @ back[0].numpy().T, x @ before[0][0].numpy().T, atol=1e-3)


def test_files(prior, tmp_path):
    prior.save(tmp_path / "prior.safetensors")
    again = Prior.load(tmp_path / "prior.safetensors")
    for name, tensor in prior.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])
    assert again.network == prior.network
    agent = make_agent("hybrid", 4, 3, prior=prior, hidden=(20,), train_steps=20)
    random = np.random.default_rng(1)
    for row in random.normal(size=(30, 4)):
        agent.update(row, agent.act(row), float(random.normal()))
    agent.save(tmp_path / "agent.safetensors")
    with pytest.raises(ba.FileError, match="not a saved prior"):
        Prior.load(tmp_path / "agent.safetensors")
    other = ba.bandits.Agent.load(tmp_path / "agent.safetensors")
    rows = random.normal(size=(50, 4))
    assert (agent.act(rows) == other.act(rows)).all()


def test_a_new_arm_is_one_drawn_at_random(prior):
    agent = make_agent("hybrid", 4, 3, prior=prior)
    assert agent.add_arm() == 3
    found = prior.for_arms(4)
    assert torch.allclose(found.mean[3], prior.mean.mean(dim=0))
    noise = found.scale / found.shape
    marginal = (noise[:, None, None] * found.covariance)[3]
    within = (noise[:3, None, None] * prior.covariance).mean(dim=0)
    assert torch.linalg.eigvalsh(marginal - within).min() > -1e-9
    assert make_agent("hybrid", 4, 3, prior=prior).act(np.zeros(4)) in range(3)


def test_from_logs(tmp_path):
    random = np.random.default_rng(2)
    logs = []
    for number in range(3):
        contexts, arms = random.normal(size=(80, 2)), random.integers(2, size=80)
        rewards = np.where(random.random(80) < 0.1, np.nan, contexts[:, 0] * (arms + number))
        logs.append(Log.of(contexts=contexts, arms=arms, probabilities=np.full(80, 0.5), rewards=rewards))
    found = fit_prior(logs, hidden=(10,), steps=200)
    assert found.mean.shape == (2, 10 + 2 + 1)
    agent = make_agent("hybrid", 2, 2, prior=found)
    agent.log(tmp_path / "log.jsonl")
    decision = agent.decide([0.1, 0.2])
    agent.reward(decision.id, 1.0)
    agent.log(None)
    with pytest.raises(ba.MatchError, match="learnt prior"):
        replay(tmp_path / "log.jsonl")
    assert replay(tmp_path / "log.jsonl", make_agent("hybrid", 2, 2, prior=found)).pending == ()
    assert fit_prior([str(tmp_path / "log.jsonl"), *logs], arms="exchangeable", hidden=(10,), steps=50).exchangeable


def test_what_does_not_fit_is_refused(prior):
    with pytest.raises(ba.SettingError, match="two or more"):
        fit_prior([wheel(0.5)])
    with pytest.raises(ba.SettingError, match="exchangeable"):
        fit_prior([wheel(0.5), wheel(0.6)], arms="other")
    with pytest.raises(ba.MatchError, match="numbers"):
        fit_prior([wheel(0.5), slopes(0)], steps=1, rounds=10)
    with pytest.raises(ba.MatchError, match="arms='exchangeable'"):
        fit_prior([slopes(0, 2), slopes(1, 3)], steps=1, rounds=10)
    with pytest.raises(ba.MatchError, match="contexts of 4"):
        make_agent("hybrid", 5, 3, prior=prior)
    with pytest.raises(ba.MatchError, match="for 3 arms"):
        make_agent("hybrid", 4, 2, prior=prior)
    with pytest.raises(ba.SettingError, match="only the hybrid"):
        make_agent("linear", 4, 3, prior=prior)
