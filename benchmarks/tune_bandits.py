"""The same search for settings for every bandit agent that has a network: what it chose, beside today's settings.

    BAYESADAM_DATA=... python benchmarks/tune_bandits.py [--quick] [--agents badam badam-map vadam bbb ivon]
        [--problems ...] [--draws 24] [--rounds 2000 8000] [--runs 3 5] [--device cuda] [--jobs 1] [--report]
        [--out out/bench]

Candidates of an agent are today's settings ("tuned"), the paper's, and random ones. `SPACE` says how each setting is
drawn; an agent draws those that the class of its settings has and keeps its other settings as they are today. The
draws of a setting depend on the candidate's number alone: the fifth random candidate has the same learning rate for
every agent, unless the agent's settings refuse the candidate as a whole and it is drawn again.

Successive halving: all candidates play all problems for a few rounds; the best third, and today's settings in any
case, play longer on other seeds; the best at the end is chosen. An agent's criterion is the mean over problems of its
regret over that of arms drawn at random, cut to [0, 2]. Rung k plays seed 7000 + k; seeds from 1000 to 1029 are kept
for reports. The chosen candidate is the best of those on the last rung by the very runs shown, which favours it: a
claim needs other seeds.

Stopped, it resumes: every agent, candidate, problem and rung is a file in out/bench/tune_bandits. Several processes
may take agents each; --report then shows them all without playing. --jobs are processes; on a GPU each has 8
simulations under way. Runs are one stack there, so that more of them cost little.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bayesadam.bandits import PAPER_AGENTS, AgentSettings, agent_settings, problem
from bayesadam.bandits.agents import entry
from bayesadam.bandits.networks import NetworkSettings
from bayesadam.bandits.simulation import Playing, in_turn
from bayesadam.errors import SettingError
from harness import Cell, arguments, mean_and_error, number, parallel, read_cell, setting, write_cell, write_results

WITH_NETWORK = tuple(name for name in PAPER_AGENTS if issubclass(entry(name).settings, NetworkSettings))
SEARCHED = ("badam", "badam-map", "vadam", "bbb", "ivon")
TABLES = ("mushroom", "financial", "jester", "statlog", "adult", "covertype")
WHEELS = ("wheel:0.5", "wheel:0.95")
TODAY, PAPER = "tuned", "paper"
SEED, DRAWS, ROUNDS, RUNS = 7000, 24, (2000, 8000), (3, 5)
WORST_RATIO = 2.0
AT_ONCE = {"cpu": 1, "cuda": 8}
# A value out of random numbers and the values of the settings that stand before it in `SPACE`.
Draw = Callable[[random.Random, Mapping[str, Any]], Any]
# Of one candidate, by problem: the criterion of every run.
Scores = Mapping[str, Sequence[float]]


# --- candidates -----------------------------------------------------------------------------------------------------


def one_of(*values: Any) -> Draw:
    return lambda source, _: source.choice(values)


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def log_uniform(low: float, high: float) -> Draw:
    """Three digits of a number whose logarithm is uniform."""
    return lambda source, _: three_digits(math.exp(source.uniform(math.log(low), math.log(high))))


def share_of_prior(low: float, high: float) -> Draw:
    """A standard deviation, log-uniform as a share of the prior's; at 1 Vadam and IVON start from no curvature."""
    share = log_uniform(low, high)
    return lambda source, values: three_digits(share(source, values) * math.sqrt(values["prior_variance"]))


SPACE: Mapping[str, Draw] = {
    "lr": log_uniform(1e-4, 3e-2),
    "betas": one_of((0.9, 0.999), (0.9, 0.9999)),
    "average": one_of(0.0, 0.995),
    "train_steps": one_of(20, 50, 100),
    "standardise": one_of(True, False),
    "l2": log_uniform(1e-4, 3e-2),
    "l2_by_noise": one_of(True, False),
    "dropout": one_of(0.0, 0.1, 0.2, 0.3),
    "prior_variance": log_uniform(1e-4, 1.0),
    "n_per_round": one_of(None, 1.0, 10.0, 100.0, 1000.0),
    "noise_variance": one_of(None, 0.01, 0.1, 0.5),
    "initial_std": share_of_prior(0.03, 0.99),
    "precision": log_uniform(1e-2, 1e1),
}


def space(agent: str) -> dict[str, Draw]:
    """How the agent's settings are drawn: those that the class of its settings has."""
    names = entry(agent).settings.names()
    return {name: draw for name, draw in SPACE.items() if name in names}


def drawn(agent: str, candidate: int) -> AgentSettings:
    """A random candidate of the agent, drawn again as long as its settings refuse it."""
    today = agent_settings(agent)
    attempt = 0
    while True:
        values: dict[str, Any] = {}
        for name, draw in space(agent).items():
            values[name] = draw(random.Random(f"{candidate} {attempt} {name}"), values)
        try:
            return replace(today, **values)
        except SettingError:
            attempt += 1


