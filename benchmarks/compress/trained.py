"""The networks that `smaller` prunes and rounds, trained by adaptive optimisers and saved as a trainer would.

    BAYESADAM_DATA=... python -m benchmarks.compress.trained resnet18 --seeds 0 1 2 [--out DIR] [--device cuda]

A network is one file, `DIR/NAME-SEED.pt`, and is not trained again where that is there; several processes may share a
GPU. Settings of pruning are chosen on the networks whose names begin with `dev-`, and those alone. Images score by the
test images classified right, in %; bytes of text by bits a byte (of the masked ones, for BERT).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.harness import arguments, replaced, write_results
from benchmarks.common.inputs import Pixels, load, read_text
from benchmarks.common.networks import Residual, ResNet18, mlp, vit
from benchmarks.common.training import augmented

TEXTS, LENGTH, MASK, IGNORED = ("manual", "manpages"), 256, 256, -100


def dropped(sizes: tuple[int, ...], dropout: float = 0.0) -> nn.Sequential:
    """A perceptron whose hidden units are dropped in training."""
    layers: list[nn.Module] = [nn.Flatten()]
    for layer in mlp(sizes):
        layers += [layer, nn.Dropout(dropout)] if isinstance(layer, nn.ReLU) and dropout else [layer]
    return nn.Sequential(*layers)


def narrow_resnet() -> nn.Sequential:
    """Five residual blocks of 48 to 192 channels."""
    blocks = [Residual(*shape) for shape in ((48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1))]
    stem = [nn.Conv2d(3, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10))


def gpt(width: int, depth: int) -> nn.Module:
    """GPT-2 of transformers over bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": width, "n_layer": depth, "n_head": width // 64, "n_positions": LENGTH}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **shape, **rates)
    )


def bert(width: int, depth: int) -> nn.Module:
    """BERT of transformers over bytes, with a 257th for what is masked."""
    from transformers import BertConfig, BertForMaskedLM

    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 64}
    shape |= {"intermediate_size": 4 * width, "max_position_embeddings": LENGTH, "vocab_size": MASK + 1}
    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape))


@dataclass(frozen=True)
class Net:
    """How a network is built and trained: Adam, AdamW where weights decay; the rate is constant or one cycle.

    Of a text, gradients are clipped to a norm of 1; on CUDA, products are of bfloat16 where `half`.
    """

    build: Callable[[], nn.Module]
    data: str
    epochs: int
    batch: int = 128
    lr: float = 1e-3
    beta2: float = 0.999
    decay: float = 0.0
    cycle: bool = True
    masked: bool = False
    half: bool = False

    @property
    def smaller_is_better(self) -> bool:
        """Whether its score is bits, not accuracy."""
        return self.data in TEXTS


