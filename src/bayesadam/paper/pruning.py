"""Figure 2: accuracy of MNIST networks after pruning, every method's ranking; and networks trained to be pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from bayesadam.data import Images, load_images
from bayesadam.engine.network import forward, member
from bayesadam.engine.rules import IVON, SWAG, BayesByBackprop, Rule, Vadam
from bayesadam.errors import SettingError
from bayesadam.paper import plots
from bayesadam.paper.methods import Data, Network, Problem, Training
from bayesadam.paper.methods.base import posteriors, trained
from bayesadam.paper.methods.optimum import diagonal_ggn
from bayesadam.paper.run import Run, new_table, require_known, seeds_of
from bayesadam.paper.work import resumed, run_parts
from bayesadam.posterior import Posterior
from bayesadam.pruning import path_scores, weight_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = (
    *(round(0.1 * k, 1) for k in range(8)),
    *(0.75, 0.8, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 0.992, 0.995, 0.997, 0.999),
)
SHOWN = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
PAPER = ("badam", "mc-dropout", "bbb", "vadam")
BEYOND = ("swag", "ivon", "laplace-diagonal")
TITLES = plots.METHOD_TITLES
_STYLES = {"snr": "-", "magnitude": "--", "path-snr": (0, (1, 1))}
_SHADES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6A5ACD", "#8C564B")
# Below the square root of the smallest float32, so that a weight the data say nothing of ranks last.
_LEAST_CURVATURE = 1e-30


@dataclass(frozen=True)
class PruningSettings:
    """What the figure depends on, the seed aside; the defaults are the paper's appendix.

    Attributes:
        n_seeds: networks for each method.
        dropout: while Badam's and MC dropout's networks train.
        beta2: Badam's β₂; the other methods have Adam's usual .999.
    """

    data: str = "mnist"
    methods: tuple[str, ...] = (*PAPER, *BEYOND)
    n_seeds: int = 3
    epochs: int = 100
    hidden: tuple[int, ...] = (400, 400)
    activation: str = "relu"
    dropout: float = 0.2
    batch_size: int = 128
    lr: float = 1e-3
    beta2: float = 0.99999

    def __post_init__(self) -> None:
        require_known("methods", self.methods, TITLES)
        if self.n_seeds < 1:
            raise SettingError(f"n_seeds must be at least 1, got {self.n_seeds}")


@dataclass(frozen=True)
class SparseSettings:
    """Networks that are trained to be pruned: a Laplace prior, and a learning rate that falls to nothing.

    There are `n_seeds` networks for each recipe; `epochs` are those of a recipe of the usual length.
    """

    data: str = "mnist"
    n_seeds: int = 3
    epochs: int = 100
    batch_size: int = 128
    lr: float = 1e-3
    beta2: float = 0.99999


@dataclass(frozen=True)
class Recipe:
    """One way of training to be pruned: widths, λ of the penalty λ|θ|₁, and how many times the usual epochs."""

    hidden: tuple[int, ...]
    sparsity: float
    input_dropout: float = 0.0
    longer: int = 1

    @property
    def name(self) -> str:
        """Such as `2×400, λ = 3e-05`."""
        dropout = f", input dropout {self.input_dropout:g}" if self.input_dropout else ""
        longer = f", {self.longer} × epochs" if self.longer != 1 else ""
        return f"{len(self.hidden)}×{self.hidden[0]}, λ = {self.sparsity:g}{dropout}{longer}"


RECIPES = (
    Recipe((400, 400), 1e-5),
    Recipe((400, 400), 3e-5),
    Recipe((400, 400), 6e-5),
    Recipe((1200, 1200), 2e-5),
    Recipe((1200, 1200), 2e-5, input_dropout=0.1, longer=2),
)


@dataclass(frozen=True, eq=False)
class Curve:
    """One method's or recipe's accuracy after pruning by one ranking: (seeds, fractions)."""

    method: str
    ranking: str
    accuracy: tuple[tuple[float, ...], ...]

    def mean(self) -> list[float]:
        """Over the seeds."""
        return [sum(column) / len(column) for column in zip(*self.accuracy, strict=True)]


def problem_of(images: Images, network: Network, training: Training, seeds: tuple[int, ...], device: str) -> Problem:
    """All seeds on the same images, which lie on the device once; nothing is held out."""
    parts = (part.to(device) for part in (images.train_x, images.train_y, images.test_x, images.test_y))
    x, y, x_test, y_test = (part.expand(len(seeds), *part.shape) for part in parts)
    return Problem(Data(x, y, x_test, y_test, "classification"), network, training, seeds)


def curves_of(method: str, problem: Problem) -> list[Curve]:
    """Train one method on every seed at once, and prune by each ranking that it has."""
    # MC dropout has no posterior over weights.
    rankings = {"badam": ("snr", "magnitude", "path-snr"), "mc-dropout": ("magnitude",)}
    return _curves(method, problem, _TRAINERS[method](problem), rankings.get(method, ("snr", "magnitude")))


def _from_adam(problem: Problem) -> list[Posterior]:
    """Read off Adam's state, as the paper has it: no prior."""
    found, optimum = [], problem.optimum
    for index in range(len(problem.seeds)):
        model, state = problem.network.build(member(optimum.params, index)), optimum.state_dict(index)
        found.append(Posterior.from_state_dict(model, state, len(problem.data), prior_precision=0.0))
    return found


