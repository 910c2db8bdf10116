"""Continual learning: tasks one after the other, anchored to the posterior of those before, beside EWC at its best
strength.

    BAYESADAM_DATA=... python -m benchmarks.merging.continual [--quick] [--only permuted split-mnist …]
        [--methods plain ewc kronecker …] [--development 0 1 2] [--seeds 1000 1001 …] [--device cuda] [--jobs 8]

- permuted: ten tasks of MNIST, each with its pixels in an order of its own; one head of ten classes.
- split-mnist, split-fashion-mnist: five tasks of two classes; the task is known, and each has a head of its own.

784-100-100 ReLU units, Adam at 10⁻³ with a fresh state for every task, batches of 100. Accuracies are means over all
tasks after the last, in %.

- plain: no anchor; joint: all tasks at once, as many steps.
- ewc: the exact diagonal Fisher, Σ_k p_k (∂ log p_k)² over every training image, one penalty a task, in the loss.
- online-laplace: the same Fisher summed, round the weights of the last task.
- diagonal, root: `ba.anchor` with Adam's own N B v̂ or N √v̂, summed over tasks; kronecker: 100 recorded batches of
  each task.

Strengths λ are in units of Bayes' rule, N F for the Fisher F of one image. Rivals get the λ of the best mean validation
accuracy (5,000 images that train nothing) over the development seeds; "ours" has λ = 1 and nothing chosen. diagonal and
root are shown at their best λ too. Each cell is a file of its own under `--out`/continual: stopped, the benchmark
resumes, and several processes may share the work by --only, --methods or --seeds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import (
    Cell,
    Target,
    arguments,
    at_least,
    mean_and_error,
    parallel,
    read_cell,
    setting,
    write_cell,
    write_results,
)
from benchmarks.common.inputs import NoData, load
from experiments.data import load_split

PROBLEMS = {"permuted": "mnist", "split-mnist": "mnist", "split-fashion-mnist": "fashion-mnist"}
GRID = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# Those with a strength to be chosen; ours are run at 1 besides.
TUNED = ("ewc", "online-laplace", "diagonal", "root")
OURS = ("diagonal", "root", "kronecker")
METHODS = ("plain", "ewc", "online-laplace", *OURS, "joint")
VALIDATION, BATCH, RATE = 5000, 100, 1e-3
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """How large the runs are."""

    tasks: int = 10
    images: int | None = None
    epochs: int = 5
    width: int = 100
    data: str | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """Training, validation and test images with their classes, and the head that serves them."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    test_x: Tensor
    test_y: Tensor
    head: int


class Net(nn.Module):
    """A body of two hidden layers, and a head for each task or one for all; `task` says which."""

    def __init__(self, inputs: int, width: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for _ in range(heads))
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the present task's head."""
        out: Tensor = self.heads[self.task](self.body(x))
        return out


# --- tasks ----------------------------------------------------------------------------------------------------------


def pixels(name: str, split: Any) -> tuple[Tensor, Tensor]:
    """Images, (n, pixels) in [0, 1], and their classes."""
    if name == "digits":
        return load_split(name, split)
    try:
        x, y = load(name, split)
    except NoData as error:
        sys.exit(str(error))
    return x.flatten(1), y


