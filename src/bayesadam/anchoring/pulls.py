r"""The pull towards what was learnt: an implicit step on (θ − μ)ᵀ P (θ − μ), by structure.

A step of the optimiser lowers the loss at the price ½ (θ − θ_t)ᵀ D (θ − θ_t). With a penalty beside the loss, and θ' where the
optimiser went, the price and the penalty are least at

.. math::
    \theta = \arg\min_x \tfrac12 (x - \theta')^\top D\, (x - \theta') + \tfrac{\lambda}{2N} (x - \mu)^\top P\, (x - \mu)
           = \theta' + (A + P)^{-1} P\, (\mu - \theta'), \qquad A = N D / \lambda

It is stable for any size of the step, and where training rests the gradients of loss and penalty cancel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.low_rank import LowRank
from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import Named, Structure
from bayesadam.readers import Rotation

# Of the mean resistance: weights that the new data do not move have next to none.
_LEAST = 1e-3


class Pull(ABC):
    """P over named parameters."""

    @abstractmethod
    def product(self, gaps: Named) -> dict[str, Tensor]:
        """P x, x by parameter name; 0 for those that are not named."""

    @abstractmethod
    def change(self, gaps: Named, resistance: Named) -> dict[str, Tensor]:
        """(A + P)⁻¹ P (μ − θ') of the parameters that have a resistance A; the others stay where they are."""

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """P by role and parameter name."""

    def quadratic(self, gaps: Named) -> Tensor:
        """xᵀ P x."""
        parts = [(gaps[name] * product).sum() for name, product in self.product(gaps).items()]
        return reduce(lambda total, part: total + part.to(total.device), parts)


@dataclass(frozen=True, eq=False)
class RotatedPull(Pull):
    """P that is diagonal for each parameter by itself, in the coordinates of its bases where it has any.

    A is not diagonal in rotated coordinates. There it is taken as one number for a matrix, the geometric mean of its entries.
    """

    precision: Named
    bases: Mapping[str, Rotation]

    def product(self, gaps: Named) -> dict[str, Tensor]:
        """Q P Qᵀ x."""
        return {name: self._scaled(name, gap, self.precision[name]) for name, gap in gaps.items()}

    def change(self, gaps: Named, resistance: Named) -> dict[str, Tensor]:
        """P/(A + P) times the gap, coordinate by coordinate."""
        found = {}
        for name, against in resistance.items():
            precision = self.precision[name]
            total = precision + (_typical(against) if name in self.bases else against)
            share = precision / total.clamp_(min=torch.finfo(total.dtype).tiny)
            found[name] = self._scaled(name, gaps[name], share)
        return found

    def _scaled(self, name: str, x: Tensor, factors: Tensor) -> Tensor:
        basis = self.bases.get(name)
        return x * factors if basis is None else basis.out_of(basis.into(x, x.dim()) * factors, x.dim())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """P in its coordinates, and the bases."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        return {"precision": dict(self.precision), "left": left, "right": right}


@dataclass(frozen=True, eq=False)
class LowRankPull(Pull):
    r"""P = diag(d) + Rᵀ R, R of K rows over all parameters together; the step is exact, by Woodbury's identity.

    .. math::
        (E + R^\top R)^{-1} = E^{-1} - E^{-1} R^\top (I + R E^{-1} R^\top)^{-1} R E^{-1}, \qquad E = A + \operatorname{diag}(d)
    """

    diagonal: Named
    rows: Named

    def product(self, gaps: Named) -> dict[str, Tensor]:
        """d x + Rᵀ (R x)."""
        along = self._along(gaps)
        return {name: self.diagonal[name] * gap + _combined(along, self.rows[name]) for name, gap in gaps.items()}

    def change(self, gaps: Named, resistance: Named) -> dict[str, Tensor]:
        """x − (A + P)⁻¹ A x; the gaps of parameters that stay pull at the others."""
        if not resistance:
            return {}
        staying = {name: gap for name, gap in gaps.items() if name not in resistance}
        push = {name: against * gaps[name] for name, against in resistance.items()}
        if staying:
            along = self._along(staying)
            push = {name: value - _combined(along, self.rows[name]) for name, value in push.items()}
        inverse = {name: (against + self.diagonal[name]).reciprocal() for name, against in resistance.items()}
        outside = {name: value * inverse[name] for name, value in push.items()}
        first = next(iter(self.rows.values()))
        gram = torch.eye(len(first), dtype=first.dtype, device=first.device)
        for name, scale in inverse.items():
            flat = self.rows[name].unsqueeze(-1).flatten(1)
            gram += ((flat * scale.reshape(1, -1)) @ flat.T).to(first.device)
        inside = torch.cholesky_solve(self._along(outside).unsqueeze(-1), torch.linalg.cholesky(gram)).squeeze(-1)
        return {
            name: gaps[name] - (outside[name] - inverse[name] * _combined(inside, self.rows[name]))
            for name in resistance
        }

    def _along(self, named: Named) -> Tensor:
        """R x."""
        first = next(iter(self.rows.values()))
        parts = [torch.tensordot(self.rows[name], x, dims=x.dim()).to(first.device) for name, x in named.items()]
        total: Tensor = reduce(torch.add, parts)
        return total

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """d and R."""
        return {"diagonal": dict(self.diagonal), "rows": dict(self.rows)}


def _typical(values: Tensor) -> Tensor:
    """The geometric mean, with the smallest values raised to a share of the arithmetic one."""
    return values.clamp(min=_LEAST * values.mean()).log_().mean().exp_()


def _combined(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ_k weights_k rows_k."""
    total: Tensor = torch.tensordot(weights.to(rows), rows, dims=1)
    return total


def pull_of(structure: Structure, settings: Settings, like: Named) -> Pull:
    """P = w c + δ of a structure, for the parameters and on the devices of `like`."""
    if isinstance(structure, Diagonal):
        precision = {name: structure.precision(name, settings).to(theta) for name, theta in like.items()}
        bases = {name: basis for name, basis in structure.bases.items() if name in like}
        return RotatedPull(
            precision, {name: basis.to(like[name].device, like[name].dtype) for name, basis in bases.items()}
        )
    assert isinstance(structure, LowRank)
    rest = Diagonal(structure.rest)
    diagonal = {name: rest.precision(name, settings).to(theta) for name, theta in like.items()}
    roots = (settings.weight * structure.values.pow(settings.power)).sqrt()
    scaled = {name: _column(roots, structure.rows[name]) * structure.rows[name] for name in like}
    return LowRankPull(diagonal, {name: rows.to(like[name]) for name, rows in scaled.items()})


def loaded_pull(tensors: Mapping[str, Named], like: Named) -> Pull:
    """What `tensors` gave, on the devices of `like`."""
    placed = {role: {name: t.to(like[name], copy=True) for name, t in named.items()} for role, named in tensors.items()}
    if "rows" in placed:
        return LowRankPull(placed["diagonal"], placed["rows"])
    left, right = placed["left"], placed["right"]
    bases = {name: Rotation(left.get(name), right.get(name)) for name in like if name in left or name in right}
    return RotatedPull(placed["precision"], bases)


def _column(values: Tensor, rows: Tensor) -> Tensor:
    return values.to(rows).reshape(-1, *[1] * (rows.dim() - 1))
