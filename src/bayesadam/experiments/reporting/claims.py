"""What the paper claims of its figures and its table, and what a run says to each claim.

All checks passed: it held. None: it did not. Some: in part. Where a check is a difference between two methods, it must
exceed two standard errors, and a smaller one leaves the check open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bayesadam.experiments.bandits import PAPER, BanditSettings
from bayesadam.experiments.pruning import TITLES as PRUNED
from bayesadam.experiments.regression import TITLES as FITTED
from bayesadam.experiments.reporting.numbers import Sample, above, fixed, percent
from bayesadam.experiments.reporting.runs import Finished

# The fractions at which rankings differ: before .75 none loses anything.
FRACTIONS = (0.75, 0.9, 0.95)
# Two accuracies are alike within half a point, two ratios within a factor of two.
_ALIKE_ACCURACY = 0.005
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
    """One comparison: what, whether it came out as claimed (None: too close to tell), and its numbers."""

    what: str
    passed: bool | None
    numbers: str
    values: tuple[float, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words, its place in the paper, and the criterion by which it is judged.

    Where these runs do not touch it, `judge` is None and the criterion says why.
    """

    key: str
    words: str
    criterion: str
    judge: Callable[[Finished], Sequence[Check]] | None = None
    place: str = "section 4"

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


def judged(claim: Claim, run: Finished | None) -> Judged:
    """What the run says to the claim; one on other data than the paper's, or a shorter one, shows its checks alone."""
    checks = tuple(claim.judge(run)) if claim.judge is not None and run is not None else ()
    if run is None or not checks:
        return Judged(claim, Verdict.UNMEASURED)
    verdict = Verdict.UNMEASURED if run.other_data else Verdict.SHORT if run.too_short else verdict_of(checks)
    return Judged(claim, verdict, checks, departures(run))


def departures(run: Finished) -> str:
    """All the ways in which the run differs from the paper's, in words; nothing where it does not."""
    own = run.experiment == "bandits" and run.settings["settings"] != "paper"
    settings = f"with our own settings, “{run.settings['settings']}”" if own else ""
    changes = ", ".join(f"{name} = {value}" for name, value in (run.settings.get("changes") or {}).items())
    return ", ".join(filter(None, (run.unlike_the_paper, settings, changes and f"with {changes}")))


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
    near, far, growth = run.sample("badam", "std_in"), run.sample("badam", "std_out"), _growth(run, "badam").mean
    words = f"{{}} against {{}}, {growth:.1f} times"
    return _compared("Badam, outside against in range", (far, near), words=words)


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
        what, both = f"growth outside, Badam and {FITTED[method]}", (_growth(run, "badam"), _growth(run, method))
        found += _compared(what, both, alike, "{:.1f}".format, "{} and {} times")
    return found


def _narrow_outside(run: Finished) -> list[Check]:
    def narrow(theirs: Sample, reference: Sample) -> bool:
        return theirs.mean < reference.mean / _ALIKE_RATIO

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


def _vadam_leads(run: Finished) -> list[Check]:
    rewards = {agent: found for agent in PAPER if (found := _rewards(run, agent))}
    problems = [p for p in rewards.get("vadam", ()) if all(p in rows for rows in rewards.values())]
    if not problems or len(rewards) < 2:
        return []
    led = [p for p in problems if max(rewards, key=lambda agent: rewards[agent][p].mean) == "vadam"]
    what, n_led, n = "Vadam has the highest mean in most columns", len(led), len(problems)
    numbers = f"in {n_led} of {n}" + (f" ({', '.join(led)})" if led else "")
    return [Check(what, n_led > n / 2, numbers, (float(n_led), float(n)), tuple(map(run.at, problems)))]


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
        "The function's standard deviation outside the training range is above that inside.",
        _widens,
        place="section 4 and caption of Figure 1",
    ),
    Claim(
        "figure1-mass-near-data",
        "Badam has more probability mass close to the observations than the other methods.",
        "Its standard deviation in range is below each of the three others'.",
        _tighter,
    ),
    Claim(
        "figure1-like-laplace",
        "Badam's predictive distribution is similar to a standard Laplace approximation's.",
        "Its deviation grows outside by the same factor, within two, as Laplace's with the GGN.",
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
        "Accuracy of the same networks is higher at 75, 90 and 95 % pruned.",
        _beats_magnitude,
        place="section 4 and Figure 2",
    ),
    Claim(
        "figure2-most-robust",
        "Badam's accuracy drops less under pruning than that of all other methods.",
        "The accuracy it has lost at 75, 90 and 95 % pruned is below each other method's.",
        _loses_least,
        place="section 4 and Figure 2",
    ),
    Claim(
        "figure2-accurate",
        "Badam has high accuracy before any pruning.",
        "It lies within half a point of the best other method, or above.",
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
        "They are not below, column by column, beyond two standard errors.",
        _column_by_column("mc-dropout", lambda ours, theirs: above(ours, theirs) is not False),
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
        "It has the highest mean of all agents in more than half of the columns.",
        _vadam_leads,
        place="section 4 and caption of Table 1",
    ),
    Claim(
        "table1-greedy",
        "Greedy does well, but is below Badam on mushroom.",
        "Badam's reward on mushroom is above Greedy's.",
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
