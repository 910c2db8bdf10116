"""Our default agent beside others on problems that chose no setting: ranks, shares near the best, worst cases.

    BAYESADAM_DATA=... python -m benchmarks.bandits.strangers [--quick] [--problems ...] [--agents default linear ...]
        [--horizons 500 2000] [--runs 20] [--seed 0] [--device cpu] [--jobs 1] [--report FILE] [--out ...]

A problem whose package or file is absent is left out, with the reason. An agent is "default", a name of ours with
changed settings, as in "hybrid,dropout=0.1", or a rival with one of its settings, as in "Vowpal Wabbit: --squarecb
-l 0.5, costs shifted"; its first setting where none is named. "reported" stands for the agents of the table in
docs/bandits.md: ours, and every rival's default and the setting that was best on 24 other problems. Rivals are told the
range of the rewards, ours are not. Slow rivals play fewer runs and rounds, see `MOST_RUNS`, and no wide problems, see
`MOST_FEATURES`. An agent is ranked among those that played a problem, over the problems that it played.

A score is what the chosen arms are expected to pay, less the worst arms', over the best arms', less the worst arms'. It
changes neither with the unit of rewards nor with their zero. One run of the longest horizon gives the scores at all of
them, as no agent knows the horizon.

Stopped, it resumes: each problem and agent is a file in out/bench/strangers. `--report docs/results/strangers.json`
plays nothing, and prints the table of a file of results.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bayesadam.bandits.settings import AgentSettings
from bayesadam.weights.draws import stream_seed
from benchmarks.bandits.problems import PROBLEMS, Absent, reward_range, stranger
from benchmarks.bandits.rivals import RANGES, RIVALS, play
from benchmarks.common.harness import Cell, arguments, one_core, parallel, read_cell, setting, write_cell, write_results
from experiments.agents import agent_settings
from experiments.problems import BanditProblem, Numbers, Rounds
from experiments.simulation import simulate

DEFAULT, LINEAR = "default", "linear"
OURS = (DEFAULT, LINEAR, "greedy")
NEAR = 0.98
REPORTED = {
    DEFAULT: "`hybrid`",
    "neural-linear": "`neural-linear`",
    "greedy": "`greedy`",
    LINEAR: "`linear`",
    "mabwiser LinUCB: alpha 0.1, l2_lambda 1": "mabwiser LinUCB, best",
    "mabwiser LinTS: alpha 0.1, l2_lambda 1": "mabwiser LinTS, best",
    "Vowpal Wabbit: --regcbopt --mellowness 0.001 -l 0.5, costs shifted": "Vowpal Wabbit, best",
    "Vowpal Wabbit: --epsilon 0.05 -l 0.5, costs negated": "Vowpal Wabbit, default",
    "mabwiser LinUCB: alpha 1, l2_lambda 1": "mabwiser LinUCB, default",
    "mabwiser LinTS: alpha 1, l2_lambda 1": "mabwiser LinTS, default",
    "calvera NeuralUCB: defaults": "calvera NeuralUCB, default",
    "calvera NeuralTS: defaults": "calvera NeuralTS, default",
}
# The most runs of a slow rival, or of one of its settings, by the most rounds that they go to.
MOST_RUNS: Mapping[str, Mapping[int, int]] = {
    "mabwiser LinUCB": {2000: 10},
    "mabwiser LinUCB: alpha 0.1, l2_lambda 1": {2000: 10, 20_000: 1},
    "mabwiser LinTS": {2000: 10},
    "calvera NeuralUCB": {500: 2},
    "calvera NeuralTS": {500: 2},
}
# Rivals that take minutes for each run of a wider problem.
MOST_FEATURES = {"mabwiser LinTS": 100, "mabwiser LinUCB": 200, "calvera NeuralUCB": 100, "calvera NeuralTS": 100}


# --- agents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One cell: which agent plays which problem, how long, how often."""

    problem: str
    agent: str
    horizons: tuple[int, ...]
    runs: int
    seed: int
    device: str

    @property
    def rival(self) -> str | None:
        """The name of the rival, where it is one."""
        name = self.agent.partition(":")[0]
        return name if name in RIVALS else None

    def about(self) -> Cell:
        """What its result depends on."""
        about = {"problem": self.problem, "agent": self.agent, "runs": self.runs, "seed": self.seed}
        about |= {"horizons": list(self.horizons)}
        return about if self.rival else about | {"own": agent_settings(*named(self.agent)).plain()}

    def path(self, out: Path) -> Path:
        """Its file."""
        agent = "".join(c if c.isalnum() or c in ".=-" else "_" for c in self.agent)
        return out / "strangers" / f"{self.problem}-{agent}-{self.horizons[-1]}x{self.runs}.json"


def named(text: str) -> tuple[str, AgentSettings]:
    """The name of one of our agents and its settings."""
    name, *changes = text.split(",")
    name = "hybrid" if name == DEFAULT else name
    pairs = [change.partition("=") for change in changes]
    return name, agent_settings(name, **{key: literal_eval(value) for key, _, value in pairs})


