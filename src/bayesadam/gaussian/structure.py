"""What a covariance structure must be able to do, what it is built or loaded from, and the record that says how."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._shards import placed_like
from bayesadam.errors import FileError
from bayesadam.gaussian.settings import Precision, Settings
from bayesadam.readers.match import Match
from bayesadam.readers.read import Curvature, working_dtype
from bayesadam.readers.rotated import Rotation

Named = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Directions:
    """Orthonormal directions Q over all weights together, along which a white vector is shorter than elsewhere.

    Attributes:
        rows: Qᵀ by parameter name, (K, *shape).
        variance: along each, at most 1, (K,).
    """

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

    Every method is a pure function of the structure, the trained weights θ (`mode`) and the settings.

    Attributes:
        kind: the name asked for in `from_optimizer(..., structure=kind)` and written into files.
        second_moment: v̂ in the coordinates in which the covariance is diagonal.
        bases: those coordinates, of the parameters whose own they are not.
        independent: whether the weights themselves are independent, each with a second moment of its own.
        has_directions: whether `directions` are ever other than None.
        flat_reason: why weights may have no precision at all, for messages.
    """

    kind: str
    second_moment: Named
    bases: Mapping[str, Rotation]
    independent = False
    has_directions = False
    flat_reason = "Their gradient was never other than zero: dead units or constant inputs"

    @abstractmethod
    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """E[θ]."""

    @abstractmethod
    def coordinate_variance(self, settings: Settings) -> dict[str, Tensor]:
        """The variances of the coordinates."""

    @abstractmethod
    def precision_factors(self, settings: Settings) -> tuple[Named, Named]:
        """(d, R) by parameter name of the precision diag(d) + Rᵀ R: d in the coordinates of `bases`, R (K, *shape) or {}."""

    def directions(self, settings: Settings) -> Directions | None:
        """Directions over all coordinates together with less variance than `coordinate_variance` says; None without any."""
        return None

    @abstractmethod
    def curvatures(self, power: float, shape: Mapping[str, Precision] | None = None) -> list[Tensor]:
        """The eigenvalues v̂ᵖ, those that are 0 left out or not; with the shape R of a prior those of R^(−½) Vᵖ R^(−½)."""

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
    def sample(
        self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """Draws in the given types; a parameter's draw depends on the seed and its own name alone."""

    @abstractmethod
    def log_prob(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """log q(values), over any leading dimensions."""

    @abstractmethod
    def entropy(self, settings: Settings) -> Tensor:
        """H[q] in nats."""

    @abstractmethod
    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """How many weights of each parameter have no precision at all; names without any are left out."""

    @abstractmethod
    def filled(self, rows: Mapping[str, int]) -> Structure:
        """The same with v̂ = 1 in place of 0 for one row of a parameter, a row that no gradient ever reached."""

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved: tensors by role, then by parameter name."""

    @abstractmethod
    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Structure:
        """The same structure elsewhere."""

    def gathered(self) -> Structure:
        """The same structure of whole tensors, where its own are sharded."""
        return self


@dataclass(frozen=True, eq=False)
class Stored:
    """A saved posterior's tensors, `role.parameter` each, the names of its parameters, and those of the model."""

    path: str | os.PathLike[str]
    tensors: Mapping[str, Tensor]
    names: Sequence[str]
    parameters: Mapping[str, nn.Parameter]

    def weights(self, role: str) -> dict[str, Tensor]:
        """Finite tensors of the parameters' shapes, on their devices."""
        named = {name: self.tensors[f"{role}.{name}"] for name in self.names}
        storage.check_owner(self.path, {name: tensor.shape for name, tensor in named.items()}, self.parameters)
        for name, tensor in named.items():
            if not bool(torch.isfinite(tensor).all()):
                raise self.damaged(f"{name!r} has entries that are not finite")
        return {n: placed_like(t, self.parameters[n]).to(working_dtype(t.dtype)) for n, t in named.items()}

    def moments(self, role: str) -> dict[str, Tensor]:
        """The same, none of them negative."""
        found = self.weights(role)
        for name, v in found.items():
            if bool((v < 0).any()):
                raise self.damaged(f"the second moment of {name!r} has negative entries")
        return found

    def damaged(self, why: str) -> FileError:
        """The error to raise."""
        return FileError(f"{self.path} is damaged: {why}")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a structure is built from: the optimiser's state, matched once.

    Attributes:
        curvature: v̂ of each parameter, the recorded gradients' where there are any.
        gradients: recorded gradients by name, (K, *shape); None without a recorder.
    """

    match: Match
    curvature: Curvature
    gradients: Named | None = None


@dataclass(frozen=True)
class StructureSpec:
    """A structure as the registry knows it.

    Attributes:
        load: builds it from the tensors of a file; a KeyError is a tensor that is missing.
        needs_gradients: whether it is built from recorded gradients alone.
        needs_state: whether it needs the optimiser's own second moment too where gradients are recorded.
    """

    name: str
    build: Callable[[Reading], Structure]
    load: Callable[[Stored], Structure]
    needs_gradients: bool = False
    needs_state: bool = False
