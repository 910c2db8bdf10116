"""One cell of Table 1: an agent plays a problem, many runs at once."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from bayesadam._checks import count
from bayesadam.bandits.settings import AgentSettings
from bayesadam.weights.draws import stream_seed
from experiments.agents import AGENTS, agent_settings
from experiments.networks import Buffer
from experiments.problems import BanditProblem, Numbers
from experiments.problems import problem as named_problem

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
    """

    rounds: int
    reward_ratio: Numbers
    regret_ratio: Numbers
    points: Numbers
    reward: Numbers
    regret: Numbers
    lost: Numbers
    seconds: float


def simulate(
    problem: str | BanditProblem,
    agent: str,
    *,
    runs: int = 10,
    rounds: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    settings: str | AgentSettings = "tuned",
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
        settings: see `agent_settings`.
    """
    own = agent_settings(agent, settings)
    playing = Playing(problem, agent, runs=runs, rounds=rounds, seed=seed, device=device, settings=own)
    while playing.done < playing.rounds:
        playing.advance()
    return playing.result()


class Playing:
    """A simulation under way, for a caller who wants to advance several in turn; arguments are those of `simulate`.

    On a GPU each has a stream of its own, and `advance` returns before the GPU is done, so that several keep it busy.
    """

    def __init__(
        self,
        problem: str | BanditProblem,
        agent: str,
        *,
        runs: int = 10,
        rounds: int | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        settings: str | AgentSettings = "tuned",
    ) -> None:
        self._start, chosen = time.perf_counter(), named_problem(problem) if isinstance(problem, str) else problem
        count("runs", runs, "with seeds of their own")
        self.rounds, self.settings = chosen.checked_rounds(rounds), agent_settings(agent, settings)
        on = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        self._stream = torch.cuda.Stream(on) if on.type == "cuda" else None  # type: ignore[no-untyped-call]
        seeds = [stream_seed(seed, "run", number) for number in range(runs)]
        self._played = [chosen.run(one, self.rounds) for one in seeds]
        with torch.cuda.stream(self._stream):
            self.buffer = Buffer(torch.from_numpy(np.stack([one.contexts for one in self._played])).to(on))
            self._pays = torch.from_numpy(np.stack([one.rewards for one in self._played])).to(on)
            self.learner = AGENTS[agent].learner(self.settings, self.buffer, chosen.n_arms, seeds)
        # The rounds at first, in which arms are pulled in turn.
        self._forced = min(self.settings.initial_pulls * chosen.n_arms, self.rounds)

    @property
    def done(self) -> int:
        """The rounds played so far."""
        return self.buffer.count

    @torch.no_grad()
    def advance(self) -> None:
        """The rounds up to the next training, and the training."""
        runs, _, n_arms = self._pays.shape
        first = self.done
        with torch.cuda.stream(self._stream):
            if first < self._forced:
                last = self._forced
                arms = (torch.arange(first, last, device=self._pays.device) % n_arms).expand(runs, -1)
            else:
                last = min(first + self.settings.train_every, self.rounds)
                arms = self.learner.choose(self.buffer.contexts[:, first:last])
            rewards = self._pays[:, first:last].gather(2, arms.unsqueeze(2)).squeeze(2)
            self.learner.observe(self.buffer.add(arms, rewards))
            if last < self.rounds:
                self.learner.train()

    def result(self) -> Simulation:
        """The outcome, when it is finished."""
        with torch.cuda.stream(self._stream):
            rewards = self.buffer.rewards.cpu().numpy()
        reward = rewards.astype(np.float64).cumsum(axis=1)
        optimum = np.stack([one.optimum for one in self._played]).cumsum(axis=1)
        uniform = np.array([one.uniform.sum() for one in self._played])
        regret = optimum - reward
        points = np.unique(np.linspace(1, self.rounds, min(self.rounds, _CURVE_POINTS)).round().astype(np.int64))
        return Simulation(
            rounds=self.rounds,
            reward_ratio=reward[:, -1] / optimum[:, -1],
            regret_ratio=regret[:, -1] / (optimum[:, -1] - uniform),
            points=points,
            reward=reward[:, points - 1],
            regret=regret[:, points - 1],
            lost=reward[:, -1] <= [one.single.sum() for one in self._played],
            seconds=time.perf_counter() - self._start,
        )


def in_turn(simulations: Iterable[Callable[[], Playing]], at_once: int) -> Iterator[tuple[int, Simulation]]:
    """The results of simulations, each begun by a call, and their numbers, as they come; `at_once` run at a time."""
    waiting = iter(enumerate(simulations))
    running = deque((number, start()) for number, start in islice(waiting, at_once))
    while running:
        number, playing = running.popleft()
        if playing.done < playing.rounds:
            playing.advance()
            running.append((number, playing))
        else:
            yield number, playing.result()
            running.extend((number, start()) for number, start in islice(waiting, 1))
