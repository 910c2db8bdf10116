"""Types that modules of Gaussians share: tensors by parameter name, in memory or on disk; inputs, and options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

AnyPath = str | os.PathLike[str]
Named = Mapping[str, Tensor]
Types = Mapping[str, torch.dtype]
# One batch: what `model(inputs)`, `model(*inputs)` or `model(**inputs)` takes.
Inputs = Tensor | np.ndarray | tuple[Tensor | np.ndarray, ...] | list[Tensor] | Mapping[str, Any]


class DrawKeywords(TypedDict, total=False):
    """The options of `Mixture.predict`."""

    draws: int | None
    forward: Callable[[nn.Module, Any], Any] | None
    generator: torch.Generator | None


class PredictKeywords(DrawKeywords, total=False):
    """The options of `Posterior.predict`."""

    covariance: bool | Literal["joint"]
