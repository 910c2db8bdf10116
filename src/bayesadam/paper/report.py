"""The report: runs what is missing, takes what is finished, and writes one page that needs nothing else to be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from bayesadam._files import replacing
from bayesadam.data import data_set, find, locate
from bayesadam.errors import BayesAdamError, DataError, SettingError
from bayesadam.paper.bandits import PAPER as PAPERS_TABLE
from bayesadam.paper.bandits import BanditSettings, run_bandits
from bayesadam.paper.pruning import PAPER as PAPERS_METHODS
from bayesadam.paper.pruning import PruningSettings, run_pruning
from bayesadam.paper.regression import RegressionSettings, run_regression
from bayesadam.paper.reporting.page import Report, page
from bayesadam.paper.reporting.runs import EXPERIMENTS, Finished, others, read
from bayesadam.paper.run import Run, require_known, text

# The quick version's own folder, so that it never stands where the whole experiment would.
QUICK = "quick"
QUICK_PRUNING = PruningSettings(data="digits", methods=PAPERS_METHODS, n_seeds=2, epochs=20)
QUICK_BANDITS = BanditSettings(runs=2, rounds=400)
QUICK_PROBLEMS = ("mushroom", "financial", "statlog", "wheel")
# Fetched by name alone, being a third of a gigabyte.
_ONLY_WHERE_PRESENT = ("census",)


@dataclass(frozen=True)
class ReportSettings:
    """What to run where it is missing; finished experiments are shown in any case.

    The quick version has few epochs, seeds and rounds, on embedded data and what lies on this machine. The bandits'
    settings are `"tuned"` or `"paper"`; None for tuned, or for those of a run that is there.
    """

    only: tuple[str, ...] = EXPERIMENTS
    quick: bool = False
    settings: str | None = None

    def __post_init__(self) -> None:
        require_known("--only", self.only, EXPERIMENTS)
        if self.settings is not None:
            replace(QUICK_BANDITS, settings=self.settings)


@dataclass(frozen=True)
class _Work:
    """What every experiment's run needs."""

    root: Path
    seed: int
    device: str
    jobs: int
    quiet: bool
    asked: ReportSettings

    def folder(self, experiment: str) -> str:
        """Where a missing run goes, below the report's folder."""
        return f"{QUICK}/{experiment}" if self.asked.quick else experiment

    def given(self, folder: str) -> dict[str, Any]:
        """What every experiment is given, to be run in that folder."""
        return {"seed": self.seed, "out": self.root / folder, "quiet": self.quiet}


def run_report(
    *, seed: int, out: Path, quiet: bool, settings: ReportSettings, device: str, jobs: int = 2
) -> tuple[Path, ...]:
    """The `report` command: `out/regression`, `out/pruning` and `out/bandits` hold the runs, `out/report.html` the page.

    The page is written again after each experiment, so that a long reproduction can be read while it runs.
    """
    run = Run("report", seed, out, asdict(settings), device=device, quiet=quiet)
    with run.prepared():
        work = _Work(out, seed, device, jobs, quiet, settings)
        runs = {experiment: _present(work, experiment) for experiment in EXPERIMENTS}
        missing: dict[str, str] = {}

        def report() -> Report:
            return Report(dict(runs), dict(missing), settings.quick, f"{date.today().day} {date.today():%B %Y}")

        for experiment in EXPERIMENTS:
            if any(found.name in (experiment, f"{QUICK}/{experiment}") for found in runs[experiment]):
                continue
            if experiment not in settings.only:
                missing[experiment] = f"Not run: the report was asked for {', '.join(settings.only)} alone."
                continue
            try:
                reason = _MISSING[experiment](work)
            except BayesAdamError as error:
                reason = f"Could not be run: {error}"
            if reason:
                missing[experiment] = reason
                print("bayesadam:", f"{experiment}:", *reason.split(), file=sys.stderr)
            runs[experiment] = _present(work, experiment)
            with replacing(out / "report.html") as temporary:
                text(page(report()))(temporary)
        whole = report()
        if not whole.every_run:
            raise BayesAdamError("nothing to report: " + " ".join(f"{name}: {why}" for name, why in missing.items()))
        return run.finish({"report.html": text(page(whole))}, whole.plain(), name="report.json")


