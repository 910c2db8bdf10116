"""Predictives as pictures: what is drawn follows from what they are of, and from what is given with them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bayesadam import _plots as plots
from bayesadam._measures import chance_above, in_bins
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.predictive import (
    LogitPredictive,
    NumericPredictive,
    Predictive,
    level_quantile,
    like,
    rows,
)
from bayesadam.likelihoods.regression import HeteroscedasticPredictive, RegressionPredictive

Kind = Literal["bands", "probabilities", "reliability", "novelty"]
_NUMERIC: tuple[Kind, ...] = ("bands", "novelty")
_CLASSES: tuple[Kind, ...] = ("probabilities", "reliability", "novelty")
_BINS = 15
# Lines that can still be told apart.
_MOST_OUTPUTS = 8


def draw(
    predictive: Predictive, x: Any, targets: Any, other: Predictive | None, kind: Kind | None, level: float, ax: Any
) -> Any:
    """`Predictive.plot`."""
    allowed = _NUMERIC if isinstance(predictive, NumericPredictive) else _CLASSES
    if kind is None:
        first = allowed[0] if targets is None or allowed is _NUMERIC else "reliability"
        kind = "novelty" if other is not None else first
    if kind not in allowed:
        raise SettingError(f"kind must be one of {allowed} for a {type(predictive).__name__}, got {kind!r}")
    n = len(predictive.mean)
    places = None if x is None else _column(x, n)
    y = None if targets is None else torch.as_tensor(targets)
    if kind == "novelty":
        return _novelty(predictive, other, ax)
    if isinstance(predictive, NumericPredictive):
        return _bands(predictive, places, y, level, ax)
    assert isinstance(predictive, LogitPredictive)
    probs = predictive.class_probs
    if kind == "probabilities":
        return plots.probabilities(ax, places, _array(probs.flatten(0, -2)))
    if y is None:
        raise SettingError("a reliability diagram needs targets=, the classes that were right")
    if y.numel() != probs[..., 0].numel():
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the probabilities {tuple(probs.shape)}")
    y = y.to(probs.device).reshape(probs.shape[:-1])
    confidence, answer = probs.double().max(dim=-1)
    # What a loss leaves out is padding.
    counted = y >= 0
    return plots.reliability(ax, *_array(in_bins(confidence[counted], (answer == y)[counted], _BINS)))


def _bands(predictive: NumericPredictive, x: Any, y: Tensor | None, level: float, ax: Any) -> Any:
    centre = predictive.predicted_mean
    mean = rows(centre)
    if mean.shape[1] > _MOST_OUTPUTS:
        raise SettingError(
            f"{mean.shape[1]} outputs are too many for one picture, which holds {_MOST_OUTPUTS}: predict some of them, "
            "predict(..., outputs=[0, 1])"
        )
    function = _function_interval(predictive, level)
    is_known = not (isinstance(predictive, RegressionPredictive) and not predictive.noise_known)
    observed = torch.stack([rows(end) for end in predictive.interval(level)]) if is_known else None
    found = [
        plots.Band(
            "mean" if mean.shape[1] == 1 else f"output {k}",
            _array(mean[:, k]),
            None if observed is None else _array(observed[:, :, k]),
            None if function is None else _array(function[:, :, k]),
        )
        for k in range(mean.shape[1])
    ]
    targets = None if y is None else _array(rows(like(y, centre)))
    return plots.bands(ax, x, found, targets, level)


def _function_interval(predictive: NumericPredictive, level: float) -> Tensor | None:
    """E[y] ± z sd of that mean, (2, n, outputs), of Gaussian targets."""
    if not isinstance(predictive, RegressionPredictive | HeteroscedasticPredictive):
        return None
    centre = rows(predictive.predicted_mean)
    reach = level_quantile(level) * rows(predictive.variance)[:, : centre.shape[1]].sqrt()
    return torch.stack([centre - reach, centre + reach])


def _novelty(predictive: Predictive, other: Predictive | None, ax: Any) -> Any:
    own = predictive.novelty
    if other is None:
        return plots.histogram(ax, {"these": _array(own)}, label="novelty (nats)")
    if not isinstance(other, Predictive):
        raise SettingError(f"other must be a predictive of other inputs, got {type(other).__name__}")
    groups = {"these": _array(own), "other": _array(other.novelty)}
    title = f"AUROC {chance_above(own, other.novelty.to(own.device)):.3f}"
    return plots.histogram(ax, groups, label="novelty (nats)", title=title)


def _column(x: Any, n: int) -> plots.Array:
    values = _array(torch.as_tensor(x)).reshape(-1)
    if len(values) != n:
        raise MatchError(
            f"x has {len(values)} numbers and the prediction {n} examples: it must have one number for each, such as one "
            "column of the inputs"
        )
    return values


def _array(tensor: Tensor) -> plots.Array:
    found: plots.Array = tensor.detach().double().cpu().numpy()
    return found
