"""The equations of merging, as pure functions of stacks: the models are the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]
# Conjugate gradients stop at this share of the right-hand side, or after so many steps.
_TOLERANCE, _STEPS = 1e-3, 500


def counted_shares(curvature: Tensor, counts: Tensor) -> Tensor:
    """Fᵢ / Σ Fⱼ, α in F: the share with which each model counts for each weight; αᵢ / Σ αⱼ where all F are 0."""
    alpha = counts.to(curvature).reshape(-1, *[1] * (curvature.dim() - 1))
    # By the largest first: second moments may be so small that their sum has few digits.
    largest = curvature.amax(dim=0)
    relative = torch.where(largest > 0, curvature / largest, alpha)
    return relative.div_(relative.sum(dim=0))


def fisher(weights: Tensor, curvature: Tensor, counts: Tensor) -> Tensor:
    """θ = (Σ Fᵢ)⁻¹ Σ Fᵢ θᵢ, α in F, and the average by α where Σ F = 0 (Matena & Raffel 2022).

    >>> fisher(torch.tensor([[1.0, 1.0], [5.0, 5.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.ones(2))
    tensor([2., 3.])
    """
    merged = counted_shares(curvature, counts).mul_(weights).sum(dim=0)
    # To the bit the same where all are, and −inf stays what it is.
    return torch.where((weights == weights[0]).all(dim=0), weights[0], merged)


def gradient_matching(weights: Tensor, curvature: Tensor, base: Tensor, base_curvature: Tensor, delta: float) -> Tensor:
    """θ = θ₀ + (F₀ + Σ Fᵢ)⁻¹ Σ (F₀ + Fᵢ)(θᵢ − θ₀) with δ added to every F (Daheim et al. 2024).

    α is in F, which is of the whole training loss, N B v̂; F₀ is 0 where nothing is known of it.
    """
    own = base_curvature + delta
    every = curvature + delta
    change = ((own + every) * (weights - base)).sum(dim=0)
    return base + change / (own + every.sum(dim=0))


def kronecker(
    weights: Sequence[Tensor], operators: Sequence[Operator], diagonal: Tensor, start: Tensor, delta: float
) -> Tensor:
    """θ of (Σ Kᵢ + δ I)(θ − θ_F) = Σ Kᵢ (θᵢ − θ_F).

    Where all models have little curvature beside δ it stays at θ_F, `start`, the merge by the diagonals. The operators
    are x → Kᵢ x, αᵢ in it. Solved by conjugate gradients preconditioned with the diagonal of Σ Kᵢ.
    """
    residual = torch.stack([k(theta - start) for k, theta in zip(operators, weights, strict=True)]).sum(dim=0)
    found, size = start.clone(), float(residual.norm())
    direction = residual / (diagonal + delta)
    product = float((residual * direction).sum())
    for _ in range(_STEPS):
        if float(residual.norm()) <= _TOLERANCE * size:
            break
        image = sum((k(direction) for k in operators), delta * direction)
        step = product / float((direction * image).sum())
        found.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        scaled = residual / (diagonal + delta)
        product, before = float((residual * scaled).sum()), product
        direction = scaled.add_(direction, alpha=product / before)
    return found
