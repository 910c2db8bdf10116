"""How the Deep Bayesian Bandits Showdown trains the agents among the paper's rows, as its code has it.

Greedy and MC dropout are trained by TensorFlow's RMSProp. Bayes by Backprop has a constant rate, no clipping, a
divergence over the number of observations, a prior by fan-in, a narrow start, biases that are points, and in training
one draw of every unit for each example (local reparameterisation).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.bandits.settings import Positive
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules import State
from bayesadam.engine.streams import Streams
from experiments.networks import NetworkSettings
from experiments.rules import Gaussian, Number, Rule, Step, TwoAdams, by_layer, sampled_outputs

# The first standard deviation of every weight.
_START = math.exp(-5)
# Added to the variance of a unit, so that its root has a slope.
_LEAST = 1e-6


@dataclass(frozen=True)
class RMSprop(Rule):
    """v ← ρ v + (1−ρ) g² from v = 1, θ ← θ − α g/√(v + ε): TensorFlow's."""

    betas = (0.0, 0.0)
    decay: float = 0.9
    eps: float = 1e-10

    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        return {"square_avg": torch.ones_like(weights)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        state["square_avg"].mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
        weights.sub_(gradient.mul_(step.lr).div_((state["square_avg"] + self.eps).sqrt_()))


@dataclass(frozen=True, eq=False)
class LocalBayesByBackprop(TwoAdams):
    """Adam on the evidence bound of q = N(μ, exp(2ρ)) of the weights, biases being points.

    The loss is mean NLL + KL(q‖p)/N with p = N(0, 1/δ): ∂/∂μ = g + δμ/N, ∂/∂ρ = 2σ² v + (δσ² − 1)/N with v by σ².
    `precision` is δ of every weight, (weights,); 0 of a bias.
    """

    precision: Tensor
    initial_std: float = _START

    def noise(self, streams: Streams, network: Network, batch: int) -> Tensor:
        """ε ~ N(0, 1) for every unit of each example."""
        return streams.normal(batch * sum((*network.hidden, network.n_outputs)))

    def masks(self, noise: Tensor, network: Network) -> list[Tensor]:
        """ε by layer, (s, b, units) each."""
        return by_layer(noise, (*network.hidden, network.n_outputs))

    def at(self, weights: Tensor, state: State, noise: Tensor, step: Step, out: Tensor) -> None:
        """μ: the gradient's own draws are those of units."""
        out.copy_(weights)

    def gradient(self, network: Network, weights: Tensor, state: State) -> Callable[..., Tensor]:
        """By μ and by the variances of the weights, (n, 2 weights), at one draw of every unit for each example."""

        def of_batch(x: Tensor, slope: Slope, *, masks: Sequence[Tensor]) -> Tensor:
            flat = weights.detach().clone(), (2 * state["rho"]).exp().detach()
            with torch.enable_grad():
                mean, variance = (unflatten(network, leaf.requires_grad_()) for leaf in flat)
                points = {name: torch.full_like(v, _LEAST) for name, v in variance.items() if name.endswith("bias")}
                outputs = sampled_outputs(network, mean, variance | points, x, masks)
            return torch.cat(torch.autograd.grad(outputs, flat, slope(outputs.detach())), dim=1)

        return of_batch

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        by_mean, by_variance = torch.split(gradient, weights.shape[1], dim=1)
        variance, uncertain = (2 * state["rho"]).exp(), self.precision > 0
        by_rho = 2 * variance * by_variance + (self.precision * variance - 1) / step.n_data
        pulled = by_mean + weights * (self.precision / step.n_data)
        self.descend(weights, state, pulled, by_rho * uncertain, step)

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(weights, (2 * state["rho"]).exp() * (self.precision > 0))


@dataclass(frozen=True)
class ShowdownSettings(NetworkSettings):
    """Of the Showdown's Bayes by Backprop: σ² of a reward, and the deviation that every weight starts from."""

    noise_variance: Positive = 0.01
    initial_std: Positive = _START

    def n_data(self, rounds: int) -> float:
        return float(max(rounds, 1))


def local_bayes_by_backprop(settings: ShowdownSettings, network: Network, device: torch.device) -> Rule:
    """p = N(0, 2/fan-in)."""
    shapes = network.shapes().values()
    parts = [torch.full(shape, shape[1] / 2 if len(shape) == 2 else 0.0).flatten() for shape in shapes]
    return LocalBayesByBackprop(torch.cat(parts).to(device), settings.initial_std)
