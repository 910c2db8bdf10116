"""An agent for the user's own loop: it acts, learns from rewards when they come, and is saved and loaded whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam.bandits.agents import AgentSettings, agent_settings
from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.kinds import learner_of
from bayesadam.bandits.learners import Learner, NetworkLearner
from bayesadam.engine.network import Network, unflatten
from bayesadam.errors import FileError, MatchError, SettingError

_FIRST_ROOM = 1024
Floats = npt.ArrayLike


@dataclass(frozen=True)
class Decision:
    """An arm that was chosen, and the number by which its reward will be told."""

    id: int
    arm: int


def make_agent(
    name: str,
    n_features: int,
    n_arms: int,
    *,
    settings: str | AgentSettings = "tuned",
    seed: int = 0,
    **changes: Any,
) -> Agent:
    """An agent to put into your own system.

    >>> agent = make_agent("linear", n_features=2, n_arms=3)
    >>> arm = agent.act([0.3, -1.0])
    >>> agent.update([0.3, -1.0], arm, reward=1.0)
    >>> decision = agent.decide([0.1, 0.2])       # the reward comes later
    >>> agent.reward(decision.id, 0.5)

    Args:
        name: one of `AGENTS`.
        n_features: the width of a context.
        n_arms: how many arms there are at first.
        settings: `"tuned"`, `"paper"` or your own.
        seed: fixes every random number.
        changes: to single settings, such as `hidden=(50,)`.
    """
    for key, value in (("n_features", n_features), ("n_arms", n_arms)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError(f"{key} must be a positive whole number, got {value!r}")
    return Agent(name, agent_settings(name, settings, **changes), n_features, n_arms, seed)


class Agent:
    """Acts and learns; made by `make_agent` or `load`.

    Two learners share what was seen: one trains, the other acts and takes over the first one's weights after each
    training. So `act` may be called from other threads while `update` trains, and is never kept waiting by it.

    Attributes:
        name: the agent's name.
        settings: its settings.
        n_features: the width of a context.
        n_arms: how many arms there have been; those removed keep their number.
    """

    def __init__(self, name: str, settings: AgentSettings, n_features: int, n_arms: int, seed: int) -> None:
        self.name, self.settings, self.n_features, self.n_arms, self.seed = name, settings, n_features, n_arms, seed
        self._buffer = Buffer(torch.zeros(1, _FIRST_ROOM, n_features))
        self._trainer, self._actor = (learner_of(settings, self._buffer, n_arms, [seed]) for _ in range(2))
        self._gone: set[int] = set()
        self._pulls = [0] * n_arms
        self._pending: dict[int, tuple[Tensor, int]] = {}
        self._next_id = 0
        self._since_training = 0
        self._learning, self._acting = threading.RLock(), threading.RLock()

    # --- acting -------------------------------------------------------------------------------------------------

    def act(self, context: Floats, *, arms: Iterable[int] | None = None) -> Any:
        """The arm for a context, an int; for a batch (k, features), an array of k arms, each with its own draw.

        At first every arm is tried a few times, in turn.

        Args:
            context: numbers, (features,) or (k, features).
            arms: those to choose from now; None for all that are not removed.
        """
        rows, single = self._checked_contexts(context)
        allowed = self._checked_arms(arms)
        with self._acting:
            chosen = self._choose(rows, allowed)
        return chosen[0] if single else np.array(chosen)

    def decide(self, context: Floats, *, arms: Iterable[int] | None = None) -> Decision:
        """As `act` for one context, remembered until its reward is told with `reward(decision.id, …)`."""
        rows, single = self._checked_contexts(context)
        if not single:
            raise MatchError(f"decide takes one context of {self.n_features} numbers, got {len(rows)} of them")
        allowed = self._checked_arms(arms)
        with self._acting:
            (arm,) = self._choose(rows, allowed)
            decision = Decision(self._next_id, arm)
            self._next_id += 1
            self._pending[decision.id] = rows[0], arm
        return decision

    def _choose(self, rows: Tensor, allowed: Sequence[int]) -> list[int]:
        found: list[int] = []
        for _ in range(len(rows)):
            least = min(allowed, key=lambda arm: self._pulls[arm])
            if self._pulls[least] >= self.settings.initial_pulls:
                break
            self._pulls[least] += 1
            found.append(least)
        rest = rows[len(found) :]
        if len(rest):
            with torch.no_grad():
                scores = self._actor.scores(rest.unsqueeze(0))[0]
            barred = torch.full_like(scores, -torch.inf)
            barred[:, list(allowed)] = scores[:, list(allowed)]
            found += barred.argmax(dim=1).tolist()
        return found

    # --- learning -----------------------------------------------------------------------------------------------

    def update(self, context: Floats, arm: Any, reward: Any) -> None:
        """Learn that an arm paid a reward in a context; or k of each. Every `train_every` observations it trains.

        Args:
            context: numbers, (features,) or (k, features).
            arm: the arm pulled, or k of them.
            reward: what it paid.
        """
        rows, single = self._checked_contexts(context)
        arms = np.atleast_1d(np.asarray(arm))
        if arms.shape != (len(rows),) or not np.issubdtype(arms.dtype, np.integer):
            raise MatchError(f"one arm, a whole number, for each of {len(rows)} contexts is needed, got {arm!r}")
        for one in arms.tolist():
            if not 0 <= one < self.n_arms:
                raise SettingError(f"there is no arm {one}: they are 0 to {self.n_arms - 1}; see add_arm")
        rewards = self._checked_rewards(reward, len(rows), single)
        with self._learning:
            self._learn(rows, torch.from_numpy(arms.astype(np.int64)), rewards)

    def reward(self, decision: int, reward: float) -> None:
        """The reward of an earlier `decide`."""
        value = self._checked_rewards(reward, 1, True)
        with self._learning:
            with self._acting:
                known = isinstance(decision, int | np.integer)
                if not known or decision not in self._pending:
                    told = "was rewarded before" if known and 0 <= decision < self._next_id else "was never made"
                    raise MatchError(
                        f"decision {decision!r} {told}: {len(self._pending)} wait for a reward, by the id of the decision"
                    )
                row, arm = self._pending.pop(decision)
            self._learn(row.unsqueeze(0), torch.tensor([arm]), value)

    @property
    def pending(self) -> tuple[int, ...]:
        """The decisions that wait for a reward."""
        with self._acting:
            return tuple(self._pending)

    def forget(self, decision: int) -> None:
        """Give up on the reward of a decision."""
        with self._acting:
            self._pending.pop(decision, None)

    def _learn(self, rows: Tensor, arms: Tensor, rewards: Tensor) -> None:
        for first in range(0, len(rows), self.settings.train_every):
            part = slice(first, first + self.settings.train_every)
            count = len(rows[part])
            self._make_room(count)
            places = slice(self._buffer.count, self._buffer.count + count)
            with self._acting:
                self._buffer.contexts[0, places] = rows[part]
                self._buffer.add(arms[None, part], rewards[None, part])
            self._trainer.observe(places)
            self._since_training += count
            trains = self._since_training >= self.settings.train_every
            if trains:
                self._trainer.train()
                self._since_training = 0
            if trains or not isinstance(self._trainer, NetworkLearner) or self.settings.kind == "neural-linear":
                self._hand_over()

    def _hand_over(self) -> None:
        """The actor takes over what was learnt, and keeps its own random numbers."""
        with self._acting:
            streams = {f"stream.{name}": stream.state() for name, stream in self._actor.streams().items()}
            self._actor.restore({**self._trainer.state(), **streams})

    # --- arms ---------------------------------------------------------------------------------------------------

    def add_arm(self) -> int:
        """A new arm; returns its number. It is tried a few times before it competes."""
        with self._learning, self._acting:
            self.n_arms += 1
            self._pulls.append(0)
            self._rebuild(self._buffer)
            return self.n_arms - 1

    def remove_arm(self, arm: int) -> None:
        """No longer choose an arm; rewards of earlier decisions for it are still learnt from."""
        with self._acting:
            if arm not in range(self.n_arms) or arm in self._gone:
                raise SettingError(f"there is no arm {arm!r} to remove: there are {self._available()}")
            if len(self._available()) == 1:
                raise SettingError(f"arm {arm} is the last one: add another before it is removed")
            self._gone.add(arm)

    def restore_arm(self, arm: int) -> None:
        """Choose a removed arm again."""
        with self._acting:
            if arm not in self._gone:
                raise SettingError(f"arm {arm!r} is not removed: {sorted(self._gone)} are")
            self._gone.discard(arm)

    def _available(self) -> list[int]:
        return [arm for arm in range(self.n_arms) if arm not in self._gone]

    # --- memory -------------------------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        room = self._buffer.contexts.shape[1]
        if self._buffer.count + count <= room:
            return
        with self._acting:
            while room < self._buffer.count + count:
                room *= 2
            self._rebuild(_wider(self._buffer, room))

    def _rebuild(self, buffer: Buffer) -> None:
        """Learners for another number of arms or more room, with what was learnt in its place."""
        self._buffer = buffer
        self._trainer = self._moved(self._trainer)
        self._actor = self._moved(self._actor)

    def _moved(self, old: Learner) -> Learner:
        fresh = learner_of(self.settings, self._buffer, self.n_arms, [self.seed])
        state, before = fresh.state(), old.state()
        networks = (getattr(old, "network", None), getattr(fresh, "network", None))
        for name, tensor in before.items():
            state[name] = tensor if name.startswith("stream.") else _placed(tensor, state[name], *networks)
        fresh.restore(state)
        return fresh

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything: what was seen and learnt, the optimiser, the random numbers, the decisions that wait."""
        with self._learning, self._acting:
            buffer, seen = self._buffer, slice(0, self._buffer.count)
            tensors = {
                "contexts": buffer.contexts[:, seen],
                "arms": buffer.arms[:, seen],
                "rewards": buffer.rewards[:, seen],
                "sums": buffer.sums,
                "pending.id": torch.tensor(list(self._pending), dtype=torch.int64),
                "pending.arm": torch.tensor([arm for _, arm in self._pending.values()], dtype=torch.int64),
                "pending.context": torch.stack([row for row, _ in self._pending.values()])
                if self._pending
                else torch.zeros(0, self.n_features),
                **{f"trainer.{name}": tensor for name, tensor in self._trainer.state().items()},
                **{f"actor.{name}": tensor for name, tensor in self._actor.state().items()},
            }
            header = {
                "agent": self.name,
                "settings": asdict(self.settings),
                "n_features": self.n_features,
                "n_arms": self.n_arms,
                "seed": self.seed,
                "room": buffer.contexts.shape[1],
                "gone": sorted(self._gone),
                "pulls": self._pulls,
                "next_id": self._next_id,
                "since_training": self._since_training,
            }
            storage.write(path, tensors, header, storage.AGENT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Agent:
        """The agent that `save` wrote; it goes on as if it had never stopped."""
        tensors, header = storage.read(path, storage.AGENT)
        try:
            known = {field.name for field in fields(AgentSettings)}
            given: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in header["settings"].items()
            }
            settings = AgentSettings(**{name: given[name] for name in known & given.keys()})
            agent = cls(header["agent"], settings, header["n_features"], header["n_arms"], header["seed"])
            agent._buffer = _wider(agent._buffer, header["room"])
            agent._rebuild(agent._buffer)
            count = tensors["arms"].shape[1]
            agent._buffer.contexts[:, :count] = tensors["contexts"]
            agent._buffer.arms[:, :count] = tensors["arms"]
            agent._buffer.rewards[:, :count] = tensors["rewards"]
            agent._buffer.sums.copy_(tensors["sums"])
            agent._buffer.count = count
            for learner, prefix in ((agent._trainer, "trainer."), (agent._actor, "actor.")):
                own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                learner.restore(own)
            waiting = zip(
                tensors["pending.id"].tolist(),
                tensors["pending.context"],
                tensors["pending.arm"].tolist(),
                strict=True,
            )
            agent._pending = {number: (row.clone(), arm) for number, row, arm in waiting}
            agent._gone, agent._pulls = set(header["gone"]), list(header["pulls"])
            agent._next_id, agent._since_training = header["next_id"], header["since_training"]
        except KeyError as missing:
            raise FileError(f"{path} is not a saved agent: it has no {missing}") from None
        return agent

    # --- what comes in ------------------------------------------------------------------------------------------

    def _checked_contexts(self, context: Floats) -> tuple[Tensor, bool]:
        try:
            array = np.asarray(context, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise MatchError(f"a context must be numbers: {error}") from None
        single = array.ndim == 1
        rows = array[None] if single else array
        if rows.ndim != 2 or rows.shape[1] != self.n_features or not len(rows):
            raise MatchError(
                f"a context has {self.n_features} numbers, a batch (k, {self.n_features}); got shape {array.shape}"
            )
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        if not np.isfinite(narrow).all():
            row, column = np.argwhere(~np.isfinite(narrow))[0]
            raise MatchError(f"contexts must be finite and fit float32: row {row} has {rows[row, column]} at {column}")
        return torch.from_numpy(narrow), single

    def _checked_rewards(self, reward: Any, count: int, single: bool) -> Tensor:
        try:
            array = np.atleast_1d(np.asarray(reward, dtype=np.float64))
        except (TypeError, ValueError) as error:
            raise MatchError(f"a reward must be a number: {error}") from None
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
        if narrow.shape != (count,) or not np.isfinite(narrow).all():
            wanted = "one finite number" if single else f"{count} finite numbers"
            raise MatchError(f"the reward must be {wanted}, got {reward!r}")
        return torch.from_numpy(narrow)

    def _checked_arms(self, arms: Iterable[int] | None) -> list[int]:
        available = self._available()
        if arms is None:
            return available
        asked = list(arms)
        unknown = [arm for arm in asked if arm not in available]
        if unknown or not asked:
            raise SettingError(f"arms must be some of {available}; got {asked}")
        return sorted(set(asked))


def _wider(buffer: Buffer, room: int) -> Buffer:
    seen = buffer.count
    contexts = torch.zeros(1, room, buffer.contexts.shape[2])
    contexts[:, :seen] = buffer.contexts[:, :seen]
    wide = Buffer(contexts)
    wide.arms[:, :seen], wide.rewards[:, :seen] = buffer.arms[:, :seen], buffer.rewards[:, :seen]
    wide.sums.copy_(buffer.sums)
    wide.count = seen
    return wide


def _placed(old: Tensor, fresh: Tensor, before: Network | None, after: Network | None) -> Tensor:
    """A tensor of a smaller learner inside that of a larger one; flat weights layer by layer."""
    if old.shape == fresh.shape:
        return old
    if before is not None and after is not None and _is_flat(old, before) and _is_flat(fresh, after):
        whole: Mapping[str, Tensor] = unflatten(after, fresh)
        for name, part in unflatten(before, old).items():
            _put(part, whole[name])
        return fresh
    _put(old, fresh)
    return fresh


def _is_flat(tensor: Tensor, network: Network) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] == sum(torch.Size(s).numel() for s in network.shapes().values())


def _put(part: Tensor, whole: Tensor) -> None:
    whole[tuple(slice(0, length) for length in part.shape)] = part
