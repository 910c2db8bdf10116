"""The estimators: ours, scikit-learn's, other packages', deep ensembles and MC dropout.

Inputs are standardised, on one core; what is not said below is at its default. Networks have 50-50 units, a rate of
0.01 that falls to 0 along a cosine over 300 epochs, and a fifth of the training data to stop early on.

- Badam, Badam ×5: one network and five.
- deep ensemble: five networks with a variance output (Lakshminarayanan et al. 2017), different in their first weights.
- MC dropout: one such network with dropout 0.1, 50 passes (Kendall and Gal 2017).
- GaussianProcess: an RBF kernel with a length for each input, plus white noise; up to 1,500 rows.
- RandomForest: a Gaussian of the out-of-bag residuals' variance about its prediction.
- linear: Bayesian ridge regression; logistic regression.
- NGBoost, CatBoost (RMSEWithUncertainty with posterior sampling, stopped early on a fifth): Gaussians.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily, Normal

from bayesadam.sklearn import BadamClassifier, BadamRegressor
from benchmarks.tables.sets import Array

LEVEL = 0.9
RATE, EPOCHS, PATIENCE = 0.01, 300, 30


@dataclass(frozen=True)
class Forecast:
    """p(y) of some rows, its mean (rows,), and the ends of 90 % intervals, if the method has its own."""

    mean: Array
    law: Distribution
    ends: tuple[Array, Array] | None = None

    def scores(self, y: Array) -> dict[str, float]:
        """NLL, CRPS, RMSE, coverage and mean width of intervals, which are quantiles of p(y) unless given.

        CRPS = E|Y − y| − ½ E|Y − Y'|, without bias over 200 to 1,000 draws, the last term from their order.
        """
        targets, n = torch.from_numpy(y), min(max(200, 400_000 // len(y)), 1000)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # A mixture draws from all its parts, which is much memory at once.
            parts = [self.law.sample((n // 10,)) for _ in range(10)]
        draws = torch.cat(parts).flatten(1).sort(dim=0).values
        places = 2 * torch.arange(1, len(draws) + 1)[:, None] - len(draws) - 1
        spread = (places * draws).sum(dim=0) / (len(draws) * (len(draws) - 1))
        low, high = self.ends or np.quantile(draws.numpy(), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return {
            "rmse": float(np.sqrt(((y - self.mean) ** 2).mean())),
            "crps": float(((draws - targets).abs().mean(dim=0) - spread).mean()),
            "nll": -float(self.law.log_prob(targets.reshape(self.law.batch_shape)).mean()),
            "coverage": float(((low <= y) & (y <= high)).mean()),
            "width": float((high - low).mean()),
        }


# Of training inputs and targets, test inputs and a seed: a forecast, or probabilities (rows, classes).
Regressor = Callable[[Array, Array, Array, int], Forecast]
Classifier = Callable[[Array, Array, Array, int], Array]
Loss = Callable[[Tensor, Tensor], Tensor]


def gaussian(mean: Array, std: Array, shift: float = 0.0, scale: float = 1.0) -> Forecast:
    """Of y scaled: one Gaussian a row, moments (rows,), or an equal mixture of several, (members, rows)."""
    means, stds = (scale * np.atleast_2d(part).T.astype(np.float64) for part in (mean, std))
    law = Normal(torch.from_numpy(means + shift), torch.from_numpy(stds))
    mixed = MixtureSameFamily(Categorical(torch.ones(means.shape)), law)
    return Forecast(means.mean(axis=1) + shift, mixed)


def of_scaled(fit: Callable[[Array, Array, Array, int], tuple[Array, Array]]) -> Regressor:
    """Gaussians whose moments were learnt from standardised targets."""
    return lambda x, y, x_test, seed: gaussian(*fit(x, (y - y.mean()) / y.std(), x_test, seed), y.mean(), y.std())


def badam(x: Array, y: Array, x_test: Array, seed: int, networks: int = 5) -> Forecast:
    """Ours."""
    model = BadamRegressor(n_ensemble=networks, random_state=seed).fit(x, y)
    mean, low, high = model.predict(x_test, return_interval=LEVEL)
    return Forecast(mean, model.distribution(x_test), (low, high))


def outputs_of(x: Array, y: Tensor, x_test: Array, seed: int, outputs: int, loss: Loss, drop: float) -> Tensor:
    """(members, rows, outputs) of five networks, each at its lowest held-out loss, or of 50 passes with dropout."""
    torch.manual_seed(seed)
    inputs, order, members = torch.from_numpy(x).float(), torch.randperm(len(x)), 1 if drop else 5
    held_out, rows = order.tensor_split([len(x) // 5])
    widths, batch = (x.shape[1], 50, 50, outputs), min(max(32, len(rows) // 32), 256)
    params = [math.sqrt(2 / m) * torch.randn(members, m, n) for m, n in pairwise(widths)]
    params = [p.requires_grad_() for p in (*params, *(torch.zeros(members, 1, n) for n in widths[1:]))]

    def forward(x: Tensor, params: list[Tensor], drop: float) -> Tensor:
        h = x.expand(members, *x.shape)
        for number, (weight, bias) in enumerate(zip(params[:3], params[3:], strict=True)):
            h = torch.baddbmm(bias, F.dropout(h.relu(), drop) if number else h, weight)
        return h

    optimizer = torch.optim.Adam(params, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    best, lowest, since = [param.detach().clone() for param in params], torch.full((members,), math.inf), 0
    for _ in range(EPOCHS):
        for part in rows[torch.randperm(len(rows))].split(batch):
            optimizer.zero_grad()
            torch.autograd.backward(loss(forward(inputs[part], params, drop), y[part]).sum())
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            losses = loss(forward(inputs[held_out], params, 0.0), y[held_out])
            better = losses < lowest
            lowest, since = losses.minimum(lowest), 0 if better.any() else since + 1
            for kept, param in zip(best, params, strict=True):
                kept[better] = param[better]
        if since == PATIENCE:
            break
    return torch.cat([forward(torch.from_numpy(x_test).float(), best, drop) for _ in range(50 if drop else 1)]).double()


def networks(drop: float) -> tuple[Regressor, Classifier]:
    """Five networks, or one with dropout: with a variance output, and with a softmax."""

    def variance(f: Tensor) -> Tensor:
        return F.softplus(f[..., 1]) + 1e-6

    def gaussian_loss(f: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(f[..., 0], y.expand(f.shape[:2]), variance(f), reduction="none").mean(dim=1)

    def class_loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.movedim(2, 1), y.expand(len(f), -1), reduction="none").mean(dim=1)

    def numbers(x: Array, y: Array, x_test: Array, seed: int) -> tuple[Array, Array]:
        f = outputs_of(x, torch.from_numpy(y).float(), x_test, seed, 2, gaussian_loss, drop)
        return f[..., 0].numpy(), variance(f).sqrt().numpy()

    def classes(x: Array, y: Array, x_test: Array, seed: int) -> Array:
        f = outputs_of(x, torch.from_numpy(y), x_test, seed, int(y.max()) + 1, class_loss, drop)
        return np.asarray(f.softmax(dim=-1).mean(dim=0).numpy())

    return of_scaled(numbers), classes


def process(x: Array, y: Array, x_test: Array, seed: int) -> Forecast:
    """A Gaussian process, its kernel by marginal likelihood."""
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed).fit(x, y)
    return gaussian(*model.predict(x_test, return_std=True))


def forest(x: Array, y: Array, x_test: Array, seed: int) -> Forecast:
    """A random forest with the noise of its out-of-bag residuals."""
    model = RandomForestRegressor(oob_score=True, random_state=seed).fit(x, y)
    std = np.sqrt(((y - model.oob_prediction_) ** 2).mean())
    return gaussian(model.predict(x_test), np.full(len(x_test), std))


def ngboost(x: Array, y: Array, x_test: Array, seed: int) -> Forecast:
    """A Gaussian, boosted by the natural gradient."""
    model = importlib.import_module("ngboost").NGBRegressor(random_state=seed, verbose=False).fit(x, y)
    return gaussian((law := model.pred_dist(x_test)).loc, law.scale)


def catboost(x: Array, y: Array, x_test: Array, seed: int, loss: str = "RMSEWithUncertainty") -> Any:
    """E[y] and sd[y], or probabilities; stopped early on a fifth."""
    package, numbers = importlib.import_module("catboost"), loss == "RMSEWithUncertainty"
    kept = train_test_split(x, y, test_size=0.2, random_state=seed, stratify=None if numbers else y)
    how = {"loss_function": loss, "posterior_sampling": numbers, "random_seed": seed, "thread_count": 1}
    how |= {"early_stopping_rounds": 50, "verbose": False, "allow_writing_files": False}
    model = (package.CatBoostRegressor if numbers else package.CatBoostClassifier)(**how)
    model.fit(kept[0], kept[2], eval_set=(kept[1], kept[3]))
    if not numbers:
        return model.predict_proba(x_test)
    mean, variance = model.predict(x_test).T
    return mean, np.sqrt(variance)


def classifier(make: Callable[[int], Any]) -> Classifier:
    """One of scikit-learn's interface."""
    return lambda x, y, x_test, seed: make(seed).fit(x, y).predict_proba(x_test)


