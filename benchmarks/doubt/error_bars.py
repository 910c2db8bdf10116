"""Numbers: error bars away from the data, by the optimiser's diagonal, its input side, Kronecker factors and others.

    BAYESADAM_DATA=... python -m benchmarks.doubt.error_bars [--quick] [--seeds 5] [--sets toy energy ...]
        [--out out/bench]

The toy problem of the paper, and of UCI tables the middle third of one feature left out, feature by feature. Networks
have 2 × 50 ReLUs under AdamW; a fifth of the rows is held out, and `tune` fits noise, scale and prior on it by
evidence. Numbers are the mean negative log-likelihood of y inside the data (held-out rows of the same range) and in the
gap, in nats of standardised targets, and the standard deviation of the function in the gap over that inside. Beside
them: the noise of the held-out residuals alone, `ba.calibrate`, five networks, and a Gaussian process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, number, setting, write_results
from benchmarks.common.inputs import Pixels, uci
from benchmarks.common.networks import mlp
from benchmarks.common.training import drawn, fit

SETS = ("toy", "energy", "yacht", "wine-quality-red")
EPOCHS, BATCH = 400, 32
DIAGONAL, INPUTS = "diagonal, p = 0.5", "inputs, p = 0.5"


class Split:
    """Standardised rows: training, held out, inside and in the gap; (x, y) each."""

    def __init__(self, train: Pixels, inside: Pixels, outside: Pixels, seed: int) -> None:
        (x, y), order = train, torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))
        held_out, rest = order.tensor_split([len(x) // 5])
        pairs, scale = ((x[held_out], y[held_out]), (x[rest], y[rest]), inside, outside), x.std(0).clamp(min=1e-6)
        standard = (((a - x.mean(0)) / scale, (b - y.mean(0)) / y.std(0)) for a, b in pairs)
        self.held_out, self.train, self.inside, self.outside = standard


def toy(seed: int) -> Split:
    """The paper's toy problem."""
    source = torch.Generator().manual_seed(seed)

    def points(n: int, low: float, high: float) -> Pixels:
        x = low + (high - low) * torch.rand(n, 1, generator=source)
        angle = 2 * math.pi * (x + 0.02 * torch.randn(n, 1, generator=source))
        return x, x + 0.3 * angle.sin() + 0.3 * (2 * angle).sin()

    left, right = points(100, -0.5, 0.0), points(140, 0.5, 1.2)
    outside = torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]])
    return Split(points(250, 0.0, 0.5), points(300, 0.0, 0.5), outside, seed)