def _usual(problem: Problem) -> Problem:
    """The problem with Adam's usual β, for the methods that do not read its state."""
    return replace(problem, training=replace(problem.training, betas=(0.9, 0.999)))


def _from_rule(rule: type[Rule], *, lr: float | None = None, **own: Any) -> Callable[[Problem], list[Posterior]]:
    def found(problem: Problem) -> list[Posterior]:
        return list(posteriors(problem, trained(_usual(problem), rule, lr=lr, **own)))

    return found


def _from_ggn(problem: Problem) -> list[Posterior]:
    stack, found = _usual(problem).optimum, []
    curvature = diagonal_ggn(problem.network, stack.params, problem.data.x[0])
    for index in range(len(problem.seeds)):
        mean, total = ({name: t.cpu() for name, t in member(part, index).items()} for part in (stack.params, curvature))
        variance = {name: t.clamp(min=_LEAST_CURVATURE).reciprocal() for name, t in total.items()}
        found.append(Posterior.from_moments(problem.network.build(mean), mean, variance, len(problem.data)))
    return found


_TRAINERS: Mapping[str, Callable[[Problem], list[Posterior]]] = {
    "badam": _from_adam,
    "mc-dropout": lambda problem: _from_adam(_usual(problem)),
    "bbb": _from_rule(BayesByBackprop),
    # δ = N/600.
    "vadam": lambda problem: _from_rule(Vadam, prior_precision=len(problem.data) / 600)(problem),
    "swag": _from_rule(SWAG),
    "ivon": _from_rule(IVON, lr=0.1, initial_hessian=0.1),
    "laplace-diagonal": _from_ggn,
}


def _curves(method: str, problem: Problem, posteriors: Sequence[Posterior], rankings: Sequence[str]) -> list[Curve]:
    found = []
    example = torch.zeros(1, problem.data.x.shape[-1])
    for ranking in rankings:
        scores = [
            path_scores(p, example_input=example) if ranking == "path-snr" else weight_scores(p, ranking)
            for p in posteriors
        ]
        stacked = {name: torch.stack([score[name] for score in scores]) for name in scores[0]}
        weights = {name: torch.stack([p.mean[name] for p in posteriors]) for name in scores[0]}
        found.append(Curve(method, ranking, pruned_accuracy(problem, weights, stacked)))
    return found


@torch.no_grad()
def pruned_accuracy(
    problem: Problem, weights: Mapping[str, Tensor], scores: Mapping[str, Tensor]
) -> tuple[tuple[float, ...], ...]:
    """Test accuracy after each of `FRACTIONS` of all weights, biases included, is set to 0, lowest score first."""
    device = problem.data.x.device
    weights = {name: t.to(device) for name, t in weights.items()}
    flat = torch.cat([scores[name].to(device).flatten(1) for name in weights], dim=1)
    places = flat.argsort(dim=1, stable=True).argsort(dim=1)
    sizes = [t[0].numel() for t in weights.values()]
    split = zip(weights, torch.split(places, sizes, dim=1), strict=True)
    place = {name: part.view_as(weights[name]) for name, part in split}
    x, y = problem.data.x_held_out[0], problem.data.y_held_out[0]
    found = []
    for fraction in FRACTIONS:
        removed = round(fraction * flat.shape[1])
        pruned = {name: t * (place[name] >= removed) for name, t in weights.items()}
        right = forward(problem.network, pruned, x).argmax(dim=-1) == y
        found.append(right.double().mean(dim=1))
    return tuple(tuple(row) for row in torch.stack(found, dim=1).tolist())


def _rows(names: Sequence[str], curves: Callable[[str], list[Curve]]) -> Iterator[tuple[str, Any]]:
    """The curves of each name as plain data, by ranking."""
    for name in names:
        yield name, {curve.ranking: [list(row) for row in curve.accuracy] for curve in curves(name)}


def table(curves: Sequence[Curve], titles: Mapping[str, str]) -> Table:
    """Mean accuracy in percent at some of the fractions."""
    title, fractions = "Test accuracy in % after pruning this fraction, mean over the seeds", (f"{f:g}" for f in SHOWN)
    view = new_table(title, ("method", "ranking", *fractions), n_left=2)
    for curve in curves:
        name, mean = titles.get(curve.method, curve.method), dict(zip(FRACTIONS, curve.mean(), strict=True))
        view.add_row(name, curve.ranking, *(f"{100 * mean[f]:.2f}" for f in SHOWN))
    return view


