"""The tables behind the bandits: contexts as numbers, neither scaled nor shuffled, and labels counted from 0.

A categorical column becomes one column of zeros and ones for each value that occurs in it, in sorted order.
"""

from __future__ import annotations

import gzip
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from bayesadam.data.fetching import locate
from bayesadam.data.registry import data_set
from bayesadam.errors import DataError, MissingFileError, SettingError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Numbers = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]

JESTER_JOKES = 40
JESTER_UNRATED = 99.0
ADULT_COLUMNS = 15
ADULT_NUMBERS = (0, 2, 4, 10, 11, 12)
ADULT_OCCUPATION = 6
ADULT_INCOME = 14
CENSUS_COLUMNS = 69
CENSUS_KEY = "caseid"
CENSUS_LABEL = "dOccup"


@dataclass(frozen=True, eq=False)
class Table:
    """A table as its file has it, row by row.

    Attributes:
        contexts: (rows, features). Of jester, the ratings of 40 jokes in [−10, 10].
        labels: (rows,), from 0 to n_labels − 1, whether or not each occurs: 1 for an edible mushroom, the occupation, the
            class. None, and `n_labels` 0, for financial and jester.
    """

    name: str
    contexts: Numbers
    labels: Labels | None = None
    n_labels: int = 0


def load_table(name: str, *, dtype: npt.DTypeLike = np.float32, progress: bool = False) -> Table:
    """One of the bandits' tables: mushroom, financial, jester, statlog, adult, covertype or census.

    The `dtype` is that of the contexts. float32 holds every integer in these files exactly, but a mean over many rows
    should be taken in float64. With uint8 the one-hot census takes 1 GB and not 4.
    """
    data_set(name)
    if name not in _READERS:
        raise SettingError(f"{name!r} is not a table: choose from {', '.join(_READERS)}")
    return _READERS[name](*locate(name, progress=progress).values(), dtype=dtype)


