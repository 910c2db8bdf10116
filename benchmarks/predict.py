"""Predictions beside laplace-torch, the same diagonal posterior on both sides, and how their cost grows.

    python benchmarks/predict.py [--quick] [--alone] [--only mlp resnet …] [--threads 1] [--out out/bench]
    python benchmarks/predict.py --device cuda [--memory-budget 8]

The peer computes Jacobians with whichever of its backends is the fastest that works; --alone measures ours without it.
Every comparison first checks both sides against a float64 Jacobian written out row by row. Memory is the growth of the
resident set, each side in a process of its own. On CUDA ours alone is timed, at large batches. The last lines say which
targets were met; predict.json and growth.png go to --out.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from harness import (
    Target,
    arguments,
    at_least,
    at_most,
    import_peer,
    interleaved,
    resident,
    setting,
    write_results,
)
from networks import ResNet18, Transformer, mlp, settle

N, DELTA, CLASSES = 60_000, 10_000.0, 10
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A network, its batches on a CPU and on CUDA, and the peer's backends that can differentiate it, the fastest
    first.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    backends: tuple[str, ...]
    large: int = 4096


CASES = {
    "mlp": Case(mlp, lambda n: torch.randn(n, 784), 64, ("BackPACK", "curvlinops")),
    # curvlinops, the peer's default, takes four times as long as BackPACK here and twice the memory.
    "resnet": Case(ResNet18, lambda n: torch.randn(n, 3, 32, 32), 4, ("BackPACK",), large=256),
    # BackPACK does not know attention.
    "transformer": Case(Transformer, lambda n: torch.randint(1000, (n, 64)), 8, ("curvlinops",)),
}


def posterior_of(model: nn.Module, inputs: Tensor, classes: int = CLASSES) -> ba.Posterior:
    return ba.Posterior.from_optimizer(model, settle(model, inputs, classes), N, prior_precision=DELTA)


def prepared(name: str, device: str = "cpu", *, quick: bool = False) -> tuple[ba.Posterior, Tensor]:
    """The case's posterior and batch, the same in every process."""
    torch.manual_seed(0)
    case = CASES[name]
    inputs = case.inputs(1 if quick else case.batch).to(device)
    return posterior_of(case.build().to(device), inputs), inputs


def peer_of(posterior: ba.Posterior, backend: str) -> Any:
    """laplace-torch's diagonal posterior with our mean and precisions, over a copy of the model (BackPACK marks it)."""
    model = copy.deepcopy(posterior.model)
    model.output_size = CLASSES
    from laplace.baselaplace import DiagLaplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    kind = {"BackPACK": BackPackGGN, "curvlinops": CurvlinopsGGN}[backend]
    found = DiagLaplace(model, "classification", prior_precision=DELTA, backend=kind)
    found.mean = torch.cat([mu.flatten() for mu in posterior.mean.values()])
    found.H = torch.cat([variance.reciprocal().flatten() for variance in posterior.variance.values()]) - DELTA
    return found


def covariance(posterior: ba.Posterior, inputs: Tensor, **options: Any) -> Tensor:
    return posterior.predict(inputs, likelihood="classification", covariance=True, **options).covariance


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


