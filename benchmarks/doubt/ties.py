"""What `ba.calibrate` and `ba.Monitor` promise, where inputs take few values, repeat, are few or rarely of a class.

    python -m benchmarks.doubt.ties [--quick] [--calibrations 200] [--only binary ...] [--jobs 2] [--out out/bench]

Each kind of inputs has one network of classes and one of whole numbers, trained on 400 examples; both are calibrated on
fresh ones again and again, and 1,000 more are scored. Means over calibrations, with their standard errors:

- flags: the share of `p_value` ≤ a, at most a.
- sets and intervals: the share that holds the truth, at least the level.
- risk: the share of calibrations whose true risk is above the one asked for, at most .05; and what is answered.
- alarms: the share of streams of 1,000 inputs without a change in which a `Monitor` at .01 alarms, at most .01.

"Safe" is a mean on the right side of its promise, or within two of its standard errors (three of a binomial share).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bayesadam as ba
from benchmarks.common.harness import arguments, at_most, mean_and_error, parallel, setting, write_results
from benchmarks.common.networks import mlp
from benchmarks.common.training import posterior_of

LEVEL, FLAGS, RISK, ALARM = 0.9, (0.01, 0.05), 0.1, 0.01
TRAIN, TEST = 400, 1000
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


def fitted(x: Tensor, y: Tensor, likelihood: str) -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp((x.shape[1], 32, 32, 1 if likelihood == "regression" else 2))
    return posterior_of(model, x, y, likelihood, steps=600, rate=3e-3, batch=64)


def one(kind: str, posteriors: tuple[ba.Posterior, ba.Posterior], seed: int) -> dict[str, float]:
    """What one calibration of each network does on fresh inputs."""
    source, row = torch.Generator().manual_seed(1000 + seed), dict[str, float]()
    x, classes, numbers = drawn(kind, 40 if kind == "tiny" else 400, source)
    new, new_classes, new_numbers = drawn(kind, TEST, source)
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


def some(kind: str, seeds: range) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    x, classes, numbers = drawn(kind, TRAIN, torch.Generator().manual_seed(0))
    posteriors = fitted(x, classes, "classification"), fitted(x, numbers, "regression")
    return [one(kind, posteriors, seed) for seed in seeds]


def safe(name: str, values: list[float]) -> tuple[float, float, bool]:
    mean, error = mean_and_error(values)
    if name in ("risk exceeded", "alarms"):
        limit = 0.05 if name == "risk exceeded" else ALARM
        return mean, error, mean <= limit + 3 * math.sqrt(limit * (1 - limit) / len(values))
    if name.startswith("flags"):
        return mean, error, mean <= float(name.split()[1].rstrip(",")) + 2 * error
    return mean, error, name == "answered" or mean >= LEVEL - 2 * error


def main() -> None:
    parser = arguments(__doc__, quick="two calibrations of two kinds", jobs=2)
    parser.add_argument("--calibrations", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    kinds, n = (options.only[:2], 2) if options.quick else (options.only, options.calibrations)
    results, unsafe = dict[str, Any](), 0
    for kind in kinds:
        calls = [partial(some, kind, range(first, n, options.jobs)) for first in range(options.jobs)]
        rows = [row for part in parallel(calls, jobs=options.jobs) for row in part]
        for name in rows[0]:
            mean, error, is_safe = safe(name, [row[name] for row in rows])
            unsafe += not is_safe
            results.setdefault(kind, {})[name] = {"mean": mean, "error": error, "safe": is_safe}
            print(f"{kind:10s} {name:24s}{mean:8.4f} ± {error:.4f}{'' if is_safe else '   not safe'}", flush=True)
    write_results(options.out, "ties", {**setting(), "calibrations": n, "results": results})
    print(*at_most("cells that are not on the safe side", 0, unsafe), sep="\n")


if __name__ == "__main__":
    main()
