"""An agent for the user's own loop: it acts, learns from rewards when they come, and is saved and loaded whole."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._checks import count
from bayesadam._files import damage_named
from bayesadam.bandits.linear import Learner, Linear
from bayesadam.bandits.log import AnyPath, Event, LogReader, LogWriter, Position, Standing, mark
from bayesadam.bandits.network import Belief, Hybrid
from bayesadam.bandits.observations import MOST_ROOM, Contexts, Observations, Rewards
from bayesadam.bandits.settings import AgentSettings, HybridSettings, LinearSettings
from bayesadam.engine.streams import Streams
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from bayesadam.weights.draws import stream_seed

# Draws from the posterior over which a probability is counted.
DRAWS = 200
Training = Literal["now", "background"]
Numbers = npt.ArrayLike | Tensor
# The learner and the settings of every agent.
_REGISTRY: Mapping[str, tuple[type[Learner], type[AgentSettings]]] = {
    "hybrid": (Hybrid, HybridSettings),
    "linear": (Linear, LinearSettings),
}
AGENTS = tuple(_REGISTRY)


@dataclass(frozen=True)
class Decision:
    """A chosen arm, with its probability in this context; its reward is reported by the `id`."""

    id: int
    arm: int
    probability: float


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
        changes: to single settings, such as `hidden=(50,)` or `reward_range=(0, 1)`: see `HybridSettings`,
            `LinearSettings`.
    """
    for key, value in (("n_features", n_features), ("n_arms", n_arms)):
        if not _is_index(value) or value < 1:
            raise SettingError(f"{key} must be a positive whole number, got {value!r}")
    if training not in get_args(Training):
        raise SettingError(f"training must be one of {get_args(Training)}, got {training!r}")
    if name not in _REGISTRY:
        raise SettingError(f"agent must be one of {', '.join(AGENTS)}, got {name!r}")
    settings = _REGISTRY[name][1]
    if unknown := sorted(set(changes) - set(settings.names())):
        choices = ", ".join(sorted(settings.names()))
        raise SettingError(f"{name} has no setting {', '.join(unknown)}: choose from {choices}")
    return Agent(name, settings(**changes), int(n_features), int(n_arms), seed, training)


