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
from bayesadam.experiments import plots
from bayesadam.experiments.run import Run
from bayesadam.experiments.work import resumed, run_parts
from bayesadam.methods import Data, Network, Problem, Training
from bayesadam.methods.base import posteriors, trained
from bayesadam.methods.optimum import diagonal_ggn
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
TITLES = {
    "badam": "Badam",
    "mc-dropout": "MC dropout",
    "bbb": "Bayes by Backprop",
    "vadam": "Vadam",
    "swag": "SWAG",
    "ivon": "IVON",
    "laplace-diagonal": "Laplace, diagonal GGN",
}
_STYLES = {"snr": "-", "magnitude": "--", "path-snr": (0, (1, 1))}
# Below the square root of the smallest float32, so that a weight the data say nothing of ranks last.
_LEAST_CURVATURE = 1e-30


@dataclass(frozen=True)
class PruningSettings:
    """What the figure depends on, the seed aside; the defaults are the paper's appendix.

    Attributes:
        data: `"mnist"`, `"fashion-mnist"` or `"digits"`.
        n_seeds: networks for each method.
        activation: `"relu"` or `"sigmoid"`.
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
        unknown = [name for name in self.methods if name not in TITLES]
        if unknown or not self.methods:
            raise SettingError(f"methods must be among {', '.join(TITLES)}; got {', '.join(self.methods) or 'none'}")
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
    """One way of training to be pruned: widths, λ of the penalty λ|θ|₁, dropout, and how many times the usual epochs."""

    hidden: tuple[int, ...]
    sparsity: float
    dropout: float = 0.2
    input_dropout: float = 0.0
    longer: int = 1

    @property
    def name(self) -> str:
        """Such as `2×400, λ = 3e-05`."""
        usual = Recipe(self.hidden, self.sparsity)
        extra = [
            f"dropout {self.dropout:g}" if self.dropout != usual.dropout else "",
            f"input dropout {self.input_dropout:g}" if self.input_dropout else "",
            f"{self.longer} × epochs" if self.longer != 1 else "",
        ]
        return ", ".join([f"{len(self.hidden)}×{self.hidden[0]}", f"λ = {self.sparsity:g}", *filter(None, extra)])


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

    def at(self, fraction: float) -> float:
        """The mean accuracy at one of `FRACTIONS`."""
        return self.mean()[FRACTIONS.index(fraction)]


def problem_of(images: Images, network: Network, training: Training, seeds: tuple[int, ...], device: str) -> Problem:
    """All seeds on the same images, which lie on the device once; nothing is held out."""
    x, y = images.train_x.to(device), images.train_y.to(device)
    x_test, y_test = images.test_x.to(device), images.test_y.to(device)
    stack = len(seeds)
    data = Data(
        x.expand(stack, -1, -1),
        y.expand(stack, -1),
        x_test.expand(stack, -1, -1),
        y_test.expand(stack, -1),
        "classification",
    )
    return Problem(data, network, training, seeds)


def curves_of(method: str, problem: Problem) -> list[Curve]:
    """Train one method on every seed at once, and prune by each ranking that it has."""
    found = _TRAINERS[method](problem)
    if method == "mc-dropout":
        # It has no posterior over weights.
        return _curves(method, problem, found, ("magnitude",))
    rankings = ("snr", "magnitude", "path-snr") if method == "badam" else ("snr", "magnitude")
    return _curves(method, problem, found, rankings)


def _from_adam(problem: Problem) -> list[Posterior]:
    """Read off Adam's state, as the paper has it: no prior."""
    return [
        Posterior.from_state_dict(
            problem.network.build(member(problem.optimum.params, index)),
            problem.optimum.state_dict(index),
            len(problem.data),
            prior_precision=0.0,
        )
        for index in range(len(problem.seeds))
    ]


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
    for ranking in rankings:
        scores = [_scores(posterior, ranking) for posterior in posteriors]
        stacked = {name: torch.stack([score[name] for score in scores]) for name in scores[0]}
        weights = {name: torch.stack([p.mean[name] for p in posteriors]) for name in scores[0]}
        found.append(Curve(method, ranking, pruned_accuracy(problem, weights, stacked)))
    return found


def _scores(posterior: Posterior, ranking: str) -> dict[str, Tensor]:
    if ranking == "path-snr":
        width = next(iter(posterior.mean.values())).shape[1]
        return path_scores(posterior, example_input=torch.zeros(1, width))
    return weight_scores(posterior, ranking)


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
    place = {
        name: part.view_as(weights[name]) for name, part in zip(weights, torch.split(places, sizes, dim=1), strict=True)
    }
    x, y = problem.data.x_held_out[0], problem.data.y_held_out[0]
    found = []
    for fraction in FRACTIONS:
        removed = round(fraction * flat.shape[1])
        kept = {name: t * (place[name] >= removed) for name, t in weights.items()}
        right = forward(problem.network, kept, x).argmax(dim=-1) == y
        found.append(right.double().mean(dim=1))
    return tuple(tuple(row) for row in torch.stack(found, dim=1).tolist())


Rows = dict[str, list[list[float]]]


def _plain(curves: Sequence[Curve]) -> Rows:
    return {curve.ranking: [list(row) for row in curve.accuracy] for curve in curves}


