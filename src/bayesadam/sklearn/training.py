"""Several small networks trained at once, each with its own weights, batches, best epoch and state of AdamW.

On a CPU a step of so small a network is all overhead, so that five networks stacked in one tensor cost little more than
one. Nothing passes between them: AdamW works element by element, and the losses are summed.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesadam.errors import DivergedError

Schedule = Literal["cosine", "constant"]
Loss = Callable[[Tensor, Tensor], Tensor]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
}


@dataclass(frozen=True)
class Recipe:
    """How the networks are built and trained.

    Attributes:
        hidden: units of each hidden layer.
        activation: a key of `ACTIVATIONS`.
        lr: the learning rate at the start.
        schedule: `"constant"`, or `"cosine"`, down to 0 at the last epoch.
        weight_decay: AdamW's λ.
        batch_size: the most examples behind one gradient.
        max_epochs: passes over the data.
        patience: epochs without a better held-out loss after which a network is done; None for no such end.
        device: where the networks are trained.
    """

    hidden: tuple[int, ...]
    activation: str
    lr: float
    schedule: Schedule
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int | None
    device: str | torch.device


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs (n, features) in float32 with their targets: numbers (n, outputs), or class numbers (n,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Data:
        """Some of the examples."""
        return Data(self.x[rows], self.y[rows])

    def to(self, device: str | torch.device) -> Data:
        """The same on another device."""
        return Data(self.x.to(device), self.y.to(device))

    def double(self) -> Data:
        """The same in float64; class numbers stay what they are."""
        return Data(self.x.double(), self.y.double() if self.y.is_floating_point() else self.y)


@dataclass(frozen=True, eq=False)
class Part:
    """One network's part of the data: the rows it is trained on, those that stop and calibrate it, and its seed.

    All parts have the same number of rows.
    """

    rows: Tensor
    held_out: Tensor
    seed: int


@dataclass(frozen=True, eq=False)
class Trained:
    """One network as it was at its best epoch.

    Attributes:
        network: with its weights, on the CPU.
        state: the state dict of AdamW after the same step, on the CPU.
        best_epoch: the epoch, from 1, with the lowest held-out loss.
        epochs: how many were trained.
        batch_size: examples behind every gradient.
    """

    network: nn.Sequential
    state: dict[str, Any]
    best_epoch: int
    epochs: int
    batch_size: int


# --- the networks ---------------------------------------------------------------------------------------------------


def make_network(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """hidden1, hidden2, ..., output, with memory for weights but no values: no random number is drawn."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes[:-1]), start=1):
        parts[f"hidden{number}"] = nn.Linear(fan_in, fan_out, device="meta")
        parts[f"activation{number}"] = ACTIVATIONS[activation]()
    parts["output"] = nn.Linear(sizes[-2], sizes[-1], device="meta")
    return nn.Sequential(parts).to_empty(device="cpu")


