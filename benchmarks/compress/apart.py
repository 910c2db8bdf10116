"""What pruning with inputs rests on: which inputs, what fine-tuning adds, whose optimiser's state, seconds and memory.

    BAYESADAM_DATA=... python -m benchmarks.compress.apart --nets DIR [--only 'lenet300-*'] [--questions inputs]

`DIR` has perceptrons of `trained`. Rows are those of `smaller`, in one file a network; stopped, it resumes. Nothing is
chosen by test images: rates and epochs are fixed below.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

import bayesadam as ba
from benchmarks.common.harness import arguments, number, resident, write_results
from benchmarks.common.inputs import load
from benchmarks.compress import smaller
from benchmarks.compress.smaller import Case, Job, Method, ours
from benchmarks.compress.trained import NETS, Data, Net, data_of, loss_of, some_inputs, trained

FRACTIONS, INPUTS, GRADIENTS, EPOCHS = (0.75, 0.9, 0.95, 0.98), 1000, 100, 5
OTHERS = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
RULES = ("SGD", "Muon") if hasattr(torch.optim, "Muon") else ("SGD",)
QUESTIONS = ("inputs", "tuning", "rules", "costs")


# --- methods --------------------------------------------------------------------------------------------------------


def on(inputs: Callable[[Tensor], Tensor]) -> Method:
    """Ours on other inputs than the network's own."""
    return lambda case, fraction, bits: case.pruned(fraction, inputs=inputs(case.inputs)).model


def recorded(data: Data, batch: int, model: nn.Module) -> ba.Posterior:
    """Kronecker-factored, of gradients G at the trained weights: its right factors are E GᵀG, its inputs weighted."""
    pairs = zip(*(part[: GRADIENTS * batch].split(batch) for part in data.train), strict=True)
    recorder = ba.Recorder.from_batches(model, pairs, F.cross_entropy, keep=GRADIENTS)
    return ba.Posterior.from_recorder(model, recorder, len(data.train[0]), "classification")


def by_factors(data: Data, batch: int, *, adam: bool) -> Method:
    """Conditioned by these factors without inputs, ranked by their own ratio or by that of Adam's state."""

    def method(case: Case, fraction: float, bits: int | None) -> nn.Module:
        ranking = ba.compress.weight_scores(case.posterior) if adam else "snr"
        return Case(recorded(data, batch, case.model), case.inputs).pruned(fraction, ranking=ranking).model

    return method


def of(made: Callable[[], ba.Posterior], ranking: str | None) -> Method:
    """Conditioned on the inputs, of another posterior than the case's."""
    return lambda case, fraction, bits: (
        Case(made(), case.inputs).pruned(fraction, inputs=case.inputs, ranking=ranking).model
    )


def tuned(net: Net, data: Data, seed: int, method: Method) -> Method:
    """What a method gives, trained one epoch more by a new Adam; the zeros of its matrices stay."""

    def tune(case: Case, fraction: float, bits: int | None) -> nn.Module:
        small = copy.deepcopy(method(case, fraction, bits))
        torch.manual_seed(seed)
        adam = torch.optim.Adam(small.parameters(), net.lr)
        with ba.compress.keep_pruned(small, {name: small.get_parameter(name) != 0 for name in case.eligible}, adam):
            return fit(small, [adam], data, net.batch, 1)

    return tune


def ruled(rule: str, net: Net, data: Data, seed: int) -> ba.Posterior:
    """Of a network that another rule trained, with v̂ tracked; Muon leaves biases to Adam."""
    torch.manual_seed(seed)
    model = net.build()
    biases, matrices = ([p for p in model.parameters() if (p.dim() == 2) is flag] for flag in (False, True))
    optimizers: list[Optimizer] = (
        [torch.optim.SGD(model.parameters(), 0.1, 0.9)]
        if rule == "SGD"
        else [torch.optim.Muon(matrices, 0.02, weight_decay=0.0), torch.optim.Adam(biases, net.lr)]
    )
    ba.track(optimizers, batch_size=net.batch)
    fit(model, optimizers, data, net.batch, EPOCHS)
    return ba.Posterior.from_optimizer(model, optimizers, len(data.train[0]), likelihood="classification")


def fit(model: nn.Module, optimizers: Sequence[Optimizer], data: Data, batch: int, epochs: int) -> nn.Module:
    """Trained on, at rates that fall to 0."""
    (x, y), steps = data.train, len(data.train[0]) // batch
    rates = [LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * steps) for optimizer in optimizers]
    model.train()
    for rows in (rows for _ in range(epochs) for rows in torch.randperm(len(x))[: steps * batch].split(batch)):
        model.zero_grad()
        loss_of(model, x[rows], y[rows]).backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
    return model.eval()


