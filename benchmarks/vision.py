"""CIFAR-10: calibrated probabilities and novelty of networks trained with AdamW, beside temperatures and ensembles.

    BAYESADAM_DATA=... python benchmarks/vision.py [--quick] [--networks resnet18 vit] [--only whole eight] [--rows ...]
        [--seeds 1000 1001 1002 1003 1004] [--data FOLDER] [--device cuda] [--out out/bench]

Stopped, it resumes: a network is a file in out/bench/vision, and so is every row of it, so that several processes may
take networks or seeds, and one with all seeds, which adds the rows of several networks, may come after them. The images
are those of `benchmarks/cifar.py` in --data or $BAYESADAM_DATA/cifar-10; MNIST's and Fashion-MNIST's lie below
$BAYESADAM_DATA. With --quick they are made up where CIFAR-10 is not there.

ResNet-18 and a small vision transformer (patches of 4, width 192, 6 blocks), AdamW with torch's own settings, a cosine
to 0, batches of 128, flips and crops, 10 epochs and 20. "whole" networks know all ten classes: probabilities are scored
on test images, doubt on test images against those of MNIST, of Fashion-MNIST (made 32 × 32 × 3) and uniform noise.
"eight" networks, of seeds 1000 to 1002, have never seen an automobile or a cat, which are what doubt is scored against;
ours are not calibrated there, and ten held-out images are the reference. The last 5,000 training images are never
trained on; the first 500 of those calibrate, ours and temperatures alike.

Rows: one network alone; at the temperature of least held-out NLL; the posterior of AdamW's second moment; the Kronecker
one of the gradients of 50 training batches; and, of the networks of all seeds, the ensemble, the ensemble with one
temperature for all logits, and the mixtures. Ours: `ba.calibrate` for probabilities, `novelty` for doubt. Beside it
stand 1 − max p and the entropy of the row's probabilities, the energy −log Σ exp f, its mean over networks, and what
several networks disagree on, the entropy of their mean less the mean of their entropies. AUROC is of test images
against the others. No setting was chosen on CIFAR-10.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
import cifar
import doubt_data
import doubt_networks
from bayesadam import scores
from doubt_data import NoData, Pixels, Suite, folder, load
from doubt_networks import Trained, network_of, train
from doubt_rows import Case, batches_of, diagonal_of, entropy, kronecker_from_batches, logits_of
from harness import Cell, Row, arguments, class_scores, number, read_cell, replaced, setting, write_cell, write_results
from networks import small_resnet, vit

NETWORKS, PARTS = ("resnet18", "vit"), ("whole", "eight")
EPOCHS = {"resnet18": 10, "vit": 20}
LEFT_OUT = doubt_data.LEFT_OUT["cifar10"][0]
EIGHT_SEEDS = (1000, 1001, 1002)
LEFT_OUT_SET, OTHERS = "left-out classes", ("mnist", "fashion-mnist")
NOVELTY = "novelty"
PROBABILITIES, DOUBTS = (
    ("accuracy", "nll", "ece", "brier"),
    (NOVELTY, "max softmax", "entropy", "energy", "disagreement"),
)
TEMPERATURES = torch.logspace(-1.3, 1.3, 400).tolist()
CHUNK = 500
BUDGET = {"cpu": 1 << 30, "cuda": 8 << 30}


@dataclass(frozen=True)
class Sizes:
    """How many images train (None: all), are kept from training, calibrate, test, and are of each other set."""

    train: int | None = None
    kept: int = 5000
    held_out: int = 500
    test: int = 1000
    outside: int = 500
    batch: int = 128


QUICK = Sizes(train=64, kept=20, held_out=10, test=10, outside=5, batch=32)
QUICK_NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {
    "resnet18": lambda classes: small_resnet(3, classes),
    "vit": lambda classes: vit(classes, width=24, depth=1, heads=2),
}


# --- images ---------------------------------------------------------------------------------------------------------


def without(pixels: Pixels) -> Pixels:
    """Without the classes left out; the others are counted from 0 on."""
    x, y = pixels
    keep = ~torch.isin(y, torch.tensor(LEFT_OUT))
    return x[keep], y[keep] - sum((y[keep] > label).long() for label in LEFT_OUT)


def coloured(x: Tensor) -> Tensor:
    """(n, 1, 28, 28) as (n, 3, 32, 32)."""
    return F.interpolate(x, size=(32, 32), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1).contiguous()


def suites(where: Path | None, sizes: Sizes, *, quick: bool) -> dict[str, Suite]:
    """What the networks of each part are trained on, calibrated with and tested on."""
    try:
        if where is None:
            raise NoData("the environment variable BAYESADAM_DATA, or --data, must name the folder of the images")
        train_set, test = (cifar.load(where, split) for split in ("train", "test"))
        others = {name: load(name, "test")[0] for name in OTHERS}
    except NoData as error:
        if not quick:
            sys.exit(f"no source delivered it: {error}")
        print(f"images are made up: {error}", flush=True)
        train_set, test = (load("cifar10", split, made_up=True) for split in ("train", "test"))
        others = {name: load(name, "test", made_up=True)[0] for name in OTHERS}
    unseen = test[0][torch.isin(test[1], torch.tensor(LEFT_OUT))]
    outside = {name: coloured(images[: sizes.outside]) for name, images in others.items()}
    outside["noise"] = torch.rand(sizes.outside, *unseen.shape[1:], generator=torch.Generator().manual_seed(0))
    return {
        "whole": _suite(train_set, test, outside, sizes),
        "eight": _suite(without(train_set), without(test), {LEFT_OUT_SET: unseen}, sizes),
    }


def _suite(train_set: Pixels, test: Pixels, outside: Mapping[str, Tensor], sizes: Sizes) -> Suite:
    (x, y), rest = train_set, len(train_set[0]) - sizes.kept
    count, held = min(rest, sizes.train or rest), slice(rest, rest + sizes.held_out)
    test = test[0][: sizes.test], test[1][: sizes.test]
    sets = {name: images[: sizes.outside] for name, images in outside.items()}
    return Suite("cifar10", (x[:count], y[:count]), (x[held], y[held]), test, sets)


# --- networks -------------------------------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def trained(path: Path, network: str, held: Suite, *, seed: int, epochs: int, batch: int) -> Trained:
    """The network of a seed, out of its file where there is one."""
    device = held.train[0].device
    if path.is_file():
        saved = torch.load(path, map_location=device, weights_only=True)
        model = network_of(network, held.classes).to(device).eval()
        model.load_state_dict(saved["model"])
        optimizer = adamw(model.parameters())
        optimizer.load_state_dict(saved["optimizer"])
        return Trained(model, optimizer, None)
    began, precision = time.perf_counter(), torch.get_float32_matmul_precision()
    # Training alone may be coarse: closed forms of predictions are compared with autograd.
    torch.set_float32_matmul_precision("high")
    try:
        one = train(network, held, seed=seed, epochs=epochs, batch=batch, optimizer_of=adamw)
    finally:
        torch.set_float32_matmul_precision(precision)
    found = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
    replaced(path, lambda unfinished: torch.save(found, unfinished))
    print(f"{path.stem} trained in {time.perf_counter() - began:.0f} s", flush=True)
    return Trained(one.model, one.optimizer, None)


# --- rows -----------------------------------------------------------------------------------------------------------

# Probabilities, and doubt by name, larger for what is less familiar.
Answer = tuple[Tensor, dict[str, Tensor]]
Scorer = Callable[[Tensor], Answer]
Told = tuple[Scorer, str]


def simple_doubt(probs: Tensor) -> dict[str, Tensor]:
    return {"max softmax": 1 - probs.amax(dim=1), "entropy": entropy(probs)}


def stacked_logits(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """(networks, n, classes)."""
    return torch.stack([logits_of(model, x) for model in models])


def of_networks(case: Case, *, tempered: bool) -> Told:
    """Their own probabilities, at the temperature of the greatest held-out likelihood out of 400 from 0.05 to 20, or at
    1.
    """
    models, best = [one.model for one in case.networks], 1.0
    if tempered:
        x, y = case.suite.held_out
        logits = stacked_logits(models, x).double()
        best = min(TEMPERATURES, key=lambda t: float(F.nll_loss((logits / t).softmax(dim=-1).mean(dim=0).log(), y)))

    def score(x: Tensor) -> Answer:
        logits = stacked_logits(models, x)
        each = (logits / best).softmax(dim=-1)
        probs = each.mean(dim=0)
        doubt = {**simple_doubt(probs), "energy": -logits.logsumexp(dim=-1).mean(dim=0)}
        if len(models) > 1:
            doubt["disagreement"] = doubt["entropy"] - torch.stack([entropy(one) for one in each]).mean(dim=0)
        return probs, doubt

    return score, f"temperature {best:.3g}"


def diagonal(case: Case, one: Trained) -> ba.Posterior:
    return diagonal_of(case, one)


def kronecker(case: Case, one: Trained) -> ba.Posterior:
    return kronecker_from_batches(Case([one], case.suite, case.network, case.seed, case.epochs, case.batch, case.draws))


def ours(case: Case, *, posterior_of: Callable[[Case, Trained], ba.Posterior]) -> Told:
    """Of one network its posterior, of several the mixture of theirs; calibrated where probabilities are scored."""
    each = [posterior_of(case, one) for one in case.networks]
    posterior: Any = each[0] if len(each) == 1 else ba.Mixture(each)
    options: Any = {"likelihood": "classification", "memory_budget": BUDGET[case.suite.test[0].device.type]}
    told, reference = "not calibrated", case.suite.held_out[0][:10]
    if LEFT_OUT_SET not in case.suite.outside:
        posterior = ba.calibrate(posterior, batches_of(case.suite.held_out, CHUNK), **options)
        told, reference = posterior.calibration.preferred, None

    def score(x: Tensor) -> Answer:
        found = posterior.predict(x, **options)
        own = {} if posterior.calibration is None else simple_doubt(found.probs)
        return found.probs, {**own, NOVELTY: posterior.novelty(x, likelihood="classification", reference=reference)}

    return score, told


ROWS: Mapping[str, Row] = {
    "alone": Row("network alone", partial(of_networks, tempered=False)),
    "temperature": Row("temperature", partial(of_networks, tempered=True)),
    "diagonal": Row("diagonal", partial(ours, posterior_of=diagonal)),
    "kronecker": Row("Kronecker", partial(ours, posterior_of=kronecker)),
    "ensemble": Row("ensemble", partial(of_networks, tempered=False), joint=True),
    "ensemble-temperature": Row("ensemble, temperature", partial(of_networks, tempered=True), joint=True),
    "mixture": Row("mixture of diagonals", partial(ours, posterior_of=diagonal), joint=True),
    "mixture-kronecker": Row("mixture of Kroneckers", partial(ours, posterior_of=kronecker), joint=True),
}


def measured(row: Row, case: Case) -> Cell:
    """Scores of probabilities, and the AUROC of every doubt against every other set."""
    began = time.perf_counter()
    scorer, told = row.fit(case)
    fitted = time.perf_counter()

    def answers(x: Tensor) -> Answer:
        parts = [scorer(part) for part in x.split(CHUNK)]
        doubts = {key: torch.cat([part[1][key].double().cpu() for part in parts]) for key in parts[0][1]}
        return torch.cat([part[0].cpu() for part in parts]), doubts

    (x, y), outside = case.suite.test, case.suite.outside
    probs, familiar = answers(x)
    others = {name: answers(images)[1] for name, images in outside.items()}
    auroc = {
        key: {name: scores.auroc(values, found[key]) for name, found in others.items()}
        for key, values in familiar.items()
    }
    seconds = {"fit_seconds": fitted - began, "score_seconds": time.perf_counter() - fitted}
    return {**class_scores(probs, y.cpu()), "auroc": auroc, "told": told, **seconds}


def run(
    names: Sequence[str],
    network: str,
    part: str,
    held: Suite,
    seeds: Sequence[int],
    about: Mapping[str, Any],
    where: Path,
) -> dict[str, list[Cell]]:
    """The cells of every row of one network and part: one a seed, or one of all seeds."""
    networks: dict[int, Trained] = {}
    cells: dict[str, list[Cell]] = {}
    groups = [[seed] for seed in seeds] + ([list(seeds)] if len(seeds) > 1 else [])
    for group in groups:
        for name in [each for each in names if ROWS[each].joint == (len(group) > 1)]:
            label = f"{network}-{part}-{'all' if len(group) > 1 else group[0]}"
            path, own = where / f"{label}-{name}.json", {**about, "seeds": group}
            cell = read_cell(path, own)
            if cell is None:
                how: Any = {"epochs": about["epochs"], "batch": about["batch"]}
                for seed in group:
                    if seed not in networks:
                        networks[seed] = trained(where / f"{network}-{part}-{seed}.pt", network, held, seed=seed, **how)
                case = Case([networks[seed] for seed in group], held, network, group[0], draws=0, **how)
                cell = {"row": name, "settings": own, **measured(ROWS[name], case)}
                write_cell(path, cell)
                print(
                    f"{label}, {name}: accuracy {cell['accuracy']:.3f}, NLL {cell['nll']:.4f}, {cell['told']}; "
                    f"{cell['fit_seconds']:.0f} s to fit, {cell['score_seconds']:.0f} s to score",
                    flush=True,
                )
            cells.setdefault(name, []).append(cell)
    return {name: cells[name] for name in ROWS if name in cells}


# --- tables ---------------------------------------------------------------------------------------------------------


def markdown(title: str, cells: Mapping[str, Sequence[Cell]]) -> str:
    """Probabilities of networks that know all classes, then every doubt against every set."""
    lines = []
    sets = list(next(iter(next(iter(cells.values()))[0]["auroc"].values())))
    if LEFT_OUT_SET not in sets:
        lines += [f"| {title} | accuracy | NLL | ECE | Brier |", "|---" * 5 + "|"]
        for name, found in cells.items():
            values = [number([cell[key] for cell in found]) for key in PROBABILITIES]
            lines.append(f"| {ROWS[name].title} | {' | '.join(values)} |")
        lines.append("")
    lines += [f"| {title}, AUROC | doubt | {' | '.join(sets)} |", "|---" * (len(sets) + 2) + "|"]
    for name, found in cells.items():
        for key in [each for each in DOUBTS if each in found[0]["auroc"]]:
            values = [number([cell["auroc"][key][each] for cell in found]) for each in sets]
            lines.append(f"| {ROWS[name].title} | {key} | {' | '.join(values)} |")
    return "\n".join(lines)


def mean_auroc(cells: Sequence[Cell], key: str) -> float:
    """Over sets and seeds."""
    return statistics.fmean(value for cell in cells for value in cell["auroc"][key].values())


def verdicts(title: str, cells: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Each novelty beside the best of the simple doubts of as many networks, by the mean AUROC."""
    told = []
    for name, found in cells.items():
        if NOVELTY not in found[0]["auroc"]:
            continue
        simple = {
            f"{ROWS[other].title}, {key}": mean_auroc(each, key)
            for other, each in cells.items()
            if NOVELTY not in each[0]["auroc"] and ROWS[other].joint == ROWS[name].joint
            for key in each[0]["auroc"]
        }
        best = max(simple, key=simple.__getitem__, default=None)
        rival = "" if best is None else f", {simple[best]:.3f} of {best}, the best of the simple ones"
        told.append(f"{title}, {ROWS[name].title}: mean AUROC {mean_auroc(found, NOVELTY):.3f} of novelty{rival}")
    return told