def picture(curves: Sequence[Curve], titles: Mapping[str, str], title: str, *, since: float = 0.0) -> Figure:
    """Accuracy against the fraction pruned, from `since` on, and the error, on a log scale, against what is left."""
    palette = dict(zip(titles, _SHADES, strict=False))
    with plots.house_style():
        figure = plots.new_figure(11.5, 4.6, title)
        left, right = figure.subplots(1, 2)
        for curve in curves:
            shade = plots.COLOURS.get(curve.method, palette.get(curve.method, plots.MUTED))
            label = f"{titles.get(curve.method, curve.method)}, {curve.ranking}"
            style: Any = {"color": shade, "linestyle": _STYLES[curve.ranking], "linewidth": 1.5, "label": label}
            accuracy = curve.mean()
            left.plot([100 * f for f in FRACTIONS], [100 * a for a in accuracy], **style)
            right.plot([100 * (1 - f) for f in FRACTIONS], [max(100 * (1 - a), 0.1) for a in accuracy], **style)
        left.set(xlabel="weights pruned, %", ylabel="test accuracy, %", xlim=(100 * since, 100), title="Accuracy")
        right.set(xlabel="weights left, % (log)", ylabel="test error, % (log)", title="Error")
        right.set(xscale="log", yscale="log", xlim=(100, 0.1))
        for axes in (left, right):
            axes.grid(visible=True, color=plots.FAINT, linewidth=0.5)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def method_curves(name: str, *, seed: int, settings: PruningSettings, device: str) -> list[Curve]:
    """One method of the figure, whole in itself, so that a process of its own can do it."""
    images = load_images(settings.data)
    network = Network(images.train_x.shape[1], settings.hidden, images.n_classes, settings.activation, settings.dropout)
    training = Training(settings.epochs, settings.batch_size, settings.lr, 0.0, (0.9, settings.beta2))
    return curves_of(name, problem_of(images, network, training, seeds_of(seed, settings.n_seeds), device))


def recipe_curves(name: str, *, seed: int, settings: SparseSettings, device: str) -> list[Curve]:
    """One recipe of the second figure."""
    images = load_images(settings.data)
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    dropout: Any = {"dropout": 0.2, "input_dropout": recipe.input_dropout}
    network = Network(images.train_x.shape[1], recipe.hidden, images.n_classes, **dropout)
    epochs, betas = settings.epochs * recipe.longer, (0.9, settings.beta2)
    sparse: Any = {"sparsity": recipe.sparsity, "schedule": "cosine"}
    training = Training(epochs, settings.batch_size, settings.lr, 0.0, betas, **sparse)
    problem = problem_of(images, network, training, seeds_of(seed, settings.n_seeds), device)
    return _curves(name, problem, _from_adam(problem), ("snr", "magnitude", "path-snr"))


def run_pruning(
    *, seed: int, out: Path, quiet: bool, settings: PruningSettings | SparseSettings, device: str, jobs: int = 1
) -> tuple[Path, ...]:
    """The `pruning` command, and with `SparseSettings` `pruning --sparse`."""
    curves: Callable[[str], list[Curve]]
    if isinstance(settings, SparseSettings):
        title = f"Trained to be pruned: {settings.data}, Laplace prior, one shot, mean of {settings.n_seeds} seeds"
        curves = partial(recipe_curves, seed=seed, settings=settings, device=device)
        titles, recorded = {recipe.name: recipe.name for recipe in RECIPES}, {**asdict(settings), "sparse": True}
        file, draw = "figure2-sparse.png", partial(picture, titles=titles, title=title, since=0.8)
    else:
        units = f"{settings.activation} units, {settings.epochs} epochs"
        title = f"Pruning {settings.data} networks, {units}, mean of {settings.n_seeds} seeds"
        curves = partial(method_curves, seed=seed, settings=settings, device=device)
        titles, recorded = {name: TITLES[name] for name in settings.methods}, asdict(settings)
        file, draw = "figure2.png", partial(picture, titles=TITLES, title=title)
    run = Run("pruning", seed, out, recorded, device=device, quiet=quiet)
    with run.prepared():
        # Here, so that missing data are reported, or fetched, before anything is trained.
        load_images(settings.data, progress=not quiet)
        run, ledger = resumed(run, "methods")
        rows = run_parts(run, ledger, list(titles), partial(_rows, curves=curves), jobs=jobs)
        found = [Curve(name, ranking, tuple(map(tuple, r))) for name in titles for ranking, r in rows[name].items()]
        run.show(table(found, titles))
        results: dict[str, dict[str, Any]] = {}
        for curve in found:
            results.setdefault(curve.method, {})[curve.ranking] = {"fractions": FRACTIONS, "accuracy": curve.accuracy}
        paths = run.finish({file: plots.png(draw(found))}, results)
        ledger.close()
        return paths
