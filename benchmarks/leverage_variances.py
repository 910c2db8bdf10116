"""What leverage has to do with variances: `regression` and `relation` of `leverage.py`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from torch import Tensor, nn

import bayesadam as ba
import tabular
from bayesadam.leverage import Layer, layer_inputs, layers_of
from bayesadam.sklearn import BadamRegressor
from bayesadam.sklearn.training import split
from harness import mean_and_error, number, parallel
from networks import mlp

# --- leverage, setting by setting -----------------------------------------------------------------------------------

RIDGE = 0.01
MEANS = {"geometric": 0.0, "mean": 1.0, "root mean square": 2.0, "power 4": 4.0, "largest": math.inf}


def layers(model: nn.Module) -> tuple[Layer, ...]:
    return layers_of(model, [name for name, _ in model.named_parameters()])


@torch.no_grad()
def pooled(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The mean over positions of every layer's input, (n, width) by module."""
    with layer_inputs(model, layers(model), len(x)) as seen:
        model(x)
    return dict(seen)


def root(a: Tensor, ridge: float = RIDGE) -> Tensor:
    """W of W Wᵀ = (A + ε ā)⁻¹; (A + ε ā)^(−½) of a diagonal."""
    if a.dim() == 1:
        return (a + ridge * a.mean()).rsqrt()
    eye = torch.eye(len(a), dtype=torch.float64, device=a.device)
    lower = torch.linalg.cholesky(a.double() + ridge * a.diagonal().double().mean() * eye)
    found: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).mT.to(a.dtype)
    return found


def leverage(a: Tensor, w: Tensor) -> Tensor:
    """h = |Wᵀ a|² of inputs (..., width)."""
    return (a * w if w.dim() == 1 else a @ w).square().sum(dim=-1)


def left_out(h: Tensor, n: int) -> Tensor:
    """h of the n inputs behind A, each left out of it."""
    return (n - 1) / n * h / (1 - h / n).clamp(min=1e-6)


def over_layers(log_h: Tensor, p: float) -> Tensor:
    """The logarithm of a power mean over layers, (n, layers) to (n,)."""
    if p == 0:
        return log_h.mean(dim=1)
    if math.isinf(p):
        return log_h.amax(dim=1)
    return ((p * log_h).logsumexp(dim=1) - math.log(log_h.shape[1])) / p


def relative(reference: Tensor, log_h: Tensor, p: float) -> Tensor:
    """r of inputs, (n,), from log h of them and of familiar ones, (·, layers)."""
    medians = reference.quantile(0.5, dim=0)
    usual = over_layers(reference - medians, p).quantile(0.5)
    return (over_layers(log_h - medians, p) - usual).exp()


# --- regression -----------------------------------------------------------------------------------------------------

# Var y/σ² by u = Var f/σ² and r.
Form = Callable[[Tensor, Tensor], Tensor]
FORMS: Mapping[str, Form] = {
    "σ²": lambda u, r: torch.ones_like(u),
    "σ² + Var f": lambda u, r: 1 + u,
    "σ² + Var f (1 + r)/2": lambda u, r: 1 + u * (1 + r) / 2,
    "σ² + Var f r": lambda u, r: 1 + u * r,
    "σ² + Var f ((1 + r)/2)²": lambda u, r: 1 + u * ((1 + r) / 2) ** 2,
    "σ² (1 + r)/2": lambda u, r: (1 + r) / 2,
    "σ² (1 + r)/2 + Var f": lambda u, r: (1 + r) / 2 + u,
    "(σ² + Var f) (1 + r)/2": lambda u, r: (1 + u) * (1 + r) / 2,
    "(σ² + Var f) max(1, r)": lambda u, r: (1 + u) * r.clamp(min=1),
}
WITHOUT_R = ("σ²", "σ² + Var f")
OF_LIBRARY = ("the library", "the library, shift=False")
LAYER_MEANS = ("geometric", "mean")
STRUCTURES = ("diagonal", "kronecker")
Splits = dict[str, float]


def levels() -> tuple[Any, Any]:
    """Five inputs of three to five levels, steps and kinks between them, hardly any noise."""
    random = np.random.RandomState(2)
    X = np.stack(np.meshgrid(*(np.linspace(-1, 1, k) for k in (5, 4, 3, 3, 4)), indexing="ij"), axis=-1).reshape(-1, 5)
    a, b, c, d, e = X[random.permutation(len(X))[:500]].T
    y = 3 * np.abs(a) + 4 * np.exp(b) * (c > 0) + 2 * a * d + e**2 + 0.05 * random.randn(500)
    return np.stack([a, b, c, d, e], axis=1), y


