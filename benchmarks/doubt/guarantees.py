"""What `ba.calibrate` promises: probabilities no worse than temperature scaling's, coverage, and a risk that is kept.

    BAYESADAM_DATA=... python -m benchmarks.doubt.guarantees [--quick] [--only networks coverage risk ties]
        [--splits 200] [--jobs 1] [--out out/bench]

- networks: scikit-learn's digits, and the test images of MNIST and of Fashion-MNIST in a fixed random order: 800 train,
  300 are held out and 697 score, or 4,000, 500 and 5,500. Two hidden layers of 100 ReLUs, and LeNet; Adam on batches of
  32, in five trainings that end too early, in time and too late. "temp." divides logits by the T of least held-out NLL.
- coverage: breast cancer, digits and Friedman's first function. 40 % of a table train one network; the rest is cut at
  random into halves, to calibrate and to score: sets or intervals at two levels, and the share of `p_value` ≤ a. With n
  held-out examples the expected coverage lies between the level and the level + 1/(n + 1), the expected share of false
  alarms between a − 1/(n + 1) and a; a mean is within where two of its standard errors reach the interval.
- risk: held-out examples are drawn from a pool with replacement, so that the share of errors among what is answered of
  the whole pool is the true risk. "exceeded" is the share of draws whose true risk is above the one asked for: .05 at
  most. "naive" takes the largest threshold at which the held-out share of errors is within the risk; "oracle" is the
  most that the pool allows. Of energy's heating loads an answer more than 2 off is wrong.
- ties: inputs that take few values, repeat, are few or rarely of a class. Each kind has one network of classes and one
  of whole numbers, trained on 400 examples; both are calibrated on fresh ones again and again, and 1,000 more are
  scored: flags (`p_value` ≤ a, at most a), sets and intervals (at least the level), calibrations whose true risk is
  above the one asked for (.05 at most), and streams of 1,000 inputs without a change in which `Monitor`s at .01 alarm.
  "Safe" is a mean on the right side of its promise, or within two of its standard errors (three of a binomial share).
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_breast_cancer, load_digits, make_friedman1
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from benchmarks.common.harness import Target, arguments, at_most, mean_and_error, parallel, setting, write_results
from benchmarks.common.inputs import NoData, Pixels, digits, load, uci
from benchmarks.common.networks import lenet, mlp
from benchmarks.common.training import posterior_of

Results = dict[str, Any]
read = partial(posterior_of, steps=1500, rate=1e-3, batch=32)


def images(name: str) -> Pixels:
    """(n, 1, side, side) with their classes, in a random order that is always the same."""
    x, y = digits() if name == "digits" else load(name, "test")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def perceptron(x: Tensor) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *mlp((x[0].numel(), 100, 100, 10)))


# How many images train, and how many are held out.
IMAGES = {"digits": (800, 300), "mnist": (4000, 500), "fashion-mnist": (4000, 500)}
TRAININGS = ((60, 1e-3), (300, 1e-3), (1000, 1e-3), (1500, 3e-3), (500, 1e-2))


def one_network(data: str, kind: str, steps: int, rate: float) -> dict[str, float]:
    """NLL of the test images, ours, temperature scaling's and the network's own."""
    (x, y), (n, n_held_out) = images(data), IMAGES[data]
    if kind == "lenet":
        x = F.interpolate(x, size=(28, 28), mode="bilinear")
    torch.manual_seed(steps)
    model = lenet() if kind == "lenet" else perceptron(x)
    posterior = read(model, x[:n], y[:n], "classification", steps=steps, rate=rate)
    net = ba.calibrate(posterior, (x[n : n + n_held_out], y[n : n + n_held_out]))
    with torch.no_grad():
        probs, logits = net(x[n + n_held_out :]).probs.double(), model(x[n:]).double()
    y_held_out, test_y = y[n : n + n_held_out], y[n + n_held_out :]
    best = minimize_scalar(
        lambda t: float(F.cross_entropy(logits[:n_held_out] / math.exp(t), y_held_out)), bounds=(-4, 4)
    )
    return {
        "ours": -float(probs.gather(1, test_y[:, None]).log().mean()),
        "temperature": float(F.cross_entropy(logits[n_held_out:] / math.exp(best.x), test_y)),
        "alone": float(F.cross_entropy(logits[n_held_out:], test_y)),
    }


def networks(*, quick: bool, jobs: int) -> tuple[Results, list[Target]]:
    """NLL after calibration beside temperature scaling and the network alone, network by network."""
    names, trainings = (["digits"], TRAININGS[1:2]) if quick else (list(IMAGES), TRAININGS)
    tasks = [(name, kind, *training) for name in names for kind in ("mlp", "lenet") for training in trainings]
    results: Results = {}
    print(f"{'':40s}{'ours':>8s}{'temp.':>8s}{'alone':>8s}{'ours/temp.':>12s}")
    for task, nll in zip(tasks, parallel([partial(one_network, *task) for task in tasks], jobs=jobs), strict=True):
        title = "{}, {}, {} steps at {:g}".format(*task)
        results[title] = row = nll | {"ratio": nll["ours"] / nll["temperature"]}
        print(f"{title:40s}" + "".join(f"{v:8.4f}" for v in nll.values()) + f"{row['ratio']:12.4f}", flush=True)
    ratios = [row["ratio"] for row in results.values()]
    worst = at_most(f"NLL, ours / temperature scaling, the largest of {len(results)}", 1.01, max(ratios))
    return results, worst + at_most("the same, the mean", 1, statistics.fmean(ratios))


LEVELS, ALARMS = (0.8, 0.95), (0.05, 0.2)
TABLES: Mapping[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "breast cancer": (partial(load_breast_cancer, return_X_y=True), "classification"),
    "digits": (partial(load_digits, return_X_y=True), "classification"),
    "friedman1": (partial(make_friedman1, 1500, noise=1.0, random_state=0), "regression"),
}


def some_splits(name: str, splits: Sequence[int]) -> tuple[list[dict[str, float]], int]:
    """Shares of examples that sets and intervals hold, and of alarms, a split; and how many examples calibrated."""
    table, likelihood = TABLES[name]
    x, y = (torch.as_tensor(part) for part in table())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows, pool = order.tensor_split([2 * len(x) // 5])
    x = ((x - x[rows].mean(dim=0)) / x[rows].std(dim=0).clamp(min=1e-6)).float()
    numbers = likelihood == "regression"
    if numbers:
        y = ((y - y[rows].mean()) / y[rows].std()).float()[:, None]
    torch.manual_seed(0)
    posterior = read(mlp((x.shape[1], 64, 64, 1 if numbers else int(y.max()) + 1)), x[rows], y[rows], likelihood)
    shares = []
    for split in splits:
        cut = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(1000 + split))]
        held_out, test = cut.tensor_split([len(cut) // 2])
        p, truth = ba.calibrate(posterior, (x[held_out], y[held_out]))(x[test]), y[test]
        if numbers:
            ends = {level: p.interval(level) for level in LEVELS}
            inside = {f"interval {level}": (low <= truth) & (truth <= high) for level, (low, high) in ends.items()}
        else:
            inside = {f"set {level}": p.set(level).gather(1, truth[:, None]) for level in LEVELS}
        inside |= {f"novelty {a}": p.p_value <= a for a in ALARMS}
        shares.append({key: float(hits.double().mean()) for key, hits in inside.items()})
    return shares, len(pool) // 2


def coverage(*, splits: int, jobs: int) -> tuple[Results, list[Target]]:
    """Sets, intervals and false alarms over random splits of one pool a table."""
    results, outside = dict[str, Any](), 0
    for name in TABLES:
        parts = list(parallel([partial(some_splits, name, range(i, splits, jobs)) for i in range(jobs)], jobs=jobs))
        shares, step = [share for part, _ in parts for share in part], 1 / (parts[0][1] + 1)
        for key in shares[0]:
            kind, level = key.split()[0], float(key.split()[1])
            low, high = (level - step, level) if kind == "novelty" else (level, level + step)
            mean, error = mean_and_error(share[key] for share in shares)
            within = low - 2 * error <= mean <= high + 2 * error
            outside += not within
            row = {"mean": mean, "error": error, "nominal": (low, high), "within": within}
            results.setdefault(name, {})[key] = row
            print(f"{name:14s} {key:14s}{mean:8.4f} ± {error:.4f}, expected {low:.4f} to {high:.4f}", flush=True)
    return results, at_most("means outside by more than two standard errors", 1, outside)


@dataclass(frozen=True, eq=False)
class Case:
    """A network's posterior before calibration, and the pool that held-out examples are drawn from."""

    posterior: ba.Posterior
    x: Tensor
    y: Tensor
    n: int
    risks: tuple[float, ...]
    tolerance: float | None = None


