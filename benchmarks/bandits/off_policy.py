"""Off-policy estimates against the truth: bias and coverage over many logs of an agent that learns.

    python -m benchmarks.bandits.off_policy [--quick] [--logs 200] [--decisions 1000] [--jobs 2] [--out out/bench]
    python -m benchmarks.bandits.off_policy --sequences 500 [--decisions 1000]
    python -m benchmarks.bandits.off_policy --cells 200

The problem is scikit-learn's digits as a bandit: the context is an image, as its first 16 principal components, an arm
is a digit, and the reward is 1 for the right one. Contexts are drawn with replacement, so that the truth is known: the
policy's mean probability of the right digit over all images.

Each log is written by a `linear` agent that learns meanwhile, through `decide`, `reward` and a log file. Two policies
are evaluated on it: a softmax of a classifier fitted to 300 images beforehand, and the same one digit too high, which
the agent hardly ever agrees with. A tenth of the agent's choices are at random ("explores"). In a quarter as many logs
it has its posterior alone ("posterior"): what that has ruled out is not in the log, and what counts is that the
estimates say so.

For each estimator: its bias, the mean error over logs, also in standard errors of that mean; its root mean squared
error; how many of the 95 % intervals hold the truth; and the mean standard error told over the standard deviation of
the errors.

`--sequences` looks at that many logs after every 100 decisions instead, to stop at the first interval that does not
hold the truth: the share of logs where that happens, with confidence sequences and with the normal intervals of the
doubly robust estimate, at 95 %, and the mean width of both. The agent learns after every 50 decisions there, and
chooses by `Agent.probabilities`. Besides the two policies it compares the first with a flatter softmax.

`--cells` are logs of 50 and of 600 decisions among five arms, each that many times, by rewards: 0 or 1, from .002 to .5
of them 1; numbers with normal noise; all 1; clicks of which only those that came are logged. The log is of a learner
that chooses by 21 or 201 draws, whose shares are the probabilities, or of one that explores and logs the chosen arm's
alone, rightly or no less than .2. Policies are near to it or far. A cell's row has the share of logs whose interval
misses the truth, of those that have none, of those with doubts, and the mean width; the normal interval beside it.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from bayesadam.bandits import Estimate, Log, compare, evaluate, make_agent
from bayesadam.bandits.off_policy import doubly_robust_terms, mean
from bayesadam.errors import BayesAdamWarning, MatchError
from benchmarks.common.harness import arguments, at_least, at_most, mean_and_error, parallel, setting, write_results

SEED = 0
COMPONENTS, FITTED = 16, 300
# Of the softmax, by policy.
SHARPNESS = {"classifier": 6.0, "one too high": 6.0, "flatter": 3.0}
LOGGING = {"explores": {"epsilon": 0.1}, "posterior": {"epsilon": 0.0}}
POLICIES = ("classifier", "one too high")
COMPARED = "classifier − flatter"
EVERY, LEARN = 100, 50
ESTIMATORS = {"ips": "IPS", "doubly_robust": "doubly robust"}
LEVEL = 0.95
ARMS = 5
SCORES = np.random.default_rng(1).normal(size=(2, 3, ARMS))
# The share of rewards that are 1, by cell; of `numbers` it is not used.
CELLS = {".002": 0.002, ".01": 0.01, ".07": 0.07, ".5": 0.5, "numbers": 0.0, "constant": 1.0, "clicks alone": 0.07}
CHOSEN_BY = ("21 draws", "201 draws", "the chosen arm's alone", "clipped at .2")


@dataclass(frozen=True, eq=False)
class Digits:
    """Contexts (n, 16), labels (n,), and the weights of a classifier that is linear in them."""

    contexts: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    @classmethod
    def load(cls) -> Digits:
        """All 1797 images."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        centred = images - images.mean(axis=0)
        contexts = centred @ np.linalg.svd(centred, full_matrices=False)[2][:COMPONENTS].T
        contexts = (contexts / contexts.std(axis=0)).astype(np.float32)
        some = np.random.default_rng(SEED).permutation(len(labels))[:FITTED]
        weights = np.linalg.lstsq(_with_one(contexts[some]), np.eye(10)[labels[some]], rcond=None)[0]
        return cls(contexts, labels, weights)

    def probabilities(self, contexts: np.ndarray, *, policy: str) -> np.ndarray:
        """Of the arms, (n, 10)."""
        scores = SHARPNESS[policy] * _with_one(contexts) @ self.weights
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return np.roll(shares, 1, axis=1) if policy == "one too high" else shares

    def truth(self, policy: str) -> float:
        """The mean reward of a policy."""
        shares = self.probabilities(self.contexts, policy=policy)
        return float(shares[np.arange(len(self.labels)), self.labels].mean())


