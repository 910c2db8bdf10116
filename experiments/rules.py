"""The rules that the paper compares with: how each learns, and the Gaussian or the functions that it ends with.

`experiments.stacks` trains by them. A new rule is a class with `start`, `at` (where the gradient is taken), `update`
and `gaussian`, and a line in `RULES`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine import rules
from bayesadam.engine.gradients import StackedGradient
from bayesadam.engine.network import ACTIVATIONS, Network, linear, unflatten
from bayesadam.engine.rules import State
from bayesadam.engine.streams import Streams

Number = float | Tensor


class Gaussian(NamedTuple):
    """A diagonal Gaussian over flat weights: mean and variance, (s, weights)."""

    mean: Tensor
    variance: Tensor


# Networks drawn from what a rule has learnt: stacked weights by name, and dropout masks where it has them.
Drawn = tuple[dict[str, Tensor], list[Tensor] | None]


class Step(NamedTuple):
    """α, 1 − β₁ᵗ, 1 − β₂ᵗ and N of one step."""

    lr: Number
    first: Number
    second: Number
    n_data: Number


class Rule(ABC):
    """One way to learn; it holds settings only.

    All functions work on flat weights (s, weights), one row per network, and on the memory that `start` made, whose
    tensors of two dimensions or more have one row per network, too. `lr` is its usual rate, where Adam's does not suit;
    with `needs_noise` the gradient is that of the mean negative log-likelihood at weights that `at` writes.
    """

    lr: ClassVar[float | None] = None
    needs_noise: ClassVar[bool] = False
    betas: tuple[float, float]

    @classmethod
    def with_settings(cls, **settings: Any) -> "Rule":
        """The rule with those of the settings that it has."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in settings.items() if name in names})

    @abstractmethod
    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        """The memory besides the weights, by name."""

    def noise(self, streams: Streams, network: Network, batch: int) -> Tensor:
        """The random numbers of a step, (s, ...): where units are dropped, one for each unit of each example."""
        return streams.uniform(batch * sum(network.hidden)) if network.dropout else torch.empty(0)

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """The factors of every hidden layer's units, (s, b, units) each, contiguous, where units are dropped."""
        parts = by_layer(noise, network.hidden) if network.dropout else ()
        return [dropout_mask(part, network.dropout) for part in parts] or None

    def gradient(self, network: Network, weights: Tensor, state: State) -> Callable[..., Tensor]:
        """What takes the gradient at the weights that `at` writes."""
        return StackedGradient(network, weights)

    def at(self, weights: Tensor, state: State, noise: Tensor, step: Step, out: Tensor) -> None:  # noqa: B027
        """Write the weights at which the gradient is taken into `out`; `noise` may be overwritten."""

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """One step, in place; `gradient` may be overwritten."""

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian | None:
        """The Gaussian over the weights that the rule ends with; None where it ends with a point."""
        return None

    def sample(self, network: Network, mean: Tensor, state: State, n_data: Number, streams: Streams, n: int) -> Drawn:
        """n functions of each network, (s·n, ...): weights drawn from the Gaussian, or the weights themselves.

        Those are dropped as in training (MC dropout): a mask per draw, the same at every input, makes it a function.
        """
        if (belief := self.gaussian(mean, state, n_data)) is not None:
            drawn = belief.mean.unsqueeze(1) + belief.variance.sqrt().unsqueeze(1) * streams.normal(n, mean.shape[1])
            return unflatten(network, drawn.flatten(0, 1)), None
        masks = None
        if network.dropout:
            kept = dropout_mask(streams.uniform(n, sum(network.hidden)), network.dropout).flatten(0, 1).unsqueeze(1)
            masks = list(torch.split(kept, list(network.hidden), dim=-1))
        return unflatten(network, mean.repeat_interleave(n, dim=0)), masks


