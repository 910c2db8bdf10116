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

from bayesadam.engine.network import Network
from bayesadam.engine.stack import constant
from experiments import baselines, figure1, figure2
from experiments.baselines import Problem, Training, trained
from experiments.data import load_images
from experiments.facts import TITLES
from experiments.rules import RULES
from experiments.running import MISSING, Run, Table, digits, mean
from experiments.stacks import blocks

PROBLEMS = {"regression": "the toy regression", "pruning": "the image network"}
MEASURES = {"step": "training step", "posterior": "posterior, of training", "prediction": "prediction"}
# Steps of one call, turns of a round, images of the GGN that is timed, and inputs that are predicted.
_STEPS, _TURNS, _IMAGES, _INPUTS = 20, 3, 500, 100
Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Settings:
    """Which images; and the number of rounds, each of which has one ratio of every kind."""

    data: str = "mnist"
    rounds: int = 10


def ratios(calls: Calls, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """The time of each call over that of the first, round by round: of medians over three turns."""
    shares: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for name in _TURNS * [*calls]:
            began = clock()
            calls[name]()
            seconds[name].append(clock() - began)
        first, *_ = medians = [median(turns) for turns in seconds.values()]
        for share, taken in zip(shares.values(), medians, strict=True):
            share.append(taken / first)
    return shares


def problem_named(name: str, seed: int, data: str) -> Problem:
    """The problem of Figure 1 or of Figure 2, with the paper's settings and one network."""
    if name == "regression":
        toy = figure1.Settings()
        return figure1.problem_of([figure1.drawn(seed, toy)], (seed,), toy)
    settings, images = figure2.Settings(data), load_images(data)
    training = Training(settings.epochs, settings.batch_size, settings.lr, 0.0, (0.9, settings.beta2))
    network = Network(images.train_x.shape[1], settings.hidden, images.n_classes, dropout=settings.dropout)
    return figure2.problem_of(images, network, training, (seed,), "cpu")


def costs(problem: Problem, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By method and round: a step over Adam's, the posterior over Adam's training, a prediction over a forward pass.

    Badam's posterior is every weight's variance, read from Adam's state. Laplace's is the diagonal GGN of all training
    data, of which 500 images are timed. Badam linearises its network, of the others 100 functions are drawn.
    """
    data, total = problem.data, problem.training.steps(len(problem.data))
    problem = replace(problem, training=replace(problem.training, epochs=1))
    dropped = replace(problem.network, dropout=problem.network.dropout or 0.2)
    plain, mc = (replace(problem, network=replace(dropped, dropout=rate)) for rate in (0.0, dropped.dropout))
    problems = {"adam": plain, "bbb": plain, "vadam": plain, "mc-dropout": mc}
    stacks = {"badam": problem.optimum, **{name: trained(of, RULES[name]) for name, of in problems.items()}}
    network, x = problem.networks()[0].eval(), data.x_held_out[0][:_INPUTS]
    (rows,) = blocks(len(data), min(problem.training.batch_size, len(data)), problem.seeds, _STEPS)
    steps = {name: partial(stack.train, rows, constant(problem.training.lr)) for name, stack in stacks.items()}
    scale = 1.0
    laplace: Callable[[], object] = partial(baselines.fit_laplace_diagonal, problem)
    if data.likelihood == "classification":
        images, params = data.x[0][:_IMAGES], problem.optimum.params
        scale, laplace = len(data) / len(images), partial(baselines.diagonal_ggn, problem.network, params, images)
    read = partial(baselines.read, problem, prior_precision=1.0)
    predict: dict[str, Callable[[], object]] = {
        "adam": torch.no_grad()(partial(network, x)),
        "badam": partial(read()[0].predict, x),
    }
    for name in ("mc-dropout", "bbb", "vadam"):
        predict[name] = partial(
            lambda draw: draw(x).mean(dim=0), baselines.drawn(name, problems[name], stacks[name], 0)
        )
    adam = {"adam": steps["adam"]}
    posteriors = ratios({**adam, "badam": lambda: read()[0].variance, "laplace-diagonal": laplace}, rounds)
    measured = {
        "step": ratios({**adam, **steps}, rounds),
        "posterior": {
            name: [of * ratio * _STEPS / total for ratio in posteriors[name]]
            for name, of in (("badam", 1.0), ("laplace-diagonal", scale))
        },
        "prediction": ratios(predict, rounds),
    }
    named = [name for name in TITLES if any(name in of for of in measured.values())]
    return {name: {what: of[name] for what, of in measured.items() if name in of} for name in named}


def table(results: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    """Means over the rounds."""
    rows = []
    for problem, methods in results.items():
        for method, measured in methods.items():
            means = [mean(measured.get(what, ())) for what in MEASURES]
            rows.append((f"{PROBLEMS.get(problem, problem)}, {TITLES.get(method, method)}", *map(digits, means)))
    note = (
        "A training step is over Adam's without dropout, of one network on the CPU; what follows training, over Adam's "
        "training of the paper's length; a prediction of 100 inputs over a forward pass: Badam's is linearised, the "
        f"others average 100 functions. {MISSING}: nothing to compute."
    )
    return Table(f"Costs, mean of {settings['rounds']} rounds", ("network, method", *MEASURES.values()), rows, note)


def run(*, seed: int, out: Path, quiet: bool, settings: Settings) -> tuple[Path, ...]:
    """The command."""
    task = Run("cost", seed, out, asdict(settings), quiet=quiet)
    results = {name: costs(problem_named(name, seed, settings.data), settings.rounds) for name in PROBLEMS}
    return task.finish({}, results, table(results, asdict(settings)))
