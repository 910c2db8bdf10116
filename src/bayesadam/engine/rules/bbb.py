"""Bayes by Backprop (Blundell et al. 2015): Adam on the evidence bound of q = N(μ, softplus(ρ)²)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.rules.adam import adam_state, adam_update
from bayesadam.engine.rules.rule import Gaussian, Number, Perturbed, State, Step


@dataclass(frozen=True)
class BayesByBackprop(Perturbed):
    """Mean NLL + KL(q‖p)/N with p = N(0, 1/δ) and the Gaussian KL in closed form.

    ∂/∂μ = g + δμ/N and ∂/∂σ = gε + (δσ − 1/σ)/N, with g the gradient at θ = μ + σε and ∂σ/∂ρ = sigmoid(ρ).

    Attributes:
        betas: Adam's (β₁, β₂).
        prior_precision: δ.
        initial_std: where every σ starts.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.02

    def start(self, weights: Tensor, n_data: Number) -> State:
        """ρ, and Adam's state for μ and for ρ."""
        rho = torch.full_like(weights, math.log(math.expm1(self.initial_std)))
        own = {f"rho.{name}": tensor for name, tensor in adam_state(weights).items()}
        return {"rho": rho, "std": torch.empty_like(weights), **adam_state(weights), **own}

    def at(self, weights: Tensor, state: State, noise: Tensor | None, step: Step, out: Tensor) -> None:
        """μ + σ ε."""
        assert noise is not None
        state["std"].copy_(F.softplus(state["rho"]))
        torch.addcmul(weights, state["std"], noise, out=out)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """Adam for μ and for ρ."""
        assert noise is not None
        std = state["std"]
        by_std = (std * self.prior_precision).sub_(std.reciprocal()).div_(step.n_data).addcmul_(gradient, noise)
        gradient.add_(weights * (self.prior_precision / step.n_data))
        own = {name: state[f"rho.{name}"] for name in ("exp_avg", "exp_avg_sq", "step")}
        adam_update(weights, gradient, state, lr=step.lr, betas=self.betas)
        adam_update(state["rho"], by_std.mul_(state["rho"].sigmoid()), own, lr=step.lr, betas=self.betas)

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """N(μ, softplus(ρ)²)."""
        return Gaussian(weights, F.softplus(state["rho"]).square())
