"""Which weights remain: scores to prune by, and masks without the lowest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor

from bayesadam._checks import is_number
from bayesadam._warnings import warn
from bayesadam.compress.masking import Owner, owners
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import require_one_network
from bayesadam.weights.named import Named, outlined
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.running import biases_before_norms, norm_widths
from bayesadam.weights.settings import PrecisionRule

Ranking = str | Named
Scope = Literal["global", "layer", "bounded"]
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
    "magnitude": lambda theta, v, rule: theta.abs(),
    # ½ θ² v̂, optimal brain damage with the empirical Fisher as Hessian: the loss that removing a weight costs.
    "saliency": lambda theta, v, rule: theta.square().mul_(v).mul_(0.5),
    # |θ| v̂^⅜, between the two.
    "between": lambda theta, v, rule: v.pow(0.375).mul_(theta).abs_(),
}


@torch.no_grad()
def weight_scores(
    posterior: GaussianWeights, ranking: Ranking = "snr", names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The score of every weight of some parameters, of all for None, by name; none is NaN.

    Args:
        ranking: a name from `RANKINGS`, or ready scores by name.
    """
    posterior.require_whole("ranking weights")
    wanted = list(posterior.mode if names is None else names)
    if isinstance(ranking, Mapping):
        if wrong := [*(ranking.keys() - posterior.mode.keys()), *(name for name in wanted if name not in ranking)]:
            raise MatchError(f"the scores given must be by parameter name: {wrong[:4]} are unknown or missing")
    elif ranking not in RANKINGS:
        raise SettingError(f"ranking must be one of {', '.join(map(repr, RANKINGS))}, or scores; got {ranking!r}")
    elif not posterior.curvature.independent:
        if ranking != "snr":
            raise SettingError(f"a {posterior.structure!r} posterior ranks by 'snr', its own |μ|/σ, or by ready scores")
        ranking = posterior.snr()
    scores = {}
    for name in wanted:
        theta = posterior.mode[name]
        if isinstance(ranking, Mapping):
            score = ranking[name]
        else:
            rule = PrecisionRule.of(posterior.settings, posterior.prior_precision[name])
            score = RANKINGS[ranking](theta, posterior.curvature.second_moment[name], rule)
        if score.shape != theta.shape:
            raise MatchError(f"the scores of {name!r} must have shape {tuple(theta.shape)}, got {tuple(score.shape)}")
        if bad := int(torch.isnan(score).sum()):
            raise MatchError(f"{bad} of the {score.numel()} scores of {name!r} are NaN: see bayesadam.doctor")
        scores[name] = score.detach().to(theta.device, None if score.is_floating_point() else torch.float64)
    return scores