@dataclass(frozen=True)
class Adam(Rule):
    """The engine's, with the penalty (λ/2)|θ|² of a `weight_decay` λ: it ends with a point."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        return rules.Adam().start(weights)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        rules.Adam(self.betas, self.weight_decay).update(weights, gradient, state, step.lr)


def by_layer(numbers: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """(s, b Σ widths) as (s, b, width) of each layer."""
    b = numbers.shape[1] // sum(widths)
    return [part.view(len(part), b, -1) for part in torch.split(numbers, [b * width for width in widths], dim=1)]


def dropout_mask(uniform: Tensor, rate: float) -> Tensor:
    """0 with probability r, otherwise 1/(1 − r)."""
    return (uniform >= rate).float().div_(1 - rate)


@dataclass(frozen=True)
class Badam(Adam):
    """Adam, and the Gaussian that its state holds: precision N √v̂ + δ, around θ or N √v̂/(N √v̂ + δ) θ."""

    prior_variance: float = 0.1
    form: str = "likelihood"

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """v̂ = v/(1 − β₂ᵗ), and 0 before the first step."""
        left = (1 - self.betas[1] ** state["step"][0].double()).clamp(min=torch.finfo(torch.float32).tiny)
        data = (state["exp_avg_sq"] / left.float()).sqrt() * n_data
        precision = data + 1 / self.prior_variance
        return Gaussian(data / precision * weights if self.form == "likelihood" else weights, precision.reciprocal())


class Perturbed(Rule):
    """Rules whose gradient is that of the mean negative log-likelihood at a draw θ = μ + σ ε from their Gaussian."""

    needs_noise = True

    @abstractmethod
    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        """The Gaussian over the weights."""

    def at(self, weights: Tensor, state: State, noise: Tensor, step: Step, out: Tensor) -> None:
        """μ + σ ε; the noise becomes σ ε, in place."""
        noise.mul_(self.gaussian(weights, state, step.n_data).variance.sqrt_())
        torch.add(weights, noise, out=out)

    def noise(self, streams: Streams, network: Network, batch: int) -> Tensor:
        return streams.normal(sum(math.prod(shape) for shape in network.shapes().values()))

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """Nothing is dropped."""
        return None


class TwoAdams(Perturbed):
    """Rules that learn the means and ρ, from which the deviations follow, by an Adam each."""

    betas: tuple[float, float] = (0.9, 0.999)
    initial_std: float

    def first_rho(self) -> float:
        """ρ of `initial_std`."""
        return math.log(self.initial_std)

    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        of_rho = {f"rho.{name}": tensor for name, tensor in rules.Adam().start(weights).items()}
        return {"rho": torch.full_like(weights, self.first_rho()), **rules.Adam().start(weights), **of_rho}

    def descend(self, weights: Tensor, state: State, by_mean: Tensor, by_rho: Tensor, step: Step) -> None:
        """One step of both."""
        of_rho = {name: state[f"rho.{name}"] for name in ("exp_avg", "exp_avg_sq", "step")}
        rules.Adam(self.betas).update(weights, by_mean, state, step.lr)
        rules.Adam(self.betas).update(state["rho"], by_rho, of_rho, step.lr)


@dataclass(frozen=True)
class BayesByBackprop(TwoAdams):
    """Bayes by Backprop (Blundell et al. 2015): Adam on the evidence bound of q = N(μ, softplus(ρ)²).

    The loss is mean NLL + KL(q‖p)/N with p = N(0, 1/δ): ∂/∂μ = g + δμ/N and ∂/∂σ = gε + (δσ − 1/σ)/N, with g the
    gradient at θ = μ + σε and ∂σ/∂ρ = sigmoid(ρ).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.02

    def first_rho(self) -> float:
        return math.log(math.expm1(self.initial_std))

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        std = F.softplus(state["rho"])
        by_std = (std * self.prior_precision).sub_(std.reciprocal()).div_(step.n_data)
        by_std.add_((gradient * noise).div_(std))
        gradient.add_(weights * (self.prior_precision / step.n_data))
        self.descend(weights, state, gradient, by_std.mul_(state["rho"].sigmoid()), step)

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(weights, F.softplus(state["rho"]).square())


