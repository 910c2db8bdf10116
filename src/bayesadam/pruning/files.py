"""Masks on disk: one safetensors file, a bit for each weight."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam.errors import FileError, MatchError


def save_masks(path: str | os.PathLike[str], masks: Mapping[str, Tensor]) -> None:
    """Write masks as packed bits by parameter name, in place of an older file only once it is complete."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise MatchError(f"mask {name!r} must be boolean, True where a weight stays, not {mask.dtype}")
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    storage.write(path, packed, {"shapes": shapes}, storage.MASKS)


def load_masks(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The masks that `save_masks` wrote, on the CPU; whatever takes masks moves them."""
    packed, header = storage.read(path, storage.MASKS)
    try:
        return {name: _unpacked(packed[name], shape) for name, shape in header["shapes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is damaged: its masks cannot be read ({error})") from error


def _unpacked(bits: Tensor, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    if bits.numel() != (size + 7) // 8:
        raise ValueError(f"{bits.numel()} bytes for a mask of shape {tuple(shape)}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(shape)
