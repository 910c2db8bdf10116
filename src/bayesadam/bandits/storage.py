"""A simulation's state on disk: one safetensors file of named tensors and a JSON header. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.errors import FileError, MissingFileError

FORMAT_VERSION = 1
_HEADER = "bayesadam.bandits"


def write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write CPU tensors by name and the header; whole or not at all."""
    text = json.dumps({"format": FORMAT_VERSION, **header}, allow_nan=False)
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={_HEADER: text})


def read(
    path: Path, *, what: str = "simulation", way_out: str = "delete it to start anew, or take another path"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write` made.

    Args:
        path: the file.
        what: should be in it, for messages.
        way_out: what to do where it is not.
    """
    if not path.is_file():
        raise MissingFileError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_HEADER)
            header = {} if text is None else json.loads(text)
            version = header.get("format") if isinstance(header, dict) else None
            if not isinstance(version, int):
                raise FileError(f"{path} holds no {what} of bayesadam: {way_out}")
            if version > FORMAT_VERSION:
                raise FileError(
                    f"{path} has format {version}, this version of bayesadam reads up to {FORMAT_VERSION}: upgrade it"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is truncated or holds no {what} of bayesadam ({error}): {way_out}") from error


def sweep(path: Path) -> None:
    """Remove what a killed process left of files it was writing in the place of `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
