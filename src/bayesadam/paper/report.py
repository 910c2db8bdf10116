"""The report: runs what is missing, takes what is finished, and writes one page that needs nothing else to be read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.commands import plots
from bayesadam.commands.running import Run, Table, text
from bayesadam.data import data_set, find, locate
from bayesadam.errors import BayesAdamError, DataError, SettingError
from bayesadam.paper import bandits, pruning, regression
from bayesadam.paper.bandits import BanditSettings, run_bandits
from bayesadam.paper.claims import CLAIMS, EXPERIMENTS, Finished, Judged, Verdict, judged, read, settings_note
from bayesadam.paper.pruning import PruningSettings, run_pruning
from bayesadam.paper.regression import RegressionSettings, run_regression

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = {
    "regression": "Figure 1: toy regression",
    "pruning": "Figure 2: pruning by signal-to-noise ratio",
    "bandits": "Table 1: contextual bandits",
}
# The quick version has a folder of its own, so that it never replaces the whole experiment.
QUICK = "quick"
QUICK_PRUNING = PruningSettings(data="digits", methods=pruning.PAPER, n_seeds=2, epochs=20)
QUICK_BANDITS = BanditSettings(runs=2, rounds=400)
QUICK_PROBLEMS = ("mushroom", "financial", "statlog", "wheel")
WIDTH, HEIGHT = 360, 270
# The page's style sheet gives these colours, for light and dark.
_VARIABLES = {plots.INK: "--ink", plots.MUTED: "--soft", plots.FAINT: "--rule", "#ffffff": "--paper"}
_SVG_STYLE = {"svg.fonttype": "none", "text.parse_math": False, "figure.dpi": 72, "font.size": 10, "axes.labelsize": 10}


# --- tables and figures -----------------------------------------------------------------------------------------------


def tables_of(run: Finished) -> list[Table]:
    """Every table of a run."""
    if run.experiment == "regression":
        return [regression.table(run.results, run.settings["n_seeds"])]
    if run.experiment == "pruning":
        return [pruning.table(curves_of(run), run.settings["n_seeds"])]
    return bandits.tables(run.results, run.settings)


def curves_of(run: Finished) -> list[pruning.Curve]:
    """The accuracies of a run of Figure 2."""
    found = [(method, ranking, one) for method, each in run.results.items() for ranking, one in each.items()]
    return [pruning.Curve(method, ranking, one["accuracy"], one["fractions"]) for method, ranking, one in found]


class Chart(NamedTuple):
    """An SVG of `WIDTH` × `HEIGHT` in the page's colours, its title, and its lines: colour, style in CSS, name."""

    title: str
    body: Markup
    legend: list[tuple[str, str, str]]


def charts_of(run: Finished) -> list[Chart]:
    """The run's figure, one chart a panel."""
    panels: dict[str, Callable[[Axes], None]]
    if run.experiment == "regression":
        shared: Any = {"curves": run.curves, "gap": bool(run.settings.get("gap"))}
        drawn = run.results if run.curves is not None else ()
        panels = {method: partial(regression.panel, method=method, **shared) for method in drawn}
    elif run.experiment == "pruning":
        curves = curves_of(run)
        panels = {name: partial(pruning.panel, curves=curves, error=name == "error") for name in ("accuracy", "error")}
    else:
        panels = {problem: partial(bandits.panel, problem=problem, agents=c) for problem, c in run.results.items()}
    return [_chart(f"{run.name}, {title}", draw) for title, draw in panels.items()]


