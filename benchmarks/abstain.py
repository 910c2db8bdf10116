"""Abstention: is the risk that was asked for kept, how much is answered, and what becomes of it when inputs shift?

    BAYESADAM_DATA=... python benchmarks/abstain.py [--quick] [--only splits shifts] [--splits 200] [--out out/bench]

One network a data set, trained once: Fashion-MNIST (4,000 of the test images train, 6,000 are the pool), windows of 48
bytes of French and German (4,000 train, 6,000 are the pool), and UCI's energy, heating loads with a variance of their
own (300 train, 468 are the pool, `predictive="forward"`): an answer more than 2 off is wrong. Under shift also MNIST
(4,000 training images, 3,000 test images are the pool).

- splits: held-out examples are drawn from the pool with replacement, so that the share of errors among what is answered
  of the whole pool is the true risk, known without an error of its own (but for the leverage of examples that were held
  out themselves, up to a sixth of the images and half of the loads). Each draw and risk is one `ba.calibrate`.
  "exceeded" is the share of draws whose true risk is above the one asked for: at most .05 at the default confidence,
  and within two standard errors of it is not above. "naive" takes the largest threshold at which the held-out share of
  errors is within the risk; "as sure" answers where the network's own probability of an error is, softmax without a
  temperature, or of loads the Gaussian's beyond the tolerance; "oracle" is the most that the pool allows.
- AURC: the area under the risk-coverage curve of the pool, by confidence at T(x), softmax alone, and novelty.
- shifts: of 500 pool images that are not held out, shifted in six ways at four strengths (`doubt_shifts.py`): the share
  that is answered and the share of wrong answers, by strength. No guarantee holds there. All three rows have the same
  procedure and held-out images; they differ in what orders the inputs, and in T.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from bayesadam.errors import HeldOutWarning
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import certified
from calibration import BATCH, best_temperature, images, trained
from doubt_data import Sizes, load, suite
from doubt_shifts import shifted
from harness import Target, arguments, at_most, one_core, setting, write_results
from networks import lenet, mlp

CONFIDENCE, STEPS, SHIFT_DRAWS, SHIFTED = 0.95, 1500, 3, 500
SHIFT_RISKS = {"Fashion-MNIST, MLP": 0.05, "MNIST, LeNet": 0.01}
Found = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A network's posterior before calibration, and the pool that held-out examples are drawn from."""

    posterior: ba.Posterior
    x: Tensor
    y: Tensor
    n: int
    risks: tuple[float, ...]
    tolerance: float | None = None


class Texts(nn.Module):
    """Two convolutions over bytes, averaged over places."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 16)
        self.first, self.second, self.head = nn.Conv1d(16, 32, 5), nn.Conv1d(32, 32, 5), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) bytes to two logits."""
        hidden = self.first(self.bytes(x).transpose(1, 2)).relu()
        return self.head(self.second(hidden).relu().mean(dim=2))  # type: ignore[no-any-return]


def _posterior(model: nn.Module, x: Tensor, y: Tensor, likelihood: Any, steps: int) -> ba.Posterior:
    record = likelihood_of(likelihood)
    optimizer = trained(
        model, x, y, lambda outputs, targets: record.loss(outputs[None], targets[None]).sum(), steps=steps
    )
    return ba.Posterior.from_optimizer(model, optimizer, len(x), batch_size=BATCH, likelihood=likelihood)


def fashion(quick: bool) -> Case:
    x, y = images("digits" if quick else "fashion-mnist")
    n = 800 if quick else 4000
    model = nn.Sequential(nn.Flatten(), *mlp((x[0].numel(), 100, 100, 10)))
    return Case(_posterior(model, x[:n], y[:n], "classification", STEPS), x[n:], y[n:], 1000, (0.01, 0.02, 0.05))


def mnist(quick: bool) -> Case:
    (x, y), (pool, labels) = (load("mnist", split, made_up=quick) for split in ("train", "test"))
    posterior = _posterior(lenet(), x[:4000], y[:4000], "classification", 100 if quick else STEPS)
    return Case(posterior, pool[:3000], labels[:3000], 1000, (0.01, 0.02, 0.05))


def texts(quick: bool) -> Case:
    data = suite("text", 0, Sizes(train=4000, held_out=3000, test=3000, outside=10), made_up=quick)
    posterior = _posterior(Texts(), *data.train, "classification", 100 if quick else 600)
    x, y = (torch.cat(parts) for parts in zip(data.held_out, data.test, strict=True))
    return Case(posterior, x, y, 1000, (0.01, 0.02, 0.05))