def masks(
    posterior: GaussianWeights,
    fraction: float | None = None,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    pattern: str | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Boolean masks, True where a weight is kept, for every parameter of the posterior and on the parameter's device.

    Of the n weights that are not excluded exactly round(fraction × n) are removed, lowest score first, equal scores by
    position. Nothing is pruned yet: see `prune`, `apply_masks` and `keep_pruned`.

    Args:
        posterior: over the weights; parameters that it does not hold are never pruned.
        fraction: the share of weights to remove, 0 to 1; None with a pattern.
        ranking: `"snr"`, |θ| N^½ v̂^¼ as in the paper; `"magnitude"`; `"saliency"`, ½ θ² v̂; `"between"`, |θ| v̂^⅜; or
            ready scores by parameter name, such as `posterior.snr()`.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter; `"bounded"`, all
            compete, and each parameter keeps a quarter of what `"layer"` would leave of it, at least one weight.
        exclude: parameters to leave whole, by name, by pattern (`"*.bias"`) or by kind: `"norms"`, `"biases"`,
            `"embeddings"`. Biases that a batch norm follows are left whole too, with a warning.
        pattern: `"N:M"` keeps the N best of every M consecutive weights along the input dimension: the features of a
            linear layer, the channels of a convolution at each position of its kernel. Parameters with one dimension,
            biases and norms, are left whole.
        only: the parameters that may be pruned; None for all.
    """
    require_one_network(posterior, "pruning")
    check_amount(fraction, scope, pattern)
    tensors = posterior.source.weights if posterior.source else {}
    buffers = dict(posterior.model.named_buffers()) if isinstance(posterior, Posterior) else tensors
    names = eligible(posterior, ranking, exclude, buffers, only)
    if pattern is None:
        removed = removals(weight_scores(posterior, ranking, names), scope, fraction)
        kept = {name: ~gone for name, gone in removed.items()}
    else:
        kept = _pattern_masks(posterior, pattern, ranking, names)
    like = posterior.parameters() if isinstance(posterior, Posterior) else outlined(posterior.mode)
    places = {name: "cpu" if like[name].is_meta else like[name].device for name in posterior.mode}
    whole = {name: torch.ones(like[name].shape, dtype=torch.bool, device=place) for name, place in places.items()}
    return whole | {name: mask.to(places[name]) for name, mask in kept.items()}


def eligible(
    posterior: GaussianWeights,
    ranking: Ranking,
    exclude: Exclude,
    buffers: Named,
    only: Collection[str] | None = None,
) -> list[str]:
    """The parameters that are not excluded, without the biases that a batch norm follows."""
    whole = excluded(posterior, exclude)
    names = [name for name in (posterior.mode if only is None else only) if name not in whole]
    if only is not None or isinstance(ranking, Mapping) or not posterior.curvature.independent:
        return names
    biases = biases_before_norms(names, posterior.curvature.second_moment.__getitem__, norm_widths(buffers).values())
    if biases:
        warn(f"left whole: {', '.join(biases[:4])}. A batch norm follows, and its running mean has them in it")
    return [name for name in names if name not in biases]


def excluded(posterior: GaussianWeights, exclude: Exclude) -> set[str]:
    """The first names of the parameters that any pattern or kind (`"norms"`, `"biases"`, `"embeddings"`) means."""
    patterns = exclude if isinstance(exclude, Collection) and not isinstance(exclude, str) else (exclude,)
    if strange := [type(pattern).__name__ for pattern in patterns if not isinstance(pattern, str)]:
        raise SettingError(f"exclude takes names or patterns, such as 'head.*', and kinds, not a {strange[0]}")
    has_model = isinstance(posterior, Posterior)
    by_name = {name: [Owner(name, None, name.rpartition(".")[2])] for name in posterior.mode}
    if isinstance(posterior, Posterior):
        by_name = owners(posterior.model)

    def means(pattern: str, owner: Owner) -> bool:
        if pattern in _CLASSES:
            return any(re.search(_CLASSES[pattern], kind.__name__) for kind in type(owner.module).__mro__)
        # `bias`, `in_proj_bias`, `bias_hh_l0`.
        return "bias" in owner.key.split("_") if pattern == "biases" else fnmatchcase(owner.name, pattern)

    chosen: set[str] = set()
    for pattern in patterns:
        meant = {name for name, ways in by_name.items() if any(means(pattern, owner) for owner in ways)}
        # A model may have no norms; of a file the modules' classes are not known.
        if not meant and not (has_model and pattern in (*_CLASSES, "biases")):
            modules = dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in by_name)
            near = [repr(name) for name in get_close_matches(pattern, [*modules, *by_name], n=2, cutoff=0.5)]
            others = f"did you mean {' or '.join(near)}?" if near else f"they are {', '.join(sorted(by_name)[:8])}"
            raise MatchError(f"exclude={pattern!r} matches no parameter: {others}")
        chosen |= meant
    return chosen


def parsed(pattern: str) -> tuple[int, int]:
    """N and M of `"N:M"`."""
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    keep, size = map(int, found.groups()) if found else (0, 0)
    if not 0 < keep <= size:
        raise SettingError(f"pattern must be 'N:M' with 0 < N ≤ M, such as '2:4', got {pattern!r}")
    return keep, size


def _pattern_masks(
    posterior: GaussianWeights, pattern: str, ranking: Ranking, names: Sequence[str]
) -> dict[str, Tensor]:
    keep, size = parsed(pattern)
    kept = {}
    for name in names:
        shape = posterior.shapes[name]
        if len(shape) < 2:
            continue
        if shape[1] % size:
            described = f"{name!r} has shape {tuple(shape)}: its {shape[1]} inputs are not a multiple of {size}"
            raise SettingError(f"{described}. Leave it whole with exclude={name!r}")
        scores = weight_scores(posterior, ranking, [name])[name].movedim(1, -1)
        order = scores.reshape(-1, size).argsort(dim=1, stable=True)
        mask = torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, : size - keep], False)
        kept[name] = mask.view(scores.shape).movedim(-1, 1).contiguous()
    return kept


def is_fraction(fraction: object) -> TypeGuard[float]:
    """Whether it is a share, 0 to 1."""
    return is_number(fraction) and 0 <= fraction <= 1


def check_amount(fraction: float | None, scope: Scope, pattern: str | None = None) -> None:
    """Refuse what does not say how many weights to remove."""
    if pattern is not None and fraction is not None:
        raise SettingError(f"pattern {pattern!r} implies the fraction: leave fraction={fraction!r} out")
    if pattern is None and not is_fraction(fraction):
        raise SettingError(f"fraction must be a number from 0 to 1, the share of weights to remove, got {fraction!r}")
    if scope not in get_args(Scope):
        raise SettingError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r}")


def removals(scores: Named, scope: Scope, fraction: float | None) -> Named:
    """Masks, True at what to remove; of lazy scores they are lazy too."""
    check_amount(fraction, scope)
    assert fraction is not None
    like = outlined(scores)
    sizes, chosen = {name: each.numel() for name, each in like.items()}, dict[str, Callable[[str], Tensor]]()
    if scope == "bounded":
        may = {name: _lowest(scores, [name], n - math.ceil((1 - fraction) / 4 * n)) for name, n in sizes.items()}
        free = Lazy(
            {name: meta(x.shape, x.dtype) for name, x in like.items()},
            lambda name: scores[name].masked_fill(~may[name](name), math.inf),
        )
    for group in [[name] for name in sizes] if scope == "layer" else [list(sizes)]:
        n = round(fraction * sum(sizes[name] for name in group))
        chosen |= dict.fromkeys(group, _lowest(free if scope == "bounded" else scores, group, n))
    if isinstance(scores, Lazy):
        return Lazy({name: meta(x.shape, torch.bool) for name, x in like.items()}, lambda name: chosen[name](name))
    return {name: chosen[name](name) for name in sizes}


def _lowest(scores: Named, names: Sequence[str], count: int) -> Callable[[str], Tensor]:
    """By name a mask, True at the `count` lowest scores over all, equal ones by position.

    A radix selection, 16 bits of the highest score to remove at a time, so that scores may stay on the disk.
    """
    wide = any(outlined(scores)[name].dtype not in (torch.float16, torch.bfloat16, torch.float32) for name in names)
    kind, bits = (torch.float64, 64) if wide else (torch.float32, 32)

    def keys(name: str) -> Iterator[Tensor]:
        """Whole numbers in the order of the scores, some at a time."""
        for part in torch.split(scores[name].reshape(-1), _AT_ONCE):
            whole = (part.to("cpu", kind) + 0.0).view(torch.int64 if wide else torch.int32)
            yield torch.where(whole < 0, whole ^ torch.iinfo(whole.dtype).max, whole)

    prefix, left = 0, count
    for shift in range(bits - 16, -1, -16):
        counts = torch.zeros(1 << 16, dtype=torch.int64)
        # The first digit has the sign: 0 is in the middle of it.
        middle = 1 << 15 if shift == bits - 16 else 0
        for part in (part for name in names for part in keys(name)):
            inside = part if middle else part[part >> (shift + 16) == prefix]
            digit = (inside >> shift) + middle if middle else (inside >> shift) & 0xFFFF
            counts += digit.long().bincount(minlength=1 << 16)
        below = counts.cumsum(0)
        last = int(torch.searchsorted(below, max(left, 1)))
        left -= int(below[last - 1]) if last else 0
        prefix = (prefix << 16) + last - middle
    # How many of the scores that equal the boundary are removed from each parameter.
    ties = {}
    for name in names:
        ties[name] = max(left, 0)
        left -= sum(int((part == prefix).sum()) for part in keys(name))

    def removed(name: str) -> Tensor:
        parts, spare = [], ties[name]
        for part in keys(name):
            equal = part == prefix
            parts.append((part < prefix) | (equal & (equal.cumsum(0) <= spare)) if count else torch.zeros_like(equal))
            spare -= int(equal.sum())
        return torch.cat(parts).view(outlined(scores)[name].shape)

    return removed
