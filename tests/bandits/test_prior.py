"""Learnt priors: what is left out against Student densities, the agent that starts from one, and its files."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

import bayesadam as ba
from bayesadam.bandits import Log, Prior, agent_settings, fit_prior, make_agent, replay, reward_problem, simulate, wheel
from bayesadam.bandits.hybrid import Hybrid
from bayesadam.bandits.learner import Buffer
from bayesadam.bandits.prior import _WIDTHS, _inverse_gamma, _left_out, _Problem, _spread
from floats import approx, assert_close

WIDTH, ARMS, ROWS = 3, 2, 60


def family(heads: np.ndarray, noise: float = 0.1, seed: int = 0) -> list[_Problem]:
    """Problems with these weights (problems, ARMS, WIDTH), on features that are known."""
    random, found = np.random.default_rng(seed), []
    for own in heads:
        phi = random.normal(size=(ROWS, WIDTH))
        rewards = phi @ own.T + noise * random.normal(size=(ROWS, len(own)))
        found.append(_Problem(*map(torch.from_numpy, (phi, rewards, np.full(rewards.shape, noise**2)))))
    return found


def errors_left_out(data: list[_Problem], heads: np.ndarray, spread: np.ndarray, noise: float) -> np.ndarray:
    """Mean squared errors of every problem's odd rows, from multivariate Student densities of its even rows."""
    found = []
    for number, one in enumerate(data):
        phi, rewards = one.phi.numpy(), one.rewards.numpy()
        known, rest = phi[::2], phi[1::2]
        # Over all arms together: σ² is theirs, and so is the component.
        whole = scipy.linalg.block_diag(*[np.eye(len(known)) + known @ (arm / noise) @ known.T for arm in spread])
        logs, means = [], []
        for other, head in enumerate(heads):
            if other != number:
                apart = (rewards[::2] - known @ head.T).T.ravel()
                dist = scipy.stats.multivariate_t(np.zeros(len(apart)), shape=noise * whole, df=4)
                logs.append(dist.logpdf(apart))
                posterior = []
                for arm, own in zip(spread, head, strict=True):
                    inverse = np.linalg.inv(arm) * noise
                    right = inverse @ own + known.T @ rewards[::2][:, len(posterior)]
                    posterior.append(np.linalg.solve(inverse + known.T @ known, right))
                means.append(posterior)
        likely = np.exp(np.array(logs) - max(logs))
        mean = np.tensordot(likely / likely.sum(), np.array(means), 1)
        found.append(np.square(rewards[1::2] - rest @ mean.T).mean())
    return np.array(found)


@pytest.mark.parametrize("width", [1.0, 0.01])
def test_what_is_left_out_is_predicted_by_the_mixture_of_the_others(width):
    heads = np.random.default_rng(1).normal(size=(6, ARMS, WIDTH))
    data = family(heads)
    spread, noise = width * _spread(torch.from_numpy(heads)), 0.04
    relative, squares = _left_out(data, torch.from_numpy(heads), spread, torch.tensor(noise, dtype=torch.float64))
    expected = errors_left_out(data, heads, spread.numpy(), noise)
    assert_close(squares, expected, rtol=1e-6)
    assert float(relative) == approx(expected.mean() / 0.1**2)


def best_width(heads: np.ndarray) -> float:
    data, heads = family(heads, noise=0.5), torch.from_numpy(heads)
    noise = torch.tensor(0.25, dtype=torch.float64)
    return min(_WIDTHS, key=lambda width: float(_left_out(data, heads, width * _spread(heads), noise)[0]))


def test_kinds_of_problems_are_told_from_a_cloud():
    random = np.random.default_rng(2)
    cloud, kinds = random.normal(size=(20, 1, WIDTH)), random.normal(size=(3, 1, WIDTH))
    assert best_width(cloud) > 0.2
    assert best_width(kinds[np.arange(20) % 3]) < 0.02


