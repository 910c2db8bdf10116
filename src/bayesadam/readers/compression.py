"""Second moments in fewer bytes, as files hold them, under `role.parameter`."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.readers.formats.lazy import meta
from bayesadam.readers.registry import working_dtype

Compression = Literal["bfloat16", "factored"]
Named = Mapping[str, Tensor]
# Up to 0.3 files had codes of 8 bits in blocks, which are still read.
_BLOCK, _LAST = 512, 255
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

    `"bfloat16"` keeps one part in 256, `"factored"` of the matrix (first dimension, all others) the sums r of the rows
    and c of the columns, :math:`v_{ij} \approx r_i c_j / \sum_k r_k`: exact where v has rank one, but a weight that
    no gradient reached then has some curvature.
    """
    check_compression(compress)
    if compress is None:
        return {"": values}
    values = values.detach().cpu()
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise MatchError("second moments that are negative, NaN or infinite cannot be compressed: training has failed")
    if compress == "bfloat16" or values.dim() < 2:
        return {"": values.bfloat16() if compress == "bfloat16" else values}
    matrix = values.flatten(1)
    rows, columns = (matrix.sum(dim=dim, dtype=torch.float64) for dim in (1, 0))
    share = rows / rows.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return {_ROWS: share.to(values.dtype), _COLUMNS: columns.to(values.dtype).reshape(values.shape[1:])}


def outline(shape: torch.Size, dtype: torch.dtype, compress: str | None) -> dict[str, Tensor]:
    """The parts that `encode` gives, without values."""
    if compress == "factored" and len(shape) > 1:
        return {_ROWS: meta(shape[:1], dtype), _COLUMNS: meta(shape[1:], dtype)}
    return {"": meta(shape, torch.bfloat16 if compress == "bfloat16" else dtype)}


def decode(parts: Named, source: str) -> Tensor:
    """The tensor behind the parts that `encode` gave; an error names `source`."""
    if _RANGE in parts:
        codes, ends = parts.get("", torch.zeros(0)), parts[_RANGE]
        if codes.dtype != torch.uint8 or ends.shape != (-(-codes.numel() // _BLOCK), 2):
            raise FileError(f"{source} is damaged: its 8-bit codes and their ranges do not belong together")
        low, high = ends.repeat_interleave(_BLOCK, dim=0)[: codes.numel()].unbind(1)
        logs = low + (codes.flatten().to(ends.dtype) - 1) * ((high - low) / (_LAST - 1))
        # The logarithm of the largest number is rounded upwards.
        values = logs.exp_().clamp_(max=torch.finfo(ends.dtype).max).view(codes.shape)
        return values.masked_fill_(codes == 0, 0.0)
    if _ROWS in parts:
        rows, columns = parts[_ROWS], parts.get(_COLUMNS, torch.zeros(()))
        if rows.dim() != 1 or not columns.dim():
            raise FileError(f"{source} is damaged: its rows and columns do not belong together")
        return rows.reshape(-1, *[1] * columns.dim()) * columns
    if "" not in parts or not parts[""].is_floating_point():
        raise FileError(f"{source} is damaged: its second moment, or a part of it, is missing")
    return parts[""].to(working_dtype(parts[""].dtype))


def moment(tensors: Named, key: str, source: str) -> Tensor:
    """The second moment under `role.parameter`, decoded."""
    role, _, name = key.partition(".")
    parts = {end: tensors[part] for end in _SUFFIXES if (part := f"{role}{end}.{name}") in tensors}
    return decode(parts, f"{name!r} of {source}")


def moment_shape(tensors: Named, key: str) -> torch.Size:
    """Its shape, without decoding it."""
    role, _, name = key.partition(".")
    if key in tensors:
        return tensors[key].shape
    rows, columns = (tensors[f"{role}{end}.{name}"] for end in (_ROWS, _COLUMNS))
    return torch.Size((*rows.shape, *columns.shape))


def widened(key: str, tensor: Tensor) -> Tensor:
    """A basis in float32; of bfloat16, as files up to 0.3 have it, orthonormal again by Q (3 I − QᵀQ)/2."""
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


def same_weights(saved: Named, present: Named) -> bool:
    """Whether probes by name differ by at most a tenth in the mean square; rounding to 8 bits is a hundredth."""
    theirs, ours = (torch.cat([named[name].double().cpu() for name in saved]) for named in (saved, present))
    return bool((ours - theirs).norm() <= 0.1 * theirs.norm())