def tasks_of(problem: str, size: Size, seed: int, device: str) -> list[Task]:
    """The tasks of a problem, in an order and with permutations of the seed, on the device."""
    (train_x, train_y), test = (pixels(size.data or PROBLEMS[problem], split) for split in ("train", "test"))
    generator = torch.Generator().manual_seed(seed)
    held = min(VALIDATION, len(train_x) // 6)
    parts = {"train": (train_x[:-held], train_y[:-held]), "held": (train_x[-held:], train_y[-held:]), "test": test}
    placed = {name: (x.to(device), y.to(device)) for name, (x, y) in parts.items()}
    return (_permuted if problem == "permuted" else _split)(placed, size, generator)


def _permuted(parts: dict[str, tuple[Tensor, Tensor]], size: Size, generator: torch.Generator) -> list[Task]:
    x, y = parts["train"]
    found = []
    for _ in range(size.tasks):
        order = torch.randperm(x.shape[1], generator=generator).to(x.device)
        rows = torch.randperm(len(x), generator=generator)[: size.images].to(x.device)
        others = [t for name in ("held", "test") for t in (parts[name][0][:, order], parts[name][1])]
        found.append(Task(x[rows][:, order], y[rows], *others, head=0))
    return found


def _split(parts: dict[str, tuple[Tensor, Tensor]], size: Size, generator: torch.Generator) -> list[Task]:
    classes = torch.randperm(10, generator=generator).reshape(5, 2).tolist()[: size.tasks]
    found = []
    for head, (first, second) in enumerate(classes):
        own = []
        for name, (x, y) in parts.items():
            rows = ((y == first) | (y == second)).nonzero().squeeze(1)
            if name == "train":
                rows = rows[torch.randperm(len(rows), generator=generator)[: size.images].to(rows.device)]
            own += [x[rows], (y[rows] == second).long()]
        found.append(Task(*own, head=head))
    return found


# --- training -------------------------------------------------------------------------------------------------------

Correct = Callable[[], None]


def train(
    model: Net, task: Task, optimizer: torch.optim.Optimizer, epochs: int, correct: Correct | None = None
) -> None:
    """Epochs of batches that are drawn on the device; `correct` adds a penalty's gradient before the step."""
    model.task = task.head
    for _ in range(epochs):
        order = torch.randperm(len(task.x), device=task.x.device)
        for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
            step(model, task, rows, optimizer, correct)


def step(model: Net, task: Task, rows: Tensor, optimizer: torch.optim.Optimizer, correct: Correct | None) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
    if correct is not None:
        correct()
    optimizer.step()


def adam(model: Net) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=RATE)


def together(model: Net, tasks: Sequence[Task], epochs: int) -> None:
    """Joint training: at every step a batch of some task, as many steps as one after the other."""
    optimizer = adam(model)
    counts = [len(task.x) // BATCH * epochs for task in tasks]
    turns = torch.repeat_interleave(torch.arange(len(tasks)), torch.tensor(counts))
    for number in turns[torch.randperm(len(turns))].tolist():
        task = tasks[number]
        model.task = task.head
        step(model, task, torch.randint(len(task.x), (BATCH,), device=task.x.device), optimizer, None)


def fisher(model: Net, task: Task) -> Named:
    """The diagonal of (1/n) Σ_n Σ_k p_k ∇log p_k ∇log p_kᵀ, exact: a linear layer's is the product of squares, example
    by example.
    """
    model.task = task.head
    kept: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
    layers = [m for m in (*model.body, model.heads[task.head]) if isinstance(m, nn.Linear)]

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        kept[module] = inputs[0].detach(), output

    handles = [layer.register_forward_hook(keep) for layer in layers]
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: torch.zeros_like(p) for layer in layers for p in layer.parameters()}
    for x in task.x.split(10_000):
        logs = model(x).log_softmax(dim=1)
        roots = logs.detach().exp().sqrt()
        for k in range(logs.shape[1]):
            outputs = [kept[layer][1] for layer in layers]
            slopes = torch.autograd.grad((logs[:, k] * roots[:, k]).sum(), outputs, retain_graph=True)
            for layer, slope in zip(layers, slopes, strict=True):
                squares = slope.square() / len(task.x)
                found[names[id(layer.weight)]] += squares.T @ kept[layer][0].square()
                found[names[id(layer.bias)]] += squares.sum(dim=0)
    for handle in handles:
        handle.remove()
    return found


