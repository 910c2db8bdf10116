"""What a covariance structure can do, what it is built or loaded from, and the record that says how."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor

from bayesadam._shards import placed_like
from bayesadam._storage import check_owner
from bayesadam.errors import FileError
from bayesadam.gaussian.settings import Precision, Settings
from bayesadam.readers import working_dtype
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.match import Match
from bayesadam.readers.rotated import Rotation

AnyPath = str | os.PathLike[str]
Named = Mapping[str, Tensor]
Types = Mapping[str, torch.dtype]


def outlined(named: Named) -> Named:
    """Shapes and types by name, without reading tensors that are on the disk."""
    found: Named = getattr(named, "outline", named)
    return found


@dataclass(frozen=True, eq=False)
class Directions:
    """Orthonormal Qᵀ by parameter name, (K, *shape), along which a white vector has variances below 1, (K,)."""

    rows: Named
    variance: Tensor

    def coordinates(self, white: Named) -> Tensor:
        """Qᵀ z, (..., K), of z by parameter name with any leading dimensions."""
        parts = []
        for name, rows in self.rows.items():
            z = white[name].unsqueeze(-1).flatten(white[name].dim() - rows.dim() + 1)
            parts.append((z @ rows.unsqueeze(-1).flatten(1).T.to(z)).to(self.variance.device))
        return reduce(torch.add, parts)

    def scaled(self, white: Named, factors: Tensor) -> dict[str, Tensor]:
        """z with its coordinates along Q multiplied by factors."""
        change = self.coordinates(white) * (factors - 1)
        return {name: z + torch.tensordot(change.to(z), self.rows[name].to(z), dims=1) for name, z in white.items()}


class Structure(ABC):
    """The curvature of a Gaussian over named parameters, before N, δ and p are chosen.

    Attributes:
        kind: its name, as in `from_optimizer(..., structure=kind)` and in files.
        second_moment: v̂ in the coordinates in which the covariance is diagonal; tensors may be on the disk.
        bases: those coordinates, of the parameters whose own they are not.
        independent: whether the weights themselves are independent, each with a second moment of its own.
        has_directions: whether `directions` are ever other than None: parameters are then not independent of another.
    """

    kind: str
    second_moment: Named
    bases: Mapping[str, Rotation] = MappingProxyType({})
    independent = False
    has_directions = False

    @abstractmethod
    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """E[θ]."""

    @abstractmethod
    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """The variances of the coordinates."""

    @abstractmethod
    def precision_factors(self, settings: Settings) -> tuple[Named, Named]:
        """(d, R) by parameter name of the precision diag(d) + Rᵀ R: d in the coordinates, R (K, *shape) or {}."""

    def directions(self, settings: Settings) -> Directions | None:
        """Directions over all coordinates together with less variance than `coordinate_variance`; None without any."""
        return None

    @abstractmethod
    def curvatures(self, power: float, shape: Mapping[str, Precision] | None = None) -> list[Tensor]:
        """The eigenvalues v̂ᵖ, with or without those that are 0; with a prior's shape R those of R^(−½) Vᵖ R^(−½)."""

    @abstractmethod
    def effective_dimension(self, settings: Settings) -> float:
        """γ = tr(w c Σ), the number of directions that the data determine and not the prior."""

    def limits(self, settings: Settings) -> str | None:
        """What is wrong with the structure at these settings, and what to do; None where nothing is."""
        return None

    @abstractmethod
    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances diag Σ."""

    @abstractmethod
    def sample(self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Types) -> dict[str, Tensor]:
        """Draws in the given types; a parameter's draw depends on the seed and its own name alone."""

    @abstractmethod
    def squared_distance(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """(θ − μ)ᵀ Λ (θ − μ) of values θ, over any leading dimensions, Λ the precision; sums in float64."""

    @abstractmethod
    def log_det(self, settings: Settings) -> Tensor:
        """log det Λ of the precision, in float64."""

    @abstractmethod
    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """How many weights of each parameter have no precision at all; names without any are left out."""

    @abstractmethod
    def tensors(self) -> dict[str, Named]:
        """What must be saved: tensors by role, then by parameter name."""

    @abstractmethod
    def each(self, change: Callable[[Tensor], Tensor]) -> Structure:
        """The same structure with every tensor changed: moved, or gathered."""

    def part(self, name: str) -> Structure:
        """The structure of one parameter alone, in memory; only where there are no directions over all."""
        raise NotImplementedError(f"a {self.kind} structure has no parts")

    def diagonal(self, name: str) -> Tensor:
        """The diagonal of V in the space of the weights: v̂, or Q_L² v̂ (Q_R²)ᵀ, squared entry by entry."""
        v = self.second_moment[name]
        return self.bases[name].diagonal(v) if name in self.bases else v


@dataclass(frozen=True, eq=False)
class Stored:
    """A saved posterior's tensors under `role.parameter`; without a model's `parameters` they stay on the disk."""

    path: AnyPath
    tensors: Named
    names: Sequence[str]
    parameters: Named | None

    def weights(self, role: str) -> Named:
        """Finite tensors of the parameters' shapes, on their devices; none of them negative but in `mode`."""
        like = {name: outlined(self.tensors)[f"{role}.{name}"] for name in self.names}
        kinds = {name: working_dtype(tensor.dtype) for name, tensor in like.items()}

        def read(name: str) -> Tensor:
            tensor = self.tensors[f"{role}.{name}"]
            if not bool(torch.isfinite(tensor).all()):
                raise self.damaged(f"{name!r} has entries that are not finite")
            if role != "mode" and bool((tensor < 0).any()):
                raise self.damaged(f"the second moment of {name!r} has negative entries")
            found = tensor if self.parameters is None else placed_like(tensor, self.parameters[name])
            return found.to(kinds[name])

        if self.parameters is None:
            return Lazy({name: meta(tuple(tensor.shape), kinds[name]) for name, tensor in like.items()}, read)
        check_owner(self.path, {name: tensor.shape for name, tensor in like.items()}, self.parameters)
        return {name: read(name) for name in self.names}

    def damaged(self, why: str) -> FileError:
        """The error to raise."""
        return FileError(f"{self.path} is damaged: {why}")


@dataclass(frozen=True, eq=False)
class Reading:
    """The optimiser's state, matched once, and v̂ of each parameter: of `gradients`, (K, *shape), if recorded."""

    match: Match
    second_moment: Named
    gradients: Named | None = None


@dataclass(frozen=True)
class StructureSpec:
    """A structure as the registry knows it; a KeyError of `load` is a tensor that a file lacks.

    Some need recorded gradients, and of these some the optimiser's own second moment too, its state.
    """

    name: str
    build: Callable[[Reading], Structure]
    load: Callable[[Stored], Structure]
    needs_gradients: bool = False
    needs_state: bool = False
