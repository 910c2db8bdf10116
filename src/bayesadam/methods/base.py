"""One small protocol for every method: fit a `Problem`, get a `Fitted` that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError
from bayesadam.likelihoods import (
    BinaryPredictive,
    ClassificationPredictive,
    Predictive,
    RegressionPredictive,
)
from bayesadam.likelihoods import LikelihoodName as Likelihood
from bayesadam.methods.training import Data, Rate, Training, adam, descend, negative_log_likelihood
from bayesadam.posterior import Posterior

AnyPredictive = Predictive
# Noise is at least this share of the held-out squared residual, however wide the function's own spread.
_LEAST_NOISE = 0.05


@dataclass(frozen=True, eq=False)
class Stack:
    """Trained weights of a stack, (s, *shape) by name, and the Adam that trained them as one flat matrix."""

    network: Network
    params: dict[str, Tensor]
    optimizer: torch.optim.Adam

    @property
    def second_moment(self) -> dict[str, Tensor]:
        """Adam's v̂, (s, *shape) by name."""
        (group,) = self.optimizer.param_groups
        state = self.optimizer.state[group["params"][0]]
        return unflatten(self.network, state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"])))

    def state_dict(self, index: int) -> dict[str, object]:
        """One network's part of the Adam's state, as Adam's own state dict for that network alone."""
        (saved,) = self.optimizer.state_dict()["state"].values()
        (group,) = self.optimizer.state_dict()["param_groups"]
        parts = {key: unflatten(self.network, saved[key]) for key in ("exp_avg", "exp_avg_sq")}
        state = {
            place: {"step": saved["step"], **{key: part[name][index] for key, part in parts.items()}}
            for place, name in enumerate(self.params)
        }
        return {"state": state, "param_groups": [{**group, "params": [*state], "param_names": [*self.params]}]}


@dataclass(frozen=True, eq=False)
class WeightGaussian:
    """A diagonal Gaussian over the weights of a stack: mean and variance, (s, *shape) by name."""

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """What every method is given: data, a network's shape, how to train, and the seeds.

    Attributes:
        data: the data, one part a seed.
        network: the shape of the networks.
        training: epochs, batch size, rates.
        seeds: one network each.
        draws: draws behind a sampled prediction.
    """

    data: Data
    network: Network
    training: Training
    seeds: tuple[int, ...]
    draws: int = 100

    def __post_init__(self) -> None:
        if len(self.seeds) != self.data.x.shape[0] or len(set(self.seeds)) != len(self.seeds):
            raise MatchError(f"{len(self.seeds)} seeds ({self.seeds}) for {self.data.x.shape[0]} sets of data")

    @cached_property
    def optimum(self) -> Stack:
        """The networks at their optimum under plain Adam: trained once, shared by the methods that start from there."""
        return train_with_adam(self, self.network, self.seeds)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method's result: one predictor a seed, and a weight posterior where the method has one.

    Attributes:
        method: the method's name.
        predictors: functions from inputs (b, inputs) to a predictive distribution.
        posteriors: one a seed, or empty.
    """

    method: str
    predictors: tuple[Callable[[Tensor], AnyPredictive], ...]
    posteriors: tuple[Posterior, ...] = field(default=())

    def predict(self, x: Tensor) -> list[AnyPredictive]:
        """The predictive distribution of each seed's network."""
        return [predictor(x) for predictor in self.predictors]


Method = Callable[[Problem], Fitted]


def train_with_adam(problem: Problem, network: Network, seeds: Sequence[int]) -> Stack:
    """Train a stack by Adam with the paper's L2 penalty, under the network's dropout, every seed with its own masks."""
    data, training = problem.data, problem.training
    device = data.x.device
    flat = flatten(initial(network, seeds, device=device)).requires_grad_()
    streams = Streams(seeds, "dropout", device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if network.input_dropout:
            x = x * streams.masks(network.input_dropout, x.shape[1], x.shape[2])
        masks = dropout_masks(streams, network, x.shape[1]) if network.dropout else None
        return negative_log_likelihood(forward(network, unflatten(network, flat), x, masks=masks), y, data.likelihood)

    rate = Rate(training, training.steps(len(data)), device)
    optimizer = adam([flat], training, rate)
    descend(optimizer, loss, data, training, seeds, streams=[streams], rate=rate)
    return Stack(network, unflatten(network, flat.detach()), optimizer)


def dropout_masks(streams: Streams, network: Network, *shape: int) -> list[Tensor]:
    """For every hidden layer, (s, *shape, units): zeros with the network's dropout rate, otherwise 1/(1 − rate)."""
    return list(torch.split(streams.masks(network.dropout, *shape, sum(network.hidden)), list(network.hidden), dim=-1))


def from_draws(draws: Tensor, likelihood: Likelihood, noise: Tensor | None) -> AnyPredictive:
    """Draws of f, (n, b, outputs), as a predictive distribution."""
    mean, variance = draws.mean(dim=0), draws.var(dim=0)
    if likelihood == "regression":
        return RegressionPredictive(mean, variance, None, draws, torch.zeros(()) if noise is None else noise)
    kind = ClassificationPredictive if likelihood == "classification" else BinaryPredictive
    return kind(mean, variance, None, draws)


def noise_beside(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """σ² by output from held-out residuals, E[r²] = σ² + Var[f], not below a small share of them."""
    square = (y.reshape(mean.shape) - mean).square().mean(dim=0)
    return (square - variance.mean(dim=0)).clamp(min=_LEAST_NOISE * square)


def sampled_predictors(
    problem: Problem, draw: Callable[[int, Tensor], Tensor]
) -> tuple[Callable[[Tensor], AnyPredictive], ...]:
    """Predictors that average draws of f, with noise from the held-out part for regression.

    Args:
        problem: the problem.
        draw: (number of the network, inputs) → draws of f, (n, b, outputs).
    """
    data = problem.data

    def predictor(index: int) -> Callable[[Tensor], AnyPredictive]:
        noise = None
        if data.likelihood == "regression":
            held_out = draw(index, data.x_held_out[index])
            noise = noise_beside(held_out.mean(dim=0), held_out.var(dim=0), data.y_held_out[index])
        return lambda x: from_draws(draw(index, x), data.likelihood, noise)

    return tuple(predictor(index) for index in range(len(problem.seeds)))
