"""The data: where files come from, by a source that misbehaves, and what is in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesadam.errors import FileError, MissingFileError, SettingError
from experiments import data
from experiments.data import DataFile, find, load_images, load_table, locate
from floats import assert_close

CONTENT = b"a,b,c\n" * 50_000
URL = "https://source.example/tiny"


class Source:
    """In place of pooch's downloader: answers an address by bytes, or by an error."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | OSError] = {}
        self.asked: list[str] = []
        self.options: dict[str, object] = {}

    def __call__(self, **options: object) -> Source:
        self.options = options
        return self

    def fetch(self, url: str, target: Path, _: object) -> None:
        self.asked.append(url)
        answer = self.answers.get(url, OSError("refused"))
        if isinstance(answer, OSError):
            raise answer
        Path(target).write_bytes(answer)


@pytest.fixture
def source(monkeypatch) -> Source:
    made = Source()
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "HTTPDownloader", lambda **options: made(**options).fetch)
    return made


def files_at(url: str) -> dict[str, DataFile]:
    return {"tiny.csv": DataFile("tables/tiny", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), url)}


@pytest.fixture
def tiny(source, tmp_path, monkeypatch) -> Path:
    """The set `tiny` with a source; gives the path it would be cached at."""
    monkeypatch.delenv("BAYESADAM_DATA", raising=False)
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(data.DATA_SETS, "tiny", files_at(URL))
    return tmp_path / "cache" / "tables" / "tiny" / "tiny.csv"


@pytest.mark.parametrize(("name", "content"), [("tiny.csv", CONTENT), ("tiny.csv.gz", gzip.compress(CONTENT))])
def test_the_users_folder_comes_first_in_either_form(tiny, source, tmp_path, monkeypatch, name, content):
    path = tmp_path / "data" / "tables" / "tiny" / name
    for file, written in ((tiny, CONTENT), (path, content)):
        file.parent.mkdir(parents=True)
        file.write_bytes(written)
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    assert locate("tiny") == {"tiny.csv": path}
    if name == "tiny.csv":
        path.write_bytes(CONTENT[:-10])
        with pytest.raises(FileError, match=f"{path} has {len(CONTENT) - 10:,} bytes, expected {len(CONTENT):,}"):
            locate("tiny")
    assert source.asked == []
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SettingError, match="nowhere, which is not a folder"):
        locate("tiny")


def test_then_the_cache_then_the_source_and_only_once(tiny, source, capsys):
    source.answers = {URL: CONTENT}
    assert find("tiny") == {}
    assert locate("tiny") == {"tiny.csv": tiny}
    assert tiny.read_bytes() == CONTENT
    assert locate("tiny") == find("tiny") == {"tiny.csv": tiny}
    # Packed for the journey, a file would be unpacked on arrival, and a .gz file with it.
    assert (source.asked, source.options["headers"]) == ([URL], {"Accept-Encoding": "identity"})
    assert capsys.readouterr().err == f"tiny: {len(CONTENT):,} bytes from {URL}\n"


