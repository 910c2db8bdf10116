"""Several fine-tuned networks made into one, each weight by how much the data of each network determine it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._checks import is_number, positive
from bayesadam._files import keep_apart, replacing
from bayesadam._storage import write_tensors
from bayesadam.errors import BayesAdamError, MatchError, SettingError
from bayesadam.lora import Adapter, Pair, pairs_in
from bayesadam.merging import methods
from bayesadam.merging.methods import MergeReport, counted_shares
from bayesadam.merging.networks import BaseSource, Network, Source, check_alike, network_of, networks_of
from bayesadam.readers import UNKNOWN, CheckpointKeywords, warn_of_memory, working_dtype
from bayesadam.readers.formats.lazy import meta
from bayesadam.weights.gaussian import require_safetensors
from bayesadam.weights.named import AnyPath
from bayesadam.weights.posterior import Posterior

if TYPE_CHECKING:
    from typing_extensions import Unpack

# δ as a share of the mean curvature: of all weights and models, of a parameter's Σ Kᵢ, or of a layer's Σ Aᵢ.
MATCHING_SHARE, KRONECKER_SHARE, INPUTS_SHARE = 0.3, 3.0, 0.1
LEAST_GRADIENTS = 50
METHODS = ("damped", "fisher", "gradient-matching", "kronecker")
# Of posteriors alone, which know the inputs of their layers.
INPUTS = "inputs"
# They take no N, B and base.
_UNSCALED = ("damped", "fisher", INPUTS)


class Merged(dict[str, Tensor]):
    """Merged weights and buffers by name, a state dict, and the `report` of how it was done, which is not saved."""

    def __init__(self, tensors: Mapping[str, Tensor], report: MergeReport) -> None:
        super().__init__(tensors)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def merge(
    models: Sequence[Source],
    *,
    method: str | None = None,
    base: BaseSource | None = None,
    weights: Sequence[float] | None = None,
    trim: float | None = None,
    inputs: Sequence[Any] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Merged:
    """One network out of several that were fine-tuned from one start, without labels and without training.

        damped             θ = (Σ αᵢ Fᵢ)⁻¹ Σ αᵢ Fᵢ θᵢ, F = v̂/⟨v̂⟩ + 1, ⟨v̂⟩ the mean over a tensor
        fisher             the same with F = v̂; the average where Σ F = 0
        gradient-matching  θ = θ₀ + (F₀ + Σ αᵢ Fᵢ)⁻¹ Σ (F₀ + αᵢ Fᵢ)(θᵢ − θ₀), F = N B v̂ + δ
        kronecker          (Σ αᵢ Kᵢ + δ I)(θ − θ_D) = Σ αᵢ Kᵢ (θᵢ − θ_D), K = N B V in its eigenbases
        inputs             (W − W_D)(Σ αᵢ Aᵢ + δ I) = Σ αᵢ (Wᵢ − W_D) Aᵢ, W a layer's weight and bias

    θ_D is the merge by the diagonals: by fisher, or with a base by gradient-matching, but for inputs. Aᵢ is the second
    moment of the inputs that the layer gets in model i; all that has none is merged by fisher. δ is a fixed
    share of the mean curvature, so that a factor common to all models, in N, B or the units of the loss, changes
    nothing. An N or B that is not known of every model counts for none.

    A parameter that only some of the models trained is taken from those. Tensors that none of them trained are
    averaged, batch norm's running statistics among them; integers are the first model's. The factors of a LoRA adapter
    are merged as their product. The report says which were.

    Args:
        models: posteriors, paths of what trainers saved, or pairs of paths (weights, optimiser's state).
        method: one of the five; None is by inputs if they are given, gradient matching with a base, else damped.
        base: θ₀, the network before fine-tuning: as `models`, or a model, a state dict or a file of weights alone.
        weights: α, how much each model is to count; 1 each if absent.
        trim: the share of each tensor's changes θᵢ − θ₀ to leave out, those of least (θᵢ − θ₀)² Fᵢ; needs a base.
        inputs: for each model, which must be a `Posterior`, a few hundred unlabelled inputs of its task, a batch or a
            loader. Posteriors that know theirs already, by `with_inputs`, are merged so by method="inputs".
        **options: how files are read, see `CheckpointKeywords`; a state in a file of its own is given in a pair.
    """
    if inputs is not None:
        if method not in (None, INPUTS):
            raise SettingError(f"inputs= are for method='inputs', not {method!r}")
        models, method = _with_inputs(models, inputs), INPUTS
    merging = _Merging.of(models, method, base, weights, trim, options)
    merged: dict[str, Tensor] = {}
    for name in merging.outline:
        first = merging.tied.get(name, name)
        # In memory of their own: tensors that were read may be mapped from a file, or be a model's.
        merged[name] = merged[first] if first in merged else merging.tensor(name).clone()
    return Merged(merged, merging.report())


def merge_checkpoints(
    paths: Sequence[AnyPath | tuple[AnyPath, AnyPath]],
    out: AnyPath,
    *,
    method: str | None = None,
    base: AnyPath | None = None,
    weights: Sequence[float] | None = None,
    trim: float | None = None,
    **options: Unpack[CheckpointKeywords],
) -> MergeReport:
    """`merge` from files to a safetensors file, tensor by tensor, so that networks larger than memory can be merged."""
    require_safetensors(out)
    out = Path(out)
    sources = [*paths, *([] if base is None else [base])]
    keep_apart(out, *(Path(part) for each in sources for part in (each if isinstance(each, tuple) else (each,))))
    merging = _Merging.of(paths, method, base, weights, trim, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        write_tensors(temporary, merging.outline, merging.tensor)
    return merging.report()


@dataclass(frozen=True, eq=False)
class _Merging:
    """Networks that fit together, merged tensor by tensor.

    `scales` are the factors on v̂ of each model, α among them, and of the base; `tied` the first name of every tied
    tensor by its other names; `adapters` the merged factors of LoRA; `layers` the weight of each weight and bias that
    are merged by inputs. `shares` grow as tensors are merged, and `solved` holds what a layer's others are to get.
    """

    networks: Sequence[Network]
    method: str
    base: Network | None
    trim: float | None
    scales: Tensor
    tied: Mapping[str, str]
    trained: Sequence[str]
    notes: list[str]
    layers: Mapping[str, str] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    solved: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        models: Sequence[Source],
        method: str | None,
        base: BaseSource | None,
        weights: Sequence[float] | None,
        trim: float | None,
        options: CheckpointKeywords,
    ) -> _Merging:
        """Read the models, check that they fit together, and warn of what makes a merge bad."""
        method = method or ("damped" if base is None else "gradient-matching")
        if method not in (*METHODS, INPUTS):
            raise SettingError(f"method must be one of {(*METHODS, INPUTS)}, got {method!r}")
        without = method in _UNSCALED and base is not None and not trim
        if (method == "gradient-matching" and base is None) or without:
            raise SettingError(
                "method='gradient-matching' needs base=, the network before fine-tuning; 'damped' and 'fisher' have "
                "none, but to trim, and 'inputs' has none"
            )
        trims = method in ("damped", "fisher", "gradient-matching") and base is not None
        if trim is not None and (not is_number(trim) or not 0 <= trim < 1 or not trims):
            raise SettingError(
                f"trim must be a share, 0 to 1, with a base and without eigenbases or inputs, got {trim!r}"
            )
        if weights is not None and len(weights) != len(models):
            raise SettingError(f"weights must have one number for each of the {len(models)} models, got {weights!r}")
        for number in weights or ():
            positive("each of weights", number, "how much a model is to count")
        networks = networks_of(models, options, bases=method == "kronecker")
        start = None if base is None else network_of(base, "the base", options, trained=False)
        outline, firsts = networks[0].outline, dict[tuple[object, ...], str]()
        keys = {name: tuple(network.identity[name] for network in networks) for name in outline}
        tied = {name: firsts[key] for name, key in keys.items() if firsts.setdefault(key, name) != name}
        pairs = pairs_in(outline)
        if pairs and (method not in ("damped", "fisher") or trim):
            raise SettingError(f"LoRA adapters are merged by method='damped' or 'fisher' untrimmed, not {method!r}")
        in_pairs = {name for pair in pairs for name in (pair.down, pair.up)}
        plain = [name for name in outline if name not in tied and name not in in_pairs]
        trained = [name for name in plain if any(name in network.owners for network in networks)]
        if start is not None:
            check_alike(networks[0], start, trained)
        if not trained and not pairs:
            raise MatchError(f"{networks[0].label} and the others have no parameter with a second moment in common")
        if method == "kronecker":
            _check_bases(networks, trained)
        layers = _layers(networks, trained) if method == INPUTS else {}
        for network in networks:
            if network.gaussian is not None:
                warn_of_memory(network.gaussian.origin, network.label)
        scales, notes = _scales(networks, start, weights, method)
        merging = cls(networks, method, start, trim, scales, tied, trained, notes, layers)
        merging._merge_adapters(pairs)
        others = [name for name in plain if name not in trained]
        kinds = {
            "that no model trained were averaged": [n for n in others if outline[n].is_floating_point()],
            f"of integers are those of {networks[0].label}": [n for n in others if not outline[n].is_floating_point()],
            "without known inputs were merged by their diagonals": [n for n in trained if layers and n not in layers],
            "that not every model trained come from those that did": [
                name for name in trained if not all(name in network.owners for network in networks)
            ],
        }
        notes += [f"{len(names)} tensors {way}: {', '.join(names[:3])}" for way, names in kinds.items() if names]
        return merging

    @property
    def outline(self) -> dict[str, Tensor]:
        """Types and shapes of the result."""
        first = self.networks[0].outline
        return {name: self.adapters.get(name, meta(tuple(t.shape), t.dtype)) for name, t in first.items()}

    def report(self) -> MergeReport:
        """How much each model counts, once all tensors are merged."""
        return MergeReport.of(self.method, [network.label for network in self.networks], self.shares, self.notes)

    @cached_property
    def delta(self) -> float:
        """δ of gradient matching, a share of the mean of Fᵢ over weights and models; 1 where there is none at all."""
        total, weights = 0.0, 0
        for name in self.trained:
            moments = [network.moment(name) for network in self.networks]
            for scale, v in zip(self.scales.tolist(), moments, strict=False):
                total += 0.0 if v is None else scale * float(v.sum(dtype=torch.float64))
            weights += self.networks[0].outline[name].numel()
        return MATCHING_SHARE * total / (len(self.networks) * max(weights, 1)) or 1.0

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """One tensor of the merged network."""
        name = self.tied.get(name, name)
        if name in self.adapters:
            return self.adapters[name]
        first = self.networks[0].weights[name].detach()
        if not first.is_floating_point():
            return first
        if name in self.layers and name not in self.solved:
            self.solved.update(self._by_inputs(self.layers[name]))
        return (self.solved.pop(name) if name in self.layers else self._start(name)).to(first)

    def _start(self, name: str) -> Tensor:
        """One tensor merged by itself, in the type that is computed in: θ_D where it belongs to a layer."""
        first = self.networks[0].outline[name]
        theta, curvature = _stacked(self.networks, name, self.scales)
        if name not in self.trained:
            # Without any curvature, which is the average.
            return methods.fisher(theta, curvature, self.scales[:-1]).view(first.shape)
        if self.method == "damped" and theta.numel():
            own = torch.tensor([float(name in network.owners) for network in self.networks])
            curvature = methods.damped(curvature) * (own * self.scales[:-1]).to(curvature)[:, None]
        if theta.numel():
            self._count(name, curvature)
        if self.base is not None:
            start, known = (tensor[0].to(theta) for tensor in _stacked([self.base], name, self.scales[-1:]))
            if self.trim:
                theta, curvature = methods.trimmed(theta, curvature, start, self.trim)
        if self.base is None or self.method in _UNSCALED:
            merged = methods.fisher(theta, curvature, self.scales[:-1])
        else:
            merged = methods.gradient_matching(theta, curvature, start, known, self.delta)
        if self.method == "kronecker" and any(network.has_bases(name) for network in self.networks):
            merged = self._kronecker(name, merged.view(first.shape))
        return merged.view(first.shape)

    def _by_inputs(self, name: str) -> dict[str, Tensor]:
        """The weight of that name and the bias of its layer, from their merges by the diagonals."""
        sides = [network.side(name) for network in self.networks]
        first = next(side for side in sides if side is not None)
        starts = {part: self._start(part).double() for part in (name, first.bias) if part is not None}
        basis, changes, moments = first.basis.to(starts[name]), [], []
        for network, side in zip(self.networks, sides, strict=True):
            own = {part: network.weights[part].detach().to(start) - start for part, start in starts.items()}
            changes.append(first.into(own[name], None if first.bias is None else own[first.bias]))
            # In the coordinates of the first; nothing where it was not trained.
            turn = torch.zeros_like(basis) if side is None else basis.mT @ side.basis.to(basis)
            moments.append((turn * (first if side is None else side).spectrum.to(turn)) @ turn.mT)
        counted = torch.stack(moments) * self.scales[:-1].to(basis)[:, None, None]
        sizes = counted.diagonal(dim1=1, dim2=2).sum(dim=1).cpu()
        self.shares.update({part: (t.numel(), t.numel() * sizes / sizes.sum()) for part, t in starts.items()})
        change = first.out_of(methods.by_inputs(torch.stack(changes), counted, INPUTS_SHARE))
        moved = zip(starts.items(), change, strict=False)
        return {part: start + by for (part, start), by in moved if by is not None}

    def _count(self, name: str, curvature: Tensor) -> None:
        shares = counted_shares(curvature, self.scales[:-1]).cpu().sum(dim=1, dtype=torch.float64)
        self.shares[name] = curvature.shape[1], shares

    def _kronecker(self, name: str, start: Tensor) -> Tensor:
        """The merge in eigenbases, from that by the diagonals."""
        thetas, operators, diagonal = [], [], torch.zeros_like(start)
        for network, scale in zip(self.networks, self.scales.tolist(), strict=False):
            if name in network.owners:
                thetas.append(network.weights[name].detach().to(start))
                operators.append(_operator(network, name, scale, start))
                diagonal += network.curvature.diagonal(network.owners[name]).to(start) * scale
        delta = KRONECKER_SHARE * float(diagonal.sum(dtype=torch.float64)) / diagonal.numel() or 1.0
        return methods.kronecker(thetas, operators, diagonal, start, delta)

    @torch.no_grad()
    def _merge_adapters(self, pairs: Sequence[Pair]) -> None:
        """Adapters' factors, of the largest rank and with its model's scaling: the nearest to the merged product."""
        networks, counts, kinds = self.networks, self.scales[:-1], set()
        for pair in pairs:
            adapters = [_adapter(network, pair, networks[0].weights[pair.up].device) for network in networks]
            if len({adapter.scale is None for adapter in adapters}) > 1:
                raise MatchError(f"put adapter_config.json beside all weights: a scaling of {pair.prefix!r} is unknown")
            ranks = [len(adapter.down) for adapter in adapters]
            largest = ranks.index(max(ranks))
            parts = torch.stack([adapter.curvature() for adapter in adapters])
            parts = methods.damped(parts.flatten(1)).view_as(parts) if self.method == "damped" else parts
            curvature = counts.to(parts)[:, None, None] * parts
            change = methods.fisher(torch.stack([adapter.change() for adapter in adapters]), curvature, counts)
            for name, factor in zip((pair.up, pair.down), adapters[largest].nearest(change), strict=True):
                like = networks[largest].outline[name]
                self.adapters[name] = factor.reshape(like.shape).to(like.dtype)
            self._count(pair.down, curvature.flatten(1))
            label = networks[largest].label
            kinds.add(f"adapters have rank {ranks[largest]}, and load with the configuration of {label}")
        self.notes.extend(sorted(kinds))


def _with_inputs(models: Sequence[Source], inputs: Sequence[Any]) -> list[Source]:
    """The posteriors with the inputs of each."""
    if not isinstance(inputs, list | tuple) or len(inputs) != len(models):
        raise SettingError(f"inputs must be a list, with a batch or a loader for each of the {len(models)} models")
    known: list[Source] = []
    for number, (model, batch) in enumerate(zip(models, inputs, strict=True), 1):
        if not isinstance(model, Posterior):
            raise SettingError(
                "inputs= needs posteriors, which run their models: Posterior.from_checkpoint(path, model)"
            )
        try:
            known.append(model.with_inputs(batch))
        except BayesAdamError as error:
            raise type(error)(f"model {number}: {error}") from error
    return known


def _layers(networks: Sequence[Network], trained: Sequence[str]) -> dict[str, str]:
    """The weight of every weight and bias of a layer whose inputs all models know that trained it."""
    layers: dict[str, str] = {}
    for name in trained:
        owners = [network for network in networks if name in network.owners]
        sides = [side for network in owners if (side := network.side(name)) is not None]
        if len(sides) == len(owners) and len(biases := {side.bias for side in sides}) == 1:
            layers |= {part: name for part in (name, *biases) if part is not None}
    if not layers:
        raise SettingError("method='inputs' needs a few hundred inputs of each model's task: inputs=[x, y]")
    return layers


def _operator(network: Network, name: str, scale: float, like: Tensor) -> Callable[[Tensor], Tensor]:
    """x → K x of one parameter, K = scale × V, on the device and in the type of `like`."""
    curvature, owner = network.curvature, network.owners[name]
    values, dims = curvature.second_moment[owner].to(like) * scale, like.dim()
    if owner not in curvature.bases:
        return values.mul
    rotation = curvature.bases[owner].to(like.device, like.dtype)
    return lambda x: rotation.out_of(rotation.into(x, dims) * values, dims)


def _scales(
    networks: Sequence[Network], base: Network | None, weights: Sequence[float] | None, method: str
) -> tuple[Tensor, list[str]]:
    """α of the models and 1 of the base; for the curvature of the whole training loss times N B, where known of all."""
    scales = torch.tensor([*([1.0] * len(networks) if weights is None else map(float, weights)), 1.0])
    notes: list[str] = []
    concerned = [*networks, *([base] if base is not None and base.gaussian else [])] if method not in _UNSCALED else []
    for words, key in (("the number of training examples", "n_data"), ("the batch size", "batch_size")):
        unknown = [network.label for network in concerned if getattr(network, key) is None]
        if unknown:
            notes.append(
                f"{words} of {', '.join(unknown)} is not known, and was taken to be the same for all: where it is not, "
                "let each model's weight be in proportion to N B"
            )
        else:
            scales[: len(concerned)] *= torch.tensor([float(getattr(network, key)) for network in concerned])
    return scales, notes


def _stacked(networks: Sequence[Network], name: str, scales: Tensor) -> tuple[Tensor, Tensor]:
    """θ and F = scale × v̂ of a parameter, flat, (models, n) each; F = 0 without a state."""
    first = networks[0].weights[name].detach()
    theta = torch.empty(len(networks), first.numel(), dtype=working_dtype(first.dtype), device=first.device)
    curvature = torch.zeros_like(theta)
    for row, (network, scale) in enumerate(zip(networks, scales.tolist(), strict=False)):
        theta[row] = network.weights[name].detach().reshape(-1)
        if (v := network.moment(name)) is not None:
            curvature[row] = v.reshape(-1).to(theta) * scale
    return theta, curvature


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
        origin = network.gaussian.origin if network.gaussian else UNKNOWN
        if origin.recorded and origin.fewest is not None and origin.fewest < LEAST_GRADIENTS:
            few = f"the eigenbases of {network.label} come from {origin.fewest:g} recorded gradients, and merging"
            raise SettingError(f"{few} needs {LEAST_GRADIENTS} at least: ba.Recorder(optimizer, keep=100)")
