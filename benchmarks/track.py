"""What `track` costs during training: a step with it over the same step without, and the memory of a weight.

    python benchmarks/track.py [--quick] [--rounds 20] [--ways …] [--taking] [--device cpu] [--out out/bench]

Of the MLP 784-400-400-10 and of a GPT: a small one, on a GPU GPT-2 itself. `--taking` times the taking of one gradient
by itself, in processor time, which other programs on the machine disturb less: the ratio is then 1 + that time / (k × a
step's). track.json goes to --out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.readers.tracking import TENSORS
from harness import arguments, at_most, interleaved, ratio, ratio_range, setting, write_results
from networks import mlp

# Every k divides it.
STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    **{f"diagonal, {bits} bits, every={k}": {"bits": bits, "every": k} for bits in (8, 32) for k in (1, 10, 20)},
    **{f"factored, every={k}": {"what": "factored", "every": k} for k in (1, 10)},
    "kronecker, every=10": {"what": "kronecker", "every": 10},
}
TARGETS = {"diagonal, 8 bits, every=10": 1.02, "factored, every=10": 1.02, "kronecker, every=10": 1.10}


def muon(model: nn.Module) -> list[Optimizer]:
    """Hidden matrices by Muon; embeddings, the head and vectors by AdamW."""
    outer = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    outer |= {m.weight for m in [*model.modules()][-1:] if isinstance(m, nn.Linear)}
    hidden = [p for p in model.parameters() if p.dim() == 2 and p not in outer]
    chosen = set(hidden)
    rest = [p for p in model.parameters() if p not in chosen]
    return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-3)],
    "Muon + AdamW": muon,
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)],
}


def of_mlp(device: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = torch.randn(128, 784, device=device), torch.randint(10, (128,), device=device)
    return mlp().to(device), lambda model: nn.functional.cross_entropy(model(x), y)


def of_gpt(device: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1024, "n_positions": 64}
    config = GPT2Config(**({} if device == "cuda" else small), use_cache=False)
    shape = (8, 1024) if device == "cuda" else (8, 64)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    return GPT2LMHeadModel(config).to(device), lambda model: model(input_ids=tokens, labels=tokens).loss


NETWORKS = {"MLP": of_mlp, "GPT": of_gpt}


def stepper(network: str, optimizer: str, way: dict[str, Any] | None, device: str) -> tuple[Callable[[], None], Any]:
    """Some training steps as one call, and what gives the bytes that are kept for a weight."""
    torch.manual_seed(0)
    model, loss = NETWORKS[network](device)
    optimizers = OPTIMIZERS[optimizer](model)
    if way is not None:
        ba.track(optimizers, **way)

    def run() -> None:
        for _ in range(STEPS):
            for each in optimizers:
                each.zero_grad()
            loss(model).backward()
            for each in optimizers:
                each.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def memory() -> float:
        states = [state for each in optimizers for state in each.state.values()]
        kept = sum(state[name].nbytes for state in states for name in TENSORS if name in state)
        return kept / sum(p.numel() for p in model.parameters())

    return run, memory


def taker(network: str, optimizer: str, way: dict[str, Any], device: str) -> Callable[[], None]:
    """What `track` does at a k-th step, on fixed gradients."""
    torch.manual_seed(0)
    model, loss = NETWORKS[network](device)
    optimizers = OPTIMIZERS[optimizer](model)
    ba.track(optimizers, **{**way, "every": 1})
    loss(model).backward()
    for each in optimizers:
        each.step()

    def run() -> None:
        for each in optimizers:
            for hook in each._optimizer_step_pre_hooks.values():
                hook(each, (each,), {})
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def measured(
    network: str, optimizer: str, device: str, rounds: int, ways: Mapping[str, dict[str, Any]], *, taking: bool
) -> Iterator[tuple[str, Any]]:
    """The milliseconds of a plain step, then every way's ratio and memory."""
    calls = {name: stepper(network, optimizer, way, device) for name, way in ways.items()}
    plain, _ = stepper(network, optimizer, None, device)
    if taking:
        # Once each, for the memory.
        for run, _ in calls.values():
            run()
        runs = {name: taker(network, optimizer, way, device) for name, way in ways.items()}
        clock = time.perf_counter if device == "cuda" else time.process_time
        seconds = interleaved({"plain": plain, **runs}, rounds=rounds, warmup=1, clock=clock)
        step = statistics.median(seconds["plain"]) / STEPS
    else:
        runs = {name: run for name, (run, _) in calls.items()}
        seconds = interleaved({"plain": plain, **runs}, rounds=rounds, warmup=1)
        step = statistics.median(seconds["plain"]) / STEPS
    yield "plain", 1000 * step
    for name, (_, memory) in calls.items():
        found: dict[str, Any] = {"bytes a weight": memory()}
        if taking:
            once = statistics.median(seconds[name])
            found |= {"taking, ms": 1000 * once, "ratio": 1 + once / (WAYS[name]["every"] * step)}
        else:
            ends = ratio_range(seconds, name, "plain")
            found |= {"ratio": ratio(seconds, name, "plain"), "5 to 95 % of rounds": ends}
        yield name, found


def main() -> None:
    parser = arguments(__doc__, quick="one round", device=True)
    parser.add_argument("--taking", action="store_true", help="time the taking of a gradient by itself")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    options = parser.parse_args()
    ways = {name: WAYS[name] for name in options.ways}
    rounds = 1 if options.quick else options.rounds
    results: dict[str, Any] = {
        **setting(),
        "device": options.device,
        "rounds": rounds,
        "taking by itself": options.taking,
    }
    # As GPUs are trained on; float32 products would hide what tracking costs.
    torch.set_float32_matmul_precision("high")
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {STEPS} steps a call")
    largest: dict[str, float] = {}
    for network in options.networks:
        for optimizer in options.optimizers:
            rows = results.setdefault("tracked / plain", {}).setdefault(network, {}).setdefault(optimizer, {})
            for name, found in measured(network, optimizer, options.device, rounds, ways, taking=options.taking):
                rows[name] = found
                if name == "plain":
                    print(f"{network}, {optimizer}: {found:.2f} ms a step")
                    continue
                rest = (f"{key}: {value:.3g}" for key, value in found.items() if isinstance(value, float))
                print(f"  {name:28s} {found['ratio']:.3f}   {', '.join(rest)}", flush=True)
                largest[name] = max(largest.get(name, 0.0), found["ratio"])
    results["largest"] = largest
    write_results(options.out, "track", results)
    for name, asked in TARGETS.items():
        at_most(f"largest ratio of a step, {name}", asked, largest.get(name))


if __name__ == "__main__":
    main()
