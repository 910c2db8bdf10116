"""The sum of two Gaussians' precisions: what was known before, and what the next data taught."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.low_rank import LowRank, low_rank_of
from bayesadam.gaussian.settings import Precision, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure
from bayesadam.readers.rotated import Rotation, eigenbasis


def summed(given: Sequence[tuple[Structure, Settings]], like: Named) -> tuple[Structure, Settings]:
    r"""The structure and the settings, over the parameters `like`, of the precision that has the curvatures of all:

    .. math::
        P = w_a c_a + w_b c_b + \max(\delta_a, \delta_b)

    The prior is counted once. It is kept as power 1, batch size 1 and N = N_a + N_b, whatever the settings.

    - Diagonal with diagonal, low rank with either of them: exact.
    - Kronecker with Kronecker or with diagonal: the bases are the eigenvectors of the summed factors, and the second
      moments the diagonal of the sum in them.
    - A parameter that only one of them has keeps its own. One that has more rows in the later one, a head with new
      classes, gets the earlier one's curvature in the old rows.
    """
    count = sum(settings.n_data for _, settings in given)
    parts = [_Part(structure, settings, like, count) for structure, settings in given]
    structures = [structure for structure, _ in given]
    found: Structure
    if all(isinstance(each, Diagonal) for each in structures):
        found = _diagonal(parts, like)
    elif all(isinstance(each, LowRank) or each.independent for each in structures):
        found = _low_rank(parts, like)
    else:
        names = " and ".join(each.kind for each in structures)
        raise SettingError(
            f"posteriors of structure {names} have no sum of either structure: read both with the same, "
            "Posterior.from_recorder(..., structure=...)"
        )
    prior = _prior([settings.prior_precision for _, settings in given], found.bases, like)
    return found, Settings(count, prior, power=1.0, batch_size=1)


def check_growth(name: str, old: torch.Size, new: torch.Size, owner: str, later: str) -> None:
    """Refuse a parameter of another shape, unless it has more rows than it had: a head that grew."""
    if not (old == new or (len(old) == len(new) > 0 and old[1:] == new[1:] and old[0] < new[0])):
        raise MatchError(
            f"{name!r} has shape {tuple(old)} in {owner} and {tuple(new)} in {later}: only a head that grew, with more "
            "rows and all else equal, can be matched"
        )


def _grown(tensor: Tensor, like: Tensor, dim: int = 0) -> Tensor:
    """The tensor in the place of another, with zeros behind it along one dimension, so that it has as many rows."""
    tensor = tensor.to(like)
    if not like.dim() or tensor.shape[dim] == len(like):
        return tensor
    shape = list(tensor.shape)
    shape[dim] = len(like) - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


class _Part:
    """One posterior's curvature over the parameters of the sum: v with N v = w c, 0 where it knows nothing."""

    def __init__(self, structure: Structure, settings: Settings, like: Named, count: float) -> None:
        self.structure, self.like = structure, like
        self._power, self._share = settings.power, settings.weight / count

    def scaled(self, moments: Tensor) -> Tensor:
        """w c/N."""
        return curvature(moments, self._power).mul_(self._share)

    def moments(self, name: str) -> Tensor:
        """v in its own coordinates, of a structure without directions."""
        found = self.structure.second_moment.get(name)
        like = self.like[name]
        return torch.zeros_like(like) if found is None else _grown(self.scaled(found), like)

    def basis(self, name: str) -> Rotation:
        """Its own coordinates; the rows that are new have theirs."""
        place = self.like[name]
        own = self.structure.bases.get(name, Rotation(None, None)).to(place.device, place.dtype)
        if self.structure.second_moment[name].shape == place.shape:
            return own
        sides = [own.left, own.right]
        longer = 0 if place.dim() > 1 else 1
        if (basis := sides[longer]) is not None:
            enlarged = torch.eye(len(place)).to(basis)
            enlarged[: len(basis), : len(basis)] = basis
            sides[longer] = enlarged
        return Rotation(*sides)