def initial_weights(network: nn.Sequential, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """torch's own initialisation, U(−k, k) with k = fan_in^(-1/2), from generators: (networks, *shape) a parameter."""
    bounds = [
        module.in_features**-0.5 for module in network if isinstance(module, nn.Linear) for _ in module.parameters()
    ]
    return [
        torch.stack([torch.empty(parameter.shape).uniform_(-k, k, generator=g) for g in generators])
        for parameter, k in zip(network.parameters(), bounds, strict=True)
    ]


def stacked_outputs(network: nn.Sequential, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """(networks, n, outputs) for inputs (networks, n, features), with weights as `initial_weights` makes them."""
    given = iter(weights)
    for module in network:
        if isinstance(module, nn.Linear):
            weight, bias = next(given), next(given)
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        else:
            x = module(x)
    return x


# --- their losses, one a network ------------------------------------------------------------------------------------


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over examples and outputs."""
    return (outputs - targets).square().mean(dim=(1, 2))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of the class numbers, in nats."""
    return nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").mean(dim=1)


# --- training -------------------------------------------------------------------------------------------------------


def even_batch_size(n: int, most: int) -> int:
    """The batch size that cuts n examples into equal batches of at most `most`, next to none left over.

    Every gradient is then a mean of the same number of examples, and v has one meaning.

    >>> even_batch_size(100, 32), even_batch_size(10, 32)
    (25, 10)
    """
    return n // math.ceil(n / most)


def batches(rows: Tensor, size: int, generators: Sequence[torch.Generator]) -> Iterator[Tensor]:
    """One epoch over the rows (networks, n) in a new order, (networks, size) at a time; n mod size are left out."""
    n = rows.shape[1]
    order = torch.stack([torch.randperm(n, generator=g) for g in generators])
    yield from torch.split(rows.gather(1, order)[:, : n - n % size], size, dim=1)


def rate(recipe: Recipe, epoch: int) -> float:
    """The learning rate of an epoch, counted from 1."""
    if recipe.schedule == "constant":
        return recipe.lr
    return recipe.lr * (1 + math.cos(math.pi * (epoch - 1) / recipe.max_epochs)) / 2


def train(recipe: Recipe, data: Data, parts: Sequence[Part], *, outputs: int, loss: Loss) -> list[Trained]:
    """One network a part, each as it was after the epoch with its lowest held-out loss: weights, v and step alike.

    Torch's global random state is neither read nor changed.

    Raises:
        DivergedError: a network whose held-out loss was never finite.
    """
    generators = [torch.Generator().manual_seed(part.seed) for part in parts]
    network = make_network([data.x.shape[1], *recipe.hidden, outputs], recipe.activation)
    weights = [w.to(recipe.device).requires_grad_() for w in initial_weights(network, generators)]
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    data = data.to(recipe.device)
    rows = torch.stack([part.rows for part in parts])
    test = data.take(torch.stack([part.held_out for part in parts]).to(recipe.device))
    size = even_batch_size(rows.shape[1], recipe.batch_size)

    best = _Best(len(parts), recipe.patience)
    for epoch in range(1, recipe.max_epochs + 1):
        optimizer.param_groups[0]["lr"] = rate(recipe, epoch)
        for picked in batches(rows, size, generators):
            batch = data.take(picked.to(recipe.device))
            optimizer.zero_grad()
            loss(stacked_outputs(network, weights, batch.x), batch.y).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            scores = loss(stacked_outputs(network, weights, test.x), test.y)
        if not best.update(epoch, scores.cpu(), weights, [optimizer.state[w]["exp_avg_sq"] for w in weights]):
            break
    if not best.epoch.all():
        raise DivergedError(f"the held-out loss was not finite after any of {epoch} epochs: lower lr={recipe.lr:g}")
    group = optimizer.state_dict()["param_groups"][0]
    return [
        Trained(
            network=_filled(network, [w[number] for w in best.weights]),
            state={
                "state": {
                    index: {
                        "step": torch.tensor(float(best_epoch * (rows.shape[1] // size))),
                        "exp_avg_sq": v[number].cpu(),
                    }
                    for index, v in enumerate(best.second_moments)
                },
                "param_groups": [{**group, "lr": rate(recipe, best_epoch)}],
            },
            best_epoch=best_epoch,
            epochs=epochs,
            batch_size=size,
        )
        for number, (best_epoch, epochs) in enumerate(zip(best.epoch.tolist(), best.epochs.tolist(), strict=True))
    ]


class _Best:
    """Each network's weights and second moments after its best epoch so far; only `update` changes it."""

    def __init__(self, networks: int, patience: int | None) -> None:
        self.patience = math.inf if patience is None else patience
        self.score = torch.full((networks,), math.inf)
        self.epoch = torch.zeros(networks, dtype=torch.long)
        self.epochs = torch.zeros(networks, dtype=torch.long)
        self.weights: list[Tensor] = []
        self.second_moments: list[Tensor] = []

    def update(self, epoch: int, scores: Tensor, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> bool:
        """Take note of an epoch; whether any network should go on.

        One that has lost its patience stays as it is, though it is trained on beside the others.
        """
        if not self.weights:
            self.weights = [w.detach().clone() for w in weights]
            self.second_moments = [v.clone() for v in moments]
        running = epoch - 1 - self.epoch < self.patience
        better = running & (scores < self.score)
        self.epochs[running] = epoch
        self.epoch[better] = epoch
        self.score[better] = scores[better]
        if better.any():
            rows = better.to(weights[0].device)
            for kept, now in zip([*self.weights, *self.second_moments], [*weights, *moments], strict=True):
                kept[rows] = now.detach()[rows]
        return bool((epoch - self.epoch < self.patience).any())


def _filled(template: nn.Sequential, weights: Sequence[Tensor]) -> nn.Sequential:
    """A network of its own with these weights."""
    network = copy.deepcopy(template)
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return network