def energy(quick: bool) -> Case:
    if quick:
        from sklearn.datasets import make_friedman1

        table = make_friedman1(768, noise=1.0, random_state=0)
    else:
        from tabular import load_uci

        table = load_uci("energy")
    x, y = (torch.as_tensor(part).float() for part in table)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order].reshape(-1, 1)
    x, y, scale = (x - x[:300].mean(dim=0)) / x[:300].std(dim=0), (y - y[:300].mean()) / y[:300].std(), y[:300].std()
    posterior = _posterior(mlp((x.shape[1], 50, 2)), x[:300], y[:300], "heteroscedastic", STEPS)
    return Case(posterior, x[300:], y[300:], 300, (0.05, 0.1, 0.2), tolerance=2 / float(scale))


CASES: dict[str, Callable[[bool], Case]] = {
    "Fashion-MNIST, MLP": fashion,
    "MNIST, LeNet": mnist,
    "French or German, CNN": texts,
    "energy, heteroscedastic MLP": energy,
}
SPLIT = ("Fashion-MNIST, MLP", "French or German, CNN", "energy, heteroscedastic MLP")


@cache
def case_of(name: str, quick: bool) -> Case:
    """A case, its network trained."""
    torch.manual_seed(0)
    return CASES[name](quick)


def calibrated(case: Case, rows: Tensor, risk: float) -> ba.Posterior:
    """As a user would, but for the warning that nothing is answered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeldOutWarning)
        held_out = case.x[rows], case.y[rows]
        how: Any = {} if case.tolerance is None else {"predictive": "forward", "tolerance": case.tolerance}
        return ba.calibrate(case.posterior, held_out, risk=risk, confidence=CONFIDENCE, **how)


def at(answered: Tensor, wrong: Tensor) -> tuple[float, float]:
    """The share answered, and the share of its answers that is wrong."""
    share = float(answered.double().mean())
    return share, float(wrong[answered].double().mean()) if share else 0.0


def naive(doubt: Tensor, wrong: Tensor, risk: float) -> float:
    """The largest threshold whose share of errors is within the risk."""
    share = scores.coverage_at(doubt, wrong, risk=risk)
    return float(doubt.sort().values[round(share * len(doubt)) - 1]) if share else -math.inf


def of_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return 1 - (logits.double() / temperature).softmax(dim=1).amax(dim=1)


def one_draw(case: Case, seed: int) -> Found:
    """Share answered and true risk of every rule, for each risk, and the areas under curves."""
    rows = torch.randint(len(case.x), (case.n,), generator=torch.Generator().manual_seed(seed))
    rules: Found = {}
    for risk in case.risks:
        posterior = calibrated(case, rows, risk)
        if not rules:
            p: Any = posterior.predict(case.x)
            doubt, wrong = p.doubt.detach(), p.wrong(case.y, case.tolerance)
            if case.tolerance is None:
                sure = of_softmax(p.mean.detach())
            else:
                sure = torch.erfc(case.tolerance / (math.sqrt(2) * doubt))
        rule = posterior.calibration.abstention  # type: ignore[union-attr]
        assert rule is not None
        rules[str(risk)] = {
            "ours": at(rule.answers(doubt), wrong),
            "naive": at(doubt <= naive(doubt[rows], wrong[rows], risk), wrong),
            "as sure": at(sure <= risk, wrong),
            "oracle": (scores.coverage_at(doubt, wrong, risk=risk), risk),
        }
    orders = {"confidence": doubt, "novelty": p.novelty.detach()}
    orders |= {"softmax": sure} if case.tolerance is None else {}
    areas = {name: scores.aurc(order, wrong) for name, order in orders.items()}
    return {"rules": rules, "aurc": areas, "error": float(wrong.double().mean())}


def splits(*, draws: int, quick: bool) -> tuple[Found, list[Target]]:
    """Every rule over random draws of held-out examples."""
    found: Found = {}
    for name in SPLIT:
        case = case_of(name, quick)
        each = [one_draw(case, seed) for seed in range(draws)]
        error = statistics.fmean(one["error"] for one in each)
        print(f"\n{name}: {case.n} held out, pool of {len(case.x)}, error without abstention {error:.3f}\n")
        print("| risk | rule | answered | true risk | exceeded |\n|---|---|---|---|---|")
        own: Found = {"n": case.n, "pool": len(case.x), "error": error, "rules": {}}
        for risk in map(str, case.risks):
            own["rules"][risk] = {}
            for rule in each[0]["rules"][risk]:
                pairs = [one["rules"][risk][rule] for one in each]
                # Rounding of a mean of zeros and ones is no excess.
                exceeded = statistics.fmean(r > float(risk) + 1e-12 for _, r in pairs)
                shares, risks = (statistics.fmean(part) for part in zip(*pairs, strict=True))
                own["rules"][risk][rule] = [round(v, 4) for v in (shares, risks, exceeded)]
                print(f"| {risk} | {rule} | {shares:.3f} | {risks:.4f} | {exceeded:.3f} |", flush=True)
        own["aurc"] = {key: round(statistics.fmean(one["aurc"][key] for one in each), 5) for key in each[0]["aurc"]}
        print("\nAURC: " + ", ".join(f"{key} {value:.4f}" for key, value in own["aurc"].items()), flush=True)
        found[name] = own
    worst = max(row["ours"][2] for own in found.values() for row in own["rules"].values())
    limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)
    return found, at_most("share of draws whose true risk exceeds the one asked for, the worst", limit, worst)


def shifts(*, quick: bool) -> tuple[Found, list[Target]]:
    """Share answered and wrong by strength, over six kinds of shift."""
    found: Found = {}
    for name, risk in SHIFT_RISKS.items():
        case, every = case_of(name, quick), []
        for seed in range(1 if quick else SHIFT_DRAWS):
            order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(seed))
            n = min(case.n, len(order) // 2)
            rows, test = order[:n], order[n : n + SHIFTED]
            posterior = calibrated(case, rows, risk)
            rule = posterior.calibration.abstention  # type: ignore[union-attr]
            assert rule is not None
            with torch.no_grad():
                logits = case.posterior.model(case.x[rows])
            best, limits = best_temperature(logits.double(), case.y[rows]), {}
            wrong = logits.argmax(dim=1) != case.y[rows]
            for title, t in (("softmax", 1.0), ("temperature scaling", best)):
                passed = certified(of_softmax(logits, t), wrong, risk=risk, confidence=CONFIDENCE)
                limits[title] = (t, -math.inf if passed is None else passed.threshold)
            copies = shifted(case.x[test], seed=seed)
            for strength in range(5):
                for x in [case.x[test]] if strength == 0 else [copies[kind][strength - 1] for kind in copies]:
                    p: Any = posterior.predict(x)
                    wrong, logits = p.wrong(case.y[test]), p.mean.detach()
                    rules = {"T(x)": p.answered}
                    rules |= {title: of_softmax(logits, t) <= limit for title, (t, limit) in limits.items()}
                    every += [(strength, title, *at(answered, wrong)) for title, answered in rules.items()]
        print(f"\n{name}, risk {risk}: answered, wrong of those, by strength of shift\n")
        print("| by | none | 1 | 2 | 3 | 4 |\n|---|---|---|---|---|---|")
        found[name] = {title: _by_strength(every, title) for title in ("T(x)", "temperature scaling", "softmax")}
        for title, cells in found[name].items():
            print(
                f"| {title} | " + " | ".join(f"{share:.2f}, {errors:.3f}" for share, errors in cells) + " |", flush=True
            )
    return found, []


def _by_strength(every: Sequence[tuple[int, str, float, float]], title: str) -> list[list[float]]:
    """The mean share answered, and the share of wrong answers among all that were answered."""
    cells = []
    for strength in range(5):
        own = [(share, share * risk) for s, t, share, risk in every if s == strength and t == title]
        share, errors = (statistics.fmean(part) for part in zip(*own, strict=True))
        cells.append([round(share, 4), round(errors / share, 4) if share else 0.0])
    return cells


def main() -> None:
    parser = arguments(__doc__, quick="4 draws, of made-up data where it has to be")
    parser.add_argument("--only", nargs="+", choices=("splits", "shifts"), default=["splits", "shifts"])
    parser.add_argument("--splits", type=int, default=200, help="draws of held-out examples for each data set")
    options = parser.parse_args()
    one_core()
    draws = 4 if options.quick else options.splits
    results: Found = {"draws": draws, "confidence": CONFIDENCE, "quick": options.quick}
    targets: list[Target] = []
    for part in options.only:
        results[part], found = (
            splits(draws=draws, quick=options.quick) if part == "splits" else shifts(quick=options.quick)
        )
        targets += found
    results |= {**setting(), "targets": [asdict(target) for target in targets]}
    write_results(options.out, "abstain", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
