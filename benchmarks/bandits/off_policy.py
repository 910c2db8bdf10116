"""Off-policy estimates against the truth: bias and coverage over many logs of an agent that learns.

    python -m benchmarks.bandits.off_policy [--quick] [--logs 200] [--decisions 1000] [--jobs 2] [--out out/bench]
    python -m benchmarks.bandits.off_policy --sequences 500 [--decisions 1000]

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
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bayesadam.bandits import Estimate, Estimates, Log, compare, evaluate, make_agent
from bayesadam.bandits.off_policy import doubly_robust_terms, mean
from bayesadam.errors import BayesAdamWarning
from benchmarks.common.harness import arguments, at_least, at_most, mean_and_error, parallel, setting, write_results

SEED = 0
COMPONENTS, FITTED = 16, 300
# Of the softmax, by policy.
SHARPNESS = {"classifier": 6.0, "one too high": 6.0, "flatter": 3.0}
LOGGING = {"explores": {"epsilon": 0.1}, "posterior": {"epsilon": 0.0}}
POLICIES = ("classifier", "one too high")
COMPARED = "classifier − flatter"
EVERY, LEARN = 100, 50
ESTIMATORS = {"ips": "IPS", "snips": "self-normalised", "doubly_robust": "doubly robust"}
LEVEL = 0.95


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
    return {policy: plain(estimates) for policy, estimates in found.items()}


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
        fixed = np.array([mean(terms[name][:n]).interval(LEVEL) for n in looks])
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
                own = [one[policy][kind] for one in found]
                missed, widths = (
                    np.mean([one["missed"] for one in own]),
                    np.mean([one["widths"] for one in own], axis=0),
                )
                results[f"{logging}, {policy}, {kind}"] = {"missed": float(missed), "widths": widths.tolist()}
                shown_widths = "".join(f"{widths[n - 1]:15.3f}" for n in looks)
                print(f"{policy:22s}{kind:12s}{missed:12.3f}{shown_widths}", flush=True)
    return results


def plain(estimates: Estimates) -> dict[str, Any]:
    each = {name: vars(getattr(estimates, name)) for name in ("logged", *ESTIMATORS)}
    return {**each, "trusted": not estimates.doubts, "effective_size": estimates.effective_size}


def summary(found: Sequence[dict[str, Any]], truth: float) -> dict[str, Any]:
    """Bias in standard errors, coverage, and the ratio of the standard errors told to the deviation of the errors."""
    rows = {}
    for name in ESTIMATORS:
        own = [Estimate(**one[name]) for one in found]
        errors = np.array([estimate.value - truth for estimate in own])
        within = [low <= truth <= high for low, high in (estimate.interval(LEVEL) for estimate in own)]
        bias, error = mean_and_error(errors.tolist())
        rows[name] = {
            "bias": bias,
            "bias_in_errors": bias / error if error else math.nan,
            "rmse": float(np.sqrt((errors**2).mean())),
            "coverage": float(np.mean(within)),
            "error_ratio": float(np.mean([estimate.error for estimate in own]) / errors.std(ddof=1)),
        }
    return {
        "truth": truth,
        "logged": float(np.mean([one["logged"]["value"] for one in found])),
        "trusted": float(np.mean([one["trusted"] for one in found])),
        "effective_size": float(np.mean([one["effective_size"] for one in found])),
        "estimators": rows,
    }


def shown(title: str, own: Mapping[str, Any]) -> str:
    head = f"{'':18s}{'bias':>10s}{'in errors':>11s}{'RMSE':>9s}{'coverage':>10s}{'error told/true':>17s}"
    facts = f"truth {own['truth']:.4f}, as logged {own['logged']:.4f}, effective size {own['effective_size']:.0f}"
    lines = [f"\n{title}: {facts}, no doubts told in {own['trusted']:.1%} of the logs", head]
    for name, row in own["estimators"].items():
        lines.append(
            f"{ESTIMATORS[name]:18s}{row['bias']:10.4f}{row['bias_in_errors']:11.2f}{row['rmse']:9.4f}{row['coverage']:10.3f}"
            f"{row['error_ratio']:17.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="12 logs of 150 decisions", jobs=2)
    parser.add_argument("--logs", type=int, default=200)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=0, help="look at this many logs after every 100 decisions")
    given = parser.parse_args()
    logs, decisions = (12, 150) if given.quick else (given.logs, given.decisions)
    if given.sequences:
        results = watched(min(given.sequences, logs) if given.quick else given.sequences, decisions, given.jobs)
        worst = max(row["missed"] for name, row in results.items() if name.endswith("sequence"))
        print()
        at_most("share of logs that a sequence ever misses", 1 - LEVEL, worst)
        write_results(given.out, "off_policy_sequences", {**setting(), "decisions": decisions, "results": results})
        return
    digits, results = Digits.load(), dict[str, Any]()
    for logging, share in (("explores", 1), ("posterior", 4)):
        calls = [
            partial(one_log, number, decisions=decisions, logging=logging) for number in range(max(2, logs // share))
        ]
        found = list(parallel(calls, jobs=given.jobs))
        for policy in POLICIES:
            own = results[f"{logging}, {policy}"] = summary([one[policy] for one in found], digits.truth(policy))
            print(shown(f"{logging}, {policy}, {len(found)} logs of {decisions} decisions", own), flush=True)
    print()
    targets = []
    for name in ESTIMATORS:
        row = results["explores, classifier"]["estimators"][name]
        targets += at_most(f"bias in standard errors, {ESTIMATORS[name]}", 2.0, abs(row["bias_in_errors"]))
        targets += at_least(f"coverage, {ESTIMATORS[name]}", 0.90, row["coverage"])
        targets += at_most(f"coverage, {ESTIMATORS[name]}", 0.99, row["coverage"])
    write_results(given.out, "off_policy", {**setting(), "logs": logs, "decisions": decisions, "results": results})
    print(f"targets met: {sum(target.met for target in targets)} of {len(targets)}")


if __name__ == "__main__":
    main()