def distance(found: Tensor, truth: Tensor) -> float:
    """The relative error, in the Frobenius norm."""
    return float((found.double() - truth).norm() / truth.norm())


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def compared(
    ours: Callable[[], object], theirs: dict[str, Callable[[], object]], *, rounds: int, times: int, warmup: int
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Our seconds, and for each peer its seconds and its ratio to ours, medians over rounds in which all take turns.

    Args:
        ours: our call.
        theirs: the peers' calls.
        rounds: turns each has.
        times: our calls in one turn, so that a short call does not fall into one scheduler's slice.
        warmup: rounds before the first counted one.
    """
    seconds = interleaved({"ours": repeated(ours, times), **theirs}, rounds=rounds, warmup=warmup)
    own = [s / times for s in seconds.pop("ours")]
    found = {
        name: (statistics.median(taken), statistics.median(t / o for t, o in zip(taken, own, strict=True)))
        for name, taken in seconds.items()
    }
    return statistics.median(own), found


# --- beside the peer ----------------------------------------------------------------------------------------------


def linearised(name: str, options: argparse.Namespace, *, rounds: int, times: int) -> dict[str, Any]:
    """Full covariances of a case, ours and the peer's: agreement, then time."""
    case = CASES[name]
    posterior, inputs = prepared(name, quick=options.quick)
    print(f"{posterior.n_weights:,} weights, batch {len(inputs)}, {CLASSES} × {CLASSES} covariances")
    few = min(2, len(inputs))
    truth, ours = reference(posterior, inputs[:few]), covariance(posterior, inputs)
    error = distance(ours[:few], truth)
    assert error < 1e-4, error
    print(f"relative distance from a float64 Jacobian: ours {error:.1e}")
    result: dict[str, Any] = {"weights": posterior.n_weights, "error": error}
    calls = {}
    for backend in () if options.alone else case.backends:
        theirs = peer_of(posterior, backend)
        values = theirs._glm_predictive_distribution(inputs)[1]
        error = distance(values[:few], truth)
        print(f"    laplace-torch ({backend}) {error:.1e}; from ours, all examples, {distance(ours, values):.1e}")
        assert error < 1e-3, (backend, error)
        result[f"error {backend}"] = error
        calls[backend] = lambda theirs=theirs: theirs._glm_predictive_distribution(inputs)
    rounds, times = (1, 1) if options.quick else (rounds, times)
    own, found = compared(lambda: covariance(posterior, inputs), calls, rounds=rounds, times=times, warmup=0)
    fresh, _ = prepared(name, quick=options.quick)
    began = time.perf_counter()
    covariance(fresh, inputs)
    first = time.perf_counter() - began
    print(f"ours {own * 1e3:.1f} ms; the first call on a model, which finds out about its layers, {first * 1e3:.1f} ms")
    result |= {"ours_ms": own * 1e3, "first_call_ms": first * 1e3}
    for backend, (taken, times_ours) in found.items():
        print(f"laplace-torch ({backend}) {taken * 1e3:.0f} ms, {times_ours:.0f} times ours")
        result |= {f"{backend}_ms": taken * 1e3, f"{backend} / ours": times_ours}
    if found:
        result["ratio"] = min(found.values())[1]
    return result


def memory(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The growth of the resident set in one call, each side in its own process."""
    result: dict[str, Any] = {}
    sides = ["ours", *(() if options.alone else CASES[name].backends)]
    for side in sides:
        with tempfile.NamedTemporaryFile(suffix=".json") as answer:
            command = [sys.executable, __file__, "--child", name, side, answer.name]
            done = subprocess.run([*command, "--threads", str(options.threads)], check=False, capture_output=True)
            if done.returncode:
                raise RuntimeError(f"{side}: {done.stderr.decode().strip()[-2000:]}")
            found = json.loads(Path(answer.name).read_text())
        print(f"{side}: {found['grown_mib']:.0f} MiB beside model and posterior, {found['peak_mib']:.0f} MiB in all")
        result[side] = found
    if len(result) > 1:
        result["ratio"] = result["ours"]["grown_mib"] / min(v["grown_mib"] for k, v in result.items() if k != "ours")
    return result


def child(name: str, side: str, answer: str) -> None:
    """What one call costs in memory, told in a file: everything else is built and resident before it."""
    limit = 20 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    posterior, inputs = prepared(name)
    if side == "ours":
        call: Callable[[], object] = lambda: covariance(posterior, inputs)  # noqa: E731
    else:
        theirs = peer_of(posterior, side)
        call = lambda: theirs._glm_predictive_distribution(inputs)  # noqa: E731
    before = resident("VmRSS")
    call()
    peak = resident("VmHWM")
    Path(answer).write_text(json.dumps({"grown_mib": peak - before, "peak_mib": peak}))


def bench_mlp(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """784-400-400-10, batch 64."""
    result = linearised("mlp", options, rounds=7, times=20)
    return result, at_least("linearised covariances, MLP: time, peer / ours", 200, result.get("ratio"))


def bench_resnet(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """A ResNet-18 on four images."""
    result = linearised("resnet", options, rounds=2, times=2)
    targets = at_least("linearised covariances, ResNet-18: time, peer / ours", 5, result.get("ratio"))
    if not options.quick:
        result["memory"] = memory("resnet", options)
        targets += at_most("the same: memory, ours / peer", 0.1, result["memory"].get("ratio"))
    return result, targets


def bench_transformer(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Four layers of attention over 64 tokens, eight sequences."""
    result = linearised("transformer", options, rounds=5, times=3)
    result["memory"] = memory("transformer", options)
    if "ratio" in result:
        print(f"time, peer / ours: {result['ratio']:.1f}; memory, ours / peer: {result['memory']['ratio']:.3f}")
    return result, []


def bench_draws(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Thirty weight draws on the MLP."""
    draws = 30
    posterior, inputs = prepared("mlp")

    def ours() -> Tensor:
        drawn = posterior.predict(inputs, likelihood="classification", predictive="sampled", n_samples=draws)
        return drawn.probs

    calls = {}
    if not options.alone:
        theirs = peer_of(posterior, "curvlinops")
        calls["laplace-torch"] = lambda: theirs(inputs, pred_type="nn", link_approx="mc", n_samples=draws)
        # Both estimate the same probabilities: they may differ by the noise of thirty draws each, no more.
        wide = torch.stack([ours() for _ in range(20)])
        noise = wide.std(dim=0).norm() * math.sqrt(1 + 1 / 20)
        apart = float((calls["laplace-torch"]() - wide.mean(dim=0)).norm() / noise)
        print(f"the peer's probabilities lie {apart:.2f} standard deviations from ours (1 expected)")
        assert apart < 3, apart
    own, found = compared(ours, calls, rounds=1 if options.quick else 15, times=3, warmup=1)
    print(f"{draws} draws: ours {own * 1e3:.1f} ms")
    result: dict[str, Any] = {"ours_ms": own * 1e3}
    if found:
        taken, result["ratio"] = found["laplace-torch"]
        result["peer_ms"] = taken * 1e3
        print(f"laplace-torch {taken * 1e3:.0f} ms")
    return result, at_least("30 weight draws, MLP: time, peer / ours", 5, result.get("ratio"))


# --- how cost grows -------------------------------------------------------------------------------------------------


def bench_growth(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Time against weights, batch, outputs and draws."""
    rounds, most = (1, 3) if options.quick else (7, None)
    sweeps = {
        "weights": [_sweep_point(batch=64, width=width) for width in (50, 100, 200, 400, 800, 1600)[:most]],
        "batch": [_sweep_point(batch=batch) for batch in (1, 4, 16, 64, 256, 1024)[:most]],
        "outputs": [_sweep_point(batch=16, classes=classes) for classes in (10, 30, 100, 300, 1000)[:most]],
        "draws": [_sweep_point(batch=64, draws=draws) for draws in (10, 30, 100, 300)[:most]],
    }
    result: dict[str, Any] = {}
    for name, points in sweeps.items():
        sizes = [int(point[name]) for point in points]
        calls = {str(size): point["call"] for size, point in zip(sizes, points, strict=True)}
        taken = interleaved(calls, rounds=rounds, warmup=1)
        # The best of the rounds: what the work costs when no neighbour interrupts it.
        best = [min(taken[str(size)]) * 1e3 for size in sizes]
        slope = steepness(sizes[-3:], best[-3:])
        result[name] = {"sizes": sizes, "ms": best, "slope": slope}
        print(f"{name:>8s}  " + "  ".join(f"{size:>9,d}" for size in sizes))
        print(f"{'ms':>8s}  " + "  ".join(f"{ms:9.2f}" for ms in best) + f"   slope at the end {slope:.2f}")
    picture(result, options.out / "growth.png")
    return result, at_most("growth of variances with the outputs: slope, log-log", 1.1, result["outputs"]["slope"])


def _sweep_point(
    *, batch: int, width: int = 400, classes: int = CLASSES, draws: int | None = None
) -> dict[str, int | Callable[[], object]]:
    torch.manual_seed(0)
    inputs = torch.randn(batch, 784)
    posterior = posterior_of(mlp((784, width, width, classes)), torch.randn(32, 784), classes)
    how: dict[str, Any] = {"predictive": "sampled", "n_samples": draws} if draws else {}

    def call() -> object:
        return posterior.predict(inputs, likelihood="classification", **how)

    return {"weights": posterior.n_weights, "batch": batch, "outputs": classes, "draws": draws or 0, "call": call}


def steepness(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def picture(result: dict[str, Any], path: Path) -> None:
    """One panel a sweep, both axes logarithmic, the slope of the last three points drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    titles = {
        "weights": "variances, batch 64, 10 outputs",
        "batch": "variances, 784-400-400-10",
        "outputs": "variances, batch 16",
        "draws": "weight draws, batch 64",
    }
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), constrained_layout=True)
    for axis, (name, found) in zip(axes, result.items(), strict=True):
        sizes, ms, slope = found["sizes"], found["ms"], found["slope"]
        axis.loglog(sizes, ms, "o", color="tab:blue")
        line = [ms[-1] * (size / sizes[-1]) ** slope for size in sizes]
        axis.loglog(sizes, line, "--", color="tab:grey", label=f"slope {slope:.2f}, last three points")
        axis.set(title=titles[name], xlabel=name)
        axis.grid(which="major", alpha=0.3)
        axis.legend(frameon=False)
    axes[0].set_ylabel("milliseconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"picture: {path}")


# --- CUDA -----------------------------------------------------------------------------------------------------------


def bench_large(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """Ours alone on CUDA: milliseconds and the memory beside model, posterior and batch."""
    result: dict[str, Any] = {}
    budget = int(options.memory_budget * 2**30)
    print(f"{torch.cuda.get_device_name()}, memory budget {options.memory_budget:g} GiB")
    for name, case in CASES.items():
        posterior, few = prepared(name, "cuda")
        # The numbers are checked in plain float32; the times are those of torch's defaults, TF32 convolutions included.
        with torch.backends.cudnn.flags(allow_tf32=False):
            error = distance(covariance(posterior, few)[:2], reference(posterior, few[:2]))
        assert error < 1e-4, (name, error)
        batch = case.large // 16 if options.quick else case.large
        inputs = case.inputs(batch).cuda()
        for what in ("covariances", "variances"):

            def call(posterior=posterior, inputs=inputs, whole=what == "covariances") -> float:
                began = time.perf_counter()
                posterior.predict(inputs, likelihood="classification", covariance=whole, memory_budget=budget)
                torch.cuda.synchronize()
                return time.perf_counter() - began

            first = call()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            ms = statistics.median(call() for _ in range(5 if first < 2 else 1)) * 1e3
            grown = (torch.cuda.max_memory_allocated() - before) / MIB
            print(f"{name:12s} batch {batch:5d} {what:12s} {ms:10.1f} ms {grown:8.0f} MiB   float64 error {error:.0e}")
            result[f"{name} {what}"] = {"batch": batch, "ms": ms, "grown_mib": grown, "error": error}
    return result, []


# --- the whole ------------------------------------------------------------------------------------------------------


BENCHES: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], list[Target]]]] = {
    "mlp": bench_mlp,
    "resnet": bench_resnet,
    "transformer": bench_transformer,
    "draws": bench_draws,
    "growth": bench_growth,
    "large": bench_large,
}


def main() -> None:
    parser = arguments(__doc__, quick="one round of each", peer="laplace-torch")
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="these alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for both sides")
    parser.add_argument("--memory-budget", type=float, default=8.0, help="GiB, on CUDA")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Networks of a few random steps: the peer's hooks and draws that change answers are not what is measured.
    warnings.simplefilter("ignore")
    if options.child:
        child(*options.child)
        return
    print(f"{options.device}, torch {torch.__version__}, {options.threads} threads")
    if options.device == "cpu":
        import_peer("laplace.curvature", "laplace-torch", alone=options.alone)
    chosen = options.only or [name for name in BENCHES if (name == "large") == (options.device == "cuda")]
    results: dict[str, Any] = {**setting(), "device": options.device}
    targets: list[Target] = []
    for name in chosen:
        print(f"\n{name}: {(BENCHES[name].__doc__ or '').splitlines()[0]}")
        results[name], found = BENCHES[name](options)
        targets += found
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "predict", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
