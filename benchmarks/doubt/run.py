"""Classes: probabilities, clean and shifted, and telling what was never seen, beside detectors and ensembles.

    python -m benchmarks.doubt.run [--quick] [--alone] [--data mnist fashion-mnist cifar10 text] [--networks ...]
        [--choices 0 1 2] [--seeds 0 1 2 3 4] [--report] [--device cuda] [--out out/bench]

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam import scores
from benchmarks.common import harness
from benchmarks.common.inputs import LEFT_OUT, NEAR, NoData, Sizes, Suite, folder, suite
from benchmarks.common.training import CLASSIFIERS, Trained, classifier, train
from benchmarks.doubt.rows import ROWS, Answer, Case, Row, Scorer, import_detectors

DATA = {
    "mnist": ("mlp", "lenet", "resnet"),
    "fashion-mnist": ("mlp", "lenet", "resnet"),
    "cifar10": ("resnet18", "vit"),
    "text": ("bert",),
}
SIZES = {"cifar10": Sizes(held_out=1000, test=1000, outside=500), "text": Sizes(held_out=2000, test=2000)}
QUICK = Sizes(320, 100, 40, 5, 5)
TURNS, ALARM = 50, 0.05
JOINT, BASELINE = "all", "temperature"
Result = dict[str, Any]


def answers(scorer: Scorer, x: Tensor) -> Answer:
    """Those of many inputs, on the CPU."""
    parts = zip(*(scorer(part) for part in x.split(500)), strict=True)
    probs, doubt, pvalues = (None if of[0] is None else torch.cat(of).detach().cpu() for of in parts)
    if doubt is None or bool(doubt.isnan().any()):
        raise ValueError("its doubt is not a number")
    return Answer(probs, doubt.double(), pvalues)


def cost(scorer: Scorer, case: Case, size: int, budget: float) -> float:
    """The median over turns, for a budget of seconds, of a row's time over that of a forward pass."""
    x = case.suite.test[0][:size]

    def timed(call: Callable[[Tensor], object]) -> Callable[[], object]:
        return lambda: (call(x), torch.cuda.synchronize() if x.is_cuda else None)

    calls = {"row": timed(scorer), "bare": timed(torch.no_grad()(case.model))}
    once = sum(harness.interleaved(calls, rounds=1, warmup=1)["row"])
    rounds = max(1, min(TURNS, int(budget / once)))
    return harness.ratio(harness.interleaved(calls, rounds=rounds, warmup=0), "row", "bare")


def measured(row: Row, case: Case, budget: float) -> Result:
    """A row's scores in one case, and its cost."""
    scorer, (x, y) = row.fit(case), case.suite.test
    inside, y = answers(scorer, x), y.cpu()
    outside = {name: answers(scorer, inputs) for name, inputs in case.suite.outside.items()}
    sets = {name: scores.auroc(inside.doubt, a.doubt) for name, a in outside.items()}
    result: Result = {"keeps": row.keeps, "sets": sets, "AUROC near": sets.get(NEAR)}
    result["AUROC far"] = statistics.fmean(value for name, value in sets.items() if name != NEAR)
    result["FPR95"] = statistics.fmean(scores.fpr95(inside.doubt, a.doubt) for a in outside.values())
    if inside.probs is not None:
        clean, shifts = harness.class_scores(inside.probs, y), dict[str, list[dict[str, float]]]()
        for kind, copies in case.suite.shifted.items():
            probs = [answers(scorer, copy).probs for copy in copies]
            shifts[kind] = [harness.class_scores(one, y[: len(one)]) for one in probs if one is not None]
        result |= {"accuracy": clean["accuracy"], "NLL": clean["nll"], "ECE": clean["ece"]}
        for title, key in (("shifted NLL", "nll"), ("shifted ECE", "ece")):
            result[title] = statistics.fmean(copy[key] for copies in shifts.values() for copy in copies)
        result["kinds"] = {kind: statistics.fmean(copy["nll"] for copy in copies) for kind, copies in shifts.items()}
    if inside.pvalue is not None:
        result["p ≤ .05, test"] = float((inside.pvalue <= ALARM).double().mean())
        flagged = [a.pvalue <= ALARM for a in outside.values() if a.pvalue is not None]
        result["p ≤ .05, others"] = float(torch.cat(flagged).double().mean())
    return result | {f"cost at batch {size}": cost(scorer, case, size, budget) for size in (1, 64)}


