"""The scikit-learn estimators beside scikit-learn's own, NGBoost and laplace-torch: NLL, and RMSE or accuracy.

    python -m benchmarks.tables.run [--quick] [--splits 10] [--sets ...] [--gap] [--alone] [--jobs 1] [--out out/bench]

The sets are scikit-learn's embedded tables and, where they are asked for by name, three UCI regressions out of
$BAYESADAM_DATA/uci with their published splits. Of the other sets a fifth is for testing, drawn anew for every split,
in equal shares of the classes. With --gap the test rows are the middle third of one input, and each input has a split:
the published gap splits of the UCI sets. All estimators see the same splits and standardised inputs; the neural
ones have 50-50 units, a rate of 0.01, and a fifth of the training data for early stopping. What is not said below is at
its default. A regression's NLL is of targets in their own units, its coverage that of 90 % intervals.

- MLPRegressor: a Gaussian about its prediction, the variance that of its training residuals.
- GaussianProcess: an RBF kernel with a length for each input, plus white noise; targets standardised.
- RandomForest: a Gaussian about its prediction, the variance that over its trees plus its training residuals'.
- NGBoost: a Gaussian, its defaults.
- Badam and Badam ×5: one network and five, with the defaults, which were chosen on other tables. Five are a mixture.
- Badam, STRUCTURE: one network with one noise variance, ReLUs and a patience of 30 epochs, by `structure`. Of such a
  network is laplace-torch, too: Kronecker factors of all training rows, δ and σ² by its marginal likelihood.

Seconds are those of fitting and of scoring the test rows; with --jobs they are of a busy machine. A probability under
0.0001 counts as that, for every estimator: a forest says 0, and one such miss would be its whole NLL.
"""

from __future__ import annotations

import copy
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
from scipy.special import logsumexp
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
from torch.utils.data import DataLoader, TensorDataset

from bayesadam.sklearn import BadamClassifier, BadamRegressor, log_likelihood
from benchmarks.common.harness import against, arguments, import_peer, mean_and_error, parallel, setting, write_results

Array = np.ndarray[Any, np.dtype[Any]]
Scores = dict[str, float]
Contender = Callable[[Array, Array, Array, Array, int], Scores]
Results = dict[str, dict[str, list[float]]]

LEAST_PROBABILITY = 1e-4
LEVEL = 0.9
MARGINAL_STEPS = 200
NETWORK = {"hidden_layer_sizes": (50, 50), "learning_rate_init": 0.01, "early_stopping": True}
NETWORK |= {"validation_fraction": 0.2, "n_iter_no_change": 30, "max_iter": 300}
ONE_NOISE: Any = {"likelihood": "regression", "activation": "relu", "patience": 30}


# --- regression -----------------------------------------------------------------------------------------------------


def gaussian_scores(mean: Array, std: Array, y: Array) -> Scores:
    """Of a Gaussian, moments of shape (n,), or of an equal mixture of several, (members, n)."""
    means, stds = np.atleast_2d(mean), np.atleast_2d(std)
    log_density = -0.5 * ((y - means) / stds) ** 2 - np.log(stds) - 0.5 * math.log(2 * math.pi)
    nll = math.log(len(means)) - logsumexp(log_density, axis=0)
    return {"nll": float(nll.mean()), "rmse": float(np.sqrt(((y - means.mean(axis=0)) ** 2).mean()))}


