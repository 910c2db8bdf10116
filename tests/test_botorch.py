"""`BadamModel` beside a dense Gaussian process, and under botorch's own acquisition functions.

botorch has an environment of its own, `make botorch-test`; elsewhere these tests are skipped.
"""

import pytest
import torch
from torch import Tensor

import bayesadam as ba
from bayesadam.errors import SettingError
from cases import fit, mlp
from floats import assert_close

pytest.importorskip("botorch", reason="needs botorch: make botorch-test")

from botorch.acquisition import qKnowledgeGradient, qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective import qLogExpectedHypervolumeImprovement
from botorch.acquisition.objective import LinearMCObjective, ScalarizedPosteriorTransform
from botorch.models.model import ModelList
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.multi_objective.box_decompositions import NondominatedPartitioning

from bayesadam.botorch import BadamModel

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def data(m: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.rand(12, 2, generator=torch.Generator().manual_seed(0)).double()
    return x, torch.stack([torch.sin((4 + c) * x.sum(dim=1)) for c in range(m)], dim=1)


def fitted(x: Tensor, y: Tensor, seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    network = mlp(2, 6, y.shape[1]).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    fit(network, optimizer, 100 * [(x, y)])
    q = ba.Posterior.from_optimizer(network, optimizer, len(x), likelihood="regression", prior_precision=1.0)
    return q.replace(noise_variance=0.1)


@pytest.fixture(params=[1, 2])
def model(request) -> BadamModel:
    x, y = data(request.param)
    return BadamModel(ba.Mixture([fitted(x, y, seed) for seed in range(2)]))


def test_the_moments_are_those_of_the_linearised_network():
    q = fitted(*data(2))
    x, model = torch.rand(5, 2).double(), BadamModel(q)
    jacobian = torch.func.jacrev(lambda params: torch.func.functional_call(q.model, params, (x,)))(dict(q.mean))
    rows = torch.cat([(jacobian[name] * q.stddev[name]).flatten(2) for name in q.mean], dim=2).flatten(0, 1)
    assert_close(model.posterior(x).mean, q.model(x).detach(), rtol=1e-5)
    assert_close(model.moments(x)[1], (rows @ rows.T).detach(), rtol=1e-5)
    assert model.posterior(torch.rand(4, 3, 2)).mean.shape == (4, 3, 2)
    with pytest.raises(SettingError, match="known noise"):
        BadamModel(q.replace(noise_variance=None))


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_posteriors_have_the_shapes_that_botorch_expects(model, batch):
    x, m = torch.rand(*batch, 4, 2).double(), model.num_outputs
    joint = model.posterior(x)
    assert joint.mean.shape == joint.variance.shape == (*batch, 4, m)
    assert joint.rsample(torch.Size([5])).shape == (5, *batch, 4, m)
    assert joint.mean.dtype == torch.float64
    assert model.posterior(x.float()).mean.dtype == torch.float32
    assert bool((model.posterior(x, observation_noise=True).variance > joint.variance).all())
    assert_close(model.posterior(x, output_indices=[m - 1]).variance, joint.variance[..., m - 1 :])


def test_moments_and_samples_have_gradients(model):
    x = torch.rand(2, 2, 2).double().requires_grad_()
    for outcome in (lambda z: model.posterior(z).mean, lambda z: model.posterior(z).covariance_matrix):
        assert torch.autograd.gradcheck(outcome, (x,))
    model.posterior(x).rsample(torch.Size([3])).sum().backward()
    assert bool((x.grad != 0).any())


def test_conditioning_is_exact_and_does_not_touch_the_first_model(model):
    x, seen, m = torch.rand(3, 2).double(), torch.rand(2, 2).double(), model.num_outputs
    y, before = torch.randn(2, m).double(), model.posterior(x).mean
    conditioned = model.condition_on_observations(seen, y)
    mean, covariance = model.moments(torch.cat([seen, x]))
    k = 2 * m
    inner = covariance[:k, :k] + torch.diag_embed(model.noise.repeat(2))
    gain = covariance[k:, :k] @ torch.linalg.inv(inner)
    expected = mean.flatten()[k:] + gain @ (y - mean[:2]).flatten()
    assert_close(conditioned.posterior(x).mean.flatten(), expected, rtol=1e-6)
    assert_close(conditioned.moments(x)[1], covariance[k:, k:] - gain @ covariance[:k, k:], rtol=1e-6)
    assert torch.equal(model.posterior(x).mean, before)
    again = model.condition_on_observations(seen[:1], y[:1]).condition_on_observations(seen[1:], y[1:])
    assert_close(again.posterior(x).mean, conditioned.posterior(x).mean, rtol=1e-6)


def test_fantasies_are_a_batch_of_conditioned_models(model):
    fantasies = model.fantasize(torch.rand(3, 2, 2).double(), SobolQMCNormalSampler(torch.Size([4])))
    assert fantasies.batch_shape == (4, 3)
    assert fantasies.posterior(torch.rand(5, 2).double()).mean.shape == (4, 3, 5, model.num_outputs)


@pytest.mark.parametrize("q", [1, 2])
def test_acquisition_functions_are_optimised(model, q):
    x, y = data(model.num_outputs)
    one = torch.eye(model.num_outputs, dtype=torch.float64)[0]
    acquisitions = [
        qLogExpectedImprovement(model, best_f=float(y[:, 0].max()), objective=LinearMCObjective(one)),
        qLogNoisyExpectedImprovement(model, x, prune_baseline=True, objective=LinearMCObjective(one)),
    ]
    if q == 1:
        how = {"num_fantasies": 2, "posterior_transform": ScalarizedPosteriorTransform(one)}
        acquisitions.append(qKnowledgeGradient(model, **how))
    for acquisition in acquisitions:
        how = {"q": q, "num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 3}}
        points, _ = optimize_acqf(acquisition, BOUNDS, **how)
        assert points.shape == (q, 2)


def test_several_objectives_are_outputs_or_a_list_of_models():
    x, y = data(2)
    apart = ModelList(*(BadamModel(fitted(x, y[:, c : c + 1])) for c in range(2)))
    point = y.min(dim=0).values
    for model in (BadamModel(fitted(x, y)), apart):
        assert model.posterior(x).mean.shape == (12, 2)
        acquisition = qLogExpectedHypervolumeImprovement(model, point, NondominatedPartitioning(point, y))
        assert acquisition(torch.rand(3, 1, 2).double()).shape == (3,)


def test_transforms_are_those_that_the_network_was_trained_under():
    x, y = data()
    inputs, outcomes = Normalize(d=2), Standardize(m=1)
    unit, standard = inputs.train()(10 * x), outcomes.train()(5 + 3 * y)[0]
    q = fitted(unit, standard)
    model = BadamModel(q, outcome_transform=outcomes.eval(), input_transform=inputs.eval())
    scale = (5 + 3 * y).std()
    assert_close(model.posterior(10 * x).mean, (5 + 3 * y).mean() + scale * q.model(unit).detach(), rtol=1e-5)
    seen = torch.rand(2, 2).double()
    moved = model.condition_on_observations(seen, torch.full((2, 1), 100.0).double())
    assert bool((moved.posterior(seen).mean > model.posterior(seen).mean).all())
