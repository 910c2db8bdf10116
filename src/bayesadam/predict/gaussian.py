"""What a prediction needs to know of a posterior: a model, a mean and a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bayesadam._alone import alone_with
from bayesadam.gaussian.structure import Directions, Structure
from bayesadam.predict.call import Call
from bayesadam.predict.linearised import Along, Moments, moments
from bayesadam.predict.plan import Plan


class Gaussian(Protocol):
    """N(μ, Σ) over named weights of a model."""

    @property
    def model(self) -> nn.Module:
        """The model."""

    @property
    def mode(self) -> Mapping[str, Tensor]:
        """The trained weights, whose names and shapes are those of the mean."""

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """μ."""

    @property
    def structure(self) -> Structure:
        """In which coordinates Σ is diagonal."""

    @property
    def coordinate_variance(self) -> Mapping[str, Tensor]:
        """The variances in those coordinates."""

    @property
    def directions(self) -> Directions | None:
        """Directions over all weights in which Σ is narrower than that."""

    @property
    def for_novelty(self) -> Gaussian:
        """The same structure under the settings of novelty."""

    @property
    def noise_variance(self) -> Tensor | None:
        """σ² of a likelihood that has one."""

    @property
    def temperature(self) -> float:
        """By which logits are divided."""

    @property
    def averaged(self) -> bool:
        """Whether probabilities average over the Gaussian."""

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over processes."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The model's parameters, checked against the weights."""

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draws of the weights."""

    def gathered(self, model: nn.Module) -> Gaussian:
        """The same in whole tensors over a plain model."""

    def require_proper(self) -> None:
        """Raise unless every variance is finite."""

    def warn_of_limits(self) -> None:
        """Warn where the structure cannot hold what its settings ask of it."""


def parameters_at_mean(gaussian: Gaussian) -> dict[str, Tensor]:
    """μ in the types and on the devices of the model's parameters."""
    with alone_with(gaussian.model):
        own = gaussian.parameters()
        return {name: mu.to(own[name]) for name, mu in gaussian.mean.items()}


def moments_of(
    gaussians: Sequence[Gaussian],
    call: Call,
    params: Mapping[str, Tensor],
    inputs: Any,
    *,
    budget: int,
    covariance: bool = False,
    along: Along | None = None,
    plan: Plan | None = None,
    captured: bool = False,
) -> Moments:
    """`linearised.moments` under several Gaussians of one mean, in one pass."""
    variances = [each.coordinate_variance.__getitem__ for each in gaussians]
    bases, directions = gaussians[0].structure.bases, [each.directions for each in gaussians]
    return moments(call, params, variances, inputs, covariance, budget, bases, directions, along, plan, captured)
