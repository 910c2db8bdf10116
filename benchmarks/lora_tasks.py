"""What the adapters of benchmarks/lora.py are trained on, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesadam as ba
from harness import class_scores

BATCH = 16
Batch = tuple[dict[str, Tensor], Tensor]
Forward = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Task:
    """A pretrained model with an adapter, data for the new task, and how logits are had.

    Attributes:
        model: the PEFT model.
        train: inputs and classes; the classes may be one a token.
        validation: the same, for calibration.
        test: the same, for the scores.
        forward: the logits that belong to the classes.
        trained_on: those that belong to the classes of the training data, where they are others.
    """

    model: nn.Module
    train: Batch
    validation: Batch
    test: Batch
    forward: Forward
    trained_on: Forward | None = None


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(batch: Batch, index: Tensor) -> Batch:
    inputs, y = batch
    return {key: value[index] for key, value in inputs.items()}, y[index]


def batches(batch: Batch, size: int) -> Iterator[Batch]:
    for index in torch.arange(len(batch[1])).split(size):
        yield rows(batch, index)


def adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


@dataclass(frozen=True)
class Fit:
    """An optimiser that has trained, and the gradients of its last steps where they were kept."""

    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder | None


def fit(
    model: nn.Module,
    data: Batch,
    forward: Forward,
    steps: int,
    lr: float,
    *,
    make: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] = adam,
    batch: int = BATCH,
    seed: int = 0,
    keep: int = 0,
) -> Fit:
    """Steps of an optimiser, plain AdamW, over what is trainable; `keep` gradients of the last half are recorded."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr)
    recorder = ba.Recorder(optimizer, keep=keep, every=max(1, steps // (2 * keep))) if keep else None
    model.train()
    for step in range(steps):
        drawn = torch.randint(len(data[1]), (batch,), generator=seeded(1_000_000 * seed + step))
        inputs, y = rows(data, drawn.to(data[1].device))
        optimizer.zero_grad()
        cross_entropy(forward(model, inputs).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    model.eval()
    return Fit(optimizer, recorder)


def scored(probs: Tensor, y: Tensor) -> dict[str, float]:
    return class_scores(probs.flatten(0, -2), y.flatten())
