"""Sets of small images, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.data.fetching import find, locate
from bayesadam.data.idx import read_idx
from bayesadam.data.registry import data_set
from bayesadam.errors import DataError, SettingError

Split = Literal["train", "test"]

IMAGE_SETS = ("mnist", "fashion-mnist", "digits")
DIGITS_TEST = 360

_FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


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
