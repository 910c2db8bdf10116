"""An agent for the user's own loop: it acts, learns from rewards when they come, and is saved and loaded whole."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._files import damage_named
from bayesadam.bandits.log import (
    AnyPath,
    Decision,
    Event,
    LogReader,
    LogWriter,
    Position,
    Standing,
    decision_line,
    line,
)
from bayesadam.bandits.network import Belief, Hybrid, Line
from bayesadam.bandits.observations import MOST_ROOM, Contexts, Observations, Rewards
from bayesadam.bandits.settings import HybridSettings
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError

Training = Literal["now", "background"]
Numbers = npt.ArrayLike | Tensor
# The settings of every agent.
_DEFAULTS = {"hybrid": HybridSettings(), "linear": HybridSettings(hidden=())}
AGENTS = tuple(_DEFAULTS)
_LARGEST = float(np.finfo(np.float32).max)
# In the background a training rests for so many seconds after every step.
_REST = 2e-4
# Of what came meanwhile, a new belief takes note of so many at once, and of so few while decisions wait.
_BLOCK, _FEW = 256, 16


def make_agent(
    name: str = "hybrid",
    n_features: int = 0,
    n_arms: int = 0,
    *,
    seed: int = 0,
    training: Training = "now",
    **changes: Any,
) -> Agent:
    """An agent to put into your own system.

    >>> agent = make_agent(n_features=2, n_arms=3)
    >>> arm = agent.act([0.3, -1.0])
    >>> agent.update([0.3, -1.0], arm, reward=1.0)
    >>> decision = agent.decide([0.1, 0.2])       # the reward comes later
    >>> agent.reward(decision.id, 0.5)

    Args:
        name: `"hybrid"`, or `"linear"`, which has no network.
        training: `"now"`: `reward` and `update` return when a training that is due is done, and the same calls give the
            same agent. `"background"`: a thread trains, no call waits for it, and decisions use its result once it is
            there.
        changes: to single settings, such as `hidden=(50,)` or `reward_range=(0, 1)`: see `HybridSettings`.
    """
    for key, value in (("n_features", n_features), ("n_arms", n_arms)):
        if not _is_index(value) or value < 1:
            raise SettingError(f"{key} must be a positive whole number, got {value!r}")
    if training not in get_args(Training):
        raise SettingError(f"training must be one of {get_args(Training)}, got {training!r}")
    if name not in AGENTS:
        raise SettingError(f"agent must be one of {', '.join(AGENTS)}, got {name!r}")
    if unknown := sorted(set(changes) - set(HybridSettings.names())):
        choices = ", ".join(sorted(HybridSettings.names()))
        raise SettingError(f"{name} has no setting {', '.join(unknown)}: choose from {choices}")
    return Agent(name, replace(_DEFAULTS[name], **changes), int(n_features), int(n_arms), seed, training)


class Agent:
    """Acts and learns; made by `make_agent` or `load`.

    All methods may be called from many threads. `act` and `decide` never wait for a training: the old belief decides
    until the new one has taken note of the observations that came meanwhile. Of more than 65,536 observations
    trainings use the newest.
    """

    def __init__(
        self, name: str, settings: HybridSettings, n_features: int, n_arms: int, seed: int, training: Training = "now"
    ) -> None:
        self.name, self.settings, self.n_features, self.seed = name, settings, n_features, seed
        self.training: Training = training
        self._standing = Standing(n_features, n_arms)
        self._seen = Observations(n_features, settings.forget)
        self._learner = Hybrid(settings, n_features, n_arms, seed)
        # `_learning` is held while something is learnt, `_acting` while the belief or the observations are used.
        self._learning, self._acting = threading.RLock(), threading.RLock()
        # The thread of a training in the background, whether one goes on, and what made one fail.
        self._thread: threading.Thread | None = None
        self._busy = False
        self._failure: Exception | None = None
        self._log: LogWriter | None = None
        # Up to where the agent has learnt a log that it does not write.
        self._known: Position | None = None

    @property
    def n_arms(self) -> int:
        """How many arms there have been; those removed keep their index."""
        return self._standing.n_arms

    def act(self, context: Numbers, *, arms: Iterable[int] | None = None) -> Any:
        """The arm for a context, an int; for a batch (k, features), an array of k arms, each with its own draw.

        At first every arm is tried a few times, in turn. `arms` are those to choose from now; None for all not removed.
        """
        rows, single = self._contexts(context)
        allowed = self._arms(arms)
        with self._acting:
            chosen, tried, _ = self._choose(rows, allowed)
            for arm in chosen[:tried]:
                self._standing.pulls[arm] += 1
        return chosen[0] if single else np.array(chosen)

    def decide(self, context: Numbers, *, arms: Iterable[int] | None = None) -> Any:
        """As `act`: a `Decision`, or a list of k, each remembered until its reward comes with `reward(decision.id, …)`.

        The decision has its probability: 1 for an arm that is tried in turn at first. The log has all decisions of a
        batch, or none.
        """
        rows, single = self._contexts(context)
        allowed = self._arms(arms)
        with self._acting:
            first, (chosen, tried, lines) = self._standing.next_id, self._choose(rows, allowed)
            shares = [[float(one == arm) for one in allowed] for arm in chosen[:tried]]
            shares += self._learner.shares(chosen[tried:], lines, allowed)
            chances = [share[allowed.index(arm)] for arm, share in zip(chosen, shares, strict=True)]
            made = list(map(Decision, itertools.count(first), chosen, chances))
            pairs = zip(made, rows, shares, strict=True)
            self._write(decision_line(one, row, allowed, share, one.id < first + tried) for one, row, share in pairs)
            for one, row in zip(made, rows, strict=True):
                self._standing.decided(one, row, one.id < first + tried)
        return made[0] if single else made

    def _choose(self, rows: Contexts, allowed: list[int]) -> tuple[list[int], int, list[Line]]:
        """The arms, how many of the first were tried in turn, and the lines that the others were chosen by."""
        pulls, chosen = [self._standing.pulls[arm] for arm in allowed], list[int]()
        while len(chosen) < len(rows) and (least := min(pulls)) < self.settings.initial_pulls:
            at = pulls.index(least)
            pulls[at] += 1
            chosen.append(allowed[at])
        if (tried := len(chosen)) == len(rows):
            return chosen, tried, []
        more, lines = self._learner.chosen(rows[tried:], allowed)
        return chosen + more, tried, lines

    def probabilities(
        self, contexts: Numbers, *, allowed: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.float64]:
        """The probability with which the agent, as it is now, chooses each arm: (k, arms), for a batch of k contexts.

        Arms that are to be tried in turn at first are taken as tried. The agent does not change. `allowed` is a mask
        (k, arms) of those to choose from.
        """
        rows, _ = self._contexts(contexts)
        with self._acting:
            mask = np.isin(np.arange(self.n_arms), self._standing.arms()) & np.ones((len(rows), 1), bool)
            if allowed is not None:
                mask &= allowed
            if not mask.any(axis=1).all():
                raise MatchError("a context has no allowed arm that is not removed")
            return self._learner.probabilities(rows, mask)

    def update(self, context: Numbers, arm: npt.ArrayLike, reward: Numbers) -> None:
        """Learn that an arm paid a reward in a context; or k of each. Every `train_every` observations it trains."""
        rows, _ = self._contexts(context)
        arms = np.atleast_1d(np.asarray(arm))
        if arms.dtype.kind not in "iu" or arms.shape != (len(rows),) or not 0 <= arms.min() <= arms.max() < self.n_arms:
            raise SettingError(f"update needs {len(rows)} arms, each 0 to {self.n_arms - 1}; got {arm!r}")
        rewards = self._rewards(reward, len(rows))
        with self._learning:
            self._tell()
            with self._acting:
                lists = {"contexts": rows.tolist(), "arms": arms.tolist(), "rewards": rewards.tolist()}
                self._write(map(line, [{"event": "update", **lists}]))
            self._learn(rows, arms, rewards)

    def reward(self, decision: int, reward: float) -> None:
        """The reward of an earlier `decide`, by the decision's `id`; otherwise as `update`."""
        is_simple = isinstance(reward, float) and abs(reward) <= _LARGEST
        # With no more digits than a float32 has.
        value = float(str(np.float32(reward) if is_simple else self._rewards(reward, 1)[0]))
        with self._learning:
            self._tell()
            with self._acting:
                if not self._waits(decision):
                    raise MatchError(f"decision {decision} was rewarded or forgotten before: see agent.pending")
                lesson = self._take({"event": "reward", "decision": int(decision), "reward": value})
            self._learn(*lesson)

    def _learn(self, contexts: Any, arms: Any, paid: Any, *, now: bool = False) -> None:
        """Add observations (k, features), (k,), (k,), at most `train_every` at a time, and train when that is due."""
        every = self.settings.train_every
        for first in range(0, len(paid), every):
            part = slice(first, first + every)
            if self._busy and self._thread is not None and self._seen.count > 2 * MOST_ROOM:
                # More come than a training can take note of.
                self._thread.join()
            with self._acting:
                if not self._busy and self._seen.count + every > MOST_ROOM:
                    self._seen.thin()
                self._learner.observe(self._seen, self._seen.add(contexts[part], arms[part], paid[part]))
            if not self._busy and self._seen.total >= every and self._learner.due(self._seen):
                with self._acting:
                    arguments = self._seen.snapshot(), copy.deepcopy(self._learner.belief)
                    self._busy = True
                if now or self.training == "now":
                    self._train(*arguments, now=True)
                else:
                    self._thread = threading.Thread(target=self._train, args=arguments, name="bayesadam training")
                    self._thread.start()

    def _train(self, seen: Observations, belief: Belief, *, now: bool = False) -> None:
        """Train, take note of the observations that came meanwhile, and let the new belief take over."""
        try:
            new = self._learner.train(seen, belief, 0.0 if now else _REST)
            first = seen.count
            while first < self._seen.count - _FEW:
                with self._acting:
                    seen = self._seen.snapshot()
                part = slice(first, min(first + _BLOCK, seen.count))
                self._learner.observe(seen, part, new)
                first = part.stop
                time.sleep(_REST)
            with self._acting:
                self._learner.observe(self._seen, slice(first, self._seen.count), new)
                self._learner.belief = new
        except Exception as error:
            if now:
                raise
            self._failure = error
        finally:
            self._busy = False

    def wait(self) -> None:
        """Return when no training goes on in the background; a `BayesAdamError` if the last one failed."""
        with self._learning:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._tell()

    def _tell(self) -> None:
        """Raise the reason for which a training in the background failed, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            remedy = "repeat this call, which did nothing: the agent goes on with what it had learnt before"
            raise BayesAdamError(f"a training failed ({failure!r}); {remedy}") from failure

    @property
    def pending(self) -> tuple[int, ...]:
        """The decisions that wait for a reward."""
        with self._acting:
            return tuple(self._standing.waiting)

    def forget(self, decision: int) -> None:
        """Give up on the reward of a decision, if it still waits; a reward that comes later is refused."""
        with self._acting:
            if self._waits(decision):
                self._take({"event": "forget", "decision": int(decision)})

    def _waits(self, decision: object) -> bool:
        """Whether a decision waits for its reward; raises where it was never made."""
        if not _is_index(decision) or not 0 <= decision < self._standing.next_id:
            raise MatchError(f"decision {decision!r} was never made: give the `id` of what decide returned")
        return decision in self._standing.waiting

    def add_arm(self) -> int:
        """A new arm; returns its index. It is tried a few times before it competes."""
        with self._alone():
            self._take({"event": "arm", "arm": self.n_arms, "change": "added"})
            self._learner = self._learner.widened()
            return self.n_arms - 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing is chosen, learnt or trained meanwhile."""
        with self._learning:
            self.wait()
            with self._acting:
                yield

    def remove_arm(self, arm: int) -> None:
        """No longer choose an arm; the agent still learns from the rewards of earlier decisions for it."""
        with self._acting:
            self._change(arm, "removed", self._standing.arms())

    def restore_arm(self, arm: int) -> None:
        """Choose a removed arm again."""
        with self._acting:
            self._change(arm, "restored", sorted(self._standing.removed))

    def _change(self, arm: int, change: str, possible: list[int]) -> None:
        if not _is_index(arm) or arm not in possible or (change == "removed" and len(possible) == 1):
            raise SettingError(f"arm {arm!r} cannot be {change}: one of {possible} can, but the last one stays")
        self._take({"event": "arm", "arm": int(arm), "change": change})

    def _write(self, lines: Iterable[str]) -> None:
        """Log lines; without a log, the one before is no longer of all that the agent knows."""
        if self._log is not None:
            self._log.write("".join(lines))
        elif self._known is not None:
            self._known = Position(self._known.id)

    def _take(self, event: Event) -> Any:
        """Write an event, then apply it; what is to be learnt from it."""
        self._write(map(line, [event]))
        return self._standing.take(event)

    def log(self, path: AnyPath | None, *, sync: bool = False) -> None:
        """Write every decision before it is returned, every reward, and every change of the arms to a file from now on.

        A log that the agent wrote before it was saved, or that `replay` made it from, is continued: the agent first
        learns what the log has and it does not. `path=None` ends logging; what happens then is in no log, and the next
        one is a new file, which begins with the decisions that wait, as if each had been the arm's turn. With `sync`,
        every line is on the disk before a call returns.
        """
        with self._alone():
            self._known = self._position()
            if self._log is not None:
                self._log.close()
                self._log = None
            if path is None:
                return
            writer = LogWriter(path, self._about(), sync=sync, since=self._known, standing=self._standing)
            if writer.before is not None:
                if self._known is None or self._known.id != writer.id:
                    raise MatchError(f"{path} is another agent's log: give a new file, or make an agent by replay")
                self._follow(writer.before)
            elif self._standing.waiting or self._standing.removed:
                writer.write("".join(self._standing.lines()))
            self._log = writer

    def _position(self) -> Position | None:
        """Up to where the agent has written or learnt a log."""
        return self._known if self._log is None else self._log.position()

    def _about(self) -> dict[str, Any]:
        """What a file says of the agent that wrote it."""
        about = {"agent": self.name, "settings": self.settings.plain(), "seed": self.seed}
        return about | {"n_features": self.n_features, "n_arms": self.n_arms}

    @property
    def log_id(self) -> str | None:
        """The id of the log that this agent writes, wrote or replayed; None for none."""
        log = self._log or self._known
        return log.id if log is not None else None

    def _follow(self, written: Iterable[Event]) -> None:
        """Do as the agent that wrote these events did."""
        for event in written:
            if (lesson := self._standing.take(event)) is not None:
                self._learn(*lesson, now=True)
            if event.get("change") == "added":
                self._learner = self._learner.widened()

    def save(self, path: AnyPath) -> None:
        """Write everything: observations, what was learnt, the optimiser, the random numbers, the pending decisions."""
        with self._alone():
            standing, position = self._standing, self._position()
            contexts, arms = ([pair[at] for pair in standing.waiting.values()] for at in (0, 1))
            tensors = {
                **self._seen.state(),
                **{f"learner.{name}": torch.from_numpy(array) for name, array in self._learner.state().items()},
                "pending.id": torch.tensor(list(standing.waiting), dtype=torch.int64),
                "pending.arm": torch.tensor(arms, dtype=torch.int64),
                "pending.context": torch.from_numpy(np.array(contexts, np.float32).reshape(-1, self.n_features)),
            }
            header = {
                **self._about(),
                "training": self.training,
                "gone": sorted(standing.removed),
                "pulls": standing.pulls,
                "next_id": standing.next_id,
                "log": position and (position.id, position.end),
                "mark": position and position.mark,
            }
            storage.write(path, tensors, header, storage.AGENT)

    @classmethod
    def load(cls, path: AnyPath) -> Agent:
        """The agent that `save` wrote; it resumes as if it had never stopped."""
        tensors, header = storage.read(path, storage.AGENT)
        with damage_named(path, "Agent.save"):
            _check_sizes(header, tensors)
            agent = _like(path, header)
            agent.training = header.get("training", "now")
            agent._seen.restore(tensors)
            if "gram" not in (learnt := _learnt(tensors)):
                agent._learner.restore(learnt)
            elif agent._seen.count:
                # Of release 0.3's linear agent, which had no heads.
                agent._learner.observe(agent._seen, slice(0, agent._seen.count))
                agent._learner.belief = agent._learner.train(agent._seen, agent._learner.belief)
            if header["log"]:
                name, end = header["log"]
                agent._known = Position(name, end, header.get("mark"))
            standing, contexts = agent._standing, tensors["pending.context"].numpy()
            waiting = zip(contexts, tensors["pending.arm"].tolist(), strict=True)
            standing.waiting = dict(zip(tensors["pending.id"].tolist(), waiting, strict=True))
            standing.removed, standing.pulls = set(header["gone"]), list(header["pulls"])
            standing.next_id = header["next_id"]
            # What the file holds goes together if the agent can choose.
            agent.probabilities(np.zeros(agent.n_features))
        return agent

    def _contexts(self, context: Numbers) -> tuple[Contexts, bool]:
        array, width = _numbers(context, "a context"), self.n_features
        if array.ndim not in (1, 2) or array.shape[-1] != width or not len(array):
            raise MatchError(f"a context has {width} numbers, a batch (k, {width}); got shape {array.shape}")
        return array.reshape(-1, width), array.ndim == 1

    def _rewards(self, reward: Numbers, n: int) -> Rewards:
        rewards = np.atleast_1d(_numbers(reward, "a reward"))
        if rewards.shape != (n,):
            raise MatchError(f"{n} contexts have {n} rewards, got {reward!r}")
        return rewards

    def _arms(self, arms: Iterable[int] | None) -> list[int]:
        available = self._standing.arms()
        if arms is None:
            return available
        chosen = list(arms) if isinstance(arms, Iterable) else []
        if not chosen or not all(_is_index(arm) and arm in available for arm in chosen):
            raise SettingError(f"arms must be a list of some of {available}, got {arms!r}")
        return sorted({int(arm) for arm in chosen})


