"""Files of `torch.save`, in all formats that it has had, as data: tensors mapped, the rest values or stand-ins.

Since 1.6 torch writes a zip archive, a pickle and a member for every storage; before, five pickles and the storages
with their lengths. `pickle.dump` of tensors has one of the second kind for every storage. Zip archives and folders have
such files in them.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import shutil
import struct
import zipfile
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import DAMAGE, damage_named
from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, Keys, contents_of
from bayesadam.readers.formats.lazy import memory_of
from bayesadam.readers.formats.pickles import (
    BUILDERS,
    BadPickle,
    Builders,
    HostilePickle,
    StandIn,
    Storage,
    Window,
    described,
    unpickle,
)
from bayesadam.readers.formats.registry import Format, format_of, registered_formats, states_beside

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# The first as pickle writes it.
_MAGIC_BYTES = (b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"L1195470371460388013333")
# How a dictionary begins in the protocols that have no mark of their own.
_PICKLED = (b"\x80", b"(d", b"}", b"ccollections\n", b"(i", b"ccopy_reg\n")
# The headers of an archive's member, before it and in the list at the end, without what varies.
_LOCAL_HEADER, _LISTED_HEADER, _SUM_FOLLOWS = 30, 46, b"PK\x07\x08"
# A storage may hold a pickle with a storage; nothing that anybody saves goes deeper.
_DEEPEST = 3
# Times the size of a compressed archive that is unpacked into memory, after the first bytes.
_MOST_UNPACKED, _UNPACKED = 64, 1 << 20
_ZIP = b"PK\x03\x04"
# As deep as anything is looked for in a file.
_LEVELS = 3
# Endings of files with tensors in archives, and of checkpoints in folders.
_MEMBERS = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_SUFFIXES = (*_MEMBERS, ".tar", ".safetensors", ".zip")
# Modules may be shared, and a hostile file can share them so often that no walk ends.
_DEEPEST_MODULE, _MOST_MODULES = 200, 1_000_000


class _Mapped(mmap.mmap):
    def seekable(self) -> bool:
        """What zipfile asks of a file, and mmap does not say before Python 3.13."""
        return True


def mapped(path: Path, access: int = mmap.ACCESS_COPY) -> memoryview:
    """A file as memory; writing to it changes the file with `ACCESS_WRITE` alone."""
    with path.open("rb" if access == mmap.ACCESS_COPY else "rb+") as file:
        # An empty file cannot be mapped.
        size = path.stat().st_size
        return memoryview(_Mapped(file.fileno(), size, access=access) if size else b"")


def as_memory(view: memoryview, itemsize: int) -> torch.UntypedStorage:
    """Bytes as the memory of tensors, copied where they do not start at a multiple of an entry's size."""
    if not view:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    memory = torch.frombuffer(view, dtype=torch.uint8)
    return (memory.clone() if memory.data_ptr() % itemsize else memory).untyped_storage()


def as_file(view: memoryview) -> Any:
    """Bytes as a file: a whole mapped file as it is, a part of one as a copy."""
    whole = isinstance(view.obj, _Mapped) and len(view.obj) == len(view)
    return view.obj if whole else io.BytesIO(view)


def begin_of(view: memoryview, info: zipfile.ZipInfo) -> int:
    """Where the content of an archive's member begins."""
    name, extra = struct.unpack("<HH", Window(view, info.header_offset).read(_LOCAL_HEADER)[26:])
    return info.header_offset + _LOCAL_HEADER + int(name) + int(extra)


def zip_members(view: memoryview) -> dict[str, memoryview]:
    """The members of an archive by name; compressed ones are unpacked, unless that takes absurdly much memory."""
    members: dict[str, memoryview] = {}
    left = _UNPACKED + _MOST_UNPACKED * len(view)
    with zipfile.ZipFile(as_file(view)) as archive:
        for info in archive.infolist():
            if info.compress_type == zipfile.ZIP_STORED:
                members[info.filename] = Window(view, begin_of(view, info)).part(info.file_size)
                continue
            left -= info.file_size
            if left < 0:
                raise BadPickle(f"the archive unpacks to more than {_MOST_UNPACKED} times its size")
            members[info.filename] = memoryview(bytearray(archive.read(info)))
    return members


def load_torch(view: memoryview, depth: int = 0) -> Any:
    """What `torch.save` or `pickle.dump` wrote, whichever version; raises ValueError where it makes no sense."""
    load = _load_zip if bytes(view[:4]) == _ZIP else _load_pickles

    def nested(content: Any = b"", *_: Any) -> Any:
        if not isinstance(content, bytes) or depth == _DEEPEST:
            raise BadPickle("a storage in a storage in a storage")
        return load_torch(memoryview(bytearray(content)), depth + 1)

    return load(view, {**BUILDERS, "torch.storage._load_from_bytes": nested})


