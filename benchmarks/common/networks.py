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


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU, for 28 × 28 images."""
    first = nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), *mlp((400, 120, 84, classes)))


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


def residual(channels: int, blocks: list[tuple[int, int, int]], classes: int) -> nn.Sequential:
    """A 3 × 3 stem and blocks by (width in, width, stride), all with batch norm, then global pooling."""
    body = [Residual(*shape) for shape in blocks]
    return nn.Sequential(*stem(channels, blocks[0][0]), *body, *pooled(blocks[-1][1], classes))


def stem(channels: int, width: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()


def pooled(width: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)


def small_resnet(classes: int = 10) -> nn.Sequential:
    """Three residual blocks of 16, 32 and 64 channels, for grey images."""
    first = stem(1, 16)
    return nn.Sequential(*first, Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), *pooled(64, classes))


def ResNet18(classes: int = 10) -> nn.Sequential:
    """The eighteen-layer residual network without pooling before the stages, for 32 × 32 images."""
    ends = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    return residual(3, [shape for end in ends for shape in (end, (end[1], end[1], 1))], classes)


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
        self.heads, self.project, self.join = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        parts = self.project(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.join(F.scaled_dot_product_attention(*parts.unbind()).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention of it, then + two linear layers of it, with layer norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        wide = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.think = nn.Sequential(nn.LayerNorm(width), *wide)

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
    patches, mean = Patches(32, 4, width), (nn.LayerNorm(width), MeanOverPlaces())
    return nn.Sequential(patches, *blocks, *mean, nn.Linear(width, classes))
