"""Methods that carry noise through training: MC dropout, Bayes by Backprop, Vadam, IVON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.network import flatten, forward, initial, member, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.methods.base import (
    Fitted,
    Problem,
    WeightGaussian,
    dropout_masks,
    sampled_predictors,
    train_with_adam,
)
from bayesadam.methods.training import Batches, Rate, adam, descend, negative_log_likelihood, repeat
from bayesadam.optim import IVON, Vadam
from bayesadam.optim._perturbed import PerturbedOptimizer
from bayesadam.posterior import Posterior

_INITIAL_STD = 0.02
# IVON divides by h + d: where the loss is flat, d alone keeps the step finite.
_LEAST_DECAY = 1e-4


def fit_mc_dropout(problem: Problem, *, rate: float = 0.2) -> Fitted:
    """MC dropout: units are switched off in training and in prediction alike, and the passes averaged."""
    network = replace(problem.network, dropout=rate)
    params = train_with_adam(problem, network, problem.seeds).params

    def draw(index: int, x: Tensor) -> Tensor:
        source = Streams([problem.seeds[index]], "dropout-prediction", x.device)
        # One mask a draw, the same at every input, makes each draw a function.
        masks = [mask[0] for mask in dropout_masks(source, network, problem.draws, 1)]
        own = {name: t.expand(problem.draws, *t.shape) for name, t in member(params, index).items()}
        return forward(network, own, x, masks=masks)

    return Fitted("mc-dropout", sampled_predictors(problem, draw))


def fit_bbb(problem: Problem, *, prior_precision: float = 1.0) -> Fitted:
    """Bayes by Backprop, predicting by weight draws."""
    return _fitted("bbb", problem, train_bbb(problem, prior_precision=prior_precision))


def train_bbb(problem: Problem, *, prior_precision: float = 1.0) -> WeightGaussian:
    """Bayes by Backprop: q = N(μ, softplus(ρ)²), mean NLL + KL(q‖p)/N with the Gaussian KL in closed form.

    A regression's noise is learnt beside the weights, one for each network.
    """
    network, data = problem.network, problem.data
    device, stack, n = data.x.device, len(problem.seeds), len(data)
    mean = flatten(initial(network, problem.seeds, device=device)).requires_grad_()
    rho = torch.full_like(mean, math.log(math.expm1(_INITIAL_STD)), requires_grad=True)
    log_noise = torch.full((stack,), -1.0, device=device, requires_grad=True)
    source = Streams(problem.seeds, "bbb", device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        std = F.softplus(rho)
        weights = torch.addcmul(mean, std, source.normal(mean.shape[1]))
        fit = negative_log_likelihood(forward(network, unflatten(network, weights), x), y, data.likelihood)
        if data.likelihood == "regression":
            fit = 0.5 * fit * torch.exp(-2 * log_noise) + log_noise
        return fit + gaussian_kl(mean, std, prior_precision) / n

    leaves = [mean, rho, *([log_noise] if data.likelihood == "regression" else [])]
    training = replace(problem.training, weight_decay=0.0, sparsity=0.0)
    rate = Rate(training, training.steps(n), device)
    descend(adam(leaves, training, rate), loss, data, training, problem.seeds, streams=[source], rate=rate)
    variance = F.softplus(rho.detach()).square()
    return WeightGaussian(unflatten(network, mean.detach()), unflatten(network, variance))


class _Stacked:
    """For optimisers over a stack: every network's noise comes from its own seed, and a step can be captured as a graph."""

    def __init__(self, *args: Any, streams: Streams, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams = streams

    def _normal(self, like: Tensor, seed: int) -> Tensor:
        return self._streams.normal(*like.shape[1:]).to(like)

    def _first_step(self, parameter: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)

    def _steps(self, state: Mapping[str, Tensor]) -> Tensor:
        return state["step"]


class _StackedVadam(_Stacked, Vadam):
    pass


class _StackedIVON(_Stacked, IVON):
    pass


def fit_vadam(problem: Problem) -> Fitted:
    """Vadam, predicting by weight draws."""
    return _fitted("vadam", problem, train_vadam(problem))


def train_vadam(problem: Problem, *, prior_precision: float = 1.0, initial_precision: float = 1e4) -> WeightGaussian:
    """Vadam, with a regression's noise learnt beside the weights."""
    training, n = problem.training, len(problem.data)

    def make(leaves: list[Tensor], streams: Streams) -> PerturbedOptimizer:
        return _StackedVadam(
            leaves,
            lr=training.lr,
            betas=training.betas,
            n_data=n,
            prior_precision=prior_precision,
            initial_precision=initial_precision,
            streams=streams,
        )

    return _train_perturbed(problem, make, "vadam", lambda state: n * state["second_moment"] + prior_precision)


def fit_ivon(problem: Problem) -> Fitted:
    """IVON, predicting by weight draws."""
    return _fitted("ivon", problem, train_ivon(problem))


def train_ivon(problem: Problem, *, lr: float = 0.02, initial_hessian: float = 1.0) -> WeightGaussian:
    """IVON, with a regression's noise learnt beside the weights."""
    n, decay = len(problem.data), max(problem.training.weight_decay, _LEAST_DECAY)

    def make(leaves: list[Tensor], streams: Streams) -> PerturbedOptimizer:
        return _StackedIVON(
            leaves,
            lr,
            n_data=n,
            initial_hessian=initial_hessian,
            weight_decay=decay,
            streams=streams,
        )

    return _train_perturbed(problem, make, "ivon", lambda state: n * (state["hessian"] + decay))


def _train_perturbed(
    problem: Problem,
    make: Callable[[list[Tensor], Streams], PerturbedOptimizer],
    purpose: str,
    precision: Callable[[Mapping[str, Tensor]], Tensor],
) -> WeightGaussian:
    """Train a stack by an optimiser that perturbs its weights, and read its Gaussian."""
    network, data, training = problem.network, problem.data, problem.training
    device, regression = data.x.device, data.likelihood == "regression"
    flat = flatten(initial(network, problem.seeds, device=device)).requires_grad_()
    streams, batches = Streams(problem.seeds, purpose, device), Batches(data, training.batch_size, problem.seeds)
    optimizer = make([flat], streams)
    log_noise = torch.full((len(problem.seeds),), -1.0, device=device, requires_grad=True)
    beside = adam([log_noise], replace(training, weight_decay=0.0), Rate(training, 1, device))

    def step() -> None:
        x, y = batches()
        optimizer.zero_grad()
        beside.zero_grad()
        with optimizer.sampled_parameters():
            outputs = forward(network, unflatten(network, flat), x)
            fit = negative_log_likelihood(outputs, y, data.likelihood)
            if regression:
                fit = 0.5 * fit * torch.exp(-2 * log_noise) + log_noise
            fit.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if regression:
            beside.step()

    repeat(step, training.steps(len(data)), batches, [streams])
    variance = precision(optimizer.state[flat]).reciprocal()
    return WeightGaussian(unflatten(network, flat.detach()), unflatten(network, variance))


def gaussian_kl(mean: Tensor, std: Tensor, prior_precision: float) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1/λ)) of every network, ½ Σ (λ(σ² + μ²) − 1 − log λσ²), (s,)."""
    scaled = prior_precision * std.square()
    return 0.5 * (scaled + prior_precision * mean.square() - 1 - scaled.log()).sum(dim=1)


def _fitted(name: str, problem: Problem, learnt: WeightGaussian) -> Fitted:
    """Predictions from weight draws of a diagonal Gaussian that the method itself learnt."""
    mean, variance = learnt.mean, learnt.variance

    def draw(index: int, x: Tensor) -> Tensor:
        source = Streams([problem.seeds[index]], f"{name}-prediction", x.device)
        weights = {
            key: mu[index] + variance[key][index].sqrt() * source.normal(problem.draws, *mu.shape[1:])[0]
            for key, mu in mean.items()
        }
        return forward(problem.network, weights, x)

    posteriors = tuple(
        Posterior.from_moments(
            problem.network.build(member(mean, i)), member(mean, i), member(variance, i), len(problem.data)
        )
        for i in range(len(problem.seeds))
    )
    return Fitted(name, sampled_predictors(problem, draw), posteriors)