def _present(work: _Work, experiment: str) -> list[Finished]:
    """The finished run first, the quick one where that is asked for and there is no other, then further runs."""
    names = [experiment, f"{QUICK}/{experiment}"] if work.asked.quick else [experiment]
    found = (read(work.root, name, experiment) for name in names)
    first = next((run for run in found if run is not None and run.complete), None)
    if first is not None and experiment == "bandits":
        _require_settings(work, first)
    further = others(work.root, experiment)
    return further if first is None else [first, *further]


def _require_settings(work: _Work, run: Finished) -> None:
    asked = work.asked.settings
    if asked is not None and run.settings["settings"] != asked:
        raise SettingError(
            f"{work.root / run.name} was run with --settings {run.settings['settings']}, not {asked}: "
            "leave the option out to take it as it is, or report on another folder"
        )


def _regression(work: _Work) -> str:
    settings = RegressionSettings().quick() if work.asked.quick else RegressionSettings()
    run_regression(**work.given(work.folder("regression")), settings=settings, jobs=work.jobs)
    return ""


def _pruning(work: _Work) -> str:
    settings, folder = (QUICK_PRUNING if work.asked.quick else PruningSettings()), work.folder("pruning")
    reason = "" if work.asked.quick else _unavailable(settings.data, progress=not work.quiet)
    if reason:
        instead = data_set(settings.data).instead
        settings, folder = replace(settings, data=instead), f"pruning-{instead}"
        reason = f"MNIST could not be had, so Figure 2 itself was not run; the embedded set {instead} stands below under its own name. {reason}"
    jobs = work.jobs if work.device == "cpu" else 1
    run_pruning(**work.given(folder), settings=settings, device=work.device, jobs=jobs)
    return reason


def _bandits(work: _Work) -> str:
    folder = work.folder("bandits")
    begun = read(work.root, folder, "bandits")
    if begun is not None:
        # Killed before its last cell: it resumes with the settings it had.
        _require_settings(work, begun)
        asked: Any = {n: tuple(value) if isinstance(value, list) else value for n, value in begun.settings.items()}
        given = {**work.given(folder), "seed": begun.metrics.get("seed", work.seed)}
        run_bandits(**given, settings=BanditSettings(**asked), device=work.device)
        return ""
    settings = QUICK_BANDITS if work.asked.quick else BanditSettings()
    settings = replace(settings, settings=work.asked.settings or settings.settings)
    wanted = QUICK_PROBLEMS if work.asked.quick else tuple(PAPERS_TABLE["badam"])
    reasons = {name: _lacking(name, work) for name in wanted}
    there = tuple(name for name in wanted if not reasons[name])
    settings, given = replace(settings, problems=there or ("wheel",)), work.given(folder if there else "bandits-wheel")
    run_bandits(**given, settings=settings, device=work.device)
    lead = "" if there else "No column of the table could be had; the embedded wheel stands below under its own name. "
    return lead + " ".join(f"Not played: {name}. {reason}" for name, reason in reasons.items() if reason)


def _lacking(name: str, work: _Work) -> str:
    """Why a problem cannot be played; nothing where it can."""
    record = data_set(name)
    if record.embedded:
        return ""
    if (work.asked.quick or name in _ONLY_WHERE_PRESENT) and len(find(name)) < len(record.files):
        return f"It is not on this machine: `bayesadam data fetch {name}`."
    return _unavailable(name, progress=not work.quiet)


def _unavailable(name: str, *, progress: bool) -> str:
    """Why a data set cannot be had; nothing where it can, and then it is on this machine."""
    try:
        locate(name, progress=progress)
    except DataError as error:
        return f"{error}."
    return ""


_MISSING: dict[str, Callable[[_Work], str]] = {"regression": _regression, "pruning": _pruning, "bandits": _bandits}