def badam_regressor(**settings: Any) -> Contender:
    def contend(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
        model = BadamRegressor(**settings, random_state=seed).fit(X, y)
        mean, low, high = model.predict(X_test, return_interval=LEVEL)
        return {
            "nll": -log_likelihood(model, X_test, y_test),
            "rmse": float(np.sqrt(((y_test - mean) ** 2).mean())),
            "coverage": float(((low <= y_test) & (y_test <= high)).mean()),
        }

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


def laplace_kron(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    # A peer: not everyone has it.
    from laplace import Laplace

    model = BadamRegressor(n_ensemble=1, **ONE_NOISE, random_state=seed).fit(X, y)
    scaler = model.target_scaler_
    x, x_test = (torch.from_numpy(model.input_scaler_.transform(part)) for part in (X, X_test))
    # It sets attributes on the model.
    peer = Laplace(copy.deepcopy(model.networks_[0]), "regression", "all", "kron")
    peer.fit(DataLoader(TensorDataset(x, torch.from_numpy(scaler.transform(y[:, None]))), batch_size=64))
    log_delta, log_sigma = (torch.zeros(1, dtype=x.dtype, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([log_delta, log_sigma], lr=0.1)
    for _ in range(MARGINAL_STEPS):
        optimizer.zero_grad()
        (-peer.log_marginal_likelihood(log_delta.exp(), log_sigma.exp())).backward()
        optimizer.step()
    peer.prior_precision, peer.sigma_noise = log_delta.exp().detach(), log_sigma.exp().detach()
    mean, variance = (part.detach().reshape(len(x_test), 1).numpy() for part in peer(x_test))
    std = np.sqrt(variance + float(peer.sigma_noise) ** 2) * scaler.scale_
    return gaussian_scores(scaler.inverse_transform(mean)[:, 0], std[:, 0], y_test)


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

STRUCTURES = ("diagonal", "inputs")
OURS = ("Badam", "Badam ×5", *(f"Badam, {structure}" for structure in STRUCTURES))
REGRESSORS: Mapping[str, Contender] = {
    "Badam": badam_regressor(n_ensemble=1),
    "Badam ×5": badam_regressor(),
    **{f"Badam, {s}": badam_regressor(n_ensemble=1, structure=s, **ONE_NOISE) for s in STRUCTURES},
    "MLPRegressor": mlp_regressor,
    "GaussianProcess": gaussian_process,
    "RandomForest": forest_regressor,
    "NGBoost": ngboost,
    "laplace-torch": laplace_kron,
}
CLASSIFIERS: Mapping[str, Contender] = {
    "Badam": classifier(lambda seed: BadamClassifier(n_ensemble=1, random_state=seed)),
    "Badam ×5": classifier(lambda seed: BadamClassifier(random_state=seed)),
    "MLPClassifier": classifier(lambda seed: MLPClassifier(**NETWORK, random_state=seed)),
    "RandomForest": classifier(lambda seed: RandomForestClassifier(random_state=seed)),
    "LogisticRegression": classifier(lambda seed: LogisticRegression(max_iter=2000)),
}
PEERS = ("NGBoost", "laplace-torch")
UCI = ("energy", "wine-quality-red", "yacht")
# The least published NLL of MC dropout (Gal and Ghahramani 2016), deep ensembles (Lakshminarayanan et al. 2017) and
# NGBoost (Duan et al. 2020).
PUBLISHED = {"energy": 0.46, "wine-quality-red": 0.90, "yacht": 0.20}


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
    **{name: (partial(load_uci, name), REGRESSORS, "rmse") for name in UCI},
}


def split_of(name: str, X: Array, y: Array, split: int, *, gap: bool) -> tuple[Array, Array, Array, Array]:
    """Training and test inputs, training and test targets; with `gap` input number `split` has one."""
    if name in UCI:
        with np.load(uci_file(name)) as stored:
            test = stored["gap_test_mask" if gap else "test_mask"][split]
        return X[~test], X[test], y[~test], y[test]
    if gap:
        test = np.zeros(len(X), dtype=bool)
        test[np.argsort(X[:, split], kind="stable")[len(X) // 3 : len(X) - len(X) // 3]] = True
        return X[~test], X[test], y[~test], y[test]
    strata = y if SETS[name][2] == "accuracy" else None
    parts: tuple[Array, Array, Array, Array] = train_test_split(
        X, y, test_size=0.2, random_state=split, stratify=strata
    )
    return parts


def scored(name: str, split: int, who: str, gap: bool) -> Scores:
    """One contender's scores and seconds on one split."""
    load, contenders, _ = SETS[name]
    X_train, X_test, y_train, y_test = split_of(name, *load(), split, gap=gap)
    began = time.perf_counter()
    with warnings.catch_warnings():
        # The peers': 300 epochs reached, a length of the kernel at its bound, a scalar with a gradient.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
        scores = contenders[who](X_train, y_train, X_test, y_test, split)
    return {**scores, "seconds": time.perf_counter() - began}


def contest(name: str, splits: int, rows: Iterable[str], *, jobs: int, gap: bool) -> Results:
    """Every contender's scores and seconds, one entry a split."""
    results: Results = {who: {} for who in rows}
    tasks = [(split, who) for split in range(splits) for who in results]
    calls = [partial(scored, name, split, who, gap) for split, who in tasks]
    for (_, who), scores in zip(tasks, parallel(calls, jobs=jobs), strict=True):
        for key, value in scores.items():
            results[who].setdefault(key, []).append(value)
    return results


# --- what is told of it ---------------------------------------------------------------------------------------------


def best_of(results: Mapping[str, Mapping[str, list[float]]], metric: str, names: Iterable[str]) -> str:
    sign = -1 if metric == "accuracy" else 1
    return min(names, key=lambda who: sign * statistics.fmean(results[who][metric]))


def table(name: str, results: Mapping[str, Mapping[str, list[float]]]) -> str:
    metric = SETS[name][2]
    peer = next((who for who in results if who not in OURS), OURS[1])
    lines = [f"{name:22s}{'NLL':>18s}  {metric:>18s}    time / {peer}   coverage"]
    for who, scores in results.items():
        cells = []
        for key in ("nll", metric):
            mean, error = mean_and_error(scores[key])
            cells.append(f"{mean:10.3f} ± {error:.3f}{'*' if who == best_of(results, key, results) else ' '}")
        slower = statistics.median(a / b for a, b in zip(scores["seconds"], results[peer]["seconds"], strict=True))
        coverage = f"{statistics.fmean(scores['coverage']):14.3f}" if "coverage" in scores else ""
        lines.append(f"  {who:20s}{'  '.join(cells)}  {slower:8.1f}{coverage}")
    return "\n".join(lines)


def beside_published(name: str, results: Results) -> str:
    """The default's NLL beside the best published one, a tie within two standard errors."""
    mean, error = mean_and_error(results["Badam ×5"]["nll"])
    gap = mean - PUBLISHED[name]
    word = "ties with" if abs(gap) <= 2 * error else "beats" if gap < 0 else "LOSES to"
    return f"Badam ×5 on {name:17s} nll {mean:.3f} ± {error:.3f} {word} the best published, {PUBLISHED[name]:.2f}"


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
    parser = arguments(__doc__, quick="two splits of the smallest sets", peer="laplace-torch and NGBoost", jobs=1)
    parser.add_argument("--splits", type=int, default=10, help="at least 2; the UCI sets have 20")
    embedded = [name for name in SETS if name not in UCI]
    parser.add_argument("--sets", nargs="+", choices=SETS, default=embedded, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--gap", action="store_true", help="one input's middle third is for testing; regressions alone")
    options = parser.parse_args()
    for module in () if options.alone else ("ngboost", "laplace"):
        import_peer(module, module)
    splits, sets = (2, ["diabetes", "wine"]) if options.quick else (options.splits, options.sets)
    if options.gap:
        sets = [name for name in sets if SETS[name][2] == "rmse"]
    results: dict[str, Results] = {}
    for name in sets:
        rows = [who for who in SETS[name][1] if not (options.alone and who in PEERS)]
        inputs = SETS[name][0]()[0].shape[1]
        count = min(splits, inputs) if options.gap and options.quick else inputs if options.gap else splits
        results[name] = contest(name, count, rows, jobs=options.jobs, gap=options.gap)
        print(table(name, results[name]), end="\n\n", flush=True)
    print(
        "Mean ± standard error over splits; * the best mean. Below, the difference to the best peer split by split, a"
    )
    print("tie within two standard errors. The best peer is picked after the fact, which favours it.")
    if not options.gap:
        print("\n".join(beside_published(name, results[name]) for name in UCI if name in results))
    told = [verdict(name, results[name], ours) for ours in OURS for name in results if ours in results[name]]
    print("\n".join(told))
    about = {**setting(), "splits": splits, "jobs": options.jobs, "gap": options.gap}
    write_results(options.out, "tables-gap" if options.gap else "tables", {**about, "results": results})
    default = [line for line in told if line.startswith("Badam ×5 ")]
    won, lost = (sum(f"nll {word}" in line for line in default) for word in ("beats", "LOSES"))
    print(f"NLL of Badam ×5 against the best peer: better on {won}, worse on {lost} of {len(results)} sets")


if __name__ == "__main__":
    main()