def candidates(agent: str, draws: int) -> dict[str, AgentSettings]:
    """Today's settings, the paper's and so many random ones, by name."""
    known = {name: agent_settings(agent, name) for name in (TODAY, PAPER)}
    return known | {f"drawn-{candidate:02d}": drawn(agent, candidate) for candidate in range(draws)}


# --- trials ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """How long the candidates play, and on which seed."""

    number: int
    rounds: int
    runs: int

    @property
    def seed(self) -> int:
        """Every rung has its own."""
        return SEED + self.number


@dataclass(frozen=True)
class Trial:
    """A candidate on a problem, at one rung; its result is a file below `folder`."""

    agent: str
    candidate: str
    settings: AgentSettings
    problem: str
    rung: Rung
    folder: Path

    @property
    def path(self) -> Path:
        """The file of its result."""
        name = f"{self.candidate}-{self.problem.replace(':', '-')}-{self.rung.number}.json"
        return self.folder / self.agent / name

    def about(self) -> dict[str, Any]:
        """What the result depends on."""
        return {"agent": self.settings.plain(), **asdict(self.rung), "seed": self.rung.seed}

    def result(self) -> Cell | None:
        """What was found; None where it was not played yet."""
        return read_cell(self.path, self.about())

    def begin(self, device: str) -> Playing:
        """The simulation, with as many rounds as the problem offers where those are fewer."""
        chosen = _problem(self.problem)
        rounds = min(self.rung.rounds, chosen.most_rounds or self.rung.rounds)
        given = {"runs": self.rung.runs, "rounds": rounds, "seed": self.rung.seed}
        return Playing(chosen, self.agent, **given, device=device, settings=self.settings)


_problem = cache(problem)


def play(trials: Sequence[Trial], device: str) -> None:
    """Play the trials in turn, several at once on a GPU, and write each result when it is there."""
    at_once = AT_ONCE[torch.device(device).type]
    for place, found in in_turn([partial(trial.begin, device) for trial in trials], at_once):
        trial, ratios = trials[place], found.regret_ratio.tolist()
        told = {"rounds": found.rounds, "regret_ratio": ratios, "seconds": round(found.seconds, 3)}
        write_cell(trial.path, {"settings": trial.about(), **told})
        where = f"{trial.agent:10s}{trial.candidate:10s}{trial.problem:11s}{found.rounds:7,d} rounds"
        print(f"{where}  regret {statistics.fmean(ratios):.3f} ({found.seconds:.0f} s)", flush=True)


def play_all(trials: Sequence[Trial], device: str, jobs: int) -> None:
    """Share the trials among processes: one by one on a CPU, in equal parts on a GPU; a single job is this process."""
    if jobs == 1:
        torch.set_num_threads(1)
        play(trials, device)
        return
    parts = len(trials) if torch.device(device).type == "cpu" else min(jobs, len(trials))
    if parts:
        calls = [partial(play, trials[first::parts], device) for first in range(parts)]
        for _ in parallel(calls, jobs=min(jobs, parts)):
            pass


# --- the search -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is the same for every agent."""

    draws: int
    problems: Sequence[str]
    rungs: Sequence[Rung]
    folder: Path


def by_run(scores: Scores) -> list[float]:
    """The criterion of every run: its mean over problems."""
    return [statistics.fmean(run) for run in zip(*scores.values(), strict=True)]


def criterion(scores: Scores) -> float:
    """The mean over problems and runs; less is better."""
    return statistics.fmean(by_run(scores))


def played(
    agent: str, field: Mapping[str, AgentSettings], rung: Rung, plan: Plan, play: Callable[[Sequence[Trial]], object]
) -> dict[str, dict[str, Cell]] | None:
    """One rung by candidate and problem, after `play` had the missing trials; None if some are missing still."""
    trials = {
        name: {problem: Trial(agent, name, field[name], problem, rung, plan.folder) for problem in plan.problems}
        for name in field
    }
    play([trial for row in trials.values() for trial in row.values() if trial.result() is None])
    found: dict[str, dict[str, Cell]] = {}
    for name, row in trials.items():
        cells = {problem: trial.result() for problem, trial in row.items()}
        found[name] = {problem: cell for problem, cell in cells.items() if cell is not None}
        if len(found[name]) < len(cells):
            return None
    return found


