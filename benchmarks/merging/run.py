"""Merging fine-tuned networks by their optimisers' states, beside averaging, task arithmetic, TIES, DARE and the exact
Fisher.

    BAYESADAM_DATA=... python -m benchmarks.merging.run [--quick] [--networks mlp lenet] [--data mnist fashion-mnist]
        [--tasks rotated mixed noisy] [--seeds 1000 1001 …] [--inputs 300] [--ours] [--device cuda]

Finished cells are kept in `--out`/merging as JSON, so that a run that was stopped resumes, and several processes may
share the cells by options that select them.

A base is trained on plain images, experts are fine-tuned from it, one a task, all by Adam with β₂ = .999. λ of task
arithmetic, the density and λ of TIES and DARE are chosen on validation images; ours has nothing to choose. Accuracy in
% on test images, the mean over tasks. "experts" is each on its own task. "exact Fisher" is from per-example gradients
at the experts' weights. With `--ours` peers and trimming are left out. A row "…, worst" is the accuracy on the task
that has the lowest.

Settings were chosen with seeds 0 to 99 on validation images; results are of seeds from 1000 on and of test images.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.merging import merge
from benchmarks.common.harness import Cell, arguments, at_least, cells, markdown, number, setting, write_results
from benchmarks.common.inputs import Pixels
from benchmarks.merging import rivals
from benchmarks.merging.tasks import DEVELOPMENT, TASKS, accuracy, build, images, train

FACTORS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.3)
DENSITIES, TRIMS = (0.1, 0.2, 0.4), (0.2, 0.5, 0.8)
Weights = Mapping[str, Tensor]
Columns = dict[str, dict[str, list[float]]]


def scores(model: nn.Module, data: Pixels, tasks: str, weights: Weights) -> list[float]:
    """Accuracy of these weights, task by task."""
    model.load_state_dict(dict(weights))
    return [accuracy(model, task(data[0]), data[1]) for task in TASKS[tasks]]


def images_cell(network: str, name: str, tasks: str, seed: int, options: argparse.Namespace) -> Cell:
    """Test accuracy of every method for one seed."""
    data, steps = images(name, options.device, quick=options.quick), options.steps
    base, _ = train(build(network, seed, options.hidden).to(options.device), *data["base"], steps=steps, seed=seed)
    x, y = data["tune"]
    tuned = [
        train(copy.deepcopy(base.model), task(x), y, steps=steps, seed=1000 * seed + number)
        for number, task in enumerate(TASKS[tasks])
    ]
    (diagonal, rich), test = zip(*tuned, strict=True), partial(scores, copy.deepcopy(base.model), data["test"], tasks)
    start, experts = base.model.state_dict(), [copy.deepcopy(q.model.state_dict()) for q in diagonal]
    few = [task(x[: max(options.inputs)]) for task in TASKS[tasks]]
    ours: dict[str, Callable[[], Weights]] = {
        "average": lambda: {name: thetas.mean(dim=0) for name, thetas in rivals.stacked(experts).items()},
        "damped": lambda: merge(diagonal),
        "fisher": lambda: merge(diagonal, method="fisher"),
        "gradient-matching": lambda: merge(diagonal, base=base),
        "kronecker": lambda: merge(rich, method="kronecker"),
        "kronecker, base": lambda: merge(rich, method="kronecker", base=base),
        **{f"inputs, {n}": lambda n=n: merge(diagonal, inputs=[x[:n] for x in few]) for n in options.inputs},
    }
    rows, seconds, chosen = {"base": statistics.fmean(test(start))}, {}, {}
    rows["experts"] = statistics.fmean(test(weights)[task] for task, weights in enumerate(experts))
    for row, make in ours.items():
        began = time.perf_counter()
        merged = make()
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds[row] = time.perf_counter() - began
        of_tasks = test(merged)
        rows |= {row: statistics.fmean(of_tasks), f"{row}, worst": min(of_tasks)}
    if options.ours:
        return {"rows": rows, "chosen": chosen, "seconds": seconds}
    for row, keys in PEERS.items():
        made = {key: partial(added, row, key, copy.deepcopy(start), experts, seed) for key in keys}
        validation = partial(scores, copy.deepcopy(base.model), data["validation"], tasks)
        chosen[row] = max(made, key=lambda key: statistics.fmean(validation(made[key]())))
        rows[row] = statistics.fmean(test(made[chosen[row]]()))
    for row, weights in others(
        base, diagonal, experts, [task(x[: 50 if options.quick else 1000]) for task in TASKS[tasks]]
    ):
        rows[row] = statistics.fmean(test(weights))
    return {"rows": rows, "chosen": chosen, "seconds": seconds}


# By peer, the settings to choose from on validation images: λ, or a density and λ.
PEERS: dict[str, list[Any]] = {
    "task arithmetic": list(FACTORS),
    "TIES": list(product(DENSITIES, (*FACTORS, 1.6, 2.0))),
    "DARE": list(product(DENSITIES, FACTORS)),
}


def added(row: str, key: Any, start: Weights, experts: Sequence[Weights], seed: int) -> Weights:
    """θ₀ + λ τ."""
    tau = {name: thetas - start[name] for name, thetas in rivals.stacked(experts).items()}
    density, factor = key if isinstance(key, tuple) else (1.0, key)
    change = rivals.ties(tau, density) if row == "TIES" else rivals.dare(tau, density, seed)
    return {name: theta + factor * change[name] for name, theta in start.items()}


def others(
    base: ba.Posterior, tuned: Sequence[ba.Posterior], experts: Sequence[Weights], inputs: Sequence[Tensor]
) -> Iterator[tuple[str, Weights]]:
    """Merges by the exact Fisher, and by ours in other ways."""
    exact = [rivals.exact_fisher(q.model, x) for q, x in zip(tuned, inputs, strict=True)]
    yield "exact Fisher", rivals.fisher_merged(experts, exact)
    for trim in TRIMS:
        yield f"fisher, {trim:g} trimmed", merge(tuned, method="fisher", base=base.model, trim=trim)
        yield f"gradient-matching, {trim:g} trimmed", merge(tuned, base=base, trim=trim)
    yield "gradient-matching, base without state", merge(tuned, base=base.model)


DIFFERENCES = (
    *(("damped", row) for row in ("average", "fisher")),
    *(("fisher", row) for row in ("average", "exact Fisher")),
    ("kronecker", "fisher"),
    ("inputs, 300", "kronecker"),
)


def columns_of(made: Mapping[str, Cell]) -> Columns:
    """Every row by setting, a number a seed, and over all settings, with differences."""
    columns: Columns = {}
    for key, cell in made.items():
        for row, value in cell["rows"].items():
            columns.setdefault(key.rpartition("-")[0], {}).setdefault(row, []).append(value)
    every = [cell["rows"] for cell in made.values()]
    columns["images, all"] = over_all = {row: [rows[row] for rows in every] for row in every[0]}
    for one, other in DIFFERENCES:
        if one in every[0] and other in every[0]:
            over_all[f"{one} − {other}"] = [rows[one] - rows[other] for rows in every]
    for row in (row for row in every[0] if f"{row}, worst" in every[0] and row != "average"):
        over_all[f"{row}, least above the average"] = [min(rows[row] - rows["average"] for rows in every)]
    return columns


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
    options = parser.parse_args()
    if options.quick:
        options.networks, options.data, options.tasks, options.seeds = ["mlp"], ["mnist"], ["mixed"], [0]
        options.steps, options.hidden = 60, 16
    # Short training is warned of, rightly, and here in every cell.
    warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
    about = {key: getattr(options, key) for key in ("quick", "steps", "hidden", "inputs", "ours")}
    makes = {
        f"images-{network}-{name}-{tasks}-{seed}": partial(images_cell, network, name, tasks, seed, options)
        for seed, network, name, tasks in product(options.seeds, options.networks, options.data, options.tasks)
        if options.half is None or (f"{network}-{name}-{tasks}" in DEVELOPMENT) == (options.half == "development")
    }
    made = cells(options.out / "merging", makes, about)
    columns, targets = columns_of(made), []
    for column, rows in columns.items():
        print(markdown((column, ""), ((row, number(values, 1)) for row, values in rows.items())), end="\n\n")
        gain = statistics.fmean(rows["damped"]) - statistics.fmean(rows["average"])
        targets += at_least(f"{column}: ours over averaging", 0.0, gain)
    write_results(
        options.out,
        "merging",
        {**setting(), "settings": about, "columns": columns, "targets": list(map(vars, targets))},
    )
    print(*targets, f"{len(made)} cells", sep="\n")


if __name__ == "__main__":
    main()
