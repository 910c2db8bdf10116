"""What speaks against a target, and what its example did to the network: outputs, their covariance and targets in, rows out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods import NumericPredictive, Predictive, likelihood
from bayesadam.likelihoods.classification import IGNORED, check_classes
from bayesadam.likelihoods.predictive import Novel, like, rows

# A normal variable is within this many standard deviations half of the time.
_QUARTILE = 0.6744897501960817


@dataclass(frozen=True, eq=False)
class Rows:
    """One entry per example of a batch, in float64.

    Attributes:
        suspicion: how strongly the network and its uncertainty speak against the target.
        loss: −log p(y | f) at the posterior's mean.
        change: Δf = v e, (batch, outputs).
        targets: as they were held against the outputs.
        predicted: the class, or E[y].
    """

    suspicion: Tensor
    loss: Tensor
    change: Tensor
    targets: Tensor
    predicted: Tensor


Measure = Callable[[Predictive, Tensor], Rows]


def rivals(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """d = f_y − f_j, and j, the strongest other class.

    >>> rivals(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0]))
    (tensor([-2.]), tensor([1]))
    """
    own = labels.unsqueeze(-1)
    strongest = logits.scatter(-1, own, -math.inf).max(dim=-1)
    return logits.gather(-1, own).squeeze(-1) - strongest.values, strongest.indices


def difference_variance(covariance: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Var[f_one − f_other] of each example, from (batch, classes, classes)."""
    at = torch.arange(len(one), device=one.device)
    both = covariance[at, one, one] + covariance[at, other, other] - 2 * covariance[at, one, other]
    return both.clamp(min=0)


def suspicion(difference: Tensor, variance: Tensor) -> Tensor:
    """−d / Var[d]^¼: large where the network is against the label, or for it on little evidence.

    Between the difference of logits, which does not see what was learned by heart, and its z-score −d/√Var[d], which overrates
    how far variances differ.
    """
    return -difference / variance.clamp(min=torch.finfo(torch.float32).tiny) ** 0.25


def mahalanobis(residual: Tensor, covariance: Tensor) -> Tensor:
    """√(rᵀ C⁻¹ r) of each example, (batch, k) and (batch, k, k); |r|/√C of a single output."""
    white = torch.linalg.solve(covariance, residual.unsqueeze(-1)).squeeze(-1)
    distance: Tensor = (residual * white).sum(dim=-1).clamp(min=0).sqrt()
    return distance


def robust_variance(residuals: Tensor) -> Tensor:
    """σ² by output, (median |r| / 0.6745)², which targets that are wrong hardly move; (n, k) → (k,).

    >>> robust_variance(torch.tensor([[-1.0], [1.0], [100.0]])).sqrt()
    tensor([1.4826])
    """
    return (residuals.abs().median(dim=0).values / _QUARTILE).square()


def classes(found: Predictive, y: Tensor) -> Rows:
    """Rows of class indices; those of −100 have no suspicion, loss and change."""
    f, covariance, novel = _moments(found)
    if f.dim() != 2 or y.dim() != 1:
        raise MatchError(
            f"an audit has one row per example, but the outputs have shape {tuple(found.mean.shape)} and the targets "
            f"{tuple(y.shape)}: pass one class index for each example, and for a language model cut its texts into examples "
            "with forward=lambda model, batch: ... that returns (batch, classes)"
        )
    if y.is_floating_point():
        raise MatchError(
            f"class indices are whole numbers, got {y.dtype}: pass labels.long(), or likelihood='regression' for numbers"
        )
    keep = y != IGNORED
    check_classes(found.mean[keep], y[keep])
    label = torch.where(keep, y, 0)
    difference, rival = rivals(novel.mean.double(), label)
    assert novel.covariance is not None
    variance = difference_variance(novel.covariance.double(), label, rival)
    error = f.softmax(dim=-1) - F.one_hot(label, f.shape[-1])
    loss = F.cross_entropy(f, label, reduction="none")
    scores, change = suspicion(difference, variance), _change(covariance, error)
    scores, loss = (torch.where(keep, column, math.nan) for column in (scores, loss))
    return Rows(scores, loss, torch.where(keep[:, None], change, math.nan), y, f.argmax(dim=-1))