def search(agent: str, plan: Plan, play: Callable[[Sequence[Trial]], object]) -> dict[str, Any] | None:
    """Successive halving over the agent's candidates; None where `play` left trials out."""
    field = every = candidates(agent, plan.draws)
    rungs, simulated = [], 0
    for rung in plan.rungs:
        found = played(agent, field, rung, plan, play)
        if found is None:
            return None
        scores = {
            name: {
                problem: [min(max(ratio, 0.0), WORST_RATIO) for ratio in cell["regret_ratio"]]
                for problem, cell in row.items()
            }
            for name, row in found.items()
        }
        ranked = sorted(scores, key=lambda name: criterion(scores[name]))
        simulated += sum(cell["rounds"] * rung.runs for row in found.values() for cell in row.values())
        rungs.append({**asdict(rung), "seed": rung.seed, "scores": {name: scores[name] for name in ranked}})
        best = {*ranked[: math.ceil(len(ranked) / 3)], TODAY}
        field = {name: settings for name, settings in field.items() if name in best}
    return {
        "space": list(space(agent)),
        "chosen": ranked[0],
        "settings": every[ranked[0]].plain(),
        "candidates": {name: settings.plain() for name, settings in every.items()},
        "rungs": rungs,
        "simulated_rounds": simulated,
    }


# --- what is told of it ---------------------------------------------------------------------------------------------


def own_values(agent: str, settings: Mapping[str, Any]) -> str:
    """The settings that are not the defaults of their class."""
    defaults = entry(agent).settings().plain()
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value != defaults[name])


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """In Markdown: for each agent what was chosen, the criterion of today's settings and of these, and the budget."""
    heads = ("agent", "chosen", "settings, where not the class's own", "today's", "chosen's", "difference", "budget")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for agent, result in found.items():
        last = result["rungs"][-1]["scores"]
        today, chosen = by_run(last[TODAY]), by_run(last[result["chosen"]])
        gap, error = mean_and_error(b - a for a, b in zip(today, chosen, strict=True))
        budget = f"{len(result['candidates'])} settings, {result['simulated_rounds'] / 1e6:.2f} M rounds"
        told = [result["chosen"], own_values(agent, result["settings"]), number(today), number(chosen)]
        lines.append(f"| {' | '.join([agent, *told, f'{gap:+.3f} ± {error:.3f}', budget])} |")
    return "\n".join(lines)


def problem_table(found: Mapping[str, Mapping[str, Any]], problems: Iterable[str]) -> str:
    """In Markdown: the same two by problem, with the worst run in brackets."""
    problems = list(problems)
    lines = [f"| last rung | {' | '.join(problems)} |", "|---" * (len(problems) + 1) + "|"]
    for agent, result in found.items():
        last = result["rungs"][-1]["scores"]
        for name in dict.fromkeys((TODAY, result["chosen"])):
            cells = [f"{number(last[name][each])} ({max(last[name][each]):.2f})" for each in problems]
            lines.append(f"| {agent}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(
        __doc__, quick="two draws, two runs of 60 and 80 rounds on the wheel, which needs no data", device=True, jobs=1
    )
    parser.add_argument("--agents", nargs="+", choices=WITH_NETWORK, default=list(SEARCHED), metavar="AGENT")
    parser.add_argument("--problems", nargs="+", default=[*TABLES, *WHEELS], metavar="PROBLEM")
    parser.add_argument("--draws", type=int, default=DRAWS, help="random candidates, besides today's and the paper's")
    parser.add_argument("--rounds", type=int, nargs="+", default=list(ROUNDS), help="of a run, rung by rung")
    parser.add_argument("--runs", type=int, nargs="+", default=list(RUNS), help="of a trial, rung by rung")
    parser.add_argument("--report", action="store_true", help="play nothing: show the agents whose search is finished")
    options = parser.parse_args()
    if options.quick:
        options.draws, options.rounds, options.runs, options.problems = 2, [60, 80], [2, 2], list(WHEELS[:1])
    if len(options.rounds) != len(options.runs) or min(options.runs) < 2:
        parser.error("--rounds and --runs must have a value for each rung, and two runs or more for a standard error")
    pairs = zip(options.rounds, options.runs, strict=True)
    rungs = [Rung(place, rounds, runs) for place, (rounds, runs) in enumerate(pairs, 1)]
    plan = Plan(options.draws, options.problems, rungs, options.out / "tune_bandits")
    at_work = partial(play_all, device=options.device, jobs=options.jobs)
    every = {agent: search(agent, plan, (lambda _: None) if options.report else at_work) for agent in options.agents}
    found = {agent: result for agent, result in every.items() if result is not None}
    if not found:
        sys.exit(f"no search is finished of {', '.join(every)} in {plan.folder}: run it without --report")
    tables = f"{table(found)}\n\n{problem_table(found, plan.problems)}"
    told = f"Regret over that of arms drawn at random, mean ± standard error of {rungs[-1].runs} runs (the worst one)."
    print(f"\n{tables}\n\n{told}")
    write_results(options.out, "tune_bandits", {**setting(), "problems": list(plan.problems), "agents": found})
    print(f"{len(found)} of {len(every)} searches are finished")


if __name__ == "__main__":
    main()
