"""Classes: p(class) = softmax(f), classes in the last dimension, and p(y = 1) = σ(f), one logit per output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods.predictive import (
    LogitMixture,
    LogitPredictive,
    Novel,
    Predictive,
    like,
    place_blocks,
    rows,
)
from bayesadam.likelihoods.record import FEWEST_TO_JUDGE, Likelihood, changed_answers

# What torch and transformers leave out of a loss: padding, a prompt, tokens that were not masked.
IGNORED = -100
# Half precision leaves the sum of probabilities that far from 1.
_SAME_SUM = 1e-2


@dataclass(frozen=True, eq=False)
class ClassificationPredictive(LogitPredictive):
    """p(class) = E[softmax(f)], classes in the last dimension.

    Without draws of its own, `link="probit"` takes softmax(κ f) with κ = (1 + π σ̄²/8)^(-1/2), σ̄² the average of the
    logits' variances under softmax(f): one κ per example, so that the order of the classes is the mean network's and
    adding a constant to all logits changes nothing. `link="sampling"` averages over 200 Gaussian draws of the logits.

    Those draws, which `mutual_information` takes too, are independent from logit to logit unless the prediction was made with
    `covariance=True`. Logits are correlated, a shift of all of them changes no probability, and without their covariance
    both can be off. 200 draws alone leave errors of .02 to .05 in the mutual information, more where the logits are drowned.
    """

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of class indices, one number per example."""
        return _log_probs(self.probs, y)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of the class, (n, batch)."""
        flat = self.probs.reshape(-1, self.probs.shape[-1])
        drawn = torch.multinomial(flat, n, replacement=True, generator=generator)
        return drawn.T.reshape(n, *self.probs.shape[:-1])

    @classmethod
    def _novel_probs(cls, novel: Novel) -> Tensor:
        """p_k ∝ 1/Σ_j exp(−(f_k − f_j)/√(1 + (π/8) Var[f_k − f_j])): every pair of classes by its own variance."""
        assert novel.covariance is not None
        blocks = place_blocks(novel.covariance, novel.mean)
        variance = blocks.diagonal(dim1=-2, dim2=-1)
        between = (variance[..., :, None] + variance[..., None, :] - 2 * blocks).clamp(min=0)
        margins = (novel.mean[..., :, None] - novel.mean[..., None, :]) * (1 + math.pi / 8 * between).rsqrt()
        return (-torch.logsumexp(-margins, dim=-1)).softmax(dim=-1)

    def _epistemic(self) -> Tensor | None:
        """½ (Σ p Var f − pᵀ Cov f p) of the logits over T, at each place."""
        if self.covariance is None:
            return None
        p = (self.mean / self.temperature).softmax(dim=-1)
        blocks = place_blocks(self.covariance, self.mean) / self.temperature**2
        spread = (p * blocks.diagonal(dim1=-2, dim2=-1)).sum(dim=-1)
        return (spread - torch.einsum("...c,...cd,...d->...", p, blocks, p)) / 2

    def _probs_at(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)

    def _probit_probs(self, mean: Tensor, variance: Tensor) -> Tensor:
        average = (mean.softmax(dim=-1) * variance).sum(dim=-1, keepdim=True)
        return (mean * (1 + math.pi / 8 * average).rsqrt()).softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class ClassificationMixture(LogitMixture, ClassificationPredictive):
    """p(class) = Σ π_m p_m(class)."""


@dataclass(frozen=True, eq=False)
class SelectedClasses(ClassificationPredictive):
    """p(class) = E[softmax(f)] where f is random in k classes, and the others' logits are at their mean.

    `mean`, `variance`, `covariance` and `draws` are of the k logits asked for; `probs` are of all classes, and so are
    `log_prob`, `entropy` and `prediction_set`. Under `link="probit"` they are those of all logits with variances of 0 but for
    the k; where there are draws, the others keep their shares of what the k leave.

    Attributes:
        outputs: the classes asked for, (batch, ..., k).
        logits: E[f] of all classes, (batch, ..., classes).
        rest_variance: Var[log Σ_rest exp f] of the linearised network, (batch, ...).
    """

    outputs: Tensor = None  # type: ignore[assignment]
    logits: Tensor = None  # type: ignore[assignment]
    rest_variance: Tensor = None  # type: ignore[assignment]

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities of all classes."""
        if self.draws is None and (self.link == "probit" or not self.averaged):
            variance = torch.zeros_like(self.logits).scatter(-1, self.outputs, self.variance)
            given = {"link": self.link, "temperature": self.temperature, "averaged": self.averaged}
            return ClassificationPredictive(self.logits, variance, **given).probs  # type: ignore[arg-type]
        coarse = self._draw_probs().mean(dim=0)
        rest = self._rest_logits.softmax(dim=-1).nan_to_num(0.0)
        return (rest * coarse[..., -1:]).scatter(-1, self.outputs, coarse[..., :-1])

    @property
    def rest_error(self) -> Tensor:
        """A bound on Σ_class |Δp| /2, (batch, ...), Δp being what the variance of the rest would change in the exact average.

        p_rest = σ(R − log Σ_asked exp f) with R = log Σ_rest exp f. σ(x + h) differs from σ(x) by at most |h|/4 and by at
        most σ(x) (exp|h| − 1); with h ~ N(0, Var R) the expectation is at most the lesser of √(Var R/8π) and, by Cauchy and
        Schwarz, √(p_rest E(exp|h| − 1)²).
        """
        s = (self.rest_variance.clamp(min=0).sqrt() / self.temperature).double()
        steep = s / math.sqrt(8 * math.pi)
        below = torch.special.ndtr
        growth = 2 * (2 * s.square()).exp() * below(2 * s) - 4 * (s.square() / 2).exp() * below(s) + 1
        rest = 1 - self.probs.gather(-1, self.outputs).sum(dim=-1).double().clamp(max=1)
        return torch.minimum(steep, (rest * growth.clamp(min=0)).sqrt()).to(self.mean)

    @property
    def _rest_logits(self) -> Tensor:
        """Those of the other classes over T, −∞ at the ones asked for."""
        return (self.logits / self.temperature).scatter(-1, self.outputs, -torch.inf)

    def _probs_at(self, logits: Tensor) -> Tensor:
        """Of the classes asked for, and of all others together, (..., k + 1)."""
        rest = self._rest_logits.logsumexp(dim=-1, keepdim=True)
        return torch.cat([logits, rest.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class SelectedMixture(ClassificationMixture, SelectedClasses):
    """p(class) = Σ π_m p_m(class), members having been asked for the same classes."""

    @property
    def rest_error(self) -> Tensor:
        """Σ π_m of the members' bounds."""
        return self._averaged(lambda member: member.rest_error)


@dataclass(frozen=True)
class Classification(Likelihood):
    """Cross-entropy in training. Evidence fails where validation works, so validation is the default."""

    name: str = "classification"
    kind: type[Predictive] = ClassificationPredictive
    coupled: bool = True
    ignored: int | None = IGNORED

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def n_outputs(self, targets: Tensor) -> int:
        """One per class, the greatest class index and one more."""
        return int(targets.max()) + 1

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Class indices, (n,)."""
        if targets.is_floating_point() and not bool((targets == targets.floor()).all()):
            raise MatchError("the targets of a classification are class indices, 0, 1, …: some are not whole numbers")
        found = targets.reshape(len(targets), -1).squeeze(1).to(like.device, torch.int64)
        if found.numel() and int(found.min()) < 0:
            raise MatchError(f"class indices must be at least 0, got {int(found.min())}")
        return found

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.softmax(dim=-1)
        return p * (1 - p)

    def hessian_root_times(self, outputs: Tensor, r: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """√p r − p (√p · r)."""
        p = outputs.softmax(dim=-1)
        scaled = p.sqrt() * r
        return scaled - p * scaled.sum(dim=-1, keepdim=True)

    def hessian_root(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """A = diag(√p) − p √pᵀ, A Aᵀ = diag(p) − p pᵀ."""
        p = outputs.softmax(dim=-1)
        return torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]

    def locations(self, outputs: Tensor) -> Tensor:
        """The logits, of at least two classes."""
        if outputs.dim() < 2 or outputs.shape[-1] < 2:
            raise MatchError(
                f"classification needs the logits of at least two classes in the last dimension, but the outputs have shape "
                f"{tuple(outputs.shape)}: for a single logit use likelihood='binary'"
            )
        return outputs

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Every place but those whose class index is −100."""
        _check_shape(targets, outputs)
        return targets != IGNORED

    def log_probs(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """log p of every class index but −100, whatever their shape."""
        assert isinstance(predictive, LogitPredictive)
        keep = self.counted(predictive.mean, targets)
        return _log_probs(predictive.probs[keep], targets[keep])

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Class indices, (batch, ...)."""
        _check_shape(targets, self.locations(outputs))
        return targets

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are not negative and sum to 1: probabilities, of which another softmax makes others."""
        sums = outputs.sum(dim=-1)
        if not sums.numel() or bool((outputs < 0).any()) or not bool(((sums - 1).abs() < _SAME_SUM).all()):
            return None
        return (
            "the outputs of each example are positive and sum to 1, as probabilities do, but likelihood='classification' takes "
            "logits: leave out the softmax, or pass forward=lambda model, x: model(x).log()"
        )

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """Other classes than the mean network's, for more than a tenth of the places."""
        return changed_answers(draws.softmax(dim=-1).mean(dim=0).argmax(dim=-1) != at_mean.argmax(dim=-1))


def check_classes(scores: Tensor, y: Tensor) -> None:
    """Raise unless y holds one class index for each row of scores."""
    _check_shape(y, scores)
    classes = scores.shape[-1]
    if y.numel() and not bool(((y >= 0) & (y < classes)).all()):
        remedy = "count from 0, y - 1" if int(y.min()) > 0 and int(y.max()) == classes else "leave out what is padding"
        raise MatchError(f"class indices must be 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}: {remedy}")


def _check_shape(y: Tensor, outputs: Tensor) -> None:
    if y.shape != outputs.shape[:-1]:
        remedies = {
            outputs.shape: ": take y.argmax(-1) of one-hot rows",
            (*outputs.shape[:-1], 1): ": take y.squeeze(-1)",
        }
        raise MatchError(
            f"expected class indices of shape {tuple(outputs.shape[:-1])}, got {tuple(y.shape)}{remedies.get(y.shape, '')}"
        )


@dataclass(frozen=True, eq=False)
class BinaryPredictive(LogitPredictive):
    """p(y = 1) = E[σ(f)] for each output, a logit; probit: σ(f (1 + π Var[f]/8)^(-1/2))."""

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of zeros and ones, summed over the outputs of an example."""
        y = like(y, self.mean)
        _check_binary(y)
        return rows(_log(torch.where(y > 0.5, self.probs, 1 - self.probs))).sum(dim=1)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, zeros and ones."""
        return torch.bernoulli(self.probs.expand(n, *self.probs.shape), generator=generator)

    @classmethod
    def _novel_probs(cls, novel: Novel) -> Tensor:
        return (novel.mean * (1 + math.pi / 8 * novel.variance).rsqrt()).sigmoid()

    def _epistemic(self) -> Tensor | None:
        """½ Σ p (1 − p) Var f over outputs, of the logits over T."""
        p = (self.mean / self.temperature).sigmoid()
        return rows(p * (1 - p) * self.variance).sum(dim=1) / (2 * self.temperature**2)

    @staticmethod
    def _of_classes(probs: Tensor) -> Tensor:
        return torch.stack([1 - probs, probs], dim=-1)

    def _probs_at(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def _probit_probs(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()


@dataclass(frozen=True, eq=False)
class BinaryMixture(LogitMixture, BinaryPredictive):
    """p(y = 1) = Σ π_m p_m(y = 1), output by output."""


@dataclass(frozen=True)
class Binary(Likelihood):
    """Binary cross-entropy in training. Validation is the default, as for classes."""

    name: str = "binary"
    kind: type[Predictive] = BinaryPredictive

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Zeros and ones, (n, k)."""
        found = super().shaped(targets, like)
        _check_binary(found)
        return found

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.sigmoid()
        return p * (1 - p)

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are all between 0 and 1: probabilities, which are no logits."""
        if len(outputs) < FEWEST_TO_JUDGE or not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return None
        return (
            "all outputs lie between 0 and 1, as probabilities do, but likelihood='binary' takes logits: leave out the "
            "sigmoid, or pass forward=lambda model, x: model(x).logit()"
        )

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """Other answers than the mean network's, for more than a tenth of the outputs."""
        return changed_answers((draws.sigmoid().mean(dim=0) > 0.5) != (at_mean > 0))


def _check_binary(y: Tensor) -> None:
    if not bool(((y == 0) | (y == 1)).all()):
        raise MatchError(f"binary targets must be 0 or 1, got {float(y.min()):g} to {float(y.max()):g}")


def _log_probs(probs: Tensor, y: Tensor) -> Tensor:
    """log p of one class index for each row of probabilities."""
    check_classes(probs, y)
    return _log(probs).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
