"""A posterior of the pruned network, and units that Torch-Pruning takes out."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress import units
from bayesadam.errors import MatchError
from cases import mlp, trained
from compress.cases_compress import normalised, posterior_of, removed
from floats import assert_close
from predict.cases_networks import Lambda


def posterior() -> ba.Posterior:
    return ba.Posterior.from_optimizer(*trained(3, 8, 1), 60, likelihood="regression", prior_precision=1.0)


@pytest.mark.parametrize("form", ["map", "likelihood"])
def test_the_model_of_the_pruned_posterior_has_the_masks_and_the_users_is_untouched(form: str) -> None:
    """In the likelihood form the mean that it has is the shrunk one."""
    dense = posterior().replace(form=form)
    weights = {name: p.detach().clone() for name, p in dense.model.named_parameters()}
    kept = ba.compress.masks(dense, 0.6)
    small = ba.prune(dense, 0.6)
    assert removed(kept) == round(0.6 * dense.n_weights)
    for name, parameter in small.model.named_parameters():
        assert_close(parameter, torch.where(kept[name], dense.mean[name], 0))
        assert_close(small.mean[name], parameter)
        assert torch.equal(dense.model.get_parameter(name), weights[name])
        assert torch.equal(dense.mode[name], weights[name])


def test_pruned_weights_are_zero_in_draws_variances_and_predictions(tmp_path) -> None:
    dense = posterior().replace(noise_variance=0.1)
    kept, small = ba.compress.masks(dense, 0.6), ba.prune(dense, 0.6)
    small.save(tmp_path / "small.safetensors")
    for each in (small, ba.Posterior.load(tmp_path / "small.safetensors", copy.deepcopy(dense.model))):
        draws = each.sample(50, generator=torch.Generator().manual_seed(0))
        for name, mask in kept.items():
            assert float(draws[name][:, ~mask].abs().max()) < 1e-13
            assert_close(each.variance[name][mask], dense.variance[name][mask])
            assert not each.snr()[name][~mask].any()
        assert bool(torch.isfinite(each.log_prob(each.sample(generator=torch.Generator().manual_seed(1)))))
    # The linearised variance is that of the weights that stay.
    x = torch.randn(5, 3)
    expected = torch.zeros(5)
    for row in range(5):
        gradients = torch.autograd.grad(small.model(x[row : row + 1]).sum(), list(small.model.parameters()))
        terms = zip(gradients, small.variance.items(), strict=True)
        expected[row] = sum((g.square() * variance * kept[name]).sum() for g, (name, variance) in terms)
    assert_close(small.predict(x).f_variance.flatten(), expected, rtol=1e-4)


def test_rotated_posteriors_are_conditioned_by_their_own_factors() -> None:
    model, optimizer = trained(3, 8, 1)
    dense = ba.Posterior.from_optimizer(model, optimizer, 60, likelihood="regression", prior_precision=1.0)
    rotated, matrices = dense.with_inputs(torch.randn(50, 3)), ["0.weight", "2.weight"]
    small = ba.prune(rotated, 0.5, ranking=dense.snr(), rounds=1)
    kept = ba.compress.masks(dense, 0.5, ranking=dense.snr(), only=matrices)
    assert_close(small.mean, ba.compress.condition(rotated, kept).mean)
    for name in matrices:
        assert torch.equal(small.mean[name] != 0, kept[name])
        assert not torch.equal(small.mean[name], dense.mode[name] * kept[name])
    # Of no single weight it is known there that it is 0.
    assert_close(small.variance, rotated.variance)


@pytest.mark.filterwarnings("ignore:left whole")
def test_running_statistics_go_with_the_copy() -> None:
    model, optimizer, x = normalised()
    dense = ba.Posterior.from_optimizer(model, optimizer, 200, likelihood="classification", prior_precision=1.0)
    small = ba.prune(dense, 0.3)
    before = small.predict(x[:5]).probs
    model.train()(x + 3)
    assert small.model[1].running_mean is not model[1].running_mean
    assert torch.equal(small.predict(x[:5]).probs, before)


def test_torch_pruning_takes_out_the_channels_of_least_score() -> None:
    torch_pruning = pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    branches = Lambda(
        lambda self, x: self.head(sum(side(self.conv(x).relu()) for side in (self.left, self.right)).relu().flatten(1)),
        conv=nn.Conv2d(1, 6, 3),
        left=nn.Conv2d(6, 4, 1),
        right=nn.Conv2d(6, 4, 1),
        head=nn.Linear(16, 2),
    )
    dense = posterior_of(branches, delta=1.0)
    small = copy.deepcopy(dense.model)
    how = ba.compress.importance(dense, small)
    scores = ba.compress.weight_scores(dense)
    # Of the first layer, whose channels two others read.
    graph = torch_pruning.DependencyGraph().build_dependency(small, example_inputs=torch.zeros(1, 1, 4, 4))
    group = graph.get_pruning_group(small.conv, torch_pruning.prune_conv_out_channels, idxs=list(range(6)))
    expected = scores["conv.weight"].flatten(1).sum(1) + scores["conv.bias"]
    expected = expected + scores["left.weight"].sum((0, 2, 3)) + scores["right.weight"].sum((0, 2, 3))
    assert_close(how(group), expected)
    pruner = torch_pruning.pruner.BasePruner(
        small, torch.zeros(1, 1, 4, 4), how, pruning_ratio=0.5, ignored_layers=[small.head]
    )
    pruner.step()
    assert (small.conv.out_channels, small.left.out_channels, small.head.in_features) == (3, 2, 8)
    best = expected.topk(3).indices.sort().values
    assert torch.equal(small.conv.weight, dense.mode["conv.weight"][best])
    assert small(torch.zeros(1, 1, 4, 4)).shape == (1, 2)


def test_an_importance_is_of_the_posteriors_network(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", SimpleNamespace())
    with pytest.raises(MatchError, match=r"'0\.weight' has shape \(9, 3\), in the posterior \(8, 3\)"):
        ba.compress.importance(posterior(), mlp(3, 9, 1))


class Padding(nn.Conv2d):
    """A convolution whose own forward pads, as TensorFlow's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