class Quadratic:
    """EWC: λ/2 Σ_t F_t (θ − θ_t)² beside the mean loss, of which the sums of F and of F θ are all that is kept.

    Tasks have N_t images each and the loss is a mean over those of the present one, so F_t is weighted by N_t/N: λ = 1
    is Bayes' rule.
    """

    def __init__(self, model: Net, strength: float, *, online: bool) -> None:
        self.model, self.strength, self.online = model, strength, online
        self.total: Named = {}
        self.moment: Named = {}

    def add(self, task: Task) -> None:
        """What the task just trained adds."""
        parameters = dict(self.model.named_parameters())
        for name, found in fisher(self.model, task).items():
            weighted = found * len(task.x)
            self.total[name] = self.total[name] + weighted if name in self.total else weighted
            centre = weighted * parameters[name].detach()
            self.moment[name] = self.moment[name] + centre if name in self.moment else centre
        if self.online:
            self.moment = {name: total * parameters[name].detach() for name, total in self.total.items()}

    def correct(self, count: int) -> None:
        """Add the penalty's gradient to that of a mean over so many images."""
        for name, parameter in self.model.named_parameters():
            if name in self.total and parameter.grad is not None:
                pull = self.total[name] * parameter.detach() - self.moment[name]
                parameter.grad.add_(pull, alpha=self.strength / count)


def posterior_of(method: str, model: Net, optimizer: torch.optim.Optimizer, task: Task) -> ba.Posterior:
    """Of the task just trained."""
    if method != "kronecker":
        options: Any = {"power": 1.0 if method == "diagonal" else 0.5, "batch_size": BATCH, "prior_precision": 1.0}
        return ba.Posterior.from_optimizer(model, optimizer, len(task.x), **options)
    order = torch.randperm(len(task.x), device=task.x.device)
    batches = ((task.x[rows], task.y[rows]) for rows in order.split(BATCH) if len(rows) == BATCH)
    recorder = ba.Recorder.from_batches(model, batches, F.cross_entropy, keep=100)
    return ba.Posterior.from_recorder(model, recorder, len(task.x))


def sequential(method: str, model: Net, tasks: Sequence[Task], epochs: int, strength: float) -> None:
    """Task after task."""
    penalty = Quadratic(model, strength, online=method == "online-laplace")
    past: ba.Posterior | None = None
    for number, task in enumerate(tasks):
        optimizer = adam(model)
        held = None
        if past is not None:
            held = ba.anchor(optimizer, past, strength=strength, n_data=len(task.x))
        is_rival = method in ("ewc", "online-laplace")
        train(model, task, optimizer, epochs, partial(penalty.correct, len(task.x)) if is_rival and number else None)
        if held is not None:
            held.remove()
        if is_rival:
            penalty.add(task)
        elif method in OURS and number + 1 < len(tasks):
            found = posterior_of(method, model, optimizer, task)
            past = found if past is None else past + found


def network(tasks: Sequence[Task], size: Size) -> Net:
    outputs = max(int(task.y.max()) for task in tasks) + 1
    return Net(tasks[0].x.shape[1], size.width, outputs, max(task.head for task in tasks) + 1).to(tasks[0].x.device)


@torch.no_grad()
def accuracy(model: Net, tasks: Sequence[Task], which: str) -> list[float]:
    found = []
    for task in tasks:
        model.task = task.head
        x, y = getattr(task, f"{which}_x"), getattr(task, f"{which}_y")
        found.append(100 * float((model(x).argmax(dim=1) == y).double().mean()))
    return found


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training of all tasks."""

    problem: str
    method: str
    strength: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Where its cell is."""
        return folder / f"{self.problem}-{self.method}-{self.strength:g}-{self.seed}.json"


def one_run(run: Run, size: Size, folder: Path, device: str) -> Cell:
    """The accuracies of a run, from its file where it is finished."""
    about = {**asdict(run), **asdict(size)}
    found = read_cell(run.path(folder), about)
    if found is not None:
        return found
    tasks = tasks_of(run.problem, size, run.seed, device)
    torch.manual_seed(run.seed)
    model = network(tasks, size)
    if run.method == "joint":
        together(model, tasks, size.epochs)
    else:
        sequential(run.method, model, tasks, size.epochs, run.strength)
    cell: Cell = {"settings": about}
    for which, name in (("held", "validation"), ("test", "test")):
        each = accuracy(model, tasks, which)
        cell |= {f"{name}_tasks": each, name: statistics.fmean(each)}
    write_cell(run.path(folder), cell)
    print(f"{run.problem}, {run.method}, λ = {run.strength:g}, seed {run.seed}: {cell['test']:.2f}", flush=True)
    return cell


