"""The agent in a user's own loop: what it learns and refuses, probabilities, saves, trainings beside decisions."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import bayesadam as ba
from bandits.cases_bandits import ARMS, PAID, ROWS, assert_alike, assert_same, feed, new, state_of
from bayesadam import _storage as storage
from bayesadam.bandits import AGENTS, Agent, Decision, make_agent, read_log, replay
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from floats import approx, assert_close
from processes import PATIENCE

HERE = np.array([0.5, -0.3, 0.2])


def play(agent: Agent, rows: np.ndarray) -> list[int]:
    """Each arm pays its feature."""
    arms = []
    for row in rows:
        arms.append(agent.act(row))
        agent.update(row, arms[-1], float(row[arms[-1] % 3]))
    return arms


@pytest.mark.parametrize(("name", "forget"), [("hybrid", None), ("linear", None), ("linear", 11.0)])
def test_the_same_seed_plays_the_same_game_and_a_saved_agent_resumes_it(name, forget, tmp_path):
    whole, agent = new(name, forget=forget), new(name, forget=forget)
    expected, first = play(whole, ROWS[:40]), play(agent, ROWS[:23])
    agent.save(tmp_path / "agent.safetensors")
    resumed = Agent.load(tmp_path / "agent.safetensors")
    assert first + play(resumed, ROWS[23:40]) == expected
    assert resumed.settings == whole.settings
    assert_same(state_of(resumed), state_of(whole))


RELEASE = Path(__file__).parent / "release_0_2"
RELEASE_0_3 = Path(__file__).parents[1] / "release_0_3"


def test_a_log_of_release_0_2_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    shutil.copy(RELEASE / "log.jsonl", path)
    agent = replay(path)
    assert list(agent.pending) == json.loads((RELEASE / "expected.json").read_text())["log"]["pending"]
    assert_close(agent.probabilities(ROWS[:4, :2]).sum(axis=1), 1)
    agent.log(path)
    agent.reward(agent.pending[0], 1.0)
    agent.log(None)
    assert len(read_log(path)) == len(read_log(RELEASE / "log.jsonl")) == 11


@pytest.mark.parametrize("name", AGENTS)
def test_agents_of_release_0_3_go_on(name):
    kept = json.loads((RELEASE_0_3 / "agents.json").read_text())
    agent = Agent.load(RELEASE_0_3 / f"agent-{name}.safetensors")
    assert list(agent.pending) == kept["agents"][name]["pending"]
    # What the hybrid agent has learnt; its rule of exploring is another. The linear one is fitted anew.
    means = agent._learner.predictive(np.array(kept["contexts"], np.float32))[0]
    assert name == "linear" or np.allclose(means, kept["agents"][name]["means"], atol=1e-5)
    assert np.isfinite(means).all()
    # The shape of the head on the contexts is 1 + n/2 of each arm.
    assert 2 * (agent._learner.belief.linear.shape - 1).sum() == agent._seen.count > 0


def test_agents_that_the_library_no_longer_has_are_refused_by_name():
    for path in (RELEASE / "badam.safetensors", RELEASE_0_3 / "agent-greedy.safetensors"):
        name = path.stem.removeprefix("agent-")
        with pytest.raises(FileError, match=f"is of the agent '{name}', not one of hybrid, linear: .*experiments"):
            Agent.load(path)
    with pytest.raises(FileError, match=r"is of an agent with a learnt prior, which releases up to 0\.3 have"):
        Agent.load(RELEASE / "hybrid.safetensors")


def test_another_file_is_not_an_agent(tmp_path):
    (tmp_path / "x").write_bytes(b"no")
    save_file({"w": torch.zeros(2)}, tmp_path / "weights.safetensors")
    for name in ("x", "weights.safetensors"):
        with pytest.raises(FileError, match=r"not a saved agent.*: give the file that Agent\.save wrote"):
            Agent.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["settings"].pop("lr"), r"damaged or not a file of Agent\.save .*'lr'"),
        (lambda header: header.update(format=99), "has format 99.*upgrade it"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, message, tmp_path):
    new().save(tmp_path / "agent")
    tensors, header = storage.read(tmp_path / "agent", storage.AGENT)
    change(header)
    storage.write(tmp_path / "agent", tensors, header, storage.AGENT)
    with pytest.raises(FileError, match=message):
        Agent.load(tmp_path / "agent")


def test_it_learns():
    agent = new("linear")
    arms = play(agent, ROWS[:250])
    late = np.mean([row[arm] for row, arm in zip(ROWS[150:250], arms[150:], strict=True)])
    assert late > 0.6 * np.mean(ROWS[150:250].max(axis=1))


def test_every_arm_is_tried_at_first_and_a_batch_draws_for_each():
    agent = new("linear", 4, initial_pulls=2, epsilon=1.0)
    assert sorted(agent.act(ROWS[:8]).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(agent.act(np.tile(HERE, (50, 1))).tolist())) > 1
    assert isinstance(agent.act(HERE), int)


def test_rewards_may_come_late_and_in_any_order():
    prompt, late = new("linear"), new("linear")
    decisions = [late.decide(row) for row in ROWS[:12]]
    assert late.pending == tuple(range(12))
    for decision, row in zip(decisions, ROWS[:12], strict=True):
        late.reward(decision.id, 1.5)
        prompt.update(row, decision.arm, 1.5)
    assert late.pending == ()
    assert_alike(late, prompt, rtol=1e-12)


@pytest.mark.parametrize("name", AGENTS)
def test_a_new_arm_leaves_what_is_known_of_the_others(name):
    agent = new(name)
    feed(agent, 0, 40)
    before, weights = state_of(agent), agent._learner.stack.params if name == "hybrid" else {}
    assert agent.add_arm() == 3
    after = state_of(agent)
    for part in ("linear.mean", "hidden.covariance"):
        np.testing.assert_array_equal(after[part][:3], before[part])
    for part, weight in weights.items():
        grown = agent._learner.stack.params[part]
        assert torch.equal(grown[:, : weight.shape[1]], weight)
        assert torch.equal(grown[:, weight.shape[1] :], new(n_arms=4)._learner.stack.params[part][:, weight.shape[1] :])
    assert agent.act(ROWS[:2], arms=[3]).tolist() == [3, 3]
    feed(agent, 40, 60)
    assert agent.n_arms == 4


def test_removed_arms_are_not_chosen_and_come_back():
    agent = new("linear", initial_pulls=0, epsilon=1.0)
    agent.remove_arm(1)
    assert 1 not in agent.act(ROWS[:60]).tolist()
    agent.update(ROWS[0], 1, 0.5)
    agent.restore_arm(1)
    assert 1 in agent.act(ROWS[:60]).tolist()
    assert set(agent.act(ROWS[:60], arms=(0, 2)).tolist()) == {0, 2}
    agent.remove_arm(0)
    agent.remove_arm(1)
    with pytest.raises(SettingError, match="the last one stays"):
        agent.remove_arm(2)


@pytest.mark.parametrize(("name", "epsilon"), [("hybrid", 0.0), ("linear", 0.0), ("linear", 0.4)])
def test_arms_are_chosen_as_often_as_their_probabilities_say(name, epsilon):
    agent, n = new(name, 4, epsilon=epsilon, initial_pulls=0), 3000
    feed(agent, 0, 30)
    for arms in (None, (0, 2, 3)):
        shares = np.bincount(agent.act(np.tile(HERE, (n, 1)), arms=arms), minlength=4) / n
        allowed = None if arms is None else np.isin(np.arange(4), arms)[None]
        expected = agent.probabilities([HERE], allowed=allowed)[0]
        assert expected.sum() == approx(1)
        assert (np.abs(shares - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 4 / n).all()
        assert arms is None or expected[1] == 0
        assert (expected[list(arms or range(4))] >= epsilon / 4).all()


@pytest.mark.parametrize("name", AGENTS)
def test_probabilities_change_no_choice(name, monkeypatch):
    plain, asked = new(name, epsilon=0.1), new(name, epsilon=0.1)
    feed(plain, 0, 30)
    feed(asked, 0, 30)
    with monkeypatch.context() as patch:
        # Who acts has none to count.
        patch.setattr("bayesadam.bandits.network.best_shares", None)
        expected, chosen = [*map(plain.act, ROWS[:8]), *plain.act(ROWS[8:17])], []
    for row in ROWS[:8]:
        before = state_of(asked)
        asked.probabilities(ROWS[:8])
        assert_same(state_of(asked), before)
        chosen.append(asked.decide(row).arm)
    assert [*chosen, *(decision.arm for decision in asked.decide(ROWS[8:17]))] == expected


def test_an_arm_that_is_tried_in_turn_or_alone_on_offer_is_certain():
    agent = new("linear", initial_pulls=2)
    first = [agent.decide(HERE) for _ in range(6)]
    assert [(decision.arm, decision.probability) for decision in first] == [(arm, 1.0) for arm in (0, 1, 2, 0, 1, 2)]
    feed(agent, 0, 12)
    assert any(0 < one.probability < 1 for one in agent.decide(ROWS[:40]))
    assert agent.decide(HERE, arms=[1]).probability == 1.0
    agent.remove_arm(0)
    assert agent.probabilities([HERE])[0, 0] == 0
    with pytest.raises(MatchError, match="no allowed arm that is not removed"):
        agent.probabilities([HERE, HERE], allowed=np.array([[True, True, True], [True, False, False]]))


def test_a_batch_is_decided_logged_and_rewarded(tmp_path):
    path, agent = tmp_path / "log.jsonl", new(initial_pulls=1)
    agent.log(path)
    first, made = agent.decide(ROWS[0]), agent.decide(ROWS[1:9])
    assert [one.id for one in (first, *made)] == list(range(9))
    assert [one.arm for one in (first, *made[:2])] == [0, 1, 2]
    assert [one.probability for one in made[:2]] == [1.0, 1.0]
    log = read_log(path)
    np.testing.assert_array_equal(log.contexts, ROWS[:9])
    np.testing.assert_array_equal(log.arms, [first.arm, *(one.arm for one in made)])
    np.testing.assert_array_equal(log.probabilities, [1.0, *(one.probability for one in made)])
    for one in reversed(made):
        agent.reward(one.id, 1.0)
    assert agent.pending == replay(path).pending == (0,)


BAD = {
    "narrow": lambda a: a.update([1.0, 2.0], 0, 1.0),
    "empty": lambda a: a.act(np.zeros((0, 3))),
    "nan": lambda a: a.update([1.0, float("nan"), 0.0], 0, 1.0),
    "too large for float32": lambda a: a.act([1.0, 1e300, 0.0]),
    "text": lambda a: a.act(["1", "2", "3"]),
    "unknown arm": lambda a: a.update([1.0, 2.0, 3.0], 5, 1.0),
    "negative arm": lambda a: a.update([1.0, 2.0, 3.0], -1, 1.0),
    "half an arm": lambda a: a.update([1.0, 2.0, 3.0], 0.5, 1.0),
    "two rewards": lambda a: a.update([1.0, 2.0, 3.0], 0, [1.0, 2.0]),
    "one bad of many": lambda a: a.update(ROWS[:3], [0, 1, 9], [1.0, 1.0, 1.0]),
    "late nan": lambda a: a.reward(0, float("nan")),
    "reward in text": lambda a: a.reward(0, np.array("1.5")),
    "complex reward": lambda a: a.reward(0, 1 + 2j),
    "no arms": lambda a: a.act([1.0, 2.0, 3.0], arms=()),
    "one arm for a list": lambda a: a.act([1.0, 2.0, 3.0], arms=1),
    "a mask for a list": lambda a: a.act([1.0, 2.0, 3.0], arms=[True, False]),
    "removed arm": lambda a: a.remove_arm(8),
    "arms to restore": lambda a: a.restore_arm([1]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_changes_nothing(bad):
    agent = new("linear", seed=1)
    feed(agent, 0, 12)
    agent.decide(ROWS[0])
    before = state_of(agent)
    with pytest.raises(ba.BayesAdamError):
        BAD[bad](agent)
    assert_same(state_of(agent), before)
    assert len(agent.pending) == 1


@pytest.mark.parametrize("bad", ["zzz", None, 7.5, [1], -1, 99, False, Decision(0, 0, 1.0)])
def test_a_decision_that_was_never_made_has_no_reward(bad):
    agent = new("linear")
    decision = agent.decide(np.zeros(3))
    for told in (lambda wrong: agent.reward(wrong, 1.0), agent.forget):
        with pytest.raises(MatchError, match="was never made: give the `id` of what decide returned"):
            told(bad)
    agent.reward(np.int64(decision.id), 1.0)
    with pytest.raises(MatchError, match=r"decision 0 was rewarded or forgotten before: see agent\.pending"):
        agent.reward(decision.id, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_features": 0}, "n_features must be a positive whole number, got 0"),
        ({"n_arms": True}, "n_arms must be a positive whole number"),
        ({"name": "badam"}, "agent must be one of hybrid, linear, got 'badam'"),
        ({"magic": 3}, "hybrid has no setting magic: choose from average, batch_size"),
        ({"training": "later"}, r"training must be one of .*'now', 'background'.*, got 'later'"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"epsilon": 2}, "epsilon must be between 0 and 1"),
        ({"forget": 0}, "forget must be positive and finite, or None, got 0"),
        ({"hidden": [3]}, r"hidden must be a tuple of whole numbers like \(100, 100\), got \[3\]"),
        ({"initial_pulls": -1}, "initial_pulls must be a whole number, 0 or more"),
        ({"reward_range": (1, 0)}, r"reward_range must be a tuple \(low, high\) with low below high"),
    ],
    ids=str,
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(SettingError, match=message):
        make_agent(**{"n_features": 3, "n_arms": 2, **change})
    assert make_agent("linear", np.int64(2), np.int64(3)).n_arms == 3


@pytest.mark.parametrize(
    "reward", [True, np.array([True]), torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)]
)
def test_booleans_tensors_and_lists_are_taken(reward):
    agent = new("linear")
    agent.update(torch.zeros(3, requires_grad=True), 0, reward)
    agent.update([0.1, 0.2, 0.3], np.int32(1), 1)
    assert agent._seen.rewards[:2].tolist() == [1, 1]


class Held:
    """A training that waits to be let go."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, train = threading.Event(), threading.Event(), agent._learner.train

        def held(*seen: object) -> object:
            self.begun.set()
            assert self.go.wait(PATIENCE)
            return train(*seen)

        monkeypatch.setattr(agent._learner, "train", held)


