"""Figure 1: the paper's toy regression, every method, many seeds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Distribution

from bayesadam.engine.network import Network
from experiments import plots
from experiments.baselines import METHODS, Data, Method, Predictor, Problem, Training, fit_rule
from experiments.data import N_TRAIN, TEST_INTERVAL, TRAIN_INTERVAL, ToyData, toy_grid, toy_points
from experiments.facts import COLOURS, TITLES
from experiments.released import fit_letter, fit_script
from experiments.running import Run, Table, check_methods, digits, generator, mean, run_parts, seeds_of

# Rows of the table that stand beside those of the figure: what the paper leaves open, settled otherwise.
VARIANTS: Mapping[str, Method] = {
    "badam-released": fit_script,
    "badam-letter": fit_letter,
    "bbb-learnt": partial(fit_rule, "bbb", learn_noise=True),
    "vadam-learnt": partial(fit_rule, "vadam", learn_noise=True),
    # From other initial precisions than its usual 10⁴.
    **{f"vadam-precision-{p:g}": partial(fit_rule, "vadam", initial_std=p**-0.5) for p in (1e1, 1e2, 1e3, 1e5)},
}
METHODS_SHOWN = (*METHODS, *VARIANTS)
METRICS = ("nll_in", "nll_out", "std_in", "std_near", "std_far", "std_out", "coverage95_in", "rmse_in")
# Outside, "near" are inputs at most so far from the middle of the training range, and "far" the others.
_NEAR = 0.5
# One method's results as plain data: its scores seed by seed, and the first seed's mean and deviation on the grid.
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What the figure depends on, the seed aside; the defaults are the paper's appendix.

    `n_held_out` points calibrate, `n_test` in range and as many outside give the scores.
    """

    methods: tuple[str, ...] = METHODS_SHOWN
    n_seeds: int = 5
    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    n_held_out: int = 50
    n_test: int = 500

    def __post_init__(self) -> None:
        check_methods(self.methods, METHODS_SHOWN)


def drawn(seed: int, settings: Settings) -> tuple[ToyData, ToyData, ToyData, ToyData]:
    """Training, held-out, in-range and outside points of one seed."""
    source, outside = (
        generator(seed, "toy"),
        ((TEST_INTERVAL[0], TRAIN_INTERVAL[0]), (TRAIN_INTERVAL[1], TEST_INTERVAL[1])),
    )
    train, held_out, near = (toy_points(n, generator=source) for n in (N_TRAIN, settings.n_held_out, settings.n_test))
    return train, held_out, near, toy_points(settings.n_test, generator=source, intervals=outside)


def problem_of(sets: Sequence[tuple[ToyData, ...]], seeds: tuple[int, ...], settings: Settings) -> Problem:
    """The paper's network of two layers of 50 units on what `drawn` gives for each seed."""
    x, y, x_held_out, y_held_out = (
        torch.stack([getattr(parts[i], field) for parts in sets]) for i in (0, 1) for field in ("x", "y")
    )
    training = Training(settings.epochs, settings.batch_size, settings.lr, settings.weight_decay)
    return Problem(Data(x, y, x_held_out, y_held_out, "regression"), Network(1, (50, 50), 1), training, seeds)


