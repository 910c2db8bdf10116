"""A Gaussian in a safetensors file: tensors under `role.parameter`, and a header of plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._shards import placed_like, whole
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import compression, working_dtype
from bayesadam.readers.formats.distributed import read_stored, stored_entries
from bayesadam.readers.formats.lazy import Lazy, meta, outline_of
from bayesadam.readers.rotated import Rotation, is_orthonormal
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.named import AnyPath, Named
from bayesadam.weights.settings import Precision, Settings

SETTING_NAMES = tuple(f.name for f in fields(Settings))
_MODE, _MOMENT = "mode", "second_moment"
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HEADER_FILE = f"{storage.POSTERIOR.header}.json"


def tensors_of(
    mode: Named, curvature: Diagonal, prior: Mapping[str, Precision], *, weights: bool, compress: str | None
) -> Named:
    """What a file holds, under `role.parameter`; tensors on disk are read when they are accessed.

    A file without weights has a few numbers of each parameter instead, under `probe`.
    """
    compression.check_compression(compress)
    roles = curvature.tensors()
    moments = roles.pop(_MOMENT)
    roles["prior_precision"] = {name: delta for name, delta in prior.items() if isinstance(delta, Tensor)}
    roles["probe"] = {} if weights else {name: compression.probe(mode[name]) for name in mode}
    outline = {f"{role}.{name}": tensor for role, named in roles.items() for name, tensor in named.items()}
    if weights:
        outline |= {f"{_MODE}.{name}": meta(tuple(t.shape), t.dtype) for name, t in outline_of(mode).items()}
    for name, v in outline_of(moments).items():
        parts = compression.outline(v.shape, v.dtype, compress)
        outline |= {f"{_MOMENT}{suffix}.{name}": part for suffix, part in parts.items()}

    def read(key: str) -> Tensor:
        role, _, name = key.partition(".")
        if role == _MODE:
            return mode[name]
        return compression.encode(moments[name], compress)[role.removeprefix(_MOMENT)]

    return Lazy(outline, read)


@dataclass(frozen=True, eq=False)
class Stored:
    """A saved posterior's tensors under `role.parameter`; without a model's `parameters` they stay on the disk."""

    path: AnyPath
    tensors: Named
    names: Sequence[str]
    parameters: Named | None

    def __post_init__(self) -> None:
        names = set(self.names)
        for key, tensor in outline_of(self.tensors).items():
            role, _, name = key.partition(".")
            if name in names and tensor.dtype not in _TYPES and (tensor.dtype, role) != (torch.uint8, _MOMENT):
                raise self.damaged(f"{key!r} is of type {tensor.dtype}")

    def damaged(self, why: str) -> FileError:
        """The error to raise."""
        return FileError(f"{self.path} is damaged: {why}")

    def device(self, name: str) -> torch.device | str:
        """Where the model has the parameter."""
        return "cpu" if self.parameters is None else self.parameters[name].device

    def tensor(self, role: str, name: str) -> Tensor:
        """One tensor as it was before it was saved, where it was saved."""
        if role in (_MOMENT, "rest"):
            return compression.moment(self.tensors, f"{role}.{name}", str(self.path))
        return compression.widened(f"{role}.{name}", self.tensors[f"{role}.{name}"])

    def outline(self, role: str, name: str) -> Tensor:
        """A weight or a second moment without its values; of codes and factors as it will be."""
        key, there = f"{role}.{name}", outline_of(self.tensors)
        shape = there[key].shape if role == _MODE else compression.moment_shape(there, key)
        keys = (f"{role}_range.{name}", f"{role}_rows.{name}", key)
        return meta(tuple(shape), working_dtype(next(there[k].dtype for k in keys if k in there)))

    def weights(self, role: str, names: Sequence[str]) -> Named:
        """Finite tensors of the parameters' shapes, in their places; none of them negative but in `mode`."""
        outline = {name: self.outline(role, name) for name in names}

        def read(name: str) -> Tensor:
            tensor = self.tensor(role, name)
            if not bool(torch.isfinite(tensor).all()):
                raise self.damaged(f"{name!r} has entries that are not finite")
            if role != _MODE and bool((tensor < 0).any()):
                raise self.damaged(f"the second moment of {name!r} has negative entries")
            return (tensor if self.parameters is None else placed_like(tensor, self.parameters[name])).to(
                outline[name].dtype
            )

        if self.parameters is None:
            return Lazy(outline, read)
        storage.check_owner(self.path, {name: like.shape for name, like in outline.items()}, self.parameters)
        return {name: read(name) for name in names}

    def mode(self, curvature: Diagonal, *, has_weights: bool) -> Named:
        """θ_t: the file's, the model's, or where there is neither zeros, each parameter's in the memory of one."""
        if has_weights:
            return self.weights(_MODE, self.names)
        if self.parameters is None:
            like = outline_of(curvature.second_moment)
            return {name: torch.zeros((), dtype=like[name].dtype).expand(like[name].shape) for name in self.names}
        parameters = {name: self.parameters[name].detach() for name in self.names}
        mode = {name: theta.to(working_dtype(theta.dtype), copy=True) for name, theta in parameters.items()}
        ours = {name: compression.probe(whole(theta)) for name, theta in mode.items()}
        theirs = {name: self.tensor("probe", name) for name in self.names}
        if any(theirs[name].shape != numbers.shape for name, numbers in ours.items()):
            raise self.damaged("its probes of the weights are not of their shapes")
        if not compression.same_weights(theirs, ours):
            raise MatchError(
                f"{self.path} has no weights of its own, and the model's are not those it belongs to: load the weights "
                "that were published with it into the model first"
            )
        return mode

    def curvature(self, kind: str, header: Mapping[str, Any]) -> Diagonal:
        """The curvature of that kind of posterior; of low-rank ones, which releases before 0.4 wrote, the diagonal."""
        if kind.startswith("low-rank"):
            warn(f"{self.path} holds a low-rank posterior, of which this release reads the diagonal")
            return Diagonal({name: self._low_rank_diagonal(name, kind) for name in self.names})
        if kind == "inputs":
            sides = {name: self._side(name, *how) for name, how in header["inputs"].items()}
            joined = {*sides, *(side.bias for side in sides.values())}
            moments = dict(self.weights(_MOMENT, [name for name in self.names if name not in joined]))
            for name, side in sides.items():
                moments[name] = torch.outer(self.tensors[f"rows.{name}"].to(side.spectrum), side.spectrum)
            return Diagonal(moments, {}, sides)
        moments_on_disk = self.weights(_MOMENT, self.names)
        rotated = [n for n in self.names if f"left.{n}" in self.tensors or f"right.{n}" in self.tensors]
        if self.parameters is None and rotated:
            return Diagonal(moments_on_disk, Lazy({n: meta((), torch.float32) for n in rotated}, self._rotation))
        return Diagonal(moments_on_disk, {name: self._rotation(name) for name in rotated})

    def _basis(self, side: str, name: str, size: int) -> Tensor:
        basis = self.tensor(side, name)
        if basis.shape != (size, size) or not is_orthonormal(basis):
            raise self.damaged(f"a basis of {name!r} is not orthogonal, or not of its shape")
        return basis

    def _rotation(self, name: str) -> Rotation:
        """The bases of one matrix or vector."""
        v = self.outline(_MOMENT, name)
        sizes = {"left": v.shape[0], "right": v.numel() // max(v.shape[0], 1)} if v.dim() > 1 else {"right": v.numel()}
        bases = {side: self._basis(side, name, n) for side, n in sizes.items() if f"{side}.{name}" in self.tensors}
        return Rotation(bases.get("left"), bases.get("right")).to(self.device(name), v.dtype)

    def _side(self, name: str, bias: str | None, inputs_first: bool) -> InputSide:
        """The input side of one layer."""
        like = outline_of(self.tensors)[f"{_MODE}.{name}"] if self.parameters is None else self.parameters[name]
        shape = like.shape
        spectrum, rows = self.tensors[f"spectrum.{name}"], self.tensors[f"rows.{name}"]
        outputs = shape[1] if inputs_first else shape[0]
        size = shape.numel() // max(outputs, 1) + (bias is not None)
        numbers = torch.cat([rows.flatten(), spectrum.flatten()])
        fits = rows.shape == (outputs,) and spectrum.shape == (size,)
        if not fits or not bool((torch.isfinite(numbers) & (numbers >= 0)).all()):
            raise self.damaged(f"{name!r} has curvature that is negative or not finite, or not of its shape")
        basis = self._basis("right", name, size).to(self.device(name))
        return InputSide(basis, spectrum.to(basis), shape, bias, inputs_first)

    def _low_rank_diagonal(self, name: str, kind: str) -> Tensor:
        """diag V = Σ_k s_k U_k² and, of `"low-rank+diagonal"`, the rest."""
        values, directions = self.tensor("eigenvalues", "directions"), self.tensor("directions", name)
        fits = values.dim() == 1 and len(directions) == len(values)
        if not fits or not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise self.damaged("its directions are not as many as its eigenvalues")
        v = torch.tensordot(values.to(directions), directions.square(), dims=1)
        v = v if kind == "low-rank" else v + self.tensor("rest", name).to(v)
        return v if self.parameters is None else placed_like(v, self.parameters[name])


def read_folder(path: AnyPath) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a folder, which releases before 0.4 wrote of a sharded posterior."""
    source = Path(path)
    try:
        text = (source / _HEADER_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FileError(f"{source} is a folder but not a saved posterior: {_HEADER_FILE}: {error}") from error
    header = storage.header_of(source, text)
    return {entry.key: read_stored(entry) for entry in stored_entries(source)}, header


def warn_of_calibration(path: AnyPath, *headers: Mapping[str, Any]) -> None:
    """Warn once of what releases before 0.4 kept of their calibration."""
    if any(header.get("calibration") is not None for header in headers):
        warn(f"{path} was calibrated by an earlier release, of which the settings alone are read: calibrate again")
