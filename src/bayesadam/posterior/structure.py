"""What a covariance structure must be able to do; `Diagonal` is the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from bayesadam.curvature.rotated import Rotation
from bayesadam.posterior.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

Named = Mapping[str, Tensor]


class Structure(Protocol):
    """The curvature of a Gaussian over named parameters, before N, δ and p are chosen.

    Every method is a pure function of the structure, the trained weights θ (`mode`) and the settings.
    """

    @property
    def kind(self) -> str:
        """The name asked for in `from_optimizer(..., structure=kind)` and written into files."""
        ...

    def mean(self, mode: Named, settings: Settings) -> dict[str, Tensor]:
        """E[θ]."""
        ...

    @property
    def second_moment(self) -> Named:
        """v̂ in the coordinates in which the covariance is diagonal."""
        ...

    @property
    def bases(self) -> Mapping[str, Rotation]:
        """Those coordinates, of the parameters whose own they are not."""
        ...

    def spread(self, settings: Settings) -> dict[str, Tensor]:
        """The variances of the coordinates."""
        ...

    def variance(self, settings: Settings) -> dict[str, Tensor]:
        """The marginal variances diag Σ."""
        ...

    def sample(
        self, mode: Named, settings: Settings, *, seed: int, n: int | None, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """Draws in the given types; a parameter's draw depends on the seed and its own name alone."""
        ...

    def log_prob(self, values: Named, mode: Named, settings: Settings) -> Tensor:
        """log q(values), over any leading dimensions."""
        ...

    def entropy(self, settings: Settings) -> Tensor:
        """H[q] in nats."""
        ...

    def flat_weights(self, settings: Settings) -> dict[str, int]:
        """How many weights of each parameter have no precision at all; names without any are left out."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved: tensors by role, then by parameter name."""
        ...

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """The same structure elsewhere."""
        ...

    def gathered(self) -> Self:
        """The same structure of whole tensors, where its own are spread over processes."""
        ...
