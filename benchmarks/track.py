"""What `track` costs during training: a step with it over the same step without, and the memory of a weight.

    python benchmarks/track.py [--quick] [--rounds 20] [--device cpu] [--out out/bench]

Of the MLP 784-400-400-10 and of a GPT: a small one, on a GPU GPT-2 itself. track.json goes to --out.
"""

from __future__ import annotations

from collections.abc import Callable
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


def main() -> None:
    parser = arguments(__doc__, quick="one round", device=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    options = parser.parse_args()
    rounds, warmup = (1, 0) if options.quick else (options.rounds, 1)
    results: dict[str, Any] = {**setting(), "device": options.device, "rounds": rounds, "tracked / plain": {}}
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {STEPS} steps a call")
    largest: dict[str, float] = {}
    for network in options.networks:
        for optimizer in options.optimizers:
            calls = {name: stepper(network, optimizer, way, options.device) for name, way in WAYS.items()}
            plain, _ = stepper(network, optimizer, None, options.device)
            runs = {"plain": plain, **{name: run for name, (run, _) in calls.items()}}
            seconds = interleaved(runs, rounds=rounds, warmup=warmup)
            step = sorted(seconds["plain"])[rounds // 2] / STEPS
            print(f"{network}, {optimizer}: {1000 * step:.2f} ms a step")
            rows = results["tracked / plain"].setdefault(network, {})[optimizer] = {"plain, ms": 1000 * step}
            for name, (_, memory) in calls.items():
                value, ends = ratio(seconds, name, "plain"), ratio_range(seconds, name, "plain")
                rows[name] = {"ratio": value, "5 to 95 % of rounds": ends, "bytes a weight": memory()}
                print(
                    f"  {name:28s} {value:.3f}   (5 to 95 % of rounds: {ends[0]:.2f} to {ends[1]:.2f})   "
                    f"{memory():.3g} bytes a weight"
                )
                largest[name] = max(largest.get(name, 0.0), value)
    results["largest"] = largest
    write_results(options.out, "track", results)
    for name, asked in TARGETS.items():
        at_most(f"largest ratio of a step, {name}", asked, largest.get(name))


if __name__ == "__main__":
    main()