def our_arms(job: Job, chosen: BanditProblem, rounds: int) -> Numbers:
    """The arms that an agent of ours chooses, (runs, rounds)."""
    name, own = named(job.agent)
    return simulate(chosen, name, runs=job.runs, rounds=rounds, seed=job.seed, device=job.device, settings=own).arms


def rival_arms(job: Job, rival: str, chosen: BanditProblem, played: Sequence[Rounds], seeds: Sequence[int]) -> Numbers:
    """The arms that a rival chooses, (runs, rounds)."""
    RANGES[chosen.name] = reward_range(chosen.name)
    settings = RIVALS[rival].settings
    make = settings[job.agent.partition(":")[2].strip() or next(iter(settings))]
    return np.stack([play(chosen, one, make, seed) for one, seed in zip(played, seeds, strict=True)])


def scores(played: Rounds, arms: Numbers, horizon: int) -> float:
    """Of one run, see above."""
    expected = played.expected[:horizon].astype(np.float64)
    worst, best = expected.min(axis=1).sum(), expected.max(axis=1).sum()
    return float((expected[np.arange(horizon), arms[:horizon]].sum() - worst) / (best - worst))


def result(job: Job) -> Cell:
    """The scores of every run at every horizon, by the horizon; or why there are none."""
    if job.rival is not None:
        try:
            importlib.import_module(RIVALS[job.rival].module)
        except ImportError as error:
            return {"skipped": f"{job.rival} cannot be imported ({error})"}
    chosen = stranger(job.problem)
    rounds = job.horizons[-1]
    if job.rival is not None and chosen.n_features > MOST_FEATURES.get(job.rival, chosen.n_features):
        return {"skipped": f"{job.rival} is too slow for {chosen.n_features} features"}
    seeds = [stream_seed(job.seed, "run", run) for run in range(job.runs)]
    played = [chosen.run(seed, rounds) for seed in seeds]
    arms = our_arms(job, chosen, rounds) if job.rival is None else rival_arms(job, job.rival, chosen, played, seeds)
    found = {str(h): [scores(one, own, h) for one, own in zip(played, arms, strict=True)] for h in job.horizons}
    return {"scores": found}


def finished(job: Job, out: Path) -> Cell:
    """A cell, measured where it is not there yet."""
    found = read_cell(job.path(out), job.about())
    if found is None:
        one_core()
        began = time.process_time()
        found = {"settings": job.about(), **result(job)}
        found["seconds"] = time.process_time() - began
        write_cell(job.path(out), found)
        told = found.get("skipped") or ", ".join(f"{statistics.fmean(of):.3f}" for of in found["scores"].values())
        print(f"{job.problem}, {job.agent}: {told} ({found['seconds']:.0f} s)", flush=True)
    return found


# --- what is printed ------------------------------------------------------------------------------------------------

Means = Mapping[str, Mapping[str, float]]
# By the horizon, the problem and the agent: the mean over runs, its standard error (None of one run) and their number.
Scores = dict[str, dict[str, dict[str, list[Any]]]]


def gathered(cells: Mapping[Job, Cell], horizons: Sequence[int], names: Sequence[str]) -> Scores:
    """The scores of cells, in the order of horizons and problems."""
    found: Scores = {str(horizon): {} for horizon in horizons}
    for horizon, rows in found.items():
        for job, cell in sorted(cells.items(), key=lambda item: names.index(item[0].problem)):
            if horizon in cell.get("scores", ()):
                runs = cell["scores"][horizon]
                error = round(statistics.stdev(runs) / math.sqrt(len(runs)), 4) if len(runs) > 1 else None
                row = rows.setdefault(job.problem, {})
                row[job.agent] = [round(statistics.fmean(runs), 4), error, len(runs)]
    return found


def means_of(rows: Mapping[str, Mapping[str, Sequence[Any]]]) -> Means:
    return {name: {agent: found[0] for agent, found in row.items()} for name, row in rows.items()}


def ranks(row: Mapping[str, float]) -> dict[str, float]:
    """The rank of each agent on a problem, 1 for the highest score; equal ones share the mean of theirs."""
    values = list(row.values())
    return {
        agent: sum(other > value for other in values) + (sum(other == value for other in values) + 1) / 2
        for agent, value in row.items()
    }


