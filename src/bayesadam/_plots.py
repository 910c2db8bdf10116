"""Pictures with matplotlib, on the user's axes or on new ones, and the statistics that they share with `scores`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import MatchError, SettingError

# Okabe and Ito's palette, safe for the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A7D0A", "#6A5ACD")
INK, MUTED, FAINT = "#222222", "#767676", "#D9D9D9"
Array = NDArray[np.float64]
_BINS = 15
# More lines cannot be told apart.
_MOST_OUTPUTS = 8


def chance_above(inside: Tensor, outside: Tensor) -> float:
    """P(outside > inside) + ½ P(outside = inside) over all pairs, by the sum of ranks: the area under the ROC curve."""
    scores = torch.cat([inside.flatten(), outside.flatten()]).double()
    _, position, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[position]
    n_in, n_out = inside.numel(), outside.numel()
    return float((ranks[n_in:].sum() - n_out * (n_out + 1) / 2) / (n_in * n_out))


def in_bins(confidence: Tensor, right: Tensor, bins: int) -> Tensor:
    """The number of answers in each of equal bins of confidence, their sum of confidence, and how many are right.

    >>> in_bins(torch.tensor([0.4, 0.9, 1.0]), torch.tensor([False, True, True]), 2)
    tensor([[1.0000, 2.0000],
            [0.4000, 1.9000],
            [0.0000, 2.0000]], dtype=torch.float64)
    """
    confidence = confidence.double()
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, right.double()])
    return values.new_zeros(3, bins).index_add_(1, index, values)


def predictive(p: Any, x: Any, targets: Any, other: Any, kind: str | None, level: float, ax: Any) -> Any:
    """`Predictive.plot`."""
    is_numeric = hasattr(p, "predicted_mean")
    allowed = ("bands", "novelty") if is_numeric else ("probabilities", "reliability", "novelty")
    if kind is None:
        first = allowed[0] if targets is None or is_numeric else "reliability"
        kind = "novelty" if other is not None else first
    if kind not in allowed:
        raise SettingError(f"kind must be one of {allowed} for a {type(p).__name__}, got {kind!r}")
    n = len(p.mean)
    places = None if x is None else _array(torch.as_tensor(x)).reshape(-1)
    if places is not None and len(places) != n:
        raise MatchError(
            f"x has {len(places)} numbers and the prediction {n} examples: it must have one number for each, such as "
            "one column of the inputs"
        )
    y = None if targets is None else torch.as_tensor(targets)
    if kind == "novelty":
        groups, title = {"these": _array(p.novelty)}, ""
        if other is not None:
            groups["other"] = _array(other.novelty)
            title = f"AUROC {chance_above(p.novelty, other.novelty.to(p.novelty.device)):.3f}"
        return histogram(ax, groups, label="novelty (nats)", title=title)
    if kind == "bands":
        return _bands(p, places, y, level, ax)
    if kind == "probabilities":
        return _probabilities(ax, places, _array(p.class_probs.flatten(0, -2)))
    return _reliability(ax, p.class_probs, y)


def _array(tensor: Tensor) -> Array:
    found: Array = tensor.detach().double().cpu().numpy()
    return found


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


def _bands(p: Any, x: Array | None, y: Tensor | None, level: float, ax: Any) -> Any:
    """Means with their intervals: lines and bands over x, or dots and bars example by example."""
    n, centre = len(p.mean), p.predicted_mean
    means = _array(centre.reshape(n, -1))
    outputs = means.shape[1]
    if outputs > _MOST_OUTPUTS:
        raise SettingError(
            f"{outputs} outputs are too many for one picture, which holds {_MOST_OUTPUTS}: predict some of them, "
            "predict(..., outputs=[0, 1])"
        )
    intervals: dict[str, tuple[Array, Array]] = {}
    if p.noise_known:
        low, high = (_array(end.reshape(n, -1)) for end in p.interval(level))
        intervals["observations"] = low, high
    if not p.likelihood.resolution:
        # E[y] ± z sd of that mean, which is Gaussian as f is.
        z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        reach = z * np.sqrt(_array(p.variance.reshape(n, -1))[:, :outputs])
        intervals["the function"] = means - reach, means + reach
    targets = None if y is None else _array(p.likelihood.matched(y, p.mean).reshape(n, -1))
    ax = axes_or_new(ax)
    places = np.arange(n, dtype=float) if x is None else x
    order = np.argsort(places, kind="stable")
    for k in range(outputs):
        shade, name = COLOURS[k], "mean" if outputs == 1 else f"output {k}"
        # Without x the outputs of an example are beside each other, so that none hides another.
        here = places if x is not None else places + 0.6 * (k - (outputs - 1) / 2) / outputs
        for (of, (low, high)), (alpha, width) in zip(intervals.items(), ((0.16, 1.2), (0.34, 3.0)), strict=False):
            # The first output's bands stand for all in the legend.
            label = f"{100 * level:g} % of {of}" if k == 0 else None
            if x is None:
                ax.vlines(here, low[:, k], high[:, k], color=shade, alpha=2 * alpha, linewidth=width, label=label)
            else:
                ax.fill_between(here[order], low[order, k], high[order, k], color=shade, alpha=alpha, lw=0, label=label)
        if x is None:
            ax.plot(here, means[:, k], "o", color=shade, markersize=3.5, markeredgewidth=0, label=name)
        else:
            ax.plot(here[order], means[order, k], color=shade, linewidth=1.6, label=name)
        if targets is not None:
            label = "targets" if k == 0 else None
            ax.plot(here, targets[:, k], "o", color=INK, ms=2.6, mew=0, alpha=0.6, label=label, zorder=3)
    ax.set_xlabel("example" if x is None else "x")
    ax.set_ylabel("y")
    if x is None:
        ax.xaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(integer=True))
    return _with_legend(ax)


def _probabilities(ax: Any, x: Array | None, probs: Array) -> Any:
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


def _reliability(ax: Any, probs: Tensor, y: Tensor | None) -> Any:
    """Accuracy against confidence, ± a standard error, bin by bin, and Σ_k (n_k/n) |accuracy_k − confidence_k|."""
    if y is None:
        raise SettingError("a reliability diagram needs targets=, the classes that were right")
    if y.numel() != probs[..., 0].numel():
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the probabilities {tuple(probs.shape)}")
    y = y.to(probs.device).reshape(probs.shape[:-1])
    confidence, answer = probs.double().max(dim=-1)
    # Negative class indices are padding, which a loss leaves out.
    counted = y >= 0
    bins = _array(in_bins(confidence[counted], (answer == y)[counted], _BINS))
    n, sure, right = bins[:, bins[0] > 0]
    sure, share = sure / n, right / n
    ece = float((n * np.abs(share - sure)).sum() / n.sum())
    ax = axes_or_new(ax, height=4.4)
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="as sure as right")
    label = f"bins of {n.sum():,.0f} examples, area by number"
    error = np.sqrt(share * (1 - share) / n)
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
