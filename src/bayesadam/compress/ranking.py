"""Which weights remain: scores to prune by, and masks without the lowest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from tempfile import TemporaryFile
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam._checks import is_number
from bayesadam._warnings import warn
from bayesadam.compress.masking import Owner, owners
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers.formats.lazy import Lazy, meta, outline_of
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import require_one_network
from bayesadam.weights.named import Named
from bayesadam.weights.networks import biases_before_norms, norm_widths
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.settings import PrecisionRule

Ranking = str | Named
Scope = Literal["global", "layer", "bounded"]
Exclude = str | Sequence[str]
# Kinds of parameters to exclude, by the names of their modules' classes; biases are known by their own names.
_CLASSES = {"norms": r"Norm(\d*d)?$", "embeddings": r"Embedding(s|Bag)?$"}
Array = npt.NDArray[Any]
# Weights that a cache holds, with what is computed of them.
_PART = 1 << 20

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
            score = _scored(RANKINGS[ranking], theta, posterior.curvature.second_moment[name], rule)
        if score.shape != theta.shape:
            raise MatchError(f"the scores of {name!r} must have shape {tuple(theta.shape)}, got {tuple(score.shape)}")
        # The least of what has a NaN is one.
        if score.numel() and bool(score.aminmax().min.isnan()):
            bad = int(torch.count_nonzero(score.isnan()))
            raise MatchError(f"{bad} of the {score.numel()} scores of {name!r} are NaN: see bayesadam.doctor")
        scores[name] = score.detach().to(theta.device, None if score.is_floating_point() else torch.float64)
    return scores


def _scored(score: Callable[..., Tensor], theta: Tensor, v: Tensor, rule: PrecisionRule) -> Tensor:
    """The scores of one parameter, on a CPU in parts that its cache holds."""
    if theta.device.type != "cpu" or isinstance(rule.delta, Tensor) or theta.numel() <= _PART:
        return score(theta, v, rule)
    flat, v = theta.reshape(-1), v.reshape(-1)
    scores = torch.empty_like(flat, dtype=score(flat[:1], v[:1], rule).dtype)
    for at in range(0, len(flat), _PART):
        scores[at : at + _PART] = score(flat[at : at + _PART], v[at : at + _PART], rule)
    return scores.view(theta.shape)


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
    if fraction is not None:
        kept = remaining(weight_scores(posterior, ranking, names), scope, fraction)
    else:
        kept = _pattern_masks(posterior, str(pattern), ranking, names)
    like = posterior.parameters() if isinstance(posterior, Posterior) else outline_of(posterior.mode)
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


def check_amount(fraction: float | None, scope: Scope, pattern: str | None = None) -> None:
    """Refuse what does not say how many weights to remove."""
    if pattern is not None and fraction is not None:
        raise SettingError(f"pattern {pattern!r} implies the fraction: leave fraction={fraction!r} out")
    if pattern is None and not (is_number(fraction) and 0 <= fraction <= 1):
        raise SettingError(f"fraction must be a number from 0 to 1, the share of weights to remove, got {fraction!r}")
    if scope not in get_args(Scope):
        raise SettingError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {scope!r}")


def remaining(scores: Named, scope: Scope, fraction: float) -> Named:
    """Masks, False at the lowest scores, equal ones by position; of scores that are on the disk, made when accessed."""
    like = outline_of(scores)
    if not like:
        return {}
    usual = all(x.dtype in (torch.float16, torch.bfloat16, torch.float32) for x in like.values())
    cuts, on_disk = np.cumsum([x.numel() for x in like.values()]), isinstance(scores, Lazy)

    def room() -> list[Array]:
        """Memory for all scores, on the disk where they are."""
        kind, size = np.float32 if usual else np.float64, cuts[-1]
        whole = np.memmap(TemporaryFile(), kind, shape=(size,)) if on_disk and size else np.empty(size, kind)  # noqa: SIM115
        return [whole, *np.split(whole, cuts[:-1])]

    every, *parts = room()
    for name, part in zip(like, parts, strict=True):
        part[:] = (scores[name].cpu().float() if usual else scores[name].cpu().double()).flatten().numpy()
        if scope == "bounded":
            competing = part.size - math.ceil((1 - fraction) / 4 * part.size)
            part[_above(part, *_cut(part.copy(), competing))] = math.inf
    if scope == "layer":
        ends = [_cut(part.copy(), round(fraction * part.size)) for part in parts]
    else:
        order = room()[0]
        order[:] = every
        value, equal = _cut(order, round(fraction * every.size))
        there = np.cumsum([np.count_nonzero(part == value) for part in parts])
        ends = [(value, number) for number in np.diff(np.minimum(there, equal), prepend=0)]
    made = dict(zip(like, zip(parts, ends, strict=True), strict=True))

    def mask(name: str) -> Tensor:
        part, end = made[name]
        return torch.from_numpy(_above(part, *end)).view(like[name].shape)

    return (
        Lazy({n: meta(tuple(x.shape), torch.bool) for n, x in like.items()}, mask)
        if on_disk
        else {n: mask(n) for n in like}
    )


def _cut(order: Array, count: int) -> tuple[float, int]:
    """The greatest of the `count` lowest, and how many of these are as great; `order` is written to."""
    if not count:
        return -math.inf, 0
    order.partition(count - 1)
    return float(order[count - 1]), int(np.count_nonzero(order[:count] == order[count - 1]))


def _above(scores: Array, value: float, equal: int) -> npt.NDArray[np.bool_]:
    """True above a value, and at it but for so many first ones."""
    above = scores >= value
    for start in range(0, scores.size, _PART):
        if not equal:
            break
        places = np.flatnonzero(scores[start : start + _PART] == value)[:equal]
        above[start + places] = False
        equal -= len(places)
    return above
