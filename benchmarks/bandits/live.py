"""The agent in a loop that serves: decisions a second, their times while a training runs, memory, and kills.

    python -m benchmarks.bandits.live [--quick] [--agent hybrid] [--problems statlog dense] [--rounds 20000]
        [--observations 1000000] [--kills 20] [--out out/bench]

All is live: one process on one core, the log on, default settings, `training="background"` unless it says "now".
Statlog has 9 features and 7 arms; "dense" has 64 features and 5 arms, rewards not linear.

- One by one: `decide`, then `reward`, round after round; trainings, which take part of the core, included. Per second
  of the wall, of the process's CPU time, and of that of the loop without the trainings; the latter two depend less on
  what else the machine does.
- Batched: `decide` with 1,000 contexts at a time, with the log and without.
- Times of `decide` while a training runs and while none does, 50 and 99 % quantiles in milliseconds.
- Memory: resident MiB after a tenth and after all of the observations, given by `update` 1,000 at a time, and the pace
  one by one before and after them.
- Kills: a process that decides, rewards and saves now and then is killed, again and again, by SIGKILL; each time
  another resumes from the saved agent and the log. Every decision and reward that it had reported must be there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bayesadam.bandits import Agent, make_agent, read_log
from benchmarks.common.harness import arguments, at_least, at_most, one_core, resident, setting, write_results
from experiments.problems import problem

ROOT = Path(__file__).parents[2]
BATCH = 1000
Rounds = tuple[np.ndarray, np.ndarray]


def rounds_of(name: str, n: int) -> Rounds:
    """Contexts (n, features) and what every arm pays, (n, arms)."""
    if name == "statlog":
        chosen = problem(name)
        played = chosen.run(0, min(n, chosen.most_rounds or n))
        again = np.arange(n) % len(played.contexts)
        return played.contexts[again], played.rewards[again]
    source = np.random.default_rng(0)
    contexts = source.normal(size=(n, 64)).astype(np.float32)
    first, second = (source.normal(size=(64, 5)) / 8 for _ in range(2))
    return contexts, contexts @ first + np.abs(contexts @ second) + 0.1 * source.normal(size=(n, 5))


def loop(agent: Agent, rounds: Rounds) -> Iterator[tuple[float, bool]]:
    """Decide and reward; the seconds that each `decide` took, and whether a training ran when it began."""
    for context, pays in zip(*rounds, strict=True):
        busy, began = agent._busy, time.perf_counter()
        decision = agent.decide(context)
        yield time.perf_counter() - began, busy
        agent.reward(decision.id, float(pays[decision.arm]))


def paces(name: str, agent: str, n: int, folder: Path) -> dict[str, Any]:
    """One by one, and batched."""
    contexts, pays = rounds_of(name, n)
    found: dict[str, Any] = {}
    for training in ("background", "now"):
        live = make_agent(agent, contexts.shape[1], pays.shape[1], training=training)
        live.log(folder / f"{name}-{training}.jsonl")
        wall, cpu, own_cpu = time.perf_counter(), time.process_time(), time.thread_time()
        seconds = list(loop(live, (contexts, pays)))
        found[training] = {
            "per second": n / (time.perf_counter() - wall),
            "per CPU second": n / (time.process_time() - cpu),
            "per CPU second of the loop": n / (time.thread_time() - own_cpu),
        }
        for what, busy in (("while training", True), ("otherwise", False)):
            own = [1000 * each for each, flag in seconds if flag == busy]
            if own:
                p50, p99 = np.quantile(own, (0.5, 0.99)).round(3).tolist()
                found[training][what] = {
                    "decisions": len(own),
                    "p50 ms": p50,
                    "p99 ms": p99,
                    "most ms": round(max(own), 3),
                }
    live.wait()
    for logged in (True, False):
        if not logged:
            live.log(None)
        wall, cpu = time.perf_counter(), time.process_time()
        for first in range(0, n, BATCH):
            made = live.decide(contexts[first : first + BATCH])
            for one in made:
                live._standing.waiting.pop(one.id)
        found["batched, " + ("log" if logged else "no log")] = {
            "per second": n / (time.perf_counter() - wall),
            "per CPU second": n / (time.process_time() - cpu),
        }
    return found


def memory(agent: str, n: int, folder: Path) -> dict[str, Any]:
    """What so many observations take; the pace before and after them."""
    tenth = n // 10
    contexts, pays = rounds_of("dense", tenth)
    live = make_agent(agent, 64, 5, training="background")
    live.log(folder / "memory.jsonl")
    few = min(2000, tenth)

    def pace() -> float:
        began = time.thread_time()
        for _ in loop(live, (contexts[:few], pays[:few])):
            pass
        return few / (time.thread_time() - began)

    found: dict[str, Any] = {"observations": n}
    live.update(contexts[:few], np.arange(few) % 5, pays[np.arange(few), np.arange(few) % 5])
    live.wait()
    found["per CPU second at first"] = pace()
    live.log(None)
    arms = np.random.default_rng(1).integers(5, size=tenth)
    paid = pays[np.arange(tenth), arms]
    began = time.process_time()
    for part in range(10):
        for first in range(0, tenth, BATCH):
            live.update(*(of[first : first + BATCH] for of in (contexts, arms, paid)))
        if part in (0, 9):
            live.wait()
            found[f"MiB after {(part + 1) * tenth:,d}"] = resident("VmRSS")
    found["CPU seconds of these"] = time.process_time() - began
    live.log(folder / "memory-after.jsonl")
    found["per CPU second at last"] = pace()
    found["rows held"] = live._seen.count
    return found


def child(log: Path, saved: Path, agent: str, attempt: int) -> None:
    """Decide and reward until killed; every report is written after the call returned."""
    contexts, pays = rounds_of("dense", 20_000)
    live = Agent.load(saved) if saved.exists() else make_agent(agent, 64, 5, training="background")
    live.log(log)
    order = np.random.default_rng(attempt).permutation(len(contexts))
    for number, at in enumerate(order):
        decision = live.decide(contexts[at])
        os.write(1, f"d{decision.id}\n".encode())
        if number % 3:
            live.reward(decision.id, float(pays[at, decision.arm]))
            os.write(1, f"r{decision.id}\n".encode())
        if number % 50 == 49:
            live.save(saved)


def kills(agent: str, n: int, folder: Path) -> dict[str, int]:
    """Kill, resume, and count what was reported and is not there."""
    log, saved, choose = folder / "killed.jsonl", folder / "killed.safetensors", random.Random(0)
    reports: list[str] = []
    for attempt in range(n):
        command = [
            sys.executable,
            "-m",
            "benchmarks.bandits.live",
            "--child",
            str(log),
            str(saved),
            agent,
            str(attempt),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(choose.randrange(20, 400)):
                reports.append(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
            reports += process.stdout.read().split()
    # A report that was cut short by the kill has no end of line and is not counted.
    whole = [report for report in reports if report[1:].isdigit()]
    decided = {int(report[1:]) for report in whole if report[0] == "d"}
    rewarded = {int(report[1:]) for report in whole if report[0] == "r"}
    found, last = read_log(log), Agent.load(saved)
    last.log(log)
    paid = set(found.ids[np.isfinite(found.rewards)].tolist())
    return {
        "kills": n,
        "decisions reported": len(decided),
        "rewards reported": len(rewarded),
        "decisions lost": len(decided - set(found.ids.tolist())),
        "rewards lost": len(rewarded - paid),
        "decisions doubled": len(found.ids) - len(set(found.ids.tolist())),
        "observations the resumed agent lacks": len(paid) - last._seen.total,
        "pending it lacks": len(set(found.ids.tolist()) - paid) - len(last.pending),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        one_core()
        log, saved, agent, attempt = sys.argv[2:]
        child(Path(log), Path(saved), agent, int(attempt))
        return
    parser = arguments(__doc__, quick="300 rounds, 3,000 observations, two kills")
    parser.add_argument("--agent", default="hybrid")
    parser.add_argument("--problems", nargs="+", default=["statlog", "dense"], choices=["statlog", "dense"])
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--observations", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    names = ["dense"] if options.quick else options.problems
    n, many, times = (300, 3000, 2) if options.quick else (options.rounds, options.observations, options.kills)
    one_core()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results: dict[str, Any] = {"agent": options.agent, **setting()}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results[name] = found = paces(name, options.agent, n, Path(folder))
            for what, own in found.items():
                told = {key: value if isinstance(value, dict) else round(value) for key, value in own.items()}
                print(f"{name}, {what}: {told}", flush=True)
            at_least(
                f"{name}, one by one per CPU second of the loop",
                1500,
                found["background"]["per CPU second of the loop"],
            )
            at_least(f"{name}, batched per CPU second", 20_000, found["batched, log"]["per CPU second"])
        results["memory"] = grown = memory(options.agent, many, Path(folder))
        print({key: round(value, 1) for key, value in grown.items()}, flush=True)
        results["kills"] = lost = kills(options.agent, times, Path(folder))
        print(lost)
        for key in list(lost)[3:]:
            at_most(key, 0, lost[key])
    write_results(options.out, "live", results)


if __name__ == "__main__":
    main()
