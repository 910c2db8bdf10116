"""What the methods cost, as ratios: a training step, the posterior that follows training, a prediction.

Calls take turns on the CPU, so that a busy machine slows all alike. The ratios still differ a little from run to run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bayesadam.commands import plots
from bayesadam.commands.running import Run, Table
from bayesadam.data import load_images
from bayesadam.engine.rules import RULES
from bayesadam.engine.stack import Stack, constant
from bayesadam.engine.streams import blocks
from bayesadam.paper import MISSING, Sample, digits
from bayesadam.paper import methods as fitting
from bayesadam.paper.methods import Data, Network, Problem, Training, trained
from bayesadam.paper.pruning import PruningSettings, problem_of
from bayesadam.paper.regression import RegressionSettings, drawn
from bayesadam.weights.posterior import Posterior

PROBLEMS = {"regression": "the toy regression", "pruning": "the image network"}
TITLES = {"adam": "Adam", **plots.METHOD_TITLES}
MEASURES = {"step": "training step", "posterior": "posterior, of training", "prediction": "prediction"}
# Steps of one call, turns of a round, images of the GGN that is timed, and inputs that are predicted.
_STEPS, _TURNS, _IMAGES, _INPUTS = 20, 3, 500, 100
Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class CostSettings:
    """Which images; and the number of rounds, each of which has one ratio of every kind."""

    data: str = "mnist"
    rounds: int = 10


def ratios(calls: Calls, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """The time of each call over that of the first, round by round: of medians over three turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for name in _TURNS * [*calls]:
            began = clock()
            calls[name]()
            seconds[name].append(clock() - began)
        first, *_ = medians = [median(each) for each in seconds.values()]
        for each, taken in zip(found.values(), medians, strict=True):
            each.append(taken / first)
    return found


def problem_named(name: str, seed: int, data: str) -> Problem:
    """The problem of Figure 1 or of Figure 2, with the paper's settings and one network."""
    if name == "regression":
        toy = RegressionSettings()
        train, held_out, *_ = drawn(seed, toy)
        own = Data(train.x[None], train.y[None], held_out.x[None], held_out.y[None], "regression")
        training = Training(toy.epochs, toy.batch_size, toy.lr, toy.weight_decay)
        return Problem(own, Network(1, (50, 50), 1), training, (seed,))
    given, images = PruningSettings(data), load_images(data)
    training = Training(given.epochs, given.batch_size, given.lr, 0.0, (0.9, given.beta2))
    network = Network(images.train_x.shape[1], given.hidden, images.n_classes, dropout=given.dropout)
    return problem_of(images, network, training, (seed,), "cpu")


def costs(problem: Problem, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By method and round: a step over Adam's, the posterior over Adam's training, a prediction over a forward pass.

    Badam's posterior is every weight's variance, read from Adam's state. Laplace's is the diagonal GGN of all training
    data, of which 500 images are timed. Badam linearises its network, of the others 100 functions are drawn.
    """
    data, total = problem.data, problem.training.steps(len(problem.data))
    problem = replace(problem, training=replace(problem.training, epochs=1))
    dropped = replace(problem.network, dropout=problem.network.dropout or 0.2)
    asked = {name: replace(problem, network=replace(dropped, dropout=0.0)) for name in ("adam", "bbb", "vadam")}
    asked["mc-dropout"] = replace(problem, network=dropped)
    stacks = {"badam": problem.optimum, **{name: trained(each, RULES[name]) for name, each in asked.items()}}
    network, x = problem.networks()[0].eval(), data.x_held_out[0][:_INPUTS]

    (rows,) = blocks(len(data), min(problem.training.batch_size, len(data)), problem.seeds, _STEPS)

    def steps(stack: Stack) -> None:
        stack.prepare(rows, constant(problem.training.lr))
        stack.run(_STEPS)

    def read() -> Posterior:
        return Posterior.from_state_dict(network, problem.optimum.state_dict(0), len(data), prior_precision=1.0)

    laplace: Callable[[], object] = partial(fitting.fit_laplace_diagonal, problem)
    scale = 1.0
    if data.likelihood == "classification":
        part = data.x[0][:_IMAGES]
        laplace = partial(fitting.diagonal_ggn, problem.network, problem.optimum.params, part)
        scale = len(data) / len(part)
    plain: Any = {"adam": partial(steps, stacks["adam"])}
    predict: Any = {"adam": torch.no_grad()(partial(network, x))}
    predict["badam"] = partial(read().predict, x, likelihood=data.likelihood)
    for name in ("mc-dropout", "bbb", "vadam"):
        predict[name] = partial(fitting.sampled(name, asked[name], stacks[name]).predict, x)
    posterior = ratios({**plain, "badam": lambda: read().variance, "laplace-diagonal": laplace}, rounds)
    del posterior["adam"]
    shares = {name: [r * _STEPS / total for r in each] for name, each in posterior.items()}
    shares["laplace-diagonal"] = [scale * share for share in shares["laplace-diagonal"]]
    found = {
        "step": ratios({**plain, **{name: partial(steps, stack) for name, stack in stacks.items()}}, rounds),
        "posterior": shares,
        "prediction": ratios(predict, rounds),
    }
    named = [name for name in TITLES if name in {**stacks, **shares}]
    return {name: {what: each[name] for what, each in found.items() if name in each} for name in named}


def table(results: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    """Means over the rounds."""
    rows = []
    for problem, methods in results.items():
        for method, found in methods.items():
            means = [Sample.of(found.get(what, ())).mean for what in MEASURES]
            rows.append((f"{PROBLEMS.get(problem, problem)}, {TITLES.get(method, method)}", *map(digits, means)))
    note = (
        "A training step is over Adam's without dropout, of one network on the CPU. The posterior is what follows "
        "training, over Adam's training of the paper's length. A prediction of 100 inputs is over a forward pass: "
        f"Badam's network is linearised, the others average 100 functions. {MISSING}: nothing to compute."
    )
    return Table(f"Costs, mean of {settings['rounds']} rounds", ("network, method", *MEASURES.values()), rows, note)


def run_cost(*, seed: int, out: Path, quiet: bool, settings: CostSettings) -> tuple[Path, ...]:
    """The `cost` command."""
    run = Run("cost", seed, out, asdict(settings), quiet=quiet)
    with run.prepared():
        results = {name: costs(problem_named(name, seed, settings.data), settings.rounds) for name in PROBLEMS}
        run.show(table(results, asdict(settings)))
        return run.finish({}, results)
