"""Files of every format that torch has had: read as the live optimiser has it, written again to the byte but for the
weights.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.readers import read_checkpoint
from bayesadam.readers.formats.torch_files import as_weights, load_torch, mapped
from formats.same import same, same_moments


def tree(pair: Any) -> dict[str, Any]:
    return {"model": pair[0].state_dict(), "optimizer": pair[1].state_dict(), "epoch": 3}


def pruned(path: Path, out: Path) -> dict[str, Any]:
    """Half of the weights at zero, as torch itself then reads the file."""
    ba.compress.prune_checkpoint(path, out, 0.5)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    found: dict[str, Any] = torch.load(out, weights_only=False)
    weights = torch.cat([w.flatten() for w in found["model"].values() if w.dim() > 1])
    assert 0.3 < (weights == 0).double().mean() < 0.7
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_protocol_of_torch_save(protocol: int, zipped: bool, pair: Any, tmp_path: Path) -> None:
    path, saved = tmp_path / "c.pt", tree(pair)
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert same_moments(path, pair, "torch" if zipped else "torch before 1.6").recorded.epoch == 3
    if zipped:
        found = pruned(path, tmp_path / "out.pt")
        assert same([found["epoch"], found["optimizer"]], [3, saved["optimizer"]])
    else:
        with pytest.raises(FileError, match=r"choose a path that ends in \.safetensors"):
            ba.compress.prune_checkpoint(path, tmp_path / "out.pt", 0.5)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_tensors_in_a_plain_pickle(protocol: int, pair: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.pkl"
    path.write_bytes(pickle.dumps(tree(pair), protocol))
    same_moments(path, pair, "pickle")
    with pytest.raises(FileError, match=r"choose a path that ends in \.safetensors"):
        ba.compress.prune_checkpoint(path, tmp_path / "out.pkl", 0.5)
    assert not (tmp_path / "out.pkl").exists()
    ba.compress.prune_checkpoint(path, tmp_path / "out.safetensors", 0.5)


def test_the_tensors_of_a_module_are_those_of_its_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[2][1].weight = model[2][0].weight
    model[1].register_buffer("fleeting", torch.zeros(3), persistent=False)
    torch.save(model, tmp_path / "m.pt")
    found = as_weights(load_torch(mapped(tmp_path / "m.pt")))
    expected = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["2.0.weight"].data_ptr() == found["2.1.weight"].data_ptr()
    torch.save(nn.DataParallel(model), tmp_path / "m.pt")
    assert list(as_weights(load_torch(mapped(tmp_path / "m.pt")))) == [f"module.{name}" for name in expected]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_has_weights_and_no_state(pair: Any, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(pair[0]), tmp_path / "m.pt")
    with pytest.raises(FileError, match=r"no optimiser state.*optimizer_path="):
        read_checkpoint(tmp_path / "m.pt")
    torch.save(pair[1].state_dict(), tmp_path / "o.pt")
    read = read_checkpoint(tmp_path / "m.pt", optimizer_path=tmp_path / "o.pt")
    assert all(torch.equal(read.weights[name], w) for name, w in pair[0].state_dict().items())


def test_a_zip_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(
        {"a": torch.ones(1000), "b": torch.zeros(7, dtype=torch.uint8), "c": torch.ones(3, dtype=torch.float64)}, path
    )
    view = mapped(path)
    file, begin = path.read_bytes(), torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    for held in load_torch(view).values():
        start = held.data_ptr() - begin
        assert 0 < start < len(file)
        assert file[start : start + held.nbytes] == held.numpy().tobytes()
    assert sys.byteorder == "little"


def zipped_again(path: Path, pair: Any, changes: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """A file of torch's, zipped by another hand; members whose names end in a key have other bytes."""
    torch.save(tree(pair), path.with_suffix(".first"))
    with zipfile.ZipFile(path.with_suffix(".first")) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, next((changes[end] for end in changes if name.endswith(end)), old.read(name)))
    return path


def test_what_was_compressed_is_read_and_not_changed_in_place(pair: Any, tmp_path: Path) -> None:
    path = zipped_again(tmp_path / "d.pt", pair, {})
    same_moments(path, pair, "torch")
    with pytest.raises(FileError, match=r"compressed.*choose a path that ends in \.safetensors"):
        ba.compress.prune_checkpoint(path, tmp_path / "out.pt", 0.5)
    assert not (tmp_path / "out.pt").exists()


def test_a_bomb_is_not_unpacked(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="unpacks to more than 64 times its size"):
        read_checkpoint(zipped_again(tmp_path / "d.pt", pair, {"/0": bytes(50_000_000)}))


def test_modules_that_share_modules_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bayesadam.readers.formats.torch_files._MOST_MODULES", 1000)
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(40):
        model = nn.Sequential(model, model)
    torch.save({"model": model}, tmp_path / "c.pt")
    with pytest.raises(FileError, match="more than 1,000 modules"):
        read_checkpoint(tmp_path / "c.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_every_truncation_is_an_error_or_the_whole(zipped: bool, pair: Any, tmp_path: Path) -> None:
    torch.save(tree(pair), tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "c.pt").read_bytes()
    for length in range(1, len(whole), max(1, len(whole) // 60)):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(FileError):
            read_checkpoint(tmp_path / "cut.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_optimiser_knows_its_parameters_by_their_memory(zipped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    shuffled = [model[i] for i in (2, 0, 3, 1)]
    groups = [{"params": [m.bias for m in shuffled]}, {"params": [m.weight for m in shuffled], "weight_decay": 0.1}]
    live = torch.optim.Adam(groups)
    model(torch.ones(1, 3)).sum().backward()
    live.step()
    torch.save({"model": model, "optimizer": live}, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    expected = ba.readers.read_optimizer(model, live).second_moment
    found = ba.readers.read_curvature(read_checkpoint(tmp_path / "c.pt")).second_moment
    assert all(torch.equal(found[name], v) for name, v in expected.items())
