"""The networks of `leverage.py` with what they are judged by: familiar inputs, shifted ones, and new ones near and far.

Two classes of MNIST or Fashion-MNIST are left out of training and are the near set; where Fashion-MNIST's training pair
is not there, four fifths of its test pair stand for it. A small encoder tells French from German by 48 bytes; English
prose is near to it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from doubt_data import NoData, folder, load
from networks import Block, MeanOverPlaces, lenet, mlp, small_resnet, train_classifier

Pairs = tuple[Tensor, Tensor]
PAIRS = {"mnist": ((2, 8), (4, 6), (0, 3)), "fashion-mnist": ((1, 2), (4, 9), (0, 7))}
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), *mlp((784, 400, 400, 8))),
    "lenet": lambda: lenet(8),
    "resnet": lambda: small_resnet(classes=8),
}
GROUPS = (*(f"{data}-{network}" for data in PAIRS for network in NETWORKS), "text")
STRENGTHS = 4
LENGTH, SHARES = 48, (0.1, 0.2, 0.35, 0.5)


@dataclass(frozen=True, eq=False)
class Case:
    """A trained network, its optimiser, and inputs.

    Attributes:
        familiar: inputs like those of training, never trained on, and their classes.
        test: the same, from other rows.
        shifted: the inputs of `test` by kind, one strength after the other.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Pairs
    familiar: Pairs
    test: Pairs
    shifted: Mapping[str, Tensor]
    near: Tensor
    far: Mapping[str, Tensor]