@dataclass(frozen=True)
class Vadam(Perturbed):
    """Vadam (Khan et al. 2018): Adam at weights drawn from N(μ, 1/(N v + δ)), v being its own second moment."""

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.01

    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        """m = 0 and v = (1/σ₀² − δ)/N."""
        second = torch.zeros_like(weights).add_((self.initial_std**-2 - self.prior_precision) / n_data)
        return {"momentum": torch.zeros_like(weights), "second_moment": second.clamp_(min=0)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """v ← β₂ v + (1−β₂) g², m ← β₁ m + (1−β₁)(g + δμ/N), μ ← μ − α m̂/(√v̂ + δ/N)."""
        momentum, second, pull = state["momentum"], state["second_moment"], self.prior_precision / step.n_data
        second.mul_(self.betas[1]).add_(gradient.square(), alpha=1 - self.betas[1])
        momentum.mul_(self.betas[0]).add_(gradient.add_(weights * pull), alpha=1 - self.betas[0])
        denominator = second.div(step.second).sqrt_().add_(pull)
        weights.sub_(momentum.div(denominator).mul_(step.lr / step.first))

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(weights, (state["second_moment"] * n_data).add_(self.prior_precision).reciprocal_())


@dataclass(frozen=True)
class IVON(Perturbed):
    """IVON (Shen et al. 2024): a variational online Newton step, its Hessian estimated from the perturbation.

    d is `weight_decay`, at least 1e-4, since a flat loss has no other curvature, and h₀ `initial_hessian`; β₁ and β₂
    are not Adam's, and so no settings.
    """

    lr, betas = 0.02, (0.9, 0.99999)
    weight_decay: float = 1e-4
    initial_hessian: float = 1.0

    @property
    def decay(self) -> float:
        return max(self.weight_decay, 1e-4)

    def start(self, weights: Tensor, n_data: Number = 1.0) -> State:
        return {"momentum": torch.zeros_like(weights), "hessian": torch.full_like(weights, self.initial_hessian)}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """g ← β₁ g + (1−β₁) ĝ, h ← β₂ h + (1−β₂) f + ½(1−β₂)²(h−f)²/(h+d), m ← m − α(h₀+d)(g/(1−β₁ᵗ) + d m)/(h+d).

        f = N (h + d) n ĝ, with n = σ ε the noise and ĝ the gradient at m + n.
        """
        momentum, hessian = state["momentum"], state["hessian"]
        (beta1, beta2), decay = self.betas, self.decay
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        # As h − (1−β₂)(h − f): in float32 the default β₂ is off by a thousandth of 1 − β₂, which would shift h's limit.
        damped = hessian + decay
        excess = hessian - (gradient * noise).mul_(damped).mul_(step.n_data)
        hessian.sub_(excess, alpha=1 - beta2).addcdiv_(excess.square_(), damped, value=0.5 * (1 - beta2) ** 2)
        direction = momentum.div(step.first).add_(weights * decay).mul_(step.lr * (self.initial_hessian + decay))
        weights.sub_(direction.div_(hessian + decay))

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(weights, (state["hessian"] + self.decay).mul_(n_data).reciprocal_())


# MC dropout is Adam of a network with dropout.
RULES: dict[str, type[Rule]] = {"adam": Adam, "mc-dropout": Adam, "bbb": BayesByBackprop, "vadam": Vadam, "ivon": IVON}
Stacked = Mapping[str, Tensor]


def sampled_outputs(network: Network, mean: Stacked, variance: Stacked, x: Tensor, noise: Sequence[Tensor]) -> Tensor:
    """f(x) at weights drawn from a diagonal Gaussian, one draw per row: (n, b, outputs); ε is (n, b, units) by layer.

    The weights of one row only enter through its activations, so these are drawn instead (local reparameterisation):
    N(a Wᵀ + b, a² Sᵀ + s), unit by unit, exactly as if all weights had been drawn for each row.
    """
    activation, h = ACTIVATIONS[network.activation](), x
    for number, epsilon in enumerate(noise):
        weight, bias = f"layer{number}.weight", f"layer{number}.bias"
        std = linear(h.square(), variance[weight], variance[bias]).clamp(min=0).sqrt()
        h = torch.addcmul(linear(h, mean[weight], mean[bias]), std, epsilon)
        if number < len(network.hidden):
            h = activation(h)
    return h
