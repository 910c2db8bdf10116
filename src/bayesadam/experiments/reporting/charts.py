"""Charts as inline SVG, drawn from a run's numbers; every chart names its values at a pointer, a finger or a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bayesadam.data.toy import TEST_INTERVAL, TRAIN_INTERVAL
from bayesadam.experiments import bandits, pruning, regression
from bayesadam.experiments.bandits import PAPER
from bayesadam.experiments.reporting.markup import Child, Markup, data, join, tag
from bayesadam.experiments.reporting.numbers import fixed, percent, significant, spread
from bayesadam.experiments.reporting.runs import Finished
from bayesadam.experiments.reporting.tables import agents_of, pruned_name

# Methods with a colour of their own in page.css; any other is grey.
COLOURED = (
    *(
        "badam",
        "gp",
        "mc-dropout",
        "bbb",
        "vadam",
        "map",
        "laplace-full",
        "laplace-diagonal",
        "ensemble",
        "ivon",
        "swag",
    ),
    *("greedy", "uniform", "badam-map", "epsilon-greedy", "neural-linear", "linear", "bootstrap"),
)
_MARKS = ("circle", "square", "diamond", "up", "down", "cross")
_DASHES = {"magnitude": "5 4", "path-snr": "1.5 3"}
# How many points of a curve the pointer can stop at.
_STOPS = 86


def colour_class(method: str) -> str:
    """The class that colours a method.

    >>> colour_class("badam"), colour_class('" onload="')
    ('k-badam', 'k-other')
    """
    return f"k-{method}" if method in COLOURED else "k-other"


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels, and its ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""
    warp: Callable[[float], float] = field(default=lambda value: value)

    def __call__(self, value: float) -> float:
        """The value's place in pixels."""
        low, high = self.warp(self.low), self.warp(self.high)
        return round(self.start + (self.warp(value) - low) / (high - low) * (self.end - self.start), 1)


def nice_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Round numbers between two, about so many.

    >>> nice_ticks(0.0, 1.0), nice_ticks(-0.5, 1.2, 4)
    ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (-0.5, 0.0, 0.5, 1.0))
    """
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(k * step, 10) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1))


@dataclass(frozen=True)
class Stop:
    """Where the pointer can stop: a place along the chart, a heading, and rows of (method, name, value)."""

    at: float
    heading: str
    rows: tuple[tuple[str, str, str], ...]


def chart(
    label: str,
    width: int,
    height: int,
    body: Sequence[Child],
    stops: Sequence[Stop],
    box: tuple[float, ...],
    along: str,
) -> Markup:
    """An SVG with its stops; `box` is the plot's left, top, right and bottom, `along` is "x" or "y"."""
    left, top, right, bottom = box
    ends = (
        {"x1": left, "x2": left, "y1": top, "y2": bottom}
        if along == "x"
        else {"x1": left, "x2": right, "y1": top, "y2": top}
    )
    cursor = tag("line", class_="cursor", **ends)
    payload = {
        "along": along,
        "stops": [[stop.at, stop.heading, [[colour_class(m), n, v] for m, n, v in stop.rows]] for stop in stops],
    }
    return tag(
        "div",
        tag(
            "svg",
            *body,
            cursor,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=f"{label}. Arrow keys step through its values.",
            tabindex="0",
        ),
        tag("div", class_="tip", role="status", aria_live="polite", hidden=True),
        data(payload),
        class_="chart",
    )


def _frame(x: Axis, y: Axis, *, grid: bool = True) -> Iterator[Markup]:
    left, right, bottom, top = x.start, x.end, y.start, y.end
    for value, name in y.ticks:
        place = y(value)
        if grid:
            yield tag("line", class_="grid", x1=left, x2=right, y1=place, y2=place)
        yield tag("text", name, class_="tick end", x=left - 6, y=place + 4)
    yield tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom)
    for value, name in x.ticks:
        place = x(value)
        yield tag("line", class_="axis", x1=place, x2=place, y1=bottom, y2=bottom + 4)
        yield tag("text", name, class_="tick middle", x=place, y=bottom + 17)
    if x.title:
        yield tag("text", x.title, class_="axis-title middle", x=round((left + right) / 2, 1), y=bottom + 35)
    if y.title:
        yield tag("text", y.title, class_="axis-title", x=2, y=top - 10)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def mark(kind: str, x: float, y: float, size: float = 3.6, **attributes: object) -> Markup:
    """A small shape, so that colour is never the only sign."""
    s = size
    shapes = {
        "square": f"M{x - s:g} {y - s:g}h{2 * s:g}v{2 * s:g}h{-2 * s:g}z",
        "diamond": f"M{x:g} {y - 1.3 * s:g}l{1.3 * s:g} {1.3 * s:g}l{-1.3 * s:g} {1.3 * s:g}l{-1.3 * s:g} {-1.3 * s:g}z",
        "up": f"M{x:g} {y - 1.2 * s:g}l{1.2 * s:g} {2.1 * s:g}h{-2.4 * s:g}z",
        "down": f"M{x:g} {y + 1.2 * s:g}l{1.2 * s:g} {-2.1 * s:g}h{-2.4 * s:g}z",
        "cross": f"M{x - s:g} {y - s:g}l{2 * s:g} {2 * s:g}m0 {-2 * s:g}l{-2 * s:g} {2 * s:g}",
    }
    extra = str(attributes.pop("class_", ""))
    name = f"mark {'open' if kind == 'cross' else ''} {extra}".split()
    if kind == "circle":
        return tag("circle", cx=x, cy=y, r=s, class_=" ".join(name), **attributes)
    return tag("path", d=shapes[kind], class_=" ".join(name), **attributes)


