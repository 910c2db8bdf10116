"""What the posterior costs in training, and one draw of a large one.

    python -m benchmarks.speed.training [--quick] [--alone] [--rounds 60] [--weights 100_000_000] [--device cpu]
        [--out out/bench]

A step with Badam over one with torch.optim.Adam, same flags, same run; next to it IVON (ivon-opt), which trains a
posterior of the same shape. A draw over plain eager torch, and on CUDA its milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import (
    arguments,
    at_most,
    cuda_milliseconds,
    import_peer,
    interleaved,
    ratio,
    setting,
    write_results,
)
from benchmarks.common.networks import mlp

BATCH, STEPS, N, DELTA = 128, 40, 60_000, 100.0
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
    "amsgrad=True": {"amsgrad": True},
}
Make = Callable[[nn.Module], Any]


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(device)


def stepper(make: Make, device: str, steps: int, *, sampled: bool = False) -> Callable[[], None]:
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
                with optimizer.sampled_params(train=True):
                    forward_backward()
            else:
                forward_backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def training(device: str, steps: int, rounds: int, ivon: Any) -> dict[str, float]:
    """Ratios of a training step to Adam's."""
    found = {}
    for label, flags in FLAGS.items():
        makers: dict[str, Make] = {
            "badam": lambda m, flags=flags: ba.Badam(m.parameters(), **flags),
            "adam": lambda m, flags=flags: torch.optim.Adam(m.parameters(), **flags),
        }
        seconds = interleaved({name: stepper(make, device, steps) for name, make in makers.items()}, rounds=rounds)
        found[f"badam, {label}"] = ratio(seconds, "badam", "adam")
    if ivon is not None:
        steppers = {
            "ivon": stepper(lambda m: ivon.IVON(m.parameters(), lr=0.1, ess=N), device, steps, sampled=True),
            "adam": stepper(lambda m: torch.optim.Adam(m.parameters()), device, steps),
        }
        found["ivon"] = ratio(interleaved(steppers, rounds=rounds), "ivon", "adam")
    for label, value in found.items():
        print(f"training step, {label:22s} over Adam: {value:.3f}")
    return found


def large_posterior(weights: int, device: str) -> tuple[ba.Posterior, dict[str, Tensor]]:
    """Over `weights` float32 weights, four matrices and a vector, after one Adam step; and v̂ of each."""
    torch.manual_seed(0)
    sizes = [weights // 2, weights // 4, weights // 8, weights // 8 - 1000, 1000]
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(size, device=device)) for i, size in enumerate(sizes)})
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    moments = {name: optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999) for name, parameter in model.items()}
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=DELTA), moments


def draw(weights: int, device: str, rounds: int) -> dict[str, float]:
    """A draw over the same written by hand; it has the posterior's moments, or the time is worth nothing."""
    (posterior, moments), mean = large_posterior(weights, device), {}
    one = posterior.sample(generator=torch.Generator().manual_seed(0))
    for name, variance in posterior.variance.items():
        mean[name] = posterior.mean[name]
        standard = ((one[name] - mean[name]) / variance.sqrt()).double()
        error = standard.numel() ** -0.5
        assert abs(float(standard.mean())) < 5 * error, name
        assert abs(float(standard.var()) - 1) < 8 * error, name

    def eager() -> dict[str, Tensor]:
        return {n: mu + torch.randn_like(mu) * (N * moments[n].sqrt() + DELTA).rsqrt() for n, mu in mean.items()}

    if device == "cuda":
        ours, theirs = cuda_milliseconds(posterior.sample), cuda_milliseconds(eager)
        print(f"one draw of {weights:,} weights: {ours:.3f} ms, by hand {theirs:.3f}")
        return {"ours ms": ours, "eager ms": theirs, "ours / eager": ours / theirs}
    seconds = interleaved({"ours": posterior.sample, "eager": eager}, rounds=rounds, warmup=1)
    return {"ours / eager": ratio(seconds, "ours", "eager")}


def main() -> None:
    parser = arguments(__doc__, quick="two rounds of one step, 100,000 weights", peer="ivon-opt", device=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--weights", type=int, default=100_000_000)
    options = parser.parse_args()
    steps, rounds, weights = (1, 2, 100_000) if options.quick else (STEPS, options.rounds, options.weights)
    ivon = import_peer("ivon", "ivon-opt", alone=options.alone)
    steps_over_adam = training(options.device, steps, rounds, ivon)
    of_draw = draw(weights, options.device, max(2, rounds // 8))
    results = {**setting(), "device": options.device, "steps": steps_over_adam, "weights": weights, "draw": of_draw}
    write_results(options.out, "training", results)
    at_most("one draw over plain eager code", 1, of_draw["ours / eager"])
    worst = max(value for label, value in steps_over_adam.items() if label.startswith("badam"))
    at_most("a training step with Badam over Adam's, the largest", 1.02, worst)


if __name__ == "__main__":
    main()
