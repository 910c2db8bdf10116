"""Every method of the paper, and more, behind one protocol: fit a problem, then predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam.engine.network import Network
from bayesadam.errors import SettingError
from bayesadam.likelihoods import LikelihoodName as Likelihood
from bayesadam.methods.base import Fitted, Method, Problem
from bayesadam.methods.gaussian_process import fit_gp
from bayesadam.methods.optimum import (
    fit_badam,
    fit_ensemble,
    fit_laplace_diagonal,
    fit_laplace_full,
    fit_map,
    fit_swag,
)
from bayesadam.methods.training import Data, Training
from bayesadam.methods.variational import fit_bbb, fit_ivon, fit_mc_dropout, fit_vadam
from bayesadam.structures.noise import stream_seed

METHODS: Mapping[str, Method] = {
    "gp": fit_gp,
    "badam": fit_badam,
    "mc-dropout": fit_mc_dropout,
    "bbb": fit_bbb,
    "vadam": fit_vadam,
    "map": fit_map,
    "laplace-diagonal": fit_laplace_diagonal,
    "laplace-full": fit_laplace_full,
    "swag": fit_swag,
    "ivon": fit_ivon,
    "ensemble": fit_ensemble,
}


def fit(
    method: str,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: Likelihood,
    hidden: tuple[int, ...] = (50, 50),
    activation: str = "relu",
    seeds: Sequence[int] = (0,),
    held_out: float = 0.2,
    **training: Any,
) -> Fitted:
    """Train one of the methods on your own data, once for each seed, all seeds as one stack.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> fitted = fit("badam", x, x.square(), likelihood="regression", hidden=(8,), epochs=5)
    >>> fitted.predict(x)[0].stddev.shape
    torch.Size([40, 1])

    Args:
        method: one of `METHODS`.
        x: inputs, (n, inputs).
        y: targets: (n,) or (n, outputs) numbers, or (n,) class numbers.
        likelihood: `"regression"`, `"classification"` or `"binary"`.
        hidden: widths of the hidden layers.
        activation: see `Network`.
        seeds: one network each; a seed also decides which examples are held out.
        held_out: the share of the examples that calibrates and is not trained on.
        training: settings of `Training`: epochs, batch_size, lr, weight_decay, betas.
    """
    if method not in METHODS:
        raise SettingError(f"method must be one of {tuple(METHODS)}, got {method!r}")
    return METHODS[method](problem(x, y, likelihood, hidden, activation, seeds, held_out, Training(**training)))


def problem(
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    hidden: tuple[int, ...],
    activation: str,
    seeds: Sequence[int],
    held_out: float,
    training: Training,
) -> Problem:
    """One data set as the problem of a stack of seeds, each with its own part held out."""
    kept = round(len(x) * (1 - held_out))
    if not 0 < kept < len(x):
        raise SettingError(f"held_out={held_out!r} of {len(x)} examples leaves none to train on, or none held out")
    if likelihood == "classification":
        outputs = int(y.max()) + 1
    else:
        y = y.reshape(len(y), -1).to(x)
        outputs = y.shape[1]
    orders = [
        torch.randperm(len(x), generator=torch.Generator().manual_seed(stream_seed(seed, "held-out"))) for seed in seeds
    ]
    train, rest = torch.stack([order[:kept] for order in orders]), torch.stack([order[kept:] for order in orders])
    data = Data(x[train], y[train], x[rest], y[rest], likelihood)
    return Problem(data, Network(x.shape[1], hidden, outputs, activation), training, tuple(seeds))


__all__ = ["METHODS", "Data", "Fitted", "Method", "Network", "Problem", "Training", "fit", "problem"]
