"""Several networks and several optimisers in one file: what fits is found, what is ambiguous is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import bayesadam as ba
from bayesadam._options import in_options
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import explain, read_checkpoint, read_curvature
from cases import mlp
from floats import assert_close
from readers.test_files import stepped


def parameters(*models: nn.Module) -> list[nn.Parameter]:
    return [parameter for model in models for parameter in model.parameters()]


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path / "c.pt")
    return path / "c.pt"


def check(read: ba.readers.Checkpoint, named: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Every v̂ is that of the live optimiser, and so is every weight, also where the file has it."""
    found = read_curvature(read).second_moment
    live = {name: p for name, p in named.items() if p in optimizer.state}
    assert found.keys() == live.keys()
    tree = torch.load(read.path, weights_only=True)
    beta = optimizer.param_groups[0]["betas"][1]
    for name, parameter in live.items():
        state = optimizer.state[parameter]
        assert_close(found[name], state["exp_avg_sq"] / (1 - beta ** float(state["step"])))
        assert torch.equal(read.weights[name], parameter)
        inside = tree
        for key in read.places[name]:
            inside = inside[key]
        assert torch.equal(inside, parameter)


def under(**models: nn.Module) -> dict[str, Tensor]:
    return {f"{key}.{name}": p for key, model in models.items() for name, p in model.named_parameters()}


def test_an_actor_and_a_critic_are_read_together(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 8, 2), mlp(4, 8, 8, 1)
    live = stepped(Adam(parameters(actor, critic)))
    tree = {"model": actor.state_dict(), "critic": critic.state_dict(), "optimizer": live.state_dict(), "step": 3}
    read = read_checkpoint(saved(tmp_path, tree))
    check(read, under(model=actor, critic=critic), live)
    assert "the only choice that fits" in " ".join(explain(read))
    # A part of what was trained is a model, too.
    part = ba.Posterior.from_checkpoint(tmp_path / "c.pt", fresh := mlp(4, 8, 8, 1), n_data=10)
    assert torch.equal(fresh[0].weight, critic[0].weight)
    assert torch.equal(part.curvature.second_moment["2.bias"], read_curvature(read).second_moment["critic.2.bias"])


def test_twins_are_read_in_the_order_that_is_given(tmp_path: Path) -> None:
    one, two = mlp(4, 8, 1), mlp(4, 8, 1)
    live = stepped(Adam(parameters(two, one)))
    path = saved(tmp_path, {"q1": one.state_dict(), "q2": two.state_dict(), "optimizer": live.state_dict()})
    with pytest.raises(FileError, match=r"(?s)weights_key='q1,q2', optimizer_key='optimizer'.*weights_key='q2,q1'"):
        read_checkpoint(path)
    for given in ("q2,q1", ("q2", "q1")):
        check(read_checkpoint(path, weights_key=given), under(q2=two, q1=one), live)
    with pytest.raises(FileError, match="twice"):
        read_checkpoint(path, weights_key="q1,q1")
    with pytest.raises(FileError, match=r"nothing of the kind under weights_key='nobody'; there is 'q1', 'q2'"):
        read_checkpoint(path, weights_key="q1,nobody")


@pytest.mark.parametrize("told", [{}, {"optimizer_key": "opt_disc"}], ids=["alone", "named"])
def test_a_state_under_the_key_of_another_is_not_that_of_the_usual_network(told: Any, tmp_path: Path) -> None:
    model, disc = mlp(3, 3, 1), mlp(3, 3, 1)
    live = stepped(Adam(disc.parameters()))
    path = saved(tmp_path, {"model": model.state_dict(), "disc": disc.state_dict(), "opt_disc": live.state_dict()})
    with pytest.raises(FileError, match=r"(?s)weights_key='model', .*weights_key='disc', optimizer_key='opt_disc'"):
        read_checkpoint(path, **told)
    check(read_checkpoint(path, weights_key="disc", **told), dict(disc.named_parameters()), live)


