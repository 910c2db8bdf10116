"""Figure 2: accuracy of MNIST networks after pruning, by every method's ranking."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayesadam as ba
from bayesadam.engine.network import Network, forward, unflatten
from experiments import plots, released
from experiments.baselines import Data, Problem, Training, diagonal_ggn, read, trained
from experiments.data import Images, load_images
from experiments.facts import COLOURS, FACTS, TITLES
from experiments.rules import RULES
from experiments.running import Run, Table, check_methods, fixed, run_parts, seeds_of

SHOWN = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
FRACTIONS = tuple(sorted({*SHOWN, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.96, 0.97, 0.992, 0.995, 0.997, 0.999}))
# Badam's networks, whose weights that stay make up for those that go: by these rankings, on so many training images.
CONDITIONED, BY, N_INPUTS = "badam-conditioned", ("between", "snr", "magnitude"), 1000
RELEASED = "badam-released"
METHODS = (CONDITIONED, "badam", "mc-dropout", "bbb", "vadam", "ivon", "laplace-diagonal", RELEASED)
_STYLES = {"snr": "-", "magnitude": "--", "path-snr": ":", "between": "-."}
_SHADES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Settings:
    """What the figure depends on, the seed aside; the defaults are the paper's appendix.

    Badam's and MC dropout's networks have `dropout`; `beta2` is Badam's, the other methods have Adam's usual .999.
    """

    data: str = "mnist"
    methods: tuple[str, ...] = METHODS
    n_seeds: int = 5
    epochs: int = 100
    hidden: tuple[int, ...] = (400, 400)
    dropout: float = 0.2
    batch_size: int = 128
    lr: float = 1e-3
    beta2: float = 0.99999

    def __post_init__(self) -> None:
        check_methods(self.methods, METHODS)


def problem_of(images: Images, network: Network, training: Training, seeds: tuple[int, ...], device: str) -> Problem:
    """All seeds on the same images, which are on the device once; the test images count as held out."""
    parts = (part.to(device) for part in (images.train_x, images.train_y, images.test_x, images.test_y))
    x, y, x_test, y_test = (part.expand(len(seeds), *part.shape) for part in parts)
    return Problem(Data(x, y, x_test, y_test, "classification"), network, training, seeds)


# Weights and their signal-to-noise ratios, of every seed: (s, *shape) by name.
Weights = dict[str, Tensor]
Ranked = tuple[Weights, Weights]


def ranked(method: str, problem: Problem) -> Ranked:
    """What a method's networks know; all but Badam's have Adam's usual β."""
    usual, n = replace(problem, training=replace(problem.training, betas=(0.9, 0.999))), len(problem.data)
    rules: dict[str, dict[str, Any]] = {"bbb": {}, "vadam": {"prior_precision": n / 600}}
    rules["ivon"] = {"lr": 0.1, "initial_hessian": 0.1}
    if method in rules:
        belief = trained(usual, RULES[method], **rules[method]).gaussian()
        assert belief is not None
        snr = belief.mean.abs() / belief.variance.sqrt()
        return unflatten(problem.network, belief.mean), unflatten(problem.network, snr)
    if method in (RELEASED, "laplace-diagonal"):
        if method == RELEASED:
            _, weights, moments = released.trained(problem, released.NOTEBOOK)
            precision = {name: n * v.sqrt() for name, v in moments.items()}
        else:
            weights = usual.optimum.params
            precision = diagonal_ggn(problem.network, weights, problem.data.x[0])
        return weights, {name: weights[name].abs() * p.clamp(min=1e-30).sqrt() for name, p in precision.items()}
    # Read off Adam's state, as the paper has it: no prior.
    problem = usual if method == "mc-dropout" else problem
    ratios = [posterior.snr() for posterior in read(problem, prior_precision=0.0)]
    return problem.optimum.params, {name: torch.stack([snr[name] for snr in ratios]) for name in ratios[0]}


