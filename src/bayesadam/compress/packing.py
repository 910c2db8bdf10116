"""Small networks in small files: codes of few bits, the zeros of pruned weights as a bitmap."""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._extras import require
from bayesadam._files import damage_named
from bayesadam._schema import PackedHeader
from bayesadam.compress.report import PruningReport
from bayesadam.compress.rounding import Grid
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict.matrices import Matrix
from bayesadam.weights.named import AnyPath, Named

KIND = storage.Kind(
    "bayesadam.packed", "a packed network", ": give the file that save_packed wrote", schema=PackedHeader
)
_WIDTHS = {2: 2, 3: 4, 4: 4, 8: 8}
Bytes = npt.NDArray[np.uint8]
# The grid of a weight, and how the weight is a matrix.
Grids = Mapping[str, tuple[Grid, Matrix]]


def save_packed(
    path: AnyPath,
    tensors: Named,
    grids: Grids | None = None,
    *,
    half: bool = False,
    buffers: Collection[str] = (),
) -> None:
    """Write a state dict to safetensors, the weights with a grid in its codes.

    Codes take `bits` each or less, by Huffman's code, or stand behind a bitmap of those that are not 0, as other
    tensors with many zeros do. The other tensors keep their types; with `half` wider floats are float16 where they fit.
    `buffers` are told from weights by their names.
    """
    parts, header = _packed(tensors, grids or {}, half)
    storage.write(path, parts, header | {"buffers": list(buffers)}, KIND)


def report_packed(path: AnyPath) -> PruningReport:
    """What the file of `save_packed` holds: the weights, those that are not 0, and the bytes, of each tensor.

    Buffers and the header have bytes alone; a second name of a tied tensor has no row.
    """
    parts, header = storage.read_mapped(path, KIND)
    tensors = {name: tensor for name, tensor in load_packed(path).items() if name not in header["same"]}
    bits = Counter(grid["bits"] for name, grid in header["grids"].items() if name in tensors)
    sizes = Counter(dict.fromkeys(tensors, 0))
    for key, part in parts.items():
        sizes[key.partition(".")[2]] += part.nbytes
    sizes["(header)"] = Path(path).stat().st_size - sizes.total()
    notes = tuple(f"{n} of {len(tensors)} tensors have codes of {each} bits" for each, n in sorted(bits.items()))
    weights = {name: tensor for name, tensor in tensors.items() if name not in header.get("buffers", ())}
    kept = {name: tensor != 0 for name, tensor in weights.items()}
    return replace(PruningReport.of(weights, kept, notes), bytes=dict(sizes))


def load_packed(path: AnyPath, like: Named | None = None) -> dict[str, Tensor]:
    """The tensors that `save_packed` wrote.

    Nothing is unpacked of a file with other names or shapes than `like`: give the model's state dict where you do not
    trust the file, as a few bytes can be a large tensor of zeros.
    """
    parts, header = storage.read(path, KIND)
    with damage_named(path, "save_packed"):
        shapes, same = {name: tuple(shape) for name, shape in header["shapes"].items()}, header["same"]
        wanted = shapes if like is None else {name: tuple(tensor.shape) for name, tensor in like.items()}
        if differ := sorted(dict(shapes.items() ^ wanted.items())):
            raise MatchError(f"{path} is of another network: {differ[:4]} differ in shape, or are in one of them alone")
        found = {name: _unpacked(parts, header, name) for name in shapes if name not in same}
        return {name: found[same.get(name, name)] for name in shapes}


def is_packed(path: AnyPath) -> bool:
    """Whether `save_packed` wrote the file."""
    return storage.is_of_kind(Path(path), KIND)


def load_network(path: AnyPath, model: nn.Module) -> nn.Module:
    """A copy of the model with the weights of a file of `save_packed`, an ordinary module."""
    network, tensors = copy.deepcopy(model), load_packed(path, model.state_dict())
    network.load_state_dict(tensors)
    return network


