"""Bandit problems: the benchmark's eight, and a user's own tables.

A run's rounds depend on the run's seed alone, and a shorter run is the beginning of a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bayesadam._checks import count
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.weights.draws import stream_seed
from experiments.data import Table, load_table

Numbers = npt.NDArray[Any]

EDIBLE, POISONED = 5.0, -35.0
_FINANCIAL_ARMS = 8
# The fixed arms of jester: of the runs of eight jokes in order of joke number, the one for which the mean rating over
# the mean best rating, .345, is nearest to Uniform's .34 in the paper, which does not say which eight it has.
_JESTER_ARMS = range(17, 25)
_WHEEL_MEANS, _WHEEL_ROUNDS = np.array([1.0, 1.0, 1.0, 1.0, 1.2]), 80_000
_CHUNK = 65_536


@dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of one run: contexts (t, features), rewards of every arm and their expectations (t, arms), float32."""

    contexts: Numbers
    rewards: Numbers
    expected: Numbers

    @property
    def optimum(self) -> Numbers:
        """The expected reward of the best arm, (t,), float64."""
        return np.asarray(self.expected.max(axis=1), np.float64)

    @property
    def uniform(self) -> Numbers:
        """The expected reward of a random arm, (t,), float64."""
        return np.asarray(self.expected.mean(axis=1, dtype=np.float64))

    @property
    def single(self) -> Numbers:
        """The expected reward of the arm that is best over all rounds, (t,), float64."""
        return np.asarray(self.expected[:, self.expected.sum(axis=0, dtype=np.float64).argmax()], np.float64)


@dataclass(frozen=True, eq=False)
class BanditProblem:
    """A contextual bandit.

    A run plays `rounds` by default and at most `most_rounds`; `make` maps (seed, rounds) to the rounds of one run.
    """

    name: str
    n_features: int
    n_arms: int
    rounds: int
    most_rounds: int | None
    make: Callable[[int, int], Rounds]

    def run(self, seed: int, rounds: int | None = None) -> Rounds:
        return self.make(seed, self.checked_rounds(rounds))

    def checked_rounds(self, rounds: int | None = None) -> int:
        """How many rounds a run plays, if the problem offers as many."""
        if rounds is not None:
            count("rounds", rounds, "of each run")
            if self.most_rounds is not None and rounds > self.most_rounds:
                raise SettingError(f"{self.name} offers {self.most_rounds} rounds, got rounds={rounds}")
        return self.rounds if rounds is None else rounds


def problem(name: str) -> BanditProblem:
    """One of the benchmark's, of `PROBLEMS`; a wheel has its δ, and `"census:1000"` the first 1,000 people alone.

    >>> problem("wheel:0.5").n_arms
    5
    """
    kind, _, option = name.partition(":")
    if kind == "wheel":
        try:
            return wheel(float(option or 0.95))
        except ValueError:
            raise SettingError(f"the wheel's δ must be a number between 0 and 1, got {name!r}") from None
    if name not in _TABLES:
        raise SettingError(f"problem must be one of {', '.join(PROBLEMS)}, got {name!r}")
    table = load_table(table_name(name))
    n, width = table.contexts.shape
    if name == "financial":
        return BanditProblem(name, width, _FINANCIAL_ARMS, n, n, partial(_financial_rounds, table.contexts))
    if name == "jester":
        arms = len(_JESTER_ARMS)
        return BanditProblem(name, width - arms, arms, n, n, partial(_jester_rounds, table.contexts))
    if name == "mushroom":
        return BanditProblem(name, width, 2, n, None, partial(_mushroom_rounds, table))
    assert table.labels is not None
    labelled = _known(name, table.contexts, table.labels, table.n_labels)
    # The paper plays fewer rounds of the two largest tables.
    return replace(labelled, rounds=min(10_000, n)) if kind in ("covertype", "census") else labelled


