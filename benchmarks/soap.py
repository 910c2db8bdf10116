"""What richer statistics cost in training: a step with SOAP, or with Adam and a recorder, over one with Adam; one run.

    python benchmarks/soap.py [--quick] [--steps 20] [--rounds 20] [--batches 128] [--device cpu] [--out FOLDER]
    python benchmarks/soap.py --large [--quick] [--periods 3] [--authors soap.py] [--device cuda] [--out FOLDER]

Every timed call has its share of refreshes and recordings, which is why the number of its steps is a multiple of 20.
With --large, a decoder of GPT-2 small's size in bfloat16 autocast, AdamW (fused), our SOAP, and those of its authors (the
file that --authors names), heavyball and pytorch_optimizer where they can be imported: means over whole periods of ten
steps, so that each has its refresh, and the median of those.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesadam as ba
import soap_large
import step
from bayesadam.optim.soap import SOAP
from harness import arguments, interleaved, ratio, ratio_range, setting, write_results

KEEP = 50
Make = Callable[[nn.Module], torch.optim.Optimizer]


def soap(**flags: int) -> Make:
    return lambda model: SOAP(model.parameters(), **flags)


def recorded(every: int) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters())
        ba.Recorder(optimizer, keep=KEEP, every=every)
        return optimizer

    return make


VARIANTS: dict[str, Make] = {
    "SOAP, precondition_every=10": soap(),
    "  statistics_every=10": soap(statistics_every=10),
    "  and precondition_every=20": soap(statistics_every=10, precondition_every=20),
    "  and max_side=400 (one-sided)": soap(statistics_every=10, max_side=400),
    "  and max_side=10": soap(statistics_every=10, max_side=10),
    "  max_side=0 (Adam)": soap(max_side=0),
    "Adam, recorder every 10th step": recorded(10),
    "  every step": recorded(1),
}


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
    parser = arguments(__doc__, quick="one round at batch 8", device=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[128])
    parser.add_argument("--large", action="store_true", help="a decoder of GPT-2 small's size instead")
    parser.add_argument("--periods", type=int, default=3, help="of ten steps, with --large")
    parser.add_argument("--authors", type=Path, help="its authors' soap.py, for --large")
    options = parser.parse_args()
    if options.large:
        size, periods = (soap_large.QUICK, 1) if options.quick else (soap_large.Size(), options.periods)
        found = soap_large.large(size, options.device, periods, options.authors)
        about = {**setting(), "device": torch.cuda.get_device_name() if "cuda" in options.device else "cpu"}
        write_results(options.out, "soap-large", {**about, "periods": periods, **found})
        value = found["ours"]["whole step / AdamW's"]
        print(f"a training step with SOAP over one with AdamW, fused: {value:.3f} (target: at most 1.15)")
        return
    if options.quick:
        options.rounds, options.batches = 1, [8]
    if options.steps < 20 or options.steps % 20:
        parser.error(f"--steps must be a multiple of 20, got {options.steps}")
    print(f"784-400-400-10, {options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {**setting(), "device": options.device}
    for batch in options.batches:
        step.BATCH = batch
        candidates = {
            label: step.stepper(make, options.device, options.steps)
            for label, make in {**VARIANTS, "adam": lambda m: torch.optim.Adam(m.parameters())}.items()
        }
        seconds = interleaved(candidates, rounds=options.rounds, warmup=1 if options.quick else 3)
        print(f"batch {batch}: Adam {1e3 * statistics.median(seconds['adam']) / options.steps:.2f} ms a step")
        results[f"batch {batch}"] = {}
        for label in VARIANTS:
            low, high = ratio_range(seconds, label, "adam")
            value = results[f"batch {batch}"][label.strip()] = ratio(seconds, label, "adam")
            print(f"  {label:32s} {value:6.2f}   (5 to 95 % of rounds: {low:.2f} to {high:.2f})")
    results["seconds to build"] = build_seconds(options.device)
    for structure, taken in results["seconds to build"].items():
        print(f"{structure} from {KEEP} recorded gradients: {taken:.2f} s")
    write_results(options.out, "soap", results)
    found = results[f"batch {options.batches[-1]}"]
    for label in ("statistics_every=10", "Adam, recorder every 10th step"):
        print(f"a step over Adam's, {label}: {found[label]:.2f} (target: at most 1.15)")


if __name__ == "__main__":
    main()
