"""`BadamRegressor` and `BadamClassifier`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn
from torch.distributions import AffineTransform, Distribution, TransformedDistribution

from bayesadam._alone import alone_with
from bayesadam._checks import count, not_negative, positive
from bayesadam._warnings import warn
from bayesadam.engine.network import Network
from bayesadam.engine.rules import Adam
from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods import (
    LIKELIHOODS,
    Component,
    Likelihood,
    Moments,
    NumericLikelihood,
    Prediction,
    likelihood,
)
from bayesadam.likelihoods.conformal import threshold
from bayesadam.sklearn.training import Part, fit_networks, split
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

Array = np.ndarray[Any, np.dtype[Any]]
_STRUCTURES = ("diagonal", "inputs")
_DTYPES = (np.float64, np.float32)
_REGRESSIONS = tuple(name for name, kind in LIKELIHOODS.items() if isinstance(kind, NumericLikelihood))
# With fewer held-out rows a noise that depends on the input is not learnt.
_FEWEST_HELD_OUT = 20
# Poisson counts vary by at least their mean; of larger ones the noise is as good as Gaussian.
_LARGEST_COUNT = 100.0
# Shares of the rows, and the variance of their noise: one row in a hundred has four times the others' σ.
_OUTLIERS = ((0.99, 1 / 1.15), (0.01, 16 / 1.15))


# Its `__init__` keeps every argument as it is, under its name, as scikit-learn wants it.
@dataclass(eq=False, repr=False)
class _Badam(BaseEstimator):  # type: ignore[misc]
    """What the two estimators share: arguments, training, posteriors."""

    hidden: Sequence[int] = (50, 50)
    _: KW_ONLY
    activation: str = "relu"
    lr: float = 1e-2
    weight_decay: float | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    max_epochs: int = 300
    patience: int | None = 30
    validation_fraction: float = 0.2
    n_ensemble: int = 5
    structure: Literal["diagonal", "inputs"] = "diagonal"
    random_state: int | np.random.RandomState | None = None
    device: str | torch.device = "cpu"

    def _split(self, X: Array, strata: Array) -> tuple[Tensor, list[Part]]:
        """Scaled inputs, and the rows of each network."""
        settings = self._settings()
        self.input_scaler_ = _scaler(X)
        random = check_random_state(self.random_state)
        return self._scaled(X), split(strata, settings["validation_fraction"], settings["n_ensemble"], random)

    def _train(self, x: Tensor, y: Tensor, parts: Sequence[Part], name: str) -> None:
        """Train, read the posteriors, tune them and keep them."""
        settings, kind, n = self._settings(), likelihood(name), len(parts[0].rows)
        decay, batch_size = settings["weight_decay"], settings["batch_size"]
        decay = (0.3 if kind.is_classes else 0.01) if decay == "auto" else decay
        y = kind.shaped(y, x)
        start = kind.start(y)
        network = Network(x.shape[1], settings["hidden"], kind.n_outputs(y), self.activation)
        trained = fit_networks(
            network,
            Adam(decoupled=True, weight_decay=decay),
            kind,
            (x.float(), kind.shaped(y, x.float())),
            parts,
            batch_size=min(max(32, n // 32), 256) if batch_size == "auto" else batch_size,
            centre=None if start is None else start.float(),
            **{name: settings[name] for name in ("lr", "max_epochs", "patience", "device")},
        )
        self.posteriors_: list[Posterior] = []
        for fit, part in zip(trained, parts, strict=True):
            posterior = Posterior.from_second_moment(
                network.build(fit.params).double(),
                fit.second_moment,
                n,
                name,
                prior_precision=n * decay or 1.0,
                batch_size=fit.batch_size,
            )
            if self.structure == "inputs":
                posterior = posterior.with_inputs(x[part.rows])
            self.posteriors_.append(_tuned(posterior, kind, x[part.held_out], y[part.held_out]))
        self.posterior_ = Mixture(self.posteriors_)
        self.networks_ = [posterior.model for posterior in self.posteriors_]
        self.best_epochs_, self.n_iter_ = [fit.best_epoch for fit in trained], max(fit.epochs for fit in trained)

    def _settings(self) -> dict[str, Any]:
        """The arguments as Python's numbers; checked here, since scikit-learn wants `__init__` to take them all."""
        arguments = self.get_params(deep=False).items()
        settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in arguments}
        for name in ("max_epochs", "n_ensemble", "batch_size", "patience"):
            if (name, settings[name]) not in (("batch_size", "auto"), ("patience", None)):
                count(name, settings[name], "see the arguments")
        positive("lr", settings["lr"], "the learning rate")
        if settings["weight_decay"] != "auto":
            not_negative("weight_decay", settings["weight_decay"])
        if not 0 <= settings["validation_fraction"] < 1:
            raise SettingError(f"validation_fraction must be from 0 and below 1, got {self.validation_fraction!r}")
        if settings["structure"] not in _STRUCTURES:
            raise SettingError(f"structure must be one of {_STRUCTURES}, got {settings['structure']!r}")
        return {**settings, "hidden": tuple(np.atleast_1d(self.hidden).tolist())}

    def _scaled(self, X: Array) -> Tensor:
        # A copy, for torch warns of memory that it may not write to; float64, so that a row's prediction does not
        # depend on the other rows.
        return torch.from_numpy(np.array(self.input_scaler_.transform(X), dtype=np.float64, order="C"))

    def _inputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, dtype=_DTYPES, reset=False))


