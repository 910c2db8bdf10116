"""Biases that a batch norm follows: no gradient, but the running mean holds them."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba


def trained() -> tuple[nn.Sequential, torch.optim.Adam, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.data.fill_(2.0)
    optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-2), torch.randn(200, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for rows in torch.randint(200, (200, 32)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval(), optimizer, x


def test_they_are_left_whole_with_a_warning():
    model, optimizer, x = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 200, prior_precision=1.0)
    # As the paper has it they have the least signal-to-noise ratio of all, and removing them is another network.
    assert (
        posterior.structure.second_moment["0.bias"].max() < 1e-6 * posterior.structure.second_moment["0.weight"].mean()
    )
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"left whole: 0\.bias"):
        masks = ba.pruning_masks(posterior, 0.1)
    assert masks["0.bias"].all()
    others = sum(mask.numel() for name, mask in masks.items() if name != "0.bias")
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.1 * others)
    before = model(x)
    ba.prune(model, masks)
    kept = (model(x) - before).norm() / before.norm()
    model[0].bias.data.zero_()
    assert kept < 0.2 < (model(x) - before).norm() / before.norm()


def test_excluded_ones_are_not_warned_of_and_others_are_not_held():
    model, optimizer, _ = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 200, prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.pruning_masks(posterior, 0.1, exclude="biases")
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    adam = torch.optim.Adam(plain.parameters())
    plain(torch.randn(8, 6)).square().mean().backward()
    adam.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.pruning_masks(ba.Posterior.from_optimizer(plain, adam, 8, prior_precision=1.0), 0.1)


def test_a_checkpoint_is_pruned_the_same_way(tmp_path: Path):
    model, optimizer, _ = trained()
    path, out = tmp_path / "last.pt", tmp_path / "pruned.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"left whole: 0\.bias"):
        ba.pruning.prune_checkpoint(path, out, 0.3)
    pruned = torch.load(out, weights_only=True)["model"]
    assert torch.equal(pruned["0.bias"], model.state_dict()["0.bias"])
    assert sum(int((tensor == 0).sum()) for name, tensor in pruned.items() if name.endswith(("weight", "bias"))) > 0
