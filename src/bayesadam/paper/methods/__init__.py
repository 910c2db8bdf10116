"""Every method of the paper, and more, behind one protocol: fit a problem, then predict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesadam.engine.network import Network
from bayesadam.engine.rules import RULES
from bayesadam.errors import SettingError
from bayesadam.gaussian.noise import stream_seed
from bayesadam.likelihoods import LikelihoodName
from bayesadam.likelihoods import likelihood as likelihood_named
from bayesadam.paper.methods.base import Data, Fitted, Method, Problem, Training, sampled, trained
from bayesadam.paper.methods.gaussian_process import fit_gp
from bayesadam.paper.methods.optimum import fit_badam, fit_ensemble, fit_laplace_diagonal, fit_laplace_full, fit_map


def fit_rule(name: str, problem: Problem) -> Fitted:
    """A method that predicts by functions drawn from what its rule has learnt: one of `bayesadam.engine.RULES`."""
    if name == "mc-dropout" and not problem.network.dropout:
        problem = replace(problem, network=replace(problem.network, dropout=0.2))
    return sampled(name, problem, trained(problem, RULES[name]))


METHODS: Mapping[str, Method] = {
    "gp": fit_gp,
    "badam": fit_badam,
    **{name: partial(fit_rule, name) for name in RULES if name != "adam"},
    "map": fit_map,
    "laplace-diagonal": fit_laplace_diagonal,
    "laplace-full": fit_laplace_full,
    "ensemble": fit_ensemble,
}


def fit(
    method: str,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: LikelihoodName,
    hidden: tuple[int, ...] = (50, 50),
    activation: str = "relu",
    seeds: Sequence[int] = (0,),
    held_out: float = 0.2,
    **training: Any,
) -> Fitted:
    """Train one of the methods on your own data, once for each seed, all seeds as one stack.

    On a terminal a bar shows how far training is, from two seconds on.

    >>> x = torch.linspace(-1, 1, 100).unsqueeze(1)
    >>> fitted = fit("badam", x, x.square(), likelihood="regression", hidden=(8,), epochs=5)
    >>> fitted.predict(x)[0].stddev.shape
    torch.Size([100, 1])

    Args:
        method: one of `METHODS`.
        x: inputs, (n, inputs).
        y: targets: (n,) or (n, targets) numbers, or (n,) class indices.
        likelihood: such as `"regression"`.
        hidden: widths of the hidden layers.
        seeds: one network each; a seed also decides which examples are held out.
        held_out: the share of the examples that calibrates and is not trained on.
        training: settings of `Training`: epochs, batch_size, lr, weight_decay, betas.
    """
    if method not in METHODS:
        raise SettingError(f"method must be one of {tuple(METHODS)}, got {method!r}")
    asked = problem(x, y, likelihood, hidden, activation, seeds, held_out, Training(**training))
    return METHODS[method](replace(asked, progress=True))


def problem(
    x: Tensor,
    y: Tensor,
    likelihood: LikelihoodName,
    hidden: tuple[int, ...],
    activation: str,
    seeds: Sequence[int],
    held_out: float,
    training: Training,
) -> Problem:
    """One data set as the problem of a stack of seeds, each with its own part held out."""
    n_train = round(len(x) * (1 - held_out))
    if not 0 < n_train < len(x):
        raise SettingError(f"held_out={held_out!r} of {len(x)} examples leaves none to train on, or none held out")
    kind = likelihood_named(likelihood)
    y = kind.shaped(y, x)
    sources = [torch.Generator().manual_seed(stream_seed(seed, "held-out")) for seed in seeds]
    orders = torch.stack([torch.randperm(len(x), generator=source) for source in sources])
    rows, rest = orders[:, :n_train], orders[:, n_train:]
    network = Network(x.shape[1], hidden, kind.n_outputs(y), activation)
    return Problem(Data(x[rows], y[rows], x[rest], y[rest], likelihood), network, training, tuple(seeds))


__all__ = ["METHODS", "Data", "Fitted", "Method", "Network", "Problem", "Training", "fit", "fit_rule", "problem"]