@dataclass(eq=False, repr=False)
class BadamRegressor(MultiOutputMixin, RegressorMixin, _Badam):  # type: ignore[misc]
    """Regression by small networks under AdamW, with the posterior over their weights in AdamW's state.

    Inputs and targets are standardised within. Each network is trained on a part of the data and keeps the weights, and
    AdamW's v̂, of the epoch with the lowest loss on the rest; the rest also tunes its posterior. The prediction is the
    equal mixture of those of the linearised networks. Guarantees and p-values need `bayesadam.calibrate` of one of
    `posteriors_` on rows that the estimator has not seen, scaled as its own.

    >>> X = np.linspace(-1, 1, 100)[:, None]
    >>> model = BadamRegressor(max_epochs=50, random_state=0).fit(X, np.sin(3 * X[:, 0]))
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> mean.shape, std.shape
    ((3,), (3,))
    >>> mean, low, high = model.predict(X[:3], return_interval=0.9)

    Args:
        hidden: units of each hidden layer; () for a linear model.
        likelihood: `"regression"`, a Gaussian of one noise variance per target; `"heteroscedastic"`, one of a noise
            that depends on the input; `"poisson"`, counts, which are not standardised; `"auto"` is the second, or the
            first where fewer than 20 rows are held out or the structure is not diagonal; of small counts the second or
            the third, both trained, whichever makes the held-out rows likelier.
        activation: `"relu"`, `"tanh"`, `"gelu"`, `"silu"`, `"elu"` or `"sigmoid"`.
        lr, weight_decay: AdamW's; the rate falls to 0 at `max_epochs`, along a cosine; the decay `"auto"` is 0.01, 0.3
            for classification. Weights are averaged over five epochs.
        batch_size: `"auto"`: 32, or a 32nd of the training data, up to 256.
        patience: passes over the training data without a lower held-out loss after which training ends; None for all
            `max_epochs`.
        validation_fraction: share of the data that a network holds out, each its own. With 0 the training data stop and
            tune too, and the uncertainty is too small.
        n_ensemble: how many networks; trained together, five cost two to three times as much as one.
        structure: `"diagonal"`; or `"inputs"`, `Posterior.with_inputs`, which widens where there are no data.
        random_state: an int, a RandomState, or None for numpy's global one; determines everything.
        device: where to train; what was learnt then predicts on the CPU.

    Attributes:
        likelihood_: the one given, or what `"auto"` came to.
        posterior_, posteriors_: the `bayesadam.Mixture` of all networks, over scaled inputs and targets; its members.
        networks_: the networks, in float64.
        noise_variance_: with `likelihood="regression"`, σ² in the units of y, one per target (a float for 1-D y).
        residuals_: |y − E[y]| in standard deviations, (rows, targets), of rows under networks that held them out.
        input_scaler_, target_scaler_: the StandardScalers of inputs and targets.
        best_epochs_, n_iter_: for each network, the best epoch; the epochs trained.
    """

    activation: str = field(default="silu", kw_only=True)
    patience: int | None = field(default=60, kw_only=True)
    likelihood: str = field(default="auto", kw_only=True)

    def fit(self, X: ArrayLike, y: ArrayLike) -> BadamRegressor:
        """Learn from inputs (n, features) and targets (n,) or (n, targets)."""
        rows, values = validate_data(self, X, y, dtype=_DTYPES, multi_output=True, y_numeric=True, ensure_min_samples=2)
        if self.likelihood not in ("auto", *_REGRESSIONS):
            raise SettingError(f"likelihood must be one of {('auto', *_REGRESSIONS)}, got {self.likelihood!r}")
        x, parts = self._split(rows, np.zeros(len(values)))
        columns = values.reshape(len(values), -1).astype(np.float64)
        if len(columns) < _FEWEST_HELD_OUT:
            warn(f"{len(columns)} rows are too few for intervals that hold their level: it takes about twenty")
        fits, names = [], [self.likelihood]
        if self.likelihood == "auto":
            few = sum(len(part.held_out) for part in parts) < _FEWEST_HELD_OUT
            # A posterior that widens makes E[exp(log-variance)] far too large.
            names = ["regression" if few or self.structure != "diagonal" else "heteroscedastic"]
            small = columns.mean(axis=0) <= np.minimum(columns.var(axis=0), _LARGEST_COUNT)
            counts = bool(((columns >= 0) & (columns % 1 == 0) & small).all())
            names += ["poisson"] if counts and names == ["heteroscedastic"] else []
        for name in names:
            self.likelihood_, kind = name, likelihood(name)
            # A scaler of zeros leaves counts as they are.
            self.target_scaler_ = _scaler(columns if kind.standardised else np.zeros_like(columns))
            targets = torch.from_numpy(self.target_scaler_.transform(columns))
            self._train(x, targets, parts, name)
            score, self.residuals_ = self._held_out(x, targets, parts)
            fits.append((score - np.log(self.target_scaler_.scale_).sum(), self.__dict__.copy()))
        self.__dict__.update(max(fits, key=lambda fit: fit[0])[1])
        self._one_target, kind = values.ndim == 1, likelihood(self.likelihood_)
        if self.likelihood == "poisson":
            held_out = parts[0].held_out
            with torch.no_grad():
                reason = kind.mismatch(self.networks_[0](x[held_out]), targets[held_out])
            if reason is not None:
                warn(f"trust the means and the intervals more than the likelihood: {reason.partition(': ')[0]}")
        if kind.noise:
            noise = np.mean([np.asarray(posterior.noise_variance) for posterior in self.posteriors_], axis=0)
            noise = noise * self.target_scaler_.scale_**2
            self.noise_variance_ = float(noise[0]) if self._one_target else noise
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False, return_interval: float | None = None
    ) -> Array | tuple[Array, ...]:
        """E[y] for each row, of counts the rate, of y's shape; then what else is asked for, in this order.

        `return_std` adds the standard deviation of y, noise included; `return_interval`, a level such as 0.9, adds the
        ends of conformal intervals E[y] ± q sd[y], q the ⌈(n + 1) level⌉-th smallest of `residuals_`, ∞ where these
        are too few. A residual is of a network that was not trained on its row, but was stopped and tuned by it: the
        level is a measured one, not a proven one.
        """
        inputs, kind = self._inputs(X), likelihood(self.likelihood_)
        mean = torch.stack([_mean(network, inputs, kind) for network in self.networks_]).mean(dim=0)
        answer = [self._in_units(mean)]
        if return_std or return_interval is not None:
            std = self.posterior_.predict(inputs).stddev
            answer += [self._in_units(std, shift=False)] if return_std else []
        if return_interval is not None:
            reach = threshold(torch.from_numpy(self.residuals_), return_interval) * std
            low, high = mean - reach, mean + reach
            assert isinstance(kind, NumericLikelihood)
            low, high = kind.ends(low, high)
            answer += [self._in_units(low), self._in_units(high)]
        return tuple(answer) if len(answer) > 1 else answer[0]

    def distribution(self, X: ArrayLike) -> Distribution:
        """p(y | X), (n, targets), in the units of y.

        One row in 100 has four times the standard deviation of noise that the others have; the variance is that of
        `predict`. Of counts it is the mixture as it is.
        """
        shift, scale = (torch.from_numpy(part) for part in (self.target_scaler_.mean_, self.target_scaler_.scale_))
        units = AffineTransform(shift, scale)
        return TransformedDistribution(self._predicted(X).distribution, [units], validate_args=False)

    def log_likelihood(self, X: ArrayLike, y: ArrayLike) -> Array:
        """log p(y | X) of each row, (n,), in nats and for y in its own units; of all its targets together."""
        p = self._predicted(X)
        columns = np.asarray(y, dtype=np.float64).reshape(len(p.components[0].f.mean), -1)
        scores = p.log_prob(torch.from_numpy(self.target_scaler_.transform(columns))).numpy()
        return np.asarray(scores - np.log(self.target_scaler_.scale_).sum())

    def _predicted(self, X: ArrayLike) -> Prediction:
        """p(y) of scaled targets."""
        p = self.posterior_.predict(self._inputs(X))
        return replace(p, components=tuple(part for c in p.components for part in _with_outliers(p.likelihood, c)))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0) -> Array:
        """Draws of y, (n, n_samples) or (n, targets, n_samples).

        Each draw is one function over all rows, of a network chosen at random, plus noise.
        """
        inputs, kind = self._inputs(X), likelihood(self.likelihood_)
        assert isinstance(kind, NumericLikelihood)
        pick, seed = check_random_state(random_state).randint(2**31 - 1, size=2).tolist()
        networks = np.random.default_rng(pick).integers(len(self.posteriors_), size=n_samples)
        draws = []
        # Distributions of torch's draw from the global numbers, which are the user's.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for number, network in enumerate(networks):
                q = self.posteriors_[network]
                f = Moments(q.draw(seed + number)(inputs))
                draws.append(kind.distribution(_with_outliers(kind, Component(f, q.noise_variance))).sample())
        return np.moveaxis(self._in_units(torch.stack(draws)), 0, -1)

    def _held_out(self, x: Tensor, y: Tensor, parts: Sequence[Part]) -> tuple[float, Array]:
        """Of rows under networks that held them out: their mean log-likelihood, and |y − E[y]| in standard deviations.

        Of few rows some are held out by several networks: each has the residual, (rows, targets), of the first, for a
        rank among n needs n rows.
        """
        kind, residuals, scores = likelihood(self.likelihood_), dict[int, Tensor](), []
        for posterior, part in zip(self.posteriors_, parts, strict=True):
            p, targets = posterior.predict(x[part.held_out]), y[part.held_out]
            scores.append(p.log_prob(targets))
            error = (targets - _mean(posterior.model, x[part.held_out], kind)).abs()
            for row, residual in zip(part.held_out.tolist(), error / p.stddev, strict=True):
                residuals.setdefault(row, residual)
        return float(torch.cat(scores).mean()), torch.stack([*residuals.values()]).numpy()

    def _in_units(self, scaled: Tensor, *, shift: bool = True) -> Array:
        """From standardised targets, in the last dimension, to the shape and units of y."""
        values: Array = scaled.numpy() * self.target_scaler_.scale_
        if shift:
            values += self.target_scaler_.mean_
        return values[..., 0] if self._one_target else values


