"""What is said where outputs, inputs or targets are not what the likelihood takes them for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, CalibrationError, MatchError
from bayesadam.likelihoods import likelihood
from cases import mlp
from floats import assert_close

K = {"likelihood": "classification"}


def posterior(model: nn.Module, variance: float = 0.01) -> ba.Posterior:
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return ba.Posterior.from_moments(model, mean, {name: torch.full_like(p, variance) for name, p in mean.items()}, 100)


# --- outputs that are something else --------------------------------------------------------------------------------


def test_counts_that_vary_too_much_are_named():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(500, 1, generator=generator) + 1
    record = likelihood("poisson")
    assert record.mismatch(f, torch.poisson(f.exp(), generator=generator)) is None
    # Gamma-distributed rates of variance r² more: Var[y]/E[y] = 1 + E[r²]/E[r].
    more = torch._standard_gamma(torch.ones(500, 1), generator=generator)
    counts = torch.poisson(f.exp() * more, generator=generator)
    found = record.mismatch(f, counts)
    assert found is not None
    assert f"vary {float((counts - f.exp()).square().sum() / f.exp().sum()):.2g} times" in found
    assert "p.prediction_set(level)" in found


def test_probabilities_are_not_logits():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.arange(40) % 3
    q = posterior(nn.Sequential(mlp(3, 4, 3), nn.Softmax(dim=-1)))
    with pytest.warns(BayesAdamWarning, match="leave out the softmax"):
        q.predict(x, **K)
    with pytest.warns(BayesAdamWarning, match="leave out the softmax"):
        ba.calibrate(q, (x, y), **K)
    log: Any = lambda model, inputs: model(inputs).log()  # noqa: E731
    assert torch.equal(q.predict(x, forward=log, **K).mean.argmax(dim=1), q.model(x).argmax(dim=1))
    of_one = posterior(nn.Sequential(mlp(3, 4, 1), nn.Sigmoid()))
    with pytest.warns(BayesAdamWarning, match="leave out the sigmoid"):
        ba.calibrate(of_one, (x, y[:, None] % 2), likelihood="binary")


# --- data -----------------------------------------------------------------------------------------------------------


def test_a_few_held_out_examples_are_warned_of():
    torch.manual_seed(0)
    x = torch.randn(19, 3)
    with pytest.warns(BayesAdamWarning, match="19 held-out targets are too few .* Hold out 20"):
        ba.calibrate(posterior(mlp(3, 4, 3)), (x, torch.arange(19) % 3), **K)


def test_examples_without_numbers_are_warned_of_and_spoil_no_other():
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    q = posterior(mlp(3, 4, 3))
    expected = q.predict(x, **K)
    x[3, 1] = torch.nan
    with pytest.warns(BayesAdamWarning, match=r"1 of 6 examples \(first number 3\) are NaN"):
        found = q.predict(x, **K)
    assert found.novelty.isnan().tolist() == [False, False, False, True, False, False]
    keep = torch.arange(6) != 3
    assert_close(found.probs[keep], expected.probs[keep])


def test_targets_without_numbers_are_refused():
    x, y = torch.randn(30, 3), torch.randn(30, 1)
    y[[3, 5]] = torch.nan
    with pytest.raises(MatchError, match="2 held-out targets are NaN"):
        ba.calibrate(posterior(mlp(3, 4, 1)), (x, y), likelihood="regression")


def test_a_lone_target_is_named():
    with pytest.raises(MatchError, match=r"\(x\[None\], y\[None\]\)"):
        ba.calibrate(posterior(mlp(3, 4, 3)), (torch.rand(3), torch.tensor(1)), **K)


def test_inputs_without_a_tensor_or_a_batch_are_named():
    q = posterior(mlp(3, 4, 3))
    with pytest.raises(MatchError, match="pass a tensor or an array"):
        q.predict([[0.1, 0.2, 0.3]], **K)
    with pytest.raises(ba.BayesAdamError, match=r"no batch dimension\? A single example is x\[None\]"):
        q.predict(torch.rand(3), **K)


def test_fewer_examples_than_in_a_batch_are_warned_of():
    model = mlp(3, 4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    nn.functional.cross_entropy(model(torch.rand(64, 3)), torch.arange(64) % 3).backward()
    optimizer.step()
    with pytest.warns(BayesAdamWarning, match=r"len\(loader.dataset\).* 16 is less than the batch size, 64"):
        ba.Posterior.from_optimizer(model, optimizer, n_data=16, batch_size=64)


# --- scores that say nothing ----------------------------------------------------------------------------------------


def test_guarantees_say_what_they_lack():
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.arange(60) % 30
    q = posterior(mlp(3, 4, 30))
    with pytest.raises(CalibrationError, match="calibrate the posterior with at least 20"):
        q.predict(x, **K).prediction_set()
    found = ba.calibrate(q, (x, y), **K).predict(x, **K)
    assert found.prediction_set(0.9).shape == (60, 30)
    assert found.novelty_pvalue.shape == (60,)


def test_classes_with_too_few_held_out_examples_are_named():
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.arange(60) % 3
    calibrated = ba.calibrate(posterior(mlp(3, 4, 3)), (x, y), **K)
    calibrated.predict(x, **K).prediction_set(0.95, by_class=True)
    keep = (y != 2) | (torch.arange(60) < 30)
    calibrated = ba.calibrate(posterior(mlp(3, 4, 3)), (x[keep], y[keep]), **K)
    with pytest.warns(BayesAdamWarning, match="1 of 3 classes are in every set: .* needs 19"):
        sets = calibrated.predict(x, **K).prediction_set(0.95, by_class=True)
    assert bool(sets[:, 2].all())
