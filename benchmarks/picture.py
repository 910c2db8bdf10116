"""The picture of the README: probabilities, novelty and shift of one network, beside its own softmax.

    BAYESADAM_DATA=... python benchmarks/picture.py [--quick] [--network mlp] [--seed 4000] [--out out/bench]

One network of `doubt.py`, trained on eight classes of MNIST by its recipe there, plain Adam, and calibrated on 5,000
held-out images. Its softmax and the calibrated posterior answer the same images:

- probabilities: how often answers are right by how confident they are, test images, bins of a tenth that hold 20 images
  or more, and the negative log-likelihood;
- novelty: scores of test images, of the two digits left out of training, and of Fashion-MNIST; by the softmax
  1 − max p. AUROC is of test images against the others;
- shift: accuracy and mean confidence on 24 shifted copies of test images (`doubt_shifts.py`), means over the six kinds
  by strength.

The seed chose nothing, and is the only one that was run.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import matplotlib
import torch
from bayesadam._plots import FAINT, INK, MUTED, in_bins
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

import bayesadam as ba
from bayesadam import scores
from doubt_data import NEAR, NoData, Sizes, Suite, suite
from doubt_networks import RECIPES, train
from doubt_rows import batches_of, logits_of
from experiments import plots
from harness import arguments, class_scores, replaced, setting, write_results

SIZES, QUICK = Sizes(test=6000, shifted=2000), Sizes(320, 100, 40, 20, 20)
NETWORKS = ("mlp", "lenet", "resnet")
FAR, LEAST = "fashion-mnist", 20
# Who answers: probabilities, and a score that is larger for what is less familiar.
Answers = dict[str, tuple[Tensor, Tensor]]
SOFTMAX, OURS = "softmax", "bayesadam"
COLOURS = {SOFTMAX: plots.COLOURS["magnitude"], OURS: plots.COLOURS["badam"]}


def measured(network: str, held: Suite, seed: int, *, epochs: int) -> dict[str, Any]:
    """All that the picture shows."""
    recipe = RECIPES[network]
    one = train(network, held, seed=seed, epochs=epochs, batch=recipe.batch)
    n_data = len(held.train[0])
    own: Any = {"batch_size": recipe.batch, "likelihood": "classification"}
    posterior = ba.Posterior.from_optimizer(one.model, one.optimizer, n_data, **own)
    posterior = ba.calibrate(posterior, batches_of(held.held_out, 500))
    print(posterior.calibration, flush=True)

    def answers(x: Tensor) -> Answers:
        plain = logits_of(one.model, x).softmax(dim=1)
        found: Any = [posterior.predict(part) for part in x.split(500)]
        probs, novelty = (torch.cat([getattr(part, key) for part in found]) for key in ("probs", "novelty"))
        return {SOFTMAX: (plain, 1 - plain.double().amax(dim=1)), OURS: (probs, novelty)}

    y, known = held.test[1], answers(held.test[0])
    others = {name: answers(held.outside[name]) for name in (NEAR, FAR)}
    shifts = {name: [answers(copy) for copy in copies] for name, copies in held.shifted.items()}
    count = held.shifts
    clean = {who: (probs[:count], score[:count]) for who, (probs, score) in known.items()}
    strengths = [[clean] * len(shifts), *zip(*shifts.values(), strict=True)]
    return {
        "clean": {who: class_scores(probs, y) for who, (probs, _) in known.items()},
        "reliability": {who: reliability(probs, y) for who, (probs, _) in known.items()},
        "scores": {
            who: {name: found[who][1].tolist() for name, found in {"known": known, **others}.items()} for who in known
        },
        "auroc": {
            who: {name: scores.auroc(score, found[who][1]) for name, found in others.items()}
            for who, (_, score) in known.items()
        },
        "shift": {
            "accuracy": [mean(scores.accuracy(found[OURS][0], y[:count]) for found in each) for each in strengths],
            **{
                who: [mean(float(found[who][0].amax(dim=1).mean()) for found in each) for each in strengths]
                for who in known
            },
        },
        "shifted nll": {
            who: mean(class_scores(found[who][0], y[:count])["nll"] for each in strengths[1:] for found in each)
            for who in known
        },
    }


def mean(values: Any) -> float:
    return statistics.fmean(values)


def reliability(probs: Tensor, y: Tensor) -> list[list[float]]:
    """Mean confidence and share of right answers of each bin that holds enough."""
    confidence, answer = probs.max(dim=1)
    counts, sure, right = in_bins(confidence, answer == y, 10)
    enough = counts >= LEAST
    return torch.stack([sure / counts, right / counts])[:, enough].tolist()


# --- the picture: read at a width of 390 pixels ---------------------------------------------------------------------

LARGE: Any = {
    "font.size": 20,
    "axes.titlesize": 26,
    "axes.labelsize": 20,
    "axes.linewidth": 1.2,
    "lines.linewidth": 5,
    "lines.markersize": 11,
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
}
SETS = {"known": ("digits", MUTED), NEAR: ("new digits", plots.COLOURS["ensemble"]), FAR: ("clothes", INK)}


def picture(results: Mapping[str, Any]) -> Figure:
    """Three panels in a row, few words in large type, on white."""
    with plots.house_style():
        matplotlib.rcParams.update(LARGE)
        layout = ConstrainedLayoutEngine(wspace=0.06, w_pad=0.15, h_pad=0.15)
        figure = Figure(figsize=(12, 5.2), layout=layout)
        grid = figure.add_gridspec(2, 3)
        draw_reliability(figure.add_subplot(grid[:, 0]), results)
        draw_scores([figure.add_subplot(grid[row, 1]) for row in range(2)], results)
        draw_shift(figure.add_subplot(grid[:, 2]), results)
    return figure


def short(value: float, digits: int) -> str:
    """.985, and 1.28."""
    return f"{value:.{digits}f}".removeprefix("0")


def write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """At a place of the panel, its upper left corner being (0, 1)."""
    axes.text(x, y, text, transform=axes.transAxes, color=colour, va="top", weight="bold")


def draw_reliability(axes: Axes, results: Mapping[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=3)
    for place, (who, (sure, right)) in enumerate(results["reliability"].items()):
        axes.plot(sure, right, "o-", color=COLOURS[who])
        write(axes, 0.02, 1 - 0.24 * place, f"{who}\nNLL {short(results['clean'][who]['nll'], 3)}", COLOURS[who])
    low = min([0.45, *(value for found in results["reliability"].values() for value in found[0] + found[1])]) - 0.03
    axes.set(title="Probabilities", xlabel="confidence", ylabel="correct", xticks=(0.5, 1), yticks=(0.5, 1))
    axes.set(xlim=(low, 1.03), ylim=(low, 1.03))


def draw_scores(panels: list[Axes], results: Mapping[str, Any]) -> None:
    """Histograms, each of area 1, and AUROC by the name of its set."""
    for axes, (who, found) in zip(panels, results["scores"].items(), strict=True):
        high = max(max(each) for each in found.values())
        write(axes, 0.1, 0.97, who, COLOURS[who])
        for place, (name, values) in enumerate(found.items()):
            title, colour = SETS[name]
            axes.hist(values, bins=25, range=(0, high), density=True, histtype="stepfilled", alpha=0.6, color=colour)
            if name in results["auroc"][who]:
                write(axes, 0.1, 0.97 - 0.2 * place, f"{title} {short(results['auroc'][who][name], 3)}", colour)
        axes.set(xticks=(), yticks=(), xlim=(0, high))
    panels[0].set_title("Novelty")
    panels[1].set_xlabel("score")


def draw_shift(axes: Axes, results: Mapping[str, Any]) -> None:
    colours = {SOFTMAX: COLOURS[SOFTMAX], OURS: COLOURS[OURS], "accuracy": MUTED}
    for place, (name, colour) in enumerate(colours.items()):
        axes.plot(results["shift"][name], "o-", color=colour)
        write(axes, 0.04, 0.42 - 0.12 * place, "correct" if name == "accuracy" else name, colour)
    low = min(0.45, *results["shift"]["accuracy"]) - 0.03
    axes.set(title="Shift", xlabel="strength", xticks=range(5), yticks=(0.5, 1), ylim=(low, 1.03))


def main() -> None:
    parser = arguments(__doc__, quick="made-up images, few, one epoch")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--seed", type=int, default=4000)
    options = parser.parse_args()
    try:
        held = suite("mnist", 0, QUICK if options.quick else SIZES, made_up=options.quick)
    except NoData as error:
        sys.exit(f"no source delivered it: {error}")
    warnings.simplefilter("ignore", ba.errors.InputRangeWarning)  # shifted images have other ranges on purpose
    epochs = 1 if options.quick else RECIPES[options.network].epochs
    results = measured(options.network, held, options.seed, epochs=epochs)
    path = options.out / "picture.png"
    replaced(path, plots.png(picture(results)))
    told = {key: found for key, found in results.items() if key != "scores"}
    about = {**setting(), "quick": options.quick, "network": options.network, "seed": options.seed, "epochs": epochs}
    write_results(options.out, "picture", {**about, **told})
    print(f"picture: {path}")
    for who in (SOFTMAX, OURS):
        clean, auroc = results["clean"][who], results["auroc"][who]
        print(
            f"{who}: NLL {clean['nll']:.4f}, ECE {clean['ece']:.4f}; AUROC {auroc[NEAR]:.3f} (new digits), "
            f"{auroc[FAR]:.3f} (clothes); confidence at the strongest shifts {results['shift'][who][-1]:.3f}, "
            f"accuracy {results['shift']['accuracy'][-1]:.3f}; NLL under shift {results['shifted nll'][who]:.3f}"
        )


if __name__ == "__main__":
    main()
