"""`BadamModel` beside a dense Gaussian process, and under botorch's own acquisition functions.

botorch has an environment of its own, `make botorch-test`; elsewhere these tests are skipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from cases import mlp
from floats import assert_close

pytest.importorskip("botorch", reason="needs botorch: make botorch-test")

from botorch.acquisition import (
    LogExpectedImprovement,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.multi_objective import qLogExpectedHypervolumeImprovement
from botorch.acquisition.objective import LinearMCObjective, ScalarizedPosteriorTransform
from botorch.models.model import ModelList
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.multi_objective.box_decompositions import NondominatedPartitioning
from botorch.utils.testing import BotorchTestCase, get_random_data

from bayesadam.botorch import BadamModel
from bayesadam.botorch.surrogate import kernel

QUICK = {"hidden": (8,), "n_ensemble": 2, "steps": 30, "ascents": 3, "activation": "tanh"}
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def data(n: int = 12, m: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0)).double()
    return x, torch.stack([torch.sin((4 + c) * x.sum(dim=1)) * 3 + 5 for c in range(m)], dim=1)


@pytest.fixture(params=[1, 2])
def model(request) -> BadamModel:
    return BadamModel.fit(*data(m=request.param), **QUICK)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_posteriors_have_the_shapes_that_botorch_expects(model, batch):
    x, m = torch.rand(*batch, 4, 2).double(), model.num_outputs
    found = model.posterior(x)
    assert found.mean.shape == found.variance.shape == (*batch, 4, m)
    assert found.rsample(torch.Size([5])).shape == (5, *batch, 4, m)
    assert found.mean.dtype == torch.float64
    assert model.posterior(x.float()).mean.dtype == torch.float32
    noisy = model.posterior(x, observation_noise=True)
    assert bool((noisy.variance > found.variance).all())
    assert model.posterior(x, output_indices=[m - 1]).mean.shape == (*batch, 4, 1)
    assert_close(model.subset_output([m - 1]).posterior(x).variance, found.variance[..., m - 1 :])


def test_moments_and_samples_have_gradients(model):
    x = torch.rand(2, 2, 2).double().requires_grad_()
    for outcome in (lambda z: model.posterior(z).mean, lambda z: model.posterior(z).covariance_matrix):
        assert torch.autograd.gradcheck(outcome, (x,))
    model.posterior(x).rsample(torch.Size([3])).sum().backward()
    assert bool((x.grad != 0).any())


def test_samples_have_the_moments_of_the_posterior(model):
    x = torch.rand(3, 2).double()
    found = model.posterior(x)
    torch.manual_seed(0)
    draws = found.rsample(torch.Size([20_000])).flatten(1)
    scale = found.variance.flatten().sqrt()
    assert_close(draws.mean(dim=0) / scale, found.mean.flatten() / scale, rtol=0, atol=0.05)
    whole = model.process.moments(x)[1]
    assert_close(draws.T.cov() / scale / scale[:, None], whole / scale / scale[:, None], rtol=0, atol=0.05)


def test_conditioning_is_that_of_the_process_and_does_not_touch_the_first_model(model):
    x, seen, m = torch.rand(3, 2).double(), torch.rand(2, 2).double(), model.num_outputs
    y, before = torch.randn(2, m).double(), model.posterior(x).mean
    found = model.condition_on_observations(seen, y)
    mean, covariance = model.process.moments(torch.cat([seen, x]))
    k = 2 * m
    inner = covariance[:k, :k] + torch.diag_embed(model.process.noise.repeat(2))
    gain = covariance[k:, :k] @ torch.linalg.inv(inner)
    assert_close(found.posterior(x).mean.flatten(), mean.flatten()[k:] + gain @ (y - mean[:2]).flatten(), rtol=1e-6)
    assert_close(found.process.moments(x)[1], covariance[k:, k:] - gain @ covariance[:k, k:], rtol=1e-6)
    assert torch.equal(model.posterior(x).mean, before)
    again = model.condition_on_observations(seen[:1], y[:1]).condition_on_observations(seen[1:], y[1:])
    assert_close(again.posterior(x).mean, found.posterior(x).mean, rtol=1e-6)


def test_fantasies_are_a_batch_of_conditioned_models(model):
    x = torch.rand(3, 2, 2).double()
    found = model.fantasize(x, SobolQMCNormalSampler(torch.Size([4])))
    assert found.batch_shape == (4, 3)
    assert found.posterior(torch.rand(5, 2).double()).mean.shape == (4, 3, 5, model.num_outputs)


def test_retraining_goes_on_from_where_it_was(model):
    x = torch.rand(3, 2).double()
    y = data(3, model.num_outputs)[1]
    found = model.condition_on_observations(x, y, retrain=True)
    assert found.train_inputs[0].shape == (15, 2)
    assert found.process.observed is None
    with pytest.raises(MatchError, match="retrain=True"):
        model.condition_on_observations(x[None], y[None], retrain=True)


@pytest.mark.parametrize("q", [1, 2])
def test_acquisition_functions_are_optimised(model, q):
    best = float(model.train_targets[:, 0].max())
    first = {"objective": LinearMCObjective(torch.eye(model.num_outputs, dtype=torch.float64)[0])}
    found = [
        qLogExpectedImprovement(model, best_f=best, **first),
        qLogNoisyExpectedImprovement(model, model.train_inputs[0], prune_baseline=True, **first),
    ]
    if q == 1:
        alone = ScalarizedPosteriorTransform(torch.eye(model.num_outputs, dtype=torch.float64)[0])
        found.append(LogExpectedImprovement(model, best_f=best, posterior_transform=alone))
        found.append(qKnowledgeGradient(model, num_fantasies=2, posterior_transform=alone))
    for acquisition in found:
        how = {"q": q, "num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 3}}
        points, _ = optimize_acqf(acquisition, BOUNDS, **how)
        assert points.shape == (q, 2)


def test_several_objectives_are_outputs_or_a_list_of_models():
    x, y = data(m=2)
    apart = ModelList(*(BadamModel.fit(x, y[:, c : c + 1], **QUICK) for c in range(2)))
    point = y.min(dim=0).values
    for model in (BadamModel.fit(x, y, **QUICK), apart):
        assert model.posterior(x).mean.shape == (12, 2)
        boxes = NondominatedPartitioning(point, y)
        acquisition = qLogExpectedHypervolumeImprovement(model, point, boxes)
        assert acquisition(torch.rand(3, 1, 2).double()).shape == (3,)


def test_transforms_are_those_of_botorch():
    x, y = data()
    model = BadamModel.fit(
        x, y, outcome_transform=Standardize(m=1), input_transform=Normalize(d=2), **{**QUICK, "steps": 300}
    )
    found = model.posterior(x)
    assert float((found.mean - y).abs().mean()) < float((y - y.mean()).abs().mean())
    plain = BadamModel.fit(x, y, **{**QUICK, "steps": 300})
    assert_close(found.mean, plain.posterior(x).mean, rtol=0.2)
    seen = torch.rand(2, 2).double()
    moved = model.condition_on_observations(seen, torch.full((2, 1), 100.0).double())
    assert bool((moved.posterior(seen).mean > model.posterior(seen).mean).all())


def test_any_posterior_of_a_regression_is_a_model():
    torch.manual_seed(0)
    network = mlp(2, 6, 2)
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        network(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()
    q = ba.Posterior.from_optimizer(network, optimizer, 20, likelihood="regression")
    with pytest.raises(SettingError, match="known noise"):
        BadamModel(q)
    q = q.replace(noise_variance=0.1)
    x, model = torch.rand(5, 2), BadamModel(q)
    expected = q.predict(x, joint=True)
    found = model.posterior(x)
    assert_close(found.mean, expected.mean, rtol=1e-5)
    assert_close(model.process.moments(x)[1], expected.joint_covariance, rtol=1e-4)
    assert model.posterior(torch.rand(4, 3, 2)).mean.shape == (4, 3, 2)


def test_the_kernel_without_a_jacobian_is_that_with_one():
    x, y = data(m=2)
    networks = BadamModel.fit(x, y, **QUICK).process.networks
    at = torch.rand(3, 2).double()
    layers = networks.layers(at)
    for number in range(2):
        params = {name: tensor[number] for name, tensor in networks.params.items()}
        model = networks.network.build(params).double()
        scaled = at * networks.relevance[number].exp()
        own = dict(model.named_parameters())
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(value, list(own.values()), retain_graph=True)])
            for value in model(scaled).flatten()
        ]
        j = torch.nn.functional.normalize(torch.stack(rows), dim=1)
        assert_close(kernel(layers, layers)[number], j @ j.T, rtol=1e-6)


class TestAsBotorchTestsModels(BotorchTestCase):
    """What botorch's own tests of models look at, with its data and in its types."""

    def test_posterior_and_conditioning(self):
        for dtype, m in ((torch.float, 1), (torch.double, 2)):
            how = {"device": self.device, "dtype": dtype}
            x, y = get_random_data(batch_shape=torch.Size(), m=m, d=2, n=10, **how)
            model = BadamModel.fit(x, y, **QUICK)
            assert model.num_outputs == m
            assert model.batch_shape == torch.Size()
            at = torch.rand(2, 3, 2, **how)
            found = model.posterior(at)
            assert found.mean.shape == torch.Size([2, 3, m])
            assert found.variance.shape == torch.Size([2, 3, m])
            assert found.mean.dtype == dtype
            conditioned = model.condition_on_observations(torch.rand(2, 4, 2, **how), torch.rand(2, 4, m, **how))
            assert conditioned.posterior(at).mean.shape == torch.Size([2, 3, m])
            assert bool((conditioned.posterior(at).variance <= found.variance + 0.0001).all())
