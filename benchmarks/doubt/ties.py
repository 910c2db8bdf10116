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

LEVEL, FLAGS, RISK, ALARM = 0.9, (0.01, 0.05), 0.1, 0.01
TRAIN, TEST = 400, 1000
Inputs = Callable[[int, torch.Generator], Tensor]


def _binary(n: int, source: torch.Generator) -> Tensor:
    return (torch.rand(n, 2, generator=source) < torch.tensor([0.3, 0.6])).float()


def _one_hot(n: int, source: torch.Generator) -> Tensor:
    shares = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    return F.one_hot(shares.multinomial(n, replacement=True, generator=source), 6).float()


def _likert(n: int, source: torch.Generator) -> Tensor:
    return torch.randint(1, 6, (n, 3), generator=source).float() - 3


def _normal(n: int, source: torch.Generator) -> Tensor:
    return torch.randn(n, 4, generator=source)


def _rounded(n: int, source: torch.Generator) -> Tensor:
    return _normal(n, source).round()


def _repeated(n: int, source: torch.Generator) -> Tensor:
    """Of 60 rows that are always the same."""
    rows = _normal(60, torch.Generator().manual_seed(0))
    return rows[torch.randint(60, (n,), generator=source)]


def _jittered(n: int, source: torch.Generator) -> Tensor:
    return _binary(n, source) + 1e-5 * torch.randn(n, 2, generator=source)


KINDS: Mapping[str, tuple[Inputs, int]] = {
    "binary": (_binary, 400),
    "one-hot": (_one_hot, 400),
    "likert": (_likert, 400),
    "rounded": (_rounded, 400),
    "repeated": (_repeated, 400),
    "jittered": (_jittered, 400),
    "normal": (_normal, 400),
    "tiny": (_normal, 40),
    "99 to 1": (_normal, 400),
}


def labels(kind: str, x: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Classes, one in a hundred of them 1 for "99 to 1", and whole numbers."""
    signal = x.sum(dim=1)
    noise = torch.rand(len(x), generator=source)
    if kind == "99 to 1":
        classes = (signal + 2 * (noise - 0.5) > 4.9).long()
    else:
        classes = (noise < (2 * signal).sigmoid()).long()
    numbers = (2 * signal + torch.randn(len(x), generator=source)).round()[:, None]
    return classes, numbers


def drawn(kind: str, n: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = KINDS[kind][0](n, source)
    return x, *labels(kind, x, source)


def fitted(x: Tensor, y: Tensor, likelihood: str) -> ba.Posterior:
    torch.manual_seed(0)
    numbers = likelihood == "regression"
    model = mlp((x.shape[1], 32, 32, 1 if numbers else 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss: Any = F.mse_loss if numbers else F.cross_entropy
    for _ in range(600):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model.eval(), optimizer, len(x), likelihood=likelihood)


def one(kind: str, posteriors: tuple[ba.Posterior, ba.Posterior], seed: int) -> dict[str, float]:
    """What one calibration of each network does on fresh inputs."""
    source = torch.Generator().manual_seed(1000 + seed)
    x, classes, numbers = drawn(kind, KINDS[kind][1], source)
    new, new_classes, new_numbers = drawn(kind, TEST, source)
    row = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
        net = ba.calibrate(posteriors[0], (x, classes), risk=RISK)
        p = net(new)
        wrong = p.probs.argmax(dim=1) != new_classes
        answered = p.answered
        row["set"] = float(p.set(LEVEL).gather(1, new_classes[:, None]).double().mean())
        row["answered"] = float(answered.double().mean())
        row["risk exceeded"] = float(bool(answered.any()) and float(wrong[answered].double().mean()) > RISK)
        numeric = ba.calibrate(posteriors[1], (x, numbers))(new)
        low, high = numeric.interval(LEVEL)
        row["interval"] = float(((low <= new_numbers) & (new_numbers <= high)).double().mean())
        for name, answer in (("classes", p), ("numbers", numeric)):
            for a in FLAGS:
                row[f"flags {a}, {name}"] = float((answer.p_value <= a).double().mean())
        row["alarms"] = float(ba.Monitor(reference=net.novelties, alarm=ALARM).update(p.novelty))
    return row


def some(kind: str, seeds: range) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    x, classes, numbers = drawn(kind, TRAIN, source)
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
    results: dict[str, Any] = {}
    unsafe = 0
    for kind in kinds:
        calls = [partial(some, kind, range(first, n, options.jobs)) for first in range(options.jobs)]
        rows = [row for part in parallel(calls, jobs=options.jobs) for row in part]
        results[kind] = {}
        for name in rows[0]:
            mean, error, held = safe(name, [row[name] for row in rows])
            unsafe += not held
            results[kind][name] = {"mean": mean, "error": error, "safe": held}
            print(f"{kind:10s} {name:24s}{mean:8.4f} ± {error:.4f}{'' if held else '   not safe'}", flush=True)
    write_results(options.out, "ties", {**setting(), "calibrations": n, "results": results})
    print(*at_most("cells that are not on the safe side", 0, unsafe), sep="\n")


if __name__ == "__main__":
    main()
