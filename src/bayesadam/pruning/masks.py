"""Which weights remain: masks by parameter name, True where one does; on disk a bit for each weight."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from bayesadam import _storage as storage
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.posterior.running import norm_widths
from bayesadam.pruning.names import held_by_statistics, matching, owners
from bayesadam.pruning.rankings import Ranking, weight_scores
from bayesadam.pruning.select import best_of_groups, lowest

Scope = Literal["global", "layer"]


def pruning_masks(
    posterior: Posterior,
    fraction: float | None = None,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: str | Sequence[str] = (),
    pattern: str | None = None,
) -> dict[str, Tensor]:
    """Boolean masks, True where a weight is kept, for every parameter of the posterior and on the parameter's device.

    Of the n weights that are not excluded exactly round(fraction × n) are removed, lowest score first; equal scores by
    |θ|, then by position. The model is not touched: see `prune`.

    Args:
        posterior: over the weights; what it does not hold is never pruned.
        fraction: the share of weights to remove, 0 to 1; None with a pattern.
        ranking: `"snr"`, |θ| N^½ v̂^¼ as in the paper; `"snr-posterior"`, with the prior; `"magnitude"`; `"saliency"`,
            ½ θ² v̂; a function `ranking(theta, v) -> scores`; or ready scores by parameter name.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: parameters to leave whole, by name, by pattern (`"*.bias"`) or by kind: `"norms"`, `"biases"`,
            `"embeddings"`. Biases that a batch norm follows are left whole too, with a warning.
        pattern: `"N:M"` keeps the N best of every M consecutive weights along the input dimension: the features of a
            linear layer, the channels of a convolution at each place of its kernel (as TensorRT and cuSPARSELt read
            2:4). Parameters with one dimension, biases and norms, are left whole.
    """
    require_posterior(posterior, "pruning")
    excluded = matching(posterior.model, exclude)
    eligible = [name for name in posterior.mode if name not in excluded]
    if posterior.structure.independent and not isinstance(ranking, Mapping):
        widths = norm_widths(dict(posterior.model.named_buffers())).values()
        held = held_by_statistics(eligible, posterior.structure.second_moment.__getitem__, widths)
        eligible = [name for name in eligible if name not in held]
    competing = compete(eligible, scope)
    if pattern is not None:
        if fraction is not None:
            raise SettingError(f"pattern {pattern!r} implies the fraction: leave fraction={fraction!r} out")
        remaining = _pattern_masks(posterior, _parsed(pattern), ranking, eligible)
    else:
        share = checked_fraction(fraction)
        scores, remaining = weight_scores(posterior, ranking, eligible), {}
        for names in competing:
            weights = [posterior.mode[name] for name in names]
            count = round(share * sum(theta.numel() for theta in weights))
            removed = lowest([scores[name] for name in names], weights, count)
            remaining |= {name: mask.logical_not_() for name, mask in zip(names, removed, strict=True)}
    whole = nothing_removed(posterior)
    return whole | {name: mask.to(whole[name].device) for name, mask in remaining.items()}


def nothing_removed(posterior: Posterior) -> dict[str, Tensor]:
    """Masks that remove nothing, on the parameters' devices."""
    devices = {name: parameter.device for name, parameter in posterior.parameters().items()}
    return {n: torch.ones(t.shape, dtype=torch.bool, device=devices[n]) for n, t in posterior.mode.items()}


def checked_fraction(fraction: object) -> float:
    """A share between 0 and 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
        raise SettingError(f"fraction must be a number from 0 to 1, the share of weights to remove, got {fraction!r}")
    return float(fraction)


def compete(names: Iterable[str], scope: Scope) -> list[list[str]]:
    """The names in groups whose weights compete: all of them, or each alone; another scope is refused."""
    if scope not in get_args(Scope):
        raise SettingError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r}")
    return [list(names)] if scope == "global" else [[name] for name in names]


def _parsed(pattern: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    keep, size = map(int, found.groups()) if found else (0, 0)
    if not 0 < keep <= size:
        raise SettingError(f"pattern must be 'N:M' with 0 < N ≤ M, such as '2:4', got {pattern!r}")
    return keep, size


def _pattern_masks(
    posterior: Posterior, pattern: tuple[int, int], ranking: Ranking, names: Sequence[str]
) -> dict[str, Tensor]:
    keep, size = pattern
    held = owners(posterior.model)
    dims = {}
    for name in names:
        shape = posterior.mode[name].shape
        if len(shape) > 1:
            dims[name] = 0 if isinstance(held[name][0].module, _ConvTransposeNd) else 1
            if shape[dims[name]] % size:
                raise SettingError(
                    f"{name!r} has shape {tuple(shape)}: its {shape[dims[name]]} inputs are not a multiple of {size}, as "
                    f"the pattern {keep}:{size} needs. Leave it whole with exclude=({name!r},)"
                )
    masks = {}
    for name, dim in dims.items():
        score = weight_scores(posterior, ranking, [name])[name].movedim(dim, -1)
        theta = posterior.mode[name].movedim(dim, -1)
        groups = best_of_groups(score.reshape(-1, size), theta.reshape(-1, size), keep)
        masks[name] = groups.view(theta.shape).movedim(-1, dim).contiguous()
    return masks


def save_masks(path: str | os.PathLike[str], masks: Mapping[str, Tensor]) -> None:
    """Write masks as packed bits by parameter name, in place of an older file only once it is complete."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise MatchError(f"mask {name!r} must be boolean, True where a weight stays, not {mask.dtype}")
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    storage.write(path, packed, {"shapes": shapes}, storage.MASKS)


def load_masks(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The masks that `save_masks` wrote, on the CPU; whatever takes masks moves them."""
    packed, header = storage.read(path, storage.MASKS)
    try:
        return {name: _unpacked(packed[name], shape) for name, shape in header["shapes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is damaged: its masks cannot be read ({error})") from error


def _unpacked(bits: Tensor, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    if bits.numel() != (size + 7) // 8:
        raise ValueError(f"{bits.numel()} bytes for a mask of shape {tuple(shape)}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(shape)
