"""The hybrid agent: its formulas by hand, its training against torch's Adam, its units, where each head counts."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bayesadam.bandits import HybridSettings, make_agent
from bayesadam.bandits.linear import with_constant
from bayesadam.bandits.network import Hybrid, best_shares
from bayesadam.bandits.observations import Observations
from bayesadam.engine.network import flatten, initial, member
from bayesadam.engine.streams import Streams
from floats import approx, assert_close

SMALL = {"hidden": (30, 30), "dropout": 0.0, "train_steps": 100}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


LINEAR = rng(2).normal(size=(600, 4)).astype(np.float32)
LINEAR_PAYS = LINEAR @ rng(3).normal(size=(4, 3))
# The arm is the ring that a point lies in: no linear function of the coordinates tells.
RINGS = (math.sqrt(3) * rng(4).uniform(-1, 1, size=(1000, 2))).astype(np.float32)
RINGS_PAY = np.eye(3)[np.digitize(np.hypot(*RINGS.T) / math.sqrt(3), [0.5, 0.8])]


def played(x: np.ndarray, pays: np.ndarray, rounds: int, **changes: object) -> tuple[Hybrid, Observations]:
    """The learner after so many rounds, five at a time, and what it saw."""
    learner = Hybrid(HybridSettings(**{**SMALL, **changes}), x.shape[1], pays.shape[1], 1)
    seen = Observations(x.shape[1], learner.settings.forget)
    arms = list(range(pays.shape[1]))
    for first in range(0, rounds, 5):
        rows = np.arange(first, min(first + 5, rounds))
        chosen = learner.chosen(x[rows], arms)[0] if first else [0, 1, 2, 0, 1]
        learner.observe(seen, seen.add(x[rows], chosen, pays[rows, chosen]))
        if learner.due(seen):
            learner.belief = learner.train(seen, learner.belief)
    return learner, seen


def test_mean_and_deviation_by_hand():
    learner, _ = played(RINGS, RINGS_PAY, 150, reward_range=(0.0, 2.0))
    belief, x = learner.belief, RINGS[200:206]
    belief.share = 0.4
    mean, std = learner.predictive(x)
    noise = 9 * (2 / belief.units[1]) ** 2 / 3**3
    expected = np.zeros(mean.shape), np.zeros(std.shape)
    for head, share in ((belief.linear, 0.6), (belief.hidden, 0.4)):
        features = belief.features(head, x)
        pooled = head.scale.sum() / (1 + (head.shape - 1).sum())
        for arm in range(3):
            own = (head.scale[arm] + 4 * pooled) / (head.shape[arm] - 1 + 4)
            for k, row in enumerate(features):
                width = row @ head.covariance[arm] @ row
                expected[0][k, arm] += share * row @ head.mean[arm]
                expected[1][k, arm] += share * math.sqrt((own * width / (16 + width) + noise / head.shape[arm]) * width)
    assert_close(mean, expected[0], rtol=1e-9)
    assert_close(std, expected[1], rtol=1e-9)
    optimism = np.abs(rng(6).normal(size=(40_000, 1, 1)))
    preferred = np.eye(3)[(mean + optimism * std).argmax(axis=2)].mean(axis=0)
    assert_close(learner.probabilities(x, np.ones((6, 3), bool)), preferred, atol=0.015)


def test_probabilities_are_of_the_highest_line():
    mean, std = rng(1).normal(size=(300, 7)), np.abs(rng(2).normal(size=(300, 7)))
    # Equal and parallel lines, arms that cannot be chosen, certainty.
    std[:100], mean[50:100], mean[100:200, 3:], std[100:200, 3:], std[200:210] = 0.5, 1.0, -np.inf, 0.0, 0.0
    shares, step = np.array(list(map(best_shares, mean.tolist(), std.tolist()))), 1 / 20_000
    ends = np.sqrt(2) * torch.erfinv(torch.arange(step / 2, 1, step, dtype=torch.float64)).numpy()
    for row, share in enumerate(shares):
        best = (mean[row] + ends[:, None] * std[row]).argmax(axis=1)
        assert_close(share, np.bincount(best, minlength=7) * step, atol=2 * step)
    assert_close(shares.sum(axis=1), 1)


@pytest.mark.parametrize("far", [0.3, 30.0])
def test_an_arm_stays_doubtful_whatever_others_pay_and_where_it_was_not_tried(far):
    x, rewards = rng(8).normal(size=(60, 3)).astype(np.float32), rng(9).normal(size=60).astype(np.float32)
    stds = []
    for passes in (1, 2000):
        learner, seen = Hybrid(HybridSettings(reward_range=(-2.0, 2.0)), 3, 2, 1), Observations(3)
        learner.observe(seen, seen.add(x, np.ones(60, int), rewards))
        learner.observe(seen, seen.add(np.resize(x, (passes, 3)), np.zeros(passes, int), np.zeros(passes)))
        stds.append(learner.predictive(np.full((1, 3), far, np.float32))[1][0, 1])
    assert 0.9 * stds[0] < stds[1] <= stds[0]
    assert (stds[1] > 1) == (far > 1)


@pytest.mark.parametrize(("average", "l2"), [(0.0, 0.0), (0.6, 0.01)])
def test_a_training_is_torchs_adam_on_the_chosen_arms(average, l2):
    settings = HybridSettings(hidden=(6, 5), dropout=0.0, train_steps=4, batch_size=16, average=average, l2=l2)
    learner, seen = Hybrid(settings, 2, 3, 5), Observations(2)
    chosen = rng(1).integers(3, size=60)
    learner.observe(seen, seen.add(RINGS[:60], chosen, RINGS_PAY[np.arange(60), chosen]))
    model = learner.network.build(member(initial(learner.network, [5]), 0))
    # The penalty of the first training: no noise is known, and 60 observations fade it.
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=l2 * 500 / 560)
    rows = Streams([5], "batches").rows(60, 4, 16).numpy()[0]
    for _ in range(2):
        rows = np.where(rows % 10 == 0, (rows - 1) % 60, rows)
    assert (rows % 10 != 0).all()
    shift, scale = (np.float32(part) for part in seen.moments())
    averaged = None
    for t, at in enumerate(rows):
        outputs = model(torch.from_numpy(seen.contexts[at])).gather(1, torch.from_numpy(seen.arms[at])[:, None])
        loss = (outputs[:, 0] - torch.from_numpy((seen.rewards[at] - shift) / scale)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # The penalty is added after the clipping, as Adam's weight decay is.
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        flat = flatten({name: p.detach()[None].clone() for name, p in model.named_parameters()})
        share = min(average, t / (t + 1))
        averaged = flat if averaged is None else share * averaged + (1 - share) * flat
    belief = learner.train(seen, learner.belief)
    assert_close(learner.stack.weights, flat, rtol=1e-4, atol=1e-6)
    assert_close(learner.stack.mean, averaged, rtol=1e-4, atol=1e-6)
    assert_close(belief.layers[1][0], learner.stack.params["layer1.weight"][0], atol=0)
    assert learner.belief is not belief


def test_heads_after_a_training_are_fits_to_all_observations():
    learner, seen = played(LINEAR, LINEAR_PAYS, 60)
    new = learner.train(seen, learner.belief)
    targets = (seen.rewards[:60].astype(float) - new.units[0]) / new.units[1]
    weight, bias = (learner.stack.params[f"layer2.{part}"][0].double().numpy() for part in ("weight", "bias"))
    last = np.column_stack([weight, bias])
    features = new.features(new.hidden, seen.contexts[:60])
    net = learner.network.build(member(learner.stack.params, 0))
    with torch.no_grad():
        own = with_constant(net[:-1](torch.from_numpy(seen.contexts[:60])).numpy())
    assert_close(features, own, rtol=1e-5)
    data = np.einsum("ki,kj->ij", features, features)
    for arm in range(3):
        rows = seen.arms[:60] == arm
        inverse = np.linalg.inv(new.hidden.covariance[arm])
        # Λ₀ is what the normal equations leave, the same on every feature.
        ridge = inverse - features[rows].T @ features[rows]
        assert_close(ridge, ridge[0, 0] * np.eye(len(ridge)), rtol=1e-4, atol=1e-6 * data.max())
        cross = ridge[0, 0] * last[arm] + features[rows].T @ targets[rows]
        assert_close(new.hidden.mean[arm], np.linalg.solve(inverse, cross), rtol=1e-4, atol=1e-6)
        assert new.linear.shape[arm] == 1 + rows.sum() / 2


def test_the_head_that_does_not_decide_learns_later_what_it_would_have_learnt():
    learner, seen = played(RINGS, RINGS_PAY, 150)
    late, prompt = (copy.deepcopy(learner.belief) for _ in range(2))
    late.share, prompt.share = 0.0, 0.5
    for at in range(150, 170):
        rows = seen.add(RINGS[at : at + 1], [at % 3], RINGS_PAY[at, at % 3, None])
        for belief in (late, prompt):
            learner.observe(seen, rows, belief)
    # What waits does not change with the memory that it was in.
    seen.contexts[:] = 0
    assert len(late.waiting) == 20
    assert not prompt.waiting
    late.settle()
    for name in ("joint", "shape", "scale"):
        assert_close(getattr(late.hidden, name), getattr(prompt.hidden, name), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_linear_rewards_are_left_to_the_linear_head():
    learner, seen = played(LINEAR, LINEAR_PAYS, 300)
    assert learner.belief.share < 0.3
    assert seen.rewards.sum() > 0.8 * LINEAR_PAYS[:300].max(axis=1).sum()


@pytest.mark.slow
def test_others_are_left_to_the_network():
    learner, seen = played(RINGS, RINGS_PAY, 1000)
    assert learner.belief.share > 0.7
    assert seen.rewards[700:1000].mean() > 0.8


@pytest.mark.parametrize(("scale", "shift"), [(8.0, 0.0), pytest.param(1.0, 16.0, marks=pytest.mark.slow)])
def test_units_of_the_rewards_do_not_matter(scale, shift):
    ours = played(LINEAR, LINEAR_PAYS, 200, train_steps=20)[1].arms[:200]
    theirs = played(LINEAR, scale * LINEAR_PAYS + shift, 200, train_steps=20)[1].arms[:200]
    assert (ours == theirs).mean() > 0.9


def test_a_prize_that_was_not_seen_is_possible_where_the_range_says_so():
    x = np.zeros((1, 2), np.float32)
    wide, narrow = (
        played(RINGS, RINGS_PAY, 60, train_steps=10, reward_range=ends)[0].predictive(x)[1]
        for ends in ((0.0, 50.0), (0.0, 1.0))
    )
    assert (wide > 3 * narrow).all()


def test_rewards_of_nothing_but_zeros_do_not_end_exploration():
    agent = make_agent(n_features=2, n_arms=4, seed=1, **{**SMALL, "train_steps": 10})
    assert agent.name == "hybrid"
    arms = []
    for context in rng(5).normal(size=(100, 2)):
        arms.append(agent.act(context))
        agent.update(context, arms[-1], 0.0)
    assert min(np.bincount(arms[50:], minlength=4)) > 2


def test_trainings_grow_rarer():
    trained, following = 0, 0
    for count in range(5, 401, 5):
        if count >= following:
            trained, following = trained + 1, count + int(max(5, (1.3 - 1) * count))
    assert played(RINGS, RINGS_PAY, 400, train_steps=2)[0].stack.done == 2 * trained
    assert played(RINGS, RINGS_PAY, 400, train_steps=2, forget=50.0)[0].stack.done > 2 * trained


def test_the_penalty_falls_with_the_data_and_with_the_noise():
    learner, seen = played(RINGS, RINGS_PAY, 120, train_steps=10)
    learner.train(seen, learner.belief)
    noise = learner.stack.penalty * (500 + 120) / 500 / learner.settings.l2
    hidden = learner.belief.hidden
    expected = (hidden.scale + learner._noise(learner.belief)).sum() / hidden.shape.sum()
    # The last training's units are nearly those of this one.
    assert noise == approx(min(1, expected), rel=0.2)
