"""One record per kind of file: how to tell it by its content, how to read it, how to write it again."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesadam.checkpoint.contents import Contents, contents_of
from bayesadam.errors import FileError, SettingError

_HEAD = 16
_RESAVE = "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)"


@dataclass(frozen=True)
class Format:
    """A kind of file or folder.

    Attributes:
        name: what it is called in `Checkpoint.format`.
        recognises: (path, the first bytes; none for a folder) → whether it is of this kind.
        read: (path, weights_key, optimizer_key) → what it holds; raises FileError where it is damaged.
        rewrite: (source, the keys that lead to its weights, weights by the file's names, target) writes it again with
            those weights; None where that cannot be done.
    """

    name: str
    recognises: Callable[[Path, bytes], bool]
    read: Callable[[Path, str | None, str | None], Contents]
    rewrite: Callable[[Path, tuple[str, ...], Mapping[str, Tensor], Path], None] | None = None


def load_tree(path: Path) -> Any:
    """What `torch.save` wrote, mapped rather than read; nothing but tensors and plain data is unpickled."""
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the class {wanted[1]}" if wanted else "more than tensors and plain data"
        raise FileError(
            f"{path} needs {what} to be unpickled, which could run any code and is not done here. Save it again from "
            f"where it was made, {_RESAVE}; or, if you trust the file, allow the class yourself with "
            "torch.serialization.add_safe_globals before reading"
        ) from None
    except SafetensorError:
        # Recent torch goes by the name.
        raise FileError(f"{path} is a file of torch.save with the name of another kind: rename it to .pt") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise FileError(f"{path} is truncated, damaged or no file of torch.save ({reason})") from error


def _read_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    return contents_of(load_tree(path), path, weights_key=weights_key, optimizer_key=optimizer_key)


def _rewrite_torch(source: Path, weights_at: tuple[str, ...], weights: Mapping[str, Tensor], target: Path) -> None:
    """The same tree with the weights at `weights_at` exchanged; all else is passed on as it is."""
    tree = copy.copy(load_tree(source))
    level = tree
    for part in weights_at:
        key = next(key for key in level if str(key) == part)
        level[key] = copy.copy(level[key])
        level = level[key]
    for name, tensor in weights.items():
        old = level[name]
        level[name] = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    torch.save(tree, target)


def _read_old_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    raise FileError(
        f"{path} is a plain pickle or a file of torch before 1.6, which cannot be mapped and is not read. If it is "
        f"yours, load it and save it again, {_RESAVE}"
    )


def _is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000


def _read_safetensors(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    for option, wanted in (("weights_key", weights_key), ("optimizer_key", optimizer_key)):
        if wanted is not None:
            raise SettingError(f"{option}={wanted!r} makes no sense for {path}: a safetensors file has no levels")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path} is truncated or damaged ({error})") from error
    # The file is sorted: the order of the model's modules is lost.
    return Contents(weights or None, None, f"{len(weights)} tensors in a safetensors file")


def _rewrite_safetensors(
    source: Path, weights_at: tuple[str, ...], weights: Mapping[str, Tensor], target: Path
) -> None:
    with safe_open(source, framework="pt", device="cpu") as file:
        metadata = file.metadata()
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_safetensors({**kept, **weights}, target, metadata)


def save_safetensors(tensors: Mapping[str, Tensor], target: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Named tensors, each with memory of its own: the format has no tied ones."""
    owned: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        owned[name] = plain.clone() if pointer in taken else plain
        taken.add(pointer)
    save_file(owned, target, metadata=dict(metadata or {"format": "pt"}))


_registry: dict[str, Format] = {
    known.name: known
    for known in (
        Format("torch", lambda path, head: head.startswith(b"PK\x03\x04"), _read_torch, _rewrite_torch),
        Format("torch before 1.6", lambda path, head: head[:1] == b"\x80", _read_old_torch),
        Format("safetensors", _is_safetensors, _read_safetensors, _rewrite_safetensors),
    )
}


def registered_formats() -> tuple[Format, ...]:
    """Every known format, the last registered first: that is the order in which they are tried."""
    return tuple(reversed(_registry.values()))


def register_format(added: Format, *, replace: bool = False) -> Format:
    """Add a format; a later one is asked before an earlier one."""
    if added.name in _registry and not replace:
        raise SettingError(
            f"a format named {added.name!r} exists already: choose another name, or pass replace=True to override it"
        )
    _registry[added.name] = added
    return added


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format of a file or folder, by its content."""
    path = Path(path)
    if not path.exists():
        raise FileError(f"no file at {path}")
    try:
        head = b"" if path.is_dir() else _head(path)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    if not path.is_dir() and not head:
        raise FileError(f"{path} is empty")
    found = next((known for known in registered_formats() if known.recognises(path, head)), None)
    if found is not None:
        return found
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir())
        raise FileError(
            f"{path} is a folder of no known format; it has {inside[:8]}. Pass the file with the weights, and the one "
            "with the optimiser's state as optimizer_path="
        )
    known_names = ", ".join(known.name for known in registered_formats())
    raise FileError(f"{path} is of no known format ({known_names}); it starts with {head!r}")
