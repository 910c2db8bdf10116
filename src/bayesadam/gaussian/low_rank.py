"""The low-rank Gaussian: a few directions that the last gradients span, and one variance a weight for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayesadam._storage import check_owner
from bayesadam.errors import ImproperError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.noise import standard_normal, stream_seed
from bayesadam.gaussian.settings import Precision, Settings
from bayesadam.gaussian.structure import Directions, Named, Reading, Stored, Structure, StructureSpec, Types
from bayesadam.readers import is_orthonormal, read_match, working_dtype

# Above this share of its rank γ says that directions are missing.
_FULL = 0.5


@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    r"""V = U diag(s) Uᵀ + diag(r), U orthonormal over all weights together; the precision is  w Vᵖ + δ.

    .. math::
        \Lambda = U \operatorname{diag}(w s^p)\, U^\top + D, \qquad D = \operatorname{diag}(w r^p + \delta)

    which for r ≠ 0 and p ≠ 1 takes the power of each part by itself. With the thin singular value decomposition
    :math:`D^{-1/2} U \operatorname{diag}(w s^p)^{1/2} = Q \operatorname{diag}(\sigma)\, W^\top` Woodbury's identity is

    .. math::
        \Sigma = D^{-1/2} \big( I - Q \operatorname{diag} \tfrac{\sigma^2}{1 + \sigma^2}\, Q^\top \big) D^{-1/2}

    Attributes:
        rows: Uᵀ by parameter name, (K, *shape).
        values: s, (K,).
        rest: r by parameter name; 0 everywhere is the isotropic rest, δ alone.
        kind: `"low-rank"`, or `"low-rank+diagonal"` where the rest is not 0.
    """

    rows: Mapping[str, Tensor]
    values: Tensor
    rest: Mapping[str, Tensor]
    kind: str = "low-rank"
    has_directions = True
    _known: WeakKeyDictionary[Settings, Directions] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def second_moment(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The diagonal of V."""
        return {name: _weighted(self.values, rows.square()) + self.rest[name] for name, rows in self.rows.items()}

    @cached_property
    def _outside(self) -> Diagonal:
        """The Gaussian of precision D."""
        return Diagonal(self.rest)

    def curvatures(self, power: float, shape: Mapping[str, Precision] | None = None) -> list[Tensor]:
        """sᵖ, and rᵖ where there is any; with a shape R the eigenvalues of R^(−½) U sᵖ Uᵀ R^(−½), and rᵖ/R."""
        inside, rest = self.values.pow(power), {name: r.pow(power) for name, r in self.rest.items() if bool(r.any())}
        if shape is None:
            return [inside, *rest.values()]
        scaled = {name: _column(inside.sqrt(), rows) * rows / shape[name] ** 0.5 for name, rows in self.rows.items()}
        return [_orthonormal(scaled)[1].square(), *(r / shape[name] for name, r in rest.items())]

    def precision_factors(self, settings: Settings) -> tuple[Named, Named]:
        """D, and diag(w sᵖ)^½ Uᵀ."""
        roots = (settings.weight * self.values.pow(settings.power)).sqrt()
        return self._outside.precision_factors(settings)[0], {n: _column(roots, r) * r for n, r in self.rows.items()}

    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """1/D, the variances outside the directions."""
        return self._outside.variance(settings)

    def directions(self, settings: Settings) -> Directions:
        """Qᵀ by parameter name, and 1/(1 + σ²)."""
        if settings in self._known:
            return self._known[settings]
        if self.flat_weights(settings):
            raise ImproperError(
                "a low-rank posterior needs a prior precision above 0, or a diagonal rest, for every weight: outside "
                "its directions there is nothing else. posterior.replace(prior_precision=1.0), or calibrate"
            )
        inside, deltas = settings.weight * self.values.pow(settings.power), list(settings.prior_precision.values())
        if self.kind == "low-rank" and not any(isinstance(d, Tensor) or d != deltas[0] for d in deltas):
            # D is a number: U is Q.
            found = Directions(self.rows, (1 + inside / deltas[0]).reciprocal())
        else:
            variance = self.coordinate_variance(settings)
            scaled = {name: _column(inside.sqrt(), r) * r * variance[name].sqrt() for name, r in self.rows.items()}
            rows, singular = _orthonormal(scaled)
            found = Directions(rows, (1 + singular.square()).reciprocal())
        self._known[settings] = found
        return found

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """θ in the map form, θ − Σ δ θ in the likelihood form."""
        if settings.form == "map":
            return dict(mode)
        variance, found = self.coordinate_variance(settings), self.directions(settings)
        pull = {n: _times(theta * variance[n].sqrt(), settings.prior_precision[n]) for n, theta in mode.items()}
        pulled = found.scaled(pull, found.variance)
        return {name: theta - pulled[name] * variance[name].sqrt() for name, theta in mode.items()}

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances diag Σ."""
        found = self.directions(settings)
        return {
            name: variance * (1 - _weighted(1 - found.variance, found.rows[name].square())).clamp(min=0)
            for name, variance in self.coordinate_variance(settings).items()
        }

    def sample(self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Types) -> dict[str, Tensor]:
        """μ + D^(−½) (ε − Q (1 − (1 + σ²)^(−½)) Qᵀ ε)."""
        found, mean, variance = self.directions(settings), self.mean(mode, settings), self.coordinate_variance(settings)
        leading = () if n is None else (n,)
        white = {name: standard_normal((*leading, *mu.shape), mu, stream_seed(seed, name)) for name, mu in mean.items()}
        shrunk = found.scaled(white, found.variance.sqrt())
        return {name: (mu + shrunk[name] * variance[name].sqrt()).to(dtypes[name]) for name, mu in mean.items()}

    def squared_distance(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """|z|² + Σ σ² (Qᵀz)², z = D^½ (θ − μ)."""
        found, mean, variance = self.directions(settings), self.mean(mode, settings), self.coordinate_variance(settings)
        white = {name: (values[name].to(mu) - mu) / variance[name].sqrt() for name, mu in mean.items()}
        inside = found.coordinates(white).double().square() * (found.variance.double().reciprocal() - 1)
        outside = self._outside.squared_distance(values, mean, replace(settings, form="map"))
        return inside.sum(dim=-1) + outside.to(inside.device)

    def log_det(self, settings: Settings) -> Tensor:
        """log det D + Σ log(1 + σ²)."""
        return self._outside.log_det(settings) - self.directions(settings).variance.double().log().sum()

    def effective_dimension(self, settings: Settings) -> float:
        """γ = tr(w Vᵖ Σ) = Σ w rᵖ/D + Σ_k σ²/(1 + σ²) Σ_i δ_i/D_i Q²_ik."""
        found, variance = self.directions(settings), self.coordinate_variance(settings)
        total = self._outside.effective_dimension(settings)
        for name, rows in found.rows.items():
            share = _times(variance[name], settings.prior_precision[name])
            shares = (rows.square() * share).unsqueeze(-1).flatten(1).sum(dim=1)
            total += float(((1 - found.variance) * shares).sum(dtype=torch.float64))
        return total

    def limits(self, settings: Settings) -> str | None:
        """Whether γ comes near K, so that directions which were only not recorded count as unknown."""
        gamma, rank = self.effective_dimension(settings), len(self.values)
        if self.kind != "low-rank" or gamma <= _FULL * rank:
            return None
        return (
            f"the data determine about γ = {gamma:.1f} directions at least, and {rank} gradients were recorded: "
            f"uncertainty is overstated elsewhere. ba.Recorder(optimizer, keep={2 * rank}), or structure='kronecker'"
        )

    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """Weights without precision of their own outside the directions: r = 0 and δ = 0."""
        return self._outside.flat_weights(settings)

    def tensors(self) -> dict[str, Named]:
        """Uᵀ under `directions`, s under `eigenvalues`, r under `rest`."""
        rest = {} if self.kind == "low-rank" else dict(self.rest)
        return {"directions": dict(self.rows), "eigenvalues": {"directions": self.values}, "rest": rest}

    def each(self, change: Callable[[Tensor], Tensor]) -> LowRank:
        """The same with every tensor changed."""
        rows, rest = ({name: change(t) for name, t in named.items()} for named in (self.rows, self.rest))
        return LowRank(rows, change(self.values), rest, self.kind)


def low_rank_of(gradients: Named, second_moment: Named | None = None) -> LowRank:
    """V = (1/K) Σ g gᵀ of recorded gradients; r = max(v̂ − diag V, 0) with a second moment of a longer memory."""
    count = len(next(iter(gradients.values())))
    rows, singular = _orthonormal({name: g / math.sqrt(count) for name, g in gradients.items()})
    found = LowRank(rows, singular.square(), no_rest(rows))
    if second_moment is None:
        return found
    rest = {name: (second_moment[name].to(v) - v).clamp(min=0) for name, v in found.second_moment.items()}
    return LowRank(rows, found.values, rest, "low-rank+diagonal")


def no_rest(rows: Named) -> dict[str, Tensor]:
    """r = 0 for every weight, in the memory of one number."""
    return {name: tensor.new_zeros(()).expand(tensor.shape[1:]) for name, tensor in rows.items()}


def _orthonormal(rows: Named) -> tuple[dict[str, Tensor], Tensor]:
    """Qᵀ and σ, falling, of the thin singular value decomposition W diag(σ) Qᵀ of (K, P) rows."""
    first = next(iter(rows.values()))
    columns = torch.cat([tensor.to(first.device).unsqueeze(-1).flatten(1).T for tensor in rows.values()])
    basis, triangle = torch.linalg.qr(columns)
    left, singular, _ = torch.linalg.svd(triangle, full_matrices=False)
    turned = (basis @ left).T
    parts = turned.split([tensor[0].numel() for tensor in rows.values()], dim=1)
    pairs = zip(rows.items(), parts, strict=True)
    return {name: part.reshape(-1, *t.shape[1:]).to(t.device) for (name, t), part in pairs}, singular


def _weighted(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ_k weights_k rows_k."""
    total: Tensor = torch.tensordot(weights.to(rows), rows, dims=1)
    return total


