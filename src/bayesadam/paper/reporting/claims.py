"""What the paper claims of its figures and its table, and what its runs say to each claim.

All checks passed: it held. None: it did not. Some: in part. Where a check is a difference between two methods, it must
exceed two standard errors, and a smaller one leaves the check open. A claim to be better than all others does not hold where
one of them is better. A claim about the table holds only where it does with the settings that the paper states; with our own
alone it holds in part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from bayesadam.paper.bandits import PAPER, BanditSettings
from bayesadam.paper.pruning import TITLES as PRUNED
from bayesadam.paper.regression import TITLES as FITTED
from bayesadam.paper.reporting.numbers import Sample, above, fixed, percent
from bayesadam.paper.reporting.runs import Finished

# The fractions at which rankings differ: before .75 none loses anything.
FRACTIONS = (0.75, 0.9, 0.95)
# Two accuracies are alike within a fifth of a point, an eighth of the best one's errors on MNIST; two rewards within .02 of
# the optimum's; two deviations within a factor of two.
_ALIKE_ACCURACY = 0.002
_ALIKE_REWARD = 0.02
_ALIKE_RATIO = 2.0


class Verdict(Enum):
    """What a run says to a claim."""

    HELD = "held"
    PARTLY = "held in part"
    FAILED = "did not hold"
    OPEN = "too close to tell"
    SHORT = "run too short to say"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Check:
    """One comparison: what, whether it came out as claimed (None: too close to tell), and its numbers.

    `under` names the settings, where runs with several of them are judged together.
    """

    what: str
    passed: bool | None
    numbers: str
    values: tuple[float, ...]
    sources: tuple[str, ...]
    under: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words, its place in the paper, and the criterion by which it is judged.

    Where these runs do not touch it, `judge` is None and the criterion says why. One of `all_others` is refuted by a single
    method that does better.
    """

    key: str
    words: str
    criterion: str
    judge: Callable[[Finished], Sequence[Check]] | None = None
    place: str = "section 4"
    all_others: bool = False

    @property
    def experiment(self) -> str:
        """Which run answers it."""
        return {"figure1": "regression", "figure2": "pruning"}.get(self.key.partition("-")[0], "bandits")


@dataclass(frozen=True)
class Judged:
    """A claim, and what one run says to it; `reservation` says how the run differs from the paper's."""

    claim: Claim
    verdict: Verdict
    checks: tuple[Check, ...] = ()
    reservation: str = ""

    def plain(self) -> dict[str, Any]:
        """For `report.json`."""
        return {
            "claim": self.claim.key,
            **{name: getattr(self.claim, name) for name in ("words", "place", "criterion")},
            "verdict": self.verdict.value,
            "reservation": self.reservation,
            "checks": [
                {"what": c.what, "passed": c.passed, "shown": c.numbers, "values": c.values, "from": c.sources}
                | ({"under": c.under} if c.under else {})
                for c in self.checks
            ],
        }


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """All passed, none, some, or none that could be decided.

    >>> yes, no, open_ = (Check("", passed, "", (), ()) for passed in (True, False, None))
    >>> [verdict_of(c).value for c in ([yes, yes], [yes, no], [no, open_], [open_], [])]
    ['held', 'held in part', 'did not hold', 'too close to tell', 'not measured']
    """
    outcomes = frozenset(check.passed for check in checks)
    simple = {frozenset(): Verdict.UNMEASURED, frozenset({True}): Verdict.HELD, frozenset({None}): Verdict.OPEN}
    return simple.get(outcomes, Verdict.PARTLY if True in outcomes else Verdict.FAILED)


def judged(claim: Claim, run: Finished | None, papers_own: Finished | None = None) -> Judged:
    """What the run says to the claim; one on other data than the paper's, or a shorter one, shows its checks alone.

    A run with our own settings is judged together with `papers_own`, that with the paper's, where there is one.
    """
    if claim.judge is None or run is None or not (checks := tuple(claim.judge(run))):
        return Judged(claim, Verdict.UNMEASURED)
    ours = own_settings(run)
    if ours:
        beside = () if papers_own is None or papers_own.too_short else tuple(claim.judge(papers_own))
        checks = (*_under(f"our settings, “{ours}”", checks), *_under(_PAPERS_SETTINGS, beside))
    verdict = Verdict.UNMEASURED if run.other_data else Verdict.SHORT if run.too_short else verdict_of(checks)
    if claim.all_others and any(check.passed is False for check in checks):
        verdict = Verdict.FAILED if verdict is Verdict.PARTLY else verdict
    if ours and verdict is Verdict.HELD and not any(check.under == _PAPERS_SETTINGS for check in checks):
        verdict = Verdict.PARTLY
    return Judged(claim, verdict, checks, departures(run))


