"""Table 1: agents on the bandit problems, with the paper's numbers next to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bayesadam._extras import require
from bayesadam.bandits import AGENTS, PAPER_AGENTS, PROBLEMS, AgentSettings, agent_settings
from bayesadam.bandits.simulation import Playing, Simulation, in_turn
from bayesadam.errors import BayesAdamError, SettingError
from bayesadam.experiments import plots
from bayesadam.experiments.run import Run
from bayesadam.experiments.work import resumed, run_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "badam": "Badam",
    "badam-map": "Badam, map form",
    "mc-dropout": "MC dropout",
    "bbb": "Bayes by Backprop",
    "vadam": "Vadam",
    "greedy": "Greedy",
    "uniform": "Uniform",
    "epsilon-greedy": "ε-greedy",
    "ivon": "IVON",
    "neural-linear": "Neural-linear",
    "linear": "Linear, full posterior",
    "bootstrap": "Bootstrap ensemble",
}
# Mean and standard deviation of total reward over the optimum's, from Table 1 of the paper.
_COLUMNS = ("mushroom", "financial", "jester", "statlog", "adult", "covertype", "census")
PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    agent: dict(zip(_COLUMNS, cells, strict=True))
    for agent, cells in {
        "badam": ((0.74, 0.09), (0.74, 0.03), (0.48, 0.01), (0.97, 0.02), (0.13, 0.01), (0.58, 0.01), (0.36, 0.06)),
        "mc-dropout": (
            (0.68, 0.11),
            (0.68, 0.02),
            (0.48, 0.01),
            (0.96, 0.02),
            (0.13, 0.01),
            (0.57, 0.01),
            (0.44, 0.03),
        ),
        "bbb": ((0.60, 0.15), (0.21, 0.13), (0.46, 0.02), (0.71, 0.17), (0.10, 0.04), (0.39, 0.06), (0.38, 0.02)),
        "vadam": ((0.76, 0.03), (0.81, 0.00), (0.48, 0.01), (0.99, 0.00), (0.26, 0.02), (0.74, 0.01), (0.65, 0.00)),
        "greedy": ((0.64, 0.18), (0.86, 0.03), (0.50, 0.01), (0.97, 0.03), (0.16, 0.01), (0.62, 0.03), (0.44, 0.02)),
        "uniform": ((-0.93, 0.09), (-0.01, 0.01), (0.34, 0.00), (0.14, 0.00), (0.07, 0.00), (0.14, 0.00), (0.11, 0.00)),
    }.items()
}
ENGINES = ("local", "ray")
# Cells under way at any time: one has both cores of a small machine to itself, but leaves a GPU idle.
_AT_ONCE = {"cpu": 1, "cuda": 8}


@dataclass(frozen=True)
class BanditSettings:
    """What the table depends on besides the seed: its columns, its rows, and the runs of each cell.

    Attributes:
        rounds: of each run; None for as many as the problem says.
        settings: `"tuned"` or `"paper"`.
        changes: to single ones of them, by name, for every agent that has them.
    """

    problems: tuple[str, ...] = _COLUMNS[:6]
    agents: tuple[str, ...] = PAPER_AGENTS
    runs: int = 10
    rounds: int | None = None
    settings: str = "tuned"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.problems if name.partition(":")[0] not in PROBLEMS]
        if unknown or not self.problems:
            raise SettingError(f"problems must be among {', '.join(PROBLEMS)}; got {', '.join(unknown) or 'none'}")
        unknown = [name for name in self.agents if name not in AGENTS]
        if unknown or not self.agents:
            raise SettingError(f"agents must be among {', '.join(AGENTS)}; got {', '.join(unknown) or 'none'}")
        known = {name for agent in self.agents for name in agent_settings(agent, self.settings).names()}
        unknown = sorted(set(self.changes) - known)
        if unknown:
            raise SettingError(
                f"no agent here has the setting {', '.join(unknown)}: choose from {', '.join(sorted(known))}"
            )
        for agent in self.agents:
            self.of(agent)

    def of(self, agent: str) -> AgentSettings:
        """The settings of an agent, with those changes that concern it."""
        own = agent_settings(agent, self.settings)
        return replace(own, **{name: value for name, value in self.changes.items() if name in own.names()})

    def cells(self) -> list[str]:
        """`problem/agent`, column by column."""
        return [f"{problem}/{agent}" for problem in self.problems for agent in self.agents]

    def described(self) -> str:
        """The settings' name, and what was changed in them."""
        changed = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return f"`{self.settings}`" + (f" with {changed}" if changed else "")