def zipped(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("readme.txt", "small")
        archive.writestr("folder/tiny.csv", content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("ending", "answer", "reason"),
    [
        ("", OSError("IncompleteRead"), "IncompleteRead"),
        ("", b"x" * len(CONTENT), "wrong checksum"),
        (".zip", b"<html>", "not a zip file"),
        (".zip", zipped(CONTENT[1:]), "wrong checksum"),
    ],
)
def test_what_a_source_does_not_deliver_is_named_and_leaves_nothing(tiny, source, monkeypatch, ending, answer, reason):
    monkeypatch.setitem(data.DATA_SETS, "tiny", files_at(URL + ending))
    source.answers = {URL + ending: answer}
    with pytest.raises(FileError, match=f"{URL}{ending} did not deliver it: .*{reason}"):
        locate("tiny")
    assert list(tiny.parent.iterdir()) == []
    source.answers = {URL + ending: zipped(CONTENT) if ending else CONTENT}
    assert locate("tiny")["tiny.csv"].read_bytes() == CONTENT
    assert list(tiny.parent.iterdir()) == [tiny]


def test_what_is_nowhere_is_named_with_the_places(tiny, tmp_path, monkeypatch):
    with pytest.raises(FileError, match="refused") as caught:
        locate("tiny")
    for part in ("tiny.csv", "'tiny'", "BAYESADAM_DATA (not set)", str(tmp_path / "cache"), "put it there by hand"):
        assert part in str(caught.value)
    monkeypatch.delenv("BAYESADAM_CACHE")
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FileError, match="'pooch', which is not installed"):
        locate("tiny")


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">2x2B{array.ndim}I", 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An image set of 6 + 4 images of 2 × 3 pixels in place of mnist, without a public source."""
    rng, folder = np.random.default_rng(0), tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    arrays = {}
    for split, n in (("train", 6), ("t10k", 4)):
        arrays[f"{split}-images-idx3-ubyte.gz"] = rng.integers(0, 256, (n, 2, 3))
        arrays[f"{split}-labels-idx1-ubyte.gz"] = np.arange(n) % 3
    for name, array in arrays.items():
        (folder / name).write_bytes(idx(array))
    files = {name: DataFile("mnist", (folder / name).stat().st_size, "", "http://127.0.0.1:9/") for name in arrays}
    monkeypatch.setitem(data.DATA_SETS, "mnist", files)
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    return folder, arrays


def test_pixels_are_flat_and_between_zero_and_one(small):
    folder, arrays = small
    images = load_images("mnist")
    for x, y, kind in ((images.train_x, images.train_y, "train"), (images.test_x, images.test_y, "t10k")):
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert_close(x.numpy(), arrays[f"{kind}-images-idx3-ubyte.gz"].reshape(-1, 6) / 255, rtol=1e-6)
        assert y.tolist() == arrays[f"{kind}-labels-idx1-ubyte.gz"].tolist()
    assert images.n_classes == 3
    (folder / "train-images-idx3-ubyte.gz").unlink()
    # One split does without the other.
    assert len(data.load_split("mnist", "t10k")[0]) == 4
    with pytest.raises(FileError, match=r"train-images-idx3-ubyte\.gz"):
        load_images("mnist")


def test_damaged_images_are_named(small, monkeypatch):
    folder, arrays = small
    path = folder / "t10k-labels-idx1-ubyte.gz"
    monkeypatch.setattr(data, "locate", lambda *_: {file: folder / file for file in arrays})
    whole = gzip.decompress(idx(arrays[path.name]))
    for content, what in (
        (idx(arrays[path.name][:3]), r"\(4, 2, 3\), labels of shape \(3,\)"),
        (idx(arrays[path.name])[:-9], f"{path} is damaged"),
        (b"plain", f"{path} is damaged"),
        (gzip.compress(whole[:-1]), "is truncated"),
        (gzip.compress(b"\0\0\x09" + whole[3:]), "not an IDX file of bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileError, match=what):
            load_images("mnist")
    with pytest.raises(SettingError, match="got 'covertype'"):
        load_images("covertype")


def test_digits_are_split_once_and_for_all():
    datasets = pytest.importorskip("sklearn.datasets")
    images = load_images("digits")
    assert (images.train_x.shape, images.test_x.shape) == ((1437, 64), (360, 64))
    # Every image once: the rows in some order are scikit-learn's.
    x, y = datasets.load_digits(return_X_y=True)
    rows = torch.cat([images.train_x, images.test_x]).numpy() * 16
    labels = torch.cat([images.train_y, images.test_y]).numpy()
    got, expected = (np.unique(np.column_stack(pair), axis=0) for pair in ((rows, labels), (x, y)))
    np.testing.assert_array_equal(got, expected)
    assert images.test_y[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]


def written(path: Path, *lines: str) -> Path:
    """A text file, packed as its name says."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as stream:
        stream.writelines(line + "\n" for line in lines)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_mushroom_is_one_hot_as_pandas_does_it(tmp_path, suffix):
    pandas, rng = pytest.importorskip("pandas"), np.random.default_rng(0)
    lines = [",".join([rng.choice(["e", "p"]), *rng.choice(list("abc?"), 22)]) for _ in range(40)]
    table = data.read_mushroom(written(path := tmp_path / f"m.data{suffix}", *lines))
    frame = pandas.read_csv(path, header=None)
    np.testing.assert_array_equal(table.contexts, pandas.get_dummies(frame.iloc[:, 1:]).to_numpy(dtype=np.float32))
    np.testing.assert_array_equal(table.labels, frame[0] == "e")
    assert table.n_labels == 2