def clothes(quick: bool) -> Case:
    """Fashion-MNIST, 4,000 of the test images train; the digits where quick."""
    (x, y), n = images("digits" if quick else "fashion-mnist"), 800 if quick else 4000
    posterior = read(perceptron(x), x[:n], y[:n], "classification")
    return Case(posterior, x[n:], y[n:], 1000, (0.01, 0.02, 0.05))


def loads(quick: bool) -> Case:
    """UCI's energy, heating loads with a variance of their own, 300 rows train; made-up rows where quick."""
    table = make_friedman1(768, noise=1.0, random_state=0) if quick else (uci("energy")["X"], uci("energy")["y"])
    order = torch.randperm(len(table[1]), generator=torch.Generator().manual_seed(0))
    x, y = (torch.as_tensor(part).float()[order] for part in table)
    x, y, scale = (x - x[:300].mean(0)) / x[:300].std(0), (y - y[:300].mean()) / y[:300].std(), float(y[:300].std())
    posterior = read(mlp((x.shape[1], 50, 2)), x[:300], y[:300, None], "heteroscedastic")
    return Case(posterior, x[300:], y[300:, None], 300, (0.05, 0.1, 0.2), tolerance=2 / scale)


CASES: Mapping[str, Callable[[bool], Case]] = {"Fashion-MNIST, MLP": clothes, "energy, MLP": loads}


