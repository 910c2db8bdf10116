"""Which weights remain: scores to prune by, the choice of the lowest, masks by parameter name, and masks on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam._checks import is_number
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.pruning.apply import Owner, PruningReport, owners
from bayesadam.readers import CheckpointKeywords, read_checkpoint, write_pruned
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import require_one_network
from bayesadam.weights.named import AnyPath, Named, outlined
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.running import biases_before_norms, norm_widths
from bayesadam.weights.settings import PrecisionRule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Ranking = str | Callable[[Tensor, Tensor], Tensor] | Named
Scope = Literal["global", "layer"]
Exclude = str | Sequence[str]
# Kinds of parameters to exclude, by the names of their modules' classes; biases are known by their own names.
_CLASSES = {"norms": r"Norm(\d*d)?$", "embeddings": r"Embedding(s|Bag)?$"}
# Weights ranked together: bounds the memory beside a parameter's own.
_AT_ONCE = 1 << 20

# Scores of θ, v̂ and the posterior's rule of precisions, by name.
RANKINGS: dict[str, Callable[[Tensor, Tensor, PrecisionRule], Tensor]] = {
    # |θ| (w v̂ᵖ)^½, |μ|/σ with δ = 0: the paper's |θ| N^½ v̂^¼ at its p = ½. With δ a dead weight, v̂ = 0, would score
    # |θ| δ^½ and outlive weights in use.
    "snr": lambda theta, v, rule: replace(rule, delta=0.0).precision(v).sqrt_().mul_(theta).abs_(),
    # |μ| (w v̂ᵖ + δ)^½, the posterior's own |μ|/σ.
    "snr-posterior": lambda theta, v, rule: rule.precision(v).sqrt_().mul_(rule.mean(theta, v)).abs_(),
    "magnitude": lambda theta, v, rule: theta.abs(),
    # ½ θ² v̂, optimal brain damage with the empirical Fisher as Hessian: the loss that removing a weight costs.
    "saliency": lambda theta, v, rule: theta.square().mul_(v).mul_(0.5),
}


@torch.no_grad()
def weight_scores(
    posterior: GaussianWeights, ranking: Ranking = "snr", names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The score of every weight of some parameters, of all for None, by name; none is NaN.

    Args:
        ranking: a name from `RANKINGS`, a function `ranking(theta, v) -> scores` of tensors, or ready scores by name.
    """
    posterior.require_whole("ranking weights")
    wanted = list(posterior.mode if names is None else names)
    if isinstance(ranking, Mapping):
        if wrong := [*(ranking.keys() - posterior.mode.keys()), *(name for name in wanted if name not in ranking)]:
            raise MatchError(f"the scores given must be by parameter name: {wrong[:4]} are unknown or missing")
    elif not callable(ranking) and ranking not in RANKINGS:
        known = ", ".join(map(repr, RANKINGS))
        raise SettingError(f"ranking must be one of {known}, a function of (theta, v), or scores; got {ranking!r}")
    elif not posterior.structure.independent:
        raise SettingError(f"a {posterior.structure.kind!r} posterior needs ready scores: ranking=posterior.snr()")
    scores = {}
    for name in wanted:
        theta = posterior.mode[name]
        if isinstance(ranking, Mapping):
            score = ranking[name]
        elif callable(ranking):
            score = ranking(theta, posterior.structure.second_moment[name])
        else:
            rule = PrecisionRule.of(posterior.settings, posterior.prior_precision[name])
            score = RANKINGS[ranking](theta, posterior.structure.second_moment[name], rule)
        if score.shape != theta.shape:
            raise MatchError(f"the scores of {name!r} must have shape {tuple(theta.shape)}, got {tuple(score.shape)}")
        if bad := int(torch.isnan(score).sum()):
            raise MatchError(f"{bad} of the {score.numel()} scores of {name!r} are NaN: see bayesadam.doctor")
        scores[name] = score.detach().to(theta.device, None if score.is_floating_point() else torch.float64)
    return scores


def pruning_masks(
    posterior: GaussianWeights,
    fraction: float | None = None,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    pattern: str | None = None,
) -> dict[str, Tensor]:
    """Boolean masks, True where a weight is kept, for every parameter of the posterior and on the parameter's device.

    Of the n weights that are not excluded exactly round(fraction × n) are removed, lowest score first, equal scores by
    position. The model is not touched: see `prune`.

    Args:
        posterior: over the weights; parameters that it does not hold are never pruned.
        fraction: the share of weights to remove, 0 to 1; None with a pattern.
        ranking: `"snr"`, |θ| N^½ v̂^¼ as in the paper; `"snr-posterior"`, with the prior; `"magnitude"`; `"saliency"`,
            ½ θ² v̂; a function `ranking(theta, v) -> scores`; or ready scores by parameter name.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: parameters to leave whole, by name, by pattern (`"*.bias"`) or by kind: `"norms"`, `"biases"`,
            `"embeddings"`. Biases that a batch norm follows are left whole too, with a warning.
        pattern: `"N:M"` keeps the N best of every M consecutive weights along the input dimension: the features of a
            linear layer, the channels of a convolution at each position of its kernel. Parameters with one dimension,
            biases and norms, are left whole.
    """
    require_one_network(posterior, "pruning")
    tensors = posterior.source.weights if posterior.source else {}
    buffers = dict(posterior.model.named_buffers()) if isinstance(posterior, Posterior) else tensors
    eligible = _eligible(posterior, ranking, exclude, buffers)
    if pattern is not None and fraction is not None:
        raise SettingError(f"pattern {pattern!r} implies the fraction: leave fraction={fraction!r} out")
    if pattern is not None:
        kept = _pattern_masks(posterior, pattern, ranking, eligible)
    else:
        removed = removals(weight_scores(posterior, ranking, eligible), scope, fraction)
        kept = {name: ~gone for name, gone in removed.items()}
    whole = nothing_removed(posterior)
    return whole | {name: mask.to(whole[name].device) for name, mask in kept.items()}