def _diagonal(parts: list[_Part], like: Named) -> Diagonal:
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for name in like:
        # A part that knows nothing of a parameter has no say in its bases.
        known = [part for part in parts if name in part.structure.second_moment]
        pairs = [(part.moments(name), part.basis(name)) for part in known]
        common = pairs[0][1]
        if len(pairs) > 1:
            # A vector is one row, as `Rotation` sees it.
            rows = [(v.unsqueeze(0) if v.dim() < 2 else v.flatten(1), basis) for v, basis in pairs]
            left = _common([(v.sum(dim=1), basis.left) for v, basis in rows])
            common = Rotation(left, _common([(v.sum(dim=0), basis.right) for v, basis in rows]))
        if common.left is not None or common.right is not None:
            bases[name] = common
        # The diagonal, in new coordinates, of what is diag(v) in old ones: (U∘U) v (U∘U)ᵀ with U = Q_newᵀ Q_old.
        turns = [Rotation(_between(basis.left, common.left), _between(basis.right, common.right)) for _, basis in pairs]
        moments[name] = reduce(torch.add, (turn.diagonal(v) for turn, (v, _) in zip(turns, pairs, strict=True)))
    return Diagonal(moments, bases)


def _common(factors: list[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """The eigenvectors of Σ Q diag(values) Qᵀ; None where neither side is rotated."""
    if all(basis is None for _, basis in factors):
        return None
    dense = [torch.diag(values) if basis is None else (basis * values) @ basis.mT for values, basis in factors]
    return eigenbasis(reduce(torch.add, dense))


def _between(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is new:
        return None
    if old is None or new is None:
        return old if new is None else new.mT
    return new.mT @ old


def _low_rank(parts: list[_Part], like: Named) -> LowRank:
    """Directions stacked with their weights, K_a + K_b of them at most; what is diagonal is added to the rest."""
    stacks: list[Named] = []
    rest: dict[str, Tensor] = {}
    for part in parts:
        structure = part.structure
        own = {name: part.moments(name) for name in like} if not isinstance(structure, LowRank) else {}
        if isinstance(structure, LowRank):
            stacks.append({name: _stack(part, structure, name) for name in like})
            if structure.kind != "low-rank":
                own = {n: _grown(part.scaled(r), like[n]) for n, r in structure.rest.items() if n in like}
        rest |= {name: rest[name] + r if name in rest else r for name, r in own.items()}
    rows = {name: torch.cat([stack[name] for stack in stacks]) for name in like}
    count = len(next(iter(rows.values())))
    found = low_rank_of({name: math.sqrt(count) * tensor for name, tensor in rows.items()})
    if not rest:
        return found
    whole = {name: rest.get(name, torch.zeros_like(theta)) for name, theta in like.items()}
    return LowRank(found.rows, found.values, whole, "low-rank+diagonal")


def _stack(part: _Part, structure: LowRank, name: str) -> Tensor:
    """√(w sᵖ/N) Uᵀ of one parameter, (K, *shape)."""
    if name not in structure.rows:
        return part.like[name].new_zeros(len(structure.values), *part.like[name].shape)
    rows = structure.rows[name]
    weights = part.scaled(structure.values).sqrt().to(rows)
    return _grown(rows * weights.reshape(-1, *[1] * (rows.dim() - 1)), part.like[name], dim=1)


def _prior(priors: Sequence[Mapping[str, Precision]], rotated: Container[str], like: Named) -> dict[str, Precision]:
    """δ by parameter name, the larger of the two: both have it for the same prior."""
    found: dict[str, Precision] = {}
    for name, theta in like.items():
        parts = [prior[name] for prior in priors if name in prior]
        if not any(isinstance(delta, Tensor) for delta in parts):
            found[name] = max(float(delta) for delta in parts)
        elif name in rotated:
            raise SettingError(
                f"{name!r} has a prior precision for every weight, and a Kronecker-factored sum needs one for all of "
                "them: posterior.replace(prior_precision=1.0)"
            )
        else:
            each = [_grown(d, theta) if isinstance(d, Tensor) else theta.new_tensor(d) for d in parts]
            found[name] = reduce(torch.maximum, each)
    return found
