"""The sum of two Gaussians' precisions: what was known before, and what the next data taught."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.readers.rotated import Rotation, eigenbasis
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.named import Named
from bayesadam.weights.settings import Precision, Settings, curvature

Terms = Sequence[tuple[Diagonal, Settings]]


def summed(terms: Terms, like: Named) -> tuple[Diagonal, Settings]:
    r"""The structure and the settings, over the parameters `like`, of the precision that has the curvatures of all:

    .. math::
        P = w_a c_a + w_b c_b + \max(\delta_a, \delta_b)

    The prior is counted once. It is kept as power 1, batch size 1 and N = N_a + N_b, whatever the settings.

    Diagonals add exactly; with a Kronecker-factored one the bases are the eigenvectors of the summed factors, and the
    second moments the diagonal of the sum in them. A parameter that only one has keeps its precision; a head with new
    classes gets the earlier curvature in the old rows.
    """
    if any(structure.inputs for structure, _ in terms):
        raise SettingError("posteriors that know their inputs have no sum: add them first, then with_inputs(inputs)")
    n_data = sum(settings.n_data for _, settings in terms)
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for name, theta in like.items():
        # One that knows nothing of a parameter has no say in its bases.
        having = [(structure, settings) for structure, settings in terms if name in structure.second_moment]
        # v with N v = w c.
        parts = [curvature(s.second_moment[name], t.power).mul_(t.weight / n_data) for s, t in having]
        parts = [_grown(v, theta) for v in parts]
        before = [_grown_basis(s.bases.get(name, Rotation(None, None)), theta) for s, _ in having]
        common = before[0]
        if len(having) > 1:
            # A vector is one row, as `Rotation` sees it.
            rows = [v.unsqueeze(0) if v.dim() < 2 else v.flatten(1) for v in parts]
            left = _common([v.sum(dim=1) for v in rows], [basis.left for basis in before])
            common = Rotation(left, _common([v.sum(dim=0) for v in rows], [basis.right for basis in before]))
        if common.left is not None or common.right is not None:
            bases[name] = common
        # The diagonal, in new coordinates, of what is diag(v) in old ones: (U∘U) v (U∘U)ᵀ with U = Q_newᵀ Q_old.
        turns = [Rotation(_between(b.left, common.left), _between(b.right, common.right)) for b in before]
        moments[name] = reduce(torch.add, (turn.diagonal(v) for turn, v in zip(turns, parts, strict=True)))
    prior = {name: _prior(name, terms, theta, name in bases) for name, theta in like.items()}
    return Diagonal(moments, bases), Settings(n_data, prior, power=1.0, batch_size=1)


def check_growth(name: str, old: torch.Size, new: torch.Size, owner: str, later: str) -> None:
    """Refuse a parameter of another shape, unless it has more rows than it had: a head that grew."""
    if not (old == new or (len(old) == len(new) > 0 and old[1:] == new[1:] and old[0] < new[0])):
        raise MatchError(
            f"{name!r} has shape {tuple(old)} in {owner} and {tuple(new)} in {later}: only a head that grew, with more "
            "rows and all else equal, can be matched"
        )


def _grown(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the place of another, with zeros behind it, so that it has as many rows."""
    tensor = tensor.to(like)
    if tensor.shape == like.shape:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(len(like) - len(tensor), *like.shape[1:])])


def _grown_basis(basis: Rotation, like: Tensor) -> Rotation:
    """The coordinates in the place of a parameter; rows that are new have axes of their own."""
    sides = [basis.left, basis.right]
    longer = 0 if like.dim() > 1 else 1
    q = sides[longer]
    if q is not None and len(q) != len(like):
        sides[longer] = torch.block_diag(q, torch.eye(len(like) - len(q)).to(q))  # type: ignore[no-untyped-call]
    return Rotation(*sides).to(like.device, like.dtype)


def _common(values: Sequence[Tensor], bases: Sequence[Tensor | None]) -> Tensor | None:
    """The eigenvectors of Σ Q diag(values) Qᵀ; None where neither side is rotated."""
    if all(basis is None for basis in bases):
        return None
    pairs = zip(values, bases, strict=True)
    return eigenbasis(reduce(torch.add, (torch.diag(v) if q is None else (q * v) @ q.mT for v, q in pairs)))


def _between(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is new:
        return None
    if old is None or new is None:
        return old if new is None else new.mT
    return new.mT @ old


def _prior(name: str, terms: Terms, theta: Tensor, rotated: bool) -> Precision:
    """δ of a parameter, the larger of the two: both have it for the same prior."""
    priors = [settings.prior_precision[name] for _, settings in terms if name in settings.prior_precision]
    if not any(isinstance(delta, Tensor) for delta in priors):
        return max(float(delta) for delta in priors)
    if rotated:
        raise SettingError(
            f"{name!r} has a prior precision for every weight, and a Kronecker-factored sum needs one for all of "
            "them: posterior.replace(prior_precision=1.0)"
        )
    return reduce(torch.maximum, (_grown(d, theta) if isinstance(d, Tensor) else theta.new_tensor(d) for d in priors))
