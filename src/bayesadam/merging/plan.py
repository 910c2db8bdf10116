"""What is merged with what, by which equation: found out once, before a tensor is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.settings import positive
from bayesadam.lora import Pair, pairs_in
from bayesadam.merging import methods
from bayesadam.merging.checks import (
    check_alike,
    check_base,
    check_bases,
    check_twice,
    notes_on,
    warn_of_copies,
    warn_of_no_change,
    warn_of_overlap,
)
from bayesadam.merging.experts import BaseSource, Expert, Source, as_operator, expert_of
from bayesadam.merging.lora import change_of, curvature_of, factors_of
from bayesadam.merging.report import MergeReport, Sums, report_of
from bayesadam.merging.stacks import adapters_of, averaged, stacked, tied_names
from bayesadam.readers import CheckpointOptions, meta, warn_of_memory

Method = Literal["fisher", "gradient-matching", "kronecker"]
# δ as a share of the mean of Fᵢ over all weights and models, and of the mean of a parameter's Σ Kᵢ over its weights.
MATCHING_SHARE, KRONECKER_SHARE = 0.3, 3.0
# What conjugate gradients may leave, of |b|.
_RESIDUAL = 0.05


@dataclass(frozen=True, eq=False)
class Plan:
    """Models that fit together, and all that their merge depends on.

    Attributes:
        experts: the models.
        base: θ₀ of gradient matching.
        scales: by what v̂ of each model is multiplied, α among it.
        base_scale: by what v̂ of the base is.
        tied: the first name of every tied tensor by its other names.
        adapters: the merged factors of LoRA adapters by name.
        sums: over each parameter's curvature, by name.
        notes: for the report.
        matching_share: δ of gradient matching, as a share of the mean of Fᵢ over all weights and models.
        kronecker_share: δ of a parameter's Kronecker factors, as a share of the mean of Σ Kᵢ over its weights.
    """

    experts: Sequence[Expert]
    method: Method
    base: Expert | None
    scales: Sequence[float]
    base_scale: float
    counts: Tensor
    tied: Mapping[str, str]
    adapters: Mapping[str, Tensor]
    sums: Mapping[str, Sums]
    notes: Sequence[str]
    matching_share: float = MATCHING_SHARE
    kronecker_share: float = KRONECKER_SHARE

    @property
    def outline(self) -> dict[str, Tensor]:
        """Types and shapes of the result."""
        first = self.experts[0].outline
        return {name: self.adapters.get(name, meta(tuple(t.shape), t.dtype)) for name, t in first.items()}

    @property
    def report(self) -> MergeReport:
        """How much each model counts."""
        return report_of(self.method, [expert.label for expert in self.experts], self.sums.items(), self.notes)

    @cached_property
    def matching_delta(self) -> float:
        """δ of gradient matching; 1 where there is no curvature at all."""
        total = reduce(Sums.__add__, self.sums.values())
        mean = float(total.curvature.mean()) / max(total.weights, 1)
        return self.matching_share * mean or 1.0

    def kronecker_delta(self, name: str) -> float:
        """δ of one parameter's factors."""
        mean = float(self.sums[name].curvature.sum()) / max(self.sums[name].weights, 1)
        return self.kronecker_share * mean or 1.0

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """One tensor of the merged network."""
        name = self.tied.get(name, name)
        if name in self.adapters:
            return self.adapters[name]
        first = self.experts[0].weights[name].detach()
        if not (first.is_floating_point() or first.is_complex()):
            return first
        if name not in self.sums:
            parts = averaged(self.experts, name, self.counts)
        elif self.method == "kronecker" and any(expert.has_bases(name) for expert in self.experts):
            return self._by_factors(name).to(first.dtype)
        else:
            parts = self._by_diagonal(name)
        found, start = torch.empty_like(first, memory_format=torch.contiguous_format), 0
        for part in parts:
            found.view(-1)[start : start + len(part)] = part
            start += len(part)
        return found

    def _by_diagonal(self, name: str) -> Iterator[Tensor]:
        """The flat parameter in pieces."""
        pieces = stacked(self.experts, name, self.scales)
        if self.base is None:
            for theta, curvature in pieces:
                yield methods.fisher(theta, curvature, self.counts)
            return
        own = stacked([self.base], name, [self.base_scale])
        for (theta, curvature), (start, known) in zip(pieces, own, strict=True):
            place = start.to(theta)
            yield methods.gradient_matching(theta, curvature, place[0], known[0].to(theta), self.matching_delta)

    def _by_factors(self, name: str) -> Tensor:
        start = torch.cat(list(self._by_diagonal(name))).reshape(self.experts[0].outline[name].shape)
        thetas, operators, diagonals = [], [], []
        for expert, scale in zip(self.experts, self.scales, strict=True):
            if name in expert.moments:
                operator, diagonal = as_operator(expert.moments[name], start.shape, scale, start)
                thetas.append(expert.weights[name].detach().to(start))
                operators.append(operator)
                diagonals.append(diagonal)
        whole = torch.stack(diagonals).sum(dim=0)
        found, left = methods.kronecker(torch.stack(thetas), operators, whole, start, self.kronecker_delta(name))
        if not left <= _RESIDUAL:
            warn(
                f"conjugate gradients left {left:.0%} of the residual of {name!r}: its curvature spans too many decades. "
                "Compare with method='fisher'"
            )
        return found


