"""One cell of Table 1: an agent plays a problem, many runs at once."""

import time
from dataclasses import dataclass

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
        arms: that were chosen, (runs, rounds).
    """

    rounds: int
    reward_ratio: Numbers
    regret_ratio: Numbers
    points: Numbers
    reward: Numbers
    regret: Numbers
    lost: Numbers
    arms: Numbers
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
    start, chosen = time.perf_counter(), named_problem(problem) if isinstance(problem, str) else problem
    count("runs", runs, "with seeds of their own")
    rounds, settings, n_arms = chosen.checked_rounds(rounds), agent_settings(agent, settings), chosen.n_arms
    on = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    seeds = [stream_seed(seed, "run", number) for number in range(runs)]
    played = [chosen.run(one, rounds) for one in seeds]
    buffer = Buffer(torch.from_numpy(np.stack([one.contexts for one in played])).to(on))
    pays = torch.from_numpy(np.stack([one.rewards for one in played])).to(on)
    learner = AGENTS[agent].learner(settings, buffer, n_arms, seeds)
    # The rounds at first, in which arms are pulled in turn.
    forced = min(settings.initial_pulls * n_arms, rounds)
    with torch.no_grad():
        while (first := buffer.count) < rounds:
            last = forced if first < forced else min(first + settings.train_every, rounds)
            if first < forced:
                arms = (torch.arange(first, last, device=on) % n_arms).expand(runs, -1)
            else:
                arms = learner.choose(buffer.contexts[:, first:last])
            rewards = pays[:, first:last].gather(2, arms.unsqueeze(2)).squeeze(2)
            learner.observe(buffer.add(arms, rewards))
            if last < rounds:
                learner.train()
    reward = buffer.rewards.cpu().numpy().astype(np.float64).cumsum(axis=1)
    optimum = np.stack([one.optimum for one in played]).cumsum(axis=1)
    regret, points = optimum - reward, np.linspace(1, rounds, min(rounds, _CURVE_POINTS)).round()
    points = np.unique(points.astype(np.int64))
    return Simulation(
        rounds=rounds,
        reward_ratio=reward[:, -1] / optimum[:, -1],
        regret_ratio=regret[:, -1] / (optimum[:, -1] - [one.uniform.sum() for one in played]),
        points=points,
        reward=reward[:, points - 1],
        regret=regret[:, points - 1],
        lost=reward[:, -1] <= [one.single.sum() for one in played],
        arms=buffer.arms.cpu().numpy(),
        seconds=time.perf_counter() - start,
    )
