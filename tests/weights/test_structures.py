"""What every structure must do, against one dense Gaussian over all weights in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.readers.rotated import eigenbasis
from cases import rewrite, seeded, train, trained
from floats import approx, assert_close
from weights.cases_structures import DELTA, STRUCTURES, N, Net, curvature, dense, flat, names_of, posterior_of

CASES = [(structure, 0.5, 8, "map") for structure in STRUCTURES]
CASES += [(structure, 1.0, 8, "likelihood") for structure in ("diagonal", "inputs")]
CASES += [(structure, 0.8, 8, "likelihood") for structure in ("diagonal", "kronecker")]
CASES += [("diagonal", 0.25, None, form) for form in ("map", "likelihood")]


@pytest.mark.parametrize(("structure", "power", "batch_size", "form"), CASES)
def test_moments_and_densities_are_the_dense_gaussians(structure, power, batch_size, form):
    q = posterior_of(structure).replace(power=power, form=form, scale=1.5, batch_size=batch_size)
    exact = dense(q)
    close = {"rtol": 1e-9, "atol": 1e-12}
    assert_close(flat(q, q.mean), exact.mean, **close)
    assert_close(flat(q, q.variance), exact.variance, **close)
    assert_close(flat(q, q.snr()), exact.mean.abs() / exact.stddev, **close)
    values = {name: torch.stack([theta + 0.3, theta]) for name, theta in q.mode.items()}
    assert_close(q.log_prob(values), exact.log_prob(flat(q, values)), rtol=1e-9)
    assert_close(q.log_prob({name: value[1] for name, value in values.items()}), q.log_prob(values)[1])
    shares = torch.linalg.eigvalsh(exact.covariance_matrix) * DELTA
    assert q.effective_dimension == approx(float((1 - shares).sum()), rel=1e-8)
    if structure != "inputs":
        v = {name: q.curvature.diagonal(name) for name in q.mode}
        assert_close(flat(q, v), curvature(q, 1.0).diagonal(), **close)


@pytest.mark.parametrize(("structure", "form"), [(s, "map") for s in STRUCTURES] + [("kronecker", "likelihood")])
def test_draws_have_the_dense_covariance(structure, form):
    q, n = posterior_of(structure).replace(form=form), 20_000
    draws, exact = q.sample(n, generator=seeded(1)), dense(q)
    standard = (flat(q, draws) - exact.mean) / exact.stddev
    correlation = exact.covariance_matrix / torch.outer(exact.stddev, exact.stddev)
    assert float(standard.mean(dim=0).abs().max()) < 5 / math.sqrt(n)
    assert float((torch.cov(standard.T) - correlation).abs().max()) < 7 / math.sqrt(n)
    one = q.sample(generator=seeded(1))
    assert {name: draw.shape for name, draw in one.items()} == q.shapes


@pytest.mark.parametrize("structure", STRUCTURES)
def test_saved_it_is_the_same_with_its_model_and_without(structure, tmp_path):
    q, path = posterior_of(structure).replace(form="likelihood", scale=0.25, power=0.8), tmp_path / "q.safetensors"
    q.save(path)
    opened = ba.GaussianWeights.open(path)
    opened.save(tmp_path / "again.safetensors")
    loaded = ba.Posterior.load(path, q.model)
    for other in (loaded, opened, ba.GaussianWeights.open(tmp_path / "again.safetensors"), q.to(dtype=torch.float64)):
        assert other.structure == q.structure
        assert vars(other.settings) == vars(q.settings)
        draws = q.sample(2, generator=seeded(1))
        # Of the input side λ and g are kept, not their products.
        tolerance = {"rtol": 1e-12 if structure == "inputs" else 1e-300}
        assert_close(other.sample(2, generator=seeded(1)), draws, **tolerance)
        assert_close(other.variance, q.variance, **tolerance)
        assert_close(other.log_prob(draws), q.log_prob(draws), rtol=1e-12)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "recorded"])
def test_a_sum_has_both_precisions_and_one_prior(structure):
    before, q = posterior_of(structure).replace(prior_precision=0.3), posterior_of(structure)
    total = before.replace(n_data=20, power=1.0) + q
    precision = torch.linalg.inv(dense(q).covariance_matrix) + 20 * 8 * curvature(q, 1.0)
    assert_close(flat(total, total.variance), torch.linalg.inv(precision).diagonal(), rtol=1e-8)
    assert_close(total.mean, q.mean)
    assert (total.n_data, total.settings.power, total.settings.batch_size) == (N + 20, 1.0, 1)
    assert isinstance(total, ba.Posterior)
    without = ba.GaussianWeights(q.mode, q.curvature, q.settings)
    assert type(before + without) is ba.GaussianWeights


def test_a_sum_of_different_bases_has_the_trace_of_both():
    """It is the diagonal of the sum in the bases of the summed factors."""
    kronecker, diagonal = posterior_of("kronecker"), posterior_of("diagonal")
    total = diagonal + kronecker
    assert set(total.curvature.bases) == set(kronecker.curvature.bases)
    traces = [
        sum(float(s.weight / (N + N) * (v**s.power).sum()) for v in q.curvature.second_moment.values())
        for q in (kronecker, diagonal)
        for s in (q.settings,)
    ]
    assert sum(float(v.sum()) for v in total.curvature.second_moment.values()) == approx(sum(traces), rel=1e-9)
    with pytest.raises(SettingError, match="add them first"):
        posterior_of("inputs") + diagonal


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "inputs"])
def test_parts_are_the_whole_parameter_by_parameter(structure):
    q = posterior_of(structure)
    parts = [q.part(name) for name in names_of(q)]
    whole = q.sample(generator=seeded(3))
    for part in parts:
        (name,) = part.mode
        assert torch.equal(part.sample(generator=seeded(3))[name], whole[name])
        assert_close(part.variance[name], q.variance[name])


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "diagonal"])
def test_rotated_coordinates_need_one_prior_precision(structure):
    q = posterior_of(structure)
    uneven = {name: torch.rand_like(theta) + 1 for name, theta in q.mode.items()}
    with pytest.raises(SettingError, match="one prior precision"):
        q.replace(prior_precision=uneven).sample()


def test_a_prior_for_every_weight_of_a_diagonal_and_for_every_parameter():
    q = posterior_of("diagonal")
    delta = {name: torch.rand_like(t) + 1 if t.dim() > 1 else float(n) for n, (name, t) in enumerate(q.mode.items())}
    uneven = q.replace(prior_precision=delta)
    exact = dense(uneven, flat(q, {name: torch.zeros_like(t) + delta[name] for name, t in q.mode.items()}))
    assert_close(flat(q, uneven.variance), exact.variance, rtol=1e-9)
    values = uneven.sample(10_000, generator=seeded(1))
    assert_close(uneven.log_prob(values), exact.log_prob(flat(q, values)), rtol=1e-9)
    standard = (flat(q, values) - exact.mean) / exact.stddev
    assert float((standard.var(dim=0) - 1).abs().max()) < 5 * math.sqrt(2 / 10_000)


def test_which_parameters_have_bases():
    assert set(posterior_of("kronecker").curvature.bases) == {"conv.weight", "odd", "head.weight"}
    one_sided = posterior_of("one-sided").curvature.bases
    assert (one_sided["head.weight"].left is None, one_sided["head.weight"].right is None) == (False, True)
    # As many gradients as a vector has entries suffice for a basis of its own.
    assert set(posterior_of("recorded").curvature.bases) == set(posterior_of("recorded").mode)


def test_a_vectors_own_curvature_is_that_of_its_recorded_gradients():
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    recorder = ba.Recorder(optimizer, keep=2, every=1)
    train(model, optimizer, steps=4)
    with pytest.warns(ba.errors.BayesAdamWarning, match="2 gradients behind it"):
        q = ba.Posterior.from_recorder(model, recorder, N, prior_precision=DELTA, batch_size=8)
    g = recorder.gradients(model)["bias"]
    sigma = torch.linalg.inv(N * 8 * g.T @ g / 2 + DELTA * torch.eye(2).double())
    assert_close(q.variance["bias"], sigma.diagonal(), rtol=1e-9)
    assert (q.origin.recorded, q.origin.steps) == (True, (2.0, 2.0))


@pytest.mark.parametrize(
    ("structure", "key"),
    [("kronecker", "left.odd"), ("inputs", "right.conv.weight"), ("inputs", "rows.head.weight")],
)
def test_a_basis_that_was_damaged_is_refused(structure, key, tmp_path):
    """In files of earlier releases too, which have no sums."""
    q, path = posterior_of(structure), tmp_path / "q.safetensors"
    q.save(path)
    rewrite(path, lambda _, tensors: tensors[key].mul_(-2))
    with pytest.raises(FileError, match=r"not orthogonal|negative"):
        ba.Posterior.load(path, q.model)


def test_what_has_no_eigenbases_is_told():
    model, adam = trained()
    with pytest.raises(SettingError, match="SOAP"):
        ba.Posterior.from_optimizer(model, adam, N, structure="kronecker")
    for name in ("full", "low-rank", "inputs"):
        with pytest.raises(SettingError, match="structure must be one of"):
            ba.Posterior.from_optimizer(model, adam, N, structure=name)


@pytest.mark.parametrize("fails", [True, False])
def test_eigenvectors_that_single_precision_misses_are_found_in_double(monkeypatch, fails):
    # Of matrices of low rank: not found on a CPU, not orthonormal on a GPU.
    exact = torch.linalg.eigh

    def rough(matrix):
        found = exact(matrix)
        if matrix.dtype == torch.float32:
            if fails:
                raise torch.linalg.LinAlgError("did not converge")
            found.eigenvectors[:, 0] = found.eigenvectors[:, 1]
        return found

    monkeypatch.setattr(torch.linalg, "eigh", rough)
    rows = torch.randn(6, 3, generator=seeded(0))
    basis = eigenbasis(rows @ rows.T)
    assert basis.dtype == torch.float32
    assert_close(basis.T @ basis, torch.eye(6), atol=1e-5)
    values = (basis.T @ rows).square().sum(dim=1)
    assert bool((values[:-1] >= values[1:] - 1e-5).all())


# --- the input side ---------------------------------------------------------------------------------------------------


def second_moments(a: Tensor) -> Tensor:
    """E[a aᵀ] over examples and positions, (..., width), with the constant 1 of the bias."""
    rows = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1).flatten(0, -2)
    return rows.T @ rows / len(rows)


def test_it_is_the_mean_of_the_layers_inputs_over_examples_and_positions():
    q, x = posterior_of("diagonal"), torch.randn(40, 2, 5).double()
    model: Net = q.model
    hidden = []
    model.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach()))
    known = q.with_inputs(x)
    model(x)
    assert {"conv.weight", "head.weight"} <= set(known.curvature.inputs)
    patches = x.unfold(2, 2, 1).transpose(1, 2).flatten(2)
    for name, a in (("conv.weight", second_moments(patches)), ("head.weight", second_moments(hidden[-1]))):
        side = known.curvature.inputs[name]
        assert side.bias == name.replace("weight", "bias")
        assert_close(side.basis @ side.spectrum.diag() @ side.basis.T, a, rtol=1e-9)
        rows = q.curvature.second_moment[name].flatten(1).sum(dim=1) + q.curvature.second_moment[side.bias]
        assert_close(known.curvature.second_moment[name].sum(dim=1), rows, rtol=1e-9)
    # The trace of the curvature is that of the diagonal: inputs turn it, and add nothing.
    assert_close(curvature(known, 1.0).trace(), curvature(q, 1.0).trace(), rtol=1e-9)
    parts = q.with_inputs([(x[:13], torch.zeros(13)), (x[13:], torch.zeros(27))])
    assert_close(parts.variance, known.variance, rtol=1e-9)


def test_one_input_direction_leaves_the_others_at_the_prior():
    """Where inputs never varied the data say nothing: a layer that saw x₀ alone knows W x₀, and no more."""
    model = nn.Linear(3, 1, bias=False).double()
    v = {"weight": torch.tensor([[0.4, 0.0, 0.0]]).double()}
    q = ba.Posterior.from_second_moment(model, v, 100).with_inputs(torch.eye(3).double()[:1].expand(30, 3) * 2)
    assert_close(q.variance["weight"][0], torch.tensor([1 / (100 * 0.1**0.5 * 4 + 1), 1, 1]).double(), rtol=1e-6)


def test_what_cannot_be_is_told():
    q, x = posterior_of("diagonal"), torch.randn(6, 2, 5).double()
    with pytest.raises(SettingError, match="this is inputs"):
        q.with_inputs(x).with_inputs(x)
    with pytest.raises(MatchError, match="not finite"):
        q.with_inputs(x * float("nan"))
    uneven = q.replace(prior_precision={n: torch.rand_like(t) for n, t in q.mode.items()})
    with pytest.raises(SettingError, match="one prior precision"):
        uneven.with_inputs(x)
