"""Safetensors files: named tensors, and for files of our own a versioned JSON header in the metadata. No pickle."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesadam._files import DAMAGE, replacing
from bayesadam._schema import AgentHeader, PosteriorHeader, typed
from bayesadam.errors import FileError, MatchError, MissingFileError

FORMAT_VERSION = 1
# Of posteriors that releases which know no other format must refuse: without weights, or compressed.
COMPACT_VERSION = 2
AnyPath = str | os.PathLike[str]
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Kind:
    """A kind of file: its header's key and type, its name in messages, what to do about another, the newest format."""

    header: str
    what: str
    remedy: str = ""
    newest: int = FORMAT_VERSION
    schema: type = dict


POSTERIOR = Kind(
    "bayesadam",
    "a saved posterior",
    ": a run's own checkpoint is read by Posterior.from_checkpoint, a network of `quantise` or `calibrate` by ba.load",
    COMPACT_VERSION,
    PosteriorHeader,
)
AGENT = Kind("bayesadam.bandits", "a saved agent", ": give the file that Agent.save wrote", schema=AgentHeader)
# Of the metadata, beside the header: its sum. Those of the tensors are in the header, under the other.
_SUM, _SUMS = "crc32", "sums"


class Lazy(Mapping[str, Any]):
    """Tensors by name, read from the disk on every access and never cached: hold on to what is needed twice.

    `outline` is the same dictionary, nested or not, with tensors on the meta device; what is known already, numbers,
    texts and counters, is there as it is. `read` gives the tensor, or the dictionary, behind a key of it.
    """

    def __init__(self, outline: Mapping[str, Any], read: Callable[[str], Any]) -> None:
        self.outline = outline
        self._read = read

    def __getitem__(self, key: str) -> Any:
        entry = self.outline[key]
        on_disk = isinstance(entry, Mapping) or (isinstance(entry, Tensor) and entry.is_meta)
        return self._read(key) if on_disk else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)

    def __contains__(self, key: object) -> bool:
        return key in self.outline


