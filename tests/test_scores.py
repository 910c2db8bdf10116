"""Scores against their definitions, pair by pair and bin by bin."""

import math

import pytest
import torch

import bayesadam as ba
from bayesadam import scores
from bayesadam.errors import MatchError
from bayesadam.likelihoods import likelihood
from bayesadam.likelihoods.base import Component
from bayesadam.likelihoods.moments import Moments
from bayesadam.likelihoods.prediction import Prediction
from floats import approx


def predicted(kind: str, mean: torch.Tensor, variance: torch.Tensor, **more: torch.Tensor) -> Prediction:
    return Prediction(likelihood(kind), (Component(Moments(mean, variance), **more),))


@pytest.fixture
def classified() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    probs = (2 * torch.randn(500, 7)).softmax(dim=-1)
    return probs, torch.multinomial(probs.sqrt(), 1).squeeze(1)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_is_summed_over_bins(classified, bins):
    probs, y = classified
    confidence, answer = probs.double().max(dim=1)
    expected = 0.0
    for k in range(bins):
        inside = (confidence > k / bins) & (confidence <= (k + 1) / bins)
        gap = (answer == y)[inside].double().sum() - confidence[inside].sum()
        expected += abs(float(gap)) / len(y)
    assert scores.ece(probs, y, bins=bins) == approx(expected, abs=1e-6)


def test_brier_and_accuracy_by_hand(classified):
    probs, y = classified
    expected = sum(
        sum((float(p[c]) - (c == int(k))) ** 2 for c in range(7)) for p, k in zip(probs, y, strict=True)
    ) / len(y)
    assert scores.brier(probs, y) == approx(expected, rel=1e-5)
    assert scores.accuracy(probs, y) == approx((probs.argmax(1) == y).sum().item() / 500)


@pytest.mark.parametrize("levels", [1000, 5])
def test_auroc_and_fpr95_equal_scikit_learn_ties_included(levels):
    generator = torch.Generator().manual_seed(1)
    inside = torch.randint(levels, (300,), generator=generator).float()
    outside = torch.randint(levels, (200,), generator=generator).float() + levels / 4
    above = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    assert scores.auroc(inside, outside) == approx(float(above.mean()))
    thresholds = [t for t in outside if (outside >= t).double().mean() >= 0.95]
    expected = min(float((inside >= t).double().mean()) for t in thresholds)
    assert scores.fpr95(inside, outside) == approx(expected)


def test_coverage_and_log_prob_of_a_known_gaussian():
    generator = torch.Generator().manual_seed(2)
    mean, variance = torch.zeros(20_000, 1), torch.full((20_000, 1), 0.75)
    p = predicted("regression", mean, variance, noise_variance=torch.tensor([0.25]))
    y = torch.randn(20_000, generator=generator)
    low, high = (p.distribution.icdf(torch.tensor(level)) for level in (0.05, 0.95))
    assert scores.coverage(low, high, y) == approx(0.9, abs=0.01)
    assert -float(p.log_prob(y).mean()) == approx(0.5 * (math.log(2 * math.pi) + 1), abs=0.03)
    assert scores.rmse(mean, y) == approx(1.0, abs=0.02)


def test_wrong_shapes_are_named(classified):
    probs, y = classified
    with pytest.raises(ba.BayesAdamError, match=r"\(500,\), got \(499,\)"):
        scores.ece(probs, y[1:])
    with pytest.raises(ba.BayesAdamError, match="needs in- and out-of-distribution scores, got 0"):
        scores.auroc(torch.zeros(0), torch.zeros(3))
    with pytest.raises(ba.BayesAdamError, match="bins"):
        scores.ece(probs, y, bins=0)


@pytest.mark.parametrize("score", [scores.accuracy, scores.brier, scores.ece])
@pytest.mark.parametrize("bad", [-100, -1, 7])
def test_numbers_that_are_no_class_are_refused(classified, score, bad):
    probs, y = classified
    assert probs.shape[-1] <= 7
    y = y.clone()
    y[3] = bad
    with pytest.raises(MatchError, match="class indices must be 0 to"):
        score(probs, y)


def test_sequences_and_labels_that_are_padding():
    torch.manual_seed(0)
    logits, y = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    assert scores.ece(logits.softmax(-1), y) == scores.ece(logits.softmax(-1).flatten(0, 1), y.flatten())
    found = predicted("classification", logits, torch.ones_like(logits))
    assert found.log_prob(y).shape == (4, 5)
    y[1, 2] = -100
    with pytest.raises(MatchError, match="must be 0 to 2, got -100 to 2"):
        found.log_prob(y)


def test_labels_are_examples_of_two_classes():
    generator = torch.Generator().manual_seed(0)
    probs, y = torch.rand(50, 4, generator=generator), torch.randint(2, (50, 4), generator=generator)
    pairs = torch.stack([1 - probs, probs], dim=-1)
    for score in (scores.accuracy, scores.brier, scores.ece):
        assert score(probs, y.float()) == score(pairs, y)
    assert scores.brier(probs, y) == approx(2 * float((probs.double() - y).square().mean()))
    with pytest.raises(MatchError, match="must be 0 or 1"):
        scores.ece(probs, probs)
