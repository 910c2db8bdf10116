"""Covariances between inputs, and drawn functions, against a whole Jacobian; gradients against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import MemoryBudgetError, SettingError
from cases import mlp, trained
from floats import assert_close
from predict.cases_networks import NETWORKS, brute_force, jacobian, posterior_over, spread_inputs

# Eight recorded gradients are few.
pytestmark = pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")

by_name = {network.name: network for network in NETWORKS}
NAMES = ("conv2d-groups", "layer-norm-sequence", "batch-norm-2d", "embedding", "encoder-layer")
STRUCTURES = ("diagonal", "kronecker", "inputs")


def posterior_of(structure: str = "diagonal", seed: int = 0, **options: Any) -> ba.Posterior:
    """Of a small regression in float64."""
    torch.manual_seed(seed)
    model = mlp(3, 6, 5, 2).double()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=8, every=1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 3).double()).square().mean().backward()
        optimizer.step()
    found = ba.Posterior.from_optimizer(
        model,
        optimizer,
        30,
        likelihood="regression",
        power=1,
        batch_size=8,
        structure="kronecker" if structure == "kronecker" else "diagonal",
        recorder=recorder if structure == "kronecker" else None,
        prior_precision=2.0,
        **options,
    )
    return found.with_inputs(torch.randn(30, 3).double()) if structure == "inputs" else found


def whole(posterior: ba.Posterior, x: Tensor) -> Tensor:
    """J Σ Jᵀ with the whole Jacobian and the whole Σ, the inverse of the Hessian of −log q."""
    names, mean = list(posterior.mean), posterior.mean
    sizes = [mean[name].numel() for name in names]

    def log_prob(flat: Tensor) -> Tensor:
        parts = zip(names, flat.split(sizes), strict=True)
        return posterior.log_prob({name: part.view(mean[name].shape) for name, part in parts})

    at = torch.cat([mean[name].flatten() for name in names])
    precision = -torch.autograd.functional.hessian(log_prob, at)
    j = jacobian(posterior.model, names, posterior.model(x)).flatten(0, 1)
    return j @ torch.linalg.solve(precision, j.T)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_joint_covariance_is_that_of_a_whole_jacobian(structure):
    posterior, x = posterior_of(structure), torch.randn(5, 3).double()
    found = posterior.predict(x, joint=True)
    assert_close(found.joint_covariance, whole(posterior, x), rtol=1e-6)
    alone = posterior.predict(x, covariance=True)
    for name in ("mean", "variance", "covariance"):
        assert_close(getattr(found, name), getattr(alone, name))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_so_for_every_kind_of_layer(name):
    model, inputs = by_name[name].make()
    posterior = posterior_over(model)
    found = posterior.predict(inputs, likelihood="regression", joint=True)
    j = jacobian(model, list(posterior.mean), spread_inputs(model, inputs)).flatten(0, 1)
    sigma = torch.cat([posterior.variance[name].flatten() for name in posterior.mean])
    assert_close(found.joint_covariance, (j * sigma) @ j.T, rtol=1e-6)
    assert_close(found.covariance, brute_force(posterior, lambda m: spread_inputs(m, inputs))[1], rtol=1e-6)


def test_parameters_are_taken_in_parts_where_memory_is_short():
    posterior, x = posterior_of(), torch.randn(4, 3).double()
    expected = posterior.predict(x, joint=True).joint_covariance
    assert_close(posterior.predict(x, joint=True, memory_budget=3 * 8 * 8 * 30).joint_covariance, expected)
    with pytest.raises(MemoryBudgetError, match="linearised-sampled"):
        posterior.predict(x, joint=True, memory_budget=100)


def test_a_mixture_adds_what_its_members_disagree_on():
    members, x = [posterior_of(seed=seed) for seed in (0, 1)], torch.randn(4, 3).double()
    found = ba.Mixture(members, [1, 3]).predict(x, joint=True)
    each = [member.predict(x, joint=True) for member in members]
    difference = (each[0].mean - each[1].mean).flatten()
    expected = 0.25 * each[0].joint_covariance + 0.75 * each[1].joint_covariance
    assert_close(found.joint_covariance, expected + 0.25 * 0.75 * difference[:, None] * difference)
    assert_close(found.joint_covariance.diagonal(), found.variance.flatten())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.slow
def test_gradients_with_respect_to_inputs_are_those_of_finite_differences(structure, calibrated):
    posterior, x = posterior_of(structure), torch.randn(3, 3).double().requires_grad_()
    if calibrated:
        posterior = ba.calibrate(posterior, (torch.randn(30, 3).double(), torch.randn(30, 2).double()))
        assert posterior.predict(x).components[0].growth is not None
    for outcome in ("mean", "variance", "covariance", "joint_covariance"):
        joint = outcome in ("covariance", "joint_covariance")
        assert torch.autograd.gradcheck(lambda z, o=outcome, j=joint: getattr(posterior.predict(z, joint=j), o), (x,))
    for kind in ("linearised", "sampled"):
        assert torch.autograd.gradcheck(posterior.draw(1, predictive=kind), (x,))


def test_inputs_have_no_graph_unless_they_require_gradients():
    posterior, x = posterior_of(), torch.randn(3, 3).double().requires_grad_()
    with torch.no_grad():
        assert not posterior.predict(x, joint=True).joint_covariance.requires_grad
    assert not posterior.predict(x.detach(), joint=True).joint_covariance.requires_grad
    posterior.model.zero_grad()
    posterior.predict(x, joint=True).joint_covariance.sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in posterior.model.parameters())


@pytest.mark.parametrize("kind", ["linearised", "sampled"])
def test_a_drawn_function_is_the_same_at_every_call(kind):
    posterior, x = posterior_of(), torch.randn(6, 3).double()
    function = posterior.draw(7, predictive=kind)
    assert_close(function(x[2:4]), function(x)[2:4])
    assert float((function(x) - posterior.draw(8, predictive=kind)(x)).detach().abs().max()) > 1e-3


def test_a_drawn_network_is_the_network_with_the_weights_drawn():
    posterior, x = posterior_of(), torch.randn(6, 3).double()
    found = posterior.draw(7, predictive="sampled")
    weights = posterior.sample(generator=torch.Generator().manual_seed(found.seed))
    assert_close(found(x), torch.func.functional_call(posterior.model, weights, (x,)).detach())


@pytest.mark.slow
def test_drawn_functions_have_the_moments_of_the_prediction():
    q, x = ba.Mixture([posterior_of(seed=seed) for seed in (0, 1)], [1, 2]), torch.randn(3, 3).double()
    draws = torch.stack([q.draw(seed)(x) for seed in range(3000)]).flatten(1)
    expected = q.predict(x, joint=True)
    scale = expected.variance.flatten().sqrt()
    assert_close(draws.mean(dim=0) / scale, expected.mean.flatten() / scale, rtol=0, atol=0.1)
    correlations = expected.joint_covariance / scale / scale[:, None]
    assert_close(draws.T.cov() / scale / scale[:, None], correlations, rtol=0, atol=0.12)


@pytest.mark.slow
def test_draws_estimate_the_joint_covariance_too():
    posterior, x = posterior_of().replace(scale=1e4, prior_precision=1e4), torch.randn(3, 3).double()
    expected = posterior.predict(x, joint=True).joint_covariance
    for kind in ("linearised-sampled", "sampled"):
        source = torch.Generator().manual_seed(0)
        found = posterior.predict(x, predictive=kind, joint=True, n_samples=2000, generator=source)
        assert_close(found.joint_covariance, expected, rtol=0, atol=0.15 * float(expected.max()))
        assert_close(found.covariance[1], found.joint_covariance[2:4, 2:4])


def test_one_draw_is_a_draw():
    posterior, x = posterior_of(), torch.randn(3, 3).double()
    found = posterior.predict(x, predictive="linearised-sampled", n_samples=1)
    assert found.draws.shape == (1, 3, 2)
    assert posterior.predict(x, predictive="sampled", n_samples=1).variance.isnan().all()


def test_classes_that_a_temperature_calibrated_have_a_joint_covariance():
    model, optimizer = trained(3, 5, 4)
    q = ba.Posterior.from_optimizer(model, optimizer, 30, likelihood="classification")
    q = ba.calibrate(q, (torch.randn(30, 3), torch.randint(4, (30,))))
    assert q.predict(torch.randn(2, 3), joint=True).joint_covariance.shape == (8, 8)
    assert q.draw(0)(torch.randn(2, 3)).shape == (2, 4)


@pytest.mark.parametrize("options", [{"outputs": [0]}, {"predictive": "forward"}, {"positions": "last"}])
def test_what_has_no_joint_covariance_is_refused(options):
    with pytest.raises(SettingError, match="joint=True"):
        posterior_of().predict(torch.zeros(2, 3).double(), joint=True, **options)


def test_a_drawn_function_of_another_kind_is_refused():
    with pytest.raises(SettingError, match="drawn function"):
        posterior_of().draw(predictive="forward")


def test_a_convolution_has_gradients_with_respect_to_its_images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)).double()
    posterior, x = posterior_over(model), torch.randn(2, 1, 4, 4).double().requires_grad_()
    found = lambda z: posterior.predict(z, likelihood="regression", joint=True).joint_covariance  # noqa: E731
    assert torch.autograd.gradcheck(found, (x,))
