"""Folders of torch.distributed.checkpoint, written by it in two processes and in one, are read as the live training."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import bayesadam as ba
from bayesadam.errors import BayesAdamError, FileError, MatchError
from bayesadam.readers import read_checkpoint
from bayesadam.readers.formats import distributed as distributed_module
from bayesadam.readers.formats.distributed import DISTRIBUTED
from bayesadam.readers.formats.lazy import Lazy, renamed
from bayesadam.readers.match import names_in
from cases import train
from formats.same import Evil, same, same_posterior
from processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def network() -> nn.Module:
    """Five rows, which two ranks cannot share evenly; one row, which leaves the second with none; buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))


# --- what each rank does, in a process of its own -------------------------------------------------------------------


def gathered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class App:
    """What torch's own tutorial saves."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = (model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(*self.parts)
        return {"model": weights, "optim": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def rank(number: int, world: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=world, init_method=f"file://{folder}/rendezvous")
    mesh = init_device_mesh("cpu", (world,))
    model = network()
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    train(model, optimizer, steps=4)
    weights, state = get_state_dict(model, optimizer)
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    table = torch.arange(35.0).view(5, 7)
    cut = {
        "rows": distribute_tensor(table, mesh, [Shard(0)]),
        "columns": distribute_tensor(table, mesh, [Shard(1)]),
        "whole": distribute_tensor(table, mesh, [Replicate()]),
        "half": distribute_tensor(table.bfloat16(), mesh, [Shard(1)]),
    }
    dcp.save({"model": weights, "optimizer": state, "epoch": 3, "n_data": 500}, checkpoint_id=folder / "names")
    dcp.save({"model": weights, "optim": flat}, checkpoint_id=folder / "flat")
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=folder / "app")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "plain")
    dcp.save({**weights, "optimizer": flat, "train_state": {"step": 4}}, checkpoint_id=folder / "loose")
    dcp.save({"cut": cut}, checkpoint_id=folder / "cut")
    live = {"model": gathered(model.state_dict()), "optimizer": gathered(optimizer.state_dict())}
    if number == 0:
        torch.save(live, folder / "live.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that two processes wrote, and `live.pt`, the training gathered from both."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, 2, folder)
    return folder


@pytest.fixture(scope="module")
def live(two_ranks: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    saved = torch.load(two_ranks / "live.pt", weights_only=True)
    model = network()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


# --- two processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["names", "flat", "app", "plain", "loose"])
def test_two_ranks_are_read_as_one_training(layout: str, two_ranks: Path, live: Any) -> None:
    model, optimizer = live
    assert len(list((two_ranks / layout).glob("*.distcp"))) == 2
    read = read_checkpoint(two_ranks / layout)
    assert read.format == "torch.distributed.checkpoint"
    assert same(dict(read.weights), dict(model.state_dict()))
    saved = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert names_in(read.optimizer) == (None if layout == "plain" else tuple(names))
    for number, name in enumerate(names):
        assert same(dict(read.optimizer["state"][number if layout == "plain" else name]), saved["state"][number])
    same_posterior(two_ranks / layout, live, network())


@pytest.mark.slow
def test_a_tensor_may_be_cut_along_any_dimension(two_ranks: Path) -> None:
    read = DISTRIBUTED.read(two_ranks / "cut").networks[0].tensors
    table = torch.arange(35.0).view(5, 7)
    for name in ("rows", "columns", "whole"):
        assert torch.equal(read[name], table)
    assert torch.equal(read["half"], table.bfloat16())
    pieces = {entry.key: len(entry.pieces) for entry in distributed_module.stored_entries(two_ranks / "cut")}
    assert pieces == {"cut.rows": 2, "cut.columns": 2, "cut.whole": 1, "cut.half": 2}


@pytest.mark.slow
def test_tensors_are_read_when_they_are_looked_at_and_not_kept(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    read_stored = distributed_module.read_stored
    monkeypatch.setattr(
        distributed_module, "read_stored", lambda entry: (looked.append(entry.key), read_stored(entry))[1]
    )
    contents = read_checkpoint(two_ranks / "names")
    # Counters, settings, and the last layer's single bias.
    assert not [key for key in looked if "weight.exp" in key or (key.startswith("model") and key.endswith("weight"))]
    looked.clear()
    state = contents.optimizer["state"]["0.weight"]
    assert isinstance(contents.weights, Lazy)
    assert isinstance(state, Lazy)
    assert "exp_avg_sq" in state
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state.outline["exp_avg_sq"].shape == contents.weights.outline["0.weight"].shape == (5, 3)
    assert renamed(contents.weights, {"first": "0.weight"}).outline["first"].dtype == torch.float32
    assert looked == []
    first, second = state["exp_avg_sq"], state["exp_avg_sq"]
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(renamed(contents.weights, {"first": "0.weight"})["first"], contents.weights["0.weight"])
    assert looked == ["optimizer.state.0.weight.exp_avg_sq"] * 2 + ["model.0.weight"] * 2


# --- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, steps=4)
    return model, optimizer


def save(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.mark.parametrize(
    "tree",
    [
        lambda m, o: dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True)),
        lambda m, o: {"state_dict": m.state_dict(), "optimizer_states": [o.state_dict()], "epoch": 3},
        lambda m, o: {"model": {f"module.{k}": v for k, v in m.state_dict().items()}, "optimizer": o.state_dict()},
    ],
)
def test_one_process(tree: Callable[[Any, Any], Any], pair: Any, tmp_path: Path) -> None:
    same_posterior(save(tmp_path / "c", tree(*pair)), pair, network())


def test_names_tell_in_whatever_groups_and_order_the_optimiser_has_them(tmp_path: Path) -> None:
    model = network()
    parts = {flag: [p for p in model.parameters() if (p.dim() > 1) == flag] for flag in (True, False)}
    optimizer = torch.optim.AdamW(
        [
            {"params": parts[False][::-1], "weight_decay": 0.0},
            {"params": parts[True], "weight_decay": 0.1, "betas": (0.9, 0.9)},
        ],
        lr=torch.tensor(0.05),
        amsgrad=True,
    )
    train(model, optimizer, steps=4)
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        weights, state = get_state_dict(model, optimizer, options=options)
        folder = save(tmp_path / str(flatten), {"model": weights, "optimizer": state})
        same_posterior(folder, (model, optimizer), network())
    # Numbers do not tell.
    plain = save(tmp_path / "plain", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(MatchError, match="param_names="):
        ba.Posterior.from_checkpoint(plain, network(), n_data=100)


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(pair: Any, tmp_path: Path) -> Path:
    return save(tmp_path / "c", {"model": pair[0].state_dict(), "optimizer": pair[1].state_dict(), "epoch": 3})


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "code was run"
    assert not (tmp_path / "code was run").exists()


def edited(folder: Path, change: Callable[[Metadata], Any]) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def place(metadata: Metadata, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        ba.Posterior.from_checkpoint(folder, network(), n_data=100)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("where", ["planner_data", "storage_data", "state_dict_metadata", "storage_meta", "version"])
def test_a_list_of_contents_that_would_run_code(where: str, folder: Path, marker: Path) -> None:
    edited(folder, lambda metadata: setattr(metadata, where, Evil(marker)))
    refused(folder, r"would call \w+\.mkdir.*made to run code")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    refused(folder, "made to run code")


@pytest.mark.slow
def test_a_hole(two_ranks: Path, tmp_path: Path) -> None:
    for number, change in enumerate(
        (
            lambda metadata: metadata.state_dict_metadata["model.0.weight"].chunks.pop(),
            lambda metadata: metadata.storage_data.pop(
                next(i for i in metadata.storage_data if i.fqn == "model.0.weight" and i.offset[0] > 0)
            ),
        )
    ):
        copy = tmp_path / str(number)
        shutil.copytree(two_ranks / "names", copy)
        edited(copy, change)
        refused(copy, r"the whole of 'model\.0\.weight'")


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "a/../../secret", "c:secret", "..\\secret"])
def test_a_name_that_leads_out_of_the_folder(name: str, folder: Path) -> None:
    shutil.copy(next(folder.glob("*.distcp")), folder.parent / "secret.distcp")
    edited(folder, lambda metadata: setattr(place(metadata, "model.0.weight"), "relative_path", name))
    refused(folder, "outside of the folder")
    edited(folder, lambda metadata: setattr(place(metadata, "model.0.weight"), "relative_path", "lost.distcp"))
    refused(folder, r"has no lost\.distcp.*copy those of all machines")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.planner_data.update({"epoch": ()}),
        lambda m: m.planner_data.update({"epoch": ("model", "0.weight", "below")}),
        lambda m: m.planner_data.update({"epoch": ("x",) * 5000}),
        lambda m: m.planner_data.update({"epoch": (1.5,)}),
        lambda m: setattr(m, "storage_data", {}),
        lambda m: setattr(m, "state_dict_metadata", [1]),
        lambda m: setattr(m.state_dict_metadata["model.0.weight"], "size", torch.Size([7, 3])),
        lambda m: setattr(m.state_dict_metadata["model.0.weight"], "size", torch.Size([2, 3])),
        lambda m: setattr(m.state_dict_metadata["model.0.weight"], "size", torch.Size([15])),
        lambda m: setattr(place(m, "model.0.weight"), "offset", -5),
        lambda m: setattr(place(m, "model.0.weight"), "length", 10**15),
        lambda m: setattr(place(m, "model.0.weight"), "relative_path", 3),
    ],
)
def test_nonsense_in_the_list_of_contents(change: Callable[[Metadata], Any], folder: Path) -> None:
    edited(folder, change)
    with pytest.raises(BayesAdamError):
        ba.Posterior.from_checkpoint(folder, network(), n_data=100)


if __name__ == "__main__":
    rank(*map(int, sys.argv[1:3]), Path(sys.argv[3]))
