"""The report: runs what is missing, takes what is finished, and writes one page that needs nothing else to be read."""

import base64
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam._version import __version__
from bayesadam.bandits.problems import table_name
from bayesadam.commands.running import Run, Table
from bayesadam.data import data_set, find, locate
from bayesadam.errors import BayesAdamError, DataError
from bayesadam.paper import bandits, cost, pruning, regression
from bayesadam.paper.bandits import BanditSettings, run_bandits
from bayesadam.paper.claims import CLAIMS, EXPERIMENTS, Finished, Judged, Verdict, judged, read
from bayesadam.paper.cost import CostSettings, run_cost
from bayesadam.paper.pruning import PruningSettings, run_pruning
from bayesadam.paper.regression import RegressionSettings, run_regression

HEADINGS = {
    "regression": "Figure 1: toy regression",
    "pruning": "Figure 2: pruning by signal-to-noise ratio",
    "bandits": "Table 1: contextual bandits",
    "cost": "Costs: time relative to Adam",
}
# The quick version has a folder of its own, so that it never replaces the whole experiment.
QUICK = "quick"
QUICK_REGRESSION = RegressionSettings(n_seeds=2, epochs=500)
QUICK_PRUNING = PruningSettings(data="digits", methods=pruning.PAPER, n_seeds=2, epochs=20)
QUICK_BANDITS = BanditSettings(problems=("mushroom", "financial", "statlog", "wheel"), runs=2, rounds=400)
QUICK_COST = CostSettings(data="digits", rounds=2)


def table_of(run: Finished) -> Table:
    """The table of a run."""
    modules: Any = {"regression": regression, "pruning": pruning, "bandits": bandits, "cost": cost}
    found: Table = modules[run.experiment].table(run.results, run.settings)
    return found


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
        found = []
        for claim in CLAIMS:
            runs = sorted(self.runs.get(claim.experiment, ()), key=lambda run: run.own_settings or run.too_short)
            each = (judged(claim, run) for run in runs)
            found.append(next((one for one in each if one.checks), judged(claim, None)))
        return sorted(found, key=lambda one: list(Verdict).index(one.verdict))

    @property
    def every_run(self) -> list[Finished]:
        """In the page's order."""
        return [run for experiment in EXPERIMENTS for run in self.runs.get(experiment, ())]

    def plain(self) -> dict[str, Any]:
        """Claims, checks and runs, for `report.json`."""
        runs = [
            {"file": f"{run.name}/metrics.json", "command": run.command, "departures": run.departures}
            for run in self.every_run
        ]
        return {"claims": [one.plain() for one in self.claims], "runs": runs, "missing": dict(self.missing)}

    def page(self) -> str:
        """The whole file, out of the template `report.html`; what is not markup already is escaped."""
        jinja2 = require("jinja2")
        given: Any = {"loader": jinja2.PackageLoader(__package__, "."), "undefined": jinja2.StrictUndefined}
        environment = jinja2.Environment(**given, autoescape=True, keep_trailing_newline=True)
        tools: Any = {"table_of": table_of, "verdicts": list(Verdict), "headings": HEADINGS}
        tools["settings_table"] = bandits.settings_table()
        tools["base64"] = lambda content: base64.b64encode(content).decode()
        return str(environment.get_template("report.html").render(report=self, version=__version__, **tools))


def run_report(*, seed: int, out: Path, quiet: bool, quick: bool, device: str) -> tuple[Path, ...]:
    """The `report` command: `out/regression` and the like hold the runs, `report.html` is the page.

    The page is written again after each experiment, so that a long reproduction can be read while it runs.
    """
    require("jinja2")
    run = Run("report", seed, out, {"quick": quick}, device=device, quiet=quiet)
    with run.prepared():
        missing: dict[str, str] = {}
        for experiment in EXPERIMENTS:
            if not any(run.name.endswith(experiment) for run in present(out, experiment, quick)):
                folder = out / QUICK / experiment if quick else out / experiment
                given: Any = {"seed": seed, "out": folder, "quiet": quiet, "device": device}
                try:
                    reason = run_missing(experiment, quick, **given)
                except BayesAdamError as error:
                    reason = f"Could not be run: {error}"
                if reason:
                    missing[experiment] = reason
                    print("bayesadam:", f"{experiment}:", *reason.split(), file=sys.stderr)
            report = Report({name: present(out, name, quick) for name in EXPERIMENTS}, missing, quick)
            run.write({"report.html": report.page()})
        if not report.every_run:
            raise BayesAdamError("nothing to report: " + " ".join(f"{name}: {why}" for name, why in missing.items()))
        return run.finish({"report.html": report.page()}, report.plain(), name="report.json")


def present(root: Path, experiment: str, quick: bool) -> list[Finished]:
    """The main run first, or the quick one where wanted, then those in folders such as `bandits-paper`."""
    further = sorted(path.parent.name for path in root.glob(f"{experiment}-*/metrics.json"))
    main = [experiment, *([f"{QUICK}/{experiment}"] if quick else [])]
    first, rest = ([read(root, name, experiment) for name in names] for names in (main, further))
    whole = [[run for run in runs if run is not None and run.complete] for runs in (first, rest)]
    return whole[0][:1] + whole[1]


def run_missing(experiment: str, quick: bool, *, device: str, **given: Any) -> str:
    """Run an experiment; returns which data could not be had."""
    if experiment == "regression":
        run_regression(**given, settings=QUICK_REGRESSION if quick else RegressionSettings())
        return ""
    if experiment == "pruning":
        run_pruning(**given, settings=QUICK_PRUNING if quick else PruningSettings(), device=device)
        return ""
    if experiment == "cost":
        run_cost(**given, settings=QUICK_COST if quick else CostSettings())
        return ""
    settings = QUICK_BANDITS if quick else BanditSettings(agents=bandits.OWN_AGENTS, settings="paper")
    absent = {}
    for name in settings.problems:
        # The quick version fetches nothing.
        table = table_name(name)
        if quick and len(find(table)) < len(data_set(table).files):
            absent[name] = f"It is not on this machine: `bayesadam data fetch {table}`."
        else:
            try:
                locate(table)
            except DataError as error:
                absent[name] = f"{error}."
    there = tuple(name for name in settings.problems if name not in absent)
    told = " ".join(f"Not played: {name}. {reason}" for name, reason in absent.items())
    if not there:
        raise DataError(told)
    run_bandits(**given, settings=replace(settings, problems=there), device=device)
    return told
