"""The networks of the benchmarks: a multi-layer perceptron, convolutional and residual networks, small transformers."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(sizes: tuple[int, ...] = (784, 400, 400, 10)) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """x + two 3 × 3 convolutions of it; a 1 × 1 convolution stands on the short way where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.short = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        # A ReLU module for each place, not a function: BackPACK, a backend of the peer, follows modules.
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width_in, h, w) to (batch, width, h/stride, w/stride)."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(inner)) + self.short(x))


class ResNet18(nn.Sequential):
    """The eighteen-layer residual network with a 3 × 3 stem and no pooling before the stages, for 32 × 32 images."""

    def __init__(self, classes: int = 10) -> None:
        stages: list[nn.Module] = []
        width_in = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            stages += [Residual(width_in, width, stride), Residual(width, width, 1)]
            width_in = width
        super().__init__(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width_in, classes),
        )


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU and largest values, for 28 × 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def small_resnet(classes: int = 10) -> nn.Sequential:
    """Three residual blocks with batch norm, of 16, 32 and 64 channels, and global pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class Patches(nn.Module):
    """Patches of an image as vectors, a vector of its place added to each."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, size, size) to (batch, patches, width)."""
        return self.project(x).flatten(2).transpose(1, 2) + self.places


class Attention(nn.Module):
    """Self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.project(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind())
        return self.join(found.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """x + attention of it, then + two linear layers of it, with layer norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attend(x)
        return x + self.think(x)


class MeanOverPlaces(nn.Module):
    """(batch, length, width) to (batch, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean."""
        return x.mean(dim=1)


def vit(classes: int = 10, *, width: int = 192, depth: int = 6, heads: int = 6) -> nn.Sequential:
    """A small vision transformer for 32 × 32 images: patches of 4 × 4, layer norm, the mean over places."""
    blocks = [Block(width, heads) for _ in range(depth)]
    return nn.Sequential(
        Patches(32, 4, width), *blocks, nn.LayerNorm(width), MeanOverPlaces(), nn.Linear(width, classes)
    )