def legend(entries: Sequence[tuple[str, str, str, str | None]]) -> Markup:
    """Names with their line and mark: (method, name, mark or "", dashes)."""
    items = []
    for method, name, kind, dash in entries:
        sample = tag(
            "svg",
            tag("line", class_="series", x1=1, x2=27, y1=7, y2=7, stroke_dasharray=dash),
            mark(kind, 14, 7) if kind else None,
            viewBox="0 0 28 14",
            width=28,
            height=14,
            aria_hidden="true",
        )
        items.append(tag("li", sample, name, class_=colour_class(method)))
    return tag("ul", *items, class_="legend")


# --- Figure 1 ---------------------------------------------------------------------------------------------------------


def predictive(run: Finished, method: str) -> Markup | None:
    """One panel of Figure 1: data, truth, mean, one and two standard deviations; None where no curves were kept."""
    if run.curves is None:
        return None
    width, height = 320, 250
    x = Axis(*TEST_INTERVAL, 36, 312, tuple((v, _tick(v)) for v in (-0.5, 0.0, 0.5, 1.0)))
    y = Axis(-1.6, 2.6, 222, 10, tuple((v, _tick(v)) for v in (-1.0, 0.0, 1.0, 2.0)))
    xs, truth = run.curves["x"], run.curves["truth"]
    found = run.curves["methods"][method]
    kept = [k for k in range(len(xs)) if None not in (found["mean"][k], found["total_std"][k])]
    title = regression.TITLES.get(method, method)

    def line(values: Sequence[float]) -> str:
        return _path([(x(xs[k]), _clipped(y, values[k])) for k in kept[::2]])

    def band(times: float) -> str:
        ends = [
            [(x(xs[k]), _clipped(y, found["mean"][k] + sign * times * found["total_std"][k])) for k in kept[::2]]
            for sign in (1, -1)
        ]
        return _path([*ends[0], *reversed(ends[1])]) + "z"

    spans = [TRAIN_INTERVAL]
    if run.settings.get("gap"):
        low, high = TRAIN_INTERVAL
        third = (high - low) / 3
        spans = [(low, low + third), (high - third, high)]
    body: list[Child] = [
        tag("rect", class_="span", x=x(low), y=10, width=round(x(high) - x(low), 1), height=212) for low, high in spans
    ]
    body += _frame(x, y, grid=False)
    if kept:
        body += [tag("path", class_="band", d=band(times)) for times in (2, 1)]
    body += [
        tag("circle", class_="datum", cx=x(a), cy=_clipped(y, b), r=1.3)
        for a, b in zip(run.curves["train"]["x"], run.curves["train"]["y"], strict=False)
    ]
    if kept:
        body += [tag("path", class_="truth", d=line(truth)), tag("path", class_="series", d=line(found["mean"]))]
    step = max(1, len(kept) // (_STOPS - 1))
    stops = [
        Stop(
            x(xs[k]),
            f"x = {fixed(xs[k], 2)}",
            (
                (method, "mean", fixed(found["mean"][k], 2)),
                (method, "std, noise included", fixed(found["total_std"][k])),
                (method, "std of the function", fixed(found["function_std"][k])),
                ("other", "truth", fixed(truth[k], 2)),
            ),
        )
        for k in kept[::step]
    ]
    drawn = chart(f"Figure 1, {title}", width, height, body, stops, (36, 10, 312, 222), "x")
    return tag("figure", tag("figcaption", title), drawn, class_=f"panel {colour_class(method)}")


def _clipped(y: Axis, value: float) -> float:
    return y(min(max(value, y.low), y.high))


def deviations(run: Finished) -> Markup:
    """The function's standard deviation in range and outside, every method, on a logarithmic axis."""
    methods = [m for m in run.results if run.sample(m, "std_in").mean > 0 and run.sample(m, "std_out").mean > 0]
    values = [run.sample(m, name).mean for m in methods for name in ("std_in", "std_out")] or [0.1, 1.0]
    low, high = 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)
    width, row = 460, 26
    top, height = 14, 14 + row * max(1, len(methods)) + 44
    powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
    x = Axis(
        low, high, 172, 448, tuple((10.0**k, f"{10.0**k:g}") for k in powers), "standard deviation (log)", math.log10
    )
    bottom = height - 44
    body: list[Child] = []
    for value, name in x.ticks:
        body += [
            tag("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom),
            tag("text", name, class_="tick middle", x=x(value), y=bottom + 17),
        ]
    body.append(tag("text", x.title, class_="axis-title middle", x=310, y=bottom + 36))
    stops = []
    for number, method in enumerate(methods):
        near, far = (run.sample(method, name) for name in ("std_in", "std_out"))
        place = top + row * number + row / 2
        title = regression.TITLES.get(method, method)
        body.append(
            tag(
                "g",
                tag("text", title, class_="name end", x=164, y=place + 4),
                tag("line", class_="link", x1=x(near.mean), x2=x(far.mean), y1=place, y2=place),
                mark("circle", x(near.mean), place, 4.5, class_="hollow"),
                mark("circle", x(far.mean), place, 4.5),
                class_=colour_class(method),
            )
        )
        rows = (
            (method, "in range", spread(near)),
            (method, "outside", spread(far)),
            (method, "outside / in range", significant(far.mean / near.mean)),
        )
        stops.append(Stop(place, title, rows))
    return chart(
        "Standard deviation in range and outside, by method", width, height, body, stops, (172, top, 448, bottom), "y"
    )


# --- Figure 2 ---------------------------------------------------------------------------------------------------------

_LEAST_LEFT = 1e-3
_PRUNED_TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999)


