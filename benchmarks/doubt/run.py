"""Classes: probabilities, clean and shifted, and telling what was never seen, beside detectors and ensembles.

    python -m benchmarks.doubt.run [--quick] [--alone] [--data mnist fashion-mnist cifar10 text] [--networks ...]
        [--choices 0 1 2] [--seeds 0 1 2 3 4] [--images N] [--epochs N] [--report] [--device cuda] [--out out/bench]

Stopped, it resumes: a cell is a file in out/bench/doubt, of one data set, network, choice and seed, or of all seeds.
Every call ends with the tables of the cells there are, in doubt.md, and their means, in doubt.json; `--report` does
nothing else. README.md in this folder says what the networks, rows and columns are.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam import scores
from benchmarks.common.harness import (
    Cell,
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
from benchmarks.common.inputs import LEFT_OUT, NEAR, NoData, Sizes, Suite, folder, suite
from benchmarks.common.training import RECIPES, Trained, load_network, save_network, train
from benchmarks.doubt.rows import ROWS, Answer, Case, Row, Scorer, import_detectors

DATA = {
    "mnist": ("mlp", "lenet", "resnet"),
    "fashion-mnist": ("mlp", "lenet", "resnet"),
    "cifar10": ("resnet18", "vit"),
    "text": ("bert",),
}
SIZES = {"cifar10": Sizes(held_out=1000, test=1000, outside=500), "text": Sizes(held_out=2000, test=2000)}
QUICK = Sizes(320, 100, 40, 5, 5)
CHUNK, TURNS, ALARM = 500, 50, 0.05
JOINT, BASELINE = "all", "temperature"
Found = dict[str, Any]

# --- one row --------------------------------------------------------------------------------------------------------


def answers(scorer: Scorer, x: Tensor) -> Answer:
    """Those of many inputs, on the CPU."""
    parts = [scorer(part) for part in x.split(CHUNK)]
    doubt = torch.cat([part.doubt.detach().double().cpu() for part in parts])
    if bool(doubt.isnan().any()):
        raise ValueError("its doubt is not a number")
    probs, pvalues = (
        None if getattr(parts[0], key) is None else torch.cat([getattr(part, key).detach().cpu() for part in parts])
        for key in ("probs", "pvalue")
    )
    return Answer(probs, doubt, pvalues)


def seconds(call: Callable[[Tensor], object], x: Tensor) -> float:
    """Of one call."""
    if x.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def cost(scorer: Scorer, case: Case, size: int, budget: float) -> float:
    """The median over turns, for a budget of seconds, of a row's time over that of a forward pass."""
    forward, x = torch.no_grad()(case.model), case.suite.test[0][:size]
    seconds(scorer, x), seconds(forward, x)
    ratios: list[float] = []
    ends = time.perf_counter() + budget
    while not ratios or (len(ratios) < TURNS and time.perf_counter() < ends):
        bare = seconds(forward, x)
        ratios.append(seconds(scorer, x) / bare)
    return statistics.median(ratios)


def measured(row: Row, case: Case, budget: float) -> Found:
    """A row's scores in one case, and its cost."""
    scorer, (x, y) = row.fit(case), case.suite.test
    inside, y = answers(scorer, x), y.cpu()
    outside = {name: answers(scorer, inputs) for name, inputs in case.suite.outside.items()}
    found: Found = {
        "keeps": row.keeps,
        "sets": {name: scores.auroc(inside.doubt, a.doubt) for name, a in outside.items()},
    }
    far = [value for name, value in found["sets"].items() if name != NEAR]
    found |= {"AUROC near": found["sets"].get(NEAR), "AUROC far": statistics.fmean(far)}
    found["FPR95"] = statistics.fmean(scores.fpr95(inside.doubt, a.doubt) for a in outside.values())
    if inside.probs is not None:
        clean = class_scores(inside.probs, y)
        kinds = {kind: [answers(scorer, copy).probs for copy in copies] for kind, copies in case.suite.shifted.items()}
        shifts = {
            kind: [class_scores(probs, y[: len(probs)]) for probs in copies if probs is not None]
            for kind, copies in kinds.items()
        }
        found |= {"accuracy": clean["accuracy"], "NLL": clean["nll"], "ECE": clean["ece"]}
        for title, key in (("shifted NLL", "nll"), ("shifted ECE", "ece")):
            found[title] = statistics.fmean(copy[key] for copies in shifts.values() for copy in copies)
        found["kinds"] = {kind: statistics.fmean(copy["nll"] for copy in copies) for kind, copies in shifts.items()}
    if inside.pvalue is not None:
        found["p ≤ .05, test"] = float((inside.pvalue <= ALARM).double().mean())
        flagged = [a.pvalue <= ALARM for a in outside.values() if a.pvalue is not None]
        found["p ≤ .05, others"] = float(torch.cat(flagged).double().mean())
    return found | {f"cost at batch {size}": cost(scorer, case, size, budget) for size in (1, 64)}


