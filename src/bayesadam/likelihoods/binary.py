"""Binary outputs: p(y = 1) = σ(f), one logit per output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods.predictive import LogitMixture, LogitPredictive, Predictive, PredictiveMixture, like, rows
from bayesadam.likelihoods.record import Likelihood, changed_answers


@dataclass(frozen=True, eq=False)
class BinaryPredictive(LogitPredictive):
    """p(y = 1) = E[σ(f)] for each output, a logit; probit: σ(f (1 + π Var[f]/8)^(-1/2))."""

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of zeros and ones, summed over the outputs of an example."""
        y = like(y, self.mean)
        _check(y)
        tiny = torch.finfo(self.probs.dtype).tiny
        chosen = torch.where(y > 0.5, self.probs, 1 - self.probs)
        return rows(chosen.clamp(min=tiny).log()).sum(dim=1)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, zeros and ones."""
        return torch.bernoulli(self.probs.expand(n, *self.probs.shape), generator=generator)

    def _of_classes(self, probs: Tensor) -> Tensor:
        return torch.stack([1 - probs, probs], dim=-1)

    def _probs_at(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def _probit_probs(self) -> Tensor:
        return (self.mean * (1 + math.pi / 8 * self.variance).rsqrt()).sigmoid()


@dataclass(frozen=True, eq=False)
class BinaryMixture(LogitMixture, BinaryPredictive):
    """p(y = 1) = Σ π_m p_m(y = 1), output by output."""


@dataclass(frozen=True)
class Binary(Likelihood):
    """Binary cross-entropy in training. Validation is the default, as for classes."""

    name: str = "binary"
    kind: type[Predictive] = BinaryPredictive
    mixture_kind: type[PredictiveMixture] = BinaryMixture

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Zeros and ones, (n, k)."""
        found = super().shaped(targets, like)
        _check(found)
        return found

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.sigmoid()
        return p * (1 - p)

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """Other answers than the mean network's, for more than a tenth of the outputs."""
        return changed_answers((draws.sigmoid().mean(dim=0) > 0.5) != (at_mean > 0))


def _check(y: Tensor) -> None:
    if not bool(((y == 0) | (y == 1)).all()):
        raise MatchError(f"binary targets must be 0 or 1, got {float(y.min()):g} to {float(y.max()):g}")
