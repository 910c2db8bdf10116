"""The networks of `optimizers.py` and their data, and the optimisers that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import doubt_data
import language
from benchmarks.merging.text import Language
from networks import ResNet18, lenet, mlp, small_resnet
from publish import turned

Pair = tuple[Tensor, Tensor]
HELD_OUT, DEGREES = 1000, 40.0
WINDOW = 128


@dataclass(frozen=True, eq=False)
class Task:
    """A network and what it learns; of texts an example is a window of bytes, and a target the next byte of each.

    Attributes:
        build: an untrained network.
        train: inputs and targets.
        held_out: to calibrate by.
        test: to report on.
        novel: inputs of another kind.
        others: two kinds of inputs that copies of the network go on with: training and test pairs.
        epochs: over the training data; half as many over those of the others.
        batch: examples of a step.
        half: trained in bfloat16, channels last, on CUDA.
    """

    build: Callable[[], nn.Module]
    train: Pair
    held_out: Pair
    test: Pair
    novel: Tensor
    others: tuple[tuple[Pair, Pair], tuple[Pair, Pair]]
    epochs: int
    batch: int
    half: bool = False


# --- data -----------------------------------------------------------------------------------------------------------


def _of_images(
    build: Callable[[], nn.Module],
    name: str,
    device: str,
    *,
    images: int,
    tests: int,
    epochs: int,
    batch: int,
    half: bool = False,
) -> Task:
    """Rotated by ± 40° they are the other kinds, a half of the training images each; clothes are novel."""
    (x, y), (test_x, test_y) = (doubt_data.load(name, split) for split in ("train", "test"))
    x, y, test_x, test_y = x[:images].to(device), y[:images].to(device), test_x[:tests].to(device), test_y[:tests]
    test_y, n = test_y.to(device), len(x) - min(HELD_OUT, len(x) // 2)
    novel = doubt_data.load("fashion-mnist", "test")[0][:tests].to(device)
    if x.shape[1] == 3:
        novel = F.pad(novel, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()

    def other(part: slice, degrees: float) -> tuple[Pair, Pair]:
        return (turned(x[part], degrees), y[part]), (turned(test_x, degrees), test_y)

    return Task(
        build,
        (x[:n], y[:n]),
        (x[n:], y[n:]),
        (test_x, test_y),
        novel,
        (other(slice(0, n // 2), -DEGREES), other(slice(n // 2, n), DEGREES)),
        epochs,
        batch,
        half,
    )


def _windows(name: str, device: str, count: int, tests: int) -> tuple[Pair, Pair]:
    """Windows of a text, to train and to test by: the last tenth of it is for the tests."""
    text = language.read_text(name, device)
    cut = len(text) * 9 // 10

    def pair(part: Tensor, most: int) -> Pair:
        starts = language.evenly(len(part) - WINDOW - 1, most, part.device)
        rows = part[starts[:, None] + torch.arange(WINDOW + 1, device=part.device)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return pair(text[:cut], count), pair(text[cut:], tests)


def _of_texts(device: str, *, windows: int, tests: int, epochs: int) -> Task:
    """`manual` is learnt, `french` and `python` are the other kinds, `german` is novel."""
    train, test = _windows("manual", device, windows, tests + min(tests, HELD_OUT // 4))
    (novel, _), _ = _windows("german", device, tests, 1)
    french, python = (_windows(name, device, windows // 2, tests) for name in ("french", "python"))
    # Held-out windows and those of the tests are of other places of the text's end.
    held_out = tuple(part[tests:] for part in test)
    test = tuple(part[:tests] for part in test)
    return Task(lambda: Language(4, 256, WINDOW), train, held_out, test, novel, (french, python), epochs, batch=50)


TASKS: Mapping[str, Callable[[str, bool], Task]] = {
    "mlp": lambda device, quick: _of_images(
        lambda: nn.Sequential(nn.Flatten(), *mlp()), "mnist", device, **_sizes(quick)
    ),
    "lenet": lambda device, quick: _of_images(lenet, "mnist", device, **_sizes(quick)),
    "resnet": lambda device, quick: _of_images(small_resnet, "mnist", device, **_sizes(quick)),
    "resnet18": lambda device, quick: _of_images(
        ResNet18, "cifar10", device, **_sizes(quick, images=21_000, tests=2000, epochs=6, batch=200, half=True)
    ),
    "gpt": lambda device, quick: _of_texts(
        device,
        **({"windows": 500, "tests": 50, "epochs": 1} if quick else {"windows": 20_000, "tests": 500, "epochs": 3}),
    ),
}


def _sizes(quick: bool, **own: Any) -> Any:
    found = {"images": 60_000, "tests": 10_000, "epochs": 4, "batch": 100, **own}
    return {**found, "images": 1500, "tests": 200, "epochs": 1} if quick else found


# --- optimisers -----------------------------------------------------------------------------------------------------


class _Own(Optimizer):
    """Steps that are written down here, a weight at a time, with one average of gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    self.move(p, p.grad, state.setdefault("momentum_buffer", torch.zeros_like(p)), group["lr"])

    def move(self, p: Tensor, gradient: Tensor, momentum: Tensor, rate: float) -> None:
        """The step of one parameter."""
        raise NotImplementedError


class Lion(_Own):
    """θ ← θ − η sign(.9 m + .1 g), m ← .99 m + .01 g."""

    def move(self, p: Tensor, gradient: Tensor, momentum: Tensor, rate: float) -> None:
        """The step of one parameter."""
        p.sub_(momentum.lerp(gradient, 0.1).sign_(), alpha=rate)
        momentum.lerp_(gradient, 0.01)


class Muon(_Own):
    """W ← W − η √max(1, m/n) U Vᵀ of the momentum's U S Vᵀ, (m, n); a convolution's weight is a matrix of its outputs.

    torch's Muon takes matrices alone. U Vᵀ is approximated by five steps of X ← aX + (bA + cA²)X with A = XXᵀ; the
    momentum is Nesterov's, of .95.
    """

    def move(self, p: Tensor, gradient: Tensor, momentum: Tensor, rate: float) -> None:
        """The step of one parameter."""
        update = orthogonal(gradient.lerp(momentum.lerp_(gradient, 0.05), 0.95).flatten(1))
        scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
        p.sub_(update.view_as(p), alpha=rate * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ of a matrix's U S Vᵀ."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x.mT if is_tall else x


def _muon(model: nn.Module, rate: float) -> list[Optimizer]:
    """Hidden matrices and filters by Muon; embeddings, the last layer and vectors by AdamW."""
    outer = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    outer.add([m for m in model.modules() if isinstance(m, nn.Linear)][-1].weight)
    hidden = [p for p in model.parameters() if p.dim() > 1 and p not in outer]
    chosen = set(hidden)
    rest = [p for p in model.parameters() if p not in chosen]
    return [Muon(hidden, lr=rate), torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0)]


OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], list[Optimizer]]] = {
    "adamw": lambda model, rate: [torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)],
    "muon": _muon,
    "sgd": lambda model, rate: [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)],
    "lion": lambda model, rate: [Lion(model.parameters(), lr=rate)],
}
RATES: Mapping[str, tuple[float, ...]] = {
    "adamw": (3e-4, 1e-3, 3e-3),
    "muon": (0.005, 0.02, 0.05),
    "sgd": (0.02, 0.05, 0.15, 0.5),
    "lion": (3e-5, 1e-4, 3e-4),
}
