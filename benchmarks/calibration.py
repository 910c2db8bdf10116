"""Calibration: probabilities beside temperature scaling on thirty networks, and guarantees on 200 splits of three
tables.

    BAYESADAM_DATA=... python benchmarks/calibration.py [--quick] [--only networks coverage] [--splits 200] [--cuts 20]
        [--jobs 1] [--out out/bench]

- networks: scikit-learn's digits, and the test images of MNIST and of Fashion-MNIST, all cut anew in a fixed random
  order: 800 images train, 300 are held out and 697 score, or 4,000, 500 and 5,500. Two hidden layers of 100 ReLU units,
  and LeNet on 28 × 28 pixels; Adam on batches of 32, in five trainings that end too early, in time and too late. "ours"
  is what `ba.calibrate` makes of the optimiser's state, all at its defaults; "temp." divides the logits by the T of
  least held-out NLL, found to six digits on the same images; "alone" is the network as it is. The images that did not
  train are cut twenty times into held-out and scored ones; the table is of the first.
- coverage: breast cancer, digits and Friedman's first function (1,500 examples). 40 % of a table train one network; the
  rest is cut at random into halves again and again, one to calibrate and one to score: LAC, APS and RAPS sets, or
  intervals, at two levels, and the share of test examples with `novelty_pvalue` ≤ a. With n held-out examples the
  expected coverage lies between the level and the level + 1/(n + 1), the expected share of false alarms between a −
  1/(n + 1) and a. All splits share one network and one pool of examples, so that their mean says nothing of other
  networks and pools; but the cuts are independent, and over those of any one pool the expectation holds. A mean is
  within where two of its standard errors reach the interval. "expected" is the standard error that m test examples
  should give, √(p (1 − p) (n + m + 1)/(m (n + 2))) over the root of the splits, and "away" the distance from the
  interval in units of it. Out of 20 means one may be outside by chance; ties of scores err on the side of coverage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_breast_cancer, load_digits, make_friedman1
from torch import Tensor, nn

import bayesadam as ba
from experiments.data import load_split
from harness import Target, arguments, at_most, mean_and_error, parallel, setting, write_results
from networks import lenet, mlp

BATCH = 32
Found = dict[str, Any]


def trained(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], *, steps: int, rate: float = 1e-3
) -> torch.optim.Adam:
    """Steps of Adam on random batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return optimizer


# --- networks -------------------------------------------------------------------------------------------------------

WORSE = 0.01
# How many images train, and how many are held out.
IMAGES = {"digits": (800, 300), "mnist": (4000, 500), "fashion-mnist": (4000, 500)}
KINDS = ("mlp", "lenet")
TRAININGS = ((60, 1e-3), (300, 1e-3), (1000, 1e-3), (1500, 3e-3), (500, 1e-2))


def images(name: str) -> tuple[Tensor, Tensor]:
    """(n, 1, side, side) in [0, 1] with their classes, in a random order that is always the same."""
    parts = [load_split(name, split) for split in (("train", "test") if name == "digits" else ("test",))]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    side = math.isqrt(x.shape[1])
    return x[order].unflatten(1, (1, side, side)), y[order]


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """T of the least NLL; that is convex in 1/T, so there is one."""
    found = minimize_scalar(
        lambda t: float(F.cross_entropy(logits / math.exp(t), y)), bounds=(-4, 4), options={"xatol": 1e-6}
    )
    return math.exp(found.x)


def one_network(data: str, kind: str, steps: int, rate: float, most: int | None, cuts: int) -> list[Found]:
    """NLL of at most that many test images, ours and the others', for each cut into held-out and test images."""
    x, y = images(data)
    if kind == "lenet":
        x = F.interpolate(x, size=(28, 28), mode="bilinear")
    n_train, n_held_out = IMAGES[data]
    (x, rest_x), (y, rest_y) = (part.split([n_train, len(part) - n_train]) for part in (x, y))
    torch.manual_seed(steps)
    model = lenet() if kind == "lenet" else nn.Sequential(nn.Flatten(), *mlp((x[0].numel(), 100, 100, 10)))
    optimizer = trained(model, x, y, F.cross_entropy, steps=steps, rate=rate)
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_train, batch_size=BATCH)
    found = []
    for cut in range(cuts):
        order = torch.arange(len(rest_y))
        if cut:
            order = torch.randperm(len(rest_y), generator=torch.Generator().manual_seed(cut))
        held, test = order.split([n_held_out, len(order) - n_held_out])
        found.append(one_cut(posterior, (rest_x[held], rest_y[held]), (rest_x[test][:most], rest_y[test][:most])))
    return found


