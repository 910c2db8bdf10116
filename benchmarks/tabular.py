"""The scikit-learn estimators beside scikit-learn's own and NGBoost: NLL, and RMSE or accuracy.

    python benchmarks/tabular.py [--quick] [--splits 10] [--sets ...] [--out out/bench]

The sets are scikit-learn's embedded tables and, where they are asked for by name, three UCI regressions out of
$BAYESADAM_DATA/uci: X, y and the rows for testing of 20 published splits. Of the other sets a fifth is for testing, drawn
anew for every split, in equal shares of the classes. All estimators see the same splits and standardised inputs; the neural
ones have 50-50 ReLU units, a rate of 0.01, and a fifth of the training data for early stopping. What is not said below is
at its default. A regression's NLL is of targets in their own units.

- MLPRegressor: a Gaussian about its prediction, the variance that of its training residuals.
- GaussianProcessRegressor: an RBF kernel with a length for each input, plus white noise; targets standardised.
- RandomForestRegressor: a Gaussian about its prediction, the variance that over its trees plus its training residuals'.
- NGBoost: a Gaussian, 500 trees at a rate of 0.01, its defaults; on the UCI sets.
- Badam and Badam ×5: one network and five, with the defaults, which were chosen on other tables (made-up ones, and
  iris). Five are a mixture, scored by `log_likelihood`; so is the heteroscedastic one, with `likelihood="heteroscedastic"`.

A probability under 0.0001 counts as that, for every estimator: a forest says 0, and one such miss would be its whole NLL.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_friedman1
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesadam.sklearn import BadamClassifier, BadamRegressor
from harness import against, arguments, mean_and_error, setting, write_results

Array = np.ndarray[Any, np.dtype[Any]]
Scores = dict[str, float]
Contender = Callable[[Array, Array, Array, Array, int], Scores]

LEAST_PROBABILITY = 1e-4
NETWORK = {"hidden_layer_sizes": (50, 50), "learning_rate_init": 0.01, "early_stopping": True}
NETWORK |= {"validation_fraction": 0.2, "n_iter_no_change": 30, "max_iter": 300}


# --- regression -----------------------------------------------------------------------------------------------------


def gaussian_scores(mean: Array, std: Array, y: Array) -> Scores:
    nll = 0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * math.log(2 * math.pi)
    return {"nll": float(nll.mean()), "rmse": float(np.sqrt(((y - mean) ** 2).mean()))}


def badam_regressor(**settings: Any) -> Contender:
    def contend(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
        model = BadamRegressor(**settings, random_state=seed).fit(X, y)
        rmse = float(np.sqrt(((y_test - model.predict(X_test)) ** 2).mean()))
        return {"nll": float(-model.log_likelihood(X_test, y_test).mean()), "rmse": rmse}

    return contend


def ngboost(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    # A peer: not everyone has it.
    from ngboost import NGBRegressor

    scaler = StandardScaler().fit(X)
    model = NGBRegressor(random_state=seed, verbose=False).fit(scaler.transform(X), y)
    found = model.pred_dist(scaler.transform(X_test))
    return gaussian_scores(found.loc, found.scale, y_test)


def mlp_regressor(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    network = make_pipeline(StandardScaler(), MLPRegressor(**NETWORK, random_state=seed))
    model = TransformedTargetRegressor(network, transformer=StandardScaler()).fit(X, y)
    std = np.sqrt(((y - model.predict(X)) ** 2).mean())
    return gaussian_scores(model.predict(X_test), np.full(len(y_test), std), y_test)


def gaussian_process(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    kernel = ConstantKernel() * RBF(np.ones(X.shape[1])) + WhiteKernel()
    model = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)).fit(
        X, y
    )
    return gaussian_scores(*model.predict(X_test, return_std=True), y_test)


def forest_regressor(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    model = RandomForestRegressor(random_state=seed).fit(X, y)
    trees = np.stack([tree.predict(X_test) for tree in model.estimators_])
    noise = ((y - model.predict(X)) ** 2).mean()
    return gaussian_scores(trees.mean(axis=0), np.sqrt(trees.var(axis=0) + noise), y_test)


# --- classification -------------------------------------------------------------------------------------------------


def class_scores(probs: Array, y: Array) -> Scores:
    picked = probs[np.arange(len(y)), y].clip(LEAST_PROBABILITY)
    return {"nll": float(-np.log(picked).mean()), "accuracy": float((probs.argmax(axis=1) == y).mean())}


def classifier(make: Callable[[int], Any]) -> Contender:
    def contend(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
        model = make_pipeline(StandardScaler(), make(seed)).fit(X, y)
        return class_scores(model.predict_proba(X_test), y_test)

    return contend


# --- the contest ----------------------------------------------------------------------------------------------------

OURS = ("Badam", "Badam ×5", "heteroscedastic ×5")
OUR_REGRESSORS: Mapping[str, Contender] = {
    "Badam": badam_regressor(n_ensemble=1),
    "Badam ×5": badam_regressor(),
    "heteroscedastic ×5": badam_regressor(likelihood="heteroscedastic"),
}
REGRESSORS: Mapping[str, Contender] = {
    **OUR_REGRESSORS,
    "MLPRegressor": mlp_regressor,
    "GaussianProcess": gaussian_process,
    "RandomForest": forest_regressor,
}
CLASSIFIERS: Mapping[str, Contender] = {
    "Badam": classifier(lambda seed: BadamClassifier(n_ensemble=1, random_state=seed)),
    "Badam ×5": classifier(lambda seed: BadamClassifier(random_state=seed)),
    "MLPClassifier": classifier(lambda seed: MLPClassifier(**NETWORK, random_state=seed)),
    "RandomForest": classifier(lambda seed: RandomForestClassifier(random_state=seed)),
    "LogisticRegression": classifier(lambda seed: LogisticRegression(max_iter=2000)),
}
UCI = ("energy", "wine-quality-red", "yacht")


def uci_file(name: str) -> Path:
    return Path(os.environ["BAYESADAM_DATA"]) / "uci" / f"{name}.npz"


def load_uci(name: str) -> tuple[Array, Array]:
    with np.load(uci_file(name)) as held:
        return held["X"], held["y"]


SETS: Mapping[str, tuple[Callable[[], tuple[Array, Array]], Mapping[str, Contender], str]] = {
    "diabetes": (lambda: load_diabetes(return_X_y=True), REGRESSORS, "rmse"),
    "friedman1": (lambda: make_friedman1(500, noise=1.0, random_state=0), REGRESSORS, "rmse"),
    "wine": (lambda: load_wine(return_X_y=True), CLASSIFIERS, "accuracy"),
    "digits": (lambda: load_digits(return_X_y=True), CLASSIFIERS, "accuracy"),
    "breast cancer": (lambda: load_breast_cancer(return_X_y=True), CLASSIFIERS, "accuracy"),
    **{name: (partial(load_uci, name), {**OUR_REGRESSORS, "NGBoost": ngboost}, "rmse") for name in UCI},
}


def split_of(name: str, X: Array, y: Array, split: int) -> tuple[Array, Array, Array, Array]:
    """Training and test inputs, training and test targets."""
    if name in UCI:
        with np.load(uci_file(name)) as held:
            test = held["test_mask"][split]
        return X[~test], X[test], y[~test], y[test]
    strata = y if SETS[name][2] == "accuracy" else None
    found: tuple[Array, Array, Array, Array] = train_test_split(
        X, y, test_size=0.2, random_state=split, stratify=strata
    )
    return found


def contest(name: str, splits: int) -> dict[str, dict[str, list[float]]]:
    """Every contender's scores and seconds, one entry a split."""
    load, contenders, metric = SETS[name]
    X, y = load()
    results: dict[str, dict[str, list[float]]] = {who: {"nll": [], metric: [], "seconds": []} for who in contenders}
    for split in range(splits):
        X_train, X_test, y_train, y_test = split_of(name, X, y, split)
        for who, contend in contenders.items():
            began = time.perf_counter()
            with warnings.catch_warnings():
                # The peers': 300 epochs reached, or a length of the kernel at its bound.
                warnings.simplefilter("ignore", ConvergenceWarning)
                scores = contend(X_train, y_train, X_test, y_test, split)
            for key, value in {**scores, "seconds": time.perf_counter() - began}.items():
                results[who][key].append(value)
    return results


