"""Serving: the fast path against the slow one, batches, trainings in the background, and memory that is bounded."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from scipy import stats

from bayesadam.bandits import AGENTS, Agent, agent_settings, make_agent, read_log, replay
from bayesadam.bandits.learner import Buffer
from bayesadam.bandits.linear import LinearPosterior
from bayesadam.engine.streams import Streams
from bayesadam.errors import FileError, SettingError, TrainingError
from floats import approx, assert_close
from processes import PATIENCE

SMALL = {"hidden": (8,), "batch_size": 16, "train_every": 5, "train_steps": 4, "window": 20}
ROWS = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
ARMS = np.random.default_rng(1).integers(3, size=2000)
PAID = np.abs(ROWS[np.arange(2000), ARMS]) + 0.1 * np.random.default_rng(2).normal(size=2000)


def new(name: str = "hybrid", **changes: object) -> Agent:
    known = (*agent_settings(name).names(), "training")
    own = {key: value for key, value in {**SMALL, **changes}.items() if key in known}
    return make_agent(name, 3, 3, seed=7, **own)


def feed(agent: Agent, first: int, last: int) -> None:
    for at in range(first, last):
        agent.update(ROWS[at], int(ARMS[at]), float(PAID[at]))


def learnt(agent: Agent) -> dict[str, torch.Tensor]:
    """By the learner that takes note of every observation."""
    learner = agent._actor if agent._actor.learns_at_once else agent._trainer
    return {name: tensor for name, tensor in learner.state().items() if not name.startswith("stream")}


def assert_alike(one: Agent, other: Agent, rtol: float = 1e-9) -> None:
    theirs = learnt(other)
    for name, tensor in learnt(one).items():
        assert_close(tensor, theirs[name], rtol=rtol, atol=rtol, msg=name)


# --- the fast path --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("k", [1, 6])
def test_one_run_by_numpy_is_the_reference_by_torch(share, k):
    agent = new()
    feed(agent, 0, 150)
    learner, x = agent._actor, torch.from_numpy(ROWS[200 : 200 + k]).unsqueeze(0)
    learner._share.fill_(share)
    found = learner.sampler(x)(50, Streams([3], "same"))
    assert_close(found, learner._draws(x, 50, Streams([3], "same")), rtol=1e-4, atol=1e-5)
    # A reward outside the range seen so far widens the prior.
    agent.update(ROWS[0], 1, 50.0)
    found = learner.sampler(x)(50, Streams([3], "same"))
    assert_close(found, learner._draws(x, 50, Streams([3], "same")), rtol=1e-4, atol=1e-4)


def test_one_observation_after_another_is_all_at_once():
    source = torch.Generator().manual_seed(1)
    x = torch.randn(1, 40, 6, generator=source).double()
    arms, rewards = torch.randint(3, (1, 40), generator=source), torch.randn(1, 40, generator=source).double()
    one, whole = (LinearPosterior.prior(1, 3, 6, 2.0, torch.device("cpu")) for _ in range(2))
    whole.update(arms, x, rewards)
    for at in range(40):
        one.update(arms[:, at : at + 1], x[:, at : at + 1], rewards[:, at : at + 1])
    for name, tensor in vars(whole).items():
        assert_close(vars(one)[name], tensor, rtol=1e-9, atol=1e-10)
    assert_close(one.widths_of_one(x[0].numpy()), whole.widths(x)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", AGENTS)
def test_a_decision_s_probabilities_are_those_of_the_reference(name):
    agent, twin = new(name, epsilon=0.2), new(name, epsilon=0.2)
    feed(agent, 0, 60)
    feed(twin, 0, 60)
    x, allowed = torch.from_numpy(ROWS[:5]).unsqueeze(0), [0, 2]
    arms, shares = agent._actor.decided(x, allowed, draws=30, streams=Streams([5], "p"))
    drawn = twin._actor.drawn(x)
    mask = torch.tensor([True, False, True])
    expected = twin._actor.choice_probabilities(x, mask, draws=30, streams=Streams([5], "p"), drawn=drawn)
    assert_close(shares, expected[0, :, allowed], atol=1e-12)
    scores = twin._actor.explored(drawn)[0, :, allowed]
    assert arms == [allowed[at] for at in scores.argmax(dim=1)]


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_is_decided_logged_and_rewarded(tmp_path):
    path, agent = tmp_path / "log.jsonl", new(initial_pulls=1)
    agent.log(path)
    first = agent.decide(ROWS[0])
    made = agent.decide(ROWS[1:9])
    assert [one.id for one in (first, *made)] == list(range(9))
    assert [one.arm for one in (first, *made[:2])] == [0, 1, 2]
    assert [one.probability for one in made[:2]] == [1.0, 1.0]
    found = read_log(path)
    np.testing.assert_array_equal(found.contexts, ROWS[:9])
    np.testing.assert_array_equal(found.arms, [first.arm, *(one.arm for one in made)])
    np.testing.assert_array_equal(found.probabilities, [1.0, *(one.probability for one in made)])
    for one in reversed(made):
        agent.reward(one.id, 1.0)
    assert agent.pending == replay(path).pending == (0,)


def test_a_batch_that_cannot_be_logged_does_not_happen(tmp_path, monkeypatch):
    path, agent, write = tmp_path / "log.jsonl", new(initial_pulls=1), os.write
    agent.log(path)
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, lines: write(descriptor, lines[: len(lines) // 2]))
        with pytest.raises(FileError, match="cannot log to"):
            agent.decide(ROWS[:10])
    assert (path.stat().st_size, agent.pending) == (size, ())
    assert [one.arm for one in agent.decide(ROWS[:3])] == [0, 1, 2]


# --- in the background ----------------------------------------------------------------------------------------------


class Held:
    """A training that waits to be let go, and may fail then."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.begun, self.go, train = threading.Event(), threading.Event(), agent._trainer.train

        def held() -> None:
            self.begun.set()
            assert self.go.wait(PATIENCE)
            if failure is not None:
                raise failure
            train()

        monkeypatch.setattr(agent._trainer, "train", held)