def methods(net: Net, data: Data, seed: int, *, quick: bool) -> Iterator[tuple[str, str, Method, int]]:
    """The question, what its row is called, the method, and how many inputs it gets."""
    other = load(OTHERS[net.data], "test", made_up=quick)[0]
    yield "inputs", "own inputs", ours, INPUTS
    yield "inputs", OTHERS[net.data], on(lambda x: other[: len(x)]), INPUTS
    yield "inputs", "uniform noise", on(torch.rand_like), INPUTS
    yield "inputs", "recorded factors, their ratio", by_factors(data, net.batch, adam=False), 0
    yield "inputs", "recorded factors, Adam's ratio", by_factors(data, net.batch, adam=True), 0
    yield "inputs", "nothing: the ratio alone", smaller.ALONE["ratio alone"], 0
    yield "tuning", "magnitude", smaller.magnitude, 0
    yield "tuning", "ours, one epoch more", tuned(net, data, seed, ours), INPUTS
    yield "tuning", "magnitude, one epoch more", tuned(net, data, seed, smaller.magnitude), 0
    for rule in RULES:
        made = cache(partial(ruled, rule, net, data, seed))
        yield "rules", f"{rule}, ours", of(made, None), INPUTS
        yield "rules", f"{rule}, magnitude conditioned", of(made, "magnitude"), INPUTS


# --- seconds and memory ---------------------------------------------------------------------------------------------


def cost(path: Path, method: Method, fraction: float, inputs: Tensor) -> tuple[float, float, float]:
    """Seconds on two threads, those of processors, and MiB beyond what there was before: in a process of its own."""
    torch.set_num_threads(2)
    case = Case(smaller.posterior_of(path, "cpu", 60_000), inputs)
    before, start, busy = resident("VmHWM"), time.perf_counter(), time.process_time()
    method(case, fraction, None)
    return time.perf_counter() - start, time.process_time() - busy, resident("VmHWM") - before


def costs(paths: Sequence[Path], fractions: Sequence[float], *, quick: bool) -> dict[str, list[float]]:
    """By method and fraction, over the networks."""
    found: dict[str, list[float]] = {}
    for fraction, path, method in product(fractions, paths, (ours, smaller.sparsegpt)):
        net, seed = NETS[path.stem.rpartition("-")[0]], int(path.stem.rpartition("-")[2])
        inputs = some_inputs(net, data_of(net, "cpu", made_up=quick), INPUTS, seed)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(cost, (path, method, fraction, inputs))
        for unit, value in zip(("s", "processor s", "MiB"), measured, strict=True):
            found.setdefault(f"{method.__name__}, {fraction:g}: {unit}", []).append(value)
    return found


# --- the command ----------------------------------------------------------------------------------------------------


def jobs(path: Path, questions: Sequence[str], fractions: Sequence[float], *, quick: bool) -> Iterator[Job]:
    """Every row of a network."""
    net, seed = NETS[path.stem.rpartition("-")[0]], int(path.stem.rpartition("-")[2])
    yield "dense", on(lambda x: x), 0.0, None, 0
    for question, title, method, n in methods(net, data_of(net, "cpu", made_up=quick), seed, quick=quick):
        if question in questions:
            for fraction in (*(() if question == "inputs" else (0.0,)), *fractions):
                yield title, method, fraction, None, n


def main() -> None:
    parser = arguments(__doc__, quick="one small network on made-up images")
    parser.add_argument("--nets", type=Path, help="folder of the trained networks")
    parser.add_argument("--only", nargs="+", default=["lenet300-*"], help="of these, by pattern")
    parser.add_argument("--fractions", type=float, nargs="+", default=list(FRACTIONS))
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    options = parser.parse_args()
    nets, fractions = options.nets or options.out / "nets", [0.9] if options.quick else options.fractions
    if options.quick and not (nets / "lenet300-0.pt").is_file():
        trained("lenet300", 0, nets / "lenet300-0.pt", "cpu", made_up=True)
    paths = [path for path in sorted(nets.glob("*.pt")) if any(fnmatchcase(path.stem, only) for only in options.only)]
    rows = []
    for path in paths:
        wanted = jobs(path, options.questions, fractions, quick=options.quick)
        rows += smaller.measure(path, options.out / f"apart-{path.stem}.json", wanted, "cpu", quick=options.quick)
    print(smaller.tables(rows))
    if "costs" in options.questions:
        found = costs(paths, fractions, quick=options.quick)
        write_results(options.out, "costs", found)
        print(*(f"{name}: {number(values, 1)}" for name, values in found.items()), sep="\n")


if __name__ == "__main__":
    main()
