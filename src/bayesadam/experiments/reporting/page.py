"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from bayesadam._version import __version__
from bayesadam.data.registry import DATA_SETS
from bayesadam.experiments.bandits import PAPER as PAPERS_TABLE
from bayesadam.experiments.reporting import charts, tables
from bayesadam.experiments.reporting.claims import (
    CLAIMS,
    Check,
    Judged,
    Verdict,
    departures,
    judge_all,
    judged,
    other_data,
    shortfall,
)
from bayesadam.experiments.reporting.markup import Child, Markup, join, prose, tag
from bayesadam.experiments.reporting.numbers import duration
from bayesadam.experiments.reporting.runs import EXPERIMENTS, Finished
from bayesadam.experiments.reporting.tables import Table

TITLE = "Practical Bayesian Neural Networks via Adaptive Optimization Methods"
HEADINGS = {
    "regression": "Figure 1: toy regression",
    "pruning": "Figure 2: pruning by signal to noise",
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


@dataclass(frozen=True)
class Report:
    """What the page is made of.

    Attributes:
        runs: by experiment, its run first and then others beside it.
        missing: by experiment, why there is no run, or what it lacks.
        quick: whether the smaller version was asked for.
        written: the day, in words.
    """

    runs: Mapping[str, Sequence[Finished]]
    missing: Mapping[str, str]
    quick: bool = False
    written: str = ""

    @property
    def claims(self) -> tuple[Judged, ...]:
        """Every claim, by the first run of its experiment."""
        return judge_all([runs[0] for runs in self.runs.values() if runs])

    @property
    def every_run(self) -> list[Finished]:
        """In the page's order."""
        return [run for experiment in EXPERIMENTS for run in self.runs.get(experiment, ())]

    def plain(self) -> dict[str, Any]:
        """Every number on the page and where it came from, for `report.json`."""
        return {
            "claims": [_plain_claim(found) for found in self.claims],
            "runs": [
                {
                    "file": run.file,
                    "sha256": run.sha256,
                    "device": run.metrics.get("device"),
                    "seconds": run.metrics.get("seconds"),
                    "seed": run.metrics.get("seed"),
                    "version": run.metrics.get("version"),
                    "settings": dict(run.settings),
                    "shorter_than_the_paper": shortfall(run),
                    "other_data_than_the_paper": other_data(run),
                    "claims": [_plain_claim(j) for j in _of_run(run)]
                    if run is not self.runs[run.experiment][0]
                    else [],
                }
                for run in self.every_run
            ],
            "missing": dict(self.missing),
            "tables": [table.plain() for run in self.every_run for table in _tables(run)],
        }


def page(report: Report) -> str:
    """The whole file."""
    sections = [_SECTIONS[experiment] for experiment in EXPERIMENTS]
    body = [
        _header(report),
        tag(
            "main",
            _in_short(report),
            *(_section(report, name, draw) for name, draw in zip(EXPERIMENTS, sections, strict=True)),
            _what_was_run(report),
        ),
        tag(
            "footer",
            f"Written by bayesadam {__version__}" + (f" on {report.written}" if report.written else "") + ". "
            "Every number here, with the file and place it was read from, is in report.json beside this page.",
        ),
        tag("script", Markup(_asset("page.js"))),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:",
        ),
        tag("title", "Badam, reproduced" + (" (quick)" if report.quick else "")),
        tag("style", Markup(_asset("page.css"))),
    )
    return "<!doctype html>\n" + tag("html", head, "\n", tag("body", *body), lang="en-GB") + "\n"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- the top ----------------------------------------------------------------------------------------------------------


