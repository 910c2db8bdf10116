"""An example as something to look at: a picture, a text, or numbers."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam.errors import MatchError

_CHANNELS = (1, 3, 4)
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_MOST_NUMBERS = 24
_MOST_CHARACTERS = 600


@dataclass(frozen=True)
class Shown:
    """Either a picture, as the address of inline PNG data, or a text."""

    picture: str | None = None
    text: str | None = None


def shown(examples: Sequence[Any]) -> list[Shown]:
    """What to show of items of a data set; pictures have one scale, so that they are as bright as they are beside each other."""
    found = [_content(example) for example in examples]
    pixels = [None if isinstance(each, str) else _pixels(each) for each in found]
    scaled = [values for values in pixels if values is not None and values.dtype != torch.uint8 and values.numel()]
    # Black is 0 where no number is below.
    least = min((float(values.min()) for values in scaled), default=0.0)
    most = max((float(values.max()) for values in scaled), default=1.0)
    return [
        Shown(text=_words(each)) if image is None else Shown(picture=_address(_bytes(image, min(least, 0.0), most)))
        for each, image in zip(found, pixels, strict=True)
    ]


def _content(example: Any) -> str | Tensor:
    """A text or numbers: the inputs of a pair, the first that can be shown of a mapping."""
    if isinstance(example, str):
        return example
    if isinstance(example, tuple | list) and example and not isinstance(example[0], int | float):
        return _content(example[0])
    if isinstance(example, Mapping):
        texts = [value for value in example.values() if isinstance(value, str)]
        others = [value for value in example.values() if isinstance(value, Tensor) or hasattr(value, "__array__")]
        if not texts and not others:
            raise MatchError(f"an example with keys {sorted(map(str, example))} has no text, image or numbers to show")
        return _content((texts or others)[0])
    try:
        values = _tensor(example)
    except (TypeError, ValueError, RuntimeError):
        kind = type(example).__name__
        raise MatchError(
            f"an example of type {kind} cannot be shown: pass images, texts or numbers as inputs"
        ) from None
    return values.nan_to_num() if values.is_floating_point() else values


def _words(content: str | Tensor) -> str:
    """A text, or the first of the numbers."""
    if isinstance(content, str):
        return content if len(content) <= _MOST_CHARACTERS else f"{content[:_MOST_CHARACTERS]}…"
    flat = content.flatten().tolist()
    some = ", ".join(f"{value:.4g}" for value in flat[:_MOST_NUMBERS])
    return some + (f", … ({len(flat):,} numbers)" if len(flat) > _MOST_NUMBERS else "")


def _address(pixels: Tensor) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode('ascii')}"


def png(pixels: Tensor) -> bytes:
    """(height, width, channels) bytes as a PNG file, of 1, 3 or 4 channels.

    >>> png(torch.zeros(2, 2, 1, dtype=torch.uint8))[1:4]
    b'PNG'
    """
    height, width, channels = pixels.shape
    # Each line is preceded by its filter's number, 0 for none.
    lines = torch.cat([pixels.new_zeros(height, 1), pixels.reshape(height, -1)], dim=1).numpy().tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _tensor(example: Any) -> Tensor:
    if isinstance(example, Tensor):
        return example.detach().cpu()
    if hasattr(example, "__array__"):
        return torch.from_numpy(np.array(example))
    return torch.as_tensor(example)


def _pixels(values: Tensor) -> Tensor | None:
    """(height, width, channels) of an image, channels first or last; None where it is none."""
    if values.dim() == 2 and min(values.shape) > 1:
        return values.unsqueeze(-1)
    if values.dim() == 3 and values.shape[0] in _CHANNELS:
        return values.permute(1, 2, 0)
    return values if values.dim() == 3 and values.shape[2] in _CHANNELS else None


def _bytes(pixels: Tensor, least: float, most: float) -> Tensor:
    """Bytes as they are, other numbers from `least` to `most` as 0 to 255."""
    if pixels.dtype == torch.uint8:
        return pixels
    return ((pixels.double() - least) * (255 / max(most - least, 1e-12))).round().to(torch.uint8)
