"""Accuracy against bytes, from the rows of `smaller`: the picture of the README.

    python -m benchmarks.compress.picture --rows DIR [--nets resnet18 gpt mnist] [--out out/bench]

A panel a network, a line a method, a point a fraction or a number of bits; means over the seeds, with their spread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.harness import arguments, replaced
from benchmarks.compress.smaller import JOINT, Row

TITLES = {
    "mnist": "MNIST, perceptron",
    "lenet300": "MNIST, LeNet-300-100",
    "resnet18": "CIFAR-10, ResNet-18",
    "vit": "CIFAR-10, ViT",
    "gpt": "GPT, bytes",
    "bert": "BERT, bytes",
}
OURS, INK = "#0072B2", "#222222"
# Rows of a line, what it is called, and how it is drawn.
LINES: tuple[tuple[Callable[[Row], bool], str, dict[str, Any]], ...] = (
    (
        lambda row: row["method"] == "ours" and row["bits"] == JOINT,
        f"bayesadam, pruned and {JOINT} bits",
        {"color": OURS, "marker": "o", "linewidth": 2},
    ),
    (
        lambda row: row["method"] == "ours" and row["bits"] and not row["fraction"],
        "bayesadam, 8 to 2 bits",
        {"color": OURS, "marker": "s", "linestyle": "--"},
    ),
    (
        lambda row: row["method"] == "sparsegpt" and row["bits"] == JOINT,
        f"SparseGPT, pruned and {JOINT} bits",
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
    axes.set_xscale("log")
    axes.set_xlabel("MB")


def main() -> None:
    parser = arguments(__doc__, quick="nothing is left out")
    parser.add_argument("--rows", type=Path, required=True, help="folder of what `smaller` wrote")
    parser.add_argument("--nets", nargs="+", choices=TITLES, default=["resnet18", "gpt", "mnist"])
    options = parser.parse_args()
    figure = Figure(figsize=(4 * len(options.nets), 3.4), layout="constrained")
    for index, net in enumerate(options.nets):
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.rows.glob(f"{net}-*.json"))]
        axes = figure.add_subplot(1, len(options.nets), index + 1)
        panel(axes, [row for rows in found for row in rows])
        is_text = net in ("gpt", "bert")
        axes.set_title(f"{TITLES[net]}: {'bits a byte' if is_text else 'test accuracy, %'}", color=INK, fontsize=10)
        if is_text:
            axes.invert_yaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path = options.out / "smaller.png"
    replaced(path, lambda unfinished: figure.savefig(unfinished, dpi=120, format="png"))
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
