"""Training a stack of small networks: every seed has its own random numbers, whoever is stacked with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.posterior.noise import stream_seed
from bayesadam.predict.predictive import Likelihood

# Random numbers are drawn for this many steps at a time.
_BLOCK = 256


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
        epochs: passes over the data, counted in examples: batches are drawn with replacement.
        batch_size: examples a step.
        lr: the learning rate.
        weight_decay: λ of the L2 penalty (λ/2)|θ|² that is added to the loss.
        betas: Adam's β₁ and β₂.
    """

    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)!r}")

    def steps(self, n: int) -> int:
        """The number of steps for n examples."""
        return max(1, round(self.epochs * n / min(self.batch_size, n)))


class Streams:
    """Random numbers for a stack: one generator a seed and purpose, so that no seed depends on its neighbours."""

    def __init__(self, seeds: Sequence[int], purpose: str, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._sources = [torch.Generator().manual_seed(stream_seed(seed, purpose)) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        """(s, *shape) standard normals."""
        return torch.stack([torch.randn(shape, generator=source) for source in self._sources]).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """(s, *shape) uniform numbers in [0, 1)."""
        return torch.stack([torch.rand(shape, generator=source) for source in self._sources]).to(self.device)

    def rows(self, n: int, *shape: int) -> Tensor:
        """(s, *shape) row numbers below n."""
        return torch.stack([torch.randint(n, shape, generator=source) for source in self._sources]).to(self.device)


def batches(data: Data, training: Training, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches (s, b, inputs) and (s, b, ...), every seed with its own choice of examples."""
    streams = Streams(seeds, "batches", data.x.device)
    size, total = min(training.batch_size, len(data)), training.steps(len(data))
    stack = torch.arange(len(seeds), device=data.x.device)[:, None]
    for first in range(0, total, _BLOCK):
        rows = streams.rows(len(data), min(_BLOCK, total - first), size)
        for step in range(rows.shape[1]):
            chosen = rows[:, step]
            yield data.x[stack, chosen], data.y[stack, chosen]


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


Loss = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


def descend(
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    data: Data,
    training: Training,
    seeds: Sequence[int],
    *,
    each_step: Callable[[int], None] | None = None,
) -> None:
    """The training loop: the sum of the networks' losses separates into their own gradients.

    Args:
        params: stacked weights, trained in place.
        optimizer: over them; it must work entry by entry, as Adam and SGD do.
        loss: (params, x, y) → a loss a network, (s,).
        data: the data.
        training: batch size and epochs.
        seeds: the networks' seeds.
        each_step: called with the number of steps done, after each.
    """
    for number, (x, y) in enumerate(batches(data, training, seeds), start=1):
        optimizer.zero_grad(set_to_none=True)
        loss(params, x, y).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if each_step is not None:
            each_step(number)