def _header(report: Report) -> Markup:
    short = [run for run in report.every_run if shortfall(run) or other_data(run)]
    banner = None
    if short:
        lines = [f"{run.name}: {', '.join(filter(None, (other_data(run), shortfall(run))))}." for run in short]
        lead = "This is the quick version. " if report.quick else ""
        banner = tag(
            "div",
            tag("p", tag("strong", lead + "Not everything here is of the paper's size, or on the paper's data:")),
            *(tag("p", line) for line in lines),
            class_="banner",
            role="note",
        )
    links = [
        ("in-short", "In short"),
        *((name, HEADINGS[name].partition(":")[0]) for name in EXPERIMENTS),
        ("runs", "What was run"),
    ]
    return tag(
        "header",
        tag("h1", "Badam, reproduced"),
        tag(
            "p",
            "Figure 1, Figure 2 and Table 1 of ",
            tag("cite", TITLE),
            " (Kessler, Salas, Tan, Zohren, Roberts; arXiv:1811.03679), run anew with bayesadam: what was found, beside what "
            "the paper says.",
            class_="lede",
        ),
        banner,
        tag(
            "nav", tag("ul", *(tag("li", tag("a", text, href=f"#{key}")) for key, text in links)), aria_label="Contents"
        ),
    )


def _in_short(report: Report) -> Markup:
    claims = report.claims
    counts = Counter(found.verdict for found in claims)
    tally = tag(
        "ul",
        *(
            tag("li", tag("b", counts[verdict], class_=_SIGNS[verdict][0]), verdict.value)
            for verdict in Verdict
            if counts[verdict]
        ),
        class_="tally",
    )
    parts: list[Child] = []
    for experiment in EXPERIMENTS:
        parts.append(tag("h3", HEADINGS[experiment].partition(":")[0]))
        parts.append(_claims([found for found in claims if found.claim.experiment == experiment]))
    return tag(
        "section",
        tag("h2", "In short: which claims held"),
        tag(
            "p",
            f"The paper makes {len(claims)} claims about its two figures, its table and its cost, put here in our words. A difference "
            "between two methods counts if it exceeds two standard errors over the seeds or runs; a smaller one is too close "
            "to tell. A run shorter than the paper's shows what it found, and judges nothing.",
        ),
        tally,
        *parts,
        id="in-short",
    )


def _claims(found: Sequence[Judged], beside: int = 0) -> Markup:
    """The claims one by one; those of the runs beside the first are numbered, since a page has each id once."""
    end = f"-{beside + 1}" if beside else ""
    return tag("ul", *(_claim(one, f"{one.claim.key}{end}") for one in found), class_="claims")


def _claim(found: Judged, key: str) -> Markup:
    name, sign = _SIGNS[found.verdict]
    checks = tag("ul", *(_check(check) for check in found.checks), class_="checks") if found.checks else None
    reservation = f" Here {found.reservation}." if found.reservation else ""
    return tag(
        "li",
        tag("p", tag("span", sign, aria_hidden="true"), found.verdict.value, class_=f"verdict {name}"),
        tag(
            "div",
            tag("p", found.claim.words),
            tag("p", prose(f"{_capital(found.claim.place)}. {found.claim.criterion}{reservation}"), class_="note"),
            checks,
        ),
        id=key,
    )


