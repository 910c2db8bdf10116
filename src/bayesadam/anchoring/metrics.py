"""How far an optimiser goes for a gradient: A of its step θ ← θ − lr g/A, by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesadam.errors import StateError
from bayesadam.readers import (
    Entry,
    Group,
    StateReader,
    as_number,
    reader_of,
    second_moment,
    stored_statistic,
    working_dtype,
)

Metric = Tensor | float


def reader_for(optimizer: Optimizer) -> StateReader:
    """The record of an optimiser whose steps have a metric; the others are refused."""
    kind, reader = type(optimizer).__name__, reader_of(optimizer)
    if reader is None:
        raise StateError(
            f"no reader is registered for {kind}, so nobody knows how far it goes for a gradient: describe it with "
            "bayesadam.readers.register(StateReader(...)), or train with Adam or SGD"
        )
    if reader.statistic == "none" and reader.name not in _RULES:
        raise StateError(
            f"{kind} does not go in proportion to the gradient, so a penalty cannot be weighed against its steps: train "
            "with Adam, AdamW, RMSprop, Adagrad or SGD"
        )
    return reader


def metric(entry: Entry) -> Metric | None:
    """A of the step that was taken last; None while the state says nothing.

    Adam and its kind √v̂ + ε; SGD (1 − μ)/(1 − dampening), for momentum μ repeats each gradient 1/(1 − μ) times; Adagrad
    √Σg² + ε; Adadelta and Adafactor with the sizes that they give to their steps.
    """
    if entry.reader.steps(entry.state, entry.group) == 0:
        return None
    return _RULES.get(entry.reader.name, _root)(entry)


def _moment(entry: Entry) -> Tensor:
    parameter, reader = entry.parameter, entry.reader
    try:
        stored = stored_statistic(reader, entry.state, entry.group, parameter.shape, working_dtype(parameter.dtype))
        return second_moment(stored, reader, entry.state, entry.group)
    except KeyError as missing:
        raise StateError(f"reader {reader.name!r} finds no {missing} in the state of {entry.name!r}") from None


def _root(entry: Entry) -> Tensor:
    return _moment(entry).sqrt_().add_(_number(entry.group, "eps"))


def _adagrad(entry: Entry) -> Tensor:
    steps = entry.reader.steps(entry.state, entry.group) or 1.0
    root = _moment(entry).mul_(steps).sqrt_().add_(_number(entry.group, "eps"))
    return root.mul_(1 + (steps - 1) * _number(entry.group, "lr_decay"))


def _adadelta(entry: Entry) -> Tensor:
    epsilon = _number(entry.group, "eps")
    sizes: Tensor = entry.state["acc_delta"] + epsilon
    return ((_moment(entry) + epsilon) / sizes).sqrt()


def _adafactor(entry: Entry) -> Tensor:
    """√v̂ lr/α with the step size α = max(ε₂, RMS θ) min(lr, t^(−½)); its clipping of large updates is left out."""
    floor, least = entry.group["eps"]
    steps = entry.reader.steps(entry.state, entry.group) or 1.0
    theta, rate = entry.parameter.detach(), as_number(entry.group["lr"], "lr")
    size = theta.square().mean().sqrt().clamp(min=least) * min(rate, steps**-0.5)
    return _moment(entry).sqrt_().clamp_(min=floor or torch.finfo(theta.dtype).eps).mul_(rate / size)


def _sgd(entry: Entry) -> float:
    momentum = _number(entry.group, "momentum")
    return (1 - momentum) / (1 - _number(entry.group, "dampening") if momentum else 1.0)


def _number(group: Group, name: str) -> float:
    value = group.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


_RULES: Mapping[str, Callable[[Entry], Metric]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "adafactor": _adafactor,
}
