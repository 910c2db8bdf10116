"""Vadam (Khan et al. 2018): Adam at weights drawn from N(μ, 1/(N v + δ)), v being its own second moment."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.engine.rules.rule import Gaussian, Number, Perturbed, State, Step


@dataclass(frozen=True)
class Vadam(Perturbed):
    """Variational Adam; the algorithm stands in `bayesadam.optim.Vadam`.

    Attributes:
        betas: (β₁, β₂).
        prior_precision: δ.
        initial_std: the standard deviation that every weight starts from.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.01

    def start(self, weights: Tensor, n_data: Number) -> State:
        """m = 0 and v = (1/σ₀² − δ)/N."""
        first = (self.initial_std**-2 - self.prior_precision) / torch.as_tensor(n_data)
        second = torch.zeros_like(weights).add_(first.to(weights))
        return {"momentum": torch.zeros_like(weights), "second_moment": second}

    def at(self, weights: Tensor, state: State, noise: Tensor | None, step: Step, out: Tensor) -> None:
        """μ + ε/√(N v + δ)."""
        assert noise is not None
        root = (state["second_moment"] * step.n_data).add_(self.prior_precision).sqrt_()
        torch.addcdiv(weights, noise, root, out=out)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """One step with the square of one gradient."""
        vadam_update(
            weights,
            gradient,
            gradient.square(),
            state["momentum"],
            state["second_moment"],
            lr=step.lr,
            betas=self.betas,
            corrections=(step.first, step.second),
            pull=self.prior_precision / step.n_data,
        )

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """N(μ, 1/(N v + δ))."""
        return Gaussian(weights, (state["second_moment"] * n_data).add_(self.prior_precision).reciprocal_())


def vadam_update(
    mean: Tensor,
    gradient: Tensor,
    square: Tensor,
    momentum: Tensor,
    second_moment: Tensor,
    *,
    lr: Number,
    betas: tuple[float, float],
    corrections: tuple[Number, Number],
    pull: Number,
) -> None:
    """m ← β₁ m + (1−β₁)(ĝ + λμ/N), v ← β₂ v + (1−β₂) ĥ, μ ← μ − α m̂/(√v̂ + λ/N), in place.

    Args:
        mean: μ; with momentum m and second_moment v.
        gradient: ĝ; overwritten.
        square: ĥ, the average of the squared gradients.
        corrections: 1 − β₁ᵗ and 1 − β₂ᵗ.
        pull: λ/N.
    """
    momentum.mul_(betas[0]).add_(gradient.add_(mean * pull), alpha=1 - betas[0])
    second_moment.mul_(betas[1]).add_(square, alpha=1 - betas[1])
    denominator = second_moment.div(corrections[1]).sqrt_().add_(pull)
    mean.sub_(momentum.div(denominator).mul_(lr / corrections[0]))
