"""Merging fine-tuned networks by their optimisers' states, beside averaging, task arithmetic, TIES, DARE and the exact
Fisher.

    BAYESADAM_DATA=... python benchmarks/merging.py [--quick] [--experiment images classes sparse text memory shares]
        [--networks mlp lenet] [--data mnist fashion-mnist] [--tasks rotated mixed noisy] [--seeds 1000 1001 …] [--steps
        2000] [--device cuda] [--out out/bench]

Finished cells are kept in `--out`/merging as JSON, so that a run that was stopped resumes, and several processes may
share the cells by options that select them.

- images: a base is trained on plain images, experts are fine-tuned from it, one a task, all by Adam with β₂ = .999. λ
  of task arithmetic, the density and λ of TIES and DARE are chosen on validation images; ours has nothing to choose.
  Accuracy in % on test images, the mean over tasks. "experts" is each on its own task, "joint" one network trained on
  all tasks' images, for as many steps as the experts together. "exact Fisher" is from per-example gradients at the
  experts' weights.
- classes: experts that know the classes 0–4 and 5–9, where merging by curvature is no good, and the overlap by which
  that is warned of, beside the overlaps of the tasks above.
- sparse: the base fine-tuned on rotated images in a share of its weights: those of the largest curvature, of the base's
  own state or of a few gradients of the new task, beside as many at random.
- text: two language models fine-tuned from one base on two kinds of text; nats per byte on held-out parts of both.
- memory: two synthetic checkpoints merged from file to file; peak anonymous memory as a multiple of the largest tensor.
- shares: δ of gradient matching and of Kronecker factors as a share of the mean curvature, on development seeds and
  validation images: by this the library's constants were chosen.

Settings were chosen with seeds 0 to 99 on validation images; results are of seeds from 1000 on and of test images.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
import merging_rivals as rivals
from bayesadam.merging import merge, similarity
from bayesadam.merging.merged import plan_of
from bayesadam.pruning import tune_only, tuning_masks
from harness import Cell, Target, arguments, at_least, at_most, number, read_cell, setting, write_cell, write_results
from merging_memory import memory_cell
from merging_tasks import TASKS, Images, Trained, accuracy, build, experts, load, rotated, train
from merging_text import text_cell

FACTORS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.3)
DENSITIES = (0.1, 0.2, 0.4)
SPARSE = (0.001, 0.01, 0.1)
MATCHING_SHARES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
KRONECKER_SHARES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
EXPERIMENTS = ("images", "classes", "sparse", "text", "memory", "shares")
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


def trained_pair(
    network: str, tasks: str, seed: int, data: Images, options: argparse.Namespace, **changes: Any
) -> tuple[Trained, list[Trained]]:
    base = train(build(network, seed, options.hidden).to(options.device), *data.base, steps=options.steps, seed=seed)
    return base, experts(base.model, data, TASKS[tasks], steps=options.steps, seed=seed, **changes)


def images_cell(network: str, name: str, tasks: str, seed: int, options: argparse.Namespace) -> Cell:
    """Test accuracy of every method for one seed."""
    data = load(name, options.device, options.most)
    base, tuned = trained_pair(network, tasks, seed, data, options)
    validation = Scorer(base.model, *data.validation, TASKS[tasks])
    test = Scorer(base.model, *data.test, TASKS[tasks])
    start, own = copy.deepcopy(base.model.state_dict()), [copy.deepcopy(each.model.state_dict()) for each in tuned]
    rows: dict[str, float] = {"base": test(start), "average": test(rivals.average(own))}
    rows["experts"] = sum(test.each(each)[task] for task, each in enumerate(own)) / len(own)
    chosen: dict[str, Any] = {}
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
    for row, grid in grids.items():
        chosen[row], weights = best(grid, validation)
        rows[row] = test(weights)
    images = data.tune[0][: options.fisher]
    exact = [rivals.exact_fisher(each.model, task(images)) for each, task in zip(tuned, TASKS[tasks], strict=True)]
    rows["exact Fisher"] = test(rivals.fisher_merged(own, exact))
    diagonal, rich = [each.diagonal for each in tuned], [each.kronecker for each in tuned]
    seconds, merged = timed(lambda: merge(diagonal), options.device)
    rows["fisher"] = test(merged)
    rows["gradient-matching"] = test(merge(diagonal, base=base.diagonal))
    rows["gradient-matching, base without state"] = test(merge(diagonal, base=base.model))
    rows["fisher of recorded gradients"] = test(merge(rich, "fisher"))
    factor_seconds, by_factors = timed(lambda: merge(rich, "kronecker"), options.device)
    rows["kronecker"] = test(by_factors)
    rows["kronecker, base"] = test(merge(rich, "kronecker", base=base.diagonal))
    if options.soap:
        soap = experts(base.model, data, TASKS[tasks], steps=options.steps, seed=seed, soap=True, rate=1e-3)
        turned = [each.kronecker for each in soap]
        rows["average (SOAP)"] = test(rivals.average([each.model.state_dict() for each in soap]))
        rows["fisher (SOAP)"] = test(merge(turned, "fisher"))
        rows["kronecker (SOAP)"] = test(merge(turned, "kronecker"))
    x, y = data.tune
    all_x, all_y = torch.cat([task(x) for task in TASKS[tasks]]), y.repeat(len(tuned))
    joint = train(copy.deepcopy(base.model), all_x, all_y, steps=len(tuned) * options.steps, seed=seed, keep=0)
    rows["joint"] = test(joint.model.state_dict())
    overlaps = [similarity(a, b) for i, a in enumerate(diagonal) for b in diagonal[:i]]
    return {
        "rows": rows,
        "chosen": chosen,
        "seconds": seconds,
        "kronecker seconds": factor_seconds,
        "overlaps": overlaps,
    }


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    began = time.perf_counter()
    found = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def shares_cell(network: str, name: str, tasks: str, seed: int, options: argparse.Namespace) -> Cell:
    """Validation accuracy by the share of the mean curvature that δ is."""
    data = load(name, options.device, options.most)
    base, tuned = trained_pair(network, tasks, seed, data, options)
    scorer = Scorer(base.model, *data.validation, TASKS[tasks])
    rows: dict[str, float] = {"average": scorer(rivals.average([each.model.state_dict() for each in tuned]))}
    for start, label in ((base.diagonal, "base with state"), (base.model, "base without")):
        plan = plan_of([each.diagonal for each in tuned], None, start, None, {})
        for share in MATCHING_SHARES:
            changed = replace(plan, matching_share=share)
            rows[f"gradient-matching, {label}, {share:g}"] = scorer({n: changed.tensor(n) for n in plan.outline})
    rich = [each.kronecker for each in tuned]
    for start, label in ((None, ""), (base.diagonal, ", base")):
        plan = plan_of(rich, "kronecker", start, None, {})  # type: ignore[arg-type]
        for share in KRONECKER_SHARES:
            changed = replace(plan, kronecker_share=share)
            rows[f"kronecker{label}, {share:g}"] = scorer({n: changed.tensor(n) for n in plan.outline})
    rows["fisher"] = scorer(merge([each.diagonal for each in tuned]))
    rows["fisher of recorded gradients"] = scorer(merge(rich, "fisher"))
    return {"rows": rows}


def classes_cell(network: str, name: str, seed: int, options: argparse.Namespace) -> Cell:
    """Experts on halves of the classes: accuracy on all, and the overlap. The base was trained for a twentieth of the
    steps.
    """
    data = load(name, options.device, options.most)
    start = build(network, seed, options.hidden).to(options.device)
    base = train(start, *data.base, steps=max(20, options.steps // 20), seed=seed, keep=0)
    x, y = data.tune
    tuned = []
    for half in (y < 5, y >= 5):
        model = copy.deepcopy(base.model)
        tuned.append(train(model, x[half], y[half], steps=options.steps, seed=seed, keep=0))
    test = Scorer(base.model, *data.test, [lambda images: images])
    diagonal = [each.diagonal for each in tuned]
    rows = {
        "base": test(base.model.state_dict()),
        "average": test(rivals.average([each.model.state_dict() for each in tuned])),
        "fisher": test(merge(diagonal)),
    }
    return {"rows": rows, "overlaps": [similarity(*diagonal)]}


def sparse_cell(network: str, name: str, seed: int, options: argparse.Namespace) -> Cell:
    """Test accuracy on images turned by 45° after fine-tuning a share of the weights."""
    data = load(name, options.device, options.most)
    base = train(
        build(network, seed, options.hidden).to(options.device), *data.base, steps=options.steps, seed=seed, keep=0
    )
    x, y, test_x = rotated(data.tune[0], 45.0), data.tune[1], rotated(data.test[0], 45.0)
    probe = train(copy.deepcopy(base.model), x, y, steps=max(20, options.steps // 20), seed=seed, rate=0.0, keep=0)
    rows = {"untuned": accuracy(base.model, test_x, data.test[1])}
    whole = train(copy.deepcopy(base.model), x, y, steps=options.steps, seed=seed, keep=0)
    rows["all weights"] = accuracy(whole.model, test_x, data.test[1])
    draw = torch.Generator().manual_seed(seed)
    for share in SPARSE:
        own, task = tuning_masks(base.diagonal, share), tuning_masks(probe.diagonal, share)
        count = sum(int(mask.sum()) for mask in own.values())
        scores = {n: torch.rand(mask.shape, generator=draw) for n, mask in own.items()}
        least = torch.cat([each.flatten() for each in scores.values()]).topk(count).values[-1]
        at_random = {n: (each >= least).to(options.device) for n, each in scores.items()}
        for label, masks in (("base's curvature", own), ("task's curvature", task), ("random", at_random)):
            model = copy.deepcopy(base.model)
            held = partial(tune_only, model, masks)
            train(model, x, y, steps=options.steps, seed=seed, keep=0, rate=3e-3, after=held)
            rows[f"{share:g}, {label}"] = accuracy(model, test_x, data.test[1])
    return {"rows": rows}


# --- cells and tables -----------------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> dict[str, Callable[[], Cell]]:
    """Every cell that was asked for, by the name of its file."""
    found: dict[str, Callable[[], Cell]] = {}
    for experiment, seed in product(options.experiment, options.seeds):
        for network, name in product(options.networks, options.data):
            label = f"{network}-{name}"
            if experiment in ("images", "shares"):
                make = images_cell if experiment == "images" else shares_cell
                for tasks in options.tasks:
                    found[f"{experiment}-{label}-{tasks}-{seed}"] = partial(make, network, name, tasks, seed, options)
            elif experiment in ("classes", "sparse"):
                make_one = classes_cell if experiment == "classes" else sparse_cell
                found[f"{experiment}-{label}-{seed}"] = partial(make_one, network, name, seed, options)
        if experiment == "text":
            found[f"text-{seed}"] = partial(text_cell, seed, options)
    if "memory" in options.experiment:
        found["memory"] = partial(memory_cell, options)
    return found


DIFFERENCES = (("fisher", "average"), ("fisher", "exact Fisher"), ("kronecker", "fisher"))


def table(cells: Mapping[str, Cell]) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """The mean and standard error of every row over the seeds, one column a setting, in Markdown; and the numbers."""
    columns: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        column = columns.setdefault(key if key == "memory" else key.rpartition("-")[0], {})
        for row, value in cell["rows"].items():
            column.setdefault(row, []).append(value)
        for value in cell.get("overlaps", ()):
            column.setdefault("overlap", []).append(value)
    images = [cell["rows"] for key, cell in cells.items() if key.startswith("images")]
    if images:
        columns["images, all"] = {row: [rows[row] for rows in images] for row in images[0]}
        for one, other in DIFFERENCES:
            columns["images, all"][f"{one} − {other}"] = [rows[one] - rows[other] for rows in images]
    texts = []
    for column, rows in columns.items():
        digits = 1 if column.startswith(("images", "shares", "classes", "sparse")) else 3
        lines = [f"| {row} | {number(values, 3 if row == 'overlap' else digits)} |" for row, values in rows.items()]
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
            found += at_least(f"{column}: v̂ over averaging", 8.0, value["fisher"] - value["average"])
            found += at_least(f"{column}: v̂ over exact Fisher", 0.0, value["fisher"] - value["exact Fisher"])
            found += at_least(f"{column}: Kronecker over the diagonal", 3.0, value["kronecker"] - value["fisher"])
    seconds = [cell["seconds"] for cell in cells.values() if "seconds" in cell]
    if seconds:
        found += at_most("seconds of the slowest diagonal merge", 1.0, max(seconds))
    if "memory" in columns:
        found += at_most(
            "peak anonymous memory over the largest tensor", 3.0, columns["memory"]["peak over largest tensor"][0]
        )
    return found


def main() -> None:
    parser = arguments(__doc__, quick="tiny networks and few steps, every experiment", device=True)
    parser.add_argument("--experiment", nargs="+", choices=EXPERIMENTS, default=["images"])
    parser.add_argument("--networks", nargs="+", choices=("mlp", "lenet"), default=["mlp", "lenet"])
    parser.add_argument("--data", nargs="+", choices=("mnist", "fashion-mnist"), default=["mnist", "fashion-mnist"])
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1000, 1005)))
    parser.add_argument("--steps", type=int, default=2000, help="of the base and of each expert")
    parser.add_argument("--hidden", type=int, default=400, help="units of the MLP's two layers")
    parser.add_argument("--soap", action="store_true", help="experts trained by SOAP as well")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the two checkpoints of `memory` together")
    parser.add_argument("--layers", type=int, default=12, help="of `text`")
    parser.add_argument("--width", type=int, default=768, help="of `text`")
    parser.add_argument("--context", type=int, default=256, help="of `text`, in bytes")
    parser.add_argument("--text-steps", type=int, default=1500, help="of the base; each of the two has half as many")
    options = parser.parse_args()
    options.most, options.fisher = None, 1000
    if options.quick:
        options.experiment = ["images", "classes", "sparse", "text", "memory"]
        options.networks, options.data, options.tasks, options.seeds = ["mlp"], ["mnist"], ["mixed"], [0]
        options.steps, options.hidden, options.most, options.fisher, options.soap = 60, 16, 500, 50, True
        options.gigabytes, options.layers, options.width, options.context, options.text_steps = 0.02, 2, 32, 32, 40
    # Short training is warned of, rightly, and here in every cell.
    warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
    keys = ("steps", "hidden", "most", "fisher", "soap", "gigabytes", "layers", "width", "context", "text_steps")
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
