"""Predictions beside laplace-torch, the same diagonal posterior on both sides: exactness, then time and memory.

    python -m benchmarks.speed.peers [--quick] [--alone] [--only mlp resnet transformer draws] [--out out/bench]

The peer computes Jacobians with whichever of its backends is the fastest that works; --alone measures ours without it.
Both sides are first checked against a float64 Jacobian written out row by row. Memory is the growth of the resident set
in one call, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import (
    Target,
    arguments,
    at_least,
    import_peer,
    interleaved,
    resident,
    setting,
    write_results,
)
from benchmarks.common.networks import ResNet18, Transformer, mlp, settle

N, DELTA, CLASSES, DRAWS = 60_000, 10_000.0, 10, 30


@dataclass(frozen=True)
class Case:
    """A network, its batch, the peer's backends that can differentiate it, and by how much ours is to be faster."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    backends: tuple[str, ...]
    asked: float


CASES = {
    "mlp": Case(mlp, lambda n: torch.randn(n, 784), 64, ("BackPACK", "curvlinops"), 200),
    # curvlinops, the peer's default, takes four times as long as BackPACK here and twice the memory.
    "resnet": Case(ResNet18, lambda n: torch.randn(n, 3, 32, 32), 4, ("BackPACK",), 5),
    # BackPACK does not know attention.
    "transformer": Case(Transformer, lambda n: torch.randint(1000, (n, 64)), 8, ("curvlinops",), 5),
}


def prepared(name: str, *, quick: bool = False) -> tuple[ba.Posterior, Tensor]:
    """The case's posterior and batch, the same in every process."""
    torch.manual_seed(0)
    case = CASES[name]
    inputs, model = case.inputs(2 if quick else case.batch), case.build()
    optimizer = settle(model, inputs, CLASSES)
    return ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=DELTA, likelihood="classification"), inputs


def peer_of(posterior: ba.Posterior, backend: str) -> Any:
    """laplace-torch's diagonal posterior with our mean and precisions, over a copy of the model (BackPACK marks it)."""
    from laplace.baselaplace import DiagLaplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    model = copy.deepcopy(posterior.model)
    model.output_size = CLASSES
    kind = {"BackPACK": BackPackGGN, "curvlinops": CurvlinopsGGN}[backend]
    peer = DiagLaplace(model, "classification", prior_precision=DELTA, backend=kind)
    peer.mean = torch.cat([mu.flatten() for mu in posterior.mean.values()])
    peer.H = torch.cat([variance.reciprocal().flatten() for variance in posterior.variance.values()]) - DELTA
    return peer


def call_of(posterior: ba.Posterior, inputs: Tensor, side: str) -> Callable[[], Tensor]:
    """The (b, c, c) covariances of outputs, by "ours" or by a backend."""
    if side == "ours":
        return lambda: posterior.predict(inputs, covariance=True).covariance
    peer = peer_of(posterior, side)
    return lambda: peer._glm_predictive_distribution(inputs)[1]


def reference(posterior: ba.Posterior, inputs: Tensor) -> Tensor:
    """J Σ Jᵀ in float64, every row of J by a backward pass of its own: (b, c, c)."""
    model = copy.deepcopy(posterior.model).double()
    roots = torch.cat([v.double().sqrt().flatten() for v in posterior.variance.values()])
    blocks = []
    for example in inputs.double() if inputs.is_floating_point() else inputs:
        outputs = model(example.unsqueeze(0))[0]
        rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs]
        scaled = torch.stack([torch.cat([g.flatten() for g in row]) * roots for row in rows])
        blocks.append(scaled @ scaled.T)
    return torch.stack(blocks)


def linearised(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Full covariances of a case, ours and the peer's: agreement, time, memory."""
    case, (posterior, inputs) = CASES[name], prepared(name, quick=options.quick)
    print(f"{posterior.n_weights:,} weights, batch {len(inputs)}, {CLASSES} × {CLASSES} covariances")
    truth = reference(posterior, inputs[:2])
    sides = ("ours", *(() if options.alone else case.backends))
    calls, result = {side: call_of(posterior, inputs, side) for side in sides}, {}
    for side, call in calls.items():
        error = float((call()[:2].double() - truth).norm() / truth.norm())
        print(f"relative distance from a float64 Jacobian: {side} {error:.1e}")
        assert error < 1e-3, (side, error)
        result[side] = {"error": error}
    seconds = interleaved(calls, rounds=1 if options.quick else 5, warmup=0 if options.quick else 1)
    for side in sides:
        ratios = [theirs / ours for theirs, ours in zip(seconds[side], seconds["ours"], strict=True)]
        result[side] |= {"ms": 1e3 * statistics.median(seconds[side]), "over ours": statistics.median(ratios)}
        if not options.quick:
            result[side]["MiB"] = memory(name, side)
        print(f"{side}: " + ", ".join(f"{key} {value:.4g}" for key, value in result[side].items()))
    fastest = min((result[side]["over ours"] for side in sides[1:]), default=None)
    return result, at_least(f"linearised covariances, {name}: time, peer / ours", case.asked, fastest)


def memory(name: str, side: str) -> float:
    """The MiB by which the resident set grows in one call, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [sys.executable, "-m", "benchmarks.speed.peers", "--child", name, side, answer.name]
        subprocess.run(command, check=True, capture_output=True)
        return float(json.loads(Path(answer.name).read_text()))


def child(name: str, side: str, answer: str) -> None:
    """What one call costs in memory, told in a file: everything else is resident before it."""
    posterior, inputs = prepared(name)
    call = call_of(posterior, inputs, side)
    before = resident("VmRSS")
    call()
    Path(answer).write_text(json.dumps(resident("VmHWM") - before))


def draws(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Thirty weight draws on the MLP."""
    posterior, inputs = prepared("mlp", quick=options.quick)
    calls: dict[str, Callable[[], Tensor]] = {"ours": lambda: posterior.predict(inputs, draws=DRAWS).probs}
    if not options.alone:
        peer = peer_of(posterior, "curvlinops")
        calls["peer"] = lambda: peer(inputs, pred_type="nn", link_approx="mc", n_samples=DRAWS)
    seconds = interleaved(calls, rounds=1 if options.quick else 15, warmup=1)
    result = {side: {"ms": 1e3 * statistics.median(values)} for side, values in seconds.items()}
    ratios = [theirs / ours for theirs, ours in zip(seconds.get("peer", []), seconds["ours"], strict=False)]
    asked = statistics.median(ratios) if ratios else None
    return result, at_least(f"{DRAWS} weight draws, MLP: time, peer / ours", 5, asked)


def main() -> None:
    parser = arguments(__doc__, quick="one round of each", peer="laplace-torch")
    parser.add_argument("--only", nargs="+", choices=(*CASES, "draws"), default=(*CASES, "draws"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Networks of a few random steps: warnings about them are not what is measured.
    warnings.simplefilter("ignore")
    if options.child:
        child(*options.child)
        return
    import_peer("laplace.curvature", "laplace-torch", alone=options.alone)
    results: dict[str, Any] = setting()
    targets: list[Target] = []
    for name in options.only:
        print(f"\n{name}")
        results[name], found = draws(options) if name == "draws" else linearised(name, options)
        targets += found
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "peers", results)
    print("\n".join(map(str, targets)) or f"ours alone, {len(options.only)} cases")


if __name__ == "__main__":
    main()
