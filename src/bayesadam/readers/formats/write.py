"""A checkpoint with some of its weights set to zero, and otherwise as it was."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam._storage import write_tensors
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.checkpoint import Checkpoint
from bayesadam.readers.formats.registry import format_of
from bayesadam.readers.pairing import identities


def write_pruned(checkpoint: Checkpoint, masks: Mapping[str, Tensor], out: str | os.PathLike[str]) -> None:
    """Write the file again with the masked weights at zero: same keys, same order, all else untouched.

    To a path that ends in `.safetensors` the weights alone are written, under their clean names and one by one: neither
    they nor masks that are made when asked for need fit into memory together.

    Masks are True where a weight stays; a tied tensor is pruned under all its names. The checkpoint's file is read again,
    and may be the one written to.
    """
    out = Path(out)
    weights = checkpoint.weights
    masks_of = _masks_of(weights, masks)

    def pruned(name: str) -> Tensor:
        return _pruned(weights[name].detach(), {masked: masks[masked] for masked in masks_of.get(name, ())})

    known = format_of(checkpoint.path)
    if out.suffix == ".safetensors" and known.name != "safetensors":
        with replacing(out) as temporary:
            write_tensors(temporary, weights, pruned)
        return
    if known.name == "safetensors" and out.suffix != ".safetensors":
        raise FileError(f"{checkpoint.path} is a safetensors file: give {out} that ending, too")
    if known.rewrite is None:
        raise FileError(
            f"{checkpoint.path}: format {known.name!r} cannot be written; choose a path that ends in .safetensors"
        )
    stored = {checkpoint.keys_to(name): name for name in masks_of}
    with replacing(out) as temporary:
        known.rewrite(checkpoint.path, stored.keys(), lambda keys: pruned(stored[keys]), temporary)


def _masks_of(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The masks of each weight that has any; a tied one has those of all its names."""
    unknown = sorted(masks.keys() - weights.keys())
    if unknown:
        raise MatchError(f"the checkpoint has no weights {unknown[:4]} to prune; it has {list(weights)[:4]}, …")
    memory = identities(weights)
    sharing: dict[tuple[Any, ...], list[str]] = {}
    for name in masks:
        sharing.setdefault(memory[name], []).append(name)
    return {name: sharing[memory[name]] for name in weights if memory[name] in sharing}


def _pruned(weight: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    for name, mask in masks.items():
        if mask.dtype != torch.bool or mask.shape != weight.shape:
            raise MatchError(
                f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}: it must be torch.bool of "
                f"shape {tuple(weight.shape)}, True where a weight stays"
            )
        weight = weight.masked_fill(~mask.cpu(), 0)
    return weight
