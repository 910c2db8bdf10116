"""The scikit-learn estimators beside scikit-learn's own and NGBoost: NLL, and RMSE or accuracy.

    python benchmarks/tabular.py [--quick] [--splits 10] [--sets ...] [--alone] [--jobs 1] [--out out/bench]
    BAYESADAM_DATA=... python benchmarks/tabular.py --gap [--alone] [--jobs 1]
    python benchmarks/tabular.py --made-up-gaps [--alone] [--jobs 1]

The sets are scikit-learn's embedded tables and, where they are asked for by name, three UCI regressions out of
$BAYESADAM_DATA/uci: X, y and the rows for testing of 20 published splits. Of the other sets a fifth is for testing,
drawn anew for every split, in equal shares of the classes. All estimators see the same splits and standardised inputs;
the neural ones have 50-50 units, a rate of 0.01, and a fifth of the training data for early stopping. What is not said
below is at its default. A regression's NLL is of targets in their own units, its coverage that of our 90 % intervals.
The UCI sets also stand beside the best published NLL; --alone leaves out NGBoost.

- MLPRegressor: a Gaussian about its prediction, the variance that of its training residuals.
- GaussianProcessRegressor: an RBF kernel with a length for each input, plus white noise; targets standardised.
- RandomForestRegressor: a Gaussian about its prediction, the variance that over its trees plus its training residuals'.
- NGBoost: a Gaussian, 500 trees at a rate of 0.01, its defaults; on the UCI sets.
- Badam and Badam ×5: one network and five, with the defaults, which were chosen on other tables (made-up ones, and
  iris). Five are a mixture, scored by `log_likelihood`. Homoscedastic ×5 has `likelihood="regression"`.
- Badam, Kronecker and Badam ×5, Kronecker: the same with `structure="inputs"`, which is homoscedastic.

With --gap the test rows are the middle third of one input, and there is a split for each input: the published gap
splits of the UCI sets. --made-up-gaps cuts four other tables so, for choosing settings: friedman1, diabetes, and two
functions made up here. All rows of one network share it, and so do those of five; they are homoscedastic, of ReLUs,
with a patience of 30 epochs:

- MAP and ensemble ×5: Gaussians about one network and about five, mixed; the variance is that of the held-out
  residuals.
- diagonal, Kronecker and low-rank, one network or five: ours, by `structure`.
- laplace-torch kron: over one network, its Kronecker factors of all training rows, held-out ones included, δ and σ² by
  200 steps of Adam on its marginal likelihood, as its documentation has it.
- default ×5: `BadamRegressor()`.
- GaussianProcess: as above.

Seconds are those of fitting and of scoring the test rows; with --jobs they are of a busy machine.

A probability under 0.0001 counts as that, for every estimator: a forest says 0, and one such miss would be its whole
NLL.
"""

from __future__ import annotations

import argparse
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

import bayesadam as ba
from bayesadam.sklearn import BadamClassifier, BadamRegressor, log_likelihood
from harness import against, arguments, import_peer, mean_and_error, parallel, setting, write_results

Array = np.ndarray[Any, np.dtype[Any]]
Scores = dict[str, float]
Contender = Callable[[Array, Array, Array, Array, int], Scores]
Results = dict[str, dict[str, list[float]]]

LEAST_PROBABILITY = 1e-4
LEVEL = 0.9
MARGINAL_STEPS = 200
NETWORK = {"hidden_layer_sizes": (50, 50), "learning_rate_init": 0.01, "early_stopping": True}
NETWORK |= {"validation_fraction": 0.2, "n_iter_no_change": 30, "max_iter": 300}
GAP_NETWORK = {"likelihood": "regression", "activation": "relu", "patience": 30}


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


# --- without a posterior, or with the peer's ------------------------------------------------------------------------


