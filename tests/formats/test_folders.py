"""Folders of the Trainer, of an adapter and of Accelerate, written by hand: none of their packages is imported."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import explain, read_checkpoint, read_curvature, read_optimizer
from floats import assert_close
from formats.same import Evil
from readers.test_files import stepped


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.LayerNorm(3))


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """As the Trainer groups them: biases and norms do not decay."""
    model = network()
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias") or name[0] in "13"]
    groups = [
        {"params": [p for _, p in named if all(p is not q for q in plain)]},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = stepped(torch.optim.AdamW(groups, weight_decay=0.1))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = {"global_step": 2, "epoch": 1.0, "stateful_callbacks": {"bayesadam": {"n_data": 40}}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, model, optimizer


def test_the_trainers_rule_orders_what_its_folder_holds(written: Any) -> None:
    folder, model, optimizer = written
    read = read_checkpoint(folder)
    assert (read.format, read.ordered) == ("Hugging Face Trainer", False)
    assert (read.recorded.step, read.recorded.epoch, read.recorded.n_data) == (2, 1, 40)
    with pytest.raises(MatchError, match="or pass the model, whose order it is"):
        read_curvature(read)
    assert_close(
        dict(read_curvature(read, network()).second_moment), dict(read_optimizer(model, optimizer).second_moment)
    )
    posterior = ba.Posterior.from_checkpoint(folder, network())
    assert_close(dict(posterior.variance), dict(ba.Posterior.from_optimizer(model, optimizer, n_data=40).variance))


def test_a_state_is_chosen_where_there_are_several(written: Any) -> None:
    folder, model, optimizer = written
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")
    (folder / "trainer_state.json").unlink()
    torch.save(stepped(torch.optim.Adam(nn.Linear(2, 2).parameters())).state_dict(), folder / "optimizer_1.bin")
    with pytest.raises(FileError, match=r"optimizer_path=; there are optimizer\.bin and optimizer_1\.bin"):
        read_checkpoint(folder)
    read = read_checkpoint(folder, optimizer_path=folder / "optimizer.bin")
    assert read.format == "Accelerate"
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    match = ba.readers.match_checkpoint(read, model, param_names=listed)
    assert f"the optimiser's state in {folder / 'optimizer.bin'}" in explain(read, match)[0]


def test_a_folder_of_checkpoints_names_the_newest(written: Any, tmp_path: Path) -> None:
    folder, model, _ = written
    for number in (200, 9):
        shutil.copytree(folder, inner := tmp_path.parent / "run" / f"checkpoint-{number}", dirs_exist_ok=True)
        os.utime(inner, (1e9, 1e9 + number))
    with pytest.raises(FileError, match=r"(?s)holds 2 checkpoints.*checkpoint-200\n.*checkpoint-9$"):
        read_checkpoint(tmp_path.parent / "run")
    shutil.rmtree(inner)
    assert read_checkpoint(tmp_path.parent / "run").weights.keys() == model.state_dict().keys()


def test_shards_that_are_refused(written: Any, tmp_path: Path) -> None:
    folder, model, _ = written
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    tensors = model.state_dict()
    parts = {f"model-0000{i}-of-00002.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    whole = {name: shard for shard, part in parts.items() for name in part}
    for shard, part in parts.items():
        save_file(part, folder / shard)
    index.write_text(json.dumps({"weight_map": whole}))
    assert read_checkpoint(folder).weights.keys() == tensors.keys()

    def refused(message: str) -> None:
        with pytest.raises(FileError, match=message):
            read_checkpoint(folder)

    name, shard = next(iter(whole.items()))
    content = (folder / shard).read_bytes()
    (folder / shard).write_bytes(content[:-8])
    refused(f"{shard} is truncated")
    (folder / shard).unlink()
    refused(f"lacks {shard}, one of 2 files")
    (folder / shard).write_bytes(content)
    for path in ("../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..\\outside.safetensors", "..", ""):
        index.write_text(json.dumps({"weight_map": {**whole, name: path}}))
        refused("not in its own folder")
    index.write_text(json.dumps({"weight_map": {**whole, name: next(s for s in parts if s != shard)}}))
    refused(f"lacks '{name}'")
    for broken in ("{", "[]", "{}", '{"weight_map": {"a": 3}}'):
        index.write_text(broken)
        refused(r"model\.safetensors\.index\.json (is|holds|has)")
    index.unlink()
    refused("copy the whole folder")


def test_an_adapter_needs_the_model(written: Any) -> None:
    folder, _, _ = written
    save_file({"base_model.model.0.lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    read = read_checkpoint(folder)
    assert (read.format, read.rules.partial) == ("PEFT adapter", True)
    with pytest.raises(MatchError, match=r"Sequential has none: pass the model with it, peft\.PeftModel"):
        read_curvature(read, network())
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match="no 'peft_type'"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "saved", [lambda e, f: f.write_bytes(pickle.dumps(e)), lambda e, f: torch.save({"state": e}, f)]
)
@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_no_code_is_run(name: str, saved: Callable[[Any, Path], Any], written: Any) -> None:
    folder, _, _ = written
    marker = folder / "code was run"
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    for other in ("training_args.bin", "rng_state.pth", "scheduler.pt"):
        (folder / other).write_bytes(pickle.dumps(Evil(marker)))
    saved(Evil(marker), folder / name)
    with pytest.raises(FileError, match=r"made to run code|truncated, damaged"):
        read_checkpoint(folder)
    assert not marker.exists()


def test_damaged_folders(written: Any) -> None:
    folder, _, _ = written
    for name, message in (
        ("model.safetensors", "truncated or damaged"),
        ("optimizer.pt", "truncated, damaged"),
        ("trainer_state.json", r"trainer_state\.json is truncated"),
    ):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(FileError, match=message):
            ba.Posterior.from_checkpoint(folder, network(), n_data=10)
        (folder / name).write_bytes(content)
    torch.save({"lr": 0.1}, folder / "optimizer.pt")
    with pytest.raises(FileError, match="holds no optimiser state"):
        read_checkpoint(folder)
