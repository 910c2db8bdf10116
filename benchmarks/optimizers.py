"""Is a tracked posterior any good? One table of optimisers by uses, and of forms of tracking by uses.

    BAYESADAM_DATA=... python benchmarks/optimizers.py [--networks mlp lenet resnet] [--optimizers adamw muon sgd lion]
        [--forms own 32 8 factored kronecker] [--seeds 1000 …] [--images N] [--epochs N] [--quick] [--device cuda]
        [--out out/bench]

Networks are trained on MNIST, batches of 100, a cosine to 0: by AdamW, by torch's Muon with AdamW for what is no
matrix, by SGD with momentum, and by Lion, whose rates were chosen by the training loss of seed 0. `ba.track` keeps
the second moment of every tenth gradient: in 32 or 8 bits, factored, or as Kronecker factors; "own" is AdamW's own
state. Uses: test accuracy whole and with .75 and .9 of the weights pruned by signal-to-noise ratio, and by magnitude;
Spearman's correlation of the ratios with those of 32 bits; AUROC of the novelty of Fashion-MNIST, by the state and ten
inputs; test NLL after `calibrate` over that at the best temperature; two fine-tunes on rotated digits merged, over the
accuracy of their average; and learning rotated digits by AdamW anchored to the posterior, mean accuracy on both,
beside that of learning them without. Each cell is a file in out/bench/optimizers; stopped, it resumes.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from harness import arguments, number, read_cell, setting, write_cell, write_results
from networks import lenet, mlp, small_resnet
from publish import BATCH, Data, accuracy, novelty, turned

FRACTIONS = (0.75, 0.9)
HELD_OUT = 1000
DEGREES = 40.0


class Lion(Optimizer):
    """θ ← θ − η (sign(β₁ m + (1 − β₁) g) + λ θ), m ← β₂ m + (1 − β₂) g."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 0.1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


def muon(parameters: list[nn.Parameter]) -> list[Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=1e-3, weight_decay=0.0)]


OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], list[Optimizer]]] = {
    "adamw": lambda p: [torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)],
    "muon": muon,
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.05, momentum=0.9)],
    "lion": lambda p: [Lion(p, lr=1e-4)],
}
FORMS: Mapping[str, dict[str, Any] | None] = {
    "own": None,
    "32": {"bits": 32},
    "8": {"bits": 8},
    "factored": {"what": "factored"},
    "kronecker": {"what": "kronecker"},
}
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), *mlp()),
    "lenet": lenet,
    "resnet": small_resnet,
}


def train(model: nn.Module, optimizers: list[Optimizer], x: Tensor, y: Tensor, epochs: int) -> None:
    """Whole batches alone, the rates on a cosine."""
    steps = len(x) // BATCH
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, epochs * steps) for each in optimizers]
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device)[: steps * BATCH].split(BATCH):
            model.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            for each in (*optimizers, *schedules):
                each.step()
    model.zero_grad()
    model.eval()


def fitted(
    model: nn.Module, name: str, form: str, x: Tensor, y: Tensor, epochs: int, past: ba.Posterior | None = None
) -> ba.Posterior:
    """The posterior of a model that was trained on from where it stands, anchored to `past` where there is one."""
    optimizers = OPTIMIZERS[name](list(model.parameters()))
    how = FORMS[form]
    tracker = None if how is None else ba.track(optimizers, batch_size=BATCH, **how)
    anchors = [] if past is None else [ba.anchor(each, past, n_data=len(x), model=model) for each in optimizers]
    train(model, optimizers, x, y, epochs)
    for each in (*anchors, *([] if tracker is None else [tracker])):
        each.remove()
    structure = "kronecker" if form == "kronecker" else "diagonal"
    given: Any = {"n_data": len(x), "batch_size": BATCH, "structure": structure, "prior_precision": 1.0}
    return ba.Posterior.from_optimizer(model, optimizers, likelihood="classification", **given)


def pruned(posterior: ba.Posterior, fraction: float, data: Data, *, magnitude: bool = False) -> float:
    model = copy.deepcopy(posterior.model)
    ranking = {k: v.abs() for k, v in posterior.mean.items()} if magnitude else posterior.snr()
    ba.prune(model, ba.pruning_masks(posterior, fraction, ranking=ranking))
    return accuracy(model, data.test_x, data.test_y)


