"""Accuracy against bytes: a panel a network, a line a method, a point a fraction or a number of bits.

    python -m benchmarks.compress.picture [--rows docs/results/smaller.json]

Means over the seeds with their standard errors: smaller.png; with the demo's error bars beside them: first.png.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bayesadam.cli import demo
from benchmarks.common.harness import arguments

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
    dense = next(row["score"] for row in rows if row["method"] == "dense")
    most = max(row["inputs"] for row in rows)
    axes.axhline(dense, color="#D9D9D9", linewidth=1, zorder=0)
    for chosen, label, style in LINES:
        line = sorted((row for row in rows if chosen(row) and row["inputs"] in (0, most)), key=lambda row: row["bytes"])
        # What others lose by their batch norms is given back to them.
        y = [row["score"] if row["method"] == "ours" else max(row["score"], row["norms again"]) for row in line]
        x, error = [row["bytes"] / 1e6 for row in line], [row["error"] for row in line]
        axes.errorbar(x, y, error, label=label, markersize=4, **style)
    # Lines end where a method has lost the network.
    worst, best = (1.4, 0.98) if rows[0]["net"] in TEXTS else (0.85, 1.01)
    axes.set_ylim(worst * dense, best * dense)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB")
    what = "bits a byte" if rows[0]["net"] in TEXTS else "test accuracy, %"
    axes.set_title(f"{TITLES[rows[0]['net']]}: {what}", color=INK, fontsize=10)


def bands(axes: Axes, drawing: dict[str, Any]) -> None:
    """The demo's error bars: two standard deviations without the input side within those with it."""
    x = drawing["grid"].flatten().numpy()
    both = zip(drawing["drawn"].values(), ("Adam's state alone", "with the input side"), (0.5, 0.2), strict=True)
    for (mean, std), label, alpha in both:
        axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=OURS, alpha=alpha, linewidth=0, label=label)
    axes.plot(x, mean, color=OURS)
    axes.plot(drawing["x"], drawing["y"], ".", color=INK, markersize=3, label="training data")
    axes.set(title="error bars, ±2 standard deviations", xlabel="x", xlim=(x[0], x[-1]))
    axes.title.set(color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def drawn(rows: Sequence[Row], nets: Sequence[str], drawing: dict[str, Any] | None = None) -> Figure:
    """The panels of some networks, and of the demo."""
    wide = len(nets) + (drawing is not None)
    figure = Figure(figsize=(4 * wide, 3.6), layout="constrained")
    for index, net in enumerate(nets):
        panel(figure.add_subplot(1, wide, index + 1), [row for row in rows if row["net"] == net])
    if drawing:
        bands(figure.add_subplot(1, wide, wide), drawing)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def main() -> None:
    parser = arguments(__doc__, quick="the same")
    parser.add_argument("--rows", type=Path, default=Path("docs/results/smaller.json"), help="what `smaller` wrote")
    options = parser.parse_args()
    rows, out = json.loads(options.rows.read_text(encoding="utf-8")), options.out
    out.mkdir(parents=True, exist_ok=True)
    drawn(rows, ("mnist", "resnet18", "gpt")).savefig(out / "smaller.png", dpi=120)
    drawn(rows, ("resnet18", "gpt"), demo.bands()).savefig(out / "first.png", dpi=120)
    print(f"pictures: {out / 'smaller.png'}, {out / 'first.png'}")


if __name__ == "__main__":
    main()
