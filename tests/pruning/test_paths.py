"""Scores along paths, against sums over paths that are written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.pruning import weight_scores
from floats import assert_close


def posterior_over(model: nn.Module, x: torch.Tensor) -> ba.Posterior:
    torch.manual_seed(0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        adam.zero_grad()
        model(x).square().mean().backward()
        adam.step()
    return ba.Posterior.from_optimizer(model, adam, n_data=10)


def proportional(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for one factor, which the layers' means of one leave open."""
    ratio = found.double().flatten() / expected.double().flatten()
    assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-5)


def test_a_score_squared_is_the_sum_over_all_paths_through_the_weight():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    posterior = posterior_over(model, torch.randn(7, 3))
    s = {name: score.double() for name, score in weight_scores(posterior).items()}
    found = ba.pruning.path_scores(posterior, example_input=torch.zeros(1, 3))
    expected = {name: torch.zeros_like(score) for name, score in s.items()}
    # Paths start at an input or at a bias, and end at an output.
    mean_one = {}
    for layer in ("0", "2"):
        inward = s[f"{layer}.weight"]
        if layer == "2":
            inward = inward * mean_one["0"]
        reach = (inward.square().sum(dim=1) + s[f"{layer}.bias"].square()).sqrt()
        mean_one[layer] = reach / reach.mean()
    for i, j, k, m in itertools.product(range(3), range(4), range(3), range(2)):
        w0, w2, w4 = (s[f"{n}.weight"][to, since] for n, to, since in (("0", j, i), ("2", k, j), ("4", m, k)))
        expected["0.weight"][j, i] += (w0 * w2 * w4) ** 2
    proportional(found["0.weight"].square(), expected["0.weight"])
    for j, k, m in itertools.product(range(4), range(3), range(2)):
        w2, w4 = s["2.weight"][k, j], s["4.weight"][m, k]
        expected["2.weight"][k, j] += (mean_one["0"][j] * w2 * w4) ** 2
        expected["0.bias"][j] += (s["0.bias"][j] * w2 * w4) ** 2
    proportional(found["2.weight"].square(), expected["2.weight"])
    proportional(found["0.bias"].square(), expected["0.bias"])
    proportional(found["4.weight"], s["4.weight"] * mean_one["2"])
    assert_close(found["4.bias"], s["4.bias"].float())


def test_convolutions_are_followed_through_pooling_and_flattening():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    posterior = posterior_over(model, torch.randn(5, 1, 6, 6))
    s = weight_scores(posterior)
    found = ba.pruning.path_scores(posterior, example_input=torch.zeros(1, 1, 6, 6))
    reach = (s["0.weight"].square().sum(dim=(1, 2, 3)) + s["0.bias"].square()).sqrt()
    read = s["4.weight"].square().view(2, 3, 4).sum(dim=(0, 2)).sqrt()
    proportional(found["4.weight"], (s["4.weight"].view(2, 3, 4) * reach[:, None]).view(2, 12))
    proportional(found["0.weight"], s["0.weight"] * read[:, None, None, None])


def test_a_unit_that_nothing_reaches_or_nobody_reads_is_worth_nothing():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0
        model[2].weight[:, 2] = 0
    posterior = posterior_over_as_is(model)
    found = ba.pruning.path_scores(posterior, example_input=torch.zeros(1, 3))
    assert not found["2.weight"][:, 1].any()
    assert not found["0.weight"][2].any()
    assert not found["0.bias"][2].any()
    assert found["0.weight"][0].all()


def posterior_over_as_is(model: nn.Module) -> ba.Posterior:
    moments = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return ba.Posterior.from_moments(model, dict(model.named_parameters()), moments, 10)


def test_what_is_not_understood_keeps_its_own_scores():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x + self.a(x))

    posterior = posterior_over(Residual(), torch.randn(5, 3))
    found = ba.pruning.path_scores(posterior, example_input=torch.zeros(1, 3))
    for name, score in weight_scores(posterior).items():
        assert_close(found[name], score)


def test_the_masks_have_the_asked_for_count_and_the_model_its_mode():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    posterior = posterior_over(model, torch.randn(5, 3))
    scores = ba.pruning.path_scores(posterior, ranking="magnitude", example_input=torch.zeros(1, 3))
    masks = ba.pruning_masks(posterior, 0.5, ranking=scores)
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.5 * 50)
    assert model.training
    with pytest.raises(ba.BayesAdamError):
        ba.pruning.path_scores(posterior, ranking="luck", example_input=torch.zeros(1, 3))