@pytest.mark.parametrize("name", ["hybrid", "linear", "neural-linear", "badam", "greedy"])
@pytest.mark.parametrize("forget", [None, 40.0])
def test_what_comes_during_a_training_is_learnt_as_if_it_came_after(name, forget, monkeypatch, tmp_path):
    agent, twin = (new(name, training=training, forget=forget, train_every=50) for training in ("background", "now"))
    monkeypatch.setattr("bayesadam.bandits.agent._FIRST_ROOM", 64)
    feed(twin, 0, 99)
    feed(agent, 0, 49)
    held = Held(agent, monkeypatch)
    feed(agent, 49, 50)
    assert held.begun.wait(PATIENCE)
    before = agent._actor.state()
    feed(agent, 50, 99)
    decision = agent.decide(ROWS[0])
    agent.forget(decision.id)
    if not agent._actor.learns_at_once:
        assert torch.equal(agent._actor.state()["weights"], before["weights"])
    held.go.set()
    agent.wait()
    assert_alike(agent, twin, rtol=1e-5)
    if name != "linear":
        assert not torch.equal(agent._actor.state()["weights"], before["weights"])
    assert agent._buffer.count == 99
    monkeypatch.undo()
    agent.save(tmp_path / "agent")
    again = Agent.load(tmp_path / "agent")
    assert again.training == "background"
    assert_alike(again, agent, rtol=0)
    feed(agent, 99, 160)
    agent.wait()


def test_a_training_that_is_due_while_another_goes_on_comes_after_it(monkeypatch):
    agent = new("greedy", training="background")
    held = Held(agent, monkeypatch)
    feed(agent, 0, 5)
    assert held.begun.wait(PATIENCE)
    feed(agent, 5, 30)
    assert agent._actor.stack.done == 0
    held.go.set()
    agent.wait()
    assert agent._actor.stack.done == 4
    monkeypatch.undo()
    feed(agent, 30, 31)
    agent.wait()
    assert agent._actor.stack.done == 8


@pytest.mark.parametrize("name", ["hybrid", "greedy"])
def test_a_training_that_fails_is_told_once(name, monkeypatch, tmp_path):
    agent = new(name, training="background", train_every=20)
    agent.log(tmp_path / "log.jsonl")
    feed(agent, 0, 19)
    waits = agent.decide(ROWS[0])
    held = Held(agent, monkeypatch, ArithmeticError("no finite loss"))
    feed(agent, 19, 20)
    held.go.set()
    agent._thread.join(PATIENCE)
    with pytest.raises(TrainingError, match=r"no finite loss.*repeat this call, which did nothing") as caught:
        agent.reward(waits.id, 1.0)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert agent.pending == (waits.id,)
    agent.reward(waits.id, 1.0)
    monkeypatch.undo()
    feed(agent, 20, 60)
    agent.wait()
    assert agent._actor.stack.done > 0
    assert agent._buffer.count == len(read_log(tmp_path / "log.jsonl")) == 61


