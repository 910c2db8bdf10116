"""Types that the Gaussian's modules share, and a saved posterior's tensors as they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam._shards import placed_like
from bayesadam._storage import check_owner
from bayesadam.errors import FileError
from bayesadam.readers import working_dtype
from bayesadam.readers.formats.lazy import Lazy, meta

AnyPath = str | os.PathLike[str]
Named = Mapping[str, Tensor]
Types = Mapping[str, torch.dtype]


def outlined(named: Named) -> Named:
    """Shapes and types by name, without reading tensors that are on the disk."""
    found: Named = getattr(named, "outline", named)
    return found


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
