"""The rivals of LeNet-300-100 and its masks against their definitions, on a small network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

import lenet
from bayesadam.engine.network import Network, flatten, initial, member, unflatten


@pytest.fixture
def images(monkeypatch):
    monkeypatch.setattr(lenet, "NETWORK", Network(6, (8, 7), 3))
    monkeypatch.setattr(lenet, "BATCH", 16)
    source = torch.Generator().manual_seed(0)
    x = torch.rand(400, 6, generator=source)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()
    return lenet.Images(x[:320], y[:320], x[320:], y[320:])


def test_the_kl_is_the_integral_up_to_a_constant():
    """KL = E log|ε| − ½ log α + c with ε ~ N(1, α), by quadrature in float64."""
    log_alpha = torch.linspace(-4, 4, 9, dtype=torch.float64)
    # The middle of 400,000 cells never falls on the singularity at 0.
    z = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000 * 20 - 10
    density = torch.exp(-0.5 * z.square()) * (20 / 400_000) / (2 * torch.pi) ** 0.5
    means = torch.stack([(density * torch.log((1 + (0.5 * a).exp() * z).abs())).sum() for a in log_alpha])
    exact = means - 0.5 * log_alpha
    found = lenet.log_uniform_kl(torch.ones_like(log_alpha), log_alpha)
    offsets = found - exact
    assert float(offsets.max() - offsets.min()) < 0.02
    assert float(exact.max() - exact.min()) > 1


def test_snip_keeps_the_largest_products_of_weight_and_gradient(images):
    weights = flatten(initial(lenet.NETWORK, (3, 4)))
    masks = lenet.snip_masks(images, weights, torch.tensor([[0.5], [0.9]]), n=50)
    for index, kept in enumerate((0.5, 0.1)):
        model = lenet.NETWORK.build(member(unflatten(lenet.NETWORK, weights), index))
        F.cross_entropy(model(images.x[:50]), images.y[:50]).backward()
        product = torch.cat([(p * p.grad).abs().flatten() for p in model.parameters()])
        count = product.numel() - round((1 - kept) * product.numel())
        assert int(masks[index].sum()) == count
        assert set(masks[index].nonzero().flatten().tolist()) == set(product.topk(count).indices.tolist())


def test_weights_that_are_pruned_stay_so_and_the_others_learn(images):
    weights = flatten(initial(lenet.NETWORK, (0, 1)))
    weights[:, ::2] = 0
    found = lenet.fit(images, (0, 1), 4, weights=weights, laplace=(0.0, 1e-5)).weights
    assert torch.equal(found[:, ::2], torch.zeros_like(found[:, ::2]))
    assert bool((found[:, 1::2] != weights[:, 1::2]).any())


def test_a_laplace_prior_is_the_engines_own_per_network(images):
    together = lenet.fit(images, (0, 1), 3, laplace=(0.0, 1e-2)).weights
    for index, penalty in enumerate((0.0, 1e-2)):
        alone = lenet.fit(images, (index,), 3, laplace=(penalty,)).weights[0]
        torch.testing.assert_close(together[index], alone, rtol=1e-4, atol=1e-6)
    assert int((together[1] == 0).sum()) > int((together[0] == 0).sum())


@pytest.mark.parametrize("ranking", ["snr", "magnitude"])
def test_gradual_pruning_ends_at_its_sparsities(images, ranking):
    sparsity = torch.tensor([[0.5], [0.8]])
    stack = lenet.fit(images, (0, 0), 5, gradual=(sparsity, ranking))
    total = stack.weights.shape[1]
    assert (stack.weights == 0).sum(dim=1).tolist() == (sparsity[:, 0] * total).round().int().tolist()


def test_sparse_vd_learns_and_ranks_biases_first(images):
    theta, score = lenet.sparse_vd(images, (0, 1), 40, (0.0, 30.0))
    assert lenet.accuracy(images, theta)[0] > 0.6
    biases = unflatten(lenet.NETWORK, score)
    assert all(bool(torch.isinf(t).all()) == (t.dim() == 2) for t in biases.values())
    weights = torch.cat([t.flatten(1) for t in biases.values() if t.dim() > 2], dim=1)
    # A stronger prior leaves more weights with log α above 3.
    assert int((weights[1] < -3).sum()) > int((weights[0] < -3).sum())


def test_the_setting_is_the_best_on_average_for_each_sparsity():
    found = {("A", True, (s,), 0.9, seed): a for s, seed, a in ((1, 0, 0.9), (1, 1, 0.5), (2, 0, 0.8), (2, 1, 0.8))}
    found |= {("A", False, (1,), 0.9, 0): 0.3, ("A", False, (2,), 0.9, 0): 0.2}
    assert lenet.chosen(found) == {(True, 0.9): (2,), (False, 0.9): (1,)}
