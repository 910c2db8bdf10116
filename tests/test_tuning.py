"""`posterior.tune`: what evidence and validation find, against closed forms and brute force."""

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import likelihood
from calibrated.cases_calibrated import NAMES, data, trained, waves
from cases import fit, jacobian
from floats import approx, assert_close


def nll(q: ba.Posterior, x: torch.Tensor, y: torch.Tensor) -> float:
    return -float(q.predict(x).log_prob(y).mean())


@pytest.mark.parametrize("name", NAMES)
def test_held_out_data_are_likelier_afterwards(name):
    q, (x, y) = trained(name), data(name, 200, 200)
    before = q.replace(noise_variance=(y - q.model(x).detach()).square().mean(dim=0)) if name == "regression" else q
    tuned = q.tune((x, y), method="validation")
    assert nll(tuned, x, y) <= nll(before, x, y) + 1e-6
    fresh = data(name, 500, 300)
    assert nll(tuned, *fresh) <= nll(before, *fresh) + 0.02
    parts = q.tune([(x[:90], y[:90]), (x[90:], y[90:])], method="validation")
    assert_close(parts.scale, tuned.scale, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_evidence_gives_the_trace_of_the_gauss_newton_matrix(name):
    q, (x, y) = trained(name), data(name, 100, 200)
    tuned = q.tune((x, y), method="evidence")
    kind, model = likelihood(name), q.model
    f, j = model(x).detach(), jacobian(model, x)
    if kind.coupled:
        p = f.softmax(dim=1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        trace = torch.einsum("nip,nij,njp->n", j, hessian, j).mean()
    else:
        trace = (kind.hessian_diagonal(f, tuned.noise_variance)[:, :, None] * j.square()).sum(dim=(1, 2)).mean()
    total = sum(float(c.sum()) for c in tuned.curvature.curvatures(tuned.settings.power))
    # The last round of σ² ends within a hundredth.
    assert tuned.settings.weight * total == approx(tuned.n_data * float(trace), rel=0.02 if kind.noise else 1e-3)
    square = sum(float(p.detach().square().sum()) for p in model.parameters())
    delta = next(iter(tuned.prior_precision.values()))
    assert delta == approx(tuned.effective_dimension / square, rel=1e-4)


def test_numbers_take_evidence_where_there_is_a_noise():
    q, held_out = trained("regression"), waves(100, 200)
    assert q.tune(held_out).scale == q.tune(held_out, method="evidence").scale
    q, held_out = trained("poisson"), data("poisson", 100, 200)
    assert q.tune(held_out).scale == q.tune(held_out, method="validation").scale


def test_a_linear_regression_gets_its_noise():
    torch.manual_seed(0)
    x = torch.randn(2000, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(2000, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    fit(model, optimizer, ((x[rows], y[rows]) for rows in torch.randint(1000, (500, 32))))
    q = ba.Posterior.from_optimizer(model, optimizer, 1000, batch_size=32, likelihood="regression", power=1.0)
    tuned = q.tune((x[1000:], y[1000:]))
    assert float(tuned.noise_variance) == approx(0.09, rel=0.1)


def test_refusals():
    q = trained("regression")
    with pytest.raises(SettingError, match="method must be one of"):
        q.tune(waves(50, 0), method="luck")
    with pytest.raises(MatchError, match="no held-out data"):
        q.tune(iter(()))


def test_noise_is_of_the_outputs_it_was_tuned_for():
    q, (x, y) = trained("regression"), data("regression", 100, 200)
    one = q.tune((x, y[:, :1]), forward=_first)
    assert one.predict(x, forward=_first).stddev.shape == (100, 1)
    with pytest.raises(MatchError, match="forward= that posterior"):
        _ = one.predict(x).stddev
    with pytest.raises(MatchError, match=r"of \(2,\) outputs, and these are \(1,\)"):
        _ = q.tune((x, y)).predict(x, forward=_first).stddev


def _first(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, :1]