def _read(method: str, rows: Rows) -> list[Curve]:
    return [Curve(method, ranking, tuple(map(tuple, accuracy))) for ranking, accuracy in rows.items()]


def _rows(names: Sequence[str], curves: Callable[[str], list[Curve]]) -> Iterator[tuple[str, Rows]]:
    for name in names:
        yield name, _plain(curves(name))


def table(curves: Sequence[Curve], titles: Mapping[str, str]) -> Table:
    """Mean accuracy in percent at some of the fractions."""
    view = Table(title="Test accuracy in % after pruning this fraction, mean over the seeds", title_justify="left")
    view.add_column("method")
    view.add_column("ranking")
    for fraction in SHOWN:
        view.add_column(f"{fraction:g}", justify="right")
    for curve in curves:
        name = titles.get(curve.method, curve.method)
        view.add_row(name, curve.ranking, *(f"{100 * curve.at(f):.2f}" for f in SHOWN))
    return view


def picture(curves: Sequence[Curve], titles: Mapping[str, str], title: str, *, since: float = 0.0) -> Figure:
    """Accuracy against the fraction pruned, from `since` on, and the error, on a log scale, against what is left."""
    palette = dict(zip(titles, _SHADES, strict=False))
    with plots.house_style():
        figure = plots.new_figure(11.5, 4.6)
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
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


_SHADES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6A5ACD", "#8C564B")


def _results(curves: Sequence[Curve]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for curve in curves:
        found.setdefault(curve.method, {})[curve.ranking] = {"fractions": FRACTIONS, "accuracy": curve.accuracy}
    return found


def method_curves(name: str, *, seed: int, settings: PruningSettings, device: str) -> list[Curve]:
    """One method of the figure, whole in itself, so that a process of its own can do it."""
    images = load_images(settings.data)
    network = Network(images.train_x.shape[1], settings.hidden, images.n_classes, settings.activation, settings.dropout)
    training = Training(settings.epochs, settings.batch_size, settings.lr, 0.0, (0.9, settings.beta2))
    return curves_of(name, problem_of(images, network, training, _seeds(seed, settings.n_seeds), device))


def recipe_curves(name: str, *, seed: int, settings: SparseSettings, device: str) -> list[Curve]:
    """One recipe of the second figure."""
    images = load_images(settings.data)
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    network = Network(
        images.train_x.shape[1],
        recipe.hidden,
        images.n_classes,
        dropout=recipe.dropout,
        input_dropout=recipe.input_dropout,
    )
    training = Training(
        settings.epochs * recipe.longer,
        settings.batch_size,
        settings.lr,
        0.0,
        (0.9, settings.beta2),
        sparsity=recipe.sparsity,
        schedule="cosine",
    )
    problem = problem_of(images, network, training, _seeds(seed, settings.n_seeds), device)
    return _curves(name, problem, _from_adam(problem), ("snr", "magnitude", "path-snr"))


def _seeds(seed: int, count: int) -> tuple[int, ...]:
    return tuple(1000 * seed + number for number in range(count))


def run_pruning(
    *, seed: int, out: Path, quiet: bool, settings: PruningSettings, device: str, jobs: int = 1
) -> tuple[Path, ...]:
    """The `pruning` command."""
    run = Run("pruning", seed, out, asdict(settings), device=device, quiet=quiet)
    run.prepare()
    # Here, so that missing data are reported, or fetched, before anything is trained.
    load_images(settings.data, progress=not quiet)
    work = partial(_rows, curves=partial(method_curves, seed=seed, settings=settings, device=device))
    run, ledger = resumed(run, "methods")
    found = run_parts(run, ledger, settings.methods, work, jobs=jobs)
    curves = [curve for name in settings.methods for curve in _read(name, found[name])]
    run.show(table(curves, TITLES))
    units = f"{settings.activation} units, {settings.epochs} epochs"
    title = f"Pruning {settings.data} networks, {units}, mean of {settings.n_seeds} seeds"
    paths = run.finish({"figure2.png": plots.png(picture(curves, TITLES, title))}, _results(curves))
    ledger.close()
    return paths


def run_sparse(
    *, seed: int, out: Path, quiet: bool, settings: SparseSettings, device: str, jobs: int = 1
) -> tuple[Path, ...]:
    """The `pruning --sparse` command."""
    run = Run("pruning", seed, out, {**asdict(settings), "sparse": True}, device=device, quiet=quiet)
    run.prepare()
    load_images(settings.data, progress=not quiet)
    names = [recipe.name for recipe in RECIPES]
    work = partial(_rows, curves=partial(recipe_curves, seed=seed, settings=settings, device=device))
    run, ledger = resumed(run, "methods")
    found = run_parts(run, ledger, names, work, jobs=jobs)
    curves = [curve for name in names for curve in _read(name, found[name])]
    titles = {name: name for name in names}
    run.show(table(curves, titles))
    title = f"Trained to be pruned: {settings.data}, Laplace prior, one shot, mean of {settings.n_seeds} seeds"
    paths = run.finish({"figure2-sparse.png": plots.png(picture(curves, titles, title, since=0.8))}, _results(curves))
    ledger.close()
    return paths
