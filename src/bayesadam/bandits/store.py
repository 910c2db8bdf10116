"""What an agent has seen and learnt: two learners behind two locks, and the file that holds everything."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch

from bayesadam import _storage as storage
from bayesadam.bandits.agents import entry, make_learner
from bayesadam.bandits.learner import AgentSettings, Buffer, Learner
from bayesadam.bandits.log import Standing
from bayesadam.bandits.prior import Prior
from bayesadam.errors import FileError, SettingError

_FIRST_ROOM = 1024


class Store:
    """The observations of an agent and its two learners.

    One learner trains. The other acts, and takes over the first one's weights after each training; where observations
    change the scores at once, it takes note of them in between. So an agent acts while it trains, without waiting.

    The lock `learning` is held as long as a training takes, `acting` only while the actor or the observations are used.
    """

    def __init__(
        self, name: str, settings: AgentSettings, n_features: int, n_arms: int, seed: int, prior: Prior | None = None
    ) -> None:
        self.name, self.settings, self.n_features, self.seed, self.prior = name, settings, n_features, seed, prior
        self.standing = Standing(n_features, n_arms)
        # The id of the log that the agent has learnt, and up to which byte.
        self.known: tuple[str, int] | None = None
        self.buffer = Buffer(torch.zeros(1, _FIRST_ROOM, n_features), settings.forget)
        self.trainer, self.actor = self._learner(), self._learner()
        self.since_training = 0
        self.learning, self.acting = threading.RLock(), threading.RLock()

    def _learner(self) -> Learner:
        return make_learner(self.name, self.settings, self.buffer, self.standing.n_arms, [self.seed], self.prior)

    def learn(self, contexts: Any, chosen: Any, paid: Any) -> None:
        """Add observations (k, features), (k,), (k,); every `train_every` of them, train."""
        rows, rewards = (torch.from_numpy(np.asarray(values, np.float32)) for values in (contexts, paid))
        arms = torch.from_numpy(np.asarray(chosen, np.int64))
        for first in range(0, len(rows), self.settings.train_every):
            part = slice(first, first + self.settings.train_every)
            count = len(rows[part])
            with self.acting:
                room, end = self.buffer.contexts.shape[1], self.buffer.count + count
                if end > room:
                    self.rebuild(self.buffer.widened(max(2 * room, end)))
                self.buffer.contexts[0, self.buffer.count : end] = rows[part]
                new = self.buffer.add(arms[None, part], rewards[None, part])
                at_once = self.actor.learns_at_once
                (self.actor if at_once else self.trainer).observe(new)
            self.since_training += count
            if self.since_training >= self.settings.train_every:
                if at_once:
                    self.trainer.load(self.actor.tensors())
                self.trainer.train()
                self.since_training = 0
                with self.acting:
                    self.actor.load(self.trainer.tensors())

    def rebuild(self, buffer: Buffer) -> None:
        """Make room for the buffer's observations, or for another arm; what was learnt stays."""
        self.buffer = buffer
        self.trainer, self.actor = self._moved(self.trainer), self._moved(self.actor)

    def _moved(self, old: Learner) -> Learner:
        """A learner for more arms or more room, with what the old one has learnt in the leading part of its tensors."""
        new = self._learner()
        state = new.state()
        for name, tensor in old.state().items():
            parts, wholes = old.parts(tensor), new.parts(state[name])
            for part, whole in zip(parts, wholes, strict=True):
                whole[tuple(slice(0, length) for length in part.shape)] = part
        new.restore(state)
        return new

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, whole or not at all."""
        waiting = self.standing.waiting
        rows = np.array([context for context, _ in waiting.values()], np.float32).reshape(-1, self.n_features)
        tensors = {
            "contexts": self.buffer.contexts[:, : self.buffer.count],
            **self.buffer.state(),
            "pending.id": torch.tensor(list(waiting), dtype=torch.int64),
            "pending.arm": torch.tensor([arm for _, arm in waiting.values()], dtype=torch.int64),
            "pending.context": torch.from_numpy(rows),
            **{f"trainer.{name}": tensor for name, tensor in self.trainer.state().items()},
            **{f"actor.{name}": tensor for name, tensor in self.actor.state().items()},
        }
        if self.prior is not None:
            tensors |= {f"prior.{name}": tensor for name, tensor in self.prior.tensors().items()}
        header = {
            "agent": self.name,
            "settings": self.settings.plain(),
            "prior": None if self.prior is None else self.prior.header(),
            "n_features": self.n_features,
            "n_arms": self.standing.n_arms,
            "seed": self.seed,
            "room": self.buffer.contexts.shape[1],
            "gone": sorted(self.standing.removed),
            "pulls": self.standing.pulls,
            "next_id": self.standing.next_id,
            "since_training": self.since_training,
            "log": self.known,
        }
        storage.write(path, tensors, header, storage.AGENT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Store:
        """What `save` wrote."""
        tensors, header = storage.read(path, storage.AGENT)
        try:
            settings = entry(header["agent"]).settings.from_plain(header["settings"])
            about, known = header["prior"], header["log"]
            prior = None if about is None else Prior.of_tensors(storage.under("prior.", tensors), about)
            store = cls(header["agent"], settings, header["n_features"], header["n_arms"], header["seed"], prior)
            store.rebuild(store.buffer.widened(header["room"]))
            store.buffer.restore(tensors)
            store.buffer.contexts[:, : store.buffer.count] = tensors["contexts"]
            store.trainer.restore(storage.under("trainer.", tensors))
            store.actor.restore(storage.under("actor.", tensors))
            store.since_training, store.known = header["since_training"], known and (known[0], known[1])
            standing = store.standing
            waiting = zip(tensors["pending.context"].numpy(), tensors["pending.arm"].tolist(), strict=True)
            standing.waiting = dict(zip(tensors["pending.id"].tolist(), waiting, strict=True))
            standing.removed, standing.pulls = set(header["gone"]), list(header["pulls"])
            standing.next_id = header["next_id"]
        except KeyError as missing:
            raise FileError(f"{path} is not a saved agent: it has no {missing}") from None
        except SettingError as error:
            raise FileError(f"{path} is not an agent of this version: {error}") from error
        return store