def at(answered: Tensor, wrong: Tensor) -> tuple[float, float]:
    """The share answered, and the share of its answers that is wrong."""
    return float(answered.double().mean()), float(wrong[answered].double().mean()) if bool(answered.any()) else 0.0


def one_draw(case: Case, seed: int, risk: float) -> dict[str, tuple[float, float]]:
    """Share answered and true risk of every rule."""
    rows = torch.randint(len(case.x), (case.n,), generator=torch.Generator().manual_seed(seed))
    how: Any = {} if case.tolerance is None else {"tolerance": case.tolerance}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)  # that nothing is answered
        p = ba.calibrate(case.posterior, (case.x[rows], case.y[rows]), risk=risk, **how)(case.x)
    if case.tolerance is None:
        doubt, wrong = 1 - p.probs.double().amax(dim=1), p.probs.argmax(dim=1) != case.y
    else:
        doubt, wrong = p.stddev[:, 0].double(), ((p.mean - case.y).abs() > case.tolerance)[:, 0]
    share = scores.coverage_at(doubt[rows], wrong[rows], risk=risk)
    limit = float(doubt[rows].sort().values[round(share * case.n) - 1]) if share else -math.inf
    oracle = scores.coverage_at(doubt, wrong, risk=risk)
    return {"ours": at(p.answered.flatten(), wrong), "naive": at(doubt <= limit, wrong), "oracle": (oracle, risk)}