@pytest.mark.parametrize("training", ["now", "background"])
def test_acting_does_not_wait_for_training(training, monkeypatch):
    agent = new(training=training)
    feed(agent, 0, 4)
    held = Held(agent, monkeypatch)
    learning = threading.Thread(target=feed, args=(agent, 4, 5))
    learning.start()
    assert held.begun.wait(PATIENCE)
    assert agent.act(ROWS[0]) in range(3)
    assert agent._learner.stack.done == 0
    held.go.set()
    learning.join(PATIENCE)
    agent.wait()
    assert agent._learner.stack.done == 4


@pytest.mark.parametrize("forget", [None, 40.0])
def test_what_comes_during_a_training_is_learnt_as_if_it_came_after(forget, monkeypatch, tmp_path):
    agent, twin = (new(training=training, forget=forget, train_every=50) for training in ("background", "now"))
    feed(twin, 0, 99)
    feed(agent, 0, 49)
    held = Held(agent, monkeypatch)
    feed(agent, 49, 50)
    assert held.begun.wait(PATIENCE)
    before = agent._learner.belief
    feed(agent, 50, 99)
    agent.forget(agent.decide(ROWS[0]).id)
    assert agent._learner.belief is before
    held.go.set()
    agent.wait()
    assert_alike(agent, twin)
    assert agent._learner.belief is not before
    monkeypatch.undo()
    agent.save(tmp_path / "agent")
    again = Agent.load(tmp_path / "agent")
    assert again.training == "background"
    assert_same(state_of(again), state_of(agent))
    feed(agent, 99, 160)
    agent.wait()