def steep() -> tuple[Any, Any]:
    """Four inputs of five to fourteen levels, the first one's effect exponential."""
    random = np.random.RandomState(3)
    X = np.stack([random.choice(np.linspace(0, 1, k), 400) for k in (14, 6, 5, 8)], axis=1)
    return X, np.exp(4 * X[:, 0]) * (1 + X[:, 1] / 2) + 5 * X[:, 2] * X[:, 3] + 0.3 * random.randn(400)


def correlated() -> tuple[Any, Any]:
    """Eight inputs of three hidden numbers."""
    random = np.random.RandomState(4)
    z = random.randn(500, 3)
    X = np.tanh(z @ random.randn(3, 8)) + 0.1 * random.randn(500, 8)
    return X, np.sin(2 * z[:, 0]) + z[:, 1] * z[:, 2] / 2 + 0.2 * random.randn(500)


TABLES = {**tabular.GAP_SETS, "levels": levels, "steep": steep, "correlated": correlated}
MADE_UP = [name for name in TABLES if name not in tabular.UCI]


def rows_of(name: str, number: int, kind: str) -> tuple[Any, Any, Any, Any]:
    """Training and test inputs, training and test targets; an end is the first or last quarter of one input."""
    X, y = TABLES[name]()
    if kind == "gap":
        return tabular.gap_split_of(name, X, y, number)
    if kind == "end":
        order, n = np.argsort(X[:, number // 2], kind="stable"), len(X) // 4
        test = np.isin(np.arange(len(X)), order[:n] if number % 2 else order[-n:])
        return X[~test], X[test], y[~test], y[test]
    if name in tabular.UCI:
        return tabular.split_of(name, X, y, number)
    found: tuple[Any, Any, Any, Any] = train_test_split(X, y, test_size=0.2, random_state=number)
    return found


def nll(square: Tensor, variance: Tensor) -> float:
    return float(0.5 * (square / variance + variance.log() + math.log(2 * math.pi)).mean())


def by_form(name: str, number: int, kind: str, structure: str) -> Splits:
    """The NLL of one split in the target's units, form by form."""
    X, X_test, y, y_test = rows_of(name, number, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ba.errors.StructureWarning)
        made = BadamRegressor(
            n_ensemble=1, structure=structure, random_state=number, likelihood="regression", activation="relu"
        ).fit(X, y)
    posterior, scaler = made.posteriors_[0], made.target_scaler_
    held_out = split(np.zeros(len(y)), made.validation_fraction, 1, check_random_state(number))[0].held_out.numpy()
    inputs = [torch.from_numpy(made.input_scaler_.transform(part)) for part in (X[held_out], X_test)]
    targets = [torch.from_numpy(scaler.transform(part[:, None])) for part in (y[held_out], y_test)]
    units, found = math.log(float(scaler.scale_[0])), {}
    for row, shift in zip(OF_LIBRARY, (True, False), strict=True):
        p = posterior.predict(inputs[1], likelihood="regression", shift=shift)
        found[row] = -float(p.log_prob(targets[1]).mean()) + units
    plain = [posterior.predict(x, likelihood="regression", shift=False) for x in inputs]
    squares = [(t - p.mean)[:, 0].square() for t, p in zip(targets, plain, strict=True)]
    u = [p.variance[:, 0] / posterior.noise_variance for p in plain]
    seen, n = [pooled(posterior.model, x) for x in inputs], len(held_out)
    w = {key: root(a.mT @ a / n) for key, a in seen[0].items()}
    reference = torch.stack([left_out(leverage(seen[0][key], w[key]), n) for key in w], dim=1).log()
    there = torch.stack([leverage(seen[1][key], w[key]) for key in w], dim=1).log()
    for mean in LAYER_MEANS:
        r = [relative(reference, each, MEANS[mean]) for each in (reference, there)]
        for form, grown in FORMS.items():
            noise = (squares[0] / grown(u[0], r[0])).mean()
            row = form if form in WITHOUT_R else f"{form}, {mean}"
            found[row] = nll(squares[1], noise * grown(u[1], r[1])) + units
    return found


def regression(options: Any) -> dict[str, Any]:
    """Mean NLL and its standard error, by tables, structures and forms; what chooses comes first."""
    results: dict[str, Any] = {}
    for where, names in {"made-up": ["waves"] if options.quick else MADE_UP, "UCI": tabular.UCI}.items():
        tasks = []
        for name in names if not (options.quick and where == "UCI") else ():
            width = TABLES[name]()[0].shape[1]
            for kind, count in (("gap", width), ("end", 0 if where == "UCI" else 2 * width), ("ordinary", 10)):
                each = range(min(count, 1) if options.quick else count)
                tasks += [(name, i, kind, structure) for i in each for structure in STRUCTURES]
        if not tasks:
            continue
        for task, found in zip(tasks, parallel([partial(by_form, *t) for t in tasks], jobs=options.jobs), strict=True):
            name, _, kind, structure = task
            at = results.setdefault(where, {}).setdefault(structure, {}).setdefault(kind, {})
            for row, value in found.items():
                at.setdefault(row, {}).setdefault(name, []).append(value)
        print(regression_table(where, results[where]), flush=True)
    return results


def regression_table(where: str, results: Mapping[str, Any]) -> str:
    """Markdown; the last columns are means over the tables, less those without leverage."""
    lines = []
    for structure, by_kind in results.items():
        names = list(by_kind["gap"]["σ²"])
        title = [f"{name}, {kind}" for kind in by_kind for name in names] + [f"all, {kind}" for kind in by_kind]
        lines += [f"\n{where}, {structure}\n", "| | " + " | ".join(title) + " |", "|---" * (len(title) + 1) + "|"]
        for row in by_kind["gap"]:
            cells = ["{:.3f} ± {:.3f}".format(*mean_and_error(by_kind[k][row][n])) for k in by_kind for n in names]
            for kind in by_kind.values():
                gains = [np.mean(kind[row][n]) - np.mean(kind[OF_LIBRARY[1]][n]) for n in names]
                cells.append(f"{np.mean(gains):+.3f}")
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- relation -------------------------------------------------------------------------------------------------------

RING, HOLE, OUTSIDE = (1.0, 2.0), (0.0, 0.8), (2.3, 6.0)
BINS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
TASKS = {"regression": 1, "classification": 3}
PLACES = ("inside", "hole", "outside")


def in_ring(n: int, radii: tuple[float, float]) -> Tensor:
    """Points of the plane, their distances from the origin uniform in a range."""
    angle, radius = 2 * math.pi * torch.rand(n), radii[0] + (radii[1] - radii[0]) * torch.rand(n)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def labelled(x: Tensor, task: str) -> Tensor:
    """sin 2a + ab/2 and noise; or which third of the plane, the angle known to ± 0.2."""
    if task == "regression":
        return (torch.sin(2 * x[:, :1]) + x.prod(dim=1, keepdim=True) / 2) + 0.1 * torch.randn(len(x), 1)
    angle = torch.atan2(x[:, 1], x[:, 0]) + 0.2 * torch.randn(len(x))
    return (angle / (2 * math.pi) * 3).floor().long() % 3


def both(task: str, seed: int, quick: bool) -> dict[str, Tensor]:
    """Var f relative to its median inside, r, and the distance from the origin, of inputs at every place."""
    torch.manual_seed(seed)
    x = in_ring(1000, RING)
    y = labelled(x, task)
    loss = nn.functional.mse_loss if task == "regression" else nn.functional.cross_entropy
    model = mlp((2, 20, 20, TASKS[task]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100 if quick else 2000):
        rows = torch.randint(800, (32,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    batches = [(x[rows], y[rows]) for rows in (torch.randint(800, (20,)) for _ in range(200))]
    recorder = ba.Recorder.from_batches(model, batches, loss, keep=200)
    posterior = ba.Posterior.from_recorder(model, recorder, n_data=800, likelihood=task)
    posterior = ba.calibrate(posterior, (x[800:], y[800:]), method="evidence")
    at = torch.cat([in_ring(1000, radii) for radii in (RING, HOLE, OUTSIDE)])
    block = posterior.predict(at, covariance=True, shift=False).covariance
    k = block.shape[-1]
    centre = torch.eye(k) - (1 / k if k > 1 else 0)
    variance = torch.einsum("ij,bji->b", centre, block)
    familiar, there = pooled(model, x[800:]), pooled(model, at)
    w = {key: root(a.mT @ a / len(a)) for key, a in familiar.items()}
    reference = torch.stack([left_out(leverage(a, w[key]), len(a)) for key, a in familiar.items()], dim=1).log()
    log_h = torch.stack([leverage(there[key], w[key]) for key in w], dim=1).log()
    found = {kind: relative(reference, log_h, MEANS[kind]) for kind in ("geometric", "mean")}
    by_layer = (log_h - reference.quantile(0.5, dim=0)).exp().unbind(dim=1)
    found |= {f"layer {i}": h for i, h in enumerate(by_layer, start=1)}
    return {"variance": variance / variance[:1000].median(), "distance": at.norm(dim=1), **found}


def relation(options: Any) -> dict[str, Any]:
    """Rank correlations of Var f and r by place, mean and standard error over networks, and the picture."""
    results: dict[str, Any] = {}
    drawn: dict[str, dict[str, Tensor]] = {}
    for task in TASKS:
        found = [both(task, seed, options.quick) for seed in range(1 if options.quick else 10)]
        for kind in ("geometric", "mean"):
            for i, place in enumerate((*PLACES, "all")):
                rows = slice(None) if place == "all" else slice(1000 * i, 1000 * i + 1000)
                each = [float(spearmanr(one["variance"][rows], one[kind][rows]).statistic) for one in found]
                results[f"{task}, {kind}, {place}"] = each
        drawn[task] = {key: torch.stack([one[key] for one in found]) for key in found[0]}
        distance = drawn[task]["distance"]
        for low, high in pairwise(BINS):
            rows = (distance >= low) & (distance < high)
            middle = {key: float(values[rows].median()) for key, values in drawn[task].items()}
            results[f"{task}, {low:g} to {high:g}"] = middle
    lines = ["| r | " + " | ".join(f"{task}, {place}" for task in TASKS for place in (*PLACES, "all")) + " |"]
    lines += ["|---" * (4 * len(TASKS) + 1) + "|"]
    for kind in ("geometric", "mean"):
        cells = [number(results[f"{task}, {kind}, {place}"], 2) for task in TASKS for place in (*PLACES, "all")]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| distance | " + " | ".join(f"{task}: Var f, r geometric, r mean" for task in TASKS) + " |",
        "|---" * 3 + "|",
    ]
    for low, high in pairwise(BINS):
        at = [results[f"{task}, {low:g} to {high:g}"] for task in TASKS]
        cells = [", ".join(f"{one[key]:.2f}" for key in ("variance", "geometric", "mean")) for one in at]
        lines.append(f"| {low:g} to {high:g} | " + " | ".join(cells) + " |")
    for task, found in drawn.items():
        hole = [float(found[key][:, 1000:2000].median()) for key in found if key.startswith("layer")]
        results[f"{task}, layers in the hole"] = hole
        lines.append(f"\nmedian h in the hole, layer by layer, {task}: " + ", ".join(f"{h:.2f}" for h in hole))
    print("\n".join(lines), flush=True)
    picture(drawn, options.out / "leverage.png")
    return results


def picture(drawn: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Medians and quartiles of Var f and r by distance; r and Var f of one network, input by input."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    names = {
        "variance": ("Var f", "#1f4e79"),
        "geometric": ("r, geometric mean of layers", "#c55a11"),
        "mean": ("r, mean of layers", "#7f7f7f"),
    }
    edges = torch.linspace(0, 6, 25)
    for ax, (task, found) in zip(axes, drawn.items(), strict=False):
        at = torch.bucketize(found["distance"], edges)
        for key, (label, colour) in names.items():
            cuts = [
                found[key][at == i].quantile(torch.tensor([0.25, 0.5, 0.75]))
                for i in range(1, len(edges))
                if bool((at == i).any())
            ]
            middle = [float((edges[i] + edges[i - 1]) / 2) for i in range(1, len(edges)) if bool((at == i).any())]
            low, half, high = torch.stack(cuts, dim=1)
            ax.plot(middle, half, color=colour, label=label)
            ax.fill_between(middle, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.axvspan(*RING, color="#d9ead3", zorder=0)
        ax.set(
            title=task,
            xlabel="distance from the origin (data: green)",
            ylabel="relative to the median inside",
            yscale="log",
            xlim=(0, 6),
        )
    axes[0].legend(frameon=False)
    one = {key: values[0] for key, values in drawn["regression"].items()}
    for i, (place, colour) in enumerate(zip(PLACES, ("#6aa84f", "#8e7cc3", "#cc4125"), strict=True)):
        rows = slice(1000 * i, 1000 * i + 1000)
        axes[2].scatter(one["geometric"][rows], one["variance"][rows], s=4, color=colour, alpha=0.5, label=place)
    axes[2].set(title="one network of the regression", xscale="log", yscale="log", xlim=(0.02, 200), ylim=(0.1, 500))
    axes[2].set(xlabel="r, geometric mean of layers", ylabel="Var f, relative to its median inside")
    axes[2].legend(frameon=False, markerscale=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)