def test_many_threads_decide_and_reward_while_trainings_go_on(tmp_path):
    agent, failures = new(training="background", growth=1.01), []
    agent.log(tmp_path / "log.jsonl")

    def work(first: int) -> None:
        try:
            for row in ROWS[first : first + 60]:
                agent.reward(agent.decide(row, draws=2).id, float(row[0]))
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
    assert agent._buffer.count == np.isfinite(read_log(tmp_path / "log.jsonl").rewards).sum() == 180
    # The head on the contexts has every observation: its shape is a₀ + n/2 of each arm.
    assert float(agent._actor._linear.shape[0, :3].sum()) == approx(3 * 1.0 + 90)


@pytest.mark.usefixtures("little_room")
def test_more_observations_than_a_training_takes_note_of_wait_for_it(monkeypatch):
    agent = new(training="background")
    held = Held(agent, monkeypatch)
    feeding = threading.Thread(target=agent.update, args=(ROWS[:600], ARMS[:600], PAID[:600]))
    feeding.start()
    assert held.begun.wait(PATIENCE)
    feeding.join(0.2)
    assert feeding.is_alive()
    assert 0 <= agent.act(ROWS[0]) < 3
    assert agent._buffer.count <= 2 * 64 + 5
    held.go.set()
    feeding.join(PATIENCE)
    agent.wait()
    assert agent._buffer.total == 600
    assert float(agent._actor._linear.shape.sum()) == approx(3 * 1.0 + 300)


def test_training_is_one_of_two():
    with pytest.raises(SettingError, match=r"training must be one of .*'now', 'background'.*, got 'later'"):
        new(training="later")


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr("bayesadam.bandits.agent._FIRST_ROOM", 16)
    monkeypatch.setattr("bayesadam.bandits.agent._MOST_ROOM", 64)


@pytest.mark.parametrize("forget", [None, 30.0])
@pytest.mark.slow
def test_the_head_on_the_contexts_has_all_observations_whatever_the_buffer_holds(forget, monkeypatch):
    whole = new(forget=forget)
    feed(whole, 0, 700)
    monkeypatch.setattr("bayesadam.bandits.agent._FIRST_ROOM", 16)
    monkeypatch.setattr("bayesadam.bandits.agent._MOST_ROOM", 64)
    agent = new(forget=forget)
    feed(agent, 0, 700)
    assert agent._buffer.total == 700
    assert agent._buffer.contexts.shape[1] <= 128
    theirs = learnt(whole)
    for name, tensor in learnt(agent).items():
        if name.startswith("linear") or name in ("shift", "scale", "ends", "due"):
            assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-9, msg=name)
    # On the hidden layer the sample counts as all.
    assert float(agent._actor._statistics(agent._actor._hidden).gram[..., -1, -1].sum()) == approx(
        whole._buffer.effective_count, rel=1e-3 if forget else 1e-9
    )


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.usefixtures("little_room")
@pytest.mark.slow
def test_an_agent_with_little_room_resumes(name, tmp_path):
    agent = new(name)
    feed(agent, 0, 333)
    agent.save(tmp_path / "agent")
    again = Agent.load(tmp_path / "agent")
    feed(agent, 333, 420)
    feed(again, 333, 420)
    assert_alike(again, agent, rtol=0)
    assert torch.equal(again._buffer.numbers[: again._buffer.count], agent._buffer.numbers[: agent._buffer.count])
    assert agent._buffer.total == again._buffer.total == 420
    assert agent._buffer.contexts.shape[1] <= 128


def test_what_is_kept_is_a_uniform_sample_in_its_order():
    buffer, most = Buffer(torch.zeros(1, 512, 1)), 256
    for first in range(0, 20_000, 100):
        if buffer.count + 100 > 512:
            buffer.thin(buffer.kept(most))
        buffer.contexts[0, buffer.count : buffer.count + 100, 0] = torch.arange(first, first + 100)
        buffer.add(torch.zeros(1, 100, dtype=torch.int64), torch.arange(first, first + 100.0)[None])
    buffer.thin(buffer.kept(most))
    numbers = buffer.numbers[: buffer.count]
    assert (buffer.total, buffer.count <= most) == (20_000, True)
    assert (numbers.diff() > 0).all()
    assert torch.equal(buffer.rewards[0, : buffer.count], numbers.float())
    assert torch.equal(buffer.contexts[0, : buffer.count, 0], numbers.float())
    assert stats.kstest(numbers.numpy(), stats.uniform(0, 20_000).cdf).pvalue > 1e-3
    assert stats.chisquare(np.bincount(numbers.numpy() % 10, minlength=10)).pvalue > 1e-3
