"""Training loops, and networks of images and texts by name: their recipes, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

import bayesadam as ba
from benchmarks.common.harness import replaced
from benchmarks.common.inputs import WINDOW, Pixels, Suite
from benchmarks.common.networks import ResNet18, lenet, mlp, small_resnet, vit


def drawn(n: int, size: int, steps: int, source: torch.Generator | None = None) -> Iterator[Tensor]:
    """Rows of n, with replacement, one batch a step."""
    device = source.device if source else "cpu"
    return (torch.randint(n, (size,), generator=source, device=device) for _ in range(steps))


def passes(n: int, size: int, epochs: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Rows of n, shuffled anew each epoch, of which the last batch, if smaller, is left out."""
    for _ in range(epochs):
        yield from torch.randperm(n, device=device)[: n // size * size].split(size)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Iterable[Tensor],
    loss: Callable[[Tensor], Tensor],
    *,
    schedule: LRScheduler | None = None,
    clip: float | None = None,
) -> nn.Module:
    """A step of the loss at each batch of rows; the network in evaluation mode, and without gradients."""
    model.train()
    for some in rows:
        optimizer.zero_grad()
        loss(some).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    optimizer.zero_grad()
    return model.eval()


def augmented(x: Tensor) -> Tensor:
    """Each image flipped or not, and moved by up to four pixels."""
    n, _, height, width = x.shape
    flipped = torch.where((torch.rand(n, device=x.device) < 0.5)[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(9, (2, n, 1), device=x.device)
    rows = (down + torch.arange(height, device=x.device))[:, :, None]
    columns = (right + torch.arange(width, device=x.device))[:, None, :]
    padded = F.pad(flipped, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    return padded[torch.arange(n, device=x.device)[:, None, None], rows, columns].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam, AdamW where weights decay, in bfloat16 where `half` and on CUDA.

    The rate is constant, or falls to 0 along a "cosine", or has one "cycle"; `clip` is the norm of gradients at most.
    """

    epochs: int
    batch: int = 128
    lr: float = 1e-3
    beta2: float = 0.999
    decay: float = 0.0
    half: bool = False
    schedule: str = "cosine"
    clip: float | None = None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Fused where on CUDA."""
        weights = list(model.parameters())
        how: Any = {"lr": self.lr, "betas": (0.9, self.beta2), "weight_decay": self.decay, "fused": weights[0].is_cuda}
        return (torch.optim.AdamW if self.decay else torch.optim.Adam)(weights, **how)

    def train(
        self,
        model: nn.Module,
        data: Pixels,
        loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
        *,
        change: Callable[[Tensor, Tensor], Pixels] = lambda x, y: (x, y),
    ) -> Trained:
        """Train on inputs and targets, of which `change` makes what a step sees.

        On CUDA products are of TensorFloat-32 meanwhile, images channels last where in bfloat16.
        """
        optimizer, n, device = self.optimizer(model), len(data[0]), data[0].device
        half, steps = self.half and device.type == "cuda", self.epochs * (n // self.batch)
        schedules = {"cosine": CosineAnnealingLR, "cycle": lambda o, t: OneCycleLR(o, self.lr, t, cycle_momentum=False)}
        schedule = schedules[self.schedule](optimizer, steps) if self.schedule in schedules else None

        def of_rows(rows: Tensor) -> Tensor:
            x, y = change(*(part[rows] for part in data))
            x = x.contiguous(memory_format=torch.channels_last if half and x.dim() == 4 else torch.contiguous_format)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                return loss(model, x, y)

        if half:
            model.to(memory_format=torch.channels_last)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            fit(
                model, optimizer, passes(n, self.batch, self.epochs, device), of_rows, schedule=schedule, clip=self.clip
            )
        finally:
            torch.set_float32_matmul_precision(precision)
        return Trained(model.to(memory_format=torch.contiguous_format), optimizer)


@dataclass(frozen=True, eq=False)
class Trained:
    """A network and what trained it."""

    model: Any
    optimizer: torch.optim.Optimizer

    def save(self, path: Path) -> None:
        """As a trainer would."""
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        replaced(path, lambda unfinished: torch.save(states, unfinished))

    @classmethod
    def load(cls, path: Path, model: nn.Module, recipe: Recipe) -> Trained:
        """As it was saved, into an untrained network."""
        saved = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer = recipe.optimizer(model.eval())
        optimizer.load_state_dict(saved["optimizer"])
        return cls(model, optimizer)


def logits_of(model: nn.Module, x: Tensor, *, chunk: int = 1000) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(chunk)])


def batches_of(pixels: Pixels, batch: int) -> list[Pixels]:
    return list(zip(*(part.split(batch) for part in pixels), strict=True))


class Bert(nn.Module):
    """BERT of transformers, 2 layers of width 64, for windows of bytes: what its pooler makes of a first token."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        shape |= {"vocab_size": 257, "hidden_size": 64, "max_position_embeddings": WINDOW + 1}
        self.bert = BertModel(BertConfig(**shape, attn_implementation="eager"))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) bytes to (batch, 64)."""
        return self.bert(input_ids=F.pad(x, (1, 0), value=256)).pooler_output  # type: ignore[no-any-return]


# By name, a network of so many classes and its recipe; the transformer's training in bfloat16 ended in NaN.
CLASSIFIERS: dict[str, tuple[Callable[[int], nn.Sequential], Recipe]] = {
    "mlp": (lambda classes: nn.Sequential(nn.Flatten(), *mlp((784, 400, 400, classes))), Recipe(8)),
    "lenet": (lenet, Recipe(8)),
    "resnet": (small_resnet, Recipe(5)),
    "resnet18": (ResNet18, Recipe(30, batch=256, decay=0.05, half=True)),
    "vit": (vit, Recipe(40, batch=256, decay=0.05)),
    "bert": (lambda classes: nn.Sequential(Bert(), nn.Linear(64, classes)), Recipe(8)),
}


def classifier(name: str, suite: Suite, *, dropout: float = 0.0) -> nn.Sequential:
    """A network; with dropout before its last two linear layers, or before its last where there is one."""
    layers = list(CLASSIFIERS[name][0](suite.classes))
    if dropout:
        for place in [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)][:-3:-1]:
            layers.insert(place, nn.Dropout(dropout))
    return nn.Sequential(*layers).to(suite.train[0].device)


def train(name: str, suite: Suite, recipe: Recipe, *, seed: int, dropout: float = 0.0) -> Trained:
    """A classifier, trained; images of CIFAR-10 are augmented."""
    torch.manual_seed(seed)
    how: Any = {"change": lambda x, y: (augmented(x), y)} if suite.name == "cifar10" else {}
    model = classifier(name, suite, dropout=dropout)
    return recipe.train(model, suite.train, lambda model, x, y: F.cross_entropy(model(x), y), **how)


def posterior_of(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Any, *, steps: int, rate: float, batch: int
) -> ba.Posterior:
    """After steps of Adam on random batches, by the loss of the likelihood."""
    loss = {"classification": F.cross_entropy, "regression": F.mse_loss}.get(likelihood, _gaussian)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    fit(model, optimizer, drawn(len(x), batch, steps), lambda rows: loss(model(x[rows]), y[rows]))
    return ba.Posterior.from_optimizer(model, optimizer, len(x), batch_size=batch, likelihood=likelihood)


def _gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """Of means and log-variances."""
    mean, log_variance = outputs.chunk(2, dim=1)
    return F.gaussian_nll_loss(mean, y, log_variance.exp())
