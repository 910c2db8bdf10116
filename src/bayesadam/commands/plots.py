"""The look that all pictures share: one style, one colour per method, and the panels that more than one picture uses."""

from __future__ import annotations

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
def house_style(changes: Mapping[Any, Any] = {}) -> Iterator[None]:
    """Our style inside, with some changes, whatever the user's; theirs again outside."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, **changes})
        yield


def new_figure(width: float, height: float, title: str, size: int = 12) -> Figure:
    """A figure in inches that lays itself out and draws to memory: no window, no pyplot, no backend chosen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=size, fontweight="bold", x=0.01, ha="left")
    return figure


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


def strip_panel(
    axes: Axes, groups: Mapping[str, ArrayLike], *, marked: Mapping[str, ArrayLike], labels: tuple[str, str]
) -> None:
    """Two strips of dots per group on a logarithmic axis, unmarked above marked, and the group's median as a bar.

    Numbers that are not positive are not drawn; `labels` are those of an unmarked and a marked dot.
    """
    jitter = np.random.default_rng(0)
    axes.set_xscale("log")
    for row, (name, values) in enumerate(groups.items()):
        numbers, mark = np.asarray(values).ravel(), np.asarray(marked[name]).ravel()
        if numbers.size > 1:
            axes.plot([np.median(numbers)] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.8, zorder=4)
        alpha = 0.8 if numbers.size <= 100 else 0.35
        style: Any = {"alpha": alpha, "markersize": 2.2, "markeredgewidth": 0, "zorder": 3}
        for which, shade, side in ((~mark, colour("badam"), -1), (mark, MUTED, 1)):
            axes.plot(numbers[which], row + side * jitter.uniform(0.04, 0.34, which.sum()), "o", color=shade, **style)
    axes.set_yticks(range(len(groups)), list(groups))
    # The empty row below the last is the legend's.
    axes.set_ylim(len(groups) + 0.3, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for shade, label in zip((colour("badam"), MUTED), labels, strict=True):
        axes.plot([], [], "o", color=shade, markersize=4, markeredgewidth=0, label=label)
    axes.plot([], [], color=INK, linewidth=1.6, label="median of all")
    axes.legend(loc="lower left", ncols=3, columnspacing=1.2, handletextpad=0.4)
