"""Learners against independent references: autograd, torch's optimisers, closed forms, moments of explicit draws."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from experiments.rules import RULES, sampled_outputs
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal
from torch import nn

from bayesadam.bandits.agents import PAPER_AGENTS, agent_settings, entry
from bayesadam.bandits.learner import Buffer, with_constant
from bayesadam.bandits.linear import (
    Linear,
    LinearPosterior,
    NeuralLinear,
    Statistics,
    normal_equations,
    shared_precision,
)
from bayesadam.bandits.networks import (
    Badam,
    BadamSettings,
    Bootstrap,
    BootstrapSettings,
    Greedy,
    GreedySettings,
    MCDropout,
    Variational,
    VariationalSettings,
    initial_weights,
)
from bayesadam.engine.gradients import StackedGradient
from bayesadam.engine.network import Network, forward, initial, member, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from floats import approx, assert_close, close

CPU = torch.device("cpu")
NETWORK = Network(3, (6, 5), 4)
SMALL = {"hidden": (6, 5), "batch_size": 16, "train_steps": 4}


def filled(runs: int = 2, n: int = 40, features: int = 3, arms: int = 4, room: int = 60) -> Buffer:
    source = torch.Generator().manual_seed(1)
    buffer = Buffer(torch.randn(runs, room, features, generator=source))
    chosen = torch.randint(arms, (runs, n), generator=source)
    buffer.add(chosen, 3 + 2 * torch.randn(runs, n, generator=source))
    return buffer


def reference_gradient(network, flat, x, arms, targets, masks=None, importance=None):
    """By autograd, one network at a time."""
    rows = []
    for i in range(len(flat)):
        row = flat[i : i + 1].clone().requires_grad_()
        own = None if masks is None else [m[i : i + 1] for m in masks]
        found = forward(network, unflatten(network, row), x[i : i + 1], masks=own)[0]
        errors = (found.gather(1, arms[i].unsqueeze(1)).squeeze(1) - targets[i]).square()
        (errors if importance is None else errors * importance[i]).mean().backward()
        rows.append(row.grad[0])
    return torch.stack(rows)


# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "gelu"])
@pytest.mark.parametrize("extra", ["plain", "dropout", "importance"])
def test_the_gradient_is_autograds(activation, extra):
    buffer = filled()
    own = {**SMALL, "activation": activation, "standardise": False}
    if extra == "importance":
        learner = Bootstrap(BootstrapSettings(**own, members=3), buffer, 4, [1, 2])
    else:
        learner = Greedy(GreedySettings(**own), buffer, 4, [1, 2])
    learner.observe(slice(0, 40))
    rows = Streams(learner.owners, "rows", CPU).rows(40, 16)
    masks = [(Streams(learner.owners, "m", CPU).uniform(16, width) > 0.3) / 0.7 for width in (6, 5)]
    masks = masks if extra == "dropout" else None
    x, slope = learner._batch(rows)
    found = StackedGradient(learner.network, learner.stack.weights)(x, slope, masks=masks)
    importance = learner._counts.gather(1, rows) if extra == "importance" else None
    # Autograd sees the rows of each network's own run.
    runs = torch.arange(2).repeat_interleave(len(rows) // 2)[:, None]
    arms, rewards = buffer.arms[runs, rows], buffer.rewards[runs, rows]
    flat, x = learner.stack.weights, buffer.contexts[runs, rows]
    expected = reference_gradient(learner.network, flat, x, arms, rewards, masks, importance)
    assert_close(found, expected)


def test_sampled_outputs_have_the_moments_of_explicit_weight_draws():
    flat = initial_weights(NETWORK, [5], None, CPU)
    variance = 0.05 * torch.rand_like(flat)
    x = torch.randn(1, 2, 3)
    n = 40_000
    rows = x.repeat_interleave(n, dim=1)
    moments = unflatten(NETWORK, flat), unflatten(NETWORK, variance)
    found = sampled_outputs(NETWORK, *moments, rows, Streams([0], "a", CPU)).view(2, n, 4)
    # One set of weights a row, drawn whole.
    weights = flat + variance.sqrt() * torch.randn(n, flat.shape[1], generator=torch.Generator().manual_seed(3))
    params = unflatten(NETWORK, weights)
    for row in range(2):
        explicit = forward(NETWORK, params, x[:, row : row + 1].expand(n, 1, 3).contiguous())[:, 0]
        error = explicit.std(dim=0) / math.sqrt(n)
        assert ((found[row].mean(dim=0) - explicit.mean(dim=0)).abs() < 6 * error).all()
        assert_close(torch.cov(found[row].T), torch.cov(explicit.T), rtol=0.06, atol=0.003)


def test_rows_have_draws_of_their_own():
    flat = initial_weights(NETWORK, [5], None, CPU)
    moments = unflatten(NETWORK, flat), unflatten(NETWORK, torch.full_like(flat, 0.1))
    rows = torch.ones(1, 500, 3)
    found = sampled_outputs(NETWORK, *moments, rows, Streams([0], "a", CPU))[0, :, 0]
    neighbours = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]
    assert found.unique().numel() == 500
    assert abs(neighbours) < 0.2


# --- optimisers -----------------------------------------------------------------------------------------------------


def follow(learner: Greedy | Variational, steps: int):
    """The mini-batches that a learner is about to draw, from a copy of its streams."""
    copy = Streams(learner.owners, "batches", CPU)
    rows = copy.rows(learner.buffer.count, steps, learner.settings.batch_size).transpose(0, 1)
    shift, scale = learner.buffer.moments()
    for chosen in rows:
        x, arms, rewards = learner.buffer.at(chosen)
        yield x, arms, ((rewards - shift) / scale).float() if learner.settings.standardise else rewards


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_training_is_torchs_adam_with_clipping_run_by_run(standardise, decay):
    settings = GreedySettings(**SMALL, lr=0.05, lr_decay=decay, l2=0.01, clip=0.4, standardise=standardise)
    learner = Greedy(settings, filled(), 4, [3, 4])
    leaves = [row.clone().requires_grad_() for row in learner.stack.weights]
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
    assert_close(learner.stack.weights, torch.stack([leaf.detach() for leaf in leaves]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["vadam", "ivon"])
def test_vadam_and_ivon_step_as_published(kind):
    """The papers' equations in float64, with the noise of the stack."""
    settings = VariationalSettings(
        **SMALL, lr=0.02, clip=None, n_per_round=2.0, noise_variance=0.5, initial_std=0.1, prior_variance=0.5
    )
    learner = Variational(RULES[kind], settings, filled(runs=1), 4, [3])
    n, prior, lr, noise = 80.0, 2.0, 0.02, Streams([3], "training", CPU)
    beta1, beta2 = learner.stack.rule.betas
    mean = learner.stack.weights.double()
    momentum, first = torch.zeros_like(mean), (100.0 - prior) / n
    curvature, decay = torch.full_like(mean, first), prior / n
    for t, (x, arms, targets) in enumerate(follow(learner, 4), start=1):
        perturbed = noise.normal(mean.shape[1]).double() / (n * curvature + prior).sqrt()
        gradient = reference_gradient(NETWORK, (mean + perturbed).float(), x, arms, targets).double()
        if kind == "vadam":
            momentum = beta1 * momentum + (1 - beta1) * (gradient + decay * mean)
            curvature = beta2 * curvature + (1 - beta2) * gradient**2
            mean = mean - lr * momentum / (1 - beta1**t) / ((curvature / (1 - beta2**t)).sqrt() + decay)
        else:
            momentum = beta1 * momentum + (1 - beta1) * gradient
            f = n * (curvature + decay) * perturbed * gradient
            correction = (1 - beta2) ** 2 * (curvature - f) ** 2 / (2 * (curvature + decay))
            curvature = beta2 * curvature + (1 - beta2) * f + correction
            step = momentum / (1 - beta1**t) + decay * mean
            mean = mean - lr * (first + decay) * step / (curvature + decay)
    learner.train()
    assert_close(learner.stack.weights.double(), mean, rtol=1e-4, atol=1e-6)
    name = "second_moment" if kind == "vadam" else "hessian"
    assert_close(learner.stack.state[name].double(), curvature, rtol=1e-4, atol=1e-7)
    assert_close(learner.gaussian()[1].double(), 1 / (n * curvature + prior), rtol=1e-4)
    assert_close(learner.gaussian()[0], learner.stack.weights)