def left_over(fraction: float) -> float:
    """−log₁₀ of the share of weights left: equal steps divide what is left by equal factors."""
    return -math.log10(max(1 - fraction, _LEAST_LEFT))


def _spaced(points: Sequence[tuple[float, float]], apart: float = 9) -> list[tuple[float, float]]:
    """Points far enough from each other to carry a mark."""
    kept: list[tuple[float, float]] = []
    for point in points:
        if not kept or math.dist(kept[-1], point) >= apart:
            kept.append(point)
    return kept


def pruned(run: Finished, curves: Sequence[tuple[str, str]], label: str) -> Markup:
    """Accuracy against the share of weights pruned, one line a (method, ranking)."""
    width, height = 460, 340
    box = (40, 26, 448, 290)
    ticks = tuple((f, f"{100 * f:g}") for f in _PRUNED_TICKS)
    x = Axis(0.0, 0.999, box[0], box[2], ticks, "weights pruned, % (log in what is left)", left_over)
    y = Axis(0.0, 1.0, box[3], box[1], tuple((v, f"{100 * v:.0f}") for v in nice_ticks(0.0, 1.0)), "test accuracy, %")
    body: list[Child] = [*_frame(x, y)]
    fractions = sorted({f for method, ranking in curves for f in run.results[method][ranking]["fractions"]})
    entries, lines = [], []
    for number, (method, ranking) in enumerate(curves):
        kind, dash = _MARKS[number % len(_MARKS)], _DASHES.get(ranking)
        entries.append((method, pruned_name(method, ranking), kind, dash))
        points = []
        for fraction in run.results[method][ranking]["fractions"]:
            sample = run.accuracy(method, ranking, fraction)
            if sample.values:
                points.append((x(fraction), y(sample.mean)))
        shape = [tag("path", class_="series", d=_path(points), stroke_dasharray=dash)] if points else []
        shape += [mark(kind, *point, 3) for point in _spaced(points)]
        lines.append(tag("g", *shape, class_=colour_class(method)))
    # Badam lies above what it is compared with.
    body += reversed(lines)
    stops = []
    for fraction in fractions:
        found = [(m, r, run.accuracy(m, r, fraction)) for m, r in curves]
        rows = tuple((m, pruned_name(m, r), f"{percent(s.mean)} %") for m, r, s in found if s.values)
        stops.append(Stop(x(fraction), f"{100 * fraction:g} % pruned", rows))
    return join([legend(entries), chart(label, width, height, body, stops, box, "x")])


