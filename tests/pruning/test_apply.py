"""Masks on a model: all or nothing, tied and wrapped models, and zeros that stay zero while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bayesadam.errors import FileError, MatchError
from bayesadam.pruning import (
    keep_pruned,
    load_masks,
    prune,
    pruning_masks,
    save_masks,
)
from cases import mlp, train
from pruning.cases_pruning import posterior_of


def half_masks(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh())
        return out


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_removed_weights_are_zero_and_the_others_bit_for_bit(dtype: torch.dtype) -> None:
    model = mlp(5, 6, 2).to(dtype)
    model.register_buffer("counts", torch.arange(4))
    before, masks = weights(model), half_masks(model)
    assert prune(model, masks) is model
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert torch.equal(parameter[masks[name]], before[name][masks[name]])
        assert not parameter[~masks[name]].any()
        assert not torch.signbit(parameter[~masks[name]]).any()
    assert torch.equal(model.counts, torch.arange(4))


def test_a_copy_is_pruned_and_the_original_is_not() -> None:
    model = mlp(5, 6, 2)
    before, masks = weights(model), half_masks(model)
    copied = prune(model, masks, inplace=False)
    assert copied is not model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not copied[0].weight[~masks["0.weight"]].any()


def test_what_is_not_finite_is_removed_too() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), float("inf")]]))
    prune(model, {"weight": torch.tensor([[False, False]])})
    assert model.weight.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"2.weigth": torch.ones(2, 6, dtype=torch.bool)}, r"'2\.weigth' is of no parameter"),
        ({"2.weight": torch.ones(6, 2, dtype=torch.bool)}, r"'2\.weight' must be .*of shape \(2, 6\), not .*\(6, 2\)"),
        ({"2.weight": torch.ones(2, 6)}, r"'2\.weight' must be a boolean tensor.*float32"),
    ],
    ids=["name", "shape", "type"],
)
@pytest.mark.parametrize(
    "act", [prune, lambda model, masks: keep_pruned(model, masks, torch.optim.Adam(model.parameters()))]
)
def test_nothing_is_written_unless_all_is_right(wrong: Any, words: str, act: Callable[..., Any]) -> None:
    model = mlp(5, 6, 2)
    before = weights(model)
    good = {"0.weight": torch.zeros(6, 5, dtype=torch.bool)}
    with pytest.raises(MatchError, match=words):
        act(model, good | wrong)
    assert weights(model).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tied_parameter_is_masked_once_under_either_name() -> None:
    mask = torch.rand(4, 4) < 0.5
    for name in ("first.weight", "second.weight"):
        model = prune(Tied(), {name: mask})
        assert model.first.weight is model.second.weight
        assert torch.equal(model.first.weight != 0, mask)
    model = Tied()
    prune(model, {"first.weight": mask, "second.weight": mask.clone()})
    assert torch.equal(model.first.weight != 0, mask)
    copied = prune(model, {"first.weight": ~mask}, inplace=False)
    assert copied.first.weight is copied.second.weight
    with pytest.raises(MatchError, match=r"'second\.weight' and 'first\.weight' are one tied parameter"):
        prune(model, {"first.weight": mask, "second.weight": ~mask})


def test_wrapped_models_are_pruned_inside() -> None:
    model = mlp(5, 6, 2)
    wrapped = nn.DataParallel(model)
    masks = half_masks(model)
    assert prune(wrapped, masks) is wrapped
    assert not model[0].weight[~masks["0.weight"]].any()
    copied = prune(wrapped, {"0.bias": torch.zeros(6, dtype=torch.bool)}, inplace=False)
    assert isinstance(copied, nn.DataParallel)
    assert not copied.module[0].bias.any()
    assert model[0].bias.any()


@pytest.mark.cuda
def test_masks_follow_the_model_to_its_device() -> None:
    model = mlp(5, 6, 2).cuda()
    masks = half_masks(model)
    prune(model, masks)
    assert not model[0].weight.cpu()[~masks["0.weight"]].any()


# --- through training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ],
    ids=["adam", "adamw", "sgd"],
)
def test_zeros_stay_exactly_zero_through_fine_tuning(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = mlp(4, 6, 1)
    optimizer = make(model.parameters())
    # Momentum from before the pruning would carry the weights away.
    train(model, optimizer, steps=10)
    masks = pruning_masks(posterior_of(model), 0.6)
    dense = copy.deepcopy(model.state_dict())
    with keep_pruned(model, masks, optimizer) as handle:
        for step in range(20):
            before = weights(model)
            train(model, optimizer, steps=1, seed=step)
            assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            for name, parameter in model.named_parameters():
                assert not parameter[~masks[name]].any()
                assert not parameter.grad[~masks[name]].any()  # type: ignore[index]
        # Dense weights and an old state come back, and go again with the next step.
        model.load_state_dict(dense)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, steps=1)
        assert all(not parameter[~masks[name]].any() for name, parameter in model.named_parameters())
        model.load_state_dict(dense)
        handle.apply()
        assert all(not parameter[~masks[name]].any() for name, parameter in model.named_parameters())
    train(model, optimizer, steps=2)
    assert any(parameter[~masks[name]].any() for name, parameter in model.named_parameters())


# --- files ------------------------------------------------------------------------------------------------------------


def test_masks_survive_a_file(tmp_path: Any) -> None:
    shapes = {"a": (3, 5), "b.c": (), "empty": (0, 2), "long": (1001,), "d": (2, 2, 2)}
    masks = {name: torch.rand(shape) < 0.5 for name, shape in shapes.items()}
    path = tmp_path / "masks.safetensors"
    save_masks(path, masks)
    found = load_masks(path)
    assert list(found) == list(masks)
    for name, mask in masks.items():
        assert found[name].dtype == torch.bool
        assert torch.equal(found[name], mask)
    # A bit a weight, and a header.
    assert path.stat().st_size < 1001
    assert [p.name for p in tmp_path.iterdir()] == ["masks.safetensors"]


def test_a_transposed_mask_is_saved_as_it_reads(tmp_path: Any) -> None:
    mask = (torch.rand(3, 5) < 0.5).T
    save_masks(tmp_path / "m", {"w": mask})
    assert torch.equal(load_masks(tmp_path / "m")["w"], mask)


def test_files_that_hold_no_masks_are_refused(tmp_path: Any) -> None:
    model = mlp(2, 1)
    with pytest.raises(FileError, match="no file at"):
        load_masks(tmp_path / "absent")
    posterior_of(model).save(tmp_path / "posterior")
    with pytest.raises(FileError, match="not a file of masks"):
        load_masks(tmp_path / "posterior")
    save_masks(tmp_path / "masks", half_masks(model))
    whole = (tmp_path / "masks").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-1])
    with pytest.raises(FileError, match="truncated"):
        load_masks(tmp_path / "cut")
    (tmp_path / "newer").write_bytes(whole.replace(b'format\\": 1', b'format\\": 9'))
    with pytest.raises(FileError, match=r"format 9.*upgrade"):
        load_masks(tmp_path / "newer")
    (tmp_path / "wrong").write_bytes(whole.replace(b"[1, 2]", b"[9, 2]"))
    with pytest.raises(FileError, match="1 bytes for a mask of shape"):
        load_masks(tmp_path / "wrong")


def test_a_failed_save_leaves_the_old_file(tmp_path: Any) -> None:
    path = tmp_path / "masks"
    save_masks(path, {"w": torch.tensor([True, False])})
    with pytest.raises(MatchError, match="'w' must be boolean"):
        save_masks(path, {"w": torch.ones(2)})
    assert load_masks(path)["w"].tolist() == [True, False]
    assert [p.name for p in tmp_path.iterdir()] == ["masks"]
