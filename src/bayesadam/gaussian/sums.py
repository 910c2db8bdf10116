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
from bayesadam.gaussian.low_rank import LowRank, low_rank_of, no_rest
from bayesadam.gaussian.settings import Precision, Settings, curvature
from bayesadam.gaussian.structure import Named, Structure
from bayesadam.readers.origin import UNKNOWN
from bayesadam.readers.rotated import Rotation, eigenbasis

if TYPE_CHECKING:
    from bayesadam.gaussian.weights import GaussianWeights

_DROPPED = "the model has no such parameter any more"


def summed(first: GaussianWeights, second: GaussianWeights) -> GaussianWeights:
    r"""The Gaussian round the second's mean whose precision has the curvatures of both:

    .. math::
        P = w_a c_a + w_b c_b + \max(\delta_a, \delta_b)

    The second must have been read after training that was anchored to the first, so that its mean is that of both data
    sets, and the prior is counted once. It is kept as power 1, batch size 1 and N = N_a + N_b, whatever the parts' settings.

    - Diagonal with diagonal, low rank with either of them: exact.
    - Kronecker with Kronecker or with diagonal: the bases are the eigenvectors of the summed factors, and the second
      moments the diagonal of the sum in them.
    - A parameter that only one of them has keeps its own. One that has more rows in the second, a head with new classes,
      gets the first's curvature in the old rows.
    """
    for each in (first, second):
        each.require_whole("a sum of posteriors")
    if not first.mode.keys() & second.mode.keys():
        raise MatchError(
            f"the posteriors have no parameter in common: one has {sorted(first.mode)[:4]}, the other "
            f"{sorted(second.mode)[:4]}. Add posteriors of one model, the later one last"
        )
    present = second.network_names()
    dropped = {name: _DROPPED for name in first.mode if present is not None and name not in present}
    mode = {**second.mean, **{n: mu for n, mu in first.mean.items() if n not in second.mode and n not in dropped}}
    for name in (each for each in first.mode if each in second.mode):
        check_growth(name, first.mode[name].shape, mode[name].shape, "the first posterior", "the second")
    count = first.n_data + second.n_data
    structure = _structure([_Part(each, mode, count) for each in (first, second)], mode)
    prior = _prior(first, second, structure, mode)
    omitted = {name: reason for name, reason in second.omitted.items() if name not in mode}
    types = {**(first.dtypes or {}), **(second.dtypes or {})}
    return replace(
        second,
        mode=mode,
        structure=structure,
        settings=Settings(count, prior, power=1.0, batch_size=1),
        omitted={**omitted, **dropped},
        origin=UNKNOWN,
        padding={name: row for name, row in {**first.padding, **second.padding}.items() if name in mode},
        dtypes={name: types.get(name, mu.dtype) for name, mu in mode.items()},
        source=None,
    )


def check_growth(name: str, old: torch.Size, new: torch.Size, owner: str, later: str) -> None:
    """Refuse a parameter of another shape, unless it has more rows than it had: a head that grew."""
    if old == new or (len(old) == len(new) > 0 and old[1:] == new[1:] and old[0] < new[0]):
        return
    raise MatchError(
        f"{name!r} has shape {tuple(old)} in {owner} and {tuple(new)} in {later}: only a head that grew, with more rows and all "
        "else equal, can be matched"
    )


def grown(tensor: Tensor, rows: int, dim: int = 0) -> Tensor:
    """The tensor with zeros behind it along one dimension, so that it has as many rows."""
    missing = rows - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = [missing if place == dim % tensor.dim() else side for place, side in enumerate(tensor.shape)]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


class _Part:
    """One posterior's curvature over the parameters of the sum: v with N v = w c, 0 where it knows nothing."""

    def __init__(self, posterior: GaussianWeights, like: Named, count: float) -> None:
        self.structure, self.like = posterior.structure, like
        self._power, self._share = posterior.settings.power, posterior.settings.weight / count

    def scaled(self, moments: Tensor) -> Tensor:
        """w c/N."""
        return curvature(moments, self._power).mul_(self._share)

    def moments(self, name: str) -> Tensor:
        """v of a diagonal or a Kronecker-factored part, in its own coordinates."""
        found = self.structure.second_moment.get(name)
        if found is None:
            return torch.zeros_like(self.like[name])
        return self.placed(name, self.scaled(found))

    def placed(self, name: str, tensor: Tensor, dim: int = 0) -> Tensor:
        """On the parameter's device, with zeros in the rows that are new."""
        like = self.like[name]
        return grown(tensor.to(like), len(like), dim) if like.dim() else tensor.to(like)

    def basis(self, name: str) -> Rotation:
        """Its own coordinates; the rows that are new have theirs."""
        place = self.like[name]
        own = self.structure.bases.get(name, Rotation(None, None)).to(place.device, place.dtype)
        if name not in self.structure.second_moment or self.structure.second_moment[name].shape == place.shape:
            return own
        rows, is_vector = len(place), place.dim() == 1
        left = own.left if is_vector or own.left is None else _enlarged(own.left, rows)
        right = _enlarged(own.right, rows) if is_vector and own.right is not None else own.right
        return Rotation(left, right)


