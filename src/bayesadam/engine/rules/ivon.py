"""IVON (Shen et al. 2024): a variational online Newton step, its Hessian estimated from the perturbation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.engine.rules.rule import Gaussian, Number, Perturbed, State, Step

_LEAST_DECAY = 1e-4


@dataclass(frozen=True)
class IVON(Perturbed):
    """Improved variational online Newton; the algorithm stands in `bayesadam.optim.IVON`.

    Attributes:
        averages: (β₁, β₂).
        prior_precision: δ = N d, with d the weight decay; None takes d = `weight_decay`.
        weight_decay: d, at least 1e-4, used where no `prior_precision` is given.
        initial_hessian: h₀; None takes the one with standard deviation `initial_std`.
        initial_std: the standard deviation that every weight starts from, used where no `initial_hessian` is given.
    """

    lr = 0.02
    averages: tuple[float, float] = (0.9, 0.99999)
    prior_precision: float | None = None
    weight_decay: float = 1e-4
    initial_hessian: float | None = 1.0
    initial_std: float = 0.02

    @property
    def betas(self) -> tuple[float, float]:  # type: ignore[override]
        """(β₁, β₂), which are not Adam's."""
        return self.averages

    def decay(self, n_data: Number) -> Number:
        """d. Where the loss is flat, d alone keeps the step finite."""
        return max(self.weight_decay, _LEAST_DECAY) if self.prior_precision is None else self.prior_precision / n_data

    def start(self, weights: Tensor, n_data: Number) -> State:
        """g = 0 and h = h₀."""
        if self.initial_hessian is None:
            first = torch.as_tensor(self.initial_std**-2 / n_data - self.decay(n_data)).to(weights)
        else:
            first = weights.new_tensor(self.initial_hessian)
        hessian = torch.zeros_like(weights).add_(first)
        return {"momentum": torch.zeros_like(weights), "hessian": hessian, "initial_hessian": first}

    def at(self, weights: Tensor, state: State, noise: Tensor | None, step: Step, out: Tensor) -> None:
        """m + ε/√(N (h + d))."""
        assert noise is not None
        torch.addcdiv(weights, noise, self._precision(state, step.n_data).sqrt_(), out=out)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """One step with the product of one gradient and its perturbation."""
        assert noise is not None
        ivon_update(
            weights,
            gradient,
            (gradient * noise).div_(self._precision(state, step.n_data).sqrt_()),
            state["momentum"],
            state["hessian"],
            lr=step.lr,
            betas=self.betas,
            correction=step.first,
            n_data=step.n_data,
            decay=self.decay(step.n_data),
            initial_hessian=state["initial_hessian"],
        )

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """N(m, 1/(N (h + d)))."""
        return Gaussian(weights, self._precision(state, n_data).reciprocal_())

    def _precision(self, state: State, n_data: Number) -> Tensor:
        return (state["hessian"] + self.decay(n_data)).mul_(n_data)


def ivon_update(
    mean: Tensor,
    gradient: Tensor,
    product: Tensor,
    momentum: Tensor,
    hessian: Tensor,
    *,
    lr: Number,
    betas: tuple[float, float],
    correction: Number,
    n_data: Number,
    decay: Number,
    initial_hessian: Number,
) -> None:
    """g ← β₁ g + (1−β₁) ĝ, h ← β₂ h + (1−β₂) f + ½(1−β₂)²(h−f)²/(h+d), m ← m − α(h₀+d)(g/(1−β₁ᵗ) + d m)/(h+d), in place.

    Args:
        mean: m; with gradient ĝ, momentum g, hessian h, decay d.
        product: the average of n ∇L(m + n); f = κ(h + d) times that, κ being `n_data`. Overwritten.
        correction: 1 − β₁ᵗ.
    """
    momentum.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    # As h − (1−β₂)(h − f): in float32 the default β₂ is off by a thousandth of 1 − β₂, which would shift h's fixed point.
    damped = hessian + decay
    excess = hessian - product.mul_(damped).mul_(n_data)
    hessian.sub_(excess, alpha=1 - betas[1]).addcdiv_(excess.square_(), damped, value=0.5 * (1 - betas[1]) ** 2)
    direction = momentum.div(correction).add_(mean * decay).mul_(lr * (initial_hessian + decay))
    mean.sub_(direction.div_(hessian + decay))
