"""A Laplace prior over the weights of a network that Adam trains, as a proximal step after Adam's own."""

from __future__ import annotations

from torch import Tensor

from bayesadam.engine.rules.rule import Number

_EPS = 1e-8


def shrink(weights: Tensor, exp_avg_sq: Tensor, *, lr: Number, second: Number, sparsity: float) -> None:
    """The proximal step of the penalty λ|θ|₁ in Adam's own metric: |θ| loses α λ/(√v̂ + ε), not below 0.

    Args:
        weights: θ, changed in place.
        exp_avg_sq: v.
        lr: α.
        second: 1 − β₂ᵗ.
        sparsity: λ.
    """
    loss = (exp_avg_sq / second).sqrt_().add_(_EPS).reciprocal_().mul_(lr * sparsity)
    weights.copy_(weights.sign() * (weights.abs() - loss).clamp_(min=0))
