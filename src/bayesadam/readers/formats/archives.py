"""Archives and folders of files: Stable-Baselines3's zip, NeMo's tar, a run's folder with several checkpoints."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, contents_of
from bayesadam.readers.formats.files import DAMAGED, damaged, load_part
from bayesadam.readers.formats.registry import Format, format_of, is_state_file, state_beside
from bayesadam.readers.formats.torch_files import MOST_UNPACKED, Part, is_tar, tar_members, zip_members

# What files with tensors are called.
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar", ".safetensors", ".zip", ".nemo")
_MEMBERS = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_OPTIMIZER = ".optimizer"
_GZIP = b"\x1f\x8b"
_SHOWN = 12


def _is_zip(path: Path, head: bytes) -> bool:
    if not head.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False
    return not any(PurePosixPath(name).name == "data.pkl" for name in names)


def _is_tar(path: Path, head: bytes) -> bool:
    if path.is_dir() or len(head) < 16:
        return False
    if head.startswith(_GZIP):
        return True
    with Part.of(path) as part:
        return part.length > 512 and part.inside(257, 5).read() == b"ustar" and not is_tar(part)


def _read_members(
    path: Path, members: Mapping[str, Part], weights_key: str | None, optimizer_key: str | None
) -> Contents:
    """The files with tensors in an archive as one dictionary, by their names without the ending."""
    tensors = {name: part for name, part in members.items() if name.endswith(_MEMBERS) and part.length}
    if not tensors:
        raise FileError(f"{path} is an archive without a file of torch; it has {sorted(members)[:8]}")
    tree: dict[str, Any] = {}
    for name, part in tensors.items():
        key = PurePosixPath(name).stem
        tree[key if key not in tree else name] = load_part(part, f"{path}: {name}")
    parts = {key.removesuffix(_OPTIMIZER) for key in tree if key.endswith(_OPTIMIZER)} - {"policy"}
    if parts and isinstance(tree.get("policy"), Mapping):
        # Stable-Baselines3's optimisers are named for the parts of the policy that they train.
        tree["policy"] = _by_part(tree["policy"])
    named = _optimizer_class(members["data"]) if "data" in members and "policy" in tree else None
    if named is not None:
        tree["optimizer_class"] = named
    return contents_of(tree, path, weights_key=weights_key, optimizer_key=optimizer_key)


def _by_part(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Weights by the first part of their names.

    >>> _by_part({"actor.0.weight": 1, "critic.bias": 2})
    {'actor': {'actor.0.weight': 1}, 'critic': {'critic.bias': 2}}
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in weights.items():
        found.setdefault(name.partition(".")[0], {})[name] = tensor
    return found


def _optimizer_class(settings: Part) -> str | None:
    """The optimiser's class as Stable-Baselines3 writes it down, in the JSON of its settings."""
    try:
        given = json.loads(settings.read().decode("utf-8"))["policy_kwargs"]["optimizer_class"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    named = re.search(r"<class '([\w.]+)'>", str(given))
    return named[1] if named else None


def _read_zip(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    try:
        with Part.of(path) as part:
            return _read_members(path, zip_members(part), weights_key, optimizer_key)
    except FileError:
        raise
    except DAMAGED as error:
        raise damaged(path, "zip", error) from error


def _read_tar(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    try:
        with Part.of(path) as part:
            packed = part.inside(0, 2).read() == _GZIP
            members = _unpacked(part) if packed else tar_members(part)
            return _read_members(path, members, weights_key, optimizer_key)
    except FileError:
        raise
    except DAMAGED as error:
        raise damaged(path, "tar", error) from error


def _unpacked(part: Part) -> dict[str, Part]:
    """The files with tensors of a compressed archive, in memory, if it is not a bomb."""
    most = 2**20 + MOST_UNPACKED * part.length
    found: dict[str, Part] = {}
    try:
        with tarfile.open(fileobj=part.as_file(), mode="r|gz") as archive:
            for member in archive:
                most -= member.size
                if most < 0:
                    raise FileError(f"the archive unpacks to more than {MOST_UNPACKED} times its size, and is not read")
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    wanted = member.name.endswith(_MEMBERS)
                    found[member.name.removeprefix("./")] = Part.of_bytes(file.read() if wanted else b"")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"no whole archive: {error}") from None
    return found


def _files_in(folder: Path) -> list[Path]:
    """Files with the endings of checkpoints, the newest first, down to the third level."""
    if not folder.is_dir():
        return []
    found = [file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(depth) if file.suffix in _SUFFIXES]
    return sorted((file for file in found if file.is_file()), key=lambda file: -file.stat().st_mtime)


def _read_folder(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    """The one checkpoint in a folder, with the state beside it; several are listed."""
    files = [file for file in _files_in(path) if not is_state_file(file)]
    if len(files) == 1:
        found = format_of(files[0]).read(files[0], weights_key, optimizer_key)
        beside = state_beside(files[0])
        if found.optimizer is not None or beside is None:
            return found
        state = format_of(beside).read(beside, None, optimizer_key)
        return replace(found, optimizer=state.optimizer, recorded=found.recorded.completed(state.recorded))
    listed = "".join(f"\n  bayesadam inspect {file}" for file in files[:_SHOWN])
    more = f"\n  and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    raise FileError(
        f"{path} holds {len(files)} files that may be checkpoints; give one of them, the newest first:{listed}{more}"
    )


ZIP = Format("zip archive", _is_zip, _read_zip)
TAR = Format("tar archive", _is_tar, _read_tar)
FOLDER = Format("folder", lambda path, head: bool(_files_in(path)), _read_folder)
