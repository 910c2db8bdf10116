"""What one network says about the outputs f of a batch, before a likelihood makes a distribution of targets of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.errors import MatchError


@dataclass(frozen=True, eq=False)
class Score:
    """An unbiased estimate and its standard error, (batch, ...); the error is NaN where one probe made it."""

    value: Tensor
    error: Tensor

    @classmethod
    def of(cls, estimates: Tensor) -> Score:
        """Of independent estimates, (n, batch, ...)."""
        if len(estimates) == 1:
            return cls(estimates[0], torch.full_like(estimates[0], math.nan))
        return cls(estimates.mean(dim=0), estimates.std(dim=0) / math.sqrt(len(estimates)))


@dataclass(frozen=True, eq=False)
class Component:
    """f of one network under its posterior: N(mean, covariance), or draws. A predictive is a weighted list of these.

    Attributes:
        mean: E[f], (batch, ...), of the outputs asked for.
        variance: Var[f], without observation noise, of the same shape; 0 where `alone`.
        covariance: (batch, outputs, outputs), where it was asked for.
        joint: the covariance between examples too, (batch · outputs, batch · outputs), where it was asked for.
        draws: (n, batch, ...), where the method sampled.
        noise_variance: σ² of a likelihood that has one; None where it is not known.
        temperature: T, by which logits are divided.
        averaged: whether probabilities average over the posterior; else they are the mean network's.
        growth: √((1 + r)/2) of each example, (batch,), by which its own temperature, or the standard deviation of f, is
            above the usual one; None for 1.
        ratio: r of each example, (batch,), its leverage over that of familiar inputs, as novelty takes it; None where
            it is not known.
        alone: whether the mean network alone was run, so that variances are not known.
        score: the estimate behind `epistemic`, where outputs are too many for an exact one.
        outputs: indices of the outputs asked for, (batch, ..., k); None for all.
        logits: E[f] of all classes, (batch, ..., classes), where some of them were asked for.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    draws: Tensor | None = None
    noise_variance: Tensor | None = None
    temperature: float = 1.0
    averaged: bool = True
    growth: Tensor | None = None
    ratio: Tensor | None = None
    alone: bool = False
    score: Score | None = None
    outputs: Tensor | None = None
    logits: Tensor | None = None
    joint: Tensor | None = None


def function_draws(component: Component, n: int, generator: torch.Generator | None) -> Tensor:
    """n draws of f: the component's own, or Gaussian ones."""
    if component.draws is not None and len(component.draws) >= n:
        return component.draws[:n]
    mean, covariance = component.mean, component.covariance
    noise = normal_like(mean, n, generator)
    if covariance is None:
        return mean + noise * component.variance.sqrt()
    # Positive semi-definite: a jitter of rounding size makes it factorise.
    scale = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
    eye = torch.eye(covariance.shape[-1], dtype=scale.dtype, device=scale.device)
    root = torch.linalg.cholesky(covariance + 10 * torch.finfo(scale.dtype).eps * scale.clamp(min=1e-30) * eye)
    flat = torch.einsum("bcd,nbd->nbc", root, noise.reshape(n, len(mean), -1))
    return mean + flat.view_as(noise)


def normal_like(mean: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, (n, *mean.shape)."""
    return torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def rows(tensor: Tensor) -> Tensor:
    """(batch, ...) as (batch, outputs), also where an output is a single number, (batch,)."""
    return tensor.reshape(tensor.shape[0], -1)


def position_blocks(covariance: Tensor, mean: Tensor) -> Tensor:
    """The covariance within the last dimension at each position, (batch, ..., o, o), from that of all outputs."""
    size = mean.shape[-1]
    positions = mean[0].numel() // size
    blocks = covariance.view(-1, positions, size, positions, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return blocks.reshape(*mean.shape, size)


def like(y: Tensor, mean: Tensor) -> Tensor:
    """Targets in the outputs' shape: (batch,) serves (batch, 1), and the other way round."""
    if y.dim() > 0 and len(y) == len(mean) and y[0].squeeze().shape == mean[0].squeeze().shape:
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the outputs {tuple(mean.shape)}")
    return y.to(mean)
