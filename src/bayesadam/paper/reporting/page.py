"""The page: one HTML file that needs nothing else, from the template `page.html`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bayesadam._version import __version__
from bayesadam.data.fetching import DATA_SETS
from bayesadam.paper.bandits import PAPER as PAPERS_TABLE
from bayesadam.paper.reporting import charts, tables
from bayesadam.paper.reporting.claims import (
    CLAIMS,
    Judged,
    Verdict,
    departures,
    judge_run,
    judged,
    settings_note,
    with_papers_settings,
)
from bayesadam.paper.reporting.numbers import duration
from bayesadam.paper.reporting.runs import EXPERIMENTS, Finished

HEADINGS = {
    "regression": "Figure 1: toy regression",
    "pruning": "Figure 2: pruning by signal-to-noise ratio",
    "bandits": "Table 1: contextual bandits",
}
_SIGNS = {
    Verdict.HELD: ("held", "✓"),
    Verdict.PARTLY: ("partly", "◐"),
    Verdict.FAILED: ("failed", "✗"),
    Verdict.OPEN: ("open", "≈"),
    Verdict.SHORT: ("open", "…"),
    Verdict.UNMEASURED: ("unmeasured", "–"),
}
_OUTCOMES = {
    True: ("held", "✓", "as claimed"),
    False: ("failed", "✗", "not as claimed"),
    None: ("open", "≈", "too close to tell"),
}
_UNITS = {"relu": "ReLU", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Report:
    """What the page is made of: runs by experiment, the main one first, and what is missing by experiment, with the reason."""

    runs: Mapping[str, Sequence[Finished]]
    missing: Mapping[str, str]
    quick: bool = False
    written: str = ""

    @cached_property
    def claims(self) -> tuple[Judged, ...]:
        """Every claim, by the main run of its experiment; Table 1's by that with the paper's settings, too."""
        main = {experiment: next(iter(runs), None) for experiment, runs in self.runs.items()}
        return tuple(judged(claim, main.get(claim.experiment), self.papers_own) for claim in CLAIMS)

    @property
    def papers_own(self) -> Finished | None:
        """Table 1's run with the settings that the paper states."""
        return with_papers_settings(self.runs.get("bandits", ()))

    @property
    def every_run(self) -> list[Finished]:
        """In the page's order."""
        return [run for experiment in EXPERIMENTS for run in self.runs.get(experiment, ())]

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return sum(run.metrics.get("seconds") or 0.0 for run in self.every_run)

    def plain(self) -> dict[str, Any]:
        """Every number on the page and where it came from, for `report.json`."""
        return {
            "claims": [found.plain() for found in self.claims],
            "runs": [
                {
                    "file": run.file,
                    "sha256": run.sha256,
                    **{name: run.metrics.get(name) for name in ("device", "seconds", "seed", "version")},
                    "settings": dict(run.settings),
                    "shorter_than_the_paper": run.shortfall,
                    "other_data_than_the_paper": run.other_data,
                    "claims": [] if run is self.runs[run.experiment][0] else [one.plain() for one in judge_run(run)],
                }
                for run in self.every_run
            ],
            "missing": dict(self.missing),
            "tables": [table.plain() for run in self.every_run for table in tables.of_run(run)],
        }


def page(report: Report) -> str:
    """The whole file; what is not markup already is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode("ascii")
    style, script = (Markup(files(__package__).joinpath(f"page.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    return environment.get_template("page.html").render(
        report=report,
        charts=charts,
        tables=tables,
        headings=HEADINGS,
        columns=tuple(PAPERS_TABLE["badam"]),
        signs=_SIGNS,
        outcomes=_OUTCOMES,
        judge_run=judge_run,
        settings_note=settings_note,
        abreast=_abreast,
        described=_described,
        provenance=_provenance,
        duration=duration,
        count=_count,
        version=__version__,
        style=style,
        script=script,
    )


def _abreast(panels: int) -> int:
    """How many panels stand in a row: three or four, whichever leaves fewer places empty.

    >>> _abreast(6), _abreast(11), _abreast(5)
    (3, 4, 3)
    """
    return min((4, 3), key=lambda columns: -panels % columns)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _took(run: Finished) -> str:
    return f"{duration(run.metrics.get('seconds'))} on {run.metrics.get('device', '?')}"


def _described(run: Finished) -> str:
    """One sentence of what was run."""
    asked = run.settings
    if run.experiment == "regression":
        what = f"The paper's toy problem, 2 × 50 units, {asked['epochs']:,} epochs, {_count(asked['n_seeds'], 'seed')}"
    elif run.experiment == "pruning":
        hidden = "-".join(str(width) for width in asked.get("hidden", ()))
        title = DATA_SETS[asked["data"]].title if asked["data"] in DATA_SETS else asked["data"]
        units = f"{hidden} {_UNITS.get(asked.get('activation', ''), 'hidden')} units, " if hidden else ""
        what = f"{title}; {units}{_count(asked['epochs'], 'epoch')}, {_count(asked['n_seeds'], 'seed')}"
    else:
        length = "all rounds of each problem" if asked["rounds"] is None else f"{asked['rounds']:,} rounds"
        how = "one setting for all problems, ours" if asked["settings"] == "tuned" else "those that the paper states"
        what = f"{_count(asked['runs'], 'run')} of {length}; settings “{asked['settings']}”: {how}"
    extra = departures(run)
    return f"{what}; {_took(run)}." + (f" This differs from the paper: {extra}." if extra else "")


def command_of(run: Finished) -> str:
    """The command that does this run again."""
    asked = run.settings
    if run.experiment == "bandits":
        lists = {name: ",".join(asked[name]) for name in ("problems", "agents")}
        options = {**lists, **{name: asked[name] for name in ("runs", "rounds", "settings")}}
    else:
        methods = ",".join(map(str, asked.get("methods", ()))) or None
        options = {"data": asked.get("data"), "methods": methods, "epochs": asked["epochs"], "seeds": asked["n_seeds"]}
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    words += [f"--{name}" for name in ("gap", "sparse") if asked.get(name)]
    return " ".join([f"bayesadam {run.experiment}", *words, f"--seed {run.metrics.get('seed', 0)}"])


def _provenance(run: Finished) -> dict[str, str]:
    """What was run, on what, and where its numbers are; text in backticks is code."""
    asked = run.settings
    data = asked["data"] if run.experiment == "pruning" else ", ".join(asked.get("problems", ("the toy problem",)))
    return {
        "data": data,
        "took": _took(run),
        "seed": str(run.metrics.get("seed", "?")),
        "settings": ", ".join(f"{name} = {_shown(value)}" for name, value in asked.items()),
        "command": f"`{command_of(run)}`",
        "version": f"bayesadam {run.metrics.get('version', '?')}",
        "file": f"`{run.file}`, sha256 {run.sha256[:16]}…",
    }


def _shown(value: Any) -> str:
    if value is None:
        return "default"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
