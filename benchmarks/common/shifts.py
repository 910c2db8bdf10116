"""Shifted copies of test inputs: six kinds at four strengths, of images and of texts, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# Inputs, a strength, and random numbers to the shifted inputs.
Shift = Callable[[Tensor, float, torch.Generator], Tensor]
SPACE, SHARES = 32, (0.05, 0.1, 0.2, 0.4)


def gaussian_blur(x: Tensor, width: float, draw: torch.Generator) -> Tensor:
    """A Gaussian kernel of that standard deviation in pixels, cut at three; edges are repeated."""
    reach = math.ceil(3 * width)
    kernel = (-0.5 * (torch.arange(-reach, reach + 1, device=x.device) / width).square()).exp()
    kernel = (kernel / kernel.sum()).to(x.dtype)
    channels = x.shape[1]
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel.expand(channels, 1, 1, -1), groups=channels)
    return F.conv2d(rows, kernel[:, None].expand(channels, 1, -1, 1), groups=channels)


def rotation(x: Tensor, degrees: float, draw: torch.Generator) -> Tensor:
    """To the left or to the right, by chance; black corners."""
    angle = math.radians(degrees) * (2.0 * torch.randint(2, (len(x),), generator=draw) - 1)
    zero = torch.zeros_like(angle)
    turn = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turn.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


IMAGES: Mapping[str, tuple[Shift, tuple[float, ...]]] = {
    "noise": (
        lambda x, deviation, draw: (x + deviation * torch.randn(x.shape, generator=draw).to(x.device)).clamp(0, 1),
        (0.05, 0.1, 0.2, 0.3),
    ),
    "blur": (gaussian_blur, (0.5, 1.0, 1.5, 2.0)),
    # That share of each image's difference from its mean.
    "contrast": (
        lambda x, share, draw: (m := x.mean((1, 2, 3), keepdim=True)) + share * (x - m),
        (0.7, 0.5, 0.3, 0.15),
    ),
    "brightness": (lambda x, more, draw: (x + more).clamp(max=1), (0.1, 0.2, 0.3, 0.4)),
    "rotation": (rotation, (10.0, 20.0, 30.0, 45.0)),
    # That share of the rows and columns.
    "coarse pixels": (
        lambda x, share, draw: F.interpolate(F.interpolate(x, scale_factor=share, mode="area"), size=x.shape[2:]),
        (0.75, 0.5, 0.36, 0.25),
    ),
}


def _some(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    return (torch.rand(x.shape, generator=draw) < share).to(x.device)


def _letters(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    return _some(x, share, draw) & (x | 32 >= ord("a")) & (x | 32 <= ord("z"))


def random_bytes(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    drawn = torch.randint(256, x.shape, generator=draw).to(x)
    return torch.where(_some(x, share, draw), drawn, x)


def swapped(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Pairs of neighbours that change places."""
    even = x.shape[1] // 2 * 2
    pairs = x[:, :even].unflatten(1, (-1, 2))
    chosen = _some(pairs[..., 0], share, draw)[..., None]
    return torch.cat([torch.where(chosen, pairs.flip(2), pairs).flatten(1), x[:, even:]], dim=1)


def deleted(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """What is left moves up; spaces fill the end."""
    gone = _some(x, share, draw)
    return torch.where(gone, SPACE, x).gather(1, gone.long().argsort(dim=1, stable=True))


def next_letters(x: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Letters that become the next of the alphabet, z an a."""
    later = (((x | 32) - ord("a") + 1) % 26 + ord("a")) ^ 32 ^ (x & 32)
    return torch.where(_letters(x, share, draw), later, x)


TEXTS: Mapping[str, Shift] = {
    "random bytes": random_bytes,
    "spaces": lambda x, share, draw: torch.where(_some(x, share, draw), SPACE, x),
    "swapped": swapped,
    "other case": lambda x, share, draw: torch.where(_letters(x, share, draw), x ^ 32, x),
    "deleted": deleted,
    "next letters": next_letters,
}


def shifted(x: Tensor, *, seed: int = 0) -> dict[str, list[Tensor]]:
    """Copies by kind, one a strength, on the device of the inputs; the random numbers are drawn on the CPU."""
    kinds = IMAGES if x.is_floating_point() else {name: (shift, SHARES) for name, shift in TEXTS.items()}
    draw = torch.Generator().manual_seed(seed)
    return {name: [shift(x, strength, draw) for strength in strengths] for name, (shift, strengths) in kinds.items()}
