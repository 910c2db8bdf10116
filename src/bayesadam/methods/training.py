"""Training a stack of small networks: every seed has its own random numbers, whoever is stacked with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import LikelihoodName as Likelihood
from bayesadam.structures.noise import stream_seed

# Rows are drawn for this many steps at a time where an epoch has fewer steps than the second number.
_BLOCK = 256
_LONG_EPOCH = 20
WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Data:
    """Data for a stack of networks, with a part held out for calibration; every seed may have its own.

    Attributes:
        x: inputs, (s, n, inputs).
        y: targets, (s, n, outputs) numbers for regression and binary outputs, (s, n) class numbers for classification.
        x_held_out: inputs that are not trained on, (s, m, inputs).
        y_held_out: their targets.
        likelihood: `"regression"`, `"classification"` or `"binary"`.
    """

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    likelihood: Likelihood

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("held-out", self.x_held_out, self.y_held_out)):
            if x.dim() != 3 or x.shape[:2] != y.shape[:2] or not x.shape[1]:
                raise MatchError(
                    f"the {name} data must be (stack, examples, ...), the same for inputs and targets and not empty; got "
                    f"{tuple(x.shape)} and {tuple(y.shape)}"
                )

    def __len__(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class Training:
    """How a network is trained; the defaults are the paper's for its toy problem.

    Attributes:
        epochs: passes over the data, counted in examples.
        batch_size: examples a step.
        lr: the learning rate.
        weight_decay: λ of the L2 penalty (λ/2)|θ|² that is added to the loss.
        betas: Adam's β₁ and β₂.
        sparsity: λ of a Laplace prior, the penalty λ|θ|₁; Adam's second moment never sees it.
        schedule: `"constant"`, or `"cosine"` from `lr` down to nothing.
    """

    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    sparsity: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not self.sparsity >= 0:
            raise SettingError(f"sparsity must be at least 0, got {self.sparsity!r}")
        if self.schedule not in ("constant", "cosine"):
            raise SettingError(f"schedule must be 'constant' or 'cosine', got {self.schedule!r}")

    def steps(self, n: int) -> int:
        """The number of steps for n examples."""
        return max(1, round(self.epochs * n / min(self.batch_size, n)))


class Batches:
    """Mini-batches (s, b, inputs) and (s, b, ...), every seed with its own choice of examples.

    Rows are drawn for many steps at a time, outside a step: an epoch's, shuffled, or a block's, with replacement where one
    pass is too short to be worth a shuffle. Which of them is next is counted in device memory, so that a step can be
    replayed.
    """

    def __init__(self, data: Data, batch_size: int, seeds: Sequence[int]) -> None:
        self._data, self._size = data, min(batch_size, len(data))
        self._streams = Streams(seeds, "batches")
        self._orders = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
        self._stack = torch.arange(len(seeds), device=data.x.device)[:, None]
        epoch = len(data) // self._size
        self.block, self._shuffled = (epoch, True) if epoch >= _LONG_EPOCH else (_BLOCK, False)
        self._rows = torch.zeros(self.block, len(seeds), self._size, dtype=torch.int64, device=data.x.device)
        self._next = torch.zeros(1, dtype=torch.int64, device=data.x.device)
        self.device = data.x.device

    def refill(self) -> None:
        """Draw the rows of the next `block` steps."""
        if self._shuffled:
            orders = [torch.randperm(len(self._data), generator=source) for source in self._orders]
            rows = torch.stack(orders)[:, : self.block * self._size].view(len(orders), self.block, self._size)
        else:
            rows = self._streams.rows(len(self._data), self.block, self._size)
        self._rows.copy_(rows.transpose(0, 1))
        self._next.zero_()

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The next batch."""
        chosen = self._rows.index_select(0, self._next)[0]
        self._next += 1
        return self._data.x[self._stack, chosen], self._data.y[self._stack, chosen]


