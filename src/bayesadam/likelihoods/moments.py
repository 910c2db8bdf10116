"""What is known of a network's outputs f before a likelihood makes a distribution of targets of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesadam.errors import MatchError


@dataclass(frozen=True, eq=False)
class Moments:
    """f of a batch under a posterior: N(mean, covariance), or draws.

    Attributes:
        mean: E[f], (batch, ...).
        variance: Var[f], of the same shape, without observation noise; None of the mean network alone.
        covariance: between the outputs of an example, (batch, outputs, outputs), where it was asked for.
        joint: between all examples too, (batch · outputs, batch · outputs), where it was asked for.
        draws: (n, batch, ...), where f was sampled.
    """

    mean: Tensor
    variance: Tensor | None = None
    covariance: Tensor | None = None
    joint: Tensor | None = None
    draws: Tensor | None = None


def rows(tensor: Tensor) -> Tensor:
    """(batch, ...) as (batch, outputs), also where an output is a single number, (batch,)."""
    return tensor.reshape(tensor.shape[0], -1)


def matched(y: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the outputs' shape: (batch,) serves (batch, 1), and the other way round."""
    if y.dim() > 0 and len(y) == len(outputs) and y[0].squeeze().shape == outputs[0].squeeze().shape:
        y = y.reshape(outputs.shape)
    if y.shape != outputs.shape:
        raise MatchError(f"the targets have shape {tuple(y.shape)}, the outputs {tuple(outputs.shape)}")
    return y.to(outputs)