# --- what is told of it ---------------------------------------------------------------------------------------------


def best_of(results: Mapping[str, Mapping[str, list[float]]], metric: str, names: Iterable[str]) -> str:
    sign = -1 if metric == "accuracy" else 1
    return min(names, key=lambda who: sign * statistics.fmean(results[who][metric]))


def table(name: str, results: Mapping[str, Mapping[str, list[float]]]) -> str:
    metric = SETS[name][2]
    peer = next(who for who in results if who not in OURS)
    lines = [f"{name:22s}{'NLL':>18s}  {metric:>18s}    time / {peer}"]
    for who, scores in results.items():
        cells = []
        for key in ("nll", metric):
            mean, error = mean_and_error(scores[key])
            cells.append(f"{mean:10.3f} ± {error:.3f}{'*' if who == best_of(results, key, results) else ' '}")
        slower = statistics.median(a / b for a, b in zip(scores["seconds"], results[peer]["seconds"], strict=True))
        lines.append(f"  {who:20s}{'  '.join(cells)}  {slower:8.1f}")
    return "\n".join(lines)


def verdict(name: str, results: Mapping[str, Mapping[str, list[float]]], ours: str) -> str:
    """Ours against the best of the peers, split by split."""
    told = []
    for metric in ("nll", SETS[name][2]):
        rival = best_of(results, metric, [who for who in results if who not in OURS])
        better = metric == "accuracy"
        word, gap, error = against(results[ours][metric], results[rival][metric], larger_is_better=better)
        told.append(f"{metric} {word} {rival} ({gap:+.3f} ± {error:.3f})")
    return f"{ours:19s} on {name:17s} " + "; ".join(told)


