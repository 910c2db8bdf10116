"""The look that all pictures share."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#767676", "#D9D9D9"


def house_style() -> AbstractContextManager[None]:
    """Our style inside, whatever the user's is; theirs again outside."""
    return matplotlib.style.context(Path(__file__).with_name("house.mplstyle"), after_reset=True)


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure in inches that lays itself out and draws to memory: no window, no pyplot, no backend chosen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def panels(draw: Sequence[Callable[[Axes], object]], title: str, *, columns: int, size: tuple[float, float]) -> Figure:
    """A figure of panels of one size in inches, each drawn by one function, row by row."""
    columns = min(columns, len(draw))
    rows = -(-len(draw) // columns)
    figure = new_figure(size[0] * columns + 0.4, size[1] * rows + 0.5, title)
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        draw[number](axes) if number < len(draw) else axes.set_axis_off()
    return figure


def png(figure: Figure) -> Callable[[Path], None]:
    """What writes the figure to a path as PNG, whatever the path's name and the user's style."""

    def write(path: Path) -> None:
        with house_style():
            figure.savefig(path, format="png")

    return write
