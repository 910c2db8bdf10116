"""Second moments in fewer bytes, as files hold them, under `role.parameter`."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesadam.errors import FileError, SettingError, StateError
from bayesadam.readers.registry import working_dtype

Compression = Literal["factored"]
Named = Mapping[str, Tensor]
BLOCK = 512
_LAST = 255
# Of a tensor's parts, the one without a suffix has its shape.
_RANGE, _ROWS, _COLUMNS = "_range", "_rows", "_columns"
_SUFFIXES = ("", _RANGE, _ROWS, _COLUMNS)
# Beside the second moments, where a saved posterior stands for an optimiser's state.
PROBE_KEY = "saved_posterior_probe"
_PROBES = 16


def check_compression(compress: str | None) -> None:
    """Refuse a name that is no compression."""
    if compress is not None and compress not in get_args(Compression):
        raise SettingError(f"compress must be one of {get_args(Compression)} or None, got {compress!r}")


def encode(values: Tensor, compress: str | None) -> dict[str, Tensor]:
    r"""A tensor of finite numbers, none of them negative, as the parts that a file holds, by the suffix of their role.

    `None` keeps it as it is. `"factored"` keeps of two or more dimensions the sums r of the rows and c of the columns,
    over the matrix (first dimension, all others): :math:`v_{ij} \approx r_i c_j / \sum_k r_k`, exact where v has rank
    one. Zeros that do not fill a row or a column are lost: a weight that no gradient reached then has some curvature.
    """
    check_compression(compress)
    if compress is None or values.dim() < 2:
        return {"": values}
    values = values.detach().cpu()
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise StateError("second moments that are negative, NaN or infinite cannot be compressed: training has failed")
    matrix = values.flatten(1)
    rows, columns = (matrix.sum(dim=dim, dtype=torch.float64) for dim in (1, 0))
    share = rows / rows.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return {_ROWS: share.to(values.dtype), _COLUMNS: columns.to(values.dtype).reshape(values.shape[1:])}


def outline(shape: torch.Size, dtype: torch.dtype, compress: str | None) -> dict[str, Tensor]:
    """The parts that `encode` gives, without values."""
    factored = compress == "factored" and len(shape) > 1
    sides = {_ROWS: shape[:1], _COLUMNS: shape[1:]} if factored else {"": shape}
    return {end: torch.empty(side, dtype=dtype, device="meta") for end, side in sides.items()}


def decode(parts: Named, source: str) -> Tensor:
    r"""The tensor behind the parts that `encode` gave; an error names `source`.

    Releases before 0.4 wrote eight bits too, in blocks of 512 entries in the flat order: with a and b the smallest
    positive and the largest entry of a block code 0 is zero, code k = 1, …, 255 :math:`a \, (b / a)^{(k - 1) / 254}`.
    """
    if _RANGE in parts:
        codes, ends = parts.get("", torch.zeros(0)), parts[_RANGE]
        if codes.dtype != torch.uint8 or ends.shape != (-(-codes.numel() // BLOCK), 2):
            raise FileError(f"{source} is damaged: its 8-bit codes and their ranges do not belong together")
        low, high = ends.unsqueeze(-1).unbind(1)
        blocks = _blocks(codes)
        logs = low + (blocks.to(ends.dtype) - 1) * ((high - low) / (_LAST - 1))
        # The logarithm of the largest number is rounded upwards.
        values = logs.exp_().clamp_(max=torch.finfo(ends.dtype).max).masked_fill_(blocks == 0, 0.0)
        return values.flatten()[: codes.numel()].reshape(codes.shape)
    if _ROWS in parts:
        rows, columns = parts[_ROWS], parts.get(_COLUMNS, torch.zeros(()))
        if rows.dim() != 1 or not columns.dim():
            raise FileError(f"{source} is damaged: its rows and columns do not belong together")
        return rows.reshape(-1, *[1] * columns.dim()) * columns
    if "" not in parts or not parts[""].is_floating_point():
        raise FileError(f"{source} is damaged: its second moment, or a part of it, is missing")
    return parts[""]


def _blocks(values: Tensor) -> Tensor:
    flat = values.flatten()
    return pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)


def moment(tensors: Named, key: str, source: str) -> Tensor:
    """The second moment under `role.parameter`, decoded."""
    role, _, name = key.partition(".")
    parts = {end: tensors[held] for end in _SUFFIXES if (held := f"{role}{end}.{name}") in tensors}
    return decode(parts, f"{name!r} of {source}")


def moment_shape(tensors: Named, key: str) -> torch.Size:
    """Its shape, without decoding it."""
    role, _, name = key.partition(".")
    if key in tensors:
        return tensors[key].shape
    rows, columns = (tensors[f"{role}{end}.{name}"] for end in (_ROWS, _COLUMNS))
    return torch.Size((*rows.shape, *columns.shape))


def widened(key: str, tensor: Tensor) -> Tensor:
    """A basis or direction in float32: files up to 0.3 have bfloat16, where bases are orthonormal again after a step
    of Newton and Schulz, Q (3 I − QᵀQ)/2.
    """
    if tensor.dtype != torch.bfloat16:
        return tensor
    wide = tensor.float()
    if key.partition(".")[0] not in ("left", "right") or wide.dim() != 2:
        return wide
    return wide @ (1.5 * torch.eye(wide.shape[1]) - 0.5 * wide.mT @ wide)


def probe(theta: Tensor) -> Tensor:
    """At most 16 evenly spaced weights, by which saved second moments recognise the weights they belong to."""
    flat = theta.detach().flatten()
    return flat[:: max(len(flat) // _PROBES, 1)][:_PROBES].to(working_dtype(theta.dtype), copy=True)


def same_weights(known: Named, found: Named) -> bool:
    """Whether probes by name differ by at most a tenth in the mean square; rounding to 8 bits is a hundredth."""
    theirs, ours = (torch.cat([named[name].double().cpu() for name in known]) for named in (known, found))
    return bool((ours - theirs).norm() <= 0.1 * theirs.norm())
