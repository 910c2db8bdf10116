"""Files of safetensors: named tensors, sorted, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesadam.checkpoint.contents import Contents
from bayesadam.checkpoint.registry import Format
from bayesadam.errors import FileError, SettingError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, mapped rather than read: pages come from the disk when they are looked at."""
    try:
        with safe_open(path, framework="pt", device="cpu"):
            # Opening checks the header: lengths, types, and that the pieces cover the file.
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path} is truncated or damaged ({error})") from error
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - _DTYPES.keys())
    if unknown:
        raise FileError(f"{path} has tensors of type {', '.join(unknown)}, which are not read")
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    return {name: _view(storage, 8 + length, entry) for name, entry in header.items()}


def _view(storage: Any, start: int, entry: Mapping[str, Any]) -> Tensor:
    """One tensor of the mapped file, over its memory where the place allows that."""
    dtype = _DTYPES[entry["dtype"]]
    first, last = entry["data_offsets"]
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, start + first, (last - first,), (1,))
    aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).reshape(entry["shape"])


def is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000


def _read_safetensors(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    for option, wanted in (("weights_key", weights_key), ("optimizer_key", optimizer_key)):
        if wanted is not None:
            raise SettingError(f"{option}={wanted!r} makes no sense for {path}: a safetensors file has no levels")
    weights = mapped_tensors(path)
    # The file is sorted: the order of the model's modules is lost.
    return Contents(weights or None, None, f"{len(weights)} tensors in a safetensors file")


def _rewrite_safetensors(
    source: Path, weights_at: tuple[str, ...], weights: Mapping[str, Tensor], target: Path
) -> None:
    with safe_open(source, framework="pt", device="cpu") as file:
        metadata = file.metadata()
    kept = mapped_tensors(source)
    save_safetensors(kept, lambda name: weights[name] if name in weights else kept[name], target, metadata)


def save_safetensors(
    like: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    target: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors one by one: no two of them need be in memory at once. Tied ones are written twice.

    Args:
        like: their names, types and shapes.
        load: (name) → its values.
        target: the file.
        metadata: texts to keep in it.
    """
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    # Wide types first, so that every tensor lies where its type may.
    facts = {
        name: (tensor.dtype, list(tensor.shape), tensor.numel() * tensor.itemsize) for name, tensor in like.items()
    }
    names = sorted(facts, key=lambda name: (-facts[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    place = 0
    for name in names:
        dtype, shape, size = facts[name]
        if dtype not in codes:
            raise FileError(f"{name!r} is of type {dtype}, which a safetensors file cannot hold")
        header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            dtype, shape, _ = facts[name]
            _write(load(name), dtype, shape, file)


def _write(tensor: Tensor, dtype: torch.dtype, shape: list[int], file: BinaryIO) -> None:
    values = tensor.detach().to("cpu", dtype).contiguous()
    assert list(values.shape) == shape
    values.reshape(-1).view(torch.uint8).numpy().tofile(file)


SAFETENSORS = Format("safetensors", is_safetensors, _read_safetensors, _rewrite_safetensors)
