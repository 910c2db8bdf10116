"""Small networks in small files: codes of few bits, the zeros of pruned weights as a bitmap."""

from __future__ import annotations

import copy
import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._files import damage_named
from bayesadam._schema import PackedHeader
from bayesadam.compress.report import PruningReport
from bayesadam.compress.rounding import Grid
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict.matrices import Matrix
from bayesadam.weights.named import AnyPath, Named

KIND = storage.Kind(
    "bayesadam.packed", "a packed network", ": give the file that Quantised.save wrote", schema=PackedHeader
)
_WIDTHS = {2: 2, 3: 4, 4: 4, 8: 8}
Bytes = npt.NDArray[np.uint8]
# The grid of a weight, and how the weight is a matrix.
Grids = Mapping[str, tuple[Grid, Matrix]]


def report_packed(path: AnyPath) -> PruningReport:
    """What the file of `Quantised.save` holds, see `report_of`."""
    parts, header = storage.read_mapped(path, KIND)
    with damage_named(path, "Quantised.save"):
        return report_of(parts, header, Path(path).stat().st_size, {})


def report_of(parts: Named, header: Mapping[str, Any], size: int, moved: Mapping[str, float]) -> PruningReport:
    """The weights, those that are not 0, and the bytes, of each tensor in a file of so many bytes.

    Buffers and the header have bytes alone; a second name of a tied tensor has no row. No weight is unpacked.
    """
    names = [name for name in header["shapes"] if name not in header["same"]]
    bits = Counter(grid["bits"] for name, grid in header["grids"].items() if name in names)
    sizes = Counter(dict.fromkeys(names, 0))
    for key, part in parts.items():
        sizes[key.partition(".")[2]] += part.nbytes
    sizes["(header)"] = size - sizes.total()
    notes = tuple(f"{n} of {len(names)} tensors have codes of {each} bits" for each, n in sorted(bits.items()))
    weights = [name for name in names if name not in header.get("buffers", ())]
    rows = {name: (math.prod(header["shapes"][name]), _left(parts, header, name)) for name in weights}
    total, left = (sum(row[column] for row in rows.values()) for column in (0, 1))
    return PruningReport(rows, total, left, notes, dict(sizes), moved)


def load_packed(path: AnyPath, like: Named) -> dict[str, Tensor]:
    """The tensors that `Quantised.save` wrote, in the types of `like`, a state dict.

    Nothing is unpacked of a file with other names or shapes, as a few bytes can be a large tensor of zeros.
    """
    parts, header = storage.read(path, KIND)
    with damage_named(path, "Quantised.save"):
        shapes, same = {name: tuple(shape) for name, shape in header["shapes"].items()}, header["same"]
        wanted = {name: tuple(tensor.shape) for name, tensor in like.items()}
        if differ := sorted(dict(shapes.items() ^ wanted.items())):
            raise MatchError(f"{path} is of another network: {differ[:4]} differ in shape, or are in one of them alone")
        found = {name: _unpacked(parts, header, name).to(like[name].dtype) for name in shapes if name not in same}
        return {name: found[same.get(name, name)] for name in shapes}


def is_packed(path: AnyPath) -> bool:
    """Whether `Quantised.save` wrote the file."""
    return storage.is_of_kind(Path(path), KIND)


def load_network(path: AnyPath, model: nn.Module) -> nn.Module:
    """A copy of the model with the weights of a file of `Quantised.save`, an ordinary module."""
    network, tensors = copy.deepcopy(model), load_packed(path, model.state_dict())
    network.load_state_dict(tensors)
    return network


