"""Images against what their publishers state, and against small IDX files written here."""

import gzip
import hashlib
import os
import struct

import numpy as np
import pytest
import torch

from bayesadam.data import fetching, find, load_images, load_split
from bayesadam.data.fetching import DataFile, DataSet
from bayesadam.errors import BayesAdamError, DataError, FileError, SettingError
from floats import approx, assert_close

MNIST_TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">2x2B{array.ndim}I", 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An image set of 6 + 4 images of 2 × 3 pixels in place of mnist, without a public source."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (6, 2, 3)),
        "train-labels-idx1-ubyte.gz": np.array([0, 1, 2, 0, 1, 2]),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (4, 2, 3)),
        "t10k-labels-idx1-ubyte.gz": np.array([2, 1, 0, 2]),
    }
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    files = []
    for name, array in arrays.items():
        content = idx(array)
        (folder / name).write_bytes(content)
        files.append(DataFile(name, len(content), hashlib.sha256(content).hexdigest()))
    monkeypatch.setitem(fetching.DATA_SETS, "mnist", DataSet("mnist", "small", "mnist", tuple(files), "digits"))
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    return folder, arrays


def test_pixels_are_flat_and_between_zero_and_one(small):
    _, arrays = small
    data = load_images("mnist")
    for x, y, kind in ((data.train_x, data.train_y, "train"), (data.test_x, data.test_y, "t10k")):
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert_close(x.numpy(), arrays[f"{kind}-images-idx3-ubyte.gz"].reshape(-1, 6) / 255, rtol=1e-6)
        assert y.tolist() == arrays[f"{kind}-labels-idx1-ubyte.gz"].tolist()
    assert data.n_classes == 3


def test_the_test_pair_alone_can_be_loaded(small):
    folder, _ = small
    (folder / "train-images-idx3-ubyte.gz").unlink()
    x, y = load_split("mnist", "test")
    assert (x.shape, y.shape) == ((4, 6), (4,))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz.*'digits'"):
        load_images("mnist")


def test_a_truncated_file_is_named(small):
    folder, _ = small
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="truncated") as caught:
        load_images("mnist")
    assert str(path) in str(caught.value)


def test_a_file_truncated_to_the_size_expected_is_named(small, monkeypatch):
    folder, _ = small
    path = folder / "t10k-images-idx3-ubyte.gz"
    size = path.stat().st_size
    path.write_bytes(idx(np.random.default_rng(1).integers(0, 256, (9, 2, 3)))[:size])
    with pytest.raises(FileError, match="is damaged") as caught:
        load_images("mnist")
    assert str(path) in str(caught.value)


def test_images_and_labels_must_belong_together(small):
    folder, arrays = small
    name = "t10k-labels-idx1-ubyte.gz"
    content = idx(arrays[name][:3])
    (folder / name).write_bytes(content)
    record = fetching.DATA_SETS["mnist"]
    changed = DataFile(name, len(content), "")
    files = tuple(changed if file.name == name else file for file in record.files)
    fetching.DATA_SETS["mnist"] = DataSet("mnist", "small", "mnist", files, "digits")
    with pytest.raises(DataError, match=r"\(4, 2, 3\), labels of shape \(3,\)"):
        load_split("mnist", "test")


@pytest.mark.parametrize(
    ("name", "split", "named"),
    [("covertype", "test", "not a set of images"), ("nonsense", "test", "nonsense"), ("digits", "val", "'val'")],
)
def test_nonsense_is_refused_by_name(name, split, named):
    with pytest.raises(SettingError, match=named):
        load_split(name, split)


# --- the real sets --------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    datasets = pytest.importorskip("sklearn.datasets")
    data = load_images("digits")
    assert (data.train_x.shape, data.test_x.shape) == ((1437, 64), (360, 64))
    assert (float(data.train_x.min()), float(data.train_x.max())) == (0, 1)
    # Every image once: the rows in some order are scikit-learn's.
    x, y = datasets.load_digits(return_X_y=True)
    rows = torch.cat([data.train_x, data.test_x]).numpy() * 16
    labels = torch.cat([data.train_y, data.test_y]).numpy()
    got, expected = (np.unique(np.column_stack(pair), axis=0) for pair in ((rows, labels), (x, y)))
    np.testing.assert_array_equal(got, expected)
    assert data.test_y[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    # No class is rare in the held-out part.
    assert data.test_y.bincount(minlength=10).min() >= 25


def present(name: str, *files: str) -> None:
    if "BAYESADAM_DATA" not in os.environ:
        pytest.skip("BAYESADAM_DATA is not set")
    try:
        found = find(name)
    except BayesAdamError as error:
        pytest.skip(str(error))
    absent = [file.name for file in fetching.data_set(name).files if file.name not in found]
    if any(file in absent for file in files) or (absent and not files):
        pytest.skip(f"{name}: no {', '.join(absent)}")


def test_mnist_is_the_published_one():
    present("mnist")
    data = load_images("mnist")
    assert (data.train_x.shape, data.test_x.shape) == ((60_000, 784), (10_000, 784))
    assert data.train_y.bincount().tolist() == MNIST_TRAIN_COUNTS
    assert (float(data.train_x.min()), float(data.train_x.max())) == (0, 1)
    # The mean and standard deviation everyone normalises with.
    assert float(data.train_x.mean()) == approx(0.1307, abs=1e-4)
    assert float(data.train_x.std()) == approx(0.3081, abs=1e-4)


def test_fashion_mnists_test_pair_is_the_published_one():
    present("fashion-mnist", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    x, y = load_split("fashion-mnist", "test")
    assert x.shape == (10_000, 784)
    assert y.bincount().tolist() == [1000] * 10
