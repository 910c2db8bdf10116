"""A Gaussian on disk: one safetensors file, or, of a sharded one, a folder of torch.distributed.checkpoint.

Tensors are under `role.parameter`; a header of plain JSON has the rest. The one pickle of a folder, torch's list of
contents, is read by `readers.formats.distributed`, which makes only plain records of it, before torch sees it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._shards import is_sharded, on_first_rank, whole, wrapped
from bayesadam._version import __version__
from bayesadam.errors import FileError, MatchError, MissingFileError
from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import AnyPath, Named, Stored, outlined
from bayesadam.readers import compression, working_dtype
from bayesadam.readers.formats.distributed import stored_entries
from bayesadam.readers.formats.lazy import Lazy, meta

if TYPE_CHECKING:
    from bayesadam.gaussian.weights import GaussianWeights

SETTING_NAMES = tuple(f.name for f in fields(Settings))
_FLAGS = ("covariant", "default_prior")
_MOMENTS = ("second_moment", "rest")
_HEADER_FILE = f"{storage.POSTERIOR.header}.json"


def packed(q: GaussianWeights, *, weights: bool, compress: str | None) -> tuple[Named, dict[str, Any]]:
    """What a file holds: tensors under `role.parameter`, those on disk read when they are accessed, and the header.

    A file without weights has a few numbers of each parameter instead, under `probe`, and like a compressed one it is
    of the later format, which older releases refuse.
    """
    compression.check_compression(compress)
    mode, settings, roles, sides = q.mode, q.settings, q.structure.tensors(), q.structure.inputs
    lazy = {role: roles.pop(role) for role in _MOMENTS if role in roles}
    held = {} if weights else {f"probe.{name}": compression.probe(mode[name]) for name in mode}
    held |= {f"{role}.{name}": tensor for role, named in roles.items() for name, tensor in named.items()}
    deltas = settings.prior_precision
    held |= {f"prior_precision.{name}": delta for name, delta in deltas.items() if isinstance(delta, Tensor)}
    like: dict[str, Tensor] = dict(held)
    if weights:
        like |= {f"mode.{name}": meta(tuple(t.shape), t.dtype) for name, t in outlined(mode).items()}
    for role, named in lazy.items():
        for name, v in outlined(named).items():
            like |= {f"{role}{end}.{name}": t for end, t in compression.outline(v.shape, v.dtype, compress).items()}

    def read(key: str) -> Tensor:
        role, _, name = key.partition(".")
        if role == "mode":
            return mode[name]
        own = next(each for each in lazy if role.startswith(each))
        return compression.encode(lazy[own][name], compress)[role.removeprefix(own)]

    numbers = {name: delta for name, delta in deltas.items() if not isinstance(delta, Tensor)}
    others = {key: getattr(settings, key) for key in SETTING_NAMES if key != "prior_precision"}
    others = {key: value for key, value in others.items() if value or key not in _FLAGS}
    header = {
        "format": storage.FORMAT_VERSION if weights and compress is None else storage.COMPACT_VERSION,
        "version": __version__,
        "structure": q.structure.kind,
        **({"inputs": {n: [side.bias, side.inputs_first] for n, side in sides.items()}} if sides else {}),
        "parameters": list(mode),
        "settings": {**others, "prior_precision": numbers},
        **q.origin.header(),
        "omitted": dict(q.omitted),
        **({} if weights else {"has_weights": False}),
        **({} if compress is None else {"compress": compress}),
    }
    return Lazy(like, read), header


def decoded(tensors: Named, source: str) -> Named:
    """A file's tensors as they were before `packed`; second moments are decoded when they are accessed."""
    keys: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        role, _, name = key.partition(".")
        own = next((each for each in _MOMENTS if role.startswith(each)), None)
        if own is None:
            keys[key] = meta(tuple(tensor.shape), torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype)
        elif f"{own}.{name}" not in keys:
            shape = compression.moment_shape(tensors, f"{own}.{name}")
            kind = tensor.dtype if role == own and tensor.is_floating_point() else torch.float32
            ends = tensors.get(f"{own}_range.{name}", tensors.get(f"{own}_rows.{name}"))
            keys[f"{own}.{name}"] = meta(tuple(shape), kind if ends is None else ends.dtype)

    def read(key: str) -> Tensor:
        if key.partition(".")[0] in _MOMENTS:
            return compression.moment(tensors, key, source)
        return compression.widened(key, tensors[key])

    return Lazy(keys, read)


def weights_of_model(stored: Stored) -> dict[str, Tensor]:
    """θ_t of a file without weights: the model's, within a tenth of the file's probes in the mean square."""
    assert stored.parameters is not None
    named = {name: stored.parameters[name].detach() for name in stored.names}
    mode = {name: theta.to(working_dtype(theta.dtype), copy=True) for name, theta in named.items()}
    found = {name: compression.probe(whole(theta)) for name, theta in mode.items()}
    known = {name: stored.tensors[f"probe.{name}"] for name in stored.names}
    if any(known[name].shape != numbers.shape for name, numbers in found.items()):
        raise stored.damaged("its probes of the weights are not of their shapes")
    if not compression.same_weights(known, found):
        raise MatchError(
            f"{stored.path} has no weights of its own, and the model's are not those it belongs to: load the weights "
            "that were published with it into the model first"
        )
    return mode


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
        own = torch.empty_like(like.to_local() if is_sharded(like) else like, dtype=entry.dtype, requires_grad=False)
        tensors[entry.key] = wrapped(own, like) if is_sharded(like) else own
    try:
        with warnings.catch_warnings():
            # That one process reads alone is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, checkpoint_id=str(source))
    except CheckpointException as failure:
        raise FileError(f"{source} cannot be read: {failure}") from failure
    return tensors, header