def risk(*, draws: int, quick: bool) -> tuple[Results, list[Target]]:
    """Every rule over random draws of held-out examples."""
    results: Results = {}
    for name, make in CASES.items():
        torch.manual_seed(0)
        case, results[name] = make(quick), {}
        for asked in case.risks:
            outcomes = [one_draw(case, seed, asked) for seed in range(draws)]
            for rule in outcomes[0]:
                shares, risks = zip(*(outcome[rule] for outcome in outcomes), strict=True)
                # Rounding of a mean of zeros and ones is no excess.
                exceeded = statistics.fmean(value > asked + 1e-12 for value in risks)
                row = {"answered": statistics.fmean(shares), "risk": statistics.fmean(risks), "exceeded": exceeded}
                results[name][f"{rule}, {asked}"] = row
                told = ", ".join(f"{key} {value:.4f}" for key, value in row.items())
                print(f"{name}, risk {asked}, {rule}: {told}", flush=True)
    worst = max(row["exceeded"] for rows in results.values() for key, row in rows.items() if key.startswith("ours"))
    limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)
    return results, at_most("share of draws whose true risk exceeds the one asked for, the worst", limit, worst)


LEVEL, FLAGS, RISK, ALARM = 0.9, (0.01, 0.05), 0.1, 0.01
Inputs = Callable[[int, torch.Generator], Tensor]


def _binary(n: int, source: torch.Generator) -> Tensor:
    return (torch.rand(n, 2, generator=source) < torch.tensor([0.3, 0.6])).float()


def _one_hot(n: int, source: torch.Generator) -> Tensor:
    shares = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    return F.one_hot(shares.multinomial(n, replacement=True, generator=source), 6).float()


def _normal(n: int, source: torch.Generator) -> Tensor:
    return torch.randn(n, 4, generator=source)


def _repeated(n: int, source: torch.Generator) -> Tensor:
    """Of 60 rows that are always the same."""
    rows = _normal(60, torch.Generator().manual_seed(0))
    return rows[torch.randint(60, (n,), generator=source)]


# Inputs by kind; "tiny" has 40 held-out examples, the others 400.
KINDS: Mapping[str, Inputs] = {
    "binary": _binary,
    "one-hot": _one_hot,
    "likert": lambda n, source: torch.randint(1, 6, (n, 3), generator=source).float() - 3,
    "rounded": lambda n, source: _normal(n, source).round(),
    "repeated": _repeated,
    "jittered": lambda n, source: _binary(n, source) + 1e-5 * torch.randn(n, 2, generator=source),
    "normal": _normal,
    "tiny": _normal,
    "99 to 1": _normal,
}