def read_mushroom(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """22 categorical columns as 117; "?" counts as a value. The label is 1 where edible."""
    columns = _columns(path, _fields(path, ",", width=23))
    wrong = np.flatnonzero(~np.isin(columns[0], ("p", "e")))
    if len(wrong):
        raise DataError(f"{path}, line {wrong[0] + 1}: class {str(columns[0][wrong[0]])!r}, expected one of ('p', 'e')")
    return Table("mushroom", _one_hot(columns[1:], dtype), (columns[0] == "e").astype(np.int64), 2)


def read_financial(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """Price changes of 21 stocks. The line of tickers is skipped: it is not in the columns' order."""
    return Table("financial", _numbers(path, None, width=21, dtype=np.float64, skip=1).astype(dtype))


def read_jester(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """The 40 jokes with the most ratings, in order of joke number, by the users who rated them all, in file order."""
    ratings = _numbers(path, ",", width=101, dtype=np.float64)[:, 1:]
    rated = ratings != JESTER_UNRATED
    jokes = np.sort(np.argsort(-rated.sum(axis=0), kind="stable")[:JESTER_JOKES])
    users = rated[:, jokes].all(axis=1)
    return Table("jester", ratings[np.ix_(users, jokes)].astype(dtype))


def read_statlog(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """9 integer columns, then the class, 1 to 7 in the file."""
    return _with_class_last("statlog", path, None, width=10, dtype=dtype)


def read_covertype(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """54 integer columns, then the class, 1 to 7 in the file."""
    return _with_class_last("covertype", path, ",", width=55, dtype=dtype)


def _with_class_last(name: str, path: str | Path, separator: str | None, width: int, dtype: npt.DTypeLike) -> Table:
    rows = _numbers(path, separator, width, np.int32)
    return Table(name, rows[:, :-1].astype(dtype), _classes(path, rows[:, -1] - 1, 7), 7)


def read_adult(data: str | Path, test: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """6 numeric columns, then 7 categorical ones and the income one-hot: 92 in all. The label is the occupation.

    Rows with "?" are dropped. The full stop that ends an income in `test` is dropped too: it would make two more
    values of the income, and the 94 columns of the Showdown.
    """
    rows = [
        (*fields[:ADULT_INCOME], fields[ADULT_INCOME].removesuffix("."))
        for path in (data, test)
        for fields in _fields(path, ",", ADULT_COLUMNS, comment="|", numbers=ADULT_NUMBERS)
        if "?" not in fields
    ]
    columns = _columns(data, rows)
    numbers = np.stack([columns[index].astype(dtype) for index in ADULT_NUMBERS], axis=1)
    others = [index for index in range(ADULT_COLUMNS) if index not in (*ADULT_NUMBERS, ADULT_OCCUPATION)]
    contexts = np.concatenate([numbers, _one_hot([columns[index] for index in others], dtype)], axis=1)
    occupations, labels = np.unique(columns[ADULT_OCCUPATION], return_inverse=True)
    return Table("adult", contexts, labels.astype(np.int64), len(occupations))


def read_census(path: str | Path, *, dtype: npt.DTypeLike = np.float32) -> Table:
    """67 categorical columns one-hot. The label is dOccup, 0 to 8; caseid is left out."""
    header = next(_fields(path, ",", CENSUS_COLUMNS), ())
    if not {CENSUS_KEY, CENSUS_LABEL} <= {*header}:
        wanted = f"{CENSUS_KEY} and {CENSUS_LABEL} among them"
        raise DataError(f"{path}, line 1: expected the names of the columns, {wanted}")
    rows = _numbers(path, ",", CENSUS_COLUMNS, np.int32, skip=1)
    features = [column for name, column in zip(header, rows.T, strict=True) if name not in (CENSUS_KEY, CENSUS_LABEL)]
    labels = _classes(path, rows[:, header.index(CENSUS_LABEL)], 9, first_line=2)
    return Table("census", _one_hot(features, dtype), labels, 9)


_READERS: dict[str, Callable[..., Table]] = {
    "mushroom": read_mushroom,
    "financial": read_financial,
    "jester": read_jester,
    "statlog": read_statlog,
    "adult": read_adult,
    "covertype": read_covertype,
    "census": read_census,
}


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


@contextmanager
def _open(path: str | Path) -> Iterator[TextIO]:
    """The text of a plain, .gz or .xz file; what is wrong with the file names it."""
    try:
        with _OPENERS.get(Path(path).suffix, open)(path, "rt", encoding="ascii") as stream:
            yield stream
    except DataError:
        raise
    except FileNotFoundError:
        raise MissingFileError(f"no file at {path}") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _fields(
    path: str | Path,
    separator: str | None,
    width: int,
    *,
    skip: int = 0,
    comment: str = "",
    numbers: Sequence[int] = (),
) -> Iterator[tuple[str, ...]]:
    """Every line below the first `skip` that is neither empty nor a comment, as `width` fields, `numbers` of them numbers."""
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if number <= skip or not line.strip() or (comment and line.startswith(comment)):
                continue
            fields = tuple(field.strip() for field in line.split(separator))
            if len(fields) != width:
                raise DataError(f"{path}, line {number}: {len(fields)} columns, expected {width}")
            for column in numbers:
                if not _NUMBER.fullmatch(fields[column]):
                    raise DataError(f"{path}, line {number}, column {column + 1}: {fields[column]!r} is not a number")
            yield fields


def _columns(path: str | Path, rows: Iterable[tuple[str, ...]]) -> list[npt.NDArray[np.str_]]:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    if not columns:
        raise DataError(f"cannot read {path}: it holds no rows")
    return columns


def _numbers(path: str | Path, separator: str | None, width: int, dtype: npt.DTypeLike, *, skip: int = 0) -> Numbers:
    """A table of `width` columns of numbers, below `skip` lines of something else."""
    problem: object = "it holds no rows"
    try:
        with _open(path) as stream, warnings.catch_warnings():
            # numpy warns of a file without rows, which is an error here.
            warnings.simplefilter("ignore", UserWarning)
            rows = np.loadtxt(stream, dtype, comments=None, delimiter=separator, skiprows=skip, ndmin=2)
        if len(rows) and rows.shape[1] == width:
            return rows
    except DataError:
        raise
    except ValueError as error:
        problem = error
    # Slower, but it names the line.
    for _ in _fields(path, separator, width, skip=skip, numbers=range(width)):
        pass
    raise DataError(f"cannot read {path}: {problem}")


def _classes(path: str | Path, labels: Numbers, n_labels: int, *, first_line: int = 1) -> Labels:
    """The labels, if each lies in 0 … n_labels − 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= n_labels))
    if len(wrong):
        raise DataError(f"{path}, line {wrong[0] + first_line}: no such class; there are {n_labels}")
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
