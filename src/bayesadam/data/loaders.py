"""Images and tables as arrays: MNIST and its likes, scikit-learn's digits, and the tables behind the bandits."""

import gzip
import lzma
import math
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.data.fetching import UNPACKED, data_set, locate
from bayesadam.errors import DataError, FileError, MissingFileError, SettingError

Split = Literal["train", "test"]
Numbers = npt.NDArray[Any]

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
    """The training and test images of `"mnist"`, `"fashion-mnist"` or `"digits"`, which needs scikit-learn alone."""
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
        x, y = require("sklearn.datasets").load_digits(return_X_y=True)
        # The same images are held out for ever: numpy never changes this old generator.
        order = np.random.RandomState(0).permutation(len(x))
        rows = order[:DIGITS_TEST] if split == "test" else order[DIGITS_TEST:]
        return torch.from_numpy(x[rows]).float().div_(16), torch.from_numpy(y[rows]).long()
    paths = locate(name, _FILES[split], progress=progress)
    images, labels = (np.array(read_idx(paths[file])) for file in _FILES[split])
    if images.ndim < 2 or labels.shape != images.shape[:1]:
        shapes = f"images of shape {images.shape}, labels of shape {labels.shape}"
        raise DataError(f"{' and '.join(map(str, paths.values()))} do not belong together: {shapes}")
    return torch.from_numpy(images).flatten(start_dim=1).float().div_(255), torch.from_numpy(labels).long()


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes in an IDX file: 0, 0, the type 8, the number of dimensions, their sizes, then the entries."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise FileError(f"{path} is not an IDX file of bytes: it starts with {raw[:4]!r}")
    body = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:body]) if len(raw) >= body else ()
    if len(shape) != raw[3] or len(raw) - body != math.prod(shape):
        raise FileError(f"{path} is truncated: {len(raw)} bytes do not hold an array of shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=body).reshape(shape)


@dataclass(frozen=True, eq=False)
class Table:
    """A table row by row: contexts (rows, features) and labels (rows,), from 0 to n_labels − 1.

    The labels are 1 for an edible mushroom, the occupation, the class; None for financial and jester.
    """

    name: str
    contexts: Numbers
    labels: npt.NDArray[np.int64] | None = None
    n_labels: int = 0


def load_table(name: str, *, dtype: npt.DTypeLike = np.float32, progress: bool = False) -> Table:
    """One of the bandits' tables: mushroom, financial, jester, statlog, adult, covertype, census or parts of it.

    The contexts are neither scaled nor shuffled. A categorical column becomes one of zeros and ones for each value that
    occurs in it, in sorted order.

    The `dtype` is that of the contexts. With uint8 the one-hot census takes 1 GB and not 4.
    """
    data_set(name)
    if name not in _READERS:
        raise SettingError(f"{name!r} is not a table: choose from {', '.join(_READERS)}")
    return _READERS[name](*locate(name, progress=progress).values(), dtype=dtype)


def read_mushroom(path: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """22 categorical columns as 117; "?" counts as a value. The label is 1 where edible."""
    rows = _read(path, ",", 23, str)
    return Table("mushroom", _one_hot([*rows.T[1:]], dtype), (rows[:, 0] == "e").astype(np.int64), 2)


def read_financial(path: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """Price changes of 21 stocks. The line of tickers is skipped: it is not in the columns' order."""
    return Table("financial", _read(path, None, 21, np.float64, skip=1).astype(dtype))


def read_jester(path: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """The 40 jokes with the most ratings, in order of joke number, by the users who rated them all, in file order."""
    ratings = _read(path, ",", 101, np.float64)[:, 1:]
    rated = ratings != 99.0
    jokes = np.sort(np.argsort(-rated.sum(axis=0), kind="stable")[:40])
    users = rated[:, jokes].all(axis=1)
    return Table("jester", ratings[np.ix_(users, jokes)].astype(dtype))


def _read_classes(name: str, separator: str | None, width: int, path: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """Integer columns, then the class, 1 to 7 in the file."""
    rows = _read(path, separator, width + 1, np.int32)
    return Table(name, rows[:, :-1].astype(dtype), _classes(path, rows[:, -1] - 1, 7), 7)


read_statlog = partial(_read_classes, "statlog", None, 9)
read_covertype = partial(_read_classes, "covertype", ",", 54)


def read_adult(data: Path, test: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """6 numeric columns, then 7 categorical ones and the income one-hot: 92 in all. The label is the occupation.

    Rows with "?" are dropped. The full stop that ends an income in `test` is dropped too: it would make two more
    values of the income, and the 94 columns of the Showdown.
    """
    numeric, occupation = (0, 2, 4, 10, 11, 12), 6
    rows = np.char.strip(np.concatenate([_read(path, ",", 15, str, comment="|") for path in (data, test)]))
    rows = rows[(rows != "?").all(axis=1)]
    rows[:, -1] = np.char.rstrip(rows[:, -1], ".")
    others = [column for index, column in enumerate(rows.T) if index not in (*numeric, occupation)]
    contexts = np.concatenate([rows[:, numeric].astype(dtype), _one_hot(others, dtype)], axis=1)
    occupations, labels = np.unique(rows[:, occupation], return_inverse=True)
    return Table("adult", contexts, labels.astype(np.int64), len(occupations))


def read_census(path: Path, dtype: npt.DTypeLike = np.float32) -> Table:
    """67 categorical columns one-hot. The label is dOccup, 0 to 8; caseid is left out."""
    with _open(path) as stream:
        header = stream.readline().strip().split(",")
    rows = _read(path, ",", 69, np.int32, skip=1)
    features = [column for name, column in zip(header, rows.T, strict=True) if name not in ("caseid", "dOccup")]
    return Table("census", _one_hot(features, dtype), _classes(path, rows[:, header.index("dOccup")], 9), 9)


_READERS: dict[str, Callable[..., Table]] = {
    "mushroom": read_mushroom,
    "financial": read_financial,
    "jester": read_jester,
    "statlog": read_statlog,
    "adult": read_adult,
    "covertype": read_covertype,
    **dict.fromkeys(("census", "census-part", "census-1000"), read_census),
}


def _open(path: Path) -> TextIO:
    """The text of a plain, .gz or .xz file."""
    opened: TextIO = UNPACKED.get(path.suffix, open)(path, "rt", encoding="ascii")
    return opened


def _read(
    path: Path, separator: str | None, width: int, dtype: npt.DTypeLike, *, skip: int = 0, comment: str | None = None
) -> Numbers:
    """A table of `width` columns, below `skip` lines of something else."""
    try:
        with _open(path) as stream, warnings.catch_warnings():
            # numpy warns of empty lines.
            warnings.simplefilter("ignore", UserWarning)
            rows = np.loadtxt(stream, dtype, comments=comment, delimiter=separator, skiprows=skip, ndmin=2)
    except FileNotFoundError:
        raise MissingFileError(f"no file at {path}") from None
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not len(rows) or rows.shape[1] != width:
        raise DataError(f"cannot read {path}: {len(rows)} rows of {rows.shape[-1]} columns, expected {width}")
    return rows


def _classes(path: Path, labels: Numbers, n_labels: int) -> npt.NDArray[np.int64]:
    if labels.min() < 0 or labels.max() >= n_labels:
        raise DataError(f"{path} has a class beyond the {n_labels} that there are")
    return labels.astype(np.int64)


def _one_hot(columns: Sequence[Numbers], dtype: npt.DTypeLike) -> Numbers:
    """For each value of each column, in sorted order, a column of zeros and ones."""
    values = [np.unique(column) for column in columns]
    starts = np.cumsum([0, *(len(found) for found in values)])
    encoded = np.zeros((len(columns[0]), starts[-1]), dtype)
    rows = np.arange(len(encoded))
    for column, found, start in zip(columns, values, starts[:-1], strict=True):
        encoded[rows, start + np.searchsorted(found, column)] = 1
    return encoded
