"""Files of safetensors: named tensors, sorted, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bayesadam._storage import map_tensors, write_tensors
from bayesadam.checkpoint.contents import Contents
from bayesadam.checkpoint.registry import Format, refuse_keys


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


SAFETENSORS = Format("safetensors", is_safetensors, _read_safetensors, _rewrite_safetensors)