Cell = dict[str, Any]


def start(name: str, *, seed: int, settings: BanditSettings, device: str, folder: Path | None) -> Playing:
    """One cell under way; with a folder, its state goes there so that a killed one resumes."""
    problem, _, agent = name.partition("/")
    checkpoint = None if folder is None else folder / f"{name.replace('/', '-').replace(':', '-')}.safetensors"
    return Playing(
        problem,
        agent,
        runs=settings.runs,
        rounds=settings.rounds,
        seed=seed,
        device=device,
        settings=settings.of(agent),
        checkpoint=checkpoint,
    )


def plain(found: Simulation) -> Cell:
    """A finished cell as plain data."""
    runs = len(found.reward_ratio)
    return {
        "reward_ratio": found.reward_ratio.tolist(),
        "regret_ratio": found.regret_ratio.tolist(),
        "rounds": found.rounds,
        "seconds": round(found.seconds, 3),
        "points": found.points.tolist(),
        "regret_mean": [float(f"{value:.6g}") for value in found.regret.mean(axis=0)],
        "regret_sd": [float(f"{value:.6g}") for value in found.regret.std(axis=0, ddof=min(1, runs - 1))],
    }


def _locally(names: Sequence[str], begin: Callable[[str], Playing], at_once: int) -> Iterator[tuple[str, Cell]]:
    for number, found in in_turn([partial(begin, name) for name in names], at_once):
        yield names[number], plain(found)


