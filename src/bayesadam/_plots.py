"""Pictures with matplotlib, on the user's axes or on new ones, and the statistics that they share with `scores`."""

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
# Weights of a layer that its picture is made of.
_PLOTTED = 1_000_000


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


def answered_up_to(doubt: Tensor, wrong: Tensor) -> Tensor:
    """How many examples are answered up to each distinct doubt, and how many errors are among them, (2, distinct)."""
    if doubt.dim() != 1 or doubt.shape != wrong.shape or not len(doubt):
        shapes = f"{tuple(doubt.shape)} and {tuple(wrong.shape)}"
        raise MatchError(f"pass one doubt and one error for each example, got {shapes}")
    _, place, counts = torch.unique(doubt, return_inverse=True, return_counts=True)
    errors = torch.zeros_like(counts, dtype=torch.float64).index_add_(0, place, wrong.to(place.device).double())
    return torch.stack([counts.double(), errors]).cumsum(dim=1)


def predictive(p: Any, x: Any, targets: Any, other: Any, kind: str | None, level: float, ax: Any) -> Any:
    """`Predictive.plot`."""
    is_numeric = hasattr(p, "predicted_mean")
    allowed = (*(("bands",) if is_numeric else ("probabilities", "reliability")), "novelty", "risk-coverage")
    if kind is None:
        first = allowed[0] if targets is None or is_numeric else "reliability"
        kind = "novelty" if other is not None else first
    if kind not in allowed:
        raise SettingError(f"kind must be one of {allowed} for a {type(p).__name__}, got {kind!r}")
    y = None if targets is None else torch.as_tensor(targets)
    if kind == "novelty":
        return _novelty(ax, p, other)
    if kind == "risk-coverage":
        return _risk_coverage(ax, p, y)
    if kind == "reliability":
        return _reliability(ax, p.class_probs, y)
    lines = _array(p.predicted_mean.reshape(len(p.mean), -1) if is_numeric else p.class_probs.flatten(0, -2))
    # Without x the examples are in the order of the first line.
    places = np.argsort(np.argsort(lines[:, 0])).astype(float) if x is None else _array(torch.as_tensor(x)).reshape(-1)
    if len(places) != len(lines):
        many = f"x has {len(places)} numbers and the prediction {len(lines)} examples"
        raise MatchError(f"{many}: give one number for each, such as one column of the inputs")
    ax = axes_or_new(ax)
    ax.set_xlabel("x" if x is not None else f"examples by {'mean' if is_numeric else 'probability of class 0'}")
    order = np.argsort(places, kind="stable")
    if kind == "bands":
        return _bands(ax, p, places, order, lines, y, level)
    for k, line in enumerate(lines.T):
        ax.plot(places[order], line[order], color=COLOURS[k % len(COLOURS)], linewidth=1.6, label=f"class {k}")
    ax.set(ylim=(-0.02, 1.02), ylabel="probability")
    return _with_legend(ax)


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


def _bands(ax: Any, p: Any, x: Array, order: Any, means: Array, y: Tensor | None, level: float) -> Any:
    """Means with their intervals over x."""
    n, outputs = means.shape
    if outputs > len(COLOURS):
        raise SettingError(f"{outputs} outputs are too many for one picture: predict(..., outputs=[0, 1]) takes some")
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
    for k in range(outputs):
        shade, at = COLOURS[k], x[order]
        for (of, (low, high)), alpha in zip(intervals.items(), (0.16, 0.34), strict=False):
            # The first output's bands stand for all in the legend.
            label = f"{100 * level:g} % of {of}" if k == 0 else None
            ax.fill_between(at, low[order, k], high[order, k], color=shade, alpha=alpha, linewidth=0, label=label)
        ax.plot(at, means[order, k], color=shade, linewidth=1.6, label="mean" if outputs == 1 else f"output {k}")
        if targets is not None:
            label = "targets" if k == 0 else None
            ax.plot(x, targets[:, k], "o", color=INK, ms=2.6, mew=0, alpha=0.6, label=label, zorder=3)
    ax.set_ylabel("y")
    return _with_legend(ax)


def _reliability(ax: Any, probs: Tensor, y: Tensor | None) -> Any:
    """Accuracy against confidence, bin by bin, and Σ_k (n_k/n) |accuracy_k − confidence_k|."""
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
    ax.scatter(sure, share, s=10 + 110 * n / n.max(), color=COLOURS[0], linewidth=0, zorder=3, label=label)
    ax.set(xlim=(0, 1.03), ylim=(0, 1.03), aspect="equal", ylabel="accuracy")
    ax.set_xlabel("confidence, the probability of the likeliest class")
    ax.set_title(f"expected calibration error {ece:.3f}", loc="left", fontsize="medium")
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    return ax


def _risk_coverage(ax: Any, p: Any, y: Tensor | None) -> Any:
    """The share of wrong answers against the share answered, by doubt and by novelty, and where `answered` is."""
    if y is None:
        raise SettingError("a risk-coverage curve needs targets=, which say what is wrong")
    ax, wrong = axes_or_new(ax), p.wrong(y)
    for shade, (name, doubt) in zip(COLOURS, {"confidence": p.doubt, "novelty": p.novelty}.items(), strict=False):
        answered, errors = map(_array, answered_up_to(doubt.detach(), wrong))
        style: Any = {"color": shade, "linewidth": 1.6, "drawstyle": "steps-post", "label": f"by {name}"}
        ax.plot(answered / len(doubt), errors / answered, **style)
    if p.abstention is not None:
        ax.axhline(p.abstention.risk, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="risk asked for")
        answers = p.answered
        if bool(answers.any()):
            at = float(answers.double().mean()), float(wrong[answers].double().mean())
            ax.plot(*at, "o", color=INK, ms=5, mew=0, zorder=3, label="answered")
    ax.set(xlim=(0, 1.02), xlabel="share answered", ylabel="share of the answers that is wrong")
    ax.set_ylim(bottom=0)
    return _with_legend(ax)


def _novelty(ax: Any, p: Any, other: Any) -> Any:
    """How the novelty is distributed, here and in the other prediction, as shares over common bins."""
    groups, title = {"these": _array(p.novelty)}, ""
    if other is not None:
        groups["other"] = _array(other.novelty)
        title = f"AUROC {chance_above(p.novelty, other.novelty.to(p.novelty.device)):.3f}"
    ax = axes_or_new(ax)
    edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), bins=30)
    for shade, (name, values) in zip(COLOURS, groups.items(), strict=False):
        own: Any = {"bins": edges, "weights": np.full(len(values), 1 / len(values)), "color": shade}
        ax.hist(values, **own, histtype="stepfilled", alpha=0.5, label=f"{name}, {len(values):,} examples")
    ax.set(xlabel="novelty", ylabel="share of examples")
    ax.set_title(title, loc="right", fontsize="medium")
    return _with_legend(ax)


def ratios(ax: Any, snr: Mapping[str, Tensor]) -> Any:
    """`snr()` of a Gaussian, layer by layer; of a large one evenly spaced weights."""
    layers: dict[str, list[Tensor]] = {}
    for name, values in snr.items():
        flat = values.flatten()
        layers.setdefault(name.rpartition(".")[0] or name, []).append(flat[:: 1 + flat.numel() // _PLOTTED].cpu())
    groups = {name: torch.cat(parts).double().numpy() for name, parts in layers.items()}
    label = "signal-to-noise ratio |μ|/σ of the weights"
    return spreads(ax, groups, label=label, threshold=1.0, meaning="|μ| = σ")


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