@pytest.mark.parametrize(
    ("model", "x", "said"),
    [
        # A weight that no layer of torch's multiplies.
        (
            Lambda(lambda self, x: x @ self.weight.view(4, 3), weight=nn.Parameter(torch.ones(12))),
            torch.randn(20, 4),
            "Prune without inputs=",
        ),
        (Padding(1, 2, 2), torch.randn(20, 1, 4, 4), "its own forward pads"),
    ],
)
def test_what_inputs_cannot_condition_is_told(model: nn.Module, x: Tensor, said: str) -> None:
    adam = torch.optim.Adam(model.parameters())
    model(x).square().mean().backward()
    adam.step()
    posterior = ba.Posterior.from_optimizer(model, adam, 20, likelihood="regression")
    with pytest.raises(MatchError, match=said):
        ba.prune(posterior, 0.5, inputs=x)


def test_a_posterior_of_a_small_part_of_the_model_is_told() -> None:
    model = mlp(20, 30, 2)
    model[0].requires_grad_(False)
    adam = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    model(torch.randn(8, 20)).square().mean().backward()
    adam.step()
    head = ba.Posterior.from_optimizer(model, adam, 8, likelihood="classification")
    assert "62 weights of the model's 692 in 2 parameters" in str(head)
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"holds 62 of the model's 692 weights"):
        ba.prune(head, 0.5)


# --- units taken out --------------------------------------------------------------------------------------------------


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


def pruner_of(posterior: ba.Posterior, ratio: float, *, everywhere: bool = False) -> Any:
    pruner: Any = pytest.importorskip("torch_pruning").pruner.BasePruner
    small = copy.deepcopy(posterior.model)
    how = ba.compress.importance(posterior, small)
    options = {"pruning_ratio": ratio, "ignored_layers": [small.head], "global_pruning": everywhere}
    return pruner(small, torch.zeros(1, 2, 6, 6), how, **options)


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
