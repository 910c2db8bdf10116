"""Single files: those of `torch.save`, a dictionary with weights and state somewhere in it, and of safetensors."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._storage import map_tensors, write_tensors
from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, contents_of
from bayesadam.readers.formats.modules import as_weights
from bayesadam.readers.formats.networks import Keys
from bayesadam.readers.formats.pickles import HostilePickle
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.formats.torch_files import Loaded, Part, is_tar, load_torch, rewrite

# What reading a damaged file may raise.
DAMAGED = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
)
# The number that a file of torch before 1.6 begins with, as pickle writes it.
_MAGIC = (b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"L1195470371460388013333")
# How a dictionary begins in the protocols that have no mark of their own.
_PICKLED = (b"\x80", b"(d", b"}", b"ccollections\n", b"(i", b"ccopy_reg\n")


def load_part(part: Part, name: str) -> Any:
    """What `torch.save` wrote; nothing it names is imported or called. `name` is the file's in messages."""
    try:
        return as_weights(load_torch(part).tree)
    except HostilePickle as error:
        raise FileError(
            f"{name} would call {error} if it were unpickled: it is made to run code. Nothing was run here; do not load "
            "it with torch.load(weights_only=False)"
        ) from None
    except DAMAGED as error:
        raise damaged(name, "torch.save", error) from error


def load_tree(path: Path) -> Any:
    """What is in a file of `torch.save`, mapped rather than read where its format allows that."""
    with Part.of(path) as part:
        return load_part(part, str(path))


def damaged(name: object, writer: str, error: BaseException) -> FileError:
    """The error to raise for a file that cannot be read."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return FileError(f"{name} is truncated, damaged or not a file of {writer} ({reason})")


def _read_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    return contents_of(load_tree(path), path, weights_key=weights_key, optimizer_key=optimizer_key)


def _rewrite_torch(source: Path, places: Collection[Keys], weights: Callable[[Keys], Tensor], target: Path) -> None:
    """The same file with some weights exchanged; all else is passed on, to the byte."""

    def changed(loaded: Loaded) -> dict[int, bytes]:
        tree = as_weights(loaded.tree)
        storages: dict[int, Tensor] = {}
        for keys in places:
            old = tree
            for part in keys:
                old = next(old[key] for key in old if str(key) == part)
            memory = old.untyped_storage()
            if not old.numel():
                continue
            if memory.data_ptr() not in loaded.parts:
                raise FileError(
                    f"{source}: {keys[-1]!r} lies inside a pickle, which is not written again; choose a path that ends in "
                    ".safetensors"
                )
            held = storages.setdefault(memory.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(memory).clone())
            view = torch.empty(0, dtype=old.dtype)
            view.set_(held.untyped_storage(), old.storage_offset(), old.shape, old.stride()).copy_(weights(keys))
        return {address: held.numpy().tobytes() for address, held in storages.items()}

    rewrite(source, changed, target)


def is_old_archive(path: Path, head: bytes) -> bool:
    """Whether it is a tar archive with the four members that torch wrote before 0.1.10."""
    if path.is_dir() or not head.rstrip(b"\0").endswith((b"sys_info", b"pickle", b"storages", b"tensors")):
        return False
    with Part.of(path) as part:
        return is_tar(part)


def is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000


def _read_safetensors(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "a safetensors file has no levels", weights_key=weights_key, optimizer_key=optimizer_key)
    weights, _ = map_tensors(path)
    # The file is sorted: the order of the model's modules is lost.
    return Contents(weights or None, None, f"{len(weights)} tensors in a safetensors file")


def _rewrite_safetensors(
    source: Path, places: Collection[Keys], weights: Callable[[Keys], Tensor], target: Path
) -> None:
    old, metadata = map_tensors(source)
    write_tensors(target, old, lambda name: weights((name,)) if (name,) in places else old[name], metadata)


TORCH = Format("torch", lambda path, head: head.startswith(b"PK\x03\x04"), _read_torch, _rewrite_torch)
OLD_TORCH = Format(
    "torch before 1.6",
    lambda path, head: any(magic in head for magic in _MAGIC) or is_old_archive(path, head),
    _read_torch,
    _rewrite_torch,
)
PICKLE = Format("pickle", lambda path, head: head.startswith(_PICKLED), _read_torch)
SAFETENSORS = Format("safetensors", is_safetensors, _read_safetensors, _rewrite_safetensors)
