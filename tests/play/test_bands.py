"""Bands and learners against references: numpy's linear algebra, autograd, a full Jacobian, `Posterior.predict`."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev

from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.methods.variational import gaussian_kl
from bayesadam.play.ask import Ask
from bayesadam.play.bands import (
    _SIGNALS,
    LENGTHSCALES,
    Kernel,
    badam_posterior,
    gaussian_draws,
    gp_bands,
    linearised_bands,
    reach_of,
)
from bayesadam.play.gradient import error_gradient
from bayesadam.play.learners import BadamLearner, BayesByBackprop, DropoutLearner, GaussianProcess, VadamLearner
from bayesadam.posterior import Posterior

GRID = torch.linspace(-3, 3, 41)
POINTS = tuple((round(-2 + 0.2 * i, 3), round(math.sin(-2 + 0.2 * i), 3)) for i in range(20))
ASK = Ask("a", POINTS, 20.0, 5.0, 0.1, 0.1, 8)


def kernel(a, b, k):
    return k.signal**2 * np.exp(-0.5 * (a[:, None] - b[None, :]) ** 2 / k.lengthscale**2)


# --- the Gaussian process -------------------------------------------------------------------------------------------


def test_the_process_is_numpys():
    x, y = np.array(POINTS).T
    found = gp_bands(torch.tensor(x), torch.tensor(y), GRID, 0.2, k := Kernel(0.7, 1.3, 0.0))
    gram = kernel(x, x, k) + 0.04 * np.eye(20)
    cross = kernel(GRID.numpy().astype(float), x, k)
    np.testing.assert_allclose(found.mean, cross @ np.linalg.solve(gram, y), atol=1e-5)
    variance = k.signal**2 - np.einsum("gi,ig->g", cross, np.linalg.solve(gram, cross.T))
    np.testing.assert_allclose(found.std, np.sqrt(variance), atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 20])
def test_the_kernel_is_the_one_of_greatest_evidence(n):
    x, y = np.array(POINTS[:n]).T

    def evidence(k):
        gram = kernel(x, x, k) + 0.01 * np.eye(n)
        _, logdet = np.linalg.slogdet(gram)
        return -0.5 * (y @ np.linalg.solve(gram, y) + logdet + n * math.log(2 * math.pi))

    process = GaussianProcess()
    process.turn_to(replace(ASK, points=POINTS[:n], noise=0.1))
    for _ in LENGTHSCALES:
        process.step()
    assert process.left == 0
    found = process.kernel
    everywhere = [evidence(Kernel(a, float(s), 0.0)) for a in LENGTHSCALES for s in _SIGNALS]
    assert found.evidence == pytest.approx(max(everywhere), abs=1e-3)
    assert evidence(found) == pytest.approx(found.evidence, abs=1e-3)


def test_points_on_top_of_each_other_do_not_break_the_process():
    process = GaussianProcess()
    process.turn_to(replace(ASK, points=((0.0, 1.0),) * 50 + ((0.0, -1.0),) * 50, noise=0.02))
    for _ in LENGTHSCALES:
        process.step()
        assert process.bands(GRID).finite


# --- the gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(7,), (5, 6)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_autograds(units, hidden, masked):
    network = Network(2, hidden, 3, units)
    flat = flatten(initial(network, [3])).requires_grad_()
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 2, generator=source), torch.randn(9, 3, generator=source)
    masks = [2.0 * (torch.rand(9, width, generator=source) > 0.5) for width in hidden] if masked else None
    stacked = None if masks is None else [mask[None] for mask in masks]
    (forward(network, unflatten(network, flat), x, masks=stacked) - y).square().mean().backward()
    held = None if masks is None else [mask.numpy() for mask in masks]
    found = error_gradient(network, flat.detach().numpy()[0], x.numpy(), y.numpy(), held)
    np.testing.assert_allclose(found, flat.grad[0], atol=1e-6)


def test_the_gradient_of_bayes_by_backprop_is_autograds():
    learner = BayesByBackprop()
    learner.turn_to(ASK)
    learner.step()
    learner.step()
    mean, rho = learner._mean.detach().clone().requires_grad_(), learner._rho.detach().clone().requires_grad_()
    learner._streams.restore(state := learner._streams.state())
    noise = learner._streams.normal(mean.shape[1])
    learner._streams.restore(state)
    std = torch.nn.functional.softplus(rho)
    f = forward(learner.network, unflatten(learner.network, mean + std * noise), learner.x)
    loss = 0.5 * (f - learner.y).square().mean() / ASK.noise**2
    (loss + gaussian_kl(mean, std, ASK.prior_precision).sum() / ASK.n_data).backward()
    learner.descend(1e-3)
    torch.testing.assert_close(learner._mean.grad, mean.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner._rho.grad, rho.grad, rtol=1e-4, atol=1e-4)


# --- Badam ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    learner = BadamLearner()
    learner.turn_to(ASK)
    for _ in range(150):
        learner.step()
    return learner


def jacobian(model, x):
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    parts = jacrev(lambda p: functional_call(model, p, (x.double(),)).squeeze(1))(params)
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1)


def test_badams_bands_are_those_of_the_full_jacobian(trained):
    posterior = trained.posterior()
    c = torch.cat([v.double().flatten().sqrt() for v in posterior.structure.second_moment.values()])
    reach = jacobian(posterior.model, trained.x).square().sum(dim=1).mean()
    weight = ASK.n_data * reach / (ASK.noise**2 * c.sum())
    expected = (
        (jacobian(posterior.model, GRID[:, None]).square() / (weight * c + ASK.prior_precision)).sum(dim=1).sqrt()
    )
    found = trained.bands(GRID)
    torch.testing.assert_close(found.std.double(), expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(found.mean, posterior.model(GRID[:, None]).squeeze(1))


def test_badams_bands_are_the_posteriors_own(trained):
    plain = trained.posterior().predict(GRID[:, None], likelihood="regression")
    found = trained.bands(GRID)
    torch.testing.assert_close(found.std, plain.variance.sqrt().squeeze(1))
    assert plain.noise_variance == pytest.approx(ASK.noise**2)


def test_the_total_curvature_is_the_gauss_newton_matrixs(trained):
    posterior = trained.posterior().replace(prior_precision=0.0)
    total = sum(float((1 / v).sum()) for v in posterior.variance.values())
    expected = float(jacobian(posterior.model, trained.x).square().sum()) / ASK.noise**2
    assert total == pytest.approx(expected * ASK.n_data / len(POINTS), rel=1e-4)


def test_the_sliders_of_the_posterior_train_nothing_and_move_the_band_the_right_way(trained):
    left, taken, weights = trained.left, trained.taken, trained._flat.detach().clone()
    base = trained.bands(GRID)
    for change in ({"n_data": 200.0}, {"prior_precision": 50.0}, {"noise": 0.05}):
        trained.turn_to(replace(ASK, **change))
        assert (trained.left, trained.taken) == (left, taken)
        assert bool((trained.bands(GRID).std < base.std).all())
        torch.testing.assert_close(trained.bands(GRID).mean, base.mean)
    trained.turn_to(ASK)
    assert torch.equal(trained._flat.detach(), weights)
    torch.testing.assert_close(trained.bands(GRID).std, base.std)


def test_a_posterior_given_from_outside_is_not_changed(trained):
    read = Posterior.from_optimizer(*_module_and_adam(), n_data=7)
    found = badam_posterior(read, reach_of(read, trained.x), n_data=3.0, prior_precision=2.0, noise=0.3)
    assert (read.n_data, found.n_data) == (7, 3.0)
    assert linearised_bands(found, GRID).finite


def _module_and_adam():
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 1)).square().mean().backward()
    adam.step()
    return model, adam


# --- learners -------------------------------------------------------------------------------------------------------

NETWORKS = [BadamLearner, DropoutLearner, BayesByBackprop, VadamLearner]
LISTENS_TO = {
    BadamLearner: {"points"},
    DropoutLearner: {"points", "dropout"},
    BayesByBackprop: {"points", "n_data", "prior_precision", "noise"},
    VadamLearner: {"points", "n_data", "prior_precision", "noise"},
}
CHANGES = {
    "points": (*POINTS, (2.5, 0.5)),
    "dropout": 0.3,
    "n_data": 100.0,
    "prior_precision": 1.0,
    "noise": 0.2,
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_learner_goes_on_with_what_it_knows_when_something_it_depends_on_has_changed(kind, name):
    learner = kind()
    learner.turn_to(ASK)
    learner.left = 1
    learner.step()
    before = _weights(learner).clone()
    learner.turn_to(replace(ASK, **{name: CHANGES[name]}))
    assert torch.equal(_weights(learner), before)
    assert bool(learner.left) == (name in LISTENS_TO[kind])


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("change", [{"width": 9}, {"units": "relu"}, {"afresh": True}, {"points": ((1.0, 1.0),)}])
def test_another_shape_or_other_data_start_afresh_and_repeatably(kind, change):
    learner, other = kind(), kind()
    learner.turn_to(ASK)
    learner.step()
    ask = replace(ASK, **change)
    for each in (learner, other):
        each.turn_to(ask)
        assert (each.left, each.taken) == (each.budget, 0)
        for _ in range(3):
            each.step()
    assert torch.equal(_weights(learner), _weights(other))


@pytest.mark.parametrize("kind", NETWORKS)
def test_training_fits_and_ends(kind):
    learner = kind()
    learner.budget = 500
    ask = replace(ASK, n_data=2000.0, width=20, dropout=0.01)
    learner.turn_to(ask)
    steps = 0
    while learner.left and steps < 5000:
        learner.step()
        steps += 1
    assert steps == learner.budget
    found = learner.bands(learner.x.squeeze(1))
    assert float((found.mean - learner.y.squeeze(1)).square().mean().sqrt()) < 0.25
    assert found.finite
    assert float(found.std.min()) > 0


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("points", [((0.0, 0.0),), ((1.0, 2.0), (1.0, -2.0)), ((-3.0, -2.0), (3.0, 2.0), (3.0, 2.0))])
def test_few_and_contradictory_points_give_finite_bands(kind, points):
    learner = kind()
    learner.turn_to(replace(ASK, points=points, noise=0.02, prior_precision=0.01, n_data=10_000.0))
    for _ in range(30):
        learner.step()
    assert learner.bands(GRID).finite


def _weights(learner):
    return (learner._mean if isinstance(learner, BayesByBackprop) else learner._flat).detach()


def test_draws_have_the_moments_of_their_gaussian():
    # A network without hidden layers is linear: f = w x + b ~ N(m x + c, s² x² + t²).
    network = Network(1, (), 1)
    draws = gaussian_draws(network, torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 0.2]]), GRID, draws=20_000)
    torch.testing.assert_close(draws.mean(dim=0), 2 * GRID - 1, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.std(dim=0), (0.25 * GRID**2 + 0.04).sqrt(), atol=0.02, rtol=0.02)
