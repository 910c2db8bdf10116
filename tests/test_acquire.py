"""What to label next, against brute force: every joint entropy written out, every determinant of a dense covariance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import acquiring
from bayesadam.acquiring import most_joint_information
from bayesadam.errors import MatchError, SettingError
from cases import mlp
from floats import assert_close

METHODS = ("batchbald", "bald", "epig", "leverage", "badge")


def classes(seed: int = 0, n_out: int = 3, likelihood: str = "classification") -> ba.Posterior:
    torch.manual_seed(seed)
    model = mlp(2, 8, n_out).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(40, 2).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    for _ in range(50):
        optimizer.zero_grad()
        f = model(x)
        loss = nn.functional.cross_entropy(f, y) if likelihood == "classification" else f.square().mean()
        loss.backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, 40, likelihood=likelihood, prior_precision=5.0)


def numbers(noise: float | None = 0.1) -> ba.Posterior:
    return classes(n_out=2, likelihood="regression").replace(noise_variance=noise)


def joint_information(probs: Tensor, weights: Tensor, rows: tuple[int, ...]) -> float:
    """I(y₁…y_k; θ), every answer written out."""
    joint = 0.0
    for answer in itertools.product(range(probs.shape[2]), repeat=len(rows)):
        p = float(weights @ torch.stack([probs[:, i, c] for i, c in zip(rows, answer, strict=True)]).prod(dim=0))
        joint -= p * np.log(p) if p > 0 else 0.0
    own = -(probs * probs.clamp(min=1e-300).log()).sum(dim=2)
    return joint - float((weights @ own)[list(rows)].sum())


def test_batches_of_classes_have_the_most_joint_information_one_after_the_other():
    source = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(6, 7, 3, generator=source)).double().softmax(dim=-1)
    weights = torch.rand(6, generator=source).double()
    weights /= weights.sum()
    found = most_joint_information(probs, weights, 4, seed=0).tolist()
    for size in range(1, 5):
        chosen = tuple(found[: size - 1])
        gains = [joint_information(probs, weights, (*chosen, i)) if i not in chosen else -1 for i in range(7)]
        assert found[size - 1] == int(np.argmax(gains))


def test_sampled_joint_entropies_are_near_the_exact_ones(monkeypatch):
    source = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(20, 12, 3, generator=source)).double().softmax(dim=-1)
    weights = torch.full((20,), 1 / 20, dtype=torch.float64)
    exact = most_joint_information(probs, weights, 5, seed=0)
    monkeypatch.setattr(acquiring, "_EXACT", 3)
    monkeypatch.setattr(acquiring, "_SAMPLED", 20_000)
    sampled = most_joint_information(probs, weights, 5, seed=0)
    worth = [joint_information(probs, weights, tuple(rows.tolist())) for rows in (exact, sampled)]
    assert_close(worth[1], worth[0], rtol=0.01)
    alone = joint_information(probs, weights, tuple(range(5)))
    assert min(worth) > alone


def test_numbers_are_chosen_by_the_determinant_of_their_covariance():
    q, pool = numbers(), torch.randn(6, 2).double()
    covariance = q.predict(pool, joint=True).joint_covariance

    def information(rows: tuple[int, ...]) -> float:
        places = [2 * i + c for i in rows for c in range(2)]
        return float(torch.logdet(torch.eye(len(places)) + covariance[places][:, places] / 0.1))

    found = ba.acquire(q, pool, 3).tolist()
    for size in range(3):
        chosen = tuple(found[:size])
        gains = [information((*chosen, i)) if i not in chosen else -1 for i in range(6)]
        assert found[size] == int(np.argmax(gains))


def test_numbers_are_chosen_for_the_variance_they_take_from_the_target():
    q, pool, target = numbers(), torch.randn(6, 2).double(), torch.randn(4, 2).double()
    covariance = q.predict(torch.cat([pool, target]), joint=True).joint_covariance

    def variance_left(rows: tuple[int, ...]) -> float:
        places, rest = [2 * i + c for i in rows for c in range(2)], slice(12, None)
        inner = covariance[places][:, places] + 0.1 * torch.eye(len(places))
        taken = covariance[rest][:, places] @ torch.linalg.solve(inner, covariance[places][:, rest])
        return float((covariance[rest, rest] - taken).trace())

    found = ba.acquire(q, pool, 3, method="epig", target=target).tolist()
    for size in range(3):
        chosen = tuple(found[:size])
        left = [variance_left((*chosen, i)) if i not in chosen else np.inf for i in range(6)]
        assert found[size] == int(np.argmin(left))


def test_epig_of_classes_is_the_mean_of_the_mutual_informations():
    source = torch.Generator().manual_seed(0)
    probs, target = ((2 * torch.randn(5, n, 3, generator=source)).double().softmax(dim=-1) for n in (4, 6))
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    found = acquiring._shared_information(probs, target, weights)
    for i in range(4):
        each = []
        for j in range(6):
            joint = torch.einsum("s,sc,sd->cd", weights, probs[:, i], target[:, j])
            apart = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0)
            each.append(float((joint * (joint / apart).log()).sum()))
        assert_close(float(found[i]), float(np.mean(each)))


def test_gradients_are_spread_as_the_written_out_ones_would_be():
    q, pool = classes(), torch.randn(30, 2).double()
    hidden = torch.tanh(pool @ q.mean["0.weight"].T + q.mean["0.bias"])
    probs = q.model(pool).detach().softmax(dim=-1)
    errors = probs - nn.functional.one_hot(probs.argmax(dim=1), 3)
    gradients = (errors[:, :, None] * hidden[:, None]).flatten(1)
    found = ba.acquire(q, pool, 6, method="badge", seed=3)
    assert torch.equal(found, ba.acquire(q, pool, 6, seed=3))
    chosen, source = [int(gradients.norm(dim=1).argmax())], torch.Generator().manual_seed(3)
    while len(chosen) < 6:
        away = torch.cdist(gradients, gradients[chosen]).amin(dim=1).square()
        away[chosen] = 0
        chosen.append(int(torch.multinomial(away.float(), 1, generator=source)))
    assert found.tolist() == chosen


@pytest.mark.slow
def test_bald_is_the_largest_mutual_information():
    q, pool = classes(), 2 * torch.randn(50, 2).double()
    found = ba.acquire(q, pool, 5, method="bald", n_samples=20_000)
    by_moments = q.predict(pool, covariance=True).mutual_information()
    assert set(found.tolist()) <= set(by_moments.topk(9).indices.tolist())


def test_leverage_is_novelty():
    q, pool = classes(), torch.randn(50, 2).double()
    assert ba.acquire(q, pool, 4, method="leverage").tolist() == q.novelty(pool).topk(4).indices.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_chunks_loaders_arrays_and_mixtures_will_do(method):
    q, pool = classes(), torch.randn(60, 2).double()
    found = ba.acquire(q, pool, 5, method=method)
    assert len(set(found.tolist())) == 5
    assert torch.equal(found, ba.acquire(q, pool, 5, method=method, chunk=7))
    assert torch.equal(found, ba.acquire(q, pool.numpy(), 5, method=method))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pool, torch.zeros(60)), batch_size=13)
    if method != "leverage":
        assert torch.equal(found, ba.acquire(q, loader, 5, method=method))
    mixed = ba.acquire(ba.Mixture([q, classes(1)]), pool, 5, method=method)
    assert len(set(mixed.tolist())) == 5


def test_few_candidates_are_the_most_informative():
    q, pool = classes(), 2 * torch.randn(200, 2).double()
    few, many = (set(ba.acquire(q, pool, 3, method="batchbald", n_candidates=n).tolist()) for n in (20, 200))
    best = set(q.predict(pool, covariance=True).mutual_information().topk(60).indices.tolist())
    assert few <= best
    assert len(many) == 3


@pytest.mark.parametrize("likelihood", ["binary", "poisson"])
@pytest.mark.parametrize("method", ["batchbald", "bald", "epig"])
def test_other_likelihoods_are_served(likelihood, method):
    q, pool = classes(n_out=1, likelihood=likelihood), torch.randn(30, 2).double()
    assert len(set(ba.acquire(q, pool, 4, method=method).tolist())) == 4


def test_memory_that_is_short_leaves_draws():
    q, pool = numbers(), torch.randn(40, 2).double()
    assert len(set(ba.acquire(q, pool, 4, memory_budget=20_000, n_samples=400).tolist())) == 4


def test_what_cannot_be_answered_is_named():
    q, pool = classes(), torch.randn(5, 2).double()
    with pytest.raises(SettingError, match="method must be None or one of"):
        ba.acquire(q, pool, 2, method="coreset")
    for method in METHODS:
        with pytest.raises(MatchError, match="the pool has 5 inputs, and k=6"):
            ba.acquire(q, pool, 6, method=method)
    with pytest.raises(SettingError, match="noise"):
        ba.acquire(numbers(None), pool, 2)
    with pytest.raises(SettingError, match="badge"):
        ba.acquire(numbers(), pool, 2, method="badge")
    with pytest.raises(MatchError, match="second time"):
        ba.acquire(q, ((part, torch.zeros(len(part))) for part in pool.split(2)), 2, method="bald")
