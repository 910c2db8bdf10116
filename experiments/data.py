"""The data of the experiments, as tensors and arrays: images, the tables behind the bandits, the toy regression.

A file is looked for in the folder that BAYESADAM_DATA names, then in the cache. Else it is downloaded to the cache, and
has its name there only once its checksum is right: one set is never taken for another.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import lzma
import math
import os
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam.errors import FileError, MissingExtraError, MissingFileError, SettingError

TIMEOUT = 20.0
Numbers = npt.NDArray[Any]
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class DataFile(NamedTuple):
    """A file below the folder of all sets, which may also hold it as .gz or .xz; a source of .zip holds it packed."""

    folder: str
    n_bytes: int
    sha256: str
    url: str


def _sets() -> dict[str, dict[str, DataFile]]:
    """The files of every set by name, out of `sets.csv`; two sets need none.

    Jester's authors have a spreadsheet, which is not this file; UCI has statlog as .Z, which Python cannot unpack.
    """
    sets: dict[str, dict[str, DataFile]] = {"digits": {}, "wheel": {}}
    with Path(__file__).with_name("sets.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            about = DataFile(row["folder"], int(row["bytes"]), row["sha256"], row["url"])
            sets.setdefault(row["set"], {})[row["file"]] = about
    return sets


DATA_SETS = _sets()


def data_set(name: str) -> dict[str, DataFile]:
    """The files of one data set."""
    if name not in DATA_SETS:
        raise SettingError(f"no data set is called {name!r}: choose from {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def _folders() -> tuple[Path | None, Path | None]:
    """The folder that BAYESADAM_DATA names, and BAYESADAM_CACHE or pooch's; None for what there is not."""
    named, cache = os.environ.get("BAYESADAM_DATA"), os.environ.get("BAYESADAM_CACHE")
    if named and not Path(named).expanduser().is_dir():
        raise SettingError(f"BAYESADAM_DATA names {named}, which is not a folder: correct it, or unset it")
    try:
        cache = cache or require("pooch").os_cache("bayesadam")
    except MissingExtraError:
        cache = None
    return Path(named).expanduser() if named else None, Path(cache).expanduser() if cache else None


def find(name: str) -> dict[str, Path]:
    """The files of a data set on this machine, by published name; nothing is downloaded."""
    paths: dict[str, Path] = {}
    for place in filter(None, _folders()):
        for file, about in data_set(name).items():
            for form in (file, f"{file}.gz", f"{file}.xz"):
                if (path := place / about.folder / form).is_file():
                    paths.setdefault(file, path)
    return paths


def locate(name: str, files: Sequence[str] = ()) -> dict[str, Path]:
    """Where the files of a data set are, all or these, by published name; missing ones are downloaded to the cache.

    Raises:
        FileError: a file has the wrong size, or is absent and cannot be downloaded.
    """
    present, paths = find(name), {}
    for file, about in data_set(name).items():
        if files and file not in files:
            continue
        path = paths[file] = present.get(file) or _download(name, file, about)
        # A truncated file is caught without reading it.
        if path.name == file and (size := path.stat().st_size) != about.n_bytes:
            wrong = f"{path} has {size:,} bytes, expected {about.n_bytes:,}: it is truncated or another file"
            raise FileError(f"{wrong}; remove it to have it downloaded")
    return paths


