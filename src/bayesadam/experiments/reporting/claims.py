"""What the paper claims of its figures and its table, and what a run says to each claim.

A claim is a record: its words, where the paper makes it, how it is judged here, and a pure function from a run to checks.
All checks passed: it held. None: it did not. Some: in part. Where a check is a difference between two methods, it must
exceed two standard errors, and a smaller one leaves the check open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from bayesadam.experiments.bandits import PAPER, BanditSettings
from bayesadam.experiments.pruning import TITLES as PRUNED
from bayesadam.experiments.pruning import PruningSettings
from bayesadam.experiments.regression import TITLES as FITTED
from bayesadam.experiments.regression import RegressionSettings
from bayesadam.experiments.reporting.numbers import Sample, above, fixed, percent
from bayesadam.experiments.reporting.runs import Finished

# The fractions at which rankings are told apart: before .75 none loses anything.
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
    """A claim of the paper, in our words.

    Attributes:
        key: its name in `report.json`.
        experiment: which run answers it.
        words: what is claimed.
        place: where in the paper.
        criterion: how it is judged; for a claim that these runs do not touch, why not.
        judge: from a run to checks; None where these runs do not touch it.
    """

    key: str
    experiment: str
    words: str
    place: str
    criterion: str
    judge: Callable[[Finished], Sequence[Check]] | None = None


@dataclass(frozen=True)
class Judged:
    """A claim, and what one run says to it; `reservation` says how the run differs from the paper's."""

    claim: Claim
    verdict: Verdict
    checks: tuple[Check, ...] = ()
    reservation: str = ""


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """All passed, none, some, or none that could be told.

    >>> yes, no, open_ = (Check("", passed, "", (), ()) for passed in (True, False, None))
    >>> [verdict_of(c).value for c in ([yes, yes], [yes, no], [no, open_], [open_], [])]
    ['held', 'held in part', 'did not hold', 'too close to tell', 'not measured']
    """
    if not checks:
        return Verdict.UNMEASURED
    outcomes = {check.passed for check in checks}
    if outcomes == {True}:
        return Verdict.HELD
    if outcomes == {None}:
        return Verdict.OPEN
    return Verdict.PARTLY if True in outcomes else Verdict.FAILED


def judged(claim: Claim, run: Finished | None) -> Judged:
    """What the run says to the claim; one on other data than the paper's, or a shorter one, shows its checks alone."""
    checks = tuple(claim.judge(run)) if claim.judge is not None and run is not None else ()
    if run is None or not checks:
        return Judged(claim, Verdict.UNMEASURED)
    verdict = Verdict.UNMEASURED if other_data(run) else Verdict.SHORT if too_short(run) else verdict_of(checks)
    return Judged(claim, verdict, checks, departures(run))


def too_short(run: Finished) -> bool:
    """Whether it trained or played for less than the paper; fewer seeds only widen the standard errors."""
    if run.experiment == "bandits":
        return run.settings["rounds"] is not None
    paper = RegressionSettings() if run.experiment == "regression" else PruningSettings()
    return bool(run.settings["epochs"] < paper.epochs)


def other_data(run: Finished) -> str:
    """How the run's data differ from the paper's, in words; nothing where they do not."""
    if run.experiment == "pruning" and run.settings["data"] != "mnist":
        return f"on {run.settings['data']}, not on MNIST"
    if run.experiment == "regression" and run.settings.get("gap"):
        return "trained with a gap in the data"
    return ""


def departures(run: Finished) -> str:
    """All the ways in which the run differs from the paper's, in words; nothing where it does not."""
    own = run.experiment == "bandits" and run.settings["settings"] != "paper"
    settings = f"with our own settings, “{run.settings['settings']}”" if own else ""
    return ", ".join(filter(None, (other_data(run), shortfall(run), settings, changed(run))))


def changed(run: Finished) -> str:
    """The bandits' single settings that were changed, in words; nothing where none was."""
    changes = run.settings.get("changes") or {}
    return "with " + ", ".join(f"{name} = {value}" for name, value in changes.items()) if changes else ""


