"""Audits against dense float64 algebra: the Jacobian, the covariance it makes, and what follows from them."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import bayesadam as ba
from bayesadam.auditing import audit
from bayesadam.errors import MatchError, SettingError
from cases import fit, jacobian, mlp, trained
from floats import approx, assert_close

BATCH, PRIOR = 8, 0.5


@cache
def fitted() -> tuple[ba.Posterior, Tensor, Tensor]:
    """A small network in float64, trained on labels some of which are random, and its data."""
    n, classes = 24, 4
    torch.manual_seed(1)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = torch.where(torch.rand(n) < 0.2, torch.randint(classes, (n,)), x[:, :2].gt(0).long() @ torch.tensor([1, 2]))
    model = mlp(3, 6, classes).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        fit(model, optimizer, [(x[rows], y[rows]) for rows in torch.randperm(n).split(BATCH)], F.cross_entropy)
    optimizer.zero_grad()
    given = {"power": 1.0, "batch_size": BATCH, "prior_precision": PRIOR}
    posterior = ba.Posterior.from_optimizer(model, optimizer, n, **given)
    return replace(posterior, likelihood="classification"), x, y


def covariances(posterior: ba.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """J Σ Jᵀ at the posterior's own settings and at those of the data's curvature, both diagonal at p = 1."""
    moment = torch.cat([posterior.curvature.second_moment[name].flatten() for name in posterior.mode])
    j, curvature = jacobian(posterior.model, x), posterior.n_data * BATCH * moment
    of = lambda delta: j @ ((curvature + delta).reciprocal()[:, None] * j.mT)  # noqa: E731
    return of(PRIOR), of(1e-3 * curvature.mean())


def test_classes_agree_with_the_dense_jacobian():
    posterior, x, y = fitted()
    found = audit(posterior, (x, y))
    own, novel = covariances(posterior, x)
    f = posterior.model(x).detach()
    for i in range(len(x)):
        others = [k for k in range(4) if k != y[i]]
        j = max(others, key=lambda k: float(f[i, k]))
        a = torch.zeros(4, dtype=torch.float64)
        a[y[i]], a[j] = 1, -1
        assert found.suspicion[i] == approx(float(-(a @ f[i]) / (a @ novel[i] @ a) ** 0.25), rel=1e-5)
        change = own[i] @ (f[i].softmax(dim=0) - F.one_hot(y[i], 4))
        assert_close(found.change[i], change.float(), rtol=1e-5, atol=1e-6)
        assert found.influence[i] == approx(float(change.norm()), rel=1e-5)
    assert_close(found.loss, F.cross_entropy(f, y, reduction="none").float())
    assert torch.equal(found.predicted, f.argmax(dim=1))
    assert torch.equal(found.labels, y)


def of_outputs(outputs: int) -> ba.Posterior:
    model, optimizer = trained(3, 5, outputs, dtype=torch.float64)
    return ba.Posterior.from_optimizer(model, optimizer, 50, power=1.0, batch_size=BATCH, prior_precision=PRIOR)


@pytest.mark.parametrize("outputs", [1, 2])
def test_of_binary_outputs_the_most_suspect_counts(outputs):
    posterior, x, y = of_outputs(outputs), torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9, outputs))
    labels = y[:, 0] if outputs == 1 else y.double()
    found = audit(posterior, (x, labels), likelihood="binary")
    own, novel = covariances(posterior, x)
    f = posterior.model(x).detach()
    each = -(2 * y - 1) * f / novel.diagonal(dim1=1, dim2=2) ** 0.25
    assert_close(found.suspicion, each.amax(dim=1).float())
    assert_close(found.change, (own @ (f.sigmoid() - y)[..., None])[..., 0].float(), rtol=1e-5, atol=1e-6)
    loss = F.binary_cross_entropy_with_logits(f, y.double(), reduction="none").sum(dim=1)
    assert_close(found.loss, loss.float())
    assert torch.equal(found.predicted.view_as(y), (f > 0).long())
    assert torch.equal(found.labels, labels.long())


def test_regression_agrees_with_the_hat_matrix():
    """The posterior of a linear regression with a flat prior, through `from_moments` where it is diagonal."""
    x, noise, model = torch.linalg.qr(torch.randn(30, 3, dtype=torch.float64)).Q, 0.3**2, nn.Linear(3, 1, bias=False)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(30, 1)
    weight, variance = (x.T @ y).T, torch.full((1, 3), noise, dtype=torch.float64)
    with torch.no_grad():
        model.double().weight.copy_(weight)
    posterior = ba.Posterior.from_moments(model, {"weight": weight}, {"weight": variance}, len(x))
    hat, residual = (x @ x.T).diagonal(), (y - x @ weight.T)[:, 0]
    found = audit(posterior.replace(noise_variance=noise), (x, y), likelihood="regression")
    assert_close(found.suspicion, (residual.abs() / (noise * (1 + hat)).sqrt()).float())
    # Leaving an example out moves its output by −h r/(1 − h); to first order by −h r.
    assert_close(found.change[:, 0], (-hat * residual).float(), rtol=1e-5, atol=1e-6)


def test_several_outputs_are_a_mahalanobis_distance():
    noise = torch.tensor([0.5, 2.0], dtype=torch.float64)
    posterior = of_outputs(2).replace(noise_variance=noise)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    own, _ = covariances(posterior, x)
    r = y - posterior.model(x).detach()
    distance = torch.einsum("ni,nij,nj->n", r, torch.linalg.inv(own + noise.diag()), r).sqrt()
    found = audit(posterior, (x, y), likelihood="regression")
    assert_close(found.suspicion, distance.float(), rtol=1e-5, atol=1e-6)
    assert_close(found.change, -(own @ (r / noise)[..., None])[..., 0].float(), rtol=1e-5, atol=1e-6)


def test_an_unknown_noise_is_estimated_and_said_so():
    model, optimizer = trained(3, 5, 1)
    posterior = ba.Posterior.from_optimizer(model, optimizer, 50, prior_precision=PRIOR)
    x = torch.randn(40, 3)
    y = model(x).detach()[:, 0] + 0.1 * torch.randn(40)
    y[3] += 50
    found = audit(posterior, [(x[:30], y[:30]), (x[30:], y[30:])], likelihood="regression")
    residual = (y - model(x).detach()[:, 0]).abs()
    assert float(found.noise_variance) == approx(float((residual.sort().values[19] / 0.67449) ** 2), rel=1e-3)
    assert found.suspects(1)[0].index == 3
    with pytest.raises(SettingError, match="noise variance is 0"):
        audit(posterior, (x, model(x).detach()), likelihood="regression")


def test_examples_are_numbered_as_they_come_however_they_are_cut():
    posterior, x, y = fitted()
    whole = audit(posterior, (x, y))
    pieces = {
        "pairs": list(zip(x.split(7), y.split(7), strict=True)),
        "generator": ((a, b) for a, b in zip(x.split(5), y.split(5), strict=True)),
        "loader": DataLoader(TensorDataset(x, y), batch_size=10),
        "mapping": [{"input": x[:9], "labels": y[:9]}, {"input": x[9:], "labels": y[9:]}],
    }
    for batches in pieces.values():
        found = audit(posterior, batches)
        for name in ("suspicion", "influence", "loss", "change"):
            assert_close(getattr(found, name), getattr(whole, name))
        assert torch.equal(found.labels, y)


def test_classes_left_out_are_never_suspects():
    posterior, x, y = fitted()
    whole = audit(posterior, (x, y))
    marked = y.clone()
    marked[[2, 5]] = -100
    found = audit(posterior, (x, marked))
    for name in ("suspicion", "influence", "loss", "change"):
        column = getattr(found, name)
        assert column[[2, 5]].isnan().all()
        keep = torch.arange(len(y)) != 2
        keep[5] = False
        assert_close(column[keep], getattr(whole, name)[keep])
    for by in ("suspicion", "influence", "loss"):
        assert {one.index for one in found.suspects(100, by=by)} == set(range(len(y))) - {2, 5}


def test_loaders_that_shuffle_are_refused():
    posterior, x, y = fitted()
    data = TensorDataset(x, y)
    for loader in (
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(8))),
    ):
        with pytest.raises(SettingError, match="shuffle=False"):
            audit(posterior, loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y[:, None].expand(-1, 3)), "one row per example"),
        (lambda x, y: (x, y[:-1]), "one for each example"),
        (lambda x, y: (x, y + 1), "class indices must be 0 to 3"),
        (lambda x, y: iter(()), "nothing to audit"),
        (lambda x, y: (x, y.double()), r"one whole number for each, its class, not torch\.float64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    posterior, x, y = fitted()
    with pytest.raises(MatchError, match=message):
        audit(posterior, change(x, y))


def test_the_model_is_left_as_it_was_even_by_an_error():
    posterior, x, y = fitted()
    model = posterior.model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def broken():
        yield x[:4], y[:4]
        raise RuntimeError("the disk is gone")

    def untouched() -> bool:
        same = all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
        return same and model.training

    audit(posterior, (x, y))
    assert untouched()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        audit(posterior, broken())
    assert untouched()
    model.eval()


def test_an_audit_of_a_few_steps_is_warned_of():
    torch.manual_seed(0)
    model, x, y = mlp(3, 4), torch.randn(8, 3), torch.randint(4, (8,))
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer, 3 * [(x, y)], F.cross_entropy)
    posterior = ba.Posterior.from_optimizer(model, optimizer, 8, prior_precision=1.0)
    with pytest.warns(ba.errors.BayesAdamWarning, match="has 3 gradients behind it"):
        audit(posterior, (x, y), likelihood="classification")
    with pytest.raises(MatchError, match="posterior must be a Posterior, got Sequential"):
        audit(model, (x, y))


@pytest.mark.parametrize("name", ["poisson", "heteroscedastic"])
def test_other_likelihoods_standardise_by_their_own_predictive(name):
    posterior, x = of_outputs(2), torch.randn(6, 3, dtype=torch.float64)
    y = torch.randint(4, (6, 2 if name == "poisson" else 1)).double()
    found = audit(posterior, (x, y), likelihood=name)
    f, (own, _) = posterior.model(x).detach().requires_grad_(), covariances(posterior, x)
    spread = own.diagonal(dim1=1, dim2=2)
    if name == "poisson":
        mean = f.exp()
        variance = mean + mean**2 * spread
        nll = (f.exp() - y * f + torch.lgamma(y + 1)).sum(dim=1)
    else:
        mean, variance = f[:, :1], spread[:, :1] + f[:, 1:].exp()
        nll = 0.5 * (math.log(2 * math.pi) + f[:, 1] + (y[:, 0] - f[:, 0]).square() * (-f[:, 1]).exp())
    assert_close(found.suspicion, ((y - mean).square() / variance).sum(dim=1).sqrt().float())
    (error,) = torch.autograd.grad(nll.sum(), f)
    assert_close(found.loss, nll.detach().float(), rtol=1e-4, atol=1e-4)
    assert_close(found.change, (own @ error[..., None])[..., 0].float(), rtol=1e-5, atol=1e-6)


def test_suspects_are_sorted_by_any_column_and_printed():
    posterior, x, y = fitted()
    found = audit(posterior, (x, y))
    for by in ("suspicion", "influence", "loss"):
        suspects = found.suspects(6, by=by)
        assert [one.index for one in suspects] == getattr(found, by).argsort(descending=True)[:6].tolist()
        assert suspects[0] == found[suspects[0].index]
    assert suspects[0].label == int(y[suspects[0].index])
    assert found[-1].index == len(found) - 1
    lines = str(found).splitlines()
    assert [int(line.split()[0]) for line in lines[1:-1]] == [one.index for one in found.suspects(20)]
    with pytest.raises(SettingError, match="by must be one of"):
        found.suspects(3, by="margin")


def test_the_likelihood_must_be_known_and_the_same():
    posterior, x, y = fitted()
    for q, name in ((posterior, "labels"), (posterior, "binary"), (replace(posterior, likelihood=None), None)):
        with pytest.raises(SettingError, match="likelihood"):
            audit(q, (x, y), likelihood=name)
    with pytest.raises(SettingError, match="Mixture has 2"):
        audit(ba.Mixture([posterior, posterior]), (x, y))
