"""The low-rank posterior against dense matrices in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import FileError, ImproperError, MatchError, SettingError, StructureWarning
from bayesadam.gaussian.low_rank import LowRank, low_rank_of
from floats import approx, assert_close

N, BATCH, KEEP = 50, 8, 6
KINDS = ["low-rank", "low-rank+diagonal"]


class Net(nn.Module):
    """A convolution, a norm, a linear layer of several places, a matrix that no layer explains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.norm = nn.LayerNorm(3)
        self.odd = nn.Parameter(torch.randn(3, 4) / 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).mT).tanh()
        return self.head((h @ self.odd).tanh().mean(dim=1))


def prior(kind: str) -> float | dict[str, float | Tensor]:
    """One number, or a mapping with numbers, the same or several, and a tensor."""
    if kind == "one":
        return 0.7
    torch.manual_seed(3)
    if kind == "equal":
        return {
            name: torch.rand_like(p) + 0.2 if name == "odd" else 0.7 for name, p in Net().double().named_parameters()
        }
    return {name: (torch.rand_like(p) + 0.2) if name == "odd" else 0.4 + len(name) / 10
            for name, p in Net().double().named_parameters()}  # fmt: skip


def trained(
    structure: str = "low-rank", delta: str = "one", power: float = 1.0, form: str = "map", keep: int = KEEP
) -> tuple[ba.Posterior, ba.Recorder]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorder = ba.Recorder(optimizer, keep=keep, every=2)
    for _ in range(31):
        optimizer.zero_grad()
        (model(torch.randn(BATCH, 2, 5).double()) - 1).square().mean().backward()
        optimizer.step()
    found = ba.Posterior.from_optimizer(
        model,
        optimizer,
        N,
        prior_precision=prior(delta),
        power=power,
        batch_size=BATCH,
        form=form,
        structure=structure,
        recorder=recorder,
    )
    return found, recorder


def flat(named, lead: int = 0) -> Tensor:
    return torch.cat([tensor.flatten(lead) for tensor in named.values()], dim=-1)


def dense(posterior: ba.Posterior, recorder: ba.Recorder) -> tuple[Tensor, Tensor, Tensor]:
    """Λ, δ and the data's precision, from the gradients by the definition: matrix powers, no Woodbury."""
    gradients = recorder.gradients(posterior.model)
    g = torch.cat([gradients[name].flatten(1) for name in posterior.mode], dim=1)
    v = g.T @ g / len(g)
    settings = posterior.settings
    # Not of v itself: the square root of an eigenvalue that is 0 but for rounding, 1e-16, is 1e-8.
    _, singular, vectors = torch.linalg.svd(g, full_matrices=False)
    data = vectors.T @ torch.diag((singular.square() / len(g)).pow(settings.power)) @ vectors
    if posterior.structure.kind == "low-rank+diagonal":
        own = ba.readers.read_optimizer(posterior.model, recorder.optimizers[0]).second_moment
        data = data + torch.diag(
            (flat({n: own[n] for n in posterior.mode}) - v.diagonal()).clamp(min=0) ** settings.power
        )
    data = settings.weight * data
    delta = torch.cat(
        [
            torch.as_tensor(settings.prior_precision[n], dtype=torch.float64).expand_as(t).flatten()
            for n, t in posterior.mode.items()
        ]
    )
    return data + torch.diag(delta), delta, data


@pytest.mark.parametrize("structure", KINDS)
@pytest.mark.parametrize("delta", ["one", "equal", "several"])
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("form", ["map", "likelihood"])
def test_it_is_the_dense_gaussian(structure, delta, power, form):
    posterior, recorder = trained(structure, delta, power, form)
    precision, prior_precision, data = dense(posterior, recorder)
    sigma = torch.linalg.inv(precision)
    theta = flat(posterior.mode)
    mu = theta if form == "map" else sigma @ data @ theta
    close = {"rtol": 1e-8, "atol": 1e-12}
    assert_close(flat(posterior.mean), mu, **close)
    assert_close(flat(posterior.variance), sigma.diagonal(), **close)
    values = {name: t + 0.1 * torch.randn(5, *t.shape).double() for name, t in posterior.mode.items()}
    reference = torch.distributions.MultivariateNormal(mu, precision_matrix=precision)
    assert_close(posterior.log_prob(values), reference.log_prob(flat(values, 1)), **close)
    assert_close(posterior.entropy(), reference.entropy(), **close)
    gamma = float((sigma @ data).trace())
    assert posterior.effective_dimension == approx(gamma, rel=1e-8)
    assert set(prior_precision.tolist()) != {0.0}


