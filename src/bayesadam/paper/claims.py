"""Finished runs of the experiments, and what they say to each claim of the paper, of which `claims.json` has the words.

A check compares two samples of a run; a difference must exceed two standard errors. All checks passed: the claim held.
None: it did not. Some: in part. A claim to be better than all others fails where one of them is better. A claim about
the table holds only with the settings that the paper states; with our own it holds in part at best.
"""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.resources import files
from operator import sub
from pathlib import Path
from typing import Any

from bayesadam.errors import FileError
from bayesadam.paper import Sample, above, digits, fixed, percent
from bayesadam.paper.bandits import HEADINGS, PAPER, SHOWDOWN, BanditSettings, published
from bayesadam.paper.cost import CostSettings
from bayesadam.paper.pruning import PruningSettings
from bayesadam.paper.regression import RegressionSettings

_PAPER: Mapping[str, Any] = {
    "regression": RegressionSettings(),
    "pruning": PruningSettings(),
    "bandits": BanditSettings(),
    "cost": CostSettings(),
}
EXPERIMENTS = tuple(_PAPER)


@dataclass(frozen=True, eq=False)
class Finished:
    """One run's `metrics.json`, its picture, and its folder's name below the report's."""

    experiment: str
    name: str
    metrics: Mapping[str, Any]
    picture: bytes = b""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run."""
        return dict(self.metrics["settings"])

    @property
    def results(self) -> Mapping[str, Any]:
        """What it found."""
        return dict(self.metrics["results"])

    def sample(self, *keys: str) -> Sample:
        """The numbers over seeds or runs at that position of the results; none where it does not exist."""
        found: Any = self.results
        for key in keys:
            found = found.get(key, {})
        return Sample.of(found or ())

    def accuracy(self, method: str, ranking: str, fraction: float) -> Sample:
        """Of pruned networks, seed by seed, at one fraction; none where it was not measured."""
        found = self.results.get(method, {}).get(ranking, {"fractions": (), "accuracy": ()})
        return Sample.of(dict(zip(found["fractions"], row, strict=True)).get(fraction) for row in found["accuracy"])

    @property
    def complete(self) -> bool:
        """Whether every requested part is there; a bandits run writes its cells as they come."""
        if self.experiment != "bandits":
            return True
        asked = [(p, a) for p in self.settings["problems"] for a in self.settings["agents"]]
        return all(agent in self.results.get(problem, {}) for problem, agent in asked)

    @property
    def command(self) -> str:
        """What repeats the run: every setting that differs from its default, as an option."""
        words = ["bayesadam", "paper", self.experiment, "--seed", str(self.metrics.get("seed", 0))]
        for name, usual in vars(_PAPER[self.experiment]).items():
            value, option = self.settings.get(name, usual), f"--{name.removeprefix('n_')}"
            if name == "changes":
                words += [word for key, each in value.items() for word in ("--set", f"{key}={_as_typed(each)}")]
            elif value not in (usual, list(usual) if isinstance(usual, tuple) else usual):
                words += [option] if value is True else [option, _as_typed(value)]
        if self.experiment in ("pruning", "bandits"):
            words += ["--device", self.metrics.get("device", "cpu")]
        return shlex.join(words)

    @property
    def too_short(self) -> bool:
        """Whether it trained or played for less than the paper; fewer seeds only widen the standard errors."""
        if self.experiment == "bandits":
            return self.settings["rounds"] is not None
        return bool(self.settings.get("epochs", 0) < getattr(_PAPER[self.experiment], "epochs", 0))

    @property
    def other_data(self) -> str:
        """How its data differ from the paper's, in words; empty where they do not."""
        if self.settings.get("data", "mnist") != "mnist":
            return f"on {self.settings['data']}, not on MNIST"
        return "trained with a gap in the data" if self.experiment == "regression" and self.settings.get("gap") else ""

    @property
    def own_settings(self) -> bool:
        """Whether a run of the table has settings that the paper does not state."""
        return self.settings.get("settings", "paper") != "paper" or bool(self.settings.get("changes"))

    @property
    def departures(self) -> str:
        """All the ways in which the run differs from the paper's, in words."""
        asked, paper, found = self.settings, _PAPER[self.experiment], [self.other_data]
        name, what = ("runs", "runs") if self.experiment == "bandits" else ("n_seeds", "seeds")
        if self.own_settings:
            changes = [f"{name} = {value}" for name, value in (asked.get("changes") or {}).items()]
            found.append(f"with our own settings, {', '.join([asked['settings'], *changes])}")
        if "census:1000" in self.results:
            found.append("census of 1,000 rounds instead of 10,000")
        if self.too_short:
            epochs = asked.get("epochs", 0)
            found.append(f"{epochs:,} epochs instead of {paper.epochs:,}" if epochs else f"{asked['rounds']:,} rounds")
        if name in asked and asked[name] < getattr(paper, name):
            found.append(f"{asked[name]} {what} instead of {getattr(paper, name)}")
        return ", ".join(filter(None, found))