def _enlarged(basis: Tensor, side: int) -> Tensor:
    """The basis with the new coordinates themselves behind it."""
    found = torch.eye(side, dtype=basis.dtype, device=basis.device)
    found[: len(basis), : len(basis)] = basis
    return found


def _structure(parts: list[_Part], like: Named) -> Structure:
    structures = [part.structure for part in parts]
    if all(isinstance(each, Diagonal) for each in structures):
        return _diagonal(parts, like)
    if all(isinstance(each, LowRank) or each.independent for each in structures):
        return _low_rank(parts, like)
    names = " and ".join(part.structure.kind for part in parts)
    raise SettingError(
        f"posteriors of structure {names} have no sum of either structure: read both with the same, Posterior.from_recorder("
        "..., structure=...)"
    )


def _diagonal(parts: list[_Part], like: Named) -> Diagonal:
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for name in like:
        # A part that knows nothing of a parameter has no say in its bases.
        known = [part for part in parts if name in part.structure.second_moment]
        pairs = [(part.moments(name), part.basis(name)) for part in known]
        if all(basis.left is None and basis.right is None for _, basis in pairs):
            moments[name] = sum((v for v, _ in pairs), torch.zeros_like(pairs[0][0]))
            continue
        bases[name] = pairs[0][1] if len(pairs) == 1 else _common_basis(pairs)
        moments[name] = sum((_turned(v, basis, bases[name]) for v, basis in pairs), torch.zeros_like(pairs[0][0]))
    return Diagonal(moments, bases)


def _common_basis(pairs: list[tuple[Tensor, Rotation]]) -> Rotation:
    """The eigenvectors of Σ Q_L diag(v 1) Q_Lᵀ and of Σ Q_R diag(vᵀ 1) Q_Rᵀ; a side that neither has rotated stays as it is."""
    lefts = [(_matrix(v).sum(dim=1), basis.left) for v, basis in pairs]
    rights = [(_matrix(v).sum(dim=0), basis.right) for v, basis in pairs]
    return Rotation(_summed_basis(lefts), _summed_basis(rights))


def _summed_basis(factors: list[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    if all(basis is None for _, basis in factors):
        return None
    dense = [torch.diag(values) if basis is None else (basis * values) @ basis.mT for values, basis in factors]
    return eigenbasis(sum(dense, torch.zeros_like(dense[0])))


def _turned(v: Tensor, old: Rotation, new: Rotation) -> Tensor:
    """The diagonal, in new coordinates, of what is diag(v) in old ones: (U_L∘U_L) v (U_R∘U_R)ᵀ with U = Q_newᵀ Q_old."""
    between = Rotation(_between(old.left, new.left), _between(old.right, new.right))
    return between.diagonal(v)


def _between(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is new:
        return None
    if old is None or new is None:
        return old if new is None else new.mT
    return new.mT @ old


def _matrix(v: Tensor) -> Tensor:
    """As `Rotation` sees it: (first dimension, all others); a vector is one row."""
    return v.unsqueeze(0) if v.dim() < 2 else v.flatten(1)


def _low_rank(parts: list[_Part], like: Named) -> LowRank:
    """Directions stacked with their weights, K_a + K_b of them at most; what is diagonal is added to the rest."""
    stacks: list[Named] = []
    rests: list[Named] = []
    for part in parts:
        structure = part.structure
        if isinstance(structure, LowRank):
            stacks.append({name: _stack(part, structure, name) for name in like})
            rest = {name: part.placed(name, part.scaled(r)) for name, r in structure.rest.items() if name in like}
            if structure.kind != "low-rank":
                rests.append(rest)
        else:
            rests.append({name: part.moments(name) for name in like})
    rows = {name: torch.cat([stack[name] for stack in stacks]) for name in like}
    count = len(next(iter(rows.values())))
    found = low_rank_of({name: math.sqrt(count) * tensor for name, tensor in rows.items()})
    if not rests:
        return found
    zero = {name: torch.zeros_like(r) for name, r in no_rest(found.rows).items()}
    rest = {name: sum((r[name] for r in rests if name in r), zero[name]) for name in like}
    return LowRank(found.rows, found.values, rest, "low-rank+diagonal")


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
        numbers = [delta for delta in parts if not isinstance(delta, Tensor)]
        tensors = [grown(delta.to(theta), len(theta)) for delta in parts if isinstance(delta, Tensor)]
        if tensors and name in structure.bases:
            raise SettingError(
                f"{name!r} has a prior precision for every weight, and a Kronecker-factored sum needs one for all of them: "
                "posterior.replace(prior_precision=1.0)"
            )
        if not tensors:
            found[name] = max(numbers)
            continue
        delta = reduce(torch.maximum, tensors)
        found[name] = delta.clamp(min=max(numbers)) if numbers else delta
    return found