def test_a_training_in_the_background_rests_after_every_step(monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr("bayesadam.bandits.network.time.sleep", rests.append)
    for training in ("now", "background"):
        agent = new(training=training)
        feed(agent, 0, 5)
        agent.wait()
        # Four steps, and parts of the fits.
        assert (len(rests) > 4) == bool(rests) == (training == "background")


def test_a_training_that_fails_is_told_once_and_leaves_the_network(monkeypatch, tmp_path):
    agent = new(training="background", train_every=20)
    agent.log(tmp_path / "log.jsonl")
    feed(agent, 0, 39)
    agent.wait()
    waits, before = agent.decide(ROWS[0]), agent._learner.stack.weights.clone()
    monkeypatch.setattr(agent._learner, "_fit_hidden", lambda seen, new: 1 // 0)
    feed(agent, 39, 40)
    agent._thread.join(PATIENCE)
    with pytest.raises(BayesAdamError, match=r"by zero.*repeat this call, which did nothing") as caught:
        agent.reward(waits.id, 1.0)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert agent.pending == (waits.id,)
    assert torch.equal(agent._learner.stack.weights, before)
    done = agent._learner.stack.done
    monkeypatch.undo()
    agent.reward(waits.id, 1.0)
    feed(agent, 40, 100)
    agent.wait()
    assert agent._learner.stack.done > done
    assert agent._seen.count == len(read_log(tmp_path / "log.jsonl")) == 101


def test_many_threads_decide_and_reward_while_trainings_go_on(tmp_path):
    agent, failures = new(training="background"), []
    agent.log(tmp_path / "log.jsonl")

    def work(first: int) -> None:
        try:
            for row in ROWS[first : first + 60]:
                agent.reward(agent.decide(row).id, float(row[0]))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agent.add_arm()
    agent.wait()
    assert not failures
    log = read_log(tmp_path / "log.jsonl")
    np.testing.assert_array_equal(log.ids, np.arange(180))
    assert agent._seen.count == np.isfinite(log.rewards).sum() == 180
    # The head on the contexts has every observation: its shape is a₀ + n/2 of each arm.
    assert agent._learner.belief.linear.shape[:3].sum() == approx(3 * 1.0 + 90)


def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesadam.bandits.observations.FIRST_ROOM", 16)
    for where in ("agent", "observations"):
        monkeypatch.setattr(f"bayesadam.bandits.{where}.MOST_ROOM", 64)


def test_more_observations_than_a_training_takes_note_of_wait_for_it(monkeypatch):
    little_room(monkeypatch)
    agent = new(training="background")
    held = Held(agent, monkeypatch)
    feeding = threading.Thread(target=agent.update, args=(ROWS[:600], ARMS[:600], PAID[:600]))
    feeding.start()
    assert held.begun.wait(PATIENCE)
    feeding.join(0.2)
    assert feeding.is_alive()
    assert 0 <= agent.act(ROWS[0]) < 3
    assert agent._seen.count <= 2 * 64 + 5
    held.go.set()
    feeding.join(PATIENCE)
    agent.wait()
    assert agent._seen.total == 600


@pytest.mark.slow
def test_beyond_its_room_an_agent_learns_from_the_newest_and_resumes(monkeypatch, tmp_path):
    little_room(monkeypatch)
    agent = new()
    feed(agent, 0, 333)
    agent.save(tmp_path / "agent")
    again = Agent.load(tmp_path / "agent")
    feed(agent, 333, 400)
    feed(again, 333, 400)
    assert_same(state_of(again), state_of(agent))
    assert (agent._seen.total, len(agent._seen.arms) <= 128) == (400, True)
    np.testing.assert_array_equal(agent._seen.contexts[: agent._seen.count], ROWS[400 - agent._seen.count : 400])
