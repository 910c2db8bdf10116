"""The scikit-learn estimators beside scikit-learn's own, on its embedded tables: NLL, and RMSE or accuracy.

    python benchmarks/tabular.py [--quick] [--splits 10] [--sets ...] [--out out/bench]

A fifth of each set is for testing, drawn anew for every split, in equal shares of the classes. All estimators see the
same splits and standardised inputs; the neural ones have 50-50 ReLU units, a rate of 0.01, and a fifth of the training
data for early stopping. What is not said below is at its default.

- MLPRegressor: a Gaussian about its prediction, the variance that of its training residuals.
- GaussianProcessRegressor: an RBF kernel with a length for each input, plus white noise; targets standardised.
- RandomForestRegressor: a Gaussian about its prediction, the variance that over its trees plus its training residuals'.
- Badam and Badam ×5: one network and five, with the defaults, which were chosen on other tables (made-up ones, and
  iris). Five are a mixture, scored as the one Gaussian that `predict(X, return_std=True)` gives.

A probability under 0.0001 counts as that, for every estimator: a forest says 0, and one such miss would be its whole NLL.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
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


def badam_regressor(n_ensemble: int) -> Contender:
    def contend(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
        model = BadamRegressor(n_ensemble=n_ensemble, random_state=seed).fit(X, y)
        return gaussian_scores(*model.predict(X_test, return_std=True), y_test)

    return contend


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

OURS = ("Badam", "Badam ×5")
REGRESSORS: Mapping[str, Contender] = {
    "Badam": badam_regressor(1),
    "Badam ×5": badam_regressor(5),
    "MLPRegressor": mlp_regressor,
    "GaussianProcess": gaussian_process,
    "RandomForest": forest_regressor,
}
CLASSIFIERS: Mapping[str, Contender] = {
    "Badam": classifier(lambda seed: BadamClassifier(random_state=seed)),
    "Badam ×5": classifier(lambda seed: BadamClassifier(n_ensemble=5, random_state=seed)),
    "MLPClassifier": classifier(lambda seed: MLPClassifier(**NETWORK, random_state=seed)),
    "RandomForest": classifier(lambda seed: RandomForestClassifier(random_state=seed)),
    "LogisticRegression": classifier(lambda seed: LogisticRegression(max_iter=2000)),
}
SETS: Mapping[str, tuple[Callable[[], tuple[Array, Array]], Mapping[str, Contender], str]] = {
    "diabetes": (lambda: load_diabetes(return_X_y=True), REGRESSORS, "rmse"),
    "friedman1": (lambda: make_friedman1(500, noise=1.0, random_state=0), REGRESSORS, "rmse"),
    "wine": (lambda: load_wine(return_X_y=True), CLASSIFIERS, "accuracy"),
    "digits": (lambda: load_digits(return_X_y=True), CLASSIFIERS, "accuracy"),
    "breast cancer": (lambda: load_breast_cancer(return_X_y=True), CLASSIFIERS, "accuracy"),
}


def contest(name: str, splits: int) -> dict[str, dict[str, list[float]]]:
    """Every contender's scores and seconds, one entry a split."""
    load, contenders, metric = SETS[name]
    X, y = load()
    results: dict[str, dict[str, list[float]]] = {who: {"nll": [], metric: [], "seconds": []} for who in contenders}
    for split in range(splits):
        strata = y if metric == "accuracy" else None
        X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=split, stratify=strata)
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
    peer = next(who for who in results if who.startswith("MLP"))
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
    return f"{ours:9s} on {name:14s} " + "; ".join(told)


def main() -> None:
    parser = arguments(__doc__, quick="two splits of the two smallest sets")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    options = parser.parse_args()
    splits, sets = (2, ["diabetes", "wine"]) if options.quick else (options.splits, options.sets)
    if splits < 2:
        parser.error("--splits must be at least 2, for there to be a standard error")
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
    verdicts = [verdict(name, results[name], ours) for ours in OURS for name in results]
    print("\n".join(verdicts))
    write_results(options.out, "tabular", {**setting(), "splits": splits, "results": results})
    lost = sum("nll LOSES" in line for line in verdicts if line.startswith("Badam ×5"))
    won = sum("nll beats" in line for line in verdicts if line.startswith("Badam ×5"))
    print(f"NLL of Badam ×5 against the best peer: better on {won}, worse on {lost} of {len(results)} sets")


if __name__ == "__main__":
    main()
