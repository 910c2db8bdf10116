"""Learners against independent references: autograd, torch's optimisers, closed forms, moments of explicit draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from bayesadam.bandits.agents import AGENTS, AgentSettings, agent_settings
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.gradients import ChosenArmGradient, layers_of, outputs, sampled_outputs
from bayesadam.bandits.kinds import learner_of
from bayesadam.bandits.learners import IVON as IvonLearner
from bayesadam.bandits.learners import Badam, BayesByBackprop, Bootstrap, MCDropout, NetworkLearner, initial_weights
from bayesadam.bandits.learners import Vadam as VadamLearner
from bayesadam.bandits.linear import Linear, LinearPosterior, NeuralLinear, Statistics, with_constant
from bayesadam.engine.network import Network, member, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from bayesadam.optim import IVON, Vadam

CPU = torch.device("cpu")
NETWORK = Network(3, (6, 5), 4)
SMALL = {"hidden": (6, 5), "batch_size": 16, "train_steps": 4}


def filled(runs: int = 2, n: int = 40, features: int = 3, arms: int = 4, room: int = 60) -> Buffer:
    source = torch.Generator().manual_seed(1)
    buffer = Buffer(torch.randn(runs, room, features, generator=source))
    chosen = torch.randint(arms, (runs, n), generator=source)
    buffer.add(chosen, 3 + 2 * torch.randn(runs, n, generator=source))
    return buffer


def batch(runs: int = 2, b: int = 16):
    source = torch.Generator().manual_seed(2)
    x = torch.randn(runs, b, 3, generator=source)
    return x, torch.randint(4, (runs, b), generator=source), torch.randn(runs, b, generator=source)


def reference_gradient(network, flat, x, arms, targets, masks=None, importance=None):
    """By autograd, one network at a time."""
    rows = []
    for i in range(len(flat)):
        row = flat[i : i + 1].clone().requires_grad_()
        parts = [None if masks is None else [m[i : i + 1] for m in masks]]
        found = outputs(network, layers_of(network, row), x[i : i + 1], parts[0])[0]
        errors = (found.gather(1, arms[i].unsqueeze(1)).squeeze(1) - targets[i]).square()
        (errors if importance is None else errors * importance[i]).mean().backward()
        rows.append(row.grad[0])
    return torch.stack(rows)


# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("extra", ["plain", "dropout", "importance"])
def test_the_gradient_is_autograds(activation, extra):
    network = Network(3, (6, 5), 4, activation)
    flat = initial_weights(network, [1, 2], None, CPU)
    x, arms, targets = batch()
    masks = [Streams([1, 2], "m", CPU).masks(0.3, 16, width) for width in (6, 5)] if extra == "dropout" else None
    importance = torch.tensor([0.0, 2.0]).repeat(16).view(2, 16) if extra == "importance" else None
    found = ChosenArmGradient(network, flat, 16)(x, arms, targets, masks=masks, importance=importance)
    # In place activations would spoil autograd's own copy for tanh and sigmoid, so the reference is a module.
    expected = []
    for i in range(2):
        module = network.build(member(unflatten(network, flat), i))
        h = x[i]
        for number in range(2):
            h = getattr(module, f"activation{number}")(getattr(module, f"layer{number}")(h))
            h = h if masks is None else h * masks[number][i]
        errors = (module.layer2(h).gather(1, arms[i].unsqueeze(1)).squeeze(1) - targets[i]).square()
        (errors if importance is None else errors * importance[i]).mean().backward()
        expected.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    torch.testing.assert_close(found, torch.stack(expected))


def test_sampled_outputs_have_the_moments_of_explicit_weight_draws():
    flat = initial_weights(NETWORK, [5], None, CPU)
    variance = 0.05 * torch.rand_like(flat)
    x = torch.randn(1, 2, 3)
    n = 40_000
    rows = x.repeat_interleave(n, dim=1)
    mean_layers, variance_layers = layers_of(NETWORK, flat), layers_of(NETWORK, variance)
    found = sampled_outputs(NETWORK, mean_layers, variance_layers, rows, Streams([0], "a", CPU)).view(2, n, 4)
    # One set of weights a row, drawn whole.
    weights = flat + variance.sqrt() * torch.randn(n, flat.shape[1], generator=torch.Generator().manual_seed(3))
    layers = layers_of(NETWORK, weights)
    for row in range(2):
        explicit = outputs(NETWORK, layers, x[:, row : row + 1].expand(n, 1, 3).contiguous())[:, 0]
        error = explicit.std(dim=0) / math.sqrt(n)
        assert ((found[row].mean(dim=0) - explicit.mean(dim=0)).abs() < 6 * error).all()
        torch.testing.assert_close(torch.cov(found[row].T), torch.cov(explicit.T), rtol=0.06, atol=0.003)


def test_rows_have_draws_of_their_own():
    flat = initial_weights(NETWORK, [5], None, CPU)
    layers = layers_of(NETWORK, flat), layers_of(NETWORK, torch.full_like(flat, 0.1))
    rows = torch.ones(1, 500, 3)
    found = sampled_outputs(NETWORK, *layers, rows, Streams([0], "a", CPU))[0, :, 0]
    neighbours = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]
    assert found.unique().numel() == 500
    assert abs(neighbours) < 0.2


# --- optimisers -----------------------------------------------------------------------------------------------------


def follow(learner: NetworkLearner, steps: int):
    """The mini-batches that a learner is about to draw, from a copy of its streams."""
    copy = Streams(learner.owners, "batches", CPU)
    rows = copy.rows(learner.buffer.count, steps, learner.settings.batch_size).transpose(0, 1)
    shift, scale = learner.buffer.moments()
    for chosen in rows:
        x = learner.buffer.rows(chosen)
        arms, rewards = learner.buffer.arms.gather(1, chosen), learner.buffer.rewards.gather(1, chosen)
        yield x, arms, ((rewards - shift) / scale).float() if learner.settings.standardise else rewards


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_training_is_torchs_adam_with_clipping_run_by_run(standardise, decay):
    settings = AgentSettings("greedy", **SMALL, lr=0.05, lr_decay=decay, l2=0.01, clip=0.4, standardise=standardise)
    learner = NetworkLearner(settings, filled(), 4, [3, 4])
    leaves = [row.clone().requires_grad_() for row in learner.weights]
    optimizers = [torch.optim.Adam([leaf], lr=0.05, weight_decay=0.01) for leaf in leaves]
    clipped = 0
    for t, (x, arms, targets) in enumerate(follow(learner, 4)):
        stack = torch.stack([leaf.detach() for leaf in leaves])
        gradient = reference_gradient(NETWORK, stack, x, arms, targets)
        for i, (leaf, optimizer) in enumerate(zip(leaves, optimizers, strict=True)):
            leaf.grad = gradient[i]
            clipped += float(nn.utils.clip_grad_norm_([leaf], 0.4)) > 0.4
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + decay * t)
            optimizer.step()
    assert clipped
    learner.train()
    torch.testing.assert_close(learner.weights, torch.stack([leaf.detach() for leaf in leaves]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "mine", "theirs"), [("vadam", VadamLearner, Vadam), ("ivon", IvonLearner, IVON)])
def test_vadam_and_ivon_step_as_the_optimisers_do(kind, mine, theirs):
    settings = AgentSettings(
        kind, **SMALL, lr=0.02, clip=None, n_per_round=2.0, noise_variance=0.5, initial_std=0.1, prior_variance=0.5
    )
    learner = mine(settings, filled(runs=1), 4, [3])
    n, prior = 80.0, 2.0
    leaf = learner.weights.clone().requires_grad_()
    if kind == "vadam":
        optimizer = theirs([leaf], 0.02, n_data=n, prior_precision=prior, initial_precision=100.0)
    else:
        start = (100.0 - prior) / n
        optimizer = theirs([leaf], 0.02, n_data=n, initial_hessian=start, weight_decay=prior / n, betas=settings.betas)
    noise = Streams([3], "training", CPU)
    optimizer._normal = lambda like, seed: noise.normal(like.shape[1])
    for x, arms, targets in follow(learner, 4):
        optimizer.zero_grad()
        with optimizer.sampled_parameters():
            leaf.grad = reference_gradient(NETWORK, leaf.detach(), x, arms, targets)
        optimizer.step()
    learner.train()
    torch.testing.assert_close(learner.weights, leaf.detach(), rtol=1e-4, atol=1e-6)
    state = optimizer.state[leaf]
    curvature = state["second_moment" if kind == "vadam" else "hessian"]
    torch.testing.assert_close(learner.curvature, curvature, rtol=1e-4, atol=1e-7)
    mean, variance = learner.posterior()
    expected = 1 / (n * curvature + prior) if kind == "vadam" else 1 / (n * (curvature + prior / n))
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean, learner.weights)


def test_bayes_by_backprop_descends_the_elbo():
    settings = AgentSettings(
        "bbb", **SMALL, lr=0.01, clip=None, n_per_round=1.0, noise_variance=0.2, initial_std=0.1, prior_variance=0.5
    )
    learner = BayesByBackprop(settings, filled(runs=1), 4, [3])
    mean, rho = learner.weights.clone().requires_grad_(), learner.rho.clone().requires_grad_()
    optimizer = torch.optim.Adam([mean, rho], lr=0.01)
    noise = Streams([3], "training", CPU)
    module = NETWORK.build()
    prior = torch.distributions.Normal(0, math.sqrt(0.5))
    for x, arms, targets in follow(learner, 4):
        std = nn.functional.softplus(rho)
        params = member(unflatten(NETWORK, mean + std * noise.normal(mean.shape[1])), 0)
        found = torch.func.functional_call(module, params, (x[0],)).gather(1, arms[0].unsqueeze(1)).squeeze(1)
        nll = -torch.distributions.Normal(found, math.sqrt(0.2)).log_prob(targets[0]).mean()
        divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), prior).sum()
        optimizer.zero_grad()
        (nll + divergence / 40).backward()
        optimizer.step()
    learner.train()
    torch.testing.assert_close(learner.weights, mean.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(learner.rho, rho.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(learner.posterior()[1], nn.functional.softplus(rho.detach()).square(), rtol=1e-4, atol=0)


# --- regularisers ---------------------------------------------------------------------------------------------------


def test_dropout_in_training_alone_for_those_who_choose_without():
    settings = AgentSettings("greedy", **SMALL, lr=0.05, dropout=0.4, clip=None)
    learner = NetworkLearner(settings, filled(), 4, [3, 4])
    leaf = learner.weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.05)
    noise = Streams([3, 4], "training", CPU)
    for x, arms, targets in follow(learner, 4):
        drawn = noise.masks(0.4, 16 * 11)
        masks = drawn[:, : 16 * 6].view(2, 16, 6), drawn[:, 16 * 6 :].view(2, 16, 5)
        leaf.grad = reference_gradient(NETWORK, leaf.detach(), x, arms, targets, masks)
        optimizer.step()
    learner.train()
    torch.testing.assert_close(learner.weights, leaf.detach(), rtol=1e-4, atol=1e-6)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(learner.scores(x), outputs(NETWORK, layers_of(NETWORK, learner.weights), x))


@pytest.mark.parametrize("kind", ["greedy", "badam", "bbb", "vadam", "ivon"])
def test_the_average_of_the_weights_acts(kind):
    settings = AgentSettings(kind, **{**SMALL, "train_steps": 1}, lr=0.05, average=0.6, form="map")
    learner = learner_of(settings, filled(), 4, [3, 4])
    seen, expected = [], None
    for t in range(5):
        learner.train()
        seen.append(learner.weights.clone())
        # A plain mean at first: the start has no share in it.
        share = min(0.6, t / (t + 1))
        expected = seen[0] if expected is None else share * expected + (1 - share) * seen[-1]
    torch.testing.assert_close(learner.mean, expected)
    assert not torch.allclose(learner.mean, learner.weights)
    if kind == "greedy":
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(learner.scores(x), outputs(NETWORK, layers_of(NETWORK, expected), x))
    else:
        torch.testing.assert_close(learner.posterior()[0], expected)


@pytest.mark.parametrize("members", [1, 3])
def test_the_noise_is_the_error_of_predictions_made_before_the_reward_was_learnt(members):
    kind = "greedy" if members == 1 else "bootstrap"
    settings = AgentSettings(kind, **SMALL, standardise=True, l2=0.5, l2_by_noise=True, members=members)
    buffer = filled()
    learner = learner_of(settings, buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    assert (learner.noise_variance() == 1).all()
    learner.train()
    shift, scale = buffer.moments()
    source = torch.Generator().manual_seed(9)
    arms, rewards = torch.randint(4, (2, 20), generator=source), torch.randn(2, 20, generator=source)
    places = buffer.add(arms, rewards)
    predicted = outputs(learner.network, learner._layers, buffer.contexts[:, places].repeat_interleave(members, 0))
    learner.observe(places)
    for network in range(2 * members):
        run = network // members
        targets = (rewards[run] - shift[run]) / scale[run]
        errors = predicted[network].gather(1, arms[run].unsqueeze(1)).squeeze(1) - targets
        kept = 0.9995**20
        expected = (100 * kept + float(errors.square().sum())) / (100 * kept + 20)
        assert float(learner.noise_variance()[network]) == pytest.approx(expected, rel=1e-4)
    learner.train()
    torch.testing.assert_close(learner._l2, 0.5 * learner.noise_variance())


def test_an_estimated_noise_scales_the_likelihood():
    settings = AgentSettings("bbb", **SMALL, noise_variance=None)
    learner = BayesByBackprop(settings, filled(), 4, [3, 4])
    learner.train()
    torch.testing.assert_close(learner._half_precision, torch.full((2, 1), 0.5))
    learner.observe(learner.buffer.add(torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), 30.0)))
    learner.train()
    assert (learner.noise_variance() > 2).all()
    torch.testing.assert_close(learner._half_precision, 0.5 / learner.noise_variance())


# --- posteriors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["likelihood", "map"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_badams_posterior_is_the_formula(form, power):
    settings = AgentSettings("badam", **SMALL, form=form, power=power, prior_variance=0.25, betas=(0.9, 0.99))
    learner = Badam(settings, filled(), 4, [3, 4])
    learner.train()
    mean, variance = learner.posterior()
    moment = learner._optimizer.second.double() / (1 - 0.99**4)
    data = 40 * 16 * moment**power
    torch.testing.assert_close(variance.double(), 1 / (data + 4), rtol=1e-4, atol=0)
    expected = learner.weights.double() * (data / (data + 4) if form == "likelihood" else 1)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-4, atol=1e-8)


def test_badam_before_any_training_is_the_prior():
    learner = Badam(AgentSettings("badam", **SMALL, prior_variance=0.25), filled(), 4, [3, 4])
    mean, variance = learner.posterior()
    assert (mean == 0).all()
    torch.testing.assert_close(variance, torch.full_like(variance, 0.25))
    assert learner.scores(torch.randn(2, 5, 3)).isfinite().all()


def test_dropout_draws_a_mask_a_row():
    learner = MCDropout(AgentSettings("mc-dropout", **SMALL, dropout=0.4), filled(), 4, [3, 4])
    found = learner.scores(torch.ones(2, 4000, 3))
    masks = Streams([3, 4], "posterior", CPU).masks(0.4, 4000 * 11)
    assert masks.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert (masks == 0).float().mean() == pytest.approx(0.4, abs=0.01)
    first = masks[:, : 4000 * 6].view(2, 4000, 6), masks[:, 4000 * 6 :].view(2, 4000, 5)
    torch.testing.assert_close(found, outputs(learner.network, learner._layers, torch.ones(2, 4000, 3), first))
    assert found[0, :, 0].unique().numel() > 100


def test_one_member_of_the_ensemble_scores_each_row():
    learner = Bootstrap(AgentSettings("bootstrap", **SMALL, members=3), filled(), 4, [3, 4])
    contexts = torch.randn(2, 50, 3)
    found = learner.scores(contexts)
    every = outputs(learner.network, learner._layers, contexts.repeat_interleave(3, dim=0)).view(2, 3, 50, 4)
    same = (every == found.unsqueeze(1)).all(dim=3)
    assert (same.sum(dim=1) == 1).all()
    assert (same.float().mean(dim=2) > 0.1).all()


def test_members_learn_from_their_own_halves():
    buffer = filled()
    learner = Bootstrap(AgentSettings("bootstrap", **SMALL, members=3), buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    counts = learner._counts[:, :40]
    assert counts.unique().tolist() == [0, 2]
    assert not torch.equal(counts[0], counts[1])
    before = learner.weights.clone()
    learner._counts.zero_()
    learner.train()
    torch.testing.assert_close(learner.weights, before)


# --- linear ---------------------------------------------------------------------------------------------------------


def conjugate(x: np.ndarray, y: np.ndarray, precision: float, a0: float, b0: float):
    """Normal–inverse-gamma, straight from the book."""
    lam = precision * np.eye(x.shape[1]) + x.T @ x
    mu = np.linalg.solve(lam, x.T @ y)
    return mu, lam, a0 + len(y) / 2, b0 + 0.5 * (y @ y - mu @ lam @ mu)


@pytest.mark.parametrize("standardise", [False, True])
def test_linear_is_the_conjugate_posterior_however_it_was_fed(standardise):
    buffer = filled()
    settings = agent_settings("linear", standardise=standardise)
    learner = Linear(settings, buffer, 4, [3, 4])
    for start in range(0, 40, 7):
        learner.observe(slice(start, min(start + 7, 40)))
    found = learner.linear_posterior()
    for run in range(2):
        rewards = buffer.rewards[run, :40].double().numpy()
        rewards = (rewards - rewards.mean()) / rewards.std() if standardise else rewards
        for arm in range(4):
            mine = (buffer.arms[run, :40] == arm).numpy()
            x = np.column_stack([buffer.contexts[run, :40].double().numpy()[mine], np.ones(mine.sum())])
            mu, lam, a, b = conjugate(x, rewards[mine], 0.25, 6, 6)
            np.testing.assert_allclose(found.mean[run, arm], mu, rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(found.factor[run, arm] @ found.factor[run, arm].T, lam, rtol=1e-9, atol=1e-9)
            assert float(found.shape[run, arm]) == a
            assert float(found.scale[run, arm]) == pytest.approx(b, rel=1e-6)


def test_linear_draws_are_students():
    data = Statistics.zeros(1, 2, 3, CPU)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 3, generator=source, dtype=torch.float64)
    x[..., 2] = 1
    data.add(x, torch.randn(1, 12, generator=source, dtype=torch.float64), torch.ones(1, 12, 2).double())
    posterior = LinearPosterior.of(data, precision=0.25, shape=6, scale=6)
    here = torch.tensor([0.5, -1.0, 1.0], dtype=torch.float64)
    n = 60_000
    draws = posterior.draws(here.expand(1, n, 3), Streams([1], "l", CPU))[0, :, 0]
    lam = (posterior.factor[0, 0] @ posterior.factor[0, 0].T).inverse()
    a, b = float(posterior.shape[0, 0]), float(posterior.scale[0, 0])
    scale = math.sqrt(b / a * float(here @ lam @ here))
    reference = torch.distributions.StudentT(2 * a, float(here @ posterior.mean[0, 0]), scale)
    assert float(draws.mean()) == pytest.approx(float(reference.mean), abs=5 * scale / math.sqrt(n))
    assert float(draws.var()) == pytest.approx(float(reference.variance), rel=0.04)
    # The fourth moment tells a Student from a Gaussian: 3 + 6/(2a − 4).
    kurtosis = float(((draws - draws.mean()) / draws.std()).pow(4).mean())
    assert kurtosis == pytest.approx(3 + 6 / (2 * a - 4), abs=0.25)


def test_neural_linear_is_the_conjugate_posterior_on_the_features():
    buffer = filled()
    learner = NeuralLinear(agent_settings("neural-linear", standardise=False, **SMALL), buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    learner.train()
    found = learner.linear_posterior()
    for run in range(2):
        module = learner.network.build(member(unflatten(learner.network, learner.mean), run))
        with torch.no_grad():
            features = with_constant(module[:-1](buffer.contexts[run, :40])).numpy()
        for arm in range(4):
            mine = (buffer.arms[run, :40] == arm).numpy()
            mu, _, a, b = conjugate(features[mine], buffer.rewards[run, :40].double().numpy()[mine], 0.25, 6, 6)
            np.testing.assert_allclose(found.mean[run, arm], mu, rtol=1e-4, atol=1e-5)
            assert float(found.shape[run, arm]) == a
            assert float(found.scale[run, arm]) == pytest.approx(b, rel=1e-4)


def test_neural_linears_window_holds_the_newest_and_counts_for_all():
    buffer = filled()
    learner = NeuralLinear(agent_settings("neural-linear", window=4, **SMALL), buffer, 4, [3, 4])
    for start in range(0, 40, 9):
        learner.observe(slice(start, min(start + 9, 40)))
    learner.refresh()
    for run in range(2):
        for arm in range(4):
            mine = torch.nonzero(buffer.arms[run, :40] == arm).flatten()
            assert set(learner._newest[run, arm].tolist()) == set(mine[-4:].tolist())
            assert float(learner.statistics.gram[run, arm, -1, -1]) == pytest.approx(len(mine))


# --- streams, buffers, settings -------------------------------------------------------------------------------------


def test_a_runs_numbers_do_not_depend_on_its_neighbours_and_go_on_after_a_restore():
    many, one = Streams([1, 2, 3], "p", CPU), Streams([2], "p", CPU)
    torch.testing.assert_close(many.uniform(5)[1], one.uniform(5)[0])
    saved = many.state()
    draws = (
        lambda s: s.normal(3, 2),
        lambda s: s.uniform(5),
        lambda s: s.rows(9, 4),
        lambda s: s.masks(0.2, 7),
        lambda s: s.gamma(torch.full((3, 2), 6.5)),
    )
    first = [draw(many) for draw in draws]
    other = Streams([7, 8, 9], "q", CPU)
    other.restore(saved)
    for draw, expected in zip(draws, first, strict=True):
        assert torch.equal(draw(other), expected)
    assert not torch.equal(Streams([2], "q", CPU).uniform(5), Streams([2], "p", CPU).uniform(5))


def test_the_buffer_knows_the_moments_of_its_rewards():
    buffer = filled()
    mean, std = buffer.moments()
    rewards = buffer.rewards[:, :40].double()
    torch.testing.assert_close(mean.squeeze(1), rewards.mean(dim=1))
    torch.testing.assert_close(std.squeeze(1), rewards.std(dim=1, correction=0))
    constant = Buffer(torch.zeros(1, 5, 2))
    constant.add(torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 0.1))
    assert float(constant.moments()[1]) == 1


def test_initial_weights_lie_in_the_range_asked_for():
    flat = initial_weights(NETWORK, [1, 2], 0.3, CPU)
    parts = unflatten(NETWORK, flat)
    for name, tensor in parts.items():
        if name.endswith("bias"):
            assert (tensor == 0).all()
        else:
            assert 0.2 < tensor.abs().max() <= 0.3
    torch.testing.assert_close(flat[1:], initial_weights(NETWORK, [2], 0.3, CPU))


def test_settings_by_name():
    for agent in AGENTS:
        paper, tuned = agent_settings(agent, "paper"), agent_settings(agent)
        assert (paper.lr, paper.lr_decay, paper.init_range, paper.batch_size) == (0.1, 0.5, 0.3, 512)
        assert (paper.train_every, paper.train_steps, paper.initial_pulls, paper.clip) == (20, 50, 3, 5.0)
        assert tuned.standardise
    assert agent_settings("badam", "paper").n_data(100) == 51_200
    assert agent_settings("badam", "paper").form == "likelihood"
    assert agent_settings("badam-map").form == "map"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"hiden": (3,)}, "no setting hiden"),
        ({"kind": "greedy"}, "no setting kind"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"average": 1.0}, "average"),
        ({"noise_variance": 0.0}, "noise_variance"),
        ({"epsilon": 2}, "epsilon"),
        ({"form": "mode"}, "form"),
        ({"activation": "gelu"}, "activation"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"clip": 0.0}, "clip"),
        ({"l2": math.nan}, "l2"),
        ({"initial_pulls": -1}, "initial_pulls"),
        ({"initial_std": 1.0}, "wider than the prior"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        agent_settings("vadam", **changes)


def test_unknown_agents_and_foreign_settings_are_refused():
    with pytest.raises(SettingError, match="agent must be one of"):
        agent_settings("bandit")
    with pytest.raises(SettingError, match="settings must be one of"):
        agent_settings("badam", "best")
    with pytest.raises(SettingError, match="are for 'badam', not for 'greedy'"):
        agent_settings("greedy", agent_settings("badam"))
