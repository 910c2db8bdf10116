"""What trainers save is read as what it is, told by its content, and refused with what to do where it cannot be."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bayesadam as ba
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import read_checkpoint, write_pruned
from bayesadam.readers.formats.lazy import Lazy
from cases import train, trained
from formats.same import same, same_moments
from readers.test_matching import Tied


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        lambda w, s: {"model": w, "optimizer": s},
        lambda w, s: {"state_dict": w, "optim": s, "epoch": 3},
        lambda w, s: {"model_state_dict": w, "optimizer_state_dict": s},
        lambda w, s: {"net": w, "optimizer_states": [s]},
        lambda w, s: {"anything": w, "whatever": s, "losses": {"train": torch.tensor(0.5)}},
        lambda w, s: {"checkpoint": {"model": w, "optimizer": s}},
        lambda w, s: {"model": w, "model_ema": {k: v + 1 for k, v in w.items()}, "optimizer": s},
        lambda w, s: {"rng": {"torch": torch.get_rng_state()}, "net": w, "optimizer": s},
        lambda w, s: {"model": {f"module.{k}": v for k, v in w.items()}, "optimizer": s},
        lambda w, s: {"model": {f"_orig_mod.{k}": v for k, v in w.items()}, "optimizer": s},
        lambda w, s: {"model": {f"module._orig_mod.{k}": v for k, v in w.items()}, "optimizer": s},
        lambda w, s: {"model": {**w, "_extra_state": {"version": 3}}, "optimizer": s},
    ],
)
def test_every_layout_is_read(layout: Callable[[Any, Any], Any], pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    path = saved(tmp_path / "c.pt", layout(model.state_dict(), optimizer.state_dict()))
    same_moments(path, pair, "torch")


def test_the_content_tells_the_format_and_not_the_name(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    state = saved(tmp_path / "state.txt", optimizer.state_dict())
    save_file(model.state_dict(), tmp_path / "model.pt")
    assert read_checkpoint(tmp_path / "model.pt", optimizer_path=state).format == "safetensors"
    path = saved(tmp_path / "c.safetensors", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    same_moments(path, pair)


def test_what_the_trainer_wrote_down(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    told = read_checkpoint(saved(tmp_path / "c.pt", {**tree, "epoch": 3, "step": torch.tensor(40), "n_data": 500}))
    assert told.recorded == ba.readers.Recorded(step=40, epoch=3, n_data=500)
    silent = read_checkpoint(saved(tmp_path / "c.pt", {**tree, "epoch": True, "best": 0.5})).recorded
    assert silent == ba.readers.Recorded()


def test_nothing_is_copied_until_it_is_used(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    before = path.read_bytes()
    read = read_checkpoint(path)
    read.weights["0.weight"].zero_()
    assert path.read_bytes() == before


# --- refused --------------------------------------------------------------------------------------------------------


def test_damaged_files(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    whole = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}).read_bytes()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    short = (tmp_path / "w.safetensors").read_bytes()[:-20]
    files = {
        "empty.pt": (b"", "is empty"),
        "cut.pt": (whole[: len(whole) // 2], "truncated, damaged"),
        "three.pt": (b"PK\x03", "of no known format"),
        "zip.pt": (b"PK\x03\x04" + bytes(100), "truncated, damaged"),
        "text.pt": (b"epoch,loss\n1,2\n", "of no known format.*starts with b'epoch,loss"),
        "cut.safetensors": (short, "truncated or damaged"),
        "pickle.pt": (pickle.dumps({"model": 1}), "holds no weights"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=message) as caught:
            read_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_missing_files_and_folders(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no file at .*nowhere"):
        read_checkpoint(tmp_path / "nowhere.pt")
    saved(tmp_path / "pytorch_model.bin", pair[0].state_dict())
    with pytest.raises(FileError, match=r"holds no optimiser state.*optimizer_path="):
        read_checkpoint(tmp_path)
    with pytest.raises(FileError, match=r"no file at .*nowhere"):
        read_checkpoint(tmp_path / "pytorch_model.bin", optimizer_path=tmp_path / "nowhere.pt")


def test_half_a_checkpoint_says_what_was_found(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "epoch": 3})
    with pytest.raises(
        FileError, match=r"no optimiser state: found 'model' \(OrderedDict of 4\), 'epoch' \(int\).*optimizer_path="
    ):
        read_checkpoint(path)
    with pytest.raises(FileError, match="no optimiser state"):
        read_checkpoint(path, optimizer_path=path)
    with pytest.raises(FileError, match=r"no weights that can be identified.*'state' \(dict of 4\)"):
        read_checkpoint(saved(tmp_path / "c.pt", optimizer.state_dict()))
    with pytest.raises(FileError, match="holds a list of 2, not a dictionary"):
        read_checkpoint(saved(tmp_path / "c.pt", [1, 2]))
    with pytest.raises(FileError, match="found nothing"):
        read_checkpoint(saved(tmp_path / "c.pt", {}))


# --- writing --------------------------------------------------------------------------------------------------------


def test_pruned_weights_are_zero_and_all_else_is_as_it_was(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    model[0].weight.data[0, 0] = torch.nan
    weights = OrderedDict((f"module.{name}", tensor) for name, tensor in model.state_dict().items())
    tree = {
        "note": "kept",
        "outer": {"model": weights, "optimizer": optimizer.state_dict(), "epoch": 7},
        "list": [1, 2.5],
    }
    path = saved(tmp_path / "c.pt", tree)
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, 0] = False
    write_pruned(read_checkpoint(path), {"0.weight": mask}, tmp_path / "out.pt")
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(torch.load(path, weights_only=True), tree)
    weights["module.0.weight"] = torch.where(mask, weights["module.0.weight"], 0.0)
    assert same(out, tree)


def test_a_file_may_be_pruned_in_place_and_stays_readable(tmp_path: Path) -> None:
    model, optimizer = trained(3, 3, 3, 3)
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    write_pruned(read_checkpoint(path), {"2.weight": torch.eye(3, dtype=torch.bool)}, path)
    read = read_checkpoint(path)
    # The note on the order of the modules has survived, or equal shapes would be refused.
    assert read.ordered
    with torch.no_grad():
        model[2].weight.mul_(torch.eye(3))
    same_moments(path, (model, optimizer))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt"]


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_each_mask_is_computed_and_each_weight_read_once(pair: Any, tmp_path: Path, ending: str) -> None:
    model, optimizer = pair
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint, accessed = read_checkpoint(path), []
    values = {"weights": checkpoint.weights, "masks": {n: torch.ones_like(p) > 0 for n, p in model.named_parameters()}}

    def counted(kind: str) -> Lazy:
        outline = {name: tensor.to("meta") for name, tensor in values[kind].items()}
        return Lazy(outline, lambda name: (accessed.append((kind, name)), values[kind][name])[1])

    write_pruned(replace(checkpoint, weights=counted("weights")), counted("masks"), tmp_path / f"out{ending}")
    assert sorted(accessed) == sorted((kind, name) for kind in values for name in values[kind])


def test_tied_weights_are_pruned_under_both_names_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    mask = torch.eye(3, dtype=torch.bool)
    checkpoint = read_checkpoint(path)
    write_pruned(checkpoint, {"first.weight": mask}, tmp_path / "out.pt")
    out = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert torch.equal(out["second.weight"], model.first.weight * mask)
    assert out["second.weight"].data_ptr() == out["first.weight"].data_ptr()
    write_pruned(checkpoint, {"first.weight": mask}, tmp_path / "out.safetensors")
    loaded = Tied()
    loaded.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert torch.equal(loaded.second.weight, model.first.weight * mask)


def test_masks_are_checked_before_anything_is_written(pair: Any, tmp_path: Path) -> None:
    model, optimizer = pair
    path = saved(tmp_path / "c.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    checkpoint = read_checkpoint(path)
    for masks, message in (
        ({"nobody": torch.ones(1, dtype=torch.bool)}, r"no weights \['nobody'\]"),
        ({"0.bias": torch.ones(4, dtype=torch.bool)}, r"must be torch.bool of shape \(5,\)"),
        ({"0.bias": torch.ones(5)}, r"must be torch.bool"),
    ):
        with pytest.raises(MatchError, match=message):
            write_pruned(checkpoint, masks, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