def table_name(name: str) -> str:
    """The data set behind a problem."""
    return "census-1000" if name == "census:1000" else name.partition(":")[0]


def classification_problem(X: Any, y: Any, *, name: str = "classification", standardise: bool = True) -> BanditProblem:
    """A table with labels as a bandit: one arm per label, reward 1 for the row's own and 0 for the others.

    >>> classification_problem([[0.0], [1.0], [2.0]], ["a", "b", "a"]).n_arms
    2

    Contexts X are (rows, features), numpy, pandas or nested lists; labels y (rows,), of any kind that can be sorted.
    With `standardise` columns are scaled to mean 0 and standard deviation 1, in float64; constant ones become 0.
    """
    contexts, labels = _numbers(X, name, "contexts"), np.asarray(y)
    if labels.ndim != 1 or len(labels) != len(contexts):
        raise MatchError(f"{name}: {len(contexts)} rows of X need as many labels, got y of shape {labels.shape}")
    # NaN differs from itself.
    missing = [row for row, label in enumerate(labels.tolist()) if label is None or label != label]
    if missing:
        raise FileError(f"{name}: the label of row {missing[0]} is missing: drop the row")
    values, codes = np.unique(labels, return_inverse=True)
    return _known(name, contexts, codes, len(values), standardise=standardise)


def reward_problem(contexts: Any, rewards: Any, *, name: str = "rewards", standardise: bool = True) -> BanditProblem:
    """A table of what every arm pays in every row as a bandit.

    >>> reward_problem([[0.0], [1.0]], [[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]).n_arms
    3

    Contexts, (rows, features), are as in `classification_problem`; rewards are (rows, arms).
    """
    table, pays = _numbers(contexts, name, "contexts"), _numbers(rewards, name, "rewards").astype(np.float32)
    if len(pays) != len(table):
        raise MatchError(f"{name}: {len(table)} contexts need as many rows of rewards, got {len(pays)}")
    return _known(name, table, pays, pays.shape[1], standardise=standardise)


def wheel(delta: float = 0.95) -> BanditProblem:
    """The wheel: contexts uniform in the unit disc; beyond the radius δ the quadrant's own arm pays 50, elsewhere 1.

    The nearer the radius is to 1, the rarer the prize.
    """
    if not 0 < delta < 1:
        raise SettingError(f"the wheel's δ must lie between 0 and 1, got {delta!r}")
    return BanditProblem(f"wheel:{delta:g}", 2, len(_WHEEL_MEANS), _WHEEL_ROUNDS, None, partial(_wheel_rounds, delta))


def _random(seed: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(stream_seed(seed, purpose)))


def _moments(rows: Numbers) -> tuple[Numbers, Numbers]:
    """The columns' means and standard deviations, 1 of a constant one: in float64, a piece at a time."""
    pieces = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    shift = np.sum([piece.sum(axis=0, dtype=np.float64) for piece in pieces], axis=0) / len(rows)
    squares = np.sum([np.square(piece - shift).sum(axis=0) for piece in pieces], axis=0)
    constant = rows.max(axis=0) == rows.min(axis=0)
    return np.where(constant, rows[0], shift), np.where(constant, 1.0, np.sqrt(squares / len(rows)))


def _shuffled(n: int, seed: int, rounds: int) -> Numbers:
    return _random(seed, "rows").permutation(n)[:rounds]


def _known(name: str, contexts: Numbers, rewards: Numbers, n_arms: int, *, standardise: bool = True) -> BanditProblem:
    """A problem whose rewards are known: those of all arms, (rows, arms), or labels (rows,) of which one is right."""
    if n_arms < 2:
        raise FileError(f"{name}: a bandit needs two arms or more, got {n_arms}")
    n, (shift, scale) = len(contexts), _moments(contexts) if standardise else (0.0, 1.0)

    def make(seed: int, rounds: int) -> Rounds:
        rows = _shuffled(n, seed, rounds)
        pays = rewards[rows] if rewards.ndim > 1 else (rewards[rows, None] == np.arange(n_arms)).astype(np.float32)
        return Rounds(np.asarray((contexts[rows] - shift) / scale, np.float32), pays, pays)

    return BanditProblem(name, contexts.shape[1], n_arms, n, n, make)


