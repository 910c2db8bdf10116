"""An agent for the user's own loop: it acts, learns from rewards when they come, and is saved and loaded whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._checks import count
from bayesadam.bandits.agents import agent_settings, check_public, entry, make_learner
from bayesadam.bandits.learner import AgentSettings, Buffer, Learner
from bayesadam.bandits.log import Event, LogFile, LogReader, Standing
from bayesadam.bandits.prior import Prior
from bayesadam.engine.streams import Streams
from bayesadam.errors import FileError, MatchError, SettingError, TrainingError
from bayesadam.weights.draws import stream_seed

# Draws from the posterior over which a probability is counted, where it has no closed form.
DRAWS = 200
# Observations that a network can be trained on at first and at most; of more, a sample is kept.
_FIRST_ROOM, _MOST_ROOM = 1024, 1 << 16
# Observations that a newly trained learner takes note of while no decision is made, and at once where many wait.
_LAST, _PIECE = 8, 64
Training = Literal["now", "background"]
Floats = npt.ArrayLike


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
    settings: str | AgentSettings = "tuned",
    prior: Prior | None = None,
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
        name: one of `AGENTS`.
        settings: `"tuned"`, `"paper"` or your own.
        prior: that the hybrid agent starts from; see `fit_prior`.
        training: `"now"`: `reward` and `update` return when a training that is due is done, and the same calls give the
            same agent. `"background"`: a thread trains, so that no call waits for it, and decisions use its result once
            it is there; when that is depends on the machine.
        changes: to single settings, such as `hidden=(50,)` or `reward_range=(0, 1)`.
    """
    check_public(name)
    for key, value in (("n_features", n_features), ("n_arms", n_arms)):
        if not _is_index(value) or value < 1:
            raise SettingError(f"{key} must be a positive whole number, got {value!r}")
    if training not in get_args(Training):
        raise SettingError(f"training must be one of {get_args(Training)}, got {training!r}")
    own = agent_settings(name, settings, **changes)
    return Agent(name, own, int(n_features), int(n_arms), seed, prior, training)


