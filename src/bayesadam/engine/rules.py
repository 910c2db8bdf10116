"""How the weights of a stack of networks learn: Adam, alone or under dropout; other rules derive from `Rule`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesadam.engine.gradients import StackedGradient
from bayesadam.engine.network import Network
from bayesadam.engine.streams import Streams

State = dict[str, Tensor]
Number = float | Tensor
EPS = 1e-8
# The number of pieces that torch's fused Adam takes in one launch: a block of a GPU has one piece, however long.
_PIECES = 30


class Step(NamedTuple):
    """α, 1 − β₁ᵗ, 1 − β₂ᵗ and N of one step: Python's numbers, or tensors () that a captured graph reads."""

    lr: Number
    first: Number
    second: Number
    n_data: Number


class Rule(ABC):
    """One way to learn; it holds settings only.

    All functions work on flat weights (s, weights), one row per network, and write into the memory that `start` made,
    so that a step can be captured as a CUDA graph. Its tensors of two dimensions or more have one row per network.
    """

    # Whether the gradient is that of the mean negative log-likelihood at weights that `at` writes.
    needs_noise: ClassVar[bool] = False
    betas: tuple[float, float]

    @abstractmethod
    def start(self, weights: Tensor, n_data: Number) -> State:
        """The memory besides the weights, by name."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """The random numbers of a step, or of many with leading dimensions: (s, *lead, ...); empty for none."""
        return torch.empty(0)

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """The factors of inputs and of every hidden layer's units, (s, b, units) each, where units are dropped."""
        return None

    def gradient(self, network: Network, weights: Tensor, state: State) -> StackedGradient:
        """What takes the gradient at the weights that `at` writes."""
        return StackedGradient(network, weights)

    def at(self, weights: Tensor, state: State, noise: Tensor, step: Step, out: Tensor) -> None:  # noqa: B027
        """Write the weights at which the gradient is taken into `out`; `noise` may be overwritten."""

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """One step, in place; `gradient` may be overwritten."""


@dataclass(frozen=True)
class Adam(Rule):
    """m ← β₁ m + (1−β₁) g, v ← β₂ v + (1−β₂) g², θ ← θ − α m̂/(√v̂ + ε), by torch's fused kernel.

    `weight_decay` is λ of the penalty (λ/2)|θ|², or of AdamW's decay where `decoupled`.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decoupled: bool = False

    def start(self, weights: Tensor, n_data: Number) -> State:  # noqa: D102
        return adam_state(weights)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:  # noqa: D102
        adam_update(weights, gradient, state, step.lr, self)


def adam_state(weights: Tensor) -> State:
    """Zeros for m, v and the count of steps, which has one entry per piece that the kernel is given."""
    step = torch.zeros(len(_pieces(weights)), device=weights.device)
    return {"exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights), "step": step}


_ADAM = Adam()


def adam_update(weights: Tensor, gradient: Tensor, state: State, lr: Number, rule: Adam = _ADAM) -> None:
    """One step of Adam with a rule's settings, in place."""
    kernel: Any = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    given = [_pieces(tensor) for tensor in (weights, gradient, state["exp_avg"], state["exp_avg_sq"])]
    (beta1, beta2), decay = rule.betas, rule.weight_decay
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "eps": EPS}
    state["step"].add_(1)
    kernel(*given, [], list(state["step"].unbind()), **settings, amsgrad=False, maximize=False)


def _pieces(tensor: Tensor) -> list[Tensor]:
    if tensor.device.type == "cpu":
        return [tensor]
    return list(torch.split(tensor.view(-1), -(-tensor.numel() // _PIECES)))


class Dropped(Rule):
    """The network's dropout, in prediction as in training (MC dropout), before the rule that it stands in front of."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """One uniform number for each unit of each example."""
        return streams.uniform(*lead, batch * sum(width for width, _ in _dropped(network)))

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """(s, b, units) per layer, contiguous; first the inputs' where these are dropped."""
        dropped = _dropped(network)
        b = noise.shape[1] // sum(width for width, _ in dropped)
        parts = torch.split(noise, [b * width for width, _ in dropped], dim=1)
        return [dropout_mask(part.view(-1, b, width), r) for part, (width, r) in zip(parts, dropped, strict=True)]


@dataclass(frozen=True)
class Dropout(Dropped, Adam):
    """Adam under dropout."""


def _dropped(network: Network) -> list[tuple[int, float]]:
    inputs = [(network.n_inputs, network.input_dropout)] if network.input_dropout else []
    return inputs + [(width, network.dropout) for width in network.hidden]


def dropout_mask(uniform: Tensor, rate: float) -> Tensor:
    """0 with probability r, otherwise 1/(1 − r)."""
    return (uniform >= rate).float().div_(1 - rate)
