"""The Kronecker-factored posterior against dense matrices in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import FileError, SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.readers.rotated import eigenbasis
from cases import orthonormal, soap
from floats import approx, assert_close

# Which probabilities made-up data prefer does not matter here.

N, DELTA = 50, 0.7


class Net(nn.Module):
    """A convolution, a batch norm, a linear layer of several places, a head; and a matrix that no layer explains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.norm = nn.LayerNorm(3)
        self.inner = nn.Linear(3, 4, bias=False)
        self.odd = nn.Parameter(torch.randn(4, 4) / 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).mT).tanh()
        h = (self.inner(h) @ self.odd).tanh()
        return self.head(h.mean(dim=1))


def trained(power: float = 0.5, form: str = "map", max_side: int = 100) -> ba.Posterior:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = soap(model.parameters(), lr=1e-2, max_side=max_side, precondition_every=2)
    for _ in range(12):
        optimizer.zero_grad()
        (model(torch.randn(8, 2, 5).double()) - 1).square().mean().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(
        model,
        orthonormal(optimizer),
        N,
        prior_precision=DELTA,
        power=power,
        form=form,
        batch_size=8,
        structure="kronecker",
    )


def dense(posterior: ba.Posterior) -> dict[str, Tensor]:
    """Σ of every parameter, from the definition: rows of W run through first, so it is Q_L ⊗ Q_R here."""
    structure, settings = posterior.structure, posterior.settings
    found = {}
    for name, v in structure.second_moment.items():
        values = 1 / (settings.weight * v.flatten() ** settings.power + DELTA)
        basis = structure.bases.get(name)
        if basis is None:
            found[name] = torch.diag(values)
            continue
        rows, columns = (v.shape[0], v.numel() // v.shape[0]) if v.dim() > 1 else (1, len(v))
        left = torch.eye(rows).double() if basis.left is None else basis.left
        right = torch.eye(columns).double() if basis.right is None else basis.right
        both = torch.kron(left, right)
        found[name] = both @ torch.diag(values) @ both.T
    return found


def test_soap_gives_bases_to_matrices_alone():
    posterior = trained()
    assert isinstance(posterior.structure, Diagonal)
    assert set(posterior.structure.bases) == {"conv.weight", "inner.weight", "odd", "head.weight"}
    one_sided = trained(max_side=3).structure.bases
    assert one_sided["head.weight"].right is None
    assert one_sided["inner.weight"].left is None
    assert set(one_sided) == {"conv.weight", "inner.weight", "head.weight"}


@pytest.mark.parametrize("max_side", [100, 3])
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("form", ["map", "likelihood"])
def test_moments_and_densities_are_those_of_the_dense_gaussian(power, form, max_side):
    posterior = trained(power, form, max_side)
    covariance = dense(posterior)
    total, values = 0.0, {}
    entropy = 0.0
    for name, sigma in covariance.items():
        theta = posterior.mode[name].flatten()
        identity = torch.eye(len(theta)).double()
        # The likelihood form: the precision less the prior's pulls towards θ.
        mu = theta if form == "map" else (identity - DELTA * sigma) @ theta
        assert_close(posterior.mean[name].flatten(), mu, rtol=1e-9, atol=1e-12)
        assert_close(posterior.variance[name].flatten(), sigma.diagonal(), rtol=1e-9, atol=1e-12)
        values[name] = posterior.mode[name] + 0.3
        reference = torch.distributions.MultivariateNormal(mu, sigma)
        total += float(reference.log_prob(values[name].flatten()))
        entropy += float(reference.entropy())
    assert float(posterior.log_prob(values)) == approx(total, rel=1e-9)
    assert float(posterior.entropy()) == approx(entropy, rel=1e-9)
    assert_close(posterior.snr()["odd"], posterior.mean["odd"].abs() / posterior.variance["odd"].sqrt())


@pytest.mark.parametrize("form", ["map", "likelihood"])
def test_draws_have_the_dense_covariance(form):
    posterior = trained(form=form)
    n = 40_000
    draws = posterior.sample(n, generator=torch.Generator().manual_seed(1))
    for name, sigma in dense(posterior).items():
        flat = draws[name].flatten(1)
        found = torch.cov(flat.T) if flat.shape[1] > 1 else flat.var().view(1, 1)
        scale = sigma.diagonal().sqrt()
        gap = (found - sigma) / (scale[:, None] * scale)
        assert float(gap.abs().max()) < 6 / math.sqrt(n)
        mean = (flat.mean(dim=0) - posterior.mean[name].flatten()) / scale
        assert float(mean.abs().max()) < 5 / math.sqrt(n)
    one = posterior.sample(generator=torch.Generator().manual_seed(1))
    assert one["conv.weight"].shape == (3, 2, 2)


@pytest.mark.parametrize(("power", "max_side"), [(0.5, 3), pytest.param(1.0, 100, marks=pytest.mark.slow)])
def test_the_linearised_predictive_is_the_dense_one(power, max_side):
    posterior = trained(power, max_side=max_side)
    x = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(2)).double()
    params = {name: tensor.detach() for name, tensor in posterior.model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(posterior.model, p, (x,)))(params)
    expected = torch.zeros(6, 2, 2).double()
    for name, sigma in dense(posterior).items():
        rows = jacobians[name].flatten(2)
        expected += rows @ sigma @ rows.mT
    found = posterior.predict(x, likelihood="regression", covariance=True)
    assert_close(found.covariance, expected, rtol=1e-8, atol=1e-12)
    assert_close(
        posterior.predict(x, likelihood="regression").variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-12
    )
    sampled = posterior.predict(
        x,
        likelihood="regression",
        predictive="linearised-sampled",
        n_samples=800,
        generator=torch.Generator().manual_seed(3),
    )
    assert_close(sampled.variance, found.variance, rtol=0.2, atol=1e-4)
    assert posterior.predict(x, likelihood="regression", predictive="sampled", n_samples=5).mean.shape == (6, 2)


