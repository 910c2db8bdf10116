"""What to label next, against brute force: every gradient and every determinant of a dense covariance written out."""

import numpy as np
import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam import acquiring
from bayesadam.errors import MatchError, SettingError
from cases import fit, jacobian, mlp


def classes(seed: int = 0, n_out: int = 3, likelihood: str = "classification") -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(2, 8, n_out).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(40, 2).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    if likelihood == "classification":
        fit(model, optimizer, 50 * [(x, y)], nn.functional.cross_entropy)
    else:
        fit(model, optimizer, 50 * [(x, 3 * x[:, :n_out])])
    return ba.Posterior.from_optimizer(model, optimizer, 40, likelihood=likelihood, prior_precision=5.0)


def numbers(noise: float | None = 0.1) -> ba.Posterior:
    return classes(n_out=2, likelihood="regression").replace(noise_variance=noise)


def test_gradients_are_spread_as_the_written_out_ones_would_be():
    q, pool = classes(), torch.randn(30, 2).double()
    hidden = torch.tanh(pool @ q.mean["0.weight"].T + q.mean["0.bias"])
    probs = q.model(pool).detach().softmax(dim=-1)
    errors = probs - nn.functional.one_hot(probs.argmax(dim=1), 3)
    gradients = (errors[:, :, None] * hidden[:, None]).flatten(1)
    found = ba.acquire(q, pool, 6, seed=3)
    chosen, source = [int(gradients.norm(dim=1).argmax())], torch.Generator().manual_seed(3)
    while len(chosen) < 6:
        away = torch.cdist(gradients, gradients[chosen]).amin(dim=1).square()
        away[chosen] = 0
        chosen.append(int(torch.multinomial(away.float(), 1, generator=source)))
    assert found.tolist() == chosen


@pytest.mark.parametrize("likelihood", ["regression", "poisson", "heteroscedastic"])
def test_numbers_are_chosen_by_the_determinant_of_their_covariance(likelihood):
    q, pool = classes(n_out=2, likelihood=likelihood).replace(noise_variance=0.1), torch.randn(20, 2).double()
    f, stddev = q.model(pool).detach(), torch.cat([each.flatten() for each in q.stddev.values()])
    rows = (jacobian(q.model, pool) * stddev).flatten(0, 1)
    hessian = {
        "regression": torch.full_like(f, 10.0),
        "poisson": f.exp(),
        "heteroscedastic": torch.stack([(-f[:, 1]).exp(), torch.full((20,), 0.5).double()], dim=1),
    }[likelihood].flatten()

    def information(chosen: tuple[int, ...]) -> float:
        places = [2 * i + c for i in chosen for c in range(2)]
        inner = hessian[places].sqrt()[:, None] * (rows @ rows.T)[places][:, places] * hessian[places].sqrt()
        return float(torch.logdet(torch.eye(len(places)) + inner))

    found = ba.acquire(q, pool, 3).tolist()
    for size in range(3):
        chosen = tuple(found[:size])
        gains = [information((*chosen, i)) if i not in chosen else -1 for i in range(20)]
        assert found[size] == int(np.argmax(gains))


@pytest.mark.parametrize("make", [classes, numbers])
def test_pieces_loaders_arrays_and_mixtures_will_do(make, monkeypatch):
    q, pool = make(), torch.randn(60, 2).double()
    found = ba.acquire(q, pool, 5)
    assert len(set(found.tolist())) == 5
    assert torch.equal(found, ba.acquire(q, pool.numpy(), 5))
    assert torch.equal(found, ba.acquire(ba.Mixture([q, q.replace(n_data=40)]), pool, 5))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pool, torch.zeros(60)), batch_size=13)
    assert torch.equal(found, ba.acquire(q, loader, 5))
    monkeypatch.setattr(acquiring, "_CHUNK", 7)
    assert torch.equal(found, ba.acquire(q, pool, 5))
    # The information that the candidates have by themselves decides on what is left.
    monkeypatch.setattr(acquiring, "_CANDIDATES", 20)
    assert len(set(ba.acquire(q, pool, 5).tolist())) == 5


def test_networks_that_disagree_about_a_number_add_to_the_covariance():
    members = [classes(seed, 2, "regression").replace(noise_variance=0.1) for seed in (0, 1)]
    pool = torch.randn(6, 2).double()
    mean, joint = acquiring._moments(ba.Mixture(members, [1, 3]), pool, None, joint=True)
    each = [acquiring._moments(ba.Mixture([q]), pool, None, joint=True) for q in members]
    away = (each[0][0] - each[1][0]).flatten()
    expected = 0.25 * each[0][1] + 0.75 * each[1][1] + 0.25 * 0.75 * torch.outer(away, away)
    assert torch.allclose(mean, 0.25 * each[0][0] + 0.75 * each[1][0])
    assert torch.allclose(joint, expected)


def test_a_binary_label_is_chosen_by_its_gradient():
    q, pool = classes(n_out=1, likelihood="binary"), torch.randn(30, 2).double()
    first = int(ba.acquire(q, pool, 4)[0])
    p = q.model(pool).detach().sigmoid()[:, 0]
    hidden = torch.tanh(pool @ q.mean["0.weight"].T + q.mean["0.bias"])
    assert first == int((torch.minimum(p, 1 - p) * hidden.norm(dim=1)).argmax())


def test_what_cannot_be_answered_is_named():
    pool = torch.randn(5, 2).double()
    for q in (classes(), numbers()):
        with pytest.raises(MatchError, match="the pool has 5 inputs, and k=6"):
            ba.acquire(q, pool, 6)
    with pytest.raises(SettingError, match="noise"):
        ba.acquire(numbers(None), pool, 2)
    with pytest.raises(MatchError, match="from a linear layer"):
        ba.acquire(classes(), pool, 2, forward=lambda model, x: model(x)[:, None])
