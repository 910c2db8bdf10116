"""Archives and folders of files, in the layouts of those who write them."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.readers import read_checkpoint
from cases import trained
from floats import assert_close


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    return trained(3, 5, 2)


def content(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def check(path: Path, pair: Any, kind: str, **options: Any) -> None:
    read = read_checkpoint(path, **options)
    expected = ba.readers.read_optimizer(*pair).second_moment
    found = ba.readers.read_curvature(read).second_moment
    assert read.format == kind
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], v) for name, v in expected.items())


def stable_baselines(pair: Any) -> dict[str, bytes]:
    """The members of Stable-Baselines3's zip."""
    return {
        "data": b'{"policy_class": {":type:": "<class \'abc.ABCMeta\'>"}}',
        "pytorch_variables.pth": content(None),
        "policy.pth": content(pair[0].state_dict()),
        "policy.optimizer.pth": content(pair[1].state_dict()),
        "_stable_baselines3_version": b"2.7.0",
        "system_info.txt": b"- OS: Linux",
    }


def write_zip(path: Path, members: Mapping[str, bytes], **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, held in members.items():
            archive.writestr(name, held)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stable_baselines_zip(compression: int, pair: Any, tmp_path: Path) -> None:
    path = write_zip(tmp_path / "ppo.zip", stable_baselines(pair), compression=compression)
    check(path, pair, "zip archive")
    with pytest.raises(FileError, match=r"choose a path that ends in \.safetensors"):
        ba.compress.prune_checkpoint(path, tmp_path / "out.zip", 0.5)


def test_archives_that_hold_nothing_of_torch(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip", {"a.txt": b"1", "b.csv": b"2"})
    with pytest.raises(FileError, match=r"without a file of torch; it has \['a.txt', 'b.csv'\]"):
        read_checkpoint(tmp_path / "a.zip")


def test_weights_and_state_beside_each_other(pair: Any, tmp_path: Path) -> None:
    torch.save(pair[0].state_dict(), tmp_path / "params.pt")
    torch.save(pair[1].state_dict(), tmp_path / "optimizer.pt")
    check(tmp_path / "params.pt", pair, "torch")
    assert read_checkpoint(tmp_path / "params.pt").optimizer_path == tmp_path / "optimizer.pt"
    check(tmp_path, pair, "folder")
    torch.save(pair[0].state_dict(), tmp_path / "best_model_3.pt")
    torch.save(pair[1].state_dict(), tmp_path / "best_opt_3.pt")
    check(tmp_path / "best_model_3.pt", pair, "torch")
    torch.save(pair[1].state_dict(), tmp_path / "best_optim_3.pt")
    with pytest.raises(FileError, match="no optimiser state"):
        read_checkpoint(tmp_path / "best_model_3.pt")


def test_a_folder_with_several_checkpoints_lists_them(pair: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    paths = [tmp_path / "a.pt", tmp_path / "run" / "b.ckpt", tmp_path / "c.pth"]
    for number, path in enumerate(paths):
        torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, path)
        os.utime(path, (1e9, 1e9 + number))
    with pytest.raises(FileError) as caught:
        read_checkpoint(tmp_path)
    lines = str(caught.value).splitlines()
    assert "holds 3 files" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == [str(path) for path in reversed(paths)]
    paths[0].unlink()
    paths[2].unlink()
    check(tmp_path, pair, "folder")


def test_the_class_that_stable_baselines_wrote_down_decides(pair: Any, tmp_path: Path) -> None:
    # Its average starts at one, and its entries are those of torch's RMSprop.
    live = torch.optim.RMSprop(pair[0].parameters(), alpha=0.9)
    pair[0](torch.ones(2, 3)).sum().backward()
    live.step()
    for state in live.state.values():
        state["square_avg"] += 0.9
    name = "stable_baselines3.common.sb2_compat.rmsprop_tf_like.RMSpropTFLike"
    told = f"""{{"policy_kwargs": {{"optimizer_class": "<class '{name}'>"}}}}""".encode()
    members = {**stable_baselines((pair[0], live)), "data": told}
    read = read_checkpoint(write_zip(tmp_path / "a2c.zip", members))
    assert read.recorded.optimizer == name
    found = ba.readers.read_curvature(read)
    held = live.state[pair[0][0].weight]["square_avg"]
    assert_close(found.second_moment["0.weight"], (held - 0.9) / 0.1, atol=1e-5)
