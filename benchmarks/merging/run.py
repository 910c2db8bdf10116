"""Merging fine-tuned networks by their optimisers' states, beside averaging, task arithmetic, TIES, DARE and the exact
Fisher.

    BAYESADAM_DATA=... python -m benchmarks.merging.run [--quick] [--networks mlp lenet] [--data mnist fashion-mnist]
        [--tasks rotated mixed noisy] [--seeds 1000 1001 …] [--inputs 300] [--ours] [--device cuda]

Finished cells are kept in `--out`/merging as JSON, so that a run that was stopped resumes, and several processes may
share the cells by options that select them.

A base is trained on plain images, experts are fine-tuned from it, one a task, all by Adam with β₂ = .999. λ of task
arithmetic, the density and λ of TIES and DARE are chosen on validation images; ours has nothing to choose. Accuracy in
% on test images, the mean over tasks. "experts" is each on its own task, "joint" one network trained on all tasks'
images, for as many steps as the experts together. "exact Fisher" is from per-example gradients at the experts' weights.
With `--ours` peers, the joint training, SOAP and trimming are left out. A row "…, worst" is the accuracy on the task
that has the lowest.

Settings were chosen with seeds 0 to 99 on validation images; results are of seeds from 1000 on and of test images.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.merging import merge
from benchmarks.common.harness import (
    Cell,
    Target,
    arguments,
    at_least,
    at_most,
    number,
    read_cell,
    setting,
    write_cell,
    write_results,
)
from benchmarks.merging import rivals
from benchmarks.merging.tasks import DEVELOPMENT, TASKS, Images, Trained, accuracy, build, experts, images, train

FACTORS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.3)
DENSITIES = (0.1, 0.2, 0.4)
TRIMS = (0.5, 0.8, 0.9)
Weights = Mapping[str, Tensor]


class Scorer:
    """Mean accuracy over tasks of weights put into one network."""

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, tasks: Sequence[Callable[[Tensor], Tensor]]
    ) -> None:
        self.model = copy.deepcopy(model)
        self.sets = [(task(images), labels) for task in tasks]

    def each(self, weights: Weights) -> list[float]:
        """Task by task."""
        self.model.load_state_dict(dict(weights))
        return [accuracy(self.model, x, y) for x, y in self.sets]

    def __call__(self, weights: Weights) -> float:
        """The mean."""
        found = self.each(weights)
        return sum(found) / len(found)


def best(candidates: Mapping[Any, Callable[[], Weights]], scorer: Scorer) -> tuple[Any, Weights]:
    """The setting with the highest score, and its weights."""
    scores = {key: scorer(make()) for key, make in candidates.items()}
    key = max(scores, key=lambda k: scores[k])
    return key, candidates[key]()


# --- images ---------------------------------------------------------------------------------------------------------


def images_cell(network: str, name: str, tasks: str, seed: int, options: argparse.Namespace) -> Cell:
    """Test accuracy of every method for one seed."""
    data = images(name, options.device, quick=options.quick)
    start_of = build(network, seed, options.hidden).to(options.device)
    base = train(start_of, *data.base, steps=options.steps, seed=seed)
    tuned = experts(base.model, data, TASKS[tasks], steps=options.steps, seed=seed)
    test = Scorer(base.model, *data.test, TASKS[tasks])
    diagonal, rich = [each.diagonal for each in tuned], [each.kronecker for each in tuned]
    rows, seconds = {"base": test(base.model.state_dict())}, {}
    own = [test.each(each.model.state_dict())[task] for task, each in enumerate(tuned)]
    rows["experts"] = sum(own) / len(own)
    few = [task(data.tune[0][: max(options.inputs)]) for task in TASKS[tasks]]
    ours: dict[str, Callable[[], Weights]] = {
        "average": lambda: rivals.average([each.model.state_dict() for each in tuned]),
        "damped": lambda: merge(diagonal),
        "fisher": lambda: merge(diagonal, method="fisher"),
        "gradient-matching": lambda: merge(diagonal, base=base.diagonal),
        "kronecker": lambda: merge(rich, method="kronecker"),
        "kronecker, base": lambda: merge(rich, method="kronecker", base=base.diagonal),
        **{f"inputs, {n}": lambda n=n: merge(diagonal, inputs=[x[:n] for x in few]) for n in options.inputs},
    }
    for row, make in ours.items():
        seconds[row], merged = timed(make, options.device)
        each = test.each(merged)
        rows |= {row: sum(each) / len(each), f"{row}, worst": min(each)}
    chosen: dict[str, Any] = {}
    if not options.ours:
        peers, chosen = others(base, tuned, data, tasks, seed, options)
        rows |= {row: test(weights) for row, weights in peers.items()}
    return {"rows": rows, "chosen": chosen, "seconds": seconds}


def others(
    base: Trained, tuned: Sequence[Trained], data: Images, tasks: str, seed: int, options: argparse.Namespace
) -> tuple[dict[str, Weights], dict[str, Any]]:
    """Weights merged by peers, and by ours in other ways; and the settings that were chosen for peers."""
    validation = Scorer(base.model, *data.validation, TASKS[tasks])
    start, own = copy.deepcopy(base.model.state_dict()), [copy.deepcopy(each.model.state_dict()) for each in tuned]
    tau = rivals.changes(start, own)
    grids: dict[str, dict[Any, Callable[[], Weights]]] = {
        "task arithmetic": {f: partial(rivals.added, start, rivals.task_arithmetic(tau), f) for f in FACTORS},
        "TIES": {
            (d, f): partial(rivals.added, start, rivals.ties(tau, d), f)
            for d, f in product(DENSITIES, (*FACTORS, 1.6, 2.0))
        },
        "DARE": {
            (d, f): partial(rivals.added, start, rivals.dare(tau, d, seed), f) for d, f in product(DENSITIES, FACTORS)
        },
    }
    best_of = {row: best(grid, validation) for row, grid in grids.items()}
    found = {row: weights for row, (_, weights) in best_of.items()}
    x, y = data.tune
    few = x[: options.fisher]
    exact = [rivals.exact_fisher(each.model, task(few)) for each, task in zip(tuned, TASKS[tasks], strict=True)]
    found["exact Fisher"] = rivals.fisher_merged(own, exact)
    diagonal, rich = [each.diagonal for each in tuned], [each.kronecker for each in tuned]
    for trim in TRIMS:
        found[f"fisher, {trim:g} trimmed"] = merge(diagonal, method="fisher", base=base.model, trim=trim)
        found[f"gradient-matching, {trim:g} trimmed"] = merge(diagonal, base=base.diagonal, trim=trim)
    found["gradient-matching, base without state"] = merge(diagonal, base=base.model)
    found["fisher of recorded gradients"] = merge(rich, method="fisher")
    if options.soap:
        soap = experts(base.model, data, TASKS[tasks], steps=options.steps, seed=seed, soap=True, rate=1e-3)
        turned = [each.kronecker for each in soap]
        found["average (SOAP)"] = rivals.average([each.model.state_dict() for each in soap])
        found |= {f"{method} (SOAP)": merge(turned, method=method) for method in ("fisher", "kronecker")}
    all_x, all_y = torch.cat([task(x) for task in TASKS[tasks]]), y.repeat(len(tuned))
    joint = train(copy.deepcopy(base.model), all_x, all_y, steps=len(tuned) * options.steps, seed=seed, keep=0)
    found["joint"] = joint.model.state_dict()
    return found, {row: setting for row, (setting, _) in best_of.items()}


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    began = time.perf_counter()
    found = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


# --- cells and tables -----------------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> dict[str, Callable[[], Cell]]:
    """Every cell that was asked for, by the name of its file."""
    return {
        f"images-{network}-{name}-{tasks}-{seed}": partial(images_cell, network, name, tasks, seed, options)
        for seed, network, name, tasks in product(options.seeds, options.networks, options.data, options.tasks)
        if options.half is None or ((network, name, tasks) in DEVELOPMENT) == (options.half == "development")
    }


DIFFERENCES = (
    *(("damped", row) for row in ("average", "fisher")),
    *(("fisher", row) for row in ("average", "exact Fisher")),
    ("kronecker", "fisher"),
    ("inputs, 300", "kronecker"),
)


def table(cells: Mapping[str, Cell]) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """The mean and standard error of every row over the seeds, one column a setting, in Markdown; and the numbers."""
    columns: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        column = columns.setdefault(key.rpartition("-")[0], {})
        for row, value in cell["rows"].items():
            column.setdefault(row, []).append(value)
    every = [cell["rows"] for cell in cells.values()]
    columns["images, all"] = {row: [rows[row] for rows in every] for row in every[0]}
    for one, other in DIFFERENCES:
        if one in every[0] and other in every[0]:
            columns["images, all"][f"{one} − {other}"] = [rows[one] - rows[other] for rows in every]
    for row in (row for row in every[0] if f"{row}, worst" in every[0] and row != "average"):
        columns["images, all"][f"{row}, least above the average"] = [min(rows[row] - rows["average"] for rows in every)]
    texts = []
    for column, rows in columns.items():
        lines = [f"| {row} | {number(values, 1)} |" for row, values in rows.items()]
        texts.append("\n".join([f"| {column} | |", "| --- | ---: |", *lines]))
    return "\n\n".join(texts), columns


def targets_of(columns: Mapping[str, Mapping[str, Sequence[float]]], cells: Mapping[str, Cell]) -> list[Target]:
    """What was promised, of each setting."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    found: list[Target] = []
    for column, rows in columns.items():
        if column.startswith("images-"):
            value = {row: mean(values) for row, values in rows.items()}
            found += at_least(f"{column}: ours over averaging", 0.0, value["damped"] - value["average"])
            found += at_least(f"{column}: Kronecker over the diagonal", 3.0, value["kronecker"] - value["fisher"])
    slowest = max(cell["seconds"]["damped"] for cell in cells.values())
    return found + at_most("seconds of the slowest diagonal merge", 1.0, slowest)


