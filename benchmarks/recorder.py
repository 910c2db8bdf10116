"""What a recorder, or SOAP, costs in training: a step over one with Adam, in one run.

    python benchmarks/recorder.py [--quick] [--steps 20] [--rounds 20] [--batches 128] [--device cpu] [--out FOLDER]

Every timed call has its share of recordings and refreshes, so the number of its steps is a multiple of 20. SOAP is
pytorch_optimizer's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bayesadam as ba
import step
from harness import arguments, import_peer, interleaved, ratio, ratio_range, setting, write_results

KEEP = 50
EVERY_TENTH = "Adam, recorder every 10th step"
Make = Callable[[nn.Module], torch.optim.Optimizer]


def recorded(every: int) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters())
        ba.Recorder(optimizer, keep=KEEP, every=every)
        return optimizer

    return make


def build_seconds(device: str) -> dict[str, float]:
    """Seconds to build each structure out of a full recorder."""
    model = step.network(device)
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=KEEP, every=1)
    for _ in range(KEEP):
        optimizer.zero_grad()
        x, y = torch.randn(step.BATCH, 784, device=device), torch.randint(10, (step.BATCH,), device=device)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = {}
    for structure in ("kronecker", "low-rank"):
        began = time.perf_counter()
        ba.Posterior.from_optimizer(model, optimizer, 60_000, structure=structure, recorder=recorder)
        found[structure] = time.perf_counter() - began
    return found


def main() -> None:
    parser = arguments(__doc__, quick="one round at batch 8", device=True, peer="pytorch_optimizer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[128])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batches = 1, [8]
    if options.steps < 20 or options.steps % 20:
        parser.error(f"--steps must be a multiple of 20, got {options.steps}")
    peer = import_peer("pytorch_optimizer", "pytorch_optimizer", alone=options.alone)
    variants: dict[str, Make] = {EVERY_TENTH: recorded(10), "  every step": recorded(1)}
    if peer is not None:
        variants["SOAP of pytorch_optimizer"] = lambda model: peer.SOAP(model.parameters())
    print(f"784-400-400-10, {options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {**setting(), "device": options.device}
    for batch in options.batches:
        step.BATCH = batch
        candidates = {
            label: step.stepper(make, options.device, options.steps)
            for label, make in {**variants, "adam": lambda m: torch.optim.Adam(m.parameters())}.items()
        }
        seconds = interleaved(candidates, rounds=options.rounds, warmup=1 if options.quick else 3)
        print(f"batch {batch}: Adam {1e3 * statistics.median(seconds['adam']) / options.steps:.2f} ms a step")
        results[f"batch {batch}"] = {}
        for label in variants:
            low, high = ratio_range(seconds, label, "adam")
            value = results[f"batch {batch}"][label.strip()] = ratio(seconds, label, "adam")
            print(f"  {label:32s} {value:6.2f}   (5 to 95 % of rounds: {low:.2f} to {high:.2f})")
    results["seconds to build"] = build_seconds(options.device)
    for structure, taken in results["seconds to build"].items():
        print(f"{structure} from {KEEP} recorded gradients: {taken:.2f} s")
    write_results(options.out, "recorder", results)
    print(f"a step over Adam's, {EVERY_TENTH}: {results[f'batch {options.batches[-1]}'][EVERY_TENTH]:.2f}")


if __name__ == "__main__":
    main()
