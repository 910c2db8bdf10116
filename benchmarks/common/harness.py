"""What every benchmark has: its options, its peer, fair timing, tables, and JSON files of results.

All take `--quick`, the smallest size that runs all of their code, and `--out`. One that compares with another package
fails where that is not installed, unless `--alone` is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from bayesadam import scores
from bayesadam._files import replacing

Result = TypeVar("Result")


def arguments(
    doc: str | None, *, quick: str, peer: str | None = None, device: bool = False, jobs: int | None = None
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share; the first line of `doc` describes the benchmark.

    `quick` says what `--quick` does, `peer` names the packages that `--alone` goes without; `jobs` is the default of
    `--jobs`, where there is such an option.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results")
    if peer:
        parser.add_argument("--alone", action="store_true", help=f"without {peer}, whose ratios are then missing")
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if jobs:
        parser.add_argument("--jobs", type=int, default=jobs, help="processes, of one thread each")
    return parser


def import_peer(module: str, package: str, *, alone: bool = False) -> ModuleType | None:
    """The peer's module; None where it is left out by `--alone`, an error where it cannot be imported."""
    if alone:
        print(f"{package} is left out (--alone): ours has nothing beside it")
        return None
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "`make peers` installs it into .venv-peers; --alone measures ours without it"
        sys.exit(f"{package} cannot be imported ({error}): there is nothing to compare with. {remedy}")


def setting() -> dict[str, Any]:
    """What every result depends on."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads()}


def write_results(out: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write `out/name.json`, and say where it is; the folder is made if absent."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"results: {path}", flush=True)


Cell = dict[str, Any]


def replaced(path: Path, write: Callable[[Path], object]) -> None:
    """A file that is there once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        write(unfinished)


def write_cell(path: Path, cell: Cell) -> None:
    """Write a finished cell, whose "settings" `read_cell` compares."""
    text = json.dumps(cell, indent=2, ensure_ascii=False) + "\n"
    replaced(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def read_cell(path: Path, about: Mapping[str, Any]) -> Cell | None:
    """A finished cell; None where there is none, an error where it is of other settings."""
    if not path.is_file():
        return None
    cell: Cell = json.loads(path.read_text(encoding="utf-8"))
    if cell["settings"] != about:
        sys.exit(f"{path} has settings {cell['settings']}, asked for are {dict(about)}: choose another --out")
    return cell


def cells(
    folder: Path, makes: Mapping[str, Callable[[], Cell | None] | None], about: Mapping[str, Any], *, jobs: int = 0
) -> dict[str, Cell]:
    """Every cell by its name: read from `folder/name.json`, else made, in this process as it is or by `jobs` others.

    What makes a cell may be None, or return it, which leaves the cell out for this time.
    """
    paths = {name: folder / f"{name}.json" for name in makes}
    missing = {name: make for name, make in makes.items() if make and read_cell(paths[name], about) is None}
    calls = [partial(_finish, paths[name], make, about) for name, make in missing.items()]
    for done, seconds in enumerate(parallel(calls, jobs=jobs) if jobs else (call() for call in calls)):
        print(f"{done + 1} of {len(missing)}: {[*missing][done]}, {seconds:.0f} s", flush=True)
    return {name: cell for name, path in paths.items() if (cell := read_cell(path, about)) is not None}


def _finish(path: Path, make: Callable[[], Cell | None], about: Mapping[str, Any]) -> float:
    began = time.perf_counter()
    if (cell := make()) is not None:
        write_cell(path, {"settings": dict(about), **cell})
    return time.perf_counter() - began


@dataclass(frozen=True)
class Target:
    """One promise: what, how much was asked for, what was measured."""

    name: str
    asked: str
    measured: float
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED':7s} {self.measured:8.4g}  {self.asked:7s} {self.name}"


def at_least(name: str, asked: float, measured: float) -> list[Target]:
    """The target, printed."""
    print(f"{name} = {measured:.4g} (target: at least {asked:g})")
    return [Target(name, f"≥ {asked:g}", measured, measured >= asked)]


def at_most(name: str, asked: float, measured: float) -> list[Target]:
    """The target, printed."""
    print(f"{name} = {measured:.4g} (target: at most {asked:g})")
    return [Target(name, f"≤ {asked:g}", measured, measured <= asked)]


def one_core() -> None:
    """Keep torch and numpy's linear algebra to one thread from now on, so that paces are of one core."""
    torch.set_num_threads(1)
    importlib.import_module("threadpoolctl").threadpool_limits(1)


def parallel(calls: Iterable[Callable[[], Result]], *, jobs: int) -> Iterator[Result]:
    """What each call returns, in their order, out of `jobs` processes of one thread each; of one it is this one."""
    # Workers are born with it, so that numpy's linear algebra, too, keeps to one thread.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if jobs == 1:
        yield from (call() for call in calls)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_called, calls)
        pool.close()
        pool.join()


def _called(call: Callable[[], Result]) -> Result:
    return call()


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """The mean, and its standard error (NaN for a single value)."""
    listed = list(values)
    error = statistics.stdev(listed) / math.sqrt(len(listed)) if len(listed) > 1 else math.nan
    return statistics.fmean(listed), error


def number(values: Sequence[float], digits: int = 3) -> str:
    """The mean and its standard error, in Markdown."""
    if not values:
        return "–"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if error == error else "")


def markdown(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def class_scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL, ECE and Brier score of (n, classes) probabilities."""
    picked = probs.gather(1, y[:, None]).clamp(min=torch.finfo(probs.dtype).tiny)
    row = {"accuracy": scores.accuracy(probs, y), "nll": -float(picked.log().mean())}
    return row | {"ece": scores.ece(probs, y), "brier": scores.brier(probs, y)}


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, in turns, so that a busy machine slows all alike; the order rotates."""
    names, seconds = list(candidates), dict[str, list[float]]({name: [] for name in candidates})
    for round_number in range(-warmup, rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            candidates[name]()
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median over rounds of our time over theirs in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def ratio_range(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> tuple[float, float]:
    """The 5 and the 95 % quantile of the same ratios."""
    ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    quantiles = statistics.quantiles(ratios, n=20, method="inclusive")
    return quantiles[0], quantiles[-1]


def cuda_milliseconds(call: Callable[[], object], *, repeats: int = 100, warmup: int = 10) -> float:
    """The median time of one call on the current CUDA device, by events."""
    times = []
    for turn in range(-warmup, repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times += [float(began.elapsed_time(ended))] if turn >= 0 else []
    return statistics.median(times)


def measured(work: Callable[[], Any], device: str) -> dict[str, float]:
    """Seconds, and the most memory beyond what there was before, in MiB; what `work` returns is kept until then.

    On a CPU it is the memory of this process alone: pages mapped from files are the system's cache.
    """
    cuda, done, peaks = device.startswith("cuda"), threading.Event(), list[float]()

    def memory() -> float:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (torch.cuda.max_memory_allocated() if cuda else (resident - shared) * os.sysconf("SC_PAGE_SIZE")) / 2**20

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(memory())

    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, watcher = memory(), threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        kept = work()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    finally:
        done.set()
        watcher.join()
    peak = max([*peaks, memory()]) - before
    del kept
    return {"seconds": seconds, "mib": peak}