def tuning_masks(posterior: GaussianWeights, share: float, *, exclude: Exclude = ()) -> dict[str, Tensor]:
    """Masks, True at the share of the weights with the largest curvature v̂: those to fine-tune (Sung et al. 2021).

    The posterior is of the network before fine-tuning, or after a few steps of it. Excluded parameters, as in
    `pruning_masks`, are trained as a whole: a new head. The masks are for `tune_only`.
    """
    require_one_network(posterior, "sparse fine-tuning")
    scores = {name: posterior.structure.diagonal(name) for name in posterior.mode}
    return pruning_masks(posterior, 1 - share, ranking=scores, exclude=exclude)


def prune_checkpoint(
    path: AnyPath,
    out: AnyPath,
    fraction: float,
    *,
    ranking: str = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    **options: Unpack[CheckpointKeywords],
) -> PruningReport:
    """Write a checkpoint again with a share of its weights at zero, lowest score first; all else in it stays.

    No model and no data are needed, and of the weights one tensor at a time is in memory. The report has the parameters
    with a state; buffers and frozen weights have no row.

    Args:
        path: a file or folder that the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction, ranking, scope, exclude: as in `pruning_masks`; of the kinds only `"biases"` needs no model.
        **options: how the file is read, see `CheckpointOptions`.
    """
    checkpoint = read_checkpoint(path, **options)
    # N does not change the order.
    saved = GaussianWeights.open(checkpoint, 1.0, prior_precision=0.0, **options)
    saved = replace(saved, structure=Diagonal(Lazy(outlined(saved.mode), saved.structure.diagonal)))
    outline = outlined(saved.mode)
    eligible = {name: outline[name] for name in _eligible(saved, ranking, exclude, checkpoint.weights)}
    scores = Lazy(eligible, lambda name: weight_scores(saved, ranking, [name])[name])
    removed = removals(scores, scope, fraction)
    masks = Lazy({name: meta(like.shape, torch.bool) for name, like in eligible.items()}, lambda name: ~removed[name])
    write_pruned(checkpoint, masks, out)
    return PruningReport.of({name: tensor for name, tensor in checkpoint.weights.items() if name in outline}, masks)


def removals(scores: Named, scope: Scope, fraction: Any, spared: int = 0) -> Named:
    """Masks, True at what to remove; so many of each parameter stay in any case. Of lazy scores they are lazy too."""
    if not is_number(fraction) or not 0 <= fraction <= 1:
        raise SettingError(f"fraction must be a number from 0 to 1, the share of weights to remove, got {fraction!r}")
    if scope not in get_args(Scope):
        raise SettingError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r}")
    shapes = {name: like.shape for name, like in outlined(scores).items()}
    chosen: dict[str, Callable[[str], Tensor]] = {}
    for group in [list(shapes)] if scope == "global" else [[name] for name in shapes]:
        total = sum(shapes[name].numel() for name in group)
        count = min(round(fraction * total), total - spared * len(group))
        chosen |= dict.fromkeys(group, _lowest(scores, group, count))
    if isinstance(scores, Lazy):
        return Lazy({name: meta(shape, torch.bool) for name, shape in shapes.items()}, lambda name: chosen[name](name))
    return {name: chosen[name](name) for name in shapes}


