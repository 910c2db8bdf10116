"""Several networks and several optimisers in one file: what fits is found, what is ambiguous is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam._options import in_options
from bayesadam.cli import app
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import explain, read_checkpoint, read_curvature
from cases import mlp
from floats import assert_close


def stepped(optimizer: Optimizer, seed: int = 0) -> Optimizer:
    """Two steps on gradients that are all different."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
    return optimizer


def parameters(*models: nn.Module) -> list[nn.Parameter]:
    return [parameter for model in models for parameter in model.parameters()]


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


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
        held = tree
        for key in read.keys_to(name):
            held = held[key]
        assert torch.equal(held, parameter)


def under(**models: nn.Module) -> dict[str, Tensor]:
    return {f"{key}.{name}": p for key, model in models.items() for name, p in model.named_parameters()}


# --- one optimiser over several networks ----------------------------------------------------------------------------


def test_an_actor_and_a_critic_are_read_together(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 8, 2), mlp(4, 8, 8, 1)
    live = stepped(Adam(parameters(actor, critic)))
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": live.state_dict(), "step": 3}
    read = read_checkpoint(saved(tmp_path / "c.pt", tree))
    check(read, under(actor=actor, critic=critic), live)
    assert read.keys_to("critic.0.bias") == ("critic", "0.bias")
    assert "the only order" in " ".join(explain(read))
    # A part of what was trained is a model, too.
    part = ba.Posterior.from_checkpoint(tmp_path / "c.pt", fresh := mlp(4, 8, 8, 1), n_data=10)
    assert torch.equal(fresh[0].weight, critic[0].weight)
    assert torch.equal(part.structure.second_moment["2.bias"], read_curvature(read).second_moment["critic.2.bias"])


def test_ml_agents_saves_vectors_that_are_not_trained(tmp_path: Path) -> None:
    policy, critic = mlp(4, 8, 2), mlp(4, 8, 1)
    policy.version = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    policy.branches = nn.Parameter(torch.zeros(1, 0), requires_grad=False)
    live = stepped(Adam(parameters(policy, critic)))
    tree = {
        "Policy": policy.state_dict(),
        "global_step": {"_GlobalSteps__global_step": torch.tensor([7])},
        "Optimizer:value_optimizer": live.state_dict(),
        "Optimizer:critic": critic.state_dict(),
    }
    read = read_checkpoint(saved(tmp_path / "c.pt", tree))
    named = {**under(Policy=policy), **{f"Optimizer:critic.{n}": p for n, p in critic.named_parameters()}}
    check(read, named, live)


def test_a_group_a_network_three_levels_down(tmp_path: Path) -> None:
    encoder, generator = mlp(3, 5, 5), mlp(5, 5, 3)
    live = stepped(Adam([{"params": encoder.parameters()}, {"params": generator.parameters(), "weight_decay": 0.1}]))
    inner = {"encoder": encoder.state_dict(), "generator": generator.state_dict()}
    tree = {"run": {"nets": inner, "opt": {"main": live.state_dict()}}}
    read = read_checkpoint(saved(tmp_path / "c.pt", tree))
    check(read, {f"run.nets.{n}": p for n, p in under(encoder=encoder, generator=generator).items()}, live)
    assert read_curvature(read).weight_decay["run.nets.generator.0.bias"] == 0.1


def test_a_usual_key_does_not_win_against_the_shapes(tmp_path: Path) -> None:
    model, value = mlp(4, 8, 2), mlp(4, 8, 1)
    live = stepped(Adam(parameters(model, value)))
    tree = {"model": model.state_dict(), "value": value.state_dict(), "optimizer": live.state_dict()}
    check(read_checkpoint(saved(tmp_path / "c.pt", tree)), under(model=model, value=value), live)


def test_buffers_and_statistics_between_networks(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 2), mlp(4, 8, 1)
    actor.register_buffer("seen", torch.ones(4))
    live = stepped(Adam(parameters(actor, critic)))
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": live.state_dict()}
    tree["norm"] = {"mean": torch.zeros(4), "std": torch.ones(4)}
    check(read_checkpoint(saved(tmp_path / "c.pt", tree)), under(actor=actor, critic=critic), live)


def test_twins_are_read_in_the_order_that_is_given(tmp_path: Path) -> None:
    one, two = mlp(4, 8, 1), mlp(4, 8, 1)
    live = stepped(Adam(parameters(two, one)))
    tree = {"q1": one.state_dict(), "q2": two.state_dict(), "optimizer": live.state_dict()}
    path = saved(tmp_path / "c.pt", tree)
    with pytest.raises(FileError, match=r"(?s)weights_key='q1,q2', optimizer_key='optimizer'.*weights_key='q2,q1'"):
        read_checkpoint(path)
    for given in ("q2,q1", ("q2", "q1")):
        check(read_checkpoint(path, weights_key=given), under(q2=two, q1=one), live)