def adult_lines(n: int, occupations: str, ending: str = "") -> list[str]:
    rng, lines = np.random.default_rng(n), []
    numbers = {0: "39", 2: "77516", 4: "13", 10: "2174", 11: "0", 12: "40"}
    for _ in range(n):
        fields = [numbers.get(column, f"v{rng.integers(3)}") for column in range(15)]
        fields[6], fields[14] = rng.choice(list(occupations)), rng.choice(["<=50K", ">50K"]) + ending
        lines.append(", ".join(fields))
    return lines


def test_adult_is_encoded_as_pandas_does_it_without_the_full_stop(tmp_path):
    pandas = pytest.importorskip("pandas")
    first = written(tmp_path / "adult.data", *adult_lines(50, "ABC?"), "")
    test = written(tmp_path / "adult.test.gz", "|1x3 Cross validator", *adult_lines(30, "BCD", "."), "")
    table = data.read_adult(first, test)
    read = {"header": None, "skipinitialspace": True, "na_values": "?"}
    frame = pandas.concat([pandas.read_csv(first, **read), pandas.read_csv(test, skiprows=1, **read)]).dropna()
    frame[14] = frame[14].str.rstrip(".")
    dummies = pandas.get_dummies(frame.drop(columns=6), columns=[1, 3, 5, 7, 8, 9, 13, 14])
    np.testing.assert_array_equal(table.contexts, dummies.to_numpy(dtype=np.float32))
    np.testing.assert_array_equal(table.labels, frame[6].astype("category").cat.codes)
    assert table.n_labels == 4


@pytest.mark.parametrize("ending", ["", "\r"])
def test_census_is_one_hot_as_pandas_does_it(tmp_path, ending):
    pandas, rng = pytest.importorskip("pandas"), np.random.default_rng(1)
    header = ",".join(["caseid", *(f"i{number}" for number in range(34)), "dOccup", *(f"d{n}" for n in range(33))])
    rows = rng.integers(0, 4, (60, 69))
    rows[:, 0], rows[:, 35] = np.arange(60) + 10_000, rng.choice(range(9), 60)
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    table = data.read_census(written(path := tmp_path / "c.txt", *(line + ending for line in lines)))
    frame = pandas.read_csv(path)
    features = frame.drop(columns=["caseid", "dOccup"])
    dummies = pandas.get_dummies(features, columns=features.columns)
    np.testing.assert_array_equal(table.contexts, dummies.to_numpy(dtype=np.uint8))
    assert table.contexts.dtype == np.uint8
    np.testing.assert_array_equal(table.labels, frame["dOccup"])


def test_jester_keeps_the_most_rated_jokes_and_those_who_rated_them_all(tmp_path):
    rng = np.random.default_rng(2)
    ratings = rng.uniform(-10, 10, (30, 100)).round(2)
    popular = np.sort(rng.choice(100, 40, replace=False))
    ratings[np.ix_(range(5), np.setdiff1d(np.arange(100), popular))] = 99
    # One user has not rated a popular joke, which stays popular.
    ratings[7, popular[3]] = 99
    rows = np.column_stack([(ratings != 99).sum(axis=1), ratings])
    table = data.read_jester(written(tmp_path / "j.csv.xz", *(",".join(f"{value:g}" for value in r) for r in rows)))
    np.testing.assert_array_equal(table.contexts, np.delete(ratings, 7, axis=0)[:, popular].astype(np.float32))
    assert table.labels is None