def plan_of(
    models: Sequence[Source],
    method: Method | None,
    base: BaseSource | None,
    weights: Sequence[float] | None,
    options: CheckpointOptions,
) -> Plan:
    """Read the models, check that they fit together, and warn of what makes a merge bad."""
    if isinstance(models, str) or not isinstance(models, Sequence) or len(models) < 2:
        raise SettingError(
            "merging takes one list of two or more models, merge([a, b]): posteriors, or paths of checkpoints"
        )
    chosen = _method(method, base)
    check_twice(models)
    experts = [expert_of(source, label, options) for source, label in zip(models, _labels(models), strict=True)]
    start = None if base is None else expert_of(base, "the base", options, trained=False)
    alpha = _counts(weights, len(experts))
    pairs = {name: pair for pair in pairs_in(experts[0].outline) for name in (pair.down, pair.up)}
    check_alike(experts, pairs)
    tied = tied_names(experts)
    notes: list[str] = []
    scales, base_scale = _scales(experts, start, alpha, chosen, notes)
    counts = torch.tensor(alpha)
    plain = [name for name in experts[0].outline if name not in tied and name not in pairs]
    trained = [name for name in plain if any(name in expert.moments for expert in experts)]
    if start is not None:
        check_base(start, experts[0], trained)
    adapters, sums = _adapters(experts, list(dict.fromkeys(pairs.values())), chosen, counts, notes)
    for name in trained:
        parts = (Sums.of(curvature, counts) for _, curvature in stacked(experts, name, scales))
        sums[name] = reduce(Sums.__add__, parts, Sums.none(len(experts)))
    if not sums:
        raise MatchError(f"{experts[0].label} and the others have no parameter with a second moment in common")
    if chosen == "kronecker":
        check_bases(experts, trained)
    warn_of_copies(experts, [*trained, *pairs])
    if start is not None:
        warn_of_no_change(start, experts, trained)
    for expert in experts:
        warn_of_memory(expert.origin, expert.label)
    warn_of_overlap(reduce(Sums.__add__, sums.values()), experts)
    notes += notes_on(experts, plain, trained)
    return Plan(experts, chosen, start, scales, base_scale, counts, tied, adapters, sums, notes)