def test_bayes_by_backprop_descends_the_elbo():
    settings = VariationalSettings(
        **SMALL, lr=0.01, clip=None, n_per_round=1.0, noise_variance=0.2, initial_std=0.1, prior_variance=0.5
    )
    learner = Variational(RULES["bbb"], settings, filled(runs=1), 4, [3])
    mean, rho = learner.stack.weights.clone().requires_grad_(), learner.stack.state["rho"].clone().requires_grad_()
    optimizer = torch.optim.Adam([mean, rho], lr=0.01)
    noise = Streams([3], "training", CPU)
    module = NETWORK.build(member(initial(NETWORK, [0]), 0))
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
    assert_close(learner.stack.weights, mean.detach(), rtol=1e-4, atol=1e-5)
    assert_close(learner.stack.state["rho"], rho.detach(), rtol=1e-4, atol=1e-5)
    assert_close(learner.gaussian()[1], nn.functional.softplus(rho.detach()).square(), rtol=1e-4)


# --- regularisers ---------------------------------------------------------------------------------------------------


def test_dropout_in_training_alone_for_those_who_choose_without():
    settings = GreedySettings(**SMALL, lr=0.05, dropout=0.4, clip=None)
    learner = Greedy(settings, filled(), 4, [3, 4])
    leaf = learner.stack.weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=0.05)
    noise = Streams([3, 4], "training", CPU)
    for x, arms, targets in follow(learner, 4):
        drawn = (noise.uniform(16 * 11) >= 0.4) / 0.6
        masks = drawn[:, : 16 * 6].view(2, 16, 6), drawn[:, 16 * 6 :].view(2, 16, 5)
        leaf.grad = reference_gradient(NETWORK, leaf.detach(), x, arms, targets, masks)
        optimizer.step()
    learner.train()
    assert_close(learner.stack.weights, leaf.detach(), rtol=1e-4, atol=1e-6)
    x = torch.randn(2, 5, 3)
    assert_close(learner.scores(x), forward(NETWORK, learner.params, x))