def figures(means: Means, agents: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of every agent over the problems it played."""
    found = {}
    for agent in agents:
        rows = [row for row in means.values() if agent in row]
        if not rows:
            continue
        over = {name: row[agent] / row[LINEAR] for name, row in means.items() if agent in row and LINEAR in row}
        found[agent] = {
            "problems": len(rows),
            "rank": statistics.fmean(ranks(row)[agent] for row in rows),
            "near": statistics.fmean(row[agent] >= NEAR * max(row.values()) for row in rows),
            "of_best": statistics.fmean(row[agent] / max(row.values()) for row in rows),
            "worst_over_linear": min(over.values(), default=math.nan),
            "worst_on": min(over, key=over.__getitem__, default="–"),  # type: ignore[dict-item]
        }
    return found


def rank_table(summary: Mapping[str, Mapping[str, Mapping[str, float]]], agents: Sequence[str]) -> str:
    """The mean rank and the share near the best at every horizon, as in docs/bandits.md; the best rank is bold."""
    best = {horizon: min((row["rank"] for row in found.values()), default=0.0) for horizon, found in summary.items()}

    def shown(horizon: str, agent: str) -> str:
        if agent not in summary[horizon]:
            return "–"
        row = summary[horizon][agent]
        text = f"{row['rank']:.1f}, {100 * row['near']:.0f} %"
        return f"**{text}**" if row["rank"] == best[horizon] else text

    lines = [f"| | {' | '.join(f'{int(horizon):,d} rounds' for horizon in summary)} |"]
    lines.append("|---" * (len(summary) + 1) + "|")
    for agent in agents:
        lines.append(f"| {REPORTED.get(agent, agent)} | {' | '.join(shown(h, agent) for h in summary)} |")
    return "\n".join(lines)


def report(found: Scores, agents: Sequence[str]) -> tuple[str, dict[str, dict[str, dict[str, float]]]]:
    """The table, and the figures behind it."""
    played = {agent for rows in found.values() for row in rows.values() for agent in row}
    agents = [agent for agent in agents if agent in played]
    summary = {horizon: figures(means_of(rows), agents) for horizon, rows in found.items()}
    return rank_table(summary, agents), summary


# --- the command ----------------------------------------------------------------------------------------------------


def shares(agent: str, horizons: Sequence[int], runs: int) -> dict[tuple[int, ...], int]:
    """The horizons that an agent plays in one go, each with the number of its runs."""
    limits = MOST_RUNS.get(agent) or MOST_RUNS.get(agent.partition(":")[0])
    if limits is None:
        return {tuple(horizons): runs}
    found, least = {}, 0
    for most, allowed in sorted(limits.items()):
        if own := tuple(horizon for horizon in horizons if least < horizon <= most):
            found[own] = min(runs, allowed)
        least = most
    return found


def jobs_of(
    names: Sequence[str], agents: Sequence[str], horizons: Sequence[int], *, runs: int, seed: int, device: str
) -> list[Job]:
    """Every agent on every problem that is there, for the horizons that both offer; the costly ones first."""
    found, costs = [], {}
    for name in names:
        try:
            chosen = stranger(name)
        except Absent as error:
            print(f"{name} is left out: {error}")
            continue
        offered = sorted(h for h in horizons if h <= chosen.rounds)
        for agent in agents if offered else ():
            for own, count in shares(agent, offered, runs).items():
                job = Job(name, agent, own, count, seed, device)
                found.append(job)
                costs[job] = own[-1] * (chosen.n_features**2 * chosen.n_arms + (agent != LINEAR) * 10**5)
    return sorted(found, key=lambda job: -costs[job])


def main() -> None:
    parser = arguments(__doc__, quick="two runs of 100 rounds, three problems, default and linear", jobs=1)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--agents", nargs="+", default=list(OURS), metavar="AGENT")
    parser.add_argument("--horizons", nargs="+", type=int, default=[500, 2000])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the runs' seeds come from it")
    parser.add_argument("--device", default="cpu", help="that our agents play on; many runs cost little more on a GPU")
    parser.add_argument("--report", metavar="FILE", help="play nothing: the table of a file of results")
    options = parser.parse_args()
    if options.report:
        found = json.loads(Path(options.report).read_text(encoding="utf-8"))["scores"]
        others = sorted({agent for rows in found.values() for row in rows.values() for agent in row} - set(REPORTED))
        print(report(found, [*REPORTED, *others])[0])
        return
    agents, names, horizons, runs = options.agents, options.problems or PROBLEMS, sorted(options.horizons), options.runs
    if options.quick:
        agents, names, horizons, runs = [DEFAULT, LINEAR], ["iris", "clicks", "linear-26"], [50, 100], 2
    agents = [one for agent in agents for one in (REPORTED if agent == "reported" else [agent])]
    jobs = jobs_of(names, agents, horizons, runs=runs, seed=options.seed, device=options.device)
    calls: list[Callable[[], Cell]] = [partial(finished, job, options.out) for job in jobs]
    made = list(parallel(calls, jobs=options.jobs)) if options.jobs > 1 else [call() for call in calls]
    cells = dict(zip(jobs, made, strict=True))
    found = gathered(cells, horizons, names)
    told, summary = report(found, agents)
    minutes = sum(cell["seconds"] for cell in cells.values()) / 60
    fewer = ", fewer of slow rivals" if any(job.runs < runs for job in cells) else ""
    print(told, f"Means of {runs} runs{fewer}, seed {options.seed}, {minutes:.1f} CPU minutes.", sep="\n\n")
    write_results(
        options.out,
        "strangers",
        {"settings": {**setting(), "seed": options.seed}, "scores": found, "figures": summary},
    )


if __name__ == "__main__":
    sys.exit(main())
