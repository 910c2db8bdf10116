"""Accuracy against bytes: a panel a network, a line a method, a point a fraction or a number of bits.

Means over the seeds, with their spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

Row = dict[str, Any]
TITLES = {
    "mnist": "MNIST, perceptron",
    "lenet300": "MNIST, LeNet-300-100",
    "resnet18": "CIFAR-10, ResNet-18",
    "vit": "CIFAR-10, ViT",
    "gpt": "GPT, bytes",
    "bert": "BERT, bytes",
}
OURS, INK, TEXTS = "#0072B2", "#222222", ("gpt", "bert")
# Rows of a line, what it is called, and how it is drawn.
LINES: tuple[tuple[Callable[[Row], bool], str, dict[str, Any]], ...] = (
    (
        lambda row: row["method"] == "ours" and row["bits"] == 4,
        "bayesadam, pruned and 4 bits",
        {"color": OURS, "marker": "o", "linewidth": 2},
    ),
    (
        lambda row: row["method"] == "ours" and row["bits"] and not row["fraction"],
        "bayesadam, 8 to 2 bits",
        {"color": OURS, "marker": "s", "linestyle": "--"},
    ),
    (
        lambda row: row["method"] == "sparsegpt" and row["bits"] == 4,
        "SparseGPT, pruned and 4 bits",
        {"color": "#D55E00", "marker": "o"},
    ),
    (
        lambda row: row["method"] == "gptq" and row["bits"],
        "GPTQ, 8 to 2 bits",
        {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    ),
    (
        lambda row: row["method"] == "magnitude" and not row["bits"],
        "smallest weights removed",
        {"color": "#767676", "marker": "o"},
    ),
)


def panel(axes: Axes, rows: list[Row]) -> None:
    """One network, most of whose rows have as many inputs as any."""
    dense = [row["score"] for row in rows if row["method"] == "dense"]
    most = max(row["inputs"] for row in rows)
    axes.axhline(fmean(dense), color="#D9D9D9", linewidth=1, zorder=0)
    for chosen, label, style in LINES:
        points: dict[float, list[Row]] = {}
        for row in (row for row in rows if chosen(row) and row["inputs"] in (0, most)):
            points.setdefault(row["fraction"] or row["bits"], []).append(row)
        seen = sorted(
            (fmean(row["bytes"] for row in some) / 1e6, [row["score"] for row in some]) for some in points.values()
        )
        spread = [stdev(scores) if len(scores) > 1 else 0.0 for _, scores in seen]
        axes.errorbar([x for x, _ in seen], [fmean(y) for _, y in seen], spread, label=label, markersize=4, **style)
    # Lines end where a method has lost the network.
    worst, best = (1.4, 0.98) if rows[0]["net"] in TEXTS else (0.85, 1.01)
    axes.set_ylim(worst * fmean(dense), best * fmean(dense))
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB")


def drawn(rows: Sequence[Row], nets: Sequence[str]) -> Figure:
    """The panels of some networks."""
    figure = Figure(figsize=(max(4 * len(nets), 8), 3.6), layout="constrained")
    for index, net in enumerate(nets):
        axes = figure.add_subplot(1, len(nets), index + 1)
        panel(axes, [row for row in rows if row["net"] == net])
        what = "bits a byte" if net in TEXTS else "test accuracy, %"
        axes.set_title(f"{TITLES.get(net, net)}: {what}", color=INK, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
