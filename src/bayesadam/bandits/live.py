"""An agent for the user's own loop: it acts, learns from rewards when they come, and is saved and loaded whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._warnings import warn
from bayesadam.bandits.agents import agent_settings, entry, make_learner
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.learners import Learner, NetworkLearner, among
from bayesadam.bandits.log import (
    ArmChanged,
    Decided,
    Event,
    Forgotten,
    Header,
    LogFile,
    LogReader,
    Rewarded,
    Updated,
    shortest,
)
from bayesadam.bandits.prior import Prior
from bayesadam.bandits.settings import AgentSettings, is_count
from bayesadam.engine.network import unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.gaussian.noise import stream_seed

# Draws from the posterior that a probability is counted over, where it has no closed form.
DRAWS = 200
_FIRST_ROOM = 1024
Floats = npt.ArrayLike


@dataclass(frozen=True)
class Decision:
    """An arm that was chosen.

    Attributes:
        id: by which its reward is reported.
        arm: the arm.
        probability: with which the agent, as it was then, chooses this arm in this context; see `Agent.decide`.
    """

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
        n_features: how many numbers a context has.
        n_arms: how many arms there are at first.
        settings: `"tuned"`, `"paper"` or your own.
        prior: that the hybrid agent starts from; see `fit_prior`.
        seed: fixes every random number.
        changes: to single settings, such as `hidden=(50,)` or `reward_range=(0, 1)`.
    """
    if not isinstance(name, str):
        raise SettingError(
            f"make_agent takes the agent's name first, got {name!r}: make_agent('hybrid', n_features=..., n_arms=...)"
        )
    counts = {"n_features": n_features, "n_arms": n_arms}
    for key, value in counts.items():
        # As numpy and pandas count.
        counts[key] = int(value) if isinstance(value, np.integer) else value
        if not is_count(counts[key]):
            raise SettingError(
                f"{key} must be a positive whole number, got {value!r}: make_agent({name!r}, n_features=5, n_arms=3) is for "
                "contexts of 5 numbers and 3 arms"
            )
    return Agent(name, agent_settings(name, settings, **changes), **counts, seed=seed, prior=prior)


