"""The log: what is in it, that it survives kills and damage, and what an agent makes of it."""

import errno
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import bayesadam as ba
from bandits import cases_bandits
from bandits.cases_bandits import ROWS, assert_same, learnt, state_of
from bayesadam import _storage as storage
from bayesadam.bandits import AGENTS, Agent, Log, make_agent, read_log, replay
from bayesadam.bandits.log import Standing
from bayesadam.errors import FileError, MatchError, MissingFileError
from floats import assert_close
from processes import run_python


def new(name: str = "linear", n_arms: int = 3, **changes: object) -> Agent:
    return cases_bandits.new(name, n_arms, **{"initial_pulls": 3, **changes})


def logged(path: Path, *which: str, **changes: object) -> Agent:
    agent = new(*which, **changes)
    agent.log(path)
    return agent


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def saved(tmp_path) -> Path:
    return tmp_path / "agent.safetensors"


def assert_alike(one: Agent, other: Agent) -> None:
    """In what waits, too."""
    for name in ("next_id", "pulls", "removed", "n_arms"):
        assert getattr(one._standing, name) == getattr(other._standing, name)
    assert (one.pending, one._learner._next) == (other.pending, other._learner._next)
    for decision, (context, arm) in one._standing.waiting.items():
        there, its = other._standing.waiting[decision]
        assert arm == its
        np.testing.assert_array_equal(np.float32(context), np.float32(there))
    cases_bandits.assert_alike(one, other)


def play(agent: Agent, rows: np.ndarray) -> list[int]:
    """Decide and reward; every fifth decision waits for the next one to be rewarded first, every seventh for ever."""
    decisions, late = [], []
    for number, row in enumerate(rows):
        decision = agent.decide(row)
        decisions.append(decision.id)
        if number % 7 == 6:
            continue
        if number % 5 == 4:
            late.append((decision, row))
            continue
        for one, context in [(decision, row), *late]:
            agent.reward(one.id, float(context[one.arm % 3]))
        late.clear()
    return decisions