def _download(name: str, file: str, about: DataFile) -> Path:
    """Download one file to the cache."""
    named, cache = _folders()
    places = f"neither in BAYESADAM_DATA ({named or 'not set'}) nor in {cache}, below {about.folder}"
    absent = f"{file} of the data set {name!r} is {places}: put it there by hand"
    try:
        # A server that packs what it sends would have it unpacked on arrival, .gz files included.
        download = require("pooch").HTTPDownloader(timeout=TIMEOUT, headers={"Accept-Encoding": "identity"})
    except MissingExtraError as error:
        raise FileError(f"{absent}; to download it, {error}") from error
    target = (cache or Path()) / about.folder / file
    print(f"{name}: {about.n_bytes:,} bytes from {about.url}", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            download(about.url, temporary, None)
            if about.url.endswith(".zip"):
                with zipfile.ZipFile(temporary) as packed:
                    largest = max(packed.infolist(), key=lambda member: member.file_size)
                    # One byte more than expected shows a wrong file, whatever it would unpack to.
                    content = packed.open(largest).read(about.n_bytes + 1)
                temporary.write_bytes(content)
            if (digest := hashlib.sha256(temporary.read_bytes()).hexdigest()) != about.sha256:
                raise FileError(f"wrong checksum: {digest}, expected {about.sha256}")
    except _DAMAGE as error:
        raise FileError(f"{absent}; {about.url} did not deliver it: {error}") from error
    return target


IMAGE_SETS = ("mnist", "fashion-mnist", "digits")
_DIGITS_TEST = 360


@dataclass(frozen=True, eq=False)
class Images:
    """Images x, (n, height · width) in [0, 1], and their classes y, (n,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def n_classes(self) -> int:
        """How many classes the training images have."""
        return int(self.train_y.max()) + 1


def load_images(name: str) -> Images:
    """The training and test images of `"mnist"`, `"fashion-mnist"` or `"digits"`, which needs scikit-learn alone."""
    if name not in IMAGE_SETS:
        raise SettingError(f"images are those of {', '.join(IMAGE_SETS)}, got {name!r}")
    if name != "digits":
        splits = [(x.flatten(1), y) for x, y in (load_split(name, split) for split in ("train", "t10k"))]
        return Images(*splits[0], *splits[1])
    x, y = require("sklearn.datasets").load_digits(return_X_y=True)
    # The same images are held out for ever: numpy never changes this old generator.
    order = np.random.RandomState(0).permutation(len(x))
    x, y = torch.tensor(x[order]).float().div_(16), torch.tensor(y[order]).long()
    return Images(x[_DIGITS_TEST:], y[_DIGITS_TEST:], x[:_DIGITS_TEST], y[:_DIGITS_TEST])


def load_split(name: str, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, height, width) in [0, 1] and classes of `"train"` or `"t10k"`."""
    names = [f"{split}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    paths = locate(name, names)
    files = [paths[file] for file in names]
    images, labels = map(read_idx, files)
    if images.ndim < 2 or labels.shape != images.shape[:1]:
        shapes = f"images of shape {images.shape}, labels of shape {labels.shape}"
        raise FileError(f"{' and '.join(map(str, files))} do not belong together: {shapes}")
    return torch.tensor(images).float().div_(255), torch.tensor(labels).long()


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes in an IDX file: 0, 0, the type 8, the number of dimensions, their sizes, then the entries."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except _DAMAGE as error:
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

    The labels are 1 for an edible mushroom, the occupation, the class; None for financial and jester. A categorical
    column is one of zeros and ones for each value that occurs in it, in sorted order.
    """

    contexts: Numbers
    labels: npt.NDArray[np.int64] | None = None
    n_labels: int = 0


def load_table(name: str) -> Table:
    """One of the bandits' tables, neither scaled nor shuffled."""
    if name not in _READERS:
        raise SettingError(f"{name!r} is not a table: choose from {', '.join(_READERS)}")
    return _READERS[name](*locate(name).values())


def read_mushroom(path: Path) -> Table:
    """22 categorical columns as 117; "?" counts as a value. The label is 1 where edible."""
    rows = _read(path, ",", 23, str)
    return Table(_one_hot([*rows.T[1:]]), (rows[:, 0] == "e").astype(np.int64), 2)


def read_financial(path: Path) -> Table:
    """Price changes of 21 stocks. The line of tickers is skipped: it is not in the columns' order."""
    return Table(_read(path, None, 21, np.float64, skip=1))


def read_jester(path: Path) -> Table:
    """The 40 jokes with the most ratings, in order of joke number, by the users who rated them all, in file order."""
    ratings = _read(path, ",", 101, np.float64)[:, 1:]
    rated = ratings != 99.0
    jokes = np.sort(np.argsort(-rated.sum(axis=0), kind="stable")[:40])
    return Table(ratings[np.ix_(rated[:, jokes].all(axis=1), jokes)].astype(np.float32))


def _read_classes(separator: str | None, width: int, path: Path) -> Table:
    """Integer columns, then the class, 1 to 7 in the file."""
    rows = _read(path, separator, width + 1, np.int32)
    return Table(rows[:, :-1].astype(np.float32), _classes(path, rows[:, -1] - 1, 7), 7)


read_statlog, read_covertype = partial(_read_classes, None, 9), partial(_read_classes, ",", 54)


def read_adult(data: Path, test: Path) -> Table:
    """6 numeric columns, then 7 categorical ones and the income one-hot: 92 in all. The label is the occupation.

    Rows with "?" are dropped. The full stop that ends an income in `test` is dropped too: it would make two more
    values of the income, and the 94 columns of the Showdown.
    """
    numeric, occupation = (0, 2, 4, 10, 11, 12), 6
    rows = np.char.strip(np.concatenate([_read(path, ",", 15, str, comment="|") for path in (data, test)]))
    rows = rows[(rows != "?").all(axis=1)]
    rows[:, -1] = np.char.rstrip(rows[:, -1], ".")
    others = [column for index, column in enumerate(rows.T) if index not in (*numeric, occupation)]
    contexts = np.concatenate([rows[:, numeric].astype(np.float32), _one_hot(others)], axis=1)
    occupations, labels = np.unique(rows[:, occupation], return_inverse=True)
    return Table(contexts, labels.astype(np.int64), len(occupations))


def read_census(path: Path) -> Table:
    """67 categorical columns one-hot. The label is dOccup, 0 to 8; caseid is left out."""
    with _open(path) as stream:
        header = stream.readline().strip().split(",")
    rows = _read(path, ",", 69, np.int32, skip=1)
    features = [column for name, column in zip(header, rows.T, strict=True) if name not in ("caseid", "dOccup")]
    return Table(_one_hot(features), _classes(path, rows[:, header.index("dOccup")], 9), 9)


_READERS: dict[str, Callable[..., Table]] = {
    "mushroom": read_mushroom,
    "financial": read_financial,
    "jester": read_jester,
    "statlog": read_statlog,
    "adult": read_adult,
    "covertype": read_covertype,
    "census": read_census,
    "census-1000": read_census,
}


def _open(path: Path) -> Any:
    """The text of a plain, .gz or .xz file."""
    return _OPENERS.get(path.suffix, open)(path, "rt", encoding="ascii")


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
    except _DAMAGE as error:
        raise FileError(f"cannot read {path}: {error}") from error
    if not len(rows) or rows.shape[1] != width:
        raise FileError(f"cannot read {path}: {len(rows)} rows of {rows.shape[-1]} columns, expected {width}")
    return rows


def _classes(path: Path, labels: Numbers, n_labels: int) -> npt.NDArray[np.int64]:
    if labels.min() < 0 or labels.max() >= n_labels:
        raise FileError(f"{path} has a class beyond the {n_labels} that there are")
    return labels.astype(np.int64)


def _one_hot(columns: Sequence[Numbers]) -> Numbers:
    """For each value of each column, in sorted order, a column of zeros and ones, in bytes."""
    values = [np.unique(column) for column in columns]
    starts = np.cumsum([0, *map(len, values)])
    # Made once: the whole census takes a gigabyte.
    encoded = np.zeros((len(columns[0]), starts[-1]), np.uint8)
    rows = np.arange(len(encoded))
    for column, present, start in zip(columns, values, starts[:-1], strict=True):
        encoded[rows, start + np.searchsorted(present, column)] = 1
    return encoded


Interval = tuple[float, float]
N_TRAIN, TRAIN_INTERVAL, TEST_INTERVAL = 200, (0.0, 0.5), (-0.5, 1.2)
# The paper writes ε ~ N(0, 0.02), and we read a standard deviation. dy/dε reaches 1 + 1.8 π ≈ 6.7, so y varies by up
# to 0.13, as in the paper's picture; were 0.02 a variance, by up to 0.94, and the curve, of height 1, would be buried.
_NOISE_STD = 0.02


class ToyData(NamedTuple):
    """Inputs x and targets y, both float32 of shape (n, 1)."""

    x: Tensor
    y: Tensor


def toy_function(x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """y = x + 0.3 sin(2π(x + ε)) + 0.3 sin(4π(x + ε)) + ε, with ε the `noise`.

    ε enters the sines too, so the standard deviation of y depends on x.

    >>> toy_function(torch.tensor([0.0, 0.25])).tolist()
    [0.0, 0.550000011920929]
    """
    angle = 2 * math.pi * (x + noise)
    return x + 0.3 * torch.sin(angle) + 0.3 * torch.sin(2 * angle) + noise


def toy_points(n: int, *, generator: torch.Generator, intervals: Sequence[Interval] = (TRAIN_INTERVAL,)) -> ToyData:
    """Noisy points with x uniform over a union of disjoint intervals (low, high) and ε ~ N(0, 0.02²)."""
    lows, highs = torch.tensor(intervals, dtype=torch.float32).unbind(dim=1)
    ends = (highs - lows).cumsum(dim=0)
    # Positions along the intervals laid end to end, then moved back to where their interval lies.
    position = torch.rand(n, generator=generator) * ends[-1]
    which = torch.searchsorted(ends, position, right=True).clamp_(max=len(lows) - 1)
    x = highs[which] - (ends[which] - position)
    noise = _NOISE_STD * torch.randn(n, generator=generator)
    return ToyData(x.unsqueeze(1), toy_function(x, noise).unsqueeze(1))


def toy_grid() -> ToyData:
    """Evenly spaced points with y the function without noise."""
    x = torch.linspace(*TEST_INTERVAL, 341).unsqueeze(1)
    return ToyData(x, toy_function(x))
