"""Sets of small images, as tensors, and the IDX files of MNIST that hold them, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.data.fetching import find, locate
from bayesadam.data.registry import data_set
from bayesadam.errors import DataError, FileError, MissingFileError, SettingError

Split = Literal["train", "test"]

IMAGE_SETS = ("mnist", "fashion-mnist", "digits")
DIGITS_TEST = 360

_FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True, eq=False)
class Images:
    """Images x, float32 of shape (n, height · width) in [0, 1], and their classes y, int64 of shape (n,)."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def n_classes(self) -> int:
        """How many classes the training images have."""
        return int(self.train_y.max()) + 1


def load_images(name: str, *, progress: bool = False) -> Images:
    """The training and test images of `"mnist"`, `"fashion-mnist"` or `"digits"`, which needs the extra sklearn alone."""
    train = load_split(name, "train", progress=progress)
    return Images(name, *train, *load_split(name, "test", progress=progress))


def load_split(name: str, split: Split, *, progress: bool = False) -> tuple[Tensor, Tensor]:
    """The images and classes of one split, `"train"` or `"test"`; the other split's files may be absent."""
    record = data_set(name)
    if name not in IMAGE_SETS:
        raise SettingError(f"{name!r} is not a set of images: choose from {', '.join(IMAGE_SETS)}")
    if split not in _FILES:
        raise SettingError(f"split must be 'train' or 'test', got {split!r}")
    if record.embedded:
        return _digits(split)
    try:
        paths = locate(name, _FILES[split], progress=progress)
    except DataError as error:
        if split == "train" and all(file in find(name) for file in _FILES["test"]):
            raise DataError(f"{error}; the test pair is there: load_split({name!r}, 'test')") from error
        raise
    images, labels = (np.array(read_idx(paths[file])) for file in _FILES[split])
    if images.ndim < 2 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{paths[_FILES[split][0]]} and {paths[_FILES[split][1]]} do not belong together: "
            f"images of shape {images.shape}, labels of shape {labels.shape}"
        )
    x = torch.from_numpy(images).flatten(start_dim=1).float().div_(255)
    return x, torch.from_numpy(labels).long()


def _digits(split: Split) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, with the same 360 images held out for ever: numpy never changes this old generator."""
    x, y = require("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))
    rows = order[:DIGITS_TEST] if split == "test" else order[DIGITS_TEST:]
    return torch.from_numpy(x[rows]).float().div_(16), torch.from_numpy(y[rows]).long()


def read_idx(path: str | Path) -> npt.NDArray[np.generic]:
    """The array in an IDX file: two zero bytes, a type, the number of dimensions, their sizes, then the entries."""
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"no file at {path}")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise FileError(f"{path} is not an IDX file: it starts with {raw[:4]!r}")
    dims, body = raw[3], 4 + 4 * raw[3]
    shape = struct.unpack(f">{dims}I", raw[4:body]) if len(raw) >= body else ()
    dtype = np.dtype(_TYPES[raw[2]])
    if len(shape) != dims or len(raw) - body != math.prod(shape) * dtype.itemsize:
        raise FileError(f"{path} is truncated: {len(raw)} bytes do not hold an array of shape {shape}")
    return np.frombuffer(raw, dtype, offset=body).reshape(shape)
