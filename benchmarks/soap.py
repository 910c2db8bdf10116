"""What eigenbases cost during training: a step with SOAP over one with torch.optim.Adam, same network, same run.

    python benchmarks/soap.py [--steps 20] [--rounds 20] [--batches 128] [--device cpu]

Every timed call has its share of refreshes, which is why the number of its steps is a multiple of 20.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import step
from bayesadam.optim.soap import SOAP
from timing import interleaved, ratio

VARIANTS: dict[str, dict[str, int]] = {
    "precondition_every=10": {},
    "  statistics_every=10": {"statistics_every": 10},
    "  and precondition_every=20": {"statistics_every": 10, "precondition_every": 20},
    "  and max_side=400 (one-sided)": {"statistics_every": 10, "max_side": 400},
    "  and max_side=10": {"statistics_every": 10, "max_side": 10},
    "max_side=0 (Adam)": {"max_side": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[128])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.steps < 20 or options.steps % 20:
        parser.error(f"--steps must be a multiple of 20, got {options.steps}")
    print(f"784-400-400-10, {options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    plain: dict[int, float] = {}
    for batch in options.batches:
        step.BATCH = batch
        parts = [(f"training step, batch {batch}", step.stepper)]
        if batch == options.batches[0]:
            parts.append(("optimiser alone", step.optimizer_only))
        for part, build in parts:
            candidates: dict[str, Callable[[], None]] = {
                label: build(lambda m, f=flags: SOAP(m.parameters(), **f), options.device, options.steps)
                for label, flags in VARIANTS.items()
            }
            candidates["adam"] = build(lambda m: torch.optim.Adam(m.parameters()), options.device, options.steps)
            seconds = interleaved(candidates, rounds=options.rounds)
            milliseconds = 1e3 * statistics.median(seconds["adam"]) / options.steps
            print(f"{part}: Adam {milliseconds:.2f} ms")
            for label in VARIANTS:
                value = ratio(seconds, label, "adam")
                ratios = [a / b for a, b in zip(seconds[label], seconds["adam"], strict=True)]
                spread = statistics.quantiles(ratios, n=20, method="inclusive")
                print(
                    f"  {label:32s} SOAP / Adam = {value:6.2f}   (5 to 95 % of rounds: {spread[0]:.2f} to {spread[-1]:.2f})"
                )
                if build is step.stepper and label == next(iter(VARIANTS)):
                    plain[batch] = value
    ratios_by_batch = ", ".join(f"{value:.2f} at batch {batch}" for batch, value in plain.items())
    print(f"ratio of a SOAP training step to Adam's, precondition_every=10: {ratios_by_batch} (target: at most 1.15)")


if __name__ == "__main__":
    main()
