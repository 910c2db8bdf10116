"""Second moments from their definitions: plain recursions in float64 over every gradient an optimiser has seen."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Settings = Mapping[str, Any]


@dataclass
class Trace:
    """What an optimiser saw of one parameter, one entry a step, in float64.

    Attributes:
        gradients: the gradient before the step; zero where a sparse one has no entry.
        parameters: the parameter before the step.
        norms: the norm of the gradients of all parameters together.
    """

    gradients: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Moments(NamedTuple):
    """A second moment as the optimiser keeps it, and with its start divided out."""

    kept: Tensor
    corrected: Tensor


Reference = Callable[[Trace, Sequence[Tensor], Settings], Moments]


def through_a_file(state: Mapping[str, Any]) -> Any:
    """An optimiser's state as a file has it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def dense(tensor: Tensor) -> Tensor:
    """A copy in float64."""
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(torch.float64, copy=True)


def gradients_of(
    model: nn.Module, optimizers: Iterable[Optimizer], losses: Iterable[Callable[[nn.Module], Tensor]]
) -> list[dict[str, Tensor]]:
    """Train by a step on every loss; the gradients of each step by name, in float64."""
    optimizers, found = list(optimizers), []
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        found.append({name: dense(p.grad) for name, p in model.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    return found


# --- recursions -----------------------------------------------------------------------------------------------------


def with_decay(trace: Trace, weight_decay: float) -> list[Tensor]:
    """Gradients of the loss plus λ/2 θ²: what coupled weight decay makes of them."""
    return [g + weight_decay * p for g, p in zip(trace.gradients, trace.parameters, strict=True)]


def squares(values: Sequence[Tensor]) -> list[Tensor]:
    return [value * value for value in values]


def average(values: Sequence[Tensor], beta: float, start: float = 0.0) -> Tensor:
    """s ← β s + (1−β) x."""
    s = torch.full_like(values[0], start)
    for value in values:
        s = beta * s + (1 - beta) * value
    return s


def weighted_mean(values: Sequence[Tensor], beta: float) -> Tensor:
    """Σᵢ β^(t−i) xᵢ / Σᵢ β^(t−i): what a bias-corrected average is, without a recursion."""
    weights = [beta**age for age in reversed(range(len(values)))]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def variance(values: Sequence[Tensor], mean: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    return mean(squares(values)) - mean(values) ** 2


def highest_average(values: Sequence[Tensor], beta: float) -> Tensor:
    """The largest that the average has been at any step."""
    s = highest = torch.zeros_like(values[0])
    for value in values:
        s = beta * s + (1 - beta) * value
        highest = torch.maximum(highest, s)
    return highest


# --- one reference an optimiser -------------------------------------------------------------------------------------


def adam(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    beta = settings["betas"][1]
    if settings.get("amsgrad"):
        # The optimiser's own update divides the maximum by the last step's correction.
        highest = highest_average(squares(gradients), beta)
        return Moments(highest, highest / (1 - beta ** len(gradients)))
    return Moments(average(squares(gradients), beta), weighted_mean(squares(gradients), beta))


def sparse_adam(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """Rows without a gradient in a step stand still; the step is counted for all."""
    beta = settings["betas"][1]
    s = torch.zeros_like(gradients[0])
    for g in gradients:
        touched = (g != 0).any(dim=1, keepdim=True)
        s = torch.where(touched, beta * s + (1 - beta) * g * g, s)
    return Moments(s, s / (1 - beta ** len(gradients)))


def adagrad(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """A mean over all steps has no start to correct: both are the same."""
    mean = sum(squares(gradients)) / len(gradients)
    return Moments(mean, mean)


def adadelta(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    return Moments(average(squares(gradients), settings["rho"]), weighted_mean(squares(gradients), settings["rho"]))


def rmsprop(trace: Trace, gradients: Sequence[Tensor], settings: Settings, start: float = 0.0) -> Moments:
    alpha = settings["alpha"]
    kept, corrected = average(squares(gradients), alpha, start), weighted_mean(squares(gradients), alpha)
    if settings["centered"]:
        kept = kept - average(gradients, alpha) ** 2
        corrected = variance(gradients, lambda values: weighted_mean(values, alpha))
    return Moments(kept, corrected)


def rmsprop_from_one(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    return rmsprop(trace, gradients, settings, start=1.0)


def adamax(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """u ← max(β u, |g| + ε), whose square stands for v."""
    u = torch.zeros_like(gradients[0])
    for g in gradients:
        u = torch.maximum(settings["betas"][1] * u, g.abs() + settings["eps"])
    return Moments(u**2, u**2)


def adafactor(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """Row and column means of g², averaged with 1 − βₜ = t^τ; the first step has weight one, so there is no start."""
    factored = gradients[0].dim() > 1
    full, rows, columns = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for t, g in enumerate(gradients, start=1):
        weight = t ** settings["beta2_decay"]
        if factored:
            rows = (1 - weight) * rows + weight * (g * g).mean(dim=-1, keepdim=True)
            columns = (1 - weight) * columns + weight * (g * g).mean(dim=-2, keepdim=True)
        else:
            full = (1 - weight) * full + weight * g * g
    v = rows * columns / rows.mean(dim=-2, keepdim=True) if factored else full
    return Moments(v, v)


def adopt(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """The first gradient's square is where the average starts."""
    first, *others = squares(gradients)
    s = average(others, settings["betas"][1]) + settings["betas"][1] ** len(others) * first
    return Moments(s, s)


def lamb(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """Adam's, of gradients whose common norm is clipped."""
    limit = settings["max_grad_norm"]
    clipped = [g / max(1.0, norm / limit) for g, norm in zip(gradients, trace.norms, strict=True)]
    return adam(trace, clipped, settings)


def adabelief(trace: Trace, gradients: Sequence[Tensor], settings: Settings) -> Moments:
    """s ← β₂ s + (1−β₂) (g − m)² + ε: each step adds ε whole."""
    beta1, beta2 = settings["betas"]
    m = s = highest = torch.zeros_like(gradients[0])
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + settings["eps"]
        highest = torch.maximum(highest, s)
    kept = highest if settings["amsgrad"] else s
    return Moments(kept, kept / (1 - beta2 ** len(gradients)))
