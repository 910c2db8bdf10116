"""What uncertainty costs over one forward pass where outputs are many: ResNet-18, a vision transformer, GPT-2 small.

    python benchmarks/outputs.py [--quick] [--only resnet vit gpt2 growth billion sharded] [--device cuda]
        [--out out/bench]

- resnet, vit: 1,000 classes, 64 images of 32 × 32. gpt2: 50,257 tokens, 8 sequences of 256, at the last place and at
  all.
- novelty: `posterior.novelty` once it has its reference.
- score: ½ tr(H Cov f) by one random direction of the outputs, `posterior.epistemic(..., probes=1)`; two give its error.
- top: variances of the ten largest outputs and of the rest of the softmax, no probes. At all places of GPT-2 by three
  draws.
- growth: a network with 10 to 50,000 outputs; the slope of log seconds over log outputs.
- billion: a model of 1.0 billion weights: posterior out of the optimiser, one draw, save, load.
- sharded: the same model over two processes on the CPU (FSDP2).

Times are medians of calls that come again; forward is the model's own, in float32 without gradients. Memory is the peak
beyond what lay there before the call beside that of a training step (gradients and activations; weights and optimiser
lie there before).
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import bayesadam as ba
from harness import Target, arguments, at_most, resident, setting, write_results
from networks import ResNet18, vit

Batch = Any


@dataclass(frozen=True)
class Sizes:
    """How large the networks are."""

    classes: int = 1000
    images: int = 64
    vocabulary: int = 50_257
    layers: int = 12
    width: int = 768
    heads: int = 12
    sequences: int = 8
    length: int = 256
    growth: tuple[int, ...] = (10, 100, 1000, 10_000, 50_000)
    billion: tuple[int, int, int] = (18, 2048, 16)
    repeats: int = 7


QUICK = Sizes(20, 4, 150, 2, 16, 2, 2, 8, (10, 100, 1000), (2, 16, 2), 2)


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median, after two calls that do not count."""
    found = []
    for number in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        if number > 1:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def peak(call: Callable[[], object], device: str) -> float | None:
    """MiB beyond what was allocated before; None without CUDA."""
    if device != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True, eq=False)
class Subject:
    """A network with its posterior, a batch, and a training step."""

    model: nn.Module
    posterior: ba.Posterior
    batch: Batch
    step: Callable[[], None]

    def forward(self) -> None:
        """As a user runs it."""
        with torch.no_grad():
            self.model(**self.batch) if isinstance(self.batch, dict) else self.model(self.batch)


def subject(model: nn.Module, batch: Batch, loss: Callable[[], Tensor], n_data: int) -> Subject:
    """Three steps of AdamW on what `loss` draws, then its posterior."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    model.train()
    for _ in range(3):
        step()
    model.eval()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data, power=1.0, batch_size=8, prior_precision=1.0)

    def measured_step() -> None:
        step()
        optimizer.zero_grad(set_to_none=True)

    measured_step()
    return Subject(model, posterior, batch, measured_step)


def images(network: nn.Module, sizes: Sizes, device: str, classes: int) -> Subject:
    model = network.to(device)
    x = torch.randn(sizes.images, 3, 32, 32, device=device)
    y = torch.randint(classes, (sizes.images,), device=device)
    return subject(model, x, lambda: F.cross_entropy(model(x), y), 50_000)


def gpt2(sizes: Sizes, device: str) -> Subject:
    shape: dict[str, Any] = {"n_layer": sizes.layers, "n_embd": sizes.width, "n_head": sizes.heads}
    config = GPT2Config(**shape, vocab_size=sizes.vocabulary, n_positions=sizes.length, use_cache=False)
    model = GPT2LMHeadModel(config).to(device)
    ids = torch.randint(sizes.vocabulary, (sizes.sequences, sizes.length), device=device)
    return subject(model, {"input_ids": ids}, lambda: model(input_ids=ids, labels=ids).loss, 100_000)


def calls(one: Subject, positions: Any) -> dict[str, Callable[[], object]]:
    """What is timed beside the forward pass."""
    asked: Any = {"likelihood": "classification", "positions": positions}
    many, familiar = positions == "all", one.posterior.relative_to([one.batch])
    top: Any = {**asked, "outputs": "top", "probes": 0, "n_samples": 3}
    top |= {"predictive": "linearised-sampled"} if many else {}
    return {
        "novelty": lambda: familiar.novelty(one.batch, likelihood="classification"),
        "score": lambda: one.posterior.epistemic(one.batch, probes=1, **asked),
        "score, 2 probes": lambda: one.posterior.epistemic(one.batch, probes=2, **asked),
        "top 10": lambda: one.posterior.predict(one.batch, **top),
    }


def costs(one: Subject, device: str, repeats: int, positions: Any = None) -> dict[str, Any]:
    """Seconds and memory, and their ratios to the forward pass and the training step."""
    forward, step = seconds(one.forward, device, repeats), peak(one.step, device)
    one.model.eval()
    found: dict[str, Any] = {"forward ms": 1e3 * forward, "training step MiB": step}
    for name, call in calls(one, positions).items():
        took, memory = seconds(call, device, repeats), peak(call, device)
        found[name] = {
            "ms": 1e3 * took,
            "forwards": took / forward,
            "MiB": memory,
            "of a training step": None if memory is None or step is None else memory / step,
        }
    found["plan"] = one.posterior.predict(
        one.batch,
        likelihood="classification",
        positions=positions,
        outputs="top",
        n_samples=3,
        predictive="linearised-sampled" if positions == "all" else "linearised",
    ).plan
    return found


def growth(sizes: Sizes, device: str) -> dict[str, Any]:
    """Seconds of the ten largest of ever more outputs of one body, and the slope in logarithms."""
    took = {}
    for classes in sizes.growth:
        one = images(vit(classes), sizes, device, classes)
        call = calls(one, None)["top 10"]
        took[classes] = seconds(call, device, sizes.repeats)
    logs = [(math.log(n), math.log(s)) for n, s in took.items()]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*logs, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return {"ms": {str(n): 1e3 * s for n, s in took.items()}, "slope": slope}


def billion(sizes: Sizes, device: str) -> dict[str, Any]:
    """Posterior, draw, save and load of a large model, in seconds and MiB."""
    model = GPT2LMHeadModel(_billion_config(sizes)).to(device)
    ids = torch.randint(sizes.vocabulary, (1, 32), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept: dict[str, Any] = {}
    found: dict[str, Any] = {"weights": sum(p.numel() for p in model.parameters())}

    def build() -> None:
        kept["posterior"] = ba.Posterior.from_optimizer(model, optimizer, 100_000, prior_precision=1.0)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        works: dict[str, Callable[[], object]] = {
            "build": build,
            "draw": lambda: kept["posterior"].sample(),
            "save": lambda: kept["posterior"].save(path, weights=False),
            "load": lambda: ba.Posterior.load(path, model),
        }
        for name, work in works.items():
            began = time.perf_counter()
            memory = peak(work, device)
            _wait(device)
            found[name] = {"seconds": time.perf_counter() - began, "MiB": memory}
        found["file MiB"] = path.stat().st_size / 2**20
    return found


def sharded(sizes: Sizes) -> dict[str, Any]:
    """The same over two processes on the CPU: each one's seconds and the most memory that it ever held."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_shard, (sizes, folder), nprocs=2)
        return {f"process {rank}": json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)}


