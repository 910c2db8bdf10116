"""`predict`, `draw` and `novelty` of posteriors: the moments under a likelihood, loaders, mixtures and refusals."""

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from bayesadam.likelihoods import Component, Moments, Prediction, likelihood
from calibrated.cases_calibrated import NAMES, blobs, data, seeded, trained, waves
from cases import jacobian
from floats import assert_close


def dense(q: ba.Posterior, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f and J Σ Jᵀ between all outputs of all examples."""
    j, variance = jacobian(q.model, x).flatten(0, 1), torch.cat([v.flatten() for v in q.variance.values()])
    return q.model(x).detach(), (j * variance) @ j.T


@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_is_that_of_the_linearised_network(name):
    q, (x, y) = trained(name).replace(noise_variance=0.3), data(name, 7, 300)
    f, joint = dense(q, x)
    variance = joint.diagonal().view_as(f)
    p, kind = q.predict(x), likelihood(name)
    assert_close(p.f_mean, f)
    assert_close(p.f_variance, variance, rtol=1e-4)
    expected = Prediction(kind, (Component(Moments(f, variance), q.noise_variance),))
    assert_close(p.log_prob(y), expected.log_prob(y), rtol=1e-4, atol=1e-5)
    assert_close(q.predict(x, covariance="joint").covariance, joint, rtol=1e-4)
    blocks = q.predict(x, covariance=True).covariance
    width = f.shape[1]
    assert_close(blocks[2], joint[2 * width : 3 * width, 2 * width : 3 * width], rtol=1e-4)


def test_a_loader_gives_one_prediction_a_batch():
    q, (x, y) = trained("classification"), blobs(30, 300)
    whole = q.predict(x)
    parts = list(q.predict([(x[:12], y[:12]), (x[12:], y[12:])]))
    assert_close(torch.cat([p.probs for p in parts]), whole.probs)


def test_draws_are_networks():
    q, x = trained("regression").replace(noise_variance=0.1), waves(5, 300)[0]
    p = q.predict(x, draws=300, generator=seeded())
    again = q.predict(x, draws=300, generator=seeded())
    assert torch.equal(p.draws, again.draws)
    assert p.draws.shape == (300, 5, 2)
    assert_close(p.f_variance, p.draws.var(dim=0))
    with pytest.raises(SettingError, match="draws must be"):
        q.predict(x, draws=1)
    with pytest.raises(SettingError, match="covariance must be"):
        q.predict(x, covariance="whole")


def test_a_drawn_function_is_the_same_at_every_call():
    q, x = trained("regression"), waves(6, 300)[0]
    function = q.draw(3)
    assert_close(torch.cat([function(x[:2]), function(x[2:])]), function(x))
    assert not torch.equal(q.draw(4)(x), function(x))
    drawn = torch.stack([q.draw(seed)(x) for seed in range(200)])
    f, joint = dense(q, x)
    assert_close(drawn.mean(dim=0), f, rtol=0, atol=4 * float(joint.diagonal().max().sqrt()) / 200**0.5)
    assert_close(drawn.var(dim=0), joint.diagonal().view_as(f), rtol=0.35)


def test_part_of_the_outputs_is_a_function():
    q, x = trained("classification"), blobs(5, 300)[0]
    first = q.replace(likelihood="binary").predict(x, forward=lambda model, inputs: model(inputs)[:, :1])
    assert_close(first.f_variance, q.predict(x).f_variance[:, :1], rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_novelty_needs_a_reference_and_no_calibration(name):
    q, x = trained(name), data(name, 60, 300)[0]
    with pytest.raises(TypeError, match="reference"):
        q.novelty(x)
    known = q.with_inputs(x[:40])
    for each in (q, known):
        found = each.novelty(torch.cat([x, 30 * x]), reference=x[:10])
        assert found.shape == (120,)
        parts = [(x[:50], torch.zeros(50)), (30 * x, torch.zeros(60))]
        whole = each.novelty([(x, torch.zeros(60)), (30 * x, torch.zeros(60))], reference=[(x[:10], torch.zeros(10))])
        assert_close(whole, found, rtol=1e-4)
        assert len(each.novelty(parts, reference=x[:10])) == 110
        if name in ("classification", "regression"):
            assert ba.scores.auroc(found[:60], found[60:]) > 0.7


def test_a_reference_that_sets_no_scale_is_refused_or_told():
    q, x = trained("regression"), waves(60, 300)[0]
    with pytest.raises(SettingError, match="the inputs themselves"):
        q.novelty(x, reference=x)
    with pytest.raises(MatchError, match="1 of 10 inputs of the reference"):
        q.novelty(x, reference=torch.cat([x[:9], torch.full((1, 1), torch.nan)]))
    with pytest.raises(MatchError, match="its output must have the batch first"):
        q.novelty(x, reference=x[0])
    for few in (x[:3], x[:1].expand(20, 1)):
        with pytest.warns(BayesAdamWarning, match=f"{len(few.unique())} different inputs"):
            q.novelty(x, reference=few)


def test_outputs_that_are_no_numbers_are_told():
    q, x = trained("classification"), blobs(5, 300)[0]
    x[1] = float("nan")
    with pytest.warns(BayesAdamWarning, match="number 1"):
        q.predict(x)


def test_batch_norms_that_were_trained_on_are_told():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer, (x, y) = torch.optim.Adam(model.parameters()), blobs(40, 1)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    q = ba.Posterior.from_optimizer(model, optimizer, 40, likelihood="classification")
    model.train()(3 * x)
    for use in (lambda: q.predict(x), lambda: ba.calibrate(q, (x, y))):
        with pytest.warns(BayesAdamWarning, match="read the posterior again"):
            use()
