"""Single files: those of `torch.save`, a dictionary with weights and state somewhere in it, and of safetensors."""

import copy
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bayesadam._storage import map_tensors, write_tensors
from bayesadam.checkpoint.contents import Contents, contents_of
from bayesadam.checkpoint.names import memory_of
from bayesadam.checkpoint.registry import Format, refuse_keys
from bayesadam.checkpoint.safe_globals import plain_data_allowed
from bayesadam.errors import FileError

# What reading a damaged pickle may raise.
DAMAGED = (
    *(pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError),
    *(AttributeError, ImportError, OverflowError, MemoryError),
)
_RESAVE = "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)"


def load_plain(file: Path | BinaryIO, name: str, **options: Any) -> Any:
    """What `torch.save` wrote; nothing but tensors and plain data is unpickled. `name` is the file's in messages."""
    try:
        with plain_data_allowed():
            return torch.load(file, weights_only=True, map_location="cpu", **options)
    except SafetensorError:
        # Recent torch goes by the name.
        raise FileError(f"{name} is a file of torch.save with the name of another kind: rename it to .pt") from None
    except DAMAGED as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted is None and not isinstance(error, pickle.UnpicklingError):
            raise damaged(name, "torch.save", error) from error
        what = f"needs the class {wanted[1]}" if wanted else "is truncated, damaged, or needs more than plain data"
        raise FileError(
            f"{name} {what} to be unpickled, which could run any code and is not done here. Save it again from "
            f"where it was made, {_RESAVE}; or, if you trust the file, do so in Python with what "
            "torch.load(path, weights_only=False) returns, or allow the class there with "
            "torch.serialization.add_safe_globals before bayesadam reads it"
        ) from None


def load_tree(path: Path) -> Any:
    """What is in a file of `torch.save`, mapped rather than read."""
    return load_plain(path, str(path), mmap=True)


def damaged(name: object, writer: str, error: BaseException) -> FileError:
    """The error to raise for a file that cannot be read."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return FileError(f"{name} is truncated, damaged or not a file of {writer} ({reason})")


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
    # One tensor for all the names of a tied one, so that it is tied in the new file.
    made: dict[tuple[Any, ...], Tensor] = {}
    for name in weights:
        old = level[name]
        memory = memory_of(old)
        tensor = made[memory] = made[memory] if memory in made else weights[name]
        level[name] = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    torch.save(tree, target)


def _read_old_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    raise FileError(
        f"{path} is a plain pickle or a file of torch before 1.6, which cannot be mapped and is not read. If it is "
        f"yours, load it and save it again, {_RESAVE}"
    )


def is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000


def _read_safetensors(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "a safetensors file has no levels", weights_key=weights_key, optimizer_key=optimizer_key)
    weights, _ = map_tensors(path)
    # The file is sorted: the order of the model's modules is lost.
    return Contents(weights or None, None, f"{len(weights)} tensors in a safetensors file")


def _rewrite_safetensors(
    source: Path, weights_at: tuple[str, ...], weights: Mapping[str, Tensor], target: Path
) -> None:
    old, metadata = map_tensors(source)
    write_tensors(target, old, lambda name: weights[name] if name in weights else old[name], metadata)


TORCH = Format("torch", lambda path, head: head.startswith(b"PK\x03\x04"), _read_torch, _rewrite_torch)
OLD_TORCH = Format("torch before 1.6", lambda path, head: head[:1] == b"\x80", _read_old_torch)
SAFETENSORS = Format("safetensors", is_safetensors, _read_safetensors, _rewrite_safetensors)
