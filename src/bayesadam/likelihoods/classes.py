"""Classes: p(class) = softmax(f), classes in the last dimension, and p(y = 1) = σ(f), one logit per output."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution

from bayesadam.errors import MatchError
from bayesadam.likelihoods.base import FEWEST_TO_JUDGE, Component, Likelihood
from bayesadam.likelihoods.moments import matched, rows

# The class index that torch and transformers leave out of a loss: padding, a prompt, tokens that were not masked.
IGNORED = -100
# Of r in novelty, chosen on MNIST, Fashion-MNIST and texts.
_SHARE, _STEEP, SHARE_OF_TEXTS = 10 * math.pi / 4, 1.5, 0.3
# Half precision leaves the sum of probabilities that far from 1.
_SAME_SUM = 1e-2


class ClassLikelihood(Likelihood):
    """p(y | f) of classes."""

    is_classes = True

    @abstractmethod
    def link(self, logits: Tensor) -> Tensor:
        """Probabilities of logits."""

    @abstractmethod
    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[p] of Gaussian logits, approximately."""

    def of_classes(self, probs: Tensor) -> Tensor:
        """Probabilities as those of classes in the last dimension."""
        return probs

    def probs(self, components: Sequence[Component]) -> Tensor:
        """Σ π E[p]: by the draws, by the probit approximation, or of the mean network alone."""
        return torch.stack([c.weight * self._probs(c) for c in components]).sum(dim=0)

    def _probs(self, c: Component) -> Tensor:
        t = c.temperature
        if c.f.draws is not None:
            return self.link(c.f.draws / t).mean(dim=0)
        return self.link(c.f.mean / t) if c.f.variance is None else self.probit(c.f.mean / t, c.f.variance / t**2)

    def novelty(self, f: Tensor, r: Tensor) -> Tensor:
        """The entropy of link(f/T), T² = 1 + (10π/4) r^1.5; see `token_novelty` of several positions."""
        if self.coupled and f.dim() > 2:
            return rows(self.token_novelty(f, r)).mean(dim=1)
        at = f / of_examples((1 + _SHARE * r**_STEEP).sqrt(), f)
        doubt = entropy(self.of_classes(self.link(at)))
        return doubt if doubt.dim() == 1 else rows(doubt).mean(dim=1)

    def token_novelty(self, f: Tensor, r: Tensor) -> Tensor:
        """The entropy at each position, and 0.3 log r of the example, (batch, positions)."""
        at_positions = entropy(f.softmax(dim=-1))
        return at_positions + SHARE_OF_TEXTS * of_examples(r.log(), at_positions)