def test_an_order_that_is_not_the_files_is_shown_and_not_taken(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 2), mlp(4, 8, 1)
    live = stepped(Adam(parameters(critic, actor)))
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": live.state_dict()}
    path = saved(tmp_path / "c.pt", tree)
    for given in (None, "actor,critic"):
        with pytest.raises(FileError, match=r"weights_key='critic,actor', optimizer_key='optimizer' \(every shape"):
            read_checkpoint(path, weights_key=given)
    check(read_checkpoint(path, weights_key="critic,actor"), under(critic=critic, actor=actor), live)
    with pytest.raises(FileError, match="twice"):
        read_checkpoint(path, weights_key="actor,actor")
    with pytest.raises(FileError, match="nothing of the kind under weights_key='nobody'"):
        read_checkpoint(path, weights_key="actor,nobody")


def test_an_optimiser_in_a_file_of_its_own(tmp_path: Path) -> None:
    actor, critic = mlp(4, 8, 2), mlp(4, 8, 1)
    live = stepped(Adam(parameters(actor, critic)))
    path = saved(tmp_path / "w.pt", {"actor": actor.state_dict(), "critic": critic.state_dict()})
    state = saved(tmp_path / "o.pt", live.state_dict())
    check(read_checkpoint(path, optimizer_path=state), under(actor=actor, critic=critic), live)
    other = saved(tmp_path / "o.pt", stepped(Adam(mlp(9, 9).parameters())).state_dict())
    with pytest.raises(FileError, match="no shapes fit"):
        read_checkpoint(path, optimizer_path=other)


def test_the_command_line_repeats_the_key(tmp_path: Path) -> None:
    one, two = mlp(4, 8, 1), mlp(4, 8, 1)
    live = stepped(Adam(parameters(two, one)))
    path = saved(tmp_path / "c.pt", {"a": one.state_dict(), "b": two.state_dict(), "o": live.state_dict()})
    out = tmp_path / "pruned.safetensors"
    command = ["prune", str(path), "-o", str(out), "--fraction", "0.5"]
    done = CliRunner().invoke(app, [*command, "--weights-key", "b", "--weights-key", "a"])
    assert done.exit_code == 0, done.output
    assert out.exists()


# --- several of both ------------------------------------------------------------------------------------------------


def gan(**sizes: Iterable[int]) -> tuple[dict[str, nn.Module], dict[str, Optimizer], dict[str, Any]]:
    models = {key: mlp(*size) for key, size in sizes.items()}
    live = {f"opt{key}": stepped(Adam(model.parameters()), seed) for seed, (key, model) in enumerate(models.items())}
    tree = {**{k: m.state_dict() for k, m in models.items()}, **{k: o.state_dict() for k, o in live.items()}}
    return models, live, tree


def test_a_gan_is_shown_as_a_table_of_its_pairs(tmp_path: Path) -> None:
    models, live, tree = gan(G=(2, 8, 4), D=(4, 8, 1))
    path = saved(tmp_path / "c.pt", tree)
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    rows = str(caught.value).splitlines()[1:]
    assert [row.strip() for row in rows] == [
        "weights_key='G', optimizer_key='optG' (every shape fits)",
        "weights_key='D', optimizer_key='optD' (every shape fits)",
    ]
    assert "--weights-key 'G' --optimizer-key 'optG'" in in_options(str(caught.value))
    for key, model in models.items():
        named = dict(model.named_parameters())
        check(read_checkpoint(path, weights_key=key), named, live[f"opt{key}"])
        check(read_checkpoint(path, optimizer_key=f"opt{key}"), named, live[f"opt{key}"])


def test_a_gan_of_equal_networks_is_not_guessed_by_its_keys(tmp_path: Path) -> None:
    models, live, tree = gan(G=(3, 5, 3), D=(3, 5, 3))
    path = saved(tmp_path / "c.pt", tree)
    for given in ({}, {"weights_key": "D"}, {"optimizer_key": "optD"}):
        with pytest.raises(FileError, match=r"weights_key='D', optimizer_key='optD'"):
            read_checkpoint(path, **given)
    read = read_checkpoint(path, weights_key="D", optimizer_key="optD")
    check(read, dict(models["D"].named_parameters()), live["optD"])


