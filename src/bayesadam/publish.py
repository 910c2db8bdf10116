"""The curvature of a saved network as a small file to publish beside its weights: no model, no data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam.errors import FileError, SettingError
from bayesadam.gaussian.kronecker import kronecker_of
from bayesadam.gaussian.settings import Settings, prior_or_decay
from bayesadam.posterior.header import header_of, weight_roles
from bayesadam.readers import (
    CheckpointKeywords,
    CheckpointOptions,
    Lazy,
    Match,
    check_entries,
    match_checkpoint,
    origin_of,
    read_checkpoint,
    read_entry,
    warn_of_memory,
    working_dtype,
)
from bayesadam.readers.compression import check_compression, compressed, encode, outline, probe

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROLE = "second_moment"


def export_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    n_data: float | None = None,
    *,
    batch_size: int | None = None,
    compress: str | None = None,
    structure: str = "diagonal",
    **options: Unpack[CheckpointKeywords],
) -> None:
    """Write the posterior of a checkpoint without its weights, tensor by tensor, to a safetensors file.

    `Posterior.load` reads it with a model that has the weights; `read_checkpoint(weights, optimizer_path=out)`, and all that
    reads checkpoints, takes it for the optimiser's state. v̂ is in it with the bias divided out, and N, B, the optimiser's name,
    its steps and, as the prior N λ, its weight decay.

    Args:
        path: what the trainer saved, see `read_checkpoint`.
        out: the file to write, with the ending `.safetensors`.
        n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
        batch_size: B, examples behind one gradient; readers who want power=1, and merging, need it.
        compress: None, float32; `"8bit"`, a quarter of the bytes; `"factored"`, next to none and much coarser: see
            `bayesadam.readers.compression.encode`.
        structure: `"diagonal"`; `"kronecker"` for a SOAP's state, with its bases, which is all read before it is written.
        **options: how the file is read, see `CheckpointOptions`.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise FileError(f"{out}: a posterior is written as safetensors: end the path in .safetensors")
    check_compression(compress)
    if structure not in ("diagonal", "kronecker"):
        raise SettingError(
            f"structure must be 'diagonal' or 'kronecker', got {structure!r}: a checkpoint holds no recorded gradients"
        )
    reading = CheckpointOptions(**options)
    checkpoint = read_checkpoint(path, reading)
    settings = Settings(checkpoint.n_data_or(n_data), {}, batch_size=checkpoint.batch_size_or(batch_size))
    match = match_checkpoint(checkpoint, options=reading)
    check_entries(match)
    origin = origin_of(match)
    shapes = {entry.name: entry.parameter.shape for entry in match.entries}
    decays = {entry.name: entry.weight_decay for entry in match.entries}
    settings = replace(settings, prior_precision=prior_or_decay(None, decays, settings.n_data, shapes))
    named = header_of(structure, settings, origin, list(shapes), weights=False, compress=compress)
    tensors = _kronecker(match, compress) if structure == "kronecker" else _diagonal(match, compress)
    header = {**named, "omitted": dict(match.omitted)}
    storage.write(out, getattr(tensors, "outline", tensors), header, load=tensors.__getitem__)
    warn_of_memory(origin, Path(path).name)


def _diagonal(match: Match, compress: str | None) -> Mapping[str, Tensor]:
    """The tensors of the file, each made when it is asked for."""
    entries = {entry.name: entry for entry in match.entries}
    like: dict[str, Tensor] = {}
    for name, entry in entries.items():
        parts = outline(entry.parameter.shape, working_dtype(entry.parameter.dtype), compress)
        like |= {f"{_ROLE}{end}.{name}": part for end, part in parts.items()}
        like[f"probe.{name}"] = probe(entry.parameter)

    def read(key: str) -> Tensor:
        role, _, name = key.partition(".")
        with torch.no_grad():
            return encode(read_entry(entries[name])[1], compress)[role.removeprefix(_ROLE)]

    return Lazy(like, read)


def _kronecker(match: Match, compress: str | None) -> dict[str, Tensor]:
    weights = {entry.name: entry.parameter for entry in match.entries}
    return compressed({**weight_roles(weights, False), **kronecker_of(match).tensors()}, compress)
