"""Units taken out by Torch-Pruning after the rest was conditioned: the cut changes nothing, the loss is made up for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress import units
from bayesadam.errors import MatchError
from compress.cases_compress import posterior_of
from floats import assert_close

torch_pruning = pytest.importorskip("torch_pruning")


class Block(nn.Module):
    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(fan_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.deep, self.norm2 = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width)
        self.two, self.short = nn.Conv2d(width, width, 1), nn.Conv2d(fan_in, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.one(x)).relu()
        out: Tensor = (self.short(x) + self.two(self.norm2(self.deep(inner)).relu())).relu()
        return out


class Net(nn.Module):
    """Residual blocks with batch norms and depthwise convolutions, whose outputs are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = Block(2, 12), Block(12, 10), nn.Conv2d(12, 6, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(16, 12, 2, stride=2), nn.Linear(12 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.up(torch.cat([self.left(x), self.right(x).relu()], dim=1)).relu()
        out: Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


@pytest.fixture(scope="module")
def dense() -> tuple[ba.Posterior, Tensor]:
    """A posterior and inputs, the channels of which are correlated, as inputs are."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(300, 2, 6, 6).cumsum(2).cumsum(3)
    with torch.no_grad():
        for _ in range(30):
            net(x)
    return posterior_of(net.eval()), x


def pruner_of(posterior: ba.Posterior, ratio: float, *, everywhere: bool = False) -> object:
    small = copy.deepcopy(posterior.model)
    how = ba.compress.importance(posterior, small)
    options = {"pruning_ratio": ratio, "ignored_layers": [small.head], "global_pruning": everywhere}
    return torch_pruning.pruner.BasePruner(small, torch.zeros(1, 2, 6, 6), how, **options)


@pytest.mark.parametrize(("ratio", "everywhere"), [(0.25, False), (0.5, False), (0.3, True)])
def test_the_cut_changes_nothing_and_the_loss_is_made_up_for(dense, ratio, everywhere, monkeypatch) -> None:
    posterior, x = dense
    given: list[tuple[dict[str, Tensor], ba.Posterior]] = []

    def conditioned(posterior: ba.Posterior, masks: dict[str, Tensor], *args: object, **how: object) -> ba.Posterior:
        given.append((masks, ba.compress.condition(posterior, masks, *args, **how)))
        return given[-1][1]

    monkeypatch.setattr(units, "condition", conditioned)
    small = units.remove_units(posterior, pruner_of(posterior, ratio, everywhere=everywhere), x[:200])
    alone = pruner_of(posterior, ratio, everywhere=everywhere)
    alone.step()
    shapes = {name: tensor.shape for name, tensor in alone.model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in small.state_dict().items()} == shapes
    assert {name: p.dtype for name, p in small.named_parameters()} == dict.fromkeys(posterior.mode, torch.float32)
    [(masks, whole)] = given
    size = sum(p.numel() for p in small.parameters())
    assert size == sum(int(mask.sum()) for mask in masks.values()) < 0.95 * posterior.n_weights
    assert_close(small(x), whole.model(x), rtol=1e-5, atol=1e-5)
    loss, lost = ((net(x[200:]) - posterior.model(x[200:])).square().mean() for net in (small, alone.model))
    assert loss < 0.2 * lost


def test_nothing_to_remove_and_another_network(dense) -> None:
    posterior, x = dense
    assert_close(ba.compress.remove_units(posterior, pruner_of(posterior, 0.0), x)(x), posterior.model(x))
    pruner = pruner_of(posterior, 0.5)
    pruner.step()
    with pytest.raises(MatchError, match="no copy of the posterior's"):
        ba.compress.remove_units(posterior, pruner, x)