def one_cut(posterior: ba.Posterior, held_out: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Found:
    """NLL of the test images, ours and the others'."""
    (held_x, held_y), (test_x, test_y) = held_out, test
    calibrated = ba.calibrate(posterior, held_out, likelihood="classification")
    found = calibrated.predict(test_x)
    with torch.no_grad():
        best = best_temperature(posterior.model(held_x).double(), held_y)
    logits = found.mean.double()
    return {
        "ours": -float(found.log_prob(test_y).double().mean()),
        "temperature": float(F.cross_entropy(logits / best, test_y)),
        "alone": float(F.cross_entropy(logits, test_y)),
        "T": best,
        "T0": calibrated.temperature,
    }


def networks(*, quick: bool, jobs: int, cuts: int) -> tuple[Found, list[Target]]:
    """NLL after calibration beside temperature scaling and the network alone, network by network."""
    names = list(IMAGES)
    if quick:
        try:
            load_split("mnist", "test"), load_split("fashion-mnist", "test")
        except ba.errors.DataError as error:
            print(f"digits alone: {error}")
            names = ["digits"]
    trainings, most, cuts = (TRAININGS[:1], 300, 2) if quick else (TRAININGS, None, cuts)
    tasks = [(name, kind, *training) for name in names for kind in KINDS for training in trainings]
    print(f"{'':40s}{'ours':>8s}{'temp.':>8s}{'alone':>8s}{'ours/temp.':>12s}{'T':>8s}")
    found: Found = {}
    calls, worse = [partial(one_network, *task, most, cuts) for task in tasks], []
    for task, of_cuts in zip(tasks, parallel(calls, jobs=jobs), strict=True):
        title, one = "{}, {}, {} steps at {:g}".format(*task), of_cuts[0]
        one["ratio"] = one["ours"] / one["temperature"]
        one["over_alone"] = [each["ours"] / each["alone"] for each in of_cuts]
        worse += [ratio > 1 + WORSE for ratio in one["over_alone"]]
        print(
            f"{title:40s}{one['ours']:8.4f}{one['temperature']:8.4f}{one['alone']:8.4f}{one['ratio']:12.4f}"
            f"{one['T']:8.3f}",
            flush=True,
        )
        found[title] = one
    ratios = [one["ratio"] for one in found.values()]
    return found, [
        *at_most(f"NLL, ours / temperature scaling, the largest of {len(found)}", 1.01, max(ratios)),
        *at_most("the same, the mean", 1, statistics.fmean(ratios)),
        *at_most(f"share of {len(worse)} cuts with an NLL above the network's by 1 %", 0.02, statistics.fmean(worse)),
    ]


# --- coverage -------------------------------------------------------------------------------------------------------

LEVELS, ALARMS, METHODS = (0.8, 0.95), (0.05, 0.2), ("lac", "aps", "raps")
STEPS, SHARE = 1500, 0.4
TABLES: Mapping[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "breast cancer": (partial(load_breast_cancer, return_X_y=True), "classification"),
    "digits": (partial(load_digits, return_X_y=True), "classification"),
    "friedman1": (partial(make_friedman1, 1500, noise=1.0, random_state=0), "regression"),
}


def held_levels(posterior: ba.Posterior, x: Tensor, y: Tensor, likelihood: Any) -> dict[str, float]:
    """Shares of the examples that their sets or intervals hold, and of those called novel."""
    found: Any = posterior.predict(x, likelihood=likelihood)
    inside: dict[str, Tensor] = {}
    for level in LEVELS:
        if likelihood == "regression":
            low, high = found.prediction_set(level)
            inside[f"interval {level}"] = (low <= y) & (y <= high)
        else:
            sets = {method: found.prediction_set(level, method=method) for method in METHODS}
            inside |= {f"{method} {level}": held.gather(1, y[:, None]) for method, held in sets.items()}
    inside |= {f"novelty {a}": found.novelty_pvalue <= a for a in ALARMS}
    return {key: float(held.double().mean()) for key, held in inside.items()}


def some_splits(name: str, splits: Sequence[int]) -> tuple[list[dict[str, float]], int, int]:
    """Shares for each split, and how many examples calibrated and scored; the network is the same for all."""
    load, likelihood = TABLES[name]
    x, y = (torch.as_tensor(part) for part in load())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows, pool = order.tensor_split([int(SHARE * len(x))])
    x = ((x - x[rows].mean(dim=0)) / x[rows].std(dim=0).clamp(min=1e-6)).float()
    if likelihood == "regression":
        y = ((y - y[rows].mean()) / y[rows].std()).float()[:, None]
    torch.manual_seed(0)
    model = mlp((x.shape[1], 64, 64, 1 if likelihood == "regression" else int(y.max()) + 1))
    loss = F.mse_loss if likelihood == "regression" else F.cross_entropy
    optimizer = trained(model, x[rows], y[rows], loss, steps=STEPS)
    posterior = ba.Posterior.from_optimizer(model, optimizer, len(rows), batch_size=BATCH)
    shares = []
    for split in splits:
        cut = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(1000 + split))]
        held_out, test = cut.tensor_split([len(cut) // 2])
        tuned = ba.calibrate(posterior, (x[held_out], y[held_out]), likelihood=likelihood)
        shares.append(held_levels(tuned, x[test], y[test], likelihood))
    return shares, len(held_out), len(test)


def judged(key: str, shares: Sequence[float], n: int, m: int) -> Found:
    """The mean over splits beside the interval that n held-out examples promise, and m test examples can show."""
    kind, level = key.split()
    p = float(level)
    low, high = (p - 1 / (n + 1), p) if kind == "novelty" else (p, p + 1 / (n + 1))
    mean, error = mean_and_error(shares)
    outside = mean - min(max(mean, low), high)
    expected = math.sqrt(p * (1 - p) * (n + m + 1) / (m * (n + 2)) / len(shares))
    away, within = outside / expected, abs(outside) <= 2 * error
    return {"mean": mean, "error": error, "expected": expected, "nominal": (low, high), "away": away, "within": within}


def coverage(*, splits: int, jobs: int) -> tuple[Found, list[Target]]:
    """Sets, intervals and false alarms over random splits of one pool a table."""
    chunk = math.ceil(splits / jobs)
    parts = [range(first, min(first + chunk, splits)) for first in range(0, splits, chunk)]
    found: Found = {}
    for name in TABLES:
        own = list(parallel([partial(some_splits, name, part) for part in parts], jobs=jobs))
        shares, (_, n, m) = [row for part, _, _ in own for row in part], own[0]
        found[name] = {key: judged(key, [row[key] for row in shares], n, m) for key in shares[0]}
        print(f"{name}: {n} held out, {m} for testing")
        print(f"  {'':14s}{'mean':>8s}{'error':>9s}{'expected':>10s}{'interval':>18s}{'away':>7s}")
        for key, one in found[name].items():
            low, high = one["nominal"]
            print(
                f"  {key:14s}{one['mean']:8.4f}{one['error']:9.5f}{one['expected']:10.5f}{low:10.4f}–{high:.4f}"
                f"{one['away']:+8.2f}  {'' if one['within'] else 'OUTSIDE'}",
                flush=True,
            )
    every = [one for rows in found.values() for one in rows.values()]
    outside = sum(not one["within"] for one in every)
    return found, at_most(f"means of {len(every)} outside by more than two standard errors", 0, outside)


def main() -> None:
    parser = arguments(__doc__, quick="one training of each network, and 4 splits", jobs=1)
    parser.add_argument("--only", nargs="+", choices=("networks", "coverage"), default=["networks", "coverage"])
    parser.add_argument("--splits", type=int, default=200, help="of each table")
    parser.add_argument("--cuts", type=int, default=20, help="of each network's images")
    options = parser.parse_args()
    splits = 4 if options.quick else options.splits
    if splits < 2:
        parser.error("--splits must be at least 2, for there to be a standard error")
    parts = {
        "networks": partial(networks, quick=options.quick, jobs=options.jobs, cuts=options.cuts),
        "coverage": partial(coverage, splits=splits, jobs=options.jobs),
    }
    results: Found = {"splits": splits, "quick": options.quick}
    targets: list[Target] = []
    for name in options.only:
        results[name], found = parts[name]()
        targets += found
    results |= {**setting(), "targets": [asdict(target) for target in targets]}
    write_results(options.out, "calibration", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
