"""A Gaussian with one precision per coordinate, w v̂ᵖ + δ: of the weights, or of rotated ones (Kronecker)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from bayesadam._shards import is_sharded, placed_like, whole
from bayesadam.errors import SettingError
from bayesadam.gaussian.noise import draw, stream_seed
from bayesadam.gaussian.settings import Precision, PrecisionRule, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure, StructureSpec, Types
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
        bases, moments = self.bases, self.second_moment
        turned = {n: bases[n].into(t.to(moments[n]), moments[n].dim()) for n, t in named.items() if n in bases}
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
        shares = [self._rule(name, settings).share(v) for name, v in self.second_moment.items()]
        return sum(float(whole(share.sum(dtype=wide(share)))) for share in shares)

    def sample(self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Types) -> dict[str, Tensor]:
        """μ + ε (w v̂ᵖ + δ)^(-1/2) in the coordinates, in one pass over θ and v̂."""
        drawn = {}
        for name, theta in self._into(mode).items():
            v = self.second_moment[name]
            dtype = v.dtype if name in self.bases else dtypes[name]
            rule = self._rule(name, settings)
            drawn[name] = draw(theta, v, rule, seed=stream_seed(seed, name), n=n, dtype=dtype)
        return {name: tensor.to(dtypes[name]) for name, tensor in self._out_of(drawn).items()}

    def squared_distance(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """Σ λ (θ − μ)² over coordinates: rotations keep distances."""
        parts, values = [], self._into(values)
        for name, theta in self._into(mode).items():
            mu = self._mean(name, theta, settings)
            terms = (placed_like(values[name], mu).to(mu) - mu).square_().mul_(self.precision(name, settings))
            dims = tuple(range(terms.dim() - mu.dim(), terms.dim()))
            parts.append(whole(terms.sum(dim=dims, dtype=wide(terms)) if dims else terms.to(wide(terms))))
        return reduce(lambda total, part: total + part.to(total.device), parts)

    def log_det(self, settings: Settings) -> Tensor:
        """Σ log λ."""
        logs = (self.precision(name, settings).log_() for name in self.second_moment)
        parts = (whole(log.sum(dtype=wide(log))) for log in logs)
        return reduce(lambda total, part: total + part.to(total.device), parts)

    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """Weights with v̂ = 0 and δ = 0."""
        flat = {}
        for name, delta in settings.prior_precision.items():
            if isinstance(delta, Tensor) or delta == 0:
                v = self.second_moment[name]
                flat[name] = zeros(v + delta if isinstance(delta, Tensor) else v)
        return {name: count for name, count in flat.items() if count}

    def tensors(self) -> dict[str, Named]:
        """v̂ under `second_moment`, and the bases under `left` and `right`."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        return {"second_moment": self.second_moment, "left": left, "right": right}

    def part(self, name: str) -> Diagonal:
        """The same of one parameter."""
        bases = {name: self.bases[name]} if name in self.bases else {}
        return replace(self, second_moment={name: self.second_moment[name]}, bases=bases)

    def each(self, change: Callable[[Tensor], Tensor]) -> Diagonal:
        """The same with every tensor changed."""
        bases = {
            name: Rotation(*(None if side is None else change(side) for side in (basis.left, basis.right)))
            for name, basis in self.bases.items()
        }
        return replace(self, second_moment={name: change(v) for name, v in self.second_moment.items()}, bases=bases)


def zeros(v: Tensor) -> int:
    """How many entries are 0, on every process; a sum of truth values would take eight bytes an entry."""
    return int(whole((v == 0).sum())) if is_sharded(v) else v.numel() - int(torch.count_nonzero(v))


def wide(tensor: Tensor) -> torch.dtype:
    """The type sums over many weights are taken in; Apple's MPS has no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


DIAGONAL = StructureSpec(
    "diagonal",
    build=lambda reading: Diagonal(reading.second_moment),
    load=lambda stored: Diagonal(stored.weights("second_moment")),
)
