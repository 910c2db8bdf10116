"""States without names: whether biases go with their own weights, and what is said where nothing tells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning
from cases import mlp, train

Split = Callable[[Sequence[nn.Parameter]], list[list[nn.Parameter]]]


def in_order(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [list(parameters)]


def by_decay(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]]


def weights_backwards(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """One list whose weights are those of the layers from the last to the first."""
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
    return [[p for (_, bias), (weight, _) in zip(pairs, pairs[::-1], strict=True) for p in (weight, bias)]]


def said(model: nn.Module, split: Split, **how: object) -> list[str]:
    """The warnings of reading a state whose groups were filled so."""
    groups = split(list(model.parameters()))
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    train(model, optimizer, steps=50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = ba.Posterior.from_state_dict(model, optimizer.state_dict(), 100, optimizer="adamw", **how)
    if split is not weights_backwards or how:
        live = ba.Posterior.from_optimizer(model, optimizer, 100)
        assert all(torch.equal(q.variance[name], v) for name, v in live.variance.items())
    return [str(one.message) for one in caught if issubclass(one.category, BayesAdamWarning)]


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", [in_order, by_decay])
def test_what_is_in_order_is_let_be(split: Split, seed: int, width: int) -> None:
    torch.manual_seed(seed)
    assert said(mlp(*[width] * 6, activation=[nn.Tanh, nn.ReLU][seed % 2]), split) == []


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_weights_that_do_not_go_with_their_biases_are_told(seed: int, width: int) -> None:
    torch.manual_seed(seed)
    model = mlp(*[width] * 6, activation=[nn.Tanh, nn.ReLU][seed % 2])
    (message,) = said(model, weights_backwards)
    assert "may be in another order than one group in the model's order" in message
    assert "Pass param_names=[...]" in message
    names = [name for name, _ in model.named_parameters()]
    pairs = list(zip(names[::2], names[1::2], strict=True))
    order = [n for (_, bias), (weight, _) in zip(pairs, pairs[::-1], strict=True) for n in (weight, bias)]
    assert said(model, weights_backwards, param_names=order) == []


def test_groups_that_nothing_confirms_are_told_unless_somebody_vouches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)), nn.Linear(8, 3, bias=False))
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": model[2].parameters()}])
    train(model, optimizer, steps=20)
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with pytest.warns(BayesAdamWarning, match=r"2 parameters that share their shapes is known by their order alone"):
        ba.Posterior.from_checkpoint(path, model, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ba.Posterior.from_checkpoint(path, model, 100, groups_in_order=True)
