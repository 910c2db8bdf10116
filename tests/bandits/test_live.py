"""The agent in a user's own loop: what it learns and refuses, and that it is whole after a save, a growth, a thread."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bayesadam as ba
from bayesadam.bandits import AGENTS, PAPER_AGENTS, Agent, Decision, Prior, agent_settings, make_agent, read_log, replay
from bayesadam.engine.network import unflatten
from bayesadam.errors import FileError, MatchError, SettingError
from floats import approx, assert_close
from processes import PATIENCE

SMALL = {"hidden": (8,), "batch_size": 16, "train_every": 5, "train_steps": 4}


def small(name: str) -> dict[str, object]:
    """As much of it as the agent has."""
    return {key: value for key, value in SMALL.items() if key in agent_settings(name).names()}


def contexts(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3))


def paid(context: np.ndarray, arm: int) -> float:
    """Each arm likes one feature."""
    return float(context[arm % 3])


def play(agent: Agent, rows: np.ndarray) -> list[int]:
    arms = []
    for row in rows:
        arm = agent.act(row)
        agent.update(row, arm, paid(row, arm))
        arms.append(arm)
    return arms


def state_of(agent: Agent) -> dict[str, torch.Tensor]:
    seen = {
        "arms": agent._buffer.arms[:, : agent._buffer.count],
        "rewards": agent._buffer.rewards.clone(),
    }
    return (
        seen
        | {f"t{k}": v for k, v in agent._trainer.state().items()}
        | {f"a{k}": v for k, v in agent._actor.state().items()}
    )


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", AGENTS)
def test_the_same_seed_plays_the_same_game_and_a_saved_agent_resumes_it(name, tmp_path):
    rows = contexts(40)
    whole = make_agent(name, 3, 3, seed=7, **small(name))
    expected = play(whole, rows)
    agent = make_agent(name, 3, 3, seed=7, **small(name))
    first = play(agent, rows[:23])
    agent.save(tmp_path / "agent.safetensors")
    resumed = Agent.load(tmp_path / "agent.safetensors")
    assert first + play(resumed, rows[23:]) == expected
    assert_same(state_of(resumed), state_of(whole))


# Written by release 0.2.0: agents, a prior and a log, and what they answered.
RELEASE = Path(__file__).parent / "release_0_2"
ANSWERS = json.loads((RELEASE / "expected.json").read_text())
ANSWERED = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)[:4]


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "log"])
def test_an_agent_of_release_0_2_loads(name, tmp_path):
    agent = Agent.load(RELEASE / f"{name}.safetensors")
    assert (agent.name, agent.n_arms, list(agent.pending)) == (name, 3, ANSWERS[name]["pending"])
    assert_close(agent.probabilities(ANSWERED, draws=100), np.array(ANSWERS[name]["probabilities"]), atol=0.021)
    agent.reward(agent.pending[0], 1.0)
    agent.update(ANSWERED, [0, 1, 2, 1], [1.0, 2.0, 3.0, 4.0])
    agent.save(tmp_path / "agent")
    assert_same(state_of(Agent.load(tmp_path / "agent")), state_of(agent))


def test_a_log_and_a_prior_of_release_0_2_load(tmp_path):
    path = tmp_path / "log.jsonl"
    shutil.copy(RELEASE / "log.jsonl", path)
    agent = replay(path)
    assert list(agent.pending) == ANSWERS["log"]["pending"]
    assert_close(agent.probabilities(ANSWERED, draws=100), np.array(ANSWERS["log"]["probabilities"]), atol=0.021)
    agent.log(path)
    agent.reward(agent.pending[0], 1.0)
    agent.log(None)
    assert len(read_log(path)) == len(read_log(RELEASE / "log.jsonl")) == 11
    prior = Prior.load(RELEASE / "prior.safetensors")
    assert make_agent("hybrid", 2, 2, prior=prior).act(ANSWERED[0]) in (0, 1)


def test_a_file_without_a_setting_is_refused_by_its_name(tmp_path):
    path = tmp_path / "agent.safetensors"
    make_agent("linear", 3, 2).save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["bayesadam.bandits"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["settings"]["shape"]
    save_file(tensors, path, metadata={"bayesadam.bandits": json.dumps(header)})
    with pytest.raises(FileError, match="is not a saved agent of this version: 'shape'"):
        Agent.load(path)


@pytest.mark.parametrize("name", ["badam", "linear"])
def test_it_learns(name):
    own = {} if name == "linear" else {"hidden": (20,), "train_steps": 20, "lr": 1e-2}
    agent = make_agent(name, 3, 3, seed=1, **{**small(name), **own})
    rows = contexts(250, 1)
    arms = play(agent, rows)
    late = np.mean([paid(row, arm) for row, arm in zip(rows[150:], arms[150:], strict=True)])
    best = np.mean(rows[150:].max(axis=1))
    assert late > 0.6 * best


@pytest.mark.parametrize("name", sorted({*PAPER_AGENTS} - {*AGENTS}))
def test_an_agent_of_the_paper_says_where_it_is_played(name):
    with pytest.raises(ba.BayesAdamError, match=rf"bayesadam paper bandits --agents {name}` play it.*hybrid, linear"):
        make_agent(name, 3, 2)


def test_every_arm_is_tried_at_first_and_a_batch_draws_for_each():
    agent = make_agent("linear", 3, 4, initial_pulls=2, epsilon=1.0)
    first = agent.act(contexts(8))
    assert sorted(first.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(agent.act(np.tile(contexts(1), (50, 1))).tolist())) > 1
    assert isinstance(agent.act(contexts(1)[0]), int)


def test_rewards_may_come_late_and_in_any_order():
    prompt, late = (make_agent("linear", 3, 2, seed=3, **small("linear")) for _ in range(2))
    rows = contexts(12)
    decisions = [late.decide(row) for row in rows]
    assert late.pending == tuple(range(12))
    for decision, row in zip(decisions, rows, strict=True):
        late.reward(decision.id, paid(row, decision.arm))
        prompt.update(row, decision.arm, paid(row, decision.arm))
    assert late.pending == ()
    assert_same(
        {k: v for k, v in state_of(late).items() if "stream" not in k},
        {k: v for k, v in state_of(prompt).items() if "stream" not in k},
    )


def test_waiting_decisions_survive_a_save(tmp_path):
    agent = make_agent("linear", 3, 2)
    decision = agent.decide(contexts(1)[0])
    agent.save(tmp_path / "a")
    again = Agent.load(tmp_path / "a")
    again.reward(decision.id, 1.0)
    with pytest.raises(ba.BayesAdamError, match="was rewarded or forgotten before"):
        again.reward(decision.id, 1.0)
    with pytest.raises(ba.BayesAdamError, match="was never made"):
        again.reward(99, 1.0)


@pytest.mark.parametrize("name", ["badam", "bootstrap", "neural-linear", "ivon"])
def test_more_room_changes_nothing(name, monkeypatch):
    rows = contexts(50)
    roomy = Agent(name, agent_settings(name, **SMALL), 3, 2, 5)
    expected = play(roomy, rows)
    monkeypatch.setattr("bayesadam.bandits.agent._FIRST_ROOM", 4)
    tight = Agent(name, agent_settings(name, **SMALL), 3, 2, 5)
    assert play(tight, rows) == expected
    assert tight._buffer.contexts.shape[1] == 64


@pytest.mark.parametrize("name", ["vadam", "ivon"])
def test_a_new_arm_starts_as_uncertain_as_the_settings_say(name):
    agent = Agent(name, agent_settings(name, **SMALL), 3, 2, 2)
    play(agent, contexts(40))
    agent.add_arm()
    variance = unflatten(agent._trainer.network, agent._trainer.gaussian().variance)["layer1.bias"][0]
    assert float(variance[2]) == approx(agent.settings.initial_std**2, rel=1e-3)


@pytest.mark.parametrize("name", ["greedy", "linear", "badam-map", "vadam"])
def test_a_new_arm_leaves_what_is_known_of_the_others(name):
    agent = Agent(name, agent_settings(name, **small(name)), 3, 2, 2)
    play(agent, contexts(40))
    x = torch.randn(1, 4, 3)
    if name == "greedy":
        before = agent._actor.scores(x)
    assert agent.add_arm() == 2
    if name == "greedy":
        assert_close(agent._actor.scores(x)[..., :2], before)
    tried = [agent.act(row) for row in contexts(agent.settings.initial_pulls)]
    assert tried == [2] * agent.settings.initial_pulls
    play(agent, contexts(20, 3))
    assert agent.n_arms == 3


def test_removed_arms_are_not_chosen_and_come_back():
    agent = make_agent("linear", 3, 3, initial_pulls=0, epsilon=1.0)
    agent.remove_arm(1)
    assert 1 not in agent.act(contexts(60)).tolist()
    agent.update(contexts(1)[0], 1, 0.5)
    agent.restore_arm(1)
    assert 1 in agent.act(contexts(60)).tolist()
    assert set(agent.act(contexts(60), arms=(0, 2)).tolist()) == {0, 2}
    agent.remove_arm(0)
    agent.remove_arm(1)
    with pytest.raises(ba.BayesAdamError, match="the last one stays"):
        agent.remove_arm(2)


BAD = {
    "narrow": lambda a: a.update([1.0, 2.0], 0, 1.0),
    "empty": lambda a: a.act(np.zeros((0, 3))),
    "nan": lambda a: a.update([1.0, float("nan"), 0.0], 0, 1.0),
    "infinite": lambda a: a.act([1.0, float("inf"), 0.0]),
    "too large for float32": lambda a: a.act([1.0, 1e300, 0.0]),
    "text": lambda a: a.act(["a", "b", "c"]),
    "unknown arm": lambda a: a.update([1.0, 2.0, 3.0], 5, 1.0),
    "negative arm": lambda a: a.update([1.0, 2.0, 3.0], -1, 1.0),
    "half an arm": lambda a: a.update([1.0, 2.0, 3.0], 0.5, 1.0),
    "nan reward": lambda a: a.update([1.0, 2.0, 3.0], 0, float("nan")),
    "two rewards": lambda a: a.update([1.0, 2.0, 3.0], 0, [1.0, 2.0]),
    "one bad of many": lambda a: a.update(contexts(3), [0, 1, 9], [1.0, 1.0, 1.0]),
    "late nan": lambda a: a.reward(0, float("nan")),
    "reward in text": lambda a: a.update([1.0, 2.0, 3.0], 0, "1"),
    "late reward in text": lambda a: a.reward(0, np.array("1.5")),
    "rewards partly in text": lambda a: a.update(contexts(2), [0, 1], np.array(["1", 2.0], dtype=object)),
    "complex reward": lambda a: a.reward(0, 1 + 2j),
    "digits in text": lambda a: a.act(["1", "2", "3"]),
    "unknown decision": lambda a: a.reward(77, 1.0),
    "unknown decision to forget": lambda a: a.forget(77),
    "no arms": lambda a: a.act([1.0, 2.0, 3.0], arms=()),
    "one arm for a list": lambda a: a.act([1.0, 2.0, 3.0], arms=1),
    "a mask for a list": lambda a: a.act([1.0, 2.0, 3.0], arms=[True, False]),
    "arms that are not whole": lambda a: a.act([1.0, 2.0, 3.0], arms=[1.0]),
    "removed arm": lambda a: a.remove_arm(8),
    "arms to restore": lambda a: a.restore_arm([1]),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_changes_nothing(bad):
    agent = make_agent("badam", 3, 2, seed=1, **SMALL)
    play(agent, contexts(12))
    agent.decide(contexts(1)[0])
    before = state_of(agent)
    with pytest.raises(ba.BayesAdamError):
        BAD[bad](agent)
    assert_same(state_of(agent), before)
    assert len(agent.pending) == 1


def test_float64_contexts_and_lists_are_taken():
    agent = make_agent("greedy", 3, 2, **SMALL)
    agent.update(contexts(7).astype(np.float64), np.zeros(7, np.int32), np.ones(7))
    agent.update([0.1, 0.2, 0.3], 1, 1)
    assert agent._buffer.count == 8


@pytest.mark.parametrize("change", [{"n_features": 0}, {"n_arms": True}, {"name": "luck"}, {"magic": 3}], ids=str)
def test_bad_settings_are_named(change):
    given = {"name": "greedy", "n_features": 3, "n_arms": 2, **change}
    with pytest.raises(ba.BayesAdamError):
        make_agent(given.pop("name"), **given)


def test_counts_are_whole_numbers():
    with pytest.raises(SettingError, match="n_arms must be a positive whole number, got 0"):
        make_agent("linear", 2)
    assert make_agent("linear", np.int64(2), np.int64(3)).n_arms == 3


@pytest.mark.parametrize("reward", [True, np.array([True]), torch.tensor(True)], ids=str)
def test_booleans_are_learnt_as_numbers(reward):
    agent = make_agent("linear", 3, 2)
    agent.update(np.zeros(3), 0, reward)
    assert agent._buffer.rewards[0, 0] == 1


def test_tensors_with_a_gradient_are_taken():
    agent = make_agent("linear", 3, 2)
    agent.update(torch.zeros(3, requires_grad=True), 0, torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True))
    assert agent._buffer.rewards[0, 0] == 0.5


def test_acting_does_not_wait_for_training(monkeypatch):
    agent = make_agent("badam", 3, 2, **SMALL)
    play(agent, contexts(10))
    begun, acted, trained = threading.Event(), threading.Event(), threading.Event()
    train = agent._trainer.train

    def held() -> None:
        begun.set()
        acted.wait(PATIENCE)
        train()
        trained.set()

    monkeypatch.setattr(agent._trainer, "train", held)
    learning = threading.Thread(target=agent.update, args=(contexts(5), [0] * 5, [1.0] * 5))
    learning.start()
    assert begun.wait(PATIENCE)
    agent.act(contexts(1)[0])
    assert not trained.is_set()
    acted.set()
    learning.join()


def test_many_threads_act_while_one_learns():
    agent = make_agent("badam", 3, 3, **SMALL)
    stop, failures = threading.Event(), []

    def acts() -> None:
        while not stop.is_set():
            try:
                assert agent.act(contexts(1)[0]) in range(4)
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=acts) for _ in range(3)]
    for thread in threads:
        thread.start()
    rows = contexts(200)
    agent.update(rows, np.arange(200) % 3, rows[np.arange(200), np.arange(200) % 3])
    agent.add_arm()
    agent.remove_arm(3)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("bad", ["zzz", None, 7.5, [1], -1, 99, False, Decision(0, 0, 1.0)])
def test_a_decision_that_was_never_made_has_no_reward(bad):
    agent = make_agent("linear", 3, 3)
    decision = agent.decide(np.zeros(3))
    for told in (lambda wrong: agent.reward(wrong, 1.0), agent.forget):
        with pytest.raises(MatchError, match="was never made: give the `id` of what decide returned"):
            told(bad)
    agent.reward(np.int64(decision.id), 1.0)
    with pytest.raises(MatchError, match=r"decision 0 was rewarded or forgotten before: see agent\.pending"):
        agent.reward(decision.id, 1.0)


def test_another_file_is_not_an_agent(tmp_path):
    (tmp_path / "x").write_bytes(b"no")
    save_file({"w": torch.zeros(2)}, tmp_path / "weights.safetensors")
    for name in ("x", "weights.safetensors"):
        with pytest.raises(FileError, match=r"not a saved agent.*: give the file that Agent\.save wrote") as caught:
            Agent.load(tmp_path / name)
        assert "delete" not in str(caught.value)
    header = {"bayesadam.bandits": '{"format": 99}'}
    save_file({"w": torch.zeros(2)}, tmp_path / "new", metadata=header)
    with pytest.raises(FileError, match=r"has format 99.*upgrade it"):
        Agent.load(tmp_path / "new")
    with pytest.raises(ba.BayesAdamError, match="no file"):
        Agent.load(tmp_path / "y")