def to_torchao(model: nn.Module, grids: Grids) -> nn.Module:
    """A copy whose linear layers with a grid hold torchao's integer weights, one byte a code, for its export.

    Needs the package torchao. A layer whose inputs are no multiple of the group stays as it is.
    """
    intx, network = require("torchao.quantization").IntxUnpackedToInt8Tensor, copy.deepcopy(model)
    for prefix, module in network.named_modules():
        grid, _ = grids.get(f"{prefix}.weight" if prefix else "weight", (None, None))
        if grid is None or not isinstance(module, nn.Linear) or grid.codes.shape[1] % grid.group:
            continue
        middle, weight = 2 ** (grid.bits - 1), module.weight
        codes = (grid.codes.to(torch.int16) - middle).to(weight.device, torch.int8)
        zero = (grid.zero - middle).expand(grid.scale.shape).contiguous()
        kind = getattr(torch, f"int{grid.bits}")
        scale, zero = (one.to(weight.device, weight.dtype) for one in (grid.scale, zero))
        packed = intx(codes, scale, zero, kind, (1, grid.group), weight.dtype, None)
        module.weight = nn.Parameter(packed, requires_grad=False)
    return network


def halved(tensor: Tensor) -> Tensor:
    """Wider floats as float16 where that is nearer than .01, of all together; others as they are."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    small, wide = tensor.half(), tensor.double()
    away = torch.where(small == wide, 0, small - wide).norm()
    return small if bool(away <= 0.01 * wide.nan_to_num(0, 0, 0).norm()) else tensor


def _packed(tensors: Named, grids: Grids, half: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the file holds, and its header."""
    parts: dict[str, Tensor] = {}
    header: dict[str, dict[str, Any]] = {"shapes": {}, "grids": {}, "same": {}}
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
            tensor = halved(tensor) if half else tensor
            some = {"values": tensor[tensor != 0], "kept": _bitmap((tensor != 0).flatten().numpy())}
            parts |= {f"{part}.{name}": stored for part, stored in min({"values": tensor}, some, key=_size).items()}
    return parts, header


def _size(parts: Named) -> int:
    return sum(part.nbytes for part in parts.values())


def _unpacked(parts: Named, header: Mapping[str, Any], name: str) -> Tensor:
    """One tensor of what `_packed` gave."""
    shape, about, kept = torch.Size(header["shapes"][name]), header["grids"].get(name), None
    if f"kept.{name}" in parts:
        kept = _kept(parts[f"kept.{name}"], shape.numel())
    n = shape.numel() if kept is None else int(kept.sum())
    values = parts[f"values.{name}"] if about is None else _opened(parts[f"codes.{name}"], n, about["bits"])
    if kept is not None:
        values = values.new_zeros(shape.numel()).masked_scatter_(kept, values)
    if about is None:
        return values.reshape(shape)
    matrix = Matrix(name, None, shape, None, about["groups"], about["inputs_first"])
    groups, outputs, inputs = matrix.size
    scale, zero = parts[f"scale.{name}"], parts[f"zero.{name}"]
    if scale.shape != (groups * outputs, -(-inputs // about["group"])):
        raise ValueError(f"the scales of {name!r} have shape {tuple(scale.shape)}")
    weight = Grid(values.reshape(-1, inputs), scale, zero, about["bits"], about["group"]).weight()
    return matrix.out_of((weight if kept is None else weight.where(kept.reshape(-1, inputs), 0)).reshape(matrix.size))


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


def _kept(stream: Tensor, n: int) -> Tensor:
    """Which of n weights a `_bitmap` keeps."""
    data = stream.numpy()
    if len(data) == -(-n // 8):
        return torch.from_numpy(np.unpackbits(data, count=n, bitorder="little")).bool()
    skips = torch.from_numpy(_inflated(data, n))
    kept = torch.zeros(n, dtype=torch.bool)
    kept[((skips.long() + (skips < 255)).cumsum(0) - 1)[skips < 255]] = True
    return kept


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