def test_every_event_is_a_line(path):
    agent = logged(path, initial_pulls=1, epsilon=0.25)
    first = agent.decide([0.1, 0.2, 0.3])
    agent.reward(first.id, 0.7)
    agent.update([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [0, 2], [0.5, -1.5])
    assert agent.add_arm() == 3
    agent.remove_arm(0)
    agent.remove_arm(1)
    agent.restore_arm(1)
    second = agent.decide([0.4, 0.5, 0.6], arms=[1])
    agent.forget(second.id)
    agent.act([0.0, 0.0, 0.0])
    head, *rest = map(json.loads, path.read_text().splitlines())
    assert head.pop("id") == agent.log_id
    assert head == {
        "event": "bayesadam.bandits",
        "format": 1,
        "agent": "linear",
        "settings": agent.settings.plain(),
        "seed": 7,
        "n_features": 3,
        "n_arms": 3,
    }
    for line in rest:
        if "context" in line:
            line["context"] = [round(number, 6) for number in line["context"]]
    context = {"context": [0.1, 0.2, 0.3]}
    assert rest == [
        {"event": "decision", "decision": 0, **context, "arm": 0, "probability": 1.0, "arms": [0, 1, 2]}
        | {"probabilities": [1.0, 0.0, 0.0], "tried": True},
        {"event": "reward", "decision": 0, "reward": 0.7},
        {"event": "update", "contexts": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "arms": [0, 2], "rewards": [0.5, -1.5]},
        {"event": "arm", "arm": 3, "change": "added"},
        {"event": "arm", "arm": 0, "change": "removed"},
        {"event": "arm", "arm": 1, "change": "removed"},
        {"event": "arm", "arm": 1, "change": "restored"},
        {"event": "decision", "decision": 1, "context": [0.4, 0.5, 0.6], "arm": 1, "probability": 1.0, "arms": [1]}
        | {"probabilities": [1.0], "tried": True},
        {"event": "forget", "decision": 1},
    ]


def test_the_arrays_are_what_happened(path):
    agent = logged(path, "hybrid", initial_pulls=1)
    decisions = [agent.decide(row, arms=(0, 2) if number % 4 == 3 else None) for number, row in enumerate(ROWS[:12])]
    agent.update(ROWS[50], 1, 2.5)
    for number in (5, 2, 7):
        agent.reward(number, 0.1 * number)
    agent.forget(3)
    agent.add_arm()
    found = read_log(path)
    assert (len(found), found.n_arms, found.id) == (13, 4, agent.log_id)
    np.testing.assert_array_equal(found.ids, [*range(12), -1])
    np.testing.assert_array_equal(found.contexts, np.vstack([ROWS[:12], ROWS[50:51]]).astype(np.float32))
    np.testing.assert_array_equal(found.arms, [*(one.arm for one in decisions), 1])
    np.testing.assert_array_equal(found.probabilities, [*(one.probability for one in decisions), np.nan])
    expected = np.full(13, np.nan)
    expected[[5, 2, 7, 12]] = 0.5, 0.2, 0.7, 2.5
    assert_close(found.rewards, expected, rtol=1e-6)
    np.testing.assert_array_equal(found.tried, [True] * 3 + [False] * 10)
    np.testing.assert_array_equal(found.allowed[3], [True, False, True, False])
    np.testing.assert_array_equal(found.allowed[4], [True, True, True, False])
    assert not found.allowed[12].any()
    np.testing.assert_array_equal(found.possible[:3], np.eye(3, 4, dtype=bool))
    decided = np.isfinite(found.probabilities)
    assert_close(found.shares.sum(axis=1), decided.astype(float))
    assert_close(found.shares[decided, found.arms[decided]], found.probabilities[decided])
    assert (found.possible <= found.allowed).all()
    assert found.possible[np.arange(12), found.arms[:12]].all()


def test_a_decision_is_on_the_disk_before_it_is_returned(tmp_path, monkeypatch):
    path, synced = tmp_path / "log.jsonl", []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), sync(descriptor)))
    agent = new()
    agent.log(path, sync=True)
    decision = agent.decide(ROWS[0])
    agent.reward(decision.id, 1.0)
    assert len(synced) == 3
    assert len(set(synced)) == 1
    agent.log(tmp_path / "other.jsonl")
    agent.decide(ROWS[1])
    assert len(synced) == 3


