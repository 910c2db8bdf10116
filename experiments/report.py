"""The report: runs what is missing, takes what is finished, and writes one page that needs nothing else to be read."""

import base64
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bayesadam import __version__
from bayesadam._extras import require
from bayesadam.errors import BayesAdamError, FileError
from experiments import cost, figure1, figure2, table1
from experiments.data import data_set, find, locate
from experiments.problems import table_name
from experiments.running import Run, Table

EXPERIMENTS: Mapping[str, Any] = {"figure1": figure1, "figure2": figure2, "table1": table1, "cost": cost}
HEADINGS = {"figure1": "Figure 1: toy regression", "figure2": "Figure 2: pruning by signal-to-noise ratio"}
HEADINGS |= {"table1": "Table 1: contextual bandits", "cost": "Costs: time relative to Adam"}
# The quick version has a folder of its own, so that it never replaces the whole experiment.
QUICK = "quick"
QUICK_SETTINGS: dict[str, Any] = {
    "figure1": figure1.Settings(n_seeds=2, epochs=500),
    "figure2": figure2.Settings("digits", ("badam", "mc-dropout", "bbb", "vadam"), n_seeds=2, epochs=20),
    "table1": table1.Settings(problems=("mushroom", "financial", "statlog", "wheel"), runs=2, rounds=400),
    "cost": cost.Settings("digits", rounds=2),
}
SETTINGS: dict[str, Any] = {name: experiment.Settings() for name, experiment in EXPERIMENTS.items()}
SETTINGS["table1"] = table1.Settings(agents=table1.OWN_AGENTS, settings="paper")


@dataclass(frozen=True, eq=False)
class Finished:
    """One run's `metrics.json`, its picture, and its folder's name below the report's."""

    experiment: str
    name: str
    metrics: Mapping[str, Any]
    picture: bytes = b""

    @property
    def table(self) -> Table:
        of: Callable[[Any, Any], Table] = EXPERIMENTS[self.experiment].table
        return of(self.metrics["results"], self.metrics["settings"])

    @property
    def complete(self) -> bool:
        """Whether every requested part is there; Table 1 writes its cells as they come."""
        problems, agents = (self.metrics["settings"].get(name, ()) for name in ("problems", "agents"))
        return all(agent in self.metrics["results"].get(problem, {}) for problem in problems for agent in agents)

    @property
    def command(self) -> str:
        """What repeats the run: every setting that differs from its default, as an option."""
        words = ["python", "-m", "experiments", self.experiment, "--seed", str(self.metrics.get("seed", 0))]
        for name, usual in vars(EXPERIMENTS[self.experiment].Settings()).items():
            value = self.metrics["settings"].get(name, usual)
            if value not in (usual, list(usual) if isinstance(usual, tuple) else usual):
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words += [f"--{name.removeprefix('n_')}", text]
        if self.experiment in ("figure2", "table1"):
            words += ["--device", self.metrics.get("device", "cpu")]
        return shlex.join(words)


def page(runs: Mapping[str, Sequence[Finished]], missing: Mapping[str, str], quick: bool) -> str:
    """The whole file, out of the template `report.html`, escaped; `missing` has why an experiment lacks something."""
    jinja2 = require("jinja2")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True)
    told: Any = {"runs": runs, "missing": missing, "quick": quick, "headings": HEADINGS, "version": __version__}
    told["base64"] = lambda content: base64.b64encode(content).decode()
    return str(environment.get_template("report.html").render(**told))


def run(*, seed: int, out: Path, quiet: bool, quick: bool, device: str) -> tuple[Path, ...]:
    """The command: `out/figure1` and the like hold the runs, `report.html` is the page.

    The page is written again after each experiment, so that a long reproduction can be read while it runs.
    """
    task = Run("report", seed, out, {"quick": quick}, device=device, quiet=quiet)
    missing: dict[str, str] = {}
    runs: dict[str, list[Finished]] = {}
    for experiment in EXPERIMENTS:
        if not any(one.name.endswith(experiment) for one in finished(out, experiment, quick)):
            folder = out / QUICK / experiment if quick else out / experiment
            try:
                reason = run_missing(experiment, quick, seed=seed, out=folder, quiet=quiet, device=device)
            except BayesAdamError as error:
                reason = f"Could not be run: {error}"
            if reason:
                missing[experiment] = reason
                print(f"experiments: {experiment}:", *reason.split(), file=sys.stderr)
        runs = {name: finished(out, name, quick) for name in EXPERIMENTS}
        task.write({"report.html": page(runs, missing, quick)})
    if not any(runs.values()):
        raise BayesAdamError("nothing to report: " + " ".join(f"{name}: {why}" for name, why in missing.items()))
    told = [{"file": f"{one.name}/metrics.json", "command": one.command} for of in runs.values() for one in of]
    return task.finish(
        {"report.html": page(runs, missing, quick)}, {"runs": told, "missing": missing}, name="report.json"
    )


def finished(root: Path, experiment: str, quick: bool) -> list[Finished]:
    """The complete runs: the whole one or, where wanted, the quick one, then those in folders as `table1-paper`."""
    main = [experiment, *([f"{QUICK}/{experiment}"] if quick else [])]
    further = sorted(path.parent.name for path in root.glob(f"{experiment}-*/metrics.json"))
    first, rest = ([run for name in names if (run := read(root, name, experiment))] for names in (main, further))
    return first[:1] + rest


def read(root: Path, name: str, experiment: str) -> Finished | None:
    """The complete run in `root/name`, or None."""
    path = root / name / "metrics.json"
    if not path.is_file():
        return None
    try:
        metrics = json.loads(path.read_bytes())
        command = metrics["command"]
    except (ValueError, KeyError, TypeError):
        raise FileError(f"{path} is not a run's metrics: remove it and run again") from None
    if command != experiment:
        raise FileError(f"{path} is of `{command}`, not {experiment}: move it, or report on another folder")
    picture = next((picture.read_bytes() for picture in sorted(path.parent.glob("*.png"))), b"")
    run = Finished(experiment, name, metrics, picture)
    return run if run.complete else None


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