class Agent:
    """Acts and learns; made by `make_agent` or `load`.

    All methods may be called from many threads. `act` and `decide` never wait for a training: one learner trains on
    the observations so far, another acts. Then the first takes note of the observations that came meanwhile, and the
    second takes over all that it has learnt.

    Of more than 65,536 observations the networks are trained on a random sample, with `forget` on the newest. Sums
    over the contexts, of which linear posteriors are made, have all of them.
    """

    def __init__(
        self,
        name: str,
        settings: AgentSettings,
        n_features: int,
        n_arms: int,
        seed: int,
        prior: Prior | None = None,
        training: Training = "now",
    ) -> None:
        self.name, self.settings, self.n_features, self.seed, self._prior = name, settings, n_features, seed, prior
        self.training: Training = training
        self._standing = Standing(n_features, n_arms)
        self._buffer = Buffer(torch.zeros(1, _FIRST_ROOM, n_features), settings.forget)
        self._trainer, self._actor = self._learner(), self._learner()
        self._since_training = 0
        # The draws by which probabilities are counted.
        self._further = Streams([seed], "probability")
        # `_learning` is held while something is learnt, `_acting` while the actor or the observations are used.
        self._learning, self._acting = threading.RLock(), threading.RLock()
        # The thread of a training in the background, whether one goes on, and what made one fail.
        self._thread: threading.Thread | None = None
        self._busy = False
        self._failure: Exception | None = None
        self._log: LogFile | None = None
        # The id of the log that the agent has learnt, and up to which byte.
        self._known: tuple[str, int] | None = None
        # Decisions that wait here, but not in the log.
        self._unlogged: set[int] = set()

    def _learner(self) -> Learner:
        return make_learner(self.name, self.settings, self._buffer, self.n_arms, [self.seed], self._prior)

    @property
    def n_arms(self) -> int:
        """How many arms there have been; those removed keep their index."""
        return self._standing.n_arms

    @torch.no_grad()
    def act(self, context: Floats, *, arms: Iterable[int] | None = None) -> Any:
        """The arm for a context, an int; for a batch (k, features), an array of k arms, each with its own draw.

        At first every arm is tried a few times, in turn. `arms` are those to choose from now; None for all not removed.
        """
        rows, single = self._contexts(context)
        allowed = self._arms(arms)
        with self._acting:
            chosen = self._in_turn(allowed, len(rows))
            for arm in chosen:
                self._standing.pulls[arm] += 1
            rest = rows[len(chosen) :]
            if len(rest):
                chosen += _largest(self._actor.scores(torch.from_numpy(rest).unsqueeze(0)), allowed)
        return chosen[0] if single else np.array(chosen)

    @torch.no_grad()
    def decide(self, context: Floats, *, arms: Iterable[int] | None = None, draws: int = DRAWS) -> Any:
        """As `act`: a `Decision`, or a list of k, each remembered until its reward comes with `reward(decision.id, …)`.

        The decision has its probability: 1 for an arm that is tried in turn at first, exact for agents that choose
        among finitely many scores, and otherwise (count + 1)/(draws + 1) with the count of further draws from the
        posterior that prefer the arm; these change no choice. `Learner.choice_probabilities` states its error. The log
        has all decisions of a batch, or none.
        """
        rows, single = self._contexts(context)
        allowed = self._arms(arms)
        count("draws", draws, "from the posterior")
        with self._acting:
            number, chosen = self._standing.next_id, self._in_turn(allowed, len(rows))
            tried = len(chosen)
            shares = [[float(one == arm) for one in allowed] for arm in chosen]
            if tried < len(rows):
                x = torch.from_numpy(rows[tried:]).unsqueeze(0)
                self._further.begin(self.seed, "decision", number)
                found, probabilities = self._actor.decided(x, allowed, draws=draws, streams=self._further)
                chosen += found
                shares += probabilities.tolist()
            made, events = [], []
            for at, (arm, own) in enumerate(zip(chosen, shares, strict=True)):
                made.append(Decision(number + at, arm, own[allowed.index(arm)]))
                event = {"event": "decision", "decision": number + at, "context": rows[at], "arm": arm}
                event |= {"probability": made[at].probability, "arms": allowed, "probabilities": own}
                events.append(event | {"tried": at < tried})
            self._take(*events)
        return made[0] if single else made

    @torch.no_grad()
    def probabilities(
        self, contexts: Floats, *, allowed: npt.NDArray[np.bool_] | None = None, draws: int = DRAWS
    ) -> npt.NDArray[np.float64]:
        """The probability with which the agent, as it is now, chooses each arm: (k, arms), for a batch of k contexts.

        Arms that are to be tried in turn at first are taken as tried. The agent does not change. `allowed` is a mask
        (k, arms) of those to choose from; `draws` are for agents without exact probabilities.
        """
        rows, _ = self._contexts(contexts)
        count("draws", draws, "from the posterior")
        streams = Streams([stream_seed(self.seed, "policy", 0)], "probability")
        with self._acting:
            mask = self._mask(self._standing.arms()).expand(len(rows), -1)
            if allowed is not None:
                mask = mask & torch.from_numpy(allowed)
            if not mask.any(dim=1).all():
                raise MatchError("a context has no allowed arm that is not removed")
            x = torch.from_numpy(rows).unsqueeze(0)
            found = self._actor.choice_probabilities(x, mask, draws=draws, streams=streams)
        return found[0].numpy()

    def _in_turn(self, allowed: Sequence[int], k: int) -> list[int]:
        """The arms of the next decisions, at most k, that were tried less often than every arm is at first."""
        pulls, chosen = [self._standing.pulls[arm] for arm in allowed], list[int]()
        while len(chosen) < k and (least := min(pulls)) < self.settings.initial_pulls:
            at = pulls.index(least)
            pulls[at] += 1
            chosen.append(allowed[at])
        return chosen

    def _mask(self, allowed: Sequence[int]) -> Tensor:
        mask = torch.zeros(self.n_arms, dtype=torch.bool)
        mask[list(allowed)] = True
        return mask

    def update(self, context: Floats, arm: Any, reward: Any) -> None:
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
                    self._log.write(_updated(rows, arms.tolist(), rewards))
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
                    # The log does not have the decision.
                    self._log.write(_updated([context], [arm], value))
                self._take({"event": "reward", "decision": int(decision), "reward": value[0]})
            self._learn([context], [arm], value)

    def _learn(self, contexts: Any, chosen: Any, paid: Any, *, now: bool = False) -> None:
        """Add observations (k, features), (k,), (k,); every `train_every` of them, train if that is due."""
        rows, rewards = np.asarray(contexts, np.float32), torch.from_numpy(np.asarray(paid, np.float32))
        arms = torch.from_numpy(np.asarray(chosen, np.int64))
        for first in range(0, len(rows), self.settings.train_every):
            part = slice(first, first + self.settings.train_every)
            more = len(rows[part])
            if self._busy and self._thread is not None and self._buffer.count > 2 * _MOST_ROOM:
                # More come than a training can take note of.
                self._thread.join()
            with self._acting:
                self._make_room(more)
                self._buffer.contexts.numpy()[0, self._buffer.count : self._buffer.count + more] = rows[part]
                new = self._buffer.add(arms[None, part], rewards[None, part])
                if self._actor.learns_at_once:
                    self._actor.observe(new)
                elif not self._busy:
                    self._trainer.observe(new)
            self._since_training += more
            if self._since_training >= self.settings.train_every and not self._busy:
                self._since_training = 0
                if self._actor.due:
                    self._begin_training(now or self.training == "now")

    def _make_room(self, more: int) -> None:
        """For so many observations; from `_MOST_ROOM` on only a sample stays, once no training uses them."""
        buffer = self._buffer
        if not self._busy and buffer.count + more > (buffer.settled + _FIRST_ROOM if buffer.settled else _MOST_ROOM):
            self._thin()
        end, room = buffer.count + more, buffer.contexts.shape[1]
        if end > room:
            self._buffer = buffer.widened(max(2 * room, end))
            for learner in (self._actor,) if self._busy else (self._actor, self._trainer):
                learner.use(self._buffer)

    def _thin(self) -> None:
        rows = self._buffer.kept(_MOST_ROOM // 2)
        (self._actor if self._actor.learns_at_once else self._trainer).thin(rows)
        self._buffer.thin(rows)

    def _begin_training(self, now: bool) -> None:
        with self._acting:
            if self._buffer.settled:
                # What came since is held whole: leave as much of it as of the rest.
                self._thin()
            self._trainer.use(self._buffer.until(self._buffer.count))
            if self._actor.learns_at_once:
                self._trainer.load(self._actor.tensors())
            self._busy = True
        if now:
            self._train(now)
        else:
            self._thread = threading.Thread(target=self._train, args=(now,), name="bayesadam training")
            self._thread.start()

    def _train(self, now: bool) -> None:
        """Train, take note of the observations that came meanwhile, and let the actor take over."""
        try:
            self._trainer.train()
            while (waiting := self._buffer.count - self._trainer.buffer.count) > _LAST:
                self._catch_up(1 if waiting < 4 * _PIECE else _PIECE)
            with self._acting:
                while self._buffer.count > self._trainer.buffer.count:
                    self._catch_up(1)
                self._actor.load(self._trainer.tensors())
        except Exception as error:
            if now:
                raise
            with self._acting:
                self._trainer.load(self._actor.tensors())
                self._failure = error
        finally:
            with self._acting:
                self._trainer.use(self._buffer)
                self._busy = False

    @torch.no_grad()
    def _catch_up(self, n: int) -> None:
        """Let the trainer take note of its next observations."""
        at = self._trainer.buffer.count
        with self._acting:
            self._trainer.use(self._buffer.until(at + n))
        self._trainer.observe(slice(at, at + n))

    def wait(self) -> None:
        """Return when no training goes on in the background; a `TrainingError` if the last one failed."""
        with self._learning:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._tell()

    def _tell(self) -> None:
        """Raise the reason for which a training in the background failed, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            told = "repeat this call, which did nothing: the agent goes on with what it had learnt before"
            raise TrainingError(f"a training failed ({failure!r}); {told}") from failure

    def _moved(self, old: Learner) -> Learner:
        """A learner for more arms, with what the old one has learnt in the leading part of its tensors."""
        new = self._learner()
        state = new.state()
        for name, tensor in old.state().items():
            for part, whole in zip(old.parts(tensor), new.parts(state[name]), strict=True):
                whole[tuple(slice(0, length) for length in part.shape)] = part
        new.restore(state)
        return new

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

    def _waits(self, decision: Any) -> bool:
        """Whether a decision waits for its reward; raises where it was never made."""
        if not _is_index(decision) or not 0 <= decision < self._standing.next_id:
            raise MatchError(f"decision {decision!r} was never made: give the `id` of what decide returned")
        return decision in self._standing.waiting

    def add_arm(self) -> int:
        """A new arm; returns its index. It is tried a few times before it competes."""
        with self._alone():
            self._take({"event": "arm", "arm": self.n_arms, "change": "added"})
            self._widen()
            return self.n_arms - 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing is chosen, learnt or trained meanwhile."""
        with self._learning:
            self.wait()
            with self._acting:
                yield

    def _widen(self) -> None:
        """Learners for one more arm; what was learnt stays."""
        self._trainer, self._actor = self._moved(self._trainer), self._moved(self._actor)

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

    def log(self, path: str | os.PathLike[str] | None, *, sync: bool = False) -> None:
        """Write every decision before it is returned, every reward, and every change of the arms to a file from now on.

        A log that the agent wrote before it was saved, or that `replay` made it from, is continued: the agent first
        learns what the log has and it does not. `path=None` ends logging. With `sync`, every line is on the disk before
        a call returns.
        """
        with self._alone():
            if self._log is not None:
                self._known = self._log.id, self._log.end
                self._log.close()
                self._log = None
            if path is None:
                return
            about = {"agent": self.name, "settings": self.settings.plain(), "seed": self.seed}
            about |= {"n_features": self.n_features, "n_arms": self.n_arms, "prior": self._prior is not None}
            file = LogFile(path, about, sync=sync)
            before, (known, end) = file.before, self._known or ("", 0)
            if before is not None:
                if known != file.id:
                    raise MatchError(f"{path} is another agent's log: give a new file, or make an agent by replay")
                self._follow([event for start, event in before.events if start >= end], before.path)
            self._log = file
            standing = Standing(self.n_features, self.n_arms) if before is None else before.standing
            self._unlogged = self._standing.waiting.keys() - standing.waiting.keys()
            for change in self._standing.changes_since(standing):
                file.write(change)

    @property
    def log_id(self) -> str | None:
        """The id of the log that this agent writes, wrote or replayed; None for none."""
        return self._log.id if self._log is not None else self._known and self._known[0]

    def _follow(self, written: Sequence[Event], path: os.PathLike[str]) -> None:
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
            if kind == "reward":
                context, arm = standing.waiting[event["decision"]]
                self._learn([context], [arm], [event["reward"]], now=True)
            elif kind == "update":
                self._learn(event["contexts"], event["arms"], event["rewards"], now=True)
            standing.take(event)
            if kind == "arm" and event["change"] == "added":
                self._widen()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything: observations, what was learnt, the optimiser, the random numbers, the pending decisions."""
        with self._alone():
            if self._log is not None:
                self._known = self._log.id, self._log.end
            waiting, prior = self._standing.waiting, self._prior
            rows = np.array([context for context, _ in waiting.values()], np.float32).reshape(-1, self.n_features)
            tensors = {
                "contexts": self._buffer.contexts[:, : self._buffer.count],
                **self._buffer.state(),
                "pending.id": torch.tensor(list(waiting), dtype=torch.int64),
                "pending.arm": torch.tensor([arm for _, arm in waiting.values()], dtype=torch.int64),
                "pending.context": torch.from_numpy(rows),
            }
            parts = {"trainer": self._trainer.state(), "actor": self._actor.state()}
            for part, own in (parts | ({} if prior is None else {"prior": prior.tensors()})).items():
                tensors |= {f"{part}.{name}": tensor for name, tensor in own.items()}
            header = {
                "agent": self.name,
                "settings": self.settings.plain(),
                "prior": None if prior is None else prior.header(),
                "n_features": self.n_features,
                "n_arms": self._standing.n_arms,
                "seed": self.seed,
                "training": self.training,
                "room": self._buffer.contexts.shape[1],
                "gone": sorted(self._standing.removed),
                "pulls": self._standing.pulls,
                "next_id": self._standing.next_id,
                "since_training": self._since_training,
                "log": self._known,
            }
            storage.write(path, tensors, header, storage.AGENT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Agent:
        """The agent that `save` wrote; it resumes as if it had never stopped."""
        tensors, header = storage.read(path, storage.AGENT)
        try:
            settings = entry(header["agent"]).settings.from_plain(header["settings"])
            about, known = header["prior"], header["log"]
            prior = None if about is None else Prior.of_tensors(storage.under("prior.", tensors), about)
            own = header["n_features"], header["n_arms"], header["seed"], prior, header.get("training", "now")
            agent = cls(header["agent"], settings, *own)
            agent._buffer = agent._buffer.widened(header["room"])
            for learner in (agent._actor, agent._trainer):
                learner.use(agent._buffer)
            agent._buffer.restore(tensors)
            agent._buffer.contexts[:, : agent._buffer.count] = tensors["contexts"]
            agent._trainer.restore(storage.under("trainer.", tensors))
            agent._actor.restore(storage.under("actor.", tensors))
            agent._since_training, agent._known = header["since_training"], known and (known[0], known[1])
            standing = agent._standing
            waiting = zip(tensors["pending.context"].numpy(), tensors["pending.arm"].tolist(), strict=True)
            standing.waiting = dict(zip(tensors["pending.id"].tolist(), waiting, strict=True))
            standing.removed, standing.pulls = set(header["gone"]), list(header["pulls"])
            standing.next_id = header["next_id"]
        except (KeyError, SettingError) as error:
            raise FileError(f"{path} is not a saved agent of this version: {error}") from error
        return agent

    def _contexts(self, context: Floats) -> tuple[npt.NDArray[np.float32], bool]:
        array, width = _numbers(context, "a context"), self.n_features
        if array.ndim not in (1, 2) or array.shape[-1] != width or not len(array):
            raise MatchError(f"a context has {width} numbers, a batch (k, {width}); got shape {array.shape}")
        return array.reshape(-1, width), array.ndim == 1

    def _rewards(self, reward: Any, n: int) -> npt.NDArray[np.float32]:
        rewards = np.atleast_1d(_numbers(reward, "a reward"))
        if rewards.shape != (n,):
            raise MatchError(f"{n} contexts have {n} rewards, got {reward!r}")
        return rewards

    def _arms(self, arms: Any) -> list[int]:
        available = self._standing.arms()
        if arms is None:
            return available
        chosen = list(arms) if isinstance(arms, Iterable) else []
        if not chosen or not all(_is_index(arm) and arm in available for arm in chosen):
            raise SettingError(f"arms must be a list of some of {available}, got {arms!r}")
        return sorted({int(arm) for arm in chosen})


def replay(path: str | os.PathLike[str], agent: Agent | None = None) -> Agent:
    """An agent that has learnt all that a log has, in its order, and whose pending decisions can be rewarded.

    What is learnt agrees with the agent that wrote the log but for rounding; the random numbers of choices begin anew.
    `agent.log(path)` then continues the log.

    Args:
        path: the log.
        agent: one that made no decision yet, with as many features and arms as the log begins with; None for an agent
            like the one that wrote the log.
    """
    reader = LogReader(path)
    header = reader.header
    if agent is None:
        if header.get("prior"):
            raise MatchError(f"the agent of {path} started from a learnt prior: give replay an agent with that prior")
        try:
            settings = entry(header["agent"]).settings.from_plain(header["settings"])
        except (KeyError, SettingError) as error:
            raise FileError(f"{path} is of no agent of this version: {error}") from error
        agent = Agent(header["agent"], settings, header["n_features"], header["n_arms"], header["seed"])
    with agent._alone():
        if agent.log_id is not None or agent._standing.next_id:
            raise MatchError("replay needs an agent that neither decided nor wrote a log: make a new one")
        for what, own in (("n_features", agent.n_features), ("n_arms", agent.n_arms)):
            if own != header[what]:
                raise MatchError(f"{path} begins with {what}={header[what]}, the agent has {own}")
        agent._follow([event for _, event in reader.events], reader.path)
        agent._known = reader.id, reader.end
    return agent


def _updated(contexts: Any, arms: Sequence[int], rewards: Any) -> Event:
    return {"event": "update", "contexts": contexts, "arms": arms, "rewards": rewards}


def _largest(scores: Tensor, allowed: Sequence[int]) -> list[int]:
    """The arms of the largest scores (1, k, arms) among those that are allowed."""
    return [allowed[place] for place in scores[0].numpy()[:, allowed].argmax(axis=1)]


def _is_index(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _numbers(values: Any, what: str) -> npt.NDArray[np.float32]:
    """Finite numbers; text is refused, which numpy would read as numbers where it can."""
    array = np.asarray(values.detach().double().cpu() if isinstance(values, Tensor) else values)
    narrow = array.copy()
    if array.dtype != np.float32:
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32) if array.dtype.kind in "biuf" else np.full(1, np.nan, np.float32)
    if not np.isfinite(narrow).all():
        raise MatchError(f"{what} must be finite numbers that fit float32, got {values!r}")
    return narrow