def repeat(
    step: Callable[[], None],
    times: int,
    batches: Batches,
    streams: Sequence[Streams] = (),
    *,
    each_step: Callable[[int], None] | None = None,
) -> None:
    """Run one step many times; on CUDA it is captured as a graph after a few, and replayed.

    Args:
        step: changes device memory alone, so that a replay does the same work on what is there by then.
        times: how often.
        batches: where the step takes its batches from.
        streams: where the step takes its random numbers from.
        each_step: called with the number of steps done, after each.
    """
    # Optimisers make their state in the first step, and libraries choose their kernels in the first few.
    eager = times if batches.device.type == "cpu" else min(times, WARM_UP)
    run = step
    for number in range(times):
        if number % batches.block == 0:
            batches.refill()
        if number == eager:
            run = captured(step, streams)
        run()
        if each_step is not None:
            each_step(number + 1)


def captured(step: Callable[[], None], streams: Sequence[Streams] = ()) -> Callable[[], None]:
    """A step as a CUDA graph, whose replay does its work again; `streams` are those it draws from."""
    graph = torch.cuda.CUDAGraph()
    for stream in streams:
        for generator in stream.generators:
            graph.register_generator_state(generator)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Rate:
    """The learning rate, in device memory where it changes from step to step: lr ½(1 + cos πt/T)."""

    def __init__(self, training: Training, steps: int, device: torch.device) -> None:
        self._training, self._steps = training, steps
        self._t = torch.zeros((), device=device)
        constant = training.schedule == "constant"
        self.value: float | Tensor = training.lr if constant else torch.tensor(training.lr, device=device)

    def advance(self) -> None:
        """On to the next step."""
        if isinstance(self.value, Tensor):
            self._t += 1
            self.value.copy_(0.5 * self._training.lr * (1 + torch.cos(math.pi * self._t / self._steps)))


def adam(leaves: Sequence[Tensor], training: Training, rate: Rate) -> torch.optim.Adam:
    """torch's Adam, as fast as it can be on the leaves' device."""
    return torch.optim.Adam(
        list(leaves),
        lr=rate.value,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,
        capturable=leaves[0].device.type == "cuda",
    )


def shrink_towards_zero(optimizer: torch.optim.Adam, sparsity: float) -> None:
    """The proximal step of the penalty λ|θ|₁ in Adam's own metric: |θ| loses α λ/(√v̂ + ε), not below 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            step = state["step"].to(parameter.device)
            root = (state["exp_avg_sq"] / (1 - group["betas"][1] ** step)).sqrt_().add_(group["eps"])
            loss = root.reciprocal_().mul_(group["lr"] * sparsity)
            parameter.copy_(parameter.sign() * (parameter.abs() - loss).clamp_(min=0))


def negative_log_likelihood(output: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The training loss of every network of a stack, a mean over its batch, (s,).

    Squared error for regression, as in the paper; cross-entropy for classes; binary cross-entropy for binary outputs.
    """
    if likelihood == "regression":
        return (output - y).square().mean(dim=(1, 2))
    if likelihood == "classification":
        losses = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(y.shape).mean(dim=1)
    return F.binary_cross_entropy_with_logits(output, y, reduction="none").mean(dim=(1, 2))


Loss = Callable[[Tensor, Tensor], Tensor]


def descend(
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    data: Data,
    training: Training,
    seeds: Sequence[int],
    *,
    streams: Sequence[Streams] = (),
    rate: Rate | None = None,
    each_step: Callable[[int], None] | None = None,
) -> None:
    """The training loop: the sum of the networks' losses separates into their own gradients.

    Args:
        optimizer: over stacked weights; it must work entry by entry, as Adam and SGD do.
        loss: (x, y) → a loss a network, (s,).
        data: the data.
        training: batch size, epochs, and the penalty.
        seeds: the networks' seeds.
        streams: where the loss takes its random numbers from.
        rate: advances after each step.
        each_step: called with the number of steps done, after each.
    """
    batches = Batches(data, training.batch_size, seeds)

    def step() -> None:
        x, y = batches()
        optimizer.zero_grad(set_to_none=True)
        loss(x, y).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if training.sparsity and isinstance(optimizer, torch.optim.Adam):
            with torch.no_grad():
                shrink_towards_zero(optimizer, training.sparsity)
        if rate is not None:
            rate.advance()

    repeat(step, training.steps(len(data)), batches, streams, each_step=each_step)
