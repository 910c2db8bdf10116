"""Masks on a model: all or nothing, tied and wrapped models, zeros that stay zero while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bayesadam.compress import apply_masks, condition, keep_pruned, masks
from bayesadam.errors import MatchError
from cases import mlp, train
from compress.cases_compress import posterior_of


def half_masks(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_removed_weights_are_zero_and_the_others_bit_for_bit(dtype: torch.dtype) -> None:
    model = mlp(5, 6, 2).to(dtype)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([float("nan"), float("inf")]))
    before, kept = copy.deepcopy(model.state_dict()), half_masks(model)
    kept["2.bias"] = torch.tensor([False, False])
    apply_masks(nn.DataParallel(model), kept)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[kept[name]], before[name][kept[name]])
        assert not parameter[~kept[name]].any()
        assert not torch.signbit(parameter[~kept[name]]).any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"2.weigth": torch.ones(2, 6, dtype=torch.bool)}, r"'2\.weigth' is of no parameter"),
        ({"2.weight": torch.ones(6, 2, dtype=torch.bool)}, r"'2\.weight' must be .*of shape \(2, 6\), not .*\(6, 2\)"),
        ({"2.weight": torch.ones(2, 6)}, r"'2\.weight' must be a boolean tensor.*float32"),
        ({"2.weight": torch.ones(2, 6, dtype=torch.int64)}, r"'2\.weight' must be a boolean tensor.*int64"),
        ({"2.weight": np.ones((2, 6), bool)}, r"'2\.weight' must be a boolean tensor.* not a ndarray of bool"),
        ({"2.weight": [1, 0]}, r"'2\.weight' must be a boolean tensor.* not a list"),
    ],
)
def test_nothing_is_written_unless_all_is_right(wrong: Any, words: str) -> None:
    model = mlp(5, 6, 2)
    before = copy.deepcopy(model.state_dict())
    bad = {"0.weight": torch.zeros(6, 5, dtype=torch.bool)} | wrong
    with pytest.raises(MatchError, match=words):
        apply_masks(model, bad)
    with pytest.raises(MatchError, match=words), keep_pruned(model, bad, torch.optim.Adam(model.parameters())):
        pass
    with pytest.raises(MatchError, match=words):
        condition(posterior_of(model), bad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tied_parameter_is_masked_once_under_either_name() -> None:
    mask = torch.rand(4, 4) < 0.5
    for named in ({"first.weight": mask}, {"second.weight": mask}, {"first.weight": mask, "second.weight": mask}):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        model = nn.ModuleDict({"first": first, "second": second})
        apply_masks(model, named)
        assert first.weight is second.weight
        assert torch.equal(first.weight != 0, mask)
    with pytest.raises(MatchError, match=r"'second\.weight' and 'first\.weight' are one tied parameter"):
        apply_masks(model, {"first.weight": mask, "second.weight": ~mask})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ],
)
def test_zeros_stay_exactly_zero_through_fine_tuning(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = mlp(4, 6, 1)
    optimizer = make(model.parameters())
    # Momentum from before the pruning would carry the weights away.
    train(model, optimizer, steps=10)
    kept = masks(posterior_of(model), 0.6)
    dense = copy.deepcopy(model.state_dict())

    def is_pruned() -> bool:
        return all(not parameter[~kept[name]].any() for name, parameter in model.named_parameters())

    with keep_pruned(model, kept, optimizer):
        for step in range(10):
            before = copy.deepcopy(model.state_dict())
            train(model, optimizer, steps=1, seed=step)
            assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            assert is_pruned()
            assert all(not p.grad[~kept[name]].any() for name, p in model.named_parameters())  # type: ignore[index]
        # Dense weights come back, and go again with the next step.
        model.load_state_dict(dense)
        train(model, optimizer, steps=1)
        assert is_pruned()
    train(model, optimizer, steps=2)
    assert not is_pruned()
