"""Running statistics of batch norms, on which predictions depend and which no posterior holds: two numbers each, to know them again."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesadam._alone import unwrap
from bayesadam._shards import is_sharded
from bayesadam._warnings import warn

_NAMES = ("running_mean", "running_var")


def running_statistics(model: nn.Module) -> dict[str, list[float]]:
    """Mean and Euclidean norm of every running mean and variance, by name.

    >>> running_statistics(nn.BatchNorm1d(4))
    {'running_mean': [0.0, 0.0], 'running_var': [1.0, 2.0]}
    """
    return {
        name: [float(buffer.double().mean()), float(buffer.double().norm())]
        for name, buffer in unwrap(model).named_buffers()
        if name.rpartition(".")[2] in _NAMES and buffer.numel() and not is_sharded(buffer)
    }


def warn_of_other_statistics(path: str | os.PathLike[str], saved: Any, model: nn.Module) -> None:
    """Warn where a posterior was saved with other statistics than the model has."""
    if not isinstance(saved, Mapping):
        return
    own = running_statistics(model)
    other = [name for name, numbers in own.items() if name in saved and not _close(numbers, saved[name])]
    if other:
        warn(
            f"the model's running statistics are not those that {path} was saved with (first {other[0]!r}, {len(other)} in all): "
            "predictions would be another network's. Load the model's own state dict before the posterior"
        )


def _close(numbers: list[float], saved: Any) -> bool:
    try:
        return all(math.isclose(a, float(b), rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(numbers, saved, strict=True))
    except (TypeError, ValueError):
        return False
