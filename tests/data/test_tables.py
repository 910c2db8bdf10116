"""The tables against pandas on small files written here, and against the published counts where the real ones are."""

import gzip
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from bayesadam.data import find, load_table
from bayesadam.data.fetching import data_set
from bayesadam.data.loaders import (
    read_adult,
    read_census,
    read_covertype,
    read_financial,
    read_jester,
    read_mushroom,
    read_statlog,
)
from bayesadam.errors import DataError, MissingFileError, SettingError
from floats import approx

ADULT_TEXT = {0: "39", 2: "77516", 4: "13", 10: "2174", 11: "0", 12: "40"}
CENSUS_HEADER = ",".join(["caseid", *(f"i{number}" for number in range(34)), "dOccup", *(f"d{n}" for n in range(33))])


def written(path: Path, *lines: str) -> Path:
    """A text file, packed as its name says."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as stream:
        stream.writelines(line + "\n" for line in lines)
    return path


def mushroom_lines(n: int = 40) -> list[str]:
    rng = np.random.default_rng(0)
    return [",".join([rng.choice(["e", "p"]), *rng.choice(list("abc?"), 22)]) for _ in range(n)]


def adult_lines(n: int, occupations: str, ending: str = "") -> list[str]:
    rng = np.random.default_rng(n)
    lines = []
    for _ in range(n):
        fields = [ADULT_TEXT.get(column, f"v{rng.integers(3)}") for column in range(15)]
        fields[6] = rng.choice(list(occupations))
        fields[14] = rng.choice(["<=50K", ">50K"]) + ending
        lines.append(", ".join(fields))
    return lines


# --- encodings, against pandas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_mushroom_is_one_hot_as_pandas_does_it(tmp_path, suffix):
    pandas = pytest.importorskip("pandas")
    path = written(tmp_path / f"m.data{suffix}", *mushroom_lines())
    table = read_mushroom(path)
    frame = pandas.read_csv(path, header=None)
    np.testing.assert_array_equal(table.contexts, pandas.get_dummies(frame.iloc[:, 1:]).to_numpy(dtype=np.float32))
    np.testing.assert_array_equal(table.labels, frame[0] == "e")
    assert table.n_labels == 2


def test_adult_is_encoded_as_pandas_does_it_without_the_full_stop(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = written(tmp_path / "adult.data", *adult_lines(50, "ABC?"), "")
    test = written(tmp_path / "adult.test.gz", "|1x3 Cross validator", *adult_lines(30, "BCD", "."), "")
    table = read_adult(data, test)
    read = {"header": None, "skipinitialspace": True, "na_values": "?"}
    frame = pandas.concat([pandas.read_csv(data, **read), pandas.read_csv(test, skiprows=1, **read)]).dropna()
    frame[14] = frame[14].str.rstrip(".")
    dummies = pandas.get_dummies(frame.drop(columns=6), columns=[1, 3, 5, 7, 8, 9, 13, 14])
    np.testing.assert_array_equal(table.contexts, dummies.to_numpy(dtype=np.float32))
    np.testing.assert_array_equal(table.labels, frame[6].astype("category").cat.codes)
    assert table.n_labels == 4


def census_lines(n: int, labels: range = range(9)) -> list[str]:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 4, (n, 69))
    rows[:, 0] = np.arange(n) + 10_000
    rows[:, 35] = rng.choice(labels, n)
    return [",".join(map(str, row)) for row in rows]


@pytest.mark.parametrize("ending", ["", "\r"])
def test_census_is_one_hot_as_pandas_does_it(tmp_path, ending):
    pandas = pytest.importorskip("pandas")
    path = written(tmp_path / "c.txt", *(line + ending for line in [CENSUS_HEADER, *census_lines(60)]))
    table = read_census(path, dtype=np.uint8)
    frame = pandas.read_csv(path)
    features = frame.drop(columns=["caseid", "dOccup"])
    dummies = pandas.get_dummies(features, columns=features.columns)
    np.testing.assert_array_equal(table.contexts, dummies.to_numpy(dtype=np.uint8))
    assert table.contexts.dtype == np.uint8
    np.testing.assert_array_equal(table.labels, frame["dOccup"])
    assert table.n_labels == 9


def test_jester_keeps_the_most_rated_jokes_and_those_who_rated_them_all(tmp_path):
    rng = np.random.default_rng(2)
    ratings = rng.uniform(-10, 10, (30, 100)).round(2)
    popular = np.sort(rng.choice(100, 40, replace=False))
    others = np.setdiff1d(np.arange(100), popular)
    ratings[:5][:, others] = 99
    ratings[np.ix_(range(5), others)] = 99
    # One user has not rated a popular joke, which stays popular.
    ratings[7, popular[3]] = 99
    rows = np.column_stack([(ratings != 99).sum(axis=1), ratings])
    path = written(tmp_path / "j.csv.xz", *(",".join(f"{value:g}" for value in row) for row in rows))
    table = read_jester(path, dtype=np.float64)
    np.testing.assert_array_equal(table.contexts, np.delete(ratings, 7, axis=0)[:, popular])
    assert table.labels is None


def test_financial_skips_the_tickers(tmp_path):
    rng = np.random.default_rng(3)
    prices = rng.normal(size=(5, 21))
    rows = (" ".join(repr(float(value)) for value in row) for row in prices)
    table = read_financial(written(tmp_path / "f.gz", "A,B,C", *rows), dtype=np.float64)
    np.testing.assert_array_equal(table.contexts, prices)
    assert (table.labels, table.n_labels) == (None, 0)


@pytest.mark.parametrize(("read", "separator", "width"), [(read_statlog, " ", 9), (read_covertype, ",", 54)])
def test_classes_count_from_zero(tmp_path, read, separator, width):
    rows = np.random.default_rng(4).integers(-100, 7000, (6, width))
    labels = [1, 7, 3, 2, 1, 5]
    lines = (separator.join(map(str, [*row, label])) for row, label in zip(rows, labels, strict=True))
    table = read(written(tmp_path / "t.gz", *lines))
    np.testing.assert_array_equal(table.contexts, rows)
    assert table.contexts.dtype == np.float32
    assert table.labels.tolist() == [0, 6, 2, 1, 0, 4]
    assert (table.labels.dtype, table.n_labels) == (np.int64, 7)


# --- files that are not what they should be -------------------------------------------------------------------------

STATLOG_LINE = "1 2 3 4 5 6 7 8 9 "


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([STATLOG_LINE + "1", STATLOG_LINE + "2", "1 2 3"], "changed from 10 to 3 at row 3"),
        ([STATLOG_LINE], "1 rows of 9 columns, expected 10"),
        ([STATLOG_LINE + "1", STATLOG_LINE + "x"], "could not convert string 'x' to int32 at row 1, column 10"),
        ([STATLOG_LINE + "1", STATLOG_LINE + "8"], "a class beyond the 7"),
        ([STATLOG_LINE + "0"], "a class beyond the 7"),
        ([], "0 rows"),
    ],
)
def test_a_wrong_line_of_numbers_is_named(tmp_path, lines, named):
    path = written(tmp_path / "shuttle.trn", *lines)
    with pytest.raises(DataError) as caught:
        read_statlog(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_wrong_lines_of_text_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"mushroom\.gz: .*from 23 to 2"):
        read_mushroom(written(tmp_path / "mushroom.gz", *mushroom_lines(2), "e,x"))
    data = written(tmp_path / "adult.data", *adult_lines(3, "AB"))
    test = written(tmp_path / "adult.test", "|1x3 Cross validator", *adult_lines(2, "AB"), "39, Private")
    with pytest.raises(DataError, match=r"adult\.test: .*from 15 to 2"):
        read_adult(data, test)
    with pytest.raises(DataError, match="a class beyond the 9"):
        read_census(written(tmp_path / "c", CENSUS_HEADER, *census_lines(2, range(9, 10))))
    with pytest.raises(ValueError, match="dOccup"):
        read_census(written(tmp_path / "c", *census_lines(3)))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "another format"])
def test_a_damaged_file_is_named(tmp_path, suffix, damage):
    lines = [f"{STATLOG_LINE}{1 + number % 7}" for number in range(5000)]
    path = written(tmp_path / f"shuttle.trn{suffix}", *lines)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "truncated": content[:middle],
            "overwritten": content[:middle] + b"\xff" * 20 + content[middle + 20 :],
            "another format": b"plain text\n",
        }[damage]
    )
    with pytest.raises(DataError, match=f"cannot read {path}"):
        read_statlog(path)


def test_nonsense_is_refused_by_name(tmp_path):
    with pytest.raises(MissingFileError, match="no file at"):
        read_statlog(tmp_path / "absent")
    with pytest.raises(SettingError, match="'mnist' is not a table: choose from mushroom"):
        load_table("mnist")
    with pytest.raises(SettingError, match="nonsense"):
        load_table("nonsense")


# --- the real tables ------------------------------------------------------------------------------------------------


def folder(name: str) -> Path:
    if "BAYESADAM_DATA" not in os.environ:
        pytest.skip("BAYESADAM_DATA is not set")
    return Path(os.environ["BAYESADAM_DATA"]) / data_set(name).folder


def real(name: str):
    folder(name)
    absent = [file.name for file in data_set(name).files if file.name not in find(name)]
    if absent:
        pytest.skip(f"{name}: no {', '.join(absent)}")
    return load_table(name)


@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        ("mushroom", (8124, 117), [3916, 4208]),
        ("financial", (3713, 21), None),
        ("jester", (19181, 40), None),
        ("statlog", (43500, 9), [34108, 37, 132, 6748, 2458, 6, 11]),
        ("covertype", (581012, 54), [211840, 283301, 35754, 2747, 9493, 17367, 20510]),
        ("census", (2458285, 389), None),
        ("census-part", (307283, 389), None),
        ("census-1000", (1000, 360), [417, 119, 180, 73, 23, 74, 108, 3, 3]),
    ],
)
def test_shapes_and_counts_are_the_published_ones(name, shape, counts):
    table = real(name)
    assert table.contexts.shape == shape
    assert np.isfinite(table.contexts).all()
    if counts is not None:
        assert np.bincount(table.labels, minlength=table.n_labels).tolist() == counts


def test_adult_has_the_showdowns_rows_and_occupations():
    table = real("adult")
    assert table.contexts.shape == (45222, 92)
    counts = np.bincount(table.labels)
    assert (len(counts), table.n_labels, counts.max(), counts.min()) == (14, 14, 6020, 14)
    # One value of each of the eight categorical columns.
    assert (table.contexts[:, 6:].sum(axis=1) == 8).all()


def test_financial_has_the_stated_range():
    contexts = real("financial").contexts
    assert (contexts.min(), contexts.max()) == (approx(-49.57, abs=0.01), approx(26.98, abs=0.01))


def test_jester_is_the_subset_stored_beside_it():
    rebuilt = folder("jester") / "jester_40jokes_19181users_rebuilt.npz"
    if not rebuilt.is_file():
        pytest.skip(f"no {rebuilt.name}")
    with np.load(rebuilt, allow_pickle=False) as stored:
        np.testing.assert_array_equal(real("jester").contexts, stored["ratings"].astype(np.float32))


def test_the_census_sample_has_the_format():
    path = folder("census") / "USCensus1990_first199rows.csv"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    table = read_census(path)
    assert len(table.contexts) == 199
    assert (table.contexts.sum(axis=1) == 67).all()
    assert sorted(set(table.labels.tolist())) == [0, 1, 2, 3, 4, 5, 6, 8]
