"""Reads IDX files, the format of MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bayesadam.errors import FileError, MissingFileError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> npt.NDArray[np.generic]:
    """The array in an IDX file: two zero bytes, a type, the number of dimensions, their sizes, then the entries."""
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"no file at {path}")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise FileError(f"{path} is not an IDX file: it starts with {raw[:4]!r}")
    dims = raw[3]
    body = 4 + 4 * dims
    shape = struct.unpack(f">{dims}I", raw[4:body]) if len(raw) >= body else ()
    dtype = np.dtype(_TYPES[raw[2]])
    if len(shape) != dims or len(raw) - body != math.prod(shape) * dtype.itemsize:
        raise FileError(f"{path} is truncated: {len(raw)} bytes do not hold an array of shape {shape}")
    return np.frombuffer(raw, dtype, offset=body).reshape(shape)
