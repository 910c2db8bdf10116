"""Agents of Table 1 against independent references: autograd, torch's optimisers, closed forms, explicit draws."""

import math

import pytest
import torch
from torch import nn

from bayesadam.engine.network import Network, forward, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from experiments.agents import AGENTS, agent_settings
from experiments.networks import BadamSettings, Buffer, GreedySettings, initial_weights
from experiments.rules import sampled_outputs
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


def learner_of(agent: str, settings, buffer: Buffer | None = None, seeds=(3, 4)):
    return AGENTS[agent].learner(settings, buffer or filled(), 4, seeds)


def reference_gradient(network, flat, x, arms, targets, masks=None):
    """By autograd, one network at a time."""
    rows = []
    for i in range(len(flat)):
        row = flat[i : i + 1].clone().requires_grad_()
        own = None if masks is None else [m[i : i + 1] for m in masks]
        found = forward(network, unflatten(network, row), x[i : i + 1], masks=own)[0]
        errors = (found.gather(1, arms[i].unsqueeze(1)).squeeze(1) - targets[i]).square()
        errors.mean().backward()
        rows.append(row.grad[0])
    return torch.stack(rows)


def epsilons(rows: int):
    return torch.split(Streams([0], "a", CPU).normal(rows, 15), [6, 5, 4], dim=2)


def test_sampled_outputs_have_the_moments_of_explicit_weight_draws():
    flat = initial_weights(NETWORK, [5], None, CPU)
    variance = 0.05 * torch.rand_like(flat)
    x = torch.randn(1, 2, 3)
    n = 40_000
    rows = x.repeat_interleave(n, dim=1)
    moments = unflatten(NETWORK, flat), unflatten(NETWORK, variance)
    found = sampled_outputs(NETWORK, *moments, rows, epsilons(2 * n)).view(2, n, 4)
    # One set of weights a row, drawn whole.
    weights = flat + variance.sqrt() * torch.randn(n, flat.shape[1], generator=torch.Generator().manual_seed(3))
    params = unflatten(NETWORK, weights)
    for row in range(2):
        explicit = forward(NETWORK, params, x[:, row : row + 1].expand(n, 1, 3).contiguous())[:, 0]
        error = explicit.std(dim=0) / math.sqrt(n)
        assert ((found[row].mean(dim=0) - explicit.mean(dim=0)).abs() < 6 * error).all()
        assert_close(torch.cov(found[row].T), torch.cov(explicit.T), rtol=0.06, atol=0.003)


def follow(learner, steps: int):
    """The mini-batches that a learner is about to draw, from a copy of its streams."""
    copy = Streams([3, 4], "batches", CPU)
    rows = copy.rows(learner.buffer.count, steps, learner.settings.batch_size).transpose(0, 1)
    shift, scale = learner.buffer.moments()
    for chosen in rows:
        x, arms, rewards = learner.buffer.at(chosen)
        yield x, arms, ((rewards - shift) / scale).float() if learner.settings.standardise else rewards


@pytest.mark.parametrize(("standardise", "decay", "dropout"), [(False, 0.0, 0.0), (True, 0.5, 0.0), (False, 0.5, 0.4)])
def test_training_is_torchs_adam_with_clipping_run_by_run(standardise, decay, dropout):
    own = {"lr": 0.05, "lr_decay": decay, "l2": 0.01, "clip": 0.4, "standardise": standardise, "dropout": dropout}
    learner, noise, masks = learner_of("greedy", GreedySettings(**SMALL, **own)), Streams([3, 4], "training", CPU), None
    leaves = [row.clone().requires_grad_() for row in learner.stack.weights]
    optimizers = [torch.optim.Adam([leaf], lr=0.05, weight_decay=0.01) for leaf in leaves]
    clipped = 0
    for t, (x, arms, targets) in enumerate(follow(learner, 4)):
        if dropout:
            drawn = (noise.uniform(16 * 11) >= dropout) / (1 - dropout)
            masks = drawn[:, : 16 * 6].view(2, 16, 6), drawn[:, 16 * 6 :].view(2, 16, 5)
        stack = torch.stack([leaf.detach() for leaf in leaves])
        gradient = reference_gradient(NETWORK, stack, x, arms, targets, masks)
        for i, (leaf, optimizer) in enumerate(zip(leaves, optimizers, strict=True)):
            leaf.grad = gradient[i]
            clipped += float(nn.utils.clip_grad_norm_([leaf], 0.4)) > 0.4
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + decay * t)
            optimizer.step()
    assert clipped
    learner.train()
    assert_close(learner.stack.weights, torch.stack([leaf.detach() for leaf in leaves]), rtol=1e-4, atol=1e-6)
    # Whoever has no posterior chooses without dropout.
    x = torch.randn(2, 5, 3)
    assert_close(learner.scores(x), forward(NETWORK, learner.stack.params, x))


