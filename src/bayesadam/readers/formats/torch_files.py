"""Files of `torch.save`, of all its formats, as data: tensors mapped or read, everything else a value or a stand-in.

Since 1.6 torch writes a zip archive: a pickle, and a member for every storage, not compressed, so that it can be mapped.
Before, it wrote five pickles one after the other, then the storages with their lengths; before 0.1.10 a tar archive.
`pickle.dump` of tensors puts a file of the second kind into the pickle for every storage.
"""

from __future__ import annotations

import io
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bayesadam.readers.formats.pickles import BadPickle, Window, load, said
from bayesadam.readers.formats.torch_pickles import BUILDERS, CONSTANTS, Storage, storage_type, tensor

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_LOCAL_HEADER = 30
_ALIGNED = 64
_CHUNK = 1 << 20
# A storage may hold a pickle with a storage; nothing that anybody saves goes deeper.
_DEEPEST = 3
# Times the size of a compressed archive that is unpacked into memory.
MOST_UNPACKED = 64
# What reading an archive may raise, whichever kind it is.
_UNREADABLE = (EOFError, OSError, OverflowError, struct.error, zlib.error)
_OLD_NAMES = ("sys_info", "pickle", "storages", "tensors")


class Mapped:
    """A file as memory, mapped when it is first asked for."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._whole: Any = None

    def memory(self, start: int, stop: int) -> torch.UntypedStorage:
        """Some of its bytes."""
        if self._whole is None:
            self._whole = torch.UntypedStorage.from_file(str(self._path), False, self._size)
        found: torch.UntypedStorage = self._whole[start:stop]
        return found


@dataclass(frozen=True)
class Part:
    """Some bytes of a file; `mapped` is None where they are in memory already."""

    file: BinaryIO
    start: int
    length: int
    mapped: Mapped | None

    @classmethod
    @contextmanager
    def of(cls, path: Path) -> Iterator[Part]:
        """A whole file."""
        with path.open("rb") as file:
            size = path.stat().st_size
            yield cls(file, 0, size, Mapped(path, size))

    @classmethod
    def of_bytes(cls, content: bytes) -> Part:
        """What is in memory already."""
        return cls(io.BytesIO(content), 0, len(content), None)

    def inside(self, start: int, length: int) -> Part:
        """A part of this part."""
        if start < 0 or length < 0 or start + length > self.length:
            raise BadPickle(f"bytes {start} to {start + length} of {self.length}")
        return Part(self.file, self.start + start, length, self.mapped)

    def window(self) -> Window:
        """For a pickle at its beginning."""
        self.file.seek(self.start)
        return Window(self.file, self.start + self.length)

    def read(self) -> bytes:
        """All of it."""
        self.file.seek(self.start)
        return self.file.read(self.length)

    def as_file(self) -> BinaryIO:
        """A file of these bytes alone."""
        return io.BufferedReader(_Slice(self.file, self.start, self.length))

    def memory(self, itemsize: int) -> torch.UntypedStorage:
        """The bytes as memory of tensors: mapped where they are at a multiple of an entry's size, else read."""
        if not self.length:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        if self.mapped is not None and self.start % itemsize == 0:
            return self.mapped.memory(self.start, self.start + self.length)
        made = torch.empty(self.length, dtype=torch.uint8)
        self.file.seek(self.start)
        if self.file.readinto(made.numpy()) != self.length:  # type: ignore[attr-defined]
            raise BadPickle("fewer bytes than it should have")
        return made.untyped_storage()


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, (0, self._place, self._length)[whence] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._place += count
        return count


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a file holds, and where in the file each storage is.

    Attributes:
        tree: the dictionary, or what else was saved.
        parts: the bytes of each storage, by the address of its memory.
        members: of an archive, the member behind each of these addresses.
    """

    tree: Any
    parts: Mapping[int, Part]
    members: Mapping[int, str]


def load_torch(part: Part, deep: int = 0) -> Loaded:
    """What `torch.save` or `pickle.dump` wrote, whichever version; raises ValueError where it makes no sense."""
    head = part.inside(0, min(part.length, 4)).read()
    if head == b"PK\x03\x04":
        return _load_zip(part, deep)
    if head[:1] != b"\x80" and is_tar(part):
        return _load_tar(part)
    return _load_pickles(part, deep)


def is_tar(part: Part) -> bool:
    """Whether it is a tar archive as torch wrote before 0.1.10."""
    try:
        named = part.length > 512 and part.inside(257, 5).read() == b"ustar"
        return named and set(_OLD_NAMES) <= set(tar_members(part))
    except BadPickle:
        return False


# --- zip, since 1.6 -------------------------------------------------------------------------------------------------


def zip_members(part: Part) -> dict[str, Part]:
    """The members of an archive that are not compressed, where they lie; compressed ones are read, if it is not a bomb."""
    found: dict[str, Part] = {}
    most = 2**20 + MOST_UNPACKED * part.length
    try:
        with zipfile.ZipFile(part.as_file()) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                if info.compress_type == zipfile.ZIP_STORED:
                    header = part.inside(info.header_offset, _LOCAL_HEADER).read()
                    skipped = sum(struct.unpack("<HH", header[26:]))
                    start = info.header_offset + _LOCAL_HEADER + skipped
                    found[info.filename] = part.inside(start, info.file_size)
                else:
                    most -= info.file_size
                    if most < 0:
                        raise BadPickle(f"the archive unpacks to more than {MOST_UNPACKED} times its size")
                    found[info.filename] = Part.of_bytes(archive.read(info))
    except (*_UNREADABLE, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise BadPickle(f"no whole zip archive: {error}") from None
    return found


def _load_zip(part: Part, deep: int) -> Loaded:
    members = zip_members(part)
    roots = [name.removesuffix("data.pkl") for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise BadPickle(f"an archive with {len(roots)} members data.pkl")
    root = roots[0]
    order = members.get(f"{root}byteorder")
    if order is not None and order.read() != b"little":
        raise BadPickle("its numbers are of a big-endian machine")
    storages: dict[str, Storage] = {}
    parts: dict[int, Part] = {}
    behind: dict[int, str] = {}

    def persistent(found: Any) -> Any:
        kind, key = _described(found)
        if key not in storages:
            name = f"{root}data/{key}"
            if name not in members:
                raise BadPickle(f"it has no {name}")
            memory = members[name].memory(kind.itemsize)
            storages[key] = Storage(memory, kind)
            parts[memory.data_ptr()], behind[memory.data_ptr()] = members[name], name
        return Storage(storages[key].memory, kind)

    # In memory: storages are read from the same file meanwhile.
    pickled = Part.of_bytes(members[f"{root}data.pkl"].read())
    return Loaded(_pickled(pickled.window(), persistent, deep), parts, behind)


def _described(found: Any) -> tuple[torch.dtype, str]:
    """The type and the key that a file refers to a storage by."""
    if not isinstance(found, tuple) or len(found) < 5 or found[0] not in ("storage", b"storage"):
        raise BadPickle("a reference to something else than a storage")
    _, kind, key = found[:3]
    if not isinstance(key, str | int):
        raise BadPickle("a storage without a key")
    return storage_type(kind), str(key)


def _pickled(window: Window, persistent: Callable[[Any], Any] | None, deep: int) -> Any:
    def nested(content: Any = b"", *_: Any) -> Any:
        if not isinstance(content, bytes) or deep == _DEEPEST:
            raise BadPickle("a storage in a storage in a storage")
        return load_torch(Part.of_bytes(content), deep + 1).tree

    return load(window, {**BUILDERS, "torch.storage._load_from_bytes": nested}, persistent, CONSTANTS)


# --- one pickle after the other, before 1.6 -------------------------------------------------------------------------


def _load_pickles(part: Part, deep: int) -> Loaded:
    window = part.window()
    first = _pickled(window, None, deep)
    if first != _MAGIC:
        return Loaded(first, {}, {})
    version, system = _pickled(window, None, deep), _pickled(window, None, deep)
    if version != _PROTOCOL:
        raise BadPickle(f"a file of version {said(version)}")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise BadPickle("its numbers are of a big-endian machine")
    begin = window.tell()
    kinds: dict[str, torch.dtype] = {}
    # Nothing is built in a first pass: the storages, whose types it has, come behind it.
    load(window, {}, lambda found: _noted(found, kinds))
    keys = _pickled(window, None, deep)
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise BadPickle("no list of storages")
    storages: dict[str, Storage] = {}
    parts: dict[int, Part] = {}
    place = window.tell() - part.start
    for key in map(str, keys):
        kind = kinds.get(key)
        if kind is None:
            raise BadPickle(f"storage {key!r}, to which nothing refers")
        (count,) = struct.unpack("<q", part.inside(place, 8).read())
        held = part.inside(place + 8, count * kind.itemsize)
        storages[key] = Storage(held.memory(kind.itemsize), kind)
        parts[storages[key].memory.data_ptr()] = held
        place += 8 + held.length

    def persistent(found: Any) -> Any:
        if isinstance(found, tuple) and found[:1] == ("module",):
            return found[1]
        kind, key = _described(found)
        if key not in storages:
            raise BadPickle(f"it has no storage {key!r}")
        view = found[5] if len(found) > 5 else None
        memory = storages[key].memory
        if view is not None:
            _, offset, size = view
            memory = memory[offset * kind.itemsize : (offset + size) * kind.itemsize]
        return Storage(memory, kind)

    part.file.seek(begin)
    return Loaded(_pickled(Window(part.file, part.start + part.length), persistent, deep), parts, {})


def _noted(found: Any, kinds: dict[str, torch.dtype]) -> Any:
    """The type of a storage, by its key."""
    if isinstance(found, tuple) and found[:1] == ("module",):
        return found[1]
    kind, key = _described(found)
    kinds[key] = kind
    return None


# --- tar, before 0.1.10 ---------------------------------------------------------------------------------------------


def tar_members(part: Part) -> dict[str, Part]:
    """The files of a tar archive that is not compressed, where they lie."""
    try:
        with tarfile.open(fileobj=part.as_file(), mode="r:") as archive:
            files = [member for member in archive if member.isfile() and not member.issparse()]
            return {file.name.removeprefix("./"): part.inside(file.offset_data, file.size) for file in files}
    except (*_UNREADABLE, tarfile.TarError, ValueError) as error:
        raise BadPickle(f"no whole tar archive: {error}") from None


def _load_tar(part: Part) -> Loaded:
    members = tar_members(part)
    held, storages = members["storages"], {}
    window = held.window()
    parts: dict[int, Part] = {}
    for _ in range(_count(_pickled(window, None, 0))):
        key, _, kind = _pickled(window, None, 0)
        dtype = storage_type(kind)
        place = window.tell() - held.start
        (count,) = struct.unpack("<q", held.inside(place, 8).read())
        found = held.inside(place + 8, count * dtype.itemsize)
        storages[key] = Storage(found.memory(dtype.itemsize), dtype)
        parts[storages[key].memory.data_ptr()] = found
        held.file.seek(found.start + found.length)
    for target, root, offset, size in _pickled(window, None, 0):
        kind = storages[root].dtype
        memory = storages[root].memory[offset * kind.itemsize : (offset + size) * kind.itemsize]
        storages[target] = Storage(memory, kind)
    tensors: dict[Any, Any] = {}
    listed = members["tensors"]
    window = listed.window()
    for _ in range(_count(_pickled(window, None, 0))):
        key, storage, _ = _pickled(window, None, 0)
        dims, _ = struct.unpack("<ii", window.read(8))
        if not 0 <= dims <= 64:
            raise BadPickle(f"a tensor of {dims} dimensions")
        *sizes, offset = struct.unpack(f"<{2 * dims + 1}q", window.read(8 * (2 * dims + 1)))
        tensors[key] = tensor(storages[storage], offset, sizes[:dims], sizes[dims:])
    known = {**storages, **tensors}
    return Loaded(_pickled(members["pickle"].window(), lambda found: known[int(found)], 0), parts, {})


def _count(found: Any) -> int:
    if not isinstance(found, int):
        raise BadPickle("no number of storages or tensors")
    return found


# --- written again --------------------------------------------------------------------------------------------------


def rewrite(source: Path, changed: Callable[[Loaded], Mapping[int, bytes]], target: Path) -> None:
    """The same file with other bytes in some of its storages, by the address of their memory; all else stays, to the byte."""
    with Part.of(source) as part:
        loaded = load_torch(part)
        new = changed(loaded)
        if loaded.members:
            _rewrite_zip(part, {loaded.members[address]: content for address, content in new.items()}, target)
            return
        with target.open("wb") as file:
            part.file.seek(0)
            shutil.copyfileobj(part.file, file, _CHUNK)
            for address, content in new.items():
                file.seek(loaded.parts[address].start)
                file.write(content)


def _rewrite_zip(part: Part, changed: Mapping[str, bytes], target: Path) -> None:
    with zipfile.ZipFile(part.as_file()) as old, target.open("wb") as file, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            content = changed.get(info.filename)
            large = info.file_size >= zipfile.ZIP64_LIMIT
            made = zipfile.ZipInfo(info.filename, info.date_time)
            # torch begins every member at a multiple of 64 bytes, so that it can be mapped.
            begin = file.tell() + _LOCAL_HEADER + len(info.filename.encode()) + 4 + 20 * large
            padding = -begin % _ALIGNED
            made.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            made.file_size = info.file_size
            with new.open(made, "w", force_zip64=large) as out:
                if content is not None:
                    out.write(content)
                else:
                    with old.open(info) as member:
                        shutil.copyfileobj(member, out, _CHUNK)
