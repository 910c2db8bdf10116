"""Decisions a second of the default agent with its log on, beside Vowpal Wabbit and mabwiser; its memory.

    BAYESADAM_DATA=... python -m benchmarks.bandits.speed [--quick] [--alone] [--decisions 5000] [--memory 1000000]

Every reward follows its decision at once. Trainings are in the background, and counted: a run ends when the last one
has. Of a decision with its reward there are the wall clock, the CPU time of the loop's thread, and that of all threads,
trainings included. Mushroom is left out where its file is absent. The ratio to a peer is of the same loop in the same
process, by the clock and by the CPU time of all threads.
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


def timed(
    rounds: Rounds,
    act: Callable[[Numbers], Any],
    learn: Callable[[Any, float], None],
    *,
    finish: Callable[[], object] = lambda: None,
    is_training: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """One decision after the other: how many a second, the milliseconds of the median and of one in a hundred."""
    waits, paid, trained, clocks = [], 0.0, [], (time.perf_counter, time.process_time, time.thread_time)
    began = [clock() for clock in clocks]
    for context, rewards in zip(rounds.contexts, rounds.rewards.tolist(), strict=True):
        trained.append(is_training())
        start = time.perf_counter()
        arm, about = act(context)
        waits.append(time.perf_counter() - start)
        learn(about, rewards[arm])
        paid += rewards[arm]
    loop = time.thread_time() - began[2]
    finish()
    wall, cpu, _ = (clock() - first for clock, first in zip(clocks, began, strict=True))
    count, late = len(waits), [wait for wait, busy in zip(waits, trained, strict=True) if busy]
    row = {"per_second": count / wall, "per_loop_cpu_second": count / loop, "per_cpu_second": count / cpu, "paid": paid}
    row |= {"median_ms": 1e3 * float(np.median(waits)), "p99_ms": 1e3 * float(np.quantile(waits, 0.99))}
    return row | ({"p99_training_ms": 1e3 * float(np.quantile(late, 0.99))} if late else {})


def ours(rounds: Rounds, folder: Path, **changes: Any) -> tuple[Agent, dict[str, float]]:
    """The agent after the loop."""
    agent = make_agent(
        n_features=rounds.contexts.shape[1], n_arms=rounds.rewards.shape[1], training="background", **changes
    )
    agent.log(folder / f"{len(rounds.contexts)}-{rounds.contexts.shape[1]}.jsonl")

    def act(context: Numbers) -> tuple[int, int]:
        decision = agent.decide(context)
        return decision.arm, decision.id

    return agent, timed(rounds, act, agent.reward, finish=agent.wait, is_training=lambda: agent._busy)


def theirs(rounds: Rounds, name: str) -> dict[str, float]:
    """A peer, by its first setting."""
    chosen = BanditProblem("linear", rounds.contexts.shape[1], rounds.rewards.shape[1], 0, None, lambda *_: rounds)
    peer = next(iter(RIVALS[name].settings.values()))(chosen, len(rounds.contexts), SEED)

    def act(context: Numbers) -> tuple[int, tuple[Any, int]]:
        shown = peer.prepare(context)
        arm = peer.act(shown)
        return arm, (shown, arm)

    return timed(rounds, act, lambda about, reward: peer.learn(*about, reward))


def batches(agent: Agent, rounds: Rounds) -> dict[str, float]:
    """Decisions of a thousand contexts at a time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for first in range(0, len(rounds.contexts), BATCH):
        agent.decide(rounds.contexts[first : first + BATCH])
    count = len(rounds.contexts)
    return {"per_second": count / (time.perf_counter() - wall), "per_cpu_second": count / (time.thread_time() - cpu)}


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
        agent, ourselves = ours(rounds, folder)
        results |= {"hybrid": ourselves, "hybrid, batches": batches(agent, rounds)}
        agent.log(None)
        results["hybrid, batches, no log"] = batches(agent, rounds)
        for peer, module in PEERS.items():
            if import_peer(module, module.partition(".")[0], alone=options.alone) is not None:
                row = results[peer] = theirs(rounds, peer)
                ratios = {"ratio": "per_second", "cpu_ratio": "per_cpu_second", "loop_ratio": "per_loop_cpu_second"}
                row |= {key: ourselves[of] / row[of] for key, of in ratios.items()}
        try:
            mushroom = problem("mushroom").run(SEED, count)
            row = results["hybrid, mushroom"] = ours(mushroom, folder)[1]
            row["reward_ratio"] = row["paid"] / float(mushroom.optimum.sum())
        except OSError as error:
            print(f"mushroom is left out: {error}")
        results["memory"] = memory(many, folder)
    for name, row in results.items():
        print(f"{name:23}", ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    write_results(options.out, "bandit_speed", {"settings": setting(), "results": results})


if __name__ == "__main__":
    sys.exit(main())
