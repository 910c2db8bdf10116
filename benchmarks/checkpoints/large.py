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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import bayesadam as ba
from bayesadam.inspecting import inspect
from benchmarks.common.harness import arguments, measured, resident, setting, write_results
from benchmarks.common.training import fit

N = 60_000
QUICK = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 20_000}
TASKS: dict[str, Callable[[str], Any]] = {
    "inspect": lambda path: inspect(path, n_data=N),
    "prune": lambda path: ba.compress.prune_checkpoint(path, f"{path}.pruned.safetensors", 0.5),
    "sample": lambda path: ba.GaussianWeights.open(path, N).sample(),
}


def saved(model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int, path: str) -> torch.optim.Optimizer:
    """What AdamW knows after some steps, which goes to a file with the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    fit(model, optimizer, steps * [torch.empty(0)], loss)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return optimizer


def on_disk(task: str, small: str, path: str) -> dict[str, float]:
    """One task in this process, after a small one for what the first use brings into memory."""
    TASKS[task](small)
    return {**measured(partial(TASKS[task], path), "cpu"), "most_resident_mib": resident("VmHWM")}


def live(device: str, quick: bool, path: str) -> dict[str, Any]:
    """Posterior and draw of a live model, which is saved."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(QUICK if quick else {}))).to(device)

    def loss(_: Tensor) -> Tensor:
        tokens = torch.randint(model.config.vocab_size, (2, 64), device=device)
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    optimizer, weights, built = saved(model, loss, 3, path), [p.numel() for p in model.parameters()], list[Any]()
    generator = torch.Generator().manual_seed(0)
    return {
        **setting(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "weights": sum(weights),
        "largest_tensor_mib": max(weights) * 4 / 2**20,
        # Kept: otherwise the draw would be found the memory that the posterior left.
        "build": measured(lambda: built.append(ba.Posterior.from_optimizer(model, optimizer, n_data=N)), device),
        "draw": measured(lambda: built[0].sample(generator=generator), device),
        "checkpoint_mib": Path(path).stat().st_size / 2**20,
    }


def main() -> None:
    options = arguments(__doc__, quick="a model of 3 million weights", device=True).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, path = f"{folder}/small.pt", f"{folder}/large.pt"
        results, tiny = live(options.device, options.quick, path), nn.Linear(8, 8)
        saved(tiny, lambda _: tiny(torch.randn(4, 8)).square().sum(), 1, small)
        for task in TASKS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results[task] = pool.apply(on_disk, (task, small, path))
    write_results(options.out, "large", results)
    for task in ("build", "draw", *TASKS):
        row, share = results[task], results[task]["mib"] / results["largest_tensor_mib"]
        print(f"  {task:8s}{row['seconds']:8.2f} s{row['mib']:9.0f} MiB beyond, {share:.2f} of the largest tensor")


if __name__ == "__main__":
    main()
