"""The scikit-learn estimators beside others on tables: ranks by log-likelihood, CRPS, coverage, error and seconds.

    python -m benchmarks.tables.run [--quick] [--half choosing] [--sets ...] [--splits 3] [--alone]
        [--jobs 1] [--report] [--out out/bench]

A fifth of each table is for testing, drawn anew for every split, in equal shares of the classes; the UCI files have
their published splits. All see the same splits and standardised inputs. Scores are in the units of the target, seconds
those of fitting and predicting. Every table, contender and split is a file in out/bench/tables: stopped, it resumes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks.common import harness
from benchmarks.common.inputs import NoData, uci
from benchmarks.tables.contenders import CLASSIFIERS, LEVEL, MOST_ROWS, OURS, PEERS, REGRESSORS
from benchmarks.tables.sets import HALVES, MOST, SIZES, TABLES, Array, load

# By table, contender and metric, one score a split.
Results = dict[str, dict[str, dict[str, list[float]]]]
DEFAULT = "Badam ×5"
METRICS = {False: ("nll", "crps", "rmse", "coverage", "width"), True: ("nll", "accuracy", "ece")}
# What every cell depends on; a probability under the least counts as that, for a forest says 0.
ABOUT, LEAST_PROBABILITY = {"torch": torch.__version__}, 1e-4
# The least published NLL of MC dropout (Gal and Ghahramani 2016), deep ensembles (Lakshminarayanan et al. 2017) and
# NGBoost (Duan et al. 2020).
PUBLISHED = {"energy": 0.46, "wine-quality-red": 0.90, "yacht": 0.20}


def for_testing(name: str, split: int) -> Array:
    """Which rows are for testing."""
    if TABLES[name].source == "uci":
        return np.asarray(uci(name)["test_mask"][split])
    rows, strata = np.arange(TABLES[name].rows), load(name)[1] if TABLES[name].is_classes else None
    return np.isin(rows, train_test_split(rows, test_size=0.2, random_state=split, stratify=strata)[1])


def play(name: str, who: str, split: int) -> harness.Cell:
    """One contender's scores and seconds on one split."""
    (x, y), test = load(name), for_testing(name, split)
    scaler = StandardScaler().fit(x[~test])
    parts = scaler.transform(x[~test]), y[~test], scaler.transform(x[test])
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A kernel's length at its bound, a solver's last iteration, a posterior that is not tuned.
        warnings.simplefilter("ignore")
        forecast: Any = (CLASSIFIERS if TABLES[name].is_classes else REGRESSORS)[who](*parts, split)
    seconds = time.perf_counter() - began
    if TABLES[name].is_classes:
        scores = harness.class_scores(torch.from_numpy(forecast.clip(LEAST_PROBABILITY)), torch.from_numpy(y[test]))
    else:
        scores = forecast.scores(y[test])
    return {"scores": {**scores, "seconds": seconds}}


def contest(names: Iterable[str], rows: Sequence[str], options: Namespace) -> Results:
    """Play what is missing, and read all."""
    places: dict[str, tuple[str, str, int]] = {}
    for name in names:
        try:
            load(name)
        except NoData as reason:
            print(f"{name} is left out: {reason}", flush=True)
            continue
        for who in CLASSIFIERS if TABLES[name].is_classes else REGRESSORS:
            if who in rows and TABLES[name].rows <= MOST_ROWS.get(who, MOST):
                places |= {f"{name}/{who}-{split}": (name, who, split) for split in range(options.splits)}
    makes = {key: None if options.report else partial(play, *place) for key, place in places.items()}
    results: Results = {}
    for key, cell in harness.cells(options.out / "tables", makes, ABOUT, jobs=options.jobs).items():
        name, who, _ = places[key]
        for metric, value in cell["scores"].items():
            results.setdefault(name, {}).setdefault(who, {}).setdefault(metric, []).append(value)
    return results


def against(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, float, float]:
    """Ours less theirs, pair by pair: a word, the mean difference and its standard error; a tie within two of those."""
    gap, error = harness.mean_and_error(a - b for a, b in zip(ours, theirs, strict=True))
    if gap == 0 or not abs(gap) > 2 * error:
        return "ties with", gap, error
    return ("beats" if gap < 0 else "LOSES to"), gap, error


def ranks(results: Results, metric: str) -> dict[str, list[int]]:
    """Each contender's rank in every table that it played, among those that have the metric."""
    places: dict[str, list[int]] = {}
    for rows in results.values():
        costs = {who: statistics.fmean(scores[metric]) for who, scores in rows.items() if metric in scores}
        better = {"accuracy": lambda mean: -mean, "coverage": lambda mean: abs(mean - LEVEL)}.get(metric, float)
        for who, mean in costs.items():
            places.setdefault(who, []).append(1 + sum(better(other) < better(mean) for other in costs.values()))
    return places