class BadamClassifier(ClassifierMixin, _Badam):  # type: ignore[misc]
    """Classification by small networks under AdamW, with the posterior over their weights in AdamW's state.

    As `BadamRegressor`, whose arguments it takes, with ReLUs and a patience of 30; every class keeps a share of the
    data in training. Probabilities are those of the linearised networks, averaged over the networks.

    >>> X = np.linspace(-1, 1, 100)[:, None]
    >>> y = np.where(X[:, 0] > 0, "right", "left")
    >>> model = BadamClassifier(max_epochs=20, random_state=0).fit(X, y)
    >>> print(model.predict([[-0.9], [0.9]]))
    ['left' 'right']

    Attributes:
        classes_: the labels, sorted; the columns of `predict_proba`.
        posterior_, posteriors_, networks_, input_scaler_, best_epochs_, n_iter_: as `BadamRegressor`'s, over logits.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> BadamClassifier:
        """Learn from inputs (n, features) and labels (n,) of any kind."""
        rows, labels = validate_data(self, X, y, dtype=_DTYPES, ensure_min_samples=2)
        check_classification_targets(labels)
        self.classes_, indices = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"BadamClassifier needs two classes or more; y holds 1 class, {self.classes_.tolist()}")
        x, parts = self._split(rows, indices)
        self._train(x, torch.from_numpy(indices.astype(np.int64)), parts, "classification")
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The likeliest label for each row."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: ArrayLike) -> Array:
        """The probability of each class, (n, classes), in the order of `classes_`."""
        inputs = self._inputs(X)
        return np.asarray(self.posterior_.predict(inputs).probs)


def log_likelihood(estimator: Any, X: ArrayLike, y: ArrayLike) -> float:
    """The mean of log p(y | X) in nats, for `scoring=`: larger is better.

    The estimator is a fitted `BadamRegressor`, a pipeline that ends with one, or a search over either. Of another
    regressor whose `predict` takes `return_std`, such as a Gaussian process, it is that of a Gaussian.

    >>> from sklearn.model_selection import cross_val_score
    >>> X = np.linspace(-1, 1, 60)[:, None]
    >>> model = BadamRegressor(hidden=(), n_ensemble=1, max_epochs=20, random_state=0)
    >>> cross_val_score(model, X, X[:, 0], cv=3, scoring=log_likelihood).shape
    (3,)
    """
    model = getattr(estimator, "best_estimator_", estimator)
    if isinstance(model, Pipeline):
        X, model = model[:-1].transform(X) if len(model) > 1 else X, model[-1]
    if hasattr(model, "log_likelihood"):
        return float(model.log_likelihood(X, y).mean())
    mean, std = model.predict(X, return_std=True)
    return float(-0.5 * np.mean(((y - mean) / std) ** 2 + np.log(2 * np.pi * std**2)))


def _mean(network: nn.Module, inputs: Tensor, kind: Likelihood) -> Tensor:
    """E[y | f] at the network's own f, (rows, targets): no derivative is needed."""
    assert isinstance(kind, NumericLikelihood)
    with alone_with(network), torch.no_grad():
        return kind.expected(Component(Moments(network(inputs))))