def _mushroom_rounds(table: Table, seed: int, rounds: int) -> Rounds:
    """Pass pays 0; eat pays 5 if edible, otherwise 5 or −35, each with probability ½."""
    assert table.labels is not None
    rows = _random(seed, "rows").integers(len(table.labels), size=rounds)
    ill = _random(seed, "rewards").random(rounds) < 0.5
    edible = table.labels[rows] == 1
    eat = np.where(edible | ~ill, EDIBLE, POISONED)
    expected = np.where(edible, EDIBLE, 0.5 * (EDIBLE + POISONED))
    rewards, expected = (np.stack([0 * eat, eats], axis=1).astype(np.float32) for eats in (eat, expected))
    return Rounds(table.contexts[rows].astype(np.float32), rewards, expected)


def _financial_rounds(table: Numbers, seed: int, rounds: int) -> Rounds:
    """Arm a is a portfolio that differs by run, x·β_a + N(0, (0.01 (a + 1))²) with |β_a| = 1."""
    weights = _random(seed, "portfolios").uniform(-1, 1, (table.shape[1], _FINANCIAL_ARMS))
    weights /= np.linalg.norm(weights, axis=0)
    contexts = table[_shuffled(len(table), seed, rounds)].astype(np.float32)
    expected = contexts.astype(np.float64) @ weights
    noise = _random(seed, "rewards").standard_normal(expected.shape) * 0.01 * np.arange(1, _FINANCIAL_ARMS + 1)
    return Rounds(contexts, (expected + noise).astype(np.float32), expected.astype(np.float32))


def _jester_rounds(ratings: Numbers, seed: int, rounds: int) -> Rounds:
    """The ratings of 8 jokes are the rewards, those of the other 32 the context."""
    table = ratings[_shuffled(len(ratings), seed, rounds)].astype(np.float32)
    contexts, rewards = np.delete(table, _JESTER_ARMS, axis=1).copy(), table[:, _JESTER_ARMS].copy()
    return Rounds(contexts, rewards, rewards)


def _wheel_rounds(delta: float, seed: int, rounds: int) -> Rounds:
    """Arms 0 to 3 belong to the quadrants (+, +), (+, −), (−, +), (−, −); arm 4 is the safe one."""
    radius, turn = _random(seed, "rows").random((rounds, 2)).T
    radius, angle = np.sqrt(radius), 2 * math.pi * turn
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    arms = np.arange(len(_WHEEL_MEANS))
    prize = (radius >= delta)[:, None] & (arms == (2 * (x < 0) + (y < 0))[:, None])
    expected = np.where(prize, 50.0, _WHEEL_MEANS)
    rewards = expected + np.where(prize, 0.01, 0.05) * _random(seed, "rewards").standard_normal(expected.shape)
    contexts = np.stack([x, y], axis=1).astype(np.float32)
    return Rounds(contexts, rewards.astype(np.float32), expected.astype(np.float32))


_TABLES = ("mushroom", "financial", "jester", "statlog", "adult", "covertype", "census", "census:1000")
PROBLEMS = (*_TABLES, "wheel")


def _numbers(values: Any, name: str, what: str) -> Numbers:
    """A table of numbers that are finite in float32, as float64."""
    try:
        table = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FileError(f"{name}: the {what} are not a table of numbers: {error}") from None
    if table.ndim != 2 or not table.size:
        raise FileError(f"{name}: the {what} must be a table that is not empty, got shape {table.shape}")
    if not (np.abs(table) <= np.finfo(np.float32).max).all():
        raise FileError(f"{name}: the {what} have numbers that are not finite in float32")
    return table