def ranking(results: Results, *, classes: bool) -> str:
    """A line a contender: its mean ranks, and on how many tables ours is better and worse, by size."""
    mine: Results = {name: rows for name, rows in results.items() if TABLES[name].is_classes == classes}
    by_metric = {metric: ranks(mine, metric) for metric in (*METRICS[classes], "seconds")}
    lines = []
    for who in sorted(by_metric["seconds"], key=lambda who: statistics.fmean(by_metric["nll"].get(who, [99]))):
        means = [f"{statistics.fmean(places[who]):.1f}" if who in places else "–" for places in by_metric.values()]
        words: dict[str, list[str]] = {size: [] for size in SIZES}
        for name, rows in mine.items():
            pair = [rows.get(one, {}).get("nll", []) for one in (DEFAULT, who)]
            if who != DEFAULT and all(pair) and len(pair[0]) == len(pair[1]):
                words[TABLES[name].size].append(against(*pair)[0])
        told = [f"{w.count('beats')}:{w.count('LOSES to')} of {len(w)} {size}" for size, w in words.items() if w]
        lines.append((who, *means, ", ".join(told)))
    return harness.markdown(("mean rank", *by_metric, f"NLL of {DEFAULT} better:worse on"), lines)


def beside_best(name: str, rows: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Every contender's scores on a table, after the default's NLL less that of the best peer, split by split."""
    table, nll = TABLES[name], {who: scores["nll"] for who, scores in rows.items() if "nll" in scores}
    lines = [f"{name}: {table.kind}, {table.rows} rows"]
    # The best is picked after the fact, which favours it.
    rival = min((who for who in nll if who not in OURS), key=lambda who: statistics.fmean(nll[who]), default=None)
    others = {rival: nll[rival]} if rival else {}
    if name in PUBLISHED and DEFAULT in nll:
        others["the best published"] = [PUBLISHED[name]] * len(nll[DEFAULT])
    for other, theirs in others.items():
        if len(nll.get(DEFAULT, ())) == len(theirs):
            word, gap, error = against(nll[DEFAULT], theirs)
            lines[0] += f"; {DEFAULT} {word} {other} ({gap:+.3f} ± {error:.3f})"
    for who, scores in rows.items():
        told = [f"{key} {harness.number(scores[key])}" for key in METRICS[table.is_classes] if key in scores]
        lines.append(f"  {who:16s}{', '.join(told)}, {statistics.median(scores['seconds']):.1f} s")
    return "\n".join(lines)


def main() -> None:
    parser = harness.arguments(__doc__, quick="two splits of the smallest sets", peer=", ".join(PEERS), jobs=1)
    parser.add_argument("--splits", type=int, default=3, help="at least 2; the UCI sets have 20")
    parser.add_argument("--half", choices=HALVES, default=HALVES[0], help="of the tables, where --sets names none")
    parser.add_argument("--sets", nargs="+", choices=TABLES, metavar="SET", help=", ".join(TABLES))
    everyone = list(dict.fromkeys((*REGRESSORS, *CLASSIFIERS)))
    parser.add_argument("--report", action="store_true", help="of what was played before")
    options = parser.parse_args()
    rows = [who for who in everyone if not (options.alone and who in PEERS)]
    for who in () if options.report else set(rows) & set(PEERS):
        harness.import_peer(PEERS[who], who)
    names = options.sets or [name for name, table in TABLES.items() if table.half == options.half]
    names = ["diabetes", "wine"] if options.quick else sorted(names, key=lambda name: TABLES[name].rows)
    options.splits = 2 if options.quick else options.splits
    results = contest(names, rows, options)
    print("\n\n".join(beside_best(name, rows) for name, rows in results.items()), end="\n\n")
    print(*(ranking(results, classes=classes) for classes in (False, True)), sep="\n\n")
    print("± is a standard error over splits; a tie is within two. The best peer is picked after the fact.")
    how = {**harness.setting(), "splits": options.splits, "jobs": options.jobs}
    harness.write_results(options.out, "tables", {**how, "results": results})
    placed = ranks(results, "nll").get(DEFAULT, [])
    print(f"mean rank of {DEFAULT} by NLL on {len(placed)} tables: {statistics.fmean(placed) if placed else 0:.2f}")


if __name__ == "__main__":
    main()
