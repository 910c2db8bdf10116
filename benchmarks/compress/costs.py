"""Seconds and memory of a ResNet-18 and a GPT of 100M weights made smaller, ours beside what is published.

    python -m benchmarks.compress.costs --device cuda

The networks are untrained, with the state of a few steps of AdamW, and their inputs are made up: 1,000 images, 128
sequences of 256 bytes. One run of each method after one on a small network; memory is beyond the network and its state.
Then what needs the checkpoint alone, each in a process of its own on the CPU: pages mapped from it do not count.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.inspecting import inspect
from benchmarks.common.harness import arguments, measured, write_results
from benchmarks.common.networks import ResNet18
from benchmarks.common.training import fit
from benchmarks.compress import published
from benchmarks.compress.smaller import ours
from benchmarks.compress.trained import LENGTH, gpt, logits_of

N = 50_000
METHODS: dict[str, Callable[[ba.Posterior, Tensor], Any]] = {
    "a draw": lambda q, x: q.sample(generator=torch.Generator().manual_seed(0)),
    "ours, .9 pruned": lambda q, x: ours(q, x, 0.9, None),
    "ours, .9 pruned in one round": lambda q, x: ours(q, x, 0.9, None, rounds=1),
    "SparseGPT, .9 pruned": lambda q, x: published.sparsegpt(q.model, x, 0.9),
    "ours, 4 bits": lambda q, x: ours(q, x, 0.0, 4),
    "GPTQ, 4 bits": lambda q, x: published.gptq(q.model, x, 4),
}
OF_FILES: dict[str, Callable[[str], Any]] = {
    "file: inspect": partial(inspect, n_data=N),
    "file: prune": lambda path: ba.compress.prune_checkpoint(path, f"{path}.pruned.safetensors", 0.5),
    "file: a draw": lambda path: ba.GaussianWeights.open(path, N).sample(),
}
# A network and its inputs.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "small": (partial(gpt, 64, 1), lambda: torch.randint(256, (16, LENGTH))),
    "ResNet-18": (ResNet18, lambda: torch.randn(1000, 3, 32, 32)),
    "GPT of 100M weights": (partial(gpt, 768, 14), lambda: torch.randint(256, (128, LENGTH))),
}


def of_file(task: str, paths: list[str]) -> dict[str, float]:
    """One task in this process, after the small network's for what the first use brings into memory."""
    OF_FILES[task](paths[0])
    return measured(partial(OF_FILES[task], paths[-1]), "cpu")


def main() -> None:
    options = arguments(__doc__, quick="the small network alone", device=True).parse_args()
    results, paths = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, (build, inputs) in CASES.items() if not options.quick else [*CASES.items()][:1]:
            torch.manual_seed(0)
            model, x = build().to(options.device), inputs().to(options.device)
            adam, first = torch.optim.AdamW(model.parameters(), 1e-4), torch.arange(16, device=options.device)
            fit(model, adam, 3 * [first], lambda rows, f=model, x=x: logits_of(f, x[rows]).logsumexp(dim=-1).mean())
            paths.append(f"{folder}/{name}.pt")
            torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, paths[-1])
            made = list[ba.Posterior]()
            read = partial(ba.Posterior.from_optimizer, model, adam, N, likelihood="classification")
            row = {"the posterior": measured(lambda: made.append(read()), options.device)}  # noqa: B023
            row |= {method: measured(partial(run, made[0], x), options.device) for method, run in METHODS.items()}
            for task in OF_FILES:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row[task] = pool.apply(of_file, (task, paths))
            results[name] = row
            print(*(f"{name}, {of}: {c['seconds']:.2f} s, {c['mib']:.0f} MiB" for of, c in row.items()), sep="\n")
    write_results(options.out, "compress-costs", results)


if __name__ == "__main__":
    main()