def test_saving_and_loading(tmp_path):
    posterior = trained()
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    again = ba.Posterior.load(path, posterior.model)
    assert again.structure.kind == "kronecker"
    for name, value in posterior.variance.items():
        assert torch.equal(again.variance[name], value)
    first, second = (p.sample(generator=torch.Generator().manual_seed(4)) for p in (posterior, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    tensors["left.odd"] = 2 * tensors["left.odd"]
    save_file(tensors, path, metadata=header)
    with pytest.raises(FileError, match="orthogonal"):
        ba.Posterior.load(path, posterior.model)


def test_from_a_state_dict_and_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = soap(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    live = ba.Posterior.from_optimizer(model, optimizer, N, structure="kronecker")
    saved = ba.Posterior.from_state_dict(
        model, optimizer.state_dict(), N, optimizer="soap-pytorch-optimizer", structure="kronecker"
    )
    path = tmp_path / "soap.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    read = ba.Posterior.from_checkpoint(path, fresh, N, structure="kronecker")
    for other in (saved, read):
        for name, value in live.variance.items():
            assert torch.equal(other.variance[name], value)
    flat = ba.Posterior.from_optimizer(model, optimizer, N)
    assert flat.structure.kind == "diagonal"
    for name, basis in live.structure.bases.items():
        both = torch.kron(basis.left, basis.right)
        dense_v = both @ torch.diag(live.structure.second_moment[name].flatten()) @ both.T
        assert_close(flat.structure.second_moment[name].flatten(), dense_v.diagonal())


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_calibration(likelihood):
    posterior = trained()
    x = torch.randn(40, 2, 5, generator=torch.Generator().manual_seed(5)).double()
    target = posterior.model(x).detach()
    y = target + 0.1 * torch.randn_like(target) if likelihood == "regression" else target.argmax(dim=1)
    tuned = ba.calibrate(posterior, [(x, y)], likelihood=likelihood)
    assert tuned.structure.kind == "kronecker"
    assert (tuned.settings.scale != posterior.settings.scale) == (likelihood == "regression")
    assert float(ba.log_marginal_likelihood(tuned, [(x, y)], likelihood=likelihood)) < math.inf


def test_what_cannot_be_is_refused():
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    adam.step()
    with pytest.raises(SettingError, match="SOAP"):
        ba.Posterior.from_optimizer(model, adam, N, structure="kronecker")
    posterior = trained()
    uneven = posterior.replace(
        prior_precision={name: torch.rand_like(theta) + 1 for name, theta in posterior.mode.items()}
    )
    with pytest.raises(SettingError, match="one prior precision"):
        uneven.sample()
    with pytest.raises(SettingError, match=r"posterior\.snr"):
        ba.compress.masks(posterior, 0.5)
    masks = ba.compress.masks(posterior, 0.5, ranking=posterior.snr())
    assert set(masks) == set(posterior.mode)


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize("keep", [30, 2])
def test_recorded_gradients_give_vectors_bases_where_they_suffice(keep, covariance):
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorder = ba.Recorder(optimizer, keep=keep, every=1)
    for _ in range(30):
        optimizer.zero_grad()
        (model(torch.randn(8, 2, 5).double()) - 1).square().mean().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(
        model, optimizer, N, structure="kronecker", recorder=recorder, prior_precision=DELTA, power=1, batch_size=8
    )
    vectors = {name for name in posterior.structure.bases if posterior.mode[name].dim() == 1}
    # Two gradients suffice for the two entries of the head's bias, not for the three of the others.
    assert vectors == ({"head.bias"} if keep == 2 else {"conv.bias", "norm.weight", "norm.bias", "head.bias"})
    bias = recorder.gradients(model)["head.bias"]
    precision = torch.eye(2).double() * DELTA + posterior.settings.weight * bias.T @ bias / len(bias)
    x = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(4)).double()
    names = list(posterior.mode)
    rows = torch.autograd.functional.jacobian(
        lambda *t: torch.func.functional_call(model, dict(zip(names, t, strict=True)), (x,)),
        tuple(posterior.mode.values()),
    )
    blocks = dense(posterior)
    # A vector's block is the inverse of its own second moment and the prior, whole.
    assert_close(blocks["head.bias"], torch.linalg.inv(precision), rtol=1e-8, atol=1e-12)
    expected = sum(row.flatten(2) @ blocks[name] @ row.flatten(2).mT for name, row in zip(names, rows, strict=True))
    found = posterior.predict(x, likelihood="regression", covariance=covariance)
    assert_close(found.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-8)
    if covariance:
        assert_close(found.covariance, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("fails", [True, False])
def test_eigenvectors_that_single_precision_misses_are_found_in_double(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    # Of matrices of low rank: not found on a CPU, not orthonormal on a GPU.
    exact = torch.linalg.eigh

    def rough(matrix: torch.Tensor) -> torch.return_types.linalg_eigh:
        found = exact(matrix)
        if matrix.dtype == torch.float32:
            if fails:
                raise torch.linalg.LinAlgError("did not converge")
            found.eigenvectors[:, 0] = found.eigenvectors[:, 1]
        return found

    monkeypatch.setattr(torch.linalg, "eigh", rough)
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    basis = eigenbasis(rows @ rows.T)
    assert basis.dtype == torch.float32
    assert_close(basis.T @ basis, torch.eye(6), atol=1e-5)
    values = (basis.T @ rows).square().sum(dim=1)
    assert bool((values[:-1] >= values[1:] - 1e-5).all())