def _column(values: Tensor, rows: Tensor) -> Tensor:
    return values.to(rows).reshape(-1, *[1] * (rows.dim() - 1))


def _times(tensor: Tensor, delta: Precision) -> Tensor:
    return tensor * (delta.to(tensor) if isinstance(delta, Tensor) else delta)


def _build(reading: Reading, *, with_rest: bool = False) -> LowRank:
    assert reading.gradients is not None
    return low_rank_of(reading.gradients, read_match(reading.match).second_moment if with_rest else None)


def _load(stored: Stored, kind: str = "low-rank") -> LowRank:
    named = {name: stored.tensors[f"directions.{name}"] for name in stored.names}
    if stored.parameters is not None:
        check_owner(stored.path, {name: rows.shape[1:] for name, rows in named.items()}, stored.parameters)
    values = stored.tensors["eigenvalues.directions"]
    flat = [rows.unsqueeze(-1).flatten(1) for rows in named.values() if len(rows) == len(values)]
    whole = len(flat) == len(named) and is_orthonormal(torch.cat(flat, dim=1).T)
    if not whole or values.dim() != 1 or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise stored.damaged("its directions are not orthonormal, or not as many as its eigenvalues")
    places = {name: "cpu" if stored.parameters is None else stored.parameters[name].device for name in named}
    rows = {name: r.to(places[name], working_dtype(r.dtype)) for name, r in named.items()}
    first = next(iter(rows.values()))
    return LowRank(rows, values.to(first), no_rest(rows) if kind == "low-rank" else dict(stored.weights("rest")), kind)


LOW_RANK = StructureSpec("low-rank", _build, _load, needs_gradients=True)
LOW_RANK_DIAGONAL = StructureSpec(
    "low-rank+diagonal",
    partial(_build, with_rest=True),
    partial(_load, kind="low-rank+diagonal"),
    needs_gradients=True,
    needs_state=True,
)
