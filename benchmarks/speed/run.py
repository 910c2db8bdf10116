"""What doubt costs: predictions, novelty and exported networks over the bare model, at batches of 1 and 64.

    python -m benchmarks.speed.run [--quick] [--networks MLP LeNet …] [--ways net compiled onnx …]
        [--device cuda] [--out out/bench]

A network of a few random steps is calibrated on 64 inputs. Each way and the bare network, logits and a softmax, run in
turns; a row is the median of the ratios, with their 5 and 95 % quantiles:

- net: `ba.calibrate(posterior, held_out)(x)`: probabilities, novelty and p-values, in one forward pass;
- compiled, graphs: the same by torch.compile, and by its graphs of CUDA, over the bare network compiled alike;
- onnx: the same as `net.save` wrote it, by onnxruntime, over the bare network exported alike (CPU alone);
- novelty: `posterior.novelty(x, reference=ten inputs)`, by the optimiser's state;
- linearised, sampled: `posterior.predict(x)`, and with 32 draws; networks of few outputs alone.

"apart" is the largest difference of a probability from those of `net`, eager. Calibration is timed over one forward
pass of the held-out inputs. "bytes" are of the exported file over those of the bare network's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import (
    Target,
    arguments,
    at_most,
    import_peer,
    interleaved,
    ratio,
    ratio_range,
    setting,
    write_results,
)
from benchmarks.common.networks import ResNet18, lenet, mlp, vit

WAYS = ("net", "compiled", "graphs", "onnx", "novelty", "linearised", "sampled")
MODES = {"compiled": "default", "graphs": "reduce-overhead"}
LIMITS = {1: 1.5, 64: 1.3}
CLASSES, LENGTH, DRAWS = 10, 64, 32


def bert() -> nn.Module:
    """Of random weights, 4 layers of width 256."""
    from transformers import BertConfig, BertForSequenceClassification

    size: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForSequenceClassification(BertConfig(vocab_size=5_000, num_labels=CLASSES, **size))


def gpt2() -> nn.Module:
    """GPT-2 small, of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def tokens(most: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(most, (batch, LENGTH))


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": (mlp, images(784)),
    "LeNet": (lenet, images(1, 28, 28)),
    "ResNet-18": (ResNet18, images(3, 32, 32)),
    "ViT": (vit, images(3, 32, 32)),
    "BERT": (bert, tokens(5_000)),
    "GPT-2": (gpt2, tokens(50_257)),
}
OF_TEXT = ("BERT", "GPT-2")