def gaps(name: str) -> list[Callable[[int], Split]]:
    """One split for each feature whose middle third is left out; a tenth of the other rows is inside."""
    table = uci(name)
    x, y = torch.tensor(table["X"]).float(), torch.tensor(table["y"]).float()[:, None]

    def split(mask: Any, seed: int) -> Split:
        gap = torch.tensor(mask)
        rest = (~gap).nonzero().flatten()
        rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
        inside, train = rest[: len(rest) // 10], rest[len(rest) // 10 :]
        return Split((x[train], y[train]), (x[inside], y[inside]), (x[gap], y[gap]), seed)

    return [partial(split, mask) for mask in table["gap_test_mask"]]


def trained(split: Split, seed: int, epochs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    x, y = split.train
    model, steps = mlp((x.shape[1], 50, 50, 1)), epochs * max(1, len(x) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = drawn(len(x), BATCH, steps)
    return fit(model, optimizer, rows, lambda some: F.mse_loss(model(x[some]), y[some]), schedule=rate), optimizer


def posteriors(split: Split, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, ba.Posterior]:
    """Of one network, each tuned by evidence."""
    (x, y), made = split.train, dict[str, ba.Posterior]()
    for power in (0.5, 1.0):
        how: Any = {"batch_size": BATCH, "power": power, "likelihood": "regression", "prior_precision": 1.0}
        q = ba.Posterior.from_optimizer(model, optimizer, n_data=len(x), **how)
        made |= {f"diagonal, p = {power:g}": q, f"inputs, p = {power:g}": q.with_inputs(x[:400])}
    batches = [(x[rows], y[rows]) for rows in drawn(len(x), BATCH, 100, torch.Generator().manual_seed(0))]
    recorder = ba.Recorder.from_batches(model, batches, F.mse_loss, keep=100)
    made["kronecker"] = ba.Posterior.from_recorder(model, recorder, len(x), likelihood="regression")
    return {name: q.tune(split.held_out, method="evidence") for name, q in made.items()}


# Means (n, 1), and variances of f and of y.
Predict = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def moments(answer: Callable[[Tensor], Any]) -> Predict:
    """Of a posterior's predictions, or a calibrated network's answers."""

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = answer(x)
        return p.mean, p.f_variance, p.stddev.square()

    return predict


def of_networks(models: list[nn.Module], held_out: Pixels) -> Predict:
    """Their spread, and the noise of the held-out residuals of their mean."""

    @torch.no_grad()
    def outputs(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in models])

    noise = (held_out[1] - outputs(held_out[0]).mean(dim=0)).square().mean()

    def predict(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = outputs(x)
        spread = f.var(dim=0, correction=0)
        return f.mean(dim=0), spread, spread + noise

    return predict


def process(split: Split) -> Predict:
    """A Gaussian process by scikit-learn, one lengthscale a feature; mean and variance of f, and its noise."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, y = (torch.cat(parts)[:800].double().numpy() for parts in zip(split.train, split.held_out, strict=True))
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    fitted = GaussianProcessRegressor(kernel, random_state=0).fit(x, y[:, 0])
    noise = fitted.kernel_.k2.noise_level

    def predict(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, std = (torch.tensor(part)[:, None] for part in fitted.predict(at.double().numpy(), return_std=True))
        variance = std.square().float()
        return mean.float(), (variance - noise).clamp(min=1e-9), variance

    return predict


def measured(split: Split, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Of every method the NLL inside and in the gap, and the deviation of f."""
    model, optimizer = trained(split, seed, epochs)
    others = [trained(split, 1000 + 10 * seed + i, epochs)[0] for i in range(4)]
    tuned = posteriors(split, model, optimizer)
    methods = {"noise alone": of_networks([model], split.held_out)}
    methods |= {name: moments(q.predict) for name, q in tuned.items()}
    methods["calibrated, inputs"] = moments(ba.calibrate(tuned[INPUTS], split.held_out))
    methods |= {"five networks": of_networks([model, *others], split.held_out), "Gaussian process": process(split)}
    rows: dict[str, dict[str, float]] = {name: {} for name in methods}
    for (name, row), (where, (x, y)) in product(rows.items(), (("in", split.inside), ("out", split.outside))):
        mean, of_f, of_y = methods[name](x)
        row[f"nll {where}"] = float(F.gaussian_nll_loss(mean, y, of_y, full=True))
        row[f"std {where}"] = float(of_f.sqrt().mean())
    return rows


def told(name: str, rows: list[Mapping[str, float]]) -> str:
    nll = (number([row[key] for row in rows]) for key in ("nll in", "nll out"))
    inside, outside = (statistics.fmean(row[key] for row in rows) for key in ("std in", "std out"))
    return f"  {name:20s}{'  '.join(nll)}  {f'{outside / inside:.1f}' if inside else '–'}"


def main() -> None:
    parser = arguments(__doc__, quick="two epochs of one seed of the toy problem")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.sets = 1, ["toy"]
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[Any]]] = {}
    for name in options.sets:
        splits, rows = [toy] if name == "toy" else gaps(name), results.setdefault(name, {})
        for seed in range(options.seeds):
            for split in splits:
                for method, row in measured(split(seed), seed, 2 if options.quick else EPOCHS).items():
                    rows.setdefault(method, []).append(row)
        print(f"{name}: NLL inside, in the gap, growth of the deviation of f", flush=True)
        print(*(told(*row) for row in rows.items()), sep="\n", flush=True)
    write_results(options.out, "error_bars", {**setting(), "seeds": options.seeds, "results": results})
    for name, rows in results.items():
        gain = [a["nll out"] - b["nll out"] for a, b in zip(rows[DIAGONAL], rows[INPUTS], strict=True)]
        print(f"{name}: what the input side gains in the gap, {statistics.fmean(gain):.3f} nats")


if __name__ == "__main__":
    main()
