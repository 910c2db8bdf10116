"""Finished runs of the experiments, and what they say to each claim of the paper, of which `claims.json` has the words.

A check compares two samples of a run; a difference must exceed two standard errors. All checks passed: the claim held.
None: it did not. Some: in part. A claim to be better than all others fails where one of them is better. A claim about
the table holds only with the settings that the paper states; with our own it holds in part at best.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from experiments import cost, figure1, figure2, table1
from experiments.running import Sample, digits, fixed, percent
from experiments.table1 import HEADINGS, PAPER, SHOWDOWN, published

EXPERIMENTS: Mapping[str, Any] = {"figure1": figure1, "figure2": figure2, "table1": table1, "cost": cost}
_PAPER: Mapping[str, Any] = {name: module.Settings() for name, module in EXPERIMENTS.items()}


@dataclass(frozen=True, eq=False)
class Finished:
    """One run's `metrics.json`, its picture, and its folder's name below the report's."""

    experiment: str
    name: str
    metrics: Mapping[str, Any]
    picture: bytes = b""

    @property
    def settings(self) -> Mapping[str, Any]:
        return dict(self.metrics["settings"])

    @property
    def results(self) -> Mapping[str, Any]:
        return dict(self.metrics["results"])

    def sample(self, *keys: str) -> Sample:
        """The numbers over seeds or runs at that position of the results; none where it does not exist."""
        part: Any = self.results
        for key in keys:
            part = part.get(key, {})
        return Sample.of(part or ())

    def accuracy(self, method: str, ranking: str, fraction: float) -> Sample:
        """Of pruned networks, seed by seed, at one fraction; none where it was not measured."""
        curve = self.results.get(method, {}).get(ranking, {"fractions": (), "accuracy": ()})
        return Sample.of(dict(zip(curve["fractions"], row, strict=True)).get(fraction) for row in curve["accuracy"])

    @property
    def complete(self) -> bool:
        """Whether every requested part is there; Table 1 writes its cells as they come."""
        problems, agents = self.settings.get("problems", ()), self.settings.get("agents", ())
        return all(agent in self.results.get(problem, {}) for problem in problems for agent in agents)

    @property
    def command(self) -> str:
        """What repeats the run: every setting that differs from its default, as an option."""
        words = ["python", "-m", "experiments", self.experiment, "--seed", str(self.metrics.get("seed", 0))]
        for name, usual in vars(_PAPER[self.experiment]).items():
            value = self.settings.get(name, usual)
            if value not in (usual, list(usual) if isinstance(usual, tuple) else usual):
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words += [f"--{name.removeprefix('n_')}", text]
        if self.experiment in ("figure2", "table1"):
            words += ["--device", self.metrics.get("device", "cpu")]
        return shlex.join(words)

    @property
    def too_short(self) -> bool:
        """Whether it trained or played for less than the paper; fewer seeds only widen the standard errors."""
        if self.experiment == "table1":
            return self.settings["rounds"] is not None
        return bool(self.settings.get("epochs", 0) < getattr(_PAPER[self.experiment], "epochs", 0))

    @property
    def other_data(self) -> str:
        """How its data differ from the paper's, in words; empty where they do not."""
        data = self.settings.get("data", "mnist")
        return "" if data == "mnist" else f"on {data}, not on MNIST"

    @property
    def own_settings(self) -> bool:
        """Whether a run of the table has settings that the paper does not state."""
        return bool(self.settings.get("settings", "paper") != "paper")

    @property
    def departures(self) -> str:
        """All the ways in which the run differs from the paper's, in words."""
        asked, paper, words = self.settings, _PAPER[self.experiment], [self.other_data]
        if self.own_settings:
            words.append(f"with our own settings, {asked['settings']}")
        if "census:1000" in self.results:
            words.append("census of 1,000 rounds instead of 10,000")
        if self.too_short:
            epochs = asked.get("epochs", 0)
            words.append(f"{epochs:,} epochs instead of {paper.epochs:,}" if epochs else f"{asked['rounds']:,} rounds")
        for name in ("runs", "n_seeds"):
            if name in asked and asked[name] < getattr(paper, name):
                words.append(f"{asked[name]} {name.removeprefix('n_')} instead of {getattr(paper, name)}")
        return ", ".join(filter(None, words))


# --- what is compared -------------------------------------------------------------------------------------------------


def above(first: Sample, second: Sample, by: float = 0.0) -> bool | None:
    """Whether the first mean lies above the second by more than `by` and 2 √(s₁²/n₁ + s₂²/n₂); None: too close to tell.

    >>> above(Sample((3.0, 3.1)), Sample((1.0, 1.1))), above(Sample((3.0, 1.0)), Sample((2.0, 2.1)))
    (True, None)
    """
    difference = first.mean - second.mean - by
    error = math.hypot(first.standard_error, second.standard_error)
    if not math.isfinite(difference) or not math.isfinite(error) or abs(difference) <= 2 * error:
        return None
    return difference > 0