@pytest.mark.parametrize("structure", KINDS)
@pytest.mark.parametrize("delta", ["one", "several"])
@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")
def test_the_linearised_prediction_is_that_of_the_dense_gaussian(structure, delta, covariance):
    posterior, recorder = trained(structure, delta)
    sigma = torch.linalg.inv(dense(posterior, recorder)[0])
    x = torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names = list(posterior.mode)

    def f(*tensors):
        return torch.func.functional_call(posterior.model, dict(zip(names, tensors, strict=True)), (x,))

    rows = torch.autograd.functional.jacobian(f, tuple(posterior.mode.values()))
    jacobian = torch.cat([row.flatten(2) for row in rows], dim=2)
    expected = jacobian @ sigma @ jacobian.mT
    # A budget of a few examples gives the same.
    for budget in (1 << 30, 3 * 8 * 2 * posterior.n_weights):
        found = posterior.predict(x, likelihood="regression", covariance=covariance, memory_budget=budget)
        assert_close(found.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-8)
        if covariance:
            assert_close(found.covariance, expected, rtol=1e-8, atol=1e-12)
    assert_close(found.mean, posterior.model(x).detach())


@pytest.mark.parametrize(
    ("structure", "delta", "form"), [(KINDS[0], "one", "map"), (KINDS[1], "several", "likelihood")]
)
def test_draws_have_its_mean_and_covariance(structure, delta, form):
    posterior, recorder = trained(structure, delta, form=form)
    sigma, n = torch.linalg.inv(dense(posterior, recorder)[0]), 60_000
    draws = flat(posterior.sample(n, generator=torch.Generator().manual_seed(1)), 1)
    scale = sigma.diagonal().sqrt()
    assert float(((torch.cov(draws.T) - sigma) / (scale[:, None] * scale)).abs().max()) < 6 / math.sqrt(n)
    assert float(((draws.mean(dim=0) - flat(posterior.mean)) / scale).abs().max()) < 5 / math.sqrt(n)
    again = flat(posterior.sample(3, generator=torch.Generator().manual_seed(1)), 1)
    assert_close(again, flat(posterior.sample(3, generator=torch.Generator().manual_seed(1)), 1))


@pytest.mark.parametrize("structure", KINDS)
def test_saved_and_loaded_it_is_the_same(structure, tmp_path):
    posterior, _ = trained(structure, "several")
    posterior.save(tmp_path / "p.safetensors")
    loaded = ba.Posterior.load(tmp_path / "p.safetensors", posterior.model)
    assert loaded.structure.kind == structure
    for one, other in ((posterior.variance, loaded.variance), (posterior.mean, loaded.mean)):
        assert_close(flat(one), flat(other))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    one, other = (p.sample(generator=g) for p, g in zip((posterior, loaded), generators, strict=True))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(MatchError, match="another model's"):
        ba.Posterior.load(tmp_path / "p.safetensors", nn.Linear(2, 2))


@pytest.mark.parametrize("harm", ["directions.odd", "eigenvalues.directions", "rest.odd", "fewer"])
def test_a_damaged_file_is_refused(harm, tmp_path):
    posterior, _ = trained("low-rank+diagonal")
    tensors, header = posterior_file(posterior, tmp_path)
    if harm == "fewer":
        tensors["eigenvalues.directions"] = tensors["eigenvalues.directions"][1:]
    else:
        tensors[harm] = tensors[harm] * -3
    ba._storage.write(tmp_path / "p.safetensors", tensors, header)
    with pytest.raises(FileError, match="damaged"):
        ba.Posterior.load(tmp_path / "p.safetensors", posterior.model)
    del tensors["directions.odd"]
    ba._storage.write(tmp_path / "p.safetensors", tensors, header)
    with pytest.raises(FileError, match="lack"):
        ba.Posterior.load(tmp_path / "p.safetensors", posterior.model)


def posterior_file(posterior, folder):
    posterior.save(folder / "p.safetensors")
    tensors, header = ba._storage.read(folder / "p.safetensors")
    header.pop("format")
    return tensors, header


