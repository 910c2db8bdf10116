"""Is a tracked posterior any good? One table of optimisers by uses, and of forms of tracking by uses.

    BAYESADAM_DATA=... python benchmarks/optimizers.py [--networks mlp lenet resnet resnet18 gpt]
        [--optimizers adamw muon sgd lion] [--forms own default 32 8 factored kronecker] [--seeds 1000 …]
        [--tuned 0.5] [--quick] [--device cuda] [--out out/bench]

The MLP 784-400-400-10, LeNet-5 and a small residual network learn MNIST, ResNet-18 learns 20,000 images of CIFAR-10, a
GPT of four blocks the bytes of a manual: by AdamW; by Muon, with AdamW for embeddings, the last layer and vectors; by
SGD with momentum; by Lion. The rates are on a cosine to 0; of some the one is taken that has the least loss on held-out
data after a quarter of the epochs, with seed 0. `ba.track` keeps the second moment of every tenth gradient: in 32 or 8
bits, factored, or as Kronecker factors; "default" as it does unless told, with each of the first hundred; "own" is
AdamW's own state.

Uses: test accuracy (of the GPT: of the next byte) whole and with .75 and .9 of the weights pruned by signal-to-noise
ratio, and by magnitude; Spearman's correlation of the ratios with those of 32 bits; AUROC of the novelty of
Fashion-MNIST, of the GPT of German, by the state and ten inputs; test NLL after `calibrate`, and over that at the
temperature that is best on the held-out data; two fine-tunes, on images turned by ± 40° or on French and Python,
merged, and beside it their average; and learning the second of these by AdamW anchored to the posterior, mean accuracy
on both, beside that of learning it without. Each cell is a file in out/bench/optimizers: stopped, it resumes, and
several processes may share the seeds.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from harness import arguments, number, read_cell, setting, write_cell, write_results
from optimizers_tasks import OPTIMIZERS, RATES, TASKS, Pair, Task

FRACTIONS = (0.75, 0.9)
TEMPERATURES = torch.logspace(-0.6, 0.6, 121).tolist()
FORMS: Mapping[str, dict[str, Any] | None] = {
    "own": None,
    "default": {},
    "32": {"bits": 32, "every": 10},
    "8": {"bits": 8, "every": 10},
    "factored": {"what": "factored", "every": 10},
    "kronecker": {"what": "kronecker", "every": 10},
}
Rates = Mapping[str, float]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy, in float32."""
    return F.cross_entropy(model(x).float().flatten(0, -2), y.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, pair: Pair) -> float:
    parts = zip(*(part.split(500) for part in pair), strict=True)
    return float(torch.cat([model(x).argmax(dim=-1) == y for x, y in parts]).double().mean())