def _method(method: Method | None, base: object) -> Method:
    if method is None:
        return "fisher" if base is None else "gradient-matching"
    if not isinstance(method, str):
        raise SettingError(
            f"method must be a name, got {type(method).__name__}: give all models in one list, merge([a, b]), and the network "
            "before fine-tuning as base="
        )
    if method not in get_args(Method):
        raise SettingError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if method == "gradient-matching" and base is None:
        raise SettingError(
            "method='gradient-matching' needs base=, the network before fine-tuning; method='fisher' does without"
        )
    if method == "fisher" and base is not None:
        raise SettingError("method='fisher' makes no use of base=: leave one of the two out")
    return method


def _labels(models: Sequence[Source]) -> list[str]:
    """The names of files where these differ, their paths where they do not, numbers for posteriors."""
    paths = [str(source[0] if isinstance(source, tuple) else source) for source in models]
    short = [path.rstrip("/").rpartition("/")[2] for path in paths]
    named = short if len(set(short)) == len(short) else paths
    given = [isinstance(source, str | tuple) or hasattr(source, "__fspath__") for source in models]
    return [name if known else f"model {i}" for i, (name, known) in enumerate(zip(named, given, strict=True), 1)]


def _counts(weights: Sequence[float] | None, models: int) -> list[float]:
    if weights is None:
        return [1.0] * models
    if isinstance(weights, str) or len(weights) != models:
        raise SettingError(f"weights must have one number for each of the {models} models, got {weights!r}")
    for number in weights:
        positive("each of weights", number, "how much a model is to count")
    return [float(number) for number in weights]


def _scales(
    experts: Sequence[Expert], base: Expert | None, alpha: Sequence[float], method: Method, notes: list[str]
) -> tuple[list[float], float]:
    """α, times N B where the method takes the curvature of the whole training loss; what is not known of all is left out."""
    if method == "fisher":
        return list(alpha), 1.0
    concerned = [*experts, *([base] if base is not None and base.moments else [])]
    factors = [1.0] * len(concerned)
    for words, found in (
        ("the number of training examples", [each.n_data for each in concerned]),
        ("the batch size", [each.batch_size for each in concerned]),
    ):
        if None not in found:
            factors = [factor * float(number or 1) for factor, number in zip(factors, found, strict=True)]
            continue
        unknown = [each.label for each, number in zip(concerned, found, strict=True) if number is None]
        text = f"{words} of {', '.join(unknown)} is not known, and was taken to be the same for all"
        notes.append(f"{text}: where it is not, let each model's weight be in proportion to N B")
    own = factors[len(experts) :]
    return [a * factor for a, factor in zip(alpha, factors, strict=False)], own[0] if own else 1.0


def _adapters(
    experts: Sequence[Expert], pairs: Sequence[Pair], method: Method, counts: Tensor, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, Sums]]:
    """The merged factors by name, of the largest rank and with its model's scaling, and the sums by module."""
    if pairs and method != "fisher":
        raise SettingError(f"LoRA adapters are merged by method='fisher', not {method!r}")
    merged: dict[str, Tensor] = {}
    sums: dict[str, Sums] = {}
    told: dict[str, str] = {}
    for pair in pairs:
        with torch.no_grad():
            each = adapters_of(experts, pair)
            place = max(range(len(each)), key=lambda number: len(each[number].down))
            largest = each[place]
            rank = len(largest.down)
            alpha = counts.to(largest.up)[:, None, None]
            curvature = alpha * torch.stack([curvature_of(adapter) for adapter in each])
            changes = torch.stack([change_of(adapter) for adapter in each])
            factors = factors_of(methods.fisher(changes, curvature, counts), rank, largest.scale)
            for name, factor in zip((pair.up, pair.down), factors, strict=True):
                like = experts[place].outline[name]
                merged[name] = factor.reshape(like.shape).to(like.dtype)
            sums[pair.down] = Sums.of(curvature.flatten(1), counts)
            told.setdefault(f"rank {rank}, and load with the configuration of {experts[place].label}", pair.prefix)
    notes += [f"adapters, {prefix} and others, have {words}" for words, prefix in told.items()]
    return merged, sums
