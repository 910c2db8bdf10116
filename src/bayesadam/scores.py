"""Scores of predictive distributions: calibration, sharpness, detection of out-of-distribution inputs.

Plain functions of tensors on any device.
"""

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.classes import check_classes, zeros_and_ones


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Share of examples whose likeliest class is the right one.

    Here, in `brier` and in `ece` probabilities of labels, each of y = 1, go with zeros and ones of the same shape:
    every label is then an example of two classes.

    >>> accuracy(torch.tensor([[0.9, 0.2], [0.6, 0.7]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """
    probs, y = _of_classes(probs, y)
    return float((probs.argmax(dim=-1) == y).double().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    """Mean of Σ_c (p_c − 1[y = c])², between 0 and 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    probs, y = _of_classes(probs, y)
    target = torch.nn.functional.one_hot(y.long(), probs.shape[-1])
    return float((probs.double() - target).square().sum(dim=-1).mean())


def ece(probs: Tensor, y: Tensor, *, bins: int = 15) -> float:
    """Expected calibration error: Σ_k (n_k/n) |accuracy_k − confidence_k| over equal bins of the confidence.

    Probabilities may have further leading dimensions, such as a sequence's, which the labels then have too.
    """
    probs, y = _of_classes(probs, y)
    probs, y = probs.flatten(0, -2), y.flatten()
    if bins < 1:
        raise SettingError(f"bins must be at least 1, got {bins!r}")
    confidence, answer = probs.double().max(dim=-1)
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gaps = confidence.new_zeros(bins).index_add_(0, index, (answer == y).double() - confidence)
    return float(gaps.abs().sum() / len(y))


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root mean squared error."""
    return float((mean - y.reshape(mean.shape)).double().square().mean().sqrt())


def coverage(low: Tensor, high: Tensor, y: Tensor) -> float:
    """Share of targets inside intervals."""
    y = y.reshape(low.shape).to(low)
    return float(((y >= low) & (y <= high)).double().mean())


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve of scores of examples like the training data and of others, higher for the latter.

    It is the chance that an out-of-distribution example scores higher than an in-distribution one, ties counting half.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    if not inside.numel() or not outside.numel():
        raise MatchError(f"AUROC needs in- and out-of-distribution scores, got {inside.numel()} and {outside.numel()}")
    scores = torch.cat([inside.flatten(), outside.flatten()]).double()
    # By the sum of ranks, that of equal scores their mean.
    _, position, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[position]
    n_in, n_out = inside.numel(), outside.numel()
    return float((ranks[n_in:].sum() - n_out * (n_out + 1) / 2) / (n_in * n_out))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of in-distribution examples above the threshold that 95 % of the out-of-distribution ones reach."""
    if not inside.numel() or not outside.numel():
        raise MatchError("FPR95 needs in- and out-of-distribution scores")
    ordered = outside.flatten().double().sort(descending=True).values
    caught = -(-95 * ordered.numel() // 100)
    return float((inside.flatten().double() >= ordered[caught - 1]).double().mean())


def risk_coverage(doubt: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """The share answered, and the share of wrong answers among them, at each distinct doubt from the least on.

    Args:
        doubt: (n,), such as `p.doubt` or `p.novelty`.
        wrong: (n,) booleans, such as `p.wrong(y)`.

    >>> risk_coverage(torch.tensor([0.1, 0.3, 0.3, 0.2]), torch.tensor([False, True, False, False]))
    (tensor([0.2500, 0.5000, 1.0000], dtype=torch.float64), tensor([0.0000, 0.0000, 0.2500], dtype=torch.float64))
    """
    answered, errors = _answered_up_to(doubt, wrong)
    return answered / len(doubt), errors / answered


def aurc(doubt: Tensor, wrong: Tensor) -> float:
    """The area under the risk-coverage curve: the mean over examples of the risk where they are the last answered.

    >>> aurc(torch.tensor([0.1, 0.3, 0.3, 0.2]), torch.tensor([False, True, False, False]))
    0.125
    """
    answered, errors = _answered_up_to(doubt, wrong)
    return float((answered.diff(prepend=answered.new_zeros(1)) * errors / answered).sum() / len(doubt))


def coverage_at(doubt: Tensor, wrong: Tensor, *, risk: float) -> float:
    """The greatest share that could be answered with a share of wrong answers of at most `risk`, on these very data."""
    coverage, risks = risk_coverage(doubt, wrong)
    return float(coverage[risks <= risk].amax()) if bool((risks <= risk).any()) else 0.0


def _of_classes(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of classes in the last dimension, and class indices, checked."""
    if probs.dim() and probs.shape == y.shape:
        probs, y = torch.stack([1 - probs, probs], dim=-1), zeros_and_ones(y)
    check_classes(probs, y)
    return probs, y


def _answered_up_to(doubt: Tensor, wrong: Tensor) -> Tensor:
    """How many examples are answered up to each distinct doubt, and how many errors are among them, (2, distinct)."""
    if doubt.dim() != 1 or doubt.shape != wrong.shape or not len(doubt):
        shapes = f"{tuple(doubt.shape)} and {tuple(wrong.shape)}"
        raise MatchError(f"pass one doubt and one error for each example, got {shapes}")
    _, place, counts = torch.unique(doubt, return_inverse=True, return_counts=True)
    errors = torch.zeros_like(counts, dtype=torch.float64).index_add_(0, place, wrong.to(place.device).double())
    return torch.stack([counts.double(), errors]).cumsum(dim=1)
