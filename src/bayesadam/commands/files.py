"""`bayesadam inspect` and `doctor`: a checkpoint's weights by signal-to-noise ratio, and what is wrong with its state."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from bayesadam._options import in_options
from bayesadam.errors import SettingError
from bayesadam.inspect import BINS, LOG_RANGE, Inspection, ParameterReport, diagnose_checkpoint, inspect_checkpoint
from bayesadam.paper import plots
from bayesadam.paper.run import Run, Target, as_json
from bayesadam.paper.saved_file import plain_settings
from bayesadam.readers.formats import CheckpointOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More rows than this cannot be read; the picture shows the largest parameters.
_ROWS = 40
# Columns that a narrow console does without, the first to go first, and the characters between two columns.
_SPARE = ("shape", "95 %", "5 %", "weights")
_GAP = 3


@dataclass(frozen=True)
class LayerTable:
    """One row per parameter, and the total, as wide as the console has room for: names stay whole, columns are left out.

    Where a name and what is left do not fit all the same, names fold after their dots.
    """

    inspection: Inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heading, *rows = self.inspection.rows()
        for n_left_out in range(len(_SPARE) + 1):
            kept = [number for number, title in enumerate(heading) if title not in _SPARE[:n_left_out]]
            widths = [max(len(row[number]) for row in (heading, *rows)) for number in kept]
            room = options.max_width - sum(widths[1:]) - _GAP * (len(kept) - 1)
            if widths[0] <= room:
                break
        what = "Signal-to-noise ratio |μ|/σ" if self.inspection.has_weights else "Standard deviation σ"
        view = Table(title=f"{what} of the weights", title_justify="left", show_footer=True, box=SIMPLE)
        view.show_edge = view.pad_edge = False
        for number in kept:
            view.add_column(
                heading[number], rows[-1][number], justify="right" if number else "left", no_wrap=number > 0
            )
        for name, *cells in rows[:-1]:
            view.add_row(_folded(name, room), *(cells[number - 1] for number in kept[1:]))
        yield view
        if n_left_out:
            yield f"Left out for want of room: {', '.join(_SPARE[:n_left_out])}. A wider terminal shows them, and --json does."


def _folded(name: str, width: int) -> str:
    """A name on lines of at most so many characters, where its dots allow.

    >>> _folded("encoder.layers.0.weight", 12).split()
    ['encoder.', 'layers.0.', 'weight']
    """
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def picture(inspection: Inspection) -> Figure:
    """A histogram of log₁₀ |μ|/σ, or of log₁₀ σ, for each parameter, and how many weights it has, the dead ones marked."""
    largest = {row.name for row in sorted(inspection.parameters, key=lambda row: -row.weights)[:_ROWS]}
    shown = [row for row in inspection.parameters if row.name in largest]
    few = f", the {len(shown)} largest parameters" if len(shown) < len(inspection.parameters) else ""
    title = f"{Path(inspection.source).name}: {inspection.weights:,} weights, read as {inspection.optimizer}{few}"
    with plots.house_style():
        figure = plots.new_figure(11, 1.6 + 0.34 * max(len(shown), 3), title)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
        _draw_histograms(left, shown, inspection)
        _draw_weights(right, shown)
    return figure


def _draw_histograms(axes: Axes, shown: Sequence[ParameterReport], inspection: Inspection) -> None:
    edges = 10 ** np.linspace(*LOG_RANGE, BINS + 1)
    histograms = np.array([row.histogram for row in shown], dtype=float)
    histograms /= histograms.max(axis=1, keepdims=True).clip(min=1)
    # Tails too thin to be seen are not worth the room.
    occupied = np.flatnonzero(histograms.max(axis=0) > 0.01)
    for number, (row, heights) in enumerate(zip(shown, histograms, strict=True)):
        if heights.any():
            # Upwards is towards smaller numbers: the first parameter is on top.
            base, shade = number + 0.4, plots.colour("snr")
            axes.stairs(base - 0.8 * heights, edges, baseline=base, fill=True, color=shade, alpha=0.75)
            axes.plot([row.quantiles[1]] * 2, [number - 0.4, number + 0.4], color=plots.INK, linewidth=1.4)
    axes.plot([], [], color=plots.INK, linewidth=1.4, label="median")
    if inspection.threshold:
        axes.axvline(inspection.threshold, color=plots.colour("magnitude"), linewidth=1, linestyle=(0, (4, 3)))
        axes.plot([], [], color=plots.colour("magnitude"), linewidth=1, label=f"|μ|/σ = {inspection.threshold:g}")
    axes.set_xscale("log")
    if occupied.size:
        axes.set_xlim(edges[max(occupied[0] - 3, 0)], edges[min(occupied[-1] + 4, BINS)])
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    scale = "N = 1: only the order counts" if inspection.n_data is None else f"N = {inspection.n_data:,.0f}"
    title = "Signal-to-noise ratio of the weights" if inspection.has_weights else "Standard deviation of the weights"
    axes.set(title=title, xlabel=f"{inspection.quantity}  ({scale})")
    axes.legend(loc="lower left", bbox_to_anchor=(0.62, 1.0), ncols=2, borderaxespad=0.2)


def _draw_weights(axes: Axes, shown: Sequence[ParameterReport]) -> None:
    places = np.arange(len(shown))
    weights = np.array([row.weights for row in shown], dtype=float)
    axes.barh(places, weights, height=0.62, color=plots.FAINT)
    axes.set_xscale("log")
    axes.set_xlim(0.5, max(weights.max(), 2) * 100)
    for row, place in zip(shown, places, strict=True):
        dead = row.dead / row.weights if row.weights else 0.0
        described = f" {row.weights:,}" + (f", {dead:.1%} dead" if row.dead else "")
        axes.text(max(row.weights, 0.5), float(place), described, va="center", fontsize=7.5, color=plots.INK)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.set(title="Weights, and the share with v = 0", xlabel="weights")


def run_inspect(
    *,
    seed: int,
    out: Path | None,
    quiet: bool,
    path: Path,
    options: CheckpointOptions,
    plot: bool = False,
    json: bool = False,
    why: bool = False,
    **settings: Any,
) -> tuple[Path, ...]:
    """The `inspect` command; the settings are those of `inspect_checkpoint`.

    It prints. To `out` it writes the picture and `metrics.json`, too; with `plot` and no `out` the picture alone, as
    `NAME-snr.png` in the current folder. With `json` the inspection is one JSON object, alone on standard output; with `why`
    the report begins with how the file was read.
    """
    target = Target.of(out or Path(f"{path.resolve().stem}-snr.png"), "inspect.png")
    if target.file.suffix != ".png":
        raise SettingError(f"--out {target.file}: the picture is a PNG, name a file that ends in .png, or a folder")
    run = Run("inspect", seed, target.file.parent, plain_settings({"path": path, **settings}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext(), run.progress() as track:
        inspection = inspect_checkpoint(path, seed=seed, track=track, **settings, **vars(options))
    results = inspection.to_dict()
    if not json:
        reasons = ["\n".join(inspection.why)] if why else []
        notes = f"{inspection.legend}\n{inspection.scale_note}"
        run.show(*reasons, str(inspection.diagnosis), LayerTable(inspection), notes)
    paths: tuple[Path, ...] = ()
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if out is not None:
            paths = run.finish({target.file.name: plots.png(picture(inspection))}, results, name=target.record)
        elif plot:
            paths = run.write({target.file.name: plots.png(picture(inspection))})
    if json:
        print(as_json(results))
    return paths


def run_doctor(
    *, out: Path | None, quiet: bool, path: Path, options: CheckpointOptions, n_data: float | None, json: bool = False
) -> bool:
    """The `doctor` command: what `diagnose_checkpoint` says, and to `out` `metrics.json`; whether a posterior can be read."""
    run = Run("doctor", 0, out or Path(), plain_settings({"path": path, "n_data": n_data}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext(), run.busy("reading the state"):
        diagnosis = diagnose_checkpoint(path, n_data=n_data, **vars(options))
    results = {**diagnosis.to_dict(), "healthy": diagnosis.healthy}
    if not json:
        run.show(in_options(str(diagnosis)))
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if out is not None:
            run.finish({}, results)
    if json:
        print(as_json(results))
    return all(finding.severity != "error" for finding in diagnosis.findings)