def _lowest(scores: Named, names: Sequence[str], count: int) -> Callable[[str], Tensor]:
    """By name a mask, True at the `count` lowest scores over all, equal ones by position, found 16 bits at a time."""
    wide = any(outlined(scores)[name].dtype not in (torch.float16, torch.bfloat16, torch.float32) for name in names)
    kind, bits = (torch.float64, 64) if wide else (torch.float32, 32)

    def keys(name: str) -> Iterator[Tensor]:
        """Whole numbers in the order of the scores, some at a time."""
        for some in torch.split(scores[name].reshape(-1), _AT_ONCE):
            found = (some.to("cpu", kind) + 0.0).view(torch.int64 if wide else torch.int32)
            yield torch.where(found < 0, found ^ torch.iinfo(found.dtype).max, found)

    prefix, left = 0, count
    for shift in range(bits - 16, -1, -16):
        digits = torch.zeros(1 << 16, dtype=torch.int64)
        # The first digit has the sign: 0 is in the middle of it.
        middle = 1 << 15 if shift == bits - 16 else 0
        for some in (some for name in names for some in keys(name)):
            inside = some if shift == bits - 16 else some[some >> (shift + 16) == prefix]
            digit = (inside >> shift) + middle if middle else (inside >> shift) & 0xFFFF
            digits += digit.long().bincount(minlength=1 << 16)
        below = digits.cumsum(0)
        found = int(torch.searchsorted(below, max(left, 1)))
        left -= int(below[found - 1]) if found else 0
        prefix = (prefix << 16) + found - middle
    spare = {}
    for name in names:
        spare[name] = max(left, 0)
        left -= sum(int((some == prefix).sum()) for some in keys(name))

    def mask(name: str) -> Tensor:
        parts, ties = [], spare[name]
        for some in keys(name):
            equal = some == prefix
            parts.append((some < prefix) | (equal & (equal.cumsum(0) <= ties)) if count else torch.zeros_like(equal))
            ties -= int(equal.sum())
        return torch.cat(parts).view(outlined(scores)[name].shape)

    return mask


def nothing_removed(posterior: GaussianWeights) -> dict[str, Tensor]:
    """Masks that remove nothing, on the parameters' devices."""
    like = posterior.parameters() if isinstance(posterior, Posterior) else outlined(posterior.mode)
    places = {name: "cpu" if like[name].is_meta else like[name].device for name in posterior.mode}
    return {name: torch.ones(like[name].shape, dtype=torch.bool, device=place) for name, place in places.items()}


def _eligible(posterior: GaussianWeights, ranking: Ranking, exclude: Exclude, buffers: Named) -> list[str]:
    """The parameters that are not excluded, without the biases that a batch norm follows."""
    whole = excluded(posterior, exclude)
    names = [name for name in posterior.mode if name not in whole]
    if isinstance(ranking, Mapping) or not posterior.structure.independent:
        return names
    held = biases_before_norms(names, posterior.structure.second_moment.__getitem__, norm_widths(buffers).values())
    if held:
        warn(f"left whole: {', '.join(held[:4])}. A batch norm follows, and its running mean has them in it")
    return [name for name in names if name not in held]


def excluded(posterior: GaussianWeights, patterns: str | Sequence[str]) -> set[str]:
    """The first names of the parameters that any pattern or kind (`"norms"`, `"biases"`, `"embeddings"`) means."""
    alone = {name: [Owner(name, None, name.rpartition(".")[2])] for name in posterior.mode}
    held = owners(posterior.model) if isinstance(posterior, Posterior) else alone

    def means(pattern: str, owner: Owner) -> bool:
        if pattern in _CLASSES:
            return any(re.search(_CLASSES[pattern], kind.__name__) for kind in type(owner.module).__mro__)
        # `bias`, `in_proj_bias`, `bias_hh_l0`.
        return "bias" in owner.key.split("_") if pattern == "biases" else fnmatchcase(owner.name, pattern)

    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        chosen = {name for name, ways in held.items() if any(means(pattern, owner) for owner in ways)}
        # Of a file the modules' classes are not known.
        if not chosen and (pattern not in (*_CLASSES, "biases") or alone is held):
            raise MatchError(f"exclude={pattern!r} matches no parameter; they are {', '.join(sorted(held)[:8])}")
        found |= chosen
    return found


def _pattern_masks(
    posterior: GaussianWeights, pattern: str, ranking: Ranking, names: Sequence[str]
) -> dict[str, Tensor]:
    parsed = re.fullmatch(r"(\d+):(\d+)", pattern)
    keep, size = map(int, parsed.groups()) if parsed else (0, 0)
    if not 0 < keep <= size:
        raise SettingError(f"pattern must be 'N:M' with 0 < N ≤ M, such as '2:4', got {pattern!r}")
    masks = {}
    for name, shape in posterior.shapes.items():
        if name not in names or len(shape) < 2:
            continue
        if shape[1] % size:
            found = f"{name!r} has shape {tuple(shape)}: its {shape[1]} inputs are not a multiple of {size}"
            raise SettingError(f"{found}. Leave it whole with exclude=({name!r},)")
        scores = weight_scores(posterior, ranking, [name])[name].movedim(1, -1)
        order = scores.reshape(-1, size).argsort(dim=1, stable=True)
        kept = torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, : size - keep], False)
        masks[name] = kept.view(scores.shape).movedim(-1, 1).contiguous()
    return masks


def save_masks(path: AnyPath, masks: Named) -> None:
    """Write masks as packed bits by parameter name, in place of an older file only once it is complete."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise MatchError(f"mask {name!r} must be boolean, True where a weight stays, not {mask.dtype}")
    packed = {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    storage.write(path, packed, {"shapes": shapes}, storage.MASKS)


def load_masks(path: AnyPath) -> dict[str, Tensor]:
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