def _difference(first: Sample, second: Sample) -> Sample:
    """Pair by pair, of the same networks, so that what they have in common drops out."""
    return Sample(tuple(map(sub, first.values, second.values)))


class Test(NamedTuple):
    """Whether two samples compare as claimed, how their means are written, and the words around them."""

    passes: Callable[[Sample, Sample], bool | None]
    show: Callable[[float], str] = fixed
    words: str = "{} against {}"


_TESTS: Mapping[str, Test] = {
    "above": Test(above),
    "below": Test(lambda ours, theirs: above(theirs, ours)),
    "above in each": Test(lambda ours, theirs: above(_difference(ours, theirs), Sample((0.0, 0.0)))),
    "alike": Test(lambda ours, theirs: 1 / 2 <= ours.mean / theirs.mean <= 2, "{:.1f}".format, "{} and {} times"),
    "keeps as much": Test(lambda ours, theirs: above(theirs, ours) is not True, percent, "{} against {} %"),
    "more accurate": Test(above, percent, "{} against {} %"),
    "loses less": Test(lambda ours, theirs: above(theirs, ours), percent, "{} against {} points"),
    "as accurate": Test(lambda ours, theirs: ours.mean >= theirs.mean - 0.002, percent, "{} and {} %"),
    "half as much again": Test(lambda ours, theirs: ours.mean > 1.5 * theirs.mean, digits, "{} against {} times"),
    "no dearer": Test(lambda ours, theirs: ours.mean <= 1.1 * theirs.mean, digits, "{} against {} times"),
    "under a tenth": Test(lambda ours, theirs: ours.mean < theirs.mean / 10, digits, "{} against {} of training"),
    "under a hundredth": Test(lambda ours, theirs: ours.mean < theirs.mean / 100, digits, "{} of training"),
    # By more than .1 nats, two standard errors counted.
    "clearly worse": Test(lambda ours, theirs: above(ours, theirs, 0.1) is True, digits, "{} against {} nats"),
    # At most .08 below, two standard errors counted; open where they are too wide to tell.
    "comparable": Test(lambda ours, theirs: above(ours, theirs, -0.08)),
    # Not below beyond two standard errors; one run alone has none.
    "reaches": Test(
        lambda ours, theirs: None if len(ours.values) < 2 else not above(theirs, ours), fixed, "{}, the paper {}"
    ),
}


def _best(samples: Iterable[Sample]) -> Sample:
    return max((s for s in samples if s.values), key=lambda s: s.mean, default=Sample(()))


def sample_at(run: Finished, path: str, column: str = "") -> Sample:
    """What a path of `claims.json` names: one score, accuracy or reward over the seeds or runs.

    Figure 1: method/score, and "growth" is the mean deviation outside over that in range; "largest" and "smallest" are
    those of Vadam's over its initial precisions. Figure 2: method/ranking/fraction, and "lost/" in front is the
    accuracy lost up to there. Table 1: an agent of the `column`, or problem/agent; the Showdown's own where it was
    played, unless it is "our". "best other" has the highest mean of those that the claim is not about. Costs:
    problem/method/measure.
    """
    first, *rest = path.split("/")
    match run.experiment:
        case "figure2" if first == "best other":
            return _best(run.accuracy(m, next(iter(c)), 0.0) for m, c in run.results.items() if "badam" not in m)
        case "figure2":
            method, ranking, fraction = rest if first == "lost" else (first, *rest)
            accuracy = run.accuracy(method, ranking, float(fraction))
            return _difference(run.accuracy(method, ranking, 0.0), accuracy) if first == "lost" else accuracy
        case "figure1" if first in ("largest", "smallest"):
            swept = [run.sample(m, *rest) for m in run.results if m == "vadam" or m.startswith("vadam-precision")]
            extreme = max if first == "largest" else min
            return extreme(swept, key=lambda s: s.mean) if len(swept) > 1 else Sample(())
        case "figure1" if rest == ["growth"]:
            near, far = run.sample(first, "std_in"), run.sample(first, "std_out")
            return Sample.of([far.mean / near.mean] if near.values and near.mean > 0 else [])
        case "figure1" | "cost":
            return run.sample(first, *rest)
    problem, agent = (first, *rest) if rest else (column, first)
    if agent == "best other":
        return _best(sample_at(run, rival, problem) for rival in PAPER if rival != "vadam")
    if agent == "the paper's badam":
        mean, sd = published(problem, "badam") or (math.nan, math.nan)
        # Two values with the mean and the standard error of the paper's ten.
        error = sd / math.sqrt(_PAPER["table1"].runs)
        return Sample((mean - error, mean + error))
    theirs = run.sample(problem, agent + SHOWDOWN, "reward_ratio")
    return theirs if theirs.values else run.sample(problem, agent.removeprefix("our "), "reward_ratio")