def binary(found: Predictive, y: Tensor) -> Rows:
    """Rows of zeros and ones, one logit each; of several outputs the most suspect one counts."""
    f, covariance, novel = _moments(found)
    y, f = like(y, found.mean), rows(f)
    targets = likelihood("binary").shaped(y, f)
    sides = 2 * targets - 1
    scores = suspicion(sides * rows(novel.mean.double()), rows(novel.variance.double())).amax(dim=1)
    change, loss = _change(covariance, f.sigmoid() - targets), F.softplus(-sides * f).sum(dim=1)
    return Rows(scores, loss, change, _flat(targets.long()), _flat((f > 0).long()))


def poisson(found: Predictive, y: Tensor) -> Rows:
    """Rows of counts: √Σ (y − E[y])²/Var[y] over targets, the predictive's own moments."""
    return _numeric("poisson", found, y, lambda f, y: f.exp() - y)


def heteroscedastic(found: Predictive, y: Tensor) -> Rows:
    """Rows of numbers with a variance of their own: √Σ (y − E[y])²/Var[y] over targets."""

    def error(f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, dim=-1)
        precision = (-log_variance).exp()
        return torch.cat([(mean - y) * precision, 0.5 * (1 - (y - mean).square() * precision)], dim=-1)

    return _numeric("heteroscedastic", found, y, error)


def regression(f: Tensor, covariance: Tensor, y: Tensor, noise_variance: Tensor) -> Rows:
    """Rows of numbers, y = f + N(0, σ²): the residual in units of its predictive, √(rᵀ (V + diag σ²)⁻¹ r) with r = y − f.

    For a single output |r|/√(σ² + V). Of an example that the posterior has not seen this is, in a linear model, the textbook's
    studentised residual |r|/(σ√(1 − h)), r and h those of a fit with it. One that was trained on has pulled f to itself, which
    is not corrected for: V of a network is far too rough for that.

    Args:
        f: outputs, (n, k).
        covariance: V of the posterior, (n, k, k).
        y: targets, (n, k).
        noise_variance: σ² by output, (k,).
    """
    residual = y - f
    scores = mahalanobis(residual, covariance + torch.diag(noise_variance))
    loss = 0.5 * (residual.square() / noise_variance + (2 * math.pi * noise_variance).log()).sum(dim=1)
    return Rows(scores, loss, _change(covariance, -residual / noise_variance), _flat(y), _flat(f))


MEASURES: Mapping[str, Measure] = {
    "classification": classes,
    "binary": binary,
    "poisson": poisson,
    "heteroscedastic": heteroscedastic,
}


def _numeric(name: str, found: Predictive, y: Tensor, error: Callable[[Tensor, Tensor], Tensor]) -> Rows:
    assert isinstance(found, NumericPredictive)
    f, covariance, _ = _moments(found)
    y = like(y, found.predicted_mean)
    loss = -_at_mean(name, found).log_prob(y)
    expected, targets = (rows(t.double()) for t in (found.predicted_mean, y))
    z = (targets - expected) / rows(found.stddev.double())
    return Rows(
        z.square().sum(dim=1).sqrt(),
        loss,
        _change(covariance, error(rows(f), targets)),
        _flat(targets),
        _flat(expected),
    )


def _moments(found: Predictive) -> tuple[Tensor, Tensor, Novel]:
    """f, its covariance, (batch, outputs, outputs), and the moments under the settings of novelty."""
    assert found.covariance is not None
    assert found.novel is not None
    return found.mean.double(), found.covariance.double(), found.novel


def _at_mean(name: str, found: Predictive) -> Predictive:
    """The predictive of the network at the mean alone."""
    mean = found.mean.double()
    return likelihood(name).predictive(mean, torch.zeros_like(mean))


def _change(covariance: Tensor, error: Tensor) -> Tensor:
    """Δf = v e: how far f moves once the example is left out, to first order (memory perturbation, Nickl et al. 2023).

    v = J Σ Jᵀ, e = ∂(−log p)/∂f: without the example the optimum moves by Σ Jᵀ e.
    """
    return (covariance @ error.unsqueeze(-1)).squeeze(-1)


def _flat(values: Tensor) -> Tensor:
    """(n, 1) as (n,)."""
    return values.squeeze(1) if values.dim() == 2 and values.shape[1] == 1 else values
