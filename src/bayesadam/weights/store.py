"""A Gaussian on disk: one safetensors file, or, of a sharded one, a folder of torch.distributed.checkpoint.

Tensors are under `role.parameter`; a header of plain JSON has the rest. The one pickle of a folder, torch's list of
contents, is read by `readers.formats.distributed`, which makes only plain records of it, before torch sees it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._shards import is_sharded, on_first_rank, placed_like, whole, wrapped
from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.errors import BayesAdamWarning, FileError, MatchError, MissingFileError
from bayesadam.readers import compression, working_dtype
from bayesadam.readers.formats.distributed import stored_entries
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.rotated import Rotation, is_orthonormal
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.named import AnyPath, Named, outlined
from bayesadam.weights.settings import Settings

if TYPE_CHECKING:
    from bayesadam.weights.gaussian import GaussianWeights

SETTING_NAMES = tuple(f.name for f in fields(Settings))
_FLAGS = ("covariant", "default_prior")
_MODE, _MOMENT = "mode", "second_moment"
_HEADER_FILE = f"{storage.POSTERIOR.header}.json"


def packed(q: GaussianWeights, *, weights: bool, compress: str | None) -> tuple[Named, dict[str, Any]]:
    """What a file holds: tensors under `role.parameter`, those on disk read when they are accessed, and the header.

    A file without weights has a few numbers of each parameter instead, under `probe`, and like a compressed one it is
    of the later format, which older releases refuse.
    """
    compression.check_compression(compress)
    mode, settings, roles, sides = q.mode, q.settings, q.curvature.tensors(), q.curvature.inputs
    moments, deltas = roles.pop(_MOMENT), settings.prior_precision
    roles["prior_precision"] = {name: delta for name, delta in deltas.items() if isinstance(delta, Tensor)}
    roles["probe"] = {} if weights else {name: compression.probe(mode[name]) for name in mode}
    outline = {f"{role}.{name}": tensor for role, named in roles.items() for name, tensor in named.items()}
    if weights:
        outline |= {f"{_MODE}.{name}": meta(tuple(t.shape), t.dtype) for name, t in outlined(mode).items()}
    for name, v in outlined(moments).items():
        parts = compression.outline(v.shape, v.dtype, compress)
        outline |= {f"{_MOMENT}{suffix}.{name}": part for suffix, part in parts.items()}

    def read(key: str) -> Tensor:
        role, _, name = key.partition(".")
        if role == _MODE:
            return mode[name]
        return compression.encode(moments[name], compress)[role.removeprefix(_MOMENT)]

    numbers = {name: delta for name, delta in deltas.items() if not isinstance(delta, Tensor)}
    plain = {key: value for key, value in vars(settings).items() if value or key not in _FLAGS}
    header = {
        "format": storage.FORMAT_VERSION if weights and compress is None else storage.COMPACT_VERSION,
        "version": __version__,
        "structure": q.structure,
        "inputs": {name: [side.bias, side.inputs_first] for name, side in sides.items()} or None,
        "parameters": list(mode),
        "settings": {**plain, "prior_precision": numbers},
        **q.origin.header(),
        "omitted": dict(q.omitted),
        "has_weights": weights,
        "compress": compress,
    }
    return Lazy(outline, read), header


@dataclass(frozen=True, eq=False)
class Stored:
    """A saved posterior's tensors under `role.parameter`; without a model's `parameters` they stay on the disk.

    A tensor that the file lacks is a KeyError.
    """

    path: AnyPath
    tensors: Named
    names: Sequence[str]
    parameters: Named | None

    def damaged(self, why: str) -> FileError:
        """The error to raise."""
        return FileError(f"{self.path} is damaged: {why}")

    def tensor(self, role: str, name: str) -> Tensor:
        """One tensor as it was before it was saved, where it was saved."""
        if role in (_MOMENT, "rest"):
            return compression.moment(self.tensors, f"{role}.{name}", str(self.path))
        return compression.widened(f"{role}.{name}", self.tensors[f"{role}.{name}"])

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        """Where the model has the parameter."""
        return tensor if self.parameters is None else placed_like(tensor, self.parameters[name])

    def outline(self, role: str, name: str) -> Tensor:
        """A weight or a second moment without its values; of codes and factors as it will be."""
        key = f"{role}.{name}"
        shape = self.tensors[key].shape if role == _MODE else compression.moment_shape(self.tensors, key)
        keys = (f"{role}_range.{name}", f"{role}_rows.{name}", key)
        return meta(tuple(shape), working_dtype(next(self.tensors[k].dtype for k in keys if k in self.tensors)))

    def weights(self, role: str, names: Sequence[str]) -> Named:
        """Finite tensors of the parameters' shapes, in their places; none of them negative but in `mode`."""
        outline = {name: self.outline(role, name) for name in names}

        def read(name: str) -> Tensor:
            tensor = self.tensor(role, name)
            if not bool(torch.isfinite(tensor).all()):
                raise self.damaged(f"{name!r} has entries that are not finite")
            if role != _MODE and bool((tensor < 0).any()):
                raise self.damaged(f"the second moment of {name!r} has negative entries")
            return self.placed(name, tensor).to(outline[name].dtype)

        if self.parameters is None:
            return Lazy(outline, read)
        storage.check_owner(self.path, {name: like.shape for name, like in outline.items()}, self.parameters)
        return {name: read(name) for name in names}

    def mode(self, structure: Diagonal, *, has_weights: bool) -> Named:
        """θ_t: the file's, the model's, or where there is neither zeros, each parameter's in the memory of one."""
        if has_weights:
            return self.weights(_MODE, self.names)
        if self.parameters is not None:
            return self._of_model(self.parameters)
        like = outlined(structure.second_moment)
        return {name: torch.zeros((), dtype=like[name].dtype).expand(like[name].shape) for name in self.names}

    def _of_model(self, parameters: Named) -> dict[str, Tensor]:
        """θ_t of a file without weights: the model's, within a tenth of the file's probes in the mean square."""
        kinds = {name: working_dtype(parameters[name].dtype) for name in self.names}
        mode = {name: parameters[name].detach().to(kind, copy=True) for name, kind in kinds.items()}
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

    def structure(self, kind: str, header: Mapping[str, Any]) -> Diagonal:
        """The structure of that kind; of low-rank ones, which releases before 0.4 wrote, the diagonal."""
        if kind.startswith("low-rank"):
            warn(f"{self.path} holds a low-rank posterior, of which this release reads the diagonal", BayesAdamWarning)
            return Diagonal({name: self._low_rank_diagonal(name, kind) for name in self.names})
        if kind == "inputs":
            sides = {name: self._side(name, *how) for name, how in header["inputs"].items()}
            joined = {*sides, *(side.bias for side in sides.values())}
            rows = {name: self.tensors[f"rows.{name}"].to(side.spectrum) for name, side in sides.items()}
            moments = dict(self.weights(_MOMENT, [name for name in self.names if name not in joined]))
            return Diagonal(moments | {n: torch.outer(g, sides[n].spectrum) for n, g in rows.items()}, {}, sides)
        moments_on_disk = self.weights(_MOMENT, self.names)
        rotated = [n for n in self.names if f"left.{n}" in self.tensors or f"right.{n}" in self.tensors]
        if self.parameters is None and rotated:
            return Diagonal(moments_on_disk, Lazy({n: meta((), torch.float32) for n in rotated}, self._rotation))
        return Diagonal(moments_on_disk, {name: self._rotation(name) for name in rotated})

    def _rotation(self, name: str) -> Rotation:
        """The bases of one matrix or vector."""
        v = self.outline(_MOMENT, name)
        lengths = [v.shape[0], v.numel() // max(v.shape[0], 1)] if v.dim() > 1 else [0, v.numel()]
        sides = [self.tensor(side, name) if f"{side}.{name}" in self.tensors else None for side in ("left", "right")]
        for basis, length in zip(sides, lengths, strict=True):
            if basis is not None and not (basis.shape == (length, length) and is_orthonormal(basis)):
                raise self.damaged(f"a basis of {name!r} is not orthogonal, or not of its shape")
        return Rotation(*sides).to("cpu" if self.parameters is None else self.parameters[name].device, v.dtype)

    def _side(self, name: str, bias: str | None, inputs_first: bool) -> InputSide:
        """The input side of one layer."""
        like = self.tensors[f"{_MODE}.{name}"] if self.parameters is None else self.parameters[name]
        basis, spectrum, rows = (self.tensors[f"{role}.{name}"] for role in ("right", "spectrum", "rows"))
        outputs = like.shape[1] if inputs_first else like.shape[0]
        size = like.numel() // max(outputs, 1) + (bias is not None)
        if basis.shape != (size, size) or spectrum.shape != (size,) or not is_orthonormal(basis):
            raise self.damaged(f"the inputs of {name!r} have a basis that is not orthogonal, or not of their number")
        if rows.shape != (outputs,) or not bool((torch.isfinite(rows) & (rows >= 0)).all() & (spectrum >= 0).all()):
            raise self.damaged(f"{name!r} has curvature that is negative or not finite, or not one for each output")
        side = InputSide(basis, spectrum, torch.Size(like.shape), bias, inputs_first)
        return side.each(lambda t: t.to("cpu" if self.parameters is None else like.device))

    def _low_rank_diagonal(self, name: str, kind: str) -> Tensor:
        """diag V = Σ_k s_k U_k² and, of `"low-rank+diagonal"`, the rest."""
        values, directions = self.tensor("eigenvalues", "directions"), self.tensor("directions", name)
        fits = values.dim() == 1 and len(directions) == len(values)
        if not fits or not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise self.damaged("its directions are not as many as its eigenvalues")
        v = torch.tensordot(values.to(directions), directions.square(), dims=1)
        return self.placed(name, v if kind == "low-rank" else v + self.tensor("rest", name).to(v))


def write_folder(target: Path, tensors: Named, header: Mapping[str, Any]) -> None:
    """Write sharded tensors, from all processes together; an older folder is replaced once the new one is complete."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    unfinished = target.with_name(f".{target.name}.unfinished")

    def prepare() -> None:
        if not target.parent.is_dir():
            raise MissingFileError(f"cannot save to {target}: the folder {target.parent} does not exist")
        if target.exists() and not (target / _HEADER_FILE).is_file():
            raise FileError(f"cannot save to {target}: it exists and is not the folder of a saved posterior")
        shutil.rmtree(unfinished, ignore_errors=True)

    def finish() -> None:
        (unfinished / _HEADER_FILE).write_text(json.dumps(dict(header)), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)

    on_first_rank(prepare)
    try:
        save(dict(tensors), checkpoint_id=str(unfinished))
        on_first_rank(finish)
    except (CheckpointException, OSError) as failure:
        raise FileError(f"cannot save to {target}: {failure}") from failure


def read_folder(path: AnyPath, parameters: Named) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A folder's tensors, placed as the parameters they are named after, and the header; all processes must call it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    source = Path(path)
    try:
        header = json.loads((source / _HEADER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{source} is a folder but not a saved posterior: {_HEADER_FILE}: {error}") from error
    header = header if isinstance(header, dict) else {}
    storage.check_version(source, header.get("format"))
    tensors: dict[str, Tensor] = {}
    for entry in stored_entries(source):
        if entry.shape is None:
            raise FileError(f"{source} is damaged: {entry.key!r} is not a tensor")
        name = entry.key.partition(".")[2]
        storage.check_owner(source, {name: torch.Size(entry.shape)}, parameters)
        like = parameters[name]
        part = torch.empty_like(like.to_local() if is_sharded(like) else like, dtype=entry.dtype, requires_grad=False)
        tensors[entry.key] = wrapped(part, like) if is_sharded(like) else part
    try:
        with warnings.catch_warnings():
            # That one process reads alone is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, checkpoint_id=str(source))
    except CheckpointException as failure:
        raise FileError(f"{source} cannot be read: {failure}") from failure
    return tensors, header
