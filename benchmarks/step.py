"""What the posterior costs during training: a step with Badam over one with torch.optim.Adam, same flags, same run.

    python benchmarks/step.py [--steps 40] [--rounds 60] [--device cpu] [--out out/bench]

Beside it, where installed, IVON (ivon-opt), which trains a posterior of the same shape. step.json goes to --out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesadam as ba
from results import OUT, write_results
from timing import interleaved, ratio

BATCH = 128
FLAGS: dict[str, dict[str, object]] = {
    "default": {},
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
    "amsgrad=True": {"amsgrad": True},
}


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = (784, 400, 400, 10)
    layers = [
        nn.Linear(sizes[0], sizes[1]),
        nn.ReLU(),
        nn.Linear(sizes[1], sizes[2]),
        nn.ReLU(),
        nn.Linear(sizes[2], sizes[3]),
    ]
    return nn.Sequential(*layers).to(device)


def stepper(
    make: Callable[[nn.Module], torch.optim.Optimizer], device: str, steps: int, *, sampled: bool = False
) -> Callable[[], None]:
    """`steps` training steps of the MLP as one call."""
    model = network(device)
    optimizer = make(model)
    x, y = torch.randn(BATCH, 784, device=device), torch.randint(10, (BATCH,), device=device)

    def forward_backward() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    def run() -> None:
        for _ in range(steps):
            if sampled:
                with optimizer.sampled_params(train=True):  # type: ignore[attr-defined]
                    forward_backward()
            else:
                forward_backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def optimizer_only(make: Callable[[nn.Module], torch.optim.Optimizer], device: str, steps: int) -> Callable[[], None]:
    """`optimizer.step()` alone, on fixed gradients."""
    model = network(device)
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def run() -> None:
        for _ in range(steps):
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    print(
        f"784-400-400-10, batch {BATCH}, {options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "steps": options.steps,
        "rounds": options.rounds,
        "badam / adam": {label: {} for label in FLAGS},
        "ivon / adam": None,
    }
    worst = 0.0
    for label, flags in FLAGS.items():
        for part, build in (("training step", stepper), ("optimiser alone", optimizer_only)):
            seconds = interleaved(
                {
                    "badam": build(lambda m, f=flags: ba.Badam(m.parameters(), **f), options.device, options.steps),
                    "adam": build(
                        lambda m, f=flags: torch.optim.Adam(m.parameters(), **f), options.device, options.steps
                    ),
                },
                rounds=options.rounds,
            )
            value = ratio(seconds, "badam", "adam")
            ratios = [a / b for a, b in zip(seconds["badam"], seconds["adam"], strict=True)]
            spread = statistics.quantiles(ratios, n=20, method="inclusive")
            print(
                f"{label:14s} {part:16s} Badam / Adam = {value:.3f}   (5 to 95 % of rounds: {spread[0]:.2f} to {spread[-1]:.2f})"
            )
            results["badam / adam"][label][part] = {"ratio": value, "5 to 95 % of rounds": [spread[0], spread[-1]]}
            if part == "training step":
                worst = max(worst, value)
    try:
        import ivon
    except ImportError:
        print("ivon-opt is not installed here (make peers brings it)")
    else:
        seconds = interleaved(
            {
                "ivon": stepper(
                    lambda m: ivon.IVON(m.parameters(), lr=0.1, ess=60_000), options.device, options.steps, sampled=True
                ),
                "badam": stepper(lambda m: ba.Badam(m.parameters()), options.device, options.steps),
                "adam": stepper(lambda m: torch.optim.Adam(m.parameters()), options.device, options.steps),
            },
            rounds=options.rounds // 2,
        )
        results["ivon / adam"] = ratio(seconds, "ivon", "adam")
        print(f"{'default':14s} {'training step':16s} IVON  / Adam = {results['ivon / adam']:.3f}")
    results["largest"] = worst
    print(f"results: {write_results(options.out, 'step', results)}")
    print(f"largest ratio of a Badam training step to Adam's: {worst:.3f} (target: at most 1.02)")


if __name__ == "__main__":
    main()
