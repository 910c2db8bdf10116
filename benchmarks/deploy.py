"""What doubt costs: `predict` and the deployed module over a bare forward pass, and its files.

    python benchmarks/deploy.py [--quick] [--networks MLP LeNet …] [--ways predict eager compiled graphs onnx]
        [--device cuda] [--out out/bench]

A row is a network of a few random steps, calibrated on 64 inputs. Probabilities, novelty and p-values of a batch of 1
and of 64 are timed over logits and a softmax, in turns: by `posterior.predict`; by `ba.deploy`, and both of them by
torch.compile, by its graphs of CUDA ("reduce-overhead"), and as `.onnx` by onnxruntime (CPU). "apart" is the largest
difference from `predict` of any probability, novelty, relative to 1 and its size, in each way; the files are what
`save` writes, their bytes over those of the bare model's. The last lines say which targets were met.
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
from bayesadam.predict.network import output_tensor
from harness import Target, arguments, at_most, import_peer, interleaved, ratio, ratio_range, setting, write_results
from networks import ResNet18, lenet, mlp, vit

WAYS = ("predict", "eager", "compiled", "graphs", "onnx")
MODES = {"compiled": "default", "graphs": "reduce-overhead"}
LIMITS = {1: 1.5, 64: 1.3}
CLASSES, LENGTH = 10, 64


def bert() -> nn.Module:
    """Of random weights, 4 layers of width 256."""
    from transformers import BertConfig, BertForSequenceClassification

    size: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForSequenceClassification(BertConfig(vocab_size=5_000, num_labels=CLASSES, **size))


def gpt2() -> nn.Module:
    """GPT-2 small, of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def images(batch: int, *shape: int) -> Tensor:
    return torch.randn(batch, *shape)