def every_row(rows: Mapping[str, Row], case: Case, budget: float) -> dict[str, Found]:
    """What is measured of every row; of one that fails, the reason."""
    found: dict[str, Found] = {}
    for name, row in rows.items():
        began = time.perf_counter()
        try:
            found[name] = measured(row, case, budget)
            told = f"AUROC far {found[name]['AUROC far']:.3f}"
        except Exception as error:
            if row.peer is None:
                traceback.print_exc()
            found[name] = {"skipped": f"{type(error).__name__}: {error}"[:300], "keeps": row.keeps}
            told = f"skipped: {found[name]['skipped']}"
        print(f"    {name:30s}{told} ({time.perf_counter() - began:.1f} s)", flush=True)
        gc.collect()
    base = found.get(BASELINE, {})
    for row in found.values():
        for key in ("NLL", "shifted NLL"):
            if key in row and key in base:
                row[f"{key} ÷ temperature's"] = row[key] / base[key]
    return found


# --- cells ----------------------------------------------------------------------------------------------------------


def trained(path: Path, network: str, held: Suite, seed: int, how: Mapping[str, int], *, new: bool) -> Trained:
    """The network of a seed, out of its file where there is one and it need not be new; a new one has its recorder."""
    if path.is_file() and not new:
        return load_network(path, network, held)
    one = train(network, held, seed=seed, epochs=how["epochs"], batch=how["batch"])
    save_network(path, one)
    return one


def run_cells(held: Suite, network: str, options: Namespace) -> None:
    """Those that are not there yet: one a seed, then the one of rows that take the networks of all seeds."""
    where, recipe = options.out / "doubt", RECIPES[network]
    label = f"{held.name}-{network}-{held.choice}"
    how = {
        "epochs": options.epochs or (1 if options.quick else recipe.epochs),
        "batch": 32 if options.quick else recipe.batch,
    }
    settings = {"images": len(held.train[0]), "draws": 3 if options.quick else 30, **how}
    budget = 0.02 if options.quick else 0.5
    paths = {seed: where / f"{label}-{seed}.pt" for seed in options.seeds}
    for seed in (*options.seeds, JOINT) if len(paths) > 1 else options.seeds:
        joint, path = seed == JOINT, where / f"{label}-{seed}.json"
        about = {**settings, "seeds": options.seeds} if joint else settings
        if read_cell(path, about) is not None:
            continue
        print(f"{label}, seed {seed}", flush=True)
        networks = [trained(paths[s], network, held, s, how, new=not joint) for s in (paths if joint else [seed])]
        case = Case(networks, held, network, 0 if joint else seed, draws=settings["draws"], **how)
        # Temperature scaling of all networks, which is the ensemble, is no baseline of one; its own comes first.
        rows = {name: row for name, row in ROWS.items() if row.joint == joint and (seed == 0 or not row.once)}
        rows = {name: row for name, row in rows.items() if not (options.alone and row.peer)}
        cell: Cell = {**setting(), "data": held.name, "network": network, "choice": held.choice, "seed": seed}
        write_cell(path, cell | {"settings": about, "rows": every_row(rows, case, budget)})


def suites(options: Namespace) -> Iterator[tuple[Suite, str]]:
    """Inputs and the networks that learn them."""
    for name in options.data or (["mnist"] if options.quick else DATA):
        networks = [network for network in DATA[name] if network in (options.networks or DATA[name])]
        if options.quick and not options.networks:
            networks = networks[1:2] or networks
        most = options.images or (10_000 if options.device == "cpu" and name != "text" else None)
        sizes = QUICK if options.quick else SIZES.get(name, Sizes())
        sizes = replace(sizes, train=options.images or sizes.train or most)
        for choice in range(len(LEFT_OUT.get(name, [()]))):
            if choice in options.choices:
                try:
                    held = suite(name, choice, sizes, made_up=options.quick and folder() is None).to(options.device)
                except NoData as error:
                    print(f"left out: {error}", flush=True)
                    continue
                yield from ((held, network) for network in networks)


