"""The look that all pictures share, one style and one colour per method, and the picture of `bayesadam inspect`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from bayesadam._plots import FAINT as FAINT
from bayesadam._plots import INK as INK
from bayesadam._plots import MUTED as MUTED
from bayesadam.inspecting import Inspection

# Okabe and Ito's palette, safe for the colour-blind; one colour per method, the same in every picture.
COLOURS: Mapping[str, str] = {
    **dict.fromkeys(("badam", "badam-map", "snr"), "#0072B2"),
    **dict.fromkeys(("gp", "greedy", "epsilon-greedy"), "#009E73"),
    "mc-dropout": "#E69F00",
    **dict.fromkeys(("bbb", "magnitude"), "#D55E00"),
    "vadam": "#CC79A7",
    **dict.fromkeys(("laplace-full", "laplace-diagonal", "linear"), "#56B4E9"),
    **dict.fromkeys(("ensemble", "bootstrap"), "#9A7D0A"),
    "ivon": "#8C564B",
    "hybrid": "#1A1A1A",
    **dict.fromkeys(("swag", "neural-linear"), "#6A5ACD"),
}
METHOD_TITLES = {
    "badam": "Badam",
    "mc-dropout": "MC dropout",
    "bbb": "Bayes by Backprop",
    "vadam": "Vadam",
    "swag": "SWAG",
    "ivon": "IVON",
    "laplace-diagonal": "Laplace, diagonal GGN",
}

# More rows than this cannot be read.
_ROWS = 40

_STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.fontsize": 8,
    "lines.solid_capstyle": "round",
}


def colour(method: str) -> str:
    """The method's colour; grey for one without.

    >>> colour("badam"), colour("unheard of")
    ('#0072B2', '#767676')
    """
    return COLOURS.get(method, MUTED)


@contextmanager
def house_style() -> Iterator[None]:
    """Our style inside, whatever the user's is; theirs again outside."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width: float, height: float, title: str, size: int = 12) -> Figure:
    """A figure in inches that lays itself out and draws to memory: no window, no pyplot, no backend chosen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=size, fontweight="bold", x=0.01, ha="left")
    return figure


def panels(
    draw: Sequence[Callable[[Axes], object]],
    title: str,
    *,
    columns: int,
    size: tuple[float, float],
    margin: tuple[float, float],
) -> tuple[Figure, list[Axes]]:
    """A figure of panels of one size in inches, each drawn by one function, row by row."""
    columns = min(columns, len(draw))
    rows = -(-len(draw) // columns)
    figure = new_figure(size[0] * columns + margin[0], size[1] * rows + margin[1], title)
    drawn = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, one in zip(drawn, draw, strict=False):
        one(axes)
    for axes in drawn[len(draw) :]:
        axes.set_axis_off()
    return figure, drawn


def png(figure: Figure) -> Callable[[Path], None]:
    """What writes the figure to a path as PNG, whatever the path's name and the user's style."""

    def write(path: Path) -> None:
        with house_style():
            figure.savefig(path, format="png")

    return write


def predictive_panel(
    axes: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    *,
    draws: Sequence[ArrayLike] = (),
    truth: ArrayLike | None = None,
    points: tuple[ArrayLike, ArrayLike] | None = None,
    method: str = "badam",
    bands: Sequence[int] = (2,),
) -> None:
    """A mean with bands of some standard deviations, functions drawn from the posterior, the truth and the data."""
    shade = colour(method)
    x, mean, std = np.asarray(x), np.asarray(mean), np.asarray(std)
    for width in bands:
        low, high = mean - width * std, mean + width * std
        axes.fill_between(x, low, high, color=shade, alpha=0.16, linewidth=0, label=f"±{width} sd")
    for number, line in enumerate(draws):
        axes.plot(x, line, color=shade, alpha=0.3, linewidth=0.5, label="functions drawn" if number == 0 else None)
    if truth is not None:
        axes.plot(x, truth, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="truth, without noise")
    if points is not None:
        axes.plot(*points, "o", color=INK, markersize=2.4, markeredgewidth=0, alpha=0.55, label="training data")
    axes.plot(x, mean, color=shade, linewidth=1.8, label="mean")


def spread_rows(axes: Axes, rows: Mapping[str, Sequence[float]]) -> None:
    """The 5 %, 50 % and 95 % quantiles of each row on a logarithmic axis, the first row on top."""
    shade = colour("snr")
    for number, (low, median, high) in enumerate(rows.values()):
        axes.plot([low, high], [number, number], color=shade, alpha=0.4, linewidth=6)
        axes.plot(median, number, "o", color=shade)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))


def inspection_picture(inspection: Inspection) -> Figure:
    """Quantiles of |μ|/σ, or of σ, for each of the largest parameters, with its number of weights and dead weights."""
    largest = {row.name for row in sorted(inspection.parameters, key=lambda row: -row.weights)[:_ROWS]}
    shown = [row for row in inspection.parameters if row.name in largest]
    few = f", the {len(shown)} largest parameters" if len(shown) < len(inspection.parameters) else ""
    title = f"{Path(inspection.source).name}: {inspection.weights:,} weights, read as {inspection.optimizer}{few}"
    scale = "N = 1: only the order counts" if inspection.n_data is None else f"N = {inspection.n_data:,.0f}"
    with house_style():
        figure = new_figure(9, 1.6 + 0.3 * max(len(shown), 3), title)
        axes = figure.subplots()
        spread_rows(axes, {row.name: row.quantiles for row in shown})
        for number, row in enumerate(shown):
            dead = f", {row.dead / row.weights:.1%} dead" if row.dead else ""
            beside: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7.5}
            axes.text(1.01, number, f"{row.weights:,}{dead}", **beside)
        if inspection.below is not None:
            axes.axvline(1, color=colour("magnitude"), linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title("weights", loc="right", fontsize=7.5)
        axes.set_xlabel(f"{inspection.quantity}: median, 5 to 95 %  ({scale})")
    return figure
