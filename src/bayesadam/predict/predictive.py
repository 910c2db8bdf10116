"""Predictive distributions: what a posterior says about the outputs, likelihood by likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError

Likelihood = Literal["regression", "classification", "binary"]
Link = Literal["probit", "sampling"]
_LOGIT_DRAWS = 200


@dataclass(frozen=True, eq=False)
class Predictive:
    """The outputs of a network under a weight posterior.

    Attributes:
        mean: E[f], of the network's output shape, (batch, ...).
        variance: Var[f], without observation noise, of the same shape.
        covariance: (batch, outputs, outputs), where it was asked for.
        draws: (n, batch, ...), draws of f where the method sampled. Those of `"linearised-sampled"` are functions: one draw
            of the weights for the whole batch. Those of `"sampled"` have the right distribution example by example and
            need not be: where every weight sits in a linear layer, activations are drawn instead of weights, independently
            from example to example. For functions at drawn weights use `sampled()`.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    draws: Tensor | None = None

    def _function_draws(self, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of f: those at hand, or Gaussian ones."""
        if self.draws is not None and len(self.draws) >= n:
            return self.draws[:n]
        noise = torch.randn(n, *self.mean.shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        if self.covariance is None:
            return self.mean + noise * self.variance.sqrt()
        # Positive semi-definite: a jitter of rounding size makes it factorise.
        scale = self.covariance.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        eye = torch.eye(self.covariance.shape[-1], dtype=scale.dtype, device=scale.device)
        root = torch.linalg.cholesky(self.covariance + 10 * torch.finfo(scale.dtype).eps * scale.clamp(min=1e-30) * eye)
        flat = torch.einsum("bcd,nbd->nbc", root, noise.reshape(n, len(self.mean), -1))
        return self.mean + flat.view_as(noise)


@dataclass(frozen=True, eq=False)
class RegressionPredictive(Predictive):
    """y = f + N(0, σ²), a Gaussian for every output.

    Attributes:
        noise_variance: σ² by output, or 0 where it is not known: see `calibrate`.
    """

    noise_variance: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def total_variance(self) -> Tensor:
        """Var[y] = Var[f] + σ²."""
        return self.variance + self.noise_variance

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of y, observation noise included."""
        return self.total_variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with probability `level`."""
        if not 0 < level < 1:
            raise SettingError(f"level must lie between 0 and 1, got {level!r}")
        z = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item()
        return self.mean - z * self.stddev, self.mean + z * self.stddev

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number an example; outputs are taken as independent unless the covariance is known."""
        y = like(y, self.mean)
        residual = _rows(y - self.mean)
        if self.covariance is not None:
            root = torch.linalg.cholesky(self._total_covariance(self.covariance))
            white = torch.linalg.solve_triangular(root, residual.unsqueeze(-1), upper=False).squeeze(-1)
            log_det = root.diagonal(dim1=1, dim2=2).log().sum(dim=1)
            constant = 0.5 * residual.shape[1] * math.log(2 * math.pi)
            density: Tensor = -0.5 * white.square().sum(dim=1) - log_det - constant
            return density
        variance = _rows(self.total_variance)
        return (-0.5 * (residual.square() / variance + (2 * math.pi * variance).log())).sum(dim=1)

    def entropy(self) -> Tensor:
        """The differential entropy of y in nats, one number an example; of the joint outputs where the covariance is known."""
        if self.covariance is not None:
            log_det = torch.linalg.slogdet(self._total_covariance(self.covariance)).logabsdet
            joint: Tensor = 0.5 * (log_det + self.covariance.shape[-1] * math.log(2 * math.pi * math.e))
            return joint
        return (0.5 * (2 * math.pi * math.e * _rows(self.total_variance)).log()).sum(dim=1)

    def _total_covariance(self, covariance: Tensor) -> Tensor:
        return covariance + torch.diag_embed(_rows(self.noise_variance.expand(self.mean.shape)))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...)."""
        noise = torch.randn(n, *self.mean.shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
        return self._function_draws(n, generator) + noise * self.noise_variance.sqrt()


@dataclass(frozen=True, eq=False)
class ClassificationPredictive(Predictive):
    """p(class) = E[softmax(f)], classes in the last dimension.

    Without draws of its own, `link="probit"` takes softmax(κ f) with κ = (1 + π σ̄²/8)^(-1/2), σ̄² the average of the
    logits' variances under softmax(f): one κ an example, so that the order of the classes is the mean network's and
    adding a constant to all logits changes nothing. `link="sampling"` averages over 200 Gaussian draws of the logits.

    Those draws, which `mutual_information` takes too, are independent from logit to logit unless the prediction was made with
    `covariance=True`. Logits are correlated, a shift of all of them changes no probability, and without their covariance
    both can be off. 200 draws alone leave errors of .02 to .05 in the mutual information, more where the logits are drowned.
    """

    link: Link = "probit"
    seed: int = 0

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities of the classes."""
        if self.draws is not None or self.link == "sampling":
            return self._draw_probs().mean(dim=0)
        spread = (self.mean.softmax(dim=-1) * self.variance).sum(dim=-1, keepdim=True)
        return (self.mean * (1 + math.pi / 8 * spread).rsqrt()).softmax(dim=-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of class numbers, one number an example."""
        if y.shape != self.mean.shape[:-1]:
            raise MatchError(f"expected class numbers of shape {tuple(self.mean.shape[:-1])}, got {tuple(y.shape)}")
        require_classes(y, self.mean.shape[-1])
        tiny = torch.finfo(self.probs.dtype).tiny
        return self.probs.clamp(min=tiny).log().gather(-1, y.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """The entropy of the predicted class in nats: all uncertainty."""
        return _entropy(self.probs)

    def mutual_information(self) -> Tensor:
        """H[E p] − E[H p], what more data could still teach: uncertainty of the weights alone.

        By draws: see the class for when these know the correlations between logits.
        """
        probs = self._draw_probs()
        return (_entropy(probs.mean(dim=0)) - _entropy(probs).mean(dim=0)).clamp(min=0)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of the class, (n, batch)."""
        flat = self.probs.reshape(-1, self.probs.shape[-1])
        drawn = torch.multinomial(flat, n, replacement=True, generator=generator)
        return drawn.T.reshape(n, *self.probs.shape[:-1])

    def _draw_probs(self) -> Tensor:
        draws = self.draws
        if draws is None:
            generator = torch.Generator(device=self.mean.device).manual_seed(self.seed)
            draws = self._function_draws(_LOGIT_DRAWS, generator)
        return draws.softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class BinaryPredictive(Predictive):
    """p(y = 1) = E[σ(f)] for each output, a logit; probit: σ(f (1 + π Var[f]/8)^(-1/2))."""

    link: Link = "probit"
    seed: int = 0

    @cached_property
    def probs(self) -> Tensor:
        """p(y = 1)."""
        if self.draws is not None or self.link == "sampling":
            return self._draw_probs().mean(dim=0)
        return (self.mean * (1 + math.pi / 8 * self.variance).rsqrt()).sigmoid()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of zeros and ones, summed over the outputs of an example."""
        y = like(y, self.mean)
        if not bool(((y == 0) | (y == 1)).all()):
            raise MatchError(f"binary targets must be 0 or 1, got {float(y.min()):g} to {float(y.max()):g}")
        tiny = torch.finfo(self.probs.dtype).tiny
        chosen = torch.where(y > 0.5, self.probs, 1 - self.probs)
        return _rows(chosen.clamp(min=tiny).log()).sum(dim=1)

    def entropy(self) -> Tensor:
        """The entropy of y in nats."""
        return _entropy(torch.stack([self.probs, 1 - self.probs], dim=-1))

    def mutual_information(self) -> Tensor:
        """H[E p] − E[H p]."""
        draws = self._draw_probs()
        both = torch.stack([draws, 1 - draws], dim=-1)
        return (_entropy(both.mean(dim=0)) - _entropy(both).mean(dim=0)).clamp(min=0)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, zeros and ones."""
        return torch.bernoulli(self.probs.expand(n, *self.probs.shape), generator=generator)

    def _draw_probs(self) -> Tensor:
        draws = self.draws
        if draws is None:
            generator = torch.Generator(device=self.mean.device).manual_seed(self.seed)
            draws = self._function_draws(_LOGIT_DRAWS, generator)
        return draws.sigmoid()


def _entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs).sum(dim=-1)
    return entropy


def _rows(tensor: Tensor) -> Tensor:
    """(batch, ...) as (batch, outputs), also where an output is a single number, (batch,)."""
    return tensor.reshape(len(tensor), -1)


def require_classes(y: Tensor, classes: int) -> None:
    """Raise unless every number is that of a class."""
    if y.numel() and not bool(((y >= 0) & (y < classes)).all()):
        raise MatchError(
            f"class numbers must be 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}: leave out what is padding"
        )


def like(y: Tensor, mean: Tensor) -> Tensor:
    """Targets in the outputs' shape: (batch,) serves (batch, 1), and the other way round."""
    if y.dim() > 0 and len(y) == len(mean) and y[0].squeeze().shape == mean[0].squeeze().shape:
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the outputs {tuple(mean.shape)}")
    return y.to(mean)
