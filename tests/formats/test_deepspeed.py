"""DeepSpeed's folders: written by DeepSpeed in two processes where it is installed, and by hand in its layout."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.readers import format_of, read_checkpoint
from bayesadam.readers.formats.deepspeed import DEEPSPEED
from bayesadam.readers.formats.lazy import Lazy
from cases import train
from formats.same import same_posterior


def network(*, tied: bool = False, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))
    model.register_buffer("scale", torch.tensor([2.0, 3.0]))
    if tied:
        model[3].weight = model[2].weight
    if frozen:
        model[2].weight.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Biases first and without decay, as trainers make groups."""
    parts = {flag: [p for p in model.parameters() if p.requires_grad and (p.dim() == 1) == flag] for flag in (0, 1)}
    groups = [{"params": parts[True], "weight_decay": 0.0}, {"params": parts[False], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01)


# --- in DeepSpeed's layout, by hand ---------------------------------------------------------------------------------

_CLASSES = {
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler",
}


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Classes that are pickled under the names of DeepSpeed's, which need not be installed."""
    made = {}
    for module, name in _CLASSES.items():
        made[name] = type(name, (), {"__module__": module})
        for depth in range(1, module.count(".") + 2):
            part = ".".join(module.split(".")[:depth])
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    for module, name in _CLASSES.items():
        setattr(sys.modules[module], name, made[name])
    return made


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    classes: dict[str, type],
    *,
    ranks: int = 2,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    change: Callable[[dict[str, Any]], Any] | None = None,
) -> Path:
    """What DeepSpeed 0.19.8 was seen to write for ZeRO 1 and 2."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {n: names[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if names[id(p)] != n}
    state = optimizer.state_dict()
    step = folder / "global_step4"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    shapes = [OrderedDict((names[id(p)], p.shape) for p in group["params"]) for group in optimizer.param_groups]
    module = OrderedDict((k, v.to(dtype) if v.is_floating_point() else v) for k, v in model.state_dict().items())
    torch.save(
        {
            "module": module,
            "buffer_names": ["scale"],
            "optimizer": None,
            "param_shapes": shapes,
            "shared_params": shared,
            "global_steps": 4,
            "dp_world_size": ranks,
            "ds_version": "0.19.8",
        },
        step / "mp_rank_00_model_states.pt",
    )

    def cut(tensors: list[Tensor], rank: int, *, padded: bool) -> Tensor:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        length = -(-flat.numel() // ranks)
        whole = torch.cat([flat, flat.new_zeros(length * ranks - flat.numel())]) if padded else flat
        return whole[rank * length : (rank + 1) * length].clone()

    for rank in range(ranks):
        states = {}
        for number, group in enumerate(state["param_groups"]):
            kept = [state["state"][key] for key in group["params"]]
            states[number] = {
                "step": kept[0]["step"],
                **{key: cut([s[key] for s in kept], rank, padded=True) for key in ("exp_avg", "exp_avg_sq")},
            }
        groups = [{**group, "params": [number]} for number, group in enumerate(state["param_groups"])]
        content = {
            "loss_scaler": classes["DynamicLossScaler"](),
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": [
                cut(group["params"], rank, padded=False) for group in optimizer.param_groups
            ],
            "zero_stage": classes["ZeroStageEnum"](),
            # Not right, as with round_robin_gradients: nothing must go by it.
            "param_slice_mappings": [OrderedDict((name, classes["fragment_address"]()) for name in s) for s in shapes],
        }
        if change is not None:
            change(content)
        file = step / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_version": "0.19.8"}, file)
    return folder


def trained(**options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(**options)
    optimizer = adamw(model)
    train(model, optimizer, steps=4)
    return model, optimizer


@pytest.mark.parametrize(("options", "ranks"), [({}, 1), ({}, 7), ({"tied": True}, 2), ({"frozen": True}, 3)])
def test_the_ranks_are_put_together(options: dict[str, bool], ranks: int, classes: Any, tmp_path: Path) -> None:
    model, optimizer = trained(**options)
    folder = write(tmp_path / "c", model, optimizer, classes, ranks=ranks)
    assert format_of(folder) is DEEPSPEED
    assert format_of(folder / "global_step4") is DEEPSPEED
    read = read_checkpoint(folder)
    assert read.recorded.step == 4
    same_posterior(folder, (model, optimizer), network(**options))
    same_posterior(folder / "global_step4", (model, optimizer), network(**options))


def test_nothing_is_put_together_until_it_is_looked_at(classes: Any, tmp_path: Path) -> None:
    read = read_checkpoint(write(tmp_path / "c", *trained(), classes))
    assert isinstance(read.weights, Lazy)
    state = read.optimizer["state"]["2.weight"]
    assert state.outline["exp_avg_sq"].is_meta
    assert state.outline["exp_avg_sq"].shape == read.weights.outline["2.weight"].shape == (5, 5)


def test_without_zero(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    tree = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1, "dp_world_size": 2}
    torch.save(tree, tmp_path / "mp_rank_00_model_states.pt")
    assert read_checkpoint(tmp_path).format == "deepspeed"
    same_posterior(tmp_path, (model, optimizer), network())


def refused(folder: Path, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        ba.Posterior.from_checkpoint(folder, network(), n_data=100)
    assert str(folder) in str(caught.value)


def test_damaged_and_incomplete_folders(classes: Any, tmp_path: Path) -> None:
    pair = trained()
    rank = "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def folder(name: str, **options: Any) -> Path:
        return write(tmp_path / name, *pair, classes, **options) / "global_step4"

    missing = folder("missing")
    (missing / rank).unlink()
    refused(missing, "has no zero_pp_rank_1.*copy those of all machines")
    headless = folder("headless")
    (headless / "mp_rank_00_model_states.pt").unlink()
    refused(headless, "has no mp_rank_00_model_states.pt")
    cut = folder("cut")
    (cut / rank).write_bytes((cut / rank).read_bytes()[:500])
    refused(cut, "truncated, damaged")
    mixed = folder("mixed")
    model = torch.load(mixed / "mp_rank_00_model_states.pt", weights_only=True)
    other = {**model["module"], "2.weight": model["module"]["2.weight"].flip(0)}
    torch.save({**model, "module": other}, mixed / "mp_rank_00_model_states.pt")
    refused(mixed, r"the ranks' '2\.weight' is not that of .*: different saves")
    torch.save({**model, "dp_world_size": 1}, mixed / "mp_rank_00_model_states.pt")
    refused(mixed, "does not have the whole of")
    refused(folder("elastic", change=lambda kept: kept.update(base_optimizer_state=[1])), "elastic_checkpoint=True")
    refused(folder("release", change=lambda kept: kept.pop("single_partition_of_fp32_groups")), "a file of DeepSpeed")
    third = folder("third")
    (third / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    refused(third, "ZeRO stage 3")
    parallel = folder("parallel")
    (parallel / "mp_rank_01_model_states.pt").touch()
    refused(parallel, "model-parallel ranks")


@pytest.mark.parametrize("tag", ["../outside", "/", "", "nowhere"])
def test_a_tag_that_leads_elsewhere(tag: str, classes: Any, tmp_path: Path) -> None:
    pair = trained()
    folder = write(tmp_path / "c", *pair, classes)
    write(tmp_path / "other", *trained(tied=True), classes)
    (tmp_path / "other" / "global_step4").rename(tmp_path / "outside")
    (folder / "latest").write_text(tag)
    assert read_checkpoint(folder).format == "folder"
    same_posterior(folder, pair, network())
