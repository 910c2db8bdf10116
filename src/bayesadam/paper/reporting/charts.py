"""The report's charts: matplotlib draws them as SVG, `page.js` shows their values at a pointer, a finger or a key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bayesadam.data.toy import TEST_INTERVAL
from bayesadam.paper import bandits, plots, pruning, regression
from bayesadam.paper.bandits import PAPER
from bayesadam.paper.reporting.numbers import fixed, mean_sd, percent, significant
from bayesadam.paper.reporting.runs import Finished
from bayesadam.paper.reporting.tables import agents_of, pruned_name

_MARKS = "osD^vX"
_DASHES: dict[str, Any] = {"magnitude": (0, (4, 3)), "path-snr": (0, (1, 2))}
# How many points of a curve the pointer can stop at.
_STOPS = 86
# The page's style sheet gives these colours, for light, dark and paper.
_VARIABLES = {plots.INK: "--ink", plots.MUTED: "--soft", plots.FAINT: "--grid", "#ffffff": "--paper"}
# One name for each colour, that of the first method which has it.
_NAMES = {shade: name for name, shade in reversed(list(plots.COLOURS.items()))}
_STYLE = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "axes.labelsize": 11, "figure.dpi": 72}


def colour_class(method: str) -> str:
    """The class that colours a method; grey for one without a colour.

    >>> colour_class("badam"), colour_class("greedy"), colour_class('" onload="')
    ('k-badam', 'k-gp', 'k-other')
    """
    return f"k-{_NAMES.get(plots.colour(method), 'other')}"


@dataclass
class Chart:
    """An SVG with its stops; sizes are in pixels, the box is the plot's left, top, right and bottom.

    Attributes:
        scope: of the ids inside, which no other chart of a page has.
        label: for those who do not see it.
        stops: where the pointer can stop along one axis: the place, a heading, and rows of (colour class, name, value).
    """

    scope: str
    title: str
    label: str
    width: int
    height: int
    box: tuple[int, int, int, int]
    along: str = "x"
    body: Markup = field(default_factory=Markup)
    stops: list[Any] = field(default_factory=list)

    @contextmanager
    def drawing(self) -> Iterator[Axes]:
        """Axes to draw on, in the house style; they become the body."""
        left, top, right, bottom = self.box
        with plots.house_style(_STYLE):
            figure = Figure(figsize=(self.width / 72, self.height / 72))
            w, h = self.width, self.height
            axes = figure.add_axes((left / w, 1 - bottom / h, (right - left) / w, (bottom - top) / h))
            yield axes
            self.body = _svg(figure, f"{self.scope} {self.label}")

    def stop(self, axes: Axes, at: float, heading: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Add a stop at a value of the axis, with rows of (method, name, value)."""
        x, y = axes.transData.transform((at, at))
        place = round(float(x if self.along == "x" else self.height - y), 1)
        self.stops.append((place, heading, [(colour_class(method), name, value) for method, name, value in rows]))


def _svg(figure: Figure, salt: str) -> Markup:
    """The elements of a figure without what only a file of its own needs, in the page's colours; ids differ by salt."""
    buffer = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r".*?</defs>|</svg>\s*$", "", buffer.getvalue(), count=1, flags=re.DOTALL).removesuffix("</svg>\n")
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"\s*font-family: [^;]*;", "", text)
    text = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    for shade, name in {**_NAMES, **_VARIABLES}.items():
        variable = name if name.startswith("--") else f"--k-{name}"
        text = text.replace(f": {shade.lower()}", f": var({variable})")
    return Markup(text)


# A legend's entries: the sign drawn, and what it stands for.
Keys = list[tuple[Markup, str]]
# A line's ends, a mark in its middle, and three points.
_ENDS, _MIDDLE, _THREE = (0.0, 1.0), (0.5,), (0.0, 0.5, 1.0)


def _keys(scope: str, entries: Mapping[str, Sequence[tuple[Sequence[float], Mapping[str, Any]]]]) -> Keys:
    """A legend: by name, what is plotted across its sign, and in which style."""
    found = []
    for name, parts in entries.items():
        chart = Chart(scope, "", f"key {name}", 28, 14, (2, 1, 26, 13))
        with chart.drawing() as axes:
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.set_axis_off()
            for x, style in parts:
                axes.plot(x, [0.5] * len(x), **style)
        found.append((chart.body, name))
    return found


