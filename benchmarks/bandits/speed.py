"""Decisions a second of the default agent with its log on, beside Vowpal Wabbit and mabwiser; its memory.

    BAYESADAM_DATA=... python -m benchmarks.bandits.speed [--quick] [--alone] [--decisions 5000] [--memory 1000000]

Every reward follows its decision at once. Trainings are in the background, and counted: a run ends when the last one
has. Mushroom is left out where its file is absent. The ratio to a peer is of the same loop in the same process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bayesadam.bandits import Agent, make_agent
from benchmarks.bandits.rivals import RIVALS
from benchmarks.common.harness import arguments, import_peer, one_core, setting, write_results
from experiments.problems import BanditProblem, Numbers, Rounds, problem

FEATURES, ARMS, BATCH, SEED = 20, 5, 1000, 38
PEERS = {"Vowpal Wabbit": "vowpalwabbit", "mabwiser LinUCB": "mabwiser.mab"}


def linear(rounds: int) -> Rounds:
    """Rewards that are linear in normal contexts, with noise."""
    rng = np.random.default_rng(SEED)
    contexts = rng.standard_normal((rounds, FEATURES)).astype(np.float32)
    expected = contexts @ rng.standard_normal((FEATURES, ARMS)).astype(np.float32) / np.float32(FEATURES**0.5)
    return Rounds(contexts, expected + 0.1 * rng.standard_normal(expected.shape).astype(np.float32), expected)


def timed(rounds: Rounds, act: Callable[[Numbers], Any], learn: Callable[[Any, float], None]) -> dict[str, float]:
    """One decision after the other: how many a second, and the milliseconds of the median and of one in a hundred."""
    waits, paid, began = [], 0.0, time.perf_counter()
    for context, rewards in zip(rounds.contexts, rounds.rewards.tolist(), strict=True):
        start = time.perf_counter()
        arm, about = act(context)
        waits.append(time.perf_counter() - start)
        learn(about, rewards[arm])
        paid += rewards[arm]
    median, late = (1e3 * np.quantile(waits, [0.5, 0.99])).tolist()
    return {"per_second": len(waits) / (time.perf_counter() - began), "median_ms": median, "p99_ms": late, "paid": paid}


def ours(rounds: Rounds, folder: Path, **changes: Any) -> tuple[Agent, dict[str, float]]:
    """The agent after the loop."""
    agent = make_agent(
        n_features=rounds.contexts.shape[1], n_arms=rounds.rewards.shape[1], training="background", **changes
    )
    agent.log(folder / f"{len(rounds.contexts)}-{rounds.contexts.shape[1]}.jsonl")

    def act(context: Numbers) -> tuple[int, int]:
        decision = agent.decide(context)
        return decision.arm, decision.id

    began = time.perf_counter()
    row = timed(rounds, act, agent.reward)
    agent.wait()
    return agent, row | {"per_second": len(rounds.contexts) / (time.perf_counter() - began)}


def theirs(rounds: Rounds, name: str) -> dict[str, float]:
    """A peer, by its first setting."""
    chosen = BanditProblem("linear", rounds.contexts.shape[1], rounds.rewards.shape[1], 0, None, lambda *_: rounds)
    peer = next(iter(RIVALS[name].settings.values()))(chosen, len(rounds.contexts), SEED)

    def act(context: Numbers) -> tuple[int, tuple[Any, int]]:
        shown = peer.prepare(context)
        arm = peer.act(shown)
        return arm, (shown, arm)

    return timed(rounds, act, lambda about, reward: peer.learn(*about, reward))


def resident() -> float:
    """MiB in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def memory(decisions: int, folder: Path, **changes: Any) -> dict[str, float]:
    """What so many decisions in batches leave in memory and on the disk, and how long a saved agent takes to go on."""
    rounds = linear(BATCH)
    agent = make_agent(n_features=FEATURES, n_arms=ARMS, training="background", **changes)
    agent.log(folder / "memory.jsonl")
    sizes = []
    for _ in range(decisions // BATCH):
        for row, decision in enumerate(agent.decide(rounds.contexts)):
            agent.reward(decision.id, float(rounds.rewards[row, decision.arm]))
        sizes.append(resident())
    agent.save(folder / "agent")
    agent.log(None)
    began = time.perf_counter()
    again = Agent.load(folder / "agent")
    again.log(folder / "memory.jsonl")
    assert again.decide(rounds.contexts[0]).id == decisions
    seconds, disk = time.perf_counter() - began, (folder / "agent").stat().st_size / 2**20
    tenth, last = sizes[len(sizes) // 10], sizes[-1]
    return {"mib_at_a_tenth": tenth, "mib": last, "file_mib": disk, "seconds_to_resume": seconds}


def main() -> None:
    parser = arguments(__doc__, quick="200 decisions, 2,000 for memory", peer="Vowpal Wabbit and mabwiser")
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--memory", type=int, default=10**6, help="decisions after which memory is measured")
    options = parser.parse_args()
    count, many = (200, 2000) if options.quick else (options.decisions, options.memory)
    one_core()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        rounds, folder = linear(count), Path(name)
        agent, results["hybrid"] = ours(rounds, folder)
        began = time.perf_counter()
        for first in range(0, count - count % BATCH or count, BATCH):
            agent.decide(rounds.contexts[first : first + BATCH])
        results["hybrid, batches"] = {"per_second": count / (time.perf_counter() - began)}
        for peer, module in PEERS.items():
            if import_peer(module, module.partition(".")[0], alone=options.alone) is not None:
                results[peer] = theirs(rounds, peer)
        try:
            mushroom = problem("mushroom").run(SEED, count)
            row = results["hybrid, mushroom"] = ours(mushroom, folder)[1]
            row["reward_ratio"] = row["paid"] / float(mushroom.optimum.sum())
        except OSError as error:
            print(f"mushroom is left out: {error}")
        results["memory"] = memory(many, folder)
    for name, row in results.items():
        ratio = {"ratio": results["hybrid"]["per_second"] / row["per_second"]} if name in PEERS else {}
        print(f"{name:18}", ", ".join(f"{key} {value:.4g}" for key, value in {**row, **ratio}.items()))
    write_results(options.out, "bandit_speed", {"settings": setting(), "results": results})


if __name__ == "__main__":
    sys.exit(main())