def every_row(rows: Mapping[str, Row], case: Case, budget: float) -> dict[str, Result]:
    """What is measured of every row; of one that fails, the reason."""
    result: dict[str, Result] = {}
    for name, row in rows.items():
        began = time.perf_counter()
        try:
            result[name] = measured(row, case, budget)
            told = f"AUROC far {result[name]['AUROC far']:.3f}"
        except Exception as error:
            if row.peer is None:
                traceback.print_exc()
            told = f"{type(error).__name__}: {error}"[:300]
            result[name] = {"skipped": told, "keeps": row.keeps}
        print(f"    {name:30s}{told} ({time.perf_counter() - began:.1f} s)", flush=True)
        gc.collect()
    base = result.get(BASELINE, {})
    for row in result.values():
        row |= {
            f"{key} ÷ temperature's": row[key] / base[key]
            for key in ("NLL", "shifted NLL")
            if key in row and key in base
        }
    return result


def run_cells(data: Suite, network: str, options: Namespace) -> None:
    """Those that are not there yet: one a seed, then the one of rows that take the networks of all seeds."""
    where, label, recipe = options.out / "doubt", f"{data.name}-{network}-{data.choice}", CLASSIFIERS[network][1]
    if options.quick:
        recipe = replace(recipe, epochs=1, batch=32)
    draws, budget = (3, 0.02) if options.quick else (30, 0.5)
    about = {"images": len(data.train[0]), "draws": draws, "epochs": recipe.epochs, "batch": recipe.batch}

    def network_of(seed: int) -> Trained:
        """Out of its file where there is one."""
        path = where / f"{label}-{seed}.pt"
        if path.is_file():
            return Trained.load(path, classifier(network, data), recipe)
        one = train(network, data, recipe, seed=seed)
        one.save(path)
        return one

    def made(seed: int | str, seeds: Sequence[int]) -> harness.Cell:
        print(f"{label}, seed {seed}", flush=True)
        joint = seed == JOINT
        networks = [network_of(one) for one in seeds]
        case = Case(networks, data, network, recipe, 0 if joint else seeds[0], draws)
        # Temperature scaling of all networks, which is the ensemble, is no baseline of one; its own comes first.
        rows = {name: row for name, row in ROWS.items() if row.joint == joint and (seed == 0 or not row.once)}
        rows = {name: row for name, row in rows.items() if not (options.alone and row.peer)}
        cell = {**harness.setting(), "data": data.name, "network": network, "choice": data.choice, "seed": seed}
        return cell | {"rows": every_row(rows, case, budget)}

    harness.cells(where, {f"{label}-{seed}": partial(made, seed, [seed]) for seed in options.seeds}, about)
    if len(options.seeds) > 1:
        joint = {f"{label}-{JOINT}": partial(made, JOINT, options.seeds)}
        harness.cells(where, joint, {**about, "seeds": options.seeds})


def suites(options: Namespace) -> Iterator[tuple[Suite, str]]:
    """Inputs and the networks that learn them."""
    for name in options.data or (["mnist"] if options.quick else DATA):
        networks = [network for network in DATA[name] if network in (options.networks or DATA[name])]
        if options.quick and not options.networks:
            networks = networks[1:2] or networks
        sizes = QUICK if options.quick else SIZES.get(name, Sizes())
        if options.device == "cpu" and name != "text":
            sizes = replace(sizes, train=sizes.train or 10_000)
        for choice in range(len(LEFT_OUT.get(name, [()]))):
            if choice in options.choices:
                try:
                    data = suite(name, choice, sizes, made_up=options.quick and folder() is None).to(options.device)
                except NoData as error:
                    print(f"left out: {error}", flush=True)
                    continue
                yield from ((data, network) for network in networks)


