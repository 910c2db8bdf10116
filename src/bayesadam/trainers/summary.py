"""A posterior in a few numbers, for a trainer's logger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesadam._shards import whole
from bayesadam.likelihoods import LikelihoodName, LogitPredictive, NumericPredictive
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.posterior import Posterior
from bayesadam.predict.call import Forward, to_device
from bayesadam.scores import coverage, ece, nll, rmse


def snr_numbers(posterior: Posterior, *, per_parameter: bool = False) -> dict[str, float]:
    """The median of |μ|/σ and the share of weights whose |μ|/σ is below 1, of each parameter too with `per_parameter`."""
    snr = {name: whole(values).flatten() for name, values in posterior.snr().items()}
    parts = {"": torch.cat([values.to(next(iter(snr.values()))) for values in snr.values()])}
    if per_parameter:
        parts |= {f"/{name}": values for name, values in snr.items() if values.numel()}
    numbers: dict[str, float] = {}
    for suffix, values in parts.items():
        numbers[f"snr_median{suffix}"] = float(values.median())
        numbers[f"snr_below_1{suffix}"] = float((values < 1).double().mean())
    return numbers


def held_out_numbers(
    posterior: Posterior,
    batches: Sequence[tuple[Any, Tensor]],
    *,
    likelihood: LikelihoodName,
    forward: Forward | None = None,
) -> dict[str, float]:
    """Scores of the linearised predictive on held-out data, and of the network without a posterior as `network_…`.

    Classification has NLL and ECE of both, over the targets that are not −100. Regression has the predictive's NLL and
    coverage of 95 % intervals, and the RMSE, which both share.
    """
    record = record_of(likelihood)
    means, variances, targets = [], [], []
    device = next(iter(posterior.parameters().values())).device
    for inputs, given in batches:
        found = posterior.predict(to_device(inputs, device), likelihood=likelihood, forward=forward)
        y = record.matched(given.to(found.mean.device), found.mean)
        keep = record.counted(found.mean, y)
        means.append(found.mean[keep])
        variances.append(found.variance[keep])
        targets.append(y[keep])
    joined = replace(found, mean=torch.cat(means), variance=torch.cat(variances))
    y = torch.cat(targets)
    if isinstance(joined, NumericPredictive):
        return {"nll": nll(joined, y), "coverage95": coverage(joined, y), "rmse": rmse(joined.predicted_mean, y)}
    assert isinstance(joined, LogitPredictive)
    network = replace(joined, variance=torch.zeros_like(joined.variance))
    return {
        "nll": nll(joined, y),
        "ece": _ece(joined, y),
        "network_nll": nll(network, y),
        "network_ece": _ece(network, y),
    }


def _ece(predictive: LogitPredictive, y: Tensor) -> float:
    return ece(predictive.class_probs.flatten(0, -2), y.flatten().long())
