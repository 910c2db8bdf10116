"""A model of GPT-2's size: what its posterior costs, live and from disk.

    python -m benchmarks.checkpoints.large [--quick] [--device cuda] [--out out/bench]

124 million random weights (transformers' own GPT-2, small) take three AdamW steps on random tokens. Then: seconds and
memory beyond the model and its optimiser to build the posterior and to take a draw; and, from what `torch.save` wrote,
each in a process of its own on the CPU, to inspect the checkpoint, to prune it and to draw from it. Memory on a CPU is
the anonymous kind: pages mapped from the file are the system's cache.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import bayesadam as ba
from bayesadam.inspecting import inspect
from benchmarks.common.harness import arguments, resident, setting, write_results

N = 60_000
QUICK = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 20_000}


def trained(device: str, quick: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model after three steps."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(QUICK if quick else {}))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    for _ in range(3):
        tokens = torch.randint(model.config.vocab_size, (2, 64), device=device)
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def measured(work: Callable[[], Any], device: str) -> dict[str, float]:
    """Seconds, and the most memory beyond what there was before, in MiB; what `work` returns is kept until then."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        kept = work()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated()
        del kept
        return {"seconds": seconds, "mib": (peak - before) / 2**20}
    before, peaks, done = resident("RssAnon"), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peaks[0] = max(peaks[0], resident("RssAnon"))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        kept = work()
        seconds = time.perf_counter() - began
    finally:
        done.set()
        watcher.join()
    del kept
    return {"seconds": seconds, "mib": peaks[0] - before}


TASKS: dict[str, Callable[[str], Any]] = {
    "inspect": lambda path: inspect(path, n_data=N),
    "prune": lambda path: ba.compress.prune_checkpoint(path, f"{path}.pruned.safetensors", 0.5),
    "sample": lambda path: ba.GaussianWeights.open(path, N).sample(),
}


def on_disk(task: str, small: str, path: str) -> dict[str, float]:
    """One task in this process, after a small one for what the first use brings into memory."""
    TASKS[task](small)
    found = measured(lambda: TASKS[task](path), "cpu")
    return {**found, "most_resident_mib": resident("VmHWM")}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def live(device: str, quick: bool, path: Path) -> dict[str, Any]:
    """Posterior and draw of the live model, which is then saved."""
    model, optimizer = trained(device, quick)
    weights = [parameter.numel() for parameter in model.parameters()]
    built: list[ba.Posterior] = []
    generator = torch.Generator().manual_seed(0)
    found = {
        **setting(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "weights": sum(weights),
        "largest_tensor_mib": max(weights) * 4 / 2**20,
        # Kept: otherwise the draw would be found the memory that the posterior left.
        "build": measured(lambda: built.append(ba.Posterior.from_optimizer(model, optimizer, n_data=N)), device),
        "draw": measured(lambda: built[0].sample(generator=generator), device),
    }
    save(model, optimizer, path)
    return {**found, "checkpoint_mib": path.stat().st_size / 2**20}


def main() -> None:
    options = arguments(__doc__, quick="a model of 3 million weights", device=True).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.pt"
        results = live(options.device, options.quick, path)
        largest = results["largest_tensor_mib"]
        print(
            f"{results['device']}, torch {torch.__version__}: {results['weights']:,} weights, the largest "
            f"tensor {largest:.0f} MiB"
        )
        tiny = nn.Linear(8, 8)
        tiny_optimizer = torch.optim.AdamW(tiny.parameters())
        tiny(torch.randn(4, 8)).square().sum().backward()
        tiny_optimizer.step()
        small = Path(folder) / "small.pt"
        save(tiny, tiny_optimizer, small)
        for task in TASKS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results[task] = pool.apply(on_disk, (task, str(small), str(path)))
    write_results(options.out, "large", results)
    for task in ("build", "draw", *TASKS):
        found = results[task]
        share = found["mib"] / largest
        print(f"  {task:8s}{found['seconds']:8.2f} s{found['mib']:9.0f} MiB beyond, {share:.2f} of the largest tensor")


if __name__ == "__main__":
    main()
