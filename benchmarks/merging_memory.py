"""Two checkpoints larger than they need be in memory, merged from file to file."""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from pathlib import Path

import torch

from bayesadam.merging import merge_checkpoints
from harness import Cell

TENSORS = 12


def write_checkpoint(path: Path, count: int, seed: int) -> None:
    """Matrices of `count` weights each with the state of an Adam, in a file of `torch.save`."""
    draw = torch.Generator().manual_seed(seed)
    side = max(1, int(count**0.5))
    weights, states = {}, {}
    for number in range(TENSORS):
        # A small pattern, repeated: random numbers of that size take minutes.
        pattern = torch.randn(side, generator=draw)
        weights[f"layer{number}.weight"] = pattern.repeat(count // side, 1)
        states[number] = {
            "step": torch.tensor(2000.0),
            "exp_avg": torch.zeros(count // side, side),
            "exp_avg_sq": pattern.square().repeat(count // side, 1),
        }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    groups = [{**group, "params": list(range(TENSORS)), "param_names": list(weights)}]
    torch.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, path)


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


def measured(paths: list[Path], out: Path) -> tuple[float, float]:
    """Seconds of the merge, and by how many bytes anonymous memory rose at most."""
    # What the first use of torch takes is no part of it.
    torch.ones(8).square().sum()
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    merge_checkpoints(paths, out)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return seconds, float(max(peak - before, 0))


def memory_cell(options: argparse.Namespace) -> Cell:
    """Both in a process of its own, so that what wrote the files is not counted."""
    folder: Path = options.out / "merging-memory"
    folder.mkdir(parents=True, exist_ok=True)
    count = int(options.gigabytes * 1e9 / 2 / 3 / 4 / TENSORS)
    paths = [folder / f"{number}.pt" for number in range(2)]
    context = multiprocessing.get_context("spawn")
    try:
        for number, path in enumerate(paths):
            with context.Pool(1) as pool:
                pool.apply(write_checkpoint, (path, count, number))
        size = sum(path.stat().st_size for path in paths)
        with context.Pool(1) as pool:
            seconds, rise = pool.apply(measured, (paths, folder / "merged.safetensors"))
    finally:
        for path in (*paths, folder / "merged.safetensors"):
            path.unlink(missing_ok=True)
    largest = 4.0 * count
    rows = {
        "gigabytes": size / 1e9,
        "seconds": seconds,
        "largest tensor, MB": largest / 1e6,
        "peak over largest tensor": rise / largest,
    }
    return {"rows": rows}
