"""Fine-tuning the weights with the largest curvature, and no others."""

from __future__ import annotations

import pytest
import torch

import bayesadam as ba
from bayesadam.pruning import tune_only, tuning_masks
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.settings import Settings
from cases import mlp, train


def posterior_of(model):
    moments = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    mode = {name: p.detach().clone() for name, p in model.named_parameters()}
    return ba.Posterior(mode, Diagonal(moments), Settings(100.0, dict.fromkeys(mode, 1.0)), model=model)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_masks_are_true_at_the_largest_curvature(share):
    model = mlp(7, 9, 3)
    posterior = posterior_of(model)
    masks = tuning_masks(posterior, share)
    scores = torch.cat([v.flatten() for v in posterior.structure.second_moment.values()])
    chosen = torch.cat([masks[name].flatten() for name in posterior.mode])
    assert int(chosen.sum()) == len(scores) - round((1 - share) * len(scores))
    assert scores[chosen].min() >= scores[~chosen].max() if share < 1 else bool(chosen.all())


def test_rotated_curvature_counts_by_its_diagonal():
    torch.manual_seed(0)
    model = mlp(4, 3)
    adam = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(adam, keep=20, every=1)
    train(model, adam)
    posterior = ba.Posterior.from_recorder(model, recorder, 240, power=0.5)
    v, basis = posterior.structure.second_moment["0.weight"], posterior.structure.bases["0.weight"]
    dense = torch.kron(basis.right, basis.left) @ torch.diag(v.T.flatten()) @ torch.kron(basis.right, basis.left).T
    diagonal = dense.diagonal().view(v.T.shape).T
    mask = tuning_masks(posterior, 0.2)["0.weight"]
    assert diagonal[mask].min() >= diagonal[~mask].max()


def test_excluded_parameters_are_trained_whole():
    masks = tuning_masks(posterior_of(mlp(7, 9, 3)), 0.01, exclude="2.*")
    assert bool(masks["2.weight"].all())
    assert bool(masks["2.bias"].all())
    assert int(masks["0.weight"].sum() + masks["0.bias"].sum()) == 1


@pytest.mark.parametrize(
    "kind", [lambda p: torch.optim.AdamW(p, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)]
)
def test_only_the_chosen_weights_move(kind):
    torch.manual_seed(0)
    model = mlp(4, 5, 1)
    optimizer = kind(model.parameters())
    # Momentum from before must not carry the others away.
    train(model, optimizer, steps=5)
    masks = {"0.weight": torch.rand(5, 4) < 0.5, "2.weight": torch.ones(1, 5, dtype=torch.bool)}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tune_only(model, masks, optimizer):
        train(model, optimizer, steps=5)
    for name, parameter in model.named_parameters():
        chosen = masks.get(name, torch.zeros_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter[~chosen], before[name][~chosen])
        assert bool((parameter[chosen] != before[name][chosen]).all())
    train(model, optimizer, steps=1)
    assert not torch.equal(model[0].bias, before["0.bias"])


def test_masks_that_train_nothing_and_strange_optimisers_are_refused():
    model = mlp(4, 5, 1)
    masks = {"0.weight": torch.ones(5, 4, dtype=torch.bool)}
    with pytest.raises(ba.errors.MatchError, match="does not have it"):
        tune_only(model, masks, torch.optim.Adam(model[2].parameters()))
    with pytest.raises(ba.errors.SettingError, match="nothing would be trained"):
        tune_only(model, {"0.weight": ~masks["0.weight"]}, torch.optim.Adam(model.parameters()))
    with pytest.raises(ba.errors.MatchError, match="of no parameter"):
        tune_only(model, {"nothing": masks["0.weight"]}, torch.optim.Adam(model.parameters()))
