"""The networks that `smaller` prunes and rounds, trained by adaptive optimisers and saved as a trainer would.

    BAYESADAM_DATA=... python -m benchmarks.compress.trained resnet18 --seeds 0 1 2 [--out DIR] [--device cuda]

A network is one file, `DIR/NAME-SEED.pt`, and is not trained again where that is there. Images score by the test images
classified right, in %; bytes of text by bits a byte (of the masked ones, for BERT).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.harness import arguments, write_results
from benchmarks.common.inputs import Pixels, load, read_text
from benchmarks.common.networks import ResNet18, mlp, vit
from benchmarks.common.training import Recipe, augmented

LENGTH, MASK, IGNORED = 256, 256, -100


def perceptron(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Its hidden units are dropped in training."""
    dropped = [nn.Dropout(dropout)] if dropout else []
    layers = [[layer, *dropped] if isinstance(layer, nn.ReLU) else [layer] for layer in mlp(sizes)]
    return nn.Sequential(nn.Flatten(), *(layer for pair in layers for layer in pair))


def gpt(width: int, depth: int) -> nn.Module:
    """GPT-2 of transformers over bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": width, "n_layer": depth, "n_head": width // 64, "n_positions": LENGTH}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **shape))


def bert(width: int, depth: int) -> nn.Module:
    """BERT of transformers over bytes, with a 257th for what is masked."""
    from transformers import BertConfig, BertForMaskedLM

    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 64}
    shape |= {"intermediate_size": 4 * width, "max_position_embeddings": LENGTH, "vocab_size": MASK + 1}
    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape))


@dataclass(frozen=True)
class Net:
    """How a network is built and trained, on which data; `masked` bytes are to be said again."""

    build: Callable[[], nn.Module]
    data: str
    recipe: Recipe
    masked: bool = False

    @property
    def smaller_is_better(self) -> bool:
        """Whether its score is bits, not accuracy."""
        return self.data == "manual"


_CONSTANT, _CYCLE = partial(Recipe, schedule="constant"), partial(Recipe, schedule="cycle", batch=512)
_TEXT = partial(_CYCLE, batch=64, decay=0.1, half=True, clip=1.0)
NETS = {
    "mnist": Net(partial(perceptron, 784, 400, 400, 10, dropout=0.2), "mnist", _CONSTANT(100, beta2=0.99999)),
    "lenet300": Net(partial(perceptron, 784, 300, 100, 10), "mnist", _CONSTANT(20)),
    "resnet18": Net(ResNet18, "cifar10", _CYCLE(12, lr=2e-3, decay=0.05, half=True)),
    "vit": Net(vit, "cifar10", _CYCLE(60, decay=0.05)),
    "gpt": Net(partial(gpt, 384, 6), "manual", _TEXT(8)),
    "bert": Net(partial(bert, 256, 4), "manual", _TEXT(12, lr=5e-4), masked=True),
}


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples: images and classes, or bytes and what is to be said at each place."""

    train: Pixels
    test: Pixels


@lru_cache(maxsize=1)
def data_of(net: Net, device: str, *, made_up: bool = False) -> Data:
    """The data of a network; of a text every twentieth window is tested."""
    if not net.smaller_is_better:
        splits = [load(net.data, split, made_up=made_up) for split in ("train", "test")]
        middle, spread = (0.5, 0.25) if net.data == "cifar10" else (0.0, 1.0)
        return Data(*((x.to(device).sub(middle).div(spread), y.to(device)) for x, y in splits))
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


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    return getattr(outputs, "logits", outputs)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    logits = logits_of(model, x).flatten(0, -2).float()
    return F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction=reduction)


@torch.no_grad()
def score(net: Net, model: nn.Module, data: Data) -> float:
    """Test accuracy in %, or bits a byte."""
    model.eval()
    batches = list(zip(*(part.split(500) for part in data.test), strict=True))
    if net.smaller_is_better:
        places = int((data.test[1] != IGNORED).sum())
        return sum(float(loss_of(model, x, y, "sum")) for x, y in batches) / places / math.log(2)
    return 100 * sum(int((logits_of(model, x).argmax(dim=1) == y).sum()) for x, y in batches) / len(data.test[1])


def trained(name: str, seed: int, path: Path, device: str, *, made_up: bool = False) -> float:
    """Train a network into a file; its score. Images of CIFAR-10 are moved and flipped."""
    net, start, how = NETS[name], time.perf_counter(), dict[str, Any]()
    recipe = replace(net.recipe, epochs=1, batch=64) if made_up else net.recipe
    if net.masked or net.data == "cifar10":
        how["change"] = lambda x, y: masked(x) if net.masked else (augmented(x), y)
    data = data_of(net, device, made_up=made_up)
    torch.manual_seed(seed)
    one = recipe.train(net.build().to(device), data.train, loss_of, **how)
    one.save(path)
    scored = score(net, one.model, data)
    print(f"{path.name}: {scored:.3f} in {time.perf_counter() - start:.0f} s", flush=True)
    return scored


def main() -> None:
    parser = arguments(__doc__, quick="one epoch of made-up data", device=True)
    parser.add_argument("nets", nargs="*", default=["lenet300"], help=f"of {', '.join(NETS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    scores = {}
    for name, seed in product(options.nets, options.seeds):
        path = options.out / f"{name}-{seed}.pt"
        if not path.is_file():
            scores[path.stem] = trained(name, seed, path, options.device, made_up=options.quick)
    write_results(options.out, f"trained-{'-'.join(options.nets)}-{'-'.join(map(str, options.seeds))}", scores)
    print(f"{len(scores)} networks trained")


if __name__ == "__main__":
    main()
