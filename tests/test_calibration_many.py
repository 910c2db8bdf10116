"""Calibration of many classes: the largest at some places, as predictions have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibration import held_out
from bayesadam.predict.prediction import Options
from floats import assert_close


class Tokens(nn.Module):
    """(batch, length) to (batch, length, 130)."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.head = nn.Embedding(130, 8), nn.Linear(8, 130)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.look(ids).cumsum(dim=1).tanh())


def text_posterior() -> tuple[ba.Posterior, Tensor]:
    torch.manual_seed(0)
    model, ids = Tokens(), torch.randint(130, (60, 6)) // 5 * 5
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:40, :-1]).flatten(0, 1), ids[:40, 1:].flatten()).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, 200, power=1.0, batch_size=40, prior_precision=1.0), ids[40:]


def test_of_many_classes_the_largest_at_some_places_are_looked_at(monkeypatch):
    posterior, text = text_posterior()
    inputs, targets = text[:, :-1], text[:, 1:].clone()
    targets[:, 0] = -100
    asked = []
    compute = held_out.moments

    def counting(*given, **options):
        found = compute(*given, **options)
        asked.append((options["rows"], found.variance.shape))
        return found

    monkeypatch.setattr(held_out, "moments", counting)
    calibrated = ba.calibrate(posterior, (inputs, targets), likelihood="classification", method="validation")
    assert asked
    assert all(along is not None and shape[2] == 10 for along, shape in asked)
    before, after = (
        -q.predict(inputs, likelihood="classification", n_samples=2).log_prob(targets.clamp(min=0))[:, 1:].mean()
        for q in (posterior, calibrated)
    )
    assert float(after) < float(before)


def test_rows_of_many_classes_are_what_predictions_have():
    posterior, text = text_posterior()
    inputs, targets = text[:, :-1], text[:, 1:]
    data = held_out.HeldOut(posterior, [(inputs, targets)], Options(likelihood="classification"), 0)
    variance = posterior.variance
    parts = list(data.moments(posterior, [variance.__getitem__]))
    assert sum(len(part.y) for part in parts) == 4 * len(inputs)
    assert torch.equal(data.observed.owners.bincount(), torch.full((len(inputs),), 4))
    whole = posterior.predict(inputs, likelihood="classification", n_samples=10**6, probes=0)
    every = whole.components[0].logits
    logits, outputs = every.flatten(0, 1), torch.zeros_like(every)
    outputs = outputs.scatter(2, whole.outputs, whole.variance).flatten(0, 1)
    for mean, variances, _, y in parts:
        for row, own, label in zip(mean, variances[0], y, strict=True):
            same = (logits - row).abs().amax(dim=1) < 1e-5
            assert_close(own, outputs[same][0], rtol=1e-4, atol=1e-7)
            assert bool((targets.flatten()[same] == label).any())


@pytest.mark.parametrize("predictive", ["linearised", "linearised-sampled"])
def test_scores_are_of_examples_whatever_their_places(predictive):
    """More places than are looked at, in several batches, with enough examples to be scored."""
    posterior, _ = text_posterior()
    ids = torch.randint(130, (70, 9), generator=torch.Generator().manual_seed(3))
    batches = [(part[:, :-1], part[:, 1:]) for part in ids.split(30)]
    options = {"predictive": predictive, "n_samples": 4} if predictive != "linearised" else {}
    found = ba.calibrate(posterior, batches, likelihood="classification", **options)
    assert found.calibration.n_scored == 70