def shortfall(run: Finished) -> str:
    """How the run is shorter than the paper's, in words; nothing where it is not."""
    asked, found = run.settings, []
    if run.experiment == "bandits":
        whole = BanditSettings()
        if asked["rounds"] is not None:
            found.append(f"{asked['rounds']:,} rounds a run")
        if asked["runs"] < whole.runs:
            found.append(f"{asked['runs']} runs instead of {whole.runs}")
    else:
        paper = RegressionSettings() if run.experiment == "regression" else PruningSettings()
        if asked["epochs"] < paper.epochs:
            found.append(f"{asked['epochs']:,} epochs instead of {paper.epochs:,}")
        if asked["n_seeds"] < paper.n_seeds:
            found.append(f"{asked['n_seeds']} seed{'s' * (asked['n_seeds'] > 1)} instead of {paper.n_seeds}")
    return ", ".join(found)


# --- Figure 1 ---------------------------------------------------------------------------------------------------------


def _stds(run: Finished, method: str) -> tuple[Sample, Sample]:
    return run.sample(method, "std_in"), run.sample(method, "std_out")


def _growth(run: Finished, method: str) -> float:
    """Mean deviation of the function outside over that in range; NaN where there is none."""
    near, far = _stds(run, method)
    return far.mean / near.mean if near.values and near.mean > 0 else math.nan


def _widens(run: Finished) -> list[Check]:
    near, far = _stds(run, "badam")
    if not near.values:
        return []
    return [
        Check(
            "Badam, outside against in range",
            above(far, near),
            f"{fixed(far.mean)} against {fixed(near.mean)}, {_growth(run, 'badam'):.1f} times",
            (far.mean, near.mean),
            (run.at("badam", "std_out"), run.at("badam", "std_in")),
        )
    ]


def _tighter(run: Finished) -> list[Check]:
    ours = run.sample("badam", "std_in")
    found = []
    for method in ("mc-dropout", "bbb", "vadam"):
        theirs = run.sample(method, "std_in")
        if ours.values and theirs.values:
            found.append(
                Check(
                    f"in range, Badam below {FITTED[method]}",
                    above(theirs, ours),
                    f"{fixed(ours.mean)} against {fixed(theirs.mean)}",
                    (ours.mean, theirs.mean),
                    (run.at("badam", "std_in"), run.at(method, "std_in")),
                )
            )
    return found


def _like_laplace(run: Finished) -> list[Check]:
    ours = _growth(run, "badam")
    found = []
    for method in ("laplace-diagonal", "laplace-full"):
        theirs = _growth(run, method)
        if math.isfinite(ours) and math.isfinite(theirs):
            found.append(
                Check(
                    f"growth outside, Badam and {FITTED[method]}",
                    1 / _ALIKE_RATIO <= ours / theirs <= _ALIKE_RATIO,
                    f"{ours:.1f} and {theirs:.1f} times",
                    (ours, theirs),
                    (run.at("badam"), run.at(method)),
                )
            )
    return found


def _narrow_outside(run: Finished) -> list[Check]:
    reference = run.sample("gp", "std_out")
    found = []
    for method in ("bbb", "vadam"):
        theirs = run.sample(method, "std_out")
        if reference.values and theirs.values:
            found.append(
                Check(
                    f"outside, {FITTED[method]} below half the GP's",
                    theirs.mean < reference.mean / _ALIKE_RATIO,
                    f"{fixed(theirs.mean)} against the GP's {fixed(reference.mean)}",
                    (theirs.mean, reference.mean),
                    (run.at(method, "std_out"), run.at("gp", "std_out")),
                )
            )
    return found


# --- Figure 2 ---------------------------------------------------------------------------------------------------------


def _beats_magnitude(run: Finished) -> list[Check]:
    found = []
    for fraction in FRACTIONS:
        ours, theirs = (run.accuracy("badam", ranking, fraction) for ranking in ("snr", "magnitude"))
        if ours.values and theirs.values:
            found.append(
                Check(
                    f"at {percent(fraction, 0)} % pruned",
                    above(ours, theirs),
                    f"{percent(ours.mean)} against {percent(theirs.mean)} %",
                    (ours.mean, theirs.mean),
                    (run.at("badam", "snr"), run.at("badam", "magnitude")),
                )
            )
    return found


def _lost(run: Finished, method: str, ranking: str, fraction: float) -> Sample:
    """Accuracy before pruning less accuracy after, seed by seed."""
    before, after = (run.accuracy(method, ranking, f).values for f in (0.0, fraction))
    return Sample(tuple(a - b for a, b in zip(before, after, strict=False)))