def _check(check: Check) -> Markup:
    name, sign = {True: ("held", "✓"), False: ("failed", "✗"), None: ("open", "≈")}[check.passed]
    word = {True: "as claimed", False: "not as claimed", None: "too close to tell"}[check.passed]
    return tag("li", tag("b", sign, class_=name, role="img", aria_label=word), f" {check.what}: {check.numbers}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plain_claim(found: Judged) -> dict[str, Any]:
    return {
        "claim": found.claim.key,
        "words": found.claim.words,
        "place": found.claim.place,
        "criterion": found.claim.criterion,
        "verdict": found.verdict.value,
        "reservation": found.reservation,
        "checks": [
            {"what": c.what, "passed": c.passed, "shown": c.numbers, "values": list(c.values), "from": list(c.sources)}
            for c in found.checks
        ],
    }


# --- figures and tables -----------------------------------------------------------------------------------------------


def _section(report: Report, experiment: str, draw: Any) -> Markup:
    runs = list(report.runs.get(experiment, ()))
    parts: list[Child] = []
    if experiment in report.missing:
        parts.append(tag("div", tag("p", prose(report.missing[experiment])), class_="banner", role="note"))
    if not runs:
        parts.append(tag("p", "There is no finished run of this experiment in the folder.", class_="note"))
    for number, run in enumerate(runs):
        if number:
            parts.append(tag("h3", f"Beside it: {run.name}"))
        parts += [_said(run), *draw(run)]
        if number:
            claims = [found for found in _of_run(run) if found.checks]
            if claims:
                parts += [tag("p", tag("strong", "The same claims, by this run")), _claims(claims, number)]
    return tag("section", tag("h2", HEADINGS[experiment]), *parts, id=experiment)


def _of_run(run: Finished) -> list[Judged]:
    return [judged(claim, run) for claim in CLAIMS if claim.experiment == run.experiment]


_UNITS = {"relu": "ReLU", "sigmoid": "sigmoid"}


def _said(run: Finished) -> Markup:
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
        how = "one setting for all problems" if asked["settings"] == "tuned" else "the paper's"
        what = f"{_count(asked['runs'], 'run')} of {length}; settings “{asked['settings']}”: {how}"
    extra = departures(run)
    end = f" This differs from the paper: {extra}." if extra else ""
    where, took = run.metrics.get("device", "?"), duration(run.metrics.get("seconds"))
    return tag("p", f"{what}; {took} on {where}.{end}", class_="note")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _regression(run: Finished) -> list[Child]:
    parts: list[Child] = []
    panels = [panel for panel in (charts.predictive(run, method) for method in run.results) if panel is not None]
    curves = tables.regression_curves(run)
    if panels:
        parts += [charts.predictive_legend(), tag("div", *panels, class_="panels")]
        if curves is not None:
            parts.append(_details(curves))
    elif run.picture is not None:
        image = base64.b64encode(run.picture).decode("ascii")
        parts += [
            tag(
                "img",
                class_="figure",
                src=f"data:image/png;base64,{image}",
                alt="Figure 1: every method's mean and bands",
            ),
            tag("p", "This run kept its picture alone, not the curves; the numbers it kept follow.", class_="note"),
        ]
    left_out = [method for method in run.settings.get("methods", ()) if method not in run.results]
    if left_out:
        parts.append(tag("p", f"Gave no result and were left out: {', '.join(map(str, left_out))}.", class_="note"))
    scores = tables.regression_scores(run)
    parts += [
        tag("h3", "How far the uncertainty opens"),
        charts.deviation_legend(),
        tag("div", tag("figure", charts.deviations(run)), class_="wide"),
        tag("p", "The paper prints no numbers for this figure; the table is ours alone.", class_="note"),
        _table(scores),
    ]
    return parts


def _pruning(run: Finished) -> list[Child]:
    drawn = [
        tag("figure", tag("figcaption", title), charts.pruned(run, curves, f"Figure 2, {title}"))
        for title, curves in charts.pruned_groups(run)
    ]
    return [
        tag("div", *drawn, class_="wide"),
        tag(
            "p",
            "The paper prints no numbers for this figure. Magnitude is its baseline with Σ = 1; path scores are ours.",
            class_="note",
        ),
        _table(tables.pruning_shown(run)),
        _details(tables.pruning_all(run)),
    ]


def _bandits(run: Finished) -> list[Child]:
    problems = tables.problems_of(run)
    absent = [problem for problem in PAPERS_TABLE["badam"] if problem not in problems]
    note = f"Columns of the paper's table that this run does not have: {', '.join(absent)}." if absent else ""
    curves = [_table(tables.regret_curve(run, problem)) for problem in problems]
    return [
        tag("p", note, class_="note") if note else None,
        _table(tables.rewards(run)),
        charts.reward_legend(),
        tag("div", *(charts.reward_panel(run, problem) for problem in problems), class_="panels"),
        _details(tables.regrets(run)),
        tag("h3", "Regret, round by round"),
        tag("p", "Mean over the runs; Uniform, whose regret grows in a straight line, is left out.", class_="note"),
        charts.regret_legend(run),
        tag("div", *(charts.regret_panel(run, problem) for problem in problems), class_="panels"),
        tag("details", tag("summary", "The numbers behind these curves"), *curves),
    ]


_SECTIONS = {"regression": _regression, "pruning": _pruning, "bandits": _bandits}


def _tables(run: Finished) -> list[Table]:
    if run.experiment == "regression":
        curves = tables.regression_curves(run)
        return [tables.regression_scores(run), *([curves] if curves is not None else [])]
    if run.experiment == "pruning":
        return [tables.pruning_shown(run), tables.pruning_all(run)]
    regret = [tables.regret_curve(run, problem) for problem in tables.problems_of(run)]
    return [tables.rewards(run), tables.regrets(run), *regret]


def _table(table: Table) -> Markup:
    head = tag("tr", tag("th", table.corner, scope="col"), *(tag("th", name, scope="col") for name in table.columns))
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(
                tag(
                    "td",
                    cell.text,
                    tag("small", cell.beneath) if cell.beneath else None,
                    class_="best" if cell.best else None,
                )
                for cell in cells
            ),
        )
        for name, cells in table.rows
    ]
    whole = tag("table", tag("thead", head), tag("tbody", *rows))
    note = tag("p", table.note, class_="note") if table.note else None
    box = tag("div", whole, class_="scroll", role="region", aria_label=table.title, tabindex="0")
    # Beside the box and not a caption inside it, so that it wraps where the table scrolls.
    return join([tag("p", table.title, class_="title"), box, note])


