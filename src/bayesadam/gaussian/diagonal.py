"""The diagonal Gaussian: one precision per weight, w v̂ᵖ + δ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from bayesadam._shards import placed_like, whole
from bayesadam.gaussian.noise import draw, stream_seed
from bayesadam.gaussian.settings import Precision, PrecisionRule, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure, StructureSpec, keep_row
from bayesadam.readers.rotated import Rotation


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """Second moments v̂ by parameter name, seen as the diagonal of V_t."""

    second_moment: Mapping[str, Tensor]
    kind = "diagonal"
    independent = True
    bases: Mapping[str, Rotation] = field(default_factory=dict, init=False, repr=False)

    def precision(self, name: str, settings: Settings) -> Tensor:
        """The precision of every weight of one parameter."""
        return self._rule(name, settings).precision(self.second_moment[name])

    def precision_factors(self, settings: Settings) -> tuple[Named, Named]:
        """w v̂ᵖ + δ, and no rows."""
        return {name: self.precision(name, settings) for name in self.second_moment}, {}

    def _rule(self, name: str, settings: Settings) -> PrecisionRule:
        return PrecisionRule.of(settings, settings.prior_precision[name])

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """θ in the map form, w c/(w c + δ) θ in the likelihood form."""
        return {name: self._rule(name, settings).mean(theta, self.second_moment[name]) for name, theta in mode.items()}

    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """1/(w v̂ᵖ + δ), infinite where there is neither curvature nor prior."""
        return {name: self.precision(name, settings).reciprocal_() for name in self.second_moment}

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The same: the weights are the coordinates."""
        return self.coordinate_variance(settings)

    def curvatures(self, power: float, shape: Mapping[str, Precision] | None = None) -> list[Tensor]:
        """v̂ᵖ, or v̂ᵖ/R, parameter by parameter."""
        found = {name: curvature(v, power) for name, v in self.second_moment.items()}
        return [c if shape is None else c / shape[name] for name, c in found.items()]

    def effective_dimension(self, settings: Settings) -> float:
        """γ = Σ w c/(w c + δ)."""
        total = 0.0
        for name, v in self.second_moment.items():
            rule = self._rule(name, settings)
            data = curvature(v, rule.power).mul_(rule.weight)
            share = data / (data + rule.delta).clamp_(min=torch.finfo(data.dtype).tiny)
            total += float(whole(share.sum(dtype=wide(share))))
        return total

    def sample(
        self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """μ + ε (w v̂ᵖ + δ)^(-1/2), in one pass over θ and v̂."""
        drawn = {}
        for name, theta in mode.items():
            v, rule = self.second_moment[name], self._rule(name, settings)
            drawn[name] = draw(theta, v, rule, seed=stream_seed(seed, name), n=n, dtype=dtypes[name])
        return drawn

    def log_prob(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """Σ ½ log(λ/2π) − ½ λ (θ − μ)², λ the precision; sums in float64."""
        parts = []
        for name, theta in mode.items():
            mu = self._rule(name, settings).mean(theta, self.second_moment[name])
            prec = self.precision(name, settings)
            quadratic = (placed_like(values[name], mu).to(mu.dtype) - mu).square_().mul_(prec)
            terms = (prec.log() - math.log(2 * math.pi) - quadratic).mul_(0.5)
            dims = tuple(range(terms.dim() - mu.dim(), terms.dim()))
            parts.append(whole(terms.sum(dim=dims, dtype=wide(terms)) if dims else terms.to(wide(terms))))
        return reduce(lambda total, part: total + part.to(total.device), parts)

    def entropy(self, settings: Settings) -> Tensor:
        """Σ ½ log(2πe/λ)."""
        each = (self.precision(name, settings).log_() for name in self.second_moment)
        parts = (0.5 * (p.numel() * math.log(2 * math.pi * math.e) - whole(p.sum(dtype=wide(p)))) for p in each)
        return reduce(lambda total, part: total + part.to(total.device), parts)

    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """Weights with v̂ = 0 and δ = 0."""
        flat = {}
        for name, count in self._zeros.items():
            delta = settings.prior_precision[name]
            if isinstance(delta, Tensor):
                v = self.second_moment[name]
                count = int(whole(((v == 0) & (delta.to(v.device) == 0)).sum()))
            elif delta > 0:
                count = 0
            if count:
                flat[name] = count
        return flat

    @cached_property
    def _zeros(self) -> dict[str, int]:
        counts = [whole((v == 0).sum()) for v in self.second_moment.values()]
        return {name: int(count) for name, count in zip(self.second_moment, counts, strict=True)}

    def filled(self, rows: Mapping[str, int]) -> Diagonal:
        """The same with v̂ = 1 in place of 0 in some rows."""
        return replace(self, second_moment=filled(self.second_moment, rows)) if rows else self

    def tensors(self) -> dict[str, Named]:
        """v̂ under `second_moment`."""
        return {"second_moment": self.second_moment}

    def part(self, name: str) -> Diagonal:
        """The same of one parameter."""
        return replace(self, second_moment={name: self.second_moment[name]})

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Diagonal:
        """The same second moments elsewhere."""
        return Diagonal({name: v.to(device=device, dtype=dtype) for name, v in self.second_moment.items()})

    def gathered(self) -> Diagonal:
        """The same second moments, whole."""
        return replace(self, second_moment={name: whole(v) for name, v in self.second_moment.items()})


def filled(moments: Named, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Moments by name with 1 in place of 0 in the row that is given for some of them."""
    new = {name: v.clone() for name, v in moments.items() if name in rows}
    for name, v in new.items():
        keep_row(v, v + (v == 0), rows[name])
    return {**moments, **new}


def wide(tensor: Tensor) -> torch.dtype:
    """The type sums over many weights are taken in; Apple's MPS has no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


DIAGONAL = StructureSpec(
    "diagonal",
    build=lambda reading: Diagonal(reading.second_moment),
    load=lambda stored: Diagonal(stored.moments("second_moment")),
)
