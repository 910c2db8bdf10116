"""What a rule is: one way to learn the weights of a stack of networks, as functions of named memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.streams import Streams

State = dict[str, Tensor]
Number = float | Tensor


class Step(NamedTuple):
    """α, 1 − β₁ᵗ, 1 − β₂ᵗ and N of one step: Python's numbers, or zero-dimensional tensors that a captured graph reads."""

    lr: Number
    first: Number
    second: Number
    n_data: Number


class Gaussian(NamedTuple):
    """A diagonal Gaussian over flat weights: mean and variance, (s, weights)."""

    mean: Tensor
    variance: Tensor


class Functions(NamedTuple):
    """Networks drawn from what a rule has learnt: stacked weights by name, and dropout masks where it has them."""

    params: dict[str, Tensor]
    masks: list[Tensor] | None = None


class Rule(ABC):
    """One way to learn: how its memory starts, where the gradient is taken, the update, the Gaussian it ends with.

    A rule holds settings alone. All functions work on flat weights (s, weights), one row per network, and write into the
    memory that `start` made, so that a step can be captured as a CUDA graph. Of that memory, tensors of two dimensions or
    more have one row per network; smaller ones belong to all.
    """

    # Whether the gradient is taken at the weights themselves, and not at perturbed ones.
    in_place: ClassVar[bool] = True
    # Whether the gradient must be that of the mean negative log-likelihood, with the observation noise in it.
    needs_noise: ClassVar[bool] = False
    # Whether it starts from weights that Adam has trained.
    starts_trained: ClassVar[bool] = False
    # Its usual learning rate, where Adam's does not suit.
    lr: ClassVar[float | None] = None
    betas: tuple[float, float]

    @classmethod
    def with_settings(cls, **settings: Any) -> Rule:
        """The rule with those of the settings that it has: betas, weight_decay, sparsity, prior_precision, …"""
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in settings.items() if name in own})

    def steps(self, given: int) -> int:
        """How many steps it takes where Adam takes so many."""
        return given

    @abstractmethod
    def start(self, weights: Tensor, n_data: Number) -> State:
        """The memory besides the weights, by name."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor | None:
        """The random numbers of a step, or of many with leading dimensions: (s, *lead, ...)."""
        return None

    def masks(self, noise: Tensor | None, network: Network) -> list[Tensor] | None:
        """The factors of inputs and of every hidden layer's units, (s, b, units) each, where units are dropped."""
        return None

    def at(self, weights: Tensor, state: State, noise: Tensor | None, step: Step, out: Tensor) -> None:  # noqa: B027
        """Write the weights at which the gradient is taken into `out`."""

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """One step, in place; `gradient` may be overwritten."""

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian | None:
        """The Gaussian over the weights that the rule ends with; None where it ends with a point."""
        return None

    def sample(
        self, network: Network, weights: Tensor, state: State, n_data: Number, streams: Streams, n: int
    ) -> Functions:
        """n functions of each network, (s·n, ...): weights drawn from the Gaussian, or the weights themselves."""
        found = self.gaussian(weights, state, n_data)
        repeated = (weights if found is None else found.mean).repeat_interleave(n, dim=0)
        if found is not None:
            drawn = streams.normal(n, weights.shape[1]).flatten(0, 1)
            repeated = torch.addcmul(repeated, found.variance.sqrt().repeat_interleave(n, dim=0), drawn)
        return Functions(unflatten(network, repeated))


class Perturbed(Rule):
    """Rules whose gradient is that of the mean negative log-likelihood at a draw θ = μ + σ ε."""

    in_place = False
    needs_noise = True

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """ε ~ N(0, 1) for every weight."""
        return streams.normal(*lead, sum(math.prod(shape) for shape in network.shapes().values()))