@pytest.mark.parametrize(("read", "separator", "width"), [(data.read_statlog, " ", 9), (data.read_covertype, ",", 54)])
def test_classes_count_from_zero(tmp_path, read, separator, width):
    rows = np.random.default_rng(4).integers(-100, 7000, (6, width))
    pairs = zip(rows, [1, 7, 3, 2, 1, 5], strict=True)
    table = read(written(tmp_path / "t.gz", *(separator.join(map(str, [*row, label])) for row, label in pairs)))
    np.testing.assert_array_equal(table.contexts, rows)
    assert (table.labels.tolist(), table.n_labels) == ([0, 6, 2, 1, 0, 4], 7)


LINE = "1 2 3 4 5 6 7 8 9 "


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([LINE + "1", LINE + "2", "1 2 3"], "changed from 10 to 3 at row 3"),
        ([LINE], "1 rows of 9 columns, expected 10"),
        ([LINE + "1", LINE + "x"], "could not convert string 'x' to int32 at row 1, column 10"),
        ([LINE + "8"], "a class beyond the 7"),
        ([], "0 rows"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, named):
    path = written(tmp_path / "shuttle.trn", *lines)
    with pytest.raises(FileError) as caught:
        data.read_statlog(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_damaged_table_is_named(tmp_path, suffix):
    path = written(tmp_path / f"shuttle.trn{suffix}", *(f"{LINE}{1 + number % 7}" for number in range(5000)))
    content = path.read_bytes()
    middle = len(content) // 2
    for damaged in (content[:middle], content[:middle] + b"\xff" * 20 + content[middle + 20 :], b"plain text\n"):
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=f"cannot read {path}"):
            data.read_statlog(path)
    with pytest.raises(MissingFileError, match="no file at"):
        data.read_statlog(tmp_path / "absent")
    with pytest.raises(SettingError, match="'mnist' is not a table: choose from mushroom"):
        load_table("mnist")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        ("mushroom", (8124, 117), [3916, 4208]),
        ("financial", (3713, 21), None),
        ("jester", (19181, 40), None),
        ("statlog", (43500, 9), [34108, 37, 132, 6748, 2458, 6, 11]),
        ("adult", (45222, 92), None),
        ("covertype", (581012, 54), [211840, 283301, 35754, 2747, 9493, 17367, 20510]),
        ("census", (2458285, 389), None),
        ("census-1000", (1000, 360), [417, 119, 180, 73, 23, 74, 108, 3, 3]),
    ],
)
def test_shapes_and_counts_are_the_published_ones(name, shape, counts):
    if "BAYESADAM_DATA" not in os.environ or len(find(name)) < len(data.data_set(name)):
        pytest.skip(f"BAYESADAM_DATA has no {name}")
    table = load_table(name)
    assert table.contexts.shape == shape
    assert np.isfinite(table.contexts).all()
    if counts is not None:
        assert np.bincount(table.labels, minlength=table.n_labels).tolist() == counts
    if name == "adult":
        # One value of each of the eight categorical columns.
        assert (table.contexts[:, 6:].sum(axis=1) == 8).all()
        assert table.n_labels == 14


def test_the_function_is_the_papers():
    """Against an independent numpy computation."""
    rng = np.random.default_rng(0)
    x, noise = rng.uniform(-0.5, 1.2, 100), rng.normal(0, 0.02, 100)
    expected = x + 0.3 * np.sin(2 * np.pi * (x + noise)) + 0.3 * np.sin(4 * np.pi * (x + noise)) + noise
    assert_close(data.toy_function(torch.from_numpy(x), torch.from_numpy(noise)).numpy(), expected, atol=1e-14)
    grid, x = data.toy_grid(), np.linspace(-0.5, 1.2, 341)
    assert_close(grid.x.ravel(), x, atol=1e-6)
    assert_close(grid.y.ravel(), x + 0.3 * np.sin(2 * np.pi * x) + 0.3 * np.sin(4 * np.pi * x), atol=1e-5)