def logits(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits  # type: ignore[no-any-return]


class Bare(nn.Module):
    """A model and a softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Its probabilities."""
        return logits(self.model, x).softmax(dim=-1)


def prepared(name: str, device: str) -> tuple[ba.Posterior, nn.Module, float]:
    """A posterior of random steps, its calibrated network, and the seconds that calibration took."""
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    model, held = build().to(device), inputs(64).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    shape = logits(model, held).shape
    y = torch.randint(shape[-1], shape[:-1], device=device)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(logits(model, held).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    posterior = ba.Posterior.from_optimizer(model.eval(), optimizer, 60_000, likelihood="classification")
    began = time.perf_counter()
    net = ba.calibrate(posterior, (held, y), forward=logits if name in OF_TEXT else None)
    return posterior, net, time.perf_counter() - began


def onnx_call(file: Path, x: Tensor) -> Callable[[], Any]:
    """A session of onnxruntime on one batch: its probabilities."""
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, how)
    feeds, names = {session.get_inputs()[0].name: x.numpy()}, [output.name for output in session.get_outputs()]
    place = names.index("probs") if "probs" in names else 0
    return lambda: torch.as_tensor(session.run(None, feeds)[place])


def export(net: nn.Module, model: nn.Module, x: Tensor, folder: Path) -> dict[str, Path]:
    """The calibrated network and the bare one as ONNX."""
    files = {name: folder / f"{name}.onnx" for name in ("net", "bare")}
    net.save(files["net"], example=x)  # type: ignore[operator]
    torch.onnx.export(
        Bare(model), (x,), files["bare"], dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    return files


def calls(
    way: str, posterior: ba.Posterior, net: nn.Module, x: Tensor, reference: Tensor, files: Mapping[str, Path]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Doubt, and the bare network, in a way."""
    if way == "onnx":
        return onnx_call(files["net"], x), onnx_call(files["bare"], x)
    modules: list[Callable[[Tensor], Any]] = [net, Bare(posterior.model)]
    if way in MODES:
        torch.compiler.reset()
        modules = [torch.compile(module, fullgraph=True, mode=MODES[way]) for module in modules]
    elif way == "novelty":
        modules[0] = partial(posterior.novelty, reference=reference)
    elif way in ("linearised", "sampled"):
        modules[0] = lambda x: posterior.predict(x, draws=DRAWS if way == "sampled" else None).probs

    def timed(module: Callable[[Tensor], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                found = module(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            return found

        return run

    return timed(modules[0]), timed(modules[1])


def bench(name: str, ways: list[str], device: str, folder: Path, *, quick: bool) -> tuple[dict[str, Any], list[Target]]:
    """One network: the ratio in every way at both batches, files, differences."""
    posterior, net, calibrating = prepared(name, device)
    inputs, result, targets = NETWORKS[name][1], {}, []
    ways = [way for way in ways if name not in OF_TEXT or way not in ("novelty", "linearised", "sampled")]
    files = export(net, posterior.model, inputs(2), folder) if "onnx" in ways else {}
    if files:
        result["bytes"] = files["net"].stat().st_size / files["bare"].stat().st_size
        print(f"{name}, exported: {result['bytes']:.3f} of the bare network's bytes")
    reference = inputs(10).to(device)
    for batch, limit in LIMITS.items():
        x = inputs(batch).to(device)
        with torch.no_grad():
            truth = net(x).probs
        for way in ways:
            doubt, bare = calls(way, posterior, net, x, reference, files)
            began = time.perf_counter()
            bare(), bare()
            once = (time.perf_counter() - began) / 2
            rounds = 3 if quick or way in ("linearised", "sampled") else max(10, min(200, int(4 / once)))
            seconds = interleaved({"doubt": doubt, "bare": bare}, rounds=rounds, warmup=1)
            over, (low, high) = ratio(seconds, "doubt", "bare"), ratio_range(seconds, "doubt", "bare")
            ms = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
            row = {"ratio": over, "range": [low, high], "ms": ms}
            print(f"{name:10s}{way:12s}batch {batch:3d}: {over:7.2f} ({low:.2f} to {high:.2f}) × {ms['bare']:.3f} ms")
            if way in ("net", *MODES, "onnx"):
                probs = doubt() if way == "onnx" else doubt().probs
                row["apart"] = float((probs.cpu() - truth.cpu()).abs().max())
                targets += at_most(f"{name}, {way}, batch {batch}: time over the bare model", limit, over)
                targets += at_most(f"{name}, {way}, batch {batch}: apart from eager", 1e-5, row["apart"])
            result[f"{way}, batch {batch}"] = row
            if way == "net" and batch == 64:
                result["calibrate"] = 1e3 * calibrating / ms["bare"]
                print(f"{name:10s}calibrate takes {result['calibrate']:.1f} forward passes")
    return result, targets


def main() -> None:
    parser = arguments(__doc__, quick="three rounds of the small networks", device=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    has = {"onnx": on_cpu and import_peer("onnxruntime", "onnxruntime") is not None, "graphs": not on_cpu}
    ways = [way for way in options.ways if has.get(way, True)]
    if options.quick:
        ways = [way for way in ways if way != "compiled"]
    warnings.simplefilter("ignore")
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {**setting(), "device": options.device}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks or (["MLP", "LeNet"] if options.quick else NETWORKS):
            results[name], found = bench(name, ways, options.device, Path(folder), quick=options.quick)
            targets += found
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "speed", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
