"""Every rival that is installed learns, and the benchmark of bandits treats all alike: `make peers-test`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bandits
from bandit_rivals import RIVALS, Diverged, Setting
from bayesadam.bandits import classification_problem

ROUNDS = 300


@pytest.fixture(scope="module")
def clusters():
    """Three classes far from each other: whoever learns at all is right nearly always."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=ROUNDS)
    X = np.eye(3)[labels] * 4 + random.standard_normal((ROUNDS, 3)) * 0.3
    return classification_problem(X, labels, name="clusters")


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_learn(name, clusters):
    entrant = RIVALS[name]
    try:
        entrant.load()
    except ImportError as error:
        pytest.skip(f"{entrant.package}: {error}")
    games = (bandits.play(clusters, clusters.run(0), one, seed=1) for one in entrant.settings[:4])
    assert any(game.rewards.mean() > 0.75 and game.rewards[-100:].mean() > 0.9 for game in games)


class Fixed:
    """Always chooses one arm, and remembers what it was told."""

    def __init__(self, arm, fails_at=None):
        self.arm, self.fails_at, self.told = arm, fails_at, []

    def prepare(self, context):
        """As it is."""
        return context

    def act(self, context):
        """The one arm, as long as it does not fail."""
        if len(self.told) == self.fails_at:
            raise Diverged
        return self.arm

    def learn(self, context, arm, reward):
        """Remember."""
        self.told.append((context.tolist(), arm, reward))


def test_a_rival_is_shown_the_rounds_in_order(clusters):
    rounds, rival = clusters.run(0, 20), Fixed(2)
    game = bandits.play(clusters, rounds, Setting("fixed", lambda *_: rival), 0)
    assert np.array_equal(game.rewards, rounds.rewards[:, 2])
    assert [told[0] for told in rival.told] == rounds.contexts.tolist()
    assert [told[1:] for told in rival.told] == [(2, reward) for reward in rounds.rewards[:, 2].tolist()]


def test_a_setting_that_diverges_is_never_the_best(clusters):
    settings = tuple(
        Setting(f"{arm}, {fails_at}", lambda *_, arm=arm, fails_at=fails_at: Fixed(arm, fails_at))
        for arm, fails_at in ((0, 5), (1, None), (2, None))
    )
    played = [clusters.run(seed, 50) for seed in range(2)]
    entrant = bandits.Entrant("bayesadam", lambda: bandits, settings)
    found = bandits.rival_result(clusters, played, [0, 1], entrant, quick=False)
    assert found["rows"]["default"]["skipped"] == "diverged in 2 runs"
    means = {arm: np.mean([one.rewards[:, arm].mean() for one in played]) for arm in (1, 2)}
    best = max(means, key=means.get)
    assert found["rows"]["best"]["setting"] == f"{best}, None"
    assert np.mean(found["rows"]["best"]["reward_ratio"]) == pytest.approx(means[best])


def test_arms_drawn_at_random_have_all_of_uniforms_regret(clusters):
    played = [clusters.run(seed) for seed in range(2)]
    found = bandits.scores(played, [one.uniform.sum() for one in played], ROUNDS)
    assert found["regret_ratio"] == pytest.approx([1, 1])
    assert found["reward_ratio"] == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize("name", bandits.SCIKIT_LEARN)
def test_scikit_learn_sets_offer_more_rounds_than_rows(name):
    chosen = bandits.scikit_learn_problem(name)
    longer, shorter = chosen.run(3, 5000), chosen.run(3, 100)
    assert longer.contexts.shape == (5000, chosen.n_features)
    assert np.array_equal(longer.contexts[:100], shorter.contexts)
    assert np.array_equal(longer.rewards.sum(axis=1), np.ones(5000))
    assert abs(longer.contexts.mean()) < 0.05


def test_no_rival_at_all_is_an_error(monkeypatch):
    def missing():
        raise ImportError("no such module")

    monkeypatch.setattr(bandits, "RIVALS", {"nobody": bandits.Entrant("nobody", missing, ())})
    with pytest.raises(SystemExit, match="nothing to compare with"):
        bandits.installed(["nobody"], alone=False)
    assert bandits.installed(["nobody"], alone=True) == {}
