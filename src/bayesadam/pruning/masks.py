"""Which weights remain: masks by parameter name, True where one does; on disk a bit for each weight."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from bayesadam import _storage as storage
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.settings import Settings
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.posterior.running import biases_before_norms, norm_widths
from bayesadam.pruning.apply import Owner, owners
from bayesadam.pruning.rankings import RANKINGS, Ranking, best_of_groups, lowest, near, weight_scores
from bayesadam.pruning.report import PrunedParameter, PruningReport
from bayesadam.readers.formats import (
    CheckpointKeywords,
    CheckpointOptions,
    match_checkpoint,
    read_checkpoint,
    write_pruned,
)
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.read import check_entries, read_entry, working_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scope = Literal["global", "layer"]
# Kinds of parameters to exclude, by the names of their modules' classes.
_CLASSES = {"norms": r"Norm(\d*d)?$", "embeddings": r"Embedding(s|Bag)?$"}


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
        posterior: over the weights; parameters that it does not hold are never pruned.
        fraction: the share of weights to remove, 0 to 1; None with a pattern.
        ranking: `"snr"`, |θ| N^½ v̂^¼ as in the paper; `"snr-posterior"`, with the prior; `"magnitude"`; `"saliency"`,
            ½ θ² v̂; a function `ranking(theta, v) -> scores`; or ready scores by parameter name.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: parameters to leave whole, by name, by pattern (`"*.bias"`) or by kind: `"norms"`, `"biases"`,
            `"embeddings"`. Biases that a batch norm follows are left whole too, with a warning.
        pattern: `"N:M"` keeps the N best of every M consecutive weights along the input dimension: the features of a
            linear layer, the channels of a convolution at each position of its kernel (as TensorRT and cuSPARSELt read
            2:4). Parameters with one dimension, biases and norms, are left whole.
    """
    require_posterior(posterior, "pruning")
    buffers = dict(posterior.model.named_buffers())
    eligible = _eligible(posterior, ranking, exclude, buffers)
    if pattern is not None:
        if fraction is not None:
            raise SettingError(f"pattern {pattern!r} implies the fraction: leave fraction={fraction!r} out")
        kept = _pattern_masks(posterior, pattern, ranking, eligible)
    else:
        scores = weight_scores(posterior, ranking, eligible)
        removed = _removed(scores, posterior.mode, eligible, scope, fraction)
        kept = {name: ~chosen(name) for name, chosen in removed.items()}
    whole = nothing_removed(posterior)
    return whole | {name: mask.to(whole[name].device) for name, mask in kept.items()}


def tuning_masks(posterior: Posterior, share: float, *, exclude: str | Sequence[str] = ()) -> dict[str, Tensor]:
    """Masks, True at the share of the weights with the largest curvature v̂: those to fine-tune (Sung et al. 2021).

    They have the form of `pruning_masks`, for `tune_only`, `save_masks` and `load_masks`. Of n weights
    n − round((1 − share) n) are chosen, over all parameters together.

    Args:
        posterior: of the network before fine-tuning, or after a few steps of it.
        share: above 0 and up to 1.
        exclude: parameters that are trained as a whole, such as a new head: as in `pruning_masks`.
    """
    require_posterior(posterior, "sparse fine-tuning")
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
        raise SettingError(f"share must be above 0 and at most 1, the share of weights to train, got {share!r}")
    structure = posterior.structure
    scores = {
        name: structure.bases[name].diagonal(v) if name in structure.bases else v
        for name, v in structure.second_moment.items()
    }
    masks = pruning_masks(posterior, 1 - float(share), ranking=scores, exclude=exclude)
    if not any(bool(mask.any()) for mask in masks.values()):
        raise SettingError(f"share={share!r} of {posterior.n_weights} weights is not one: nothing would be trained")
    return masks


