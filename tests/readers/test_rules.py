"""What a trainer does without writing it down, a part of what was trained, and N."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers import Rules, read_checkpoint, read_curvature
from cases import train, trained


class Wrapped(nn.Module):
    """A network, and a head of equal shapes beside it."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3))
        if twice:
            self.other = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.net(x))
        return out + self.other(x) if hasattr(self, "other") else out


def saved(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **beside: object) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}, path)
    return path


def wrapped(path: Path, *, twice: bool = False) -> tuple[Wrapped, torch.optim.Optimizer, Path]:
    torch.manual_seed(0)
    model = Wrapped(twice)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    train(model, optimizer)
    return model, optimizer, saved(path / "whole.pt", model, optimizer)


# --- a part of the model --------------------------------------------------------------------------------------------


def test_the_network_inside_what_was_trained(tmp_path: Path) -> None:
    model, optimizer, path = wrapped(tmp_path)
    inner = Wrapped().net
    found = ba.Posterior.from_checkpoint(path, inner, n_data=32)
    whole = ba.Posterior.from_optimizer(model, optimizer, n_data=32)
    assert list(found.mode) == [name for name, _ in inner.named_parameters()]
    for name, theta in found.mode.items():
        assert torch.equal(theta, whole.mode[f"net.{name}"])
        assert torch.equal(found.variance[name], whole.variance[f"net.{name}"])
    for name, tensor in inner.state_dict().items():
        assert torch.equal(tensor, model.net.state_dict()[name])


def test_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    _, _, path = wrapped(tmp_path, twice=True)
    inner = Wrapped().net
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    with pytest.raises(MatchError, match=r"'net\.' and 'other\.'"):
        ba.Posterior.from_checkpoint(path, inner, n_data=32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())


def test_a_network_that_is_no_part_is_refused(tmp_path: Path) -> None:
    _, _, path = wrapped(tmp_path)
    with pytest.raises(MatchError, match="another model's"):
        ba.Posterior.from_checkpoint(path, nn.Sequential(nn.Linear(3, 4)), n_data=32)


# --- rules ----------------------------------------------------------------------------------------------------------


def two_groups(path: Path) -> tuple[nn.Module, torch.optim.Optimizer, Path]:
    """Weights of equal shapes in one group, biases in the other: nothing but a rule can tell their order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    groups = [[model[2].weight, model[0].weight], [model[0].bias, model[2].bias]]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * i} for i, group in enumerate(groups)])
    train(model, optimizer)
    return model, optimizer, saved(path / "groups.pt", model, optimizer)


TRUE = [["2.weight", "0.weight"], ["0.bias", "2.bias"]]
OTHER = [["0.weight", "2.weight"], ["0.bias", "2.bias"]]


@pytest.mark.parametrize("with_model", [True, False])
def test_the_trainers_rule_orders_the_parameters(tmp_path: Path, with_model: bool) -> None:
    model, optimizer, path = two_groups(tmp_path)
    checkpoint = read_checkpoint(path)
    with pytest.raises(MatchError, match="may belong to"):
        read_curvature(checkpoint, model)
    fitting_sizes_alone = [["0.bias", "2.bias"], ["0.weight", "2.weight"]]
    rules = Rules(model=lambda: copy.deepcopy(model).to("meta"), orders=lambda _: [fitting_sizes_alone, TRUE])
    expected = ba.readers.read_optimizer(model, optimizer)
    found = read_curvature(replace(checkpoint, rules=rules), model if with_model else None)
    assert found.weight_decay == expected.weight_decay
    for name, v in expected.second_moment.items():
        assert torch.equal(found.second_moment[name], v)


def test_rules_that_disagree_are_refused(tmp_path: Path) -> None:
    model, _, path = two_groups(tmp_path)
    checkpoint = replace(read_checkpoint(path), rules=Rules(orders=lambda _: [TRUE, OTHER]))
    with pytest.raises(MatchError, match=r"'0.weight' or to '2.weight'.*param_names"):
        read_curvature(checkpoint, model)


def test_names_in_the_file_may_differ_from_the_models(tmp_path: Path) -> None:
    model, optimizer, path = two_groups(tmp_path)
    checkpoint = read_checkpoint(path)
    renamed = {f"old.{name}": tensor for name, tensor in checkpoint.weights.items()}
    rules = Rules(
        model=lambda: model,
        names=lambda _: {name: name.removeprefix("old.") for name in renamed},
        orders=lambda _: [TRUE],
    )
    moved = replace(checkpoint, weights=renamed, stored_names={name: name for name in renamed}, rules=rules)
    expected = ba.readers.read_optimizer(model, optimizer).second_moment
    alone = read_curvature(moved).second_moment
    assert all(torch.equal(alone[f"old.{name}"], v) for name, v in expected.items())
    together = read_curvature(moved, model).second_moment
    assert all(torch.equal(together[name], v) for name, v in expected.items())


def test_what_was_trained_but_not_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(3, 5, 2)
    checkpoint = read_checkpoint(saved(tmp_path / "c.pt", model, optimizer))
    kept = {name: tensor for name, tensor in checkpoint.weights.items() if name != "2.bias"}
    for partial in (True, False):
        part = replace(checkpoint, weights=kept, rules=Rules(partial=partial))
        if partial:
            with pytest.raises(MatchError, match=r"does not hold \['2.bias'\]"):
                read_curvature(part, model)
        else:
            assert "2.bias" in read_curvature(part, model).second_moment


# --- N --------------------------------------------------------------------------------------------------------------


def test_n_comes_from_the_trainers_record_or_the_caller(tmp_path: Path) -> None:
    model, optimizer = trained(3, 5, 2)
    path = saved(tmp_path / "c.pt", model, optimizer, n_data=123)
    assert ba.Posterior.from_checkpoint(path, model).n_data == 123
    assert ba.Posterior.from_checkpoint(path, model, 77).n_data == 77
    silent = saved(tmp_path / "silent.pt", model, optimizer)
    with pytest.raises(SettingError, match="pass n_data="):
        ba.Posterior.from_checkpoint(silent, model)