def pruned_groups(run: Finished) -> list[tuple[str, list[tuple[str, str]]]]:
    """Which curves share a chart: the paper's methods, then those beyond it with Badam beside them."""
    has = {(method, ranking) for method, rankings in run.results.items() for ranking in rankings}
    paper = [
        *(("badam", ranking) for ranking in ("snr", "path-snr", "magnitude")),
        ("mc-dropout", "magnitude"),
        *((method, "snr") for method in ("bbb", "vadam")),
    ]
    beyond = [(method, "snr") for method in run.results if method not in pruning.PAPER]
    groups = [("The paper's methods", [curve for curve in paper if curve in has])]
    others = [curve for curve in beyond if curve in has]
    groups.append(("Beyond the paper", [*(c for c in paper[:1] if c in has), *others] if others else []))
    return [(title, curves) for title, curves in groups if curves]


# --- Table 1 ----------------------------------------------------------------------------------------------------------


def reward_panel(run: Finished, problem: str) -> Markup:
    """One column of Table 1: ours with one standard deviation, the paper's hollow; Uniform may lie off the scale."""
    agents = [agent for agent in agents_of(run) if agent in run.results[problem]]
    samples = {agent: run.sample(problem, agent, "reward_ratio") for agent in agents}
    paper = {agent: PAPER[agent][problem] for agent in agents if problem in PAPER.get(agent, {})}
    scaled = [agent for agent in agents if agent != "uniform"] or agents
    ends = [samples[a].mean + sign * _or_zero(samples[a].sd) for a in scaled for sign in (-1, 1) if samples[a].values]
    ends += [paper[a][0] for a in scaled if a in paper]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    room = max(high - low, 0.02) * 0.08
    low, high = low - room, high + room
    width, row, top, left, right = 320, 24, 8, 124, 312
    bottom = top + row * len(agents)
    x = Axis(low, high, left, right, tuple((v, _tick(v)) for v in nice_ticks(low, high, 4)))
    body: list[Child] = []
    for value, name in x.ticks:
        body += [
            tag("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom),
            tag("text", name, class_="tick middle", x=x(value), y=bottom + 16),
        ]
    stops = []
    for number, agent in enumerate(agents):
        sample, place = samples[agent], top + row * number + row / 2
        title = bandits.TITLES.get(agent, agent)
        shapes: list[Child] = [tag("text", title, class_="name end", x=left - 8, y=place + 4)]
        if sample.values and sample.mean < low:
            shapes.append(tag("text", f"◂ {fixed(sample.mean, 2)}", class_="tick", x=left + 4, y=place + 4))
        elif sample.values:
            sd = _or_zero(sample.sd)
            reach = (x(max(sample.mean - sd, low)), x(min(sample.mean + sd, high)))
            shapes += [
                tag("line", class_="link", x1=reach[0], x2=reach[1], y1=place, y2=place),
                mark("circle", x(min(sample.mean, high)), place, 4.5),
            ]
        if agent in paper and low <= paper[agent][0] <= high:
            shapes.append(mark("diamond", x(paper[agent][0]), place, 4, class_="hollow"))
        body.append(tag("g", *shapes, class_=colour_class(agent)))
        rows = [(agent, "ours", spread(sample))]
        if agent in paper:
            rows.append((agent, "the paper", f"{fixed(paper[agent][0], 2)} ± {fixed(paper[agent][1], 2)}"))
        stops.append(Stop(place, title, tuple(rows)))
    drawn = chart(
        f"{problem}: reward over the optimum's", width, bottom + 26, body, stops, (left, top, right, bottom), "y"
    )
    return tag("figure", tag("figcaption", problem), drawn, class_="panel")


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def reward_legend() -> Markup:
    """What the marks of the reward panels stand for."""
    ours = tag("svg", tag("line", class_="link", x1=1, x2=27, y1=7, y2=7), mark("circle", 14, 7, 4.5), **_SAMPLE)
    theirs = tag("svg", mark("diamond", 14, 7, 4, class_="hollow"), **_SAMPLE)
    return tag(
        "ul",
        tag("li", ours, "ours, mean and one standard deviation"),
        tag("li", theirs, "the paper's mean"),
        class_="legend k-other",
    )


def deviation_legend() -> Markup:
    """What the marks of `deviations` stand for."""
    near = tag("svg", mark("circle", 14, 7, 4.5, class_="hollow"), **_SAMPLE)
    far = tag("svg", mark("circle", 14, 7, 4.5), **_SAMPLE)
    return tag("ul", tag("li", near, "in the training range"), tag("li", far, "outside it"), class_="legend k-other")


def predictive_legend() -> Markup:
    """What a panel of Figure 1 holds."""
    mean = tag("svg", tag("line", class_="series", x1=1, x2=27, y1=7, y2=7), **_SAMPLE)
    bands = tag(
        "svg",
        tag("rect", class_="band", x=1, y=1, width=26, height=12),
        tag("rect", class_="band", x=1, y=4, width=26, height=6),
        **_SAMPLE,
    )
    truth = tag("svg", tag("line", class_="truth", x1=1, x2=27, y1=7, y2=7), **_SAMPLE)
    points = tag(
        "svg", *(tag("circle", class_="datum", cx=c, cy=y, r=1.6) for c, y in ((7, 9), (14, 5), (21, 8))), **_SAMPLE
    )
    span = tag("svg", tag("rect", class_="span", x=1, y=1, width=26, height=12), **_SAMPLE)
    return tag(
        "ul",
        tag("li", mean, "mean"),
        tag("li", bands, "one and two standard deviations, noise included"),
        tag("li", truth, "truth, without noise"),
        tag("li", points, "training data"),
        tag("li", span, "training range"),
        class_="legend k-badam",
    )


_SAMPLE: dict[str, Any] = {"viewBox": "0 0 28 14", "width": 28, "height": 14, "aria_hidden": "true"}


def regret_panel(run: Finished, problem: str) -> Markup:
    """Cumulative regret of every agent, round by round."""
    agents = [agent for agent in agents_of(run) if agent in run.results[problem]]
    # Uniform's regret grows in a straight line, and would flatten all others.
    shown = [agent for agent in agents if agent != "uniform"] or agents
    cells = {agent: run.results[problem][agent] for agent in shown}
    last = max((cell["points"][-1] for cell in cells.values() if cell["points"]), default=1)
    tops = [value for cell in cells.values() for value in cell["regret_mean"] if value is not None]
    low, high = min([0.0, *tops]), max([1e-9, *tops])
    width, height, box = 320, 250, (50, 24, 312, 216)
    x = Axis(
        0.0, max(last, 1), box[0], box[2], tuple((v, _tick(v)) for v in nice_ticks(0.0, max(last, 1), 4)), "rounds"
    )
    y = Axis(low, high, box[3], box[1], tuple((v, _tick(v)) for v in nice_ticks(low, high, 4)), "cumulative regret")
    body: list[Child] = [*_frame(x, y)]
    lines = []
    for agent in shown:
        cell, number = cells[agent], agents_of(run).index(agent)
        kept = [k for k, value in enumerate(cell["regret_mean"]) if value is not None]
        points = [(x(cell["points"][k]), y(cell["regret_mean"][k])) for k in kept[:: max(1, len(kept) // 120)]]
        if not points:
            continue
        kind = _MARKS[number % len(_MARKS)]
        shape = [tag("path", class_="series", d=_path(points))]
        shape += [mark(kind, *point, 3) for point in points[15 + 4 * number :: 30]]
        lines.append(tag("g", *shape, class_=colour_class(agent)))
    body += reversed(lines)
    places = range(len(next(iter(cells.values()))["points"])) if cells else range(0)
    stops = []
    for place in places[:: max(1, len(places) // 50)]:
        rows = tuple(
            (
                agent,
                bandits.TITLES.get(agent, agent),
                f"{significant(cell['regret_mean'][place])} ± {significant(cell['regret_sd'][place])}",
            )
            for agent, cell in cells.items()
            if place < len(cell["points"])
        )
        at = next(iter(cells.values()))["points"][place]
        stops.append(Stop(x(at), f"round {at:,}", rows))
    drawn = chart(f"{problem}: cumulative regret", width, height + 8, body, stops, box, "x")
    return tag("figure", tag("figcaption", problem), drawn, class_="panel")


def regret_legend(run: Finished) -> Markup:
    """The agents of the regret panels."""
    agents = agents_of(run)
    shown = [agent for agent in agents if agent != "uniform"] or agents
    return legend([(a, bandits.TITLES.get(a, a), _MARKS[agents.index(a) % len(_MARKS)], None) for a in shown])


def _tick(value: float) -> str:
    """Such as `−.5`, and thousands as `20k`."""
    text = f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"
    return text.replace("-", "−").replace("0.", ".", 1) if abs(value) < 1 else text.replace("-", "−")
