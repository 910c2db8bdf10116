"""Bands and learners against references: numpy, a full Jacobian, `Posterior.predict`, the rule itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev

from bayesadam.engine.gradients import loss_and_slope
from bayesadam.engine.network import flatten, forward, initial, member, unflatten
from bayesadam.engine.process import gaussian_process
from bayesadam.engine.rules import IVON, RULES
from bayesadam.engine.stack import Stack, train
from bayesadam.play.learners import LENGTHSCALES, PANELS, SIGNALS, Panel, Request
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior
from floats import approx, assert_close

GRID = torch.linspace(-3, 3, 41)
POINTS = tuple((round(-2 + 0.2 * i, 3), round(math.sin(-2 + 0.2 * i), 3)) for i in range(20))
REQUEST = Request("a", POINTS, 20.0, 5.0, 0.1, 0.1, 8)


def learner_of(method, **changes):
    panel = replace(KINDS[method], **changes)
    return panel.learner(panel)


# A rule that the page does not show needs no more than an entry.
KINDS = {panel.method: panel for panel in (*PANELS, Panel("ivon", "IVON", rule=IVON))}


def kernel(a, b, lengthscale, signal):
    return signal**2 * np.exp(-0.5 * (a[:, None] - b[None, :]) ** 2 / lengthscale**2)


# --- the Gaussian process -------------------------------------------------------------------------------------------


def test_the_process_is_numpys():
    x, y = np.array(POINTS).T
    theta = torch.tensor([math.log(0.7), 2 * math.log(1.3), 2 * math.log(0.2), 0.0], dtype=torch.float64)
    _, mean, found = gaussian_process(theta, torch.tensor(x)[:, None], torch.tensor(y), GRID[:, None])
    gram = kernel(x, x, 0.7, 1.3) + 0.04 * np.eye(20)
    cross = kernel(GRID.numpy().astype(float), x, 0.7, 1.3)
    assert_close(mean, cross @ np.linalg.solve(gram, y), atol=1e-4)
    variance = 1.3**2 - np.einsum("gi,ig->g", cross, np.linalg.solve(gram, cross.T))
    assert_close(found.sqrt(), np.sqrt(variance), atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 20])
def test_the_kernel_is_the_one_of_greatest_evidence(n):
    x, y = np.array(POINTS[:n]).T

    def evidence(*of):
        gram = kernel(x, x, *of) + 0.01 * np.eye(n)
        _, logdet = np.linalg.slogdet(gram)
        return -0.5 * (y @ np.linalg.solve(gram, y) + logdet + n * math.log(2 * math.pi))

    process = learner_of("gp")
    process.accept(replace(REQUEST, points=POINTS[:n], noise=0.1))
    for _ in LENGTHSCALES:
        process.step()
    assert process.left == 0
    found, *best = max(process._tried)
    everywhere = [evidence(a, s) for a in LENGTHSCALES for s in SIGNALS]
    assert found == approx(max(everywhere), abs=1e-3)
    assert evidence(*best) == approx(found, abs=1e-3)


def test_points_on_top_of_each_other_do_not_break_the_process():
    process = learner_of("gp")
    process.accept(replace(REQUEST, points=((0.0, 1.0),) * 50 + ((0.0, -1.0),) * 50, noise=0.02))
    for _ in LENGTHSCALES:
        process.step()
        assert process.bands(GRID).finite


# --- Badam ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    learner = learner_of("badam")
    learner.accept(REQUEST)
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
    weight = REQUEST.n_data * reach / (REQUEST.noise**2 * c.sum())
    expected = (
        (jacobian(posterior.model, GRID[:, None]).square() / (weight * c + REQUEST.prior_precision)).sum(dim=1).sqrt()
    )
    found = trained.bands(GRID)
    assert_close(found.std.double(), expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert_close(found.mean, posterior.model(GRID[:, None]).squeeze(1))


def test_badams_bands_are_the_posteriors_own(trained):
    plain = trained.posterior().predict(GRID[:, None], likelihood="regression")
    found = trained.bands(GRID)
    assert_close(found.std, plain.variance.sqrt().squeeze(1))
    assert plain.noise_variance == approx(REQUEST.noise**2)


def test_the_total_curvature_is_the_gauss_newton_matrixs(trained):
    posterior = trained.posterior().replace(prior_precision=0.0)
    total = sum(float((1 / v).sum()) for v in posterior.variance.values())
    expected = float(jacobian(posterior.model, trained.x).square().sum()) / REQUEST.noise**2
    assert total == approx(expected * REQUEST.n_data / len(POINTS), rel=1e-4)


def test_the_sliders_of_the_posterior_train_nothing_and_move_the_band_the_right_way(trained):
    left, taken, weights = trained.left, trained.taken, trained.stack.weights.clone()
    base = trained.bands(GRID)
    for change in ({"n_data": 200.0}, {"prior_precision": 50.0}, {"noise": 0.05}):
        trained.accept(replace(REQUEST, **change))
        assert (trained.left, trained.taken) == (left, taken)
        assert bool((trained.bands(GRID).std < base.std).all())
        assert_close(trained.bands(GRID).mean, base.mean)
    trained.accept(REQUEST)
    assert torch.equal(trained.stack.weights, weights)
    assert_close(trained.bands(GRID).std, base.std)


# --- the ensemble ---------------------------------------------------------------------------------------------------


def test_the_ensembles_band_is_that_of_the_mixture_of_its_networks():
    learner = learner_of("ensemble")
    learner.accept(REQUEST)
    for _ in range(50):
        learner.step()
    stack = learner.stack
    members = []
    for index in range(5):
        params = member(stack.params, index)
        model = stack.network.build(params)
        nearly_sure = {name: torch.full_like(theta, 1e-12) for name, theta in params.items()}
        members.append(Posterior.from_moments(model, params, nearly_sure, 1.0).replace(noise_variance=1.0))
    expected = Mixture(members).predict(GRID[:, None], likelihood="regression")
    found = learner.bands(GRID)
    assert_close(found.mean, expected.mean.squeeze(1), rtol=1e-4, atol=1e-5)
    assert_close(found.std, expected.variance.sqrt().squeeze(1), rtol=1e-3, atol=1e-4)


def test_a_network_of_the_ensemble_learns_as_it_would_alone():
    learner, alone = learner_of("ensemble"), learner_of("ensemble", networks=1)
    for each in (learner, alone):
        each.accept(REQUEST)
        for _ in range(40):
            each.step()
    assert_close(learner.stack.weights[:1], alone.stack.weights, rtol=1e-4, atol=1e-5)


# --- learners -------------------------------------------------------------------------------------------------------

NETWORKS = ["badam", "mc-dropout", "bbb", "vadam", "ensemble", "ivon"]
LISTENS_TO = {
    **{kind: {"points"} for kind in ("badam", "ensemble")},
    "mc-dropout": {"points", "dropout"},
    **{kind: {"points", "n_data", "prior_precision", "noise"} for kind in ("bbb", "vadam", "ivon")},
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
def test_a_learner_resumes_with_what_it_knows_when_something_it_depends_on_has_changed(kind, name):
    learner = learner_of(kind)
    learner.accept(REQUEST)
    learner.left = 1
    learner.step()
    before = learner.stack.weights.clone()
    learner.accept(replace(REQUEST, **{name: CHANGES[name]}))
    assert torch.equal(learner.stack.weights, before)
    assert bool(learner.left) == (name in LISTENS_TO[kind])


@pytest.mark.parametrize("kind", ["badam", "bbb", "ensemble"])
@pytest.mark.parametrize("change", [{"width": 9}, {"units": "relu"}, {"restart": True}, {"points": ((1.0, 1.0),)}])
def test_another_shape_or_other_data_restart_repeatably(kind, change):
    learner, other = learner_of(kind), learner_of(kind)
    learner.accept(REQUEST)
    learner.step()
    request = replace(REQUEST, **change)
    for each in (learner, other):
        each.accept(request)
        assert (each.left, each.taken) == (each.panel.budget, 0)
        for _ in range(3):
            each.step()
    assert torch.equal(learner.stack.weights, other.stack.weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_training_fits_and_ends(kind):
    learner = learner_of(kind, budget=500)
    request = replace(REQUEST, n_data=2000.0, width=20, dropout=0.01)
    learner.accept(request)
    steps = 0
    while learner.left and steps < 5000:
        learner.step()
        steps += 1
    assert steps == learner.panel.budget
    found = learner.bands(learner.x.squeeze(1))
    assert float((found.mean - learner.y.squeeze(1)).square().mean().sqrt()) < 0.25
    assert found.finite
    assert float(found.std.min()) > 0


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("points", [((0.0, 0.0),), ((1.0, 2.0), (1.0, -2.0)), ((-3.0, -2.0), (3.0, 2.0), (3.0, 2.0))])
def test_few_and_contradictory_points_give_finite_bands(kind, points):
    learner = learner_of(kind)
    learner.accept(replace(REQUEST, points=points, noise=0.02, prior_precision=0.01, n_data=10_000.0))
    for _ in range(30):
        learner.step()
    assert learner.bands(GRID).finite


@pytest.mark.parametrize("kind", ["mc-dropout", "bbb", "vadam", "ivon"])
def test_a_learner_is_its_rule_at_the_sliders_values(kind):
    learner = learner_of(kind)
    learner.accept(REQUEST)
    for _ in range(40):
        learner.step()
    network = learner.stack.network
    assert network.dropout == (REQUEST.dropout if kind == "mc-dropout" else 0)
    x, y = (torch.tensor(POINTS)[:, i : i + 1] for i in (0, 1))
    noise = REQUEST.noise if RULES[kind].needs_noise else math.sqrt(0.5)

    def batch(rows):
        loss = lambda f: (f - y[rows]).square().mean(dim=(1, 2)) / (2 * noise**2)  # noqa: E731
        return x[rows], lambda f: loss_and_slope(loss, f)[1]

    rule = RULES[kind].with_settings(weight_decay=1e-4, prior_precision=REQUEST.prior_precision)
    stack = Stack(network, rule, [0], batch, n_data=REQUEST.n_data)
    rate = lambda done: 1e-2 * 0.1 ** (done / learner.panel.budget)  # noqa: E731
    train(stack, [torch.arange(20).expand(40, 1, 20)], rate)
    assert_close(learner.stack.weights, stack.weights, rtol=2e-2, atol=2e-3)
    if (found := stack.gaussian()) is None:
        return
    draws = found.mean + found.variance.sqrt() * torch.randn(4000, 1, found.mean.shape[1])
    f = forward(network, unflatten(network, draws.flatten(0, 1)), GRID[:, None]).squeeze(2)
    bands = learner.bands(GRID)
    assert float(((bands.mean - f.mean(dim=0)) / f.std(dim=0)).abs().max()) < 0.7
    assert float((bands.std / f.std(dim=0)).log().abs().max()) < 0.5


def test_networks_start_as_the_engines():
    learner = learner_of("badam")
    learner.accept(REQUEST)
    assert torch.equal(learner.stack.weights, flatten(initial(learner.stack.network, [0])))
