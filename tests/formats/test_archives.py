"""Archives and folders of files, in the layouts of those who write them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.readers import read_checkpoint
from formats import fuzz
from formats.same import same_moments


def stable_baselines(pair: Any) -> dict[str, bytes]:
    """The members of Stable-Baselines3's zip."""
    return {
        "data": b'{"policy_class": {":type:": "<class \'abc.ABCMeta\'>"}}',
        "pytorch_variables.pth": fuzz.saved(None),
        "policy.pth": fuzz.saved(pair[0].state_dict()),
        "policy.optimizer.pth": fuzz.saved(pair[1].state_dict()),
        "_stable_baselines3_version": b"2.7.0",
        "system_info.txt": b"- OS: Linux",
    }


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stable_baselines_zip(compression: int, pair: Any, tmp_path: Path) -> None:
    path = tmp_path / "ppo.zip"
    path.write_bytes(fuzz.archive_of(stable_baselines(pair), compression))
    same_moments(path, pair, "zip archive")
    with pytest.raises(FileError, match=r"choose a path that ends in \.safetensors"):
        ba.compress.prune_checkpoint(path, tmp_path / "out.zip", 0.5)


def test_archives_that_hold_nothing_of_torch(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(fuzz.archive_of({"a.txt": b"1", "b.csv": b"2"}))
    with pytest.raises(FileError, match=r"without a file of torch; it has \['a.txt', 'b.csv'\]"):
        read_checkpoint(tmp_path / "a.zip")


def test_weights_and_state_beside_each_other(pair: Any, tmp_path: Path) -> None:
    torch.save(pair[0].state_dict(), tmp_path / "params.pt")
    torch.save(pair[1].state_dict(), tmp_path / "optimizer.pt")
    same_moments(tmp_path / "params.pt", pair, "torch")
    assert read_checkpoint(tmp_path / "params.pt").optimizer_path == tmp_path / "optimizer.pt"
    same_moments(tmp_path, pair, "folder")
    torch.save(pair[0].state_dict(), tmp_path / "best_model_3.pt")
    torch.save(pair[1].state_dict(), tmp_path / "best_opt_3.pt")
    same_moments(tmp_path / "best_model_3.pt", pair, "torch")
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
    assert "holds 3 checkpoints" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == [str(path) for path in reversed(paths)]
    paths[0].unlink()
    paths[2].unlink()
    same_moments(tmp_path, pair, "folder")
