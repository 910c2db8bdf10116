"""One cell of Table 1: an agent plays a problem, many runs at once."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._checks import count
from bayesadam._files import sweep
from bayesadam._progress import progress as tracked
from bayesadam.bandits.agents import agent_settings, make_learner
from bayesadam.bandits.learner import AgentSettings, Buffer
from bayesadam.bandits.prior import Prior
from bayesadam.bandits.problems import BanditProblem, Numbers, Rounds
from bayesadam.bandits.problems import problem as named_problem
from bayesadam.errors import MatchError
from bayesadam.gaussian.noise import stream_seed

_CURVE_POINTS = 500


@dataclass(frozen=True, eq=False)
class Simulation:
    """The outcome; arrays have one entry, or row, per run.

    Attributes:
        reward_ratio: total reward over what the best arms are expected to pay, (runs,).
        regret_ratio: total regret over the regret that arms drawn at random are expected to have, (runs,).
        points: the rounds at which the curves are taken, (points,), at most 500.
        reward: cumulative reward there, (runs, points).
        regret: cumulative regret there, what the best arms are expected to pay less the reward, (runs, points).
        lost: whether a run earned no more than one arm, the best, played in every round, is expected to, (runs,).
        seconds: of all processes that had a part in it.
    """

    problem: str
    agent: str
    seed: int
    rounds: int
    reward_ratio: Numbers
    regret_ratio: Numbers
    points: Numbers
    reward: Numbers
    regret: Numbers
    lost: Numbers
    seconds: float
    settings: AgentSettings


def simulate(
    problem: str | BanditProblem,
    agent: str,
    *,
    runs: int = 10,
    rounds: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    settings: str | AgentSettings = "tuned",
    prior: Prior | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 3.0,
    progress: Callable[[int, int], object] | None = None,
) -> Simulation:
    """Let an agent play a problem.

    First every arm is pulled a few times in turn. Then the agent acts, a new context per round, and trains every
    `settings.train_every` rounds; between two trainings the rounds are one batch, each with its own posterior draw.
    Every run has its own random numbers: up to rounding it does not depend on the other runs.

    >>> found = simulate("wheel:0.5", "linear", runs=2, rounds=60)
    >>> found.reward_ratio.shape
    (2,)

    Args:
        problem: a name (see `problem`), or a problem.
        agent: one of `AGENTS`.
        rounds: of each run; None for as many as the problem says.
        device: None for a GPU where there is one.
        settings: `"tuned"`, `"paper"` or your own.
        prior: that the hybrid agent starts from; see `fit_prior`.
        checkpoint: a file to which the state is written now and then. If it exists, the simulation resumes from it, and
            on a CPU ends with the numbers of one that was never interrupted.
        checkpoint_seconds: the least time between two writes.
        progress: called with the rounds done and the rounds in all; None for a bar on a terminal, from two seconds on.
    """
    given = runs, rounds, seed, device, settings, checkpoint, checkpoint_seconds, prior
    with Playing(problem, agent, *given) as playing:
        for _ in tracked(playing.turns, "simulate") if progress is None else playing.turns:
            playing.advance()
            if progress is not None:
                progress(playing.done, playing.rounds)
        return playing.result()


class Playing:
    """A simulation under way, for a caller who wants to advance several in turn; arguments are those of `simulate`.

    On a GPU each has a stream of its own, and `advance` returns before the GPU is done, so that several keep it busy.
    """

    def __init__(
        self,
        problem: str | BanditProblem,
        agent: str,
        runs: int = 10,
        rounds: int | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        settings: str | AgentSettings = "tuned",
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 3.0,
        prior: Prior | None = None,
    ) -> None:
        chosen = named_problem(problem) if isinstance(problem, str) else problem
        own = agent_settings(agent, settings)
        count("runs", runs, "with seeds of their own")
        self.rounds = chosen.checked_rounds(rounds)
        on = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        self._start, self._settings = time.perf_counter(), own
        self._stream = torch.cuda.Stream(on) if on.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._path, self._checkpoint_seconds = None if checkpoint is None else Path(checkpoint), checkpoint_seconds
        seeds = [stream_seed(seed, "run", number) for number in range(runs)]
        self._played = [chosen.run(one, self.rounds) for one in seeds]
        saved: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None
        if self._path is not None:
            sweep(self._path)
            saved = storage.read(self._path, storage.SIMULATION) if self._path.exists() else None
        # The lanes, one per thread, as even as can be.
        threads = min(runs, torch.get_num_threads()) if on.type == "cpu" else 1
        sizes = [len(part) for part in np.array_split(seeds, threads)] if saved is None else saved[1]["lanes"]
        self._header: dict[str, Any] = {
            "problem": chosen.name,
            "agent": agent,
            "runs": runs,
            "rounds": self.rounds,
            "seed": seed,
            "device": on.type,
            "settings": own.plain(),
            "data": _fingerprint(self._played, prior),
            "lanes": sizes,
        }
        written = self._header if saved is None else saved[1]
        for name, value in self._header.items():
            if (found := written.get(name)) != value:
                other = "other data" if name == "data" else f"{name}={found!r}, not {value!r}"
                raise MatchError(f"{checkpoint} is of a simulation with {other}: delete it to start again")
        with torch.cuda.stream(self._stream):
            self._lanes = [
                _Lane(agent, own, seeds[first:last], self._played[first:last], on, prior)
                for first, last in pairwise(accumulate(sizes, initial=0))
            ]
            if saved is not None:
                for number, lane in enumerate(self._lanes):
                    state = storage.under(f"{number}/", saved[0])
                    lane.buffer.restore(state)
                    lane.learner.restore(storage.under("learner.", state))
                self._start -= float(saved[1]["seconds"])
        self._written = time.perf_counter()
        # Torch's own threads are off meanwhile: for products of this size, one thread per lane is faster.
        self._threads_before = torch.get_num_threads()
        alone = len(self._lanes) == 1
        self._pool = None if alone else ThreadPoolExecutor(len(sizes), "", torch.set_num_threads, (1,))

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            torch.set_num_threads(self._threads_before)

    @property
    def done(self) -> int:
        """The rounds played so far."""
        return self._lanes[0].buffer.count

    @property
    def turns(self) -> range:
        """One for each `advance` that is left: the rounds with arms in turn at first, then those between trainings."""
        forced = self._lanes[0].forced
        rest = max(0, self.rounds - max(self.done, forced))
        return range((self.done < min(forced, self.rounds)) + -(-rest // self._settings.train_every))

    def advance(self) -> None:
        """The rounds up to the next training, and the training; now and then, the checkpoint."""
        with torch.cuda.stream(self._stream):
            for _ in (map if self._pool is None else self._pool.map)(_Lane.advance, self._lanes):
                pass
            now = time.perf_counter()
            if self._path is not None and (self.done == self.rounds or now - self._written >= self._checkpoint_seconds):
                tensors: dict[str, Tensor] = {}
                for number, lane in enumerate(self._lanes):
                    tensors |= {f"{number}/{name}": tensor for name, tensor in lane.buffer.state().items()}
                    tensors |= {f"{number}/learner.{name}": tensor for name, tensor in lane.learner.state().items()}
                header = {**self._header, "seconds": now - self._start}
                storage.write(self._path, tensors, header, storage.SIMULATION)
                self._written = time.perf_counter()

    def result(self) -> Simulation:
        """The outcome, when it is finished."""
        with torch.cuda.stream(self._stream):
            rewards = np.concatenate([lane.buffer.rewards.cpu().numpy() for lane in self._lanes])
        reward = rewards.astype(np.float64).cumsum(axis=1)
        optimum = np.stack([one.optimum for one in self._played]).cumsum(axis=1)
        uniform = np.array([one.uniform.sum() for one in self._played])
        regret = optimum - reward
        points = np.unique(np.linspace(1, self.rounds, min(self.rounds, _CURVE_POINTS)).round().astype(np.int64))
        return Simulation(
            **{name: self._header[name] for name in ("problem", "agent", "seed", "rounds")},
            reward_ratio=reward[:, -1] / optimum[:, -1],
            regret_ratio=regret[:, -1] / (optimum[:, -1] - uniform),
            points=points,
            reward=reward[:, points - 1],
            regret=regret[:, points - 1],
            lost=reward[:, -1] <= [one.single.sum() for one in self._played],
            seconds=time.perf_counter() - self._start,
            settings=self._settings,
        )


def in_turn(simulations: Iterable[Callable[[], Playing]], at_once: int) -> Iterator[tuple[int, Simulation]]:
    """The results of simulations, each begun by a call, and their numbers, as they come; `at_once` run at a time."""
    waiting = iter(enumerate(simulations))
    running: deque[tuple[int, Playing]] = deque((number, start()) for number, start in islice(waiting, at_once))
    try:
        while running:
            number, playing = running.popleft()
            if playing.done < playing.rounds:
                playing.advance()
                running.append((number, playing))
                continue
            with playing:
                yield number, playing.result()
            running.extend((number, start()) for number, start in islice(waiting, 1))
    finally:
        for _, playing in running:
            playing.__exit__()


class _Lane:
    """Some of the runs, in one stack."""

    def __init__(
        self,
        agent: str,
        settings: AgentSettings,
        seeds: Sequence[int],
        played: Sequence[Rounds],
        device: torch.device,
        prior: Prior | None = None,
    ) -> None:
        contexts = torch.from_numpy(np.stack([rounds.contexts for rounds in played])).to(device)
        self.buffer = Buffer(contexts, settings.forget)
        self._pays = torch.from_numpy(np.stack([rounds.rewards for rounds in played])).to(device)
        n_arms = self._pays.shape[2]
        self.learner = make_learner(agent, settings, self.buffer, n_arms, seeds, prior)
        self.forced = settings.initial_pulls * n_arms

    @torch.no_grad()
    def advance(self) -> None:
        """The rounds up to the next training, and the training."""
        runs, total, n_arms = self._pays.shape
        first = self.buffer.count
        forced = first < self.forced
        last = min(self.forced if forced else first + self.learner.settings.train_every, total)
        if forced:
            arms = (torch.arange(first, last, device=self._pays.device) % n_arms).expand(runs, -1)
        else:
            arms = self.learner.scores(self.buffer.contexts[:, first:last]).argmax(dim=2)
        rewards = self._pays[:, first:last].gather(2, arms.unsqueeze(2)).squeeze(2)
        self.learner.observe(self.buffer.add(arms, rewards))
        if last < total:
            self.learner.train()


def _fingerprint(played: Sequence[Rounds], prior: Prior | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    arrays = [array for rounds in played for array in (rounds.contexts, rounds.rewards)]
    for array in arrays + ([] if prior is None else [tensor.numpy() for tensor in prior.tensors().values()]):
        digest.update(array.tobytes())
    return digest.hexdigest()