@pytest.mark.parametrize("kind", ["greedy", "badam", "bbb", "vadam"])
def test_the_average_of_the_weights_acts(kind):
    own = {**SMALL, "train_steps": 1, "lr": 0.05, "average": 0.6, **({"form": "map"} if kind == "badam" else {})}
    learner = learner_of(kind, AGENTS[kind].settings(**own))
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
        assert_close(learner.stack.gaussian()[0], expected)


def test_the_noise_is_the_error_of_predictions_made_before_the_reward_was_learnt():
    buffer = filled()
    learner = learner_of("greedy", GreedySettings(**SMALL, standardise=True, l2=0.5, l2_by_noise=True), buffer)
    learner.observe(slice(0, 40))
    learner.train()
    assert (learner.stack.penalties == 0.5).all()
    shift, scale = buffer.moments()
    source = torch.Generator().manual_seed(9)
    arms, rewards = torch.randint(4, (2, 20), generator=source), torch.randn(2, 20, generator=source)
    places = buffer.add(arms, rewards)
    predicted = forward(learner.network, learner.stack.params, buffer.contexts[:, places])
    learner.observe(places)
    errors = predicted.gather(2, arms.unsqueeze(2)).squeeze(2) - (rewards - shift) / scale
    before = 100 * 0.9995**20
    learner.train()
    assert_close(learner.stack.penalties[:, 0], 0.5 * (before + errors.square().sum(dim=1)) / (before + 20), rtol=1e-4)


@pytest.mark.parametrize("form", ["likelihood", "map"])
def test_badams_posterior_is_the_formula(form):
    settings = BadamSettings(**SMALL, form=form, prior_variance=0.25, betas=(0.9, 0.99))
    learner = learner_of("badam", settings)
    learner.train()
    mean, variance = learner.stack.gaussian()
    moment = learner.stack.state["exp_avg_sq"].double() / (1 - 0.99**4)
    data = 40 * 16 * moment.sqrt()
    assert_close(variance.double(), 1 / (data + 4), rtol=1e-4)
    expected = learner.stack.weights.double() * (data / (data + 4) if form == "likelihood" else 1)
    assert_close(mean.double(), expected, rtol=1e-4, atol=1e-8)


def test_dropout_draws_a_mask_a_row():
    learner = learner_of("mc-dropout", GreedySettings(**SMALL, dropout=0.4))
    found = learner.scores(torch.ones(2, 4000, 3))
    masks = (Streams([3, 4], "posterior", CPU).uniform(4000 * 11) >= 0.4) / 0.6
    assert masks.unique().tolist() == approx([0, 1 / 0.6])
    assert (masks == 0).float().mean() == approx(0.4, abs=0.01)
    first = masks[:, : 4000 * 6].view(2, 4000, 6), masks[:, 4000 * 6 :].view(2, 4000, 5)
    assert_close(found, forward(learner.network, learner.stack.params, torch.ones(2, 4000, 3), masks=first))
    assert found[0, :, 0].unique().numel() > 100


def test_settings_by_name():
    for agent, entry in AGENTS.items():
        paper = agent_settings(agent, "paper")
        if "lr_decay" in entry.settings.names() and agent != "bbb-showdown":
            assert (paper.lr, paper.lr_decay, paper.init_range, paper.batch_size) == (0.1, 0.5, 0.3, 512)
            assert (paper.train_steps, paper.clip, paper.standardise) == (50, 5.0, False)
        every, pulls = (5, 1) if agent in ("hybrid", "linear") else (20, 3)
        assert (paper.train_every, paper.initial_pulls, agent_settings(agent).forget) == (every, pulls, None)
    assert agent_settings("badam", "paper").n_data(100) == 51_200
    assert agent_settings("badam", "paper").form == "likelihood"
    assert agent_settings("badam", "paper").prior_variance == 0.01
    assert agent_settings("badam-map").form == agent_settings("badam-map", "paper").form == "map"
    assert agent_settings("mc-dropout").dropout == agent_settings("mc-dropout", "paper").dropout == 0.2
    assert agent_settings("linear").hidden == agent_settings("linear", "paper").hidden == ()


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    [
        ("vadam", {"lr": True}, "lr must be positive"),
        ("vadam", {"hiden": (3,)}, "vadam has no setting hiden: choose from activation, average, batch_size"),
        ("badam", {"form": "mode"}, "form must be 'likelihood' or 'map', got 'mode'"),
        ("vadam", {"betas": (0.9, 1.0)}, "betas"),
        ("vadam", {"initial_std": 1.0}, "wider than the prior"),
        ("bandit", {}, "agent must be one of"),
    ],
)
def test_bad_settings_are_refused(agent, changes, message):
    with pytest.raises(SettingError, match=message):
        agent_settings(agent, **changes)