def outline_of(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary of which what is on the disk appears as shape and type."""
    outline: Mapping[str, Any] = getattr(tensors, "outline", tensors)
    return outline


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without values, for an outline."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _sum(values: Tensor) -> str:
    """CRC-32 of type, shape and values."""
    begun = zlib.crc32(f"{values.dtype}{list(values.shape)}".encode())
    return f"{zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, begun):08x}"


def write(
    path: AnyPath,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    kind: Kind = POSTERIOR,
    *,
    load: Callable[[str], Tensor] | None = None,
) -> None:
    """Write tensors by name, with the header as JSON in the metadata; complete or not at all.

    With `load`, which gives the values by name, `tensors` have the shapes and types alone.
    """

    with replacing(path) as temporary:
        write_tensors(temporary, tensors, load or tensors.__getitem__, partial(_texts, header, kind))


def size_of(tensors: Mapping[str, Tensor], header: Mapping[str, Any], kind: Kind) -> int:
    """The bytes of the file that `write` would make."""
    texts = _texts(header, kind, dict.fromkeys(tensors, "0" * 8))
    return len(_head(_placed(tensors), texts)) + sum(tensor.nbytes for tensor in tensors.values())


def _texts(header: Mapping[str, Any], kind: Kind, sums: Mapping[str, str]) -> dict[str, str]:
    text = json.dumps({"format": FORMAT_VERSION, **header, _SUMS: dict(sums)}, allow_nan=False)
    return {kind.header: text, _SUM: f"{zlib.crc32(text.encode()):08x}"}


def read(path: AnyPath, kind: Kind = POSTERIOR) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write` made."""
    tensors, header = read_mapped(path, kind)
    return {name: tensor.clone() for name, tensor in tensors.items()}, header


def read_mapped(path: AnyPath, kind: Kind = POSTERIOR) -> tuple[Lazy, dict[str, Any]]:
    """`read` with the tensors on disk; the first access of each compares its sum with the header's.

    Files of earlier releases have no sums. What their headers hold is compared with the kind's type alone.
    """
    if not Path(path).is_file():
        raise MissingFileError(f"no file at {path}")
    tensors, metadata = map_tensors(Path(path), f"not {kind.what}", kind.remedy)
    text = metadata.get(kind.header, "null")
    header = header_of(path, text, kind)
    sums, is_same = header.pop(_SUMS, {}), metadata.get(_SUM) == f"{zlib.crc32(text.encode()):08x}"
    if (sums != {} or _SUM in metadata) and not (is_same and isinstance(sums, dict) and sums.keys() == tensors.keys()):
        raise FileError(f"{path} is damaged: its header is not what was written")

    def checked(name: str) -> Tensor:
        tensor = tensors[name]
        if name in sums and _sum(tensor) != sums[name]:
            raise FileError(f"{path} is damaged: {name!r} is not what was written")
        sums.pop(name, None)
        return tensor

    return Lazy({name: meta(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, checked), header


def header_of(path: AnyPath, text: str, kind: Kind = POSTERIOR) -> dict[str, Any]:
    """The JSON of a header, of the kind and of a format that is read, and of the kind's type."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is truncated or not {kind.what} ({error}){kind.remedy}") from error
    header = header if isinstance(header, dict) else {}
    check_version(path, header.get("format"), kind)
    try:
        checked: dict[str, Any] = typed(header, kind.schema)
    except (ValueError, TypeError) as error:
        raise FileError(f"{path} is damaged: {error}") from None
    return checked


def is_of_kind(path: Path, kind: Kind = POSTERIOR) -> bool:
    """Whether a safetensors file has the kind's header, by its metadata alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return kind.header in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def check_version(path: AnyPath, version: object, kind: Kind = POSTERIOR) -> None:
    """Refuse what is not a file of the kind, or is one of a later format."""
    if version is None:
        raise FileError(f"{path} is not {kind.what}: it has no {kind.header!r} header{kind.remedy}")
    if not isinstance(version, int) or version > kind.newest:
        raise FileError(f"{path} has format {version}, this version of bayesadam reads up to {kind.newest}: upgrade it")


def check_owner(path: AnyPath, shapes: Mapping[str, torch.Size], parameters: Mapping[str, Tensor]) -> None:
    """Refuse the posterior of another model: every name must be a parameter of its shape."""
    if missing := [name for name in shapes if name not in parameters]:
        raise MatchError(f"{path} is another model's posterior: the model has no parameters {missing[:4]}")
    for name, shape in shapes.items():
        if shape != parameters[name].shape:
            differ = f"{name!r} has shape {tuple(shape)} in the file and {tuple(parameters[name].shape)} in the model"
            raise MatchError(f"{path} is another model's posterior: {differ}")


def map_tensors(path: Path, otherwise: str = "damaged", remedy: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file, mapped rather than read, and the metadata; pages are read when they are used."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (*DAMAGE, SafetensorError) as error:
        raise FileError(f"{path} is truncated or {otherwise} ({error}){remedy}") from error


def write_tensors(
    target: Path,
    like: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    about: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None,
) -> None:
    """Write named tensors one by one: no two of them need be in memory at once. Tied ones are written twice.

    `like` has their names, types and shapes, `load` gives the values by name, `about` the texts to store with them, of
    a length that does not depend on the tensors' sums.
    """
    like = _placed(like)
    sums = dict.fromkeys(like, "0" * 8)
    with target.open("wb") as file:
        file.write(_head(like, {"format": "pt"} if about is None else about(sums)))
        for name in like:
            values = load(name).detach().to("cpu", like[name].dtype).contiguous()
            assert values.shape == like[name].shape
            values.reshape(-1).view(torch.uint8).numpy().tofile(file)
            sums[name] = "" if about is None else _sum(values)
        if about is not None:
            file.seek(0)
            file.write(_head(like, about(sums)))


def _placed(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Types and shapes in the order of a file: wide types first, so that every tensor is aligned."""
    return {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in sorted(like.items(), key=lambda item: (-item[1].itemsize, item[0]))
    }


def _head(like: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """What stands before the tensors, which follow each other in this order."""
    header, end = {"__metadata__": dict[str, Any](texts)}, 0
    for name, tensor in like.items():
        if tensor.dtype not in _CODES:
            raise FileError(f"{name!r} is of type {tensor.dtype}, which a safetensors file cannot hold")
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