def _with_one(contexts: np.ndarray) -> np.ndarray:
    return np.column_stack([contexts, np.ones(len(contexts))])


def one_log(number: int, *, decisions: int, logging: str) -> dict[str, Any]:
    """The estimates of all policies from one log, and whether they are to be trusted."""
    digits = Digits.load()
    rows = np.random.default_rng([SEED, number]).integers(len(digits.labels), size=decisions)
    agent = make_agent("linear", COMPONENTS, 10, seed=number, **LOGGING[logging])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        agent.log(path)
        for row in rows:
            decision = agent.decide(digits.contexts[row])
            agent.reward(decision.id, float(decision.arm == digits.labels[row]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BayesAdamWarning)
            found = {policy: evaluate(path, partial(digits.probabilities, policy=policy)) for policy in POLICIES}
    return {
        policy: {
            "logged": one.logged.value,
            "trusted": not one.doubts,
            "effective_size": one.effective_size,
            "ips": (one.ips.value, one.ips.error, *normal(one.ips)),
            "doubly_robust": (*astuple(one.doubly_robust)[:2], *one.doubly_robust.interval(LEVEL)),
        }
        for policy, one in found.items()
    }


def watched_log(number: int, *, decisions: int, logging: str) -> dict[str, dict[str, Any]]:
    """Whether the intervals at any look miss the truth, and their widths at each, by policy."""
    digits, rng = Digits.load(), np.random.default_rng([SEED, 1, number])
    rows = rng.integers(len(digits.labels), size=decisions)
    agent = make_agent("linear", COMPONENTS, 10, seed=number, **LOGGING[logging])
    contexts, arms, shares = digits.contexts[rows], np.zeros(decisions, int), np.zeros((decisions, 10))
    for first in range(0, decisions, LEARN):
        part = slice(first, first + LEARN)
        shares[part] = agent.probabilities(contexts[part])
        arms[part] = [rng.choice(10, p=each / each.sum()) for each in shares[part]]
        agent.update(contexts[part], arms[part], arms[part] == digits.labels[rows[part]])
    log = Log.of(contexts=contexts, arms=arms, probabilities=shares, rewards=arms == digits.labels[rows])
    policies = {policy: partial(digits.probabilities, policy=policy) for policy in SHARPNESS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        found = {policy: evaluate(log, policies[policy]) for policy in POLICIES}
        both = compare(log, policies["classifier"], policies["flatter"])
    terms = {policy: doubly_robust_terms(one.log, one.predicted, one.shares) for policy, one in found.items()}
    one, two = both.first, both.second
    terms[COMPARED] = doubly_robust_terms(one.log, one.predicted, one.shares - two.shares)
    truths = {policy: digits.truth(policy) for policy in POLICIES}
    truths[COMPARED] = digits.truth("classifier") - digits.truth("flatter")
    results = {}
    for name, one in {**found, COMPARED: both}.items():
        sequence, looks = one.sequence(LEVEL, reward_range=(0, 1)), np.arange(EVERY, decisions + 1, EVERY)
        anytime = np.stack([sequence.lower, sequence.upper], axis=1)[looks - 1]
        fixed = np.array([normal(mean(terms[name][:n])) for n in looks])
        results[name] = {
            kind: {
                "missed": bool(((truths[name] < ends[:, 0]) | (truths[name] > ends[:, 1])).any()),
                "widths": (ends[:, 1] - ends[:, 0]).tolist(),
            }
            for kind, ends in (("sequence", anytime), ("normal", fixed))
        }
    return results


def watched(logs: int, decisions: int, jobs: int) -> dict[str, Any]:
    """Share of the logs with a miss at any look, and mean widths at some looks, by logging, policy and interval."""
    results: dict[str, Any] = {}
    looks = sorted({min(n, decisions) // EVERY for n in (200, 500, 1000, decisions)} - {0})
    head = "".join(f"{f'width at {n * EVERY}':>15s}" for n in looks)
    for logging in LOGGING:
        calls = [partial(watched_log, number, decisions=decisions, logging=logging) for number in range(logs)]
        found = list(parallel(calls, jobs=jobs))
        print(f"\n{logging}, {logs} logs of {decisions} decisions\n{'':34s}{'ever missed':>12s}{head}")
        for policy in found[0]:
            for kind in ("sequence", "normal"):
                missed, widths = (
                    np.mean([one[policy][kind][of] for one in found], axis=0) for of in ("missed", "widths")
                )
                results[f"{logging}, {policy}, {kind}"] = {"missed": float(missed), "widths": widths.tolist()}
                shown_widths = "".join(f"{widths[n - 1]:15.3f}" for n in looks)
                print(f"{policy:22s}{kind:12s}{missed:12.3f}{shown_widths}", flush=True)
    return results


def _softmax(scores: np.ndarray) -> np.ndarray:
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def near_or_far(contexts: np.ndarray, *, policy: str) -> np.ndarray:
    """A policy's probabilities of the five arms of a cell."""
    return _softmax((1.5 if policy == "near" else -1.5) * contexts @ SCORES[0])


def paid(contexts: np.ndarray, *, rewards: str) -> np.ndarray:
    """The mean rewards of a cell, (n, arms)."""
    likely = 2 / (1 + np.exp(-contexts @ SCORES[1]))
    return likely if rewards == "numbers" else likely ** (rewards != "constant") * CELLS[rewards]


def cell_log(number: int, *, decisions: int, rewards: str, logging: str) -> Log:
    """A log of a learner that begins near the first policy and learns ten times."""
    rng = np.random.default_rng([SEED, 2, number, decisions])
    x, draws, rows = rng.normal(size=(decisions, 3)), 21 if "21" in logging else 201, np.arange(decisions)
    means, weights = paid(x, rewards=rewards), 1.5 * SCORES[0]
    shares, arms, told = np.zeros((decisions, ARMS)), np.zeros(decisions, int), np.zeros(decisions)
    for part in np.array_split(rows, 10):
        scores = (x[part] @ weights)[:, None] + 1.5 * rng.gumbel(size=(len(part), draws, ARMS))
        best = scores.argmax(axis=2)
        shares[part] = (best[..., None] == np.arange(ARMS)).mean(axis=1)
        arms[part] = best[:, 0]
        if "chosen" in logging or "clipped" in logging:
            shares[part] = 0.9 * shares[part] + 0.1 / ARMS
            arms[part] = [rng.choice(ARMS, p=row / row.sum()) for row in shares[part]]
        mean, noise = means[part, arms[part]], 0.5 * rng.normal(size=len(part))
        told[part] = mean + noise if rewards == "numbers" else rng.random(len(part)) < mean
        # Towards what paid more than the mean did.
        above = told[part] - told[: part[-1] + 1].mean()
        weights = weights + x[part].T @ (above[:, None] * (arms[part, None] == np.arange(ARMS))) / len(part)
    if rewards == "clicks alone":
        told[told == 0] = math.nan
    chosen = shares[rows, arms].clip(0.2 if "clipped" in logging else 0)
    return Log.of(
        contexts=x, arms=arms, probabilities=shares if "draws" in logging else chosen, rewards=told, n_arms=ARMS
    )


@cache
def cell_truth(policy: str, rewards: str) -> float:
    """The mean reward of a policy."""
    many = np.random.default_rng(SEED).normal(size=(400_000, 3))
    return float((near_or_far(many, policy=policy) * paid(many, rewards=rewards)).sum(axis=1).mean())


def one_cell(number: int, **cell: Any) -> dict[str, list[list[float]]]:
    """By policy and interval: whether it misses the truth, is missing, comes with doubts; and how wide it is."""
    log, found = cell_log(number, **cell), {}
    for policy in ("near", "far"):
        truth, which = cell_truth(policy, cell["rewards"]), partial(near_or_far, policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BayesAdamWarning)
            try:
                one = evaluate(log, which)
            except MatchError:
                # Of no or one reward.
                found[policy] = [[0, 1, 1, math.nan]] * 2
                continue
        ends = one.doubly_robust.interval(LEVEL), normal(one.doubly_robust)
        found[policy] = [
            [not low <= truth <= high and low == low, low != low, bool(one.doubts), high - low] for low, high in ends
        ]
    return found


def cells(logs: int, jobs: int) -> dict[str, Any]:
    """The means over logs, by cell; the limit of the share that misses is two standard errors above 5 %."""
    results: dict[str, Any] = {}
    limit = 1 - LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / logs)
    print(f"{'':58s}{'missed':>8s}{'none':>7s}{'doubts':>8s}{'width':>8s}   normal: missed, width; limit {limit:.3f}")
    for decisions, logging, rewards in itertools.product((50, 600), CHOSEN_BY, CELLS):
        one = partial(one_cell, decisions=decisions, logging=logging, rewards=rewards)
        runs = list(parallel([partial(one, number) for number in range(logs)], jobs=jobs))
        for policy in runs[0]:
            rows = np.array([run[policy] for run in runs], float)
            table = np.column_stack([rows[..., :3].mean(axis=0), [_mean(part) for part in rows[..., 3].T]])
            name, (ours, plainly) = f"{decisions}, {logging}, {rewards}, {policy}", table.tolist()
            results[name] = {"betting": ours, "normal": plainly}
            cells = f"{ours[0]:8.3f}{ours[1]:7.2f}{ours[2]:8.2f}{ours[3]:8.3f}"
            print(f"{name:58s}{cells}   {plainly[0]:.3f} {plainly[3]:.3f}", flush=True)
    return results


def _mean(values: np.ndarray) -> float:
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else math.nan


def normal(estimate: Estimate) -> tuple[float, float]:
    """value ± z error: right for many decisions with rewards that are not rare."""
    reach = NormalDist().inv_cdf(0.5 + LEVEL / 2) * estimate.error
    return estimate.value - reach, estimate.value + reach


def summary(found: Sequence[dict[str, Any]], truth: float) -> dict[str, Any]:
    """Bias in standard errors, coverage, and the ratio of the standard errors told to the deviation of the errors."""
    rows = {}
    for name in ESTIMATORS:
        values, told, low, high = np.array([one[name] for one in found]).T
        bias, error = mean_and_error((values - truth).tolist())
        rows[name] = {
            "bias": bias,
            "bias_in_errors": bias / error if error else math.nan,
            "rmse": float(np.sqrt(((values - truth) ** 2).mean())),
            "coverage": float(((low <= truth) & (truth <= high)).mean()),
            "error_ratio": float(told.mean() / values.std(ddof=1)),
        }
    means = {name: float(np.mean([one[name] for one in found])) for name in ("logged", "trusted", "effective_size")}
    return {"truth": truth, **means, "estimators": rows}


def shown(title: str, own: Mapping[str, Any]) -> str:
    facts = f"truth {own['truth']:.4f}, as logged {own['logged']:.4f}, effective size {own['effective_size']:.0f}"
    lines = [f"\n{title}: {facts}, no doubts told in {own['trusted']:.1%} of the logs"]
    lines += [f"{'':18s}{'bias':>10s}{'in errors':>11s}{'RMSE':>9s}{'coverage':>10s}{'error told/true':>17s}"]
    for name, row in own["estimators"].items():
        bias, errors, rmse, coverage, told = row.values()
        lines.append(f"{ESTIMATORS[name]:18s}{bias:10.4f}{errors:11.2f}{rmse:9.4f}{coverage:10.3f}{told:17.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="12 logs of 150 decisions", jobs=2)
    parser.add_argument("--logs", type=int, default=200)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--cells", type=int, default=0, help="how many logs each cell of rewards and policies has")
    parser.add_argument("--sequences", type=int, default=0, help="look at this many logs after every 100 decisions")
    given = parser.parse_args()
    logs, decisions = (12, 150) if given.quick else (given.logs, given.decisions)
    if given.cells:
        results = cells(given.cells, given.jobs)
        print()
        limit = 1 - LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / given.cells)
        worst = max(one["betting"][0] for one in results.values())
        at_most("worst share of logs that an interval misses", limit, worst)
        write_results(given.out, "off_policy_cells", {**setting(), "logs": given.cells, "results": results})
        return
    if given.sequences:
        results = watched(min(given.sequences, logs) if given.quick else given.sequences, decisions, given.jobs)
        worst = max(row["missed"] for name, row in results.items() if name.endswith("sequence"))
        print()
        at_most("share of logs that a sequence ever misses", 1 - LEVEL, worst)
        write_results(given.out, "off_policy_sequences", {**setting(), "decisions": decisions, "results": results})
        return
    digits, results = Digits.load(), dict[str, Any]()
    for logging, share in (("explores", 1), ("posterior", 4)):
        one = partial(one_log, decisions=decisions, logging=logging)
        found = list(parallel([partial(one, number) for number in range(max(2, logs // share))], jobs=given.jobs))
        for policy in POLICIES:
            own = results[f"{logging}, {policy}"] = summary([one[policy] for one in found], digits.truth(policy))
            print(shown(f"{logging}, {policy}, {len(found)} logs of {decisions} decisions", own), flush=True)
    print()
    targets = []
    for name in ESTIMATORS:
        row = results["explores, classifier"]["estimators"][name]
        targets += at_most(f"bias in standard errors, {ESTIMATORS[name]}", 2.0, abs(row["bias_in_errors"]))
        targets += at_least(f"coverage, {ESTIMATORS[name]}", 0.90, row["coverage"])
        if name != "doubly_robust":
            targets += at_most(f"coverage, {ESTIMATORS[name]}", 0.99, row["coverage"])
    write_results(given.out, "off_policy", {**setting(), "logs": logs, "decisions": decisions, "results": results})
    print(f"targets met: {sum(target.met for target in targets)} of {len(targets)}")


if __name__ == "__main__":
    main()