def tokens(batch: int, *, most: int) -> dict[str, Tensor]:
    ids = torch.randint(most, (batch, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "MLP": (mlp, lambda batch: images(batch, 784)),
    "LeNet": (lenet, lambda batch: images(batch, 1, 28, 28)),
    "ResNet-18": (ResNet18, lambda batch: images(batch, 3, 32, 32)),
    "ViT": (vit, lambda batch: images(batch, 3, 32, 32)),
    "BERT": (bert, partial(tokens, most=5_000)),
    "GPT-2": (gpt2, partial(tokens, most=50_257)),
}


class Bare(nn.Module):
    """A model and a softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Tensor:
        """Its probabilities."""
        found = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        return output_tensor(found).softmax(dim=-1)


def moved(inputs: Any, device: str) -> Any:
    return {k: v.to(device) for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.to(device)


def calibrated(name: str, device: str) -> tuple[ba.Posterior, float]:
    """A posterior of random steps, and the seconds that calibration took."""
    torch.manual_seed(0)
    build, inputs_of = NETWORKS[name]
    model, held = build().to(device), moved(inputs_of(64), device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    shape = output_tensor(model(**held) if isinstance(held, dict) else model(held)).shape
    y = torch.randint(shape[-1], shape[:-1], device=device)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = output_tensor(model(**held) if isinstance(held, dict) else model(held))
        F.cross_entropy(outputs.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    posterior = ba.Posterior.from_optimizer(model.eval(), optimizer, 60_000, likelihood="classification")
    began = time.perf_counter()
    own = (lambda model, x: output_tensor(model(**x))) if name == "GPT-2" else None
    posterior = ba.calibrate(posterior, (held, y), forward=own)
    return posterior, time.perf_counter() - began


def onnx_call(file: Path, inputs: Any) -> Callable[[], dict[str, Tensor]]:
    """A session of onnxruntime on one batch."""
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, how)
    leaves = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    feeds = {given.name: leaf.numpy() for given, leaf in zip(session.get_inputs(), leaves, strict=True)}
    names = [each.name for each in session.get_outputs()]
    return lambda: dict(zip(names, map(torch.as_tensor, session.run(None, feeds)), strict=True))


def files_of(posterior: ba.Posterior, inputs_of: Callable[[int], Any], folder: Path, *, onnx: bool) -> dict[str, Path]:
    """The deployed module and the bare one, in each format."""
    served, bare = ba.deploy(posterior), Bare(ba.deploy(posterior).model)
    for handle in [module for module in bare.modules() if module._forward_pre_hooks]:
        handle._forward_pre_hooks.clear()
    found, example, batch = {}, inputs_of(2), torch.export.Dim("batch", min=1, max=65_535)
    shapes: Any = {name: {0: batch} for name in example} if isinstance(example, dict) else {0: batch}
    with torch.no_grad():
        program = torch.export.export(bare, (example,), dynamic_shapes=(shapes,), strict=False)
    for suffix in (".pt2", ".onnx") if onnx else (".pt2",):
        served.save(folder / f"served{suffix}", example)
        if suffix == ".pt2":
            torch.export.save(program, folder / "bare.pt2")
        else:
            torch.onnx.export(program, dynamo=True, verbose=False).save(folder / "bare.onnx")
        found |= {f"{kind}{suffix}": folder / f"{kind}{suffix}" for kind in ("served", "bare")}
    return found


def calls(
    way: str, posterior: ba.Posterior, inputs: Any, files: Mapping[str, Path], device: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Doubt, and the bare network, in a way."""
    served, bare = ba.deploy(posterior), Bare(posterior.model)
    if way == "onnx":
        return onnx_call(files["served.onnx"], inputs), onnx_call(files["bare.onnx"], inputs)
    if way in MODES:
        torch.compiler.reset()
        served, bare = (torch.compile(each, fullgraph=True, mode=MODES[way]) for each in (served, bare))  # type: ignore[assignment]

    def timed(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                found = call()
            if device == "cuda":
                torch.cuda.synchronize()
            return found

        return run

    if way == "predict":

        def doubt() -> dict[str, Tensor]:
            p = posterior.predict(inputs)
            return {"probs": p.probs, "novelty": p.novelty, "p_value": p.novelty_pvalue}

        return timed(doubt), timed(lambda: bare(inputs))
    return timed(lambda: served(inputs)._asdict()), timed(lambda: bare(inputs))


def apart(found: Mapping[str, Tensor], truth: ba.Predictive) -> float:
    """The largest difference of a probability, or of novelty over 1 and its size."""
    probs = (found["probs"].cpu() - truth.probs.cpu()).abs().max()
    novelty = truth.novelty.cpu()
    return float(max(probs, ((found["novelty"].cpu() - novelty).abs() / (1 + novelty.abs())).max()))


def bench(name: str, ways: list[str], device: str, folder: Path, *, quick: bool) -> tuple[dict[str, Any], list[Target]]:
    """One network: seconds in every way at both batches, files, differences."""
    posterior, calibrating = calibrated(name, device)
    inputs_of = NETWORKS[name][1]
    files = files_of(posterior, lambda batch: moved(inputs_of(batch), device), folder, onnx="onnx" in ways)
    sizes = {key: path.stat().st_size for key, path in files.items()}
    result: dict[str, Any] = {"bytes": sizes}
    targets: list[Target] = []
    print(f"{name}: " + ", ".join(f"{key} {size / 1e6:.2f} MB" for key, size in sizes.items()))
    for batch, most in LIMITS.items():
        inputs = moved(inputs_of(batch), device)
        truth = posterior.predict(inputs)
        for way in ways:
            doubt, bare = calls(way, posterior, inputs, files, device)
            difference, began = apart(doubt(), truth), time.perf_counter()
            bare()
            bare()
            once = (time.perf_counter() - began) / 2
            rounds = 3 if quick else max(10, min(200, int(4 / once)))
            seconds = interleaved({"doubt": doubt, "bare": bare}, rounds=rounds)
            over, ms = ratio(seconds, "doubt", "bare"), {k: statistics.median(v) * 1e3 for k, v in seconds.items()}
            result[f"{way}, batch {batch}"] = {
                "ms": ms,
                "ratio": over,
                "range": ratio_range(seconds, "doubt", "bare"),
                "apart": difference,
            }
            print(f"{name}, {way}, batch {batch}: {ms['doubt']:.2f} ms, bare {ms['bare']:.2f}; apart {difference:.1e}")
            targets += at_most(f"{name}, {way}, batch {batch}: time over the bare model", most, over)
            targets += at_most(f"{name}, {way}, batch {batch}: apart from predict", 1e-5, difference)
            if way == "predict" and batch == max(LIMITS):
                targets += at_most(f"{name}: passes of calibrate", 5, calibrating / (ms["bare"] / 1e3 * 64 / batch))
    return result, targets


def main() -> None:
    parser = arguments(__doc__, quick="three rounds of the small networks", device=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=None)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    has = {"onnx": on_cpu and import_peer("onnxruntime", "onnxruntime") is not None, "graphs": not on_cpu}
    ways = [way for way in options.ways or WAYS if has.get(way, True)]
    warnings.simplefilter("ignore")
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {**setting(), "device": options.device}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks or (["MLP", "LeNet"] if options.quick else NETWORKS):
            results[name], found = bench(name, ways, options.device, Path(folder), quick=options.quick)
            targets += found
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "deploy", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
