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
from bayesadam.errors import FileError, MatchError, MissingFileError

FORMAT_VERSION = 1
HEADER = "bayesadam"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors under `role.parameter` names, with the header as JSON in the file's metadata."""
    text = json.dumps({"format": FORMAT_VERSION, **header})
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata={HEADER: text})


def read(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write` made."""
    if not Path(path).is_file():
        raise MissingFileError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(HEADER)
            loaded = None if text is None else json.loads(text)
            header: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
            check_version(path, header.get("format"))
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is truncated or not a saved posterior ({error})") from error


def check_version(path: str | os.PathLike[str], version: object) -> None:
    """Refuse what is not a saved posterior, or is one of a later format."""
    if version is None:
        raise FileError(f"{path} is not a saved posterior: it has no {HEADER!r} header")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FileError(
            f"{path} has format {version}, this version of bayesadam reads up to {FORMAT_VERSION}: upgrade it"
        )


def check_owner(
    path: str | os.PathLike[str], shapes: Mapping[str, torch.Size], parameters: Mapping[str, Tensor]
) -> None:
    """Refuse the posterior of another model: every name must be a parameter of its shape."""
    missing = [name for name in shapes if name not in parameters]
    if missing:
        raise MatchError(f"{path} is another model's posterior: the model has no parameters {missing[:4]}")
    for name, shape in shapes.items():
        if shape != parameters[name].shape:
            raise MatchError(
                f"{path} is another model's posterior: {name!r} has shape {tuple(shape)} in the file and "
                f"{tuple(parameters[name].shape)} in the model"
            )