def cell_of(network: str, name: str, form: str, data: Data, seed: int, epochs: int) -> dict[str, Any]:
    """All uses of one posterior."""
    torch.manual_seed(seed)
    model = NETWORKS[network]().to(data.x.device)
    n = len(data.x) - HELD_OUT
    x, y = data.x[:n], data.y[:n]
    posterior = fitted(model, name, form, x, y, epochs)
    row = {"accuracy": accuracy(model, data.test_x, data.test_y)}
    for fraction in FRACTIONS:
        row[f"pruned {fraction:g}"] = pruned(posterior, fraction, data)
        row[f"pruned {fraction:g}, magnitude"] = pruned(posterior, fraction, data, magnitude=True)
    row["novelty"] = novelty(posterior, data)
    report = ba.calibrate(posterior, (data.x[n:], data.y[n:]))
    p = report.predict(data.test_x)
    plain = report.predict(data.test_x, shift=False)
    row["NLL"] = ba.scores.nll(p, data.test_y)
    row["NLL over temperature's"] = row["NLL"] / ba.scores.nll(plain, data.test_y)
    half, few = n // 2, max(epochs // 2, 1)
    angles = (-DEGREES, DEGREES)
    tests = [turned(data.test_x, angle) for angle in angles]
    experts = []
    for angle, part in zip(angles, (slice(0, half), slice(half, n)), strict=True):
        expert = copy.deepcopy(model)
        experts.append(fitted(expert, name, form, turned(x[part], angle), y[part], few))

    def mean_accuracy(weights: Mapping[str, Tensor]) -> float:
        merged = copy.deepcopy(model)
        merged.load_state_dict({**merged.state_dict(), **weights})
        return statistics.fmean(accuracy(merged, test, data.test_y) for test in tests)

    states = [expert.model.state_dict() for expert in experts]
    average = {k: (states[0][k] + states[1][k]) / 2 for k in states[0] if states[0][k].is_floating_point()}
    row["average"] = mean_accuracy(average)
    row["merged"] = mean_accuracy(dict(ba.merge(experts, "kronecker" if form == "kronecker" else "fisher")))
    turned_x, both = turned(x[:half], DEGREES), (data.test_x, tests[1])
    for what, past in (("learnt on", None), ("learnt on, anchored", posterior)):
        learner = copy.deepcopy(model)
        fitted(learner, "adamw", "own", turned_x, y[:half], few, past)
        row[what] = statistics.fmean(accuracy(learner, test, data.test_y) for test in both)
    ratios = torch.cat([value.flatten() for value in posterior.snr().values()])
    return {"row": row, "ranks": ratios.argsort().argsort()[:: max(len(ratios) // 20_000, 1)].tolist()}


def spearman(a: list[float], b: list[float]) -> float:
    pair = torch.tensor([a, b], dtype=torch.float64).argsort(dim=1).argsort(dim=1).double()
    return float(torch.corrcoef(pair)[0, 1])


def main() -> None:
    parser = arguments(__doc__, quick="one seed, one epoch of 1,500 images", device=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mlp", "lenet"])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["own", "32", "8", "factored"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1000, 1005)))
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds, networks = (options.seeds[:1], options.networks[:1]) if options.quick else (options.seeds, options.networks)
    images, epochs, tests = (1500, 1, 200) if options.quick else (options.images, options.epochs, options.tests)
    data = Data.load(options.device, images, tests)
    about = {"images": images, "epochs": epochs, "tests": tests}
    results: dict[str, Any] = {**setting(), **about, "seeds": seeds, "quick": options.quick, "rows": {}}
    for network in networks:
        lines: list[str] = []
        for name in options.optimizers:
            whole: dict[int, list[float]] = {}
            for form in (form for form in options.forms if form != "own" or name == "adamw"):
                rows = []
                for seed in seeds:
                    path = options.out / "optimizers" / f"{network}-{name}-{form}-{seed}.json"
                    cell = read_cell(path, about)
                    if cell is None:
                        cell = {"settings": about, **cell_of(network, name, form, data, seed, epochs)}
                        write_cell(path, cell)
                    if form == "32":
                        whole[seed] = cell["ranks"]
                    row = dict(cell["row"])
                    if seed in whole:
                        row["Spearman"] = spearman(cell["ranks"], whole[seed])
                    rows.append(row)
                results["rows"][f"{network}, {name}, {form}"] = rows
                columns = list(rows[0]) if "Spearman" in rows[0] else [*rows[0], "Spearman"]
                if not lines:
                    lines = [f"| {network} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
                cells = [number([row[c] for row in rows], 4) if c in rows[0] else "" for c in columns]
                lines.append(f"| {name}, {form} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
        print("\n".join(lines), flush=True)
    write_results(options.out, "optimizers", results)


if __name__ == "__main__":
    main()