def _line_keys(scope: str, styles: Mapping[str, Mapping[str, Any]]) -> Keys:
    return _keys(scope, {name: [(_THREE, {**style, "markevery": [1]})] for name, style in styles.items()})


def _line(method: str, mark: str = "", dashes: Any = "-") -> dict[str, Any]:
    """The style of a method's line; marks differ, so that colour is never the only sign."""
    shade = plots.colour(method)
    edge = {"marker": mark, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.6} if mark else {}
    return {"color": shade, "linewidth": 1.8, "linestyle": dashes, **edge}


def _dot(method: str, mark: str = "o", *, hollow: bool = False) -> dict[str, Any]:
    shade = plots.colour(method)
    fill = "white" if hollow else shade
    return {"marker": mark, "markersize": 8, "linestyle": "", "markeredgecolor": shade, "markerfacecolor": fill}


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=plots.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _name_axis(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, fontweight="normal", color=plots.MUTED)
    axes.grid(axis="y", color=plots.FAINT, linewidth=0.8)


def predictive(run: Finished, method: str) -> Chart:
    """One panel of Figure 1: data, truth, mean, one and two standard deviations."""
    title = regression.TITLES.get(method, method)
    chart = Chart(run.name, title, f"Figure 1, {title}", 320, 250, (36, 10, 312, 222))
    curves: Any = run.curves
    x, truth = (np.array(curves[name], dtype=float) for name in ("x", "truth"))
    mean, function, total = (np.array(curves["methods"][method][name], dtype=float) for name in regression.SHOWN)
    with chart.drawing() as axes:
        for interval in regression.training_intervals(gap=bool(run.settings.get("gap"))):
            axes.axvspan(*interval, color=plots.FAINT, alpha=0.75, linewidth=0)
        points = (curves["train"]["x"], curves["train"]["y"])
        panel: Any = {"truth": truth[::2], "points": points, "method": method, "bands": (2, 1)}
        plots.predictive_panel(axes, x[::2], mean[::2], total[::2], **panel)
        axes.set(xlim=TEST_INTERVAL, ylim=(-1.6, 2.6), xticks=(-0.5, 0.0, 0.5, 1.0), yticks=range(-1, 3))
        finite = np.flatnonzero(np.isfinite(mean) & np.isfinite(total))
        for k in finite[:: max(1, len(finite) // (_STOPS - 1))]:
            rows = (
                (method, "mean", fixed(mean[k], 2)),
                (method, "std, noise included", fixed(total[k])),
                (method, "std of the function", fixed(function[k])),
                ("other", "truth", fixed(truth[k], 2)),
            )
            chart.stop(axes, x[k], f"x = {fixed(x[k], 2)}", rows)
    return chart


def predictive_keys(run: Finished) -> Keys:
    """What a panel of Figure 1 holds."""
    thick: Any = {"color": plots.colour("badam"), "alpha": 0.2, "solid_capstyle": "butt"}
    bands = [(_ENDS, {**thick, "linewidth": width}) for width in (11, 5.5)]
    entries: Any = {
        "mean": [(_ENDS, _line("badam"))],
        "one and two standard deviations, noise included": bands,
        "truth, without noise": [(_ENDS, {"color": plots.INK, "linewidth": 1, "linestyle": (0, (4, 3))})],
        "training data": [((0.1, 0.5, 0.9), {"color": plots.INK, "marker": ".", "linestyle": "", "alpha": 0.55})],
        "training range": [(_ENDS, {"color": plots.FAINT, "linewidth": 11, "solid_capstyle": "butt"})],
    }
    return _keys(run.name, entries)


def deviations(run: Finished) -> Chart:
    """The function's standard deviation in range and outside, every method, on a logarithmic axis."""
    methods = [m for m in run.results if run.sample(m, "std_in").mean > 0 and run.sample(m, "std_out").mean > 0]
    bottom = 14 + 26 * max(1, len(methods))
    label = "Standard deviation in range and outside, by method"
    chart = Chart(run.name, "", label, 460, bottom + 44, (172, 14, 448, bottom), "y")
    titles = [regression.TITLES.get(method, method) for method in methods]
    with chart.drawing() as axes:
        axes.set(xscale="log", xlabel="standard deviation (log)")
        axes.xaxis.set(major_formatter="{x:g}", minor_locator=NullLocator())
        _name_rows(axes, titles)
        for row, (method, title) in enumerate(zip(methods, titles, strict=True)):
            near, far = (run.sample(method, name) for name in ("std_in", "std_out"))
            axes.plot([near.mean, far.mean], [row, row], **_line(method))
            axes.plot(near.mean, row, **_dot(method, hollow=True))
            axes.plot(far.mean, row, **_dot(method))
            rows = (("in range", mean_sd(near)), ("outside", mean_sd(far)))
            ratio = ("outside / in range", significant(far.mean / near.mean))
            chart.stop(axes, row, title, [(method, *row) for row in (*rows, ratio)])
    return chart


def deviation_keys(run: Finished) -> Keys:
    """What the marks of `deviations` stand for."""
    names = {"in the training range": True, "outside it": False}
    return _keys(run.name, {name: [(_MIDDLE, _dot("other", hollow=hollow))] for name, hollow in names.items()})


_LEAST_LEFT = 1e-3
_PRUNED_TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999)


def _log_left(fraction: float) -> float:
    """−log₁₀ of the share of weights left: equal steps divide what is left by equal factors."""
    return -math.log10(max(1 - fraction, _LEAST_LEFT))


def _pruned_style(number: int, method: str, ranking: str) -> dict[str, Any]:
    return _line(method, _MARKS[number % len(_MARKS)], _DASHES.get(ranking, "-"))


def pruned_keys(run: Finished, title: str, curves: Sequence[tuple[str, str]]) -> Keys:
    """The lines of `pruned`."""
    styles = {pruned_name(*curve): _pruned_style(number, *curve) for number, curve in enumerate(curves)}
    return _line_keys(f"{run.name} {title}", styles)


def pruned(run: Finished, title: str, curves: Sequence[tuple[str, str]]) -> Chart:
    """Accuracy against the share of weights pruned, one line a (method, ranking)."""
    chart = Chart(run.name, title, f"Figure 2, {title}", 460, 340, (40, 26, 440, 290))
    fractions = sorted({f for method, ranking in curves for f in run.results[method][ranking]["fractions"]})
    samples = {(curve, fraction): run.accuracy(*curve, fraction) for curve in curves for fraction in fractions}
    with chart.drawing() as axes:
        axes.set_xticks([_log_left(f) for f in _PRUNED_TICKS], [f"{100 * f:g}" for f in _PRUNED_TICKS])
        axes.set(xlim=(0, 3), ylim=(0, 100), xlabel="weights pruned, % (log in what is left)")
        _name_axis(axes, "test accuracy, %")
        for number, curve in enumerate(curves):
            points = [(_log_left(f), 100 * samples[curve, f].mean) for f in fractions if samples[curve, f].values]
            # Badam lies above what it is compared with.
            style = _pruned_style(number, *curve) | {"zorder": 3 - number / 100, "markevery": 0.03, "clip_on": False}
            axes.plot(*zip(*points, strict=True), **style) if points else None
        for fraction in fractions:
            found = [(curve, samples[curve, fraction]) for curve in curves if samples[curve, fraction].values]
            rows = [(c[0], pruned_name(*c), f"{percent(sample.mean)} %") for c, sample in found]
            chart.stop(axes, _log_left(fraction), f"{100 * fraction:g} % pruned", rows)
    return chart


def pruned_groups(run: Finished) -> list[tuple[str, list[tuple[str, str]]]]:
    """Which curves share a chart: the paper's methods, then the others together with Badam."""
    measured = {(method, ranking) for method, rankings in run.results.items() for ranking in rankings}
    paper = [*(("badam", ranking) for ranking in ("snr", "path-snr", "magnitude")), ("mc-dropout", "magnitude")]
    paper += [(method, "snr") for method in ("bbb", "vadam")]
    others = [(m, "snr") for m in run.results if m not in pruning.PAPER and (m, "snr") in measured]
    groups = {"The paper's methods": paper, "Beyond the paper": [*paper[:1], *others] if others else []}
    found = [(title, [curve for curve in curves if curve in measured]) for title, curves in groups.items()]
    return [(title, curves) for title, curves in found if curves]


def rewards(run: Finished, problem: str) -> Chart:
    """One column of Table 1: ours with one standard deviation, the paper's hollow; Uniform may lie off the scale."""
    agents = [agent for agent in agents_of(run) if agent in run.results[problem]]
    samples = {agent: run.sample(problem, agent, "reward_ratio") for agent in agents}
    errors = {agent: sample.sd if math.isfinite(sample.sd) else 0.0 for agent, sample in samples.items()}
    paper = {agent: PAPER[agent][problem] for agent in agents if problem in PAPER.get(agent, {})}
    scaled = [agent for agent in agents if agent != "uniform"] or agents
    ends = [samples[a].mean + sign * errors[a] for a in scaled for sign in (-1, 1) if samples[a].values]
    ends += [paper[a][0] for a in scaled if a in paper]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    room = max(high - low, 0.02) * 0.08
    bottom = 8 + 24 * len(agents)
    label = f"{problem}: reward over the optimum's"
    chart = Chart(run.name, problem, label, 320, bottom + 26, (124, 8, 312, bottom), "y")
    titles = [bandits.TITLES.get(agent, agent) for agent in agents]
    with chart.drawing() as axes:
        _name_rows(axes, titles)
        axes.set(xlim=(low - room, high + room))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        for row, (agent, title) in enumerate(zip(agents, titles, strict=True)):
            mean, sd = samples[agent].mean, errors[agent]
            rows = [(agent, "ours", mean_sd(samples[agent]))]
            if mean < low - room:
                axes.annotate(f"◂ {fixed(mean, 2)}", (low - room, row), (4, 0), textcoords="offset points", va="center")
            elif samples[agent].values:
                axes.plot([mean - sd, mean + sd], [row, row], **_line(agent))
                axes.plot(mean, row, **_dot(agent))
            if agent in paper:
                axes.plot(paper[agent][0], row, **_dot(agent, "D", hollow=True))
                rows.append((agent, "the paper", " ± ".join(fixed(value, 2) for value in paper[agent])))
            chart.stop(axes, row, title, rows)
    return chart


def reward_keys(run: Finished) -> Keys:
    """What the marks of the reward panels stand for."""
    ours = [(_ENDS, _line("other")), (_MIDDLE, _dot("other"))]
    paper = [(_MIDDLE, _dot("other", "D", hollow=True))]
    return _keys(run.name, {"ours, mean and one standard deviation": ours, "the paper's mean": paper})


def _regret_agents(run: Finished) -> dict[str, dict[str, Any]]:
    """The agents of the regret panels and their lines, without Uniform, which would flatten all others."""
    agents = agents_of(run)
    shown = [agent for agent in agents if agent != "uniform"] or agents
    return {agent: _line(agent, _MARKS[agents.index(agent) % len(_MARKS)]) for agent in shown}


def regret(run: Finished, problem: str) -> Chart:
    """Cumulative regret of every agent, round by round."""
    chart = Chart(run.name, problem, f"{problem}: cumulative regret", 320, 258, (50, 24, 312, 216))
    styles = {agent: style for agent, style in _regret_agents(run).items() if agent in run.results[problem]}
    cells = {agent: run.results[problem][agent] for agent in styles}
    with chart.drawing() as axes:
        for number, (agent, cell) in enumerate(cells.items()):
            x, y = (np.array(cell[name], dtype=float) for name in ("points", "regret_mean"))
            thin = slice(None, None, max(1, len(x) // 120))
            # Badam lies above what it is compared with, and marks do not hide each other.
            order: Any = {"zorder": 3 - number / 100, "markevery": (15 + 4 * number, 30), "clip_on": False}
            axes.plot(x[thin], y[thin], **styles[agent], **order)
        axes.set(xlim=(0, None), xlabel="rounds")
        axes.set_ylim(min(0.0, axes.get_ylim()[0]) if np.isfinite(axes.dataLim.y0) and axes.dataLim.y0 < 0 else 0.0)
        _name_axis(axes, "cumulative regret")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}")
            axis.set_major_locator(MaxNLocator(4))
        points: Sequence[int] = next((cell["points"] for cell in cells.values()), ())
        for place in range(0, len(points), max(1, len(points) // 50)):
            there = {agent: cell for agent, cell in cells.items() if place < len(cell["points"])}
            shown = {
                a: [significant(c[name][place]) for name in ("regret_mean", "regret_sd")] for a, c in there.items()
            }
            rows = [(agent, bandits.TITLES.get(agent, agent), " ± ".join(pair)) for agent, pair in shown.items()]
            chart.stop(axes, points[place], f"round {points[place]:,}", rows)
    return chart


def regret_keys(run: Finished) -> Keys:
    """The agents of the regret panels."""
    styles = {bandits.TITLES.get(agent, agent): style for agent, style in _regret_agents(run).items()}
    return _line_keys(run.name, styles)