def _one_shard(rank: int, sizes: Sizes, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(_billion_config(sizes))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    ids = torch.randint(sizes.vocabulary, (1, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found: dict[str, Any] = {"MiB before": resident("VmHWM")}
    kept: dict[str, Any] = {}
    path = Path(folder) / "posterior"
    works: dict[str, Callable[[], object]] = {
        "build": lambda: kept.update(p=ba.Posterior.from_optimizer(model, optimizer, 100_000, prior_precision=1.0)),
        "draw": lambda: kept["p"].sample(generator=torch.Generator().manual_seed(0)),
        "save": lambda: kept["p"].save(path),
        "load": lambda: ba.Posterior.load(path, model),
    }
    for name, work in works.items():
        torch.distributed.barrier()
        began = time.perf_counter()
        work()
        found[name] = {"seconds": time.perf_counter() - began, "most MiB so far": resident("VmHWM")}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _billion_config(sizes: Sizes) -> GPT2Config:
    layers, width, heads = sizes.billion
    return GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=sizes.vocabulary, n_positions=64, use_cache=False
    )


def judged(results: dict[str, Any]) -> list[Target]:
    found: list[Target] = []
    for name in ("resnet", "vit", "gpt2 last", "gpt2 all"):
        if name in results:
            one = results[name]
            found += at_most(f"{name}: novelty, forward passes", 1.5, one["novelty"]["forwards"])
            found += at_most(f"{name}: score, forward passes", 4, one["score"]["forwards"])
            found += at_most(f"{name}: ten largest, forward passes", 8, one["top 10"]["forwards"])
            for what in ("score", "top 10"):
                found += at_most(f"{name}: {what}, memory of a training step", 2, one[what]["of a training step"])
    if "growth" in results:
        found += at_most("growth with outputs, slope", 0.1, results["growth"]["slope"])
    return found


def main() -> None:
    names = ("resnet", "vit", "gpt2", "growth", "billion", "sharded")
    parser = arguments(__doc__, quick="tiny networks", device=True)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    sizes, device = QUICK if options.quick else Sizes(), options.device
    torch.manual_seed(0)
    results: dict[str, Any] = {**setting(), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    if "resnet" in options.only:
        results["resnet"] = costs(images(ResNet18(sizes.classes), sizes, device, sizes.classes), device, sizes.repeats)
    if "vit" in options.only:
        results["vit"] = costs(images(vit(sizes.classes), sizes, device, sizes.classes), device, sizes.repeats)
    if "gpt2" in options.only:
        one = gpt2(sizes, device)
        results["gpt2 last"] = costs(one, device, sizes.repeats, "last")
        results["gpt2 all"] = costs(one, device, sizes.repeats, "all")
    if "growth" in options.only:
        results["growth"] = growth(sizes, device)
    if "billion" in options.only:
        results["billion"] = billion(sizes, device)
    if "sharded" in options.only:
        results["sharded"] = sharded(sizes)
    targets = judged(results)
    write_results(options.out, "outputs", {**results, "targets": [asdict(target) for target in targets]})
    for name, one in results.items():
        print(f"{name}: {one}")
    for target in targets:
        print(target)
    print(f"{sum(target.met for target in targets)} of {len(targets)} targets met")


if __name__ == "__main__":
    main()