def _with_outliers(kind: Likelihood, c: Component) -> list[Component]:
    """The same network with `_OUTLIERS`; of counts as it is."""
    if not kind.standardised:
        return [c]
    assert c.noise_variance is not None
    mean, *log_variance = c.f.mean.chunk(kind.outputs_per_target, dim=-1)
    parts = []
    for share, factor in _OUTLIERS:
        f = replace(c.f, mean=torch.cat([mean, *(g + math.log(factor) for g in log_variance)], dim=-1))
        parts.append(replace(c, f=f, weight=share * c.weight, noise_variance=factor * c.noise_variance))
    return parts


def _tuned(posterior: Posterior, kind: Likelihood, x: Tensor, y: Tensor) -> Posterior:
    """The posterior, tuned; as it was read, with the noise of its residuals, where tuning fails."""
    with torch.no_grad():
        noise = (y - posterior.model(x)).square().mean(dim=0) if kind.noise else kind.ceiling(y)
    posterior = posterior.replace(noise_variance=noise)
    try:
        return posterior.tune((x, y))
    except CalibrationError as error:
        warn(f"the posterior is not tuned: {error}")
        return posterior


def _scaler(columns: Array) -> StandardScaler:
    # Whatever containers the user has set scikit-learn to make, this one's output stays in here.
    return StandardScaler().set_output(transform="default").fit(columns)
