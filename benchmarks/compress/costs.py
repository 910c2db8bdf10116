"""Seconds and memory on a GPU of making a ResNet-18 and a GPT of 100M weights smaller, ours beside what is published.

    python -m benchmarks.compress.costs --device cuda

The networks are untrained, with the state of a few steps of Adam, and their inputs are made up: 1,000 images, 128
sequences of 256 bytes. One run of each method after one on a small network; memory is beyond the network and its state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, measured, write_results
from benchmarks.common.networks import ResNet18
from benchmarks.common.training import fit
from benchmarks.compress.smaller import gptq, ours, sparsegpt
from benchmarks.compress.trained import LENGTH, gpt, logits_of

METHODS: dict[str, Callable[[ba.Posterior, Tensor], nn.Module]] = {
    "ours, .9 pruned": lambda q, x: ours(q, x, 0.9, None),
    "ours, .9 pruned in one round": lambda q, x: ours(q, x, 0.9, None, rounds=1),
    "SparseGPT, .9 pruned": lambda q, x: sparsegpt(q, x, 0.9, None),
    "ours, 4 bits": lambda q, x: ours(q, x, 0.0, 4),
    "GPTQ, 4 bits": lambda q, x: gptq(q, x, 0.0, 4),
}
# A network and its inputs.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "small": (partial(gpt, 64, 1), lambda: torch.randint(256, (16, LENGTH))),
    "ResNet-18": (ResNet18, lambda: torch.randn(1000, 3, 32, 32)),
    "GPT of 100M weights": (partial(gpt, 768, 14), lambda: torch.randint(256, (128, LENGTH))),
}


def main() -> None:
    options = arguments(__doc__, quick="the small network alone", device=True).parse_args()
    results: dict[str, Any] = {}
    for name, (build, inputs) in CASES.items() if not options.quick else [*CASES.items()][:1]:
        torch.manual_seed(0)
        model, x = build().to(options.device), inputs().to(options.device)
        adam, first = torch.optim.Adam(model.parameters(), 1e-4), torch.arange(16, device=options.device)
        fit(model, adam, 3 * [first], lambda rows, f=model, x=x: logits_of(f, x[rows]).logsumexp(dim=-1).mean())
        q = ba.Posterior.from_optimizer(model, adam, 50_000, likelihood="classification")
        for method, run in METHODS.items():
            row = results.setdefault(name, {})[method] = measured(partial(run, q, x), options.device)
            print(f"{name}, {method}: {row['seconds']:.2f} s, {row['mib']:.0f} MiB", flush=True)
    write_results(options.out, "compress-costs", results)


if __name__ == "__main__":
    main()