def _as_typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def read(root: Path, name: str, experiment: str) -> Finished | None:
    """The run in `root/name`; None where there is none. A `metrics.json` that is damaged is an error."""
    path = root / name / "metrics.json"
    if not path.is_file():
        return None
    try:
        metrics = json.loads(path.read_bytes())
        command = metrics["command"]
    except (ValueError, KeyError, TypeError):
        raise FileError(f"{path} is not a run's metrics: remove it and run again") from None
    if command != experiment:
        raise FileError(f"{path} is of `bayesadam {command}`, not {experiment}: move it, or report on another folder")
    pictures = sorted(path.parent.glob("*.png"))
    return Finished(experiment, name, metrics, pictures[0].read_bytes() if pictures else b"")


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


Test = Callable[[Sample, Sample], bool | None]
# By name: the test, how the two means are written, and the words around them.
_TESTS: Mapping[str, tuple[Test, Callable[[float], str], str]] = {
    "above": (above, fixed, "{} against {}"),
    # Of the same networks, so that what they have in common drops out.
    "above in each": (
        lambda ours, theirs: above(Sample(tuple(map(sub, ours.values, theirs.values))), Sample((0.0, 0.0))),
        fixed,
        "{} against {}",
    ),
    "below": (lambda ours, theirs: above(theirs, ours), fixed, "{} against {}"),
    "alike": (lambda ours, theirs: 1 / 2 <= ours.mean / theirs.mean <= 2, "{:.1f}".format, "{} and {} times"),
    "keeps as much": (lambda ours, theirs: above(theirs, ours) is not True, percent, "{} against {} %"),
    "more accurate": (above, percent, "{} against {} %"),
    "loses less": (lambda ours, theirs: above(theirs, ours), percent, "{} against {} points"),
    "more than half as much again": (lambda ours, theirs: ours.mean > 1.5 * theirs.mean, digits, "{} against {} times"),
    "no dearer": (lambda ours, theirs: ours.mean <= 1.1 * theirs.mean, digits, "{} against {} times"),
    "under a tenth": (lambda ours, theirs: ours.mean < theirs.mean / 10, digits, "{} against {} of training"),
    "under a hundredth": (lambda ours, theirs: ours.mean < theirs.mean / 100, digits, "{} of training"),
    # By more than .1 nats, two standard errors counted.
    "clearly worse": (
        lambda ours, theirs: above(ours, Sample(tuple(v + 0.1 for v in theirs.values))) is True,
        digits,
        "{} against {} nats",
    ),
    "as accurate": (lambda ours, theirs: ours.mean >= theirs.mean - 0.002, percent, "{} and {} %"),
    # At most .08 below, two standard errors counted; open where they are too wide to tell.
    "comparable": (
        lambda ours, theirs: above(ours, Sample(tuple(v - 0.08 for v in theirs.values))),
        fixed,
        "{} against {}",
    ),
    # Not below beyond two standard errors; one run alone has none.
    "reaches": (
        lambda ours, theirs: None if len(ours.values) < 2 else not above(theirs, ours),
        fixed,
        "{}, the paper {}",
    ),
}


