"""A Laplace prior on the weights, exp(−λ|θ|), as a proximal step after any rule's own."""

from torch import Tensor

from bayesadam.engine.rules.rule import Number


def shrink(weights: Tensor, metric: Tensor, *, lr: Number, sparsity: float) -> None:
    """The proximal step of the penalty λ|θ|₁ in a diagonal metric M, in place: |θ| loses α λ/M, not below 0.

    Adam's own metric is M = √v̂ + ε.
    """
    loss = metric.reciprocal().mul_(lr * sparsity)
    weights.copy_(weights.sign() * (weights.abs() - loss).clamp_(min=0))