@pytest.mark.parametrize("failure", ["full", "short"])
def test_what_cannot_be_written_does_not_happen(failure, monkeypatch, path):
    agent, twin = new(initial_pulls=1), new(initial_pulls=1)
    agent.log(path)
    play(agent, ROWS[:9])
    play(twin, ROWS[:9])
    before, size = learnt(agent), path.stat().st_size
    write = os.write

    def fails(descriptor: int, line: bytes) -> int:
        if failure == "short":
            return write(descriptor, line[: len(line) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    waits = agent.pending[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        for call in (
            lambda: agent.decide(ROWS[9]),
            lambda: agent.decide(ROWS[9:19]),
            lambda: agent.reward(waits, 1.0),
            lambda: agent.update(ROWS[9], 0, 1.0),
            lambda: agent.forget(waits),
            lambda: agent.add_arm(),
            lambda: agent.remove_arm(0),
        ):
            with pytest.raises(FileError, match=r"cannot log to .*log\.jsonl.*agent\.log\(None\) goes on without"):
                call()
    assert path.stat().st_size == size
    assert (agent.n_arms, agent.pending, agent._standing.removed) == (3, twin.pending, set())
    assert_same(learnt(agent), before)
    assert agent.decide(ROWS[9]).id == 9
    assert len(read_log(path)) == 10


def test_a_half_written_last_line_is_cut_off_wherever_it_broke(tmp_path, path):
    whole = tmp_path / "whole.jsonl"
    agent = new(initial_pulls=0)
    agent.log(whole)
    for row in ROWS[:3]:
        agent.decide(row)
    text = whole.read_bytes()
    start = text[:-1].rindex(b"\n") + 1
    for end in (start + 1, start + 2, *range(start + 9, len(text) - 2, 37), len(text) - 2, len(text) - 1):
        path.write_bytes(text[:end])
        with pytest.warns(
            ba.errors.BayesAdamWarning, match=rf"the last line of .*, {end - start} bytes, was only half written"
        ):
            assert len(read_log(path)) == 2
        assert path.read_bytes() == text[:end]
        with pytest.warns(ba.errors.BayesAdamWarning, match="is left out"):
            again = replay(path)
        with pytest.warns(ba.errors.BayesAdamWarning, match="is left out") as caught:
            again.log(path)
        assert caught[0].filename == __file__
        assert path.read_bytes() == text[:start]
        assert again.pending == (0, 1)
        assert again.decide(ROWS[2]).id == 2
        again.log(None)
        np.testing.assert_array_equal(read_log(path).ids, [0, 1, 2])
    path.write_bytes(text[:-1])
    with pytest.warns(ba.errors.BayesAdamWarning, match="half written"):
        assert replay(path).pending == (0, 1)


DAMAGE = {
    "a line cut short": lambda line: line[: len(line) // 2],
    "another event": lambda line: line.replace('"decision"', '"revision"', 1),
    "a doubled id": lambda line: line.replace('"decision":2', '"decision":1'),
    "an unknown arm": lambda line: line.replace('"arms":[0, 1, 2]', '"arms":[0, 1, 9]'),
    "a narrow context": lambda line: line.replace('"context":[', '"context":[0.5,', 1),
    "an impossible choice": lambda line: json.dumps(
        {**json.loads(line), "probability": 0.0, "probabilities": [0.0] * 3}
    ),
    "a reward without its decision": lambda line: '{"event":"reward","decision":77,"reward":1.0}',
    "a reward that is no number": lambda line: '{"event":"reward","decision":1,"reward":NaN}',
    "an arm out of turn": lambda line: '{"event":"arm","arm":7,"change":"added"}',
    "an update out of step": lambda line: '{"event":"update","contexts":[[1,2,3]],"arms":[],"rewards":[1]}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_an_error_that_names_it(damage, path):
    agent = logged(path)
    agent.reward(agent.decide(ROWS[0]).id, 1.0)
    for row in ROWS[1:4]:
        agent.decide(row)
    agent.log(None)
    good = path.read_text().splitlines()
    good[4] = DAMAGE[damage](good[4])
    path.write_text("\n".join(good) + "\n")
    before, fresh = path.read_bytes(), new()
    for use in (read_log, replay, fresh.log):
        with pytest.raises(FileError, match=r"log\.jsonl is damaged in line 5 \(.+\): mend or remove it"):
            use(path)
    assert path.read_bytes() == before
    assert fresh.pending == ()
    # Nothing holds the file.
    path.write_text("")
    fresh.log(path)


@pytest.mark.parametrize(
    "text", ["", "hello", "hello\n", '{"event": 1}', '{"a": 1}\n', "[1]\n", "1", '{"event":"x"}\n{}\n']
)
def test_another_file_is_no_log_and_is_left_alone(text, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    for use in (read_log, replay, *([new().log] if text else [])):
        with pytest.raises(FileError, match=r"is not a log of decisions: give the file that Agent\.log wrote"):
            use(path)
    assert path.read_text() == text


def test_a_later_format_is_refused(path):
    new().log(path)
    path.write_text(path.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(FileError, match=r"has format 99.*upgrade it"):
        read_log(path)


def test_paths_that_cannot_be(tmp_path):
    for missing in (lambda: read_log(tmp_path / "x"), lambda: replay(tmp_path / "x")):
        with pytest.raises(MissingFileError, match="no file"):
            missing()
    for path in (tmp_path, tmp_path / "nowhere" / "log.jsonl"):
        with pytest.raises(FileError, match="cannot log to"):
            new().log(path)


def test_a_log_has_one_writer(path):
    one = new()
    one.log(path)
    other = replay(path)
    with pytest.raises(FileError, match="written by another agent or process"):
        other.log(path)
    one.log(path)
    one.log(None)
    other.log(path)
    del other
    one.log(path)


def test_a_forked_process_cannot_write_its_parent_s_log(monkeypatch, path):
    agent = logged(path)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -7)
        with pytest.raises(FileError, match="attach one in this process, -7"):
            agent.decide(ROWS[0])
    assert agent.decide(ROWS[0]).id == 0
    assert len(read_log(path)) == 1


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("by", ["all of its log", "a file and what was logged since"])
def test_an_agent_is_made_again(name, by, path, saved):
    agent = logged(path, name)
    play(agent, ROWS[:20])
    agent.save(saved)
    play(agent, ROWS[20:41])
    agent.update(ROWS[100:103], [0, 1, 2], [1.0, 2.0, 3.0])
    agent.add_arm()
    agent.decide(ROWS[41])
    agent.remove_arm(0)
    agent.forget(agent.pending[-1])
    agent.reward(agent.pending[0], 0.25)
    agent.log(None)
    size, again = path.stat().st_size, replay(path) if by == "all of its log" else Agent.load(saved)
    again.log(path)
    assert (again.log_id, again.settings, path.stat().st_size) == (agent.log_id, agent.settings, size)
    assert_alike(again, agent)
    with pytest.raises(MatchError, match="was rewarded or forgotten before"):
        again.reward(0, 1.0)
    again.add_arm()
    # Cold: tried as often as every arm is at first.
    assert [(one.id, one.arm) for one in map(again.decide, ROWS[:2])] == [(42, 4), (43, 3)]
    again.log(None)
    ids = read_log(path).ids
    np.testing.assert_array_equal(ids[ids >= 0], np.arange(44))


def test_replay_warm_starts_another_kind_of_agent_whose_log_begins_with_what_waits(tmp_path, path):
    agent = logged(path)
    play(agent, ROWS[:40])
    other = replay(path, new("hybrid"))
    assert other.name == "hybrid"
    assert other._seen.count == agent._seen.count
    assert other.pending == agent.pending
    assert other._learner.stack.done > 0
    other.remove_arm(1)
    other.log(tmp_path / "other.jsonl")
    assert other.decide(ROWS[0]).id == 40
    waits = agent.pending[0]
    other.reward(waits, 0.5)
    again, log = replay(tmp_path / "other.jsonl"), read_log(tmp_path / "other.jsonl")
    assert (again.pending, again._standing.removed) == (other.pending, {1})
    assert (log.rewards[0], log.tried[0], log.arms[0]) == (0.5, True, agent._standing.waiting[waits][1])
    np.testing.assert_array_equal(log.ids, [*agent.pending, 40])


def test_replay_needs_a_new_agent_that_fits(path):
    agent = logged(path)
    play(agent, ROWS[:5])
    for unfit, message in (
        (agent, "replay needs an agent that neither decided nor wrote a log"),
        (new(n_arms=4), "begins with n_arms=3, the agent has 4"),
        (make_agent("linear", 2, 3), "begins with n_features=3, the agent has 2"),
    ):
        before = state_of(unfit)
        with pytest.raises(MatchError, match=message):
            replay(path, unfit)
        assert_same(state_of(unfit), before)
    used = new()
    used.decide(ROWS[0])
    with pytest.raises(MatchError, match="make a new one"):
        replay(path, used)
    path.write_text(path.read_text().replace('"agent":"linear"', '"agent":"lunar"'))
    with pytest.raises(FileError, match="is of the agent 'lunar', not one of hybrid, linear"):
        replay(path)


def resumed(path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, int]:
    """The saved agent with its log, and how many events of that it took, to read them and to follow."""
    taken, take = [], Standing.take
    with monkeypatch.context() as patch:
        patch.setattr(Standing, "take", lambda standing, event: (taken.append(event), take(standing, event))[1])
        agent = Agent.load(saved)
        agent.log(path)
    return agent, len(taken)


@pytest.mark.parametrize("detached", [False, True])
def test_resuming_reads_the_end_of_a_log_alone(detached, monkeypatch, path, saved):
    agent = logged(path, initial_pulls=1)
    play(agent, ROWS[:60])
    agent.remove_arm(0)
    if detached:
        agent.log(None)
    agent.save(saved)
    agent.log(None)
    again, count = resumed(path, saved, monkeypatch)
    assert count == 0
    assert_alike(again, agent)
    play(again, ROWS[61:70])
    again.log(None)
    more, count = resumed(path, saved, monkeypatch)
    assert 20 < count < 60
    assert_alike(more, again)
    more.log(None)
    assert_alike(replay(path), again)
    # A file of an earlier release has no checksum of the log.
    tensors, header = storage.read(saved, storage.AGENT)
    del header["mark"]
    storage.write(saved, tensors, header, storage.AGENT)
    assert_alike(resumed(path, saved, monkeypatch)[0], again)


@pytest.mark.parametrize("grown", [0, 10])
def test_a_log_that_lost_its_end_is_refused(grown, path, saved):
    agent = logged(path, initial_pulls=1)
    for row in ROWS[:20]:
        agent.decide(row)
    agent.save(saved)
    agent.log(None)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:17]))
    other = replay(path)
    other.log(path)
    for row in ROWS[40 : 40 + grown]:
        other.decide(row)
    other.log(None)
    there = path.read_bytes()
    with pytest.raises(MatchError, match=r"lost lines that the agent knows of: give a new file, or .* by replay"):
        Agent.load(saved).log(path)
    assert path.read_bytes() == there
    again = replay(path)
    again.log(path)
    assert again.decide(ROWS[0]).id == 16 + grown


def test_damage_after_a_save_names_its_line(path, saved):
    agent = logged(path)
    play(agent, ROWS[:9])
    agent.save(saved)
    there = len(path.read_text().splitlines())
    play(agent, ROWS[9:12])
    agent.log(None)
    text = path.read_text().splitlines()
    text[there + 1] = "{}"
    path.write_text("\n".join(text) + "\n")
    again = Agent.load(saved)
    with pytest.raises(FileError, match=rf"is damaged in line {there + 2} "):
        again.log(path)
    assert_alike(again, Agent.load(saved))


def test_replay_holds_no_more_than_what_waits(path):
    agent = logged(path)
    for _ in range(8):
        for decision in agent.decide(ROWS[:100]):
            agent.forget(decision.id)
    agent.log(None)
    replay(path)
    tracemalloc.start()
    try:
        replay(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size


def test_an_agent_that_went_on_without_its_log_needs_another(tmp_path, path):
    agent = logged(path)
    agent.decide(ROWS[0])
    agent.save(tmp_path / "agent")
    size = path.stat().st_size
    for number, act in enumerate((lambda one: one.decide(ROWS[2]), lambda one: one.forget(0), Agent.add_arm)):
        agent.log(None)
        hasty = Agent.load(tmp_path / "agent")
        act(hasty)
        hasty.save(tmp_path / "hasty")
        for one in (hasty, Agent.load(tmp_path / "hasty")):
            with pytest.raises(MatchError, match="lacks what the agent did since: give a new file, or make an agent"):
                one.log(path)
        hasty.log(tmp_path / f"{number}.jsonl")
    with pytest.raises(MatchError, match="is another agent's log: give a new file, or make an agent by replay"):
        new().log(path)
    assert path.stat().st_size == size


GIVEN = {"contexts": np.zeros((2, 3)), "arms": [0, 1], "probabilities": [0.5, 1.0], "rewards": [1.0, np.nan]}


def test_logs_of_other_systems():
    log, every = Log.of(**GIVEN, n_arms=4), np.array([[0.3, 0.7, 0.0], [0.5, 0.2, 0.3]])
    assert (len(log), log.n_arms, log.id) == (2, 4, None)
    assert log.possible.all()
    assert log.tried.sum() == log.shares.sum() == 0
    assert Log.of(**GIVEN).n_arms == 2
    assert Log.of(**GIVEN, allowed=[[True, False, True], [True, True, True]]).n_arms == 3
    full = Log.of(**{**GIVEN, "probabilities": every})
    np.testing.assert_array_equal(full.shares, every)
    np.testing.assert_array_equal(full.probabilities, [every[row, arm] for row, arm in enumerate(GIVEN["arms"])])
    np.testing.assert_array_equal(full.possible, every > 0)
    assert full.allowed.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": np.zeros(2)}, "contexts and allowed must have 2 rows"),
        ({"arms": [0, 1, 1]}, "contexts and allowed must have 3 rows"),
        ({"arms": [0.5, 1.0]}, "arms must be"),
        ({"arms": [-1, 0]}, "arms must be"),
        ({"arms": [[0, 1]]}, "arms must be"),
        ({"probabilities": [0.5]}, r"probabilities and rewards be \(2,\)"),
        ({"probabilities": [0.0, 1.0]}, "probabilities must be above 0 and at most 1, and those of row 0 are not"),
        ({"probabilities": [1.0, np.nan]}, "row 1"),
        ({"probabilities": [[0.5, 0.5]]}, "contexts and allowed must have 2 rows"),
        ({"probabilities": [[0.5, 0.5], [0.5, 0.4]]}, "must sum to 1 over the arms allowed, and those of row 1"),
        ({"probabilities": [[0.5, 0.6, -0.1], [0.5, 0.5, 0.0]]}, "must be at least 0, .* and those of row 0 are not"),
        (
            {"probabilities": [[1.0, 1e-5], [0.5, 0.5]], "allowed": [[True, False], [True, True]]},
            "0 where not allowed, and those of row 0 are not",
        ),
        ({"rewards": [np.inf, 1.0]}, "rewards must be finite, or NaN where none came"),
        ({"contexts": [[0.0], [np.nan]]}, "contexts must be finite, and those of row 1 are not"),
        ({"n_arms": 1}, "arms must be among those allowed, and those of row 1 are not"),
        ({"allowed": [[False, True], [True, True]]}, "arms must be among those allowed, and those of row 0"),
        ({"allowed": [True, True]}, "contexts and allowed must have 2 rows"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    with pytest.raises(MatchError, match=message):
        Log.of(**{**GIVEN, **change})


# Imports once, then forks a process for each attempt. The parent reads what the child says it has done, and kills it
# after a random number of reports, wherever it is by then.
KILLED = """
import os, random, signal, sys
import numpy as np
from pathlib import Path
from bayesadam.bandits import Agent, make_agent, replay

path, saved = Path(sys.argv[1]), Path(sys.argv[2])
choose = random.Random(5)


def child(attempt, report):
    rows = np.random.default_rng(attempt).normal(size=(10_000, 2))
    if attempt % 2 and saved.exists():
        agent = Agent.load(saved)
    else:
        agent = replay(path) if path.exists() else make_agent("linear", 2, 3, train_every=3)
    agent.log(path)
    for number, row in enumerate(rows):
        decision = agent.decide(row)
        os.write(report, f"d{decision.id}\\n".encode())
        if number % 3:
            agent.reward(decision.id, float(row[0]))
            os.write(report, f"r{decision.id}\\n".encode())
        if number % 5 == 4:
            agent.save(saved)


for attempt in range(8):
    reading, writing = os.pipe()
    worker = os.fork()
    if not worker:
        os.close(reading)
        try:
            child(attempt, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as reports:
        for _ in range(choose.randrange(1, 30)):
            print(reports.readline().strip(), flush=True)
        os.kill(worker, signal.SIGKILL)
        # What it had reported by then counts too.
        for line in reports:
            print(line.strip())
    assert os.waitpid(worker, 0)[1] == signal.SIGKILL, attempt
"""


@pytest.mark.slow
def test_kills_lose_no_decision_and_double_none(path, saved):
    done = run_python(KILLED, path, saved, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    reports = done.stdout.split()
    decided = [int(report[1:]) for report in reports if report.startswith("d")]
    rewarded = [int(report[1:]) for report in reports if report.startswith("r")]
    assert len(decided) >= 8
    assert len(set(decided)) == len(decided)
    last = replay(path)
    found = read_log(path)
    np.testing.assert_array_equal(found.ids, np.arange(len(found)))
    assert set(decided) <= set(found.ids.tolist())
    assert len(set(rewarded)) == len(rewarded)
    paid = found.ids[np.isfinite(found.rewards)]
    assert set(rewarded) <= set(paid.tolist())
    # At most what each of them was killed at was not yet reported.
    assert len(found) - len(decided) <= 8
    assert len(paid) - len(rewarded) <= 8
    assert last._seen.count == len(paid)
