"""Methods that carry noise through training: MC dropout, Bayes by Backprop, Vadam, IVON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.methods.base import Fitted, Problem, sampled_predictors
from bayesadam.methods.network import forward, initial, member
from bayesadam.methods.training import Streams, batches, descend, negative_log_likelihood
from bayesadam.optim import IVON, Vadam
from bayesadam.optim._perturbed import PerturbedOptimizer
from bayesadam.posterior import Posterior

_INITIAL_STD = 0.02


def fit_mc_dropout(problem: Problem, *, rate: float = 0.2) -> Fitted:
    """MC dropout: units are switched off in training and in prediction alike, and the passes averaged."""
    network = replace(problem.network, dropout=rate)
    params = train_with_dropout(problem, rate)

    def draw(index: int, x: Tensor) -> Tensor:
        source = Streams([problem.seeds[index]], "dropout-prediction", x.device)
        masks = [_mask(source.uniform(problem.draws, 1, width)[0], rate) for width in network.hidden]
        own = {name: t.expand(problem.draws, *t.shape) for name, t in member(params, index).items()}
        # One mask a draw, the same at every input, makes each draw a function.
        return forward(network, own, x, masks=masks)

    return Fitted("mc-dropout", sampled_predictors(problem, draw))


def train_with_dropout(problem: Problem, rate: float) -> dict[str, Tensor]:
    """Adam under dropout, every seed with its own masks."""
    network, data, training = problem.network, problem.data, problem.training
    params = {name: t.requires_grad_() for name, t in initial(network, problem.seeds, device=data.x.device).items()}
    source = Streams(problem.seeds, "dropout", data.x.device)

    def loss(p: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        masks = [_mask(source.uniform(x.shape[1], width), rate) for width in network.hidden]
        return negative_log_likelihood(forward(network, p, x, masks=masks), y, data.likelihood)

    optimizer = torch.optim.Adam(
        list(params.values()), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )
    descend(params, optimizer, loss, data, training, problem.seeds)
    return {name: tensor.detach() for name, tensor in params.items()}


def fit_bbb(problem: Problem, *, prior_precision: float = 1.0) -> Fitted:
    """Bayes by Backprop: q = N(μ, softplus(ρ)²), mean NLL + KL(q‖p)/N with the Gaussian KL in closed form.

    A regression's noise is learnt beside the weights, one for each network.
    """
    network, data, training = problem.network, problem.data, problem.training
    stack, n = len(problem.seeds), len(data)
    means = {name: t.requires_grad_() for name, t in initial(network, problem.seeds, device=data.x.device).items()}
    start = math.log(math.expm1(_INITIAL_STD))
    spreads = {name: torch.full_like(t, start, requires_grad=True) for name, t in means.items()}
    log_noise = torch.full((stack,), -1.0, device=data.x.device, requires_grad=True)
    source = Streams(problem.seeds, "bbb", data.x.device)

    def loss(_: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        stds = {name: F.softplus(rho) for name, rho in spreads.items()}
        weights = {name: means[name] + std * source.normal(*std.shape[1:]) for name, std in stds.items()}
        fit = negative_log_likelihood(forward(network, weights, x), y, data.likelihood)
        if data.likelihood == "regression":
            fit = 0.5 * fit * torch.exp(-2 * log_noise) + log_noise
        return fit + gaussian_kl(means, stds, prior_precision) / n

    leaves = [*means.values(), *spreads.values(), *([log_noise] if data.likelihood == "regression" else [])]
    optimizer = torch.optim.Adam(leaves, lr=training.lr, betas=training.betas, fused=True)
    descend(means, optimizer, loss, data, training, problem.seeds)
    variance = {name: F.softplus(rho.detach()).square() for name, rho in spreads.items()}
    return _from_weight_gaussian("bbb", problem, {name: t.detach() for name, t in means.items()}, variance)


class _StackedNoise:
    """For optimisers over a stack: every network's noise comes from its own seed."""

    def __init__(self, *args: Any, streams: Streams, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams = streams

    def _normal(self, like: Tensor, seed: int) -> Tensor:
        return self._streams.normal(*like.shape[1:]).to(like)


class _StackedVadam(_StackedNoise, Vadam):
    pass


class _StackedIVON(_StackedNoise, IVON):
    pass


def fit_vadam(problem: Problem, *, prior_precision: float = 1.0, initial_precision: float = 1e4) -> Fitted:
    """Vadam, with a regression's noise learnt beside the weights."""
    return _fit_perturbed(
        "vadam",
        problem,
        lambda leaves, streams: _StackedVadam(
            leaves,
            lr=problem.training.lr,
            betas=problem.training.betas,
            n_data=len(problem.data),
            prior_precision=prior_precision,
            initial_precision=initial_precision,
            streams=streams,
        ),
        lambda state: len(problem.data) * state["second_moment"] + prior_precision,
    )


def fit_ivon(problem: Problem, *, lr: float = 0.1, initial_hessian: float = 1.0) -> Fitted:
    """IVON, with a regression's noise learnt beside the weights."""
    decay = max(problem.training.weight_decay, 1e-6)
    return _fit_perturbed(
        "ivon",
        problem,
        lambda leaves, streams: _StackedIVON(
            leaves,
            lr,
            n_data=len(problem.data),
            initial_hessian=initial_hessian,
            weight_decay=decay,
            betas=(0.9, 0.9999),
            streams=streams,
        ),
        lambda state: len(problem.data) * (state["hessian"] + decay),
    )


def _fit_perturbed(
    name: str,
    problem: Problem,
    make: Callable[[list[Tensor], Streams], PerturbedOptimizer],
    precision: Callable[[Mapping[str, Tensor]], Tensor],
) -> Fitted:
    """Train a stack by an optimiser that perturbs its weights, and read its Gaussian."""
    network, data, training = problem.network, problem.data, problem.training
    params = {key: t.requires_grad_() for key, t in initial(network, problem.seeds, device=data.x.device).items()}
    optimizer = make(list(params.values()), Streams(problem.seeds, name, data.x.device))
    log_noise = torch.full((len(problem.seeds),), -1.0, device=data.x.device, requires_grad=True)
    beside = torch.optim.Adam([log_noise], lr=training.lr, betas=training.betas)
    for x, y in batches(data, training, problem.seeds):
        optimizer.zero_grad()
        beside.zero_grad()
        with optimizer.sampled_parameters():
            fit = negative_log_likelihood(forward(network, params, x), y, data.likelihood)
            if data.likelihood == "regression":
                fit = 0.5 * fit * torch.exp(-2 * log_noise) + log_noise
            fit.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if data.likelihood == "regression":
            beside.step()
    mean = {key: t.detach() for key, t in params.items()}
    variance = {key: precision(optimizer.state[t]).reciprocal() for key, t in params.items()}
    return _from_weight_gaussian(name, problem, mean, variance)


def gaussian_kl(means: Mapping[str, Tensor], stds: Mapping[str, Tensor], prior_precision: float) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1/λ)) of every network, ½ Σ (λ(σ² + μ²) − 1 − log λσ²), (s,)."""
    total: Tensor = torch.zeros(next(iter(means.values())).shape[0], device=next(iter(means.values())).device)
    for name, mean in means.items():
        scaled = prior_precision * stds[name].square()
        total = total + 0.5 * (scaled + prior_precision * mean.square() - 1 - scaled.log()).flatten(1).sum(dim=1)
    return total


def _mask(uniform: Tensor, rate: float) -> Tensor:
    """Zeros with probability `rate`, otherwise 1/(1 − rate)."""
    return (uniform >= rate).float() / (1 - rate)


def _from_weight_gaussian(
    name: str, problem: Problem, mean: Mapping[str, Tensor], variance: Mapping[str, Tensor]
) -> Fitted:
    """Predictions from weight draws of a diagonal Gaussian that the method itself learnt."""

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