def case(group: str, number: int, *, quick: bool, device: str) -> Case:
    """The network of a group and a number, trained on seed 100 + number."""
    torch.manual_seed(100 + number)
    data, _, network = group.rpartition("-")
    parts = text() if group == "text" else images(data, PAIRS[data][number], made_up=quick)
    moved: Any = {key: _to(value, device) for key, value in parts.items()}
    model = (encoder() if group == "text" else NETWORKS[network]()).to(device)
    x, y = moved["train"]
    optimizer = train_classifier(model, x, y, epochs=1 if quick else max(6, -(-100_000 // len(x))))
    return Case(model, optimizer, **moved)


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(each, device) for key, each in value.items()}
    return tuple(_to(each, device) for each in value)


# --- images ---------------------------------------------------------------------------------------------------------


def images(name: str, pair: tuple[int, int], *, made_up: bool) -> dict[str, Any]:
    """Eight classes, and what was never trained on."""
    other = next(each for each in PAIRS if each != name)
    x_test, y_test = load(name, "test", made_up=made_up)
    try:
        x, y = load(name, "train", made_up=made_up)
    except NoData:
        cut = 4 * len(x_test) // 5
        (x, x_test), (y, y_test) = (t.split([cut, len(t) - cut]) for t in (x_test, y_test))
    near = x_test[torch.isin(y_test, torch.tensor(pair))][:500]
    (x, y), (x_test, y_test) = _without(x, y, pair), _without(x_test, y_test, pair)
    held = min(2500, len(x) // 4)
    (x_test, spare), y_test = x_test.split([len(x_test) // 2, len(x_test) - len(x_test) // 2]), y_test[:600]
    x_test = x_test[:600]
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:500, None] / 16
    far = {
        "turned": spare[:500].rot90(1, (2, 3)),
        "inverted": 1 - spare[-500:],
        other: load(other, "test", made_up=made_up)[0][:500],
        "digits": F.interpolate(digits, size=(28, 28), mode="bilinear", align_corners=False),
        "noise": torch.rand(500, *x.shape[1:]),
    }
    return {
        "train": (x[:-held], y[:-held]),
        "familiar": (x[-held:], y[-held:]),
        "test": (x_test, y_test[: len(x_test)]),
        "shifted": {kind: torch.cat([worse(x_test, i) for i in range(STRENGTHS)]) for kind, worse in SHIFTS.items()},
        "near": near,
        "far": far,
    }


def _without(x: Tensor, y: Tensor, pair: tuple[int, int]) -> Pairs:
    keep = ~torch.isin(y, torch.tensor(pair))
    return x[keep], y[keep] - sum((y[keep] > label).long() for label in pair)


def _turned(x: Tensor, degrees: float) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    matrix = torch.stack([angle.cos(), -angle.sin(), 0 * angle, angle.sin(), angle.cos(), 0 * angle]).reshape(1, 2, 3)
    grid = F.affine_grid(matrix.expand(len(x), -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _coarse(x: Tensor, size: int) -> Tensor:
    return F.interpolate(F.interpolate(x, size=size, mode="area"), size=x.shape[-1])


SHIFTS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda x, i: (x + (0.1, 0.2, 0.3, 0.5)[i] * torch.randn_like(x)).clamp(0, 1),
    "blur": lambda x, i: F.avg_pool2d(x, 2 * i + 3, stride=1, padding=i + 1),
    "contrast": lambda x, i: x.mean() + (0.7, 0.5, 0.3, 0.15)[i] * (x - x.mean()),
    "brightness": lambda x, i: (x + (0.1, 0.2, 0.35, 0.5)[i]).clamp(max=1),
    "rotation": lambda x, i: _turned(x, (15, 30, 45, 60)[i]),
    "coarse pixels": lambda x, i: _coarse(x, (14, 10, 7, 5)[i]),
}

# --- text -----------------------------------------------------------------------------------------------------------


class Bytes(nn.Module):
    """Bytes and their places as vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, LENGTH) to (batch, LENGTH, width)."""
        return self.tokens(ids) + self.places


def encoder() -> nn.Sequential:
    """Two blocks of attention, 64 wide, and the mean over places."""
    blocks = [Block(64, 4) for _ in range(2)]
    return nn.Sequential(Bytes(64), *blocks, nn.LayerNorm(64), MeanOverPlaces(), nn.Linear(64, 2))


def _windows(name: str, n: int, part: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Pieces of a part of a file, drawn at random; its first 20,000 bytes are the same in several languages."""
    root = folder()
    if root is None:
        raise NoData("text: the environment variable BAYESADAM_DATA must name the folder of the data")
    content = gzip.decompress((root / "text" / f"{name}.txt.gz").read_bytes())
    whole = torch.frombuffer(bytearray(content[20_000:]), dtype=torch.uint8)
    starts = torch.randint(int(part[0] * len(whole)), int(part[1] * len(whole)) - LENGTH, (n, 1))
    return whole[starts + torch.arange(LENGTH)].long()


def text() -> dict[str, Any]:
    """French and German, and what is neither."""
    found: dict[str, Any] = {}
    for key, n, part in (("train", 20_000, (0.0, 0.8)), ("familiar", 2500, (0.8, 0.9)), ("test", 600, (0.9, 1.0))):
        order = torch.randperm(n)
        x = torch.cat([_windows(name, n // 2, part) for name in ("french", "german")])
        found[key] = x[order], torch.arange(2).repeat_interleave(n // 2)[order]
    test = found["test"][0]
    found["shifted"] = {
        kind: torch.cat([torch.where(torch.rand(test.shape) < s, worse(test), test) for s in SHARES])
        for kind, worse in TEXT_SHIFTS.items()
    }
    far = {name: _windows(name, 500) for name in ("python", "manpages", "dictionary")}
    return {**found, "near": _windows("manual", 500), "far": far | {"random": torch.randint(256, (500, LENGTH))}}


TEXT_SHIFTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "random bytes": lambda x: torch.randint_like(x, 256),
    "blanks": lambda x: torch.full_like(x, 32),
    "capitals": lambda x: torch.where((x >= 97) & (x <= 122), x - 32, x),
    "repeated": lambda x: x.roll(1, dims=1),
    "next letter": lambda x: (x + 1) % 256,
    "shuffled": lambda x: x[:, torch.randperm(LENGTH)],
}