@pytest.mark.parametrize("structure", KINDS)
@pytest.mark.parametrize("method", ["validation", "evidence"])
@pytest.mark.filterwarnings("ignore::bayesadam.errors.StructureWarning")
def test_calibration_raises_the_held_out_likelihood(structure, method):
    posterior, _ = trained(structure)
    x = torch.randn(40, 2, 5).double()
    y = 1 + 0.3 * torch.randn(40, 2).double()
    better = ba.calibrate(posterior, (x, y), likelihood="regression", method=method)
    found = better.predict(x, likelihood="regression").log_prob(y).mean()
    worse = (
        posterior.replace(noise_variance=better.noise_variance, prior_precision=1e-4)
        .predict(x, likelihood="regression")
        .log_prob(y)
        .mean()
    )
    assert found > worse
    if method == "evidence":
        square = sum(float(theta.square().sum()) for theta in better.mode.values())
        delta = better.prior_precision["odd"]
        assert delta * square == approx(better.effective_dimension, rel=1e-4)


def test_the_marginal_likelihood_is_laplaces():
    posterior, recorder = trained()
    posterior = posterior.replace(noise_variance=torch.tensor(0.2).double())
    x, y = torch.randn(N, 2, 5).double(), torch.randn(N, 2).double()
    precision, delta, _ = dense(posterior, recorder)
    theta = flat(posterior.mode)
    fit = (
        torch.distributions.Normal(posterior.model(x).detach(), float(posterior.noise_variance) ** 0.5)
        .log_prob(y)
        .sum()
    )
    expected = fit - 0.5 * (delta * theta.square()).sum() - 0.5 * (torch.logdet(precision) - delta.log().sum())
    found = ba.log_marginal_likelihood(posterior, (x, y), likelihood="regression")
    assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_it_warns_where_more_directions_are_determined_than_it_kept():
    posterior, _ = trained()
    wide = posterior.replace(prior_precision=1e-3)
    assert wide.effective_dimension > KEEP / 2
    with pytest.warns(StructureWarning, match=r"γ = \d.*keep=12"):
        wide.predict(torch.randn(3, 2, 5).double(), likelihood="regression")
    narrow = posterior.replace(prior_precision=1e5)
    assert narrow.effective_dimension < KEEP / 2
    narrow.predict(torch.randn(3, 2, 5).double(), likelihood="regression")


def test_without_a_prior_it_says_so():
    posterior, _ = trained()
    flat_one = posterior.replace(prior_precision=0.0)
    with pytest.raises(ImproperError, match="prior"):
        flat_one.sample()
    with pytest.raises(ImproperError, match="prior"):
        _ = flat_one.variance


def test_more_gradients_than_weights_is_the_full_matrix():
    rows = {"a": torch.randn(9, 2).double(), "b": torch.randn(9, 1, 2).double()}
    found = low_rank_of(rows)
    g = torch.cat([r.flatten(1) for r in rows.values()], dim=1)
    u = torch.cat([r.flatten(1) for r in found.rows.values()], dim=1)
    assert_close(u.T @ torch.diag(found.values) @ u, g.T @ g / 9)
    assert_close(torch.cat([v.flatten() for v in found.second_moment.values()]), g.square().mean(dim=0))


def test_it_needs_recorded_gradients():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    for build in (
        lambda: ba.Posterior.from_optimizer(model, optimizer, 10, structure="low-rank"),
        lambda: ba.Posterior.from_state_dict(model, optimizer.state_dict(), 10, structure="low-rank+diagonal"),
    ):
        with pytest.raises(SettingError, match="Recorder"):
            build()


def test_it_moves_and_changes_type():
    posterior, _ = trained("low-rank+diagonal")
    single = posterior.to(dtype=torch.float32)
    assert isinstance(single.structure, LowRank)
    assert single.structure.kind == "low-rank+diagonal"
    assert_close(flat(single.variance).double(), flat(posterior.variance), rtol=1e-4, atol=1e-6)
    # Where the data have determined nearly everything, float32 still finds what is left.
    x = torch.randn(4, 2, 5)
    model = Net()
    model.load_state_dict(posterior.model.state_dict())
    narrow = posterior.replace(prior_precision=1e-3, n_data=1e7)
    exact = narrow.predict(x.double(), likelihood="regression").variance
    rounded = dataclasses.replace(narrow.to(dtype=torch.float32), model=model)
    assert_close(rounded.predict(x, likelihood="regression").variance.double(), exact, rtol=1e-2)