def replay(path: AnyPath, agent: Agent | None = None) -> Agent:
    """An agent that has learnt all that a log has, in its order, and whose pending decisions can be rewarded.

    What is learnt agrees with the agent that wrote the log but for rounding; the random numbers of choices begin anew.
    `agent.log(path)` then continues the log. An `agent` that made no decision yet, with as many features and arms as
    the log begins with, replaces one like the log's.
    """
    reader = LogReader(path)
    header = reader.header
    if agent is None:
        try:
            agent = _like(path, header)
        except (KeyError, SettingError) as error:
            raise FileError(f"{path} is of no agent of this version: {error}") from error
    with agent._alone():
        if agent.log_id is not None or agent._standing.next_id:
            raise MatchError("replay needs an agent that neither decided nor wrote a log: make a new one")
        for name in ("n_features", "n_arms"):
            if getattr(agent, name) != header[name]:
                raise MatchError(f"{path} begins with {name}={header[name]}, the agent has {getattr(agent, name)}")
        agent._follow(reader)
        agent._known = reader.position()
    return agent


def _like(path: AnyPath, header: Mapping[str, Any]) -> Agent:
    """A new agent, as the header of a file describes it."""
    if header["agent"] not in AGENTS:
        there = "releases up to 0.3 have it, and `python -m experiments table1` plays it"
        raise FileError(f"{path} is of the agent {header['agent']!r}, not one of {', '.join(AGENTS)}: {there}")
    if header.get("prior"):
        raise FileError(f"{path} is of an agent with a learnt prior, which releases up to 0.3 have: make a new agent")
    # Up to release 0.3 the linear agent had other settings.
    known = header["settings"] if header["agent"] == "hybrid" else _DEFAULTS["linear"].plain() | header["settings"]
    settings = HybridSettings.from_plain(known)
    return Agent(header["agent"], settings, header["n_features"], header["n_arms"], header["seed"])