def _on_ray(names: Sequence[str], begin: Callable[[str], Playing], device: str) -> Iterator[tuple[str, Cell]]:
    """One task per cell on the Ray cluster that this process belongs to, or on one of this machine."""
    ray: Any = require("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False)
    try:
        share = 1 / _AT_ONCE[device] if device == "cuda" else 0
        task = ray.remote(num_gpus=share)(lambda name: list(_locally([name], begin, 1)))
        left = [task.remote(name) for name in names]
        while left:
            done, left = ray.wait(left)
            try:
                found = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                # Its message is the worker's whole traceback.
                raise (error.cause if isinstance(error.cause, BayesAdamError) else error) from None
            yield from found
    finally:
        if started:
            ray.shutdown()


def by_problem(cells: Mapping[str, Cell]) -> dict[str, dict[str, Cell]]:
    """`problem/agent` as `results[problem][agent]`."""
    found: dict[str, dict[str, Cell]] = {}
    for name, cell in cells.items():
        problem, _, agent = name.partition("/")
        found.setdefault(problem, {})[agent] = cell
    return found


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(variance)


def _short(mean: float, sd: float) -> str:
    return f"{mean:.3f}±{sd:.3f}".replace("0.", ".")


def markdown(cells: Mapping[str, Cell], settings: BanditSettings) -> str:
    """Reward over the optimum's, ours above the paper's, the best of each column and source in bold; then regret."""
    found = by_problem(cells)
    head = ["| | " + " | ".join(settings.problems) + " |", "|---" * (len(settings.problems) + 1) + "|"]
    ours = {p: {a: _moments(cell["reward_ratio"]) for a, cell in agents.items()} for p, agents in found.items()}
    best = {p: max(value[0] for value in agents.values()) for p, agents in ours.items()}
    published = {p: max(rows[p][0] for rows in PAPER.values()) for p in settings.problems if p in _COLUMNS}
    lines = []
    for agent in settings.agents:
        row = [
            _bold(_short(*ours[p][agent]), ours[p][agent][0] == best[p]) if agent in ours.get(p, {}) else ""
            for p in settings.problems
        ]
        lines.append(f"| {TITLES.get(agent, agent)} | " + " | ".join(row) + " |")
        if agent in PAPER:
            theirs = [
                _bold(_short(*PAPER[agent][p]), PAPER[agent][p][0] == published[p]) if p in _COLUMNS else ""
                for p in settings.problems
            ]
            lines.append("| *in the paper* | " + " | ".join(theirs) + " |")
    regret = []
    for agent in settings.agents:
        shares = [
            _moments(found[p][agent]["regret_ratio"]) if agent in found.get(p, {}) else None for p in settings.problems
        ]
        regret.append(
            f"| {TITLES.get(agent, agent)} | "
            + " | ".join("" if s is None else f"{100 * s[0]:.2f}±{100 * s[1]:.2f}" for s in shares)
            + " |"
        )
    return "\n".join(
        [
            f"Total reward over the optimum's, mean ± standard deviation of {settings.runs} runs, settings {settings.described()}.",
            "",
            *head,
            *lines,
            "",
            "Regret in % of Uniform's expected regret.",
            "",
            *head,
            *regret,
            "",
        ]
    )


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def table(cells: Mapping[str, Cell], settings: BanditSettings) -> Table:
    """Mean reward over the optimum's, with the paper's in brackets."""
    view = Table(title="Total reward over the optimum's (the paper's in brackets)", title_justify="left")
    view.add_column("agent")
    for problem in settings.problems:
        view.add_column(problem, justify="right")
    found = by_problem(cells)
    for agent in settings.agents:
        row = []
        for problem in settings.problems:
            mean = _moments(found[problem][agent]["reward_ratio"])[0]
            paper = PAPER.get(agent, {}).get(problem)
            row.append(f"{mean:.3f}" + ("" if paper is None else f" ({paper[0]:.2f})"))
        view.add_row(TITLES.get(agent, agent), *row)
    return view


def picture(cells: Mapping[str, Cell], settings: BanditSettings) -> Figure:
    """Cumulative regret, mean and one standard deviation over the runs, one panel per problem."""
    found = by_problem(cells)
    columns = min(3, len(settings.problems))
    rows = -(-len(settings.problems) // columns)
    with plots.house_style():
        figure = plots.new_figure(4.2 * columns + 1.6, 3.2 * rows + 0.4)
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, problem in zip(panels.flat, settings.problems, strict=False):
            for agent in settings.agents:
                cell = found[problem][agent]
                pairs = list(zip(cell["regret_mean"], cell["regret_sd"], strict=True))
                shade = plots.colour(agent)
                axes.plot(
                    cell["points"], cell["regret_mean"], color=shade, linewidth=1.4, label=TITLES.get(agent, agent)
                )
                low, high = [m - s for m, s in pairs], [m + s for m, s in pairs]
                axes.fill_between(cell["points"], low, high, color=shade, alpha=0.15, linewidth=0)
            axes.set(title=problem, xlabel="rounds", ylabel="cumulative regret")
        for axes in panels.flat[len(settings.problems) :]:
            axes.set_axis_off()
        panels.flat[columns - 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        title = f"Regret, mean and one standard deviation of {settings.runs} runs"
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def run_bandits(
    *, seed: int, out: Path, quiet: bool, settings: BanditSettings, device: str, engine: str = "local"
) -> tuple[Path, ...]:
    """The `bandits` command: results go to `metrics.json` as they arrive."""
    if engine not in ENGINES:
        raise SettingError(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    run = Run("bandits", seed, out, asdict(settings), device=device, quiet=quiet)
    run.prepare()
    run, ledger = resumed(run, "problems", "agents")
    names = settings.cells()
    unfinished = out / "unfinished"
    begin = partial(
        start, seed=seed, settings=settings, device=device, folder=unfinished.resolve() if engine == "local" else None
    )
    if engine == "local":
        unfinished.mkdir(exist_ok=True)
        work = partial(_locally, begin=begin, at_once=_AT_ONCE[device])
    else:
        work = partial(_on_ray, begin=begin, device=device)
    done = run_parts(
        run, ledger, names, work, groups=lambda left: [left], on_part=lambda done: run.so_far(by_problem(done))
    )
    ordered = {name: done[name] for name in names}
    run.show(table(ordered, settings))
    text = markdown(ordered, settings)
    paths = run.finish(
        {
            "table1.md": lambda path: path.write_text(text, encoding="utf-8"),
            "regret.png": plots.png(picture(ordered, settings)),
        },
        by_problem(ordered),
    )
    ledger.close()
    for state in unfinished.glob("*.safetensors"):
        state.unlink()
    if unfinished.is_dir() and not any(unfinished.iterdir()):
        unfinished.rmdir()
    return paths