def best_strength(problem: str, method: str, seeds: Sequence[int], size: Size, folder: Path) -> float | None:
    """λ of the best mean validation accuracy over the development seeds; None where these are not all there."""
    means = {}
    for strength in GRID:
        runs = [Run(problem, method, strength, seed) for seed in seeds]
        cells = [read_cell(run.path(folder), {**asdict(run), **asdict(size)}) for run in runs]
        if any(cell is None for cell in cells):
            return None
        means[strength] = statistics.fmean(cell["validation"] for cell in cells if cell)
    return max(means, key=lambda strength: means[strength])


# --- the whole ------------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Rows are methods, columns problems."""
    rows = list(dict.fromkeys(row for columns in found.values() for row in columns))
    lines = [f"{'':28s}" + "".join(f"{problem:>22s}" for problem in found)]
    for row in rows:
        shown = [
            f"{one['mean']:.2f} ± {one['error']:.2f}" if (one := columns.get(row)) else "–"
            for columns in found.values()
        ]
        lines.append(f"{row:28s}" + "".join(f"{text:>22s}" for text in shown))
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="two small tasks of scikit-learn's digits", device=True, jobs=1)
    parser.add_argument("--only", nargs="+", choices=tuple(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--development", nargs="*", type=int, default=[0, 1, 2], help="seeds that choose λ")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1000, 1010)), help="seeds that are reported")
    parser.add_argument("--tasks", type=int, default=10, help="at most, of each problem")
    parser.add_argument("--images", type=int, help="for each task; all by default")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=100)
    options = parser.parse_args()
    size = Size(options.tasks, options.images, options.epochs, options.width)
    only, seeds, development = options.only, options.seeds, options.development
    if options.quick:
        size, only, seeds, development = Size(2, None, 2, 20, "digits"), only[:2], [1000, 1001], [0]
    folder = options.out / "continual"
    run = partial(one_run, size=size, folder=folder, device=options.device)

    def all_of(runs: Sequence[Run]) -> dict[Run, Cell]:
        calls = [partial(run, each) for each in runs]
        cells = parallel(calls, jobs=options.jobs) if options.jobs > 1 else (call() for call in calls)
        return dict(zip(runs, cells, strict=True))

    tuned = [method for method in TUNED if method in options.methods]
    all_of([Run(p, m, strength, seed) for p in only for seed in development for m in tuned for strength in GRID])
    rows: dict[str, dict[str, list[Run]]] = {problem: {} for problem in only}
    for problem in only:
        for method in options.methods:
            best = best_strength(problem, method, development, size, folder) if method in tuned else None
            strengths = {f"{method}, λ = 1": 1.0} if method in OURS else {} if method in TUNED else {method: 1.0}
            if best is not None:
                strengths[f"{method}, best λ"] = best
            for row, strength in strengths.items():
                rows[problem][row] = [Run(problem, method, strength, seed) for seed in seeds]
    cells = all_of(list(dict.fromkeys(each for columns in rows.values() for runs in columns.values() for each in runs)))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for problem, columns in rows.items():
        found[problem] = {}
        for row, runs in columns.items():
            each = [cells[one]["test"] for one in runs]
            mean, error = mean_and_error(each)
            found[problem][row] = {"mean": mean, "error": error, "each": each, "strength": runs[0].strength}
    print(table(found))
    targets: list[Target] = []
    for problem, columns in found.items():
        ours, theirs = columns.get("kronecker, λ = 1"), columns.get("ewc, best λ")
        if ours and theirs:
            targets += at_least(f"{problem}: Kronecker at λ = 1 less EWC at its best", 0, ours["mean"] - theirs["mean"])
    results = {"size": asdict(size), "development": development, "seeds": seeds, **setting(), "problems": found}
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "continual", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