_PAPERS_SETTINGS = "the settings that the paper states"


def _under(settings: str, checks: Iterable[Check]) -> Iterator[Check]:
    return (replace(check, under=settings) for check in checks)


def own_settings(run: Finished) -> str:
    """The name of our own settings, where a run of the table has them; nothing where it has the paper's."""
    return str(run.settings["settings"]) if run.experiment == "bandits" and run.settings["settings"] != "paper" else ""


def with_papers_settings(runs: Iterable[Finished]) -> Finished | None:
    """The first run of the table with the settings that the paper states, and no others."""
    found = (run for run in runs if run.experiment == "bandits" and run.settings["settings"] == "paper")
    return next((run for run in found if not run.settings.get("changes")), None)


def settings_note(run: Finished, papers_own: Finished | None) -> str:
    """Whose settings the table has, and what the paper's own give; text in backticks is code."""
    ours = own_settings(run)
    if not ours:
        return "Played with the settings that the paper states."
    lead = f"Played with our own settings, “{ours}”, not with those that the paper states."
    checks = [] if papers_own is None else _reaches_the_paper(papers_own)
    if not checks:
        return f"{lead} Those were not played here: `bayesadam bandits --settings paper`."
    reached = [check.what for check in checks if check.passed]
    told = f"with them Badam reaches its row in {len(reached)} of {len(checks)} columns"
    told += f" ({', '.join(reached)})" if reached else ""
    gives = "give" if len(reached) == len(checks) else "do not give"
    return f"{lead} The paper's own settings {gives} its table: {told}."


def departures(run: Finished) -> str:
    """All the ways in which the run differs from the paper's but its settings' name, in words; nothing where it does not."""
    changes = ", ".join(f"{name} = {value}" for name, value in (run.settings.get("changes") or {}).items())
    return ", ".join(filter(None, (run.unlike_the_paper, changes and f"with {changes}")))


def _compared(
    what: str,
    samples: Iterable[Sample],
    passed: Callable[[Sample, Sample], bool | None] = above,
    show: Callable[[float], str] = fixed,
    words: str = "{} against {}",
) -> list[Check]:
    """One check of two means; none where either was not measured."""
    ours, theirs = samples
    if not ours.values or not theirs.values:
        return []
    means = (ours.mean, theirs.mean)
    return [Check(what, passed(ours, theirs), words.format(*map(show, means)), means, (ours.source, theirs.source))]


def _below(ours: Sample, theirs: Sample) -> bool | None:
    return above(theirs, ours)


def _growth(run: Finished, method: str) -> Sample:
    """Mean deviation of the function outside over that in range."""
    near, far = run.sample(method, "std_in"), run.sample(method, "std_out")
    return Sample.of([far.mean / near.mean] if near.values and near.mean > 0 else [], run.at(method))


def _widens(run: Finished) -> list[Check]:
    near, far = (run.sample("badam", name) for name in ("std_in", "std_out"))
    found = _compared("Badam, outside against in range", (far, near))
    growth, reference = _growth(run, "badam"), _growth(run, "gp")
    what = "by at least half the Gaussian process's factor"
    if found and not reference.values:
        unknown = f"{growth.mean:.1f} times; no process was fitted"
        return [*found, Check(what, None, unknown, (growth.mean,), (growth.source,))]
    return found + _compared(what, (growth, reference), _at_least_half, "{:.1f}".format, "{} against {} times")


def _at_least_half(ours: Sample, theirs: Sample) -> bool:
    return ours.mean >= theirs.mean / _ALIKE_RATIO


def _tighter(run: Finished) -> list[Check]:
    ours = run.sample("badam", "std_in")
    return [
        check
        for method in ("mc-dropout", "bbb", "vadam")
        for check in _compared(f"in range, Badam below {FITTED[method]}", (ours, run.sample(method, "std_in")), _below)
    ]


def _like_laplace(run: Finished) -> list[Check]:
    def alike(ours: Sample, theirs: Sample) -> bool:
        return 1 / _ALIKE_RATIO <= ours.mean / theirs.mean <= _ALIKE_RATIO

    found = []
    for method in ("laplace-diagonal", "laplace-full"):
        for where, name in (("in range", "std_in"), ("outside", "std_out")):
            both = (run.sample(m, name) for m in ("badam", method))
            found += _compared(f"{where}, Badam and {FITTED[method]}", both, alike, words="{} and {}")
    return found


