"""The sum of two Gaussians' precisions: what was known before, and what the next data taught."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.low_rank import LowRank, low_rank_of
from bayesadam.gaussian.settings import Precision, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure
from bayesadam.readers.origin import UNKNOWN
from bayesadam.readers.rotated import Rotation, eigenbasis

if TYPE_CHECKING:
    from bayesadam.gaussian.weights import GaussianWeights


def summed(first: GaussianWeights, second: GaussianWeights) -> GaussianWeights:
    r"""The Gaussian around the second's mean whose precision has the curvatures of both:

    .. math::
        P = w_a c_a + w_b c_b + \max(\delta_a, \delta_b)

    The second must have been read after training that was anchored to the first, so that its mean is that of both data
    sets, and the prior is counted once. It is kept as power 1, batch size 1 and N = N_a + N_b, whatever the settings.

    - Diagonal with diagonal, low rank with either of them: exact.
    - Kronecker with Kronecker or with diagonal: the bases are the eigenvectors of the summed factors, and the second
      moments the diagonal of the sum in them.
    - A parameter that only one of them has keeps its own. One that has more rows in the second, a head with new
      classes, gets the first's curvature in the old rows.
    """
    for each in (first, second):
        each.require_whole("a sum of posteriors")
    if not first.mode.keys() & second.mode.keys():
        raise MatchError(
            f"the posteriors have no parameter in common: one has {sorted(first.mode)[:4]}, the other "
            f"{sorted(second.mode)[:4]}. Add posteriors of one model, the later one last"
        )
    present = second.network_names()
    gone = [name for name in first.mode if present is not None and name not in present]
    mode = {**second.mean, **{n: mu for n, mu in first.mean.items() if n not in second.mode and n not in gone}}
    for name in (each for each in first.mode if each in second.mode):
        check_growth(name, first.mode[name].shape, mode[name].shape, "the first posterior", "the second")
    count = first.n_data + second.n_data
    structure = _structure([_Part(each, mode, count) for each in (first, second)], mode)
    omitted = {name: reason for name, reason in second.omitted.items() if name not in mode}
    types = {**(first.dtypes or {}), **(second.dtypes or {})}
    return replace(
        second,
        mode=mode,
        structure=structure,
        settings=Settings(count, _prior(first, second, structure, mode), power=1.0, batch_size=1),
        omitted={**omitted, **dict.fromkeys(gone, "the model has no such parameter any more")},
        origin=UNKNOWN,
        padding={name: row for name, row in {**first.padding, **second.padding}.items() if name in mode},
        dtypes={name: types.get(name, mu.dtype) for name, mu in mode.items()},
        source=None,
    )


def check_growth(name: str, old: torch.Size, new: torch.Size, owner: str, later: str) -> None:
    """Refuse a parameter of another shape, unless it has more rows than it had: a head that grew."""
    if not (old == new or (len(old) == len(new) > 0 and old[1:] == new[1:] and old[0] < new[0])):
        raise MatchError(
            f"{name!r} has shape {tuple(old)} in {owner} and {tuple(new)} in {later}: only a head that grew, with more "
            "rows and all else equal, can be matched"
        )


def grown(tensor: Tensor, rows: int, dim: int = 0) -> Tensor:
    """The tensor with zeros behind it along one dimension, so that it has as many rows."""
    shape = list(tensor.shape)
    shape[dim] = rows - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim) if shape[dim] else tensor


class _Part:
    """One posterior's curvature over the parameters of the sum: v with N v = w c, 0 where it knows nothing."""

    def __init__(self, posterior: GaussianWeights, like: Named, count: float) -> None:
        self.structure, self.like = posterior.structure, like
        self._power, self._share = posterior.settings.power, posterior.settings.weight / count

    def scaled(self, moments: Tensor) -> Tensor:
        """w c/N."""
        return curvature(moments, self._power).mul_(self._share)

    def moments(self, name: str) -> Tensor:
        """v in its own coordinates, of a structure without directions."""
        found = self.structure.second_moment.get(name)
        return torch.zeros_like(self.like[name]) if found is None else self.placed(name, self.scaled(found))

    def placed(self, name: str, tensor: Tensor, dim: int = 0) -> Tensor:
        """On the parameter's device, with zeros in the rows that are new."""
        like = self.like[name]
        return grown(tensor.to(like), len(like), dim) if like.dim() else tensor.to(like)

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


def _structure(parts: list[_Part], like: Named) -> Structure:
    structures = [part.structure for part in parts]
    if all(isinstance(each, Diagonal) for each in structures):
        return _diagonal(parts, like)
    if all(isinstance(each, LowRank) or each.independent for each in structures):
        return _low_rank(parts, like)
    names = " and ".join(each.kind for each in structures)
    raise SettingError(
        f"posteriors of structure {names} have no sum of either structure: read both with the same, "
        "Posterior.from_recorder(..., structure=...)"
    )


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
                own = {name: part.placed(name, part.scaled(r)) for name, r in structure.rest.items() if name in like}
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
    return part.placed(name, rows * weights.reshape(-1, *[1] * (rows.dim() - 1)), dim=1)


def _prior(first: GaussianWeights, second: GaussianWeights, structure: Structure, like: Named) -> dict[str, Precision]:
    """δ by parameter name, the larger of the two: both have it for the same prior."""
    found: dict[str, Precision] = {}
    for name, theta in like.items():
        parts = [part.prior_precision[name] for part in (first, second) if name in part.mode]
        if not any(isinstance(delta, Tensor) for delta in parts):
            found[name] = max(float(delta) for delta in parts)
        elif name in structure.bases:
            raise SettingError(
                f"{name!r} has a prior precision for every weight, and a Kronecker-factored sum needs one for all of "
                "them: posterior.replace(prior_precision=1.0)"
            )
        else:
            each = [grown(d.to(theta), len(theta)) if isinstance(d, Tensor) else theta.new_tensor(d) for d in parts]
            found[name] = reduce(torch.maximum, each)
    return found