class Agent:
    """Acts and learns; made by `make_agent` or `load`.

    Two learners share what was seen: one trains, the other acts and takes over the first one's weights after each
    training; in between the other takes note of what comes, where that changes the scores. So `act` may be called from other threads while `update` trains, and never waits for it.

    Attributes:
        n_arms: how many arms there have been; those removed keep their index.
    """

    def __init__(
        self, name: str, settings: AgentSettings, n_features: int, n_arms: int, seed: int, prior: Prior | None = None
    ) -> None:
        self._prior = prior
        self.name, self.settings, self.n_features, self.n_arms, self.seed = name, settings, n_features, n_arms, seed
        self._buffer = Buffer(torch.zeros(1, _FIRST_ROOM, n_features), settings.forget)
        self._trainer, self._actor = self._learner(), self._learner()
        self._gone: set[int] = set()
        self._pulls = [0] * n_arms
        self._pending: dict[int, tuple[Tensor, int]] = {}
        self._next_id = 0
        self._since_training = 0
        self._told_of_range = False
        self._log: LogFile | None = None
        # The log whose lines make up what this agent knows, and up to where.
        self._followed: tuple[str, int] | None = None
        self._learning, self._acting = threading.RLock(), threading.RLock()

    def _learner(self) -> Learner:
        return make_learner(self.name, self.settings, self._buffer, self.n_arms, [self.seed], self._prior)

    @torch.no_grad()
    def act(self, context: Floats, *, arms: Iterable[int] | None = None) -> Any:
        """The arm for a context, an int; for a batch (k, features), an array of k arms, each with its own draw.

        At first every arm is tried a few times, in turn. `arms` are those to choose from now; None for all not removed.
        """
        rows, single = self._checked_contexts(context)
        allowed = self._checked_arms(arms)
        chosen: list[int] = []
        with self._acting:
            while len(chosen) < len(rows) and (arm := self._untried(allowed)) is not None:
                self._pulls[arm] += 1
                chosen.append(arm)
            rest = rows[len(chosen) :]
            if len(rest):
                chosen += _largest(self._actor.scores(rest.unsqueeze(0)), self._mask(allowed))
        return chosen[0] if single else np.array(chosen)

    @torch.no_grad()
    def decide(self, context: Floats, *, arms: Iterable[int] | None = None, draws: int = DRAWS) -> Decision:
        """As `act` for one context, remembered until its reward comes with `reward(decision.id, …)`.

        The decision has its probability: 1 for an arm that is tried in turn at first, exact for agents that choose among
        finitely many scores, and otherwise the share of draws from the posterior that prefer the arm, the one that chose
        among them: (count + 1)/(draws + 1). `Learner.choice_probabilities` says how far that is from the limit of many.

        Args:
            context: one context.
            arms: those to choose from now; None for all not removed.
            draws: the further draws. They change no choice.
        """
        rows, single = self._checked_contexts(context)
        if not single:
            raise MatchError(f"decide takes one context of {self.n_features} numbers, got {len(rows)} of them")
        allowed = self._checked_arms(arms)
        _check_draws(draws)
        with self._acting:
            mask, x, untried = self._mask(allowed), rows.unsqueeze(0), self._untried(allowed)
            if untried is not None:
                arm, shares = untried, [float(one == untried) for one in allowed]
            else:
                drawn = self._actor.drawn(x)
                (arm,) = _largest(self._actor.explored(drawn), mask)
                streams = Streams([stream_seed(self.seed, "decision", self._next_id)], "probability")
                found = self._actor.choice_probabilities(x, mask, draws=draws, streams=streams, drawn=drawn)
                shares = found[0, 0, allowed].tolist()
            decision = Decision(self._next_id, arm, shares[allowed.index(arm)])
            if self._log is not None:
                context, tried = shortest(rows[0].numpy()), untried is not None
                self._log.write(Decided(decision.id, context, arm, decision.probability, allowed, shares, tried))
            self._note(decision.id, rows[0], arm, tried=untried is not None)
        return decision

    @torch.no_grad()
    def probabilities(
        self,
        contexts: Floats,
        *,
        arms: Iterable[int] | npt.NDArray[np.bool_] | None = None,
        draws: int = DRAWS,
        seed: int = 0,
    ) -> npt.NDArray[np.float64]:
        """With which probability the agent, as it is now, chooses each arm: (k, arms), for a batch of k contexts.

        Arms that are to be tried in turn at first are taken as tried. Nothing of the agent changes.

        Args:
            contexts: (k, features).
            arms: those to choose from, as for `act`; or a mask (k, arms) with those of each context.
            draws: from the posterior, for agents that have no exact probabilities.
            seed: of these draws.
        """
        rows, _ = self._checked_contexts(contexts)
        _check_draws(draws)
        streams = Streams([stream_seed(self.seed, "policy", seed)], "probability")
        with self._acting:
            mask = (
                self._checked_mask(arms, len(rows))
                if isinstance(arms, np.ndarray) and arms.ndim == 2
                else self._mask(self._checked_arms(arms))
            )
            found = self._actor.choice_probabilities(rows.unsqueeze(0), mask, draws=draws, streams=streams)
        return found[0].numpy()

    def _untried(self, allowed: Sequence[int]) -> int | None:
        """The arm that was tried least, if less often than every arm is at first."""
        least = min(allowed, key=lambda arm: self._pulls[arm])
        return least if self._pulls[least] < self.settings.initial_pulls else None

    def _mask(self, allowed: Sequence[int]) -> Tensor:
        mask = torch.zeros(self.n_arms, dtype=torch.bool)
        mask[list(allowed)] = True
        return mask

    def update(self, context: Floats, arm: Any, reward: Any) -> None:
        """Learn that an arm paid a reward in a context; or k of each. Every `train_every` observations it trains.

        A reward outside the `reward_range` that the agent was made with is learnt, with a warning.
        """
        rows, single = self._checked_contexts(context)
        arms, last = np.atleast_1d(np.asarray(arm)), self.n_arms - 1
        if arms.shape != (len(rows),) or not np.issubdtype(arms.dtype, np.integer):
            wanted = "one arm" if single else f"{len(rows)} arms, one for each context"
            raise MatchError(f"update needs {wanted}, by whole numbers from 0 to {last}; got {arm!r}")
        for one in arms.tolist():
            if not 0 <= one <= last:
                raise SettingError(f"there is no arm {one}: they are 0 to {last}, and add_arm makes another")
        rewards = self._checked_rewards(reward, len(rows), single)
        with self._learning:
            if self._log is not None:
                self._write(Updated(shortest(rows.numpy()), arms.tolist(), shortest(rewards.numpy())))
            self._learn(rows, torch.from_numpy(arms.astype(np.int64)), rewards)

    def reward(self, decision: int, reward: float) -> None:
        """The reward of an earlier `decide`, by the decision's `id`; else as `update`."""
        value = self._checked_rewards(reward, 1, True)
        with self._learning:
            with self._acting:
                if not self._waits(decision):
                    raise MatchError(f"decision {decision} was rewarded or forgotten before: see agent.pending")
                row, arm = self._pending[decision]
                if self._log is not None:
                    (paid,) = shortest(value.numpy())
                    logged = decision in self._log.standing.waiting
                    told = Updated([shortest(row.numpy())], [arm], [paid])
                    self._write(Rewarded(int(decision), paid) if logged else told)
                del self._pending[decision]
            self._learn(row.unsqueeze(0), torch.tensor([arm]), value)

    def __repr__(self) -> str:
        seen, waiting = sum(self._pulls), len(self._pending)
        return f"Agent({self.name!r}, {self.n_features} features, {self.n_arms} arms, {seen} rewards seen, {waiting} pending)"

    @property
    def pending(self) -> tuple[int, ...]:
        """The decisions that wait for a reward."""
        with self._acting:
            return tuple(self._pending)

    def forget(self, decision: int) -> None:
        """Give up on the reward of a decision; nothing is learnt from it, and a reward that comes yet is refused.

        A decision that was rewarded or forgotten before stays as it is.
        """
        with self._acting:
            if self._waits(decision):
                if self._log is not None and decision in self._log.standing.waiting:
                    self._write(Forgotten(int(decision)))
                del self._pending[decision]

    def _waits(self, decision: Any) -> bool:
        """Whether a decision waits for its reward; raises where it was never made."""
        if isinstance(decision, Decision):
            raise MatchError(f"a decision is known by its id: give {decision.id}, the `id` of {decision}")
        if not _is_index(decision) or not 0 <= decision < self._next_id:
            raise MatchError(
                f"decision {decision!r} was never made: give the `id` of what decide returned; {len(self._pending)} wait for "
                "a reward, see agent.pending"
            )
        return decision in self._pending

    def _learn(self, rows: Tensor, arms: Tensor, rewards: Tensor) -> None:
        for first in range(0, len(rows), self.settings.train_every):
            part = slice(first, first + self.settings.train_every)
            count = len(rows[part])
            self._make_room(count)
            places = slice(self._buffer.count, self._buffer.count + count)
            with self._acting:
                self._buffer.contexts[0, places] = rows[part]
                self._buffer.add(arms[None, part], rewards[None, part])
            at_once = self._actor.learns_at_once
            with self._acting:
                (self._actor if at_once else self._trainer).observe(places)
            self._since_training += count
            if self._since_training >= self.settings.train_every:
                if at_once:
                    self._trainer.load(self._actor.tensors())
                self._trainer.train()
                self._since_training = 0
                with self._acting:
                    self._actor.load(self._trainer.tensors())

    def add_arm(self) -> int:
        """A new arm; returns its index. It is tried a few times before it competes."""
        with self._learning, self._acting:
            event = ArmChanged(self.n_arms, "added")
            self._write(event)
            self._change(event)
            return event.arm

    def remove_arm(self, arm: int) -> None:
        """No longer choose an arm; the agent still learns from the rewards of earlier decisions for it."""
        with self._acting:
            if not _is_index(arm) or arm not in self._available():
                raise SettingError(f"there is no arm {arm!r} to remove: there are {self._available()}")
            if len(self._available()) == 1:
                raise SettingError(f"arm {arm} is the last one: add another before it is removed")
            event = ArmChanged(int(arm), "removed")
            self._write(event)
            self._change(event)

    def restore_arm(self, arm: int) -> None:
        """Choose a removed arm again."""
        with self._acting:
            if not _is_index(arm) or arm not in self._gone:
                raise SettingError(f"arm {arm!r} is not removed: {sorted(self._gone)} are")
            event = ArmChanged(int(arm), "restored")
            self._write(event)
            self._change(event)

    def _change(self, event: ArmChanged) -> None:
        if event.change == "added":
            self.n_arms += 1
            self._pulls.append(0)
            self._rebuild(self._buffer)
        elif event.change == "removed":
            self._gone.add(event.arm)
        else:
            self._gone.discard(event.arm)

    def _available(self) -> list[int]:
        return [arm for arm in range(self.n_arms) if arm not in self._gone]

    def _make_room(self, count: int) -> None:
        room = self._buffer.contexts.shape[1]
        if self._buffer.count + count <= room:
            return
        with self._acting:
            while room < self._buffer.count + count:
                room *= 2
            self._rebuild(self._buffer.widened(room))

    def _rebuild(self, buffer: Buffer) -> None:
        """Learners for another number of arms or more room, with what was learnt in its place."""
        self._buffer = buffer
        self._trainer, self._actor = self._moved(self._trainer), self._moved(self._actor)

    def _moved(self, old: Learner) -> Learner:
        new = self._learner()
        state = new.state()
        for name, tensor in old.state().items():
            if name.startswith("stream."):
                state[name] = tensor
            elif tensor.shape == state[name].shape:
                state[name].copy_(tensor)
            elif isinstance(old, NetworkLearner) and isinstance(new, NetworkLearner) and _is_flat(tensor, old):
                parts = unflatten(new.network, state[name])
                for key, part in unflatten(old.network, tensor).items():
                    _put(part, parts[key])
            else:
                _put(tensor, state[name])
        new.restore(state)
        return new

    def log(self, path: str | os.PathLike[str] | None, *, sync: bool = False) -> None:
        """Write down every decision before it is returned, every reward, and every change of the arms, from now on.

        The file has one JSON object a line, each appended by a single write: a killed process loses none, and a killed
        machine at most the end, of which a half-written line is cut off with a warning when the log is continued.

        A log that exists is continued. Ids go on after the larger of its last and the agent's own, and the decisions that
        wait in it wait in the agent too. An agent that was saved while it wrote this log, or made by `replay` of it, first
        learns what the log has and it does not; any other agent does not learn from the log: see `replay`.

        Args:
            path: the file; None ends logging.
            sync: whether every line is on the disk, not only with the operating system, before a call returns; slower, for
                machines that may lose power.
        """
        with self._learning, self._acting:
            if self._log is not None:
                self._followed = self._log.header.id, self._log.end
                self._log.close()
                self._log = None
            if path is not None:
                learnt = self._prior is not None
                header = Header(self.name, self.settings.plain(), self.seed, self.n_features, self.n_arms, learnt)
                file = LogFile(path, header, sync=sync)
                try:
                    self._join(file)
                except BaseException:
                    file.close()
                    raise
                self._log = file
                self._tell_of_arms(file)

    @property
    def log_id(self) -> str | None:
        """The id of the log that this agent writes, wrote or replayed; None for none."""
        return self._log.header.id if self._log is not None else self._followed and self._followed[0]

    def _join(self, file: LogFile) -> None:
        """Take over what a log has and the agent has not."""
        self._check_width(file.header, file.path)
        known_id, known = self._followed or (None, 0)
        mine = known_id == file.header.id
        unknown = [event for start, event in file.read() if mine and start >= known]
        standing = file.standing
        if mine:
            self._follow(unknown, file.path)
        if self.n_arms < standing.n_arms:
            raise MatchError(
                f"{file.path} has {standing.n_arms} arms and the agent {self.n_arms}: add arms first, or see replay"
            )
        waiting = {} if mine else standing.waiting
        both = sorted(waiting.keys() & self._pending.keys())
        if both:
            raise MatchError(
                f"decision {both[0]} waits for a reward in {file.path} and, another one, in the agent: reward or forget the "
                "agent's, or give it another log"
            )
        for event in waiting.values():
            self._pending[event.decision] = _row(event.context), event.arm
        self._next_id = max(self._next_id, standing.next_id)

    def _tell_of_arms(self, file: LogFile) -> None:
        """Write down how the arms changed while no log was written."""
        changes = [ArmChanged(arm, "added") for arm in range(file.standing.n_arms, self.n_arms)]
        changes += [ArmChanged(arm, "removed") for arm in sorted(self._gone - file.standing.removed)]
        changes += [ArmChanged(arm, "restored") for arm in sorted(file.standing.removed - self._gone)]
        for change in changes:
            file.write(change)

    def _write(self, event: Event) -> None:
        with self._acting:
            if self._log is not None:
                self._log.write(event)

    def _note(self, decision: int, row: Tensor, arm: int, *, tried: bool) -> None:
        """Remember a decision until its reward comes."""
        self._next_id = decision + 1
        self._pending[decision] = row, arm
        self._pulls[arm] += tried

    def _follow(self, events: Sequence[Event], path: os.PathLike[str]) -> None:
        """Do as the agent that wrote these events did; rewards are learnt as many at once as there are up to a training."""
        first = next((event.decision for event in events if isinstance(event, Decided)), self._next_id)
        if first < self._next_id:
            raise MatchError(
                f"{path} has a decision {first}, and the agent has one of its own: attach the log before the agent decides, or "
                "replay it into a new agent"
            )
        told: list[tuple[Tensor, int, float]] = []

        def learn() -> None:
            if told:
                rows, arms, rewards = zip(*told, strict=True)
                self._learn(torch.stack(rows), torch.tensor(arms), _row(rewards))
                told.clear()

        for event in events:
            if isinstance(event, Decided):
                self._note(event.decision, _row(event.context), event.arm, tried=event.tried)
            elif isinstance(event, Rewarded | Forgotten):
                # None where the agent was rewarded while it wrote no log.
                waited = self._pending.pop(event.decision, None)
                if isinstance(event, Rewarded) and waited is not None:
                    told.append((*waited, event.reward))
                if len(told) >= self.settings.train_every - self._since_training:
                    learn()
            else:
                learn()
                if isinstance(event, Updated):
                    rows = torch.stack([_row(context) for context in event.contexts])
                    self._learn(rows, torch.tensor(event.arms), _row(event.rewards))
                else:
                    self._change(event)
        learn()

    def _check_width(self, header: Header, path: os.PathLike[str]) -> None:
        if header.n_features != self.n_features:
            raise MatchError(f"{path} has contexts of {header.n_features} numbers, the agent of {self.n_features}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything: what was seen and learnt, the optimiser, the random numbers, the decisions that wait."""
        with self._learning, self._acting:
            waiting = [row for row, _ in self._pending.values()]
            tensors = {
                "contexts": self._buffer.contexts[:, : self._buffer.count],
                **self._buffer.state(),
                "pending.id": torch.tensor(list(self._pending), dtype=torch.int64),
                "pending.arm": torch.tensor([arm for _, arm in self._pending.values()], dtype=torch.int64),
                "pending.context": torch.stack(waiting) if waiting else torch.zeros(0, self.n_features),
                **{f"trainer.{name}": tensor for name, tensor in self._trainer.state().items()},
                **{f"actor.{name}": tensor for name, tensor in self._actor.state().items()},
            }
            if self._prior is not None:
                tensors |= {f"prior.{name}": tensor for name, tensor in self._prior.tensors().items()}
            header = {
                "agent": self.name,
                "settings": self.settings.plain(),
                "prior": None if self._prior is None else self._prior.header(),
                "n_features": self.n_features,
                "n_arms": self.n_arms,
                "seed": self.seed,
                "room": self._buffer.contexts.shape[1],
                "gone": sorted(self._gone),
                "pulls": self._pulls,
                "next_id": self._next_id,
                "since_training": self._since_training,
                "log": self._followed if self._log is None else (self._log.header.id, self._log.end),
            }
            storage.write(path, tensors, header, storage.AGENT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Agent:
        """The agent that `save` wrote; it resumes as if it had never stopped."""
        tensors, header = storage.read(path, storage.AGENT)
        try:
            settings = entry(header["agent"]).settings.from_plain(header["settings"])
            about = header.get("prior")
            prior = None if about is None else Prior.of_tensors(storage.under("prior.", tensors), about)
            agent = cls(header["agent"], settings, header["n_features"], header["n_arms"], header["seed"], prior)
            agent._rebuild(agent._buffer.widened(header["room"]))
            agent._buffer.restore(tensors)
            agent._buffer.contexts[:, : agent._buffer.count] = tensors["contexts"]
            for learner, prefix in ((agent._trainer, "trainer."), (agent._actor, "actor.")):
                learner.restore(storage.under(prefix, tensors))
            rows_and_arms = zip(tensors["pending.context"], tensors["pending.arm"].tolist(), strict=True)
            agent._pending = dict(zip(tensors["pending.id"].tolist(), rows_and_arms, strict=True))
            agent._gone, agent._pulls = set(header["gone"]), list(header["pulls"])
            agent._next_id, agent._since_training = header["next_id"], header["since_training"]
            followed = header.get("log")
            agent._followed = None if followed is None else (followed[0], followed[1])
        except KeyError as missing:
            raise FileError(f"{path} is not a saved agent: it has no {missing}") from None
        except SettingError as error:
            raise FileError(f"{path} is not an agent of this version: {error}") from error
        return agent

    def _checked_contexts(self, context: Floats) -> tuple[Tensor, bool]:
        (array, narrow), width = _numbers(context, "a context must be numbers"), self.n_features
        if array.ndim not in (1, 2) or array.shape[-1] != width or not len(array):
            raise MatchError(f"a context has {width} numbers, a batch (k, {width}); got shape {array.shape}")
        rows = narrow.reshape(-1, width)
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            value = array.reshape(rows.shape)[row, column]
            raise MatchError(f"contexts must be finite and fit float32: row {row} has {value} at {column}")
        return torch.from_numpy(rows), array.ndim == 1

    def _checked_rewards(self, reward: Any, count: int, single: bool) -> Tensor:
        narrow = np.atleast_1d(_numbers(reward, "a reward must be a number")[1])
        if narrow.shape != (count,) or not np.isfinite(narrow).all():
            wanted = "one finite number" if single else f"{count} finite numbers"
            raise MatchError(
                f"the reward must be {wanted}, got {reward!r}: where a reward is not known, report none, and forget the decision"
            )
        self._warn_of_range(narrow)
        return torch.from_numpy(narrow)

    def _warn_of_range(self, rewards: npt.NDArray[np.float32]) -> None:
        """Once an agent: rewards that are said to be impossible, which an agent without a range never has."""
        given = getattr(self.settings, "reward_range", None)
        if given is None or self._told_of_range:
            return
        # As rewards are kept.
        low, high = np.asarray(given, dtype=np.float32)
        outside = rewards[(rewards < low) | (rewards > high)]
        if len(outside):
            warn(
                f"a reward of {outside[0]:g} lies outside reward_range={given}. It is learnt, but exploration goes by the range: "
                "make the agent with one that holds every reward, or look whether this one is in other units. Said once"
            )
            self._told_of_range = True

    def _checked_arms(self, arms: Iterable[int] | None) -> list[int]:
        available = self._available()
        if arms is None:
            return available
        asked = list(arms) if isinstance(arms, Iterable) else []
        if not asked or not all(_is_index(arm) and arm in available for arm in asked):
            raise SettingError(f"arms must be a list of some of {available}, got {arms!r}")
        return sorted(set(asked))

    def _checked_mask(self, mask: npt.NDArray[np.bool_], count: int) -> Tensor:
        if mask.shape != (count, self.n_arms) or mask.dtype != np.bool_:
            raise MatchError(
                f"a mask of arms must be of shape {(count, self.n_arms)} and of booleans, got {mask.shape} of {mask.dtype}"
            )
        available = torch.from_numpy(mask) & self._mask(self._available())
        barred = (~available.any(dim=1)).nonzero()
        if len(barred):
            raise SettingError(f"context {int(barred[0])} has no arm to choose from: there are {self._available()}")
        return available


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def _check_draws(draws: int) -> None:
    if not is_count(draws):
        raise SettingError(f"draws must be a positive whole number, got {draws!r}")


def _largest(scores: Tensor, allowed: Tensor) -> list[int]:
    """The arms of the largest scores (1, k, arms) among those that are allowed."""
    return among(scores[0], allowed).argmax(dim=1).tolist()


def replay(path: str | os.PathLike[str], agent: Agent | None = None) -> Agent:
    """An agent that has learnt all that a log has, in its order, and for whose decisions it can be rewarded.

    >>> import tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     agent = make_agent("linear", n_features=2, n_arms=3)
    ...     agent.log(os.path.join(folder, "log.jsonl"))
    ...     decision = agent.decide([0.3, -1.0])
    ...     again = replay(os.path.join(folder, "log.jsonl"))
    >>> again.pending == (decision.id,)
    True

    For an agent as the one that wrote the log, that is what it knew: the same observations in the same order, with the same
    trainings between them. They are taken in as many at once as there are up to a training, which the last digits tell, and
    the random numbers of choices begin anew. `agent.log(path)` then continues the log.

    Args:
        path: the log.
        agent: one that made no decision yet, with as many features and arms as the log begins with, to warm-start another
            kind of agent, or one with other settings; None for an agent as the one that wrote the log.
    """
    reader = LogReader(path)
    header, events = reader.header, list(reader)
    if agent is None:
        if header.prior:
            raise MatchError(f"the agent of {path} started from a learnt prior: give replay an agent with that prior")
        try:
            settings = entry(header.agent).settings.from_plain(header.settings)
        except SettingError as error:
            raise FileError(f"{path} is of no agent of this version: {error}") from error
        agent = Agent(header.agent, settings, header.n_features, header.n_arms, header.seed)
    agent._check_width(header, reader.path)
    with agent._learning, agent._acting:
        if agent.log_id is not None or agent._next_id:
            raise MatchError("replay needs an agent that neither decided nor wrote a log: make a new one")
        if agent.n_arms != header.n_arms:
            raise MatchError(f"{path} begins with {header.n_arms} arms, the agent has {agent.n_arms}: give it as many")
        agent._follow(events, reader.path)
        agent._followed = header.id, reader.end
    reader.warn_of_rest("is left out")
    return agent


def _is_index(value: Any) -> bool:
    """Whether it is a whole number, as Python or numpy has them; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_text(array: npt.NDArray[Any]) -> bool:
    """Whether it holds text, which numpy would read as numbers where it can."""
    return array.dtype.kind in "SU" or (array.dtype.kind == "O" and any(isinstance(v, str | bytes) for v in array.flat))


def _numbers(values: Any, message: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """In float64 and in float32; what does not fit the latter is infinite there."""
    try:
        given = np.asarray(values.detach().double().cpu() if isinstance(values, Tensor) else values)
        if _is_text(given) or given.dtype.kind == "c":
            raise TypeError(f"got {values!r}")
        array = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise MatchError(f"{message}: {error}") from None
    with np.errstate(over="ignore"):
        return array, array.astype(np.float32)


def _is_flat(tensor: Tensor, learner: NetworkLearner) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] == learner.stack.weights.shape[1]


def _put(part: Tensor, whole: Tensor) -> None:
    """A smaller tensor into the leading corner of a larger one."""
    whole[tuple(slice(0, length) for length in part.shape)] = part