def _narrow_outside(run: Finished) -> list[Check]:
    def narrow(theirs: Sample, reference: Sample) -> bool:
        return not _at_least_half(theirs, reference)

    found = []
    for method in ("bbb", "vadam"):
        both = (run.sample(m, "std_out") for m in (method, "gp"))
        found += _compared(
            f"outside, {FITTED[method]} below half the GP's", both, narrow, words="{} against the GP's {}"
        )
    return found


def _beats_magnitude(run: Finished) -> list[Check]:
    found = []
    for fraction in FRACTIONS:
        both = (run.accuracy("badam", ranking, fraction) for ranking in ("snr", "magnitude"))
        found += _compared(f"at {percent(fraction, 0)} % pruned", both, show=percent, words="{} against {} %")
    return found


def _lost(run: Finished, method: str, ranking: str, fraction: float) -> Sample:
    """Accuracy before pruning less accuracy after, seed by seed."""
    before, after = (run.accuracy(method, ranking, f) for f in (0.0, fraction))
    return Sample(tuple(a - b for a, b in zip(before.values, after.values, strict=False)), before.source)


def _loses_least(run: Finished) -> list[Check]:
    found = []
    for method, ranking in (("mc-dropout", "magnitude"), ("bbb", "snr"), ("vadam", "snr")):
        for fraction in FRACTIONS:
            what = f"lost at {percent(fraction, 0)} %, Badam less than {PRUNED[method]}"
            both = _lost(run, "badam", "snr", fraction), _lost(run, method, ranking, fraction)
            found += _compared(what, both, _below, percent, "{} against {} points")
    return found


def _accurate(run: Finished) -> list[Check]:
    others = {m: run.accuracy(m, next(iter(found)), 0.0) for m, found in run.results.items() if m != "badam" and found}
    others = {method: sample for method, sample in others.items() if sample.values}
    if not others:
        return []
    best = max(others, key=lambda method: others[method].mean)

    def close(ours: Sample, theirs: Sample) -> bool:
        return ours.mean >= theirs.mean - _ALIKE_ACCURACY

    what = f"Badam and the best of the others, {PRUNED.get(best, best)}"
    return _compared(what, (run.accuracy("badam", "snr", 0.0), others[best]), close, percent, "{} and {} %")


_PAPERS_PROBLEMS = tuple(PAPER["badam"])


def _rewards(run: Finished, agent: str) -> dict[str, Sample]:
    found = {problem: run.sample(problem, agent, "reward_ratio") for problem in _PAPERS_PROBLEMS}
    return {problem: sample for problem, sample in found.items() if sample.values}


def _column_by_column(
    rival: str, passed: Callable[[Sample, Sample], bool | None], problems: Sequence[str] = _PAPERS_PROBLEMS
) -> Callable[[Finished], list[Check]]:
    def judge(run: Finished) -> list[Check]:
        both = {p: [run.sample(p, agent, "reward_ratio") for agent in ("badam", rival)] for p in problems}
        return [check for problem in problems for check in _compared(problem, both[problem], passed)]

    return judge


def _not_below(ours: Sample, theirs: Sample) -> bool | None:
    """Whether ours is at most `_ALIKE_REWARD` below, two standard errors counted; None where they are too wide to tell."""
    lower = Sample(tuple(value - _ALIKE_REWARD for value in theirs.values))
    return above(ours, lower)


def _vadam_leads(run: Finished) -> list[Check]:
    rewards = {agent: found for agent in PAPER if (found := _rewards(run, agent))}
    problems = [p for p in rewards.get("vadam", ()) if all(p in rows for rows in rewards.values())]
    if not problems or len(rewards) < 2:
        return []
    others = [rows for agent, rows in rewards.items() if agent != "vadam"]
    ahead = {p: max((rows[p] for rows in others), key=lambda sample: sample.mean) for p in problems}
    led = [p for p in problems if rewards["vadam"][p].mean > ahead[p].mean]
    clearly = [p for p in led if above(rewards["vadam"][p], ahead[p])]
    n = len(problems)
    passed = True if len(clearly) > n / 2 else None if len(led) > n / 2 else False
    what, values = "Vadam has the highest mean in most columns", (float(len(led)), float(n))
    numbers = f"in {len(led)} of {n}" + (f" ({', '.join(led)})" if led else "")
    numbers += f", {len(clearly)} of them beyond two standard errors" if len(clearly) < len(led) else ""
    return [Check(what, passed, numbers, values, tuple(map(run.at, problems)))]