def path_scores(snr: Weights) -> Weights:
    """s_ij a_j b_i: a weight's ratio times what reaches its input and what its output reaches.

    a_i² = Σ_j (s_ij a_j)² + s_i² with the bias last, b_j² = Σ_i (s_ij b_i)²; 1 at the network's ends, and on average
    over each layer. Squared, the product sums over all paths through the weight.
    """

    def of_mean_one(strength: Tensor) -> Tensor:
        return strength / strength.mean(dim=1, keepdim=True)

    layers = [(snr[f"layer{k}.weight"], snr[f"layer{k}.bias"]) for k in range(len(snr) // 2)]
    arriving, leaving = [torch.ones_like(layers[0][0][:, 0])], [torch.ones_like(layers[-1][1])]
    for weight, bias in layers[:-1]:
        square = (weight * arriving[-1][:, None, :]).square().sum(dim=2) + bias.square()
        arriving.append(of_mean_one(square.sqrt()))
    for weight, _ in reversed(layers[1:]):
        leaving.insert(0, of_mean_one((weight * leaving[0][:, :, None]).square().sum(dim=1).sqrt()))
    scores: Weights = {}
    for k, ((weight, bias), a, b) in enumerate(zip(layers, arriving, leaving, strict=True)):
        scores |= {f"layer{k}.weight": weight * a[:, None, :] * b[:, :, None], f"layer{k}.bias": bias * b}
    return scores


def curves_of(method: str, problem: Problem) -> dict[str, Any]:
    """Train one method on every seed at once, and prune by each ranking that it has.

    The accuracies of a ranking are (seeds, fractions), as plain data.
    """
    if method == CONDITIONED:
        return conditioned(problem)
    weights, snr = ranked(method, problem)
    rankings = {"snr": snr, "magnitude": {name: theta.abs() for name, theta in weights.items()}}
    if method == "mc-dropout":
        del rankings["snr"]
    if method == "badam":
        rankings["path-snr"] = path_scores(snr)
    return {
        name: {"fractions": FRACTIONS, "accuracy": pruned_accuracy(problem, weights, scores)}
        for name, scores in rankings.items()
    }


@torch.no_grad()
def conditioned(problem: Problem) -> dict[str, Any]:
    """Curves of `ba.prune` with inputs: this share of the matrices goes, and all biases stay."""
    data, fractions, accuracies = problem.data, [f for f in SHOWN if f >= 0.5], dict[str, list[list[float]]]()
    # The networks that `read` builds are on the CPU.
    inputs, x, y = (part.cpu() for part in (data.x[0, :N_INPUTS], data.x_held_out[0], data.y_held_out[0]))
    for posterior, ranking in product(read(problem, prior_precision=0.0), BY):
        small = (ba.prune(posterior, f, inputs=inputs, ranking=ranking).model.eval() for f in fractions)
        right = [float((model(x).argmax(dim=1) == y).double().mean()) for model in small]
        accuracies.setdefault(ranking, []).append(right)
    return {ranking: {"fractions": fractions, "accuracy": shares} for ranking, shares in accuracies.items()}


@torch.no_grad()
def pruned_accuracy(problem: Problem, weights: Weights, scores: Weights) -> Any:
    """Test accuracy after each of `FRACTIONS` of all weights, biases included, is set to 0, lowest score first."""
    device = problem.data.x.device
    weights = {name: t.to(device) for name, t in weights.items()}
    flat = torch.cat([scores[name].to(device).flatten(1) for name in weights], dim=1)
    rank = unflatten(problem.network, flat.argsort(dim=1, stable=True).argsort(dim=1))
    x, y = problem.data.x_held_out[0], problem.data.y_held_out[0]
    accuracies = []
    for fraction in FRACTIONS:
        removed = round(fraction * flat.shape[1])
        pruned = {name: t * (rank[name] >= removed) for name, t in weights.items()}
        right = forward(problem.network, pruned, x).argmax(dim=-1) == y
        accuracies.append(right.double().mean(dim=1))
    return torch.stack(accuracies, dim=1).tolist()


def fit_part(
    names: Sequence[str], *, seed: int, settings: Settings, device: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The curves of each method; those that share a network share its training."""
    images, seeds = load_images(settings.data), seeds_of(seed, settings.n_seeds)
    problem = lru_cache(maxsize=1)(partial(problem_of, images, seeds=seeds, device=device))
    training = Training(settings.epochs, settings.batch_size, settings.lr, 0.0, (0.9, settings.beta2))
    for name in names:
        network = Network(images.train_x.shape[1], settings.hidden, images.n_classes, dropout=settings.dropout)
        if name == RELEASED:
            network = replace(network, activation=released.NOTEBOOK.activation, dropout=0.0)
        yield name, curves_of(name, problem(network, training))


def mean_curves(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[float, float]]:
    """By method and ranking, the mean accuracy over the seeds at each fraction."""
    return {
        (method, ranking): dict(zip(curve["fractions"], map(fmean, zip(*curve["accuracy"], strict=True)), strict=True))
        for method, rankings in results.items()
        for ranking, curve in rankings.items()
    }


def table(results: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    """Mean accuracy in percent at some of the fractions."""
    curves = mean_curves(results)
    fractions = [f for f in SHOWN if any(f in curve for curve in curves.values())]
    best = {f: max(curve[f] for curve in curves.values() if f in curve) for f in fractions}
    rows = []
    for (method, ranking), curve in curves.items():
        bold = ["**" if curve.get(f) == best[f] else "" for f in fractions]
        cells = (f"{b}{fixed(100 * curve.get(f, math.nan), 2)}{b}" for f, b in zip(fractions, bold, strict=True))
        rows.append((f"{TITLES.get(method, method)}, {ranking}", *cells))
        if method == RELEASED:
            printed = (fixed(100 * FACTS["notebook"][ranking].get(str(f), math.nan), 2) for f in fractions)
            rows.append((f"*what the notebook prints*, {ranking}", *printed))
    title = f"Test accuracy in % after pruning this share of all weights, mean of {settings['n_seeds']} seeds"
    note = "Magnitude is the paper's baseline with Σ = 1; path scores and conditioning are ours. It prints no numbers."
    return Table(title, ("method, ranking", *(f"{100 * f:g} %" for f in fractions)), rows, note)


def picture(results: Mapping[str, Any], title: str) -> Figure:
    """Accuracy against the fraction pruned, and, on logarithmic scales, the error against the fraction left."""
    with plots.house_style():
        figure = plots.new_figure(11.5, 4.6, title)
        left, right = figure.subplots(1, 2)
        for (method, ranking), curve in mean_curves(results).items():
            shade = _SHADES[list(results).index(method) % len(_SHADES)]
            look: Any = {"color": COLOURS.get(method, shade), "linestyle": _STYLES.get(ranking, "-")}
            look |= {"linewidth": 1.5, "label": f"{TITLES.get(method, method)}, {ranking}"}
            left.plot([100 * f for f in curve], [100 * a for a in curve.values()], **look)
            errors = [max(100 - 100 * a, 0.1) for a in curve.values()]
            right.plot([100 - 100 * f for f in curve], errors, **look)
        left.set(xlabel="weights pruned, %", ylabel="test accuracy, %", xlim=(0, 100), title="Accuracy")
        right.set(xlabel="weights left, % (log)", ylabel="test error, % (log)", title="Error")
        right.set(xscale="log", yscale="log", xlim=(100, 0.1))
        for axes in (left, right):
            axes.grid(visible=True, color=plots.FAINT, linewidth=0.5)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def run(*, seed: int, out: Path, quiet: bool, settings: Settings, device: str) -> tuple[Path, ...]:
    """The command."""
    task = Run("figure2", seed, out, asdict(settings), device=device, quiet=quiet)
    results = run_parts(task, settings.methods, partial(fit_part, seed=seed, settings=settings, device=device))
    title = f"Pruning {settings.data} networks, {settings.epochs} epochs, mean of {settings.n_seeds} seeds"
    return task.finish({"figure2.png": plots.png(picture(results, title))}, results, table(results, asdict(settings)))