def networks(n_ensemble: int) -> Contender:
    """The regressor's networks, each with the noise of its own held-out residuals."""

    def contend(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
        model = BadamRegressor(n_ensemble=n_ensemble, calibration=None, **GAP_NETWORK, random_state=seed).fit(X, y)
        x, scaler = torch.from_numpy(model.input_scaler_.transform(X_test)), model.target_scaler_
        with torch.no_grad():
            means = np.stack([scaler.inverse_transform(network(x).numpy())[:, 0] for network in model.networks_])
        stds = [np.sqrt(float(posterior.noise_variance)) * scaler.scale_ for posterior in model.posteriors_]
        return gaussian_scores(means, np.stack(stds), y_test)

    return contend


def laplace_kron(X: Array, y: Array, X_test: Array, y_test: Array, seed: int) -> Scores:
    # A peer: not everyone has it.
    from laplace import Laplace

    model = BadamRegressor(n_ensemble=1, calibration=None, **GAP_NETWORK, random_state=seed).fit(X, y)
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

OURS = ("Badam", "Badam ×5", "Badam, Kronecker", "Badam ×5, Kronecker", "homoscedastic ×5")
OUR_REGRESSORS: Mapping[str, Contender] = {
    "Badam": badam_regressor(n_ensemble=1),
    "Badam ×5": badam_regressor(),
    "Badam, Kronecker": badam_regressor(n_ensemble=1, structure="inputs"),
    "Badam ×5, Kronecker": badam_regressor(structure="inputs"),
    "homoscedastic ×5": badam_regressor(likelihood="regression"),
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
    "Badam, Kronecker": classifier(
        lambda seed: BadamClassifier(n_ensemble=1, structure="inputs", random_state=seed)
    ),
    "Badam ×5, Kronecker": classifier(lambda seed: BadamClassifier(structure="inputs", random_state=seed)),
    "MLPClassifier": classifier(lambda seed: MLPClassifier(**NETWORK, random_state=seed)),
    "RandomForest": classifier(lambda seed: RandomForestClassifier(random_state=seed)),
    "LogisticRegression": classifier(lambda seed: LogisticRegression(max_iter=2000)),
}
GAP_ROWS: Mapping[str, Contender] = {
    "MAP": networks(1),
    "ensemble ×5": networks(5),
    "diagonal": badam_regressor(n_ensemble=1, structure="diagonal", **GAP_NETWORK),
    "Kronecker": badam_regressor(n_ensemble=1, structure="inputs", **GAP_NETWORK),
    "low-rank": badam_regressor(n_ensemble=1, structure="low-rank", **GAP_NETWORK),
    "diagonal ×5": badam_regressor(n_ensemble=5, structure="diagonal", **GAP_NETWORK),
    "Kronecker ×5": badam_regressor(n_ensemble=5, structure="inputs", **GAP_NETWORK),
    "default ×5": badam_regressor(),
    "laplace-torch kron": laplace_kron,
    "GaussianProcess": gaussian_process,
}
PAIRS = (("Badam, Kronecker", "Badam"), ("Badam ×5, Kronecker", "Badam ×5"))
GAP_PAIRS = (
    ("diagonal", "MAP"),
    ("Kronecker", "MAP"),
    ("Kronecker", "laplace-torch kron"),
    ("Kronecker", "diagonal"),
    ("diagonal ×5", "ensemble ×5"),
    ("Kronecker ×5", "ensemble ×5"),
    ("Kronecker ×5", "diagonal ×5"),
)
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
    **{name: (partial(load_uci, name), {**OUR_REGRESSORS, "NGBoost": ngboost}, "rmse") for name in UCI},
}


def waves() -> tuple[Array, Array]:
    """Smooth and curved, inputs in a cube: y = sin 2a + ½b² − ac, with little noise."""
    random = np.random.RandomState(0)
    X = random.uniform(-2, 2, (400, 3))
    return X, np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] ** 2 - X[:, 0] * X[:, 2] + 0.1 * random.randn(400)


def ramps() -> tuple[Array, Array]:
    """Straight but for its kinks, Gaussian inputs: y = |a| + max(b, c) − ½d, with more noise."""
    random = np.random.RandomState(1)
    X = random.randn(400, 4)
    return X, np.abs(X[:, 0]) + X[:, 1:3].max(axis=1) - 0.5 * X[:, 3] + 0.3 * random.randn(400)


MADE_UP = {"friedman1": SETS["friedman1"][0], "diabetes": SETS["diabetes"][0], "ramps": ramps, "waves": waves}
GAP_SETS = {**{name: SETS[name][0] for name in UCI}, **MADE_UP}


