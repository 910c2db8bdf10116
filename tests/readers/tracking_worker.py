"""One of several processes of test_tracking_sharded: trains shards, saves them and resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam._shards import own_part, whole
from bayesadam.errors import SettingError
from bayesadam.readers import read_optimizer
from ranks import run_checks


def muon(model: nn.Module) -> list[Optimizer]:
    """The last layer, which Muon is not meant for, is one that torch's cannot train where a process has none of it."""
    hidden = {p for p in model.parameters() if p.dim() == 2 and len(p) > 1}
    matrices, rest = ([p for p in model.parameters() if (p in hidden) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)],
    "muon": muon,
}


def network() -> nn.Sequential:
    """Seven rows are uneven over two processes; of one row a process has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 1))


def split(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0])
    return fully_shard(model)  # type: ignore[return-value]


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for number in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(number))
        (model(x) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def begun(name: str, model: nn.Module) -> list[Optimizer]:
    optimizers = OPTIMIZERS[name](model)
    ba.track(optimizers, every=2, decay=0.9, batch_size=16)
    return optimizers


def held(model: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Every entry of the states and groups, this process's part of it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in sorted(state.items()):
                yield f"{names[parameter]} {key}", value
        for group in optimizer.param_groups:
            yield from ((f"{number} {key}", group[key]) for key in sorted(group) if key != "params")


def assert_same(found: Iterator[tuple[str, Any]], expected: Iterator[tuple[str, Any]]) -> None:
    for (key, ours), (wanted, theirs) in zip(found, expected, strict=True):
        assert key == wanted
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype, key
            assert ours.shape == theirs.shape, key
            assert torch.equal(own_part(ours), own_part(theirs)), key
        else:
            assert ours == theirs, key


def check_resumed(folder: Path, name: str, flat: bool) -> None:
    options = states.StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [split(network()) for _ in range(3)]
    optimizers = [begun(name, model) for model in models]
    train(models[0], optimizers[0], range(9))
    train(models[1], optimizers[1], range(5))

    def saved(number: int) -> dict[str, Any]:
        model, each = models[number], optimizers[number]
        return {
            "model": states.get_model_state_dict(model),
            "optimizer": states.get_optimizer_state_dict(model, each, options=options),
        }

    target = folder / f"{name}_{flat}"
    dcp.save(saved(1), checkpoint_id=target)
    tree = saved(2)
    dcp.load(tree, checkpoint_id=target)
    states.set_model_state_dict(models[2], tree["model"])
    states.set_optimizer_state_dict(models[2], optimizers[2], tree["optimizer"], options=options)
    train(models[2], optimizers[2], range(5, 9))
    for found, expected in zip(models[2].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(own_part(found), own_part(expected))
    assert_same(held(models[2], optimizers[2]), held(models[0], optimizers[0]))


def check_moments(name: str) -> dict[str, Tensor]:
    """Read off shards; the one process that has them whole finds the same."""
    model = split(network())
    optimizers = begun(name, model)
    train(model, optimizers, range(9))
    return {key: whole(v) for key, v in read_optimizer(model, optimizers).second_moment.items()}


def check_columns() -> dict[str, Tensor]:
    """Split along the second dimension, as tensor parallelism splits."""
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gradient = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    shard = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(1)]))
    model[0].weight = shard
    optimizer = torch.optim.SGD([shard], lr=0.1)
    ba.track(optimizer, every=1)
    shard.grad = distribute_tensor(gradient, mesh, [Shard(1)])
    optimizer.step()
    return {"0.weight": whole(read_optimizer(model, optimizer).second_moment["0.weight"])}


def check_factored() -> None:
    model = split(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ba.track(optimizer, what="factored")
    with pytest.raises(SettingError, match="factors of a sharded parameter"):
        train(model, [optimizer], range(1))


def checks(folder: Path) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"factored": check_factored, "columns": check_columns}
    for name in OPTIMIZERS:
        found[f"moments {name}"] = partial(check_moments, name)
        for flat in (False, True):
            found[f"resumed {name} {flat}"] = partial(check_resumed, folder, name, flat)
    return found


if __name__ == "__main__":
    run_checks(checks)
