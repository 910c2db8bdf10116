"""The rules that the paper compares with, and what each of them ends with: a Gaussian, or functions drawn from it.

They train on `experiments.stacks`. A new rule is a class with `start`, `at` (where the gradient is taken),
`update` and `gaussian`, and a line in `RULES`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine import rules
from bayesadam.engine.network import ACTIVATIONS, dropout_mask, linear, unflatten
from bayesadam.engine.rules import EPS, State
from experiments import stacks
from experiments.stacks import (
    Dropped,
    Network,
    Number,
    Stack,
    Step,
    Streams,
    adam_state,
    adam_update,
    second_moment,
)


class Gaussian(NamedTuple):
    """A diagonal Gaussian over flat weights: mean and variance, (s, weights)."""

    mean: Tensor
    variance: Tensor


# Networks drawn from what a rule has learnt: stacked weights by name, and dropout masks where it has them.
Drawn = tuple[dict[str, Tensor], list[Tensor] | None]


class Rule(stacks.Rule):
    """A rule of a stack, and what it ends with."""

    # Whether the rule starts from weights that Adam has trained; its usual rate, where Adam's does not suit.
    starts_trained: ClassVar[bool] = False
    lr: ClassVar[float | None] = None

    @classmethod
    def with_settings(cls, **settings: Any) -> "Rule":
        """The rule with those of the settings that it has."""
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in settings.items() if name in own})

    def steps(self, given: int) -> int:
        """The number of steps it takes where Adam takes `given`."""
        return given

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian | None:
        """The Gaussian over the weights that the rule ends with; None where it ends with a point."""
        return None

    def sample(self, network: Network, mean: Tensor, state: State, n_data: Number, streams: Streams, n: int) -> Drawn:
        """n functions of each network, (s·n, ...): weights drawn from the Gaussian, or the weights themselves."""
        found, drawn = self.gaussian(mean, state, n_data), mean.unsqueeze(1).expand(-1, n, -1)
        if found is not None:
            drawn = found.mean.unsqueeze(1) + found.variance.sqrt().unsqueeze(1) * streams.normal(n, mean.shape[1])
        return unflatten(network, drawn.flatten(0, 1)), None


@dataclass(frozen=True)
class Adam(stacks.Adam, Rule):
    """The stack's, with `sparsity`: λ of a Laplace prior exp(−λ|θ|), a proximal step that v never sees.

    In Adam's metric |θ| loses α λ/(√v̂ + ε), not below 0.
    """

    sparsity: float = 0.0

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        super().update(weights, gradient, state, noise, step)
        if self.sparsity:
            metric = (state["exp_avg_sq"] / step.second).sqrt_().add_(EPS)
            weights.copy_(weights.sign() * (weights.abs() - step.lr * self.sparsity / metric).clamp_(min=0))


@dataclass(frozen=True)
class Dropout(Dropped, Adam):
    """Adam under dropout, which goes on in prediction (MC dropout)."""

    def sample(self, network: Network, mean: Tensor, state: State, n_data: Number, streams: Streams, n: int) -> Drawn:
        """One mask per draw, the same at every input, makes each draw a function."""
        drawn = dropout_mask(streams.uniform(n, sum(network.hidden)), network.dropout).flatten(0, 1).unsqueeze(1)
        masks = list(torch.split(drawn, list(network.hidden), dim=-1))
        return unflatten(network, mean.repeat_interleave(n, dim=0)), masks


@dataclass(frozen=True)
class Badam(Adam):
    """Adam, and the Gaussian that its state holds: precision N c + δ with c = v̂ᵖ, around θ or N c/(N c + δ) θ."""

    prior_variance: float = 0.1
    power: float = 0.5
    form: str = "likelihood"

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        data = second_moment(state, self.betas[1]).pow(self.power) * n_data
        precision = data + 1 / self.prior_variance
        return Gaussian(data / precision * weights if self.form == "likelihood" else weights, precision.reciprocal())


@dataclass(frozen=True)
class DroppedBadam(Dropped, Badam):
    """Badam, trained under dropout."""


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

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        return streams.normal(*lead, sum(math.prod(shape) for shape in network.shapes().values()))


@dataclass(frozen=True)
class BayesByBackprop(Perturbed):
    """Bayes by Backprop (Blundell et al. 2015): Adam on the evidence bound of q = N(μ, softplus(ρ)²).

    The loss is mean NLL + KL(q‖p)/N with p = N(0, 1/δ): ∂/∂μ = g + δμ/N and ∂/∂σ = gε + (δσ − 1/σ)/N, with g the
    gradient at θ = μ + σε and ∂σ/∂ρ = sigmoid(ρ).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.02

    def start(self, weights: Tensor, n_data: Number) -> State:
        rho = torch.full_like(weights, math.log(math.expm1(self.initial_std)))
        own = {f"rho.{name}": tensor for name, tensor in adam_state(weights).items()}
        return {"rho": rho, **adam_state(weights), **own}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        std = F.softplus(state["rho"])
        by_std = (std * self.prior_precision).sub_(std.reciprocal()).div_(step.n_data)
        by_std.add_((gradient * noise).div_(std))
        gradient.add_(weights * (self.prior_precision / step.n_data))
        own = {name: state[f"rho.{name}"] for name in ("exp_avg", "exp_avg_sq", "step")}
        adam_update(weights, gradient, state, step.lr, rules.Adam(self.betas))
        adam_update(state["rho"], by_std.mul_(state["rho"].sigmoid()), own, step.lr, rules.Adam(self.betas))

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(weights, F.softplus(state["rho"]).square())


