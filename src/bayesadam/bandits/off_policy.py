"""What another policy would have earned, from the log of the one that acted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bayesadam._warnings import warn
from bayesadam.bandits.agent import DRAWS, Agent
from bayesadam.bandits.learner import with_constant
from bayesadam.bandits.linear import LinearPosterior, LinearSettings, Statistics
from bayesadam.bandits.log import Log, read_log
from bayesadam.errors import MatchError, OverlapWarning, SettingError

Numbers = npt.NDArray[np.float64]
Policy = Callable[[npt.NDArray[np.float32]], Any]

# The model of the rewards is refitted whenever its data have grown by this factor.
_GROWTH = 1.1
# Its prior, in units of the rewards' standard deviation: that of the `linear` agent's weights, and a noise of 1 that
# counts as two observations.
_PRIOR = {"precision": LinearSettings.precision, "shape": 2.0, "scale": 1.0}


@dataclass(frozen=True)
class Estimate:
    """A mean reward, and its standard error."""

    value: float
    error: float

    def interval(self, level: float) -> tuple[float, float]:
        """The normal one, value ± z error."""
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.error
        return self.value - reach, self.value + reach


def mean(terms: Numbers) -> Estimate:
    """Of independent terms, or of martingale differences around one mean; s/√n is its standard error."""
    error = float(terms.std(ddof=1)) / math.sqrt(len(terms)) if len(terms) > 1 else math.nan
    return Estimate(float(terms.mean()), error)


def self_normalised(rewards: Numbers, weights: Numbers) -> Estimate:
    """SNIPS, v = Σ w r/Σ w, with the standard error of a ratio by the delta method, √(Σ w² (r − v)²)/Σ w.

    Its bias is of the order 1/n; unlike IPS it does not change when a constant is added to all rewards.
    """
    total = weights.sum()
    if not total:
        return Estimate(math.nan, math.nan)
    value = (weights * rewards).sum() / total
    return Estimate(float(value), float(np.sqrt((weights**2 * (rewards - value) ** 2).sum()) / total))


class RewardModel:
    """q̂(x, a), Bayesian linear regression per arm around the mean reward; arms without data have that mean."""

    def __init__(self, log: Log) -> None:
        self._log, self._end = log, 0
        self._data = Statistics.zeros(1, log.n_arms, log.contexts.shape[1] + 1, torch.device("cpu"))

    def fit(self, end: int) -> RewardModel:
        """Fit it to the rewarded rows of the log before `end`, which may only grow; returns the model."""
        log, rows = self._log, self._end + np.flatnonzero(np.isfinite(self._log.rewards[self._end : end]))
        if len(rows):
            arms, rewards = (torch.from_numpy(part[rows])[None] for part in (log.arms, log.rewards))
            self._data.add(arms, _features(log.contexts[rows]), rewards, torch.ones_like(rewards))
        self._end, data = end, self._data
        count = float(data.gram[..., -1, -1].sum()) or 1.0
        self._shift = float(data.cross[..., -1].sum()) / count
        self._scale = math.sqrt(max(float(data.squares.sum()) / count - self._shift**2, 0.0)) or 1.0
        units = (data.squares.new_full((1, 1), value) for value in (self._shift, self._scale))
        self._posterior = LinearPosterior.of(data.standardised(*units), **_PRIOR)
        return self

    def predict(self, contexts: npt.NDArray[np.float32]) -> Numbers:
        """The mean rewards of every arm, (n, arms)."""
        found = _features(contexts)[0] @ self._posterior.mean[0, :, 0].mT
        return found.numpy() * self._scale + self._shift

    def direct(self, contexts: npt.NDArray[np.float32], probabilities: Numbers) -> Estimate:
        """The direct method, (1/n) Σ_i v̂(x_i): as good as the model, and no better with more decisions.

        Its variance is that of v̂ over the contexts, plus that of the model: Σ_a z_aᵀ Cov(β_a) z_a with
        z_a = (1/n) Σ_i π(a | x_i) x_i and Cov(β) = s² b/(a − 1) C, s the rewards' scale. Errors of the model's form are
        not in it.
        """
        over_contexts = mean((probabilities * self.predict(contexts)).sum(axis=1))
        z, own = torch.from_numpy(probabilities).mT @ _features(contexts)[0] / len(contexts), self._posterior
        widths = torch.einsum("af,afg,ag->a", z, own.covariance[0], z)
        of_model = self._scale**2 * float((own.scale[0, :, 0] / (own.shape[0] - 1) * widths).sum())
        return Estimate(over_contexts.value, math.sqrt(over_contexts.error**2 + of_model))


def _features(contexts: npt.NDArray[np.float32]) -> torch.Tensor:
    return with_constant(torch.from_numpy(contexts)[None])


def predicted_before(log: Log) -> Numbers:
    """q̂(x, ·) of every row from a model of earlier rows only, (n, arms).

    Later rows would bias it: an agent that learns chooses by the rewards it had, so its later choices tell of this
    reward. The model is refitted whenever its data have grown by a tenth.
    """
    model, found, first = RewardModel(log), np.zeros((len(log), log.n_arms)), 0
    while first < len(log):
        last = max(first + 1, math.ceil(_GROWTH * first))
        found[first:last] = model.fit(first).predict(log.contexts[first:last])
        first = last
    return found


@dataclass(frozen=True)
class Estimates:
    """The mean reward that a policy would have had on a log's contexts; it prints as a table.

    With weights w = π(a | x)/p of the decisions, a model q̂(x, a) of the rewards, and v̂(x) = Σ_a π(a | x) q̂(x, a):

    Attributes:
        logged: of the policy that wrote the log.
        direct: by a linear model of the rewards alone, see `RewardModel.direct`.
        ips: (1/n) Σ w r, unbiased where the log could choose whatever the policy does. Given all decisions before it,
            each term's mean is the policy's value: so, too, for the log of an agent that learns.
        snips: Σ w r/Σ w, see `self_normalised`.
        doubly_robust: the one to use: (1/n) Σ [v̂(x) + w (r − q̂(x, a))]. Unbiased as IPS is, whatever the model, which
            is fitted to earlier decisions alone; the better the model, the smaller the variance.
        decisions: how many were used; `left_out` by reason.
        effective_size: (Σ w)²/Σ w²: this many decisions of the policy's own would be as informative.
        impossible: the share of the policy's probability on arms that the log could not choose.
        doubts: why all but the direct method cannot be trusted; empty where they can.
    """

    logged: Estimate
    direct: Estimate
    ips: Estimate
    snips: Estimate
    doubly_robust: Estimate
    level: float
    decisions: int
    left_out: Mapping[str, int]
    effective_size: float
    impossible: float
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        rows = {
            "as logged": self.logged,
            "direct method": self.direct,
            "IPS": self.ips,
            "self-normalised IPS": self.snips,
            "doubly robust": self.doubly_robust,
        }
        lines = [f"{'':20s}{'value':>10s}{'std. error':>12s}  {100 * self.level:g} % interval"]
        for name, found in rows.items():
            low, high = found.interval(self.level)
            lines.append(f"{name:20s}{found.value:10.4g}{found.error:12.2g}  {low:.4g} to {high:.4g}")
        lines.append(f"{self.decisions} decisions; left out: {_counts(self.left_out)}")
        lines.append(f"effective sample size {self.effective_size:.4g}; on impossible arms {self.impossible:.2%}")
        return "\n".join(lines + [f"not to be trusted: {doubt}" for doubt in self.doubts])


def _counts(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "none"


def evaluate(
    log: Log | str | os.PathLike[str], policy: Agent | Policy, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Estimates:
    """What a policy would have earned in place of the one that wrote a log, by five estimators.

    >>> rng = np.random.default_rng(0)
    >>> arms = rng.integers(2, size=400)
    >>> log = Log.of(contexts=rng.normal(size=(400, 1)), arms=arms, probabilities=np.full(400, 0.5), rewards=arms + 0.0)
    >>> always_one = evaluate(log, lambda contexts: np.ones(len(contexts), int))
    >>> low, high = always_one.doubly_robust.interval(0.95)
    >>> bool(low <= 1 <= high), always_one.doubts
    (True, ())

    The decisions with a probability and a reward are used, but for arms that were tried in turn. Rewards must be
    missing at random: given the context and the arm, whether one comes must not depend on how large it is. Contexts are
    taken as independent draws, and rewards as not drifting. The intervals, which are normal, do not hold where an
    `OverlapWarning` comes: where the policy chooses what the log could not, or few decisions have most of the weight.

    Args:
        log: a path, or the result of `read_log` or `Log.of`.
        policy: an agent as it is now, which chooses among the arms of each decision and learns nothing; or a function
            from contexts (n, features) to probabilities (n, arms), or to arms (n,). It must not have learnt from this
            log.
        level: of the intervals.
        draws: from an agent's posterior for each context. Few make the estimates less precise, not biased.
    """
    if not 0 < level < 1:
        raise SettingError(f"level must lie between 0 and 1, got {level!r}")
    log = log if isinstance(log, Log) else read_log(log)
    known, paid = np.isfinite(log.probabilities), np.isfinite(log.rewards)
    used = np.flatnonzero(known & paid & ~log.tried)
    left_out = {
        "without a reward": int((known & ~paid).sum()),
        "tried in turn": int((paid & log.tried).sum()),
        "without a probability": int((~known).sum()),
    }
    if len(used) < 2:
        raise MatchError(f"the log has {len(used)} decisions to use, too few; left out: {_counts(left_out)}")
    contexts, arms, rewards, allowed = log.contexts[used], log.arms[used], log.rewards[used], log.allowed[used]
    if isinstance(policy, Agent):
        # The agent is offered the arms of the log; arms of its own that the log does not have were not on offer.
        both = min(log.n_arms, policy.n_arms)
        mask, shares = np.zeros((len(used), policy.n_arms), bool), np.zeros(allowed.shape)
        mask[:, :both] = allowed[:, :both]
        shares[:, :both] = policy.probabilities(contexts, allowed=mask, draws=draws, seed=seed)[:, :both]
    else:
        shares = _checked_probabilities(policy(contexts), (len(used), log.n_arms))
    rows, n = np.arange(len(used)), len(used)
    weights, predicted = shares[rows, arms] / log.probabilities[used], predicted_before(log)[used]
    total, weight, never = weights.sum(), mean(weights), np.bincount(arms, minlength=log.n_arms) == 0
    size = float(total**2 / (weights**2).sum()) if total else 0.0
    largest = float(weights.max() / total) if total else 1.0
    impossible, unseen = float(shares[~log.possible[used]].sum() / n), float(shares[:, never].sum() / n)
    on = "of the policy's probability is on arms that the log"
    rarely = "some arms are too seldom chosen to be seen, or the probabilities in the log are wrong"
    reasons = {
        f"the effective sample size is {size:.3g}, below 30": size < 30,
        f"one decision has {largest:.0%} of all the weight": largest > 0.1,
        f"{impossible:.1%} {on} could not choose": impossible > 0.01,
        f"{unseen:.1%} {on} never chose": unseen > 0.01,
        f"the mean weight is {weight.value:.3g} and not {1 - impossible:.3g}: {rarely}": (
            abs(weight.value - (1 - impossible)) > 4 * weight.error + 1e-9
        ),
        "the agent has learnt from this very log, which favours it": (
            isinstance(policy, Agent) and policy.log_id is not None and policy.log_id == log.id
        ),
    }
    doubts = tuple(reason for reason, holds in reasons.items() if holds)
    if doubts:
        warn(f"off-policy estimates cannot be trusted: {'; '.join(doubts)}", OverlapWarning)
    return Estimates(
        logged=mean(rewards),
        direct=RewardModel(log).fit(len(log)).direct(contexts, shares),
        ips=mean(weights * rewards),
        snips=self_normalised(rewards, weights),
        doubly_robust=mean((shares * predicted).sum(axis=1) + weights * (rewards - predicted[rows, arms])),
        level=level,
        decisions=n,
        left_out=left_out,
        effective_size=size,
        impossible=impossible,
        doubts=doubts,
    )


def _checked_probabilities(given: Any, shape: tuple[int, int]) -> Numbers:
    found = np.asarray(given)
    if found.shape == shape[:1] and np.issubdtype(found.dtype, np.integer):
        found = found[:, None] == np.arange(shape[1])
    if found.shape != shape:
        raise MatchError(f"a policy gives probabilities of shape {shape}, or {shape[0]} arms; got {found.shape}")
    shares = found.astype(np.float64)
    wrong = ~((shares >= 0).all(axis=1) & np.isclose(shares.sum(axis=1), 1, atol=1e-4))
    if wrong.any():
        said = f"those of row {int(wrong.argmax())} do not, or are of an arm that the log does not have"
        raise MatchError(f"a policy's probabilities are at least 0 and sum to 1, and {said}")
    return shares