def _loses_least(run: Finished) -> list[Check]:
    found = []
    for method, ranking in (("mc-dropout", "magnitude"), ("bbb", "snr"), ("vadam", "snr")):
        for fraction in FRACTIONS:
            ours, theirs = _lost(run, "badam", "snr", fraction), _lost(run, method, ranking, fraction)
            if ours.values and theirs.values:
                found.append(
                    Check(
                        f"lost at {percent(fraction, 0)} %, Badam less than {PRUNED[method]}",
                        above(theirs, ours),
                        f"{percent(ours.mean)} against {percent(theirs.mean)} points",
                        (ours.mean, theirs.mean),
                        (run.at("badam", "snr"), run.at(method, ranking)),
                    )
                )
    return found


def _accurate(run: Finished) -> list[Check]:
    ours = run.accuracy("badam", "snr", 0.0)
    rivals = {
        method: run.accuracy(method, next(iter(rankings)), 0.0)
        for method, rankings in run.results.items()
        if method != "badam" and rankings
    }
    rivals = {method: sample for method, sample in rivals.items() if sample.values}
    if not ours.values or not rivals:
        return []
    best = max(rivals, key=lambda method: rivals[method].mean)
    return [
        Check(
            f"Badam beside the best of the others, {PRUNED.get(best, best)}",
            ours.mean >= rivals[best].mean - _ALIKE_ACCURACY,
            f"{percent(ours.mean)} and {percent(rivals[best].mean)} %",
            (ours.mean, rivals[best].mean),
            (run.at("badam", "snr"), run.at(best)),
        )
    ]


# --- Table 1 ----------------------------------------------------------------------------------------------------------

_PAPERS_PROBLEMS = tuple(PAPER["badam"])


def _rewards(run: Finished, agent: str) -> dict[str, Sample]:
    found = {problem: run.sample(problem, agent, "reward_ratio") for problem in _PAPERS_PROBLEMS}
    return {problem: sample for problem, sample in found.items() if sample.values}


def _column_by_column(
    rival: str, passed: Callable[[Sample, Sample], bool | None], problems: Sequence[str] = _PAPERS_PROBLEMS
) -> Callable[[Finished], list[Check]]:
    def judge(run: Finished) -> list[Check]:
        ours, theirs = _rewards(run, "badam"), _rewards(run, rival)
        return [
            Check(
                problem,
                passed(ours[problem], theirs[problem]),
                f"{fixed(ours[problem].mean)} against {fixed(theirs[problem].mean)}",
                (ours[problem].mean, theirs[problem].mean),
                tuple(run.at(problem, agent, "reward_ratio") for agent in ("badam", rival)),
            )
            for problem in problems
            if problem in ours and problem in theirs
        ]

    return judge


def _not_below(ours: Sample, theirs: Sample) -> bool:
    return above(ours, theirs) is not False


def _vadam_leads(run: Finished) -> list[Check]:
    agents = [agent for agent in PAPER if _rewards(run, agent)]
    if "vadam" not in agents or len(agents) < 2:
        return []
    rewards = {agent: _rewards(run, agent) for agent in agents}
    problems = [problem for problem in rewards["vadam"] if all(problem in rows for rows in rewards.values())]
    if not problems:
        return []
    led = [p for p in problems if max(agents, key=lambda agent: rewards[agent][p].mean) == "vadam"]
    return [
        Check(
            "Vadam has the highest mean in most columns",
            len(led) > len(problems) / 2,
            f"in {len(led)} of {len(problems)}" + (f" ({', '.join(led)})" if led else ""),
            (float(len(led)), float(len(problems))),
            tuple(run.at(problem) for problem in problems),
        )
    ]


def _reaches_the_paper(run: Finished) -> list[Check]:
    found = []
    for problem, sample in _rewards(run, "badam").items():
        mean, sd = PAPER["badam"][problem]
        error = math.hypot(sample.standard_error, sd / math.sqrt(BanditSettings().runs))
        found.append(
            Check(
                problem,
                sample.mean >= mean - 2 * error if math.isfinite(error) else None,
                f"{fixed(sample.mean)}, the paper {fixed(mean, 2)}",
                (sample.mean, mean),
                (run.at(problem, "badam", "reward_ratio"), "the paper's Table 1"),
            )
        )
    return found