def test_the_order_of_the_networks_is_that_of_the_shapes(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 2), mlp(4, 8, 1)
    live = stepped(Adam(parameters(critic, actor)))
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": live.state_dict()}
    check(read_checkpoint(saved(tmp_path, tree)), under(critic=critic, actor=actor), live)


@pytest.mark.parametrize("sizes", [((2, 8, 4), (4, 8, 1)), ((3, 5, 3), (3, 5, 3))], ids=["unlike", "alike"])
def test_a_gan_is_shown_as_a_table_of_its_pairs(sizes: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    models = {key: mlp(*size) for key, size in zip("GD", sizes, strict=True)}
    live = {key: stepped(Adam(model.parameters()), seed) for seed, (key, model) in enumerate(models.items())}
    weights = {key: model.state_dict() for key, model in models.items()}
    path = saved(tmp_path, {**weights, **{f"opt{key}": each.state_dict() for key, each in live.items()}})
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    rows = [row.strip() for row in str(caught.value).splitlines()[1:]]
    assert {f"weights_key='{key}', optimizer_key='opt{key}' (every shape fits)" for key in models} <= set(rows)
    assert len(rows) == (2 if sizes[0] != sizes[1] else 4)
    assert "--weights-key 'G' --optimizer-key 'optG'" in in_options(str(caught.value))
    for key, model in models.items():
        both = {"weights_key": key, "optimizer_key": f"opt{key}"}
        check(read_checkpoint(path, **both), dict(model.named_parameters()), live[key])
        if sizes[0] != sizes[1]:
            # The state is told by its shapes, and the other's is refused by them.
            check(read_checkpoint(path, weights_key=key), dict(model.named_parameters()), live[key])
            with pytest.raises(MatchError, match="another model's state"):
                read_curvature(read_checkpoint(path, weights_key=key, optimizer_key=f"opt{'GD'[key == 'G']}"))


def test_the_state_that_is_named_finds_its_network(tmp_path: Path) -> None:
    actor, critic, log_alpha = mlp(3, 8, 4), mlp(5, 8, 1), nn.Parameter(torch.zeros(1))
    lives = {key: stepped(Adam(net.parameters())) for key, net in (("actor", actor), ("critic", critic))}
    lives["alpha"] = stepped(Adam([log_alpha]))
    tree = {
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "critic_target": copy.deepcopy(critic).state_dict(),
        "log_alpha": log_alpha.data,
        **{f"{key}_optimizer": live.state_dict() for key, live in lives.items()},
    }
    path = saved(tmp_path, tree)
    with pytest.raises(FileError, match=r"weights_key='actor', optimizer_key='actor_optimizer' \(every shape fits\)"):
        read_checkpoint(path)
    read = read_checkpoint(path, optimizer_key="critic_optimizer")
    check(read, dict(critic.named_parameters()), lives["critic"])
    assert any("'critic_target' was not read, a copy of 'critic'" in line for line in explain(read))


@pytest.mark.parametrize("key", ["net_ema", "emaNet", "target_policy", "best_model", "shadow", "policy.avg"])
def test_a_copy_is_left_out(tmp_path: Path, key: str) -> None:
    policy = mlp(3, 5, 1)
    live = stepped(Adam(policy.parameters()))
    other = {name: tensor + 1 for name, tensor in policy.state_dict().items()}
    read = read_checkpoint(saved(tmp_path, {key: other, "policy": policy.state_dict(), "adam": live.state_dict()}))
    check(read, dict(policy.named_parameters()), live)
    copied = read_checkpoint(tmp_path / "c.pt", weights_key=key)
    assert torch.equal(copied.weights["0.bias"], other["0.bias"])


def test_an_average_with_its_own_counter_and_the_same_tensors_twice(tmp_path: Path) -> None:
    policy = mlp(3, 5, 1)
    live = stepped(Adam(policy.parameters()))
    average = torch.optim.swa_utils.AveragedModel(policy)
    for other in ({"swa": average.state_dict()}, {"a": policy.state_dict()}):
        tree = {**other, "policy": policy.state_dict(), "adam": live.state_dict()}
        check(read_checkpoint(saved(tmp_path, tree)), dict(policy.named_parameters()), live)
