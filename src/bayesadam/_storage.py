"""Safetensors files: named tensors, and for files of our own a versioned JSON header in the metadata. No pickle."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesadam._files import replacing
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
    """A kind of file: its header's key, its name in messages, what to do about another, the newest format read."""

    header: str
    what: str
    remedy: str = ""
    newest: int = FORMAT_VERSION


POSTERIOR = Kind(
    "bayesadam", "a saved posterior", ": a run's own checkpoint is read by Posterior.from_checkpoint", COMPACT_VERSION
)
AGENT = Kind("bayesadam.bandits", "a saved agent", ": give the file that Agent.save wrote")


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
    text = json.dumps({"format": FORMAT_VERSION, **header}, allow_nan=False)
    with replacing(path) as temporary:
        write_tensors(temporary, tensors, load or tensors.__getitem__, {kind.header: text})


def read(path: AnyPath, kind: Kind = POSTERIOR) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write` made."""
    tensors, header = read_mapped(path, kind)
    return {name: tensor.clone() for name, tensor in tensors.items()}, header


def read_mapped(path: AnyPath, kind: Kind = POSTERIOR) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`read` with the tensors on disk until they are used."""
    if not Path(path).is_file():
        raise MissingFileError(f"no file at {path}")
    tensors, metadata = map_tensors(Path(path), f"not {kind.what}", kind.remedy)
    try:
        header = json.loads(metadata.get(kind.header, "null"))
    except ValueError as error:
        raise FileError(f"{path} is truncated or not {kind.what} ({error}){kind.remedy}") from error
    header = header if isinstance(header, dict) else {}
    check_version(path, header.get("format"), kind)
    return tensors, header


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
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path} is truncated or {otherwise} ({error}){remedy}") from error


def write_tensors(
    target: Path, like: Mapping[str, Tensor], load: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors one by one: no two of them need be in memory at once. Tied ones are written twice.

    `like` has their names, types and shapes, `load` gives the values by name, `metadata` are texts to store with them.
    """
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in like.items()}
    # Wide types first, so that every tensor is aligned.
    names = sorted(like, key=lambda name: (-like[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name in names:
        tensor = like[name]
        if tensor.dtype not in _CODES:
            raise FileError(f"{name!r} is of type {tensor.dtype}, which a safetensors file cannot hold")
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = load(name).detach().to("cpu", like[name].dtype).contiguous()
            assert values.shape == like[name].shape
            values.reshape(-1).view(torch.uint8).numpy().tofile(file)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