def gap_split_of(name: str, X: Array, y: Array, split: int) -> tuple[Array, Array, Array, Array]:
    """The same, the test rows being the middle third of input number `split`."""
    test = np.zeros(len(X), dtype=bool)
    if name in UCI:
        with np.load(uci_file(name)) as held:
            test = held["gap_test_mask"][split]
    else:
        test[np.argsort(X[:, split], kind="stable")[len(X) // 3 : len(X) - len(X) // 3]] = True
    return X[~test], X[test], y[~test], y[test]


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


def scored(name: str, split: int, who: str, gap: bool) -> Scores:
    """One contender's scores and seconds on one split."""
    X, y = (GAP_SETS[name] if gap else SETS[name][0])()
    X_train, X_test, y_train, y_test = (gap_split_of if gap else split_of)(name, X, y, split)
    contend = (GAP_ROWS if gap else SETS[name][1])[who]
    began = time.perf_counter()
    with warnings.catch_warnings():
        # The peers': 300 epochs reached, a length of the kernel at its bound, a scalar with a gradient. Ours: what
        # low-rank cannot hold.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
        warnings.simplefilter("ignore", ba.errors.StructureWarning)
        scores = contend(X_train, y_train, X_test, y_test, split)
    return {**scores, "seconds": time.perf_counter() - began}


def contest(name: str, splits: int, rows: Iterable[str], *, jobs: int, gap: bool = False) -> Results:
    """Every contender's scores and seconds, one entry a split."""
    rows = list(rows)
    tasks = [(split, who) for split in range(splits) for who in rows]
    found = list(parallel([partial(scored, name, split, who, gap) for split, who in tasks], jobs=jobs))
    results: Results = {who: {} for who in rows}
    for (_, who), scores in zip(tasks, found, strict=True):
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


def compared(results: Mapping[str, Results], pairs: Iterable[tuple[str, str]]) -> tuple[list[str], str]:
    """The NLL of one row against another's, split by split: a line a set, and a last one that counts the last
    pair's.
    """
    lines, words = [], []
    for ours, theirs in pairs:
        words = []
        for name in [each for each in results if {ours, theirs} <= set(results[each])]:
            nll = (results[name][who]["nll"] for who in (ours, theirs))
            word, gap, error = against(*nll, larger_is_better=False)
            words.append(word)
            lines.append(f"{ours:19s} on {name:17s} nll {word} {theirs} ({gap:+.3f} ± {error:.3f})")
    won, lost = words.count("beats"), words.count("LOSES to")
    return lines, f"NLL of {ours} against {theirs}: better on {won}, worse on {lost} of {len(words)} sets"


def gap_table(name: str, results: Results) -> str:
    best = best_of(results, "nll", results)
    lines = [f"{name:20s}{'NLL':>20s}{'worst':>11s}{'RMSE':>10s}{'seconds':>10s}"]
    for who, scores in results.items():
        (mean, error), seconds = mean_and_error(scores["nll"]), statistics.median(scores["seconds"])
        lines.append(
            f"  {who:18s}{mean:10.3f} ± {error:<7.3f}{'*' if who == best else ' '}{max(scores['nll']):10.3f}"
            f"{statistics.fmean(scores['rmse']):10.3f}{seconds:10.1f}"
        )
    return "\n".join(lines)


def gaps(options: argparse.Namespace) -> None:
    """Gap splits of every set, one for each of its inputs."""
    import_peer("laplace", "laplace-torch", alone=options.alone)
    rows = [who for who in GAP_ROWS if not (options.alone and who.startswith("laplace"))]
    names = list(UCI if options.gap else MADE_UP)
    results: dict[str, Results] = {}
    for name in names[-1:] if options.quick else names:
        splits = 2 if options.quick else GAP_SETS[name]()[0].shape[1]
        results[name] = contest(name, splits, rows, jobs=options.jobs, gap=True)
        print(f"{splits} gap splits\n{gap_table(name, results[name])}", end="\n\n", flush=True)
    print("Mean ± standard error over the splits, the worst split, the median seconds; * the least mean. Below, the")
    print("differences split by split, a tie within two standard errors.")
    lines, last = compared(results, [pair for pair in GAP_PAIRS if set(pair) <= set(rows)])
    print("\n".join(lines))
    title = "tabular-gap" if options.gap else "tabular-made-up-gaps"
    write_results(options.out, title, {**setting(), "jobs": options.jobs, "results": results})
    print(last)


def main() -> None:
    parser = arguments(__doc__, quick="two splits of the smallest sets", peer="laplace-torch and NGBoost", jobs=1)
    parser.add_argument("--splits", type=int, default=10)
    embedded = [name for name in SETS if name not in UCI]
    parser.add_argument("--sets", nargs="+", choices=SETS, default=embedded, metavar="SET", help=", ".join(SETS))
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--gap", action="store_true", help="the gap splits of the UCI sets")
    kinds.add_argument("--made-up-gaps", action="store_true", help="gap splits of tables for choosing settings")
    options = parser.parse_args()
    splits, sets = (2, ["diabetes", "wine"]) if options.quick else (options.splits, options.sets)
    if splits < 2:
        parser.error("--splits must be at least 2, for there to be a standard error")
    if (options.gap or set(sets) & set(UCI)) and (splits > 20 or "BAYESADAM_DATA" not in os.environ):
        parser.error("the UCI sets have 20 splits and lie in the folder uci of $BAYESADAM_DATA, which must be set")
    if options.gap or options.made_up_gaps:
        gaps(options)
        return
    results: dict[str, Results] = {}
    for name in sets:
        rows = [who for who in SETS[name][1] if not (options.alone and who == "NGBoost")]
        results[name] = contest(name, splits, rows, jobs=options.jobs)
        print(table(name, results[name]), end="\n\n", flush=True)
    print(
        f"Mean ± standard error over {splits} splits; * the best mean. Below, the difference to the best peer split by"
    )
    print("split, a tie within two standard errors. The best peer is picked after the fact, which favours it.")
    print("\n".join(beside_published(name, results[name]) for name in UCI if name in results))
    rivalled = [name for name in results if not set(results[name]) <= set(OURS)]
    verdicts = [verdict(name, results[name], ours) for ours in OURS for name in rivalled if ours in results[name]]
    structures, last = compared(results, PAIRS)
    print("\n".join([*verdicts, *structures, last]))
    write_results(options.out, "tabular", {**setting(), "splits": splits, "jobs": options.jobs, "results": results})
    lost = sum("nll LOSES" in line for line in verdicts if line.startswith("Badam ×5 "))
    won = sum("nll beats" in line for line in verdicts if line.startswith("Badam ×5 "))
    print(f"NLL of Badam ×5 against the best peer: better on {won}, worse on {lost} of {len(rivalled)} sets")


if __name__ == "__main__":
    main()
