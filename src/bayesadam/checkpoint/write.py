"""A checkpoint with some of its weights set to zero, and otherwise as it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.checkpoint.checkpoint import Checkpoint
from bayesadam.checkpoint.formats import format_of, save_safetensors
from bayesadam.checkpoint.names import memory_of
from bayesadam.errors import FileError, MatchError


def write_pruned(checkpoint: Checkpoint, masks: Mapping[str, Tensor], out: str | os.PathLike[str]) -> None:
    """Write the file again with the masked weights at zero: same keys, same order, all else untouched.

    To a path that ends in `.safetensors` the weights alone are written, under their clean names.

    Args:
        checkpoint: what `read_checkpoint` returned; its file is read again, and may be the one written to.
        masks: by parameter name, True where a weight stays; a tied tensor is pruned under all its names.
        out: the file to write.
    """
    out = Path(out)
    pruned = _pruned(checkpoint.weights, masks)
    known = format_of(checkpoint.path)
    if out.suffix == ".safetensors" and known.name != "safetensors":
        with replacing(out) as temporary:
            save_safetensors({**checkpoint.weights, **pruned}, temporary)
        return
    if known.name == "safetensors" and out.suffix != ".safetensors":
        raise FileError(f"{checkpoint.path} is a safetensors file: give {out} that ending, too")
    if known.rewrite is None:
        raise FileError(
            f"{checkpoint.path}: format {known.name!r} cannot be written; choose a path that ends in .safetensors"
        )
    with replacing(out) as temporary:
        by_key = {checkpoint.stored_names[name]: tensor for name, tensor in pruned.items()}
        known.rewrite(checkpoint.path, checkpoint.weights_at, by_key, temporary)


def _pruned(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    unknown = sorted(masks.keys() - weights.keys())
    if unknown:
        raise MatchError(f"the checkpoint has no weights {unknown[:4]} to prune; it has {list(weights)[:4]}, …")
    kept: dict[tuple[Any, ...], Tensor] = {}
    for name, mask in masks.items():
        if mask.dtype != torch.bool or mask.shape != weights[name].shape:
            raise MatchError(
                f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}: it must be torch.bool of shape "
                f"{tuple(weights[name].shape)}, True where a weight stays"
            )
        memory = memory_of(weights[name])
        kept[memory] = kept[memory] & mask.cpu() if memory in kept else mask.cpu()
    owners = {memory_of(weight): weight.detach() for weight in weights.values()}
    zeroed = {memory: owners[memory].masked_fill(~mask, 0) for memory, mask in kept.items()}
    # One tensor for all the names of a tied one, so that it is tied in the new file.
    return {name: zeroed[memory_of(weight)] for name, weight in weights.items() if memory_of(weight) in zeroed}