CLAIMS = (
    Claim(
        "figure1-widens",
        "regression",
        "Badam is sure where there are data, and its uncertainty widens gradually away from them.",
        "section 4 and caption of Figure 1",
        "The function's standard deviation outside the training range is above that inside.",
        _widens,
    ),
    Claim(
        "figure1-mass-near-data",
        "regression",
        "Badam keeps more probability mass close to the observations than the other methods.",
        "section 4",
        "Its standard deviation in range is below each of the three others'.",
        _tighter,
    ),
    Claim(
        "figure1-like-laplace",
        "regression",
        "Badam's predictive distribution is similar to a standard Laplace approximation's.",
        "section 4",
        "Its deviation grows outside by the same factor, within two, as Laplace's with the GGN.",
        _like_laplace,
    ),
    Claim(
        "figure1-variational-narrow",
        "regression",
        "Bayes by Backprop and Vadam, at convergence, are not very uncertain far from the observations.",
        "section 4",
        "Their deviation outside is less than half the Gaussian process's.",
        _narrow_outside,
    ),
    Claim(
        "figure1-vadam-sensitive",
        "regression",
        "Bayes by Backprop and Vadam are expensive to run, and Vadam is sensitive to its initial precision.",
        "section 4",
        "These runs neither time single methods nor vary the precision.",
    ),
    Claim(
        "figure2-beats-magnitude",
        "pruning",
        "Pruning by Badam's signal to noise is more robust than pruning by magnitude, the baseline with Σ\u00a0=\u00a01.",
        "section 4 and Figure 2",
        "Accuracy of the same networks is higher at 75, 90 and 95 % pruned.",
        _beats_magnitude,
    ),
    Claim(
        "figure2-most-robust",
        "pruning",
        "Badam's accuracy drops less under pruning than that of all other methods.",
        "section 4 and Figure 2",
        "The accuracy it has lost at 75, 90 and 95 % pruned is below each other method's.",
        _loses_least,
    ),
    Claim(
        "figure2-accurate",
        "pruning",
        "Badam has high accuracy before any pruning.",
        "section 4 and caption of Figure 2",
        "It lies within half a point of the best other method, or above.",
        _accurate,
    ),
    Claim(
        "figure2-settings",
        "pruning",
        "No L2 penalty and a β₂ as large as .99999 give the best uncertainties.",
        "appendix on weight pruning",
        "These runs use those settings, and do not vary them.",
    ),
    Claim(
        "table1-reaches",
        "bandits",
        "Badam earns the rewards of its row in the table.",
        "Table 1",
        "Ours are not below the paper's, column by column, beyond two standard errors.",
        _reaches_the_paper,
    ),
    Claim(
        "table1-mc-dropout",
        "bandits",
        "Badam's rewards are comparable to MC dropout's.",
        "section 4",
        "They are not below, column by column, beyond two standard errors.",
        _column_by_column("mc-dropout", _not_below),
    ),
    Claim(
        "table1-bbb",
        "bandits",
        "Badam outperforms Bayes by Backprop.",
        "section 4",
        "Its reward is above, column by column.",
        _column_by_column("bbb", above),
    ),
    Claim(
        "table1-vadam",
        "bandits",
        "Vadam performs best on most data sets.",
        "section 4 and caption of Table 1",
        "It has the highest mean of all agents in more than half of the columns.",
        _vadam_leads,
    ),
    Claim(
        "table1-greedy",
        "bandits",
        "Greedy does well, but is below Badam on mushroom.",
        "section 4",
        "Badam's reward on mushroom is above Greedy's.",
        _column_by_column("greedy", above, ("mushroom",)),
    ),
    Claim(
        "cheap",
        "bandits",
        "Badam is computationally efficient, like MC dropout, and needs no covariance computed afterwards.",
        "conclusion",
        "These runs do not time training steps; `make bench` does.",
    ),
)


def judge_all(runs: Sequence[Finished]) -> tuple[Judged, ...]:
    """Every claim, by the first run of its experiment."""
    first: dict[str, Finished] = {}
    for run in runs:
        first.setdefault(run.experiment, run)
    return tuple(judged(claim, first.get(claim.experiment)) for claim in CLAIMS)
