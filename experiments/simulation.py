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


@dataclass(frozen=True, eq=False)
class Simulation:
    """The outcome; arrays have one entry, or row, per run.

    Attributes:
        reward: in total, (runs,).
        reward_ratio: that over what the best arms are expected to pay.
        regret_ratio: total regret over the regret that arms drawn at random are expected to have.
        lost: whether a run earned no more than one arm, the best, played in every round, is expected to.
        arms: that were chosen, (runs, rounds).
    """

    rounds: int
    reward: Numbers
    reward_ratio: Numbers
    regret_ratio: Numbers
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
    """Let an agent play a problem; every run has its own random numbers, and does not depend on the other runs.

    First every arm is pulled a few times in turn. Then the agent acts, a new context per round, and trains every
    `settings.train_every` rounds; between two trainings the rounds are one batch, each with its own posterior draw.

    >>> found = simulate("wheel:0.5", "linear", runs=2, rounds=60)
    >>> found.reward_ratio.shape
    (2,)

    Args:
        problem: a problem, or the name of one.
        agent: one of `AGENTS`, with its settings (see `agent_settings`).
        rounds: of each run; None for as many as the problem says.
        device: None for a GPU where there is one.
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
    # A chunked sum, as numpy's own, would round differently: these are the last of cumulative ones.
    reward = buffer.rewards.cpu().numpy().astype(np.float64).cumsum(axis=1)[:, -1]
    optimum = np.array([one.optimum.cumsum()[-1] for one in played])
    return Simulation(
        rounds=rounds,
        reward=reward,
        reward_ratio=reward / optimum,
        regret_ratio=(optimum - reward) / (optimum - [one.uniform.sum() for one in played]),
        lost=reward <= [one.single.sum() for one in played],
        arms=buffer.arms.cpu().numpy(),
        seconds=time.perf_counter() - start,
    )
