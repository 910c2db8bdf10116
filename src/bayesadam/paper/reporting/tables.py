"""Tables as data: each number with its place in a run's file, drawn by `page` and written to `report.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bayesadam.paper import bandits, pruning, regression
from bayesadam.paper.bandits import PAPER
from bayesadam.paper.reporting.numbers import MISSING, Sample, fixed, mean_error, percent, significant
from bayesadam.paper.reporting.runs import Finished

# Every so many points of the grid and of a regret curve have a row in the tables behind the charts.
_GRID_STEP = 20
_REGRET_ROWS = 10


@dataclass(frozen=True)
class Cell:
    """One number: as shown, as it is, and the file and JSON pointer it came from.

    `beneath` is shown under it in small type, such as the paper's number; `best` marks the best of its column.
    """

    text: str
    value: float | None = None
    source: str = ""
    sd: float | None = None
    beneath: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table: heading of the rows' names, headings of the columns, and rows of a name and its cells."""

    key: str
    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For `report.json`."""
        return {
            "table": self.key,
            "title": self.title,
            "numbers": [
                {"row": name, "column": column, "shown": cell.text, "value": cell.value, "sd": cell.sd}
                | ({"beneath": cell.beneath} if cell.beneath else {})
                | {"from": cell.source}
                for name, cells in self.rows
                for column, cell in zip(self.columns, cells, strict=True)
                if cell.value is not None
            ],
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cell(sample: Sample, text: str, **more: Any) -> Cell:
    if not sample.values:
        return Cell(MISSING)
    return Cell(text, sample.mean, sample.source, _finite(sample.sd), **more)


def of_run(run: Finished) -> list[Table]:
    """Every table of a run."""
    if run.experiment == "regression":
        return [regression_scores(run), *([regression_curves(run)] if run.curves is not None else [])]
    if run.experiment == "pruning":
        return [pruning_shown(run), pruning_all(run)]
    return [rewards(run), worst_runs(run), regrets(run), *(regret_curve(run, problem) for problem in problems_of(run))]


_SCORES = {
    "nll_in": ("NLL in", significant),
    "nll_out": ("NLL out", significant),
    "coverage95_in": ("95 % coverage", fixed),
    "rmse_in": ("RMSE in", significant),
    "std_in": ("std in", fixed),
    "std_out": ("std out", fixed),
}


def regression_scores(run: Finished) -> Table:
    """Means over the seeds, and by how much the deviation grows outside."""
    rows = []
    for method in run.results:
        samples = {name: run.sample(method, name) for name in _SCORES}
        near, far = samples["std_in"].mean, samples["std_out"].mean
        ratio = far / near if near > 0 else math.nan
        last = Cell(significant(ratio), _finite(ratio), run.at(method))
        cells = (_cell(sample, _SCORES[name][1](sample.mean)) for name, sample in samples.items())
        rows.append((regression.TITLES.get(method, method), (*cells, last)))
    return Table(
        f"{run.name}/scores",
        f"Scores, mean of {run.settings['n_seeds']} seeds",
        "method",
        (*(heading for heading, _ in _SCORES.values()), "out / in"),
        tuple(rows),
        "NLL is the mean negative log-likelihood of new points, lower is better. “std” is the function's standard deviation, "
        "without noise. “In” is the training range, 0 to 0.5; “out” is −0.5 to 0 and 0.5 to 1.2, where no method has seen data.",
    )


def regression_curves(run: Finished) -> Table:
    """Mean and standard deviation (noise included) of the first seed, on every `_GRID_STEP`-th point of the grid."""
    curves: Any = run.curves
    file = f"{run.name}/curves.json"
    methods = list(run.results)

    def cell(method: str, place: int) -> Cell:
        mean, sd = (curves["methods"][method][name][place] for name in ("mean", "total_std"))
        return Cell(f"{fixed(mean, 2)} ± {fixed(sd, 2)}", mean, f"{file}#/methods/{method}/mean/{place}", sd)

    places = range(0, len(curves["x"]), _GRID_STEP)
    rows = tuple((fixed(curves["x"][place], 2), tuple(cell(m, place) for m in methods)) for place in places)
    columns = tuple(regression.TITLES.get(method, method) for method in methods)
    return Table(f"{run.name}/curves", "Mean ± standard deviation, noise included, first seed", "x", columns, rows)


RANKINGS = {"snr": "signal-to-noise ratio", "magnitude": "magnitude", "path-snr": "path scores"}


def pruned_name(method: str, ranking: str) -> str:
    """Such as `Badam, signal-to-noise ratio`."""
    return f"{pruning.TITLES.get(method, method)}, {RANKINGS.get(ranking, ranking)}"


def _measured(run: Finished) -> list[float]:
    return sorted({f for rankings in run.results.values() for found in rankings.values() for f in found["fractions"]})


def _accuracies(run: Finished, fractions: Sequence[float], key: str, title: str, note: str = "") -> Table:
    rows = []
    for curve in ((method, ranking) for method, rankings in run.results.items() for ranking in rankings):
        samples = [run.accuracy(*curve, fraction) for fraction in fractions]
        rows.append((pruned_name(*curve), [_cell(sample, percent(sample.mean)) for sample in samples]))
    columns = zip(*(cells for _, cells in rows), strict=True)
    best = [max((cell.value for cell in column if cell.value is not None), default=None) for column in columns]
    marked = tuple(
        (name, tuple(replace(cell, best=cell.value == top) for cell, top in zip(cells, best, strict=True)))
        for name, cells in rows
    )
    return Table(key, title, "method, ranking", tuple(f"{100 * f:g} %" for f in fractions), marked, note)


def pruning_shown(run: Finished) -> Table:
    """Accuracy in percent at the fractions of interest."""
    measured = _measured(run)
    fractions = [fraction for fraction in pruning.SHOWN if fraction in measured]
    title = f"Test accuracy in % after pruning this share of all weights, mean of {run.settings['n_seeds']} seeds"
    return _accuracies(run, fractions, f"{run.name}/accuracy", title, "The best of each column in bold.")


def pruning_all(run: Finished) -> Table:
    """The same at every fraction."""
    return _accuracies(run, _measured(run), f"{run.name}/accuracy-all", "Test accuracy in %, every fraction")


def agents_of(run: Finished) -> list[str]:
    """In the order they were asked for."""
    return [agent for agent in run.settings["agents"] if any(agent in cells for cells in run.results.values())]


def problems_of(run: Finished) -> list[str]:
    """In the order they were asked for."""
    return [problem for problem in run.settings["problems"] if problem in run.results]


def rewards(run: Finished) -> Table:
    """Total reward over the optimum's, with the paper's beneath; the best of each column marked."""
    problems = problems_of(run)
    means = {p: {a: run.sample(p, a, "reward_ratio").mean for a in run.results[p]} for p in problems}
    rows = []
    for agent in agents_of(run):
        cells = []
        for problem in problems:
            sample = run.sample(problem, agent, "reward_ratio")
            beneath = " ± ".join(fixed(value, 2) for value in PAPER.get(agent, {}).get(problem, ()))
            best = agent in means[problem] and means[problem][agent] == max(means[problem].values())
            cells.append(_cell(sample, mean_error(sample), beneath=beneath, best=best))
        rows.append((bandits.TITLES.get(agent, agent), tuple(cells)))
    runs = f"{run.settings['runs']} run{'s' * (run.settings['runs'] > 1)}"
    title = (
        f"Total reward over the optimum's, settings “{run.settings['settings']}”, mean ± standard error of {runs}; beneath, "
        "the paper's ± standard deviation"
    )
    note = "The best of ours in each column in bold."
    return Table(f"{run.name}/rewards", title, "agent", tuple(problems), tuple(rows), note)


def worst_runs(run: Finished) -> Table:
    """The reward of the worst run of each cell, and how many were lost."""

    def cell(problem: str, agent: str) -> Cell:
        sample = run.sample(problem, agent, "reward_ratio")
        if not sample.values:
            return Cell(MISSING)
        least = min(sample.values)
        return Cell(bandits.worst(run.results[problem][agent]), least, f"{sample.source}/{sample.values.index(least)}")

    problems = problems_of(run)
    rows = ((bandits.TITLES.get(a, a), tuple(cell(problem, a) for problem in problems)) for a in agents_of(run))
    title = "The worst run: total reward over the optimum's"
    note = f"{bandits.LOST[:1].upper()}{bandits.LOST[1:]}."
    return Table(f"{run.name}/worst", title, "agent", tuple(problems), tuple(rows), note)


def regrets(run: Finished) -> Table:
    """Regret in percent of Uniform's expected regret: the other normalisation in use."""
    problems = problems_of(run)
    samples = {agent: [run.sample(problem, agent, "regret_ratio") for problem in problems] for agent in agents_of(run)}
    rows = (
        (
            bandits.TITLES.get(agent, agent),
            tuple(_cell(s, f"{percent(s.mean)} ± {percent(s.standard_error)}") for s in found),
        )
        for agent, found in samples.items()
    )
    title = "Regret in % of the expected regret of Uniform, mean ± standard error; lower is better"
    return Table(f"{run.name}/regrets", title, "agent", tuple(problems), tuple(rows))


def regret_curve(run: Finished, problem: str) -> Table:
    """Cumulative regret of every agent at some rounds."""
    agents = [agent for agent in agents_of(run) if agent in run.results[problem]]
    points = run.results[problem][agents[0]]["points"] if agents else []
    step = max(1, len(points) // _REGRET_ROWS)
    places = sorted({*range(step - 1, len(points), step), len(points) - 1}) if points else []

    def cell(agent: str, place: int) -> Cell:
        found = run.results[problem][agent]
        if place >= len(found["points"]):
            return Cell(MISSING)
        mean, sd = found["regret_mean"][place], found["regret_sd"][place]
        source = f"{run.at(problem, agent, 'regret_mean')}/{place}"
        return Cell(f"{significant(mean)} ± {significant(sd)}", mean, source, sd)

    rows = tuple((f"{points[place]:,}", tuple(cell(agent, place) for agent in agents)) for place in places)
    title, columns = (
        f"{problem}: cumulative regret, mean ± standard deviation",
        tuple(bandits.TITLES.get(a, a) for a in agents),
    )
    return Table(f"{run.name}/regret/{problem}", title, "round", columns, rows)