def fit_methods(methods: Sequence[str], *, seed: int, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Fit some methods on every seed at once, and score them."""
    seeds = seeds_of(seed, settings.n_seeds)
    problem = problem_of(sets := [drawn(s, settings) for s in seeds], seeds, settings)
    for method in methods:
        yield method, _scored({**METHODS, **VARIANTS}[method](problem), sets)


def nll(y: Distribution, targets: Tensor) -> float:
    """Mean negative log-likelihood in nats per target."""
    return -float(y.log_prob(targets).mean(dtype=torch.float64))


def coverage(y: Distribution, targets: Tensor, level: float = 0.95) -> float:
    """The share of targets in the central interval of the level: P(Y ≤ y) is at most so far from ½."""
    return float(((y.cdf(targets) - 0.5).abs() <= level / 2).double().mean())


def _scored(predictors: Sequence[Predictor], sets: Sequence[tuple[ToyData, ...]]) -> Row:
    rows = []
    for predictor, (_, _, inside, outside) in zip(predictors, sets, strict=True):
        near, far = predictor(inside.x), predictor(outside.x)
        std_in, std_out = (p.f_variance.sqrt() for p in (near, far))
        close = (outside.x - sum(TRAIN_INTERVAL) / 2).abs() <= _NEAR
        deviations = (float(part.mean()) for part in (std_in, std_out[close], std_out[~close], std_out))
        rmse = float((near.f_mean - inside.y).double().square().mean().sqrt())
        scores = (nll(p.distribution, part.y) for p, part in ((near, inside), (far, outside)))
        rows.append((*scores, *deviations, coverage(near.distribution, inside.y), rmse))
    grid = predictors[0](toy_grid().x)
    mean, std = (part.squeeze(1).tolist() for part in (grid.f_mean, grid.stddev))
    return {"scores": dict(zip(METRICS, zip(*rows, strict=True), strict=True)), "mean": mean, "std": std}


def table(results: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    """Means over the seeds."""
    columns = {"nll_in": "NLL in", "nll_out": "NLL out", "coverage95_in": "95 % coverage", "rmse_in": "RMSE in"}
    columns |= {"std_in": "std in", "std_near": "std near", "std_far": "std far", "std_out": "std out"}
    rows = []
    for method, scores in results.items():
        means = {name: mean(scores.get(name, ())) for name in columns}
        growth = means["std_out"] / means["std_in"] if means["std_in"] > 0 else math.nan
        rows.append((TITLES.get(method, method), *map(digits, (*means.values(), growth))))
    note = (
        "NLL and RMSE are of new, noisy points, “std” is the function's deviation. “In” is the training range, "
        "0 to 0.5; “out” is −0.5 to 0 and 0.5 to 1.2, “near” its part at most 0.25 away, “far” the rest. The noise is "
        "the held-out squared error of a network unless it is learnt. The paper prints no numbers for this figure."
    )
    return Table(f"Scores, mean of {settings['n_seeds']} seeds", ("method", *columns.values(), "out / in"), rows, note)


def picture(rows: Mapping[str, Row], seed: int, settings: Settings) -> Figure:
    """A panel a method, of the variants the released code's alone: the first seed's data, mean, and bands."""
    rows = {name: row for name, row in rows.items() if name not in VARIANTS or name == "badam-released"} or rows
    (train, *_), grid = drawn(seeds_of(seed, 1)[0], settings), toy_grid()
    x = grid.x.squeeze(1).numpy()

    def panel(axes: Axes, method: str, row: Row) -> None:
        axes.axvspan(*TRAIN_INTERVAL, color=plots.FAINT, alpha=0.35, linewidth=0)
        shade, mean, std = COLOURS.get(method, plots.MUTED), np.array(row["mean"]), np.array(row["std"])
        for width in (1, 2):
            axes.fill_between(x, mean - width * std, mean + width * std, color=shade, alpha=0.16, linewidth=0)
        axes.plot(x, grid.y.squeeze(1), color=plots.INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(train.x, train.y, "o", color=plots.INK, markersize=2.4, markeredgewidth=0, alpha=0.55)
        axes.plot(x, mean, color=shade, linewidth=1.8)
        axes.set(title=TITLES.get(method, method), xlim=TEST_INTERVAL, ylim=(-1.6, 2.6))
        axes.locator_params(axis="x", nbins=4)

    title = "Toy regression: mean, one and two standard deviations (noise included)"
    draw = [partial(panel, method=method, row=row) for method, row in rows.items()]
    with plots.house_style():
        return plots.panels(draw, title, columns=5, size=(2.9, 2.7))


def run(*, seed: int, out: Path, quiet: bool, settings: Settings) -> tuple[Path, ...]:
    """The command."""
    task = Run("figure1", seed, out, asdict(settings), quiet=quiet)
    parts = run_parts(task, settings.methods, partial(fit_methods, seed=seed, settings=settings))
    rows = {name: parts[name] for name in METHODS_SHOWN if name in parts}
    results = {method: row["scores"] for method, row in rows.items()}
    files = {"figure1.png": plots.png(picture(rows, seed, settings))}
    return task.finish(files, results, table(results, asdict(settings)))