# --- what is told of it ---------------------------------------------------------------------------------------------

COLUMNS = ("accuracy", "NLL", "NLL ÷ temperature's", "ECE", "shifted NLL", "shifted NLL ÷ temperature's", "shifted ECE")
COLUMNS += ("AUROC near", "AUROC far", "FPR95", "p ≤ .05, test", "p ≤ .05, others")
COSTS = ("cost at batch 1", "cost at batch 64")


def numbers(rows: Sequence[Found], key: str, part: str | None = None) -> list[float]:
    """Of the cells that have it."""
    values = [(row.get(part, {}) if part else row).get(key) for row in rows]
    return [value for value in values if value is not None]


def table(title: str, rows: Mapping[str, Sequence[Found]], columns: Sequence[str], part: str | None = None) -> str:
    """A line a row, means and standard errors over cells; costs are medians."""
    costs = () if part else COSTS
    heads = [*columns, *costs, *([] if part else ["keeps"])]
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, cells in rows.items():
        line = [number(numbers(cells, key, part)) for key in columns]
        line += [f"{statistics.median(values):.1f}" if (values := numbers(cells, key)) else "–" for key in costs]
        if part and set(line) == {"–"}:
            continue
        lines.append(
            f"| {name} | {' | '.join(line)} |" + ("" if part else f" {cells[0].get('skipped', cells[0]['keeps'])} |")
        )
    return "\n".join(lines)


def report(out: Path, *, quick: bool) -> None:
    """Tables and means of all cells, in doubt.md and doubt.json; ends with an error where a row of ours failed."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "doubt").glob("*.json"))]
    if not cells:
        sys.exit(f"no cell is finished in {out / 'doubt'}")
    groups: dict[str, dict[str, list[Found]]] = {}
    for cell in cells:
        group = groups.setdefault(f"{cell['data']}, {cell['network']}", {})
        for name in [name for name in ROWS if name in cell["rows"]]:
            group.setdefault(name, []).append(cell["rows"][name])
    texts = []
    for title, rows in groups.items():
        parts = {
            part: list(dict.fromkeys(key for cells in rows.values() for row in cells for key in row.get(part, {})))
            for part in ("kinds", "sets")
        }
        texts.append(table(title, rows, COLUMNS))
        texts += [table(f"{title}: {part}", rows, columns, part) for part, columns in parts.items()]
    text = "\n\n".join(texts)
    replaced(out / "doubt.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    means = {
        title: {
            name: {key: statistics.fmean(values) for key in (*COLUMNS, *COSTS) if (values := numbers(cells, key))}
            for name, cells in rows.items()
        }
        for title, rows in groups.items()
    }
    print(text)
    write_results(out, "doubt", {"quick": quick, "cells": len(cells), "results": means})
    failed = [
        f"{title}: {name}"
        for title, rows in groups.items()
        for name in rows
        if name.startswith("ours") and "skipped" in rows[name][0]
    ]
    if failed:
        sys.exit(f"rows of our own failed: {'; '.join(failed)}")
    print(f"{len(cells)} cells: {out / 'doubt.json'} and doubt.md")


def main() -> None:
    every = sorted({network for networks in DATA.values() for network in networks})
    peers, quick = "laplace-torch and pytorch-ood", "two seeds, one network, hundreds of images, one epoch"
    parser = arguments(__doc__, quick=quick, peer=peers, device=True)
    parser.add_argument("--data", nargs="+", choices=DATA, metavar="SET", help=", ".join(DATA))
    parser.add_argument("--networks", nargs="+", choices=every, metavar="NETWORK", help=", ".join(every))
    parser.add_argument("--choices", type=int, nargs="+", help="pairs of classes left out: 0 to 2")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 to 4")
    parser.add_argument("--images", type=int, help="for training; 10,000 on a CPU, all on a GPU")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--report", action="store_true", help="tables of the cells there are, nothing else")
    options = parser.parse_args()
    options.seeds = options.seeds or list(range(2 if options.quick else 5))
    options.choices = options.choices or ([0] if options.quick else [0, 1, 2])
    if options.quick:
        torch.set_num_threads(1)
    if not options.report:
        import_peer("laplace", "laplace-torch", alone=options.alone)
        import_detectors(alone=options.alone)
        for held, network in suites(options):
            run_cells(held, network, options)
    report(options.out, quick=options.quick)


if __name__ == "__main__":
    main()