class Agent:
    """Acts and learns; made by `make_agent` or `load`.

    All methods may be called from many threads. `act` and `decide` never wait for a training: the old belief decides
    until the new one has taken note of the observations that came meanwhile. Of more than 65,536 observations
    `"hybrid"` learns from the newest.
    """

    def __init__(
        self, name: str, settings: AgentSettings, n_features: int, n_arms: int, seed: int, training: Training = "now"
    ) -> None:
        self.name, self.settings, self.n_features, self.seed = name, settings, n_features, seed
        self.training: Training = training
        self._standing = Standing(n_features, n_arms)
        self._seen = Observations(n_features, settings.forget)
        self._learner = _REGISTRY[name][0](settings, n_features, n_arms, seed)
        self._since_training = 0
        # The draws by which probabilities are counted.
        self._further = Streams([seed], "probability")
        # `_learning` is held while something is learnt, `_acting` while the belief or the observations are used.
        self._learning, self._acting = threading.RLock(), threading.RLock()
        # The thread of a training in the background, whether one goes on, and what made one fail.
        self._thread: threading.Thread | None = None
        self._busy = False
        self._failure: Exception | None = None
        self._log: LogWriter | None = None
        # Up to where the agent has learnt a log that it does not write.
        self._known: Position | None = None
        # Decisions that wait here, but not in the log.
        self._unlogged: set[int] = set()

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
            chosen = self._in_turn(allowed, len(rows))
            for arm in chosen:
                self._standing.pulls[arm] += 1
            if len(chosen) < len(rows):
                chosen += self._learner.chosen(rows[len(chosen) :], allowed)[0]
        return chosen[0] if single else np.array(chosen)

    def decide(self, context: Numbers, *, arms: Iterable[int] | None = None, draws: int = DRAWS) -> Any:
        """As `act`: a `Decision`, or a list of k, each remembered until its reward comes with `reward(decision.id, …)`.

        The decision has its probability: 1 for an arm that is tried in turn at first, otherwise (count + 1)/(draws + 1)
        with the count of further draws from the posterior that prefer the arm; these change no choice.
        `Learner.chosen` states its error. The log has all decisions of a batch, or none.
        """
        rows, single = self._contexts(context)
        allowed = self._arms(arms)
        count("draws", draws, "from the posterior")
        with self._acting:
            first, chosen = self._standing.next_id, self._in_turn(allowed, len(rows))
            tried = len(chosen)
            shares = [[float(one == arm) for one in allowed] for arm in chosen]
            if tried < len(rows):
                self._further.begin(self.seed, "decision", first)
                more, share = self._learner.chosen(rows[tried:], allowed, draws=draws, further=self._further)
                chosen += more
                shares += share.tolist()
            made, events = [], []
            for at, (arm, probabilities) in enumerate(zip(chosen, shares, strict=True)):
                made.append(Decision(first + at, arm, probabilities[allowed.index(arm)]))
                event = {"event": "decision", "decision": first + at, "context": rows[at], "arm": arm}
                event |= {"probability": made[at].probability, "arms": allowed, "probabilities": probabilities}
                events.append(event | {"tried": at < tried})
            self._take(*events)
        return made[0] if single else made

    def probabilities(
        self, contexts: Numbers, *, allowed: npt.NDArray[np.bool_] | None = None, draws: int = DRAWS
    ) -> npt.NDArray[np.float64]:
        """The probability with which the agent, as it is now, chooses each arm: (k, arms), for a batch of k contexts.

        Arms that are to be tried in turn at first are taken as tried. The agent does not change. `allowed` is a mask
        (k, arms) of those to choose from.
        """
        rows, _ = self._contexts(contexts)
        count("draws", draws, "from the posterior")
        streams = Streams([stream_seed(self.seed, "policy", 0)], "probability")
        with self._acting:
            mask = np.isin(np.arange(self.n_arms), self._standing.arms()) & np.ones((len(rows), 1), bool)
            if allowed is not None:
                mask &= allowed
            if not mask.any(axis=1).all():
                raise MatchError("a context has no allowed arm that is not removed")
            return self._learner.probabilities(rows, mask, draws, streams)

    def _in_turn(self, allowed: Sequence[int], k: int) -> list[int]:
        """The arms of the next decisions, at most k, that were tried less often than every arm is at first."""
        pulls, chosen = [self._standing.pulls[arm] for arm in allowed], list[int]()
        while len(chosen) < k and (least := min(pulls)) < self.settings.initial_pulls:
            at = pulls.index(least)
            pulls[at] += 1
            chosen.append(allowed[at])
        return chosen

    def update(self, context: Numbers, arm: npt.ArrayLike, reward: Numbers) -> None:
        """Learn that an arm paid a reward in a context; or k of each. Every `train_every` observations it trains."""
        rows, _ = self._contexts(context)
        arms = np.atleast_1d(np.asarray(arm))
        if arms.dtype.kind not in "iu" or arms.shape != (len(rows),) or not 0 <= arms.min() <= arms.max() < self.n_arms:
            raise SettingError(f"update needs {len(rows)} arms, each 0 to {self.n_arms - 1}; got {arm!r}")
        rewards = self._rewards(reward, len(rows))
        with self._learning:
            self._tell()
            if self._log is not None:
                with self._acting:
                    self._log.write(_update(rows, arms.tolist(), rewards))
            self._learn(rows, arms, rewards)

    def reward(self, decision: int, reward: float) -> None:
        """The reward of an earlier `decide`, by the decision's `id`; otherwise as `update`."""
        value = self._rewards(reward, 1)
        with self._learning:
            self._tell()
            with self._acting:
                if not self._waits(decision):
                    raise MatchError(f"decision {decision} was rewarded or forgotten before: see agent.pending")
                context, arm = self._standing.waiting[decision]
                if self._log is not None and decision in self._unlogged:
                    self._log.write(_update([context], [arm], value) | {"decision": int(decision)})
                self._take({"event": "reward", "decision": int(decision), "reward": value[0]})
            self._learn([context], [arm], value)

    def _learn(
        self,
        contexts: Sequence[Any] | Contexts,
        arms: Sequence[int] | npt.NDArray[Any],
        paid: Sequence[float] | Rewards,
        *,
        now: bool = False,
    ) -> None:
        """Add observations (k, features), (k,), (k,); every `train_every` of them, train if that is due."""
        every = self.settings.train_every
        for first in range(0, len(paid), every):
            part = slice(first, first + every)
            if self._busy and self._thread is not None and self._seen.count > 2 * MOST_ROOM:
                # More come than a training can take note of.
                self._thread.join()
            with self._acting:
                if not self._busy and self._seen.count + len(paid[part]) > MOST_ROOM:
                    self._seen.thin()
                self._learner.observe(self._seen, self._seen.add(contexts[part], arms[part], paid[part]))
            self._since_training += len(paid[part])
            if self._since_training >= every and not self._busy:
                self._since_training = 0
                if isinstance(self._learner, Hybrid) and self._learner.due(self._seen):
                    self._begin_training(self._learner, now or self.training == "now")

    def _begin_training(self, learner: Hybrid, now: bool) -> None:
        with self._acting:
            arguments = learner, self._seen.snapshot(), copy.deepcopy(learner.belief), now
            self._busy = True
        if now:
            self._train(*arguments)
        else:
            self._thread = threading.Thread(target=self._train, args=arguments, name="bayesadam training")
            self._thread.start()

    def _train(self, learner: Hybrid, seen: Observations, belief: Belief, now: bool) -> None:
        """Train, take note of the observations that came meanwhile, and let the new belief take over."""
        try:
            new = learner.train(seen, belief)
            # Most of them while decisions are made, and the few that came then while none is.
            seen = self._catch_up(learner, new, seen.count)
            with self._acting:
                self._catch_up(learner, new, seen.count)
                learner.belief = new
        except Exception as error:
            if now:
                raise
            self._failure = error
        finally:
            self._busy = False

    def _catch_up(self, learner: Hybrid, new: Belief, first: int) -> Observations:
        """Let a belief take note of the observations from this row on; returns these and those before."""
        with self._acting:
            seen = self._seen.snapshot()
        if seen.count > first:
            learner.note(new, seen, slice(first, seen.count))
        return seen

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

    def _take(self, *events: Event) -> None:
        """Write events, unless they are of a decision that is not in the log; then apply them."""
        if self._log is not None and events[0].get("decision") not in self._unlogged:
            self._log.write(*events)
        for event in events:
            self._standing.take(event)

    def log(self, path: AnyPath | None, *, sync: bool = False) -> None:
        """Write every decision before it is returned, every reward, and every change of the arms to a file from now on.

        A log that the agent wrote before it was saved, or that `replay` made it from, is continued: the agent first
        learns what the log has and it does not. `path=None` ends logging. With `sync`, every line is on the disk before
        a call returns.
        """
        with self._alone():
            self._known = self._position()
            if self._log is not None:
                self._log.close()
                self._log = None
            if path is None:
                return
            writer = LogWriter(path, self._about(), sync=sync, since=self._known)
            standing, before = Standing(self.n_features, self.n_arms), writer.before
            if before is not None:
                if self._known is None or self._known.id != writer.id:
                    raise MatchError(f"{path} is another agent's log: give a new file, or make an agent by replay")
                standing = before.standing
                self._follow(before, path)
            self._log = writer
            self._unlogged = self._standing.waiting.keys() - standing.waiting.keys()
            for change in self._standing.changes_since(standing):
                writer.write(change)

    def _position(self) -> Position | None:
        """Up to where the agent has written or learnt a log."""
        if self._log is None:
            return self._known
        return self._log.position(self._standing.without(self._unlogged))

    def _about(self) -> dict[str, Any]:
        """What a file says of the agent that wrote it."""
        about = {"agent": self.name, "settings": self.settings.plain(), "seed": self.seed}
        return about | {"n_features": self.n_features, "n_arms": self.n_arms}

    @property
    def log_id(self) -> str | None:
        """The id of the log that this agent writes, wrote or replayed; None for none."""
        log = self._log or self._known
        return log.id if log is not None else None

    def _follow(self, written: Iterable[Event], path: AnyPath) -> None:
        """Do as the agent that wrote these events did."""
        standing = self._standing
        first = next((event["decision"] for event in written if event["event"] == "decision"), standing.next_id)
        if first < standing.next_id:
            raise MatchError(f"{path} and the agent have a decision {first} each: attach it before the agent decides")
        for event in written:
            kind = event["event"]
            if kind in ("reward", "forget") and event["decision"] not in standing.waiting:
                # It was rewarded while the agent wrote no log.
                continue
            done = {"added": range(standing.n_arms), "removed": standing.removed, "restored": standing.arms()}
            if kind == "arm" and event["arm"] in done[event["change"]]:
                # It was changed while the agent wrote no log.
                continue
            if kind == "reward":
                context, arm = standing.waiting[event["decision"]]
                self._learn([context], [arm], [event["reward"]], now=True)
            elif kind == "update":
                self._learn(event["contexts"], event["arms"], event["rewards"], now=True)
                # The decision of a reward is told where it is in no line of this log.
                standing.waiting.pop(event.get("decision", -1), None)
            standing.take(event)
            if kind == "arm" and event["change"] == "added":
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
            log, logged = position and (position.id, position.end), None
            if position is not None and (there := position.standing) is not None:
                tensors["logged.pending"] = torch.tensor(list(there.waiting), dtype=torch.int64)
                logged = {"n_arms": there.n_arms, "gone": sorted(there.removed), "next_id": there.next_id}
                logged["mark"] = position.mark
            header = {
                **self._about(),
                "training": self.training,
                "gone": sorted(standing.removed),
                "pulls": standing.pulls,
                "next_id": standing.next_id,
                "since_training": self._since_training,
                "log": log,
                "logged": logged,
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
            agent._learner.restore({"moments": np.array(agent._seen.moments()), **_learnt(tensors)})
            agent._since_training = header["since_training"]
            if header["log"]:
                name, end = header["log"]
                logged = header.get("logged") or {}
                agent._known = Position(name, end, _logged(agent.n_features, logged, tensors), logged.get("mark"))
            standing, contexts = agent._standing, tensors["pending.context"].numpy()
            waiting = zip(contexts, tensors["pending.arm"].tolist(), strict=True)
            standing.waiting = dict(zip(tensors["pending.id"].tolist(), waiting, strict=True))
            standing.removed, standing.pulls = set(header["gone"]), list(header["pulls"])
            standing.next_id = header["next_id"]
            # What the file holds goes together if the agent can choose.
            agent.probabilities(np.zeros(agent.n_features), draws=1)
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
        agent._follow(reader, path)
        agent._known = Position(reader.id, reader.end, reader.standing, mark(path, reader.end))
    return agent


def _update(contexts: Sequence[Any] | Contexts, arms: Sequence[int], rewards: Rewards) -> Event:
    return {"event": "update", "contexts": contexts, "arms": arms, "rewards": rewards}


def _like(path: AnyPath, header: Mapping[str, Any]) -> Agent:
    """A new agent, as the header of a file describes it."""
    if header["agent"] not in _REGISTRY:
        there = "releases up to 0.3 have it, and `python -m experiments table1` plays it"
        raise FileError(f"{path} is of the agent {header['agent']!r}, not one of {', '.join(AGENTS)}: {there}")
    if header.get("prior"):
        raise FileError(f"{path} is of an agent with a learnt prior, which releases up to 0.3 have: make a new agent")
    settings = _REGISTRY[header["agent"]][1].from_plain(header["settings"])
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
        or not all(bool(tensor.isfinite().all()) for tensor in tensors.values())
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


def _logged(n_features: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Standing | None:
    """The standing of a log, as `Agent.save` wrote it, without the contexts of what waits."""
    if not facts:
        return None
    standing = Standing(n_features, facts["n_arms"])
    standing.removed, standing.next_id = set(facts["gone"]), facts["next_id"]
    standing.waiting = dict.fromkeys(tensors["logged.pending"].tolist(), (None, 0))
    return standing


def _is_index(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _numbers(values: Numbers, what: str) -> npt.NDArray[np.float32]:
    """Finite numbers; text is refused, which numpy would read as numbers where it can."""
    array = np.asarray(values.detach().double().cpu() if isinstance(values, Tensor) else values)
    narrow = np.full(1, np.nan, np.float32)
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise MatchError(f"{what} must be finite numbers that fit float32, got {values!r}")
    return narrow
