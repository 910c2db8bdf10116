"""The published methods on layers small enough to know the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compress import published


def error(model: nn.Module, other: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - other(x)).square().mean())


@pytest.fixture
def layer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    mixed = torch.randn(12, 12, dtype=torch.float64) + 0.5
    return nn.Sequential(nn.Linear(12, 5)).double(), torch.randn(300, 12, dtype=torch.float64) @ mixed


def test_a_sweep_that_removes_one_column_gives_the_conditional_mean_in_blocks_of_any_size(layer):
    model, x = layer
    w, h = model[0].weight.detach(), x.mT @ x / len(x)
    ridge = h + 0.01 * h.diagonal().mean() * torch.eye(12, dtype=h.dtype)
    moved = published.sweep(w, h, lambda *_: lambda column, k: torch.zeros_like(column) if k == 0 else column)
    expected = w[:, 1:] + w[:, :1] * torch.linalg.solve(ridge[1:, 1:], ridge[1:, :1]).mT
    assert (moved[:, 0] == 0).all()
    torch.testing.assert_close(moved[:, 1:], expected, rtol=1e-8, atol=1e-10)
    onto = published.grid_of(w, 3)
    whole, parts = (published.sweep(w, h, lambda *_: lambda column, k: onto(column), block) for block in (12, 5))
    torch.testing.assert_close(parts, whole)


def test_sparsegpt_moves_what_stays(layer):
    model, x = layer
    swept = published.sparsegpt(model, x, 0.5, block=4)
    masked = nn.Sequential(nn.Linear(12, 5)).double()
    masked.load_state_dict(model.state_dict())
    published.write(masked[0], published.matrix_of(model[0]) * (swept[0].weight != 0))
    assert int((swept[0].weight == 0).sum()) == 30
    assert error(model, swept, x) < 0.7 * error(model, masked, x)


def test_gptq_is_closer_than_rounding_and_stays_on_its_grid(layer):
    model, x = layer
    for search in (False, True):
        ours, nearest = published.gptq(model, x, 3, search=search), published.rtn(model, 3, search=search)
        assert error(model, ours, x) < 0.8 * error(model, nearest, x)
        assert max(len(row.unique()) for row in ours[0].weight) <= 8


def test_wanda_and_magnitude_choose_by_their_scores(layer):
    model, x = layer
    w = model[0].weight.detach()
    for small, scores in (
        (published.wanda(model, x, 0.25), w.abs() * x.norm(dim=0)),
        (published.magnitude(model, 0.25), w.abs().view(1, -1)),
    ):
        limit = scores.sort(dim=1).values[:, scores.shape[1] // 4, None]
        expected = torch.where(scores < limit, 0, w.view_as(scores)).view_as(w)
        torch.testing.assert_close(small[0].weight.detach(), expected, rtol=0, atol=0)


def test_convolutions_are_patches_and_later_layers_see_the_pruned_ones():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    )
    x = torch.randn(200, 2, 8, 8)
    moment = published.moment_of(model.eval(), model[0], x)
    outputs = model[0](x) - model[0].bias[:, None, None]
    w = published.matrix_of(model[0]).double()
    torch.testing.assert_close(
        (w @ moment @ w.mT).diagonal(), outputs.square().mean((0, 2, 3)).double(), rtol=1e-4, atol=1e-6
    )
    small = published.sparsegpt(model, x, 0.5)
    assert not torch.equal(published.moment_of(small, small[4], x), published.moment_of(model, model[4], x))
    again = published.renormed(small, x)
    torch.testing.assert_close(again[1].running_mean, small[0](x).mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    assert torch.equal(model[1].running_mean, torch.zeros(3))


def test_a_layer_of_transformers_is_the_same_matrix(layer):
    model, x = layer
    utils = pytest.importorskip("transformers.pytorch_utils")
    turned = nn.Sequential(utils.Conv1D(5, 12)).double()
    turned.load_state_dict({"0.weight": model[0].weight.mT, "0.bias": model[0].bias})
    for method, how in ((published.sparsegpt, 0.5), (published.gptq, 3)):
        turned_back, expected = method(turned, x, how), method(model, x, how)
        torch.testing.assert_close(turned_back[0].weight.mT, expected[0].weight, rtol=1e-9, atol=1e-12)
