"""LeNet-300-100 pruned to .95, .98 and .985: our rankings beside SNIP and Sparse VD, with and without retraining.

    BAYESADAM_DATA=... python benchmarks/lenet.py [--quick] [--seeds 5] [--epochs 80] [--device cuda] [--out out/bench]

784-300-100-10 on MNIST; the sparsity is the share of all 266,610 parameters, biases included, that are 0. Every method
trains for `--epochs` and retrains for half as many; those that prune before or while they train have both together.
All have Adam, batches of 128 and a cosine schedule. Each method's setting is chosen for each sparsity by accuracy on
the last 10,000 training images, with networks that saw the other 50,000 and have seeds of their own. Then networks
of fresh seeds are trained on all 60,000 with it, and the table has their accuracy on the test images.

SNIP (Lee et al. 2019) keeps the weights with the largest |θ ∂L/∂θ| of the initial network. Sparse VD (Molchanov et
al. 2017) is written from its equations; its weights are removed in the order of log α.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.gradients import StackedGradient, loss_and_slope
from bayesadam.engine.network import Network, flatten, forward, initial, linear, unflatten
from bayesadam.engine.rules import EPS, Adam, Number, State, Step, adam_state, adam_update
from bayesadam.engine.stack import Stack, cosine
from bayesadam.engine.streams import blocks
from experiments.data import load_images
from harness import arguments, mean_and_error, write_results

NETWORK = Network(784, (300, 100), 10)
SPARSITIES = (0.95, 0.98, 0.985)
BATCH, LR = 128, 1e-3
# The posterior of one shot has the paper's β₂; those that are trained under a mask have Adam's usual one.
ONE_SHOT, USUAL = (0.9, 0.99999), (0.9, 0.999)
N_VALIDATION = 10_000
# Seeds that choose, and those that are reported.
DEVELOPMENT, REPORTED = (0, 1), 1000
# Gradual pruning reaches its sparsity after this share of the epochs.
RAMP = 0.6
PUBLISHED = {"SNIP, published": (98.4, 97.6, None), "Sparse VD, published": (None, None, 98.08)}

Setting = tuple[float, ...]
# By the names of the table's rows, what is varied: λ of a Laplace prior; for SNIP the factor of the initial weights, 1
# or that of He's, and λ of (λ/2)|θ|²; for Sparse VD the factor of the KL.
GRIDS: Mapping[str, Sequence[Setting]] = {
    "Laplace prior, signal-to-noise ratio": [(2e-5,), (4e-5,), (8e-5,), (1.6e-4,), (3.2e-4,)],
    "gradual, signal-to-noise ratio": [(0.0,), (2e-5,), (5e-5,)],
    "SNIP": [*product((1.0, 6**0.5), (0.0, 1e-5, 1e-4))],
    "Sparse VD": [(0.3,), (1.0,)],
    "gradual, magnitude": [(0.0,), (2e-5,), (5e-5,)],
    "Adam, signal-to-noise ratio": [(0.0,)],
}


@dataclass(frozen=True, eq=False)
class Images:
    """Images and labels to train on, and those that count."""

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor


@dataclass(frozen=True, eq=False)
class Held(Adam):
    """Adam with a Laplace prior per network, `laplace` (s, 1), and with weights held at 0 by a mask, (s, weights).

    The mask begins with the weights that are not 0. |θ| loses α λ/(√v̂ + ε), as in `Adam`.
    """

    laplace: Tensor | None = None

    def start(self, weights: Tensor, n_data: Number) -> State:
        """Adam's state and the mask."""
        return {**adam_state(weights), "mask": (weights != 0).to(weights)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """Adam's, the proximal step, the mask."""
        super().update(weights, gradient, state, noise, step)
        if self.laplace is not None:
            metric = (state["exp_avg_sq"] / step.second).sqrt_().add_(EPS)
            weights.copy_(weights.sign() * (weights.abs() - step.lr * self.laplace / metric).clamp_(min=0))
        weights.mul_(state["mask"])


def mean_loss(y: Tensor) -> Callable[[Tensor], Tensor]:
    """From outputs (s, b, classes) to the mean negative log-likelihood of each network, (s,)."""
    return lambda f: F.cross_entropy(f.mT, y, reduction="none").mean(dim=1)


def column(values: Iterable[float], like: Tensor) -> Tensor:
    """(s, 1), on the device of another tensor."""
    return torch.tensor([*values], dtype=torch.float32, device=like.device).unsqueeze(1)


def fit(
    images: Images,
    seeds: Sequence[int],
    epochs: int,
    *,
    betas: tuple[float, float] = USUAL,
    weights: Tensor | None = None,
    laplace: Sequence[float] = (),
    decay: Sequence[float] = (),
    gradual: tuple[Tensor, str] | None = None,
) -> Stack:
    """A stack of networks, one per seed, each with its own λ of a Laplace prior, or of (λ/2)|θ|².

    `gradual` has the sparsities (s, 1) and a ranking: after each epoch the lowest are removed, a share
    s (1 − (1 − t)³) of all with t from 0 to 1 (Zhu and Gupta 2017).
    """
    index = torch.arange(len(seeds), device=images.x.device)[:, None]

    def batch(rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        loss = mean_loss(images.y[rows])
        return images.x[rows], lambda f: loss_and_slope(loss, f)[1]

    rule = Held(betas, laplace=column(laplace, images.x) if any(laplace) else None)
    given = None if weights is None else weights.clone()
    stack = Stack(NETWORK, rule, seeds, batch, n_data=len(images.x), weights=given, device=index.device)
    stack.penalty = column(decay, images.x) if any(decay) else None
    per_epoch = len(images.x) // BATCH
    steps = epochs * per_epoch
    for done, rows in enumerate(blocks(len(images.x), BATCH, seeds, steps), start=1):
        stack.prepare(rows, cosine(LR, steps))
        stack.run(len(rows))
        if gradual is not None and done <= round(RAMP * epochs):
            share = gradual[0] * (1 - (1 - done / round(RAMP * epochs)) ** 3)
            stack.state["mask"].copy_(kept(scores(stack, gradual[1]), share))
            stack.weights.mul_(stack.state["mask"])
    return stack


def scores(stack: Stack, ranking: str) -> Tensor:
    """|θ|, or the signal-to-noise ratio |θ| v^¼, (s, weights)."""
    return stack.weights.abs() * (stack.state["exp_avg_sq"] ** 0.25 if ranking == "snr" else 1)


def kept(score: Tensor, sparsity: Tensor) -> Tensor:
    """1 where a weight stays, (s, weights): all but the share `sparsity`, (s, 1), that is lowest."""
    rank = score.argsort(dim=1, stable=True).argsort(dim=1)
    return (rank >= (sparsity * score.shape[1]).round()).to(score)


@torch.no_grad()
def accuracy(images: Images, weights: Tensor) -> list[float]:
    """Of each network, on the images that count."""
    outputs = forward(NETWORK, unflatten(NETWORK, weights), images.x_held_out)
    return (outputs.argmax(dim=-1) == images.y_held_out).double().mean(dim=1).tolist()


def snip_masks(images: Images, weights: Tensor, sparsity: Tensor, n: int = 1000) -> Tensor:
    """SNIP: the largest |θ ∂L/∂θ| stay, from so many images."""
    loss = mean_loss(images.y[:n].expand(len(weights), -1))
    inputs = images.x[:n].expand(len(weights), -1, -1)
    gradient = StackedGradient(NETWORK, weights)(inputs, lambda f: loss_and_slope(loss, f)[1])
    return kept((gradient * weights).abs(), sparsity)


# --- Sparse VD --------------------------------------------------------------------------------------------------------


def log_uniform_kl(theta: Tensor, log_variance: Tensor) -> Tensor:
    """KL of N(θ, σ²) from the log-uniform prior, up to a constant, with α = σ²/θ² (Molchanov et al. 2017, equation 14).

    KL ≈ k₁ − k₁ sigmoid(k₂ + k₃ log α) + ½ log(1 + 1/α).
    """
    alpha = log_alpha(theta, log_variance)
    return 0.63576 * (1 - torch.sigmoid(1.87320 + 1.48695 * alpha)) + 0.5 * F.softplus(-alpha)


def log_alpha(theta: Tensor, log_variance: Tensor) -> Tensor:
    """log σ²/θ², cut at ±10."""
    return (log_variance - 2 * torch.log(theta.abs() + 1e-8)).clamp(-10, 10)


def sparse_vd(images: Images, seeds: Sequence[int], epochs: int, kl: Sequence[float]) -> tuple[Tensor, Tensor]:
    """θ and −log α, both (s, weights), with a factor of the KL per network; biases have no noise and rank first.

    Activations are drawn, N(a Wᵀ + b, a² σ²ᵀ). The KL's factor rises from 0 over the first half of the epochs.
    """
    device, n = images.x.device, len(images.x)
    theta = flatten(initial(NETWORK, seeds, device=device))
    log_variance = torch.full_like(theta, -10.0)
    states, factor = (adam_state(theta), adam_state(theta)), column(kl, theta)
    is_weight = flatten({k: torch.full((1, *s), float(len(s) > 1)) for k, s in NETWORK.shapes().items()}).to(device)
    rows = torch.zeros(len(seeds), BATCH, dtype=torch.int64, device=device)
    lr, warm = torch.zeros((), device=device), torch.zeros((), device=device)

    def step() -> None:
        leaves = theta.detach().requires_grad_(), log_variance.detach().requires_grad_()
        with torch.enable_grad():
            params, variances = unflatten(NETWORK, leaves[0]), unflatten(NETWORK, leaves[1].exp())
            h = images.x[rows]
            for number in range(3):
                weight, bias = params[f"layer{number}.weight"], params[f"layer{number}.bias"]
                variance = torch.bmm(h.square(), variances[f"layer{number}.weight"].mT)
                z = linear(h, weight, bias)
                z = z + (variance + 1e-8).sqrt() * torch.randn_like(z)
                h = z.relu() if number < 2 else z
            penalty = (log_uniform_kl(*leaves) * is_weight).sum(dim=1, keepdim=True) * factor * warm / n
            loss = mean_loss(images.y[rows])(h).sum() + penalty.sum()
            gradients = torch.autograd.grad(loss, leaves)
        for value, gradient, state in zip((theta, log_variance), gradients, states, strict=True):
            adam_update(value, gradient.contiguous(), state, lr)

    run = captured(step) if device.type == "cuda" else step
    steps, done = epochs * (n // BATCH), 0
    for block in blocks(n, BATCH, seeds, steps):
        rates = cosine(LR, steps)(torch.arange(done, done + len(block), dtype=torch.float64)).tolist()
        warm.fill_(min(1.0, 2 * done / steps))
        for now, rate in zip(block.to(device), rates, strict=True):
            rows.copy_(now)
            lr.fill_(rate)
            run()
        done += len(block)
    return theta, torch.where(is_weight > 0, -log_alpha(theta, log_variance), torch.inf)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as a CUDA graph, after three that choose their kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            step()
    finally:
        gc.enable()
    return graph.replay


# --- the methods ------------------------------------------------------------------------------------------------------

# One result: (method, retrained, setting, sparsity, seed) to accuracy.
Key = tuple[str, bool, Setting, float, int]
Cases = Sequence[tuple[Setting, float, int]]


def under_masks(name: str, images: Images, cases: Cases, epochs: int) -> Tensor:
    """Weights of networks that are pruned before (SNIP) or while they train, (cases, weights)."""
    settings, sparsities, seeds = zip(*cases, strict=True)
    first, share = [s[0] for s in settings], column(sparsities, images.x)
    if name != "SNIP":
        gradual = share, "snr" if "signal" in name else "magnitude"
        return fit(images, seeds, epochs, laplace=first, gradual=gradual).weights
    params, scale = initial(NETWORK, seeds, device=images.x.device), column(first, images.x).unsqueeze(2)
    weights = flatten({key: t * scale if t.dim() > 2 else t for key, t in params.items()})
    weights = weights * snip_masks(images, weights, share)
    return fit(images, seeds, epochs, weights=weights, decay=[s[1] for s in settings]).weights


def measured(name: str, images: Images, cases: Cases, epochs: int) -> dict[Key, float]:
    """One method at every (setting, sparsity, seed), all as one stack; the networks before pruning have sparsity 0."""
    retraining, found = epochs // 2, dict[Key, float]()
    if name == "SNIP" or name.startswith("gradual"):
        retrained = under_masks(name, images, cases, epochs + retraining)
    else:
        once = list(dict.fromkeys((setting, seed) for setting, _, seed in cases))
        seeds, first = [seed for _, seed in once], [s[0] for s, _ in once]
        if name == "Sparse VD":
            weights, score = sparse_vd(images, seeds, epochs, first)
        else:
            stack = fit(images, seeds, epochs, betas=ONE_SHOT, laplace=first)
            weights, score = stack.weights, scores(stack, "snr")
        before = zip(once, accuracy(images, weights), strict=True)
        found = {(name, False, setting, 0.0, seed): a for (setting, seed), a in before}
        own = [once.index((setting, seed)) for setting, _, seed in cases]
        pruned = weights[own] * kept(score[own], column((sparsity for _, sparsity, _ in cases), weights))
        one_shot = zip(cases, accuracy(images, pruned), strict=True)
        found |= {(name, False, *case): a for case, a in one_shot}
        retrained = fit(images, [seed for *_, seed in cases], retraining, weights=pruned).weights
    return found | {(name, True, *case): a for case, a in zip(cases, accuracy(images, retrained), strict=True)}


def chosen(found: Mapping[Key, float]) -> dict[tuple[bool, float], Setting]:
    """For retrained networks or not, and each sparsity, the setting with the highest mean accuracy over the seeds."""
    means: dict[tuple[bool, float], dict[Setting, list[float]]] = {}
    for (_, retrained, setting, sparsity, _), value in found.items():
        means.setdefault((retrained, sparsity), {}).setdefault(setting, []).append(value)
    return {key: max(each, key=lambda s: sum(each[s]) / len(each[s])) for key, each in means.items()}


def table(results: Mapping[str, Any]) -> str:
    """Test accuracy in %, in Markdown."""
    lines = ["| | retrained | " + " | ".join(f"{s:g}" for s in SPARSITIES) + " |", "|---" * 5 + "|"]
    for name, each in results.items():
        for retrained, row in each["accuracy"].items():
            cells = []
            for values in row.values():
                mean, error = mean_and_error(values)
                cells.append(f"{100 * mean:.2f} ± {100 * error:.2f}")
            lines.append(f"| {name} | {retrained} | " + " | ".join(cells) + " |")
    for name, values in PUBLISHED.items():
        cells = [f"{v:g}" if v else "–" for v in values]
        lines.append(f"| *{name}* | {'yes' if 'SNIP' in name else 'no'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="two epochs of 1,000 images", device=True)
    parser.add_argument("--seeds", type=int, default=5, help="networks of each method that are reported")
    parser.add_argument("--epochs", type=int, default=80, help="passes over the images, before any retraining")
    parser.add_argument("--methods", nargs="+", choices=GRIDS, default=list(GRIDS), help="these alone")
    options = parser.parse_args()
    data = load_images("mnist")
    parts = [part.to(options.device) for part in (data.train_x, data.train_y, data.test_x, data.test_y)]
    n_validation = N_VALIDATION
    if options.quick:
        parts, n_validation, options.epochs, options.seeds = [part[:3000] for part in parts], 500, 2, 2
    x, y, x_test, y_test = parts
    choosing = Images(x[:-n_validation], y[:-n_validation], x[-n_validation:], y[-n_validation:])
    reporting, seeds = Images(x, y, x_test, y_test), range(REPORTED, REPORTED + options.seeds)
    results: dict[str, Any] = {}
    for name in options.methods:
        grid = [*product(GRIDS[name], SPARSITIES, DEVELOPMENT)]
        tried = measured(name, choosing, grid, options.epochs)
        best = chosen(tried)
        asked = {(best[key], key[1]) for key in best if key[1]}
        found = measured(name, reporting, [(*case, seed) for case in sorted(asked) for seed in seeds], options.epochs)
        accuracies: dict[str, Any] = {}
        for (retrained, sparsity), setting in sorted(best.items()):
            if sparsity:
                row = [found[name, retrained, setting, sparsity, seed] for seed in seeds]
                accuracies.setdefault("yes" if retrained else "no", {})[f"{sparsity:g}"] = row
        settings = {f"{s:g}, {'retrained' if r else 'one shot'}": best[r, s] for r, s in sorted(best) if s}
        shown = [
            {"retrained": k[1], "setting": k[2], "sparsity": k[3], "seed": k[4], "accuracy": a}
            for k, a in tried.items()
        ]
        results[name] = {"accuracy": accuracies, "chosen": settings, "validation": shown}
        results[name]["unpruned"] = [a for key, a in found.items() if not key[3]]
        about = {"epochs": options.epochs, "seeds": [*seeds], "sparsities": SPARSITIES, "methods": results}
        write_results(options.out, "lenet", about)
        print(table(results), flush=True)
    print(f"{len(results)} methods, {options.seeds} networks each")


if __name__ == "__main__":
    main()