def _chart(title: str, draw: Callable[[Axes], None]) -> Chart:
    """What `draw` puts on axes, drawn by matplotlib; ids inside differ by the title."""
    buffer = StringIO()
    with plots.house_style({**_SVG_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # Without what only a file of its own needs.
    svg = re.sub(r".*?</defs>", "", buffer.getvalue(), count=1, flags=re.DOTALL).removesuffix("</svg>\n")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"\s*font-family: [^;]*;", "", svg)
    svg = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for shade, variable in _VARIABLES.items():
        svg = svg.replace(f": {shade.lower()}", f": var({variable})")
    styles = {"--": "dashed", ":": "dotted", "None": "dotted"}
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    legend = [(str(x.get_color()), styles.get(str(x.get_linestyle()), "solid"), str(x.get_label())) for x in lines]
    return Chart(title, Markup(svg), legend)


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What the page is made of: runs by experiment, the main one first, and the reason for each one missing."""

    runs: Mapping[str, Sequence[Finished]]
    missing: Mapping[str, str]
    quick: bool = False

    @cached_property
    def claims(self) -> tuple[Judged, ...]:
        """Every claim, failed ones first, by its main run; Table 1's also by that with the paper's settings."""
        main = {experiment: next(iter(runs), None) for experiment, runs in self.runs.items()}
        found = [judged(claim, main.get(claim.experiment), self.papers_own) for claim in CLAIMS]
        return tuple(sorted(found, key=lambda one: list(Verdict).index(one.verdict)))

    @property
    def papers_own(self) -> Finished | None:
        """Table 1's run with the settings that the paper states, and no others."""
        played = self.runs.get("bandits", ())
        return next((run for run in played if not run.own_settings and not run.settings.get("changes")), None)

    @property
    def every_run(self) -> list[Finished]:
        """In the page's order."""
        return [run for experiment in EXPERIMENTS for run in self.runs.get(experiment, ())]

    def further_claims(self, run: Finished) -> list[Judged]:
        """What a run beside the main one says; none for the main one."""
        if run is self.runs[run.experiment][0]:
            return []
        return [judged(claim, run) for claim in CLAIMS if claim.experiment == run.experiment]

    def plain(self) -> dict[str, Any]:
        """Claims, checks with the position of their numbers, and runs, for `report.json`."""
        runs = [
            {
                "file": run.file,
                "sha256": run.sha256,
                **{name: run.metrics.get(name) for name in ("device", "seconds", "seed", "version")},
                "settings": dict(run.settings),
                "departures": run.departures,
                "claims": [one.plain() for one in self.further_claims(run)],
            }
            for run in self.every_run
        ]
        return {"claims": [one.plain() for one in self.claims], "runs": runs, "missing": dict(self.missing)}


def page(report: Report) -> str:
    """The whole file, out of the template `report.html`; what is not markup already is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    tools: Any = {"tables_of": tables_of, "charts_of": charts_of, "command_of": command_of}
    tools |= {"settings_note": settings_note, "verdicts": list(Verdict), "headings": HEADINGS}
    size = {"width": WIDTH, "height": HEIGHT}
    return environment.get_template("report.html").render(report=report, version=__version__, **tools, **size)


def command_of(run: Finished) -> str:
    """The command that does this run again."""
    asked = {name.removeprefix("n_"): value for name, value in run.settings.items()}
    taken = ("data", "methods", "epochs", "seeds", "problems", "agents", "runs", "rounds", "settings")
    given = {name: asked[name] for name in taken if asked.get(name) is not None}
    words = [f"--{name} {','.join(map(str, v)) if isinstance(v, list) else v}" for name, v in given.items()]
    words += [f"--{name}" for name in ("gap", "sparse") if asked.get(name)]
    return " ".join([f"bayesadam paper {run.experiment}", *words, f"--seed {run.metrics.get('seed', 0)}"])


# --- running what is missing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportSettings:
    """What to run where it is missing; the bandits' settings, None for tuned or those of a run that is there."""

    only: tuple[str, ...] = EXPERIMENTS
    quick: bool = False
    settings: str | None = None


def run_report(
    *, seed: int, out: Path, quiet: bool, settings: ReportSettings, device: str, jobs: int = 2
) -> tuple[Path, ...]:
    """The `report` command: `out/regression`, `out/pruning` and `out/bandits` hold the runs, `report.html` is the page.

    The page is written again after each experiment, so that a long reproduction can be read while it runs.
    """
    run = Run("report", seed, out, asdict(settings), device=device, quiet=quiet)
    with run.prepared():
        work = _Work(out, seed, device, jobs, quiet, settings)
        runs = {experiment: work.present(experiment) for experiment in EXPERIMENTS}
        missing: dict[str, str] = {}
        for experiment in EXPERIMENTS:
            if any(found.name in (experiment, f"{QUICK}/{experiment}") for found in runs[experiment]):
                continue
            if experiment not in settings.only:
                missing[experiment] = f"Not run: the report was asked for {', '.join(settings.only)} alone."
                continue
            try:
                reason = getattr(work, experiment)()
            except BayesAdamError as error:
                reason = f"Could not be run: {error}"
            if reason:
                missing[experiment] = reason
                print("bayesadam:", f"{experiment}:", *reason.split(), file=sys.stderr)
            runs[experiment] = work.present(experiment)
            with replacing(out / "report.html") as temporary:
                text(page(Report(dict(runs), dict(missing), settings.quick)))(temporary)
        whole = Report(runs, missing, settings.quick)
        if not whole.every_run:
            raise BayesAdamError("nothing to report: " + " ".join(f"{name}: {why}" for name, why in missing.items()))
        return run.finish({"report.html": text(page(whole))}, whole.plain(), name="report.json")


@dataclass(frozen=True)
class _Work:
    """Finds the finished runs, and runs an experiment that is missing; that method returns what could not be done."""

    root: Path
    seed: int
    device: str
    jobs: int
    quiet: bool
    asked: ReportSettings

    def present(self, experiment: str) -> list[Finished]:
        """The finished run first, or the quick one where wanted, then those in folders such as `bandits-paper`."""

        def complete(names: Sequence[str]) -> list[Finished]:
            runs = [read(self.root, name, experiment) for name in names]
            return [run for run in runs if run is not None and run.complete]

        first = complete([experiment, f"{QUICK}/{experiment}"] if self.asked.quick else [experiment])[:1]
        for run in first:
            self._require_settings(run)
        return first + complete(sorted(path.parent.name for path in self.root.glob(f"{experiment}-*/metrics.json")))

    def _require_settings(self, run: Finished) -> None:
        played = run.settings.get("settings")
        if run.experiment == "bandits" and self.asked.settings not in (None, played):
            raise SettingError(
                f"{self.root / run.name} was run with --settings {played}, not {self.asked.settings}: "
                "leave the option out to take it as it is, or report on another folder"
            )

    def _given(self, folder: str) -> dict[str, Any]:
        folder = f"{QUICK}/{folder}" if self.asked.quick else folder
        return {"seed": self.seed, "out": self.root / folder, "quiet": self.quiet}

    def regression(self) -> str:
        settings = RegressionSettings().quick() if self.asked.quick else RegressionSettings()
        run_regression(**self._given("regression"), settings=settings, jobs=self.jobs)
        return ""

    def pruning(self) -> str:
        settings, folder = (QUICK_PRUNING if self.asked.quick else PruningSettings()), "pruning"
        reason = "" if self.asked.quick else self._unavailable(settings.data)
        if reason:
            instead = data_set(settings.data).instead
            settings, folder = replace(settings, data=instead), f"pruning-{instead}"
            lead = f"MNIST could not be had, so Figure 2 itself was not run; the embedded set {instead} is below"
            reason = f"{lead} under its own name. {reason}"
        jobs = self.jobs if self.device == "cpu" else 1
        run_pruning(**self._given(folder), settings=settings, device=self.device, jobs=jobs)
        return reason

    def bandits(self) -> str:
        begun = read(self.root, f"{QUICK}/bandits" if self.asked.quick else "bandits", "bandits")
        if begun is not None:
            # Killed before its last cell: it resumes with the settings it had.
            self._require_settings(begun)
            asked: Any = {n: tuple(value) if isinstance(value, list) else value for n, value in begun.settings.items()}
            given = {**self._given("bandits"), "seed": begun.metrics.get("seed", self.seed)}
            run_bandits(**given, settings=BanditSettings(**asked), device=self.device)
            return ""
        settings = QUICK_BANDITS if self.asked.quick else BanditSettings()
        wanted = QUICK_PROBLEMS if self.asked.quick else tuple(bandits.PAPER["badam"])
        reasons = {name: self._unavailable(name) for name in wanted}
        there = tuple(name for name in wanted if not reasons[name])
        settings = replace(settings, settings=self.asked.settings or settings.settings, problems=there or ("wheel",))
        run_bandits(**self._given("bandits" if there else "bandits-wheel"), settings=settings, device=self.device)
        lead = "" if there else "No column of the table could be had; the embedded wheel is below under its own name. "
        return lead + " ".join(f"Not played: {name}. {reason}" for name, reason in reasons.items() if reason)

    def _unavailable(self, name: str) -> str:
        """Why a data set cannot be had; empty where it is on this machine, now."""
        record = data_set(name)
        if record.embedded:
            return ""
        # The census is a third of a gigabyte, and fetched by name alone.
        if (self.asked.quick or name == "census") and len(find(name)) < len(record.files):
            return f"It is not on this machine: `bayesadam data fetch {name}`."
        try:
            locate(name, progress=not self.quiet)
        except DataError as error:
            return f"{error}."
        return ""
