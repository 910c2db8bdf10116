"""A checkpoint with some of its weights set to zero, and otherwise as it was."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.checkpoint.checkpoint import Checkpoint
from bayesadam.checkpoint.lazy import Lazy, meta
from bayesadam.checkpoint.names import memory_of
from bayesadam.checkpoint.registry import format_of
from bayesadam.checkpoint.safetensors_file import save_safetensors
from bayesadam.errors import FileError, MatchError


def write_pruned(checkpoint: Checkpoint, masks: Mapping[str, Tensor], out: str | os.PathLike[str]) -> None:
    """Write the file again with the masked weights at zero: same keys, same order, all else untouched.

    To a path that ends in `.safetensors` the weights alone are written, under their clean names and one by one: neither
    they nor masks that are made when asked for need fit into memory together.

    Args:
        checkpoint: what `read_checkpoint` returned; its file is read again, and may be the one written to.
        masks: by parameter name, True where a weight stays; a tied tensor is pruned under all its names.
        out: the file to write.
    """
    out = Path(out)
    pruned = _Pruned.of(checkpoint.weights, masks)
    known = format_of(checkpoint.path)
    if out.suffix == ".safetensors" and known.name != "safetensors":
        with replacing(out) as temporary:
            save_safetensors(checkpoint.weights, pruned.weight, temporary)
        return
    if known.name == "safetensors" and out.suffix != ".safetensors":
        raise FileError(f"{checkpoint.path} is a safetensors file: give {out} that ending, too")
    if known.rewrite is None:
        raise FileError(
            f"{checkpoint.path}: format {known.name!r} cannot be written; choose a path that ends in .safetensors"
        )
    stored = {checkpoint.stored_names[name]: name for name in pruned.masks_of}
    outline = {
        key: meta(checkpoint.weights[name].shape, checkpoint.weights[name].dtype) for key, name in stored.items()
    }
    with replacing(out) as temporary:
        weights = Lazy(outline, lambda key: pruned.weight(stored[key]))
        known.rewrite(checkpoint.path, checkpoint.weights_at, weights, temporary)


@dataclass(frozen=True, eq=False)
class _Pruned:
    """Weights with the masked ones at zero, worked out when they are asked for.

    Attributes:
        weights: all of them.
        masks: of some.
        masks_of: the masks that concern a weight; a tied one has those of all its names.
    """

    weights: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    masks_of: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> _Pruned:
        unknown = sorted(masks.keys() - weights.keys())
        if unknown:
            raise MatchError(f"the checkpoint has no weights {unknown[:4]} to prune; it has {list(weights)[:4]}, …")
        memory = {name: memory_of(weight) for name, weight in weights.items()}
        sharing: dict[tuple[Any, ...], list[str]] = {}
        for name in masks:
            sharing.setdefault(memory[name], []).append(name)
        return cls(weights, masks, {name: sharing[memory[name]] for name in weights if memory[name] in sharing})

    def weight(self, name: str) -> Tensor:
        weight = self.weights[name].detach()
        if name not in self.masks_of:
            return weight
        kept = torch.ones((), dtype=torch.bool)
        for masked in self.masks_of[name]:
            mask = self.masks[masked]
            if mask.dtype != torch.bool or mask.shape != weight.shape:
                raise MatchError(
                    f"the mask of {masked!r} is {mask.dtype} of shape {tuple(mask.shape)}: it must be torch.bool of "
                    f"shape {tuple(weight.shape)}, True where a weight stays"
                )
            kept = kept & mask.cpu()
        return weight.masked_fill(~kept, 0)
