"""Networks to merge: a base trained on plain images, and experts fine-tuned from it on images changed in different
ways.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.inputs import load
from benchmarks.common.networks import lenet, mlp

BATCH = 100
KEEP = 100


# --- images ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Images:
    """Images (n, 1, 28, 28) in [0, 1] and their classes: to train the base, the experts, to choose by, to report on."""

    base: tuple[Tensor, Tensor]
    tune: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def images(name: str, device: str, *, quick: bool) -> Images:
    """A set in a fixed random order; 500 made-up images of each where quick."""
    (x, y), test = (load(name, split, made_up=quick) for split in ("train", "test"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cuts = order.split([500, 500, 1000] if quick else [20_000, 30_000, 10_000])
    parts = [*((x[rows], y[rows]) for rows in cuts), test]
    return Images(*((x[: 500 if quick else None].to(device), y[: 500 if quick else None].to(device)) for x, y in parts))


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Turned about the centre."""
    if not degrees:
        return x
    turn = math.radians(degrees)
    matrix = torch.tensor(
        [[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]], device=x.device
    )
    parts = []
    for part in x.split(5000):
        grid = F.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        parts.append(F.grid_sample(part, grid, align_corners=False))
    return torch.cat(parts)


def shifted(x: Tensor, places: int) -> Tensor:
    """Moved to the right, round the edge."""
    return x.roll(places, dims=3)


def noisy(x: Tensor, size: float) -> Tensor:
    """With the same kind of noise for every image, always the same."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x))).to(x.device)
    return (x + size * noise).clamp(0, 1)


Change = Callable[[Tensor], Tensor]
# Each task of "noisy" has its own disturbance; "rotated" and "mixed" are those of the study.
TASKS: dict[str, tuple[Change, ...]] = {
    "rotated": tuple((lambda x, d=d: rotated(x, d)) for d in (-60.0, -20.0, 20.0, 60.0)),
    "mixed": (lambda x: 1 - x, lambda x: rotated(x, 90.0), lambda x: shifted(x, 6)),
    "noisy": (lambda x: noisy(x, 0.5), lambda x: 1 - x, lambda x: rotated(x, 45.0), lambda x: x),
}
# Half of the kinds of merges, by which δ of the damped merge was chosen, with seeds 0 and 1.
DEVELOPMENT = (
    ("mlp", "mnist", "rotated"),
    ("mlp", "mnist", "noisy"),
    ("mlp", "fashion-mnist", "mixed"),
    ("lenet", "mnist", "mixed"),
    ("lenet", "fashion-mnist", "rotated"),
    ("lenet", "fashion-mnist", "noisy"),
)


# --- networks -------------------------------------------------------------------------------------------------------


def build(kind: str, seed: int, hidden: int) -> nn.Module:
    """An untrained network of images (n, 1, 28, 28)."""
    torch.manual_seed(seed)
    return lenet() if kind == "lenet" else nn.Sequential(nn.Flatten(), *mlp((784, hidden, hidden, 10)))


@dataclass(frozen=True, eq=False)
class Trained:
    """A network and its posteriors."""

    model: nn.Module
    diagonal: ba.Posterior
    kronecker: ba.Posterior | None


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    seed: int,
    rate: float = 1e-3,
    decay: bool = True,
    soap: bool = False,
    keep: int = KEEP,
) -> Trained:
    """Steps of Adam, or of SOAP, on random batches, with a recorder of the last gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    if soap:
        from pytorch_optimizer import SOAP

        optimizer = SOAP(model.parameters(), lr=rate, weight_decay=0.0)
    # Over the whole of training, as v̂ is.
    recorder = ba.Recorder(optimizer, keep=keep, every=max(1, steps // keep)) if keep and not soap else None
    draw = torch.Generator(device=x.device).manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps) if decay else rate
        rows = torch.randint(len(x), (BATCH,), generator=draw, device=x.device)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    shared = {"prior_precision": 1.0, "power": 1.0, "batch_size": BATCH}
    diagonal = ba.Posterior.from_optimizer(model, optimizer, len(x), **shared)
    rich = None
    if recorder is not None:
        recorder.remove()
        rich = ba.Posterior.from_recorder(model, recorder, len(x), **shared)
    elif soap:
        rich = ba.Posterior.from_optimizer(model, optimizer, len(x), structure="kronecker", **shared)
    return Trained(model, diagonal, rich)


def experts(base: nn.Module, data: Images, tasks: Sequence[Change], *, seed: int, **options: Any) -> list[Trained]:
    """One network a task, each fine-tuned from the base."""
    x, y = data.tune
    return [
        train(copy.deepcopy(base), task(x), y, seed=1000 * seed + number, **options)
        for number, task in enumerate(tasks)
    ]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In %."""
    return 100 * float((torch.cat([model(part).argmax(dim=1) for part in x.split(5000)]) == y).float().mean())
