"""Several fine-tuned networks made into one, each weight by how much the data of each network determine it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._checks import positive
from bayesadam._files import keep_apart, replacing
from bayesadam._storage import write_tensors
from bayesadam.errors import MatchError, SettingError
from bayesadam.lora import Adapter, Pair, pairs_in
from bayesadam.merging import methods
from bayesadam.merging.methods import MergeReport, Sums
from bayesadam.merging.networks import BaseSource, Network, Source, check_alike, network_of, networks_of
from bayesadam.readers import CheckpointKeywords, warn_of_memory, working_dtype
from bayesadam.readers.curvature import PIECE
from bayesadam.readers.formats.lazy import meta
from bayesadam.weights.gaussian import require_safetensors
from bayesadam.weights.named import AnyPath

if TYPE_CHECKING:
    from typing_extensions import Unpack

MATCHING_SHARE, KRONECKER_SHARE = 0.3, 3.0
LEAST_GRADIENTS = 50


class Merged(dict[str, Tensor]):
    """Merged weights and buffers by name, a state dict, and the `report` of how it was done, which is not saved."""

    def __init__(self, tensors: Mapping[str, Tensor], report: MergeReport) -> None:
        super().__init__(tensors)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def merge(
    models: Sequence[Source],
    method: str | None = None,
    *,
    base: BaseSource | None = None,
    weights: Sequence[float] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Merged:
    """One network out of several that were fine-tuned from one start, without data and without training.

        fisher             θ = (Σ αᵢ Fᵢ)⁻¹ Σ αᵢ Fᵢ θᵢ, F = v̂; the average where Σ F = 0
        gradient-matching  θ = θ₀ + (F₀ + Σ αᵢ Fᵢ)⁻¹ Σ (F₀ + αᵢ Fᵢ)(θᵢ − θ₀), F = N B v̂ + δ
        kronecker          (Σ αᵢ Kᵢ + δ I)(θ − θ_D) = Σ αᵢ Kᵢ (θᵢ − θ_D), K = N B V in its eigenbases

    θ_D is the merge by the diagonals: the first equation, or with a base the second. δ is a fixed share of the mean
    curvature, so that a factor common to all models, in N, B or the units of the loss, changes nothing. An N or B that
    is not known of every model counts for none.

    A parameter that only some of the models trained is taken from those. Tensors that none of them trained are
    averaged, batch norm's running statistics among them; integers are the first model's. The factors of a LoRA adapter
    are merged as their product. The report says which were.

    Args:
        models: posteriors, paths of what trainers saved, or pairs of paths (weights, optimiser's state).
        method: one of the three; None is gradient matching with a base, else Fisher.
        base: θ₀, the network before fine-tuning: as `models`, or a model, a state dict or a file of weights alone.
        weights: α, how much each model is to count; 1 each if absent.
        **options: how files are read, see `CheckpointOptions`; a state in a file of its own is given in a pair.
    """
    plan = plan_of(models, method, base, weights, options)
    found: dict[str, Tensor] = {}
    for name in plan.outline:
        first = plan.tied.get(name, name)
        # In memory of their own: tensors that were read may be mapped from a file, or be a model's.
        found[name] = found[first] if first in found else plan.tensor(name).clone()
    return Merged(found, plan.report)


def merge_checkpoints(
    paths: Sequence[AnyPath | tuple[AnyPath, AnyPath]],
    out: AnyPath,
    method: str | None = None,
    *,
    base: AnyPath | None = None,
    weights: Sequence[float] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> MergeReport:
    """`merge` from files to a safetensors file, tensor by tensor, so that networks larger than memory can be merged."""
    require_safetensors(out)
    out = Path(out)
    sources = [*paths, *([] if base is None else [base])]
    keep_apart(out, *(Path(part) for each in sources for part in (each if isinstance(each, tuple) else (each,))))
    plan = plan_of(paths, method, base, weights, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        write_tensors(temporary, plan.outline, plan.tensor)
    return plan.report


def similarity(a: Source, b: Source, **options: Unpack[CheckpointKeywords]) -> float:
    """Σ √(F_a F_b) / √(Σ F_a Σ F_b), the overlap of two networks' curvatures F = v̂: 1 for the same, 0 for disjoint.

    1 − the squared Hellinger distance between the curvatures as distributions over the weights; neither N, B nor the
    loss's units change it. The networks, given as in `merge`, must be of one architecture. Of Kronecker factors F is
    the diagonal of V.
    """
    networks = networks_of((a, b), options)
    tied = _tied_names(networks)
    trained = [n for n in networks[0].outline if n not in tied and any(n in each.owners for each in networks)]
    total = Sums.total(_sums(networks, trained, torch.ones(2)).values())
    if not bool((total.curvature > 0).all()):
        raise MatchError("one of the two networks has no curvature at all: v̂ is 0 throughout")
    return total.overlap(0, 1)


@dataclass(frozen=True, eq=False)
class Plan:
    """Models that fit together, and all that their merge depends on.

    `scales` are the factors on v̂ of each model, α among them, and of the base; `tied` the first name of every tied
    tensor by its other names; `adapters` the merged factors of LoRA; `sums` are over each parameter's curvature. δ is a
    share of the mean of Fᵢ over all weights and models, or of the mean of a parameter's Σ Kᵢ over its weights.
    """

    networks: Sequence[Network]
    method: str
    base: Network | None
    scales: Tensor
    tied: Mapping[str, str]
    adapters: Mapping[str, Tensor]
    sums: Mapping[str, Sums]
    notes: Sequence[str]
    matching_share: float = MATCHING_SHARE
    kronecker_share: float = KRONECKER_SHARE

    @property
    def outline(self) -> dict[str, Tensor]:
        """Types and shapes of the result."""
        first = self.networks[0].outline
        return {name: self.adapters.get(name, meta(tuple(t.shape), t.dtype)) for name, t in first.items()}

    @property
    def report(self) -> MergeReport:
        """How much each model counts."""
        return MergeReport.of(self.method, [each.label for each in self.networks], self.sums, self.notes)

    @cached_property
    def matching_delta(self) -> float:
        """δ of gradient matching; 1 where there is no curvature at all."""
        total = Sums.total(self.sums.values())
        return self.matching_share * float(total.curvature.mean()) / total.weights or 1.0

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """One tensor of the merged network."""
        name = self.tied.get(name, name)
        if name in self.adapters:
            return self.adapters[name]
        first = self.networks[0].weights[name].detach()
        if not _is_real(first):
            return first
        # A tensor that no model trained has no curvature, and Fisher's merge of it is the average.
        parts = (METHODS[self.method] if name in self.sums else _fisher)(self, name)
        found, start = torch.empty_like(first, memory_format=torch.contiguous_format), 0
        for part in parts:
            found.view(-1)[start : start + len(part)] = part
            start += len(part)
        return found


def _fisher(plan: Plan, name: str) -> Iterator[Tensor]:
    for theta, curvature in _stacked(plan.networks, name, plan.scales):
        yield methods.fisher(theta, curvature, plan.scales[:-1])


def _gradient_matching(plan: Plan, name: str) -> Iterator[Tensor]:
    own = _stacked([plan.base], name, plan.scales[-1:])  # type: ignore[list-item]
    for (theta, curvature), before in zip(_stacked(plan.networks, name, plan.scales), own, strict=True):
        start, known = (tensor[0].to(theta) for tensor in before)
        yield methods.gradient_matching(theta, curvature, start, known, plan.matching_delta)


def _kronecker(plan: Plan, name: str) -> Iterator[Tensor]:
    parts = _fisher(plan, name) if plan.base is None else _gradient_matching(plan, name)
    if not any(each.has_bases(name) for each in plan.networks):
        yield from parts
        return
    start = torch.cat(list(parts)).reshape(plan.networks[0].outline[name].shape)
    thetas, operators, diagonal = [], [], torch.zeros_like(start)
    for each, scale in zip(plan.networks, plan.scales.tolist(), strict=False):
        if name in each.owners:
            thetas.append(each.weights[name].detach().to(start))
            operators.append(_operator(each, name, scale, start))
            diagonal += each.moment(name).to(start) * scale  # type: ignore[union-attr]
    mean = float(plan.sums[name].curvature.sum()) / plan.sums[name].weights
    yield methods.kronecker(thetas, operators, diagonal, start, plan.kronecker_share * mean or 1.0).reshape(-1)


def _operator(network: Network, name: str, scale: float, like: Tensor) -> Callable[[Tensor], Tensor]:
    """x → K x of one parameter, K = scale × V, on the device and in the type of `like`."""
    structure, owner = network.gaussian.structure, network.owners[name]  # type: ignore[union-attr]
    values, dims = structure.second_moment[owner].to(like) * scale, like.dim()
    if owner not in structure.bases:
        return values.mul
    rotation = structure.bases[owner].to(like.device, like.dtype)
    return lambda x: rotation.out_of(rotation.into(x, dims) * values, dims)


# A method is a function of a plan and a parameter's name that yields the merged parameter in flat pieces.
METHODS: dict[str, Callable[[Plan, str], Iterator[Tensor]]] = {
    "fisher": _fisher,
    "gradient-matching": _gradient_matching,
    "kronecker": _kronecker,
}


def plan_of(
    models: Sequence[Source],
    method: str | None,
    base: BaseSource | None,
    weights: Sequence[float] | None,
    options: CheckpointKeywords,
) -> Plan:
    """Read the models, check that they fit together, and warn of what makes a merge bad."""
    if method is None:
        method = "fisher" if base is None else "gradient-matching"
    if method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise SettingError(f"method must be one of {known}, got {method!r}: give all models in one list, merge([a, b])")
    if (method == "gradient-matching" and base is None) or (method == "fisher" and base is not None):
        raise SettingError("method='gradient-matching' needs base=, the network before fine-tuning; 'fisher' has none")
    if weights is not None and len(weights) != len(models):
        raise SettingError(f"weights must have one number for each of the {len(models)} models, got {weights!r}")
    for number in weights or ():
        positive("each of weights", number, "how much a model is to count")
    networks = networks_of(models, options, bases=method == "kronecker")
    start = None if base is None else network_of(base, "the base", options, trained=False)
    outline, pairs, tied = networks[0].outline, pairs_in(networks[0].outline), _tied_names(networks)
    if pairs and method != "fisher":
        raise SettingError(f"LoRA adapters are merged by method='fisher', not {method!r}")
    scales, notes = _scales(networks, start, weights, method)
    adapters, sums = _merged_adapters(networks, pairs, scales[:-1], notes)
    plain = [name for name in outline if name not in tied and name not in adapters]
    trained = [name for name in plain if any(name in each.owners for each in networks)]
    if start is not None:
        check_alike(networks[0], start, trained)
    sums |= _sums(networks, trained, scales)
    if not sums:
        raise MatchError(f"{networks[0].label} and the others have no parameter with a second moment in common")
    if method == "kronecker":
        _check_bases(networks, trained)
    for network in networks:
        warn_of_memory(network.gaussian.origin, network.label)  # type: ignore[union-attr]
    others = [name for name in plain if name not in sums]
    kinds = {
        "that no model trained were averaged": [name for name in others if _is_real(outline[name])],
        f"of integers are those of {networks[0].label}": [name for name in others if not _is_real(outline[name])],
        "that not every model trained come from those that did": [
            name for name in trained if not all(name in each.owners for each in networks)
        ],
    }
    notes += [f"{len(names)} tensors {way}: {', '.join(names[:3])}" for way, names in kinds.items() if names]
    return Plan(networks, method, start, scales, tied, adapters, sums, notes)


def _scales(
    networks: Sequence[Network], base: Network | None, weights: Sequence[float] | None, method: str
) -> tuple[Tensor, list[str]]:
    """α of the models and 1 of the base; for the curvature of the whole training loss times N B, where known of all."""
    scales = torch.tensor([*([1.0] * len(networks) if weights is None else map(float, weights)), 1.0])
    notes: list[str] = []
    concerned = [*networks, *([base] if base is not None and base.gaussian else [])] if method != "fisher" else []
    for words, key in (("the number of training examples", "n_data"), ("the batch size", "batch_size")):
        unknown = [each.label for each in concerned if getattr(each, key) is None]
        if unknown:
            notes.append(
                f"{words} of {', '.join(unknown)} is not known, and was taken to be the same for all: where it is not, "
                "let each model's weight be in proportion to N B"
            )
        else:
            scales[: len(concerned)] *= torch.tensor([float(getattr(each, key)) for each in concerned])
    return scales, notes


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tied_names(networks: Sequence[Network]) -> dict[str, str]:
    """The first name of every tensor that all the networks have tied, by its other names."""
    first: dict[tuple[object, ...], str] = {}
    keys = {name: tuple(each.identity[name] for each in networks) for name in networks[0].outline}
    return {name: first[key] for name, key in keys.items() if first.setdefault(key, name) != name}


def _stacked(networks: Sequence[Network], name: str, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """θ and F = scale × v̂ of a parameter in pieces of the flat tensor, (models, n) each; F = 0 without a state."""
    flat = [each.weights[name].detach().reshape(-1) for each in networks]
    kind, device = working_dtype(flat[0].dtype), flat[0].device
    zeros = torch.zeros((), device=device).expand(flat[0].shape)
    rows = [zeros if v is None else v.reshape(-1) for v in (each.moment(name) for each in networks)]
    for start in range(0, len(flat[0]), PIECE):
        theta, v = (torch.stack([t[start : start + PIECE].to(device, kind) for t in each]) for each in (flat, rows))
        yield theta, v.mul_(scales[: len(v), None].to(v))


def _sums(networks: Sequence[Network], names: Sequence[str], scales: Tensor) -> dict[str, Sums]:
    return {
        name: Sums.total(Sums.of(f, scales[: len(networks)]) for _, f in _stacked(networks, name, scales))
        for name in names
        if networks[0].outline[name].numel()
    }


@torch.no_grad()
def _merged_adapters(
    networks: Sequence[Network], pairs: Sequence[Pair], counts: Tensor, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, Sums]]:
    """The merged factors by name, of the largest rank and with its model's scaling, and the sums by module."""
    merged: dict[str, Tensor] = {}
    sums: dict[str, Sums] = {}
    kinds = set()
    for pair in pairs:
        adapters = [_adapter(each, pair, networks[0].weights[pair.up].device) for each in networks]
        if len({adapter.scale is None for adapter in adapters}) > 1:
            raise MatchError(f"put adapter_config.json beside all weights: a scaling of {pair.prefix!r} is unknown")
        ranks = [len(adapter.down) for adapter in adapters]
        largest = ranks.index(max(ranks))
        curvature = torch.stack([n * adapter.curvature() for n, adapter in zip(counts.tolist(), adapters, strict=True)])
        change = methods.fisher(torch.stack([adapter.change() for adapter in adapters]), curvature, counts)
        for name, factor in zip((pair.up, pair.down), adapters[largest].nearest(change), strict=True):
            like = networks[largest].outline[name]
            merged[name] = factor.reshape(like.shape).to(like.dtype)
        sums[pair.down] = Sums.of(curvature.flatten(1), counts)
        kinds.add(f"adapters have rank {ranks[largest]}, and load with the configuration of {networks[largest].label}")
    notes += sorted(kinds)
    return merged, sums


def _adapter(network: Network, pair: Pair, device: torch.device) -> Adapter:
    """Both factors as matrices, with their second moments."""
    tensors = []
    for name in (pair.up, pair.down):
        weight, v = network.weights[name].detach(), network.moment(name)
        weight = weight.to(device, working_dtype(weight.dtype)).flatten(1)
        tensors.append((weight, torch.zeros_like(weight) if v is None else v.to(weight).flatten(1)))
    (up, up_moment), (down, down_moment) = tensors
    scale = network.scaling(pair.prefix, pair.adapter, len(down)) if network.scaling else None
    return Adapter(up, down, up_moment, down_moment, scale)


def _check_bases(networks: Sequence[Network], trained: Sequence[str]) -> None:
    """Refuse models without eigenbases, or with bases of too few gradients."""
    for network in networks:
        if not any(network.has_bases(name) for name in trained):
            raise SettingError(f"method='kronecker' needs eigenbases, and {network.label} has none: record gradients")
        origin = network.gaussian.origin  # type: ignore[union-attr]
        if origin.recorded and origin.fewest is not None and origin.fewest < LEAST_GRADIENTS:
            found = f"the eigenbases of {network.label} come from {origin.fewest:g} recorded gradients, and merging"
            raise SettingError(f"{found} needs {LEAST_GRADIENTS} at least: ba.Recorder(optimizer, keep=100)")
