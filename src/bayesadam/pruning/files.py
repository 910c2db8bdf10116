"""Masks on disk: one safetensors file, a bit for each weight."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.errors import FileError, MatchError, MissingFileError

FORMAT_VERSION = 1
_HEADER = "bayesadam-masks"


def save_masks(path: str | os.PathLike[str], masks: Mapping[str, Tensor]) -> None:
    """Write masks as packed bits by parameter name, in place of an older file only once it is complete."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise MatchError(f"mask {name!r} must be boolean, True where a weight is kept, not {mask.dtype}")
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in masks.items()}
    header = {"format": FORMAT_VERSION, "shapes": {name: list(mask.shape) for name, mask in masks.items()}}
    with replacing(path) as temporary:
        save_file(packed, temporary, metadata={_HEADER: json.dumps(header)})


def load_masks(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The masks that `save_masks` wrote, on the CPU; whatever takes masks moves them."""
    if not Path(path).is_file():
        raise MissingFileError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_HEADER)
            if text is None:
                raise FileError(f"{path} is a safetensors file but holds no masks: it has no {_HEADER!r} header")
            header = json.loads(text)
            if not isinstance(header["format"], int) or header["format"] > FORMAT_VERSION:
                raise FileError(
                    f"{path} has format {header['format']}, this version of bayesadam reads up to {FORMAT_VERSION}: "
                    "upgrade it"
                )
            return {name: _unpacked(file.get_tensor(name), shape) for name, shape in header["shapes"].items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is truncated or holds no masks ({error})") from error


def _unpacked(bits: Tensor, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    if bits.numel() != (size + 7) // 8:
        raise ValueError(f"{bits.numel()} bytes for a mask of shape {tuple(shape)}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(shape)
