"""Leverage: how its settings were chosen, how many inputs it needs, and what it does for variances.

    python benchmarks/leverage.py [PART ...] [--quick] [--groups ...] [--jobs 1] [--device cuda] [--out out/bench]

Without a PART all of them run.

- regression: the NLL of tables on gap splits, whose test rows are the middle third of one input, and on ordinary ones,
  by what of the variance σ² + Var f grows with leverage. One network of 50-50 ReLU units under AdamW a split, stopped
  by a fifth of the training rows; the same rows give A, the medians and, with the growth in place, σ². Forms are chosen
  on made-up tables and diabetes, and reported of three UCI tables out of $BAYESADAM_DATA/uci.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from torch import Tensor, nn

import bayesadam as ba
import tabular
from bayesadam.leverage import Layer, layer_inputs, layers_of
from bayesadam.sklearn import BadamRegressor
from bayesadam.sklearn.training import split
from harness import arguments, mean_and_error, parallel, setting, write_results

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
    "(σ² + Var f) √((1 + r)/2)": lambda u, r: (1 + u) * ((1 + r) / 2) ** 0.5,
    "(σ² + Var f) (1 + r)/2": lambda u, r: (1 + u) * (1 + r) / 2,
    "(σ² + Var f) ((1 + r)/2)^1.5": lambda u, r: (1 + u) * ((1 + r) / 2) ** 1.5,
    "(σ² + Var f) ((1 + r)/2)²": lambda u, r: (1 + u) * ((1 + r) / 2) ** 2,
    "(σ² + Var f) max(1, r)": lambda u, r: (1 + u) * r.clamp(min=1),
    "(σ² + Var f) max(1, r)²": lambda u, r: (1 + u) * r.clamp(min=1) ** 2,
    "σ² max(1, r) + Var f (1 + r)/2": lambda u, r: r.clamp(min=1) + u * (1 + r) / 2,
    "(σ² + Var f (1 + r)/2) (1 + r)/2": lambda u, r: (1 + u * (1 + r) / 2) * (1 + r) / 2,
}
WITHOUT_R = ("σ²", "σ² + Var f")
OF_LIBRARY = ("the library", "the library, shift=False")
LAYER_MEANS = ("geometric", "mean", "largest")
STRUCTURES = ("diagonal", "kronecker")
Splits = dict[str, float]


def rows_of(name: str, number: int, gap: bool) -> tuple[Any, Any, Any, Any]:
    """Training and test inputs, training and test targets."""
    X, y = tabular.GAP_SETS[name]()
    if gap:
        return tabular.gap_split_of(name, X, y, number)
    if name in tabular.UCI:
        return tabular.split_of(name, X, y, number)
    found: tuple[Any, Any, Any, Any] = train_test_split(X, y, test_size=0.2, random_state=number)
    return found


def nll(square: Tensor, variance: Tensor) -> float:
    return float(0.5 * (square / variance + variance.log() + math.log(2 * math.pi)).mean())


def by_form(name: str, number: int, gap: bool, structure: str) -> Splits:
    """The NLL of one split in the target's units, form by form."""
    X, X_test, y, y_test = rows_of(name, number, gap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ba.errors.StructureWarning)
        made = BadamRegressor(n_ensemble=1, structure=structure, random_state=number).fit(X, y)
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
    for kind in LAYER_MEANS:
        r = [relative(reference, each, MEANS[kind]) for each in (reference, there)]
        for form, grown in FORMS.items():
            noise = (squares[0] / grown(u[0], r[0])).mean()
            row = form if form in WITHOUT_R else f"{form}, {kind}"
            found[row] = nll(squares[1], noise * grown(u[1], r[1])) + units
    return found


def regression(options: Any) -> dict[str, Any]:
    """Mean NLL and its standard error, by tables, structures and forms; what chooses comes first."""
    results: dict[str, Any] = {}
    wanted = {"made-up": tabular.MADE_UP, "UCI": tabular.UCI}
    for where, names in {"made-up": ["waves"]}.items() if options.quick else wanted.items():
        tasks = []
        for name in names:
            gaps = tabular.GAP_SETS[name]()[0].shape[1]
            for gap, count in ((True, gaps), (False, 10)):
                each = range(1 if options.quick else count)
                tasks += [(name, number, gap, s) for number in each for s in STRUCTURES]
        for task, found in zip(tasks, parallel([partial(by_form, *t) for t in tasks], jobs=options.jobs), strict=True):
            name, _, gap, structure = task
            at = results.setdefault(where, {}).setdefault(structure, {}).setdefault("gap" if gap else "ordinary", {})
            for row, value in found.items():
                at.setdefault(row, {}).setdefault(name, []).append(value)
        print(regression_table(where, results[where]), flush=True)
    return results


def regression_table(where: str, results: Mapping[str, Any]) -> str:
    """Markdown; the last columns are means over the tables, relative to σ² + Var f."""
    lines = []
    for structure, by_kind in results.items():
        names = list(by_kind["gap"]["σ²"])
        title = [f"{name}, {kind}" for kind in by_kind for name in names] + [f"all, {kind}" for kind in by_kind]
        lines += [f"\n{where}, {structure}\n", "| | " + " | ".join(title) + " |", "|---" * (len(title) + 1) + "|"]
        for row in by_kind["gap"]:
            cells = ["{:.3f} ± {:.3f}".format(*mean_and_error(by_kind[k][row][n])) for k in by_kind for n in names]
            for kind in by_kind.values():
                gains = [np.mean(kind[row][n]) - np.mean(kind["σ² + Var f"][n]) for n in names]
                cells.append(f"{np.mean(gains):+.3f}")
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- parts ----------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {"regression": regression}


def main() -> None:
    parser = arguments(__doc__, quick="one split, one network, made-up images", device=True, jobs=1)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    parts: Sequence[str] = options.parts or list(PARTS)
    results = {part: PARTS[part](options) for part in parts}
    name = "-".join(["leverage", *options.parts])
    write_results(options.out, name, {**setting(), "results": results})
    print(f"{len(results)} parts")


if __name__ == "__main__":
    main()
