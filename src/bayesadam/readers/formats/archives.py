"""Archives and folders of files: Stable-Baselines3's zip, NeMo's tar, a run's folder with several checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, contents_of
from bayesadam.readers.formats.registry import Format, format_of, is_state_file, state_beside
from bayesadam.readers.formats.torch_files import damage_named, load_view, mapped, tar_members, zip_members

_MEMBERS = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_SUFFIXES = (*_MEMBERS, ".tar", ".safetensors", ".zip", ".nemo")
_OPTIMIZER = ".optimizer"


def _archive(name: str, recognises: Callable[[Path, bytes], bool], members_of: Callable[[Any], Any]) -> Format:
    def read(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
        with damage_named(path, name.partition(" ")[0]):
            tree = _tree(path, members_of(mapped(path)))
        return contents_of(tree, path, weights_key=weights_key, optimizer_key=optimizer_key)

    return Format(name, recognises, read)


def _tree(path: Path, members: Mapping[str, memoryview]) -> dict[str, Any]:
    """The files with tensors in an archive as one dictionary, by their names without the ending."""
    tensors = {name: view for name, view in members.items() if name.endswith(_MEMBERS) and view}
    if not tensors:
        raise FileError(f"{path} is an archive without a file of torch; it has {sorted(members)[:8]}")
    tree: dict[str, Any] = {}
    for name, view in tensors.items():
        key = PurePosixPath(name).stem
        tree[key if key not in tree else name] = load_view(view, f"{path}: {name}")
    policy = tree.get("policy")
    if any(key.endswith(_OPTIMIZER) and key != f"policy{_OPTIMIZER}" for key in tree) and isinstance(policy, Mapping):
        # Stable-Baselines3's optimisers are named for the parts of the policy that they train.
        parts: dict[str, dict[str, Any]] = {}
        for name, tensor in policy.items():
            parts.setdefault(name.partition(".")[0], {})[name] = tensor
        tree["policy"] = parts
    if "data" in members and policy is not None:
        # Its settings are JSON, with the optimiser's class in words.
        try:
            settings = json.loads(bytes(members["data"]).decode("utf-8"))
            named = re.search(r"<class '([\w.]+)'>", str(settings["policy_kwargs"]["optimizer_class"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            named = None
        tree |= {"optimizer_class": named[1]} if named else {}
    return tree


def _files_in(folder: Path) -> list[Path]:
    """Files with the endings of checkpoints, the newest first, down to the third level."""
    found = [file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(depth) if file.suffix in _SUFFIXES]
    return sorted((file for file in found if file.is_file()), key=lambda file: -file.stat().st_mtime)


def _read_folder(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    """The one checkpoint in a folder, with the state beside it; several are listed."""
    files = [file for file in _files_in(path) if not is_state_file(file)]
    if len(files) != 1:
        listed = "".join(f"\n  bayesadam inspect {file}" for file in files[:12])
        raise FileError(f"{path} holds {len(files)} files that may be checkpoints; the newest is first:{listed}")
    found = format_of(files[0]).read(files[0], weights_key, optimizer_key)
    beside = state_beside(files[0])
    if found.optimizer is not None or beside is None:
        return found
    state = format_of(beside).read(beside, None, optimizer_key)
    return replace(found, optimizer=state.optimizer, recorded=found.recorded.completed(state.recorded))


ZIP = _archive("zip archive", lambda path, head: head.startswith(b"PK\x03\x04"), zip_members)
TAR = _archive("tar archive", lambda path, head: head.startswith(b"\x1f\x8b") or head[257:262] == b"ustar", tar_members)
FOLDER = Format("folder", lambda path, head: bool(_files_in(path)), _read_folder, folder=True)
