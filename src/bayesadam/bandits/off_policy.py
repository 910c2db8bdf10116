"""What another policy would have earned, from the log of the one that acted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from bayesadam._checks import count
from bayesadam._warnings import warn
from bayesadam.bandits.agent import Agent
from bayesadam.bandits.linear import Statistics, with_constant
from bayesadam.bandits.log import Log, read_log
from bayesadam.bandits.settings import LinearSettings
from bayesadam.errors import BayesAdamWarning, MatchError
from bayesadam.likelihoods.conformal import check_level

Numbers = npt.NDArray[np.float64]
Policy = Callable[[npt.NDArray[np.float32]], Any]

# The model of the rewards is refitted whenever its data have grown by this factor.
_GROWTH = 1.1
_LEVEL = 0.95
# The bets λ of a confidence sequence: those near √(2 log(1/risk)/(n variance)) win.
_BETS = 4.0 ** np.arange(-7, 2)
# How far below 0 a term of a confidence sequence may lie, k, in units of the rewards' range.
_DEPTH = 4.0
_HALVINGS = 30


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


def predicted_before(log: Log) -> Numbers:
    """q̂(x, ·) of every row, (n, arms), by ridge regression per arm around the mean reward, from earlier rows only.

    Later rows would bias it: an agent that learns chooses by the rewards it had, so its later choices tell of this
    reward. The model is refitted whenever its data have grown by a tenth.
    """
    x, known = with_constant(log.contexts), np.isfinite(log.rewards)
    data = Statistics.zeros(log.n_arms, x.shape[1])
    ridge = LinearSettings.precision * np.eye(x.shape[1])
    predicted, fitted, first = np.zeros((len(log), log.n_arms)), 0, 0
    while first < len(log):
        rows = fitted + np.flatnonzero(known[fitted:first])
        data.add(log.arms[rows], x[rows], log.rewards[rows], np.ones(len(rows)))
        shift = data.cross[:, -1].sum() / max(data.counts.sum(), 1)
        slopes = np.linalg.solve(data.gram + ridge, (data.cross - shift * data.gram[..., -1])[..., None])
        fitted, last = first, max(first + 1, math.ceil(_GROWTH * first))
        predicted[first:last] = x[first:last] @ slopes[..., 0].T + shift
        first = last
    return predicted


def lower_bounds(terms: Numbers, risk: float) -> Numbers:
    """Bounds below the mean of μ_i = E[X_i | all before it], one after each of the terms X_i ≥ 0.

    All of them hold together with a probability of at least 1 − risk, however large single terms are, also where the
    μ_i differ. For every λ ≥ 0 the product of (1 + λ X_i)/(1 + λ μ_i) is a martingale that starts at 1 and is never
    negative; so is its mean over several λ. By Ville's inequality that ever reaches 1/risk with a probability of at
    most `risk`. The logarithm is concave, so Σ log(1 + λ μ_i) ≤ n log(1 + λ μ) with the mean μ of the μ_i. Until 1/risk
    is reached, μ is therefore above the solution of

        mean over λ of exp(Σ log(1 + λ X_i) − n log(1 + λ μ)) = 1/risk,

    whose left side falls with μ and is at most 1 where μ is the mean of the X_i. Without a solution the bound is 0.
    """
    counts, bets = np.arange(1, len(terms) + 1), _BETS[:, None]
    grown = np.log1p(bets * terms).cumsum(axis=1)
    low, high = np.zeros(len(terms)), terms.cumsum() / counts
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        wealth = np.logaddexp.reduce(grown - counts * np.log1p(bets * middle)) - math.log(len(_BETS))
        low, high = np.where(wealth > -math.log(risk), (middle, high), (low, middle))
    return low


@dataclass(frozen=True, eq=False)
class ConfidenceSequence:
    """An interval after each decision; with the probability asked for, every one of them holds.

    Attributes:
        decisions: their ids, (n,).
        lower, upper: (n,) each, of the mean over the decisions so far.
    """

    decisions: npt.NDArray[np.int64]
    lower: Numbers
    upper: Numbers


@dataclass(frozen=True, eq=False)
class Judged:
    """The n decisions of a log that are used, what a model predicts for them, and how many were left out."""

    log: Log
    predicted: Numbers
    left_out: Mapping[str, int]

    @classmethod
    def of(cls, log: Log | str | os.PathLike[str], since: int | None, until: int | None) -> Judged:
        """See `evaluate`."""
        log = log if isinstance(log, Log) else read_log(log)
        for name, end in (("since", since), ("until", until)):
            if end is not None:
                count(name, end, "a decision's number: logs have no times", least=0)
        # An update belongs to the decision before it.
        number = np.maximum.accumulate(log.ids)
        inside = (number >= (-1 if since is None else since)) & (number < (math.inf if until is None else until))
        known, paid = np.isfinite(log.probabilities), np.isfinite(log.rewards)
        used = np.flatnonzero(inside & known & paid & ~log.tried)
        left_out = {
            "without a reward": int((inside & known & ~paid).sum()),
            "tried in turn": int((inside & paid & log.tried).sum()),
            "without a probability": int((inside & ~known).sum()),
        }
        if len(used) < 2:
            window = f"since={since}, until={until}"
            raise MatchError(f"the log has {len(used)} decisions to use ({window}), too few; left out: {left_out}")
        rows = {name: part[used] for name, part in vars(log).items() if name != "id"}
        return cls(Log(**rows, id=log.id), predicted_before(log)[used], left_out)

    def shares(self, policy: Agent | Policy) -> Numbers:
        """The probabilities with which a policy chooses, (n, arms)."""
        log = self.log
        allowed = log.allowed
        if isinstance(policy, Agent):
            # Arms of the agent that the log does not have were not on offer.
            both = min(log.n_arms, policy.n_arms)
            mask, shares = np.zeros((len(log), policy.n_arms), bool), np.zeros(allowed.shape)
            mask[:, :both] = allowed[:, :both]
            shares[:, :both] = policy.probabilities(log.contexts, allowed=mask)[:, :both]
            return shares
        shares = _checked_probabilities(policy(log.contexts), allowed.shape)
        # Where nothing is left, all of it stays, to be told as impossible.
        left = shares * (allowed | ~(shares * allowed).any(axis=1, keepdims=True))
        factor: Numbers = shares.sum(axis=1) / left.sum(axis=1)
        return factor[:, None] * left

    def doubly_robust(self, shares: Numbers) -> Numbers:
        """v̂(x) + w (r − q̂(x, a)), (n,); linear in the shares."""
        chosen = np.arange(len(self.log)), self.log.arms
        expected: Numbers = (shares * self.predicted).sum(axis=1)
        return expected + shares[chosen] / self.log.probabilities * (self.log.rewards - self.predicted[chosen])

    def terms(self, gains: Numbers, losses: Numbers, low: float, high: float, depth: float) -> Numbers:
        """X ≥ −depth, (n,), whose mean is that of Σ_a π(a | x) r(a) + ρ(a | x) (1 − r(a)), with rewards from 0 to 1.

        π are `gains` and ρ `losses`, both (n, arms). For g(a, r) = π(a | x) r + ρ(a | x) (1 − r), the mean of
        g(a, r)/p(a | x) is the one wanted. As in a doubly robust estimate, what the model predicts of it is replaced by
        its exact mean (Waudby-Smith et al., "Anytime-valid off-policy inference for contextual bandits"), but only so
        far as the bound allows, c(a) = min(g(a, q̂), depth p(a | x)):

            X = (g(a, r) − c(a))/p(a | x) + Σ_b c(b).

        Where the log could not choose what π or ρ do, the mean is too small.
        """
        log, chosen = self.log, (np.arange(len(self.log)), self.log.arms)
        rewards, predicted = ((part - low) / (high - low) for part in (log.rewards, self.predicted.clip(low, high)))
        told = np.minimum(gains * predicted + losses * (1 - predicted), depth * log.shares)
        paid = gains[chosen] * rewards + losses[chosen] * (1 - rewards)
        expected: Numbers = told.sum(axis=1)
        return (paid - told[chosen]) / log.probabilities + expected

    def sequence(
        self, shares: Numbers, other: Numbers | None, level: float, reward_range: tuple[float, float]
    ) -> ConfidenceSequence:
        """Of the mean reward by `shares`, less that by `other`, from the `lower_bounds` of terms that are at least 0.

        With rewards from 0 to 1, the mean of the terms with π = `shares` and ρ = `other` is the difference plus 1, and
        that with π and ρ exchanged is 1 less the difference. With ρ = 0 they are the value and 1 less the value.
        Terms whose mean is too small leave the bounds true.
        """
        check_level(level)
        low, high = (float(end) for end in reward_range)
        least, most = self.log.rewards.min(), self.log.rewards.max()
        if not (-math.inf < low <= least <= most <= high < math.inf and low < high):
            told = f"here {least:g} to {most:g}; got {reward_range!r}"
            raise MatchError(f"reward_range must be (low, high) around all rewards, {told}")
        # Without the probabilities of all arms, a prediction's mean is not known.
        depth = _DEPTH if self.log.shares.any() else 0.0
        rival, floor, origin = (np.zeros_like(shares), 0, low) if other is None else (other, -1, 0)
        above, below = (
            lower_bounds(self.terms(*pair, low, high, depth) + depth, (1 - level) / 2) - depth
            for pair in ((shares, rival), (rival, shares))
        )
        lower, upper = (origin + (high - low) * np.clip(one, floor, 1) for one in (above + floor, 1 - below))
        return ConfidenceSequence(self.log.ids, lower, upper)


@dataclass(frozen=True)
class Estimates:
    """The mean reward that a policy would have had on a log's contexts; it prints as a table.

    With weights w = π(a | x)/p of the decisions, a model q̂(x, a) of the rewards, and v̂(x) = Σ_a π(a | x) q̂(x, a):

    Attributes:
        logged: of the policy that wrote the log.
        ips: (1/n) Σ w r, unbiased where the log could choose whatever the policy does. Given all decisions before it,
            each term's mean is the policy's value: so, too, for the log of an agent that learns.
        snips: Σ w r/Σ w, see `self_normalised`.
        doubly_robust: the one to use: (1/n) Σ [v̂(x) + w (r − q̂(x, a))]. Unbiased as IPS is, whatever the model, which
            is fitted to earlier decisions alone; the better the model, the smaller the variance.
        decisions: how many were used; `left_out` by reason.
        effective_size: (Σ w)²/Σ w²: this many decisions of the policy's own would be as informative.
        impossible: the share of the policy's probability on arms that the log could not choose.
        doubts: why the estimates cannot be trusted; empty where they can.
        judged: the decisions that were used.
        shares: the policy's probabilities, (decisions, arms).
    """

    logged: Estimate
    ips: Estimate
    snips: Estimate
    doubly_robust: Estimate
    decisions: int
    left_out: Mapping[str, int]
    effective_size: float
    impossible: float
    doubts: tuple[str, ...]
    judged: Judged = field(repr=False, compare=False)
    shares: Numbers = field(repr=False, compare=False)

    def sequence(self, level: float, *, reward_range: tuple[float, float]) -> ConfidenceSequence:
        """Intervals that hold at any time: look after every decision, and stop when you like.

        With a probability of at least `level`, all of them hold: also of an agent that learns, after few decisions, and
        where the log could not choose what the policy does. The logged probabilities must be right, and all rewards
        that can come lie in `reward_range`. Where contexts or rewards drift, each interval is for the mean over the
        decisions so far. The derivation is at `lower_bounds` and `Judged.terms`.

        >>> rng = np.random.default_rng(0)
        >>> arms = rng.integers(2, size=400)
        >>> log = Log.of(contexts=np.zeros((400, 1)), arms=arms, probabilities=np.full((400, 2), 0.5), rewards=arms)
        >>> found = evaluate(log, lambda contexts: np.ones(len(contexts), int)).sequence(0.95, reward_range=(0, 1))
        >>> bool(found.lower[-1] > 0.9 and (found.upper == 1).all())
        True
        """
        return self.judged.sequence(self.shares, None, level, reward_range)

    def __str__(self) -> str:
        rows = {"as logged": self.logged, "IPS": self.ips, "self-normalised IPS": self.snips}
        rows["doubly robust"] = self.doubly_robust
        lines = _table(rows)
        lines.append(f"{self.decisions} decisions; left out: {dict(self.left_out)}")
        lines.append(f"effective sample size {self.effective_size:.4g}; on impossible arms {self.impossible:.2%}")
        return "\n".join(lines + [f"not to be trusted: {doubt}" for doubt in self.doubts])


def _table(rows: Mapping[str, Estimate]) -> list[str]:
    lines = [f"{'':20s}{'value':>10s}{'std. error':>12s}  {_LEVEL:.0%} interval"]
    for name, found in rows.items():
        low, high = found.interval(_LEVEL)
        lines.append(f"{name:20s}{found.value:10.4g}{found.error:12.2g}  {low:.4g} to {high:.4g}")
    return lines


@dataclass(frozen=True)
class Comparison:
    """Two policies on one log; it prints as a table.

    Attributes:
        first, second: their estimates.
        difference: the first's doubly robust value less the second's. Its standard error is that of the decisions'
            differences: small where the policies agree.
    """

    first: Estimates
    second: Estimates
    difference: Estimate

    def sequence(self, level: float, *, reward_range: tuple[float, float]) -> ConfidenceSequence:
        """Of the difference, as `Estimates.sequence`: once 0 is outside, one policy is the better."""
        return self.first.judged.sequence(self.first.shares, self.second.shares, level, reward_range)

    def __str__(self) -> str:
        both = {"first": self.first, "second": self.second}
        rows = {name: one.doubly_robust for name, one in both.items()}
        doubts = [f"not to be trusted: {name}: {doubt}" for name, one in both.items() for doubt in one.doubts]
        return "\n".join([*_table(rows | {"difference": self.difference}), *doubts])


def evaluate(
    log: Log | str | os.PathLike[str],
    policy: Agent | Policy,
    *,
    since: int | None = None,
    until: int | None = None,
) -> Estimates:
    """What a policy would have earned in place of the one that wrote a log.

    >>> rng = np.random.default_rng(0)
    >>> arms = rng.integers(2, size=400)
    >>> log = Log.of(contexts=rng.normal(size=(400, 1)), arms=arms, probabilities=np.full(400, 0.5), rewards=arms + 0.0)
    >>> always_one = evaluate(log, lambda contexts: np.ones(len(contexts), int))
    >>> low, high = always_one.doubly_robust.interval(0.95)
    >>> bool(low <= 1 <= high), always_one.doubts
    (True, ())

    The decisions with a probability and a reward are used, but for arms that were tried in turn. Rewards must be
    missing at random: whether one comes must depend neither on the arm nor on how large it is. Contexts are taken as
    independent draws, and rewards as not drifting. The intervals, which are normal, do not hold where an
    `BayesAdamWarning` comes: where the policy chooses what the log could not, or few decisions have most of the weight.
    They are for one look at the end: `Estimates.sequence` is for many.

    Args:
        log: a path, or the result of `read_log` or `Log.of`.
        policy: an agent as it is now, which learns nothing; or a function from contexts (n, features) to probabilities
            (n, arms), or to arms (n,). It must not have learnt from the decisions that are used. It chooses among the
            arms that were on offer: probabilities are divided by their sum over these. Where that is 0, they stay as
            they are, and the estimates are doubted.
        since: the first decision to use, by its id, as in `Decision.id`; in logs by `Log.of` its row. Earlier ones
            still serve the model of the rewards. Logs have no times.
        until: the first decision not to use.
    """
    return _estimates(Judged.of(log, since, until), policy)


def compare(
    log: Log | str | os.PathLike[str],
    first: Agent | Policy,
    second: Agent | Policy,
    *,
    since: int | None = None,
    until: int | None = None,
) -> Comparison:
    """How much more the first of two policies would have earned; the arguments are those of `evaluate`.

    >>> rng = np.random.default_rng(0)
    >>> arms = rng.integers(2, size=400)
    >>> log = Log.of(contexts=np.zeros((400, 1)), arms=arms, probabilities=np.full((400, 2), 0.5), rewards=arms)
    >>> one, zero = (lambda contexts, arm=arm: np.full(len(contexts), arm) for arm in (1, 0))
    >>> round(compare(log, one, zero).difference.value, 1)
    1.0
    """
    judged = Judged.of(log, since, until)
    one, other = (_estimates(judged, policy) for policy in (first, second))
    return Comparison(one, other, mean(judged.doubly_robust(one.shares - other.shares)))


def _estimates(judged: Judged, policy: Agent | Policy) -> Estimates:
    log, shares = judged.log, judged.shares(policy)
    n, weights = len(log), shares[np.arange(len(log)), log.arms] / log.probabilities
    total, weight, never = weights.sum(), mean(weights), np.bincount(log.arms, minlength=log.n_arms) == 0
    size, largest = (float(total**2 / (weights**2).sum()), float(weights.max() / total)) if total else (0.0, 1.0)
    impossible, unseen = float(shares[~log.possible].sum() / n), float(shares[:, never].sum() / n)
    stranded = int(((shares * log.allowed).sum(axis=1) == 0).sum())
    off = abs(weight.value - (1 - impossible)) > 4 * weight.error + 1e-9
    learnt = isinstance(policy, Agent) and policy.log_id is not None and policy.log_id == log.id
    on = "of the policy's probability is on arms that the log"
    reasons = {
        f"in {stranded} decisions the policy chooses none of the arms that were on offer": stranded > 0,
        f"the effective sample size is {size:.3g}, below 30": size < 30,
        f"one decision has {largest:.0%} of all the weight": largest > 0.1,
        f"{impossible:.1%} {on} could not choose": impossible > 0.01,
        f"{unseen:.1%} {on} never chose": unseen > 0.01,
        f"the mean weight is {weight.value:.3g} and not {1 - impossible:.3g}: are the logged probabilities right?": off,
        "the agent has learnt from this very log, which favours it": learnt,
    }
    doubts = tuple(reason for reason, holds in reasons.items() if holds)
    if doubts:
        warn(f"off-policy estimates cannot be trusted: {'; '.join(doubts)}", BayesAdamWarning)
    return Estimates(
        logged=mean(log.rewards),
        ips=mean(weights * log.rewards),
        snips=self_normalised(log.rewards, weights),
        doubly_robust=mean(judged.doubly_robust(shares)),
        decisions=n,
        left_out=judged.left_out,
        effective_size=size,
        impossible=impossible,
        doubts=doubts,
        judged=judged,
        shares=shares,
    )


def _checked_probabilities(given: Any, shape: tuple[int, int]) -> Numbers:
    found = np.asarray(given)
    if found.shape == shape[:1] and np.issubdtype(found.dtype, np.integer):
        found = found[:, None] == np.arange(shape[1])
    if found.shape != shape:
        raise MatchError(f"a policy gives probabilities of shape {shape}, or {shape[0]} arms; got {found.shape}")
    shares = found.astype(np.float64)
    if not ((shares >= 0).all() and np.allclose(shares.sum(axis=1), 1, atol=1e-4)):
        raise MatchError("a policy's probabilities must be at least 0 and sum to 1, over the arms that the log has")
    return shares