# --- claims -----------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """What a run says to a claim, in the order of the page: failed ones first."""

    FAILED = "did not hold"
    PARTLY = "held in part"
    OPEN = "cannot be told"
    HELD = "held"
    SHORT = "run too short to say"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Check:
    """One comparison: what, whether it came out as claimed (None: too close to tell), and its numbers.

    One that does not count is shown beside the others, and decides nothing.
    """

    what: str
    passed: bool | None
    numbers: str
    values: tuple[float, ...]
    counts: bool = True


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words, its position in the paper, and the criterion by which it is judged.

    A comparison has a name, two paths of `sample_at`, a test, and "beside" if it is to be shown alone; "*" is every
    column of the table. Of `all_others` a single one that does better refutes the claim; with `most` it must hold for
    more than half of its checks, which count as one.
    """

    key: str
    words: str
    criterion: str
    checks: tuple[Any, ...] = ()
    place: str = "section 4"
    all_others: bool = False
    most: bool = False

    @property
    def experiment(self) -> str:
        return self.key.partition("-")[0]

    def checked(self, run: Finished) -> list[Check]:
        """Every comparison that the run has measured."""
        checks = []
        # The paper's problems that it has played; a part of one, such as `"census:1000"`, is shown alone.
        played = [name for name in run.results if published(name, "badam")]
        for what, first, second, name, *beside in self.checks:
            for column in played if "*" in what else [""]:
                ours, theirs = (sample_at(run, path, column) for path in (first, second))
                if ours.values and theirs.values:
                    test, means = _TESTS[name], (ours.mean, theirs.mean)
                    title = what.replace("*", HEADINGS.get(column, column))
                    numbers, counts = test.words.format(*map(test.show, means)), not beside and ":" not in column
                    checks.append(Check(title, test.passes(ours, theirs), numbers, means, counts))
        counted = [check for check in checks if check.counts]
        if not self.most or not counted:
            return checks
        n, clearly = len(counted), sum(check.passed is True for check in counted)
        led = [check.what for check in counted if check.values[0] > check.values[1]]
        passed = True if clearly > n / 2 else None if len(led) > n / 2 else False
        columns = f" ({', '.join(led)})" if led else ""
        numbers = f"ahead in {len(led)} of {n}{columns}, {clearly} of them beyond two standard errors"
        return [Check("most columns", passed, numbers, (float(len(led)), float(n)))]


CLAIMS = tuple(
    Claim(**record) for record in json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Judged:
    """A claim, and what one run says to it; `reservation` says how the run differs from the paper's."""

    claim: Claim
    verdict: Verdict
    checks: tuple[Check, ...] = ()
    reservation: str = ""

    @property
    def decided_by(self) -> str:
        """What decides it, in one sentence."""
        counted = [check for check in self.checks if check.counts]
        right, against = ([check for check in counted if check.passed is outcome] for outcome in (True, False))
        if not counted or self.verdict in (Verdict.SHORT, Verdict.UNMEASURED):
            return ""
        share = f"{len(right)} of {len(counted)} came out as claimed"
        if against:
            return f"{share}; against it {against[0].what}: {against[0].numbers}."
        if len(right) < len(counted):
            return f"{share}, the others within two standard errors."
        return f"All {len(counted)} came out as claimed." if len(counted) > 1 else f"{right[0].numbers}."

    def plain(self) -> dict[str, Any]:
        words = {name: getattr(self.claim, name) for name in ("words", "place", "criterion")}
        verdict = {"verdict": self.verdict.value, "decided_by": self.decided_by, "reservation": self.reservation}
        return {"claim": self.claim.key, **words, **verdict, "checks": [asdict(check) for check in self.checks]}


def judged(claim: Claim, run: Finished | None) -> Judged:
    """What the run says to the claim; one on other data than the paper's, or a shorter one, shows its checks alone."""
    checks = () if run is None or run.experiment != claim.experiment else tuple(claim.checked(run))
    if run is None or not checks:
        return Judged(claim, Verdict.UNMEASURED)
    outcomes = {check.passed for check in checks if check.counts}
    if not outcomes or run.other_data:
        verdict = Verdict.UNMEASURED
    elif run.too_short:
        verdict = Verdict.SHORT
    elif outcomes == {None}:
        verdict = Verdict.OPEN
    elif True not in outcomes or (claim.all_others and False in outcomes):
        verdict = Verdict.FAILED
    elif outcomes == {True} and not run.own_settings:
        verdict = Verdict.HELD
    else:
        verdict = Verdict.PARTLY
    return Judged(claim, verdict, checks, run.departures)
