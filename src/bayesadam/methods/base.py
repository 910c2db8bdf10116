"""One small protocol for every method: fit a `Problem`, get a `Fitted` that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.methods.network import Network, forward, initial
from bayesadam.methods.training import Data, Training, descend, negative_log_likelihood
from bayesadam.posterior import Posterior
from bayesadam.predict.predictive import (
    BinaryPredictive,
    ClassificationPredictive,
    Likelihood,
    RegressionPredictive,
)

AnyPredictive = RegressionPredictive | ClassificationPredictive | BinaryPredictive
# Noise is at least this share of the held-out squared residual, however wide the function's own spread.
_LEAST_NOISE = 0.05


@dataclass(frozen=True, eq=False)
class Stack:
    """Trained weights of a stack, (s, *shape) by name, and the Adam that trained them."""

    params: dict[str, Tensor]
    optimizer: torch.optim.Adam


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

    def loss(self, network: Network) -> Callable[..., Tensor]:
        """The mean negative log-likelihood of every network on a batch."""
        likelihood = self.data.likelihood
        return lambda params, x, y: negative_log_likelihood(forward(network, params, x), y, likelihood)


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
    """Train a stack by Adam with the paper's L2 penalty."""
    device = problem.data.x.device
    params = {name: t.requires_grad_() for name, t in initial(network, seeds, device=device).items()}
    training = problem.training
    optimizer = torch.optim.Adam(
        list(params.values()), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )
    descend(params, optimizer, problem.loss(network), problem.data, training, seeds)
    return Stack({name: tensor.detach() for name, tensor in params.items()}, optimizer)


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