def sample_at(run: Finished, path: list[Any]) -> Sample:
    """What a path of `claims.json` names: one score, accuracy or reward over the seeds or runs.

    Figure 1: (method, score), and "growth" is the mean deviation outside over that in range; "largest" and "smallest"
    are those of Vadam's over its initial precisions. Figure 2: (method, ranking, fraction), and with a second fraction
    the accuracy lost between them. Table 1: (problem, agent), the Showdown's own where it was played, unless "our"
    stands first. "best other" has the highest mean of those that the claim is not about. Costs: (problem, method,
    measure).
    """
    if run.experiment == "cost":
        return run.sample(*path)
    if run.experiment == "regression":
        method, score = path
        if method in ("largest", "smallest"):
            swept = [run.sample(m, score) for m in run.results if m == "vadam" or m.startswith("vadam-precision")]
            extreme = max if method == "largest" else min
            return extreme(swept, key=lambda s: s.mean) if len(swept) > 1 else Sample(())
        near, far = run.sample(method, "std_in"), run.sample(method, "std_out")
        if score == "growth":
            return Sample.of([far.mean / near.mean] if near.values and near.mean > 0 else [])
        return run.sample(method, score)
    if run.experiment == "pruning":
        method, ranking, first, *second = path
        if method == "best other":
            others = [run.accuracy(m, next(iter(found)), first) for m, found in run.results.items() if "badam" not in m]
            return max((s for s in others if s.values), key=lambda s: s.mean, default=Sample(()))
        before = run.accuracy(method, ranking, first)
        if not second:
            return before
        after = run.accuracy(method, ranking, *second)
        return Sample(tuple(a - b for a, b in zip(before.values, after.values, strict=False)))
    problem, agent = path
    if agent == "best other":
        rivals = [sample_at(run, [problem, rival]) for rival in PAPER if rival != "vadam"]
        return max((s for s in rivals if s.values), key=lambda s: s.mean, default=Sample(()))
    if agent == "the paper's badam":
        mean, sd = published(problem, "badam") or (math.nan, math.nan)
        # Two values with the mean and the standard error of the paper's ten.
        error = sd / math.sqrt(BanditSettings.runs)
        return Sample((mean - error, mean + error))
    theirs = run.sample(problem, agent + SHOWDOWN, "reward_ratio")
    if theirs.values:
        return theirs
    return run.sample(problem, agent.removeprefix("our "), "reward_ratio")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words, its position in the paper, and the criterion by which it is judged.

    Each of the `comparisons` has a name, two paths of `sample_at`, a test, and "beside" if it is to be shown alone; "*"
    is every column of the table. Of `all_others` a single one that does better refutes it; with
    `most` it must hold for more than half of its checks, which count as one.
    """

    key: str
    words: str
    criterion: str
    comparisons: tuple[Any, ...] = ()
    place: str = "section 4"
    all_others: bool = False
    most: bool = False

    @property
    def experiment(self) -> str:
        """Which run answers it."""
        named = {"figure1": "regression", "figure2": "pruning", "table1": "bandits", "cost": "cost"}
        return named[self.key.partition("-")[0]]

    def checks(self, run: Finished) -> list[Check]:
        """Every comparison that the run has measured."""
        found = []
        for what, first, second, name, *beside in self.comparisons:
            test, show, words = _TESTS[name]
            for problem in _columns(run) if what.startswith("*") else [""]:
                ours, theirs = (sample_at(run, [problem if p == "*" else p for p in path]) for path in (first, second))
                if ours.values and theirs.values:
                    means, named = (ours.mean, theirs.mean), what.replace("*", HEADINGS.get(problem, problem))
                    shown, counts = words.format(*map(show, means)), not beside and ":" not in problem
                    found.append(Check(named, test(ours, theirs), shown, means, counts))
        counted = [check for check in found if check.counts]
        if not self.most or not counted:
            return found
        found = counted
        n, clearly = len(found), sum(check.passed is True for check in found)
        led = [check.what for check in found if check.values[0] > check.values[1]]
        passed = True if clearly > n / 2 else None if len(led) > n / 2 else False
        named = f" ({', '.join(led)})" if led else ""
        shown = f"ahead in {len(led)} of {n}{named}, {clearly} of them beyond two standard errors"
        return [Check("most columns", passed, shown, (float(len(led)), float(n)))]


def _columns(run: Finished) -> list[str]:
    """The paper's problems that a run has played; a part of one, such as `"census:1000"`, is shown alone."""
    return [name for name in run.results if published(name, "badam")]


CLAIMS = tuple(
    Claim(comparisons=tuple(record.pop("checks", ())), **record)
    for record in json.loads(files(__package__).joinpath("claims.json").read_text("utf-8"))
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
        """For `report.json`."""
        words = {name: getattr(self.claim, name) for name in ("words", "place", "criterion")}
        found = {"verdict": self.verdict.value, "decided_by": self.decided_by, "reservation": self.reservation}
        return {"claim": self.claim.key, **words, **found, "checks": [asdict(check) for check in self.checks]}


def judged(claim: Claim, run: Finished | None) -> Judged:
    """What the run says to the claim; one on other data than the paper's, or a shorter one, shows its checks alone."""
    checks = [] if run is None or run.experiment != claim.experiment else claim.checks(run)
    if run is None or not checks:
        return Judged(claim, Verdict.UNMEASURED)
    outcomes = {check.passed for check in checks if check.counts}
    if not outcomes:
        return Judged(claim, Verdict.UNMEASURED, tuple(checks), run.departures)
    if run.other_data or run.too_short:
        verdict = Verdict.UNMEASURED if run.other_data else Verdict.SHORT
    elif outcomes == {None}:
        verdict = Verdict.OPEN
    elif True not in outcomes or (claim.all_others and False in outcomes):
        verdict = Verdict.FAILED
    elif outcomes == {True} and not run.own_settings:
        verdict = Verdict.HELD
    else:
        verdict = Verdict.PARTLY
    return Judged(claim, verdict, tuple(checks), run.departures)
