"""What the posterior costs during training: a step with Badam over one with torch.optim.Adam, same flags, same run.

    python benchmarks/step.py [--quick] [--alone] [--steps 40] [--rounds 60] [--device cpu] [--out out/bench]

Next to it, IVON (ivon-opt), which trains a posterior of the same shape. step.json goes to --out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bayesadam as ba
from harness import arguments, import_peer, interleaved, ratio, ratio_range, setting, write_results
from networks import mlp

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
    return mlp().to(device)


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
    parser = arguments(__doc__, quick="two rounds of one step", peer="ivon-opt", device=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 1, 2
    ivon = import_peer("ivon", "ivon-opt", alone=options.alone)
    print(
        f"784-400-400-10, batch {BATCH}, {options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    results: dict[str, Any] = {
        **setting(),
        "device": options.device,
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
            low, high = ratio_range(seconds, "badam", "adam")
            print(f"{label:14s} {part:16s} Badam / Adam = {value:.3f}   (5 to 95 % of rounds: {low:.2f} to {high:.2f})")
            results["badam / adam"][label][part] = {"ratio": value, "5 to 95 % of rounds": [low, high]}
            if part == "training step":
                worst = max(worst, value)
    if ivon is not None:
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
    write_results(options.out, "step", results)
    print(f"largest ratio of a Badam training step to Adam's: {worst:.3f} (target: at most 1.02)")


if __name__ == "__main__":
    main()