def test_the_noise_is_the_inverse_gamma_with_these_moments():
    shape, scale = _inverse_gamma(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert float(shape) == approx(2 + 4 / (2 / 3))
    assert float(scale / shape) == approx(2)


def test_an_arm_that_no_problem_saw_twice_has_no_prior():
    logs = [
        Log.of(contexts=np.ones((4, 1)), arms=arms, probabilities=np.full(4, 0.5), rewards=np.ones(4), n_arms=2)
        for arms in ([0, 0, 0, 0], [0, 0, 1, 1])
    ]
    with pytest.raises(ba.errors.MatchError, match="arms='exchangeable'"):
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
    return fit_prior([slopes(number) for number in range(12)], hidden=(30,), rounds=200, steps=300)


@pytest.mark.slow
def test_an_agent_that_starts_from_a_prior_needs_less(prior):
    small = agent_settings("hybrid", hidden=(20,), train_steps=20)
    alone = simulate(slopes(99), "hybrid", runs=4, rounds=150, seed=3, settings=small)
    with_prior = simulate(slopes(99), "hybrid", runs=4, rounds=150, seed=3, settings=small, prior=prior)
    assert with_prior.regret_ratio.mean() < 0.7 * alone.regret_ratio.mean()


def started(prior: Prior, contexts: torch.Tensor, n_arms: int = 3) -> Hybrid:
    settings = agent_settings("hybrid", hidden=(20,), train_steps=20)
    learner = Hybrid(settings, Buffer(contexts), n_arms, list(range(len(contexts))))
    learner.start_from(prior)
    return learner


def test_its_head_is_the_normal_equations_around_every_component(prior):
    random = np.random.default_rng(0)
    contexts = torch.from_numpy(random.normal(size=(1, 60, 4))).float()
    learner = started(prior, contexts)
    arms, rewards = torch.arange(60).remainder(3)[None], torch.from_numpy(random.normal(size=(1, 60))).float()
    learner.observe(learner.buffer.add(arms, rewards))
    before = learner._linear.mean.clone(), learner._linear.covariance.clone()
    x, paid = prior.features(contexts)[0].numpy(), rewards[0].numpy()
    errors = np.zeros(len(prior.mean))
    for arm in range(3):
        own = arms[0].numpy() == arm
        inverse = np.linalg.inv(prior.covariance[arm].numpy())
        precision = inverse + x[own].T @ x[own]
        assert_close(before[1][0, arm], np.linalg.inv(precision), rtol=1e-5, atol=1e-7)
        for component, first in enumerate(prior.mean[:, arm].numpy()):
            mean = np.linalg.solve(precision, inverse @ first + x[own].T @ paid[own])
            assert_close(before[0][0, arm, component], mean, rtol=1e-5, atol=1e-5)
            apart = paid[own] - x[own] @ first
            errors[component] += (
                0.5
                * apart
                @ np.linalg.solve(np.eye(own.sum()) + x[own] @ prior.covariance[arm].numpy() @ x[own].T, apart)
            )
    # The Student density of all rewards: σ² and the component are those of all arms.
    logs = -(float(prior.shape) + 30) * np.log(float(prior.scale) + errors)
    likely = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    assert_close(learner._likely()[0], np.tile(likely, (3, 1)), atol=1e-6)
    # A training writes it in units of the rewards seen.
    learner.train()
    shift, scale = learner._shift.double(), learner._scale.double()
    back = learner._linear.mean * scale[..., None, None]
    back[..., -1] += shift.unsqueeze(2)
    assert_close(x @ back[0, :, 0].numpy().T, x @ before[0][0, :, 0].numpy().T, atol=1e-3)


def test_decisions_draw_components_as_often_as_they_are_likely(prior):
    contexts = torch.randn(2, 40, 4, generator=torch.Generator().manual_seed(0))
    learner = started(prior, contexts)
    learner.observe(learner.buffer.add(torch.arange(10).remainder(3).repeat(2, 1), torch.randn(2, 10)))
    drawn = learner._drawn(5, 4000, learner._choice)
    assert (drawn == drawn[..., :1]).all()
    for run in range(2):
        shares = torch.bincount(drawn[run, ..., 0].flatten(), minlength=len(prior.mean)) / 20000
        assert_close(shares.double(), learner._likely()[run, 0], atol=0.02)


def test_exchangeable_arms_find_their_own_component():
    kinds = np.random.default_rng(4).normal(size=(3, 4))

    def permuted(number: int):
        random = np.random.default_rng(number)
        contexts = random.normal(size=(300, 4))
        return reward_problem(contexts, contexts @ kinds[random.permutation(3)].T, name="kinds", standardise=False)

    prior = fit_prior([permuted(number) for number in range(6)], arms="exchangeable", hidden=(20,), steps=400)
    rounds = permuted(50).run(0)
    learner = started(prior, torch.from_numpy(rounds.contexts[None]))
    arms = torch.arange(30).remainder(3)[None]
    learner.observe(learner.buffer.add(arms, torch.from_numpy(rounds.rewards)[None].gather(2, arms.T[None])[..., 0]))
    average = (learner._likely().unsqueeze(3) * learner._linear.mean).sum(dim=2)[0]
    found = prior.features(torch.from_numpy(rounds.contexts[None, 100:]))[0] @ average.mT
    error = (found - torch.from_numpy(rounds.rewards[100:])).square().mean().sqrt()
    assert error < 0.3 * rounds.rewards.std()


def test_a_prior_that_does_not_hold_gives_way_to_the_network(prior):
    contexts = torch.randn(1, 400, 4, generator=torch.Generator().manual_seed(1))
    arms = torch.arange(400).remainder(3)[None]
    for rewards, holds in ((torch.sin(2 * contexts[..., 0]) * (arms - 1), True), (50 * contexts[..., 1].abs(), False)):
        learner = started(prior, contexts)
        learner.observe(learner.buffer.add(arms, rewards))
        learner.train()
        assert bool(learner._holds(learner._prior)) == holds
        assert not holds or float(learner._share) == 0


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
    with pytest.raises(ba.errors.FileError, match="not a saved prior"):
        Prior.load(tmp_path / "agent.safetensors")
    other = ba.bandits.Agent.load(tmp_path / "agent.safetensors")
    rows = random.normal(size=(50, 4))
    assert (agent.act(rows) == other.act(rows)).all()


def test_a_new_arm_is_one_drawn_at_random(prior):
    agent = make_agent("hybrid", 4, 3, prior=prior)
    assert agent.add_arm() == 3
    found = prior.for_arms(4)
    assert torch.equal(found.mean[:, :3], prior.mean)
    assert_close(found.mean[:, 3], prior.mean.mean(dim=1))
    between = torch.stack([torch.cov(own.T, correction=0) for own in prior.mean]).mean(dim=0)
    noise = prior.scale / prior.shape
    assert_close(noise * found.covariance[3], noise * prior.covariance.mean(dim=0) + between)
    assert make_agent("hybrid", 4, 3, prior=prior).act(np.zeros(4)) in range(3)


def test_from_logs(tmp_path):
    random = np.random.default_rng(2)
    logs = []
    for number in range(3):
        contexts, arms = random.normal(size=(80, 2)), random.integers(2, size=80)
        rewards = np.where(random.random(80) < 0.1, np.nan, contexts[:, 0] * (arms + number))
        logs.append(Log.of(contexts=contexts, arms=arms, probabilities=np.full(80, 0.5), rewards=rewards))
    found = fit_prior(logs, hidden=(10,), steps=200)
    assert found.mean.shape == (3, 2, 10 + 2 + 1)
    agent = make_agent("hybrid", 2, 2, prior=found)
    agent.log(tmp_path / "log.jsonl")
    decision = agent.decide([0.1, 0.2])
    agent.reward(decision.id, 1.0)
    agent.log(None)
    with pytest.raises(ba.errors.MatchError, match="learnt prior"):
        replay(tmp_path / "log.jsonl")
    assert replay(tmp_path / "log.jsonl", make_agent("hybrid", 2, 2, prior=found)).pending == ()
    assert fit_prior([str(tmp_path / "log.jsonl"), *logs], arms="exchangeable", hidden=(10,), steps=50).exchangeable


def test_what_does_not_fit_is_refused(prior):
    with pytest.raises(ba.errors.SettingError, match="two sources or more"):
        fit_prior([wheel(0.5)])
    with pytest.raises(ba.errors.SettingError, match="exchangeable"):
        fit_prior([wheel(0.5), wheel(0.6)], arms="other")
    with pytest.raises(ba.errors.MatchError, match="they must agree"):
        fit_prior([wheel(0.5), slopes(0)], steps=1, rounds=10)
    with pytest.raises(ba.errors.MatchError, match="they must agree"):
        fit_prior([slopes(0, 2), slopes(1, 3)], steps=1, rounds=10)
    with pytest.raises(ba.errors.MatchError, match="contexts of 4"):
        make_agent("hybrid", 5, 3, prior=prior)
    with pytest.raises(ba.errors.MatchError, match="for 3 arms"):
        make_agent("hybrid", 4, 2, prior=prior)
    with pytest.raises(ba.errors.SettingError, match="only the hybrid"):
        make_agent("linear", 4, 3, prior=prior)
