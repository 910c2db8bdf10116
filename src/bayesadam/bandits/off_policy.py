"""What another policy would have earned, from the log of the one that acted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from bayesadam._checks import count
from bayesadam._warnings import warn
from bayesadam.bandits.agent import Agent
from bayesadam.bandits.linear import Statistics, with_constant
from bayesadam.bandits.log import AnyPath, Log, read_log
from bayesadam.bandits.observations import Contexts, Floats, Indices
from bayesadam.errors import MatchError
from bayesadam.likelihoods.conformal import check_level

Policy = Callable[[Contexts], npt.ArrayLike]
Range = tuple[float, float]

# The model of the rewards is refitted whenever its data have grown by this factor.
_GROWTH, _RIDGE = 1.1, 0.25
_LEVEL = 0.95
# The bets λ of a confidence sequence: those near √(2 log(1/risk)/(n variance)) win.
_BETS = 4.0 ** np.arange(-7, 2)
# How far below 0 a term of a confidence sequence may lie, k, in units of the rewards' range.
_DEPTH = 4.0
_HALVINGS = 30
# Of an interval: the depths k to choose from, and the largest bet in units of the one that could lose everything.
_DEPTHS, _BOLDEST = np.array([0.0, 0.5, 1, 2, 4, 8, 16]), 0.75
# Without at least so many rewards that differ from the usual ones, an estimate is doubtful.
_FEWEST_EVENTS = 4
# Where a larger share of the decisions has no reward, there is no interval; and where all rewards are equal.
_MOST_UNREWARDED, _MOST_BESIDE_EQUAL = 0.2, 0.01


def _unknown(level: float) -> Range:
    return math.nan, math.nan


@dataclass(frozen=True)
class Estimate:
    """A mean reward, and its standard error."""

    value: float
    error: float
    bounds: Callable[[float], Range] = field(default=_unknown, repr=False, compare=False)

    def interval(self, level: float) -> Range:
        """What holds the mean with a probability of at least `level`; NaN where nothing can be said.

        Of a policy's value it is the same for all its estimators, from the bounds of the doubly robust one: see
        `Estimates`.
        """
        check_level(level)
        return self.bounds(level)


def mean(terms: Floats) -> Estimate:
    """Of independent terms, or of martingale differences around one mean; s/√n is its standard error."""
    error = float(terms.std(ddof=1)) / math.sqrt(len(terms)) if len(terms) > 1 else math.nan
    return Estimate(float(terms.mean()), error)


def predicted_before(log: Log) -> Floats:
    """q̂(x, ·) of every row, (n, arms), by ridge regression per arm around the mean reward, from earlier rows only.

    Later rows would bias it: an agent that learns chooses by the rewards it had, so its later choices tell of this
    reward. The model is refitted whenever its data have grown by a tenth.
    """
    x, paid = with_constant(log.contexts), np.isfinite(log.rewards)
    data = Statistics.zeros(log.n_arms, x.shape[1])
    ridge = _RIDGE * np.eye(x.shape[1])
    predicted, fitted, first = np.zeros((len(log), log.n_arms)), 0, 0
    while first < len(log):
        rows = fitted + np.flatnonzero(paid[fitted:first])
        data.add(log.arms[rows], x[rows], log.rewards[rows], np.ones(len(rows)))
        shift = data.cross[:, -1].sum() / max(data.counts.sum(), 1)
        slopes = np.linalg.solve(data.gram + ridge, (data.cross - shift * data.gram[..., -1])[..., None])
        fitted, last = first, max(first + 1, math.ceil(_GROWTH * first))
        predicted[first:last] = x[first:last] @ slopes[..., 0].T + shift
        first = last
    return predicted


def lower_bounds(terms: Floats, risk: float) -> Floats:
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


def bound_at_end(terms: Floats, depths: Floats, risk: float) -> float:
    """A bound below the mean μ ≥ 0 of terms that holds with a probability of at least 1 − risk, for one look.

    `terms` are (k, n), in rows of terms X ≥ −d with the same mean and the `depths` d. Given all before it each X_i has
    the mean μ, so that for any bet λ_i ≥ 0 and any row, chosen by the terms before i alone, the product of
    (1 + λ_i (X_i + d_i))/(1 + λ_i (μ + d_i)) is a martingale that starts at 1 and is never negative: it ever reaches
    1/risk with a probability of at most `risk` (Waudby-Smith and Ramdas, "Estimating means of bounded random variables
    by betting"). It falls with μ; the bound is where it has just reached that. Here λ/(1 + λ (m + d)) is
    e = √(2 log(1/risk)/(n s²)) with the mean m and the variance s² of the terms before, at most ¾/(m + d), and the row
    the one that promises the smallest error, log(1/risk)/(n e) + e s²/2.
    """
    n, goal = terms.shape[1], -math.log(risk)
    # Those before, of one more with the variance ¼.
    sums, squares = (np.pad(part.cumsum(axis=1)[:, :-1], ((0, 0), (1, 0))) for part in (terms, terms**2))
    middle = sums / np.maximum(np.arange(n), 1)
    variance = (np.maximum(squares - sums * middle, 0) + 0.25) / np.arange(1, n + 1)
    reach = depths[:, None] + middle.clip(0, 1)
    bets = np.minimum(np.sqrt(2 * goal / (n * variance)), _BOLDEST / np.maximum(reach, 1e-9))
    row = (goal / (n * bets) + bets * variance / 2).argmin(axis=0), np.arange(n)
    bets, depth = bets[row] / (1 - bets[row] * reach[row]), depths[row[0]]
    won, low, high = np.log1p(bets * (terms[row] + depth)), 0.0, 2.0
    for _ in range(_HALVINGS):
        value = (low + high) / 2
        reached = (won - np.log1p(bets * (value + depth))).cumsum().max() >= goal
        low, high = (value, high) if reached else (low, value)
    return low


def doubly_robust_terms(log: Log, predicted: Floats, shares: Floats) -> Floats:
    """v̂(x) + w (r − q̂(x, a)), (n,); linear in the shares."""
    chosen = np.arange(len(log)), log.arms
    expected: Floats = (shares * predicted).sum(axis=1)
    return expected + shares[chosen] / log.probabilities * (log.rewards - predicted[chosen])


def sequence_terms(log: Log, predicted: Floats, gains: Floats, losses: Floats, ends: Range, depth: float) -> Floats:
    """X ≥ −depth, (n,), whose mean is that of Σ_a π(a | x) r(a) + ρ(a | x) (1 − r(a)), with rewards from 0 to 1.

    π are `gains` and ρ `losses`, both (n, arms). For g(a, r) = π(a | x) r + ρ(a | x) (1 − r), the mean of
    g(a, r)/p(a | x) is the one wanted. As in a doubly robust estimate, what the model predicts of it is replaced by its
    exact mean (Waudby-Smith et al., "Anytime-valid off-policy inference for contextual bandits"), but only so far as
    the bound allows, c(a) = min(g(a, q̂), depth p(a | x)):

        X = (g(a, r) − c(a))/p(a | x) + Σ_b c(b).

    Where the log could not choose what π or ρ do, the mean is too small.
    """
    low, high = ends
    chosen = np.arange(len(log)), log.arms
    rewards, predicted = ((part - low) / (high - low) for part in (log.rewards, predicted.clip(low, high)))
    bounded = np.minimum(gains * predicted + losses * (1 - predicted), depth * log.shares)
    paid = gains[chosen] * rewards + losses[chosen] * (1 - rewards)
    expected: Floats = bounded.sum(axis=1)
    return (paid - bounded[chosen]) / log.probabilities + expected


@dataclass(frozen=True, eq=False)
class ConfidenceSequence:
    """An interval after each decision; with the probability asked for, every one of them holds.

    Attributes:
        decisions: their ids, (n,).
        lower, upper: (n,) each, of the mean over the decisions so far.
    """

    decisions: Indices
    lower: Floats
    upper: Floats


def _two_sided(
    log: Log,
    predicted: Floats,
    policies: tuple[Floats, Floats | None],
    ends: Range,
    below: Callable[[Callable[[float], Floats]], npt.ArrayLike],
) -> tuple[Floats, Floats]:
    """Bounds of a policy's mean reward, less another's; `below` gives those below a mean from its terms by depth.

    With rewards from 0 to 1, the mean of the terms with π of the one and ρ of the other is the difference plus 1, and
    that with π and ρ exchanged is 1 less the difference. With ρ = 0 they are the value and 1 less the value. Terms
    whose mean is too small leave the bounds true.
    """
    (low, high), (shares, others) = ends, policies
    pair = (shares, np.zeros_like(shares) if others is None else others)
    floor, origin = (0, low) if others is None else (-1, 0)
    above, under = (
        np.asarray(below(partial(sequence_terms, log, predicted, *both, ends))) for both in (pair, pair[::-1])
    )
    lower, upper = (origin + (high - low) * np.clip(end, floor, 1) for end in (above + floor, 1 - under))
    return lower, upper


def _sequence(one: Estimates, other: Estimates | None, level: float, reward_range: Range) -> ConfidenceSequence:
    check_level(level)
    ends, log = _checked(reward_range, one.log.rewards), one.log
    # Without the probabilities of all arms, a prediction's mean is not known.
    depth = _DEPTH if log.shares.any() else 0.0

    def below(terms: Callable[[float], Floats]) -> Floats:
        return lower_bounds(terms(depth) + depth, (1 - level) / 2) - depth

    lower, upper = _two_sided(log, one.predicted, (one.shares, None if other is None else other.shares), ends, below)
    if one.unrewarded:
        lower, upper = np.full((2, len(log)), math.nan)
    return ConfidenceSequence(log.ids, lower, upper)


def _interval(
    log: Log, predicted: Floats, policies: tuple[Floats, Floats | None], ends: Range | None, level: float
) -> Range:
    """As the end of a sequence, but for one look; where other arms' probabilities are not logged, the least is used."""
    if ends is None:
        return _unknown(level)
    depths = _DEPTHS[: np.searchsorted(_DEPTHS, max(1.0, math.sqrt(len(log)) / 2), side="right")]
    if not log.shares.any():
        log = replace(log, shares=log.allowed * log.probabilities.min())

    def below(terms: Callable[[float], Floats]) -> float:
        return bound_at_end(np.stack([terms(depth) for depth in depths.tolist()]), depths, (1 - level) / 2)

    lower, upper = map(float, _two_sided(log, predicted, policies, ends, below))
    return (lower, upper) if lower <= upper else _unknown(level)


def _checked(reward_range: Range, rewards: Floats) -> Range:
    low, high = (float(end) for end in reward_range)
    least, most = rewards.min(), rewards.max()
    if not (-math.inf < low <= least <= most <= high < math.inf and low < high):
        raise MatchError(
            f"reward_range must be (low, high) around all rewards, here {least:g} to {most:g}; got {reward_range!r}"
        )
    return low, high


@dataclass(frozen=True)
class Estimates:
    """The mean reward that a policy would have had on a log's contexts; it prints as a table.

    With weights w = π(a | x)/p of the decisions, a model q̂(x, a) of the rewards, and v̂(x) = Σ_a π(a | x) q̂(x, a):

    Attributes:
        logged: of the policy that wrote the log.
        ips: (1/n) Σ w r, unbiased where the log could choose whatever the policy does. Given all decisions before it,
            each term's mean is the policy's value: so, too, for the log of an agent that learns.
        doubly_robust: the one to use: (1/n) Σ [v̂(x) + w (r − q̂(x, a))]. Unbiased as IPS is, whatever the model, which
            is fitted to earlier decisions alone; the better the model, the smaller the variance.
        decisions: how many were used; `left_out` by reason.
        effective_size: (Σ w)²/Σ w²: this many decisions of the policy's own would be as informative.
        impossible: the share of the policy's probability on arms that the log could not choose.
        reward_range: the ends that intervals count on; None where there is no interval, and a doubt says why.
        unrewarded: whether so many decisions have no reward that those with one may be others than the rest.
        doubts: why the estimates cannot be trusted; empty where they can.

    Intervals hold, up to their level, also of rare rewards, of few decisions, of an agent that learns, where arms could
    not be chosen and where probabilities are counted from few draws. They rest on the range of the rewards, and of
    a log with the probabilities of the chosen arms alone on that no arm allowed had less than the smallest of them.

        log, predicted, shares: the decisions used, q̂ and the policy's probabilities, (decisions, arms) each.
    """

    logged: Estimate
    ips: Estimate
    doubly_robust: Estimate
    decisions: int
    left_out: Mapping[str, int]
    effective_size: float
    impossible: float
    reward_range: Range | None
    unrewarded: bool
    doubts: tuple[str, ...]
    log: Log = field(repr=False, compare=False)
    predicted: Floats = field(repr=False, compare=False)
    shares: Floats = field(repr=False, compare=False)

    def sequence(self, level: float, *, reward_range: Range) -> ConfidenceSequence:
        """Intervals that hold at any time: look after every decision, and stop when you like.

        With a probability of at least `level`, all of them hold: also of an agent that learns, after few decisions, and
        where the log could not choose what the policy does. The logged probabilities must be right, and all rewards
        that can come lie in `reward_range`. Where contexts or rewards drift, each interval is for the mean over the
        decisions so far. They are NaN where `interval` is for want of rewards. The derivation is at `lower_bounds` and
        `sequence_terms`.
        """
        return _sequence(self, None, level, reward_range)

    def __str__(self) -> str:
        lines = _table({"as logged": self.logged, "IPS": self.ips, "doubly robust": self.doubly_robust})
        lines.append(f"{self.decisions} decisions; left out: {dict(self.left_out)}")
        lines.append(f"effective sample size {self.effective_size:.4g}; on impossible arms {self.impossible:.2%}")
        return "\n".join(lines + [f"not to be trusted: {doubt}" for doubt in self.doubts])


def _table(rows: Mapping[str, Estimate]) -> list[str]:
    lines = [f"{'':20s}{'value':>10s}{'std. error':>12s}  {_LEVEL:.0%} interval"]
    for name, row in rows.items():
        low, high = row.interval(_LEVEL)
        ends = "none" if math.isnan(low) else f"{low:.4g} to {high:.4g}"
        lines.append(f"{name:20s}{row.value:10.4g}{row.error:12.2g}  {ends}")
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

    def sequence(self, level: float, *, reward_range: Range) -> ConfidenceSequence:
        """Of the difference, as `Estimates.sequence`: once 0 is outside, one policy is the better."""
        return _sequence(self.first, self.second, level, reward_range)

    def __str__(self) -> str:
        both = {"first": self.first, "second": self.second}
        rows = {name: one.doubly_robust for name, one in both.items()}
        doubts = [f"not to be trusted: {name}: {doubt}" for name, one in both.items() for doubt in one.doubts]
        return "\n".join([*_table(rows | {"difference": self.difference}), *doubts])


def evaluate(
    log: Log | AnyPath,
    policy: Agent | Policy,
    *,
    since: int | None = None,
    until: int | None = None,
    reward_range: Range | None = None,
) -> Estimates:
    """What a policy would have earned in place of the one that wrote a log.

    >>> rng = np.random.default_rng(0)
    >>> arms = rng.integers(2, size=400)
    >>> log = Log.of(contexts=rng.normal(size=(400, 1)), arms=arms, probabilities=np.full(400, 0.5), rewards=arms + 0.0)
    >>> always_one = evaluate(log, lambda contexts: np.ones(len(contexts), int))
    >>> low, high = always_one.doubly_robust.interval(0.95)
    >>> bool(low <= 1 <= high), always_one.doubts
    (True, ())

    The decisions with a probability and a reward are used, but for arms that were tried in turn. Whether a reward comes
    must depend neither on the arm nor on how large it is: where more than a fifth of the decisions has none there is no
    interval, nor where all rewards are equal and a hundredth has none, since logs of clicks alone look like that.
    Contexts and rewards must not drift. The intervals are for one look at the end.

    Args:
        policy: an agent as it is now, which learns nothing; or a function from contexts (n, features) to probabilities
            (n, arms), or to arms (n,). It must not have learnt from the decisions that are used, and chooses among the
            arms that were on offer: probabilities are divided by their sum over these.
        since, until: the first decision to use and the first not to use, by `Decision.id`; in logs by `Log.of` by row.
            Earlier ones still serve the model of the rewards.
        reward_range: (low, high) around all rewards that can come; None for those of the log, which may be too narrow
            where large rewards are rare, and give no interval where all are equal.
    """
    return _estimates(*_used(log, since, until), reward_range, policy)


def compare(
    log: Log | AnyPath,
    first: Agent | Policy,
    second: Agent | Policy,
    *,
    since: int | None = None,
    until: int | None = None,
    reward_range: Range | None = None,
) -> Comparison:
    """How much more the first of two policies would have earned; the arguments are those of `evaluate`.

    >>> rng = np.random.default_rng(0)
    >>> arms = rng.integers(2, size=400)
    >>> log = Log.of(contexts=np.zeros((400, 1)), arms=arms, probabilities=np.full((400, 2), 0.5), rewards=arms)
    >>> one, zero = (lambda contexts, arm=arm: np.full(len(contexts), arm) for arm in (1, 0))
    >>> round(compare(log, one, zero).difference.value, 1)
    1.0
    """
    used, predicted, left_out = _used(log, since, until)
    one, other = (_estimates(used, predicted, left_out, reward_range, policy) for policy in (first, second))
    difference = mean(doubly_robust_terms(used, predicted, one.shares - other.shares))
    bounds = partial(_interval, used, predicted, (one.shares, other.shares), one.reward_range)
    return Comparison(one, other, replace(difference, bounds=bounds))


def _used(log: Log | AnyPath, since: int | None, until: int | None) -> tuple[Log, Floats, dict[str, int]]:
    """The decisions of a log that are used, what a model predicts for them, and how many were left out."""
    whole = log if isinstance(log, Log) else read_log(log)
    for name, end in (("since", since), ("until", until)):
        if end is not None:
            count(name, end, "a decision's number: logs have no times", least=0)
    # An update belongs to the decision before it.
    number = np.maximum.accumulate(whole.ids)
    inside = (number >= (-1 if since is None else since)) & (number < (math.inf if until is None else until))
    decided, paid = np.isfinite(whole.probabilities), np.isfinite(whole.rewards)
    rows = np.flatnonzero(inside & decided & paid & ~whole.tried)
    left_out = {
        "without a reward": int((inside & decided & ~paid).sum()),
        "tried in turn": int((inside & paid & whole.tried).sum()),
        "without a probability": int((inside & ~decided).sum()),
    }
    if len(rows) < 2:
        window = f"since={since}, until={until}"
        raise MatchError(f"the log has {len(rows)} decisions to use ({window}), too few; left out: {left_out}")
    used = Log(**{name: part if name == "id" else part[rows] for name, part in vars(whole).items()})
    return used, predicted_before(whole)[rows], left_out


def _events(rewards: Floats, weights: Floats) -> float:
    """How many rewards decide a weighted mean v: (Σ w |r − v|)²/(4 Σ w² (r − v)²), n p (1 − p) of n equal weights.

    Infinite where nothing deviates.
    """
    apart = weights * (rewards - np.average(rewards, weights=weights)) if weights.any() else np.zeros(1)
    squares = float((apart**2).sum())
    return float(np.abs(apart).sum()) ** 2 / (4 * squares) if squares > 0 else math.inf


def _estimates(
    log: Log,
    predicted: Floats,
    left_out: Mapping[str, int],
    reward_range: Range | None,
    policy: Agent | Policy,
) -> Estimates:
    shares = _shares(log, policy)
    n, weights = len(log), shares[np.arange(len(log)), log.arms] / log.probabilities
    total, weight, never = weights.sum(), mean(weights), np.bincount(log.arms, minlength=log.n_arms) == 0
    size, largest = (float(total**2 / (weights**2).sum()), float(weights.max() / total)) if total else (0.0, 1.0)
    # Also as rare as in the whole log: the policy may have had none of them.
    events = min(_events(log.rewards, weights), size / n * _events(log.rewards, np.ones(n)))
    impossible, unseen = float(shares[~log.possible].sum() / n), float(shares[:, never].sum() / n)
    stranded = int(((shares * log.allowed).sum(axis=1) == 0).sum())
    off = abs(weight.value - (1 - impossible)) > 4 * weight.error + 1e-9
    learnt = isinstance(policy, Agent) and policy.log_id is not None and policy.log_id == log.id
    on = "of the policy's probability is on arms that the log"
    missing = left_out["without a reward"]
    seen = float(log.rewards.min()), float(log.rewards.max())
    equal = seen[0] == seen[1]
    unrewarded = missing > (_MOST_BESIDE_EQUAL if equal else _MOST_UNREWARDED) * (missing + n)
    ends = None if reward_range is None and equal else _checked(reward_range or seen, log.rewards)
    reasons = {
        f"{missing} of {missing + n} decisions have no reward, so that there is no interval: log 0 for what paid "
        "nothing, or leave out what is missing by chance": unrewarded,
        f"all rewards are {log.rewards[0]:g}: there is no interval without reward_range=(low, high)": ends is None,
        f"only about {events:.2g} effective rewards differ from the usual ones, below {_FEWEST_EVENTS}": events
        < _FEWEST_EVENTS,
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
        warn(f"off-policy estimates cannot be trusted: {'; '.join(doubts)}")
    ends = None if unrewarded else ends
    bounds = partial(_interval, log, predicted, (shares, None), ends)
    return Estimates(
        logged=replace(mean(log.rewards), bounds=partial(_logged, log, ends)),
        ips=replace(mean(weights * log.rewards), bounds=bounds),
        doubly_robust=replace(mean(doubly_robust_terms(log, predicted, shares)), bounds=bounds),
        decisions=n,
        left_out=left_out,
        effective_size=size,
        impossible=impossible,
        reward_range=ends,
        unrewarded=unrewarded,
        doubts=doubts,
        log=log,
        predicted=predicted,
        shares=shares,
    )


def _logged(log: Log, ends: Range | None, level: float) -> Range:
    """The mean over the decisions made, whose means may differ: of an agent that learns."""
    if ends is None:
        return _unknown(level)
    rewards, width = (log.rewards - ends[0]) / (ends[1] - ends[0]), ends[1] - ends[0]
    below, above = (float(lower_bounds(part, (1 - level) / 2)[-1]) for part in (rewards, 1 - rewards))
    return ends[0] + width * below, ends[1] - width * above


def _shares(log: Log, policy: Agent | Policy) -> Floats:
    """The probabilities with which a policy chooses among the arms on offer, (n, arms)."""
    if isinstance(policy, Agent):
        # Arms of the agent that the log does not have were not on offer.
        both = min(log.n_arms, policy.n_arms)
        mask, shares = np.zeros((len(log), policy.n_arms), bool), np.zeros(log.allowed.shape)
        mask[:, :both] = log.allowed[:, :both]
        shares[:, :both] = policy.probabilities(log.contexts, allowed=mask)[:, :both]
        return shares
    answer, shape = np.asarray(policy(log.contexts)), log.allowed.shape
    if answer.shape == shape[:1] and np.issubdtype(answer.dtype, np.integer):
        answer = answer[:, None] == np.arange(shape[1])
    if answer.shape != shape:
        raise MatchError(f"a policy gives probabilities of shape {shape}, or {shape[0]} arms; got {answer.shape}")
    shares = answer.astype(np.float64)
    if not ((shares >= 0).all() and np.allclose(shares.sum(axis=1), 1, atol=1e-4)):
        raise MatchError("a policy's probabilities must be at least 0 and sum to 1, over the arms that the log has")
    # Where nothing is left, all of it stays, to be told as impossible.
    left = shares * (log.allowed | ~(shares * log.allowed).any(axis=1, keepdims=True))
    factor: Floats = shares.sum(axis=1) / left.sum(axis=1)
    return factor[:, None] * left
