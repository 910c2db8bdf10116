"""Posteriors on disk: one safetensors file of named tensors and a versioned JSON header. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.errors import FileError

FORMAT_VERSION = 1
_HEADER = "bayesadam"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors under `role.parameter` names, with the header as JSON in the file's metadata."""
    text = json.dumps({"format": FORMAT_VERSION, **header})
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata={_HEADER: text})


def read(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write` made."""
    if not Path(path).is_file():
        raise FileError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(_HEADER)
            loaded = None if text is None else json.loads(text)
            header: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
            version = header.get("format")
            if version is None:
                raise FileError(f"{path} is a safetensors file but not a saved posterior: it has no {_HEADER!r} header")
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise FileError(
                    f"{path} has format {version}, this version of bayesadam reads up to {FORMAT_VERSION}: upgrade it"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is truncated or not a saved posterior ({error})") from error
