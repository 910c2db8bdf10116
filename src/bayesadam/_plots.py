"""Pictures of a few kinds, of plain arrays, on the user's axes or on new ones; matplotlib is needed from here on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayesadam._extras import require

# Okabe and Ito's palette, safe for the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A7D0A", "#6A5ACD")
INK, MUTED, FAINT = "#222222", "#767676", "#D9D9D9"
Array = NDArray[np.float64]


class Band(NamedTuple):
    """An output: its mean, (n,), the interval of observations and that of the function, (2, n), where they are known."""

    name: str
    mean: Array
    observations: Array | None
    function: Array | None


def axes_or_new(ax: Any, *, height: float = 3.4) -> Any:
    """The axes given, or those of a new figure of pyplot's."""
    if ax is None:
        _, ax = require("matplotlib.pyplot").subplots(figsize=(5.6, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _with_legend(ax: Any) -> Any:
    """A legend above the axes, where it hides nothing."""
    above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    ax.legend(**above, frameon=False, fontsize="small", ncols=3, columnspacing=1.2, handlelength=1.4)
    return ax


def bands(ax: Any, x: Array | None, found: Sequence[Band], targets: Array | None, level: float) -> Any:
    """Means with their intervals: lines and bands over x, or dots and bars example by example."""
    ax = axes_or_new(ax)
    places = np.arange(len(found[0].mean), dtype=float) if x is None else x
    order = np.argsort(places, kind="stable")
    for number, band in enumerate(found):
        shade = COLOURS[number % len(COLOURS)]
        # Of several outputs the first one's bands stand for all.
        is_first = number == 0
        # Beside each other where there is no x, so that the outputs of an example do not hide one another.
        here = places if x is not None else places + 0.6 * (number - (len(found) - 1) / 2) / len(found)
        for interval, of, alpha, width in (
            (band.observations, "observations", 0.16, 1.2),
            (band.function, "the function", 0.34, 3.0),
        ):
            if interval is None:
                continue
            low, high = interval
            label = f"{100 * level:g} % of {of}" if is_first else None
            if x is None:
                ax.vlines(here, low, high, color=shade, alpha=min(1.0, 2 * alpha), linewidth=width, label=label)
            else:
                ax.fill_between(here[order], low[order], high[order], color=shade, alpha=alpha, lw=0, label=label)
        if x is None:
            ax.plot(here, band.mean, "o", color=shade, markersize=3.5, markeredgewidth=0, label=band.name)
        else:
            ax.plot(here[order], band.mean[order], color=shade, linewidth=1.6, label=band.name)
        if targets is not None:
            label = "targets" if is_first else None
            ax.plot(here, targets[:, number], "o", color=INK, ms=2.6, mew=0, alpha=0.6, label=label, zorder=3)
    ax.set_xlabel("example" if x is None else "x")
    ax.set_ylabel("y")
    if x is None:
        ax.xaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(integer=True))
    return _with_legend(ax)


def probabilities(ax: Any, x: Array | None, probs: Array) -> Any:
    """The probability of every class over x, or its mean over the examples as bars."""
    ax = axes_or_new(ax)
    n, classes = probs.shape
    if x is None:
        ax.bar(np.arange(classes), probs.mean(axis=0), color=COLOURS[0], width=0.7)
        ax.set_xlabel("class")
        ax.set_ylabel(f"mean probability of {n:,} examples")
        ax.xaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(integer=True))
        return ax
    order = np.argsort(x, kind="stable")
    for k in range(classes):
        ax.plot(x[order], probs[order, k], color=COLOURS[k % len(COLOURS)], linewidth=1.6, label=f"class {k}")
    ax.set_ylim(-0.02, 1.02)
    ax.set_xlabel("x")
    ax.set_ylabel("probability")
    return _with_legend(ax)


def reliability(ax: Any, counts: Array, confidence: Array, right: Array) -> Any:
    """How often answers are right against how sure they were, ± a standard error, of numbers and sums bin by bin.

    The expected calibration error is Σ_k (n_k/n) |accuracy_k − confidence_k|, as in `scores.ece`.
    """
    ax = axes_or_new(ax, height=4.4)
    filled = counts > 0
    n = counts[filled]
    sure, share = confidence[filled] / n, right[filled] / n
    error = np.sqrt(share * (1 - share) / n)
    ece = float((n * np.abs(share - sure)).sum() / n.sum())
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="as sure as right")
    label = f"bins of {n.sum():,.0f} examples, area by number"
    ax.errorbar(sure, share, error, fmt="none", ecolor=COLOURS[0], elinewidth=1, alpha=0.7)
    ax.scatter(sure, share, s=10 + 110 * n / n.max(), color=COLOURS[0], linewidth=0, zorder=3, label=label)
    ax.set_xlim(0, 1.03)
    ax.set_ylim(0, 1.03)
    ax.set_aspect("equal")
    ax.set_xlabel("confidence, the probability of the likeliest class")
    ax.set_ylabel("accuracy")
    ax.set_title(f"expected calibration error {ece:.3f}", loc="left", fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    return ax


def histogram(ax: Any, groups: Mapping[str, Array], *, label: str, title: str = "") -> Any:
    """How each group is distributed, as shares of it over common bins."""
    ax = axes_or_new(ax)
    every = np.concatenate(list(groups.values()))
    edges = np.histogram_bin_edges(every, bins=30)
    for number, (name, values) in enumerate(groups.items()):
        shade = COLOURS[number % len(COLOURS)]
        own: Any = {"bins": edges, "weights": np.full(len(values), 1 / len(values))}
        ax.hist(values, **own, color=shade, alpha=0.25)
        ax.hist(values, **own, histtype="step", color=shade, linewidth=1.4, label=f"{name}, {len(values):,} examples")
    ax.set_xlabel(label)
    ax.set_ylabel("share of examples")
    ax.set_title(title, loc="right", fontsize="medium")
    return _with_legend(ax)


def spreads(ax: Any, groups: Mapping[str, Array], *, label: str, threshold: float, meaning: str) -> Any:
    """Median, middle half and middle nine tenths of each group's positive numbers, a row each on a logarithmic axis."""
    ax = axes_or_new(ax, height=min(20.0, 1.2 + 0.26 * len(groups)))
    shade = COLOURS[0]
    ax.set_xscale("log")
    ax.axvline(threshold, color=FAINT, linewidth=1.2, zorder=0)
    for row, values in enumerate(groups.values()):
        positive = values[values > 0]
        if not len(positive):
            continue
        p5, p25, p50, p75, p95 = np.quantile(positive, (0.05, 0.25, 0.5, 0.75, 0.95))
        first = row == 0
        ax.plot([p5, p95], [row, row], color=shade, lw=1, alpha=0.6, label="middle 90 %" if first else None)
        ax.plot([p25, p75], [row, row], color=shade, lw=4.5, alpha=0.6, label="middle 50 %" if first else None)
        ax.plot([p50], [row], "o", color=INK, ms=4, mew=0, label="median" if first else None)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_ylabel("layer")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(label)
    ax.text(threshold, 1.01, meaning, color=MUTED, fontsize="small", transform=ax.get_xaxis_transform(), ha="center")
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax
