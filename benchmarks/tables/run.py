"""The scikit-learn estimators beside others on tables: ranks by log-likelihood, CRPS, coverage, error and seconds.

    python -m benchmarks.tables.run [--quick] [--half choosing] [--sets ...] [--contenders ...] [--splits 3] [--gap]
        [--alone] [--jobs 1] [--report] [--out out/bench]

A fifth of each table is for testing, drawn anew for every split, in equal shares of the classes; the UCI files have
their published splits. With --gap it is the middle third of one input, a split for each, in those files the published
ones. All see the same splits and standardised inputs. Scores are in the units of the target, seconds those of fitting
and predicting. Every table, contender and split is a file in out/bench/tables: stopped, it resumes.
"""

from __future__ import annotations

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks.common import harness
from benchmarks.tables.contenders import CLASSIFIERS, LEVEL, MOST_ROWS, OURS, PEERS, REGRESSORS
from benchmarks.tables.sets import HALVES, MOST, SIZES, TABLES, Absent, Array, load, uci_file

# By table, contender and metric, one score a split.
Results = dict[str, dict[str, dict[str, list[float]]]]
DEFAULT = "Badam ×5"
METRICS = {False: ("nll", "crps", "rmse", "coverage", "width"), True: ("nll", "accuracy", "ece")}
# What every cell depends on; a probability under the least counts as that, for a forest says 0.
ABOUT, LEAST_PROBABILITY = {"torch": torch.__version__}, 1e-4
# The least published NLL of MC dropout (Gal and Ghahramani 2016), deep ensembles (Lakshminarayanan et al. 2017) and
# NGBoost (Duan et al. 2020).
PUBLISHED = {"energy": 0.46, "wine-quality-red": 0.90, "yacht": 0.20}


# --- playing --------------------------------------------------------------------------------------------------------


def for_testing(name: str, split: int, *, gap: bool) -> Array:
    """Which rows are for testing; with `gap` the middle third of input number `split`."""
    x, y = load(name)
    if TABLES[name].source == "uci":
        with np.load(uci_file(name)) as stored:
            return np.asarray(stored["gap_test_mask" if gap else "test_mask"][split])
    if gap:
        chosen = np.argsort(x[:, split], kind="stable")[len(x) // 3 : len(x) - len(x) // 3]
    else:
        strata = y if TABLES[name].is_classes else None
        chosen = train_test_split(np.arange(len(x)), test_size=0.2, random_state=split, stratify=strata)[1]
    return np.isin(np.arange(len(x)), chosen)


def play(path: Path, name: str, who: str, split: int, *, gap: bool) -> None:
    """One contender's scores and seconds on one split, written."""
    (x, y), test = load(name), for_testing(name, split, gap=gap)
    scaler = StandardScaler().fit(x[~test])
    parts = scaler.transform(x[~test]), y[~test], scaler.transform(x[test])
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A kernel's length at its bound, a solver's last iteration, a posterior that is not tuned.
        warnings.simplefilter("ignore")
        found: Any = (CLASSIFIERS if TABLES[name].is_classes else REGRESSORS)[who](*parts, split)
    seconds = time.perf_counter() - began
    if TABLES[name].is_classes:
        scores = harness.class_scores(torch.from_numpy(found.clip(LEAST_PROBABILITY)), torch.from_numpy(y[test]))
    else:
        scores = found.scores(y[test])
    harness.write_cell(path, {"settings": ABOUT, "scores": {**scores, "seconds": seconds}})


def contest(names: Iterable[str], rows: Sequence[str], folder: Path, options: Namespace) -> Results:
    """Play what is missing, and read all."""
    cells: dict[Path, tuple[str, str, int]] = {}
    for name in names:
        try:
            columns = load(name)[0].shape[1]
        except Absent as reason:
            print(f"{name} is left out: {reason}", flush=True)
            continue
        for who in CLASSIFIERS if TABLES[name].is_classes else REGRESSORS:
            if who in rows and TABLES[name].rows <= MOST_ROWS.get(who, MOST):
                splits = columns if options.gap and not options.quick else options.splits
                cells |= {folder / name / f"{who}-{split}.json": (name, who, split) for split in range(splits)}
    missing = [] if options.report else [path for path in cells if harness.read_cell(path, ABOUT) is None]
    calls = [partial(play, path, *cells[path], gap=options.gap) for path in missing]
    for done, _ in enumerate(harness.parallel(calls, jobs=options.jobs)):
        print(f"{done + 1} of {len(missing)}: {missing[done]}", flush=True)
    results: Results = {}
    for path, (name, who, _) in cells.items():
        cell = harness.read_cell(path, ABOUT) or {"scores": {}}
        for metric, value in cell["scores"].items():
            results.setdefault(name, {}).setdefault(who, {}).setdefault(metric, []).append(value)
    return results


# --- what is told of it ---------------------------------------------------------------------------------------------


def cost(metric: str, values: Iterable[float]) -> float:
    """What ranks by a metric, the less the better."""
    mean = statistics.fmean(values)
    return -mean if metric == "accuracy" else abs(mean - LEVEL) if metric == "coverage" else mean


def ranks(results: Results, metric: str) -> dict[str, list[int]]:
    """Each contender's rank in every table that it played, among those that have the metric."""
    found: dict[str, list[int]] = {}
    for rows in results.values():
        having = {who: cost(metric, scores[metric]) for who, scores in rows.items() if metric in scores}
        for who, own in having.items():
            found.setdefault(who, []).append(1 + sum(other < own for other in having.values()))
    return found


def ranking(results: Results, *, classes: bool) -> str:
    """A line a contender: its mean ranks, and on how many tables ours is better and worse, by size."""
    mine: Results = {name: rows for name, rows in results.items() if TABLES[name].is_classes == classes}
    by_metric = {metric: ranks(mine, metric) for metric in (*METRICS[classes], "seconds")}
    lines = [f"{'mean rank':16s}{''.join(f'{metric:>10s}' for metric in by_metric)}   NLL of {DEFAULT} better:worse on"]
    for who in sorted(by_metric["seconds"], key=lambda who: statistics.fmean(by_metric["nll"].get(who, [99]))):
        means = (f"{statistics.fmean(found[who]):10.1f}" if who in found else " " * 10 for found in by_metric.values())
        words: dict[str, list[str]] = {size: [] for size in SIZES}
        for name, rows in mine.items():
            pair = [rows.get(one, {}).get("nll", []) for one in (DEFAULT, who)]
            if who != DEFAULT and all(pair) and len(pair[0]) == len(pair[1]):
                words[TABLES[name].size].append(harness.against(*pair, larger_is_better=False)[0])
        told = [f"{w.count('beats')}:{w.count('LOSES to')} of {len(w)} {size}" for size, w in words.items() if w]
        lines.append(f"{who:16s}{''.join(means)}   {', '.join(told)}")
    return "\n".join(lines)


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
            word, gap, error = harness.against(nll[DEFAULT], theirs, larger_is_better=False)
            lines[0] += f"; {DEFAULT} {word} {other} ({gap:+.3f} ± {error:.3f})"
    for who, scores in rows.items():
        cells = [f"{key} {harness.number(scores[key])}" for key in METRICS[table.is_classes] if key in scores]
        lines.append(f"  {who:16s}{', '.join(cells)}, {statistics.median(scores['seconds']):.1f} s")
    return "\n".join(lines)


def main() -> None:
    parser = harness.arguments(__doc__, quick="two splits of the smallest sets", peer=", ".join(PEERS), jobs=1)
    parser.add_argument("--splits", type=int, default=3, help="at least 2; the UCI sets have 20")
    parser.add_argument("--half", choices=HALVES, default=HALVES[0], help="of the tables, where --sets names none")
    parser.add_argument("--sets", nargs="+", choices=TABLES, metavar="SET", help=", ".join(TABLES))
    everyone = list(dict.fromkeys((*REGRESSORS, *CLASSIFIERS)))
    parser.add_argument("--contenders", nargs="+", choices=everyone, metavar="NAME", help=", ".join(everyone))
    parser.add_argument("--gap", action="store_true", help="one input's middle third is for testing; regressions alone")
    parser.add_argument("--report", action="store_true", help="of what was played before")
    options = parser.parse_args()
    rows = options.contenders or [who for who in everyone if options.gap or who not in OURS[2:]]
    rows = [who for who in rows if not (options.alone and who in PEERS)]
    for who in () if options.report else set(rows) & set(PEERS):
        harness.import_peer(PEERS[who], who)
    names = options.sets or [name for name, table in TABLES.items() if table.half == options.half]
    names = ["diabetes", "wine"] if options.quick else sorted(names, key=lambda name: TABLES[name].rows)
    if options.gap:
        names = [name for name in names if not TABLES[name].is_classes]
    options.splits, folder = 2 if options.quick else options.splits, Path(options.out, f"tables{'-gap' * options.gap}")
    results = contest(names, rows, folder, options)
    print("\n\n".join(beside_best(name, rows) for name, rows in results.items()), end="\n\n")
    print(*(ranking(results, classes=classes) for classes in (False, True)), sep="\n\n")
    print("± is a standard error over splits; a tie is within two. The best peer is picked after the fact.")
    how = {**harness.setting(), "splits": options.splits, "jobs": options.jobs}
    harness.write_results(options.out, folder.name, {**how, "results": results})
    placed = ranks(results, "nll").get(DEFAULT, [])
    print(f"mean rank of {DEFAULT} by NLL on {len(placed)} tables: {statistics.fmean(placed) if placed else 0:.2f}")


if __name__ == "__main__":
    main()
