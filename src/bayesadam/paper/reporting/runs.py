"""Finished runs of the experiments, as their folders hold them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bayesadam.errors import FileError
from bayesadam.paper.bandits import BanditSettings
from bayesadam.paper.pruning import PruningSettings
from bayesadam.paper.regression import METRICS, SHOWN, RegressionSettings
from bayesadam.paper.reporting.numbers import Sample

EXPERIMENTS = ("regression", "pruning", "bandits")


@dataclass(frozen=True, eq=False)
class Finished:
    """One run's `metrics.json`, with Figure 1's curves and its picture as PNG where the run saved them.

    `name` is the run's folder below the report's, such as `"bandits-paper"`; `sha256` is that of the file.
    """

    experiment: str
    name: str
    metrics: Mapping[str, Any]
    sha256: str
    curves: Mapping[str, Any] | None = None
    picture: bytes | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it was asked."""
        return dict(self.metrics["settings"])

    @property
    def results(self) -> Mapping[str, Any]:
        """What it found."""
        return dict(self.metrics["results"])

    @property
    def file(self) -> str:
        """The file's path below the report's folder."""
        return f"{self.name}/metrics.json"

    def at(self, *keys: str) -> str:
        """Where a result stands in the file, as a JSON pointer."""
        return "/".join([f"{self.file}#", "results", *(key.replace("~", "~0").replace("/", "~1") for key in keys)])

    def sample(self, *keys: str) -> Sample:
        """The numbers over seeds or runs that stand there; none where there is no such place."""
        place: Any = self.results
        for key in keys:
            place = place.get(key, {})
        return Sample.of(place or (), self.at(*keys))

    def accuracy(self, method: str, ranking: str, fraction: float) -> Sample:
        """Of pruned networks, seed by seed, at one fraction; none where it was not measured."""
        found = self.results.get(method, {}).get(ranking)
        if found is None or fraction not in found["fractions"]:
            return Sample(())
        place = found["fractions"].index(fraction)
        return Sample.of((row[place] for row in found["accuracy"]), self.at(method, ranking, "accuracy"))

    @property
    def complete(self) -> bool:
        """Whether every part that was asked for is there; a bandits run writes its cells as they come."""
        if self.experiment != "bandits":
            return True
        asked = [(p, a) for p in self.settings["problems"] for a in self.settings["agents"]]
        return all(agent in self.results.get(problem, {}) for problem, agent in asked)

    @property
    def too_short(self) -> bool:
        """Whether it trained or played for less than the paper; fewer seeds only widen the standard errors."""
        if self.experiment == "bandits":
            return self.settings["rounds"] is not None
        return bool(self.settings["epochs"] < _PAPER[self.experiment].epochs)

    @property
    def other_data(self) -> str:
        """How its data differ from the paper's, in words; nothing where they do not."""
        if self.experiment == "pruning" and self.settings["data"] != "mnist":
            return f"on {self.settings['data']}, not on MNIST"
        return "trained with a gap in the data" if self.experiment == "regression" and self.settings.get("gap") else ""

    @property
    def shortfall(self) -> str:
        """How it is shorter than the paper's, in words; nothing where it is not."""
        asked, paper, found = self.settings, _PAPER[self.experiment], []
        if self.experiment == "bandits" and self.too_short:
            found.append(f"{asked['rounds']:,} rounds a run")
        elif self.too_short:
            found.append(f"{asked['epochs']:,} epochs instead of {paper.epochs:,}")
        name, what = ("runs", "run") if self.experiment == "bandits" else ("n_seeds", "seed")
        if asked[name] < getattr(paper, name):
            found.append(f"{asked[name]} {what}{'s' * (asked[name] != 1)} instead of {getattr(paper, name)}")
        return ", ".join(found)

    @property
    def unlike_the_paper(self) -> str:
        """Other data and less work, in words."""
        return ", ".join(filter(None, (self.other_data, self.shortfall)))


_PAPER: Mapping[str, Any] = dict(
    zip(EXPERIMENTS, (RegressionSettings(), PruningSettings(), BanditSettings()), strict=True)
)


def read(root: Path, name: str, experiment: str) -> Finished | None:
    """The run in `root/name`; None where there is none.

    Raises:
        FileError: there is a `metrics.json` that is damaged, or another command's.
    """
    path = root / name / "metrics.json"
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    try:
        metrics = json.loads(raw)
        command = metrics["command"]
    except (ValueError, KeyError, TypeError):
        raise FileError(f"{path} is not a run's metrics: remove it and run again") from None
    if command != experiment:
        raise FileError(f"{path} is of `bayesadam {command}`, not {experiment}: move it, or report on another folder")
    try:
        _check(experiment, metrics["settings"], metrics["results"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FileError(f"{path} lacks what a run of {experiment} holds ({error!r}): remove it and run again") from None
    found = Finished(experiment, name, metrics, hashlib.sha256(raw).hexdigest())
    if experiment != "regression":
        return found
    curves, picture = _curves(root / name / "curves.json", metrics["results"]), root / name / "figure1.png"
    return replace(found, curves=curves, picture=picture.read_bytes() if picture.is_file() else None)


def others(root: Path, experiment: str) -> list[Finished]:
    """Further runs of an experiment, in folders such as `bandits-paper`, that are complete."""
    names = sorted(path.parent.name for path in root.glob(f"{experiment}-*/metrics.json"))
    found = (read(root, name, experiment) for name in names)
    return [run for run in found if run is not None and run.complete]


def _numbers(*lists: Any, alike: bool = False) -> None:
    """Refuse what is not a list of numbers and, if they must be alike, lists of unequal length."""
    for values in lists:
        if not isinstance(values, list) or not {type(value) for value in values} <= {int, float, type(None)}:
            raise ValueError(f"not a list of numbers: {str(values)[:60]}")
    if alike and len({len(values) for values in lists}) > 1:
        raise ValueError("lists of unequal length")


def _check(experiment: str, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Refuse settings and results that lack what the page shows, or have it in another form."""
    names: list[Any] = []
    counts = [(settings, name) for name in (("runs",) if experiment == "bandits" else ("epochs", "n_seeds"))]
    parts = list(results.values())
    if experiment == "regression":
        for values in (scores[name] for scores in parts for name in METRICS):
            _numbers(values)
    elif experiment == "pruning":
        names = [settings["data"]]
        for found in (found for rankings in parts for found in rankings.values()):
            _numbers(found["fractions"], *found["accuracy"], alike=True)
    else:
        names = [settings["settings"], *settings["problems"], *settings["agents"]]
        counts += [] if settings["rounds"] is None else [(settings, "rounds")]
        for cell in (cell for agents in parts for cell in agents.values()):
            _numbers(cell["reward_ratio"], cell["regret_ratio"])
            _numbers(cell["points"], cell["regret_mean"], cell["regret_sd"], alike=True)
            counts.append((cell, "rounds"))
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a name is not text")
    for holder, name in counts:
        if type(holder[name]) is not int:
            raise ValueError(f"{name} is not a whole number")


def _curves(path: Path, results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Figure 1's curves; None where there are none, or they are not of these results."""
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        curves = [found["methods"][method][name] for method in results for name in SHOWN]
        _numbers(found["truth"], *found["train"].values())
        _numbers(found["x"], *curves, alike=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found