COLUMNS = ("accuracy", "NLL", "NLL ÷ temperature's", "ECE", "shifted NLL", "shifted NLL ÷ temperature's", "shifted ECE")
COLUMNS += ("AUROC near", "AUROC far", "FPR95", "p ≤ .05, test", "p ≤ .05, others")
COSTS = ("cost at batch 1", "cost at batch 64")


def numbers(rows: Sequence[Result], key: str, part: str | None = None) -> list[float]:
    """Of the cells that have it."""
    values = [(row.get(part, {}) if part else row).get(key) for row in rows]
    return [value for value in values if value is not None]


def tables(title: str, rows: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """A line a row, means and standard errors over cells; costs are medians. Then shifts by kind, AUROC by set."""
    lines = []
    for name, some in rows.items():
        costs = (f"{statistics.median(values):.1f}" if (values := numbers(some, key)) else "–" for key in COSTS)
        keeps = some[0].get("skipped", some[0]["keeps"])
        lines.append((name, *(harness.number(numbers(some, key)) for key in COLUMNS), *costs, keeps))
    yield harness.markdown((title, *COLUMNS, *COSTS, "keeps"), lines)
    for part in ("kinds", "sets"):
        heads = list(dict.fromkeys(key for some in rows.values() for row in some for key in row.get(part, {})))
        having = {name: some for name, some in rows.items() if any(part in row for row in some)}
        lines = ((name, *(harness.number(numbers(some, key, part)) for key in heads)) for name, some in having.items())
        yield harness.markdown((f"{title}: {part}", *heads), lines)


def report(out: Path, *, quick: bool) -> None:
    """Tables and means of all cells, in doubt.md and doubt.json; ends with an error where a row of ours failed."""
    every = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "doubt").glob("*.json"))]
    if not every:
        sys.exit(f"no cell is finished in {out / 'doubt'}")
    groups: dict[str, dict[str, list[Result]]] = {}
    for cell in every:
        group = groups.setdefault(f"{cell['data']}, {cell['network']}", {})
        for name in [name for name in ROWS if name in cell["rows"]]:
            group.setdefault(name, []).append(cell["rows"][name])
    text = "\n\n".join(table for title, rows in groups.items() for table in tables(title, rows))
    harness.replaced(out / "doubt.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    means = {
        title: {
            name: {key: statistics.fmean(values) for key in (*COLUMNS, *COSTS) if (values := numbers(some, key))}
            for name, some in rows.items()
        }
        for title, rows in groups.items()
    }
    print(text)
    harness.write_results(out, "doubt", {"quick": quick, "cells": len(every), "results": means})
    of_ours = ((title, name, row) for title, rows in groups.items() for name, row in rows.items() if "ours" in name)
    if failed := [f"{title}: {name}" for title, name, row in of_ours if "skipped" in row[0]]:
        sys.exit(f"rows of our own failed: {'; '.join(failed)}")
    print(f"{len(every)} cells: {out / 'doubt.json'} and doubt.md")


def main() -> None:
    every = sorted(CLASSIFIERS)
    peers, quick = "laplace-torch and pytorch-ood", "two seeds, one network, hundreds of images, one epoch"
    parser = harness.arguments(__doc__, quick=quick, peer=peers, device=True)
    parser.add_argument("--data", nargs="+", choices=DATA, metavar="SET", help=", ".join(DATA))
    parser.add_argument("--networks", nargs="+", choices=every, metavar="NETWORK", help=", ".join(every))
    parser.add_argument("--choices", type=int, nargs="+", help="pairs of classes left out: 0 to 2")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 to 4")
    parser.add_argument("--report", action="store_true", help="tables of the cells there are, nothing else")
    options = parser.parse_args()
    options.seeds = options.seeds or list(range(2 if options.quick else 5))
    options.choices = options.choices or ([0] if options.quick else [0, 1, 2])
    if options.quick:
        torch.set_num_threads(1)
    if not options.report:
        harness.import_peer("laplace", "laplace-torch", alone=options.alone)
        import_detectors(alone=options.alone)
        for data, network in suites(options):
            run_cells(data, network, options)
    report(options.out, quick=options.quick)


if __name__ == "__main__":
    main()
