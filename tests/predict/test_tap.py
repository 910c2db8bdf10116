"""The layers of a model and the inputs they are given, averaged over positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesadam.errors import MatchError
from bayesadam.predict.matrices import Matrix, layers_of
from bayesadam.predict.network import evaluating
from bayesadam.predict.tap import Seen, observed, tapped
from floats import assert_close
from predict.cases_networks import Conv1D, Lambda, encoder, normal, posterior_over

LAYERS = {
    "linear": (nn.Linear(6, 5), torch.randn(7, 6)),
    "linear with positions": (nn.Linear(6, 5), torch.randn(7, 3, 6)),
    "convolution": (nn.Conv2d(6, 4, 3), torch.randn(7, 6, 5, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), torch.randn(7, 6, 5, 5)),
    "one dimension": (nn.Conv1d(6, 4, 3), torch.randn(7, 6, 5)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3), torch.randn(7, 6, 5, 5)),
    "transformers": (Conv1D(6, 5), torch.randn(7, 3, 6)),
    "embedding": (nn.Embedding(6, 4), torch.randint(6, (7, 3))),
    "attention": (nn.MultiheadAttention(6, 2), torch.randn(3, 7, 6)),
}


def layer_of(module: nn.Module) -> Matrix:
    (layer,) = layers_of(module, dict(module.named_parameters()))
    return layer


def seen_by(module: nn.Module, *inputs: Any, size: int, mask: Tensor | None = None) -> Tensor:
    with tapped(module, [layer_of(module)], Seen(size, mask)) as seen:
        for x in inputs:
            module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    assert not module._forward_hooks
    return torch.stack(seen.runs[""]).mean(dim=0)


def pooled_by_hand(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return torch.stack([torch.bincount(row, minlength=6) / len(row) for row in x])
    if isinstance(module, nn.MultiheadAttention):
        return x.mean(dim=0)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
        return x.flatten(2).mean(dim=2)
    return x if x.dim() == 2 else x.mean(dim=1)


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_are_averaged_over_positions(name: str):
    module, x = LAYERS[name]
    assert_close(seen_by(module, x, size=7), pooled_by_hand(module, x))


@pytest.mark.parametrize("name", LAYERS)
def test_columns_are_the_second_moment_of_each_input(name: str):
    """A gradient of W is a sum of d aᵀ: an input that is 0 leaves its columns 0."""
    module, _ = LAYERS[name]
    layer = layer_of(module)
    weight = dict(module.named_parameters())[layer.weight].detach()
    columns = layer.columns(weight.square())
    assert columns.shape == (6,)
    for j in range(6):
        without = weight.clone()
        if layer.inputs_first:
            without[j] = 0
        elif layer.groups > 1:
            of_group = weight.shape[0] // layer.groups
            group, column = divmod(j, 6 // layer.groups)
            without[group * of_group : (group + 1) * of_group, column] = 0
        else:
            without[:, j] = 0
        assert_close(columns[j], (weight.square() - without.square()).sum())


def test_a_layer_that_runs_twice_has_the_mean():
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    assert_close(seen_by(nn.Linear(3, 3), a, b, size=4), (a + b) / 2)


def test_layers_of_one_input_share_its_mean_until_it_is_changed_in_place():
    model, x = nn.ModuleList(nn.Linear(3, 2) for _ in range(3)), torch.randn(2, 4, 3)
    expected = x.mean(dim=1)
    with tapped(model, layers_of(model, dict(model.named_parameters())), Seen(2)) as seen, torch.no_grad():
        model[0](x), model[1](x), model[2](x.mul_(2))
    (first,), (second,), (third,) = seen.runs.values()
    assert first is second
    assert_close(torch.stack([first, third]), torch.stack([expected, 2 * expected]))


def test_padding_is_left_out():
    x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    expected = torch.stack([x[0, :2].mean(dim=0), x[1].mean(dim=0)])
    assert_close(seen_by(nn.Linear(3, 2), x, size=2, mask=mask), expected)


def test_examples_are_found_where_they_lie():
    """In the second dimension of sequences, also where their length is a multiple of the batch; or folded into it."""
    x = torch.randn(6, 3, 4)
    assert_close(seen_by(nn.Linear(4, 2), x, size=3), x.mean(dim=0))
    frames = torch.randn(3, 2, 5, 4, 4)
    expected = frames.mean(dim=(1, 3, 4))
    assert_close(seen_by(nn.Conv2d(5, 2, 3), frames.flatten(0, 1), size=3), expected)
    assert_close(seen_by(nn.Linear(4, 2), torch.ones(3, 2, 4).cumsum(dim=0).flatten(0, 1), size=3)[:, 0], [1, 2, 3])


def test_sequence_first_attention_and_what_follows_see_the_same_examples():
    model, x = encoder(1, batch_first=False).eval(), normal(3, 6, 4)().float()
    layers = layers_of(model, dict(model.named_parameters()))
    with evaluating(model, differentiable=False), torch.no_grad():
        with tapped(model, layers, Seen(3)) as whole:
            f = model(x)
        with tapped(model, layers, Seen(1)) as one:
            model(x[2:])
    assert {"whole.self_attn", "whole.linear1", "whole.linear2", "head"} == whole.runs.keys()
    assert_close(one.pooled(f), {name: pooled[2:] for name, pooled in whole.pooled(f).items()})


@pytest.mark.parametrize("name", ["linear", "linear with positions", "convolution"])
def test_rows_that_are_not_examples_are_refused(name: str):
    """Nodes of graphs, or ragged batches: novelty would be averaged over neighbours. The hooks are gone thereafter."""
    module, x = LAYERS[name]
    model = nn.Sequential(module)
    with (
        pytest.raises(MatchError, match=r"layer '0' has 7 rows of inputs for 5 examples.*Give a list of examples"),
        tapped(model, layers_of(model, dict(model.named_parameters())), Seen(5)),
    ):
        model(x)
    assert not module._forward_hooks


def test_layers_without_rows_for_each_example_have_no_inputs():
    """One that does not run, one that all examples share, and embeddings of positions."""
    names = {"words": nn.Embedding(9, 4), "places": nn.Embedding(3, 4), "shared": nn.Linear(4, 4), "spare": nn.Linear(4, 4), "head": nn.Linear(4, 2)}  # fmt: skip

    def forward(self: Any, ids: Tensor) -> Tensor:
        z = self.words(ids) + self.places(torch.arange(3).expand_as(ids)) + self.shared(torch.ones(3, 4))
        return self.head(input=z)

    model = Lambda(forward, **names)
    layers = layers_of(model, dict(model.named_parameters()))
    assert {layer.module for layer in layers} == set(names)
    with tapped(model, layers, Seen(5, words=False)) as seen:
        model(torch.randint(9, (5, 3)))
    assert seen.runs.keys() == {"words", "head"}


def test_a_posterior_is_observed_at_its_mean():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(5, 3)
    posterior = posterior_over(model)
    outputs, pooled = observed(posterior, layers_of(model, posterior.mean), x)
    with torch.no_grad():
        model[0].weight.zero_()
    assert_close(pooled["0"], x)
    assert_close(pooled["2"], x @ posterior.mean["0.weight"].T + posterior.mean["0.bias"])
    assert_close(outputs, observed(posterior, (), x)[0])
    assert model[1].training