@pytest.mark.parametrize("kind", ["greedy", "badam", "bbb", "vadam", "ivon"])
def test_the_average_of_the_weights_acts(kind):
    own = {**SMALL, "train_steps": 1, "lr": 0.05, "average": 0.6, **({"form": "map"} if kind == "badam" else {})}
    learner = entry(kind).learner(entry(kind).settings(**own), filled(), 4, [3, 4])
    seen, expected = [], None
    for t in range(5):
        learner.train()
        seen.append(learner.stack.weights.clone())
        # A plain mean at first: the start has no share in it.
        share = min(0.6, t / (t + 1))
        expected = seen[0] if expected is None else share * expected + (1 - share) * seen[-1]
    assert_close(learner.stack.mean, expected)
    assert not close(learner.stack.mean, learner.stack.weights)
    if kind == "greedy":
        x = torch.randn(2, 5, 3)
        assert_close(learner.scores(x), forward(NETWORK, unflatten(NETWORK, expected), x))
    else:
        assert_close(learner.gaussian()[0], expected)


@pytest.mark.parametrize("members", [1, 3])
def test_the_noise_is_the_error_of_predictions_made_before_the_reward_was_learnt(members):
    settings = BootstrapSettings(**SMALL, standardise=True, l2=0.5, l2_by_noise=True, members=members)
    buffer = filled()
    learner = Bootstrap(settings, buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    assert (learner.noise_variance() == 1).all()
    learner.train()
    shift, scale = buffer.moments()
    source = torch.Generator().manual_seed(9)
    arms, rewards = torch.randint(4, (2, 20), generator=source), torch.randn(2, 20, generator=source)
    places = buffer.add(arms, rewards)
    predicted = forward(learner.network, learner.params, buffer.contexts[:, places].repeat_interleave(members, 0))
    learner.observe(places)
    for network in range(2 * members):
        run = network // members
        targets = (rewards[run] - shift[run]) / scale[run]
        errors = predicted[network].gather(1, arms[run].unsqueeze(1)).squeeze(1) - targets
        before = 100 * 0.9995**20
        expected = (before + float(errors.square().sum())) / (before + 20)
        assert float(learner.noise_variance()[network]) == approx(expected, rel=1e-4)
    learner.train()
    assert_close(learner.stack.penalty, 0.5 * learner.noise_variance())


# --- posteriors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["likelihood", "map"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_badams_posterior_is_the_formula(form, power):
    settings = BadamSettings(**SMALL, form=form, power=power, prior_variance=0.25, betas=(0.9, 0.99))
    learner = Badam(settings, filled(), 4, [3, 4])
    learner.train()
    mean, variance = learner.gaussian()
    moment = learner.stack.state["exp_avg_sq"].double() / (1 - 0.99**4)
    data = 40 * 16 * moment**power
    assert_close(variance.double(), 1 / (data + 4), rtol=1e-4)
    expected = learner.stack.weights.double() * (data / (data + 4) if form == "likelihood" else 1)
    assert_close(mean.double(), expected, rtol=1e-4, atol=1e-8)


def test_badam_before_any_training_is_the_prior():
    learner = Badam(BadamSettings(**SMALL, prior_variance=0.25), filled(), 4, [3, 4])
    mean, variance = learner.gaussian()
    assert (mean == 0).all()
    assert_close(variance, torch.full_like(variance, 0.25))
    assert learner.scores(torch.randn(2, 5, 3)).isfinite().all()


def test_dropout_draws_a_mask_a_row():
    learner = MCDropout(GreedySettings(**SMALL, dropout=0.4), filled(), 4, [3, 4])
    found = learner.scores(torch.ones(2, 4000, 3))
    masks = (Streams([3, 4], "posterior", CPU).uniform(4000 * 11) >= 0.4) / 0.6
    assert masks.unique().tolist() == approx([0, 1 / 0.6])
    assert (masks == 0).float().mean() == approx(0.4, abs=0.01)
    first = masks[:, : 4000 * 6].view(2, 4000, 6), masks[:, 4000 * 6 :].view(2, 4000, 5)
    assert_close(found, forward(learner.network, learner.params, torch.ones(2, 4000, 3), masks=first))
    assert found[0, :, 0].unique().numel() > 100


def test_one_member_of_the_ensemble_scores_each_row():
    learner = Bootstrap(BootstrapSettings(**SMALL, members=3), filled(), 4, [3, 4])
    contexts = torch.randn(2, 50, 3)
    found = learner.scores(contexts)
    every = forward(learner.network, learner.params, contexts.repeat_interleave(3, dim=0)).view(2, 3, 50, 4)
    same = (every == found.unsqueeze(1)).all(dim=3)
    assert (same.sum(dim=1) == 1).all()
    assert (same.float().mean(dim=2) > 0.1).all()


def test_members_learn_from_their_own_halves():
    buffer = filled()
    learner = Bootstrap(BootstrapSettings(**SMALL, members=3), buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    counts = learner._counts[:, :40]
    assert counts.unique().tolist() == [0, 2]
    assert not torch.equal(counts[0], counts[1])
    before = learner.stack.weights.clone()
    learner._counts.zero_()
    learner.train()
    assert_close(learner.stack.weights, before)


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
            assert_close(found.mean[run, arm, 0], mu, rtol=1e-6, atol=1e-8)
            assert_close(found.covariance[run, arm], np.linalg.inv(lam), rtol=1e-8)
            assert float(found.shape[run, arm]) == a
            assert float(found.scale[run, arm]) == approx(b, rel=1e-6)


def test_linear_draws_are_students():
    data = Statistics.zeros(1, 2, 3, CPU)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 3, generator=source, dtype=torch.float64)
    x[..., 2] = 1
    rewards = torch.randn(1, 12, generator=source, dtype=torch.float64)
    for arm in range(2):
        data.add(torch.full((1, 12), arm), x, rewards, torch.ones(1, 12).double())
    posterior = LinearPosterior.of(data, precision=0.25, shape=6, scale=6)
    here = torch.tensor([0.5, -1.0, 1.0], dtype=torch.float64)
    n = 60_000
    draws = posterior.draws(here.expand(1, n, 3), 1, Streams([1], "l", CPU))[0, :, 0, 0]
    lam = posterior.covariance[0, 0]
    a, b = float(posterior.shape[0, 0]), float(posterior.scale[0, 0])
    scale = math.sqrt(b / a * float(here @ lam @ here))
    reference = torch.distributions.StudentT(2 * a, float(here @ posterior.mean[0, 0, 0]), scale)
    assert float(draws.mean()) == approx(float(reference.mean), abs=5 * scale / math.sqrt(n))
    assert float(draws.var()) == approx(float(reference.variance), rel=0.04)
    # The fourth moment tells a Student from a Gaussian: 3 + 6/(2a − 4).
    kurtosis = float(((draws - draws.mean()) / draws.std()).pow(4).mean())
    assert kurtosis == approx(3 + 6 / (2 * a - 4), abs=0.25)


def arms_with_one_prior(weights_std: float) -> tuple[Statistics, np.ndarray, np.ndarray]:
    """Of one run with six arms, nine observations each; their features, (arms, n, 3), and rewards, (arms, n)."""
    source = np.random.default_rng(5)
    x = np.concatenate([source.normal(size=(6, 9, 2)), np.ones((6, 9, 1))], axis=2)
    rewards = (x @ (weights_std * source.normal(size=(6, 3, 1)))).squeeze(2) + 0.5 * source.normal(size=(6, 9))
    data = Statistics.zeros(1, 6, 3, CPU)
    for arm in range(6):
        own = torch.from_numpy(x[arm])[None], torch.from_numpy(rewards[arm])[None]
        data.add(torch.full((1, 9), arm), *own, torch.ones(1, 9).double())
    return data, x, rewards


def marginals(x: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """1 + X Λ₀⁻¹ Xᵀ of all arms, a block matrix."""
    return block_diag(*(np.eye(len(own)) + own @ np.linalg.inv(precision) @ own.T for own in x))


def test_a_step_towards_the_shared_precision_makes_rewards_likelier():
    data, x, rewards = arms_with_one_prior(0.3)
    prior, precision = torch.zeros(1, 6, 1, 3).double(), 0.01 * torch.eye(3).double()[None, None]
    first, variance, evidence = precision, 0.25, []
    for _ in range(6):
        covariance = variance * marginals(x, precision[0, 0].numpy())
        evidence.append(multivariate_normal.logpdf(rewards.ravel(), cov=covariance))
        covariances, mean, _ = normal_equations(data, prior, precision)
        noise = torch.full((1, 1), variance).double()
        precision = shared_precision(mean.squeeze(2), covariances, noise, first, first_arms=0.0)
    assert all(np.diff(evidence) > 0)
    # Arms that nothing is known of, so many that the others do not count, leave the first precision.
    unmoved = shared_precision(mean.squeeze(2), covariances, noise, first, first_arms=1e12)
    assert_close(unmoved, first, rtol=1e-6)


def test_neural_linear_is_the_conjugate_posterior_on_the_features():
    buffer = filled()
    learner = NeuralLinear(agent_settings("neural-linear", standardise=False, **SMALL), buffer, 4, [3, 4])
    learner.observe(slice(0, 40))
    learner.train()
    found = learner.linear_posterior()
    for run in range(2):
        module = learner.network.build(member(learner.params, run)).eval()
        with torch.no_grad():
            features = with_constant(module[:-1](buffer.contexts[run, :40])).numpy()
        for arm in range(4):
            mine = (buffer.arms[run, :40] == arm).numpy()
            mu, _, a, b = conjugate(features[mine], buffer.rewards[run, :40].double().numpy()[mine], 0.25, 6, 6)
            assert_close(found.mean[run, arm, 0], mu, rtol=1e-4, atol=1e-5)
            assert float(found.shape[run, arm]) == a
            assert float(found.scale[run, arm]) == approx(b, rel=1e-4)


def test_neural_linears_window_counts_for_all():
    buffer = filled()
    learner = NeuralLinear(agent_settings("neural-linear", window=4, **SMALL), buffer, 4, [3, 4])
    for start in range(0, 40, 9):
        learner.observe(slice(start, min(start + 9, 40)))
    learner.train()
    for run in range(2):
        for arm in range(4):
            mine = torch.nonzero(buffer.arms[run, :40] == arm).flatten()
            assert float(learner.statistics.gram[run, arm, -1, -1]) == approx(len(mine))


# --- streams, buffers, settings -------------------------------------------------------------------------------------


def test_a_runs_numbers_do_not_depend_on_its_neighbours_and_resume_after_a_restore():
    many, one = Streams([1, 2, 3], "p", CPU), Streams([2], "p", CPU)
    assert_close(many.uniform(5)[1], one.uniform(5)[0])
    saved = many.state()
    draws = (
        lambda s: s.normal(3, 2),
        lambda s: s.uniform(5),
        lambda s: s.rows(9, 4),
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
    assert_close(mean.squeeze(1), rewards.mean(dim=1))
    assert_close(std.squeeze(1), rewards.std(dim=1, correction=0))
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
    assert_close(flat[1:], initial_weights(NETWORK, [2], 0.3, CPU))


def test_settings_by_name():
    for agent in PAPER_AGENTS:
        paper, tuned = agent_settings(agent, "paper"), agent_settings(agent)
        if agent == "hybrid":
            assert paper == tuned
        if "lr" not in paper.names() or agent in ("hybrid", "bbb-showdown"):
            continue
        assert (paper.lr, paper.lr_decay, paper.init_range, paper.batch_size) == (0.1, 0.5, 0.3, 512)
        assert (paper.train_steps, paper.clip, paper.standardise) == (50, 5.0, False)
    for agent in PAPER_AGENTS:
        every = 5 if agent == "hybrid" else 20
        assert (agent_settings(agent, "paper").train_every, agent_settings(agent).initial_pulls) == (
            every,
            1 if agent == "hybrid" else 3,
        )
    assert agent_settings("badam", "paper").n_data(100) == 51_200
    assert agent_settings("badam", "paper").form == "likelihood"
    assert (
        agent_settings("badam", "paper").prior_variance == agent_settings("badam-map", "paper").prior_variance == 0.01
    )
    assert agent_settings("badam-map").form == agent_settings("badam-map", "paper").form == "map"
    assert agent_settings("mc-dropout").dropout == agent_settings("mc-dropout", "paper").dropout == 0.2
    assert agent_settings("epsilon-greedy").epsilon == agent_settings("epsilon-greedy", "paper").epsilon == 0.05
    assert agent_settings("bbb", "paper").noise_variance == 0.01
    assert agent_settings("linear").standardise


@pytest.mark.parametrize("agent", PAPER_AGENTS)
def test_settings_survive_json_with_the_keys_of_other_agents(agent):
    own = agent_settings(agent)
    text = json.dumps({"kind": agent, "members": 3, "window": 7, **own.plain()})
    assert type(own).from_plain(json.loads(text)) == own
    less = {name: value for name, value in own.plain().items() if name != "train_every"}
    with pytest.raises(KeyError, match="train_every"):
        type(own).from_plain(less)


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    [
        ("vadam", {"lr": 0.0}, "lr must be positive"),
        ("vadam", {"lr": True}, "lr must be positive"),
        ("vadam", {"hiden": (3,)}, "vadam has no setting hiden: choose from activation, average, batch_size"),
        ("vadam", {"dropout": 0.1}, "vadam has no setting dropout"),
        (
            "linear",
            {"lr": 0.1},
            "linear has no setting lr: choose from epsilon, forget, initial_pulls, precision, scale",
        ),
        ("vadam", {"rule": "adam"}, "no setting rule"),
        ("vadam", {"batch_size": 1.5}, "batch_size must be a positive whole number, got 1.5"),
        ("greedy", {"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ("vadam", {"average": 1.0}, "average"),
        ("vadam", {"noise_variance": 0.0}, "noise_variance must be positive and finite"),
        ("vadam", {"epsilon": 2}, "epsilon must be between 0 and 1"),
        ("linear", {"forget": 0}, "forget must be positive and finite, or None, got 0"),
        ("badam", {"form": "mode"}, "form must be 'likelihood' or 'map', got 'mode'"),
        ("vadam", {"betas": (0.9, 1.0)}, "betas"),
        ("vadam", {"clip": 0.0}, "clip"),
        ("greedy", {"l2": math.nan}, "l2"),
        ("greedy", {"l2_by_noise": 1}, "l2_by_noise must be True or False"),
        ("vadam", {"initial_pulls": -1}, "initial_pulls must be a whole number, 0 or more"),
        ("vadam", {"initial_std": 1.0}, "wider than the prior"),
        ("vadam", {"hidden": [3]}, r"hidden must be a tuple of whole numbers like \(100, 100\), got \[3\]"),
        ("neural-linear", {"hidden": ()}, "hidden must be one hidden layer or more"),
        ("bootstrap", {"members": 0}, "members"),
    ],
)
def test_bad_settings_are_refused(agent, changes, message):
    with pytest.raises(SettingError, match=message):
        agent_settings(agent, **changes)


def test_unknown_agents_and_foreign_settings_are_refused():
    with pytest.raises(SettingError, match="agent must be one of"):
        agent_settings("bandit")
    with pytest.raises(SettingError, match="settings must be one of"):
        agent_settings("badam", "best")
    for mine, other in (("greedy", "badam"), ("ivon", "greedy")):
        with pytest.raises(SettingError, match=f"{mine} takes .*Settings, not .*Settings"):
            agent_settings(mine, agent_settings(other))
    assert agent_settings("badam-map", agent_settings("badam")) == agent_settings("badam")
