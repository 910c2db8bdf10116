"""Table 1: agents on the bandit problems, with the paper's numbers next to ours."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any

from experiments.agents import agent_settings
from experiments.facts import FACTS, TITLES
from experiments.running import MISSING, Run, Table, finite, fixed, run_parts
from experiments.running import mean as average
from experiments.simulation import simulate

PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = FACTS["table1"]
_COLUMNS = tuple(PAPER["uniform"])
# An agent that the paper took from the Showdown has this at the end of its name.
SHOWDOWN = "-showdown"
# The rows with the paper's settings: its own, Badam's other form, and a stronger Bayes by Backprop.
OWN_AGENTS = (
    *("badam", "badam-map", f"mc-dropout{SHOWDOWN}", f"bbb{SHOWDOWN}", "bbb", "vadam", f"greedy{SHOWDOWN}", "uniform"),
)


@dataclass(frozen=True)
class Settings:
    """What the table depends on besides the seed: its columns, rows, runs of each cell, and the agents' settings."""

    problems: tuple[str, ...] = (*_COLUMNS[:6], "census:1000")
    agents: tuple[str, ...] = tuple(PAPER)
    runs: int = 10
    rounds: int | None = None
    settings: str = "tuned"

    def __post_init__(self) -> None:
        for agent in self.agents:
            agent_settings(agent, self.settings)


Cell = dict[str, Any]
HEADINGS = {"census:1000": "census, 1,000 rounds"}


def play(names: Sequence[str], *, seed: int, settings: Settings, device: str) -> Iterator[tuple[str, Cell]]:
    """Finished cells as plain data, as they come."""
    how: Any = {"runs": settings.runs, "rounds": settings.rounds, "settings": settings.settings}
    for name in names:
        problem, agent = name.split("/")
        outcome = simulate(problem, agent, seed=seed, device=device, **how)
        shares = {name: getattr(outcome, name).tolist() for name in ("reward_ratio", "regret_ratio", "lost")}
        yield name, {**shares, "rounds": outcome.rounds, "seconds": round(outcome.seconds, 3)}


def by_problem(cells: Mapping[str, Cell]) -> dict[str, dict[str, Cell]]:
    """`problem/agent` as `results[problem][agent]`."""
    results: dict[str, dict[str, Cell]] = {}
    for name, cell in cells.items():
        problem, _, agent = name.partition("/")
        results.setdefault(problem, {})[agent] = cell
    return results


def spread(cell: Cell) -> str:
    """A cell's mean ± standard deviation; in brackets its standard error, its worst run, and how many runs were lost.

    >>> spread({"reward_ratio": [0.9, 0.1], "lost": [False, True]})
    '.500 ± .566 (.400; .100, 1 lost)'
    """
    values, lost = finite(cell["reward_ratio"]), sum(cell.get("lost", ()))
    if not values:
        return MISSING
    told = f"{fixed(min(values))}{f', {lost} lost' if lost else ''}"
    if len(values) == 1:
        return f"{fixed(values[0])} ({told})"
    deviation = stdev(values)
    return f"{fixed(average(values))} ± {fixed(deviation)} ({fixed(deviation / math.sqrt(len(values)))}; {told})"


def table(results: Mapping[str, Mapping[str, Cell]], settings: Mapping[str, Any]) -> Table:
    """Reward over the optimum's, ours above the paper's, the best of each column and source in bold."""
    problems = [problem for problem in settings["problems"] if problem in results]
    agents = [agent for agent in settings["agents"] if any(agent in results[problem] for problem in problems)]
    means = {p: {a: average(cell["reward_ratio"]) for a, cell in results[p].items()} for p in problems}
    best = {p: max((m for m in column.values() if math.isfinite(m)), default=None) for p, column in means.items()}
    highest = {p: max(rows[p][0] for rows in PAPER.values()) for p in _COLUMNS}
    rows = []
    for agent in agents:
        shown, paper = [], []
        for p in problems:
            bold = "**" if means[p].get(agent) == best[p] else ""
            mean, _, rest = spread(results[p][agent]).partition(" ") if agent in results[p] else (MISSING, "", "")
            shown.append(f"{bold}{mean}{bold} {rest}".strip())
            theirs = PAPER.get(agent.removesuffix(SHOWDOWN), {}).get(p.partition(":")[0])
            star = "**" if theirs and theirs[0] == highest[p.partition(":")[0]] else ""
            paper.append(f"{star}{fixed(theirs[0], 2)}{star} ± {fixed(theirs[1], 2)}" if theirs else "")
        rows.append((TITLES.get(agent, agent), *shown))
        if any(paper) and agent + SHOWDOWN not in agents:
            rows.append(("*in the paper*", *paper))
    played = f"{settings['runs']} runs, settings `{settings['settings']}`"
    title = f"Total reward over the optimum's: mean ± standard deviation of {played} (standard error; worst run)"
    note = (
        "Lost are runs that earned no more than the best single arm. The paper's are means ± standard deviations of 10 "
        "runs; its census has 10,000 rounds."
    )
    return Table(title, ("agent", *(HEADINGS.get(p, p) for p in problems)), rows, note)


def run(*, seed: int, out: Path, quiet: bool, settings: Settings, device: str) -> tuple[Path, ...]:
    """Play the cells; results go to `metrics.json` as they arrive."""
    task = Run("table1", seed, out, asdict(settings), device=device, quiet=quiet)
    names = [f"{problem}/{agent}" for problem in settings.problems for agent in settings.agents]

    def so_far(done: Mapping[str, Cell]) -> None:
        task.write({"metrics.json": task.metrics(by_problem(done))})

    results = by_problem(run_parts(task, names, partial(play, seed=seed, settings=settings, device=device), so_far))
    view = table(results, asdict(settings))
    return task.finish({"table1.md": view.markdown()}, results, view)