def prune_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    fraction: float,
    *,
    ranking: str = "snr",
    scope: Scope = "global",
    exclude: str | Sequence[str] = (),
    **options: Unpack[CheckpointKeywords],
) -> PruningReport:
    """Write a checkpoint again with a share of its weights at zero, lowest score first; all else in it stays as it was.

    No model and no data are needed, and of the weights one tensor at a time is in memory.

    Args:
        path: a file or folder that the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction: the share of the weights with a state to remove, 0 to 1.
        ranking: a name from `RANKINGS`.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: parameters to leave whole, by name, by pattern (`"norm*.weight"`) or `"biases"`; the other kinds need the
            model, see `pruning_masks`. Biases that a batch norm follows are left whole too, with a warning.
        **options: how the file is read, see `CheckpointOptions`.

    Returns:
        The parameters with a state, and what was removed of them; buffers and frozen weights have no row.
    """
    if not isinstance(ranking, str):
        raise SettingError(f"ranking must be one of {', '.join(map(repr, RANKINGS))}, got {ranking!r}")
    reading = CheckpointOptions(**options)
    checkpoint = read_checkpoint(path, reading)
    saved = _opened(checkpoint, reading)
    eligible = _eligible(saved, ranking, exclude, checkpoint.weights)
    outline = saved.mode.outline
    scores = Lazy(outline, lambda name: weight_scores(saved, ranking, [name])[name])
    removed = _removed(scores, saved.mode, eligible, scope, fraction)
    masks = Lazy({n: meta(outline[n].shape, torch.bool) for n in eligible}, lambda name: ~removed[name](name))
    write_pruned(checkpoint, masks, out)
    found = ((name, tensor) for name, tensor in checkpoint.weights.items() if name in saved.mode)
    return PruningReport.total(tuple(PrunedParameter.of(name, tensor, masks.get(name)) for name, tensor in found))


@dataclass(frozen=True)
class _Saved:
    mode: Lazy
    structure: Diagonal
    settings: Settings

    def require_whole(self, what: str) -> None:
        pass


def _opened(checkpoint: Any, reading: CheckpointOptions) -> Any:
    match = match_checkpoint(checkpoint, options=reading)
    check_entries(match)
    entries = {entry.name: entry for entry in match.entries}
    outline = {name: meta(e.parameter.shape, working_dtype(e.parameter.dtype)) for name, e in entries.items()}
    with torch.no_grad():
        mode = Lazy(outline, lambda n: entries[n].parameter.detach().to(outline[n].dtype))
        return _Saved(
            mode,
            Diagonal(Lazy(outline, lambda n: read_entry(entries[n])[1])),
            Settings(1.0, dict.fromkeys(entries, 0.0)),
        )


def _removed(
    scores: Mapping[str, Tensor], weights: Mapping[str, Tensor], names: Sequence[str], scope: Scope, fraction: object
) -> dict[str, Callable[[str], Tensor]]:
    """By parameter name, a function of the name: True at the weights to remove."""
    share, sizes = checked_fraction(fraction), getattr(weights, "outline", weights)
    found: dict[str, Callable[[str], Tensor]] = {}
    for group in competing(names, scope):
        count = round(share * sum(sizes[name].numel() for name in group))
        found |= dict.fromkeys(group, lowest(scores, weights, group, count))
    return found


def checked_fraction(fraction: object) -> float:
    """A share between 0 and 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
        raise SettingError(f"fraction must be a number from 0 to 1, the share of weights to remove, got {fraction!r}")
    return float(fraction)


def competing(names: Iterable[str], scope: Scope) -> list[list[str]]:
    """The names in groups whose weights compete: all of them, or each alone."""
    if scope not in get_args(Scope):
        raise SettingError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r}")
    return [list(names)] if scope == "global" else [[name] for name in names]


def nothing_removed(posterior: Posterior) -> dict[str, Tensor]:
    """Masks that remove nothing, on the parameters' devices."""
    devices = {name: parameter.device for name, parameter in posterior.parameters().items()}
    return {n: torch.ones(t.shape, dtype=torch.bool, device=devices[n]) for n, t in posterior.mode.items()}


