"""f's moments as `bayesadam.predict.linearised` will give them, from today's `predict`; goes once that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """E[f], Var[f], and covariances between outputs, (batch, c, c), and inputs too, (batch c, batch c)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    joint: Tensor | None


def linearised(
    posterior: Any, inputs: Any, *, forward: Any = None, covariance: bool = False, joint: bool = False
) -> Moments:
    """The moments of f under a posterior of one network."""
    name = posterior.likelihood or "regression"
    options = {"likelihood": name, "forward": forward, "covariance": covariance, "joint": joint, "shift": False}
    p = posterior.predict(inputs, predictive="linearised", **options)
    return Moments(p.mean, p.variance, p.covariance, p.joint_covariance if joint else None)
