"""A Gaussian with one precision per coordinate, w v̂ᵖ + δ: of the weights themselves, or of rotated ones (Kronecker)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from bayesadam._shards import is_sharded, placed_like, whole
from bayesadam.errors import SettingError
from bayesadam.gaussian.noise import draw, stream_seed
from bayesadam.gaussian.settings import Precision, PrecisionRule, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure, StructureSpec, keep_row
from bayesadam.readers.rotated import Rotation


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """Second moments v̂ by parameter name, the diagonal of V_t in the coordinates of each parameter's `bases`.

    Without bases the coordinates are the weights. A matrix W with bases Q_L and Q_R is Kronecker-factored:

        Cov vec(W) = (Q_R ⊗ Q_L) diag(1/(w v̂ᵖ + δ)) (Q_R ⊗ Q_L)ᵀ
    """

    second_moment: Mapping[str, Tensor]
    bases: Mapping[str, Rotation] = field(default_factory=dict)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """`"diagonal"`, or `"kronecker"` with bases."""
        return "kronecker" if self.bases else "diagonal"

    @property
    def independent(self) -> bool:  # type: ignore[override]
        """Whether the weights are the coordinates."""
        return not self.bases

    def _into(self, named: Named) -> Named:
        """Weights by name as coordinates."""
        moments = self.second_moment
        turned = {
            n: self.bases[n].into(t.to(moments[n]), moments[n].dim()) for n, t in named.items() if n in self.bases
        }
        return {**named, **turned} if turned else named

    def _out_of(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Coordinates by name as weights."""
        bases, moments = self.bases, self.second_moment
        return {n: bases[n].out_of(t, moments[n].dim()) if n in bases else t for n, t in named.items()}

    def _rule(self, name: str, settings: Settings) -> PrecisionRule:
        delta = settings.prior_precision[name]
        if name in self.bases and isinstance(delta, Tensor):
            raise SettingError(
                f"a Kronecker-factored posterior needs one prior precision for all weights of {name!r}: a rotated "
                "prior of different ones is not diagonal"
            )
        return PrecisionRule.of(settings, delta)

    def precision(self, name: str, settings: Settings) -> Tensor:
        """w v̂ᵖ + δ of every coordinate of one parameter."""
        return self._rule(name, settings).precision(self.second_moment[name])

    def precision_factors(self, settings: Settings) -> tuple[Named, Named]:
        """w v̂ᵖ + δ, and no rows."""
        return {name: self.precision(name, settings) for name in self.second_moment}, {}

    def _mean(self, name: str, coordinates: Tensor, settings: Settings) -> Tensor:
        return self._rule(name, settings).mean(coordinates, self.second_moment[name])

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """θ in the map form; in the likelihood form its coordinates shrink by w c/(w c + δ)."""
        if settings.form == "map":
            return dict(mode)
        return self._out_of({name: self._mean(name, theta, settings) for name, theta in self._into(mode).items()})

    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """1/(w v̂ᵖ + δ), infinite where there is neither curvature nor prior."""
        return {name: self.precision(name, settings).reciprocal_() for name in self.second_moment}

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances of the weights."""
        found = self.coordinate_variance(settings)
        return {name: self.bases[name].diagonal(v) if name in self.bases else v for name, v in found.items()}

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
        """μ + ε (w v̂ᵖ + δ)^(-1/2) in the coordinates, in one pass over θ and v̂."""
        drawn = {}
        for name, theta in self._into(mode).items():
            v = self.second_moment[name]
            dtype = v.dtype if name in self.bases else dtypes[name]
            rule = self._rule(name, settings)
            drawn[name] = draw(theta, v, rule, seed=stream_seed(seed, name), n=n, dtype=dtype)
        return {name: tensor.to(dtypes[name]) for name, tensor in self._out_of(drawn).items()}

    def log_prob(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """Σ ½ log(λ/2π) − ½ λ (θ − μ)² over coordinates, λ the precision: rotations keep volumes; sums in float64."""
        parts, values = [], self._into(values)
        for name, theta in self._into(mode).items():
            mu, prec = self._mean(name, theta, settings), self.precision(name, settings)
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
        counts = [zeros(v) for v in self.second_moment.values()]
        return {name: int(count) for name, count in zip(self.second_moment, counts, strict=True)}

    def filled(self, rows: Mapping[str, int]) -> Diagonal:
        """The same with v̂ = 1 in place of 0 in some rows; with a left basis in a direction without curvature.

        A row that no gradient reached lies in the space of those directions, where Σ is the same in all axes.
        """
        rows = dict(rows)
        for name in rows.keys() & self.bases.keys():
            if self.bases[name].left is not None:
                v = self.second_moment[name]
                rows[name] = int((v.reshape(len(v), -1) == 0).sum(dim=1).argmax())
        return replace(self, second_moment=filled(self.second_moment, rows)) if rows else self

    def tensors(self) -> dict[str, Named]:
        """v̂ under `second_moment`, and the bases under `left` and `right`."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        return {"second_moment": self.second_moment, "left": left, "right": right}

    def part(self, name: str) -> Diagonal:
        """The same of one parameter."""
        bases = {name: self.bases[name]} if name in self.bases else {}
        return replace(self, second_moment={name: self.second_moment[name]}, bases=bases)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Diagonal:
        """The same elsewhere."""
        moments = {name: v.to(device=device, dtype=dtype) for name, v in self.second_moment.items()}
        return replace(
            self, second_moment=moments, bases={n: basis.to(device, dtype) for n, basis in self.bases.items()}
        )

    def gathered(self) -> Diagonal:
        """The same second moments, whole."""
        return replace(self, second_moment={name: whole(v) for name, v in self.second_moment.items()})


def filled(moments: Named, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Moments by name with 1 in place of 0 in the row that is given for some of them."""
    new = {name: v.clone() for name, v in moments.items() if name in rows}
    for name, v in new.items():
        keep_row(v, v + (v == 0), rows[name])
    return {**moments, **new}


def zeros(v: Tensor) -> Tensor:
    """How many entries are 0, on every process; a sum of truth values would take eight bytes an entry."""
    return whole((v == 0).sum()) if is_sharded(v) else v.numel() - torch.count_nonzero(v)


def wide(tensor: Tensor) -> torch.dtype:
    """The type sums over many weights are taken in; Apple's MPS has no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


DIAGONAL = StructureSpec(
    "diagonal",
    build=lambda reading: Diagonal(reading.second_moment),
    load=lambda stored: Diagonal(stored.moments("second_moment")),
)