def packed(tensors: Named, grids: Grids, buffers: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file of a state dict holds, the weights with a grid in its codes, and its header.

    Codes take `bits` each or less, by Huffman's code, or stand behind a bitmap of those that are not 0, as other
    tensors with many zeros do. The other tensors keep their values, wider floats as float16 where that has them all.
    `buffers` are told from weights by their names.
    """
    parts: dict[str, Tensor] = {}
    header: dict[str, Any] = {"shapes": {}, "grids": {}, "same": {}, "buffers": list(buffers)}
    first: dict[object, str] = {}
    if strange := [name for name in grids if name not in tensors]:
        raise MatchError(f"the tensors lack {strange[:4]}, which have grids: give the network's state dict")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise SettingError(f"{name!r} is a {type(tensor).__name__}, and files hold tensors: leave it out")
        header["shapes"][name] = list(tensor.shape)
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(where, name) != name:
            header["same"][name] = first[where]
        elif name in grids:
            grid, matrix = grids[name]
            layout = {"groups": matrix.groups, "inputs_first": matrix.inputs_first}
            header["grids"][name] = {"bits": grid.bits, "group": grid.group, **layout}
            codes, kept = (one.cpu().flatten().numpy() for one in (grid.codes, grid.codes != grid.wide(grid.zero)))
            whole = {"codes": _stream(codes, grid.bits)}
            apart = {"codes": _stream(codes[kept], grid.bits), "kept": _bitmap(kept)}
            least = min(whole, apart, key=_size) | {"scale": grid.scale, "zero": grid.zero}
            parts |= {f"{part}.{name}": stored for part, stored in least.items()}
        else:
            tensor = tensor.detach().cpu()
            if tensor.dtype in (torch.float32, torch.float64) and tensor.equal(tensor.half().to(tensor)):
                tensor = tensor.half()
            some = {"values": tensor[tensor != 0], "kept": _bitmap((tensor != 0).flatten().numpy())}
            parts |= {f"{part}.{name}": stored for part, stored in min({"values": tensor}, some, key=_size).items()}
    return parts, header


def _size(parts: Named) -> int:
    return sum(part.nbytes for part in parts.values())


def _left(parts: Named, header: Mapping[str, Any], name: str) -> int:
    """How many entries of a tensor are not 0."""
    n, about = math.prod(header["shapes"][name]), header["grids"].get(name)
    if f"kept.{name}" in parts:
        return len(_places(parts[f"kept.{name}"], n))
    values = parts[f"values.{name}"] if about is None else _unpacked(parts, header, name)
    if values.numel() != n:
        raise ValueError(f"{name!r} has {values.numel()} values, and {n} by its shape")
    return int(torch.count_nonzero(values))


def _unpacked(parts: Named, header: Mapping[str, Any], name: str) -> Tensor:
    """One tensor of what `_packed` gave."""
    shape, about = torch.Size(header["shapes"][name]), header["grids"].get(name)
    kept: slice | Tensor = slice(None)
    if f"kept.{name}" in parts:
        kept = _places(parts[f"kept.{name}"], shape.numel())
    n = shape.numel() if isinstance(kept, slice) else len(kept)
    values = parts[f"values.{name}"] if about is None else _opened(parts[f"codes.{name}"], n, about["bits"])
    if not isinstance(kept, slice):
        values = values.new_zeros(shape.numel()).index_put_((kept,), values)
    if about is None:
        return values.reshape(shape)
    matrix = Matrix(name, None, shape, None, about["groups"], about["inputs_first"])
    groups, outputs, inputs = matrix.size
    scale, zero = parts[f"scale.{name}"], parts[f"zero.{name}"]
    if about["group"] > inputs or scale.shape != (groups * outputs, -(-inputs // about["group"])):
        raise ValueError(f"the scales of {name!r} have shape {tuple(scale.shape)}")
    weight = Grid(values.reshape(-1, inputs), scale, zero, about["bits"], about["group"]).weight()
    some = torch.zeros_like(weight)
    some.view(-1)[kept] = weight.view(-1)[kept]
    return matrix.out_of(some.reshape(matrix.size))


def _stream(codes: Bytes, bits: int) -> Tensor:
    """Codes at `bits` each, or of Huffman's lengths, which are of whole bytes: those of 3 bits are joined as of 4."""
    each = [np.unpackbits(codes[:, None], axis=1, count=width, bitorder="little") for width in (bits, _WIDTHS[bits])]
    return _shorter(*(np.packbits(one, bitorder="little") for one in each))


def _opened(stream: Tensor, n: int, bits: int) -> Tensor:
    """The n codes of a `_stream`."""
    data, width = stream.numpy(), bits
    if len(data) != -(-n * bits // 8):
        width = _WIDTHS[bits]
        data = _inflated(data, -(-n * width // 8))
    each = np.unpackbits(data, bitorder="little")[: n * width].reshape(n, width)
    codes = np.packbits(each, axis=1, bitorder="little")[:, 0]
    if (codes >> bits).any():
        raise ValueError(f"codes of {bits} bits are larger")
    return torch.from_numpy(codes)


def _bitmap(kept: npt.NDArray[np.bool_]) -> Tensor:
    """A bit a weight, or how many are left out before each that is kept, 255 where it is not the next."""
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    counts = gaps // 255 + 1
    skips = np.full(int(counts.sum()), 255, np.uint8)
    skips[counts.cumsum() - 1] = gaps % 255
    return _shorter(np.packbits(kept, bitorder="little"), skips)


def _places(stream: Tensor, n: int) -> Tensor:
    """Which of n weights a `_bitmap` keeps, by their numbers."""
    data = stream.numpy()
    if len(data) == -(-n // 8):
        return torch.from_numpy(np.flatnonzero(np.unpackbits(data, count=n, bitorder="little")))
    skips = torch.from_numpy(_inflated(data, n))
    places = ((skips.long() + (skips < 255)).cumsum(0) - 1)[skips < 255]
    if len(places) and int(places[-1]) >= n:
        raise ValueError(f"a stream keeps more than {n} weights")
    return places


def _shorter(bare: Bytes, other: Bytes) -> Tensor:
    """The first, or the second deflated, which are told by their lengths."""
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    deflated = np.frombuffer(deflate.compress(other.tobytes()) + deflate.flush(), np.uint8)
    return torch.from_numpy((deflated if len(deflated) < len(bare) else bare).copy())


def _inflated(data: Bytes, most: int) -> Bytes:
    """The bytes that were deflated, which are at most so many: no more are inflated."""
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data.tobytes(), most + 1)
    if len(plain) > most or not inflater.eof or inflater.unused_data:
        raise ValueError(f"a stream holds more than {most} bytes, or is cut short")
    return np.frombuffer(plain, np.uint8).copy()