def _reaches_the_paper(run: Finished) -> list[Check]:
    found = []
    for problem, sample in _rewards(run, "badam").items():
        mean, sd = PAPER["badam"][problem]
        error = math.hypot(sample.standard_error, sd / math.sqrt(BanditSettings().runs))
        passed = sample.mean >= mean - 2 * error if math.isfinite(error) else None
        numbers = f"{fixed(sample.mean)}, the paper {fixed(mean, 2)}"
        found.append(Check(problem, passed, numbers, (sample.mean, mean), (sample.source, "the paper's Table 1")))
    return found


CLAIMS = (
    Claim(
        "figure1-widens",
        "Badam is sure where there are data, and its uncertainty widens gradually away from them.",
        "The function's standard deviation outside the training range is above that inside, and has grown by at least half the "
        "factor by which a Gaussian process's grows.",
        _widens,
        place="section 4 and caption of Figure 1",
    ),
    Claim(
        "figure1-mass-near-data",
        "Badam has more probability mass close to the observations than the other methods.",
        "Its standard deviation in range is below each of the three others'; one that is clearly lower refutes it.",
        _tighter,
        all_others=True,
    ),
    Claim(
        "figure1-like-laplace",
        "Badam's predictive distribution is similar to a standard Laplace approximation's.",
        "Its deviation, in range and outside, is that of Laplace with the GGN, within a factor of two.",
        _like_laplace,
    ),
    Claim(
        "figure1-variational-narrow",
        "Bayes by Backprop and Vadam, at convergence, are not very uncertain far from the observations.",
        "Their deviation outside is less than half the Gaussian process's.",
        _narrow_outside,
    ),
    Claim(
        "figure1-vadam-sensitive",
        "Bayes by Backprop and Vadam are expensive to run, and Vadam is sensitive to its initial precision.",
        "These runs neither time single methods nor vary the precision.",
    ),
    Claim(
        "figure2-beats-magnitude",
        "Pruning by Badam's signal-to-noise ratio is more robust than pruning by magnitude, the baseline with Σ\u00a0=\u00a01.",
        "Accuracy of the same networks is higher at 75, 90 and 95 % pruned. One data set, one shape of network.",
        _beats_magnitude,
        place="section 4 and Figure 2",
    ),
    Claim(
        "figure2-most-robust",
        "Badam's accuracy drops less under pruning than that of all other methods.",
        "The accuracy it has lost at 75, 90 and 95 % pruned is below each other method's; one that clearly loses less refutes it.",
        _loses_least,
        place="section 4 and Figure 2",
        all_others=True,
    ),
    Claim(
        "figure2-accurate",
        "Badam has high accuracy before any pruning.",
        "It lies within a fifth of a point of the best other method, or above.",
        _accurate,
        place="section 4 and caption of Figure 2",
    ),
    Claim(
        "figure2-settings",
        "No L2 penalty and a β₂ as large as .99999 give the best uncertainties.",
        "These runs use those settings, and do not vary them.",
        place="appendix on weight pruning",
    ),
    Claim(
        "table1-reaches",
        "Badam earns the rewards of its row in the table.",
        "Ours are not below the paper's, column by column, beyond two standard errors.",
        _reaches_the_paper,
        place="Table 1",
    ),
    Claim(
        "table1-mc-dropout",
        "Badam's rewards are comparable to MC dropout's.",
        "They are at most .02 below, column by column, two standard errors counted against them.",
        _column_by_column("mc-dropout", _not_below),
    ),
    Claim(
        "table1-bbb",
        "Badam outperforms Bayes by Backprop.",
        "Its reward is above, column by column.",
        _column_by_column("bbb", above),
    ),
    Claim(
        "table1-vadam",
        "Vadam performs best on most data sets.",
        "It has the highest mean of the paper's agents, beyond two standard errors, in more than half of the columns.",
        _vadam_leads,
        place="section 4 and caption of Table 1",
    ),
    Claim(
        "table1-greedy",
        "Greedy does well, but is below Badam on mushroom.",
        "Badam's reward on mushroom is above Greedy's. That Greedy does well is not judged.",
        _column_by_column("greedy", above, ("mushroom",)),
    ),
    Claim(
        "cheap",
        "Badam is computationally efficient, like MC dropout, and needs no covariance computed afterwards.",
        "These runs do not time training steps; `make bench` does.",
        place="conclusion",
    ),
)


def judge_run(run: Finished) -> list[Judged]:
    """The claims about one run's experiment."""
    return [judged(claim, run) for claim in CLAIMS if claim.experiment == run.experiment]