def main() -> None:
    parser = arguments(__doc__, quick="small networks of one epoch, two seeds, tens of images", device=True)
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK", help="resnet18, vit"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="whole, eight")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="1000 to 1004; eight classes: to 1002")
    parser.add_argument("--data", type=Path, default=None, help="folder of part1.npz and part2.npz")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    root = folder()
    held = suites(options.data or (root and root / "cifar-10"), sizes, quick=options.quick)
    seeds = options.seeds or [1000 + k for k in range(2 if options.quick else 5)]
    tables, told, results = [], [], {}
    for network in options.networks:
        for part in options.only:
            own = [seed for seed in seeds if part == "whole" or seed in EIGHT_SEEDS[: 1 if options.quick else None]]
            about = {**asdict(sizes), "epochs": 1 if options.quick else EPOCHS[network]}
            suite = held[part].to(options.device)
            with mock.patch.dict(doubt_networks.NETWORKS, QUICK_NETWORKS if options.quick else {}):
                cells = run(options.rows, network, part, suite, own, about, options.out / "vision")
            if cells:
                title = f"{network}, {part}"
                tables.append(markdown(title, cells))
                told += verdicts(title, cells)
                results[title] = cells
                print(f"\n{tables[-1]}\n", flush=True)
    write_results(options.out, "vision", {**setting(), "quick": options.quick, "cells": results})
    text = "\n\n".join(
        [*tables, f"Mean ± standard error over {len(seeds)} seeds, of eight classes {len(EIGHT_SEEDS)} at most."]
    )
    replaced(options.out / "vision.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    print("\n".join(told) or f"{len(results)} tables, no row of ours")


if __name__ == "__main__":
    main()