def _check_sizes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless tensors are finite and those of an agent of the header's size, before there is memory for one."""
    features, n_arms, pending = header["n_features"], header["n_arms"], tensors["pending.context"]
    widths = (features, *header["settings"].get("hidden", ()), n_arms)
    weights = [tensor.numel() for name, tensor in tensors.items() if name in ("learner.weights", "actor.weights")]
    arms = torch.cat([tensors["arms"].flatten(), tensors["pending.arm"].flatten()])
    if (
        len(header["pulls"]) != n_arms
        or {tensors["contexts"].shape[-1], pending.shape[-1]} != {features}
        or (pending.dim(), tensors["pending.arm"].dim(), tensors["pending.id"].dim()) != (2, 1, 1)
        or any(size != sum((m + 1) * n for m, n in itertools.pairwise(widths)) for size in weights)
        or not all(bool(tensor.isfinite().all()) for name, tensor in tensors.items() if name != "learner.ends")
        or not bool(((arms >= 0) & (arms < n_arms)).all())
    ):
        raise ValueError("its tensors are not those of an agent of that size, or not finite")


def _learnt(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """The learner's part of a file; up to release 0.3 there were two, and the one that trained had its own streams."""
    parts = storage.under("learner.", tensors)
    if not parts:
        trainer = storage.under("trainer.stream.", tensors)
        streams = {f"stream.{name}": trainer[name] for name in trainer.keys() & {"batches", "training"}}
        parts = storage.under("actor.", tensors) | streams
    return {name: tensor.numpy() for name, tensor in parts.items()}


def _is_index(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _numbers(values: Numbers, what: str) -> npt.NDArray[np.float32]:
    """Finite numbers; text is refused, which numpy would read as numbers where it can."""
    array = np.asarray(values.detach().double().cpu() if isinstance(values, Tensor) else values)
    # A NaN is the largest.
    if array.dtype.kind not in "biuf" or not np.abs(array).max(initial=0) <= _LARGEST:
        raise MatchError(f"{what} must be finite numbers that fit float32, got {values!r}")
    return array.astype(np.float32)
