"""The Kronecker-factored Gaussian: diagonal in the eigenbases of each weight matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam.errors import SettingError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.settings import PrecisionRule, Settings
from bayesadam.gaussian.structure import Named, Reading, Stored, StructureSpec, outlined
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.match import Match
from bayesadam.readers.read import read_entry, working_dtype
from bayesadam.readers.rotated import RotatedReader, Rotation, eigenbasis, is_orthonormal


@dataclass(frozen=True, eq=False)
class Kronecker(Diagonal):
    """Cov vec(W) = (Q_R ⊗ Q_L) diag(1/(w v̂ᵖ + δ)) (Q_R ⊗ Q_L)ᵀ for every matrix W, diagonal for the rest.

    In the coordinates of its bases, where its second moments are, it is a `Diagonal`: every method is that one's between
    two rotations.
    """

    bases: Mapping[str, Rotation]
    kind = "kronecker"
    independent = False

    def _into(self, named: Named) -> dict[str, Tensor]:
        moments = self.second_moment
        return {
            name: self.bases[name].into(t.to(moments[name]), moments[name].dim()) if name in self.bases else t
            for name, t in named.items()
        }

    def _out_of(self, named: Named) -> dict[str, Tensor]:
        return {
            name: self.bases[name].out_of(tensor, self.second_moment[name].dim()) if name in self.bases else tensor
            for name, tensor in named.items()
        }

    def _rule(self, name: str, settings: Settings) -> PrecisionRule:
        if name in self.bases and isinstance(settings.prior_precision[name], Tensor):
            raise SettingError(
                f"a Kronecker-factored posterior needs one prior precision for all weights of {name!r}: a rotated prior "
                "of different ones is not diagonal"
            )
        return super()._rule(name, settings)

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """θ in the map form; in the likelihood form its coordinates shrink by w c/(w c + δ)."""
        if settings.form == "map":
            return dict(mode)
        return self._out_of(super().mean(self._into(mode), settings))

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances of the weights."""
        return {
            name: self.bases[name].diagonal(values) if name in self.bases else values
            for name, values in self.coordinate_variance(settings).items()
        }

    def sample(
        self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """Coordinates drawn one by one, and rotated back."""
        inner = {name: v.dtype if name in self.bases else dtypes[name] for name, v in self.second_moment.items()}
        drawn = super().sample(self._into(mode), settings, seed=seed, n=n, dtypes=inner)
        return {name: tensor.to(dtypes[name]) for name, tensor in self._out_of(drawn).items()}

    def log_prob(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """That of the coordinates: a rotation keeps volumes."""
        return super().log_prob(self._into(values), self._into(mode), settings)

    def filled(self, rows: Mapping[str, int]) -> Diagonal:
        """The same with v̂ = 1 in place of 0 in some rows; with a left basis in one of the directions that have no curvature.

        A row that no gradient reached lies in the space of those directions, where Σ is the same whichever are its axes.
        """
        places = dict(rows)
        for name in rows.keys() & self.bases.keys():
            v = self.second_moment[name]
            if self.bases[name].left is not None:
                places[name] = int((v.reshape(len(v), -1) == 0).sum(dim=1).argmax())
        return super().filled(places)

    def part(self, name: str) -> Kronecker:
        """The same of one parameter."""
        moments = {name: self.second_moment[name]}
        return Kronecker(moments, {name: self.bases[name]} if name in self.bases else {})

    def tensors(self) -> dict[str, Named]:
        """v̂ in its coordinates, and the bases under `left` and `right`."""
        left = {name: basis.left for name, basis in self.bases.items() if basis.left is not None}
        right = {name: basis.right for name, basis in self.bases.items() if basis.right is not None}
        return {**super().tensors(), "left": left, "right": right}

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Kronecker:
        """The same elsewhere."""
        bases = {name: basis.to(device, dtype) for name, basis in self.bases.items()}
        return Kronecker(super().to(device, dtype).second_moment, bases)


def kronecker_of(match: Match) -> Kronecker:
    """The structure that the state of a SOAP or a Shampoo holds; what they do not rotate, and other optimisers', is diagonal."""
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for entry in match.entries:
        if is_sharded(entry.parameter):
            raise SettingError(f"parameter {entry.name!r} is sharded, and a Kronecker-factored posterior is not")
        place = entry.parameter.device, working_dtype(entry.parameter.dtype)
        found = None
        if isinstance(entry.reader, RotatedReader):
            found = entry.reader.rotated(entry.state, entry.group, entry.parameter.shape)
        if found is None:
            moments[entry.name] = read_entry(entry)[1].to(*place)
            continue
        moments[entry.name], bases[entry.name] = found.second_moment.to(*place), found.rotation.to(*place)
    if not bases:
        raise SettingError(
            "structure='kronecker' needs eigenbases, which SOAP keeps: train with bayesadam.optim.SOAP or another that is "
            "read, or use structure='diagonal'"
        )
    return Kronecker(moments, bases)


def kronecker_from_gradients(gradients: Named, *, max_side: int = 10_000) -> Kronecker:
    """The structure of recorded gradients, (K, *shape) by parameter name: bases of Σ G Gᵀ and Σ Gᵀ G, v̂ the mean square in them.

    A vector gets the basis of Σ g gᵀ where there are as many gradients as it has entries; with fewer that matrix is flat in
    directions in which nothing was seen. Sides longer than `max_side` are left as they are.
    """
    moments: dict[str, Tensor] = {}
    bases: dict[str, Rotation] = {}
    for name, stack in gradients.items():
        found: list[Tensor | None] = [None, None]
        if stack.dim() > 2:
            matrices = stack.flatten(2)
            sides = (matrices.transpose(0, 1).flatten(1), matrices.flatten(0, 1).T)
            found = [eigenbasis(rows @ rows.T) if 1 < len(rows) <= max_side else None for rows in sides]
        elif stack.dim() == 2 and 1 < stack.shape[1] <= min(len(stack), max_side):
            found[1] = eigenbasis(stack.T @ stack)
        if any(basis is not None for basis in found):
            bases[name] = Rotation(*found)
            stack = torch.stack([bases[name].into(gradient, gradient.dim()) for gradient in stack])
        moments[name] = stack.square().mean(dim=0)
    if not bases:
        raise SettingError("no parameter has eigenbases to be found: use structure='diagonal' or 'low-rank'")
    return Kronecker(moments, bases)


def _build(reading: Reading) -> Kronecker:
    return kronecker_of(reading.match) if reading.gradients is None else kronecker_from_gradients(reading.gradients)


def _load(stored: Stored) -> Kronecker:
    """The second moments and their bases, each basis of the side of its parameter and orthogonal."""
    moments = stored.moments("second_moment")
    like = outlined(moments)

    def read(name: str) -> Rotation:
        v = like[name]
        sides = [stored.tensors.get(f"{side}.{name}") for side in ("left", "right")]
        lengths = [v.shape[0], v.numel() // max(v.shape[0], 1)] if v.dim() > 1 else [0, v.numel()]
        for basis, length in zip(sides, lengths, strict=True):
            if basis is not None and not (basis.shape == (length, length) and is_orthonormal(basis)):
                raise stored.damaged(f"a basis of {name!r} is not orthogonal, or not of its shape")
        return Rotation(*sides).to(torch.device("cpu") if v.is_meta else v.device, v.dtype)

    names = [name for name in like if any(f"{side}.{name}" in stored.tensors for side in ("left", "right"))]
    if stored.parameters is None:
        return Kronecker(moments, Lazy({name: meta((), torch.float32) for name in names}, read))
    return Kronecker(moments, {name: read(name) for name in names})


KRONECKER = StructureSpec("kronecker", _build, _load)