def test_the_only_optimiser_whose_shapes_fit(tmp_path: Path) -> None:
    models, live, tree = gan(G=(2, 8, 4), D=(4, 8, 1))
    del tree["D"]
    read = read_checkpoint(saved(tmp_path / "c.pt", tree))
    check(read, dict(models["G"].named_parameters()), live["optG"])


def test_sac(tmp_path: Path) -> None:
    actor, critic = mlp(3, 8, 4), mlp(5, 8, 1)
    target, log_alpha = copy.deepcopy(critic), nn.Parameter(torch.zeros(1))
    lives = {
        "actor": stepped(Adam(actor.parameters())),
        "critic": stepped(Adam(critic.parameters())),
        "alpha": stepped(Adam([log_alpha])),
    }
    tree = {
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "critic_target": target.state_dict(),
        "log_alpha": log_alpha.data,
        **{f"{key}_optimizer": live.state_dict() for key, live in lives.items()},
    }
    path = saved(tmp_path / "c.pt", tree)
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    assert [row.strip() for row in str(caught.value).splitlines()[1:]] == [
        "weights_key='actor', optimizer_key='actor_optimizer' (every shape fits)",
        "weights_key='critic', optimizer_key='critic_optimizer' (every shape fits)",
        # Its last bias is as long.
        "weights_key='critic', optimizer_key='alpha_optimizer' (every shape fits, of 1 in 4 parameters)",
    ]
    read = read_checkpoint(path, optimizer_key="critic_optimizer")
    check(read, dict(critic.named_parameters()), lives["critic"])
    assert any("'critic_target' was left out, a copy of 'critic'" in line for line in explain(read))


# --- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["net_ema", "emaNet", "target_policy", "best_model", "shadow", "policy.avg"])
def test_a_copy_is_left_out(tmp_path: Path, key: str) -> None:
    policy = mlp(3, 5, 1)
    live = stepped(Adam(policy.parameters()))
    other = {name: tensor + 1 for name, tensor in policy.state_dict().items()}
    tree = {key: other, "policy": policy.state_dict(), "adam": live.state_dict()}
    read = read_checkpoint(saved(tmp_path / "c.pt", tree))
    check(read, dict(policy.named_parameters()), live)
    copied = read_checkpoint(tmp_path / "c.pt", weights_key=key)
    assert torch.equal(copied.weights["0.bias"], other["0.bias"])


def test_an_average_with_its_own_counter_and_prefix(tmp_path: Path) -> None:
    policy = mlp(3, 5, 1)
    live = stepped(Adam(policy.parameters()))
    average = torch.optim.swa_utils.AveragedModel(policy)
    tree = {"swa": average.state_dict(), "policy": policy.state_dict(), "adam": live.state_dict()}
    check(read_checkpoint(saved(tmp_path / "c.pt", tree)), dict(policy.named_parameters()), live)


def test_the_same_tensors_twice_are_one_network(tmp_path: Path) -> None:
    policy = mlp(3, 5, 1)
    live = stepped(Adam(policy.parameters()))
    tree = {"a": policy.state_dict(), "b": policy.state_dict(), "adam": live.state_dict()}
    check(read_checkpoint(saved(tmp_path / "c.pt", tree)), dict(policy.named_parameters()), live)


def test_alike_without_such_a_word_is_no_copy(tmp_path: Path) -> None:
    one, two = mlp(3, 5, 1), mlp(3, 5, 1)
    live = stepped(Adam(one.parameters()))
    tree = {"one": one.state_dict(), "two": two.state_dict(), "adam": live.state_dict()}
    with pytest.raises(FileError, match=r"(?s)weights_key='one'.*weights_key='two'"):
        read_checkpoint(saved(tmp_path / "c.pt", tree))


# --- what is left out -----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.last = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))


def test_scalars_are_read_and_complex_numbers_left_out(tmp_path: Path) -> None:
    model = Mixed()
    live = stepped(Adam(model.parameters()))
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": live.state_dict()})
    with pytest.raises(MatchError, match="'phase' is complex"):
        read_curvature(read_checkpoint(path), Mixed())
    # The buffer has the shape of a bias.
    with pytest.raises(MatchError, match="may belong to") as caught:
        read_curvature(read_checkpoint(path))
    assert "another model" not in str(caught.value)
    del model.offset
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": live.state_dict()})
    found = read_curvature(read_checkpoint(path))
    real = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    assert found.second_moment.keys() == real.keys()
    for name, parameter in real.items():
        state = live.state[parameter]
        assert_close(found.second_moment[name], state["exp_avg_sq"] / (1 - 0.999**2))
    assert list(found.omitted) == ["phase"]
