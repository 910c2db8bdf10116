"""One draw from the posterior of a large model, against plain eager torch in the same run.

    python benchmarks/sample.py [--quick] [--weights 100_000_000] [--device cuda] [--out out/bench]

On CUDA it prints milliseconds, the peak memory of a draw and the floor set by memory traffic (θ and v̂ read once, the
draw written once); on a CPU the ratio to eager code alone. sample.json goes to --out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from harness import arguments, cuda_milliseconds, interleaved, ratio, setting, write_results

N, DELTA = 60_000, 100.0


def posterior_of(weights: int, device: str) -> ba.Posterior:
    """A posterior over `weights` float32 weights: four matrices and a vector, after one Adam step."""
    torch.manual_seed(0)
    sizes = [weights // 2, weights // 4, weights // 8, weights // 8 - 1000, 1000]
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(size, device=device)) for i, size in enumerate(sizes)})
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=DELTA)


def eager(posterior: ba.Posterior) -> dict[str, Tensor]:
    """The draw as one would write it by hand."""
    moments = posterior.structure.tensors()["second_moment"]
    return {
        name: theta + torch.randn_like(theta) * (N * moments[name].sqrt() + DELTA).rsqrt()
        for name, theta in posterior.mode.items()
    }


def check(posterior: ba.Posterior) -> None:
    """The draw has the posterior's moments; a fast wrong draw is worth nothing."""
    draw = posterior.sample(generator=torch.Generator().manual_seed(0))
    for name, theta in posterior.mode.items():
        standard = (draw[name] - theta) / posterior.variance[name].sqrt()
        count = standard.numel()
        mean, variance = float(standard.mean(dtype=torch.float64)), float(standard.double().var())
        assert abs(mean) < 5 / count**0.5, (name, mean)
        assert abs(variance - 1) < 5 * (2 / count) ** 0.5, (name, variance)


def main() -> None:
    parser = arguments(__doc__, quick="100,000 weights, one round", device=True)
    parser.add_argument("--weights", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.quick:
        options.weights, options.rounds = 100_000, 1
    posterior = posterior_of(options.weights, options.device)
    print(f"{posterior.n_weights:,} float32 weights, {options.device}, torch {torch.__version__}")
    check(posterior)
    results: dict[str, Any] = {**setting(), "device": options.device, "weights": posterior.n_weights}
    results |= on_cuda(posterior) if options.device == "cuda" else on_cpu(posterior, options.rounds)
    write_results(options.out, "sample", results)
    target = "" if options.device == "cuda" else " (target: at most 1)"
    print(f"draw over plain eager code: {results['ours / eager']:.3f}{target}")
    if options.device == "cuda":
        print(f"one draw: {results['milliseconds']['ours']:.3f} ms (target: at most 0.65)")


def on_cpu(posterior: ba.Posterior, rounds: int) -> dict[str, Any]:
    """The time of one draw over that of plain eager code."""
    seconds = interleaved({"ours": posterior.sample, "eager": lambda: eager(posterior)}, rounds=rounds, warmup=1)
    return {"rounds": rounds, "ours / eager": ratio(seconds, "ours", "eager")}


def on_cuda(posterior: ba.Posterior) -> dict[str, Any]:
    """Time and memory of one draw on the current CUDA device."""
    largest = max(theta.numel() for theta in posterior.mode.values()) * 4
    size = posterior.n_weights * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    draw = posterior.sample()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - size
    del draw
    # What the floor costs on this very machine: two tensors read, one written.
    a, b, out = (torch.randn(posterior.n_weights, device="cuda") for _ in range(3))
    floor = cuda_milliseconds(lambda: torch.add(a, b, out=out))
    ours = cuda_milliseconds(posterior.sample)
    by_hand = cuda_milliseconds(lambda: eager(posterior))
    print(f"{torch.cuda.get_device_name()}: read two, write one {floor:.3f} ms; plain eager {by_hand:.3f} ms")
    print(f"memory beside the draw itself: {extra / 2**20:.1f} MiB, the largest tensor is {largest / 2**20:.1f} MiB")
    return {
        "name": torch.cuda.get_device_name(),
        "milliseconds": {"ours": ours, "eager": by_hand, "read two, write one": floor},
        "ours / eager": ours / by_hand,
        "memory beside the draw, bytes": extra,
        "largest tensor, bytes": largest,
    }


if __name__ == "__main__":
    main()
