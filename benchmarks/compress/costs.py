"""Seconds and memory on a GPU of making a ResNet-18 and a GPT of 100M weights smaller, ours beside what is published.

    python -m benchmarks.compress.costs --device cuda

The networks are untrained, with the state of a few steps of Adam, and their inputs are made up: 1,000 images, 128
sequences of 256 bytes. One run of each method after one on a small network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, write_results
from benchmarks.common.networks import ResNet18
from benchmarks.compress.smaller import Case, gptq, ours, sparsegpt
from benchmarks.compress.trained import LENGTH, gpt, logits_of

METHODS: dict[str, Callable[[Case], nn.Module]] = {
    "ours, .9 pruned": lambda case: ours(case, 0.9, None),
    "ours, .9 pruned in one round": lambda case: case.pruned(0.9, inputs=case.inputs, rounds=1).model,
    "SparseGPT, .9 pruned": lambda case: sparsegpt(case, 0.9, None),
    "ours, 4 bits": lambda case: ours(case, 0.0, 4),
    "GPTQ, 4 bits": lambda case: gptq(case, 0.0, 4),
}


def images(n: int) -> Tensor:
    """As large as CIFAR-10's."""
    return torch.randn(n, 3, 32, 32)


def text(n: int) -> Tensor:
    """Sequences of bytes."""
    return torch.randint(256, (n, LENGTH))


def case_of(build: Callable[[], nn.Module], made: Callable[[int], Tensor], n: int, device: str) -> Case:
    """A network after three steps of Adam, and inputs for it."""
    torch.manual_seed(0)
    model = build().to(device)
    adam = torch.optim.Adam(model.parameters(), 1e-4)
    for _ in range(3):
        adam.zero_grad()
        logits_of(model, made(16).to(device)).logsumexp(dim=-1).mean().backward()
        adam.step()
    posterior = ba.Posterior.from_optimizer(model.eval(), adam, 50_000, likelihood="classification")
    return Case(posterior, made(n).to(device))


def measured(case: Case, method: Callable[[Case], nn.Module]) -> dict[str, float]:
    """Seconds, and on a GPU the GB at most, those of the network among them."""
    is_cuda = case.inputs.is_cuda
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    method(case)
    if is_cuda:
        torch.cuda.synchronize()
    row = {"seconds": time.perf_counter() - start}
    return row | ({"GB": torch.cuda.max_memory_allocated() / 1e9} if is_cuda else {})


def main() -> None:
    options = arguments(__doc__, quick="small networks alone", device=True).parse_args()
    small = case_of(partial(gpt, 64, 1), text, 8, options.device)
    found = {"small": {name: measured(small, method) for name, method in METHODS.items()}}
    if not options.quick:
        cases = {
            "ResNet-18": partial(case_of, ResNet18, images, 1000),
            "GPT of 100M weights": partial(case_of, partial(gpt, 768, 14), text, 128),
        }
        for name, made in cases.items():
            case, found[name] = made(options.device), {}
            for method, run in METHODS.items():
                found[name][method] = row = measured(case, run)
                print(f"{name}, {method}: {row}", flush=True)
    write_results(options.out, "compress-costs", found)


if __name__ == "__main__":
    main()