class Classification(ClassLikelihood):
    """p(class) = softmax(f), classes in the last dimension, cross-entropy in training.

    Of Gaussian logits E[p] is softmax(κ f) with κ = (1 + π σ̄²/8)^(-1/2), σ̄² the average of the logits' variances
    under softmax(f): one κ per example, so that the order of the classes is the mean network's and adding a constant to
    all logits changes nothing.
    """

    name = "classification"
    coupled = True
    ignored = IGNORED

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def n_outputs(self, targets: Tensor) -> int:
        """One per class, the greatest class index and one more."""
        return int(targets.max()) + 1

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Class indices, (n,)."""
        labels = targets.reshape(len(targets), -1).squeeze(1).to(like.device, torch.int64)
        if not bool((labels == targets.reshape(labels.shape).to(like.device)).all()) or bool((labels < 0).any()):
            raise MatchError("the targets of a classification are class indices, whole numbers of at least 0")
        return labels

    def locations(self, outputs: Tensor) -> Tensor:
        """The logits, of at least two classes."""
        if outputs.dim() < 2 or outputs.shape[-1] < 2:
            raise MatchError(
                "classification needs the logits of at least two classes in the last dimension, but the outputs have "
                f"shape {tuple(outputs.shape)}: for a single logit use likelihood='binary'"
            )
        return outputs

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Class indices, (batch, ...)."""
        _check_shape(targets, self.locations(outputs))
        if targets.is_floating_point() and not bool((targets == targets.round()).all()):
            raise MatchError("the targets of a classification are class indices, and some are no whole numbers")
        return targets.long()

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Every position but those whose class index is −100."""
        return targets != IGNORED

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are not negative and sum to 1: probabilities, of which another softmax makes others."""
        sums = outputs.sum(dim=-1)
        if not sums.numel() or bool((outputs < 0).any()) or not bool(((sums - 1).abs() < _SAME_SUM).all()):
            return None
        return (
            "the outputs of each example are positive and sum to 1, as probabilities do, but classification takes "
            "logits: leave out the softmax, or pass forward=lambda model, x: model(x).log()"
        )

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.softmax(dim=-1)
        return p * (1 - p)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """A = diag(√p) − p √pᵀ, (..., o, o), of the whole Hessian A Aᵀ = diag(p) − p pᵀ."""
        p = outputs.softmax(dim=-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)

    def distribution(self, components: Sequence[Component]) -> Distribution:
        """The classes."""
        self.locations(components[0].f.mean)
        return Categorical(probs=self.probs(components), validate_args=False)

    def log_prob(self, components: Sequence[Component], y: Tensor) -> Tensor:
        """log p of each class index."""
        probs = self.probs(components)
        check_classes(probs, y)
        return _log(probs).gather(-1, y.to(probs.device).long().unsqueeze(-1)).squeeze(-1)

    def link(self, logits: Tensor) -> Tensor:
        """Softmax."""
        return logits.softmax(dim=-1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """softmax(κ f), κ = (1 + π σ̄²/8)^(-1/2)."""
        shared = (mean.softmax(dim=-1) * variance).sum(dim=-1, keepdim=True)
        return (mean * (1 + math.pi / 8 * shared).rsqrt()).softmax(dim=-1)


class Binary(ClassLikelihood):
    """p(y = 1) = σ(f) for each output, a logit, binary cross-entropy in training."""

    name = "binary"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Zeros and ones, (n, k)."""
        return zeros_and_ones(super().shaped(targets, like))

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are all between 0 and 1: probabilities, not logits."""
        if len(outputs) < FEWEST_TO_JUDGE or not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return None
        return (
            "all outputs lie between 0 and 1, as probabilities do, but likelihood='binary' takes logits: leave out the "
            "sigmoid, or pass forward=lambda model, x: model(x).logit()"
        )

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.sigmoid()
        return p * (1 - p)

    def distribution(self, components: Sequence[Component]) -> Distribution:
        """Zeros and ones, output by output."""
        return Bernoulli(probs=self.probs(components), validate_args=False)

    def log_prob(self, components: Sequence[Component], y: Tensor) -> Tensor:
        """log p(y) of zeros and ones, summed over the outputs of an example."""
        probs = self.probs(components)
        y = zeros_and_ones(matched(y, probs))
        return rows(_log(torch.where(y > 0.5, probs, 1 - probs))).sum(dim=1)

    def link(self, logits: Tensor) -> Tensor:
        """σ(f)."""
        return logits.sigmoid()

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """σ(f (1 + π Var[f]/8)^(-1/2))."""
        return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()

    def of_classes(self, probs: Tensor) -> Tensor:
        """p(y = 0) and p(y = 1), in a new last dimension."""
        return torch.stack([1 - probs, probs], dim=-1)


def entropy(probs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension."""
    # ONNX does not have `entr`, whose gradient at 0 is infinite.
    if torch.compiler.is_compiling() or probs.requires_grad:
        return -(probs * _log(probs)).sum(dim=-1)
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(dim=-1)


def of_examples(values: Tensor, like: Tensor) -> Tensor:
    """One number for each example, (batch,), in the dimensions of its outputs."""
    return values.to(like).view(-1, *[1] * (like.dim() - 1))


def check_classes(scores: Tensor, y: Tensor) -> None:
    """Raise unless y holds one class index for each row of scores."""
    _check_shape(y, scores)
    classes = scores.shape[-1]
    if y.numel() and not bool(((y >= 0) & (y < classes)).all()):
        raise MatchError(f"class indices must be 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}")


def classes_are_second(targets: Tensor, outputs: Tensor, with_forward: bool = True) -> bool:
    """Whether class indices go with outputs (batch, classes, ...), as torch's cross-entropy takes them, alone.

    Images with as many classes as rows and columns are refused without a `forward`; sequences have theirs last.
    """
    if outputs.dim() < 3 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return False
    if targets.shape != outputs.shape[:-1]:
        return True
    if outputs.dim() > 3 and not with_forward:
        raise MatchError(
            f"of outputs {tuple(outputs.shape)} the classes may be in the second dimension or in the last: say which, "
            "forward=lambda model, x: model(x).movedim(1, -1), or forward=lambda model, x: model(x)"
        )
    return False


def _check_shape(y: Tensor, outputs: Tensor) -> None:
    expected = outputs.shape[:-1]
    if y.shape == expected:
        return
    remedy = ""
    if classes_are_second(y, outputs):
        remedy = ". The classes are in the second dimension: pass forward=lambda model, x: model(x).movedim(1, -1)"
    elif y.shape == outputs.shape:
        remedy = ". One-hot targets, or probabilities, are not taken: pass their argmax over the classes"
    elif outputs.dim() > 2 and y.dim() == outputs.dim() and y.shape[1] == 1:
        remedy = ". Leave out the dimension of one channel: pass targets[:, 0]"
    elif outputs.dim() > 3 and y.dim() == outputs.dim() - 1 and y.shape[0] == outputs.shape[0]:
        remedy = (
            f", or {(y.shape[0], *outputs.shape[2:])} of outputs with the classes in the second dimension: resize the "
            "outputs, or the targets, so that there is one of each for every pixel"
        )
    raise MatchError(f"expected class indices of shape {tuple(expected)}, got {tuple(y.shape)}{remedy}")


def zeros_and_ones(y: Tensor) -> Tensor:
    """The targets, if all are 0 or 1."""
    if not bool(((y == 0) | (y == 1)).all()):
        raise MatchError(f"binary targets must be 0 or 1, got {float(y.min()):g} to {float(y.max()):g}")
    return y


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
