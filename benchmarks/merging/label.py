"""Which inputs to label: accuracy after 50, 100 and 300 labels, by random choice, entropy and `acquire`.

    BAYESADAM_DATA=... python -m benchmarks.merging.label [--quick] [--seeds 10] [--problems ...] [--part 0/1]

Every method has the same network, with dropout, trained from scratch by AdamW after every ten labels on those there
are: what differs is which ten come next. They start from the same twenty labels, drawn at random, and choose out of the
same pool.

Problems: scikit-learn's digits, MNIST with an MLP and with a CNN, and two tables, statlog (shuttle) and covertype. A
pool has 4,000 inputs, of digits 1,200. A cell, one problem, method and seed, is a JSON file under `--out`, and is not
run again; `--part i/n` runs every n-th of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bayesadam.likelihoods.classification import entropy
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import (
    Cell,
    arguments,
    mean_and_error,
    number,
    one_core,
    setting,
    shared_cells,
    write_results,
)
from experiments.data import load_images, load_table

LABELS = (50, 100, 300)
FIRST, BATCH, STEPS = 20, 10, 300
DROPOUT = 0.3
METHODS = ("random", "entropy", "acquire")


# --- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Inputs and classes of the pool and for testing, and the network that learns them."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    build: Callable[[], nn.Module]


def mlp(n_in: int, n_out: int, width: int = 128) -> nn.Module:
    layers = [
        nn.Linear(n_in, width),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
    ]
    return nn.Sequential(*layers, nn.Linear(width, n_out))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(DROPOUT),
        nn.Linear(800, 64),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(64, 10),
    )


def of_images(name: str, seed: int, pool: int, kind: str) -> Problem:
    data = load_images(name)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))[:pool]
    x, test_x = (images.float().reshape(len(images), -1) for images in (data.train_x[order], data.test_x[:5000]))
    scale = float(x.max())
    x, test_x = x / scale, test_x / scale
    if kind == "cnn":
        x, test_x = (images.view(-1, 1, 28, 28) for images in (x, test_x))
    build = cnn if kind == "cnn" else lambda: mlp(x.shape[1], 10)
    return Problem(x, data.train_y[order].long(), test_x, data.test_y[:5000].long(), build)


def of_table(name: str, seed: int, pool: int) -> Problem:
    table = load_table(name)
    order = torch.randperm(len(table.contexts), generator=torch.Generator().manual_seed(seed))[: pool + 5000]
    x, y = torch.from_numpy(table.contexts)[order], torch.from_numpy(table.labels)[order]
    x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-6)
    return Problem(x[:pool], y[:pool], x[pool:], y[pool:], lambda: mlp(x.shape[1], table.n_labels))


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "digits": lambda seed: of_images("digits", seed, 1200, "mlp"),
    "mnist mlp": lambda seed: of_images("mnist", seed, 4000, "mlp"),
    "mnist cnn": lambda seed: of_images("mnist", seed, 4000, "cnn"),
    "statlog": lambda seed: of_table("statlog", seed, 4000),
    "covertype": lambda seed: of_table("covertype", seed, 4000),
}


# --- training and choosing --------------------------------------------------------------------------------------------


def train(problem: Problem, labelled: Tensor, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new network on the labels there are."""
    torch.manual_seed(seed)
    model = problem.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    x, y = problem.x[labelled], problem.y[labelled]
    for _ in range(STEPS):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval(), optimizer


@torch.no_grad()
def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(1000)]).softmax(dim=-1)


def choose(method: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, n: int, seed: int) -> Tensor:
    """Ten of the inputs."""
    if method == "random":
        return torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:BATCH]
    if method == "entropy":
        return entropy(probabilities(model, x)).topk(BATCH).indices
    posterior = ba.Posterior.from_optimizer(model, optimizer, n, likelihood="classification")
    return ba.acquire(posterior, x, BATCH, seed=seed)


def learn(name: str, method: str, seed: int, most: int) -> Cell:
    """Accuracy at every number of labels, and the seconds of a choice."""
    problem = PROBLEMS[name](seed)
    order = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(1000 + seed))
    labelled, accuracy, seconds = order[:FIRST], {}, []
    while True:
        model, optimizer = train(problem, labelled, seed)
        right = probabilities(model, problem.test_x).argmax(dim=1) == problem.test_y
        accuracy[str(len(labelled))] = float(right.float().mean())
        if len(labelled) >= most:
            return {"accuracy": accuracy, "seconds": statistics.median(seconds)}
        rest = torch.ones(len(problem.x), dtype=torch.bool)
        rest[labelled] = False
        left = rest.nonzero().flatten()
        began = time.perf_counter()
        chosen = choose(method, model, optimizer, problem.x[left], len(labelled), seed)
        seconds.append(time.perf_counter() - began)
        labelled = torch.cat([labelled, left[chosen]])


# --- results ----------------------------------------------------------------------------------------------------------


def area(cell: Cell) -> float:
    """The mean accuracy over numbers of labels."""
    return statistics.fmean(cell["accuracy"].values())


def report(cells: dict[tuple[str, str], list[Cell]], problems: list[str], methods: list[str]) -> dict[str, Any]:
    """Tables, and what `acquire` is beside random choice and entropy."""
    results: dict[str, Any] = {}
    for problem in problems:
        print(
            f"\n{problem}: accuracy after {', '.join(map(str, LABELS))} labels; area under the curve; seconds a choice"
        )
        for method in methods:
            own = cells.get((problem, method), [])
            if not own:
                continue
            at = [[c["accuracy"][str(n)] for c in own] for n in LABELS if str(n) in own[0]["accuracy"]]
            columns = "  ".join(number(values) for values in (*at, [area(c) for c in own]))
            print(f"  {method:20s} {columns}  {statistics.median(c['seconds'] for c in own):.2f} s")
            results.setdefault(problem, {})[method] = {"area": [area(c) for c in own], "accuracy": at}
        pairs = [list(zip(cells[problem, "acquire"], cells[problem, other], strict=False)) for other in METHODS[:2]]
        for other, pair in zip(METHODS, pairs, strict=False):
            gap, error = mean_and_error(area(ours) - area(theirs) for ours, theirs in pair)
            print(f"  acquire less {other}: {gap:+.4f} ± {error:.4f}")
    return results


def main() -> None:
    parser = arguments(__doc__, quick="40 labels of digits, one seed, three methods")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.set_defaults(methods=list(METHODS))
    parser.add_argument("--part", default="0/1", help="i/n: every n-th cell, from the i-th on")
    options: argparse.Namespace = parser.parse_args()
    one_core()
    warnings.filterwarnings("ignore", category=ba.errors.BayesAdamWarning)
    if options.quick:
        options.seeds, options.problems = 1, ["digits"]
    most = 40 if options.quick else max(LABELS)
    cells = shared_cells(
        options,
        "label",
        {"labels": most},
        lambda problem, method, seed: learn(problem, method, seed, most),
        lambda cell: f"area {area(cell):.4f}",
    )
    results = report(cells, options.problems, options.methods)
    write_results(options.out, "label", {**setting(), "problems": results})


if __name__ == "__main__":
    main()
