"""The tensors of a saved posterior, each checked: what is damaged or another model's is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._shards import placed_like
from bayesadam.curvature.read import working_dtype
from bayesadam.errors import FileError


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


def is_orthonormal(columns: Tensor) -> bool:
    """Whether the columns of a matrix are, within rounding."""
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    return bool(((columns.mT @ columns - identity).abs() < 1e-2).all())