def drawn(kind: str, n: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes, one in a hundred of them 1 for "99 to 1", and whole numbers."""
    x = KINDS[kind](n, source)
    signal, noise = x.sum(dim=1), torch.rand(n, generator=source)
    rare, even = signal + 2 * (noise - 0.5) > 4.9, noise < (2 * signal).sigmoid()
    numbers = (2 * signal + torch.randn(n, generator=source)).round()[:, None]
    return x, (rare if kind == "99 to 1" else even).long(), numbers


def one_calibration(kind: str, posteriors: Sequence[ba.Posterior], seed: int) -> dict[str, float]:
    """What one calibration of each network does on fresh inputs."""
    source, row = torch.Generator().manual_seed(1000 + seed), dict[str, float]()
    x, classes, numbers = drawn(kind, 40 if kind == "tiny" else 400, source)
    new, new_classes, new_numbers = drawn(kind, 1000, source)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
        net = ba.calibrate(posteriors[0], (x, classes), risk=RISK)
        p, numeric = net(new), ba.calibrate(posteriors[1], (x, numbers))(new)
        wrong, answered = p.probs.argmax(dim=1) != new_classes, p.answered
        row["set"] = float(p.set(LEVEL).gather(1, new_classes[:, None]).double().mean())
        row["answered"] = float(answered.double().mean())
        row["risk exceeded"] = float(bool(answered.any()) and float(wrong[answered].double().mean()) > RISK)
        low, high = numeric.interval(LEVEL)
        row["interval"] = float(((low <= new_numbers) & (new_numbers <= high)).double().mean())
        for name, answer in (("classes", p), ("numbers", numeric)):
            row |= {f"flags {a}, {name}": float((answer.p_value <= a).double().mean()) for a in FLAGS}
        row["alarms"] = float(ba.Monitor(reference=net.novelties, alarm=ALARM).update(p.novelty))
    return row


def some_calibrations(kind: str, seeds: range) -> list[dict[str, float]]:
    posteriors = []
    x, *targets = drawn(kind, 400, torch.Generator().manual_seed(0))
    for y, outputs, likelihood in zip(targets, (2, 1), ("classification", "regression"), strict=True):
        torch.manual_seed(0)
        model = mlp((x.shape[1], 32, 32, outputs))
        posteriors.append(posterior_of(model, x, y, likelihood, steps=600, rate=3e-3, batch=64))
    return [one_calibration(kind, posteriors, seed) for seed in seeds]


def safe(name: str, values: list[float]) -> tuple[float, float, bool]:
    mean, error = mean_and_error(values)
    if name in ("risk exceeded", "alarms"):
        limit = 0.05 if name == "risk exceeded" else ALARM
        return mean, error, mean <= limit + 3 * math.sqrt(limit * (1 - limit) / len(values))
    if name.startswith("flags"):
        return mean, error, mean <= float(name.split()[1].rstrip(",")) + 2 * error
    return mean, error, name == "answered" or mean >= LEVEL - 2 * error


def ties(*, calibrations: int, jobs: int, quick: bool) -> tuple[Results, list[Target]]:
    """Every promise on every kind of inputs."""
    results, unsafe = dict[str, Any](), 0
    for kind in list(KINDS)[: 2 if quick else None]:
        calls = [partial(some_calibrations, kind, range(first, calibrations, jobs)) for first in range(jobs)]
        rows = [row for part in parallel(calls, jobs=jobs) for row in part]
        for name in rows[0]:
            mean, error, is_safe = safe(name, [row[name] for row in rows])
            unsafe += not is_safe
            results.setdefault(kind, {})[name] = {"mean": mean, "error": error, "safe": is_safe}
            print(f"{kind:10s} {name:24s}{mean:8.4f} ± {error:.4f}{'' if is_safe else '   not safe'}", flush=True)
    return results, at_most("cells that are not on the safe side", 0, unsafe)


def main() -> None:
    parser = arguments(__doc__, quick="two networks of digits, and 4 splits", jobs=1)
    parts = ("networks", "coverage", "risk", "ties")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--splits", type=int, default=200, help="of each table, pool and kind, at least 2")
    options = parser.parse_args()
    splits = 4 if options.quick else options.splits
    run: Mapping[str, Callable[[], tuple[Results, list[Target]]]] = {
        "networks": partial(networks, quick=options.quick, jobs=options.jobs),
        "coverage": partial(coverage, splits=splits, jobs=options.jobs),
        "risk": partial(risk, draws=splits, quick=options.quick),
        "ties": partial(ties, calibrations=2 if options.quick else splits, jobs=options.jobs, quick=options.quick),
    }
    results: Results = {**setting(), "splits": splits, "quick": options.quick, "targets": []}
    for name in options.only:
        try:
            results[name], targets = run[name]()
        except NoData as error:
            raise SystemExit(str(error)) from error
        results["targets"] += [asdict(target) for target in targets]
    write_results(options.out, "guarantees", results)
    print(*(Target(**target) for target in results["targets"]), sep="\n")


if __name__ == "__main__":
    main()