def _details(table: Table) -> Markup:
    return tag("details", tag("summary", f"As numbers: {table.title[:1].lower() + table.title[1:]}"), _table(table))


# --- what was run -----------------------------------------------------------------------------------------------------


def command_of(run: Finished) -> str:
    """The command that does this run again."""
    asked, words = run.settings, [f"bayesadam {run.experiment}"]
    if run.experiment == "bandits":
        words += [
            f"--problems {','.join(asked['problems'])}",
            f"--agents {','.join(asked['agents'])}",
            f"--runs {asked['runs']}",
        ]
        words += [f"--rounds {asked['rounds']}"] if asked["rounds"] is not None else []
        words.append(f"--settings {asked['settings']}")
    else:
        words += [f"--data {asked['data']}"] if run.experiment == "pruning" else []
        methods = asked.get("methods", ())
        words += [f"--methods {','.join(map(str, methods))}"] if methods else []
        words += [f"--epochs {asked['epochs']}", f"--seeds {asked['n_seeds']}"]
        words += ["--gap"] if asked.get("gap") else []
        words += ["--sparse"] if asked.get("sparse") else []
    return " ".join([*words, f"--seed {run.metrics.get('seed', 0)}"])


def _what_was_run(report: Report) -> Markup:
    parts: list[Child] = []
    for run in report.every_run:
        about = run.metrics
        data = {"regression": "the toy problem, drawn from a generator"}.get(run.experiment) or (
            run.settings["data"] if run.experiment == "pruning" else ", ".join(run.settings["problems"])
        )
        settings = ", ".join(f"{name} = {_shown(value)}" for name, value in run.settings.items())
        rows = (
            ("data", data),
            ("took", f"{duration(about.get('seconds'))} on {about.get('device', '?')}"),
            ("seed", about.get("seed", "?")),
            ("settings", settings),
            ("command", tag("code", command_of(run))),
            ("version", f"bayesadam {about.get('version', '?')}"),
            ("file", join([tag("code", run.file), f", sha256 {run.sha256[:16]}…"])),
        )
        body = tag("tbody", *(tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows))
        parts += [tag("h3", run.name), tag("div", tag("table", body, class_="runs"), class_="scroll")]
    parts += [tag("p", prose(f"{HEADINGS[name]}: {reason}"), class_="note") for name, reason in report.missing.items()]
    total = sum(run.metrics.get("seconds") or 0.0 for run in report.every_run)
    lead = tag("p", f"{_count(len(report.every_run), 'run')}, {duration(total)} in all.", class_="note")
    return tag("section", tag("h2", "What was run"), lead, *parts, id="runs")


def _shown(value: Any) -> str:
    if value is None:
        return "default"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
