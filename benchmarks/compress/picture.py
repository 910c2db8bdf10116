"""Accuracy against bytes: a panel a network, a line a method, a point a fraction or a number of bits.

    python -m benchmarks.compress.picture

Of docs/results/smaller.json, means over the seeds with their standard errors: smaller.png; with the demo's error bars
beside them: first.png.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bayesadam.cli import demo
from benchmarks.common.harness import arguments

Row = dict[str, Any]
ROWS = Path(__file__).parents[2] / "docs" / "results" / "smaller.json"
# What a network is called, and whether its score is bits a byte.
NETS = {"mnist": ("MNIST, perceptron", False), "resnet18": ("CIFAR-10, ResNet-18", False), "gpt": ("GPT, bytes", True)}
OURS, INK = "#0072B2", "#222222"
# By the rows' method and what was done, "pruned", "rounded" or "both": what a line is called, and how it is drawn.
LINES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("ours", "both"): ("bayesadam, pruned and 4 bits", {"color": OURS, "marker": "o", "linewidth": 2}),
    ("ours", "rounded"): ("bayesadam, 8 to 2 bits", {"color": OURS, "marker": "s", "linestyle": "--"}),
    ("sparsegpt", "both"): ("SparseGPT, pruned and 4 bits", {"color": "#D55E00", "marker": "o"}),
    ("gptq", "rounded"): ("GPTQ, 8 to 2 bits", {"color": "#E69F00", "marker": "s", "linestyle": "--"}),
    ("magnitude", "pruned"): ("smallest weights removed", {"color": "#767676", "marker": "o"}),
}


def on_line(row: Row, method: str, done: str) -> bool:
    """Whether a row is on a line; 4 bits without pruning is on both of ours."""
    bits, fraction = row["bits"], row["fraction"]
    return row["method"] == method and {"both": bits == 4, "rounded": bits and not fraction, "pruned": not bits}[done]


def panel(axes: Axes, rows: list[Row]) -> None:
    """One network, most of whose rows have as many inputs as any."""
    dense = next(row["score"] for row in rows if row["method"] == "dense")
    most, (title, is_text) = max(row["inputs"] for row in rows), NETS[rows[0]["net"]]
    axes.axhline(dense, color="#D9D9D9", linewidth=1, zorder=0)
    for key, (label, style) in LINES.items():
        line = sorted(
            (row for row in rows if on_line(row, *key) and row["inputs"] in (0, most)), key=lambda r: r["bytes"]
        )
        # What others lose by their batch norms is given back to them.
        y = [row["score"] if row["method"] == "ours" else max(row["score"], row["norms again"]) for row in line]
        x, error = [row["bytes"] / 1e6 for row in line], [row["error"] for row in line]
        axes.errorbar(x, y, error, label=label, markersize=4, **style)
    # Lines end where a method has lost the network.
    worst, best = (1.4, 0.98) if is_text else (0.85, 1.01)
    axes.set(ylim=(worst * dense, best * dense), xscale="log", xlabel="MB")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{title}: {'bits a byte' if is_text else 'test accuracy, %'}", color=INK, fontsize=10)


def bands(axes: Axes, drawing: dict[str, Any]) -> None:
    """The demo's error bars: two standard deviations without the input side within those with it."""
    x = drawing["grid"].flatten().numpy()
    both = zip(drawing["drawn"].values(), ("Adam's state alone", "with the input side"), (0.5, 0.2), strict=True)
    for (mean, std), label, alpha in both:
        axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=OURS, alpha=alpha, linewidth=0, label=label)
    axes.plot(x, mean, color=OURS)
    axes.plot(drawing["x"], drawing["y"], ".", color=INK, markersize=3, label="training data")
    axes.set(xlabel="x", xlim=(x[0], x[-1]))
    axes.set_title("error bars, ±2 standard deviations", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def drawn(rows: Sequence[Row], nets: Sequence[str], drawing: dict[str, Any] | None = None) -> Figure:
    """The panels of some networks, and of the demo."""
    wide = len(nets) + (drawing is not None)
    figure = Figure(figsize=(4 * wide, 3.6), layout="constrained")
    panels = figure.subplots(1, wide)
    for axes, net in zip(panels, nets, strict=False):
        panel(axes, [row for row in rows if row["net"] == net])
    if drawing:
        bands(panels[-1], drawing)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def main() -> None:
    out, rows = arguments(__doc__, quick="the same").parse_args().out, json.loads(ROWS.read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    drawn(rows, tuple(NETS)).savefig(out / "smaller.png", dpi=120)
    drawn(rows, ("resnet18", "gpt"), demo.bands()).savefig(out / "first.png", dpi=120)
    print(f"pictures: {out / 'smaller.png'}, {out / 'first.png'}")


if __name__ == "__main__":
    main()
