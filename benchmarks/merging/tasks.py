"""Networks to merge: a base trained on plain images, and experts fine-tuned from it on images changed in different
ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import bayesadam as ba
from benchmarks.common.inputs import Pixels, load
from benchmarks.common.networks import lenet, mlp
from benchmarks.common.training import drawn, fit

BATCH, KEEP = 100, 100


def images(name: str, device: str, *, quick: bool) -> dict[str, Pixels]:
    """To train the "base", to "tune" experts, to choose by ("validation") and to report on ("test").

    Images are (n, 1, 28, 28) in [0, 1], in a fixed random order; 500 made-up ones of each where quick.
    """
    (x, y), test = (load(name, split, made_up=quick) for split in ("train", "test"))
    order, most = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)), 500 if quick else None
    cuts = order.split([500, 500, 1000] if quick else [20_000, 30_000, 10_000])
    parts = dict(zip(("base", "tune", "validation"), ((x[rows], y[rows]) for rows in cuts), strict=True)) | {
        "test": test
    }
    return {part: (x[:most].to(device), y[:most].to(device)) for part, (x, y) in parts.items()}


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Turned about the centre."""
    turn = math.radians(degrees)
    rows = [[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]]
    matrix, parts = torch.tensor(rows, device=x.device), []
    for part in x.split(5000):
        grid = F.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        parts.append(F.grid_sample(part, grid, align_corners=False))
    return torch.cat(parts)


def noisy(x: Tensor) -> Tensor:
    """With the same kind of noise for every image, always the same."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x))).to(x.device)
    return (x + 0.5 * noise).clamp(0, 1)


Change = Callable[[Tensor], Tensor]
TASKS: dict[str, tuple[Change, ...]] = {
    "rotated": tuple((lambda x, d=d: rotated(x, d)) for d in (-60.0, -20.0, 20.0, 60.0)),
    "mixed": (lambda x: 1 - x, lambda x: rotated(x, 90.0), lambda x: x.roll(6, dims=3)),
    "noisy": (noisy, lambda x: 1 - x, lambda x: rotated(x, 45.0), lambda x: x),
}
# Half of the kinds of merges, by which δ of the damped merge was chosen, with seeds 0 and 1.
DEVELOPMENT = {"mlp-mnist-rotated", "mlp-mnist-noisy", "mlp-fashion-mnist-mixed", "lenet-mnist-mixed"}
DEVELOPMENT |= {"lenet-fashion-mnist-rotated", "lenet-fashion-mnist-noisy"}


def build(kind: str, seed: int, hidden: int) -> nn.Module:
    """An untrained network of images (n, 1, 28, 28)."""
    torch.manual_seed(seed)
    return lenet() if kind == "lenet" else nn.Sequential(nn.Flatten(), *mlp((784, hidden, hidden, 10)))


# A network's posteriors, by v̂ and by recorded gradients.
Pair = tuple[ba.Posterior, ba.Posterior]


def train(model: nn.Module, x: Tensor, y: Tensor, *, steps: int, seed: int) -> Pair:
    """Steps of Adam on random batches, at a rate that falls to 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rate, draw = LambdaLR(optimizer, lambda step: 1 - step / steps), torch.Generator(device=x.device).manual_seed(seed)
    # Recorded over the whole of training, as v̂ is.
    with ba.Recorder(optimizer, keep=KEEP, every=max(1, steps // KEEP)) as recorder:
        rows = drawn(len(x), BATCH, steps, draw)
        fit(model, optimizer, rows, lambda some: F.cross_entropy(model(x[some]), y[some]), schedule=rate)
    how = {"prior_precision": 1.0, "power": 1.0, "batch_size": BATCH}
    diagonal = ba.Posterior.from_optimizer(model, optimizer, len(x), **how)
    return diagonal, ba.Posterior.from_recorder(model, recorder, len(x), **how)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In %."""
    return 100 * float((torch.cat([model(part).argmax(dim=1) for part in x.split(5000)]) == y).float().mean())