def train(model: nn.Module, optimizers: list[Optimizer], task: Task, pair: Pair, epochs: float) -> None:
    """Whole batches alone, the rates on a cosine."""
    x, y = pair
    total = max(int(epochs * (len(x) // task.batch)), 1)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, total) for each in optimizers]
    half = task.half and x.is_cuda
    layout = torch.channels_last if half else torch.contiguous_format
    model.train().to(memory_format=layout) if half else model.train()  # type: ignore[call-overload]
    rows: list[Tensor] = []
    for _ in range(total):
        rows = rows or list(torch.randperm(len(x), device=x.device).split(task.batch))[: len(x) // task.batch]
        chosen = rows.pop()
        inputs = x[chosen].contiguous(memory_format=layout) if half else x[chosen]
        model.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            loss = loss_of(model, inputs, y[chosen])
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
    model.zero_grad()
    if half:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    model.eval()


def fitted(
    model: nn.Module,
    task: Task,
    pair: Pair,
    epochs: float,
    name: str,
    form: str,
    rates: Rates,
    past: ba.Posterior | None = None,
) -> ba.Posterior:
    """The posterior of a model that was trained on from where it stands, anchored to `past` where there is one."""
    optimizers = OPTIMIZERS[name](model, rates[name])
    how = FORMS[form]
    tracker = None if how is None else ba.track(optimizers, batch_size=task.batch, **how)
    anchors = [] if past is None else [ba.anchor(each, past, n_data=len(pair[0]), model=model) for each in optimizers]
    train(model, optimizers, task, pair, epochs)
    for each in (*anchors, *([] if tracker is None else [tracker])):
        each.remove()
    structure = "kronecker" if form == "kronecker" else "diagonal"
    given: Any = {"n_data": len(pair[0]), "batch_size": task.batch, "structure": structure, "prior_precision": 1.0}
    return ba.Posterior.from_optimizer(model, optimizers, likelihood="classification", **given)


def chosen_rate(task: Task, name: str) -> float:
    """The one of the least held-out loss after a short training."""
    losses = {}
    for rate in RATES[name]:
        torch.manual_seed(0)
        model = task.build().to(task.novel.device)
        train(model, OPTIMIZERS[name](model, rate), task, task.train, task.epochs / 4)
        with torch.no_grad():
            losses[rate] = float(loss_of(model, *task.held_out).nan_to_num(torch.inf))
    return min(losses, key=losses.__getitem__)


def pruned(posterior: ba.Posterior, fraction: float, task: Task, *, magnitude: bool = False) -> float:
    model = copy.deepcopy(posterior.model)
    ranking = {k: v.abs() for k, v in posterior.mean.items()} if magnitude else posterior.snr()
    ba.compress.apply_masks(model, ba.compress.masks(posterior, fraction, ranking=ranking))
    return accuracy(model, task.test)


def cell_of(task: Task, name: str, form: str, seed: int, rates: Rates, tuned: float) -> dict[str, Any]:
    """All uses of one posterior."""
    torch.manual_seed(seed)
    model = task.build().to(task.novel.device)
    posterior = fitted(model, task, task.train, task.epochs, name, form, rates)
    row = {"accuracy": accuracy(model, task.test)}
    for fraction in FRACTIONS:
        row[f"pruned {fraction:g}"] = pruned(posterior, fraction, task)
        row[f"pruned {fraction:g}, magnitude"] = pruned(posterior, fraction, task, magnitude=True)
    near = posterior.relative_to([task.train[0][:10]])
    row["novelty"] = ba.scores.auroc(
        *(near.novelty(x, likelihood="classification") for x in (task.test[0], task.novel))
    )
    report = ba.calibrate(posterior, task.held_out)
    row["NLL"] = ba.scores.nll(report.predict(task.test[0]), task.test[1])
    row["NLL over temperature's"] = row["NLL"] / tempered(model, task)
    few = task.epochs * tuned
    experts = [fitted(copy.deepcopy(model), task, pair, few, name, form, rates) for pair, _ in task.others]
    tests = [test for _, test in task.others]
    states = [expert.model.state_dict() for expert in experts]
    average = {k: (states[0][k] + states[1][k]) / 2 for k in states[0] if states[0][k].is_floating_point()}
    fisher = {**average, **ba.merge(experts, "kronecker" if form == "kronecker" else "fisher")}
    for what, weights in {"average": average, "merged": fisher}.items():
        both = copy.deepcopy(model)
        both.load_state_dict({**both.state_dict(), **weights})
        row[what] = statistics.fmean(accuracy(both, test) for test in tests)
    for what, past in (("learnt on", None), ("learnt on, anchored", posterior)):
        learner = copy.deepcopy(model)
        fitted(learner, task, task.others[1][0], few, "adamw", "own", rates, past)
        row[what] = statistics.fmean(accuracy(learner, test) for test in (task.test, tests[1]))
    ratios = torch.cat([value.flatten() for value in posterior.snr().values()])
    return {"row": row, "ranks": ratios.argsort().argsort()[:: max(len(ratios) // 20_000, 1)].tolist()}


@torch.no_grad()
def tempered(model: nn.Module, task: Task) -> float:
    """The test NLL at the temperature that is best on the held-out data."""
    held, test = ((model(x).flatten(0, -2), y.flatten()) for x, y in (task.held_out, task.test))
    best = min(TEMPERATURES, key=lambda t: float(F.cross_entropy(held[0] / t, held[1])))
    return float(F.cross_entropy(test[0] / best, test[1]))


def spearman(a: list[float], b: list[float]) -> float:
    pair = torch.tensor([a, b], dtype=torch.float64).argsort(dim=1).argsort(dim=1).double()
    return float(torch.corrcoef(pair)[0, 1])


def kept(path: Path, about: Any, make: Any) -> Any:
    """What a cell's file has, or is given now."""
    cell = read_cell(path, about)
    if cell is None:
        cell = {"settings": about, **make()}
        write_cell(path, cell)
    return cell


def main() -> None:
    parser = arguments(__doc__, quick="one seed, one epoch of 1,500 images or 500 windows", device=True)
    parser.add_argument("--networks", nargs="+", choices=TASKS, default=["mlp", "lenet"])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["own", "32", "8", "factored"])
    parser.add_argument("--tuned", type=float, default=0.5, help="epochs of a fine-tune over those of the training")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(1000, 1005)), help="none: the rates alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    seeds, networks = (options.seeds[:1], options.networks[:1]) if options.quick else (options.seeds, options.networks)
    about = {"quick": options.quick, **({} if options.tuned == 0.5 else {"tuned": options.tuned})}
    results: dict[str, Any] = {**setting(), **about, "seeds": seeds, "rows": {}, "rates": {}}
    folder = options.out / "optimizers"
    for network in networks:
        task = TASKS[network](options.device, options.quick)
        rates = {
            name: kept(folder / f"rate-{network}-{name}.json", about, lambda: {"rate": chosen_rate(task, name)})["rate"]  # noqa: B023
            for name in dict.fromkeys((*options.optimizers, "adamw"))
        }
        results["rates"][network] = rates
        print(network, rates, flush=True)
        lines: list[str] = []
        for name in options.optimizers:
            whole: dict[int, list[float]] = {}
            for form in (form for form in options.forms if form != "own" or name == "adamw"):
                rows = []
                for seed in seeds:
                    path = folder / f"{network}-{name}-{form}-{seed}.json"
                    cell = kept(path, about, lambda: cell_of(task, name, form, seed, rates, options.tuned))  # noqa: B023
                    if form == "32":
                        whole[seed] = cell["ranks"]
                    row = dict(cell["row"])
                    if seed in whole:
                        row["Spearman"] = spearman(cell["ranks"], whole[seed])
                    rows.append(row)
                if not rows:
                    continue
                results["rows"][f"{network}, {name}, {form}"] = rows
                columns = list(rows[0]) if "Spearman" in rows[0] else [*rows[0], "Spearman"]
                if not lines:
                    lines = [f"| {network} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
                cells = [number([row[c] for row in rows], 4) if c in rows[0] else "" for c in columns]
                lines.append(f"| {name}, {form} | {' | '.join(cells)} |")
        print("\n".join(lines), flush=True)
    write_results(options.out, "optimizers", results)


if __name__ == "__main__":
    main()