def load_view(view: memoryview, name: str) -> Any:
    """What `torch.save` wrote, modules as their state dicts; `name` is the file's in messages."""
    with damage_named(name, "torch.save"):
        try:
            return as_weights(load_torch(view))
        except HostilePickle as error:
            raise FileError(
                f"{name} would call {error} if it were unpickled: it is made to run code. Nothing was run here; do not "
                "load it with torch.load(weights_only=False)"
            ) from None


def load_tree(path: Path) -> Any:
    """What is in a file of `torch.save`; nothing that it names is imported or called."""
    return load_view(mapped(path), str(path))


def _load_zip(view: memoryview, builders: Builders) -> Any:
    storages: dict[str, torch.UntypedStorage] = {}
    members = zip_members(view)
    roots = [name.removesuffix("data.pkl") for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise BadPickle(f"an archive with {len(roots)} members data.pkl")
    root = roots[0]
    if bytes(members.get(f"{root}byteorder", b"little")) != b"little":
        raise BadPickle("its numbers are of a big-endian machine")

    def persistent(reference: Any) -> Storage:
        kind, key = described(reference)
        name = f"{root}data/{key}"
        if name not in storages:
            storages[name] = as_memory(members[name], kind.itemsize)
        return Storage(storages[name], kind)

    return unpickle(Window(members[f"{root}data.pkl"]), builders, persistent)


def _load_pickles(view: memoryview, builders: Builders) -> Any:
    window = Window(view)
    first = unpickle(window, builders)
    if not isinstance(first, int) or first != _MAGIC:
        return first
    version, system = unpickle(window, builders), unpickle(window, builders)
    if version != _PROTOCOL:
        raise BadPickle("a file of another version")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise BadPickle("its numbers are of a big-endian machine")
    kinds: dict[str, torch.dtype] = {}
    storages: dict[str, torch.UntypedStorage] = {}

    def persistent(reference: Any) -> Any:
        if isinstance(reference, tuple) and reference[:1] == ("module",):
            return reference[1]
        kind, key = described(reference)
        kinds[key] = kind
        if key not in storages:
            return None
        storage = Storage(storages[key], kind)
        return storage.part(*reference[5][1:]) if len(reference) > 5 and reference[5] is not None else storage

    # The storages, whose types the pickle has, come after it, each behind its length: the pickle is read once for
    # these, as stand-ins, and again with the storages.
    begin = window.position
    unpickle(window, {}, persistent)
    for key in map(str, unpickle(window, builders)):
        (count,) = struct.unpack("<q", window.read(8))
        size = kinds[key].itemsize
        storages[key] = as_memory(window.part(count * size), size)
    return unpickle(Window(view, begin), builders, persistent)


def as_weights(tree: Any) -> Any:
    """The tree with every module and optimiser in its upper levels exchanged for its state dict."""
    names: dict[tuple[Any, ...], str] = {}

    def weights(module: StandIn) -> Any:
        tensors = OrderedDict(_tensors(module, "", frozenset(), itertools.count()))
        for name, value in tensors.items():
            names.setdefault(memory_of(value), name)
        return tensors or module

    return _exchanged(_exchanged(tree, weights), lambda module: _state_dict(module, names))


def _exchanged(tree: Any, made: Callable[[StandIn], Any], level: int = 0) -> Any:
    if isinstance(tree, StandIn):
        return made(tree)
    if level == _LEVELS or not isinstance(tree, dict):
        return tree
    values = OrderedDict((key, _exchanged(value, made, level + 1)) for key, value in tree.items())
    if all(values[key] is tree[key] for key in tree):
        return tree
    # torch notes the order of the modules at a state dict.
    if hasattr(tree, "_metadata"):
        values._metadata = tree._metadata  # type: ignore[attr-defined]
    return values


def _tensors(root: StandIn, prefix: str, above: frozenset[int], visits: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, then children, in the order of `state_dict`; of TorchScript, attributes in file order."""
    state = root.state
    is_module = isinstance(state, Mapping) and ("_modules" in state or root.name.startswith("__torch__."))
    if not is_module or id(root) in above or len(above) == _DEEPEST_MODULE:
        return
    if next(visits) == _MOST_MODULES:
        raise BadPickle(f"more than {_MOST_MODULES:,} modules in one")
    tensors = children = state
    if "_modules" in state:
        skipped = state.get("_non_persistent_buffers_set")
        if isinstance(skipped, StandIn):
            # A set, which old protocols make from a list.
            skipped = skipped.arguments[0] if skipped.arguments else ()
        buffers = {key: value for key, value in (state.get("_buffers") or {}).items() if key not in (skipped or ())}
        tensors, children = {**(state.get("_parameters") or {}), **buffers}, state["_modules"]
    yield from ((f"{prefix}{key}", value) for key, value in tensors.items() if isinstance(value, Tensor))
    for key, value in children.items():
        if isinstance(value, StandIn):
            yield from _tensors(value, f"{prefix}{key}.", above | {id(root)}, visits)


def _state_dict(optimizer: StandIn, names: Mapping[tuple[Any, ...], str]) -> Any:
    """An optimiser's state dict; anything else as it is. Its parameters are tensors, known by their memory."""
    state = optimizer.state
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return optimizer
    groups, states = state["param_groups"], state["state"]
    try:
        listed = [memory_of(parameter) for group in groups for parameter in group["params"]]
        named = all(memory in names for memory in listed)
        keys = {memory: names[memory] if named else number for number, memory in enumerate(listed)}
        numbered = {keys[memory_of(parameter)]: value for parameter, value in states.items()}
        made = [{**group, "params": [keys[memory_of(p)] for p in group["params"]]} for group in groups]
    except (TypeError, KeyError, AttributeError):
        return optimizer
    return {"state": numbered, "param_groups": made} if len(keys) == len(listed) else optimizer


def rewrite(source: Path, keys: Collection[Keys], weights: Callable[[Keys], Tensor], target: Path) -> None:
    """Copy a zip archive, then write the weights into the copy: every other byte stays, but for checksums."""
    shutil.copyfile(source, target)
    # What is written to this view is written to the file.
    view = mapped(target, mmap.ACCESS_WRITE)
    tree, start = load_view(view, str(source)), torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    changed = []
    for path in keys:
        weight = tree
        for part in path:
            weight = next(weight[key] for key in weight if str(key) == part)
        if weight.numel() and not start <= weight.data_ptr() < start + len(view):
            raise FileError(
                f"{source}: {path[-1]!r} is compressed, unaligned or inside a pickle, and cannot be changed in place: "
                "choose a path that ends in .safetensors"
            )
        weight.copy_(weights(path))
        changed.append(weight.data_ptr() - start)
    # Checksums of the members that were changed.
    changed.sort()
    with zipfile.ZipFile(as_file(view)) as archive:
        listed = archive.start_dir
        for info in archive.infolist():
            begin = begin_of(view, info)
            end = begin + info.file_size
            if bisect_left(changed, begin) < bisect_left(changed, end):
                # torch writes it after the content, behind a mark.
                place = end + 4 if view[end : end + 4] == _SUM_FOLLOWS else info.header_offset + 14
                checksum = struct.pack("<I", zlib.crc32(view[begin:end]))
                view[place : place + 4] = view[listed + 16 : listed + 20] = checksum
            listed += _LISTED_HEADER + sum(struct.unpack("<HHH", view[listed + 28 : listed + 34]))


def _read(path: Path) -> Contents:
    return replace(contents_of(load_tree(path), path), beside=states_beside(path))


def _is_torch(path: Path, head: bytes) -> bool:
    """A zip archive with a member data.pkl."""
    if not head.startswith(_ZIP):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(PurePosixPath(name).name == "data.pkl" for name in archive.namelist())
    except DAMAGE:
        return False


def _read_zip(path: Path) -> Contents:
    """The files with tensors in an archive as one dictionary, by their names without the ending."""
    with damage_named(path, "zip"):
        members = zip_members(mapped(path))
    names = [name for name, view in members.items() if name.endswith(_MEMBERS) and view]
    if not names:
        raise FileError(f"{path} is an archive without a file of torch; it has {sorted(members)[:8]}")
    tree = {PurePosixPath(name).stem: load_view(members[name], f"{path}: {name}") for name in names}
    return contents_of(tree, path)


def _checkpoints_in(folder: Path, levels: int = _LEVELS) -> Iterator[Path]:
    """Files with the endings of checkpoints, and folders of known formats, down to the third level."""
    known = [kind for kind in registered_formats() if kind.folder and kind is not FOLDER]
    for path in folder.iterdir():
        is_open = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
        if (path.is_file() and path.suffix in _SUFFIXES) or (is_open and any(k.recognises(path, b"") for k in known)):
            yield path
        elif is_open and levels > 1:
            yield from _checkpoints_in(path, levels - 1)


def _read_folder(path: Path) -> Contents:
    """The one checkpoint in a folder, with the state beside it; several are listed."""
    found = sorted(_checkpoints_in(path), key=lambda one: -one.stat().st_mtime)
    states = {state for one in found for state in states_beside(one)}
    found = [one for one in found if one not in states]
    if len(found) != 1:
        listed = "".join(f"\n  bayesadam inspect {one}" for one in found[:12])
        raise FileError(f"{path} holds {len(found)} checkpoints, or files that may be some; newest first:{listed}")
    return format_of(found[0]).read(found[0])


TORCH = Format("torch", _is_torch, _read, rewrite)
OLD_TORCH = Format("torch before 1.6", lambda path, head: any(one in head[:32] for one in _MAGIC_BYTES), _read)
PICKLE = Format("pickle", lambda path, head: head.startswith(_PICKLED), _read)
ZIP = Format("zip archive", lambda path, head: head.startswith(_ZIP), _read_zip)
FOLDER = Format("folder", lambda path, head: any(_checkpoints_in(path)), _read_folder, folder=True)
