"""The report: runs what is missing, takes what is finished, and writes one page that needs nothing else to be read."""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bayesadam import __version__
from bayesadam._extras import require
from bayesadam.errors import BayesAdamError, FileError
from experiments import cost, figure1, figure2, table1
from experiments.claims import CLAIMS, EXPERIMENTS, Finished, Judged, Verdict, judged
from experiments.data import data_set, find, locate
from experiments.problems import table_name
from experiments.running import Run, Table

HEADINGS = {
    "figure1": "Figure 1: toy regression",
    "figure2": "Figure 2: pruning by signal-to-noise ratio",
    "table1": "Table 1: contextual bandits",
    "cost": "Costs: time relative to Adam",
}
# The quick version has a folder of its own, so that it never replaces the whole experiment.
QUICK = "quick"
QUICK_SETTINGS: dict[str, Any] = {
    "figure1": figure1.Settings(n_seeds=2, epochs=500),
    "figure2": figure2.Settings("digits", ("badam", "mc-dropout", "bbb", "vadam"), n_seeds=2, epochs=20),
    "table1": table1.Settings(problems=("mushroom", "financial", "statlog", "wheel"), runs=2, rounds=400),
    "cost": cost.Settings("digits", rounds=2),
}
SETTINGS: dict[str, Any] = {
    "figure1": figure1.Settings(),
    "figure2": figure2.Settings(),
    "table1": table1.Settings(agents=table1.OWN_AGENTS, settings="paper"),
    "cost": cost.Settings(),
}


def table_of(run: Finished) -> Table:
    """The table of a run."""
    table: Table = EXPERIMENTS[run.experiment].table(run.results, run.settings)
    return table


@dataclass(frozen=True)
class Report:
    """What the page is made of: runs by experiment, the main one first, and the reason for each one missing."""

    runs: Mapping[str, Sequence[Finished]]
    missing: Mapping[str, str]
    quick: bool = False

    @cached_property
    def claims(self) -> list[Judged]:
        """Every claim, failed ones first, by the first run that measured it; Table 1's by the paper's settings if any.

        A run that is shorter than the paper's comes last.
        """
        verdicts = []
        for claim in CLAIMS:
            runs = sorted(self.runs.get(claim.experiment, ()), key=lambda run: run.own_settings or run.too_short)
            each = (judged(claim, run) for run in runs)
            verdicts.append(next((one for one in each if one.checks), judged(claim, None)))
        return sorted(verdicts, key=lambda one: list(Verdict).index(one.verdict))

    @property
    def every_run(self) -> list[Finished]:
        return [run for experiment in EXPERIMENTS for run in self.runs.get(experiment, ())]

    def plain(self) -> dict[str, Any]:
        runs = [
            {"file": f"{run.name}/metrics.json", "command": run.command, "departures": run.departures}
            for run in self.every_run
        ]
        return {"claims": [one.plain() for one in self.claims], "runs": runs, "missing": dict(self.missing)}

    def page(self) -> str:
        """The whole file, out of the template `report.html`; what is not markup already is escaped."""
        jinja2 = require("jinja2")
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True)
        tools: Any = {"table_of": table_of, "verdicts": list(Verdict), "headings": HEADINGS}
        tools["settings_table"] = table1.settings_table()
        tools["base64"] = lambda content: base64.b64encode(content).decode()
        return str(environment.get_template("report.html").render(report=self, version=__version__, **tools))


def run(*, seed: int, out: Path, quiet: bool, quick: bool, device: str) -> tuple[Path, ...]:
    """The command: `out/figure1` and the like hold the runs, `report.html` is the page.

    The page is written again after each experiment, so that a long reproduction can be read while it runs.
    """
    task = Run("report", seed, out, {"quick": quick}, device=device, quiet=quiet)
    missing: dict[str, str] = {}
    for experiment in EXPERIMENTS:
        if not main_runs(out, experiment, quick):
            folder = out / QUICK / experiment if quick else out / experiment
            try:
                reason = run_missing(experiment, quick, seed=seed, out=folder, quiet=quiet, device=device)
            except BayesAdamError as error:
                reason = f"Could not be run: {error}"
            if reason:
                missing[experiment] = reason
                print(f"experiments: {experiment}:", *reason.split(), file=sys.stderr)
        runs = {name: [*main_runs(out, name, quick)[:1], *further_runs(out, name)] for name in EXPERIMENTS}
        report = Report(runs, missing, quick)
        task.write({"report.html": report.page()})
    if not report.every_run:
        raise BayesAdamError("nothing to report: " + " ".join(f"{name}: {why}" for name, why in missing.items()))
    return task.finish({"report.html": report.page()}, report.plain(), name="report.json")


def main_runs(root: Path, experiment: str, quick: bool) -> list[Finished]:
    """The whole run, then the quick one where wanted."""
    return _complete(root, experiment, [experiment, *([f"{QUICK}/{experiment}"] if quick else [])])


def further_runs(root: Path, experiment: str) -> list[Finished]:
    """Those in folders such as `table1-paper`."""
    return _complete(root, experiment, sorted(path.parent.name for path in root.glob(f"{experiment}-*/metrics.json")))


def _complete(root: Path, experiment: str, names: Sequence[str]) -> list[Finished]:
    runs = [read(root, name, experiment) for name in names if (root / name / "metrics.json").is_file()]
    return [run for run in runs if run.complete]


def read(root: Path, name: str, experiment: str) -> Finished:
    """The run in `root/name`. A `metrics.json` that is damaged is an error."""
    path = root / name / "metrics.json"
    try:
        metrics = json.loads(path.read_bytes())
        command = metrics["command"]
    except (ValueError, KeyError, TypeError):
        raise FileError(f"{path} is not a run's metrics: remove it and run again") from None
    if command != experiment:
        raise FileError(f"{path} is of `{command}`, not {experiment}: move it, or report on another folder")
    pictures = sorted(path.parent.glob("*.png"))
    return Finished(experiment, name, metrics, pictures[0].read_bytes() if pictures else b"")


def run_missing(experiment: str, quick: bool, *, device: str, **common: Any) -> str:
    """Run an experiment; returns which data could not be had."""
    settings = (QUICK_SETTINGS if quick else SETTINGS)[experiment]
    if experiment != "table1":
        on = {"device": device} if experiment == "figure2" else {}
        EXPERIMENTS[experiment].run(**common, **on, settings=settings)
        return ""
    absent = {name: reason for name in settings.problems if (reason := _absence(table_name(name), quick))}
    played = tuple(name for name in settings.problems if name not in absent)
    reasons = " ".join(f"Not played: {name}. {reason}" for name, reason in absent.items())
    if not played:
        raise FileError(reasons)
    table1.run(**common, device=device, settings=replace(settings, problems=played))
    return reasons


def _absence(table: str, quick: bool) -> str:
    """Why a table cannot be had; the quick version downloads nothing."""
    try:
        if quick and len(find(table)) < len(data_set(table)):
            return "It is not on this machine, and the quick version downloads nothing."
        locate(table)
    except FileError as error:
        return f"{error}."
    return ""
