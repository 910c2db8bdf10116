"""Types that modules of Gaussians share: tensors by parameter name, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

AnyPath = str | os.PathLike[str]
Named = Mapping[str, Tensor]
Types = Mapping[str, torch.dtype]


def outlined(named: Named) -> Named:
    """Shapes and types by name, without reading tensors that are on the disk."""
    outline: Named = getattr(named, "outline", named)
    return outline