OURS = ("Badam", "Badam ×5")
REGRESSORS: Mapping[str, Regressor] = {
    "Badam": partial(badam, networks=1),
    "Badam ×5": badam,
    "deep ensemble": networks(0.0)[0],
    "MC dropout": networks(0.1)[0],
    "GaussianProcess": process,
    "RandomForest": forest,
    "linear": lambda x, y, x_test, seed: gaussian(*BayesianRidge().fit(x, y).predict(x_test, return_std=True)),
    "NGBoost": ngboost,
    "CatBoost": of_scaled(catboost),
}
CLASSIFIERS: Mapping[str, Classifier] = {
    "Badam": classifier(lambda seed: BadamClassifier(n_ensemble=1, random_state=seed)),
    "Badam ×5": classifier(lambda seed: BadamClassifier(random_state=seed)),
    "deep ensemble": networks(0.0)[1],
    "MC dropout": networks(0.1)[1],
    "RandomForest": classifier(lambda seed: RandomForestClassifier(random_state=seed)),
    "linear": classifier(lambda seed: LogisticRegression(max_iter=2000)),
    "CatBoost": lambda x, y, x_test, seed: catboost(x, y, x_test, seed, "Logloss" if y.max() == 1 else "MultiClass"),
}
MOST_ROWS = {"GaussianProcess": 1500}
PEERS = {"NGBoost": "ngboost", "CatBoost": "catboost"}
