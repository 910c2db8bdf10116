"""The one structure: a precision w c + δ for every coordinate, in the weights' own coordinates or in rotated ones.

| bases | name          | from                                                          |
|-------|---------------|---------------------------------------------------------------|
| none  | `"diagonal"`  | the second moment of Adam and its kin                         |
| right | `"inputs"`    | the same, and the inputs of each layer (`weights.inputs`)     |
| both  | `"kronecker"` | SOAP, Shampoo's statistics, or recorded gradients             |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from bayesadam._shards import is_sharded, placed_like, whole
from bayesadam.errors import SettingError
from bayesadam.readers.formats.lazy import outline_of
from bayesadam.readers.rotated import Rotation
from bayesadam.weights.draws import draw, stream_seed
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.named import Named, Types
from bayesadam.weights.settings import Precision, PrecisionRule, Settings, curvature


@dataclass(frozen=True, eq=False)
class Diagonal:
    """Second moments v̂ by parameter name, the diagonal of V_t in the coordinates of each parameter.

    A matrix W with the bases Q_L and Q_R is Kronecker-factored:

        Cov vec(W) = (Q_R ⊗ Q_L) diag(1/(w c + δ)) (Q_R ⊗ Q_L)ᵀ,   c = v̂ᵖ

    One whose inputs are known has Q_R alone, and v̂_ij = g_i λ_j there: its curvature is c = g_iᵖ λ_j = v̂ᵖ λ^(1−p).

    Tensors may be on the disk. A bias that is a column of its matrix, one of `inputs`, has no moment of its own.
    """

    second_moment: Named
    bases: Mapping[str, Rotation] = field(default_factory=dict)
    inputs: Mapping[str, InputSide] = field(default_factory=dict)

    @property
    def independent(self) -> bool:
        """Whether the weights are the coordinates, so that each is independent of all others."""
        return not self.bases and not self.inputs

    @property
    def by_parameter(self) -> bool:
        """Whether parameters are independent of each other: no bias has joined its matrix."""
        return not any(side.bias for side in self.inputs.values())

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter."""
        coordinates, sides = outline_of(self.second_moment), self.inputs
        shapes = {name: sides[name].shape if name in sides else v.shape for name, v in coordinates.items()}
        return shapes | {side.bias: coordinates[n].shape[:1] for n, side in sides.items() if side.bias is not None}

    def into(self, named: Named) -> Named:
        """Weights by name, with any leading dimensions, as coordinates."""
        if self.independent:
            return named
        biases, coordinates = {side.bias for side in self.inputs.values()}, {}
        for name, t in named.items():
            if name in self.inputs:
                side, v = self.inputs[name], self.second_moment[name]
                coordinates[name] = side.into(t.to(v), None if side.bias is None else named[side.bias])
            elif name in self.bases:
                v = self.second_moment[name]
                coordinates[name] = self.bases[name].into(t.to(v), v.dim())
            elif name not in biases:
                coordinates[name] = t
        return coordinates

    def out_of(self, named: Named, *, variances: bool = False) -> dict[str, Tensor]:
        """Coordinates by name, with any leading dimensions, as weights; or `variances` of the one as of the other."""
        weights: dict[str, Tensor] = {}
        for name, t in named.items():
            if name in self.inputs:
                side = self.inputs[name]
                weights[name], bias = side.diagonal(t) if variances else side.out_of(t)
                weights |= {} if side.bias is None or bias is None else {side.bias: bias}
            elif name in self.bases:
                basis, dims = self.bases[name], outline_of(self.second_moment)[name].dim()
                weights[name] = basis.diagonal(t) if variances else basis.out_of(t, dims)
            else:
                weights[name] = t
        return weights

    def moment(self, name: str, power: float) -> Tensor:
        """What to the power p is the curvature c: v̂, or v̂ λ^((1−p)/p) where inputs are known."""
        v, side = self.second_moment[name], self.inputs.get(name)
        return v if side is None or power == 1 else v * side.spectrum.to(v) ** ((1 - power) / power)

    def _rule(self, name: str, settings: Settings) -> PrecisionRule:
        delta = settings.prior_precision[name]
        if isinstance(delta, Tensor) and (name in self.bases or name in self.inputs):
            raise SettingError(
                f"a posterior in rotated coordinates needs one prior precision for all weights of {name!r}: a rotated "
                "prior of different ones is not diagonal"
            )
        return PrecisionRule.of(settings, delta)

    def precision(self, name: str, settings: Settings) -> Tensor:
        """w c + δ of every coordinate of one parameter."""
        return self._rule(name, settings).precision(self.moment(name, settings.power))

    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """1/(w c + δ), infinite where there is neither curvature nor prior."""
        return {name: self.precision(name, settings).reciprocal_() for name in self.second_moment}

    def curvatures(self, power: float, shape: Mapping[str, Precision] | None = None) -> list[Tensor]:
        """c, or c/R with the shape R of a prior, parameter by parameter; the eigenvalues of Vᵖ."""
        named = {name: curvature(self.moment(name, power), power) for name in self.second_moment}
        return [c if shape is None else c / shape[name] for name, c in named.items()]

    def diagonal(self, name: str) -> Tensor:
        """The diagonal of V in the space of the weights: v̂, or Q_L² v̂ (Q_R²)ᵀ, squared entry by entry."""
        owner = next((n for n, side in self.inputs.items() if side.bias == name), name)
        return self.out_of({owner: self.second_moment[owner]}, variances=True)[name]

    def effective_dimension(self, settings: Settings) -> float:
        """γ = Σ w c/(w c + δ), the number of directions that the data determine and not the prior."""
        shares = (self._rule(n, settings).share(self.moment(n, settings.power)) for n in self.second_moment)
        return sum(float(whole(share.sum(dtype=wide(share)))) for share in shares)

    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """How many coordinates of each parameter have v̂ = 0 and δ = 0; names without any are left out."""
        # A δ above 0 needs no look at v̂.
        deltas = {name: self._rule(name, settings).delta for name in self.second_moment}
        improper = [name for name, delta in deltas.items() if isinstance(delta, Tensor) or delta == 0]
        flat = {name: zeros(self.second_moment[name] + deltas[name]) for name in improper}
        return {name: count for name, count in flat.items() if count}

    def _mean(self, name: str, coordinates: Tensor, settings: Settings) -> Tensor:
        return self._rule(name, settings).mean(coordinates, self.moment(name, settings.power))

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """θ in the map form; in the likelihood form its coordinates shrink by w c/(w c + δ)."""
        if settings.form == "map":
            return dict(mode)
        return self.out_of({name: self._mean(name, theta, settings) for name, theta in self.into(mode).items()})

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances of the weights."""
        return self.out_of(self.coordinate_variance(settings), variances=True)

    def sample(self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Types) -> dict[str, Tensor]:
        """μ + ε (w c + δ)^(-1/2) in the coordinates, in one pass over θ and v̂; a name's draw is its own."""
        drawn = {}
        for name, theta in self.into(mode).items():
            v = self.moment(name, settings.power)
            dtype = dtypes[name] if name not in self.bases and name not in self.inputs else v.dtype
            rule = self._rule(name, settings)
            drawn[name] = draw(theta, v, rule, seed=stream_seed(seed, name), n=n, dtype=dtype)
        return {name: tensor.to(dtypes[name]) for name, tensor in self.out_of(drawn).items()}

    def squared_distance(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """Σ (w c + δ) (θ − μ)² over coordinates, in float64: rotations keep distances."""
        parts, values = [], self.into(values)
        for name, theta in self.into(mode).items():
            mu = self._mean(name, theta, settings)
            terms = (placed_like(values[name], mu).to(mu) - mu).square_().mul_(self.precision(name, settings))
            dims = tuple(range(terms.dim() - mu.dim(), terms.dim()))
            parts.append(whole(terms.sum(dim=dims, dtype=wide(terms)) if dims else terms.to(wide(terms))))
        return _total(parts)

    def log_det(self, settings: Settings) -> Tensor:
        """Σ log(w c + δ), in float64."""
        logs = (self.precision(name, settings).log_() for name in self.second_moment)
        return _total(whole(log.sum(dtype=wide(log))) for log in logs)

    def tensors(self) -> dict[str, Named]:
        """What is saved, by role and name: v̂, bases, and of layers whose inputs are known λ and g instead of v̂."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        right |= {name: side.basis for name, side in self.inputs.items()}
        spectra = {name: side.spectrum for name, side in self.inputs.items()}
        rows = {name: self.second_moment[name].sum(dim=1) / s.sum() for name, s in spectra.items()}
        moments = {n: v for n, v in self.second_moment.items() if n not in rows} if rows else self.second_moment
        return {"second_moment": moments, "left": left, "right": right, "spectrum": spectra, "rows": rows}

    def part(self, name: str) -> Diagonal:
        """The same of one parameter, in memory; only where `by_parameter`."""
        bases = {name: self.bases[name]} if name in self.bases else {}
        inputs = {name: self.inputs[name]} if name in self.inputs else {}
        return Diagonal({name: self.second_moment[name]}, bases, inputs)

    def each(self, change: Callable[[Tensor], Tensor]) -> Diagonal:
        """The same with every tensor changed."""
        return replace(
            self,
            second_moment={name: change(v) for name, v in self.second_moment.items()},
            bases={name: basis.each(change) for name, basis in self.bases.items()},
            inputs={name: side.each(change) for name, side in self.inputs.items()},
        )


def _total(parts: Iterable[Tensor]) -> Tensor:
    return reduce(lambda total, part: total + part.to(total.device), parts)


def zeros(v: Tensor) -> int:
    """How many entries are 0, on every process; a sum of truth values would take eight bytes an entry."""
    return int(whole((v == 0).sum())) if is_sharded(v) else v.numel() - int(torch.count_nonzero(v))


def wide(tensor: Tensor) -> torch.dtype:
    """The type sums over many weights are taken in; Apple's MPS has no float64."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64