_TEXT: dict[str, Any] = {"batch": 64, "decay": 0.1, "half": True}
NETS = {
    "mnist": Net(partial(dropped, (784, 400, 400, 10), 0.2), "mnist", 100, beta2=0.99999, cycle=False),
    "lenet300": Net(partial(dropped, (784, 300, 100, 10)), "mnist", 20, cycle=False),
    "resnet18": Net(ResNet18, "cifar10", 12, batch=512, lr=2e-3, decay=0.05, half=True),
    "vit": Net(vit, "cifar10", 60, batch=512, decay=0.05),
    "gpt": Net(partial(gpt, 384, 6), "manual", 8, **_TEXT),
    "bert": Net(partial(bert, 256, 4), "manual", 12, lr=5e-4, masked=True, **_TEXT),
    "dev-mlp": Net(partial(dropped, (784, 256, 256, 10)), "fashion-mnist", 20, cycle=False),
    "dev-resnet": Net(narrow_resnet, "cifar10", 8, batch=512, lr=2e-3, decay=0.02, half=True),
    "dev-vit": Net(partial(vit, width=128, depth=4, heads=4), "cifar10", 30, batch=512, decay=0.05),
    "dev-gpt": Net(partial(gpt, 256, 4), "manpages", 6, beta2=0.99, **_TEXT),
}


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples: images and classes, or bytes and what is to be said at each place."""

    train: Pixels
    test: Pixels


@lru_cache(maxsize=1)
def data_of(net: Net, device: str, *, made_up: bool = False) -> Data:
    """The data of a network; of a text every twentieth window is tested."""
    if net.data not in TEXTS:
        splits = [load(net.data, split, made_up=made_up) for split in ("train", "test")]
        middle, spread = (0.5, 0.25) if net.data == "cifar10" else (0.0, 1.0)
        train, test = [(x.to(device).sub(middle).div(spread), y.to(device)) for x, y in splits]
        return Data(train, test)
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(97, 103, (40_000,), generator=draw) if made_up else read_text(net.data).long()
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    tested = torch.arange(len(windows)) % 20 == 0
    x, y = windows[:, :-1], windows[:, 1:]
    test = masked(x[tested], draw) if net.masked else (x[tested], y[tested])
    parts = [part.contiguous().to(device) for part in (x[~tested], y[~tested], *test)]
    return Data((parts[0], parts[1]), (parts[2], parts[3]))


def masked(x: Tensor, draw: torch.Generator | None = None) -> Pixels:
    """15 % of the places masked, and what they held."""
    gone = torch.rand(x.shape, device=x.device, generator=draw) < 0.15
    return torch.where(gone, MASK, x), torch.where(gone, x, IGNORED)


def some_inputs(net: Net, data: Data, n: int, seed: int) -> Tensor:
    """Training inputs without their labels, drawn by the seed."""
    draw = torch.Generator().manual_seed(seed)
    x = data.train[0][torch.randperm(len(data.train[0]), generator=draw)[:n].to(data.train[0].device)]
    return masked(x.cpu(), draw)[0].to(x.device) if net.masked else x


# --- training and scores --------------------------------------------------------------------------------------------


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return getattr(found, "logits", found)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        logits_of(model, x).flatten(0, -2).float(), y.flatten(), ignore_index=IGNORED, reduction=reduction
    )


@torch.no_grad()
def score(net: Net, model: nn.Module, data: Data) -> float:
    """Test accuracy in %, or bits a byte."""
    model.eval()
    batches = list(zip(*(part.split(500) for part in data.test), strict=True))
    if net.smaller_is_better:
        places = int((data.test[1] != IGNORED).sum())
        return sum(float(loss_of(model, x, y, "sum")) for x, y in batches) / places / math.log(2)
    return 100 * sum(int((logits_of(model, x).argmax(dim=1) == y).sum()) for x, y in batches) / len(data.test[1])


def train(net: Net, data: Data, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and what trained it; images of CIFAR-10 are moved and flipped."""
    torch.manual_seed(seed)
    x, y = data.train
    natural, kind = net.data == "cifar10", x.device.type
    layout = torch.channels_last if natural else torch.contiguous_format
    model = net.build().to(x.device, memory_format=layout).train()
    rule = torch.optim.AdamW if net.decay else torch.optim.Adam
    settings = {"lr": net.lr, "betas": (0.9, net.beta2), "weight_decay": net.decay, "fused": kind == "cuda"}
    optimizer, steps = rule(model.parameters(), **settings), len(x) // net.batch
    rates: torch.optim.lr_scheduler.LRScheduler = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, net.lr, net.epochs * steps, cycle_momentum=False)
        if net.cycle
        else torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    )
    for _ in range(net.epochs):
        for rows in torch.randperm(len(x), device=x.device)[: steps * net.batch].split(net.batch):
            inputs, labels = masked(x[rows]) if net.masked else (x[rows], y[rows])
            inputs = augmented(inputs).contiguous(memory_format=layout) if natural else inputs
            optimizer.zero_grad()
            with torch.autocast(kind, torch.bfloat16, enabled=net.half and kind == "cuda"):
                loss = loss_of(model, inputs, labels)
            loss.backward()
            if net.smaller_is_better:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
    return model.to(memory_format=torch.contiguous_format).eval(), optimizer


def trained(
    name: str, seed: int, path: Path, device: str, *, epochs: int | None = None, made_up: bool = False
) -> float:
    """Train a network into a file; its score."""
    net = replace(NETS[name], epochs=1, batch=64) if made_up else NETS[name]
    net = replace(net, epochs=epochs or net.epochs)
    data, start = data_of(net, device, made_up=made_up), time.perf_counter()
    model, optimizer = train(net, data, seed)
    seconds, found = time.perf_counter() - start, score(net, model, data)
    replaced(path, partial(torch.save, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    print(f"{path.name}: {found:.3f} in {seconds:.0f} s", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__, quick="one epoch of made-up data", device=True)
    parser.add_argument("nets", nargs="*", default=["lenet300"], help=f"of {', '.join(NETS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="in place of the network's own")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    paths = {(name, seed): options.out / f"{name}-{seed}.pt" for name in options.nets for seed in options.seeds}
    found = {
        path.stem: trained(*key, path, options.device, epochs=options.epochs, made_up=options.quick)
        for key, path in paths.items()
        if not path.is_file()
    }
    write_results(options.out, f"trained-{'-'.join(options.nets)}-{'-'.join(map(str, options.seeds))}", found)
    print(f"{len(found)} networks trained")


if __name__ == "__main__":
    main()
