"""Networks of images and texts by name: how they are trained, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import replaced
from benchmarks.common.inputs import WINDOW, Pixels, Suite
from benchmarks.common.networks import ResNet18, lenet, mlp, small_resnet, vit

RATE, KEEP = 1e-3, 50


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


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam with a cosine to 0, AdamW where weights decay, in bfloat16 where `half` and on
    CUDA.
    """

    epochs: int
    batch: int = 128
    decay: float = 0.0
    half: bool = False


NETWORKS: dict[str, Callable[[int], nn.Sequential]] = {
    "mlp": lambda classes: nn.Sequential(nn.Flatten(), *mlp((784, 400, 400, classes))),
    "lenet": lenet,
    "resnet": small_resnet,
    "resnet18": ResNet18,
    "vit": vit,
    "bert": lambda classes: nn.Sequential(Bert(), nn.Linear(64, classes)),
}
# The transformer's training in bfloat16 ended in NaN.
RECIPES = {
    "mlp": Recipe(8),
    "lenet": Recipe(8),
    "resnet": Recipe(5),
    "resnet18": Recipe(30, batch=256, decay=0.05, half=True),
    "vit": Recipe(40, batch=256, decay=0.05),
    "bert": Recipe(8),
}


@dataclass(frozen=True, eq=False)
class Trained:
    """A network and what trained it."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder | None


def network_of(name: str, classes: int, *, dropout: float = 0.0) -> nn.Sequential:
    """A network; with dropout before its last two linear layers, or before its last where there is one."""
    layers = list(NETWORKS[name](classes))
    if dropout:
        for place in [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)][:-3:-1]:
            layers.insert(place, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def optimizer_for(network: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam, or AdamW where its recipe has weights decay."""
    listed, decay = list(parameters), RECIPES[network].decay
    fused = listed[0].is_cuda
    if decay:
        return torch.optim.AdamW(listed, lr=RATE, weight_decay=decay, fused=fused)
    return torch.optim.Adam(listed, lr=RATE, fused=fused)


def augmented(x: Tensor) -> Tensor:
    """Each image flipped or not, and moved by up to four pixels."""
    n, _, height, width = x.shape
    flipped = torch.where((torch.rand(n, device=x.device) < 0.5)[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(9, (2, n, 1), device=x.device)
    rows = (down + torch.arange(height, device=x.device))[:, :, None]
    columns = (right + torch.arange(width, device=x.device))[:, None, :]
    padded = F.pad(flipped, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    return padded[torch.arange(n, device=x.device)[:, None, None], rows, columns].permute(0, 3, 1, 2)


def train(
    network: str,
    suite: Suite,
    *,
    seed: int,
    epochs: int,
    batch: int,
    dropout: float = 0.0,
) -> Trained:
    """A network trained by its recipe; the last batch of an epoch, if smaller, is left out.

    CIFAR-10 is augmented. On CUDA products are of TensorFloat-32 while it trains, images channels last where in
    bfloat16.
    """
    torch.manual_seed(seed)
    x, y = suite.train
    kind, recipe = x.device.type, RECIPES[network]
    half = recipe.half and kind == "cuda"
    model = network_of(network, suite.classes, dropout=dropout).to(x.device).train()
    if half:
        model = model.to(memory_format=torch.channels_last)
    optimizer = optimizer_for(network, model.parameters())
    steps, natural = len(x) // batch, suite.name == "cifar10"
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ba.Recorder(optimizer, keep=KEEP) as recorder:
            for _ in range(epochs):
                for rows in torch.randperm(len(x), device=x.device)[: steps * batch].split(batch):
                    inputs = augmented(x[rows]) if natural else x[rows]
                    inputs = inputs.contiguous(memory_format=torch.channels_last) if half else inputs.contiguous()
                    optimizer.zero_grad()
                    with torch.autocast(kind, torch.bfloat16, enabled=half):
                        loss = F.cross_entropy(model(inputs), y[rows])
                    loss.backward()
                    optimizer.step()
                    schedule.step()
    finally:
        torch.set_float32_matmul_precision(precision)
    optimizer.zero_grad()
    return Trained(model.to(memory_format=torch.contiguous_format).eval(), optimizer, recorder)


def logits_of(model: nn.Module, x: Tensor, *, chunk: int = 1000) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(chunk)])


def batches_of(pixels: Pixels, batch: int) -> list[Pixels]:
    return list(zip(*(part.split(batch) for part in pixels), strict=True))


def save_network(path: Path, one: Trained) -> None:
    """Without its recorder."""
    held = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
    replaced(path, lambda unfinished: torch.save(held, unfinished))


def load_network(path: Path, network: str, held: Suite) -> Trained:
    """As it was saved."""
    device = held.train[0].device
    saved = torch.load(path, map_location=device, weights_only=True)
    model = network_of(network, held.classes).to(device).eval()
    model.load_state_dict(saved["model"])
    optimizer = optimizer_for(network, model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    return Trained(model, optimizer, None)
