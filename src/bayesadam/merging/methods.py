"""The equations of merging, as pure functions of stacks, the models first; and the report of what a merge did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam._tables import aligned

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


def damped(moments: Tensor) -> Tensor:
    """F = v̂/⟨v̂⟩ + 1 of a tensor in each model, (models, n), ⟨v̂⟩ the mean over its weights; 1 where no v̂ is above 0.

    A model whose gradients are larger counts for no more than another, and no weight for less than half of the mean.

    >>> damped(torch.tensor([[1.0, 3.0], [0.0, 0.0], [20.0, 60.0]]))
    tensor([[1.5000, 2.5000],
            [1.0000, 1.0000],
            [1.5000, 2.5000]])
    """
    # By the largest first: the mean of second moments that are very small has few digits.
    relative = moments / torch.where((most := moments.amax(dim=1, keepdim=True)) > 0, most, 1.0)
    return relative / relative.mean(dim=1, keepdim=True).clamp(min=torch.finfo(relative.dtype).tiny) + 1


def gradient_matching(weights: Tensor, curvature: Tensor, base: Tensor, base_curvature: Tensor, delta: float) -> Tensor:
    """θ = θ₀ + (F₀ + Σ Fᵢ)⁻¹ Σ (F₀ + Fᵢ)(θᵢ − θ₀) with δ added to every F (Daheim et al. 2024).

    α is in F, which is of the whole training loss, N B v̂; F₀ is 0 where nothing is known of it.
    """
    at_base, at_models = base_curvature + delta, curvature + delta
    change = ((at_base + at_models) * (weights - base)).sum(dim=0)
    return base + change / (at_base + at_models.sum(dim=0))


def trimmed(weights: Tensor, curvature: Tensor, base: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """θ and F without the share of each model's changes that has the least (θᵢ − θ₀)² Fᵢ: there θᵢ = θ₀ and Fᵢ = 0.

    >>> theta, f = torch.tensor([[1.0, 5.0], [2.0, 0.5]]), torch.ones(2, 2)
    >>> trimmed(theta, f, torch.zeros(2), 0.5)
    (tensor([[0., 5.],
            [2., 0.]]), tensor([[0., 1.],
            [1., 0.]]))
    """
    size = (weights - base).square_().mul_(curvature)
    least = size.argsort(dim=1, stable=True)[:, : round(share * size.shape[1])]
    removed = torch.zeros_like(size, dtype=torch.bool).scatter_(1, least, True)
    return torch.where(removed, base, weights), curvature.masked_fill(removed, 0)


def kronecker(
    weights: Sequence[Tensor], operators: Sequence[Operator], diagonal: Tensor, start: Tensor, delta: float
) -> Tensor:
    """θ of (Σ Kᵢ + δ I)(θ − θ_F) = Σ Kᵢ (θᵢ − θ_F).

    Where all models have little curvature beside δ it stays at θ_F, `start`, the merge by the diagonals. The operators
    are x → Kᵢ x, αᵢ in it. Solved by conjugate gradients preconditioned with the diagonal of Σ Kᵢ.
    """
    residual = torch.stack([k(theta - start) for k, theta in zip(operators, weights, strict=True)]).sum(dim=0)
    solution, size = start.clone(), float(residual.norm())
    direction = residual / (diagonal + delta)
    product = float((residual * direction).sum())
    for _ in range(_STEPS):
        if float(residual.norm()) <= _TOLERANCE * size:
            break
        image = sum((k(direction) for k in operators), delta * direction)
        step = product / float((direction * image).sum())
        solution.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        scaled = residual / (diagonal + delta)
        product, before = float((residual * scaled).sum()), product
        direction = scaled.add_(direction, alpha=product / before)
    return solution


def by_inputs(changes: Tensor, inputs: Tensor, share: float) -> Tensor:
    """X of X (Σ Aᵢ + δ I) = Σ Xᵢ Aᵢ, Aᵢ the second moment of a layer's inputs in model i, α in it (Jin et al. 2023).

    Xᵢ = Wᵢ − W_D, so that directions that no input has stay at W_D. δ is that share of the mean diagonal of Σ Aᵢ.
    """
    total = inputs.sum(dim=0)
    delta = share * float(total.diagonal().mean()) or 1.0
    factor = torch.linalg.cholesky(total + delta * torch.eye(len(total)).to(total))
    return torch.cholesky_solve((changes @ inputs).sum(dim=0).mT, factor).mT


@dataclass(frozen=True)
class MergeReport:
    """What a merge of the models `labels` did; prints as a table of layers.

    `layers` has the mean share with which each model counted, by module. `notes` say what was merged in another way,
    and what was not known.
    """

    method: str
    labels: tuple[str, ...]
    layers: Mapping[str, tuple[float, ...]]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, method: str, labels: Iterable[str], shares: Mapping[str, tuple[int, Tensor]], notes: Iterable[str]
    ) -> MergeReport:
        """The report of sums of shares over so many weights, by parameter name."""
        modules: dict[str, tuple[int, Tensor]] = {}
        for name, (weights, total) in shares.items():
            module = name.rpartition(".")[0] or name
            before, sums = modules.get(module, (0, torch.zeros_like(total)))
            modules[module] = before + weights, sums + total
        layers = {name: tuple((total / weights).tolist()) for name, (weights, total) in modules.items()}
        return cls(method, tuple(labels), layers, tuple(notes))

    def __str__(self) -> str:
        numbers = [f"model {number}" for number in range(1, len(self.labels) + 1)]
        legend = [f"{number} is {label}" for number, label in zip(numbers, self.labels, strict=True) if number != label]
        lines = [["layer", *numbers]]
        lines += [[name, *(f"{share:.1%}" for share in shares)] for name, shares in self.layers.items()]
        return "\n".join([*aligned(lines), *legend, f"merged by {self.method}", *self.notes])