def main() -> None:
    parser = arguments(__doc__, quick="two splits of the two smallest sets")
    parser.add_argument("--splits", type=int, default=10)
    embedded = [name for name in SETS if name not in UCI]
    parser.add_argument("--sets", nargs="+", choices=SETS, default=embedded, metavar="SET", help=", ".join(SETS))
    options = parser.parse_args()
    splits, sets = (2, ["diabetes", "wine"]) if options.quick else (options.splits, options.sets)
    if splits < 2:
        parser.error("--splits must be at least 2, for there to be a standard error")
    if set(sets) & set(UCI) and (splits > 20 or "BAYESADAM_DATA" not in os.environ):
        parser.error("the UCI sets have 20 splits and lie in the folder uci of $BAYESADAM_DATA, which must be set")
    # So small a network is slowed by a second thread.
    torch.set_num_threads(1)
    results = {}
    for name in sets:
        results[name] = contest(name, splits)
        print(table(name, results[name]), end="\n\n", flush=True)
    print(
        f"Mean ± standard error over {splits} splits; * the best mean. Below, the difference to the best peer split by"
    )
    print("split, a tie within two standard errors. The best peer is picked after the fact, which favours it.")
    verdicts = [verdict(name, results[name], ours) for ours in OURS for name in results if ours in results[name]]
    print("\n".join(verdicts))
    write_results(options.out, "tabular", {**setting(), "splits": splits, "results": results})
    lost = sum("nll LOSES" in line for line in verdicts if line.startswith("Badam ×5 "))
    won = sum("nll beats" in line for line in verdicts if line.startswith("Badam ×5 "))
    print(f"NLL of Badam ×5 against the best peer: better on {won}, worse on {lost} of {len(results)} sets")


if __name__ == "__main__":
    main()