@dataclass(frozen=True)
class Vadam(Perturbed):
    """Vadam (Khan et al. 2018): Adam at weights drawn from N(μ, 1/(N v + δ)), v being its own second moment."""

    betas: tuple[float, float] = (0.9, 0.999)
    prior_precision: float = 1.0
    initial_std: float = 0.01

    def start(self, weights: Tensor, n_data: Number) -> State:
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

    `averages` are (β₁, β₂), which are not Adam's. d is `weight_decay`, at least 1e-4, since a flat loss has no other
    curvature, and h₀ `initial_hessian`.
    """

    lr = 0.02
    averages: tuple[float, float] = (0.9, 0.99999)
    weight_decay: float = 1e-4
    initial_hessian: float = 1.0

    @property
    def betas(self) -> tuple[float, float]:  # type: ignore[override]
        return self.averages

    @property
    def decay(self) -> float:
        return max(self.weight_decay, 1e-4)

    def start(self, weights: Tensor, n_data: Number) -> State:
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


@dataclass(frozen=True)
class SWAG(Rule):
    """SWAG (Maddox et al. 2019): the moments of SGD's iterates around an optimum.

    θ ← θ − α (g + λθ) with the weight decay λ; `every` few steps the iterate enters a running mean, variance and the
    last K (`rank`) deviations, until there are so many `snapshots`.
    """

    starts_trained = True
    lr = 1e-2
    betas = (0.0, 0.0)
    weight_decay: float = 0.0
    snapshots: int = 100
    every: int = 10
    rank: int = 20

    def steps(self, given: int) -> int:
        return self.snapshots * self.every

    def start(self, weights: Tensor, n_data: Number) -> State:
        """Zero moments; the deviations have one slot more, into which iterates that do not count are written."""
        counts = {name: torch.zeros((), dtype=torch.int64, device=weights.device) for name in ("steps", "count")}
        moments = {name: torch.zeros_like(weights) for name in ("mean", "squares")}
        return {**moments, "deviations": weights.new_zeros(len(weights), self.rank + 1, weights.shape[1]), **counts}

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """SGD, then Welford's sums: w² less w̄² would leave the difference of two large numbers."""
        weights.sub_(gradient.add_(weights, alpha=self.weight_decay).mul_(step.lr))
        state["steps"] += 1
        counts = (state["steps"] % self.every == 0).to(torch.int64)
        state["count"] += counts
        away = (weights - state["mean"]) * counts
        state["mean"] += away / state["count"].clamp(min=1)
        deviation = weights - state["mean"]
        state["squares"].addcmul_(away, deviation)
        slot = torch.where(counts > 0, (state["count"] - 1) % self.rank, self.rank)
        state["deviations"].index_copy_(1, slot.reshape(1), deviation.unsqueeze(1))

    def gaussian(self, weights: Tensor, state: State, n_data: Number) -> Gaussian:
        return Gaussian(state["mean"], (state["squares"] / state["count"]).clamp(min=1e-12))

    def deviations(self, state: State) -> Tensor:
        """D, the last deviations from the running mean, oldest first, (s, K, weights)."""
        count = int(state["count"])
        return state["deviations"][:, [number % self.rank for number in range(max(0, count - self.rank), count)]]

    def sample(self, network: Network, mean: Tensor, state: State, n_data: Number, streams: Streams, n: int) -> Drawn:
        """θ = w̄ + 2^(-1/2) (√var z₁ + D z₂/√(K−1))."""
        mean, variance = self.gaussian(mean, state, n_data)
        columns = self.deviations(state)
        low_rank = torch.bmm(streams.normal(n, columns.shape[1]), columns) / math.sqrt(columns.shape[1] - 1)
        drawn = streams.normal(n, mean.shape[1]) * variance.sqrt().unsqueeze(1) + low_rank
        return unflatten(network, (mean.unsqueeze(1) + drawn / math.sqrt(2)).flatten(0, 1)), None


RULES: Mapping[str, type[Rule]] = {
    "adam": Adam,
    "mc-dropout": Dropout,
    "bbb": BayesByBackprop,
    "vadam": Vadam,
    "ivon": IVON,
    "swag": SWAG,
}


def gaussian(stack: Stack) -> Gaussian | None:
    """The Gaussian that a stack's rule ends with, around its `mean`."""
    assert isinstance(stack.rule, Rule)
    return stack.rule.gaussian(stack.mean, stack.state, stack.n_data)


def functions(stack: Stack, index: int, n: int, streams: Streams) -> Drawn:
    """n functions drawn from one network's posterior; `streams` has that network's seed alone."""
    assert isinstance(stack.rule, Rule)
    own = {name: t[index : index + 1] if t.dim() > 1 else t for name, t in stack.state.items()}
    return stack.rule.sample(stack.network, stack.mean[index : index + 1], own, stack.n_data, streams, n)


def sampled_outputs(
    network: Network,
    mean: Mapping[str, Tensor],
    variance: Mapping[str, Tensor],
    x: Tensor,
    noise: Sequence[Tensor],
) -> Tensor:
    """f(x) at weights drawn from a diagonal Gaussian, one draw per row: (n, b, outputs); ε is (n, b, units) by layer.

    The weights of one row only enter through its activations, so these are drawn instead (local reparameterisation):
    N(a Wᵀ + b, a² Sᵀ + s), unit by unit, exactly as if all weights had been drawn for each row.
    """
    activation = ACTIVATIONS[network.activation]()
    h = x
    for number, epsilon in enumerate(noise):
        weight, bias = f"layer{number}.weight", f"layer{number}.bias"
        std = linear(h.square(), variance[weight], variance[bias]).clamp(min=0).sqrt()
        h = torch.addcmul(linear(h, mean[weight], mean[bias]), std, epsilon)
        if number < len(network.hidden):
            h = activation(h)
    return h