def main() -> None:
    parser = arguments(__doc__, quick="a tiny network and few steps", device=True)
    parser.add_argument("--networks", nargs="+", choices=("mlp", "lenet"), default=["mlp", "lenet"])
    parser.add_argument("--data", nargs="+", choices=("mnist", "fashion-mnist"), default=["mnist", "fashion-mnist"])
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1000, 1005)))
    parser.add_argument("--steps", type=int, default=2000, help="of the base and of each expert")
    parser.add_argument("--hidden", type=int, default=400, help="units of the MLP's two layers")
    parser.add_argument("--half", choices=("development", "held-out"), help="by which settings were chosen, or not")
    parser.add_argument("--inputs", nargs="+", type=int, default=[300], help="of each task, for the merge by inputs")
    parser.add_argument("--ours", action="store_true", help="without peers")
    parser.add_argument("--soap", action="store_true", help="experts trained by SOAP as well")
    options = parser.parse_args()
    options.fisher = 1000
    if options.quick:
        options.networks, options.data, options.tasks, options.seeds = ["mlp"], ["mnist"], ["mixed"], [0]
        options.steps, options.hidden, options.fisher, options.soap = 60, 16, 50, True
    # Short training is warned of, rightly, and here in every cell.
    warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
    keys = ("quick", "steps", "hidden", "fisher", "soap", "inputs", "ours")
    about = {key: getattr(options, key) for key in keys}
    folder: Path = options.out / "merging"
    cells: dict[str, Cell] = {}
    for name, make in cells_of(options).items():
        path = folder / f"{name}.json"
        cell = read_cell(path, about)
        if cell is None:
            began = time.perf_counter()
            cell = {"settings": about, **make()}
            write_cell(path, cell)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        cells[name] = cell
    text, columns = table(cells)
    print(text)
    (options.out / "merging.md").write_text(text + "\n", encoding="utf-8")
    found = targets_of(columns, cells)
    write_results(
        options.out, "merging", {**setting(), "settings": about, "columns": columns, "targets": list(map(vars, found))}
    )
    for target in found:
        print(target)
    print(f"{len(cells)} cells")


if __name__ == "__main__":
    main()