def _eligible(
    posterior: Posterior, ranking: Ranking, exclude: str | Sequence[str], buffers: Mapping[str, Tensor]
) -> list[str]:
    """The parameters that are not excluded, without the biases that a batch norm follows."""
    whole = excluded(posterior, exclude)
    if posterior.structure.independent and not isinstance(ranking, Mapping):
        names = [name for name in posterior.mode if name not in whole]
        moment = posterior.structure.second_moment.__getitem__
        held = biases_before_norms(names, moment, norm_widths(buffers).values())
        if held:
            warn(
                f"left whole: {', '.join(held[:4])}{', …' if len(held) > 4 else ''}. A batch norm follows: the loss did "
                "not depend on them, but its running mean has them in it, and without them the network would be another"
            )
        whole |= set(held)
    return [name for name in posterior.mode if name not in whole]


def excluded(posterior: Posterior, patterns: str | Sequence[str]) -> set[str]:
    """The first names of the parameters that any pattern or kind (`"norms"`, `"biases"`, `"embeddings"`) means.

    A kind that the model has none of is passed over; a pattern that matches nothing is an error. Without a model biases
    are known by their names, and the other kinds are refused.
    """
    model = getattr(posterior, "model", None)
    held = {name: (Owner(name, None, name.rpartition(".")[2]),) for name in posterior.mode}
    held = held if model is None else owners(model)
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        of_class = _CLASSES.get(pattern)
        if of_class and model is None:
            names = sorted(posterior.mode)
            raise SettingError(
                f"exclude={pattern!r} goes by the classes of the model's modules, which a file does not have: write "
                f"patterns of names instead, such as '*.norm*.weight'. Its parameters are {', '.join(names[:8])}"
                + (", …" if len(names) > 8 else "")
            )

        def means(owner: Owner) -> bool:
            if of_class:
                return any(re.search(of_class, kind.__name__) for kind in type(owner.module).__mro__)
            # `bias`, `in_proj_bias`, `bias_hh_l0`.
            return "bias" in owner.key.split("_") if pattern == "biases" else fnmatchcase(owner.name, pattern)

        chosen = {name for name, ways in held.items() if any(map(means, ways))}
        if not chosen and not of_class and pattern != "biases":
            raise MatchError(
                f"exclude={pattern!r} matches no parameter; near it: {near(pattern.strip('*'), held)}. The kinds are "
                + ", ".join(map(repr, ("norms", "biases", "embeddings") if model is not None else ("biases",)))
            )
        found |= chosen
    return found


def _pattern_masks(posterior: Posterior, pattern: str, ranking: Ranking, names: Sequence[str]) -> dict[str, Tensor]:
    parsed = re.fullmatch(r"(\d+):(\d+)", pattern)
    keep, size = map(int, parsed.groups()) if parsed else (0, 0)
    if not 0 < keep <= size:
        raise SettingError(f"pattern must be 'N:M' with 0 < N ≤ M, such as '2:4', got {pattern!r}")
    held = owners(posterior.model)
    dims = {
        n: 0 if isinstance(held[n][0].module, _ConvTransposeNd) else 1 for n in names if posterior.mode[n].dim() > 1
    }
    for name, dim in dims.items():
        shape = posterior.mode[name].shape
        if shape[dim] % size:
            raise SettingError(
                f"{name!r} has shape {tuple(shape)}: its {shape[dim]} inputs are not a multiple of {size}, as the pattern "
                f"{pattern} needs. Leave it whole with exclude=({name!r},)"
            )
    masks = {}
    for name, score in weight_scores(posterior, ranking, dims).items():
        score, theta = (tensor.movedim(dims[name], -1) for tensor in (score, posterior.mode[name]))
        groups = best_of_groups(score.reshape(-1, size), theta.reshape(-1, size), keep)
        masks[name] = groups.view(theta.shape).movedim(-1, dims[name]).contiguous()
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
    masks = {}
    try:
        for name, shape in header["shapes"].items():
            bits, size = packed[name], math.prod(shape)
            if bits.numel() != (size + 7) // 8:
                raise ValueError(f"{bits.numel()} bytes for a mask of shape {tuple(shape)}")
            masks[name] = torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is damaged: its masks cannot be read ({error})") from error
    return masks
